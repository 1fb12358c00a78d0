"""Populations for papers: the closest measures against the target, and the correlations of all of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from flatscope.reports.population import (
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
