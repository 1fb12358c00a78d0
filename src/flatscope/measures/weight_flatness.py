"""Flatness in weight space: the gradient and the Hessian of the training loss as they are."""

from __future__ import annotations

from functools import partial

from flatscope.context import Context
from flatscope.curvature.both_ends import BothEnds
from flatscope.curvature.layer_blocks import layer_blocks
from flatscope.curvature.operators import Hessian
from flatscope.curvature.spectrum import Eigenpair, extreme_eigenpair
from flatscope.measures.layer_values import layer_values, measured_layers, trace_of_everything
from flatscope.params import norm
from flatscope.registry import Value, measure
from flatscope.stopping import out_of_time


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
def hessian_trace(ctx: Context, *, precision: float | None = None, most_products: int = 1024) -> Value:
    """Trace of the Hessian of the training loss over all trainable parameters.

    From all columns of the sweep on piecewise-linear networks, and exact then, or from random ones where that costs
    less. The trace over parameters whose block is not Gauss-Newton comes from Hessian products, the same that give the
    layers' traces, and is added.

    Args:
        ctx: the network.
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return trace_of_everything(ctx, precision, most_products)


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
def layer_trace(ctx: Context, *, precision: float | None = None, most_products: int = 1024) -> dict[str, Value]:
    """Trace of the Hessian with respect to each layer's weights.

    Args:
        ctx: the network.
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return layer_values(ctx, "trace", precision, most_products)


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
    return BothEnds(Hessian(ctx), ctx.generator("hessian eigenvalues"), partial(out_of_time, ctx))


def as_value(pair: Eigenpair, tolerance: float, relative_to: str = "relative") -> Value:
    """An eigenvalue as a table entry; the residual bounds its error."""
    if not pair.converged:
        return Value(pair.value, exact=False, reason=f"eigensolver stopped with residual {pair.residual:.2g}")
    low, high = pair.value - pair.residual, pair.value + pair.residual
    remark = f"to {tolerance:.0e} {relative_to}" if pair.residual else ""
    return Value(pair.value, low=low, high=high, reason=remark)


def top_eigenpairs(ctx: Context, tolerance: float) -> dict[str, Eigenpair]:
    """Top eigenpair of every layer's Hessian block."""
    blocks = ctx.sweep(layer_blocks)
    generator = ctx.generator("layer eigenvalues")
    names = {layer.weight: layer.name for layer in measured_layers(ctx)}
    return {names[weight]: extreme_eigenpair(block, generator, tolerance=tolerance) for weight, block in blocks.items()}
