"""How far the outputs can move when an input moves: bounds from the weights, layer by layer.

A layer counts with its spectral norm; that of a convolution is the norm of the map that it is on its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.measures.margins import from_log, positive_margin
from flatscope.measures.path_norms import log_gradient_bounds
from flatscope.network.layers import Layer
from flatscope.network.operations import TABLE
from flatscope.network.products import LAYER_CALLS
from flatscope.network.program import Operation, is_in_place, replay, tensors_in
from flatscope.network.stretch_rules import Stretches, matrix_norm, operator_norm
from flatscope.registry import PATH_SYMMETRIES, Value, measure
from flatscope.samples import output_tensor, parts_of

_of_distances = partial(measure, paper="neyshabur2017", equation="Section 2.3", on_folded=True)


@_of_distances(
    symbol=r"\prod_i \|W_i\|_2 \ge \sup_x \|J_f(x)\|_2",
    direction="lower",
    invariant_under={"layer_scaling", "permutation"},
    cost="sweep",
    passes={},
    conventions="layers as linear maps on inputs of their true size, pooling and sums with their own constants",
)
def lipschitz_l2(ctx: Context, *, log: bool = False) -> Value:
    """Upper bound on how far the outputs move per distance that the input moves, both in ℓ2.

    Norms multiply along a chain, add up where branches are added, and add up as squares where they are put side by
    side. Operations of which no constant is known are refused by name.

    Args:
        log: give the natural logarithm instead.
    """
    return from_log(ctx.sweep(_log_constant), log)


@_of_distances(
    symbol=r"\max_o \phi_1(o) \ge \sup_x \|J_f(x)\|_\infty",
    direction="lower",
    invariant_under=PATH_SYMMETRIES,
    passes={},
    conventions="the ℓ1 path norm without biases, largest over outputs; never more than `l1_inf_norm`",
)
def lipschitz_linf(ctx: Context, *, log: bool = False) -> Value:
    """Upper bound on how far an output moves when no entry of the input moves by more than 1.

    Args:
        log: give the natural logarithm instead.
    """
    return from_log(float(log_gradient_bounds(ctx).max()), log)


@_of_distances(
    symbol=r"\gamma_{\mathrm{margin}} / (\sqrt 2 \prod_i \|W_i\|_2)",
    direction="higher",
    invariant_under={"layer_scaling", "permutation", "output_scaling"},
    needs={"classes"},
    cost="sweep",
    passes={"forward": 1},
    conventions="ℓ2 distance of inputs as the network receives them; `margin` over √2 times `lipschitz_l2`",
)
def certified_radius(ctx: Context, *, epsilon: float = 0.05) -> Value:
    """Distance that all but a fraction of the training inputs can move without changing class.

    Args:
        epsilon: fraction of the training samples that may lie at or below the margin.
    """
    constant = ctx.sweep(_log_constant)
    return from_log(math.log(positive_margin(ctx, epsilon)) - math.log(2) / 2 - constant)


def _log_constant(ctx: Context) -> float:
    following = Constants(ctx)
    with torch.no_grad():
        outputs = output_tensor(replay(ctx.problem.model, following.inputs, following.follow, ctx.params))
    if not following.knows(outputs):
        raise NotApplicable(
            "distances begin at inputs of real numbers; this network reads whole numbers, such as words"
        )
    return following.log_constant(outputs)


class Constants(Stretches):
    """A rule for `replay` that follows ℓ2 Lipschitz constants, as logarithms, through a network."""

    def __init__(self, ctx: Context) -> None:
        self.ctx, self.inputs = ctx, ctx.problem.example(1)
        super().__init__(list(parts_of(self.inputs)))
        self._layers = {id(ctx.params[layer.weight]): layer.name for layer in ctx.network if layer.uses == 1}

    def follow(self, op: Operation) -> Any:
        """Run one operation and bound what it does."""
        signals = [tensor for tensor in op.tensors if self.knows(tensor)]
        result, meaning = op.run(), TABLE.get(op.name)
        outcomes = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        written = op.name == "setitem" or is_in_place(op) or op.kwargs.get("inplace") is True
        if not signals or (not outcomes and not written) or (meaning is not None and meaning.creates):
            return result
        if meaning is None or (written and not meaning.writes_safely):
            self.refuse(op)
        if meaning.stretch is not None:
            constant = meaning.stretch(self, op, signals, result)
        elif meaning.slope is not None and len(signals) == 1:
            constant = self.log_constant(signals[0]) + math.log(meaning.slope)
        else:
            self.refuse(op)
        if written:  # views of what was written to are written to as well
            memory = {tensor.untyped_storage().data_ptr() for tensor in outcomes}
            for tensor, before in self._known.items():
                if tensor.untyped_storage().data_ptr() in memory:
                    self._known[tensor] = max(before, constant)
        for tensor in outcomes:
            self._known[tensor] = constant
        return result

    def layer_norm(self, op: Operation, weight: Tensor) -> float:
        """Spectral norm of a layer, known already unless its weight is used in several places or computed."""
        name = self._layers.get(id(weight))
        if name is not None:
            return self.ctx.sweep(layer_norms)[name]
        if op.name == "linear":
            return matrix_norm(weight)
        given = {**op.named(*LAYER_CALLS[op.name][1]), "bias": None}
        x, _ = given.pop("input"), given.pop("weight")
        return operator_norm(lambda v: op.function(v, weight=weight.to(v.dtype), **given), tuple(x.shape[1:]), x.device)


_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "conv": (functional.conv1d, functional.conv2d, functional.conv3d),
    "transposed": (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
}


def rows_of(ctx: Context, layer: Layer) -> Tensor:
    """The weight as a matrix (outputs, incoming weights of each), float64; of a group only what it reads."""
    weight = ctx.params[layer.weight].detach().double()
    if layer.input_first:  # (in, out / groups, taps)
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        weight = grouped.transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def layer_norms(ctx: Context) -> dict[str, float]:
    """Spectral norm of every layer as a linear map on an input of its true size, by layer name."""
    return {layer.name: _layer_norm(ctx, layer) for layer in ctx.network}


def _layer_norm(ctx: Context, layer: Layer) -> float:
    weight = ctx.params[layer.weight].detach().double()
    if layer.kind in ("dense", "lookup"):
        return matrix_norm(weight)
    if math.prod(weight.shape[2:]) == 1 and layer.kind == "conv":  # positions do not mix
        return matrix_norm(weight.reshape(layer.groups, -1, weight.shape[1]))
    function, weights = _FUNCTIONS[layer.kind][weight.ndim - 3], {torch.float64: weight, torch.float32: weight.float()}

    def apply(x: Tensor) -> Tensor:
        return function(x, weights[x.dtype], None, **layer.settings)

    return operator_norm(apply, layer.input_shape, weight.device)
