"""Relative flatness (Petzka et al. 2019): curvature times squared weights, so that layer scaling cancels.

Column j of a weight holds the outgoing weights of input feature j; κ uses whole layers, ρ one column at a time.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.products import by_products, column_directions, relative_directions, row_directions
from flatscope.curvature.sweep import exact_sweep
from flatscope.errors import UnknownNameError
from flatscope.measures.weight_flatness import (
    as_value,
    combined,
    layer_traces,
    measured_layers,
    top_eigenpairs,
)
from flatscope.registry import Value, measure

LAYERWISE = {"layer_scaling", "permutation"}
UNITWISE = {"layer_scaling", "unit_scaling", "permutation", "batchnorm_scaling"}
CONVENTIONS = "weights without biases; Frobenius norm; mean over samples"


def _kappas(ctx: Context, tolerance: float) -> dict[str, Value]:
    """κ^l = ‖w_l‖²_F λ_max(H_l) of every layer."""
    result = {}
    for layer in measured_layers(ctx):
        pair = ctx.sweep(top_eigenpairs, tolerance=tolerance)[layer.name]
        result[layer.name] = _times(as_value(pair, tolerance), _squared_norm(ctx, layer.weight))
    return result


def _kappa_traces(ctx: Context, accuracy: float, most_products: int) -> dict[str, Value]:
    """κ_τ^l = ‖w_l‖²_F Tr H_l of every layer."""
    weights = {layer.name: layer.weight for layer in measured_layers(ctx)}
    traces = layer_traces(ctx, accuracy, most_products)
    return {name: _times(value, _squared_norm(ctx, weights[name])) for name, value in traces.items()}


def _squared_norm(ctx: Context, weight: str) -> float:
    return float(ctx.params[weight].double().square().sum())


def _times(value: Value, factor: float) -> Value:
    def scaled(number: float | Tensor | None) -> float | Tensor | None:
        return None if number is None else number * factor

    return replace(
        value,
        value=value.value * factor,
        stderr=value.stderr * factor,
        data_stderr=scaled(value.data_stderr),
        low=scaled(value.low),
        high=scaled(value.high),
    )


@measure(
    symbol=r"\kappa^l",
    paper="petzka2019",
    equation="Definition 1, Table 1",
    per="layer",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def kappa(ctx: Context, *, tolerance: float = 1e-6) -> dict[str, Value]:
    """Squared norm of a layer's weights times the largest eigenvalue of its Hessian.

    Args:
        ctx: the network.
        tolerance: relative accuracy of the eigensolver.
    """
    return _kappas(ctx, tolerance)


@measure(
    symbol=r"\kappa^{\max}",
    paper="petzka2019",
    equation="Table 1",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def kappa_max(ctx: Context, *, tolerance: float = 1e-6) -> Value:
    """Largest kappa over the layers.

    Args:
        ctx: the network.
        tolerance: relative accuracy of the eigensolver.
    """
    return combined(_kappas(ctx, tolerance), "max")


@measure(
    symbol=r"\kappa^{\Sigma}",
    paper="petzka2019",
    equation="Table 1",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def kappa_sum(ctx: Context, *, tolerance: float = 1e-6) -> Value:
    """Sum of kappa over the layers.

    Args:
        ctx: the network.
        tolerance: relative accuracy of the eigensolver.
    """
    return combined(_kappas(ctx, tolerance), "sum")


@measure(
    symbol=r"\kappa_\tau^l",
    paper="petzka2019",
    equation="Table 1",
    per="layer",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=f"{CONVENTIONS}; un-normalised trace",
)
def kappa_trace(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> dict[str, Value]:
    """Squared norm of a layer's weights times the trace of its Hessian.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    return _kappa_traces(ctx, accuracy, most_products)


@measure(
    symbol=r"\kappa_\tau^{\max}",
    paper="petzka2019",
    equation="Table 1",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def kappa_trace_max(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> Value:
    """Largest kappa_trace over the layers.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    return combined(_kappa_traces(ctx, accuracy, most_products), "max")


@measure(
    symbol=r"\kappa_\tau^{\Sigma}",
    paper="petzka2019",
    equation="Table 1",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def kappa_trace_sum(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> Value:
    """Sum of kappa_trace over the layers.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    return combined(_kappa_traces(ctx, accuracy, most_products), "sum")


def rhos(ctx: Context, reading: str) -> dict[str, Value]:
    """ρ^l(j) of every unit of every layer, as one tensor a layer."""
    if reading not in ("column", "row"):
        raise UnknownNameError.among(reading, ("column", "row"), "reading of rho")
    swept = ctx.sweep(exact_sweep, rows=True) if reading == "row" else ctx.sweep(exact_sweep)
    layers = measured_layers(ctx)
    curved = tuple(layer for layer in layers if layer.weight in swept.curved)
    directions = column_directions if reading == "column" else row_directions
    estimates = by_products(ctx, curved, directions) if curved else {}
    result = {}
    for layer in layers:
        if layer.name in estimates:
            found = estimates[layer.name]
            worst = float(found.stderr.max())
            result[layer.name] = Value(found.value, worst, exact=found.exact, reason=swept.curved[layer.weight])
        elif layer.weight in swept.layers:
            sums = swept.layers[layer.weight].rho if reading == "column" else swept.layers[layer.weight].rho_rows
            result[layer.name] = Value(sums.value, data_stderr=sums.stderr)
        else:
            units = layer.input_shape[-1] if layer.kind == "dense" else layer.input_shape[0]
            result[layer.name] = Value(torch.zeros(units), reason="its output does not reach the network's")
    return result


def _per_layer(values: dict[str, Value], how: str) -> dict[str, Value]:
    """Maximum or sum over the units of each layer."""
    result = {}
    for name, value in values.items():
        units = torch.as_tensor(value.value)
        if how == "max":
            number, stderr = float(units.max()), value.stderr
        else:
            number, stderr = float(units.sum()), value.stderr * len(units) ** 0.5
        result[name] = Value(number, stderr, exact=value.exact, reason=value.reason)
    return result


@measure(
    symbol=r"\rho^l(j)",
    paper="petzka2019",
    equation="Table 1",
    per="unit",
    direction="lower",
    invariant_under=UNITWISE,
    cost="sweep",
    conventions=f"{CONVENTIONS}; j an input feature of a dense layer, an input channel of a convolution",
)
def rho_unit(ctx: Context, *, reading: str = "column") -> dict[str, Value]:
    """Curvature along each unit's own weights: w(j)ᵀ H w(j).

    Args:
        ctx: the network.
        reading: "column" (the paper's: outgoing weights of unit j of the layer before) or "row" (incoming weights).
    """
    return rhos(ctx, reading)


@measure(
    symbol=r"\rho^l",
    paper="petzka2019",
    equation="Table 1",
    per="layer",
    direction="lower",
    invariant_under=UNITWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def rho(ctx: Context, *, reading: str = "column") -> dict[str, Value]:
    """Largest rho_unit in each layer.

    Args:
        ctx: the network.
        reading: "column" or "row"; see `rho_unit`.
    """
    return _per_layer(rhos(ctx, reading), "max")


@measure(
    symbol=r"\rho_\sigma^l",
    paper="petzka2019",
    equation="Table 1",
    per="layer",
    direction="lower",
    invariant_under=UNITWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def rho_layer_sum(ctx: Context, *, reading: str = "column") -> dict[str, Value]:
    """Sum of rho_unit over each layer.

    Args:
        ctx: the network.
        reading: "column" or "row"; see `rho_unit`.
    """
    return _per_layer(rhos(ctx, reading), "sum")


@measure(
    symbol=r"\rho^{\max}",
    paper="petzka2019",
    equation="Table 1",
    direction="lower",
    invariant_under=UNITWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def rho_max(ctx: Context, *, reading: str = "column") -> Value:
    """Largest rho_unit in the network.

    Args:
        ctx: the network.
        reading: "column" or "row"; see `rho_unit`.
    """
    return combined(_per_layer(rhos(ctx, reading), "max"), "max")


@measure(
    symbol=r"\rho^{\Sigma}",
    paper="petzka2019",
    equation="Table 1",
    direction="lower",
    invariant_under=UNITWISE,
    cost="sweep",
    conventions=CONVENTIONS,
)
def rho_sum(ctx: Context, *, reading: str = "column") -> Value:
    """Sum of rho_unit over the network.

    Args:
        ctx: the network.
        reading: "column" or "row"; see `rho_unit`.
    """
    return combined(_per_layer(rhos(ctx, reading), "sum"), "sum")


@measure(
    symbol=r"\sum_{s,s'} \langle w_s, w_{s'}\rangle \operatorname{Tr} H_{s,s'}",
    paper="flatscope",
    equation="Petzka et al.'s later form of relative flatness",
    per="layer",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    conventions=f"{CONVENTIONS}; w_s: row s of the weight reshaped to (out, in · taps)",
)
def relative_flatness(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> dict[str, Value]:
    """Row-by-row relative flatness of each layer: inner products of rows times traces of their Hessian blocks.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    swept = ctx.sweep(exact_sweep)
    layers = measured_layers(ctx)
    curved = tuple(layer for layer in layers if layer.weight in swept.curved)
    estimates = by_products(ctx, curved, relative_directions, accuracy, most_products) if curved else {}
    result = {}
    for layer in layers:
        if layer.name in estimates:
            found = estimates[layer.name]
            reason = swept.curved[layer.weight]
            result[layer.name] = Value(float(found.value), float(found.stderr), exact=found.exact, reason=reason)
        elif layer.weight in swept.layers:
            sums = swept.layers[layer.weight].relative_flatness
            result[layer.name] = Value(float(sums.value), data_stderr=float(sums.stderr))
        else:
            result[layer.name] = Value(0.0, reason="its output does not reach the network's")
    return result
