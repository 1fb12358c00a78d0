"""Norms of the weights, layer by layer and as products over the network."""

from __future__ import annotations

import math
from functools import partial

import torch

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.measures.lipschitz import layer_norms, rows_of
from flatscope.measures.margins import declare_with_margin, from_log
from flatscope.network.singular_values import matrix_norm
from flatscope.network.stretch_rules import safe_log
from flatscope.params import count
from flatscope.registry import LAYER_SYMMETRIES, SYMMETRIES, Value, measure
from flatscope.sampling import end_in_time

layer_norm = partial(
    measure,
    paper="neyshabur2017",
    equation="Section 2.2",
    direction="lower",
    invariant_under=LAYER_SYMMETRIES,
    passes={},
    on_folded=True,
)
_BRANCHING = "a product over layers has no meaning on a branching network; see the layers"

_counted = partial(
    measure, paper="neyshabur2017", equation="Section 2.1, eq (1)", invariant_under=set(SYMMETRIES), passes={}
)


@_counted(
    symbol=r"\dim(w)",
    caption="trainable parameters",
    conventions="trainable scalars; a shared tensor counts once, BatchNorm's own parameters count",
)
def parameter_count(ctx: Context) -> float:
    """Number of trainable parameters."""
    return float(count(ctx.trainable.values()))


@_counted(
    symbol=r"d \cdot \dim(w)",
    conventions="d = number of weight matrices, dim(w) = `parameter_count`; what the paper's O hides is left out",
)
def vc_dimension(ctx: Context, *, with_log: bool = False) -> float:
    """Order of the VC dimension of networks of this architecture: depth times number of parameters.

    Args:
        with_log: times the binary logarithm of the number of parameters, which the paper's bound hides.
    """
    # Weights that are computed are layers too; parameters are counted as they are trained.
    network = ctx.network if ctx.problem.plain is ctx.problem else Context(ctx.problem.plain).network
    if network.missing:
        raise NotApplicable(network.missing)
    n = count(ctx.trainable.values())
    return float(len(network.layers) * n) * (math.log2(n) if with_log else 1.0)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_F", conventions="weights only, no biases; the product of the norms, not of their squares"
)
def l2_norm(ctx: Context, *, log: bool = False) -> dict[str, Value]:
    """Product over layers of the Frobenius norms of the weights; per layer, the norm itself.

    On a branching network a product over layers says nothing about the function: only the layers get a value. Where
    layers are rescaled the product stands still and the values of the layers move, here and in the other norms.

    Args:
        log: give the natural logarithm instead.
    """
    return group_norm(ctx, p=2.0, q=2.0, log=log)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_2",
    cost="sweep",
    conventions="weights only, no biases; a convolution as the linear map on the largest input that it receives; "
    "padding other than zeros comes before it and is not part of it",
)
def spectral_norm(ctx: Context, *, reshape: bool = False, log: bool = False) -> dict[str, Value]:
    """Product over layers of the spectral norms of the weights; per layer, the norm itself.

    Args:
        reshape: take a convolution as the matrix (output channels, incoming weights). It is smaller, and no bound on
            how far the layer can stretch its input.
        log: give the natural logarithm instead.
    """
    if reshape:
        check = partial(end_in_time, ctx)
        return with_product(ctx, {layer.name: matrix_norm(rows_of(ctx, layer), check) for layer in ctx.network}, log)
    return with_product(ctx, ctx.cached(layer_norms), log)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_{1,\infty}",
    conventions="weights only, no biases; the largest ℓ1 norm of the incoming weights of a unit",
)
def l1_inf_norm(ctx: Context, *, log: bool = False) -> dict[str, Value]:
    """Product over layers of the largest ℓ1 norm of a unit's incoming weights; per layer, the norm itself.

    Args:
        log: give the natural logarithm instead.
    """
    return group_norm(ctx, p=1.0, q=math.inf, log=log)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_{p,q}",
    conventions="weights only, no biases; ℓ_p over the incoming weights of a unit, then ℓ_q over units",
)
def group_norm(ctx: Context, *, p: float = 3.0, q: float = 1.5, log: bool = False) -> dict[str, Value]:
    """Product over layers of the ℓ_{p,q} norms of the weights; per layer, the norm itself.

    p = q = 2 is the Frobenius norm, p = 1 and q = inf the largest ℓ1 norm of a unit's incoming weights.

    Args:
        p: order of the norm over the incoming weights of a unit, at least 1; inf for their largest.
        q: order of the norm over the units of a layer, at least 1; inf for the largest.
        log: give the natural logarithm instead.
    """
    for name, value in (("p", p), ("q", q)):
        if not value >= 1:
            raise InputError("an order of at least 1", str(value), where=f"group norm, {name}")
    return with_product(
        ctx, {layer.name: float(rows_of(ctx, layer).norm(p, dim=1).norm(q)) for layer in ctx.network}, log
    )


@measure(
    symbol=r"\|w_{\mathrm{in}}\|_1",
    paper="zhang2017",
    equation="Figure 16",
    per="unit",
    direction="lower",
    invariant_under={"permutation"},
    passes={},
    on_folded=True,
    conventions="an output unit is an output feature or channel; weights only, no biases",
)
def fan_in_l1(ctx: Context) -> dict[str, torch.Tensor]:
    """ℓ1 norm of the incoming weights of each output unit."""
    return {layer.name: rows_of(ctx, layer).abs().sum(1).cpu() for layer in ctx.network}


@measure(
    symbol=r"\|w - w_0\|_2",
    paper="flatscope",
    equation="distance travelled in training",
    direction="lower",
    needs={"initial"},
    passes={},
    conventions="all trainable parameters; per layer its weight alone; from the weights as they were given",
)
def distance_from_initialization(ctx: Context) -> dict[str, float]:
    """Euclidean distance of the weights from those that training started from; per layer, that of its weight."""
    initial = ctx.problem.initial
    assert initial is not None  # refused beforehand where it is missing
    squares = {
        name: float((value.double() - initial[name].double()).square().sum()) for name, value in ctx.trainable.items()
    }
    layers = {layer.name: layer.weight for layer in ctx.network if layer.weight in squares}
    return {"": math.sqrt(sum(squares.values()))} | {name: math.sqrt(squares[w]) for name, w in layers.items()}


def with_product(ctx: Context, per_layer: dict[str, float], log: bool) -> dict[str, Value]:
    """The product over layers (where layers form a chain) in front of the values of the layers."""
    layers = {name: from_log(safe_log(value), log) for name, value in per_layer.items()}
    refusal = ctx.network.missing or ("" if ctx.network.chain else _BRANCHING)
    if refusal:
        return {"": Value(math.nan, exact=False, reason=refusal), **layers}
    # A sum of logarithms neither overflows nor vanishes.
    return {"": from_log(math.fsum(safe_log(value) for value in per_layer.values()), log), **layers}


declare_with_margin(l2_norm, r"\gamma^{-2} \prod_i 4 \|W_i\|_F^2", with_4d=True, chain=True)
declare_with_margin(
    spectral_norm,
    # Printed without the factor 4 per layer, with which alone it bounds the capacity of the Frobenius norm.
    r"\gamma^{-2} \prod_i h_i \|W_i\|_2^2",
    with_4d=False,
    widths=True,
    chain=True,
    caption="spectral norms over margin, squared",
)
declare_with_margin(l1_inf_norm, r"\gamma^{-2} \prod_i \|W_i\|_{1,\infty}^2", with_4d=False, chain=True)
declare_with_margin(group_norm, r"\gamma^{-2} \prod_i \|W_i\|_{p,q}^2", with_4d=False, chain=True)
