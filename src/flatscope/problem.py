"""Problem: a trained model, its data and its loss, checked once before anything is measured."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from flatscope.errors import InputError
from flatscope.guards import precise_math, untouched_randomness
from flatscope.loss import Loss, PerSample, as_loss, is_classification
from flatscope.params import Params, named_parameters, non_finite_name, trainable_names
from flatscope.samples import Batch, Inputs, Samples, as_samples, cut, moved, parts_of, shape_text

DEFAULT_BATCH = 256


class Problem:
    """A model, its training data and loss; optionally test data and the weights training started from.

    The model is copied at construction: later changes to it do not reach the problem, and nothing done
    here reaches the model. Parameters with `requires_grad=False` are constants of the network (unless all
    of them are: a network frozen for inference is measured as if none were).

    Args:
        model: any `nn.Module` in eval mode whose output is a tensor (or has `.logits`).
        train: `(x, y)` tensors or arrays, a `Dataset`, a `DataLoader`, or a list of batches.
        test: the same, held out; needed only by measures that say so.
        loss: "cross_entropy", "mse" (squared error summed over outputs), or a function of (outputs, targets)
            that gives one value per sample. Always averaged over samples.
        initial: a module or state dict with the weights before training.
        device: where to compute; the model's device by default.
        dtype: floating-point type to compute in; the model's by default.
        batch_size: the most samples to evaluate at once; it changes memory and time, never a value.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 2)
        >>> problem = fs.Problem(model, train=(torch.ones(4, 2), torch.tensor([0, 1, 0, 1])))
        >>> problem.n_train, problem.n_outputs
        (4, 2)
    """

    def __init__(
        self,
        model: nn.Module,
        train: Any,
        test: Any = None,
        loss: str | PerSample = "cross_entropy",
        initial: nn.Module | Mapping[str, Tensor] | None = None,
        *,
        device: str | torch.device | None = None,
        dtype: torch.dtype | None = None,
        batch_size: int | None = None,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise InputError("a torch.nn.Module", type(model).__name__, where="model")
        if batch_size is not None and batch_size < 1:
            raise InputError("a batch size of at least 1", str(batch_size), where="batch_size")
        first = next((p for p in model.parameters() if p.is_floating_point()), None)
        if first is None:
            raise InputError("a model with parameters", "none", where="model", fix="There is nothing to measure")
        _refuse_active_layers(model)
        self.device = torch.device(device) if device is not None else first.device
        self.dtype = dtype or first.dtype
        self.batch_size = batch_size or DEFAULT_BATCH
        self.loss: Loss = as_loss(loss)
        self.model = _replica(model).to(self.device, self.dtype)
        self.trainable = trainable_names(self.model)
        self.params: Params = named_parameters(self.model)
        self.buffers: Params = {name: value.detach().clone() for name, value in self.model.named_buffers()}
        bad = non_finite_name({**self.params, **self.buffers})
        if bad:
            raise InputError("finite weights", "NaN or infinity", where=bad, fix="Did training diverge?")
        with untouched_randomness(), precise_math():
            self.train: Samples = as_samples(train, "train")
            self.test: Samples | None = None if test is None else as_samples(test, "test")
        with untouched_randomness(self.generators), precise_math(), torch.no_grad():
            self.n_outputs, self.classification = self._check_outputs()
            self._check_values(self.train)
            if self.test is not None:
                self._check_values(self.test)
        self.initial = None if initial is None else self._checked_initial(initial)

    @property
    def n_train(self) -> int:
        """Number of training samples."""
        return self.train.n

    @property
    def generators(self) -> tuple[torch.Generator, ...]:
        """Random generators of the user's loaders, which reading would move on."""
        return self.train.generators + (self.test.generators if self.test is not None else ())

    def part(self, name: str) -> Samples:
        """The "train" or "test" samples."""
        if name == "train":
            return self.train
        if name == "test" and self.test is not None:
            return self.test
        raise InputError("train or test data that was given", repr(name), where="part of the data")

    def batches(self, part: str = "train", size: int | None = None) -> Iterator[Batch]:
        """One pass over the samples, on the device and in the dtype, at most `size` (or `batch_size`) at once."""
        for inputs, targets in self.part(part).batches(size or self.batch_size):
            yield moved(inputs, self.device, self.dtype), self._moved_targets(targets)

    def forward(self, inputs: Inputs, params: Params | None = None, buffers: Params | None = None) -> Tensor:
        """Outputs of the network at `params` (its own by default); the module itself is not changed."""
        state = {**(self.params if params is None else params), **(self.buffers if buffers is None else buffers)}
        if isinstance(inputs, dict):
            raw = functional_call(self.model, state, (), inputs)
        else:
            raw = functional_call(self.model, state, inputs)
        return output_tensor(raw)

    def example(self, size: int = 2) -> Inputs:
        """The first few training inputs, on the device."""
        inputs, _ = next(iter(self.batches(size=size)))
        return inputs

    def _moved_targets(self, targets: Tensor) -> Tensor:
        if targets.is_floating_point():
            return targets.to(self.device, self.dtype)
        return targets.to(self.device) if targets.dtype == torch.bool else targets.to(self.device, torch.int64)

    def _check_outputs(self) -> tuple[int, bool]:
        """Forward passes on one batch: shapes, determinism, one sample independent of the others."""
        inputs, targets = next(iter(self.batches(size=min(self.batch_size, 32))))
        outputs = self._try_forward(inputs)
        if outputs.ndim < 1 or len(outputs) != len(targets):
            raise InputError(
                f"one output row per sample ({len(targets)})",
                f"outputs {tuple(outputs.shape)}",
                where="model",
            )
        if not torch.isfinite(outputs).all():
            raise InputError("finite outputs", "NaN or infinity", where="model, first batch of train")
        scale = outputs.abs().max().clamp_min(torch.finfo(self.dtype).tiny)
        rounding = 1e3 * torch.finfo(self.dtype).eps
        if ((self.forward(inputs) - outputs).abs().max() / scale) > rounding:
            raise InputError(
                "the same outputs from two forward passes",
                "outputs that differ",
                where="model",
                fix="Switch off dropout and other randomness in the forward pass",
            )
        half = (len(targets) + 1) // 2
        if ((self.forward(cut(inputs, 0, half)) - outputs[:half]).abs().max() / scale) > rounding:
            raise InputError(
                "outputs that depend on their own sample only",
                "outputs that change with the other samples of the batch",
                where="model",
                fix="Call model.eval(); normalise with running statistics, not with those of the batch",
            )
        self.loss(outputs, targets)
        return int(outputs[0].numel()), is_classification(outputs, targets)

    def _check_values(self, samples: Samples) -> None:
        """One pass over the data: finite values, labels in range, the shapes of the first training batch."""
        expected = [part.shape[1:] for part in parts_of(self.example())]
        for inputs, targets in samples.batches(self.batch_size):
            parts = parts_of(inputs)
            if [part.shape[1:] for part in parts] != expected and not isinstance(inputs, dict):
                raise InputError(
                    f"samples of shape {', '.join(str(tuple(shape)) for shape in expected)}",
                    f"a batch {shape_text(inputs)}",
                    where=samples.where,
                )
            for value in (*parts, targets):
                if value.is_floating_point() and not torch.isfinite(value).all():
                    raise InputError("finite data", "NaN or infinity", where=samples.where, fix="Clean the data first")
            if self.loss.name == "cross_entropy" and targets.is_floating_point():
                raise InputError("class numbers (integers)", f"{targets.dtype} targets", where=samples.where)
            in_classes = self.classification and self.loss.name in ("cross_entropy", "mse")
            if in_classes and (int(targets.min()) < 0 or int(targets.max()) >= self.n_outputs):
                raise InputError(
                    f"labels from 0 to {self.n_outputs - 1} (the model has {self.n_outputs} outputs)",
                    f"labels from {int(targets.min())} to {int(targets.max())}",
                    where=samples.where,
                )

    def _try_forward(self, inputs: Inputs) -> Tensor:
        try:
            return self.forward(inputs)
        except InputError:
            raise
        except Exception as problem:
            raise InputError(
                "inputs that the model accepts",
                f"a batch {shape_text(inputs)} on which it fails ({str(problem).splitlines()[0]})",
                where=_failing_module(self.model, inputs),
                fix="Check the input shape and dtype",
            ) from problem

    def _checked_initial(self, initial: nn.Module | Mapping[str, Tensor]) -> Params:
        given = dict(initial.state_dict()) if isinstance(initial, nn.Module) else dict(initial)
        for name, value in self.params.items():
            if name not in given or given[name].shape != value.shape:
                found = tuple(given[name].shape) if name in given else "nothing"
                raise InputError(f"a tensor of shape {tuple(value.shape)}", f"{found}", where=f"initial, {name}")
        return {name: given[name].detach().to(self.device, self.dtype) for name in self.params}


def output_tensor(raw: Any) -> Tensor:
    """The output tensor of a model: itself, its `.logits`, or its "logits" entry."""
    if isinstance(raw, Tensor):
        return raw
    if isinstance(raw, Mapping) and isinstance(raw.get("logits"), Tensor):
        logits: Tensor = raw["logits"]
        return logits
    if isinstance(getattr(raw, "logits", None), Tensor):
        attribute: Tensor = raw.logits
        return attribute
    raise InputError(
        "a model whose output is a tensor or has .logits",
        type(raw).__name__,
        where="model",
        fix="Wrap the model in a module that returns the tensor to be measured",
    )


def _replica(model: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(model)
    except Exception as problem:
        raise InputError(
            "a model that can be copied (copy.deepcopy)",
            str(problem).splitlines()[0],
            where="model",
            fix="Remove old-style weight_norm or cached tensors first",
        ) from problem


def _refuse_active_layers(model: nn.Module) -> None:
    """Dropout and batch statistics left on would make every number depend on chance or on the batch."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise InputError("dropout switched off", f"{kind} in training mode", where=name, fix="Call model.eval()")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training:
                raise InputError(
                    "normalisation with running statistics",
                    f"{kind} in training mode",
                    where=name,
                    fix="Call model.eval()",
                )
            if module.running_mean is None:
                raise InputError(
                    "normalisation with running statistics",
                    f"{kind} without any (track_running_stats=False)",
                    where=name,
                    fix="Its output depends on the batch, so no measure of one function exists",
                )


def _failing_module(model: nn.Module, inputs: Inputs) -> str:
    """Name of the innermost module whose forward raises on these inputs."""
    entered: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: entered.append(name)))
        handles.append(module.register_forward_hook(lambda _m, _a, _o: entered.pop() and None))
    try:
        model(**inputs) if isinstance(inputs, dict) else model(*parts_of(inputs))
    except Exception:
        return f"layer {entered[-1]}" if entered and entered[-1] else "model"
    finally:
        for handle in handles:
            handle.remove()
    return "model"
