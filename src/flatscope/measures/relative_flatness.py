"""Relative flatness (Petzka et al. 2019): curvature times squared weights, so that layer scaling cancels.

Column j of a weight holds the outgoing weights of input feature j; κ uses whole layers, ρ one column at a time.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, Literal

from flatscope.context import Context
from flatscope.derived_measures import derived
from flatscope.errors import NotApplicable, refuse_unknown
from flatscope.measures.layer_values import (
    all_layers_exact,
    largest_layer_value,
    largest_unit_by_layer,
    layer_values,
    measured_layers,
    network_value,
    shared_reason,
    value_with_interval_ends,
)
from flatscope.measures.weight_flatness import layer_max_eigenvalue, layer_trace
from flatscope.registry import FUNCTION_SYMMETRIES, LAYER_SYMMETRIES, Value, measure

Over = Literal["layers", "max", "sum"]
CONVENTIONS = "weights without biases; Frobenius norm; mean over samples"


_of_network = partial(derived, per="network", equation="Table 1", needs={"every_layer"}, conventions=CONVENTIONS)


def _times_squared_norm(ctx: Context, values: dict[str, Value]) -> dict[str, Value]:
    """Every layer's value times ‖w_l‖²_F."""
    return {
        layer.name: _value_times_factor(values[layer.name], float(ctx.params[layer.weight].double().square().sum()))
        for layer in measured_layers(ctx)
    }


def _value_times_factor(value: Value, factor: float) -> Value:
    numbers = {name: getattr(value, name) for name in ("value", "stderr", "data_stderr", "low", "high")}
    return replace(value, **{name: number * factor for name, number in numbers.items() if number is not None})


def _refuse_unrecognised_layers(ctx: Context, form: Over) -> None:
    """Raise where one value of the network is asked for and some trainable matrix is no recognised layer."""
    if form != "layers" and ctx.network.missing:
        raise NotApplicable(ctx.network.missing)


def _sum_over_layers(values: dict[str, Value]) -> Value:
    """The sum over layers, with the interval of the sum."""
    total, low, high = (sum(parts) for parts in zip(*map(value_with_interval_ends, values.values()), strict=True))
    exact = all_layers_exact(values)
    ends = {} if exact else {"low": low, "high": high}
    return Value(total, exact=exact, reason=shared_reason(values), **ends)


_LAYERS_OR_MAX = {
    "form": (
        "layers",
        Literal["layers", "max"],
        '"layers": one value per layer; "max": the largest of them, one value of the network.',
    )
}


@derived(
    layer_max_eigenvalue,
    {
        "form": (
            "layers",
            Literal["layers", "max", "sum"],
            '"layers": one value per layer; "max" (κ^max of the paper) or "sum" (κ^Σ): the largest of them, or their '
            "sum, one value of the network.",
        )
    },
    symbol=r"\kappa^l = \|w^l\|_F^2\, \lambda_{\max}(H_l)",
    equation="Definition 1, Table 1",
    invariant_under=LAYER_SYMMETRIES,
    typical=None,
    conventions=CONVENTIONS,
)
def kappa(ctx: Context, form: Over = "layers", **options: Any) -> dict[str, Value] | Value:
    """Squared norm of a layer's weights times the largest eigenvalue of its Hessian."""
    _refuse_unrecognised_layers(ctx, form)
    values = _times_squared_norm(ctx, layer_max_eigenvalue(ctx, **options))
    return values if form == "layers" else largest_layer_value(values) if form == "max" else _sum_over_layers(values)


@derived(
    layer_trace,
    _LAYERS_OR_MAX,
    symbol=r"\kappa_\tau^l = \|w^l\|_F^2 \operatorname{Tr} H_l",
    equation="Table 1",
    invariant_under=LAYER_SYMMETRIES,
    conventions=f"{CONVENTIONS}; un-normalised trace",
)
def kappa_trace(ctx: Context, form: Over = "layers", **options: Any) -> dict[str, Value] | Value:
    """Squared norm of a layer's weights times the trace of its Hessian.

    The sum over the layers is `kappa_trace_sum`.
    """
    _refuse_unrecognised_layers(ctx, form)
    values = _layer_traces(ctx, **options)
    return values if form == "layers" else largest_layer_value(values)


def _layer_traces(ctx: Context, **options: Any) -> dict[str, Value]:
    return _times_squared_norm(ctx, layer_trace(ctx, **options))


@_of_network(
    layer_trace,
    invariant_under=LAYER_SYMMETRIES,
    symbol=r"\kappa_\tau^{\Sigma} = \sum_l \|w^l\|_F^2 \operatorname{Tr} H_l",
    caption="curvature × layer norm²",
)
def kappa_trace_sum(ctx: Context, **options: Any) -> Value:
    """Squared weight norm times Hessian trace, summed over the layers."""
    # With an error of its own: that of independent layers would be wrong, since they share their draws.
    return network_value(ctx, "kappa_trace", **options, reason=shared_reason(_layer_traces(ctx, **options)))


@measure(
    symbol=r"\rho^l(j) = w^l(j)^\top H_l\, w^l(j)",
    paper="petzka2019",
    equation="Table 1",
    per="unit",
    direction="lower",
    invariant_under=FUNCTION_SYMMETRIES,
    needs={"layers"},
    cost="sweep",
    falls_with_loss=True,
    conventions=f"{CONVENTIONS}; j an input feature of a dense layer, an input channel of a convolution",
)
def rho_unit(
    ctx: Context, *, reading: str = "column", precision: float | None = None, most_products: int = 1024
) -> dict[str, Value]:
    """Curvature times squared weights of each input of a layer; unchanged by rescaling.

    Args:
        reading: "column" (the paper's: the weights of an input of the layer) or "row" (those of an output unit).
        precision: relative standard error of the largest and of the sum to reach where they are estimated; that of the
            call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return layer_values(ctx, _quantity_of_reading(reading), precision, most_products)


def _quantity_of_reading(reading: str) -> str:
    refuse_unknown(reading, ("column", "row"), "reading of rho")
    return "rho" if reading == "column" else "rho_rows"


_of_rho = partial(derived, rho_unit, equation="Table 1", per="layer", conventions=CONVENTIONS)


@_of_rho(_LAYERS_OR_MAX, symbol=r"\rho^l = \max_j w^l(j)^\top H_l\, w^l(j)")
def rho(ctx: Context, form: Over = "layers", **options: Any) -> dict[str, Value] | Value:
    """Curvature times squared weights of the input of a layer where that is largest; unchanged by rescaling."""
    _refuse_unrecognised_layers(ctx, form)
    values = largest_unit_by_layer(rho_unit(ctx, **options))
    return values if form == "layers" else largest_layer_value(values)


@_of_rho(symbol=r"\rho_\sigma^l = \sum_j w^l(j)^\top H_l\, w^l(j)")
def rho_layer_sum(ctx: Context, reading: str = "column", **options: Any) -> dict[str, Value]:
    """Curvature times squared weights, summed over the inputs of a layer; unchanged by rescaling."""
    return layer_values(ctx, f"{_quantity_of_reading(reading)}_sum", **options)


@_of_network(rho_unit, symbol=r"\rho^{\Sigma} = \sum_l \sum_j w^l(j)^\top H_l\, w^l(j)", caption="curvature × weights²")
def rho_sum(ctx: Context, reading: str = "column", **options: Any) -> Value:
    """Curvature times squared weights, summed over all inputs of all layers; unchanged by rescaling."""
    reason = shared_reason(rho_unit(ctx, reading=reading, **options))
    return network_value(ctx, f"{_quantity_of_reading(reading)}_sum", **options, reason=reason)


@derived(
    layer_trace,
    symbol=r"\sum_{s,s'} \langle w_s, w_{s'}\rangle \operatorname{Tr} H_{s,s'}",
    paper="flatscope",
    equation="Petzka et al. 2021 (Relative Flatness and Generalization), relative flatness κ_Tr of a layer",
    invariant_under={*LAYER_SYMMETRIES, "attention_scaling"},  # outputs of a layer may be rescaled, one by one
    conventions=f"{CONVENTIONS}; w_s: row s of the weight reshaped to (out, in · taps); s and s' run over all pairs of "
    "rows, equal ones included; the paper evaluates it at a minimum, here at any weights",
)
def relative_flatness(ctx: Context, **options: Any) -> dict[str, Value]:
    """Inner products of a layer's rows times traces of their Hessian blocks, summed over all pairs of rows."""
    return layer_values(ctx, "relative_flatness", **options)
