"""Norms of the weights, layer by layer and over the network."""

from __future__ import annotations

import math

from flatscope.context import Context
from flatscope.params import count
from flatscope.registry import SYMMETRIES, Value, measure


@measure(
    symbol=r"\dim(w)",
    paper="neyshabur2017",
    equation="Section 2.1, eq (1)",
    direction="none",
    invariant_under=SYMMETRIES,
    passes={},
    conventions="trainable scalars; a shared tensor counts once, BatchNorm's own parameters count",
)
def parameter_count(ctx: Context) -> float:
    """Number of trainable parameters."""
    return float(count(ctx.trainable.values()))


@measure(
    symbol=r"\prod_i \|W_i\|_F",
    paper="neyshabur2017",
    equation="Section 2.2",
    direction="lower",
    invariant_under={"layer_scaling", "permutation"},
    passes={},
    on_folded=True,
    conventions="weights only, no biases; the product of the norms, not of their squares",
)
def l2_norm(ctx: Context) -> dict[str, float | Value]:
    """Product over layers of the Frobenius norms of the weights; per layer, the norm itself.

    On a branching network a product over layers says nothing about the function: only the layers get a value.
    """
    norms = {layer.name: float(ctx.params[layer.weight].double().norm()) for layer in ctx.network}
    return with_product(ctx, norms)


def with_product(ctx: Context, per_layer: dict[str, float]) -> dict[str, float | Value]:
    """The product over layers (where layers form a chain) in front of the values of the layers."""
    if not per_layer:
        return {"": Value(math.nan, exact=False, reason="the network has no dense or convolutional layer")}
    if ctx.network.chain:
        return {"": math.prod(per_layer.values()), **per_layer}
    reason = "a product over layers has no meaning on a branching network; see the layers"
    return {"": Value(math.nan, exact=False, reason=reason), **per_layer}
