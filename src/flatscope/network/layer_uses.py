"""Uses of weights by layers: read off a recorded step, or off an operation while it runs.

In a plain network (see `plain`) every product with a weight is a `linear`, a convolution, its transpose or a lookup,
whatever words the module uses, so these calls are all that has to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Literal, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatscope.network.interception import WEIGHT_CALLS, Call, Operation, address_of
from flatscope.network.products import masked_name
from flatscope.params import Params

V = TypeVar("V")  # a slot of a record, or a tensor of a running pass


class Role(NamedTuple):
    """The parameter that a tensor stands for."""

    parameter: str  # its name
    form: Literal["whole", "masked", "view"]  # as it is, times a fixed mask of zeros and ones, or part of its memory


class Roles:
    """The parameters that tensors of one pass stand for.

    Args:
        params: the tensors that the network is called with, by name.
    """

    def __init__(self, params: Params) -> None:
        self._whole = {id(value): Role(name, "whole") for name, value in params.items()}
        self._views = {address: Role(name, "view") for name, value in params.items() if (address := address_of(value))}

    def of(self, value: Any) -> Role | None:
        """The role of a tensor; None where it stands for no parameter."""
        if not isinstance(value, Tensor):
            return None
        if name := masked_name(value):
            return Role(name, "masked")
        return self._whole.get(id(value)) or self._views.get(address_of(value) or 0)

    def name_of(self, value: Any) -> str | None:
        """Name of the parameter that a tensor is, as it is or under a mask; None for any other."""
        role = self.of(value)
        return None if role is None or role.form == "view" else role.parameter


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
    settings: dict[str, Any] = field(
        default_factory=dict, hash=False
    )  # stride, padding, dilation, groups, statistics, word of padding
    masked: bool = False  # whether a fixed mask holds some entries of the weight at zero
    opaque: bool = False
    follows: bool = False  # whether autograd follows the output
    step: int = -1  # its number in a record
    edge: GradientEdge | None = None  # where the output stands in the graph of a running pass


SETTINGS = {
    "conv": ("stride", "padding", "output_padding", "groups", "dilation"),
    "transposed": ("stride", "padding", "output_padding", "groups", "dilation"),
    "batchnorm": ("running_mean", "running_var", "eps"),
    "lookup": ("padding_idx", "max_norm", "scale_grad_by_freq"),
}


def layer_use(call: Call, role_of: Callable[[Any], Role | None]) -> LayerUse[Any] | None:
    """The use of a weight that a call is; None for any other call.

    Args:
        call: a step of a record, or an operation that is about to run.
        role_of: the parameter that one of its arguments stands for.
    """
    if call.name not in WEIGHT_CALLS:
        return None
    kind, order = WEIGHT_CALLS[call.name]
    given = call.named(*order)
    weight, bias = role_of(given.get("weight")), role_of(given.get("bias"))
    if weight is None or (kind == "batchnorm" and weight.form == "view"):
        return None
    settings = {name: given.get(name) for name in SETTINGS.get(kind, ()) if name in given or kind == "batchnorm"}
    return LayerUse(
        weight.parameter,
        bias.parameter if bias is not None and bias.form == "whole" else None,
        kind,
        given["input"],
        settings=settings,
        masked=weight.form == "masked",
        opaque=weight.form == "view",
    )


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
        self._roles = Roles(params)

    @property
    def of_layers(self) -> list[LayerUse[Tensor]]:
        """The uses of weight matrices, without BatchNorm's."""
        return [use for use in self.uses if use.kind != "batchnorm"]

    def follow(self, op: Operation) -> Any:
        """Run one operation, keeping it if it is a layer's."""
        use = layer_use(op, self._roles.of)
        if use is None or torch._C._functorch.maybe_current_level() != self._level:
            return op.run()  # inside torch.func the rows of single samples cannot be seen
        if use.kind == "batchnorm":  # no layer, but its scale and shift are parameters with curvature of their own
            return self._note(use, op.run())
        axis = 0 if use.opaque else self._axes.get(use.weight, 0)
        axis = axis if use.input.ndim > axis + 1 else 0
        if axis:
            use = replace(use, input=use.input.movedim(axis, 0))
        elif self._isolate and use.input.is_floating_point():
            use = replace(use, input=use.input.view_as(use.input))
        output = self._note(use, op.function(**{**op.layer_arguments(), "input": use.input}))
        return output.movedim(0, axis).contiguous() if axis else output  # laid out as it would have been

    def _note(self, use: LayerUse[Tensor], output: Any) -> Any:
        """Keep a use and where its output stands in the graph; the output."""
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
