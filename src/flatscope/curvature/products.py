"""The sweep's quantities from products, for parameters whose block the columns do not give.

One product with random signs serves all layers and units: ζ_b bᵀ(HEζ) has mean bᵀHb.
"""

from __future__ import annotations

from flatscope.context import Context
from flatscope.curvature.estimators import FEW, DiagonalSums, diagonal_sums
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.signs import Signs
from flatscope.curvature.sweep import swept
from flatscope.params import count
from flatscope.stopping import time_limit

CHEAP = 2_000_000  # samples times parameters: of so few hundreds of products take a second


def probed(ctx: Context, quantity: str, precision: float | None = None, most_products: int = 1024) -> DiagonalSums:
    """A quantity of everything that the columns leave out, by (parameter, quantity) as in `Curvature.means`.

    Args:
        ctx: the network; cached there, so ask through `ctx.sweep(probed, …)`.
        quantity: "trace", "rho", "rho_rows" or "relative_flatness".
        precision: largest relative standard error of a value of the network or a layer; the context's by default, 0
            for one product per direction.
        most_products: give up after so many.
    """
    wanted = ctx.effort.precision if precision is None else precision
    covered = swept(ctx, precision, rows=quantity == "rho_rows")
    operator = LayerDirections(ctx, quantity, covered.left_out)
    known = {key: (float(mean.value), float(mean.stderr)) for key, mean in covered.means.items() if not key[0]}
    # As many products as draws of all groups together would be, where a product is not cheap.
    cheap = ctx.problem.n_train * count(ctx.trainable.values()) <= CHEAP
    return diagonal_sums(
        operator,
        Signs(ctx.seed, f"products for {quantity}"),
        precision=wanted,
        most_products=most_products,
        offsets=known,
        over=time_limit(ctx),
        few=None if cheap else FEW // operator.groups,
    )
