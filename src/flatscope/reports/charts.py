"""The figures of the page: SVG that follows the page's width, text size and colours.

Positions are percentages and text keeps its size, so that a chart reads as well on a phone as on a screen.
Colours are classes (`c0`, `c1`, ...), which the style sheet fills for light, dark and print.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from markupsafe import Markup

from flatscope.formatting import percent, written
from flatscope.reports.figure_data import (
    BiCriteriaData,
    ComparisonData,
    CurvesData,
    DistributionData,
    LayersData,
    Scale,
    UnitsData,
    linear_ticks,
    log_ticks,
    ratio_range,
)
from flatscope.reports.markup import Section, breakable, element, fragment

Colours = Mapping[str, int]  # network: number of its colour
BAR, GAP = 12, 4  # pixels
PLOT_HEIGHT, PLOT_TOP, PLOT_BOTTOM = 200, 18, 26
GRID = 1000  # units of the inner drawing, which is stretched to the plot's size

STANDING_WORDS = {
    "all": "",
    "some": "moved by rescaling single units",
    "none": "moved by rescaling",
    "unknown": "invariance not declared",
}


class Key(NamedTuple):
    """One entry of a legend."""

    label: str
    colour: int
    dashed: bool = False


class Chart(NamedTuple):
    """A figure with its caption, its legend, and its numbers as a table for those who cannot see it."""

    title: str
    caption: str
    legend: list[Key]
    body: Markup
    header: list[str]
    rows: list[list[str]]


def comparison_chart(data: ComparisonData, colours: Colours) -> Chart:
    """Ratios to the first network on a logarithmic axis, a group of bars per measure."""
    low, high = ratio_range(data)
    span = math.log(high / low)

    def place(ratio: float) -> float:
        return 100 * math.log(ratio / low) / span

    groups = []
    for label, ratios, errors, standing in zip(data.measures, data.ratios, data.errors, data.standing, strict=True):
        bars = [
            _bar(place(1), place(ratio), colours[network], faint=standing != "all", error=_ends(ratio, error, place))
            for network, ratio, error in zip(data.networks, ratios, errors, strict=True)
        ]
        values = [(f"{written(ratio, 3)}×", colours[n]) for n, ratio in zip(data.networks, ratios, strict=True)]
        groups.append(_group(label, STANDING_WORDS[standing], bars, values, baseline=place(1)))
    axis = _axis([(place(tick), f"{tick:g}×") for tick in log_ticks(low, high)])
    return Chart(
        title=f"Everything as a ratio to {data.reference}",
        caption=(
            f"Bars start at the value of {data.reference}; the axis is logarithmic. Full bars can be compared; pale "
            "striped ones belong to measures that rescaling the weights moves while the function stays the same."
        ),
        legend=[Key(network, colours[network]) for network in data.networks],
        body=element("ul", *groups, axis, class_="bars"),
        header=["measure", *data.networks],
        rows=[[m, *(_ratio_text(r, e) for r, e in zip(rs, es, strict=True))]
              for m, rs, es in zip(data.measures, data.ratios, data.errors, strict=True)],
    )  # fmt: skip


def _ratio_text(ratio: float, error: float) -> str:
    return f"{written(ratio, 4)} ± {written(error, 2)}" if error else written(ratio, 4)


def layers_chart(data: LayersData, colours: Colours) -> Chart:
    """A group of bars per layer, from zero, all on one scale."""
    finite = [value for row in data.values for value in row if math.isfinite(value)]
    low, high = min([0.0, *finite]), max([0.0, *finite])
    span = (high - low) or 1.0

    def place(value: float) -> float:
        return 100 * (value - low) / span

    groups = []
    for layer, row, errors in zip(data.layers, data.values, data.errors, strict=True):
        bars, values = [], []
        for network, value, error in zip(data.networks, row, errors, strict=True):
            known = math.isfinite(value)  # otherwise an empty strip, so that bars stay beside their numbers
            ends = _ends(value, error, place) if known else None
            bars.append(_bar(place(0), place(value), colours[network], error=ends) if known else element("g"))
            values.append((written(value), colours[network]))
        groups.append(_group(layer, "", bars, values, baseline=place(0)))
    return Chart(
        title=data.measure,
        caption="One value per layer, first layer on top; bars start at zero.",
        legend=[Key(network, colours[network]) for network in data.networks],
        body=element("ul", *groups, class_="bars"),
        header=["layer", *data.networks],
        rows=[[layer, *(written(value) for value in row)] for layer, row in zip(data.layers, data.values, strict=True)],
    )


def _ends(value: float, error: float, place: Callable[[float], float]) -> tuple[float, float] | None:
    """Where one standard error to either side lies; None where the value is exact."""
    return (place(max(value - error, value / 10)), place(value + error)) if error > 0 and value > 0 else None


def _bar(
    start: float, end: float, colour: int, *, faint: bool = False, error: tuple[float, float] | None = None
) -> Markup:
    """A bar in its own strip: the bar, and a line for the standard error."""
    left, width = min(start, end), max(abs(end - start), 0.3)
    shapes = [
        element("rect", x=f"{left:.2f}%", width=f"{width:.2f}%", y=1, height=BAR - 2, class_=f"bar c{colour}", rx=1)
    ]
    if faint:
        shapes.append(
            element("rect", x=f"{left:.2f}%", width=f"{width:.2f}%", y=1, height=BAR - 2, fill="url(#stripes)")
        )
    if error is not None:
        ends = {"x1": f"{error[0]:.2f}%", "x2": f"{error[1]:.2f}%", "y1": BAR / 2, "y2": BAR / 2}
        shapes.append(element("line", class_="error", **ends))
    return element("g", *shapes, class_="faint" if faint else None)


def _group(label: str, remark: str, bars: list[Markup], values: list[tuple[str, int]], baseline: float) -> Markup:
    """A label, its bars below each other, and the numbers beside them."""
    step = BAR + GAP
    height = max(1, len(bars)) * step
    moved = [
        element("svg", bar, y=n * step + GAP // 2, width="100%", height=BAR, overflow="visible")
        for n, bar in enumerate(bars)
    ]
    line = element("line", x1=f"{baseline:.2f}%", x2=f"{baseline:.2f}%", y1=0, y2=height, class_="base")
    picture = element("svg", *moved, line, width="100%", height=height, aria_hidden="true")
    numbers = [element("span", text, class_=f"value c{colour}") for text, colour in values]
    name, bracket, options = label.partition("[")
    small = [element("small", text) for text in (bracket + options, remark) if text]
    return element(
        "li",
        element("span", element("span", breakable(name), class_="name"), *small, class_="label"),
        picture,
        element("span", *numbers, class_="values"),
    )


def _axis(ticks: Iterable[tuple[float, str]]) -> Markup:
    texts = [element("text", text, x=f"{x:.2f}%", y=13, text_anchor=_anchor(x)) for x, text in ticks]
    picture = element("svg", *texts, width="100%", height=18, class_="axis")
    return element("li", element("span"), picture, element("span"), class_="axis-row", aria_hidden="true")


def _anchor(x: float) -> str:
    return "start" if x < 4 else "end" if x > 96 else "middle"


def distribution_chart(data: DistributionData, colours: Colours) -> Chart:
    """Outlined histograms over shared bins."""
    low, high = data.edges[0], data.edges[-1]
    top = max(max(shares) for shares in data.shares)
    span = (high - low) or 1.0
    across = [GRID * (edge - low) / span for edge in data.edges]
    shapes = []
    for network, shares in zip(data.networks, data.shares, strict=True):
        points = [(across[0], float(GRID))]
        for n, share in enumerate(shares):
            y = GRID * (1 - share / top)
            points += [(across[n], y), (across[n + 1], y)]
        points.append((across[-1], float(GRID)))
        shapes.append(_path(points, f"area c{colours[network]}"))
    header = [f"per {data.per}", *data.networks]
    rows = [["number", *(written(n) for n in data.n_values)]]
    rows += [
        [name, *(written(q[n]) for q in data.quartiles)]
        for n, name in enumerate(("lower quartile", "median", "upper quartile"))
    ]
    rows += [["share below zero", *(f"{100 * share:.2g}\u202f%" for share in data.below_zero)]]
    medians = "; ".join(f"{network}: {written(q[1])}" for network, q in zip(data.networks, data.quartiles, strict=True))
    x_ticks = [(100 * (tick - low) / span, written(tick)) for tick in linear_ticks(low, high)]
    y_ticks = [(100 * (1 - tick / top), f"{100 * tick:g}\u202f%") for tick in linear_ticks(0, top, 4)]
    zero = 100 * -low / span if low < 0 < high else None
    return Chart(
        title=data.measure,
        caption=f"Share of {data.per}s by value; all networks share the same bins.",
        legend=[Key(network, colours[network]) for network in data.networks],
        body=_plot(shapes, x_ticks, y_ticks, f"Histograms of {data.measure} per {data.per}. Median {medians}.", zero),
        header=header,
        rows=rows,
    )


def curves_chart(data: CurvesData, colours: Colours) -> Chart:
    """Lines over epochs: solid for the training set, dashed for the test set."""
    lines = [
        PlotLine(c.epochs, c.values, f"line c{colours[c.network]}{' dashed' if c.part == 'test' else ''}")
        for c in data.curves
    ]
    labels = [f"{curve.network}, {curve.part}" if curve.part else curve.network for curve in data.curves]
    last = "; ".join(f"{label}: {written(curve.values[-1])}" for label, curve in zip(labels, data.curves, strict=True))
    return Chart(
        title=data.quantity,
        caption="By epoch" + (", logarithmic scale." if data.log else "."),
        legend=[
            Key(label, colours[curve.network], curve.part == "test")
            for label, curve in zip(labels, data.curves, strict=True)
        ],
        body=line_plot(lines, f"Curves of {data.quantity} over epochs. At the end {last}.", log_y=data.log),
        header=["curve", "first", "best (lowest)", "last", "epochs"],
        rows=[
            [label, written(c.values[0]), written(min(c.values)), written(c.values[-1]), written(c.epochs[-1])]
            for label, c in zip(labels, data.curves, strict=True)
        ],
    )


class PlotLine(NamedTuple):
    """A line of a plot, with a dot at every point where it is `dotted` and standard errors where they are known."""

    x: Sequence[float]
    y: Sequence[float]
    class_: str
    dotted: bool = False
    errors: Sequence[float] = ()


def line_plot(lines: Sequence[PlotLine], description: str, *, log_x: bool = False, log_y: bool = False) -> Markup:
    """Lines over two axes, either of them logarithmic; a linear vertical axis starts at zero or below."""
    x_values = [x for line in lines for x in line.x]
    y_values = [y for line in lines for y in line.y]
    low, high = min(y_values), max(y_values)
    low = low / (high / low) ** 0.05 if log_y else min(low, 0.0)  # air below, or a base line that means zero
    left, right = min(x_values), max(x_values)
    if any(line.dotted for line in lines):  # a dot on the frame would be half a dot
        air = (right / left) ** 0.04 if log_x else (right - left) * 0.04
        left, right = (left / air, right * air) if log_x else (left - air, right + air)
    across, down = Scale(left, right, log_x), Scale(low, high, log_y)
    shapes = []
    for line in lines:
        points = [(GRID * across(x), GRID * (1 - down(y))) for x, y in zip(line.x, line.y, strict=True)]
        shapes.append(_path(points, line.class_))
        if line.dotted:
            shapes += [_path([point], f"{line.class_} dotted") for point in points]
        for (x, _), y, error in zip(points, line.y, line.errors, strict=False):
            if error > 0:
                ends = [min(max(down(end), 0.0), 1.0) for end in (max(y - error, low), y + error)]
                shapes.append(_path([(x, GRID * (1 - end)) for end in ends], f"{line.class_} whisker"))
    return _plot(
        shapes,
        [(100 * across(tick), written(tick)) for tick in across.ticks()],
        [(100 * (1 - down(tick)), written(tick)) for tick in down.ticks(4)],
        description,
    )


def _path(points: list[tuple[float, float]], class_: str) -> Markup:
    if len(points) == 1:
        points = points * 2  # a line of no length still shows its round ends
    return element("path", d="M" + "L".join(f"{x:.1f} {y:.1f}" for x, y in points), class_=class_)


def _plot(
    shapes: list[Markup],
    x_ticks: list[tuple[float, str]],
    y_ticks: list[tuple[float, str]],
    description: str,
    zero: float | None = None,
) -> Markup:
    """Axes, grid and stretched shapes; ticks are (percent, text), from the left and from the top."""
    parts, labels = [], []  # labels come last: they stay readable where a shape lies behind them
    for place, text in y_ticks:
        y = f"{PLOT_TOP + PLOT_HEIGHT * place / 100:.1f}"
        parts.append(element("line", x1="0", x2="100%", y1=y, y2=y, class_="grid"))
        labels.append(element("text", text, x="0", y=y, dy="-4"))
    foot = PLOT_TOP + PLOT_HEIGHT
    for place, text in x_ticks:
        x = f"{place:.2f}%"
        parts.append(element("line", x1=x, x2=x, y1=foot, y2=foot + 5, class_="tick"))
        parts.append(element("text", text, x=x, y=foot + 19, text_anchor=_anchor(place)))
    if zero is not None:
        parts.append(element("line", x1=f"{zero:.2f}%", x2=f"{zero:.2f}%", y1=PLOT_TOP, y2=foot, class_="base"))
    inner = element(
        "svg", *shapes, y=PLOT_TOP, width="100%", height=PLOT_HEIGHT, viewBox=f"0 0 {GRID} {GRID}",
        preserveAspectRatio="none", overflow="visible",
    )  # fmt: skip
    axis = element("line", x1="0", x2="100%", y1=foot, y2=foot, class_="tick")
    size = {"width": "100%", "height": foot + PLOT_BOTTOM}
    return element("svg", *parts, inner, axis, *labels, class_="plot", role="img", aria_label=description, **size)


def units_chart(data: UnitsData, colours: Colours) -> Chart:
    """Lines over the rank of the unit."""
    lines = [
        PlotLine(ranks, values, f"line c{colours[network]}", dotted=len(ranks) == 1)
        for network, ranks, values in zip(data.networks, data.ranks, data.values, strict=True)
    ]
    words = "; ".join(
        f"{network}: {written(values[0])} down to {written(values[-1])}"
        for network, values in zip(data.networks, data.values, strict=True)
    )
    return Chart(
        title=f"{data.measure} · {data.layer}",
        caption=f"Units by rank, the largest first{', logarithmic scale' if data.log else ''}.",
        legend=[Key(network, colours[network]) for network in data.networks],
        body=line_plot(lines, f"{data.measure} of the units of {data.layer} by rank. {words}.", log_y=data.log),
        header=["network", "units", "largest", "median", "smallest", "share of the largest tenth"],
        rows=[
            [network, written(n), written(v[0]), written(median), written(v[-1]), percent(share)]
            for network, n, v, median, share in zip(
                data.networks, data.n_units, data.values, data.medians, data.shares, strict=True
            )
        ],
    )


def bicriteria_chart(data: BiCriteriaData, colours: Colours) -> Chart:
    """Lines that fall from the upper left: less divergence is bought with more sharpness."""
    lines = [
        PlotLine(c.divergence, c.sharpness, f"line c{colours[c.network]}", dotted=True, errors=c.errors)
        for c in data.curves
    ]
    words = "; ".join(
        f"{c.network}: sharpness {written(c.sharpness[0])} at a divergence of {written(c.divergence[0])}, "
        f"{written(c.sharpness[-1])} at {written(c.divergence[-1])}"
        for c in data.curves
    )
    return Chart(
        title="Expected sharpness against KL divergence",
        caption=(
            "One dot per noise level α, the smallest at the right. Across: divergence of the noise from the prior, "
            f"logarithmic. Up: how much the loss rises under that noise{', logarithmic' if data.log else ''}. "
            "A curve nearer to the lower left is better at both."
        ),
        legend=[Key(curve.network, colours[curve.network]) for curve in data.curves],
        body=line_plot(lines, f"Expected sharpness over KL divergence. {words}.", log_x=True, log_y=data.log),
        header=["network", "α", "KL divergence", "expected sharpness", "± s.e."],
        rows=[
            [c.network, written(a), written(d), written(s), written(e, 2) if e else "exact"]
            for c in data.curves
            for a, d, s, e in zip(c.alphas, c.divergence, c.sharpness, c.errors, strict=True)
        ],
    )


def charts_section(anchor: str, title: str, charts: list[Chart], *, wide: bool = False) -> Section:
    """A section of figures; its body is empty where there are none."""
    return Section(anchor, title, fragment("charts.html", charts=charts, wide=wide) if charts else Markup(""))
