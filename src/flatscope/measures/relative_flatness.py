"""Relative flatness (Petzka et al. 2019): curvature times squared weights, so that layer scaling cancels.

Column j of a weight holds the outgoing weights of input feature j; κ uses whole layers, ρ one column at a time.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Set
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from flatscope.context import Context
from flatscope.errors import refuse_unknown
from flatscope.measures.layer_values import (
    all_exact,
    largest,
    largest_units,
    layer_values,
    measured_layers,
    network_value,
    shared_reason,
)
from flatscope.measures.weight_flatness import layer_eigenvalues
from flatscope.registry import FUNCTION_SYMMETRIES, LAYER_SYMMETRIES, Value, measure

CONVENTIONS = "weights without biases; Frobenius norm; mean over samples"


def _declare(
    base: Callable[..., dict[str, Value]],
    combine: Callable[..., Any],
    *,
    name: str,
    summary: str,
    symbol: str,
    invariant_under: Set[str],
    per: str = "network",
    headline: str = "",
) -> None:
    """Declare a measure that combines the values of `base`: `combine(ctx, values, **options)`, with its options."""

    def function(ctx: Context, **options: Any) -> Any:
        return combine(ctx, base(ctx, **options), **options)

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
        needs={"every_layer" if per == "network" else "layers"},
        cost="sweep",
        headline=headline,
        falls_with_loss=True,
        conventions=CONVENTIONS,
    )(function)


def _declare_over_layers(
    base: Callable[..., dict[str, Value]], total: Callable[..., Value], symbol: str, **headlines: str
) -> None:
    """Declare `…_max` and `…_sum` of a value per layer.

    Args:
        base: the value per layer.
        total: `total(ctx, values, **options)` makes the sum.
        symbol: LaTeX.
        headlines: the words of one that is to be looked at first.
    """
    for how, combine, words, mark in (
        ("max", _largest, "Largest {} over the layers.", r"^{{\max}} = \max_l {}^l"),
        ("sum", total, "Sum of {} over the layers.", r"^{{\Sigma}} = \sum_l {}^l"),
    ):
        _declare(
            base,
            combine,
            name=f"{base.__name__}_{how}",
            summary=words.format(base.__name__),
            symbol=symbol + mark.format(symbol),
            invariant_under=LAYER_SYMMETRIES,
            headline=headlines.get(how, ""),
        )


def _largest(ctx: Context, values: dict[str, Value], **options: Any) -> Value:
    del ctx, options
    return largest(values)


def _added(ctx: Context, values: dict[str, Value], **options: Any) -> Value:
    """The sum of values without standard errors."""
    del ctx, options
    total = sum(float(value.value) for value in values.values())
    return Value(total, exact=all_exact(values), reason=shared_reason(values))


def _summed(ctx: Context, values: dict[str, Value], quantity: str, **options: Any) -> Value:
    """The sum of values from the sweep; its error is not that of independent layers, which share their draws."""
    return network_value(ctx, quantity, **options, reason=shared_reason(values))


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
    symbol=r"\kappa^l = \|w^l\|_F^2\, \lambda_{\max}(H_l)",
    paper="petzka2019",
    equation="Definition 1, Table 1",
    per="layer",
    direction="lower",
    invariant_under=LAYER_SYMMETRIES,
    needs={"layers"},
    cost="sweep",
    falls_with_loss=True,
    conventions=CONVENTIONS,
)
def kappa(ctx: Context, *, tolerance: float = 1e-4) -> dict[str, Value]:
    """Squared norm of a layer's weights times the largest eigenvalue of its Hessian.

    Args:
        tolerance: relative accuracy of the eigensolver.
    """
    return _times_squared_norm(ctx, layer_eigenvalues(ctx, tolerance))


_declare_over_layers(kappa, _added, r"\kappa", max="sharpest layer, relative to weights")


@measure(
    symbol=r"\kappa_\tau^l = \|w^l\|_F^2 \operatorname{Tr} H_l",
    paper="petzka2019",
    equation="Table 1",
    per="layer",
    direction="lower",
    invariant_under=LAYER_SYMMETRIES,
    needs={"layers"},
    cost="sweep",
    falls_with_loss=True,
    conventions=f"{CONVENTIONS}; un-normalised trace",
)
def kappa_trace(ctx: Context, *, precision: float | None = None, most_products: int = 1024) -> dict[str, Value]:
    """Squared norm of a layer's weights times the trace of its Hessian.

    Args:
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return _times_squared_norm(ctx, layer_values(ctx, "trace", precision, most_products))


_declare_over_layers(
    kappa_trace, partial(_summed, quantity="kappa_trace"), r"\kappa_\tau", sum="all layers, relative to weights"
)


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
    """Curvature along the weights of each input of a layer: w(j)ᵀ H w(j).

    Args:
        reading: "column" (the paper's: the weights of an input of the layer) or "row" (those of an output unit).
        precision: relative standard error of the largest and of the sum to reach where they are estimated; that of the
            call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return layer_values(ctx, _quantity(reading), precision, most_products)


def _quantity(reading: str) -> str:
    refuse_unknown(reading, ("column", "row"), "reading of rho")
    return "rho" if reading == "column" else "rho_rows"


def _rho(ctx: Context, values: dict[str, Value], **options: Any) -> dict[str, Value]:
    del ctx, options
    return largest_units(values)


def _rho_layer_sum(ctx: Context, values: dict[str, Value], reading: str = "column", **options: Any) -> dict[str, Value]:
    del values
    return layer_values(ctx, f"{_quantity(reading)}_sum", **options)


def _rho_max(ctx: Context, values: dict[str, Value], **options: Any) -> Value:
    del ctx, options
    return largest(largest_units(values))


def _rho_sum(ctx: Context, values: dict[str, Value], reading: str = "column", **options: Any) -> Value:
    return _summed(ctx, values, f"{_quantity(reading)}_sum", **options)


for _name, _summary, _symbol, _per, _combine in (
    ("rho", "Largest rho_unit in each layer.", r"\rho^l = \max_j \rho^l(j)", "layer", _rho),
    ("rho_layer_sum", "Sum of rho_unit over each layer.", r"\rho_\sigma^l = \sum_j \rho^l(j)", "layer", _rho_layer_sum),
    ("rho_max", "Largest rho_unit in the network.", r"\rho^{\max} = \max_l \rho^l", "network", _rho_max),
    ("rho_sum", "Sum of rho_unit over the network.", r"\rho^{\Sigma} = \sum_l \rho_\sigma^l", "network", _rho_sum),
):
    _declare(
        rho_unit,
        _combine,
        name=_name,
        summary=_summary,
        symbol=_symbol,
        invariant_under=FUNCTION_SYMMETRIES,
        per=_per,
        headline="all inputs of layers, relative to weights" if _name == "rho_sum" else "",
    )


@measure(
    symbol=r"\sum_{s,s'} \langle w_s, w_{s'}\rangle \operatorname{Tr} H_{s,s'}",
    paper="flatscope",
    equation="Petzka et al. 2021 (Relative Flatness and Generalization), relative flatness κ_Tr of a layer",
    per="layer",
    direction="lower",
    invariant_under={*LAYER_SYMMETRIES, "attention_scaling"},  # outputs of a layer may be rescaled, one by one
    needs={"layers"},
    cost="sweep",
    falls_with_loss=True,
    conventions=f"{CONVENTIONS}; w_s: row s of the weight reshaped to (out, in · taps); s and s' run over all pairs of "
    "rows, equal ones included; the paper evaluates it at a minimum, here at any weights",
)
def relative_flatness(ctx: Context, *, precision: float | None = None, most_products: int = 1024) -> dict[str, Value]:
    """Row-by-row relative flatness of each layer: inner products of rows times traces of their Hessian blocks.

    Args:
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: give up after so many Hessian products.
    """
    return layer_values(ctx, "relative_flatness", precision, most_products)
