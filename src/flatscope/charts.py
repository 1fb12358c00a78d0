"""Charts that results share: values by name, curves over steps; and figures in the size that a paper asks."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np

from flatscope.errors import InputError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#B8558C", "#C98A00", "#2F9BD8", "#5F6368")
WIDTH, HEIGHT, ROW = 6.0, 3.4, 0.24  # inches of a figure, and of a line of a list
WIDEST, LARGEST = 100.0, 100.0  # inches and points
WIDE = 100.0  # ratio of values beyond which an axis is logarithmic
RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")
LONGEST = 34  # letters of a label


@dataclass(frozen=True)
class Bars:
    """Values by name, as points on lines with their errors; several series beside each other.

    Attributes:
        labels: of the lines, the first on top.
        values: of each series by its name, one for each label; NaN where there is none.
        errors: of a series, as long; NaN where not known.
        axis: what the values are.
    """

    labels: Sequence[str]
    values: Mapping[str, Sequence[float]]
    errors: Mapping[str, Sequence[float]] = field(default_factory=dict)
    axis: str = "value"

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of a figure of its own, in inches."""
        return WIDTH, 0.9 + ROW * max(4, len(self.labels) * (1 + 0.3 * (len(self.values) - 1)))

    def draw(self, ax: Axes) -> None:
        """Draw into axes; logarithmic where all values have one sign and differ much."""
        for n, (name, values) in enumerate(self.values.items()):
            places = np.arange(len(self.labels)) + (n - (len(self.values) - 1) / 2) * 0.7 / len(self.values)
            numbers = np.asarray(values, dtype=float)
            errors = np.nan_to_num(np.asarray(self.errors.get(name, np.zeros(len(numbers))), dtype=float), posinf=0.0)
            numbers[~np.isfinite(numbers)] = np.nan
            ax.errorbar(
                numbers, places, xerr=errors, fmt="o", markersize=4, elinewidth=1.2, color=COLOURS[n % len(COLOURS)],
                label=name,
            )  # fmt: skip
        everything = np.concatenate([np.asarray(values, dtype=float) for values in self.values.values()])
        known = everything[np.isfinite(everything)]
        if len(known) and known.min() > 0 and known.max() > WIDE * known.min():
            ax.set_xscale("log")
            label_powers(ax.xaxis)
        elif len(known) and known.min() < 0 < known.max():
            ax.axvline(0, color="0.6", linewidth=0.8)
        ax.set_yticks(range(len(self.labels)), [_shortened_label(label) for label in self.labels])
        ax.set_ylim(len(self.labels) - 0.4, -0.6)
        ax.set_xlabel(self.axis)
        _finish_axes(ax, legend=len(self.values) > 1)


@dataclass(frozen=True)
class Curves:
    """Values along training, a curve for each name.

    Attributes:
        curves: (places, values) by name.
        x: what the places are.
        y: what the values are.
        lines: values that a horizontal line marks, by what it means.
    """

    curves: Mapping[str, tuple[Sequence[float], Sequence[float]]]
    x: str
    y: str
    lines: Mapping[str, float] = field(default_factory=dict)

    @property
    def size(self) -> tuple[float, float]:
        """Width and height of a figure of its own, in inches."""
        return WIDTH, HEIGHT

    def draw(self, ax: Axes) -> None:
        """Draw into axes."""
        for n, (name, (places, values)) in enumerate(self.curves.items()):
            ax.plot(
                places, values, marker=".", linewidth=1.2, color=COLOURS[n % len(COLOURS)], label=_shortened_label(name)
            )
        for name, value in self.lines.items():
            ax.axhline(value, color="0.6", linewidth=0.8, linestyle="--", label=name)
        ax.set_xlabel(self.x)
        ax.set_ylabel(self.y)
        _finish_axes(ax, legend=len(self.curves) + len(self.lines) > 1)


Chart = Bars | Curves


def figure_of_chart(chart: Chart) -> Figure:
    """A figure of its own for a chart."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=chart.size, layout="constrained")
    chart.draw(figure.subplots())
    return figure


def resized_figure(figure: Figure, width: float | None = None, font_size: float | None = None) -> Figure:
    """The figure in the width that a paper has room for, its letters in the size that the paper has.

    Args:
        figure: as it was drawn, in its own size.
        width: inches; the height follows in proportion. None: as it is.
        font_size: points of all text. None: as it is.
    """
    for name, value, most, unit in (("width", width, WIDEST, "inches"), ("font_size", font_size, LARGEST, "points")):
        if value is not None and not (isinstance(value, int | float) and 0 < value <= most):
            raise InputError(f"{unit}, above 0 and at most {most:g}", repr(value), where=f"figure, {name}")
    if width is not None:
        before, height = figure.get_size_inches()
        figure.set_size_inches(width, height * width / before)
    if font_size is not None:
        from matplotlib.text import Text

        figure.canvas.draw()  # tick labels are made when they are drawn
        for text in figure.findobj(Text):
            text.set_fontsize(font_size)
        for ax in figure.axes:  # those that are made later, when the size has changed
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_tick_params(which="both", labelsize=font_size)
    return figure


def label_powers(axis: Axis) -> None:
    """Write the powers of ten of a logarithmic axis in letters of one size: formulas set exponents in smaller ones."""
    from matplotlib.ticker import FuncFormatter, NullFormatter

    axis.set_major_formatter(FuncFormatter(lambda value, _: _power_of_ten(value)))
    axis.set_minor_formatter(NullFormatter())


def _power_of_ten(value: float) -> str:
    exponent = round(math.log10(value)) if value > 0 else 0
    exact = math.isclose(value, 10.0**exponent, rel_tol=1e-9)
    return f"10{str(exponent).translate(RAISED)}" if exact else f"{value:g}"


def _shortened_label(label: str) -> str:
    return label if len(label) <= LONGEST else f"{label[: LONGEST - 1]}…"


def _finish_axes(ax: Any, legend: bool) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    if legend:
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)


def finite_or_nan(values: Iterable[Any]) -> list[float]:
    """Numbers of a column; NaN for what is none or infinite."""
    numbers = [float(value) if value is not None else math.nan for value in values]
    return [value if math.isfinite(value) else math.nan for value in numbers]
