"""Figures of measured and trained networks, the same for the page and for papers, and all figures as files."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from flatscope.disk import whole_file
from flatscope.errors import InputError
from flatscope.files import PICTURES, figure_bytes
from flatscope.formatting import as_percent, measure_label, with_error, written
from flatscope.reports.markup import Colours
from flatscope.reports.measured import comparison_data
from flatscope.reports.plots import (
    COLOURS,
    OTHER,
    Curve,
    Plot,
    figure_from_axes_function,
    figure_of,
    figure_of_curves,
    is_better_on_log_axis,
    legend_above,
    scale_axis,
    shortened_name,
)
from flatscope.rows import rows_of
from flatscope.table import Table

if TYPE_CHECKING:
    from matplotlib.axes import Axes

ROW = 0.21  # inches of a line in a figure that lists things
LINES = {"train": "-", "test": "--", "": "-"}
NOT_A_CURVE = ("epoch", "step", "index", "seconds")
MOST_BINS = 40
MOST_POINTS = 160  # of a line; wider layers are shown by that many of their ranks
MOST_LAYERS = 12  # figures of one measure
SHARPNESS, DIVERGENCE = "expected_sharpness", "pac_bayes_kl"

Floats = np.ndarray[Any, np.dtype[np.float64]]
Rows = Mapping[str, pd.DataFrame]  # of one measure, by network


def colour_of(network: str, colours: Colours) -> str:
    """The colour of a network; that of strangers where the page does not know it."""
    return COLOURS[colours.get(network, OTHER) % len(COLOURS)]


def offset_of_network_mark(n: int, networks: int) -> float:
    """Distance of the n-th network's mark from the middle of its line."""
    return (n - (networks - 1) / 2) * 0.8 / networks


def comparison_plot(tables: Mapping[str, Table], colours: Colours, left_out: Collection[str] = ()) -> Iterator[Plot]:
    """Ratios to the first network, a dot with its standard error per measure; at most one plot.

    Args:
        tables: by network.
        colours: of the networks.
        left_out: labels of measures that cannot rank these networks.
    """
    data = comparison_data(tables, left_out) if tables else None
    if data is None or not data.measures:
        return
    first, better = shortened_name(data.reference, 14), shortened_name(data.networks[0], 14)
    sides = f"← {first} better   |   {better if len(data.networks) == 1 else 'others'} better →"

    def draw(ax: Axes) -> None:
        from matplotlib.ticker import FuncFormatter, LogLocator

        for n, network in enumerate(data.networks):
            rows = offset_of_network_mark(n, len(data.networks)) + np.arange(len(data.measures))
            values = [factors[n] for factors in data.factors]
            errors = [0.0 if math.isnan(row[n]) else row[n] for row in data.errors]
            ax.hlines(rows, 1, values, color=colour_of(network, colours), linewidth=1.0, alpha=0.5)
            ax.errorbar(values, rows, xerr=errors, fmt="o", markersize=4.5, elinewidth=1.2,
                        color=colour_of(network, colours), label=shortened_name(network))  # fmt: skip
        ax.axvline(1, color="#333333", linewidth=1)
        ends = [1.0, *(factor for factors in data.factors for factor in factors)]
        scale_axis(ax.xaxis, sides, [min(ends), max(2.0, *ends)], log=True)
        if max(ends) > 100 * min(ends):
            ax.xaxis.set_major_locator(LogLocator(numticks=4))
        ax.xaxis.label.set_fontsize(9)
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
        ax.set_yticks(range(len(data.measures)), [shortened_name(label, 34) for label in data.measures], fontsize=9)
        ax.tick_params(axis="y", length=0)
        ax.set_ylim(len(data.measures) - 0.4, -0.6)
        ax.margins(x=0.06)
        low, high = ax.get_xlim()
        ax.set_xlim(min(0.45, low), max(2.2, high))  # marks to read factors by, and small ones look small
        if len(data.networks) > 1:
            legend_above(ax)

    yield Plot(
        "comparison",
        f"How many times better than {data.reference}",
        "By every invariant measure that may rank them: flatter, a smaller norm, a larger margin. To the right of "
        f"1× {' or '.join(data.networks)} is better, to the left {data.reference}; logarithmic axis, bars are one "
        "standard error where it is known.",
        figure_from_axes_function(draw, height=0.9 + ROW * len(data.measures) * (1 + 0.35 * (len(data.networks) - 1))),
        ["measure", *data.networks],
        [[m, *(" ± ".join(filter(None, with_error(f, e))) for f, e in zip(fs, es, strict=True))]
         for m, fs, es in zip(data.measures, data.factors, data.errors, strict=True)],
    )  # fmt: skip


def measured_plots(tables: Mapping[str, Table], colours: Colours) -> Iterator[Plot]:
    """Distributions over samples, the two criteria, profiles of layers and of units."""
    for measure, rows in _rows_by_measure_and_network(tables, "sample").items():
        yield from _distribution_plots(measure, rows, colours)
    yield from _bi_criteria_plots(tables, colours)
    for measure, rows in _rows_by_measure_and_network(tables, "layer").items():
        yield _layer_profile_plot(measure, rows, colours)
    for measure, rows in _rows_by_measure_and_network(tables, "unit").items():
        layers = dict.fromkeys(str(layer) for frame in rows.values() for layer in frame["layer"])
        for layer in list(layers)[:MOST_LAYERS]:
            yield from _unit_rank_plots(measure, layer, rows, colours)


def _rows_by_measure_and_network(tables: Mapping[str, Table], level: str) -> dict[str, dict[str, pd.DataFrame]]:
    """{measure with its options: {network: its rows}} of the values per sample, layer or unit."""
    rows_by_measure: dict[str, dict[str, pd.DataFrame]] = {}
    for network, table in tables.items():
        for (measure, options), rows in rows_of(table.to_frame(), level).groupby(["measure", "options"], sort=False):
            rows_by_measure.setdefault(measure_label(str(measure), str(options)), {})[network] = rows
    return rows_by_measure


def _finite_values(rows: pd.DataFrame) -> Floats:
    values: Floats = rows["value"].to_numpy(dtype="float64")
    return values[np.isfinite(values)]


def _distribution_plots(measure: str, rows: Rows, colours: Colours) -> Iterator[Plot]:
    values = {
        network: numbers_of_network
        for network, frame in rows.items()
        if len(numbers_of_network := _finite_values(frame))
    }
    if not values:
        return
    pooled = np.concatenate(list(values.values()))
    edges = np.histogram_bin_edges(pooled, bins="fd" if np.ptp(pooled) > 0 else 1)
    if len(edges) > MOST_BINS + 1:  # a few far values would otherwise ask for millions of bins
        edges = np.histogram_bin_edges(pooled, bins=MOST_BINS)

    def draw(ax: Axes) -> None:
        for network, numbers_of_network in values.items():
            shares, colour = (
                np.histogram(numbers_of_network, edges)[0] / len(numbers_of_network),
                colour_of(network, colours),
            )
            ax.stairs(shares, edges, fill=True, color=colour, alpha=0.18)
            ax.stairs(shares, edges, color=colour, linewidth=1.5, label=shortened_name(network))
        if edges[0] < 0 < edges[-1]:
            ax.axvline(0, color="#333333", linewidth=1)
        scale_axis(ax.xaxis, shortened_name(measure, 40))
        scale_axis(ax.yaxis, "share of samples")
        legend_above(ax)

    numbers = [["number", *(written(len(numbers_of_network)) for numbers_of_network in values.values())]]
    for share, name in ((0.25, "lower quartile"), (0.5, "median"), (0.75, "upper quartile")):
        numbers.append(
            [name, *(written(float(np.quantile(numbers_of_network, share))) for numbers_of_network in values.values())]
        )
    numbers.append(
        [
            "share below zero",
            *(as_percent(float((numbers_of_network < 0).mean())) for numbers_of_network in values.values()),
        ]
    )
    caption = "Share of samples by value; all networks share the same bins."
    yield Plot(
        f"distribution-{measure}", measure, caption, figure_from_axes_function(draw), ["per sample", *values], numbers
    )


def _bi_criteria_plots(tables: Mapping[str, Table], colours: Colours) -> Iterator[Plot]:
    """Sharpness against divergence of all networks that have both at two noise levels or more."""
    measured: dict[str, pd.DataFrame] = {}  # by growing alpha: sharpness, its standard error, divergence
    for network, table in tables.items():
        both = _values_by_alpha(table, SHARPNESS).join(
            _values_by_alpha(table, DIVERGENCE)["value"].rename("divergence")
        )
        both = both[both["divergence"] > 0].sort_index()
        if len(both) > 1:
            measured[network] = both
    if not measured:
        return
    drawn = []
    for network, curve in measured.items():
        look = {"yerr": curve["stderr"] if curve["stderr"].any() else None, "marker": "o", "markersize": 4}
        place = curve["divergence"], curve["value"]
        drawn.append(Curve(shortened_name(network), *place, colour_of(network, colours), look | {"elinewidth": 1}))
    yield Plot(
        "sharpness-and-divergence",
        "Expected sharpness against KL divergence",
        "One dot per noise level α, the smallest at the right; a curve nearer to the lower left is better at both.",
        figure_of_curves(drawn, "KL divergence", "expected sharpness", log_x=True),
        ["network", "α", "KL divergence", "expected sharpness", "± s.e."],
        [[network, written(alpha), written(kl), written(value), written(stderr, 2) if stderr else "exact"]
         for network, curve in measured.items() for alpha, value, stderr, kl in curve.itertuples()],
    )  # fmt: skip


def _values_by_alpha(table: Table, measure: str) -> pd.DataFrame:
    """Finite values and standard errors by alpha; where other options differ too, the first set of them."""
    rows = table.to_frame()
    rows = rows[(rows["measure"] == measure) & (rows["options"] != "") & (rows["layer"] == "")]
    alphas = [json.loads(text).get("alpha") for text in rows["options"]]
    rows = rows.assign(alpha=pd.to_numeric(pd.Series(alphas, rows.index, dtype=object), errors="coerce"))
    rows = rows[np.isfinite(rows["value"]) & rows["alpha"].notna()].drop_duplicates("alpha")
    return pd.DataFrame(rows.set_index("alpha")[["value", "stderr"]], dtype="float64")


def _layer_profile_plot(measure: str, rows: Rows, colours: Colours) -> Plot:
    layers = list(dict.fromkeys(str(layer) for frame in rows.values() for layer in frame["layer"]))
    by_layer = {n: frame.drop_duplicates("layer").set_index("layer").reindex(layers) for n, frame in rows.items()}

    def draw(ax: Axes) -> None:
        for n, (network, frame) in enumerate(by_layer.items()):
            errors = frame["stderr"].fillna(0.0)
            places = np.arange(len(layers)) + offset_of_network_mark(n, len(by_layer))
            ax.barh(places, frame["value"], 0.72 / len(by_layer),
                    color=colour_of(network, colours), label=shortened_name(network),
                    xerr=errors if errors.any() else None)  # fmt: skip
        scale_axis(ax.xaxis, shortened_name(measure, 40))
        ax.set_yticks(range(len(layers)), [shortened_name(layer) for layer in layers], fontsize=9)
        ax.set_ylim(len(layers) - 0.4, -0.6)
        legend_above(ax)

    return Plot(
        f"layers-{measure}",
        measure,
        "One value per layer, first layer on top.",
        figure_from_axes_function(draw, height=1.1 + ROW * len(layers) * max(1.0, 0.6 * len(by_layer))),
        ["layer", *by_layer],
        [[layer, *(written(float(frame["value"][layer])) for frame in by_layer.values())] for layer in layers],
    )


def _unit_rank_plots(measure: str, layer: str, rows: Rows, colours: Colours) -> Iterator[Plot]:
    """Values of the units of one layer by rank; networks without that layer are left out."""
    falling = {
        network: np.sort(_finite_values(frame[frame["layer"] == layer]))[::-1] for network, frame in rows.items()
    }
    falling = {network: values for network, values in falling.items() if len(values)}
    if not falling:
        return
    drawn = []
    for network, values in falling.items():
        shown = np.unique(np.linspace(0, len(values) - 1, min(len(values), MOST_POINTS)).round().astype(int))
        look = {"marker": "." if len(shown) < 40 else ""}
        drawn.append(Curve(shortened_name(network), shown + 1, values[shown], colour_of(network, colours), look))
    numbers = [
        [
            network,
            *(written(float(value)) for value in (len(v), v[0], np.median(v), v[-1])),
            as_percent(_share_of_largest_tenth(v)),
        ]
        for network, v in falling.items()
    ]
    header = ["network", "values", "largest", "median", "smallest", "share of the largest tenth"]
    log = is_better_on_log_axis(np.concatenate(list(falling.values())))
    caption = f"Values by rank, the largest first{', logarithmic scale' if log else ''}."
    make = figure_of_curves(drawn, "rank", shortened_name(measure, 30))
    yield Plot(f"units-{measure}-{layer}", f"{measure} · {layer}", caption, make, header, numbers)


def _share_of_largest_tenth(falling: Floats) -> float:
    """Share of the largest tenth in the sum; NaN where values do not all have one sign."""
    if falling[-1] < 0 or falling.sum() <= 0:
        return math.nan
    return float(falling[: max(1, round(len(falling) / 10))].sum() / falling.sum())


def history_plots(histories: Mapping[str, pd.DataFrame], colours: Colours) -> Iterator[Plot]:
    """Training curves, one figure per recorded quantity: solid for the training set, dashed for the test set."""
    frames = {name: frame if "epoch" in frame.columns else frame.reset_index() for name, frame in histories.items()}
    varying = [
        _split_column_name(str(column))[1]
        for frame in frames.values()
        for column in frame.select_dtypes("number")
        if column not in NOT_A_CURVE and frame[column].nunique() > 1
    ]
    for quantity in dict.fromkeys(varying):
        yield from _training_curve_plots(frames, quantity, colours)


def _split_column_name(column: str) -> tuple[str, str]:
    """train_loss → (train, loss)."""
    part, _, name = column.partition("_")
    return (part, name) if part in LINES and name else ("", column)


def _training_curve_plots(frames: Mapping[str, pd.DataFrame], quantity: str, colours: Colours) -> Iterator[Plot]:
    drawn: list[Curve] = []  # finite values by epoch
    numbers: list[list[str]] = []
    for network, frame in frames.items():
        for column in frame.columns:
            part, name = _split_column_name(str(column))
            points = frame.set_index("epoch")[column] if name == quantity else pd.Series(dtype="float64")
            points = points.astype("float64").replace([math.inf, -math.inf], math.nan).dropna()
            if len(points):
                label, look = f"{network}, {part}" if part else network, {"fmt": LINES[part]}
                drawn.append(Curve(shortened_name(label, 30), points.index, points, colour_of(network, colours), look))
                ends = (points.iloc[0], points.min(), points.iloc[-1], points.index[-1])
                numbers.append([label, *(written(float(value)) for value in ends)])
    if not drawn:
        return
    log = is_better_on_log_axis(value for curve in drawn for value in curve.y)
    caption = f"By epoch{', logarithmic scale' if log else ''}."
    header = ["curve", "first", "lowest", "last", "epochs"]
    yield Plot(f"training-{quantity}", quantity, caption, figure_of_curves(drawn, "epoch", quantity), header, numbers)


def save_plots(plots: Iterable[Plot], folder: str | os.PathLike[str], formats: str | Iterable[str]) -> list[Path]:
    """Write plots as files, each under a name of its own."""
    chosen = (formats,) if isinstance(formats, str) else tuple(formats)
    for name in chosen:
        if name not in PICTURES:
            raise InputError(f"formats of {', '.join(PICTURES)}", repr(name), where="save_figures")
    saved: list[Path] = []
    taken: set[str] = set()
    for plot in plots:
        stem, figure = _unique_file_stem(plot.stem, taken), figure_of(plot)
        for extension in chosen:
            target = Path(folder) / f"{stem}.{extension}"
            with whole_file(target) as temporary:
                temporary.write_bytes(figure_bytes(figure, extension))
            saved.append(target)
    return saved


def _unique_file_stem(text: str, taken: set[str]) -> str:
    """A file name that any system takes, and that no other figure of this call has."""
    plain = re.sub(r"[^A-Za-z0-9_-]+", "-", text).strip("-")[:100] or "figure"
    stem, n = plain, 2
    while stem in taken:
        stem, n = f"{plain}-{n}", n + 1
    taken.add(stem)
    return stem
