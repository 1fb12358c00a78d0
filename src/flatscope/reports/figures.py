"""Figures for papers, by Matplotlib: the page draws the same data, so that the two never disagree.

Nothing here touches pyplot: figures are objects of their own and leave no global state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from flatscope.errors import InputError
from flatscope.files import PICTURES, figure_bytes
from flatscope.guards import whole_file
from flatscope.reports.figure_data import (
    BiCriteriaData,
    ComparisonData,
    CurvesData,
    DistributionData,
    LayersData,
    UnitsData,
    bicriteria_data,
    comparison_data,
    curves_data,
    curves_quantities,
    distribution_data,
    distribution_measures,
    layers_data,
    layers_measures,
    log_ticks,
    ratio_range,
    units_data,
    units_profiles,
)
from flatscope.reports.items import by_kind
from flatscope.reports.landscape_figures import landscape_figures
from flatscope.reports.population_frame import (
    ColourChoice,
    MeasureStatistics,
    PopulationFrame,
    colour_choices,
    log_scales,
)
from flatscope.reports.population_page import estimate_words

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any common colour vision; the yellow is left out, it fades on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
LINES = {"train": "-", "test": "--", "": "-"}


def draw_comparison(data: ComparisonData, ax: Axes) -> None:
    """Horizontal bars that start at the first network's value; hatched where rescaling alone moves the measure."""
    from matplotlib.patches import Patch

    height = 0.8 / len(data.networks)
    for n in range(len(data.networks)):
        for m, (ratios, errors) in enumerate(zip(data.ratios, data.errors, strict=True)):
            y = m + (n - (len(data.networks) - 1) / 2) * height
            firm = data.standing[m] == "all"
            ax.barh(
                y,
                ratios[n] - 1,
                height=0.9 * height,
                left=1,
                color=_colour(n + 1),
                alpha=1.0 if firm else 0.45,
                hatch=None if firm else "////",
                edgecolor="white",
                linewidth=0,
                xerr=errors[n] or None,
                error_kw={"elinewidth": 1, "ecolor": "0.2"},
            )
            rightwards = ratios[n] >= 1
            ax.annotate(
                f"{ratios[n]:.3g}×",
                (ratios[n], y),
                xytext=(4 if rightwards else -4, 0),
                textcoords="offset points",
                va="center",
                ha="left" if rightwards else "right",
                fontsize="small",
            )
    low, high = ratio_range(data)
    ticks = log_ticks(low, high)
    ax.set_xscale("log", base=10)
    ax.set_xlim(low, high)
    ax.minorticks_off()
    ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
    ax.set_yticks(range(len(data.measures)), [label.replace("[", "\n[") for label in data.measures])
    ax.invert_yaxis()
    ax.axvline(1, color="0.2", linewidth=1)
    ax.set_xlabel(f"ratio to {data.reference}\nhatched: rescaling the weights moves this measure", fontsize="small")
    handles = [Patch(color=_colour(n + 1), label=network) for n, network in enumerate(data.networks)]
    ax.legend(handles=handles, frameon=False, fontsize="small", loc="lower left", bbox_to_anchor=(0, 1), ncols=2)


def _colour(n: int) -> str:
    return COLOURS[n % len(COLOURS)]


def draw_distribution(data: DistributionData, ax: Axes) -> None:
    """One outlined histogram per network, and a line at zero where values have both signs."""
    for n, (network, shares) in enumerate(zip(data.networks, data.shares, strict=True)):
        colour = _colour(n)
        ax.stairs(shares, data.edges, fill=True, color=colour, alpha=0.18)
        ax.stairs(shares, data.edges, color=colour, linewidth=1.5, label=network)
    if data.edges[0] < 0 < data.edges[-1]:
        ax.axvline(0, color="0.2", linewidth=1)
    ax.set_xlabel(data.measure)
    ax.set_ylabel(f"share of {data.per}s")
    ax.legend(frameon=False, fontsize="small")


def draw_layers(data: LayersData, ax: Axes) -> None:
    """Bars by layer, one colour per network."""
    width = 0.8 / len(data.networks)
    positions = np.arange(len(data.layers))
    for n, network in enumerate(data.networks):
        heights = [row[n] for row in data.values]
        errors = [row[n] for row in data.errors]
        offset = (n - (len(data.networks) - 1) / 2) * width
        ax.bar(
            positions + offset,
            heights,
            0.9 * width,
            color=_colour(n),
            label=network,
            yerr=errors if any(errors) else None,
        )
    crowded = len(data.layers) > 6
    ax.set_xticks(positions, data.layers, rotation=45 if crowded else 0, ha="right" if crowded else "center")
    ax.set_ylabel(data.measure)
    ax.legend(frameon=False, fontsize="small")


def draw_curves(data: CurvesData, ax: Axes) -> None:
    """Solid for the training set, dashed for the test set, one colour per network."""
    networks = list(dict.fromkeys(curve.network for curve in data.curves))
    for curve in data.curves:
        colour = _colour(networks.index(curve.network))
        label = f"{curve.network}, {curve.part}" if curve.part else curve.network
        ax.plot(curve.epochs, curve.values, LINES[curve.part], color=colour, linewidth=1.5, label=label)
    if data.log:
        ax.set_yscale("log")
    ax.set_xlabel("epoch")
    ax.set_ylabel(data.quantity)
    ax.legend(frameon=False, fontsize="small")


def draw_units(data: UnitsData, ax: Axes) -> None:
    """Values over the rank of the unit, one line per network."""
    for n, (network, ranks, values) in enumerate(zip(data.networks, data.ranks, data.values, strict=True)):
        ax.plot(ranks, values, marker="." if len(ranks) < 40 else "", color=_colour(n), linewidth=1.5, label=network)
    if data.log:
        ax.set_yscale("log")
    ax.set_xlabel(f"rank of the unit of {data.layer}")
    ax.set_ylabel(data.measure)
    ax.legend(frameon=False, fontsize="small")


def draw_bicriteria(data: BiCriteriaData, ax: Axes) -> None:
    """Expected sharpness over divergence, one marker per noise level, bars of one standard error."""
    for n, curve in enumerate(data.curves):
        errors = curve.errors if any(curve.errors) else None
        ax.errorbar(
            curve.divergence, curve.sharpness, yerr=errors, marker="o", markersize=4, color=_colour(n),
            linewidth=1.5, elinewidth=1, label=curve.network,
        )  # fmt: skip
    ax.set_xscale("log")
    if data.log:
        ax.set_yscale("log")
    ax.set_xlabel("KL divergence")
    ax.set_ylabel("expected sharpness")
    ax.legend(frameon=False, fontsize="small")


def save_figures(items: object, folder: str | os.PathLike[str], formats: str | Iterable[str] = ("png",)) -> list[Path]:
    """Write every figure that the items allow, for papers and slides.

    Args:
        items: as for `report`: tables, landscapes, populations, histories, Matplotlib figures; named or not.
        folder: made if it is not there.
        formats: of "png", "svg" and "pdf".

    Returns:
        The files, in the order of the report: comparison, distributions, the two criteria, profiles of layers and
        units, landscapes, populations, training curves, given figures.
    """
    chosen = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in chosen:
        if name not in PICTURES:
            raise InputError(f"formats of {', '.join(PICTURES)}", repr(name), where="save_figures")
    saved = []
    for stem, figure in _figures(items):
        for extension in chosen:
            target = Path(folder) / f"{stem}.{extension}"
            with whole_file(target) as temporary:
                temporary.write_bytes(figure_bytes(figure, extension))
            saved.append(target)
    return saved


def _figures(items: object) -> Iterator[tuple[str, Figure]]:
    kinds = by_kind(items)
    tables, histories = kinds["measures"], kinds["histories"]
    stems: list[str] = []
    if len(tables) > 1 and (data := comparison_data(tables)).measures:
        figure, ax = _canvas(height=1.2 + 0.3 * len(data.measures) * len(data.networks))
        draw_comparison(data, ax)
        yield _stem("comparison", stems), figure
    for measure in distribution_measures(tables):
        figure, ax = _canvas()
        draw_distribution(distribution_data(tables, measure), ax)
        yield _stem(f"distribution-{measure}", stems), figure
    if (criteria := bicriteria_data(tables)).curves:
        figure, ax = _canvas()
        draw_bicriteria(criteria, ax)
        yield _stem("sharpness-and-divergence", stems), figure
    for measure in layers_measures(tables):
        figure, ax = _canvas()
        draw_layers(layers_data(tables, measure), ax)
        yield _stem(f"layers-{measure}", stems), figure
    for measure, layer in units_profiles(tables):
        figure, ax = _canvas()
        draw_units(units_data(tables, measure, layer), ax)
        yield _stem(f"units-{measure}-{layer}", stems), figure
    for stem, figure in landscape_figures(kinds["surfaces"]):
        yield _stem(stem, stems), figure
    for name, spectrum in kinds["spectra"].items():
        yield _stem(f"spectrum-{name}", stems), spectrum.figure()
    for name, simplex in kinds["simplexes"].items():
        yield _stem(f"interpolation-{name.removeprefix('interpolation')}", stems), simplex.figure()
    for name, population in kinds["populations"].items():
        for stem, figure in population_figures(name, population, COLOURS):
            yield _stem(stem, stems), figure
    for quantity in curves_quantities(histories):
        figure, ax = _canvas()
        draw_curves(curves_data(histories, quantity), ax)
        yield _stem(f"training-{quantity}", stems), figure
    for title, given in kinds["figures"].items():
        yield _stem(title, stems), given


def _canvas(width: float = 6.0, height: float = 3.6) -> tuple[Figure, Axes]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    ax = figure.add_subplot()
    ax.spines[["top", "right"]].set_visible(False)
    return figure, ax


def _stem(text: str, taken: list[str]) -> str:
    """A file name that any system takes, and that no other figure of this call has."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-") or "figure"
    stem, n = plain, 2
    while stem in taken:
        stem, n = f"{plain}-{n}", n + 1
    taken.append(stem)
    return stem


MARKERS = "os^DvPp"
SCATTERS = 6  # measures with a scatter of their own


def draw_scatter(
    population: PopulationFrame,
    entry: MeasureStatistics,
    choice: ColourChoice | None,
    ax: Axes,
    colours: tuple[str, ...],
) -> None:
    """One mark per network, coloured and shaped by a hyper-parameter."""
    x = population.frame[entry.measure].to_numpy(dtype="float64")
    y = population.frame[population.target].to_numpy(dtype="float64")
    style: dict[str, Any] = {"s": 22, "alpha": 0.75, "linewidths": 0}
    if choice is None:
        ax.scatter(x, y, color=colours[0], **style)
    elif choice.levels:
        codes = np.array(choice.codes)
        for n, level in enumerate(choice.levels):
            ax.scatter(x[codes == n], y[codes == n], color=colours[n], marker=MARKERS[n], label=level, **style)
        ax.legend(title=choice.name, frameon=False, fontsize="small", title_fontsize="small")
    else:
        drawn = ax.scatter(x, y, c=choice.numbers, cmap="viridis", **style)
        ax.figure.colorbar(drawn, ax=ax, label=choice.name)
    log_x, log_y = log_scales(population, entry.measure)
    ax.set_xscale("log" if log_x else "linear")
    ax.set_yscale("log" if log_y else "linear")
    ax.set_xlabel(entry.measure)
    ax.set_ylabel(population.target)
    ax.set_title(f"Kendall {estimate_words(entry.kendall)}, n = {entry.kendall.n}", fontsize="small")


def draw_correlations(statistics: list[MeasureStatistics], ax: Axes, colours: tuple[str, ...]) -> None:
    """Kendall's tau of every measure with its interval, the closest association on top."""
    shown = [entry for entry in statistics if np.isfinite(entry.kendall.value)]
    for n, entry in enumerate(shown):
        value, low, high = entry.kendall.value, entry.kendall.low, entry.kendall.high
        ends = [[value - low], [high - value]] if np.isfinite(low) else None
        ax.errorbar(value, n, xerr=ends, fmt="o", color=colours[0], markersize=3.5, elinewidth=1)
    ax.axvline(0, color="0.2", linewidth=1)
    ax.set_yticks(range(len(shown)), [entry.measure for entry in shown], fontsize="x-small")
    ax.set_ylim(max(len(shown), 1) - 0.5, -0.5)
    ax.set_xlim(-1, 1)
    ax.set_xlabel("Kendall’s tau")


def population_figures(
    name: str, population: PopulationFrame, colours: tuple[str, ...]
) -> Iterator[tuple[str, Figure]]:
    """The correlations of all measures, then the scatter of the closest ones."""
    from matplotlib.figure import Figure

    statistics = population.statistics
    choices = colour_choices(population)
    figure = Figure(figsize=(6.0, 1.0 + 0.16 * len(statistics)), layout="constrained")
    ax = figure.add_subplot()
    ax.spines[["top", "right"]].set_visible(False)
    draw_correlations(statistics, ax, colours)
    yield f"{name}-correlations", figure
    for entry in [found for found in statistics if np.isfinite(found.kendall.value)][:SCATTERS]:
        figure = Figure(figsize=(4.6, 3.6), layout="constrained")
        ax = figure.add_subplot()
        ax.spines[["top", "right"]].set_visible(False)
        draw_scatter(population, entry, choices[0] if choices else None, ax, colours)
        yield f"{name}-{entry.measure}", figure
