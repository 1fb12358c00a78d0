"""Flatness in weight space: the gradient and the Hessian of the training loss as they are."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.both_ends import BothEnds
from flatscope.curvature.estimators import trace
from flatscope.curvature.layer_blocks import layer_blocks
from flatscope.curvature.operators import Hessian
from flatscope.curvature.products import Directions, by_products, trace_directions
from flatscope.curvature.spectrum import Eigenpair, extreme_eigenpair
from flatscope.curvature.sums import LayerSums, Mean
from flatscope.curvature.sweep import exact_sweep
from flatscope.network.layers import Layer
from flatscope.params import norm
from flatscope.registry import Value, measure

MOST_REASONS = 3


@measure(
    symbol=r"\|\nabla \hat L(w)\|_2",
    paper="yi2019",
    equation="Section 2.1",
    direction="none",
    invariant_under={"permutation"},
    cost="light",
    passes={"forward": 1, "backward": 1},
    headline="slope of the loss; 0 at a minimum",
    falls_with_loss=True,
    conventions="all trainable parameters, biases included; mean over samples",
)
def gradient_norm(ctx: Context) -> float:
    r"""Euclidean norm of the gradient of the training loss: is this a minimum at all?

    .. math:: \| \tfrac1n \sum_i \nabla_w \ell(f_w(x_i), y_i) \|_2

    Curvature says how flat a minimum is only where this is close to zero.
    """
    return norm(ctx.gradient())


@measure(
    symbol=r"\operatorname{tr} \nabla^2 \hat L(w)",
    paper="yi2019",
    equation="Definition 2.1",
    direction="lower",
    invariant_under={"permutation"},
    cost="sweep",
    headline="curvature, all directions summed",
    falls_with_loss=True,
    conventions="all trainable parameters, BatchNorm's included; mean over samples; not divided by their number",
)
def hessian_trace(ctx: Context, *, accuracy: float = 0.01, most_products: int = 1024) -> Value:
    """Trace of the Hessian of the training loss over all trainable parameters.

    Exact on piecewise-linear networks. The trace over parameters whose block is not Gauss-Newton comes from Hessian
    products and is added: one for every direction, and exact, up to 1,024 of them; an estimate beyond.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where it must be estimated.
        most_products: give up after so many Hessian products.
    """
    swept = ctx.sweep(exact_sweep)
    known = float(swept.total.value) if swept.total.n else 0.0
    data_stderr = float(swept.total.stderr) if swept.total.n else None
    if not swept.curved:
        return Value(known, data_stderr=data_stderr)
    found = trace(
        Hessian(ctx, swept.curved),
        ctx.generator("hessian_trace"),
        accuracy=accuracy,
        most_products=most_products,
        offset=known,
    )
    ways = f"products, one for each of {found.products:,} directions" if found.exact else "products"
    tensors = "1 parameter tensor" if len(swept.curved) == 1 else f"{len(swept.curved)} parameter tensors"
    reason = f"{tensors} by {ways}: {next(iter(swept.curved.values()))}"
    if not found.converged:
        reason += f"; asked for {accuracy:.2g} relative, not reached in {found.products} products"
    return Value(known + found.value, stderr=found.stderr, exact=found.exact, reason=reason)


@measure(
    symbol=r"\operatorname{Tr} H_l",
    paper="petzka2019",
    equation="Figure 2",
    per="layer",
    direction="lower",
    invariant_under={"permutation"},
    cost="sweep",
    falls_with_loss=True,
    conventions="the layer's weight without its bias; un-normalised trace",
)
def layer_trace(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> dict[str, Value]:
    """Trace of the Hessian with respect to each layer's weights.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    return ctx.sweep(layer_traces, accuracy=accuracy, most_products=most_products)


@measure(
    symbol=r"\lambda_{\max}(H_l)",
    paper="petzka2019",
    equation="Figure 2",
    per="layer",
    direction="lower",
    invariant_under={"permutation"},
    cost="sweep",
    falls_with_loss=True,
    conventions="algebraically largest eigenvalue; the layer's weight without its bias",
)
def layer_max_eigenvalue(ctx: Context, *, tolerance: float = 1e-6) -> dict[str, Value]:
    """Largest eigenvalue of the Hessian with respect to each layer's weights.

    Args:
        ctx: the network.
        tolerance: relative accuracy of the eigensolver.
    """
    return {layer: as_value(pair, tolerance) for layer, pair in ctx.sweep(top_eigenpairs, tolerance=tolerance).items()}


@measure(
    symbol=r"\lambda_{\max}(\nabla^2 \hat L)",
    paper="yi2019",
    equation="Section 5",
    direction="lower",
    invariant_under={"permutation"},
    cost="sweep",
    headline="curvature, sharpest direction",
    falls_with_loss=True,
    conventions="all trainable parameters, cross-layer blocks included: the true Hessian, not Gauss-Newton",
)
def hessian_max_eigenvalue(ctx: Context, *, tolerance: float = 1e-4) -> Value:
    """Largest eigenvalue of the Hessian of the training loss.

    Args:
        ctx: the network.
        tolerance: relative accuracy of the eigensolver.
    """
    return as_value(ctx.sweep(whole_spectrum).largest(tolerance), tolerance)


@measure(
    symbol=r"\lambda_{\min}(\nabla^2 \hat L)",
    paper="yi2019",
    equation="Section 5",
    direction="none",
    invariant_under={"permutation"},
    cost="sweep",
    falls_with_loss=True,
    conventions="all trainable parameters; negative at a saddle point or away from a minimum",
)
def hessian_min_eigenvalue(ctx: Context, *, tolerance: float = 1e-3) -> Value:
    """Smallest (most negative) eigenvalue of the Hessian of the training loss.

    Args:
        ctx: the network.
        tolerance: accuracy of the eigensolver, relative to the width of the spectrum.
    """
    return as_value(ctx.sweep(whole_spectrum).smallest(tolerance), tolerance, "of the spectrum's width")


def whole_spectrum(ctx: Context) -> BothEnds:
    """Both ends of the spectrum of the whole Hessian, found with the same products."""
    return BothEnds(Hessian(ctx), ctx.generator("hessian eigenvalues"), ctx.effort.deadline)


def as_value(pair: Eigenpair, tolerance: float, relative_to: str = "relative") -> Value:
    """An eigenvalue as a table entry; the residual bounds its error."""
    if not pair.converged:
        return Value(pair.value, exact=False, reason=f"eigensolver stopped with residual {pair.residual:.2g}")
    low, high = pair.value - pair.residual, pair.value + pair.residual
    remark = f"to {tolerance:.0e} {relative_to}" if pair.residual else ""
    return Value(pair.value, low=low, high=high, reason=remark)


def measured_layers(ctx: Context) -> tuple[Layer, ...]:
    """The layers whose weights may move, in forward order."""
    return tuple(layer for layer in ctx.network if layer.weight in ctx.problem.trainable)


def exact_or_products(
    ctx: Context,
    swept_sums: Callable[[LayerSums], Mean],
    directions: Callable[[Tensor, Layer], Directions],
    *,
    accuracy: float = 0.02,
    most_products: int = 1024,
    rows: bool = False,
) -> dict[str, Value]:
    """A quantity of every layer's Hessian block: from the exact sweep where it applies, from products elsewhere.

    Args:
        ctx: the network.
        swept_sums: reads the quantity from the sweep.
        directions: those that the quantity sums over, for products.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
        rows: whether the sweep must go along rows as well.
    """
    swept = ctx.sweep(exact_sweep, rows=True) if rows else ctx.sweep(exact_sweep)
    layers = measured_layers(ctx)
    curved = tuple(layer for layer in layers if layer.weight in swept.curved)
    estimates = by_products(ctx, curved, directions, accuracy, most_products) if curved else {}
    result = {}
    for layer in layers:
        if layer.name in estimates:
            found, reason = estimates[layer.name], swept.curved[layer.weight]
            result[layer.name] = Value(found.value, float(found.stderr.max()), exact=found.exact, reason=reason)
        elif layer.weight in swept.layers:
            sums = swept_sums(swept.layers[layer.weight])
            result[layer.name] = Value(sums.value, data_stderr=sums.stderr)
        else:
            units = directions(ctx.params[layer.weight], layer).units
            result[layer.name] = Value(torch.zeros(units), reason="its output does not reach the network's")
    return result


def one_number_each(values: dict[str, Value]) -> dict[str, Value]:
    """Values that are tensors of one entry as numbers."""
    return {
        name: replace(
            value,
            value=float(value.value),
            data_stderr=None if value.data_stderr is None else float(value.data_stderr),
        )
        for name, value in values.items()
    }


def layer_traces(ctx: Context, accuracy: float, most_products: int) -> dict[str, Value]:
    """Trace of every layer's Hessian block, computed once for all measures that are made of it."""
    return one_number_each(
        exact_or_products(
            ctx, lambda sums: sums.trace, trace_directions, accuracy=accuracy, most_products=most_products
        )
    )


def top_eigenpairs(ctx: Context, tolerance: float) -> dict[str, Eigenpair]:
    """Top eigenpair of every layer's Hessian block."""
    blocks = ctx.sweep(layer_blocks)
    generator = ctx.generator("layer eigenvalues")
    names = {layer.weight: layer.name for layer in measured_layers(ctx)}
    return {names[weight]: extreme_eigenpair(block, generator, tolerance=tolerance) for weight, block in blocks.items()}


def combined(values: dict[str, Value], how: str) -> Value:
    """Sum or maximum over layers; the error of a sum adds up as if the layers' errors were independent."""
    exact, reason = all_exact(values), shared_reason(values)
    if how == "max":
        top = max(values.values(), key=lambda v: float(v.value))
        return Value(float(top.value), top.stderr, data_stderr=top.data_stderr, exact=exact, reason=reason)
    stderr = math.sqrt(sum(value.stderr**2 for value in values.values()))
    return Value(sum(float(value.value) for value in values.values()), stderr, exact=exact, reason=reason)


def shared_reason(values: dict[str, Value]) -> str:
    """The remarks of the layers as one: each once, and where not all layers have it, how many do."""
    counted = Counter(value.reason for value in values.values() if value.reason)
    parts = [
        reason if count == len(values) else f"{count} of {len(values)} layers: {reason}"
        for reason, count in counted.most_common(MOST_REASONS)
    ]
    return "; ".join([*parts, *(["…"] if len(counted) > MOST_REASONS else [])])


def all_exact(values: dict[str, Value]) -> bool:
    """Whether no layer was estimated."""
    return all(value.exact is not False for value in values.values())
