"""Norms of the weights, layer by layer and as products over the network."""

from __future__ import annotations

import math
from functools import partial
from typing import Literal

import torch

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.measures.lipschitz import layer_norms, lipschitz_l2, weight_as_matrix
from flatscope.measures.margins import declare_in_forms, value_from_logarithm
from flatscope.network.singular_values import matrix_norm
from flatscope.network.stretch_rules import safe_log
from flatscope.params import count_scalars
from flatscope.registry import LAYER_SYMMETRIES, SYMMETRIES, Value, measure
from flatscope.sampling import refuse_out_of_time

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

Count = Literal["count", "vc_dimension"]


@measure(
    symbol=r"\dim(w)",
    paper="neyshabur2017",
    equation="Section 2.1, eq (1)",
    invariant_under=set(SYMMETRIES),
    passes={},
    caption="trainable parameters",
    conventions="trainable scalars; a shared tensor counts once, BatchNorm's own parameters count",
)
def parameter_count(ctx: Context, *, form: Count = "count", with_log: bool = False) -> float:
    r"""Number of trainable parameters.

    Args:
        form: "count"; "vc_dimension": the order of the VC dimension of networks of this architecture, the number of
            weight matrices times that of parameters, :math:`d \cdot \dim(w)`; what the paper's O hides is left out.
        with_log: whether the VC dimension has the binary logarithm of the number of parameters, which the paper's
            bound hides.
    """
    n = count_scalars(ctx.trainable.values())
    if form == "count":
        return float(n)
    # Weights that are computed are layers too; parameters are counted as they are trained.
    network = ctx.network if ctx.problem.plain is ctx.problem else Context(ctx.problem.plain).network
    if network.missing:
        raise NotApplicable(network.missing)
    return float(len(network.layers) * n) * (math.log2(n) if with_log else 1.0)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_F", conventions="weights only, no biases; the product of the norms, not of their squares"
)
@declare_in_forms(r"\gamma^{-2} \prod_i 4 \|W_i\|_F^2", with_4d=True, chain=True)
def l2_norm(ctx: Context, *, log: bool = False) -> dict[str, Value]:
    """Product over layers of the Frobenius norms of the weights; per layer, the norm itself.

    On a branching network a product over layers says nothing about the function: only the layers get a value. Where
    layers are rescaled the product stands still and the values of the layers move, here and in the other norms.

    Args:
        log: give the natural logarithm instead.
    """
    return _group_norms(ctx, 2.0, 2.0, log)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_2",
    cost="sweep",
    conventions="weights only, no biases; a convolution as the linear map on the largest input that it receives; "
    "padding other than zeros comes before it and is not part of it",
)
# Printed without the factor 4 per layer, with which alone it bounds the capacity of the Frobenius norm.
@declare_in_forms(
    r"\gamma^{-2} \prod_i h_i \|W_i\|_2^2",
    with_4d=False,
    widths=True,
    chain=True,
    more={
        "lipschitz_l2": (
            lipschitz_l2,
            "an upper bound on how far the outputs move per distance that the input moves, both in ℓ2, at which norms "
            "multiply along a chain, add up where branches are added, and add up as squares where they are put side by "
            "side; pooling and sums count with their own constants, so that on a plain chain of layers it is the norm",
        )
    },
)
def spectral_norm(ctx: Context, *, reshape: bool = False, log: bool = False) -> dict[str, Value]:
    """Product over layers of the spectral norms of the weights; per layer, the norm itself.

    Args:
        reshape: take a convolution as the matrix (output channels, incoming weights). It is smaller, and no bound on
            how far the layer can stretch its input.
        log: give the natural logarithm instead.
    """
    if reshape:
        check = partial(refuse_out_of_time, ctx)
        return values_with_product(
            ctx, {layer.name: matrix_norm(weight_as_matrix(ctx, layer), check) for layer in ctx.network}, log
        )
    return values_with_product(ctx, ctx.cached(layer_norms), log)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_{1,\infty}",
    conventions="weights only, no biases; the largest ℓ1 norm of the incoming weights of a unit",
)
@declare_in_forms(r"\gamma^{-2} \prod_i \|W_i\|_{1,\infty}^2", with_4d=False, chain=True)
def l1_inf_norm(ctx: Context, *, log: bool = False) -> dict[str, Value]:
    """Product over layers of the largest ℓ1 norm of a unit's incoming weights; per layer, the norm itself.

    Args:
        log: give the natural logarithm instead.
    """
    return _group_norms(ctx, 1.0, math.inf, log)


@layer_norm(
    symbol=r"\prod_i \|W_i\|_{p,q}",
    conventions="weights only, no biases; ℓ_p over the incoming weights of a unit, then ℓ_q over units",
)
@declare_in_forms(r"\gamma^{-2} \prod_i \|W_i\|_{p,q}^2", with_4d=False, chain=True)
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
    return _group_norms(ctx, p, q, log)


def _group_norms(ctx: Context, p: float, q: float, log: bool) -> dict[str, Value]:
    return values_with_product(
        ctx, {layer.name: float(weight_as_matrix(ctx, layer).norm(p, dim=1).norm(q)) for layer in ctx.network}, log
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
    return {layer.name: weight_as_matrix(ctx, layer).abs().sum(1).cpu() for layer in ctx.network}


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


def values_with_product(ctx: Context, per_layer: dict[str, float], log: bool) -> dict[str, Value]:
    """The product over layers (where layers form a chain) in front of the values of the layers."""
    layers = {name: value_from_logarithm(safe_log(value), log) for name, value in per_layer.items()}
    refusal = ctx.network.missing or ("" if ctx.network.chain else _BRANCHING)
    if refusal:
        return {"": Value(math.nan, exact=False, reason=refusal), **layers}
    # A sum of logarithms neither overflows nor vanishes.
    return {"": value_from_logarithm(math.fsum(safe_log(value) for value in per_layer.values()), log), **layers}
