"""The edge of stability on a page: the answer, the curves against the threshold, and how the spectrum moves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

import numpy as np
import torch
from markupsafe import Markup

from flatscope.formatting import written
from flatscope.reports.figures import colour_of
from flatscope.reports.markup import Colours, PagePart, Section, answer_and_list, element, table
from flatscope.reports.measured import MANY
from flatscope.reports.plots import (
    Plot,
    content_of_first_plots,
    figure_from_axes_function,
    first_plot_for_top,
    is_better_on_log_axis,
    legend_above,
    plot_cards,
    scale_axis,
    shortened_name,
)
from flatscope.training.stability.sharpness_record import BAND, EDGE, Stability

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_FRAMES = 8
CUT = 2 * EDGE  # first weights may be far above the edge; what happens there would be flattened by them
FRAME = 0.85  # inches of one spectral density
CURVES = {  # column: title, how to read it
    "loss": ("Training loss", "On the samples that were recorded."),
    "noise_scale": (
        "Gradient-noise scale",
        "The batch size at which noise and mean of the gradient are equal: larger batches see little noise.",
    ),
}


def stability_part(runs: Mapping[str, Stability], colours: Colours) -> PagePart:
    """Part of the page on stability: place of each training against the edge, curves, every record as a table."""
    sentences = [
        f"{name}: {words}" if len(runs) > 1 else words for name, run in runs.items() for words in run.sentences()
    ]
    plots = list(stability_plots(runs, colours))
    body = plot_cards(plots)
    for name, run in runs.items():
        header, rows = run.cells()
        body += element("p", f"Records of {name}:", class_="quiet note") + table(
            f"Records of {name}", header, rows, tall=len(rows) > MANY
        )
        remarks = [remark for remark in run.rows["remark"].drop_duplicates() if remark]
        body += Markup("").join(element("p", remark, class_="quiet") for remark in remarks)
    sections = [Section("stability", "Edge of stability", body, "sharpness against the step size")]
    provenance = {f"{name}, stability": run.meta for name, run in runs.items()}
    return PagePart(
        answer_and_list(sentences),
        sections,
        provenance,
        picture=first_plot_for_top(plots),
        below=content_of_first_plots(plots),
    )


def stability_plots(runs: Mapping[str, Stability], colours: Colours) -> Iterator[Plot]:
    """η·λ_max and η·batch sharpness against 2, loss, noise scale, spectral densities by step."""
    yield from _sharpness_plots(runs, colours)
    for column, (title, caption) in CURVES.items():
        yield from _stability_curves(runs, colours, column, title, caption)
    for name, run in runs.items():
        if run.densities:
            yield _spectral_density_plot(name, run)


def _sharpness_plots(runs: Mapping[str, Stability], colours: Colours) -> Iterator[Plot]:
    known = {name: run for name, run in runs.items() if run.rows["normalized_sharpness"].notna().any()}
    if not known:
        yield from _stability_curves(
            runs, colours, "lambda_max", "Sharpness λ_max", "No threshold of its update rule is known."
        )
        return
    batches = any(run.rows["normalized_batch"].notna().any() for run in known.values())
    high = max(float(run.rows[["normalized_sharpness", "normalized_batch"]].max().max()) for run in known.values())

    def draw(ax: Axes) -> None:
        ax.axhspan((1 - BAND) * EDGE, (1 + BAND) * EDGE, color="#eeeeee", zorder=0)
        ax.axhline(EDGE, color="#333333", linewidth=1)
        for name, run in known.items():
            colour, rows = colour_of(name, colours), run.rows
            ax.plot(rows["step"], rows["normalized_sharpness"], color=colour, label=shortened_name(name))
            if rows["normalized_batch"].notna().any():
                errors = rows["lr"] * rows["batch_stderr"].fillna(0.0)
                ax.errorbar(rows["step"], rows["normalized_batch"], yerr=errors, color=colour, fmt=".", markersize=4,
                            elinewidth=0.8, label=shortened_name(f"{name}, batch sharpness", 34))  # fmt: skip
        ax.set_ylim(0, CUT if high > CUT else None)
        scale_axis(ax.xaxis, "step")
        scale_axis(ax.yaxis, symbols)
        if len(known) > 1 or batches:
            legend_above(ax, 1 if batches else 2)

    symbols = " or ".join(dict.fromkeys(run.rule.symbol for run in known.values()))
    yield Plot(
        "stability",
        f"{symbols}{' and batch sharpness' if batches else ''} against the edge",
        "A step along the sharpest direction overshoots by more than it came from above the line at 2. Shaded: within "
        f"{BAND:.0%} of it, which counts as being there."
        + (" Dots: η·batch sharpness with its error." if batches else "")
        + (f" Cut at {CUT:g}; the highest is {written(high, 3)}." if high > CUT else ""),
        figure_from_axes_function(draw),
        ["training", "of", "where", "from step", "mean", "95 % interval", "spread"],
        [row for name, run in known.items() for row in _edge_of_stability_rows(name, run)],
    )


def _edge_of_stability_rows(name: str, run: Stability) -> Iterator[list[str]]:
    """Rows of the table below the curves: where λ_max and batch sharpness stay, from when on, with the interval."""
    for kind, curve in (("λ_max", run.sharpness), ("batch sharpness", run.batch_sharpness)):
        if curve.where != "unknown":
            known = not math.isnan(curve.mean.low) or not math.isnan(curve.mean.high)
            interval = f"{curve.mean.low:.3f}–{curve.mean.high:.3f}" if known else "too few records"
            values = written(curve.mean.value, 3), interval, written(curve.spread, 2)
            yield [name, kind, curve.where, str(curve.start), *values]


def _stability_curves(
    runs: Mapping[str, Stability], colours: Colours, column: str, title: str, caption: str
) -> Iterator[Plot]:
    series = {name: run.rows.set_index("step")[column].dropna() for name, run in runs.items()}
    series = {name: values for name, values in series.items() if len(values) > 1}
    if not series:
        return
    everything = np.concatenate([values.to_numpy() for values in series.values()])
    log = is_better_on_log_axis(everything)

    def draw(ax: Axes) -> None:
        for name, values in series.items():
            ax.plot(values.index, values, color=colour_of(name, colours), label=shortened_name(name))
        scale_axis(ax.xaxis, "step")
        scale_axis(ax.yaxis, title.lower() if title.isascii() else title, everything, log=log)
        if len(series) > 1:
            legend_above(ax)

    numbers = [
        [name, *(written(float(value)) for value in (s.iloc[0], s.min(), s.max(), s.iloc[-1]))]
        for name, s in series.items()
    ]
    header = ["training", "first", "lowest", "highest", "last"]
    yield Plot(
        f"stability-{column}",
        title,
        caption + (" Logarithmic scale." if log else ""),
        figure_from_axes_function(draw),
        header,
        numbers,
    )


def _spectral_density_plot(name: str, run: Stability) -> Plot:
    """Small multiples on one axis of eigenvalues, the first step on top, each with the threshold of its step."""
    steps = sorted(run.densities)
    shown = [steps[place] for place in np.unique(np.linspace(0, len(steps) - 1, MOST_FRAMES).round().astype(int))]
    thresholds = run.rows.set_index("step")["threshold"]
    low, high = (end(run.densities[step].range[place] for step in shown) for end, place in ((min, 0), (max, 1)))
    ends = [value for step in shown if (value := float(thresholds.get(step, math.nan))) < 2 * high]
    high = max([high, *ends])
    margin = 0.03 * (high - low) or 1.0
    grid = torch.linspace(low - margin, high + margin, 600, dtype=torch.float64)

    def make() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6, 0.6 + FRAME * len(shown)), layout="constrained")
        rows = figure.subplots(len(shown), 1, sharex=True, squeeze=False)[:, 0]
        for ax, step in zip(rows, shown, strict=True):
            density = run.densities[step]
            width = (high - low) / 150 or 1.0
            values = density.smoothed(grid, width)
            floor = 1 / (3 * density.size * width * math.sqrt(2 * math.pi))
            ax.fill_between(
                grid.numpy(), floor, values.clamp_min(floor).numpy(), color="#0072B2", alpha=0.25, linewidth=0
            )
            ax.plot(grid.numpy(), values.clamp_min(floor).numpy(), color="#0072B2", linewidth=1.1)
            ax.axvline(float(thresholds.get(step, math.nan)), color="#D55E00", linewidth=1.2)
            ax.set_yscale("log")
            ax.set_yticks([])
            ax.minorticks_off()
            ax.spines["left"].set_visible(False)
            ax.annotate(f"step {step}", (0.0, 0.95), xycoords="axes fraction", ha="left", va="top", fontsize=9)
        rows[-1].set_xlim(float(grid[0]), float(grid[-1]))
        scale_axis(rows[-1].xaxis, "eigenvalue of the Hessian")
        return figure

    numbers = []
    for step in shown:
        density = run.densities[step]
        ends_text = [written(end) for end in density.range]
        numbers.append(
            [str(step), *ends_text, written(float(thresholds.get(step, math.nan))), written(density.trace[0])]
        )
    return Plot(
        f"spectra-{name}",
        f"{name}: the spectrum as it moves",
        "Density of the Hessian's eigenvalues, logarithmic, one row per step; the line is the threshold if it is near.",
        make,
        ["step", "smallest", "largest", "threshold", "trace"],
        numbers,
    )
