"""Problem: a trained model, its data and its loss, checked once before anything is measured."""

from __future__ import annotations

import copy
import itertools
import platform
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, first_line, refuse_unless_whole
from flatscope.first_batch import (
    SteadyOutputs,
    advice_on_inputs,
    checked_outputs,
    failing_module,
    refuse_failing_loss,
    refuse_hidden_uses,
    remarks_on_linear_loss,
)
from flatscope.input_checks import (
    advice_on_model,
    doubts_of_outputs,
    first_weights,
    independent_copy,
    initial_weights,
    look_at_both,
    model_on_device,
    refuse_active_layers,
    refuse_missing_values,
    refuse_shapes_that_fail,
    remarks_on_data,
    remarks_on_frozen_weights,
    remarks_on_wrappers,
    usable_device,
    usable_dtype,
)
from flatscope.isolation import coarse_products, own_settings, settings_of_running_model, untouched_randomness
from flatscope.loss import Loss, PerSample, in_double_where_possible, next_tokens
from flatscope.network.interception import OperationRule, refuse_if_different, replay
from flatscope.network.normal_form import is_rewritten, mark_not_covered, normal_form, not_covered
from flatscope.network.pass_recording import record
from flatscope.network.program import Program
from flatscope.network.structure import StructuralFacts, Structure, first_reading, record_structure
from flatscope.params import Params, call_with_tensors, named_parameters, non_finite_name, tied_names, trainable_names
from flatscope.sample_sources import as_samples
from flatscope.samples import Batch, Inputs, Samples, inputs_on_device, output_tensor, shape_text, tensors_of_inputs
from flatscope.sharing import agreeing_ranks
from flatscope.target_checks import (
    TargetLook,
    are_one_hot,
    check_targets,
    reason_without_classes,
    targets_are_unshifted_tokens,
)
from flatscope.torch_losses import loss_for_outputs, loss_with_normaliser, read_loss, reading_remarks
from flatscope.version import __version__

DEFAULT_BATCH = 256
PROBED_BATCH = 32
MOVED = "labels are the tokens themselves: moved by one, as Hugging Face's models do"


class Problem:
    """A model, its training data and loss; optionally test data and the weights training started from.

    The model is copied at construction: later changes to it do not reach the problem, and nothing done
    here reaches the model. Parameters with `requires_grad=False` are constants of the network (unless all
    of them are: a network frozen for inference is measured as if none were).

    Args:
        model: any `nn.Module` in eval mode whose output is a tensor (or has `.logits`).
        train: `(x, y)` tensors or arrays, a `Dataset`, a `DataLoader`, or a list of batches.
        test: the same, held out; needed only by measures that say so.
        loss: "cross_entropy" (of logits; log-probabilities give the same; over pixels it is their mean), "bce" (one
            logit, or several labels, over which it is summed), "next_token" (language models; the mean over the tokens
            of a sequence), "mse" (squared error summed over outputs, class numbers as one-hot vectors), one of
            torch's modules or functions as it is (`nn.CrossEntropyLoss(weight=…)`, `nn.MSELoss()`, `F.huber_loss`), or
            a function of (outputs, targets) that gives one value per sample. Always averaged over samples. One-hot
            targets are read as class numbers.
        initial: a module or state dict with the weights before training.
        device: where to compute; the model's device by default.
        dtype: torch.float32 or torch.float64; the model's by default (float32 for half-precision weights).
        batch_size: the most samples to evaluate at once; it changes memory and time, never a value.
        shard: "auto": where `torch.distributed` is initialised, the ranks share the samples of each sweep, and every
            rank gets the values that one process would get; False: this process measures by itself.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 2)
        >>> problem = fs.Problem(model, train=(torch.ones(4, 2), torch.tensor([0, 1, 0, 1])))
        >>> problem
        Problem(Linear of 6 parameters, 4 training samples, loss cross_entropy)
    """

    @own_settings()
    def __init__(
        self,
        model: nn.Module,
        train: Any,
        test: Any = None,
        loss: str | PerSample | nn.Module = "cross_entropy",
        initial: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int | None = None,
        shard: Literal["auto", False] = "auto",
    ) -> None:
        if not isinstance(model, nn.Module):
            fix = advice_on_model(model)
            raise InputError("a torch.nn.Module", type(model).__name__, where="model", fix=fix)
        if batch_size is not None:
            refuse_unless_whole(batch_size, "batch_size")
        refuse_missing_values(model)
        refuse_active_layers(model)
        first = first_weights(model)
        self.device = first.device if device is None else usable_device(device)
        self.dtype = usable_dtype(dtype, first.dtype)
        self.bits_of_weights = torch.finfo(first.dtype).bits  # of the model as it was given
        self.batch_size = batch_size or DEFAULT_BATCH
        self.loss: Loss = read_loss(loss)
        self._one_hot = self._one_logit = self._unmoved = False  # until the targets have been looked at
        self.facts = StructuralFacts()
        self._take_model(model)
        bad = non_finite_name(self.params, self.buffers)
        if bad:
            raise InputError("finite weights", "NaN or infinity", where=bad, fix="Did training diverge?")
        self.train: Samples = as_samples(train, "train")
        self.test: Samples | None = None if test is None else as_samples(test, "test")
        # In full, also within coarse products: those of other batches differ by their rounding.
        with untouched_randomness(self.generators), torch.no_grad(), coarse_products(coarse=False):
            looks, self.overlap = look_at_both(self.train, self.test, self.batch_size, self.loss.ignored)
            probe = self._first_samples("train")  # a loader that shuffles has others next time
            outputs = checked_outputs(self.model, probe, partial(self._try_forward, part="train"))
            for look in looks:
                refuse_shapes_that_fail(
                    look, lambda inputs: self.forward(inputs_on_device(inputs, self.device, self.dtype))
                )
            self.uneven = any(look.others for look in looks)  # whether samples have several shapes
            self._read_network(SteadyOutputs(probe, outputs))
            self.n_outputs = int(outputs[0].numel())
            self.first_output = outputs[:1].clone()  # of the first training sample
            self.loss = loss_for_outputs(self.loss, outputs)
            self._read_targets(outputs, [look.targets for look in looks])
            self.loss = loss_with_normaliser(self.loss, self.batches(), self.n_outputs)
            refuse_failing_loss(self.loss, outputs, self._first_samples("train")[1], "train")
            if self.test is not None:
                held_out, labels = self._first_samples("test")
                refuse_failing_loss(self.loss, self._try_forward(held_out, "test"), labels, "test")
            self.loss = in_double_where_possible(self.loss, outputs, self._first_samples("train")[1])
            doubts = doubts_of_outputs(self.loss, self._first_samples("train"), outputs, self.forward, self.params)
            numbered = self.classification and not self._one_hot
            strange = [*remarks_on_data(self.loss, numbered, looks, self.n_train, self.overlap)]
            strange += remarks_on_linear_loss(self.loss, outputs, self._first_samples("train")[1])
            parts = [self.train] if self.test is None else [self.train, self.test]
            self.ranks = agreeing_ranks(shard, parts, [*self.params.values(), *self.buffers.values()])
        self.initial = None if initial is None else initial_weights(initial, self.params, self._tied)
        read = [*reading_remarks(self.loss, outputs), *([MOVED] if self._unmoved else [])]
        # Kept with every table.
        self.remarks = (*doubts, *strange, *read, *remarks_on_wrappers(model), *remarks_on_frozen_weights(self.model))
        for doubt in doubts:
            warnings.warn(doubt, UserWarning, stacklevel=3)

    def _read_targets(self, outputs: Tensor, targets: list[TargetLook]) -> None:
        """Keep what the targets are: classes, one-hot vectors, tokens; refuse those that the loss cannot take."""
        self._one_hot = are_one_hot(self.loss, outputs.shape, targets)
        for look in targets if not self._one_hot else ():
            check_targets(self.loss, outputs.shape, look)
        self.no_classes = reason_without_classes(self.loss, outputs, targets, self._one_hot)
        self._one_logit = self.loss.kind == "logistic" and not self.no_classes
        self._unmoved = self.loss.name == "next_token" and targets_are_unshifted_tokens(*self._first_samples("train"))

    def _take_model(self, model: nn.Module) -> None:
        self.model = model_on_device(independent_copy(model), self.device, self.dtype)
        self.trainable = trainable_names(self.model)
        self.params: Params = named_parameters(self.model)
        self.buffers: Params = {name: value.detach().clone() for name, value in self.model.named_buffers()}
        self._tied = tied_names(self.model)

    def __repr__(self) -> str:
        network = f"{type(self.model).__name__} of {sum(value.numel() for value in self.params.values()):,} parameters"
        samples = f"{self.n_train} training" + (f" and {self.test.n} test" if self.test is not None else "")
        return f"Problem({network}, {samples} samples, loss {self.loss.name})"

    @property
    def n_train(self) -> int:
        """Number of training samples."""
        return self.train.n

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Random generators of the user's loaders, which reading would move on."""
        return self.train.generators + (self.test.generators if self.test is not None else ())

    @property
    def classification(self) -> bool:
        """True if every sample has one class, so that error and margins exist; `no_classes` says why not."""
        return not self.no_classes

    @property
    def n_classes(self) -> int:
        """Number of classes of a classification: that of the outputs, and two where there is one logit."""
        return max(self.n_outputs, 2)

    def with_model(self, model: nn.Module) -> Problem:
        """The same data and loss, not checked again, with another module that computes the same function."""
        other = copy.copy(self)
        other.__dict__.pop("_rewritten", None)
        other.facts = StructuralFacts()
        other._take_model(model)
        other.initial = None  # weights of another module before training are not those of this one
        return other

    def rescaled(self, model: nn.Module) -> Problem:
        """The same network with other weights and the same function: what was read of the network holds there too."""
        other = self.with_model(model)
        other.facts = self.facts
        return other

    def in_double(self) -> Problem:
        """The same problem in float64, where the device has it."""
        if self.dtype == torch.float64 or self.device.type == "mps":
            return self
        other = copy.copy(self)
        other.dtype = torch.float64
        double = other.rescaled(self.model)
        if self.initial is not None:
            double.initial = {name: value.double() for name, value in self.initial.items()}
        return double

    def leaves(self) -> Params:
        """All parameters at their own values, the trainable ones as leaves that require gradients."""
        moving = {name: self.params[name].detach().requires_grad_() for name in self.trainable}
        return {**self.params, **moving}

    @property
    def structure(self) -> Structure:
        """Recorded passes of the first samples, in plain words."""
        if self.facts.structure is None:
            with own_settings():
                self.facts.structure = record_structure(self.model, self.example(), self.leaves())
        return self.facts.structure

    def program_of(self, inputs: Inputs) -> Program:
        """The recorded program of samples of this shape; where values decide what is computed, of samples alike."""
        shapes = tuple(tuple(part.shape[1:]) for part in tensors_of_inputs(inputs))
        if shapes == tuple(tuple(part.shape[1:]) for part in tensors_of_inputs(self.example())):
            return self.structure.program
        if shapes not in self.facts.programs:
            self.facts.programs[shapes] = self.recorded(inputs)
        return self.facts.programs[shapes]

    def recorded(self, inputs: Inputs) -> Program:
        """The program of one pass of these samples, recorded anew."""
        with own_settings():
            return record(self.model, inputs, self.leaves()).program

    def _read_network(self, check: SteadyOutputs) -> None:
        """Read the network, which from then on runs in plain words; refuse one that is no function of each sample."""
        everything = partial(self.batches, size=PROBED_BATCH)
        try:
            reading = first_reading(self.model, self.example(), self.leaves(), everything, self.uneven)
        except Exception:
            check.refuse_others(self.forward)
            raise
        if not check.agree_with(reading.outputs, reading.reversed_outputs):
            check.refuse_others(self.forward)
        refuse_hidden_uses(self.model, reading.outputs)
        # Whether values or shapes of the samples decide what is computed, so that the first ones do not show all.
        self.samples_decide = self.uneven or bool(reading.choice)
        self.facts.structure = reading.structure
        if reading.not_covered is not None:
            self.facts.normal_form, self.facts.not_covered = self.facts, reading.not_covered

    @property
    def plain(self) -> Problem:
        """The same problem with every weight that acts as a parameter of its own; itself where they are already."""
        return self._rewritten or self

    @cached_property
    def _rewritten(self) -> Problem | None:
        """`plain` where it is another: a problem that held itself would keep its data until the collector comes."""
        if self.facts.normal_form is self.facts:  # and so is every copy with other weights
            mark_not_covered(self.model, self.facts.not_covered)
            return None
        batches = (inputs for inputs, _ in self.batches(size=self.batch_size))
        twin = normal_form(self.model, itertools.chain([self.example()], batches), everything=self.samples_decide)
        if not is_rewritten(twin):
            self.facts.normal_form, self.facts.not_covered = self.facts, not_covered(twin)
            mark_not_covered(self.model, not_covered(twin))
            return None
        refuse_if_different(self.model, twin, self.example(), "reading the network's weights")
        other = self.with_model(twin)
        other.facts = self.facts.normal_form = self.facts.normal_form or other.facts
        return other

    def part(self, name: str) -> Samples:
        """The "train" or "test" samples."""
        if name == "train":
            return self.train
        if name == "test" and self.test is not None:
            return self.test
        raise InputError("train or test data that was given", repr(name), where="part of the data")

    def batches(self, part: str = "train", size: int | None = None, shared: bool = False) -> Iterator[Batch]:
        """One pass over the samples, on the device and in the dtype, at most `size` (or `batch_size`) at once.

        Args:
            part: "train" or "test".
            size: the most samples of a batch.
            shared: this rank's share only.
        """
        samples = self.part(part)
        share = self.ranks.share(samples.n) if shared and self.ranks.size > 1 else None
        for inputs, targets in samples.batches(size or self.batch_size, share):
            yield inputs_on_device(inputs, self.device, self.dtype), self._moved_targets(targets)

    def forward(
        self,
        inputs: Inputs,
        params: Params | None = None,
        buffers: Params | None = None,
        rules: Sequence[OperationRule] = (),
    ) -> Tensor:
        """Outputs of the network at `params` (its own by default); the module itself is not changed.

        Args:
            inputs: some samples.
            params: all parameters.
            buffers: all buffers.
            rules: what its operations are handed to (see `replay`).
        """
        state = {**(self.params if params is None else params), **(self.buffers if buffers is None else buffers)}
        if rules:
            return output_tensor(replay(self.model, inputs, rules, state))
        args, keywords = ((), inputs) if isinstance(inputs, dict) else (inputs, {})
        dtype = next((value.dtype for value in state.values() if value.is_floating_point()), self.dtype)
        with settings_of_running_model(dtype, self.device):
            return output_tensor(call_with_tensors(self.model, state, self._tied, args, keywords))

    def example(self, size: int = 2) -> Inputs:
        """The first few training inputs, on the device."""
        inputs, _ = next(iter(self.batches(size=size)))
        return inputs

    def provenance(self, begun: float) -> dict[str, Any]:
        """Provenance of a result: versions, place, loss, and the seconds since `begun`."""
        threads = f"{torch.get_num_threads()} threads"
        place = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else threads
        return {
            "version": __version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": f"{self.device} ({place})",
            "dtype": str(self.dtype).removeprefix("torch."),
            "loss": self.loss.name,
            "seconds": round(time.perf_counter() - begun, 4),
            "time": datetime.now(UTC).isoformat(timespec="seconds"),
        }

    def _moved_targets(self, targets: Tensor) -> Tensor:
        if self._one_hot:
            targets = targets.to(torch.uint8).argmax(1)  # of zeros and ones
        if self._unmoved:
            targets = next_tokens(targets)
        if self._one_logit:
            targets = targets.reshape(-1).to(torch.int64)
        if targets.is_floating_point():
            return targets.to(self.device, self.dtype)
        return targets.to(self.device) if targets.dtype == torch.bool else targets.to(self.device, torch.int64)

    def _first_samples(self, part: str) -> Batch:
        """The first samples of a part, few enough to evaluate several times."""
        return next(iter(self.batches(part, min(self.batch_size, PROBED_BATCH))))

    def _try_forward(self, inputs: Inputs, part: str) -> Tensor:
        try:
            return self.forward(inputs)
        except InputError:
            raise
        except Exception as problem:
            got = f"a batch {shape_text(inputs)} on which it fails ({first_line(problem)})"
            where, fix = f"{part}, {failing_module(self.model, inputs)}", advice_on_inputs(inputs, first_line(problem))
            raise InputError("inputs that the model accepts", got, where, fix) from problem
