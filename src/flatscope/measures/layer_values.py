"""Values of every layer, and of all together, from the sweep where it covers them and from products elsewhere."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.columns import column_sweep, swept
from flatscope.curvature.estimators import TRACE, DiagonalSums
from flatscope.curvature.layer_directions import DIRECTIONS
from flatscope.curvature.route import TRACE_ALONE, find_not_covered, route_of, trace_route
from flatscope.curvature.sweep_result import Curvature
from flatscope.curvature.trace_by_products import probed, whole_trace
from flatscope.formatting import first_of_names, numbered
from flatscope.network.layers import Layer
from flatscope.network.normal_form import made_of
from flatscope.registry import Value
from flatscope.sampling import time_is_over

MOST_REASONS, MOST_PARTS = 3, 6  # named in a remark: reasons, and parameters that a weight is made of
ASKED = "; asked for "  # begins the remark of a value that is less precise than that
GAUSS_NEWTON = "of the Gauss-Newton matrix"
# The products that give what the sweep does not cover of a quantity.
PRODUCTS = {"kappa_trace": "trace", "rho_sum": "rho", "rho_rows_sum": "rho_rows"}


def measured_layers(ctx: Context) -> tuple[Layer, ...]:
    """The layers whose weights may move, in forward order."""
    return tuple(layer for layer in ctx.network if layer.weight in ctx.problem.trainable)


def layer_values(
    ctx: Context, quantity: str, precision: float | None = None, most_products: int = 1024
) -> dict[str, Value]:
    """A quantity of every layer's curvature block; tensors of one value per unit for "rho" and "rho_rows".

    Args:
        quantity: see `Curvature`.
        precision: relative standard error to reach where it is estimated; the context's by default.
        most_products: give up after so many products.
    """
    covered = swept(ctx, precision, rows=quantity.startswith("rho_rows"))
    rest = _products_for_uncovered_parameters(
        ctx, covered, quantity, precision, most_products, [layer.weight for layer in measured_layers(ctx)]
    )
    result = {}
    for layer in measured_layers(ctx):
        key, mean = (layer.weight, quantity), covered.of(layer.weight, quantity)
        if key in rest.values:
            ways = "" if rest.exact else f"; sampled, {rest.products} products"
            remarks = remark_on_derived_weight(ctx, layer.weight), remark_on_matrix(ctx, layer.weight)
            reason = _join_remarks(*remarks, f"{covered.not_covered[layer.weight]}{ways}")
            value = _value_of_numbers(rest.values[key], rest.stderrs[key], None, rest.exact, reason, quantity)
            result[layer.name] = _with_precision_remark(ctx, value, precision, rest.missed)
        elif mean is not None:
            reason = _join_remarks(
                remark_on_derived_weight(ctx, layer.weight),
                remark_on_matrix(ctx, layer.weight),
                _sampling_in_words(covered),
            )
            value = _value_of_numbers(mean.value, mean.stderr, mean.data_stderr, not covered.draws, reason, quantity)
            result[layer.name] = _with_precision_remark(ctx, value, precision, covered.missed)
        else:
            zeros = torch.zeros(_number_of_input_units(ctx, layer, quantity))
            result[layer.name] = _value_of_numbers(
                zeros, torch.zeros_like(zeros), None, True, "its output does not reach the network's", quantity
            )
    return result


def network_value(
    ctx: Context, quantity: str, precision: float | None = None, most_products: int = 1024, reason: str = ""
) -> Value:
    """The sum of a quantity over all layers, or of "trace" over all parameters, with the error of the sum itself."""
    covered = swept(ctx, precision, rows=quantity.startswith("rho_rows"))
    mean = covered.of("", quantity)
    rest = _products_for_uncovered_parameters(
        ctx, covered, quantity, precision, most_products, list(covered.not_covered)
    )
    known, error = (0.0, 0.0) if mean is None else (float(mean.value), float(mean.stderr))
    data_stderr = float(mean.data_stderr) if mean is not None and not covered.not_covered else None
    key = "", quantity
    value = known + float(rest.values[key]) if key in rest.values else known
    stderr = math.hypot(error, float(rest.stderrs[key])) if key in rest.values else error
    exact = not covered.draws and (rest.exact or key not in rest.values)
    total = Value(value, stderr, data_stderr=data_stderr, exact=exact, reason=reason)
    return _with_precision_remark(ctx, total, precision, covered.missed or rest.missed)


def _with_precision_remark(ctx: Context, value: Value, precision: float | None, missed: str) -> Value:
    """A value that is less precise than asked for says so; of units the largest counts."""
    wanted = ctx.effort.precision if precision is None else precision
    values, errors = (torch.as_tensor(part).reshape(-1) for part in (value.value, value.stderr))
    top = values.abs().argmax()
    if not missed or errors[top] <= wanted * values[top].abs():
        return value
    return replace(value, reason=f"{value.reason}{ASKED}{wanted:.2g} relative ({missed})")


def _products_for_uncovered_parameters(
    ctx: Context, covered: Curvature, quantity: str, precision: float | None, most_products: int, wanted: Iterable[str]
) -> DiagonalSums:
    """Share of a quantity from products, for parameters that the columns left out."""
    if not any(name in covered.not_covered for name in wanted):
        return DiagonalSums()
    options = {} if precision is None or precision == ctx.effort.precision else {"precision": precision}
    return ctx.cached(probed, quantity=PRODUCTS.get(quantity, quantity), most_products=most_products, **options)


def trace_of_everything(ctx: Context, precision: float | None, most_products: int) -> Value:
    """The trace over all trainable parameters, with a remark on how it was obtained."""
    if ctx.effort.trace_alone and not ctx.knows(column_sweep):
        trace = _trace_by_whole_products(ctx, ctx.effort.precision if precision is None else precision, most_products)
        if trace is not None:
            return trace
    covered = swept(ctx, precision)
    parts = [_sampling_in_words(covered)]
    if covered.not_covered:
        rest = _products_for_uncovered_parameters(ctx, covered, "trace", precision, most_products, covered.not_covered)
        parts.append(_products_in_words(rest, len(covered.not_covered), next(iter(covered.not_covered.values()))))
    reason = _join_remarks(remark_on_matrix(ctx, *ctx.problem.trainable), *parts)
    return network_value(ctx, "trace", precision, most_products, reason)


def _trace_by_whole_products(ctx: Context, precision: float, most_products: int) -> Value | None:
    """The trace from products of the whole matrix; None where layers' ways are cheaper, or turn out to be."""
    route, layers = trace_route(ctx, precision), route_of(ctx, precision)
    if route is layers:
        return None
    worth = math.ceil(layers.passes / ctx.effort.limits.product_passes)  # products that cost as much as those ways
    trace = ctx.cached(whole_trace, precision=precision, most_products=min(most_products, worth))
    if trace.missed and worth < most_products and not time_is_over(ctx):
        return None
    reason = _join_remarks(
        remark_on_matrix(ctx, *ctx.problem.trainable), _products_in_words(trace, len(route.ways), TRACE_ALONE)
    )
    value, error = (float(part[TRACE]) for part in (trace.values, trace.stderrs))
    return _with_precision_remark(ctx, Value(value, error, exact=trace.exact, reason=reason), precision, trace.missed)


def _products_in_words(sums: DiagonalSums, tensors: int, why: str) -> str:
    """Remark on how products gave a share of the trace."""
    ways = f"products, one for each of {sums.directions:,} directions" if sums.exact else f"{sums.products} products"
    return f"{numbered(tensors, 'parameter tensor')} by {ways}: {why}"


def remark_on_derived_weight(ctx: Context, weight: str) -> str:
    """Remark on what a derived weight is computed from; empty for a parameter."""
    params = made_of(ctx.problem.model).get(weight)
    return f"of the weight that is computed from {first_of_names(list(params), MOST_PARTS)}" if params else ""


def remark_on_matrix(ctx: Context, *names: str) -> str:
    """Which matrix a value that is made of these parameters' blocks belongs to, where that needs saying."""
    if ctx.effort.curvature != "gauss_newton":
        return ""
    differs = not find_not_covered(ctx, "hessian", lookups=True).keys().isdisjoint(names)
    return GAUSS_NEWTON if differs else f"{GAUSS_NEWTON}, here the same as the Hessian's"


def _sampling_in_words(covered: Curvature) -> str:
    return f"sampled, {covered.draws} draws" if covered.draws else ""


def _join_remarks(*parts: str) -> str:
    return "; ".join(part for part in parts if part)


def _value_of_numbers(
    value: Tensor, stderr: Tensor, data_stderr: Tensor | None, exact: bool, reason: str, quantity: str
) -> Value:
    """One number, or one for each unit."""
    if quantity in ("rho", "rho_rows"):
        return Value(value.reshape(-1), stderr.reshape(-1), data_stderr, exact=exact, reason=reason)
    spread = None if data_stderr is None else float(data_stderr)
    return Value(float(value), float(stderr), spread, exact=exact, reason=reason)


def _number_of_input_units(ctx: Context, layer: Layer, quantity: str) -> int:
    return DIRECTIONS[quantity](ctx.params[layer.weight], layer).count if quantity in ("rho", "rho_rows") else 1


def largest_layer_value(values: dict[str, Value]) -> Value:
    """The largest of the layers' values."""
    top = max(values.values(), key=lambda value: float(value.value))
    reason = shared_reason(values) + "".join(top.reason.partition(ASKED)[1:])
    largest = Value(float(top.value), top.stderr, top.data_stderr, exact=all_layers_exact(values), reason=reason)
    if all(value.low is None and value.high is None for value in values.values()):
        return largest
    _, low, high = (max(ends) for ends in zip(*map(value_with_interval_ends, values.values()), strict=True))
    return replace(largest, low=low, high=high)


def value_with_interval_ends(value: Value) -> tuple[float, float, float]:
    """A number and the ends of its interval; without one these are the number itself."""
    number = float(value.value)
    low, high = (number if end is None else float(end) for end in (value.low, value.high))
    return number, low, high


def largest_unit_by_layer(values: dict[str, Value]) -> dict[str, Value]:
    """The largest unit of each layer."""
    result = {}
    for name, value in values.items():
        top = int(torch.as_tensor(value.value).argmax())
        numbers = {column: getattr(value, column) for column in ("value", "stderr", "data_stderr")}
        top_values: dict[str, Any] = {column: float(each[top]) for column, each in numbers.items() if each is not None}
        result[name] = replace(value, **top_values)
    return result


def shared_reason(values: dict[str, Value]) -> str:
    """The remarks of the layers as one: each once, and where not all layers have it, how many do.

    Without those on a layer's own precision, which is not that of what is made of the layers.
    """
    counted = Counter(value.reason.partition(ASKED)[0] for value in values.values() if value.reason)
    parts = [
        reason if count == len(values) else f"{count} of {len(values)} layers: {reason}"
        for reason, count in counted.most_common(MOST_REASONS)
    ]
    return "; ".join([*parts, *(["…"] if len(counted) > MOST_REASONS else [])])


def all_layers_exact(values: dict[str, Value]) -> bool:
    """True if no layer was estimated."""
    return all(value.exact is not False for value in values.values())
