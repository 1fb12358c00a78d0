"""Which layers of a smooth network products give with less work than random columns.

The columns at curved operations far behind a layer nearly cancel there, and leave noise; products have none of it. For
the last layers of a network it is the other way round.
"""

from __future__ import annotations

from flatscope.context import Context
from flatscope.curvature.estimators import ProductDraws, relative_error
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.signs import Signs
from flatscope.curvature.sums import Curvature
from flatscope.stopping import FIRST_LOOK

SOON = 16  # a layer that is precise after so many draws stays with the columns
DRAW = 1.0  # what a draw of columns costs, in products: about two, but it serves more than one quantity
REASON = "random columns have more noise there than products"


def better_by_products(ctx: Context, found: Curvature, wanted: float) -> dict[str, str]:
    """{parameter: reason} for those that are to be left to products.

    Args:
        ctx: the network.
        found: a first look by random columns.
        wanted: relative standard error that every layer's trace is to reach.
    """
    means = {layer: mean for layer in ctx.network if (mean := found.of(layer.weight, "trace")) is not None}
    errors = {layer: relative_error(mean.value, mean.stderr) for layer, mean in means.items()}
    slow = [layer for layer, error in errors.items() if found.draws * (error / wanted) ** 2 > SOON]
    if not slow:
        return {}
    operator = LayerDirections(ctx, "trace", [layer.weight for layer in slow])
    products = ProductDraws(operator, Signs(ctx.seed, "noise of products"), 1, bool)
    taken = products.take(max(2, -(-FIRST_LOOK // operator.groups)))
    moved: list[str | None] = []
    for layer in slow:
        by_columns = float(means[layer].stderr) ** 2 * found.draws
        by_products = float(products.spread.stderrs[layer.weight, "trace"]) ** 2 * taken
        if by_products < DRAW * by_columns:
            moved += [layer.weight, layer.bias]
    return {name: REASON for name in moved if name in ctx.problem.trainable}
