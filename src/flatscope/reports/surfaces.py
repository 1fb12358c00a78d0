"""Landscapes on the page: a surface that turns, a contour map, lines, all on one height scale."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple, cast

import numpy as np
from markupsafe import Markup

from flatscope.formatting import written
from flatscope.landscapes.surface import Surface
from flatscope.reports.charts import Chart, Colours, Key, PlotLine, line_plot
from flatscope.reports.figure_data import Scale, linear_ticks, wants_log
from flatscope.reports.markup import Part, Section, element, fragment

Grid = np.ndarray[Any, np.dtype[np.float64]]
SPACE_WORDS = {"weights": "weight space", "psi": "path space (PSI)"}
DEEPEST = 1e-6  # of the highest point; lower ones are drawn at that height on a logarithmic scale
MOST_BANDS = 14


class PlaneData(NamedTuple):
    """A plane: heights by (row of t₂, column of t₁), NaN where there is a hole."""

    network: str
    space: str
    directions: str
    across: list[float]
    up: list[float]
    heights: Grid
    centre: float

    @property
    def title(self) -> str:
        """The space in words."""
        words = SPACE_WORDS.get(self.space, self.space)
        return words[:1].upper() + words[1:]

    @property
    def holes(self) -> float:
        """Share of the grid points without a height."""
        return float(np.isnan(self.heights).mean())

    @property
    def rise(self) -> tuple[float, float]:
        """Lowest and highest finite loss on the plane; NaN where there is none."""
        finite = self.heights[np.isfinite(self.heights)]
        return (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)


class LineData(NamedTuple):
    """A line through a network; holes are left out and break the line into pieces."""

    network: str
    space: str
    pieces: list[tuple[list[float], list[float]]]
    holes: int


def network_of(name: str, surface: Surface) -> str:
    """The network's name within the name under which the report keeps a surface."""
    return name.removesuffix(f", {SPACE_WORDS.get(surface.space, surface.space)}")


def planes(surfaces: Mapping[str, Surface]) -> dict[str, list[PlaneData]]:
    """The 2-D surfaces by network, weight space first."""
    found: dict[str, list[PlaneData]] = {}
    for name, surface in surfaces.items():
        if surface.dimensions == 2:
            first, second = (axis.tolist() for axis in surface.axes)
            plane = PlaneData(
                network_of(name, surface),
                surface.space,
                surface.directions,
                first,
                second,
                _finite(surface).T,
                float(surface.centre),
            )
            found.setdefault(plane.network, []).append(plane)
    for group in found.values():
        group.sort(key=lambda plane: plane.space != "weights")
    return found


def lines_of(surfaces: Mapping[str, Surface]) -> list[LineData]:
    """The 1-D surfaces."""
    return [
        LineData(network_of(name, surface), surface.space, *_pieces(surface))
        for name, surface in surfaces.items()
        if surface.dimensions == 1
    ]


def _finite(surface: Surface) -> Grid:
    """The loss with NaN at the poles and wherever it is not a number that can be drawn."""
    loss = np.array(surface.loss.detach().cpu().numpy(), dtype=np.float64)
    loss[~np.isfinite(loss) | surface.poles.cpu().numpy().astype(bool)] = math.nan
    return loss


def _pieces(surface: Surface) -> tuple[list[tuple[list[float], list[float]]], int]:
    pieces: list[tuple[list[float], list[float]]] = [([], [])]
    heights = _finite(surface)
    for place, height in zip(surface.axes[0].tolist(), heights.tolist(), strict=True):
        if math.isnan(height):
            pieces.append(([], []))
        else:
            pieces[-1][0].append(place)
            pieces[-1][1].append(height)
    return [piece for piece in pieces if piece[0]], int(np.isnan(heights).sum())


def height_scale(data: Sequence[PlaneData]) -> Scale:
    """One scale for all planes: logarithmic where losses are positive and span much."""
    ends = np.array([plane.rise for plane in data])
    if not np.isfinite(ends).any():
        return Scale(0.0, 1.0)
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    low = max(low, DEEPEST * high) if low > 0 else low
    if not high > low:  # flat to rounding: a scale of some height shows it as flat
        return Scale(low, low + max(abs(low), 1.0))
    return Scale(low, high, low > 0 and high > 20 * low)


def bands(scale: Scale) -> list[float]:
    """Heights at which contour lines run, the ends of the scale included: round ones, as many as can be told apart."""
    if scale.log:
        powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        inner = [step * 10.0**power for power in powers for step in (1, 2, 5)]
        if len(inner) > 3 * MOST_BANDS:
            inner = [10.0**power for power in powers]
    else:
        inner = scale.ticks(MOST_BANDS)
    air = 0.01  # a line that close to an end would only draw a sliver
    return [scale.low, *(level for level in inner if air < scale(level) < 1 - air), scale.high]


def placed(heights: Grid, scale: Scale) -> Grid:
    """Heights as places on the scale, 0 to 1, holes as NaN."""
    places = np.array([math.nan if math.isnan(h) else min(max(scale(h), 0.0), 1.0) for h in heights.flat])
    return places.reshape(heights.shape)


# From dark to bright with any common colour vision; the stops of Matplotlib's viridis, so that papers match the page.
RAMP = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30", "#fde725")
MAP, MARGIN_LEFT, MARGIN_TOP, MARGIN_BOTTOM = 360, 40, 8, 34  # pixels at full size
HOLE = 65535  # in the numbers handed to the script; heights take 0 to 65534
COARSEST, FINEST = 25, 60  # cells along an axis of a surface, which is drawn anew with every movement
SAMPLED = 5  # rows and columns of the table that stands for the picture


def surfaces_part(surfaces: Mapping[str, Surface], colours: Colours) -> Part:
    """All planes on one height scale, lines in one figure, and what may be read off them."""
    groups = planes(surfaces)
    data = [plane for group in groups.values() for plane in group]
    scale = height_scale(data)
    cards = {
        network: [
            {
                "plane": plane,
                "map": contour_map(plane, scale),
                "canvas": _canvas_data(plane, scale),
                "words": plane_words(plane) + _thinned(plane),
                "table": _sampled(plane),
            }
            for plane in group
        ]
        for network, group in groups.items()
    }
    body = fragment(
        "surfaces.html",
        groups=cards,
        colours=colours,
        key=colour_key(scale) if data else "",
        log=scale.log,
        lines=[_lines_chart(surfaces, colours)] if lines_of(surfaces) else [],
    )
    summary = fragment("surface_summary.html", notes=[(p.network, p.title, plane_words(p)) for p in data])
    provenance = {f"{name}, landscape": surface.meta for name, surface in surfaces.items()}
    return Part(summary if data else Markup(""), [Section("landscape", "Landscape", body)], provenance)


def plane_words(plane: PlaneData) -> str:
    """What the plane shows in a sentence or two, holes included."""
    low, high = plane.rise
    if math.isnan(low):
        return "No point of this plane has a finite loss."
    words = (
        f"Loss {written(plane.centre, 3)} at the network, from {written(low, 3)} to {written(high, 3)} on the plane."
    )
    if plane.heights.size and low < plane.centre - 1e-3 * (high - low):
        words += " The network is not the lowest point of it."
    if plane.holes:
        why = (
            "no network has these path values, or none that is reached without crossing a pole"
            if plane.space == "psi"
            else "the loss is not finite"
        )
        words += f" {100 * plane.holes:.2g}\u202f% of the points are holes: {why}."
    return words


def _canvas_data(plane: PlaneData, scale: Scale) -> dict[str, Any]:
    """Attributes of the canvas: heights as 16-bit places on the scale, and what turns them into numbers again."""
    rows, columns = _stride(len(plane.up)), _stride(len(plane.across))
    places = placed(plane.heights[::rows, ::columns], scale)
    numbers = np.where(np.isnan(places), HOLE, np.round(np.nan_to_num(places) * (HOLE - 1))).astype("<u2")
    low, high = plane.rise
    return {
        "data-heights": base64.b64encode(numbers.tobytes()).decode(),
        "data-columns": places.shape[1],
        "data-across": f"{plane.across[0]:g} {plane.across[-1]:g}",
        "data-up": f"{plane.up[0]:g} {plane.up[-1]:g}",
        "data-scale": f"{scale.low!r} {scale.high!r} {int(scale.log)}",
        "data-ramp": " ".join(RAMP),
        "data-ticks": " ".join(repr(float(tick)) for tick in scale.ticks(5)),
        "aria-label": f"Loss surface of {plane.network} in {SPACE_WORDS.get(plane.space, plane.space)}, "
        f"from {written(low, 3)} to {written(high, 3)}",
    }


def _stride(n: int) -> int:
    """One in how many points of an axis the surface is drawn with, so that it turns without delay.

    Both ends are kept and the steps stay equal; an axis that cannot be thinned like that stays as it is.
    """
    steps = (step for step in range(1, n) if (n - 1) % step == 0 and COARSEST <= (n - 1) // step <= FINEST)
    return next(steps, 1) if n - 1 > FINEST else 1


def _thinned(plane: PlaneData) -> str:
    steps = {_stride(len(plane.up)), _stride(len(plane.across))}
    return (
        "" if steps == {1} else f" The surface is drawn with one in {max(steps)} points of an axis, the map with all."
    )


def contour_map(plane: PlaneData, scale: Scale) -> Markup:
    """Filled bands between contour lines as SVG; holes show the striped ground."""
    shapes = [element("rect", width=MAP, height=MAP, class_="ground"), _stripes()] if plane.holes else []
    shapes += _bands(plane, scale)
    x, y = Scale(plane.across[0], plane.across[-1]), Scale(plane.up[0], plane.up[-1])
    parts = [element("svg", *shapes, x=MARGIN_LEFT, y=MARGIN_TOP, width=MAP, height=MAP)]
    if plane.across[0] <= 0 <= plane.across[-1] and plane.up[0] <= 0 <= plane.up[-1]:
        at = (MARGIN_LEFT + MAP * x(0), MARGIN_TOP + MAP * (1 - y(0)))
        cross = f"M{at[0] - 7:.1f} {at[1]:.1f}h14M{at[0]:.1f} {at[1] - 7:.1f}v14"
        parts += [element("path", d=cross, class_="cross halo"), element("path", d=cross, class_="cross")]
    for tick in linear_ticks(plane.across[0], plane.across[-1], 5):
        place = f"{MARGIN_LEFT + MAP * x(tick):.1f}"
        parts.append(element("line", x1=place, x2=place, y1=MARGIN_TOP + MAP, y2=MARGIN_TOP + MAP + 5, class_="tick"))
        parts.append(element("text", written(tick), x=place, y=MARGIN_TOP + MAP + 18, text_anchor="middle"))
    for tick in linear_ticks(plane.up[0], plane.up[-1], 5):
        place = f"{MARGIN_TOP + MAP * (1 - y(tick)):.1f}"
        parts.append(element("line", x1=MARGIN_LEFT - 5, x2=MARGIN_LEFT, y1=place, y2=place, class_="tick"))
        parts.append(element("text", written(tick), x=MARGIN_LEFT - 8, y=place, dy="4", text_anchor="end"))
    label = f"Contour map of {plane.network} in {SPACE_WORDS.get(plane.space, plane.space)}. {plane_words(plane)}"
    size = f"0 0 {MARGIN_LEFT + MAP + 12} {MARGIN_TOP + MAP + MARGIN_BOTTOM}"
    return element("svg", *parts, viewBox=size, class_="map", role="img", aria_label=label)


def _stripes() -> Markup:
    return element("rect", width=MAP, height=MAP, fill="url(#stripes)", class_="holes")


def _bands(plane: PlaneData, scale: Scale) -> list[Markup]:
    """One path per band of heights; ContourPy (which Matplotlib stands on) cuts them out of the grid."""
    from contourpy import FillType, contour_generator  # only here: a page of tables should not wait for it

    if min(plane.heights.shape) < 2 or np.isnan(plane.heights).all():
        return []
    x = np.array([MAP * Scale(plane.across[0], plane.across[-1])(value) for value in plane.across])
    y = np.array([MAP * (1 - Scale(plane.up[0], plane.up[-1])(value)) for value in plane.up])
    places = np.ma.masked_invalid(placed(plane.heights, scale))
    cutter = contour_generator(x, y, places, fill_type=FillType.OuterOffset)
    levels = [scale(level) for level in bands(scale)]
    shapes = []
    for n, (low, high) in enumerate(pairwise(levels)):
        # The lowest and the highest points lie on the ends, so these are moved out a little.
        start, end = (-1e-9 if n == 0 else low), (1 + 1e-9 if n == len(levels) - 2 else high)
        outlines, offsets = cast("tuple[list[Any], list[Any]]", cutter.filled(start, end))
        path = "".join(
            "M" + "L".join(f"{px:.1f} {py:.1f}" for px, py in outline[a:b]) + "Z"
            for outline, cuts in zip(outlines, offsets, strict=True)
            for a, b in pairwise(cuts)
        )
        if path:
            shapes.append(
                element("path", d=path, fill=ramp_colour((low + high) / 2), fill_rule="evenodd", class_="band")
            )
    return shapes


def ramp_colour(place: float) -> str:
    """The colour of a place between 0 and 1, between the nearest two stops."""
    position = min(max(place, 0.0), 1.0) * (len(RAMP) - 1)
    n = min(int(position), len(RAMP) - 2)
    ends = [[int(stop[k : k + 2], 16) for k in (1, 3, 5)] for stop in RAMP[n : n + 2]]
    mixed = (round(a + (b - a) * (position - n)) for a, b in zip(*ends, strict=True))
    return "#" + "".join(f"{channel:02x}" for channel in mixed)


def colour_key(scale: Scale) -> Markup:
    """The height scale that all planes share, as a strip of the bands with their heights."""
    levels = bands(scale)
    parts = []
    for low, high in pairwise(levels):
        start, end = 100 * scale(low), 100 * scale(high)
        colour = ramp_colour((start + end) / 200)
        parts.append(element("rect", x=f"{start:.2f}%", width=f"{end - start:.2f}%", height=14, fill=colour))
    shown = levels if len(levels) <= 7 else [levels[0], *levels[1:-1:2], levels[-1]]
    last = -100.0
    for level in shown:
        place = 100 * scale(level)
        if place - last > (24 if last == 0 else 15) and (place < 85 or level == shown[-1]):
            anchor = "start" if place < 4 else "end" if place > 96 else "middle"
            parts.append(element("text", written(level, 3), x=f"{place:.2f}%", y=30, text_anchor=anchor))
            last = place
    return element("svg", *parts, width="100%", height=34, class_="key", aria_hidden="true")


def _sampled(plane: PlaneData) -> dict[str, Any]:
    """A few rows and columns of the grid, for those who cannot see the picture."""
    rows, columns = (_spread(len(axis)) for axis in (plane.up, plane.across))
    return {
        "header": ["t₂ \\ t₁", *(written(plane.across[c], 3) for c in columns)],
        "rows": [
            [written(plane.up[r], 3), *(_height_words(float(plane.heights[r, c])) for c in columns)]
            for r in reversed(rows)
        ],
    }


def _height_words(height: float) -> str:
    return "hole" if math.isnan(height) else written(height, 3)


def _spread(n: int) -> Sequence[int]:
    return sorted({round(k * (n - 1) / (SAMPLED - 1)) for k in range(SAMPLED)})


def _lines_chart(surfaces: Mapping[str, Surface], colours: Colours) -> Chart:
    """All lines in one figure: solid in weight space, dashed in path space."""
    found = lines_of(surfaces)
    shown = [
        PlotLine(x, y, f"line c{colours.get(line.network, 6)}{' dashed' if line.space != 'weights' else ''}")
        for line in found
        for x, y in line.pieces
    ]
    log = wants_log(value for line in shown for value in line.y)
    labels = [f"{line.network}, {SPACE_WORDS.get(line.space, line.space)}" for line in found]
    holes = sum(line.holes for line in found)
    values = [[value for _, y in line.pieces for value in y] or [math.nan] for line in found]
    return Chart(
        title="Loss along a line through the network",
        caption="The network is at 0."
        + (" Logarithmic scale." if log else "")
        + (f" Lines break at {holes} points where there is no network, or no finite loss." if holes else ""),
        legend=[
            Key(label, colours.get(line.network, 6), line.space != "weights")
            for label, line in zip(labels, found, strict=True)
        ],
        body=line_plot(shown, "Loss along a line through the network.", log_y=log) if shown else Markup(""),
        header=["line", "lowest", "highest", "holes"],
        rows=[
            [label, written(min(v)), written(max(v)), written(line.holes)]
            for label, v, line in zip(labels, values, found, strict=True)
        ],
    )
