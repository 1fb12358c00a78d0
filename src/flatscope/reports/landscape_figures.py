"""Landscapes for papers: contour maps side by side and reliefs, every plane of a call on one height scale."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from flatscope.formatting import written
from flatscope.landscapes.surface import Surface
from flatscope.reports.figure_data import Scale, wants_log
from flatscope.reports.surfaces import SPACE_WORDS, PlaneData, bands, height_scale, lines_of, placed, planes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

HATCH: dict[str, Any] = {"facecolor": "0.95", "edgecolor": "0.75", "hatch": "////", "linewidth": 0.0}
PANEL = 3.4  # inches


def draw_contours(plane: PlaneData, ax: Axes, scale: Scale) -> Any:
    """Filled contours with lines between them; holes hatched; a cross where the network is."""
    x, y = np.array(plane.across), np.array(plane.up)
    if plane.holes:
        ax.fill_between(x[[0, -1]], y[0], y[-1], **HATCH)
    places = np.ma.masked_invalid(placed(plane.heights, scale))
    drawn = None
    if min(places.shape) > 1 and not places.mask.all():
        levels = [scale(level) for level in bands(scale)]
        drawn = ax.contourf(x, y, places, levels=levels, cmap="viridis", vmin=0, vmax=1)
        ax.contour(x, y, places, levels=levels[1:-1], colors="white", linewidths=0.4, alpha=0.7)
    if x[0] <= 0 <= x[-1] and y[0] <= 0 <= y[-1]:
        ax.plot([0], [0], marker="+", color="black", markersize=9, markeredgewidth=3)
        ax.plot([0], [0], marker="+", color="white", markersize=8, markeredgewidth=1.4)
    ax.set_xlim(x[0], x[-1])
    ax.set_ylim(y[0], y[-1])
    ax.set_aspect("equal" if np.isclose(np.ptp(x), np.ptp(y)) else "auto")
    ax.set_xlabel("$t_1$")
    ax.set_ylabel("$t_2$")
    ax.set_title(plane.title, fontsize="medium")
    return drawn


def draw_relief(plane: PlaneData, ax: Any, scale: Scale) -> None:
    """The plane as a surface in three dimensions; holes are left out."""
    x, y = np.meshgrid(plane.across, plane.up)
    heights = placed(plane.heights, scale)
    if min(heights.shape) > 1 and np.isfinite(heights).any():
        shown = np.ma.masked_invalid(heights)
        ax.plot_surface(x, y, shown, cmap="viridis", vmin=0, vmax=1, rcount=80, ccount=80, linewidth=0)
    ticks = scale.ticks(5)
    ax.set_zlim(0, 1)
    ax.set_zticks([scale(tick) for tick in ticks], [written(tick, 3) for tick in ticks])
    ax.set_xlabel("$t_1$")
    ax.set_ylabel("$t_2$")
    ax.view_init(elev=32, azim=-52)
    ax.set_title(plane.title, fontsize="medium")


def landscape_figures(surfaces: Mapping[str, Surface]) -> Iterator[tuple[str, Figure]]:
    """Per network its contour maps and its reliefs; then all lines in one figure."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    groups = planes(surfaces)
    scale = height_scale([plane for group in groups.values() for plane in group])
    for network, group in groups.items():
        figure = Figure(figsize=(0.9 + PANEL * len(group), PANEL), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(group)))
        for plane, ax in zip(group, panels, strict=True):
            draw_contours(plane, ax, scale)
        ticks = scale.ticks(5)
        bar = figure.colorbar(ScalarMappable(cmap="viridis"), ax=list(panels), label="loss")
        bar.set_ticks([scale(tick) for tick in ticks], labels=[written(tick, 3) for tick in ticks])
        yield f"landscape-{network}", figure
        figure = Figure(figsize=(1.15 * PANEL * len(group), PANEL), layout="constrained")
        for n, plane in enumerate(group):
            draw_relief(plane, figure.add_subplot(1, len(group), n + 1, projection="3d"), scale)
        yield f"relief-{network}", figure
    if lines_of(surfaces):
        figure = Figure(figsize=(6.0, 3.6), layout="constrained")
        draw_lines(surfaces, figure.add_subplot())
        yield "landscape-lines", figure


def draw_lines(surfaces: Mapping[str, Surface], ax: Axes) -> None:
    """Loss along lines: solid in weight space, dashed in path space, broken at holes."""
    found = lines_of(surfaces)
    for n, line in enumerate(found):
        for k, (x, y) in enumerate(line.pieces):
            label = f"{line.network}, {SPACE_WORDS.get(line.space, line.space)}" if k == 0 else None
            ax.plot(x, y, "-" if line.space == "weights" else "--", color=f"C{n % 10}", linewidth=1.5, label=label)
    if wants_log(value for line in found for _, y in line.pieces for value in y):
        ax.set_yscale("log")
    ax.spines[["top", "right"]].set_visible(False)
    ax.set_xlabel("$t$")
    ax.set_ylabel("loss")
    if ax.get_legend_handles_labels()[0]:
        ax.legend(frameon=False, fontsize="small")
