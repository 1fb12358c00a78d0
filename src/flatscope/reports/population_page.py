"""The scatter of a population, drawn here once and again by the script whenever a control changes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from markupsafe import Markup

from flatscope.formatting import written
from flatscope.registry import PAPERS, SYMMETRIES
from flatscope.reports.charts import Colours
from flatscope.reports.figure_data import Scale
from flatscope.reports.markup import Part, Section, element, fragment
from flatscope.reports.measured import standing
from flatscope.reports.population_frame import (
    CONFIDENCE,
    ColourChoice,
    MeasureStatistics,
    PopulationFrame,
    colour_choices,
    log_scales,
    network_names,
)
from flatscope.reports.surfaces import RAMP, ramp_colour

if TYPE_CHECKING:
    from flatscope.stats import Estimate

HEIGHT, TOP, BOTTOM = 340, 14, 30  # pixels; the script has them from the drawing
SIDE = 3.0  # percent of the width left free at either side
# One shape per level beside its colour, so that no level is told by colour alone; 10 pixels wide around the origin.
SHAPES = (
    "M4.5 0A4.5 4.5 0 1 1 -4.5 0A4.5 4.5 0 1 1 4.5 0Z",
    "M-4 -4H4V4H-4Z",
    "M0 -5L5 4H-5Z",
    "M0 -5.5L5.5 0L0 5.5L-5.5 0Z",
    "M0 5L5 -4H-5Z",
    "M-1.7 -5H1.7V-1.7H5V1.7H1.7V5H-1.7V1.7H-5V-1.7H-1.7Z",
    "M-5 -2L0 -5.5L5 -2L3 4.5H-3Z",
)
KINDS = ("pearson", "spearman", "kendall", "partial")


def populations_part(populations: Mapping[str, PopulationFrame], _: Colours) -> Part:
    """For every population a scatter with its controls and the table of correlations."""
    sections, summaries = [], []
    for n, (name, population) in enumerate(populations.items()):
        statistics = population.statistics
        first = statistics[0]
        choices = colour_choices(population)
        logs = log_scales(population, first.measure)
        body = fragment(
            "population.html",
            number=n,
            name=name,
            population=population,
            statistics=statistics,
            kinds=[kind for kind in KINDS if kind != "partial" or population.parameters],
            choices=choices,
            logs=logs,
            plot=scatter(population, first.measure, choices[0] if choices else None, logs),
            legend=_legend(choices[0] if choices else None),
            words=correlation_words(first, logs),
            data=_script_data(population, statistics, choices),
            rows=_rows(population, first.measure),
            estimate=estimate_words,
            sort_key=_sort_key,
            standing=standing,
            papers=PAPERS,
            symmetries=SYMMETRIES,
            confidence=f"{100 * CONFIDENCE:g}",
        )
        title = "Population" if len(populations) == 1 else f"Population: {name}"
        sections.append(Section(f"population-{n}" if n else "population", title, body))
        summaries.append(fragment("population_summary.html", name=name, several=len(populations) > 1,
                                  sentences=summary_sentences(population, statistics)))  # fmt: skip
    provenance = {f"{name}, population": dict(p.meta or {}) | {"networks": len(p)} for name, p in populations.items()}
    return Part(Markup("").join(summaries), sections, provenance)


def estimate_words(estimate: Estimate | None) -> str:
    """`0.62 [0.31, 0.81]`."""
    if estimate is None or math.isnan(estimate.value):
        return "n/a"
    text = f"{estimate.value:.2f}"
    if not math.isnan(estimate.low):
        text += f" [{estimate.low:.2f}, {estimate.high:.2f}]"
    return text.replace("-", "−")


def _sort_key(estimate: Estimate | None) -> str:
    return "" if estimate is None or math.isnan(estimate.value) else f"{estimate.value:.6f}"


def correlation_words(entry: MeasureStatistics, logs: tuple[bool, bool]) -> str:
    """What stands beside the scatter; the script writes the same."""
    key = ("x" if logs[0] else "") + ("y" if logs[1] else "")
    pearson = entry.pearson.get(key, entry.pearson.get(""))
    return (
        f"Pearson {estimate_words(pearson)} on these axes, Spearman {estimate_words(entry.spearman)}, "
        f"Kendall {estimate_words(entry.kendall)}; {written(entry.kendall.n)} networks."
    )


def summary_sentences(population: PopulationFrame, statistics: list[MeasureStatistics]) -> list[str]:
    """What the population shows and how far that can be trusted."""
    valued = [entry for entry in statistics if math.isfinite(entry.kendall.value)]
    target = population.frame[population.target]
    sentences = [
        f"{len(population)} networks; {population.target} from {written(float(target.min()), 3)} to "
        f"{written(float(target.max()), 3)}."
    ]
    if not valued:
        return [*sentences, "No measure varies over them, so nothing can be said about any."]
    clear = [entry for entry in valued if entry.adjusted < 1 - CONFIDENCE]
    best = valued[0]
    sentences.append(
        f"{best.measure} goes along with it most closely: Kendall’s tau {estimate_words(best.kendall)}. "
        f"Of {len(valued)} measures, {len(clear)} have an association that chance would hardly give even once when so "
        f"many are tried (Holm-adjusted p < {1 - CONFIDENCE:.2g})."
    )
    fixed = [e for e in clear if e.partial and not math.isnan(e.partial.low) and e.partial.low * e.partial.high > 0]
    if population.parameters:
        names = ", ".join(population.parameters)
        sentences.append(
            f"{len(fixed)} of these {len(clear)} keep a rank correlation that differs from zero when {names} are held "
            "fixed; the others may only show which settings generalize."
        )
    against = [e.measure for e in clear if e.entry and _against(e)]
    if against:
        more = f" and {len(against) - 5} more" if len(against) > 5 else ""
        sentences.append(f"Against the direction that their source expects: {', '.join(against[:5])}{more}.")
    missing = [entry.measure for entry in statistics if entry not in valued]
    if missing:
        more = f" and {len(missing) - 5} more" if len(missing) > 5 else ""
        sentences.append(f"Without a correlation, for lack of values that vary: {', '.join(missing[:5])}{more}.")
    return sentences


def _against(entry: MeasureStatistics) -> bool:
    """Whether a larger gap goes with values that the source calls better."""
    assert entry.entry is not None
    sign = {"lower": 1, "higher": -1}.get(entry.entry.direction, 0)
    return sign * entry.kendall.value < 0


def scatter(population: PopulationFrame, measure: str, choice: ColourChoice | None, logs: tuple[bool, bool]) -> Markup:
    """The plot as it stands before any control is touched, and for those who read without a script."""
    x = population.frame[measure].to_numpy(dtype="float64")
    y = population.frame[population.target].to_numpy(dtype="float64")
    across, down = _axis(x, logs[0]), _axis(y, logs[1])
    axes = []
    for tick in across.ticks():
        place = f"{_percent(across(tick)):.2f}%"
        axes.append(element("line", x1=place, x2=place, y1=TOP, y2=TOP + HEIGHT, class_="grid"))
        axes.append(element("text", written(tick), x=place, y=TOP + HEIGHT + 19, text_anchor="middle"))
    for tick in down.ticks(5):
        place = f"{TOP + HEIGHT * (1 - down(tick)):.1f}"
        axes.append(element("line", x1="0", x2="100%", y1=place, y2=place, class_="grid"))
        axes.append(element("text", written(tick), x="0", y=place, dy="-4"))
    marks = []
    for n, (a, b) in enumerate(zip(x, y, strict=True)):
        shown = math.isfinite(a) and math.isfinite(b)
        left, top = (_percent(across(a)), TOP + HEIGHT * (1 - down(b))) if shown else (0.0, 0.0)
        shape, look = _look(choice, n)
        mark = element("path", d=shape, **look)
        hidden = None if shown else "none"
        marks.append(element("svg", mark, x=f"{left:.2f}%", y=f"{top:.1f}", overflow="visible", display=hidden))
    size = {"width": "100%", "height": TOP + HEIGHT + BOTTOM, "data-top": TOP, "data-height": HEIGHT, "data-side": SIDE}
    label = f"{population.target} over {measure}, one mark per network"
    return element(
        "svg", element("g", *axes, class_="axes"), element("g", *marks, class_="marks"),
        element("circle", r=9, class_="here", display="none"),
        class_="plot scatter", role="application", aria_roledescription="scatter plot", tabindex=0, aria_label=label,
        **size,
    )  # fmt: skip


def _axis(values: np.ndarray[Any, Any], log: bool) -> Scale:
    finite = values[np.isfinite(values)]
    return Scale(float(finite.min()), float(finite.max()), log) if len(finite) else Scale(0.0, 1.0)


def _percent(place: float) -> float:
    return SIDE + (100 - 2 * SIDE) * place


def _look(choice: ColourChoice | None, n: int) -> tuple[str, dict[str, object]]:
    """Shape and colour of a row's mark."""
    if choice is None:
        return SHAPES[0], {"class_": "mark c0"}
    if choice.levels:
        level = choice.codes[n]
        return (SHAPES[level], {"class_": f"mark c{level}"}) if level >= 0 else (SHAPES[0], {"class_": "mark none"})
    finite = [value for value in choice.numbers if math.isfinite(value)]
    scale = Scale(min(finite), max(finite))
    if not math.isfinite(choice.numbers[n]):
        return SHAPES[0], {"class_": "mark none"}
    return SHAPES[0], {"class_": "mark", "fill": ramp_colour(scale(choice.numbers[n]))}


def _legend(choice: ColourChoice | None) -> list[tuple[str, str, Mapping[str, object]]]:
    """(shape, label, attributes) of every entry."""
    if choice is None:
        return []
    if choice.levels:
        return [(SHAPES[n], level, {"class": f"mark c{n}"}) for n, level in enumerate(choice.levels)]
    finite = sorted(value for value in choice.numbers if math.isfinite(value))
    ends = [finite[0], finite[len(finite) // 2], finite[-1]]
    scale = Scale(finite[0], finite[-1])
    return [(SHAPES[0], written(value), {"class": "mark", "fill": ramp_colour(scale(value))}) for value in ends]


def _rows(population: PopulationFrame, measure: str) -> list[list[str]]:
    """The points as a table: name, hyper-parameters, target, measure."""
    columns = [*(population.parameters or ()), population.target, measure]
    return [
        [name, *(_text(population.frame[column].iloc[n]) for column in columns)]
        for n, name in enumerate(network_names(population))
    ]


def _text(value: Any) -> str:
    if isinstance(value, (float, np.floating)):
        return written(float(value))
    return "n/a" if pd.isna(value) else str(value)


def _script_data(
    population: PopulationFrame, statistics: list[MeasureStatistics], choices: list[ColourChoice]
) -> dict[str, Any]:
    """All that the script draws from: values to six digits, statistics as the page writes them."""
    frame = population.frame
    return {
        "names": network_names(population),
        "targetName": population.target,
        "target": _numbers(frame[population.target]),
        "measures": {entry.measure: _numbers(frame[entry.measure]) for entry in statistics},
        "statistics": {
            entry.measure: {
                "pearson": {key: estimate_words(found) for key, found in entry.pearson.items()},
                "spearman": estimate_words(entry.spearman),
                "kendall": estimate_words(entry.kendall),
                "n": entry.kendall.n,
                "log": log_scales(population, entry.measure)[0],
            }
            for entry in statistics
        },
        "colours": {
            choice.name: {
                "levels": choice.levels,
                "index": choice.codes,
                "numbers": [_short(v) for v in choice.numbers],
            }
            for choice in choices
        },
        "shapes": SHAPES,
        "ramp": RAMP,
    }


def _numbers(column: pd.Series[Any]) -> list[float | None]:
    return [_short(float(value)) for value in column.astype("float64")]


def _short(value: float) -> float | None:
    """Six digits are more than a screen shows; None where there is nothing to draw."""
    return float(f"{value:.6g}") if math.isfinite(value) else None
