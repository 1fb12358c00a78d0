"""Figures of measured and trained networks, the same for the page and for papers, and all figures as files."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from flatscope.errors import InputError
from flatscope.files import PICTURES, figure_bytes
from flatscope.formatting import percent, with_error, written
from flatscope.guards import whole_file
from flatscope.reports.figure_data import (
    bicriteria_data,
    comparison_data,
    curves_data,
    curves_quantities,
    distribution_data,
    distribution_measures,
    layers_data,
    layers_measures,
    units_data,
    units_profiles,
)
from flatscope.reports.markup import Colours
from flatscope.reports.plots import COLOURS, OTHER, Plot, figure_of, legend_above, on_axes, scale_axis, shortened
from flatscope.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.21  # inches of a line in a figure that lists things
LINES = {"train": "-", "test": "--", "": "-"}


def colour_of(network: str, colours: Colours) -> str:
    """The colour of a network; that of strangers where the page does not know it."""
    return COLOURS[colours.get(network, OTHER) % len(COLOURS)]


def comparison_plot(tables: Mapping[str, Table], colours: Colours) -> Iterator[Plot]:
    """How many times better than the first network, a dot with its standard error per measure; at most one plot."""
    data = comparison_data(tables) if tables else None
    if data is None or not data.measures:
        return
    step = 0.8 / len(data.networks)
    first, better = shortened(data.reference, 14), shortened(data.networks[0], 14)
    sides = f"← {first} better   |   {better if len(data.networks) == 1 else 'others'} better →"

    def draw(ax: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator

        for n, network in enumerate(data.networks):
            rows = [m + (n - (len(data.networks) - 1) / 2) * step for m in range(len(data.measures))]
            values = [factors[n] for factors in data.factors]
            errors = [0.0 if math.isnan(row[n]) else row[n] for row in data.errors]
            ax.hlines(rows, 1, values, color=colour_of(network, colours), linewidth=1.0, alpha=0.5)
            ax.errorbar(values, rows, xerr=errors, fmt="o", markersize=4.5, elinewidth=1.2,
                        color=colour_of(network, colours), label=shortened(network))  # fmt: skip
        ax.axvline(1, color="#333333", linewidth=1)
        ends = [1.0, *(factor for factors in data.factors for factor in factors)]
        scale_axis(ax.xaxis, [min(ends), max(2.0, *ends)], log=True)
        if max(ends) > 100 * min(ends):
            ax.xaxis.set_major_locator(LogLocator(numticks=4))
        ax.set_xlabel(sides, fontsize=9)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        ax.set_yticks(range(len(data.measures)), [shortened(label, 30) for label in data.measures], fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(data.measures) - 0.4, -0.6)
        ax.margins(x=0.06)
        if len(data.networks) > 1:
            legend_above(ax)

    yield Plot(
        "comparison",
        f"How many times better than {data.reference}",
        "By every invariant measure with a better direction: flatter, a smaller norm, a larger margin. To the right of "
        f"1× {' or '.join(data.networks)} is better, to the left {data.reference}; logarithmic axis, bars are one "
        "standard error where it is known.",
        on_axes(draw, height=0.9 + ROW * len(data.measures) * (1 + 0.35 * (len(data.networks) - 1))),
        ["measure", *data.networks],
        [[m, *(_factor_text(f, e) for f, e in zip(fs, es, strict=True))]
         for m, fs, es in zip(data.measures, data.factors, data.errors, strict=True)],
    )  # fmt: skip


def _factor_text(factor: float, error: float) -> str:
    return " ± ".join(filter(None, with_error(factor, error)))


def measured_plots(tables: Mapping[str, Table], colours: Colours) -> Iterator[Plot]:
    """Distributions over samples, the two criteria, profiles of layers and of units."""
    for measure in distribution_measures(tables):
        yield _distribution(tables, measure, colours)
    if len((bicriteria_data(tables)).curves):
        yield _criteria(tables, colours)
    for measure in layers_measures(tables):
        yield _layers(tables, measure, colours)
    for measure, layer in units_profiles(tables):
        yield _units(tables, measure, layer, colours)


def _distribution(tables: Mapping[str, Table], measure: str, colours: Colours) -> Plot:
    data = distribution_data(tables, measure)

    def draw(ax: Axes) -> None:
        for network, shares in zip(data.networks, data.shares, strict=True):
            colour = colour_of(network, colours)
            ax.stairs(shares, data.edges, fill=True, color=colour, alpha=0.18)
            ax.stairs(shares, data.edges, color=colour, linewidth=1.5, label=shortened(network))
        if data.edges[0] < 0 < data.edges[-1]:
            ax.axvline(0, color="#333333", linewidth=1)
        scale_axis(ax.xaxis, data.edges)
        scale_axis(ax.yaxis, [])
        ax.set_xlabel(shortened(measure, 40))
        ax.set_ylabel(f"share of {data.per}s")
        legend_above(ax)

    rows = [["number", *map(written, data.n_values)]]
    for n, name in enumerate(("lower quartile", "median", "upper quartile")):
        rows.append([name, *(written(quartiles[n]) for quartiles in data.quartiles)])
    rows.append(["share below zero", *map(percent, data.below_zero)])
    caption = f"Share of {data.per}s by value; all networks share the same bins."
    header = [f"per {data.per}", *data.networks]
    return Plot(f"distribution-{measure}", measure, caption, on_axes(draw), header, rows)


def _criteria(tables: Mapping[str, Table], colours: Colours) -> Plot:
    data = bicriteria_data(tables)

    def draw(ax: Axes) -> None:
        for curve in data.curves:
            errors = curve.errors if any(curve.errors) else None
            ax.errorbar(curve.divergence, curve.sharpness, yerr=errors, marker="o", markersize=4, elinewidth=1,
                        color=colour_of(curve.network, colours), label=shortened(curve.network))  # fmt: skip
        scale_axis(ax.xaxis, [value for curve in data.curves for value in curve.divergence], log=True)
        scale_axis(ax.yaxis, [value for curve in data.curves for value in curve.sharpness], log=data.log)
        ax.set_xlabel("KL divergence")
        ax.set_ylabel("expected sharpness")
        legend_above(ax)

    return Plot(
        "sharpness-and-divergence",
        "Expected sharpness against KL divergence",
        "One dot per noise level α, the smallest at the right; a curve nearer to the lower left is better at both.",
        on_axes(draw),
        ["network", "α", "KL divergence", "expected sharpness", "± s.e."],
        [[c.network, written(a), written(d), written(s), written(e, 2) if e else "exact"]
         for c in data.curves
         for a, d, s, e in zip(c.alphas, c.divergence, c.sharpness, c.errors, strict=True)],
    )  # fmt: skip


def _layers(tables: Mapping[str, Table], measure: str, colours: Colours) -> Plot:
    data = layers_data(tables, measure)
    step = 0.8 / len(data.networks)

    def draw(ax: Axes) -> None:
        for n, network in enumerate(data.networks):
            rows = [place + (n - (len(data.networks) - 1) / 2) * step for place in range(len(data.layers))]
            errors = [row[n] for row in data.errors]
            ax.barh(rows, [row[n] for row in data.values], 0.9 * step, color=colour_of(network, colours),
                    label=shortened(network), xerr=errors if any(errors) else None)  # fmt: skip
        scale_axis(ax.xaxis, [])
        ax.set_yticks(range(len(data.layers)), [shortened(layer) for layer in data.layers], fontsize=9)
        ax.set_ylim(len(data.layers) - 0.4, -0.6)
        ax.set_xlabel(shortened(measure, 40))
        legend_above(ax)

    return Plot(
        f"layers-{measure}",
        measure,
        "One value per layer, first layer on top.",
        on_axes(draw, height=1.1 + ROW * len(data.layers) * max(1.0, 0.6 * len(data.networks))),
        ["layer", *data.networks],
        [[layer, *map(written, row)] for layer, row in zip(data.layers, data.values, strict=True)],
    )


def _units(tables: Mapping[str, Table], measure: str, layer: str, colours: Colours) -> Plot:
    data = units_data(tables, measure, layer)

    def draw(ax: Axes) -> None:
        for network, ranks, values in zip(data.networks, data.ranks, data.values, strict=True):
            marker = "." if len(ranks) < 40 else ""
            ax.plot(ranks, values, marker=marker, color=colour_of(network, colours), label=shortened(network))
        scale_axis(ax.xaxis, [])
        scale_axis(ax.yaxis, [value for values in data.values for value in values], log=data.log)
        ax.set_xlabel("rank")
        ax.set_ylabel(shortened(measure, 30))
        legend_above(ax)

    rows = [
        [network, written(n), written(v[0]), written(median), written(v[-1]), percent(share)]
        for network, n, v, median, share in zip(
            data.networks, data.n_units, data.values, data.medians, data.shares, strict=True
        )
    ]
    header = ["network", "values", "largest", "median", "smallest", "share of the largest tenth"]
    caption = f"Values by rank, the largest first{', logarithmic scale' if data.log else ''}."
    return Plot(f"units-{measure}-{layer}", f"{measure} · {layer}", caption, on_axes(draw), header, rows)


def history_plots(histories: Mapping[str, pd.DataFrame], colours: Colours) -> Iterator[Plot]:
    """Training curves, one figure per recorded quantity: solid for the training set, dashed for the test set."""
    for quantity in curves_quantities(histories):
        yield _curves(histories, quantity, colours)


def _curves(histories: Mapping[str, pd.DataFrame], quantity: str, colours: Colours) -> Plot:
    data = curves_data(histories, quantity)
    labels = [f"{curve.network}, {curve.part}" if curve.part else curve.network for curve in data.curves]

    def draw(ax: Axes) -> None:
        for label, curve in zip(labels, data.curves, strict=True):
            colour = colour_of(curve.network, colours)
            ax.plot(curve.epochs, curve.values, LINES[curve.part], color=colour, label=shortened(label, 30))
        scale_axis(ax.xaxis, [])
        scale_axis(ax.yaxis, [value for curve in data.curves for value in curve.values], log=data.log)
        ax.set_xlabel("epoch")
        ax.set_ylabel(quantity)
        legend_above(ax)

    rows = [
        [label, written(c.values[0]), written(min(c.values)), written(c.values[-1]), written(c.epochs[-1])]
        for label, c in zip(labels, data.curves, strict=True)
    ]
    caption = "By epoch" + (", logarithmic scale." if data.log else ".")
    header = ["curve", "first", "lowest", "last", "epochs"]
    return Plot(f"training-{quantity}", quantity, caption, on_axes(draw), header, rows)


def save_plots(plots: Iterable[Plot], folder: str | os.PathLike[str], formats: str | Iterable[str]) -> list[Path]:
    """Write plots as files, each under a name of its own."""
    chosen = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in chosen:
        if name not in PICTURES:
            raise InputError(f"formats of {', '.join(PICTURES)}", repr(name), where="save_figures")
    saved: list[Path] = []
    taken: set[str] = set()
    for plot in plots:
        stem, figure = _stem(plot.stem, taken), figure_of(plot)
        for extension in chosen:
            target = Path(folder) / f"{stem}.{extension}"
            with whole_file(target) as temporary:
                temporary.write_bytes(figure_bytes(figure, extension))
            saved.append(target)
    return saved


def _stem(text: str, taken: set[str]) -> str:
    """A file name that any system takes, and that no other figure of this call has."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:100] or "figure"
    stem, n = plain, 2
    while stem in taken:
        stem, n = f"{plain}-{n}", n + 1
    taken.add(stem)
    return stem
