"""Relative flatness (Petzka et al. 2019): curvature times squared weights, so that layer scaling cancels.

Column j of a weight holds the outgoing weights of input feature j; κ uses whole layers, ρ one column at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.products import column_directions, relative_directions, row_directions
from flatscope.errors import UnknownNameError
from flatscope.measures.weight_flatness import (
    as_value,
    combined,
    exact_or_products,
    layer_traces,
    measured_layers,
    one_number_each,
    top_eigenpairs,
)
from flatscope.registry import Value, measure

LAYERWISE = {"layer_scaling", "permutation"}
UNITWISE = {"layer_scaling", "unit_scaling", "permutation", "batchnorm_scaling"}
CONVENTIONS = "weights without biases; Frobenius norm; mean over samples"


def _declare(
    base: Callable[..., dict[str, Value]],
    combine: Callable[[dict[str, Value]], Any],
    *,
    name: str,
    summary: str,
    symbol: str,
    invariant_under: set[str],
    per: str = "network",
    headline: str = "",
) -> None:
    """Declare a measure that combines the values of `base`; it has the same options."""

    def function(ctx: Context, **options: Any) -> Any:
        return combine(base(ctx, **options))

    function.__name__ = function.__qualname__ = name
    listed = inspect.cleandoc(base.__doc__ or "").partition("\nArgs:\n")[2]
    function.__doc__ = f"{summary}\n\nArgs:\n{listed}"
    function.__signature__ = inspect.signature(base)  # type: ignore[attr-defined]
    measure(
        symbol=symbol,
        paper="petzka2019",
        equation="Table 1",
        per=per,
        direction="lower",
        invariant_under=invariant_under,
        cost="sweep",
        headline=headline,
        falls_with_loss=True,
        conventions=CONVENTIONS,
    )(function)


def _declare_over_layers(base: Callable[..., dict[str, Value]], symbol: str, **headlines: str) -> None:
    """Declare `…_max` and `…_sum` of a value per layer; `headlines`: the words of one that is to be looked at first."""
    for how, words, mark in (
        ("max", "Largest {} over the layers.", r"\max"),
        ("sum", "Sum of {} over the layers.", r"\Sigma"),
    ):
        _declare(
            base,
            partial(combined, how=how),
            name=f"{base.__name__}_{how}",
            summary=words.format(base.__name__),
            symbol=f"{symbol}^{{{mark}}}",
            invariant_under=LAYERWISE,
            headline=headlines.get(how, ""),
        )


def _times_squared_norm(ctx: Context, values: dict[str, Value]) -> dict[str, Value]:
    """Every layer's value times ‖w_l‖²_F."""
    return {
        layer.name: _times(values[layer.name], float(ctx.params[layer.weight].double().square().sum()))
        for layer in measured_layers(ctx)
    }


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
    falls_with_loss=True,
    conventions=CONVENTIONS,
)
def kappa(ctx: Context, *, tolerance: float = 1e-6) -> dict[str, Value]:
    """Squared norm of a layer's weights times the largest eigenvalue of its Hessian.

    Args:
        ctx: the network.
        tolerance: relative accuracy of the eigensolver.
    """
    pairs = ctx.sweep(top_eigenpairs, tolerance=tolerance)
    return _times_squared_norm(ctx, {name: as_value(pair, tolerance) for name, pair in pairs.items()})


_declare_over_layers(kappa, r"\kappa", max="sharpest layer, relative to weights")


@measure(
    symbol=r"\kappa_\tau^l",
    paper="petzka2019",
    equation="Table 1",
    per="layer",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    falls_with_loss=True,
    conventions=f"{CONVENTIONS}; un-normalised trace",
)
def kappa_trace(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> dict[str, Value]:
    """Squared norm of a layer's weights times the trace of its Hessian.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    return _times_squared_norm(ctx, ctx.sweep(layer_traces, accuracy=accuracy, most_products=most_products))


_declare_over_layers(kappa_trace, r"\kappa_\tau", sum="all layers, relative to weights")


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


def _of_network(values: dict[str, Value], how: str) -> Value:
    """Maximum or sum over all units."""
    return combined(_per_layer(values, how), how)


@measure(
    symbol=r"\rho^l(j)",
    paper="petzka2019",
    equation="Table 1",
    per="unit",
    direction="lower",
    invariant_under=UNITWISE,
    cost="sweep",
    falls_with_loss=True,
    conventions=f"{CONVENTIONS}; j an input feature of a dense layer, an input channel of a convolution",
)
def rho_unit(ctx: Context, *, reading: str = "column") -> dict[str, Value]:
    """Curvature along each unit's own weights: w(j)ᵀ H w(j).

    Args:
        ctx: the network.
        reading: "column" (the paper's: outgoing weights of unit j of the layer before) or "row" (incoming weights).
    """
    if reading not in ("column", "row"):
        raise UnknownNameError.among(reading, ("column", "row"), "reading of rho")
    return ctx.sweep(unit_rho, reading=reading)


def unit_rho(ctx: Context, reading: str) -> dict[str, Value]:
    """ρ of every unit, computed once for all measures that are made of it."""
    if reading == "column":
        return exact_or_products(ctx, lambda sums: sums.rho, column_directions)
    return exact_or_products(ctx, lambda sums: sums.rho_rows, row_directions, rows=True)


for _name, _summary, _symbol, _per, _combine in (
    ("rho", "Largest rho_unit in each layer.", r"\rho^l", "layer", partial(_per_layer, how="max")),
    ("rho_layer_sum", "Sum of rho_unit over each layer.", r"\rho_\sigma^l", "layer", partial(_per_layer, how="sum")),
    ("rho_max", "Largest rho_unit in the network.", r"\rho^{\max}", "network", partial(_of_network, how="max")),
    ("rho_sum", "Sum of rho_unit over the network.", r"\rho^{\Sigma}", "network", partial(_of_network, how="sum")),
):
    _declare(
        rho_unit,
        _combine,
        name=_name,
        summary=_summary,
        symbol=_symbol,
        invariant_under=UNITWISE,
        per=_per,
        headline="all units, relative to weights" if _name == "rho_sum" else "",
    )


@measure(
    symbol=r"\sum_{s,s'} \langle w_s, w_{s'}\rangle \operatorname{Tr} H_{s,s'}",
    paper="flatscope",
    equation="Petzka et al.'s later form of relative flatness",
    per="layer",
    direction="lower",
    invariant_under=LAYERWISE,
    cost="sweep",
    falls_with_loss=True,
    conventions=f"{CONVENTIONS}; w_s: row s of the weight reshaped to (out, in · taps)",
)
def relative_flatness(ctx: Context, *, accuracy: float = 0.02, most_products: int = 1024) -> dict[str, Value]:
    """Row-by-row relative flatness of each layer: inner products of rows times traces of their Hessian blocks.

    Args:
        ctx: the network.
        accuracy: relative standard error to reach where products are needed.
        most_products: give up after so many Hessian products.
    """
    return one_number_each(
        exact_or_products(
            ctx,
            lambda sums: sums.relative_flatness,
            relative_directions,
            accuracy=accuracy,
            most_products=most_products,
        )
    )
