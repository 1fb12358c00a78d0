"""Sections of the report about decisions: what rounding each layer costs, what other weights do to the loss."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from flatscope.decisions.forecast import Forecast
from flatscope.decisions.sensitivity import Sensitivity
from flatscope.reports.kinds import Kind
from flatscope.reports.markup import Colours, PagePart
from flatscope.reports.plots import Plot, figure_fitted_to_page
from flatscope.reports.sections import drawn_part
from flatscope.result import Result


def _kind(words: str, of: type[Result], title: str, gist: str) -> Kind:
    """Kind of results that show themselves as one figure, with their headline as its caption."""
    anchor = title.lower()

    def plots(results: Mapping[str, Result], _: Colours) -> Iterator[Plot]:
        for name, each in results.items():
            caption = " ".join(each.headline_lines())
            yield Plot(f"{anchor}-{name}", name, caption, figure_fitted_to_page(each.figure), *each.cells())

    def part(results: Mapping[str, Result], colours: Colours) -> PagePart:
        return drawn_part(title, gist, plots(results, colours), results)

    return Kind(words, of, "network", part, plots=plots)


DECISION_KINDS = {
    "sensitivities": _kind(
        "a Sensitivity of layers", Sensitivity, "Sensitivity", "what rounding or pruning each layer costs"
    ),
    "forecasts": _kind("a Forecast of other weights", Forecast, "Forecast", "what other weights do to this loss"),
}
