"""Landscapes on the page: a surface that turns, a contour map, lines, all on one height scale."""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from markupsafe import Markup

from flatscope.formatting import written
from flatscope.landscapes.surface import SPACES, Surface, common_heights
from flatscope.reports.figures import colour_of
from flatscope.reports.markup import Colours, PagePart, Section, answer_and_list, element, table
from flatscope.reports.plots import (
    Curve,
    Plot,
    figure_from_axes_function,
    figure_of_curves,
    plot_cards,
    scale_axis,
    shortened_name,
    svg_of_plot,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Grid = np.ndarray[Any, np.dtype[np.float64]]
DEEPEST = 1e-6  # of the highest point; lower ones are drawn at that height on a logarithmic scale
# From dark to bright with any common colour vision: the stops of Matplotlib's viridis, which draws the maps.
RAMP = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
HOLE = 65535  # in the numbers handed to the script; heights take 0 to 65534
COARSEST, FINEST = 25, 60  # cells along an axis of a surface, which is drawn anew with every movement
SAMPLED = 5  # rows and columns of the table that stands for the picture
PANEL = 3.3, 2.7  # inches of a contour map with its colour bar
MOST_PANELS = 4  # networks whose maps stand at the top of the page
ADVICE = (
    "A plane shows two directions out of very many: a valley there is no proof of a flat minimum, and how wide it "
    "looks depends on how the directions are scaled. All planes of this page share one height scale."
)
TURNING = (
    "Drag a surface to turn it, or focus it and use the arrow keys; plus and minus, the wheel while it has the focus, "
    "or two fingers zoom; 0 puts it back. Surfaces of one network turn together. Point at one to read it off."
)


class Scale(NamedTuple):
    """Heights from `low` to `high`; calling it gives the places of heights, 0 to 1, holes as NaN."""

    low: float
    high: float
    log: bool = False

    def __call__(self, heights: Grid) -> Grid:
        """The places of heights."""
        if self.log:
            places = np.log(np.maximum(heights, self.low * 1e-9) / self.low) / math.log(self.high / self.low)
        else:
            places = (heights - self.low) / (self.high - self.low)
        return np.clip(places, 0.0, 1.0)

    def ticks(self) -> list[float]:
        """Round numbers on the scale."""
        from matplotlib.ticker import LogLocator, MaxNLocator

        ticks = (LogLocator(numticks=6) if self.log else MaxNLocator(5)).tick_values(self.low, self.high)
        return [float(tick) for tick in ticks if self.low <= tick <= self.high]


def label_of_surface(surface: Surface) -> str:
    """Label that tells the surfaces of one network apart."""
    return surface.space_words if surface.dimensions == 2 else f"line in {surface.space_words}"


def network_of_surface(name: str, surface: Surface) -> str:
    """The network's name within the name under which the report keeps a surface."""
    return name.removesuffix(f", {label_of_surface(surface)}")


def planes_by_network(surfaces: Mapping[str, Surface]) -> dict[str, list[Surface]]:
    """The 2-D surfaces by network, weight space first."""
    planes: dict[str, list[Surface]] = {}
    for name, surface in surfaces.items():
        if surface.dimensions == 2:
            planes.setdefault(network_of_surface(name, surface), []).append(surface)
    for group in planes.values():
        group.sort(key=lambda surface: surface.space != "weights")
    return planes


def finite_heights(surface: Surface) -> Grid:
    """The loss with NaN at the poles and wherever it is not a number that can be drawn."""
    loss = np.array(surface.loss.detach().cpu().numpy(), dtype=np.float64)
    loss[~np.isfinite(loss) | surface.poles.cpu().numpy().astype(bool)] = math.nan
    return loss


def height_scale(surfaces: Sequence[Surface]) -> Scale:
    """One scale for all planes: logarithmic where losses are positive and span much."""
    low, high = common_heights(surfaces)
    low = max(low, DEEPEST * high) if low > 0 else low
    if not high > low:  # flat to rounding: a scale of some height shows it as flat
        return Scale(low, low + max(abs(low), 1.0))
    return Scale(low, high, low > 0 and high > 20 * low)


def surfaces_part(surfaces: Mapping[str, Surface], colours: Colours) -> PagePart:
    """All planes on one height scale, lines in one figure; the maps of the networks may stand at the top."""
    groups = planes_by_network(surfaces)
    scale = height_scale([surface for group in groups.values() for surface in group])
    maps = {
        (name, s.space): svg_of_plot(_contour_map_plot(name, s, scale)) for name, group in groups.items() for s in group
    }
    bodies = []
    for network, group in groups.items():
        dot = element("span", class_=f"dot c{colours[network]}", aria_hidden="true") if network in colours else ""
        bodies.append(element("h3", dot, network, class_="network-name"))
        bodies.append(
            element(
                "div", *(_plane_card(network, s, scale, maps[network, s.space]) for s in group), class_="charts planes"
            )
        )
    turning = element("p", TURNING, class_="quiet turn", id="turn-hint", hidden="") if groups else ""
    advice, lines = element("p", ADVICE, class_="quiet"), plot_cards(line_plots(surfaces, colours))
    body = Markup("").join((advice, turning, *bodies, lines))
    provenance = {f"{name}, landscape": surface.meta for name, surface in surfaces.items()}
    section = Section("landscape", "Landscape", body, "loss around the networks; drag a surface to rotate it")
    answer = answer_and_list([f"{name}: {loss_around_network_in_words(surface)}" for name, surface in surfaces.items()])
    above = _planes_at_the_top(groups)
    repeated = tuple(maps[name, surface.space] for name, surface in above.items())
    return PagePart(answer, [section], provenance, picture=_maps_side_by_side(above, scale), below=repeated)


def loss_around_network_in_words(surface: Surface) -> str:
    """Sentence that compares the loss at the network with that around it."""
    low, high = surface.heights
    lower = surface.centre - low > 0.01 * (high - low)  # by more than rounding
    plane = "plane" if surface.dimensions == 2 else "line"
    words = f"loss {written(surface.centre)}, on the {plane} around it from {written(low)} to {written(high)}."
    return f"{words} The network is not at its lowest point." if lower else words


def _planes_at_the_top(groups: Mapping[str, list[Surface]]) -> dict[str, Surface]:
    """One plane of each network, in a space that all of them have; none where they have none in common."""
    spaces = [{surface.space for surface in group} for group in groups.values()]
    shared = [space for space in SPACES if spaces and all(space in planes for planes in spaces)]
    first = list(groups.items())[:MOST_PANELS] if shared else []
    return {name: next(surface for surface in group if surface.space == shared[0]) for name, group in first}


def _maps_side_by_side(chosen: Mapping[str, Surface], scale: Scale) -> Markup:
    """The maps of these planes, one beside the other; nothing of none."""
    if not chosen:
        return Markup("")
    space = SPACES[next(iter(chosen.values())).space]
    maps = [
        element(
            "div",
            element("p", name, class_="panel-title"),
            svg_of_plot(_contour_map_plot(name, surface, scale, "at-the-top-")),
        )
        for name, surface in chosen.items()
    ]
    what = f"Training loss around {'each network' if len(maps) > 1 else 'the network'} (white cross)"
    caption = element("figcaption", f"{what} in {space}, one height scale.", class_="quiet")
    return element("figure", element("div", *maps, class_="panels"), caption, class_="hero")


def surface_plots(surfaces: Mapping[str, Surface], colours: Colours) -> Iterator[Plot]:
    """Per plane its contour map and its relief; then all lines in one figure."""
    groups = planes_by_network(surfaces)
    scale = height_scale([surface for group in groups.values() for surface in group])
    for network, group in groups.items():
        for surface in group:
            yield _contour_map_plot(network, surface, scale)
            yield Plot(f"relief-{network}-{surface.space}", _surface_title(surface), "", _relief_figure(surface, scale))
    yield from line_plots(surfaces, colours)


def _surface_title(surface: Surface) -> str:
    words = surface.space_words
    return words[:1].upper() + words[1:]


def _contour_map_plot(network: str, surface: Surface, scale: Scale, prefix: str = "") -> Plot:
    def fill(ax: Axes) -> None:
        drawn = surface.plot(ax, heights=(scale.low, scale.high), log=scale.log)
        for axis in (ax.xaxis, ax.yaxis):
            scale_axis(axis, axis.get_label_text())
        if drawn is not None:
            bar = ax.figure.colorbar(drawn, ax=ax)
            scale_axis(bar.ax.yaxis, "loss", [scale.low, scale.high], log=scale.log)

    label = f"Contour map of {network} in {surface.space_words}"
    return Plot(
        f"{prefix}landscape-{network}-{surface.space}",
        label,
        plane_in_words(surface),
        figure_from_axes_function(fill, *PANEL),
    )


def _relief_figure(surface: Surface, scale: Scale) -> Callable[[], Figure]:
    """The plane as a surface in three dimensions; holes are left out."""

    def make() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.0, 3.4), layout="constrained")
        ax: Any = figure.add_subplot(projection="3d")
        x, y = np.meshgrid(*(axis.numpy() for axis in surface.axes))
        heights = scale(finite_heights(surface).T)
        if min(heights.shape) > 1 and np.isfinite(heights).any():
            shown = np.ma.masked_invalid(heights)
            ax.plot_surface(x, y, shown, cmap="viridis", vmin=0, vmax=1, rcount=80, ccount=80, linewidth=0)
        ticks = scale.ticks()
        ax.set_zlim(0, 1)
        ax.set_zticks(scale(np.array(ticks)), [written(tick, 3) for tick in ticks])
        ax.set_xlabel("t₁")
        ax.set_ylabel("t₂")
        ax.view_init(elev=32, azim=-52)
        return figure

    return make


def _plane_card(network: str, surface: Surface, scale: Scale, drawn: Markup) -> Markup:
    """The surface to turn, the map, what they show in words, and a few of the numbers."""
    title = _surface_title(surface)
    canvas = element(
        "canvas", tabindex=0, role="application", aria_roledescription="surface to turn", aria_describedby="turn-hint",
        **_canvas_data(network, surface, scale),
    )  # fmt: skip
    relief = element("div", canvas, element("output", aria_live="off"), class_="relief", hidden="")
    step = max(_grid_stride(len(axis)) for axis in surface.axes)
    thinned = "" if step == 1 else f" The surface is drawn with one in {step} points of an axis, the map with all."
    header, rows = _sampled_heights(surface)
    numbers = table(f"Loss of {network}, {title}", header, rows, class_="plain numbers")
    return element(
        "figure",
        element("figcaption", element("h4", title), element("p", f"{surface.directions} directions", class_="quiet")),
        element("div", relief, drawn, class_="views"),
        element("p", plane_in_words(surface) + thinned, class_="quiet words"),
        element("details", element("summary", "Numbers", element("span", f" of {title}", class_="hidden")), numbers),
        class_="card",
    )


def plane_in_words(surface: Surface) -> str:
    """Sentences on what the plane shows, holes included."""
    heights = finite_heights(surface)
    if np.isnan(heights).all():
        return "No point of this plane has a finite loss."
    low, high, centre = float(np.nanmin(heights)), float(np.nanmax(heights)), float(surface.centre)
    words = f"Loss {written(centre, 3)} at the network, from {written(low, 3)} to {written(high, 3)} on the plane."
    if low < centre - 1e-3 * (high - low):
        words += " The network is not the lowest point of it."
    holes = float(np.isnan(heights).mean())
    if holes:
        why = (
            "no network has these path values, or none that is reached without crossing a pole"
            if surface.space == "psi"
            else "the loss is not finite"
        )
        words += f" {100 * holes:.2g}\u202f% of the points are holes: {why}."
    return words


def _canvas_data(network: str, surface: Surface, scale: Scale) -> dict[str, Any]:
    """Attributes of the canvas: heights as 16-bit places on the scale, and what turns them into numbers again."""
    across, up = surface.axes
    places = scale(finite_heights(surface).T[:: _grid_stride(len(up)), :: _grid_stride(len(across))])
    numbers = np.where(np.isnan(places), HOLE, np.round(np.nan_to_num(places) * (HOLE - 1))).astype("<u2")
    return {
        "data_heights": base64.b64encode(numbers.tobytes()).decode(),
        "data_columns": places.shape[1],
        "data_across": f"{float(across[0]):g} {float(across[-1]):g}",
        "data_up": f"{float(up[0]):g} {float(up[-1]):g}",
        "data_scale": f"{scale.low!r} {scale.high!r} {int(scale.log)}",
        "data_ramp": " ".join(RAMP),
        "data_ticks": " ".join(repr(tick) for tick in scale.ticks()),
        "aria_label": f"Loss surface of {network} in {surface.space_words}. " + plane_in_words(surface),
    }


def _grid_stride(n: int) -> int:
    """One in how many points of an axis the surface is drawn with, so that it turns without delay.

    Both ends are kept and the steps stay equal; an axis that cannot be thinned like that stays as it is.
    """
    steps = (step for step in range(1, n) if (n - 1) % step == 0 and COARSEST <= (n - 1) // step <= FINEST)
    return next(steps, 1) if n - 1 > FINEST else 1


def _sampled_heights(surface: Surface) -> tuple[list[str], list[list[str]]]:
    """Header and rows: a few points of the grid, for those who cannot see the picture."""
    heights = finite_heights(surface)
    columns, rows = (
        sorted({round(k * (len(axis) - 1) / (SAMPLED - 1)) for k in range(SAMPLED)}) for axis in surface.axes
    )
    header = ["t₂ \\ t₁", *(written(float(surface.axes[0][c]), 3) for c in columns)]
    words = [["hole" if math.isnan(height) else written(height, 3) for height in row] for row in heights.T.tolist()]
    return header, [[written(float(surface.axes[1][r]), 3), *(words[r][c] for c in columns)] for r in reversed(rows)]


def line_plots(surfaces: Mapping[str, Surface], colours: Colours) -> Iterator[Plot]:
    """All lines in one figure: solid in weight space, dashed in path space, broken at holes."""
    lines = {name: surface for name, surface in surfaces.items() if surface.dimensions == 1}
    if not lines:
        return
    heights = {name: finite_heights(surface) for name, surface in lines.items()}
    holes = {name: int(np.isnan(line).sum()) for name, line in heights.items()}

    drawn = []
    for name, surface in lines.items():
        look = {"fmt": "-" if surface.space == "weights" else "--"}
        colour = colour_of(network_of_surface(name, surface), colours)
        drawn.append(Curve(shortened_name(name, 34), surface.axes[0].numpy(), heights[name], colour, look))
    broken = f" Lines break at {sum(holes.values())} points where there is no network, or no finite loss."
    ends = {name: line[np.isfinite(line)] for name, line in heights.items()}
    yield Plot(
        "landscape-lines",
        "Loss along a line through the network",
        f"The network is at 0.{broken if any(holes.values()) else ''}",
        figure_of_curves(drawn, "t", "loss", columns=1),
        ["line", "lowest", "highest", "holes"],
        [[name, written(float(e.min(initial=math.inf))), written(float(e.max(initial=-math.inf))), written(holes[name])]
         for name, e in ends.items()],
    )  # fmt: skip
