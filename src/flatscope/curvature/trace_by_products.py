"""The sweep's quantities from products, for parameters whose block the columns do not give.

One product with random signs serves all layers and units: ζ_b bᵀ(HEζ) has mean bᵀHb.
"""

from __future__ import annotations

from flatscope.context import Context
from flatscope.curvature.coarse_search import has_coarse_products
from flatscope.curvature.columns import swept
from flatscope.curvature.estimators import Asked, DiagonalQuantities, DiagonalSums, diagonal_sums
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.operators import curvature_operator, sample_groups
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import multiplied_out
from flatscope.limits import STANDARD
from flatscope.sampling import time_limit

IN_TF32 = "random products are in TF32; what they differ from products in full is part of the standard errors"


def probed(
    ctx: Context, quantity: str, precision: float | None = None, most_products: int = STANDARD.most_products
) -> DiagonalSums:
    """A quantity of everything that the columns leave out, by (parameter, quantity) as in `Curvature.means`.

    Args:
        ctx: the network; cached there, so ask through `ctx.cached(probed, …)`.
        quantity: "trace", "rho", "rho_rows" or "relative_flatness".
        precision: largest relative standard error of a value of the network or a layer; the context's by default, 0
            for one product per direction.
        most_products: give up after so many.
    """
    wanted = ctx.effort.precision if precision is None else precision
    covered = swept(ctx, precision, rows=quantity == "rho_rows")
    directions = LayerDirections(ctx, quantity, covered.not_covered)
    known = {key: (float(mean.value), float(mean.stderr)) for key, mean in covered.means.items() if not key[0]}
    limits, size = ctx.effort.limits, directions.matrix.size
    one_by_one = multiplied_out(ctx, covered.not_covered, size, wanted)
    if one_by_one and most_products >= limits.most_products:
        most_products = max(most_products, size)  # a limit that nobody has lowered is one of draws
    asked = Asked(wanted, most_products, known, time_limit(ctx), size if one_by_one else 0, has_coarse_products(ctx))
    found = diagonal_sums(directions, Signs(ctx.seed, f"products for {quantity}"), asked, limits)
    if found.coarse:
        ctx.remark(IN_TF32)
    return found


def whole_trace(ctx: Context, precision: float, most_products: int) -> DiagonalSums:
    """The trace over all trainable parameters from products of the whole matrix.

    Args:
        ctx: the network; cached there, so ask through `ctx.cached(whole_trace, …)`.
        precision: largest relative standard error.
        most_products: give up after so many.
    """
    operator = curvature_operator(ctx, None, sample_groups(ctx))
    asked = Asked(precision, most_products, late=time_limit(ctx), few=0, coarse=has_coarse_products(ctx))
    signs = Signs(ctx.seed, "products for the whole trace")
    found = diagonal_sums(DiagonalQuantities(operator), signs, asked, ctx.effort.limits)
    if found.coarse:
        ctx.remark(IN_TF32)
    return found
