"""A network run with the weights of many: one forward pass for a whole stack of trials.

The module itself is run, watched as everywhere in the library (`network.interception`), on the samples of all trials
one behind the other. Where it calls a layer, the call is made with the stacked weights instead: a grouped convolution
on (samples, trials · channels, ...), a batched matrix product on (trials, samples, features). All other operations
treat every sample by itself and run as they are, with trials as further samples. In networks with convolutions the
trial varies fastest along the folded axis, so that their input is no copy; in others the sample does.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import first_line
from flatscope.isolation import untouched_randomness
from flatscope.network.interception import LAYER_CALLS, NORM_ORDER, Operation, replay, tensors_in, watched, with_tensors
from flatscope.network.operations import LEAVES_TORCH
from flatscope.training.checkpoint import data_fingerprint

Weights = Mapping[str, Tensor]  # every tensor with the trials as leading dimension
# Called as seen(weight name, folded input, folded output) at each layer; what it returns is the layer's output.
Seen = Callable[[str, Tensor, Tensor], Tensor]

CONVOLUTIONS: dict[str, Callable[..., Tensor]] = {
    name: getattr(functional, name) for name, (kind, _) in LAYER_CALLS.items() if kind in ("conv", "transposed")
}
STACKED_LAYERS = ("linear", *CONVOLUTIONS)
NORMS = {
    "batch_norm": NORM_ORDER,
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "group_norm": ("input", "num_groups", "weight", "bias", "eps"),
}
BATCH_COUNT = "num_batches_tracked"  # counted by whoever trains, once an epoch


class NotStackable(Exception):  # noqa: N818  a reason to train one by one, not a fault
    """This network cannot be run as one of a stack; the message says why."""


class StackedNetwork:
    """The network of a module without its weights, which are given stacked at each call.

    Args:
        model: any module, of which only the structure matters; copied.
        example: some samples that it takes.

    Attributes:
        used: names of the parameters that its layers read.
        has_convolutions: whether there are convolutions among them.
        products: multiplications of a forward pass for one sample, in its layers.
        trials_first: in which order inputs are given.
        signature: the operations with all their settings; networks of one signature can run as one stack.

    Raises:
        NotStackable: it does something that a stack cannot do as single networks do.
    """

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._model = copy.deepcopy(model)
        self._names = _names_of_tensors(self._model)
        first = next(model.parameters())
        self._device, self.used, self.has_convolutions, self.products = first.device, set[str](), False, 0
        samples = example[:2].to(first if example.is_floating_point() else first.device)
        self.signature = "\n".join(self._recorded(samples, training) for training in (False, True))
        self.products //= 2 * len(samples)  # both passes have counted them
        self.trials_first = not self.has_convolutions

    def __call__(self, weights: Weights, inputs: Tensor, *, training: bool = False, seen: Seen | None = None) -> Tensor:
        """Outputs (trials, samples, ...) of every trial on its own samples.

        Args:
            weights: parameters and buffers by name, stacked; running statistics are updated in place in training.
            inputs: (trials, samples, ...) if `self.trials_first`, else (samples, trials, ...).
            training: BatchNorm with the statistics of the batch.
            seen: looks at what enters and leaves the layers.
        """
        trials = inputs.shape[0 if self.trials_first else 1]
        if self._model.training != training:
            self._model.train(training)
        if inputs.device != self._device:  # for buffers that are no layer's
            self._device = inputs.device
            self._names = _names_of_tensors(self._model.to(self._device))

        def rule(op: Operation) -> Any:
            if not any(id(tensor) in self._names for tensor in op.tensors):
                return op.run()
            if op.name in LAYER_CALLS:
                given = op.layer_arguments()
                result = self._layer(op.name, dict(given), weights, trials)
                return result if seen is None else seen(self._names[id(given["weight"])], given["input"], result)
            return self._norm(op, weights, trials) if op.name in NORMS else op.args[0]  # else a count of batches

        with watched(rule):
            outputs = self._model(inputs.flatten(0, 1))
        return self.split(outputs, trials)

    def split(self, folded: Tensor, trials: int) -> Tensor:
        """(trials, samples, ...) of a value inside of the network, which has both in its first axis."""
        parts = self._with_axis_of_trials(folded, trials)
        return parts if self.trials_first else parts.transpose(0, 1)

    def _with_axis_of_trials(self, folded: Tensor, trials: int) -> Tensor:
        """The folded axis as two, in the order of the inputs: no copy."""
        return folded.reshape(*((trials, -1) if self.trials_first else (-1, trials)), *folded.shape[1:])

    def _stacked_weight(self, weights: Weights, tensor: Tensor | None) -> Tensor | None:
        return None if tensor is None else weights[self._names[id(tensor)]]

    def _layer(self, name: str, given: dict[str, Any], weights: Weights, trials: int) -> Tensor:
        weight, bias = (
            self._stacked_weight(weights, given.pop("weight")),
            self._stacked_weight(weights, given.pop("bias", None)),
        )
        x = given.pop("input")
        assert weight is not None  # `_check` has seen to it
        if name == "linear":
            return self._linear(x, weight, bias, trials)
        given["groups"] = trials * given.get("groups", 1)
        result = CONVOLUTIONS[name](
            self._joined(x, trials), _trials_merged_with_channels(weight), _trials_merged_with_channels(bias), **given
        )
        return self._folded_from_channels(result, trials)

    def _linear(self, x: Tensor, weight: Tensor, bias: Tensor | None, trials: int) -> Tensor:
        if trials == 1:
            return functional.linear(x, weight.flatten(0, 1), None if bias is None else bias.flatten(0, 1))
        rows = self.split(x, trials)  # (t, b, ..., in)
        flat = rows.reshape(trials, -1, rows.shape[-1])  # (t, samples and positions, in)
        # The weight on the left, so that its gradient comes out as it lies in memory.
        across = flat.transpose(1, 2)
        result = torch.bmm(weight, across) if bias is None else torch.baddbmm(bias[:, :, None], weight, across)
        result = result.transpose(1, 2).reshape(*rows.shape[:-1], -1)
        return (result if self.trials_first else result.transpose(0, 1)).flatten(0, 1)

    def _norm(self, op: Operation, weights: Weights, trials: int) -> Tensor:
        given = op.named(*NORMS[op.name])
        x, scale, shift = (
            given["input"],
            self._stacked_weight(weights, given["weight"]),
            self._stacked_weight(weights, given["bias"]),
        )
        if op.name == "batch_norm":
            for name in ("running_mean", "running_var"):
                given[name] = _trials_merged_with_channels(self._stacked_weight(weights, given[name]))
            given |= {
                "input": self._joined(x, trials),
                "weight": _trials_merged_with_channels(scale),
                "bias": _trials_merged_with_channels(shift),
            }
            return self._folded_from_channels(op.function(**given), trials)
        values = self._with_axis_of_trials(op.function(**given | {"weight": None, "bias": None}), trials)

        def placed(tensor: Tensor) -> Tensor:  # over channels, or over the last dimensions
            filled = (1,) * (values.ndim - tensor.ndim - 1)
            shape = (*tensor.shape[1:], *filled) if op.name == "group_norm" else (*filled, *tensor.shape[1:])
            return tensor.reshape(*((trials, 1) if self.trials_first else (1, trials)), *shape)

        values = values if scale is None else values * placed(scale)
        values = values if shift is None else values + placed(shift)
        return values.flatten(0, 1)

    def _joined(self, folded: Tensor, trials: int) -> Tensor:
        """(samples, trials · channels, ...), as grouped layers read it."""
        return self.split(folded, trials).transpose(0, 1).flatten(1, 2)

    def _folded_from_channels(self, joined: Tensor, trials: int) -> Tensor:
        """Folded again, from what a grouped layer gives."""
        parts = joined.reshape(len(joined), trials, -1, *joined.shape[2:])
        return (parts.transpose(0, 1) if self.trials_first else parts).flatten(0, 1)

    def _recorded(self, example: Tensor, training: bool) -> str:
        """Run the single network; its operations as text, once nothing is found in them that a stack cannot do."""
        lines: list[str] = []
        kept = [example]  # numbered in their order; an id means nothing once its object is gone
        numbers = {id(example): 0}

        def shown(tensor: Tensor) -> Any:
            if id(tensor) in self._names:
                return _Text(self._names[id(tensor)])
            if id(tensor) in numbers:
                return _Text(f"%{numbers[id(tensor)]}")
            return _Text(data_fingerprint(tensor[None], tensor))  # a constant

        def rule(op: Operation) -> Any:
            described = with_tensors((op.args, op.kwargs), shown)
            before = torch.get_rng_state()
            result = op.run()
            tensors = list(tensors_in(result))
            if not torch.equal(before, torch.get_rng_state()):
                raise NotStackable(f"{op.place} draws masks, which a stack cannot draw as single networks do")
            if op.name in LEAVES_TORCH and not tensors:
                raise NotStackable(f"its forward pass looks at values ({op.place})")
            if tensors:
                self._check(op, tensors[0])
                lines.append(f"{op.module} {op.name} {described}")
            for tensor in tensors:
                numbers[id(tensor)] = len(kept)
                kept.append(tensor)
            return result

        self._model.train(training)
        try:
            with untouched_randomness(), torch.no_grad():
                outputs = replay(self._model, example, rule)
        except NotStackable:
            raise
        except Exception as problem:  # the user's code can fail in any way
            raise NotStackable(f"it fails ({first_line(problem)})") from None
        if not isinstance(outputs, Tensor):
            raise NotStackable("its output is not one tensor")
        return "\n".join(lines)

    def _check(self, op: Operation, result: Tensor) -> None:
        """Refuse an operation that reads tensors of the network and is not known to take them stacked."""
        used = [self._names[id(tensor)] for tensor in op.tensors if id(tensor) in self._names]
        if not used or all(name.rpartition(".")[2] == BATCH_COUNT for name in used):
            return
        order = NORMS.get(op.name) or (LAYER_CALLS[op.name][1] if op.name in STACKED_LAYERS else ())
        given = op.named(*order)
        tensors = [given.pop(name, None) for name in ("weight", "bias", "running_mean", "running_var") if name in order]
        foreign = [tensor for tensor in tensors if tensor is not None and id(tensor) not in self._names]
        if not tensors or foreign or any(id(tensor) in self._names for tensor in tensors_in(given)):
            raise NotStackable(f"it uses the tensor {used[0]} outside of a layer ({op.place})")
        self.used |= set(used)
        self.has_convolutions |= op.name in CONVOLUTIONS
        if op.name in STACKED_LAYERS:
            transposed = LAYER_CALLS[op.name][0] == "transposed"
            self.products += (given["input"] if transposed else result).numel() * tensors[0][0].numel()


class _Text(str):
    """Shown without quotation marks."""

    __slots__ = ()
    __repr__ = str.__str__


def _names_of_tensors(model: nn.Module) -> dict[int, str]:
    return {id(tensor): name for name, tensor in [*model.named_buffers(), *model.named_parameters()]}


def _trials_merged_with_channels(tensor: Tensor | None) -> Tensor | None:
    """Trials and first dimension as one; a view, so that running statistics can be updated through it."""
    return None if tensor is None else tensor.view(-1, *tensor.shape[2:])
