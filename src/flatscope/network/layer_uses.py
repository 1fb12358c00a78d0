"""Uses of weights by layers: read off a recorded step, or off an operation while it runs.

In a plain network (see `plain`) every product with a weight is a `linear`, a convolution, its transpose or a lookup,
whatever words the module uses, so these calls are all that has to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatscope.network.products import LAYER_CALLS, NORM_ORDER, masked_name
from flatscope.network.watching import Operation
from flatscope.params import Params

V = TypeVar("V")  # a slot of a record, or a tensor of a running pass


@dataclass(frozen=True)
class LayerUse(Generic[V]):
    """One use of a weight by a layer's operation, or of a BatchNorm's scale.

    The output of a running pass is kept as an edge of the autograd graph and not as a tensor: an activation in place
    would overwrite it. An opaque use reads a weight through a view of it (a tied transpose, say): known by name only.
    """

    weight: str
    bias: str | None
    kind: str  # "dense", "conv", "transposed", "lookup" or "batchnorm"
    input: V
    output_shape: tuple[int, ...] = ()
    settings: dict[str, Any] = field(default_factory=dict, hash=False)  # stride, padding, dilation, groups, statistics
    masked: bool = False  # whether a fixed mask holds some entries of the weight at zero
    opaque: bool = False
    follows: bool = False  # whether autograd follows the output
    step: int = -1  # its number in a record
    edge: GradientEdge | None = None  # where the output stands in the graph of a running pass

    @property
    def input_follows(self) -> bool:
        """True where the input depends on parameters, so that gradients reach it."""
        return bool(getattr(self.input, "follows", False) or getattr(self.input, "requires_grad", False))


class Call(Protocol):
    """A step of a record or a running operation."""

    @property
    def name(self) -> str:
        """Of the operation."""

    def named(self, *names: str) -> dict[str, Any]:
        """Arguments by name."""


@dataclass(frozen=True)
class Names:
    """The parameter that a value is: as it is, under a fixed mask, or as a view; None where it is none."""

    whole: Callable[[Any], str | None]
    masked: Callable[[Any], str | None]
    viewed: Callable[[Any], str | None]


def order_of(call: Call) -> tuple[str, ...]:
    """Names of the arguments of a layer's operation or of a BatchNorm's, in order."""
    return LAYER_CALLS[call.name][1] if call.name in LAYER_CALLS else NORM_ORDER


def layer_use(call: Call, names: Names) -> LayerUse[Any] | None:
    """The use of a weight that a call is; None for any other call."""
    if call.name not in LAYER_CALLS and call.name != "batch_norm":
        return None
    kind = LAYER_CALLS[call.name][0] if call.name in LAYER_CALLS else "batchnorm"
    given = call.named(*order_of(call))
    value, masked = given.get("weight"), names.masked(given.get("weight"))
    name = masked or names.whole(value)
    viewed = names.viewed(value) if name is None and kind != "batchnorm" else None
    if name is None and viewed is None:
        return None
    settings: dict[str, Any] = {}
    if kind in ("conv", "transposed"):
        settings = {name: value for name, value in given.items() if name not in ("input", "weight", "bias")}
    elif kind == "batchnorm":
        settings = {name: given.get(name) for name in ("running_mean", "running_var", "eps")}
    bias = names.whole(given.get("bias"))
    opaque = name is None
    return LayerUse(name or str(viewed), bias, kind, given["input"], (), settings, masked is not None, opaque)


class LayerRecorder:
    """A rule that collects every use of a named weight.

    Args:
        params: the tensors that the network is called with, by name.
        isolate: give every layer its own view of its input, so that gradients with respect to that view are
            what flows through this layer alone and not through a neighbouring residual branch.
        axes: the axis of its input that has the samples, for weights for which it is not the first: these layers are
            run, and recorded, with the samples in front.
    """

    def __init__(self, params: Params, isolate: bool = False, axes: Mapping[str, int] | None = None) -> None:
        self.uses: list[LayerUse[Tensor]] = []
        self._level = torch._C._functorch.maybe_current_level()
        self._axes, self._isolate = axes or {}, isolate
        whole = {id(value): name for name, value in params.items()}
        memory = {_memory(value): name for name, value in params.items()}
        self._names = Names(
            lambda value: whole.get(id(value)),
            lambda value: masked_name(value) if isinstance(value, Tensor) else None,
            lambda value: memory.get(_memory(value)) if isinstance(value, Tensor) else None,
        )

    @property
    def of_layers(self) -> list[LayerUse[Tensor]]:
        """The uses of weight matrices, without BatchNorm's."""
        return [use for use in self.uses if use.kind != "batchnorm"]

    def follow(self, op: Operation) -> Any:
        """Run one operation, keeping it if it is a layer's."""
        use = layer_use(op, self._names)
        if use is None or torch._C._functorch.maybe_current_level() != self._level:
            return op.run()  # inside torch.func the rows of single samples cannot be seen
        if use.kind == "batchnorm":  # no layer, but its scale and shift are parameters with curvature of their own
            return self._kept(use, op.run())
        axis = 0 if use.opaque else self._axes.get(use.weight, 0)
        axis = axis if use.input.ndim > axis + 1 else 0
        if axis:
            use = replace(use, input=use.input.movedim(axis, 0))
        elif self._isolate and use.input.is_floating_point():
            use = replace(use, input=use.input.view_as(use.input))
        output = self._kept(use, op.function(**{**op.named(*order_of(op)), "input": use.input}))
        return output.movedim(0, axis).contiguous() if axis else output  # laid out as it would have been

    def _kept(self, use: LayerUse[Tensor], output: Any) -> Any:
        edge = get_gradient_edge(output) if output.requires_grad else None
        shape, follows = tuple(output.shape), edge is not None
        self.uses.append(replace(use, output_shape=shape, follows=follows, edge=edge))
        return output


def by_samples(use: LayerUse[Tensor], n: int) -> LayerUse[Tensor]:
    """A use of a dense layer with the samples as first axis, where positions were flattened into it.

    The rows of a sample lie one behind the other, as `x.reshape(-1, features)` leaves them.
    """
    if use.kind != "dense" or len(use.input) in (0, n) or len(use.input) % n:
        return use
    rows = len(use.input) // n
    given = use.input.detach().reshape(n, rows, *use.input.shape[1:])
    return replace(use, input=given, output_shape=(n, rows, *use.output_shape[1:]))


def _memory(value: Tensor) -> int:
    """Address of what a tensor is a view of; 0 where it has none."""
    try:
        return int(value.untyped_storage().data_ptr())
    except (RuntimeError, NotImplementedError):  # inside vmap
        return 0
