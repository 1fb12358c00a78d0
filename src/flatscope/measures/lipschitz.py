"""How far the outputs can move when an input moves: bounds from the weights, layer by layer.

A layer counts with its spectral norm; that of a convolution is the norm of the map that it is on its input.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.measures.attacks import MARGIN_PASSES, PASSES, refuse_broken_constant, refuse_broken_radius
from flatscope.measures.margins import positive_margin, value_from_logarithm
from flatscope.measures.path_norms import log_gradient_bound
from flatscope.measures.sample_kinds import free_inputs, kinds_of_samples
from flatscope.network.discontinuities import Discontinuities
from flatscope.network.interception import Operation, OperationRule, tensors_in
from flatscope.network.layer_uses import LayerUse
from flatscope.network.layers import Layer
from flatscope.network.operations import TABLE
from flatscope.network.program import Slot
from flatscope.network.singular_values import Check, matrix_norm, operator_norm
from flatscope.network.stretch_rules import Stretches, entrywise
from flatscope.registry import PATH_SYMMETRIES, Value, measure
from flatscope.samples import Inputs, tensors_of_inputs
from flatscope.sampling import refuse_out_of_time

_of_distances = partial(measure, paper="neyshabur2017", equation="Section 2.3", on_folded=True)


def lipschitz_l2(ctx: Context, *, log: bool = False) -> Value:
    """Upper bound on how far the outputs move per distance that the input moves, both in ℓ2.

    Norms multiply along a chain, add up where branches are added, and add up as squares where they are put side by
    side. Operations of which no constant is known are refused by name, and so are comparisons, roundings and choices by
    value of which the outputs are made. The constant is the largest over all shapes that samples have; pairs of inputs
    that would break it are looked for before it is given. `spectral_norm` has it as one of its forms.

    Args:
        ctx: the network.
        log: give the natural logarithm instead.
    """
    constant = ctx.cached(log_constant)
    refuse_broken_constant(ctx, constant, 2, "lipschitz_l2")
    return value_from_logarithm(constant, log)


@_of_distances(
    symbol=r"\max_o \phi_1(o) \ge \sup_x \|J_f(x)\|_\infty",
    direction="lower",
    invariant_under=PATH_SYMMETRIES,
    typical=PASSES,
    conventions="the ℓ1 path norm without biases, largest over outputs; never more than `l1_inf_norm`",
)
def lipschitz_linf(ctx: Context, *, log: bool = False) -> Value:
    """Upper bound on how far an output moves when no entry of the input moves by more than 1.

    Args:
        log: give the natural logarithm instead.
    """
    constant = log_gradient_bound(ctx)
    refuse_broken_constant(ctx, constant, math.inf, "lipschitz_linf")
    return value_from_logarithm(constant, log)


@_of_distances(
    symbol=r"\gamma_{\mathrm{margin}} / (\sqrt 2 \prod_i \|W_i\|_2)",
    direction="higher",
    invariant_under={"layer_scaling", "permutation", "output_scaling"},
    needs={"classes"},
    cost="sweep",
    typical=MARGIN_PASSES,
    conventions="ℓ2 distance of inputs as the network receives them; `margin` over √2 times the form lipschitz_l2 of "
    "`spectral_norm`",
)
def certified_radius(ctx: Context, *, epsilon: float = 0.05) -> Value:
    """Distance that all but a fraction of the training inputs can move without changing class.

    Args:
        epsilon: fraction of the training samples that may lie at or below the margin.
    """
    constant, margin = ctx.cached(log_constant), positive_margin(ctx, epsilon)
    refuse_broken_constant(ctx, constant, 2, "certified_radius")
    radius = value_from_logarithm(math.log(margin) - math.log(2) / 2 - constant)
    refuse_broken_radius(ctx, margin, float(radius.value))
    return radius


def log_constant(ctx: Context) -> float:
    """Logarithm of the ℓ2 constant of all outputs, the largest over the kinds of samples."""
    return max(_log_constant_of(ctx, inputs) for inputs in kinds_of_samples(ctx))


def _log_constant_of(ctx: Context, inputs: Inputs) -> float:
    following = Constants(ctx, inputs)
    return following.log_constant(following.run(following.follow))


class Constants(Stretches):
    """A rule for `Problem.forward` that follows ℓ2 Lipschitz constants, as logarithms, through a network.

    Args:
        ctx: the network.
        inputs: samples of one kind; of several the largest constants are found.
    """

    def __init__(self, ctx: Context, inputs: Inputs) -> None:
        self.ctx, self.inputs = ctx, free_inputs(inputs)
        super().__init__(list(tensors_of_inputs(self.inputs)), partial(refuse_out_of_time, ctx))
        self.jumps = Discontinuities(self._known, "no Lipschitz constant")
        self._params = {name: value.detach() for name, value in ctx.params.items()}
        self._layers = {id(self._params[layer.weight]): layer.name for layer in ctx.network if layer.uses == 1}

    def run(self, rule: OperationRule) -> Tensor:
        """Outputs of the network with this rule, or one that calls it; the input moves them by a rule."""
        with torch.enable_grad():  # what has a gradient and is not known comes from what was not seen
            outputs = self.ctx.problem.forward(self.inputs, self._params, rules=[rule])
        self.jumps.refuse_outputs(outputs)
        if not self.knows(outputs):
            raise NotApplicable(
                "distances begin at inputs of real numbers; this network reads whole numbers, such as words"
            )
        return outputs

    def follow(self, op: Operation) -> Any:
        """Run one operation and bound what it does."""
        if self.jumps.answers(op):
            return self.jumps.follow(op)
        signals = [tensor for tensor in op.tensors if self.knows(tensor)]
        rectifies = self.jumps.rectifies(op)
        result, meaning = op.run(), TABLE.get(op.name)
        self.jumps.note(op, result)
        outcomes = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        written = op.name == "setitem" or op.in_place or op.kwargs.get("inplace") is True or "out" in op.kwargs
        if (not outcomes and not written) or (meaning is not None and meaning.creates and not written):
            return result
        if meaning is None or (written and not meaning.writes_safely):
            self.refuse(op)
        stretch = entrywise if rectifies else meaning.stretch
        if stretch is not None:
            constant = stretch(self, op, signals, result)
        elif meaning.slope is not None and len(signals) == 1:
            constant = self.log_constant(signals[0]) + math.log(meaning.slope)
        else:
            self.refuse(op)
        if written:  # views of what was written to are written to as well
            self._note_written(outcomes, constant)
            for tensor in outcomes:
                self.jumps.wrote(op, tensor)
        for tensor in outcomes:
            self._known[tensor] = constant
        return result

    def _note_written(self, outcomes: list[Tensor], constant: float) -> None:
        """Constants of the tensors that share memory with what was written to.

        Of a part with at least the constant of the whole, what the operation adds to it is all that the whole gains.
        Of a part that was made smaller before, the whole is made of what is left beside it and of the new part.
        """
        memory = {tensor.untyped_storage().data_ptr() for tensor in outcomes}
        part = max((self._known[tensor] for tensor in outcomes if tensor in self._known), default=-math.inf)
        for tensor, whole in self._known.items():
            if tensor.untyped_storage().data_ptr() in memory:
                larger, smaller = max(whole, constant), min(whole, constant)
                beside = math.log1p(math.exp(2 * (smaller - larger))) / 2 if part < whole and larger > -math.inf else 0
                self._known[tensor] = larger + beside

    def layer_norm(self, op: Operation, weight: Tensor) -> float:
        """Spectral norm of a layer, known already unless its weight is used in several places or computed."""
        name = self._layers.get(id(weight))
        if name is not None:
            return self.ctx.cached(layer_norms)[name]
        if op.name == "linear":
            return matrix_norm(weight, self.check)
        given = {**op.layer_arguments(), "bias": None}
        x, _ = given.pop("input"), given.pop("weight")
        shape = tuple(x.shape[x.ndim - weight.ndim + 1 :])
        fixed = weight.detach()
        return operator_norm(lambda v: op.function(v, weight=fixed.to(v.dtype), **given), shape, x.device, self.check)


_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], ...]] = {
    "conv": (functional.conv1d, functional.conv2d, functional.conv3d),
    "transposed": (functional.conv_transpose1d, functional.conv_transpose2d, functional.conv_transpose3d),
}


def weight_as_matrix(ctx: Context, layer: Layer) -> Tensor:
    """The weight as a matrix (outputs, incoming weights of each), float64; of a group only what it reads."""
    weight = ctx.params[layer.weight].detach().double()
    if layer.input_first:  # (in, out / groups, taps)
        grouped = weight.reshape(layer.groups, -1, *weight.shape[1:])
        weight = grouped.transpose(1, 2).flatten(0, 1)
    return weight.flatten(1)


def layer_norms(ctx: Context) -> dict[str, float]:
    """Spectral norm of every layer as a linear map, by layer name; of a convolution the largest over its input sizes.

    A larger input has no smaller norm: zeros around a smaller one change nothing.
    """
    uses: dict[str, list[LayerUse[Slot]]] = {}
    for inputs in kinds_of_samples(ctx, everything=False):
        for use in ctx.problem.program_of(inputs).layer_uses():
            uses.setdefault(use.weight, []).append(use)
    return {layer.name: _layer_norm(ctx, layer, uses.get(layer.weight, [])) for layer in ctx.network}


def _layer_norm(ctx: Context, layer: Layer, recorded: list[LayerUse[Slot]]) -> float:
    weight, check = ctx.params[layer.weight].detach().double(), partial(refuse_out_of_time, ctx)
    if layer.kind in ("dense", "lookup"):
        return matrix_norm(weight, check)
    if math.prod(weight.shape[2:]) == 1 and layer.kind == "conv":  # positions do not mix
        return matrix_norm(weight.reshape(layer.groups, -1, weight.shape[1]), check)
    sizes = [(use.input.shape[len(use.input.shape) - weight.ndim + 1 :], use.settings) for use in recorded]
    uses = sizes or [(layer.input_shape, layer.settings)]
    largest = [use for use in uses if not any(_has_larger_input(other, use) for other in uses)]
    return max(_norm_at(layer, weight, *use, check) for use in {str(use): use for use in largest}.values())


def _has_larger_input(other: tuple[tuple[int, ...], Any], use: tuple[tuple[int, ...], Any]) -> bool:
    """True if another use of the same layer is on a larger input."""
    larger = all(more >= size for more, size in zip(other[0], use[0], strict=True))
    return larger and other[0] != use[0] and other[1] == use[1]


def _norm_at(layer: Layer, weight: Tensor, shape: tuple[int, ...], settings: Mapping[str, Any], check: Check) -> float:
    function, weights = _FUNCTIONS[layer.kind][weight.ndim - 3], {torch.float64: weight, torch.float32: weight.float()}

    def apply(x: Tensor) -> Tensor:
        return function(x, weights[x.dtype], None, **settings)

    return operator_norm(apply, shape, weight.device, check)
