"""Plot: a picture with its title, its caption and its numbers; drawn by Matplotlib for the page and for papers alike.

The page takes Matplotlib's SVG apart and puts it in as elements of its own, so that colours follow the theme and text
keeps the page's font. Figures are drawn as wide as a phone and grow from there. Nothing here touches pyplot.
"""

from __future__ import annotations

import io
import math
import re
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple
from weakref import WeakKeyDictionary
from xml.etree import ElementTree

from markupsafe import Markup, escape

from flatscope.formatting import printable_text, written
from flatscope.reports.markup import Section, element, table

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

# Okabe and Ito's palette, told apart with any common colour vision; the yellow is left out, it fades on white.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#6B6B6B")
OTHER = len(COLOURS) - 1  # colour of a network that no table of the page is about
WIDTH, HEIGHT = 4.6, 2.7  # inches, 72 units of the picture each
ROW = 0.2  # inches of a line of text
# Drawn colours as variables of the page's style sheet.
_THEMED = {
    **{colour.lower(): f"var(--c{n})" for n, colour in enumerate(COLOURS)},
    "#000000": "var(--ink)",
    "#333333": "var(--ink)",
    "#cccccc": "var(--line)",
    "#bbbbbb": "var(--strong-line)",
    "#eeeeee": "var(--wash)",
    "#dddddd": "var(--line)",
}
_STYLE: Any = {
    "font.size": 10,
    "text.parse_math": False,  # names may hold any sign
    "svg.fonttype": "none",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.formatter.use_mathtext": False,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "axes.labelsize": 10,
    "lines.linewidth": 1.6,
}

# What was drawn, by what drew it and as long as that lives: the first plot of a part also stands at the top.
_DRAWN: WeakKeyDictionary[Callable[[], Figure], str] = WeakKeyDictionary()


class Plot(NamedTuple):
    """A picture that can be made."""

    stem: str  # what to call its file
    title: str  # above it
    caption: str  # how to read it
    make: Callable[[], Figure]  # draws it
    header: Sequence[str] = ()  # of the table that says the same in numbers
    rows: Sequence[Sequence[str]] = ()  # of that table


def figure_from_axes_function(
    draw: Callable[[Axes], None], width: float = WIDTH, height: float = HEIGHT
) -> Callable[[], Figure]:
    """Function that makes a figure of that size, in inches, from one that draws into axes."""

    def make() -> Figure:
        from matplotlib.figure import Figure

        figure = Figure(figsize=(width, height), layout="constrained")
        draw(figure.add_subplot())
        return figure

    return make


class Curve(NamedTuple):
    """A line of a figure."""

    label: str
    x: Sequence[float] | Any
    y: Sequence[float] | Any
    colour: str
    look: Mapping[str, Any] = {}  # how it is drawn, as `Axes.errorbar` takes it


def figure_of_curves(
    drawn: Sequence[Curve], across: str, up: str, *, log_x: bool = False, columns: int = 2
) -> Callable[[], Figure]:
    """Function that makes a figure of lines; heights are logarithmic where they span much."""

    def draw(ax: Axes) -> None:
        for curve in drawn:
            ax.errorbar(curve.x, curve.y, color=curve.colour, label=curve.label, **curve.look)
        scale_axis(ax.xaxis, across, [x for curve in drawn for x in curve.x], log=log_x)
        heights = [y for curve in drawn for y in curve.y]
        scale_axis(ax.yaxis, up, heights, log=is_better_on_log_axis(heights))
        legend_above(ax, columns)

    return figure_from_axes_function(draw)


def figure_of(plot: Plot) -> Figure:
    """The plot as a Matplotlib figure, in our style."""
    from matplotlib import rc_context

    with rc_context(_STYLE):
        return plot.make()


def svg_of_plot(plot: Plot) -> Markup:
    """The plot as an SVG element of the page."""
    label = f"{plot.title}. {plot.caption}".strip()
    drawn = _DRAWN.get(plot.make)
    if drawn is None:
        drawn = _DRAWN[plot.make] = _svg_text(figure_of(plot), plot.stem)
    return _svg_for_page(drawn, label, salt=plot.stem)


def plot_card(plot: Plot) -> Markup:
    """Title, picture, and the numbers folded below it."""
    caption = element("figcaption", element("h3", plot.title), element("p", plot.caption, class_="quiet"))
    return element("figure", caption, svg_of_plot(plot), _folded_numbers(plot), class_="card")


def _folded_numbers(plot: Plot) -> Markup:
    """The numbers of a plot, folded."""
    if not plot.rows:
        return Markup("")
    hidden = element("span", f" of {plot.title}", class_="hidden")
    numbers = table(f"Numbers of {plot.title}", plot.header, plot.rows, class_="plain numbers")
    return element("details", element("summary", "Numbers", hidden), numbers)


def plot_cards(plots: Iterable[Plot]) -> Markup:
    """Several plots beside each other; empty without any."""
    shown = [plot_card(plot) for plot in plots]
    return element("div", *shown, class_="charts") if shown else Markup("")


def plots_section(anchor: str, title: str, plots: Iterable[Plot], gist: str = "") -> list[Section]:
    """A section of plots; none without any."""
    body = plot_cards(plots)
    return [Section(anchor, title, body, gist)] if body else []


def first_plot_for_top(plots: Sequence[Plot], most: int = 1) -> Markup:
    """The first of the plots, for the top of the page; nothing for none."""
    return Markup("").join(map(_plot_at_the_top, plots[:most]))


def _plot_at_the_top(plot: Plot) -> Markup:
    first = plot._replace(stem=f"top-{plot.stem}")
    caption = element("figcaption", first.caption, class_="quiet")
    title = element("p", first.title, class_="panel-title")
    return element("figure", title, svg_of_plot(first), caption, _folded_numbers(first), class_="hero")


def content_of_first_plots(plots: Sequence[Plot], most: int = 1) -> tuple[Markup, ...]:
    """Content of `first_plot_for_top` for a section of these plots."""
    return (plot_cards(plots),) if len(plots) <= most else tuple(map(plot_card, plots[:most]))


def _svg_text(figure: Figure, salt: str) -> str:
    """Matplotlib's SVG of a figure, the same at every run; its names of shapes depend on the salt."""
    from matplotlib import rc_context
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    buffer = io.BytesIO()
    for patch in (figure.patch, *(ax.patch for ax in figure.axes)):
        patch.set_visible(patch.get_hatch() is not None)
    with rc_context({"svg.hashsalt": salt, "svg.fonttype": "none"}):
        # Figure.savefig would draw it twice.
        FigureCanvasSVG(figure).print_svg(buffer, metadata={"Date": None})  # type: ignore[no-untyped-call]
    return printable_text(buffer.getvalue().decode())


def _svg_for_page(text: str, label: str, salt: str) -> Markup:
    """Matplotlib's SVG as part of the page: without styles of its own, which the page's security policy forbids."""
    root, used = ElementTree.fromstring(text), set(re.findall(r"#([\w-]+)", text))
    # Names of shapes are unique within a figure only; the salt makes them differ between figures.
    prefix = f"f{zlib.crc32(f'{salt} {label}'.encode()):x}-"
    box = " ".join(f"{float(number):g}" for number in root.attrib["viewBox"].split())
    inner = Markup("").join(_svg_element(child, prefix, used) for child in root)
    return element("svg", inner, viewBox=box, class_="chart", role="img", aria_label=label)


_DROPPED = ("metadata", "style", "title")


def _svg_element(node: Any, prefix: str, used: set[str]) -> Markup:
    """One element of Matplotlib's with its style as attributes, themed colours and names of its own."""
    tag = node.tag.rpartition("}")[2]
    if tag in _DROPPED:
        return Markup("")
    if tag == "a":  # what Matplotlib calls the address of a mark is its name here, shown where one points at it
        name = next(value for key, value in node.attrib.items() if key.endswith("href"))
        return element("g", element("title", name), *(_svg_element(child, prefix, used) for child in node))
    attributes: dict[str, str] = {}
    for key, value in node.attrib.items():
        name = key.rpartition("}")[2]
        if name == "style":
            attributes |= _style_as_attributes(value)
        elif name == "id":
            if value in used:
                attributes["id"] = prefix + value
        elif name == "href":
            attributes["href"] = value.replace("#", f"#{prefix}", 1)
        else:
            attributes[name] = value.replace("url(#", f"url(#{prefix}")
    for key in ("fill", "stroke"):
        if key in attributes:
            attributes[key] = _THEMED.get(attributes[key].lower(), attributes[key])
    for key in ("d", "points"):
        if key in attributes:
            attributes[key] = _rounded_positions(attributes[key])
    text = (node.text or "").strip()
    inner = [escape(text)] if text else []
    inner += [_svg_element(child, prefix, used) for child in node]
    if tag == "g" and not any(inner):
        return Markup("")
    return element(tag, *inner, **attributes)


def _style_as_attributes(style: str) -> dict[str, str]:
    """`fill: none; font: 10px 'DejaVu Sans'` as attributes; fonts are the page's own."""
    attributes: dict[str, str] = {}
    for part in style.split(";"):
        name, _, value = (text.strip() for text in part.partition(":"))
        if name in ("font", "font-size"):
            size = re.search(r"([\d.]+)px", value)
            attributes["font-size"] = size[1] if size else "10"
        elif name and not name.startswith("font-"):
            attributes[name] = value
    return attributes


def _rounded_positions(places: str) -> str:
    """Positions to a hundredth of a point."""
    return re.sub(r"-?\d+\.\d{3,}", lambda number: f"{float(number[0]):.2f}".rstrip("0").rstrip("."), places.strip())


def is_better_on_log_axis(values: Iterable[float]) -> bool:
    """True if values are positive and span so much that a linear axis would hide most of them."""
    finite = [value for value in values if math.isfinite(value)]
    return bool(finite) and min(finite) > 0 and max(finite) > 20 * min(finite)


def scale_axis(axis: Axis, title: str, values: Iterable[float] = (), *, log: bool = False) -> None:
    """Its title, and numbers as the page writes them, few enough not to touch; logarithmic where asked and possible."""
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter, NullLocator

    finite = [value for value in values if math.isfinite(value)]
    log = log and bool(finite) and min(finite) > 0
    if log:
        axis._set_axes_scale("log")  # type: ignore[attr-defined]  # what Axes.set_xscale calls
        decades = math.log10(max(finite) / min(finite))
        fine = (1.0, 2.0, 5.0) if decades < 1.5 else (1.0, 3.0) if decades < 2.5 else (1.0,)
        axis.set_major_locator(LogLocator(subs=fine, numticks=5))
        axis.set_minor_locator(NullLocator())
        axis.set_minor_formatter(NullFormatter())
    else:
        axis.set_major_locator(MaxNLocator(nbins=5, steps=[1, 2, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: written(float(f"{value:.6g}"), 3)))
    axis.set_label_text(title)


def legend_above(ax: Axes, columns: int = 2, **look: Any) -> None:
    """A legend above the axes, where it covers nothing, in a figure that grows by it."""
    handles, _ = ax.get_legend_handles_labels()
    if handles:
        rows = -(-len(handles) // columns) + bool(look.get("title"))
        width, height = ax.figure.get_size_inches()  # type: ignore[union-attr]
        ax.figure.set_size_inches(width, height + ROW * rows)  # type: ignore[union-attr]
        place: Any = {"loc": "lower left", "bbox_to_anchor": (-0.02, 1.0), "borderaxespad": 0.2, "columnspacing": 1.2}
        ax.legend(**place, ncols=columns, **look)


def figure_fitted_to_page(make: Callable[[], Figure]) -> Callable[[], Figure]:
    """Function that makes a figure in our size, with numbers on its logarithmic axes as the page writes them."""

    def fitted_figure() -> Figure:
        from matplotlib.ticker import FuncFormatter, LogFormatter, NullFormatter

        figure = make()
        figure.set_size_inches(WIDTH, HEIGHT)
        for axis in (axis for ax in figure.axes for axis in (ax.xaxis, ax.yaxis)):
            if isinstance(axis.get_major_formatter(), LogFormatter):
                axis.set_major_formatter(FuncFormatter(lambda value, _: written(float(f"{value:.6g}"), 3)))
                axis.set_minor_formatter(NullFormatter())
        return figure

    return fitted_figure


def shortened_name(name: str, most: int = 22) -> str:
    """The end of a long name, which tells layers apart better than its beginning."""
    return name if len(name) <= most else f"…{name[1 - most :]}"
