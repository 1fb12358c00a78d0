"""Sections of the report about decisions: what rounding each layer costs, what other weights do to the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flatscope.decisions.forecast import Forecast
from flatscope.decisions.sensitivity import Sensitivity
from flatscope.reports.kinds import Kind
from flatscope.reports.markup import Colours, PagePart
from flatscope.reports.plots import Plot, figure_fitted_to_page
from flatscope.reports.sections import drawn_part


def sensitivity_plots(sensitivities: Mapping[str, Sensitivity], _: Colours) -> Iterator[Plot]:
    """Layers by changes as a heat map, and size against loss."""
    for name, each in sensitivities.items():
        caption = " ".join(each.headline_lines())
        yield Plot(f"sensitivity-{name}", name, caption, figure_fitted_to_page(each.figure), *each.cells())


def sensitivity_part(sensitivities: Mapping[str, Sensitivity], colours: Colours) -> PagePart:
    """Which layers take few bits or can be pruned."""
    gist = "what rounding or pruning each layer costs"
    return drawn_part("Sensitivity", gist, sensitivity_plots(sensitivities, colours), sensitivities)


def forecast_plots(forecasts: Mapping[str, Forecast], _: Colours) -> Iterator[Plot]:
    """Each layer's predicted share beside what it costs alone."""
    for name, each in forecasts.items():
        yield Plot(
            f"forecast-{name}", name, " ".join(each.headline_lines()), figure_fitted_to_page(each.figure), *each.cells()
        )


def forecast_part(forecasts: Mapping[str, Forecast], colours: Colours) -> PagePart:
    """Part of the page on the change of the loss by other weights."""
    gist = "what other weights do to this loss"
    return drawn_part("Forecast", gist, forecast_plots(forecasts, colours), forecasts)


DECISION_KINDS = {
    "sensitivities": Kind("a Sensitivity of layers", Sensitivity, "network", sensitivity_part, plots=sensitivity_plots),
    "forecasts": Kind("a Forecast of other weights", Forecast, "network", forecast_part, plots=forecast_plots),
}
