"""Flatness in weight space: the gradient and the Hessian of the training loss as they are."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from flatscope.context import Context
from flatscope.curvature.brackets import rounding
from flatscope.curvature.coarse_search import has_coarse_products
from flatscope.curvature.layer_products import LayerBlocks
from flatscope.curvature.operators import CurvatureOperator, curvature_operator
from flatscope.curvature.spectrum import Eigenpair, Search, Wanted, extreme_eigenpairs, in_full, side_by_side
from flatscope.errors import refuse_unless_whole
from flatscope.isolation import coarse_products
from flatscope.measures.layer_values import (
    GAUSS_NEWTON,
    layer_values,
    measured_layers,
    remark_on_derived_weight,
    remark_on_matrix,
    trace_of_everything,
)
from flatscope.params import norm
from flatscope.registry import Value, measure
from flatscope.sampling import time_is_over

# The smallest eigenvalue mostly lies at the edge of a dense cloud around zero. Digits of its own are looked for down to
# such a share of the one that is largest in size, and so long.
CLOUD, AFFORDABLE = 1e-4, 100

_of_weights = partial(measure, invariant_under={"permutation"}, cost="sweep", falls_with_loss=True)
SEARCHED = "search, right for 99 of 100 random starts"
_BRACKET = "a search ends at an interval [low, high]; exact where the matrix is small and written out"


@_of_weights(
    symbol=r"\|\nabla \hat L(w)\|_2",
    paper="yi2019",
    equation="Section 2.1",
    cost="light",
    passes={"forward": 1, "backward": 1},
    caption="slope; 0 at a minimum",
    conventions="all trainable parameters, biases included; mean over samples",
)
def gradient_norm(ctx: Context) -> float:
    r"""Euclidean norm of the gradient of the training loss: is this a minimum at all?

    .. math:: \| \tfrac1n \sum_i \nabla_w \ell(f_w(x_i), y_i) \|_2

    Curvature says how flat a minimum is only where there is one. This number cannot tell: it changes when weights are
    rescaled. Every table says it instead: a network is at a minimum where one step down the gradient lowers the
    training loss by at most 0.02 % of the loss of outputs that ignore the inputs, nearly at one up to 0.2 %.
    """
    return norm(ctx.gradient())


@_of_weights(
    symbol=r"\operatorname{tr} \nabla^2 \hat L(w)",
    paper="yi2019",
    equation="Definition 2.1",
    direction="lower",
    caption="curvature, summed",
    conventions="all trainable parameters, BatchNorm's included; mean over samples; not divided by their number",
)
def hessian_trace(ctx: Context, *, precision: float | None = None, most_products: int = 1024) -> Value:
    """Trace of the Hessian of the training loss over all trainable parameters.

    From all columns of the sweep on piecewise-linear networks, and exact then, or from random ones where that costs
    less. The trace over parameters whose block is not Gauss-Newton comes from Hessian products, the same that give the
    layers' traces, and is added. Where no layer is asked for beside it, products of the whole Hessian take the place of
    all that, if they are expected to cost less than what is not exact of it.

    Args:
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return trace_of_everything(ctx, precision, most_products)


@_of_weights(
    symbol=r"\operatorname{Tr} H_l",
    paper="petzka2019",
    equation="Figure 2",
    per="layer",
    direction="lower",
    needs={"layers"},
    conventions="the layer's weight without its bias; un-normalised trace",
)
def layer_trace(ctx: Context, *, precision: float | None = None, most_products: int = 1024) -> dict[str, Value]:
    """Trace of the Hessian with respect to each layer's weights.

    Args:
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return layer_values(ctx, "trace", precision, most_products)


@_of_weights(
    symbol=r"\lambda_{\max}(H_l)",
    paper="petzka2019",
    equation="Figure 2",
    per="layer",
    direction="lower",
    needs={"layers"},
    typical={"sweep": 1, "column": 1},
    exact=False,
    search="lower",
    bracketed=True,
    conventions=f"algebraically largest eigenvalue; the layer's weight without its bias; {_BRACKET}",
)
def layer_max_eigenvalue(ctx: Context, *, tolerance: float | None = None) -> dict[str, Value]:
    """Largest eigenvalue of the Hessian with respect to each layer's weights.

    Args:
        tolerance: relative width of the interval that the search ends at; by default 1e-3, or a twentieth of the
            precision that the call asks for where that is less, 1e-4 where it is 0. The value itself is better by far.
    """
    pairs = ctx.cached(
        top_eigenpairs, tolerance=eigen_tolerance(ctx, tolerance), enough=accepted_residual(ctx, tolerance)
    )
    return {
        layer.name: eigenvalue_as_value(
            ctx, pairs[layer.name], abs(pairs[layer.name].value), _remarks_on_weight(ctx, layer.weight)
        )
        for layer in measured_layers(ctx)
    }


@_of_weights(
    symbol=r"\lambda_{\max}(\nabla^2 \hat L)",
    paper="yi2019",
    equation="Section 5",
    direction="lower",
    typical={"curvature": 16},
    exact=False,
    search="lower",
    bracketed=True,
    caption="curvature, sharpest way",
    conventions="all trainable parameters, cross-layer blocks included; Gauss-Newton only where it is asked for; "
    f"{_BRACKET}",
)
def hessian_max_eigenvalue(ctx: Context, *, tolerance: float | None = None) -> Value:
    """Largest eigenvalue of the Hessian of the training loss.

    Args:
        tolerance: relative width of the interval that the search ends at; by default 1e-3, or a twentieth of the
            precision that the call asks for where that is less, 1e-4 where it is 0. The value itself is better by far.
    """
    return _eigenvalue_of_whole_network(
        ctx, Wanted(1, 0, eigen_tolerance(ctx, tolerance)), accepted_residual(ctx, tolerance)
    )


@_of_weights(
    symbol=r"\lambda_{\min}(\nabla^2 \hat L)",
    paper="yi2019",
    equation="Section 5",
    typical={"curvature": 40},
    exact=False,
    search="upper",
    bracketed=True,
    conventions=f"all trainable parameters; negative at a saddle point or away from a minimum; {_BRACKET}",
)
def hessian_min_eigenvalue(ctx: Context, *, tolerance: float = 0.01, most_products: int = AFFORDABLE) -> Value:
    """Smallest (most negative) eigenvalue of the Hessian of the training loss.

    Args:
        tolerance: width of the interval that the search ends at, relative to this eigenvalue itself, or to a
            ten-thousandth of the one that is largest in size where that is more.
        most_products: give up after so many Hessian products, with the interval reached: it may hold zero.
    """
    refuse_unless_whole(most_products, "most_products")
    return _eigenvalue_of_whole_network(
        ctx, Wanted(0, 1, tolerance, CLOUD), accepted_residual(ctx, None), most_products
    )


def _remarks_on_weight(ctx: Context, weight: str) -> str:
    return "; ".join(filter(None, (remark_on_derived_weight(ctx, weight), remark_on_matrix(ctx, weight))))


def eigen_tolerance(ctx: Context, given: float | None) -> float:
    """The accuracy of an eigensolver that is asked for, or that the call's precision asks for."""
    return min(1e-3, max(ctx.effort.precision / 20, ctx.effort.limits.coarse_tolerance)) if given is None else given


def accepted_residual(ctx: Context, tolerance: float | None) -> float:
    """The residual that is enough for a vector that was found with coarse products; 0 where none are to be used.

    On a GPU they take a third of the time, and as they are as good as 2 to 3 digits, no more may be asked for.
    """
    return (
        ctx.effort.precision
        if has_coarse_products(ctx) and tolerance is None and ctx.effort.precision >= ctx.effort.limits.coarse_precision
        else 0.0
    )


def _eigenvalue_of_whole_network(
    ctx: Context, wanted: Wanted, enough: float, most_products: int | None = None
) -> Value:
    # The blocks between layers differ from the Hessian's on piecewise-linear networks as well.
    matrix = GAUSS_NEWTON if ctx.effort.curvature == "gauss_newton" else ""

    def over(search: Search) -> bool:
        return time_is_over(ctx) or (most_products is not None and search.products >= most_products)

    if enough:
        operator, search = ctx.cached(whole_matrix_and_search, coarse=True)
        with coarse_products():
            (pair,) = _search_and_release(operator, search, wanted, partial(over, search))
        pair = in_full(pair, operator @ pair.vector)
        operator.release()
        if pair.residual <= enough * abs(pair.value) or time_is_over(ctx):
            return eigenvalue_as_value(ctx, pair, search.largest, matrix)
    operator, search = ctx.cached(whole_matrix_and_search)
    (pair,) = _search_and_release(operator, search, wanted, partial(over, search))
    return eigenvalue_as_value(ctx, pair, search.largest, matrix)


def _search_and_release(
    operator: CurvatureOperator, search: Search, wanted: Wanted, expired: Callable[[], bool]
) -> list[Eigenpair]:
    """Eigenpairs of an operator that the context keeps, also where a product fails: without its graphs."""
    try:
        return extreme_eigenpairs(operator, search, wanted, expired=expired)
    finally:
        operator.release()


def whole_matrix_and_search(ctx: Context, coarse: bool = False) -> tuple[CurvatureOperator, Search]:
    """The whole matrix, and the search of both ends of its spectrum: what one end has paid for serves the other too.

    Args:
        ctx: the network.
        coarse: one by coarse products, which no other may go on with.
    """
    del coarse
    operator = curvature_operator(ctx, ctx.problem.trainable)
    generator = ctx.generator("hessian eigenvalues")
    return operator, Search(operator.size, generator, Wanted(1, 1, ctx.effort.limits.coarse_tolerance), operator.device)


def eigenvalue_as_value(ctx: Context, pair: Eigenpair, largest: float, matrix: str = "") -> Value:
    """The outermost eigenvalue as a table entry, with its bracket; exact where the matrix was written out.

    Args:
        ctx: its numbers say how far rounding may have moved the eigenvalue.
        pair: what the search ended at.
        largest: size of the matrix's largest eigenvalue.
        matrix: which one it is, where that needs saying.
    """
    if pair.written_out:
        return Value(pair.value, low=pair.value, high=pair.value, exact=True, reason=matrix)
    ended = ""
    if not pair.converged:
        ended = "out of time" if time_is_over(ctx) else f"stopped after {pair.products:,} products"
    reach = rounding(largest, ctx.problem.dtype, pair.vector.dtype)
    reason = "; ".join(part for part in (ended, matrix, SEARCHED) if part)
    return Value(pair.value, low=pair.low - reach, high=pair.high + reach, exact=False, reason=reason)


def top_eigenpairs(ctx: Context, tolerance: float, enough: float = 0.0) -> dict[str, Eigenpair]:
    """Top eigenpair of every layer's block: searched side by side as far as one pass serves them all.

    Args:
        ctx: the network.
        tolerance: accuracy of each search.
        enough: search with coarse products, and again where the relative residual in full precision is larger; 0 for
            not.
    """
    blocks, wanted = ctx.cached(LayerBlocks), Wanted(tolerance=tolerance)
    pairs_by_weight: dict[str, Eigenpair] = {}
    if enough:
        with coarse_products():
            pairs_by_weight = _search_top_eigenpairs(ctx, blocks, list(blocks.sizes), wanted)
        vectors = {name: pair.vector.to(ctx.problem.device) for name, pair in pairs_by_weight.items()}
        products = blocks.products({name: vector for name, vector in vectors.items() if name not in blocks.own})
        for name, operator in blocks.own.items():
            products[name] = operator @ vectors[name]
            operator.release()
        pairs_by_weight = {name: in_full(pair, products[name]) for name, pair in pairs_by_weight.items()}
        pairs_by_weight = {
            name: pair for name, pair in pairs_by_weight.items() if pair.residual <= enough * abs(pair.value)
        }
    pairs_by_weight |= _search_top_eigenpairs(
        ctx, blocks, [name for name in blocks.sizes if name not in pairs_by_weight], wanted
    )
    return {layer.name: pairs_by_weight[layer.weight] for layer in measured_layers(ctx)}


def _search_top_eigenpairs(ctx: Context, blocks: LayerBlocks, names: list[str], wanted: Wanted) -> dict[str, Eigenpair]:
    """The top eigenpairs of some blocks, by the names of their weights."""
    generator, whole = ctx.generator("layer eigenvalues"), sum(blocks.sizes.values())
    searches = {name: Search(blocks.sizes[name], generator, wanted, ctx.problem.device, whole) for name in names}
    late = partial(time_is_over, ctx)
    # Those with a product of their own go one after the other: each keeps its graphs while it is searched.
    operators = {name: operator for name, operator in blocks.own.items() if name in searches}
    pairs_by_weight = {
        name: _search_and_release(op, searches.pop(name), wanted, late) for name, op in operators.items()
    }
    pairs_by_weight |= side_by_side(searches, wanted, blocks.products, expired=late)
    return {name: pairs[0] for name, pairs in pairs_by_weight.items()}
