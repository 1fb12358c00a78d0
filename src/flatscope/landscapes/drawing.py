"""How a surface is drawn: lines and filled contours, several on one height scale, poles left blank and hatched.

Nothing here touches pyplot: figures are objects of their own and leave no global state.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from torch import Tensor

from flatscope.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = 24
WORDS = {"weights": "weight space", "psi": "path space"}


class Drawable(Protocol):
    """What drawing reads of a surface."""

    @property
    def loss(self) -> Tensor: ...  # noqa: D102
    @property
    def error(self) -> Tensor | None: ...  # noqa: D102
    @property
    def axes(self) -> tuple[Tensor, ...]: ...  # noqa: D102
    @property
    def space(self) -> str: ...  # noqa: D102
    @property
    def directions(self) -> str: ...  # noqa: D102
    @property
    def poles(self) -> Tensor: ...  # noqa: D102
    @property
    def meta(self) -> dict[str, Any]: ...  # noqa: D102


def draw(
    surface: Drawable,
    ax: Axes,
    *,
    heights: tuple[float, float] | None = None,
    quantity: str = "loss",
    log: bool = False,
) -> Any:
    """A line with the network marked, or filled contours; returns Matplotlib's artist."""
    values = values_of(surface, quantity)
    low, high = heights or common_heights([surface], quantity)
    ax.set_xlabel("$t_1$" if len(surface.axes) == 2 else "$t$")
    if len(surface.axes) == 1:
        return _line(surface, values, ax, (low, high), quantity, log)
    ax.set_ylabel("$t_2$")
    first, second = (axis.numpy() for axis in surface.axes)
    blank = ~np.isfinite(values.T)
    shown = np.ma.masked_array(values.T, mask=blank)  # contour wants [row of t2, column of t1]
    if surface.poles.any():
        ax.set_facecolor("#eeeeee")
        ax.fill_between(
            first[[0, -1]], second[0], second[-1], facecolor="none", edgecolor="#bbbbbb", hatch="////", lw=0
        )
    if shown.mask.all() or min(len(first), len(second)) < 2:
        ax.set_xlim(first[0], first[-1])
        ax.set_ylim(second[0], second[-1])
        return None
    levels = _levels(low, high, log)
    filled = ax.contourf(first, second, shown, levels=levels, cmap="viridis", extend="both", norm=_norm(levels, log))
    ax.contour(first, second, shown, levels=levels[::3], colors="white", linewidths=0.4, alpha=0.7)
    if _holds_origin(surface):
        ax.plot([0], [0], marker="+", color="white", markersize=8, markeredgewidth=1.4)
    ax.set_aspect("equal" if np.isclose(np.ptp(first), np.ptp(second)) else "auto")
    return filled


def side_by_side(
    surfaces: Sequence[Drawable], *, titles: Sequence[str] = (), quantity: str = "loss", log: bool = False
) -> Figure:
    """One panel per surface on one height scale."""
    from matplotlib.figure import Figure

    if titles and len(titles) != len(surfaces):
        raise InputError(f"{len(surfaces)} titles", str(len(titles)), where="figure")
    heights = common_heights(surfaces, quantity)
    figure = Figure(figsize=(0.9 + 3.5 * len(surfaces), 3.4), layout="constrained")
    panels = np.atleast_1d(figure.subplots(1, len(surfaces)))
    drawn = None
    for n, (surface, ax) in enumerate(zip(surfaces, panels, strict=True)):
        found = draw(surface, ax, heights=heights, quantity=quantity, log=log)
        drawn = found if len(surface.axes) == 2 and found is not None else drawn
        default = f"{WORDS.get(surface.space, surface.space)}, {surface.directions} directions"
        ax.set_title(titles[n] if titles else default, fontsize=10)
    if drawn is not None:
        figure.colorbar(drawn, ax=list(panels), label=_label(surfaces[0], quantity), format="%.3g")
    return figure


def common_heights(surfaces: Sequence[Drawable], quantity: str = "loss") -> tuple[float, float]:
    """Lowest and highest finite value over all surfaces."""
    finite = [part[np.isfinite(part)] for part in (values_of(surface, quantity) for surface in surfaces)]
    joined = np.concatenate(finite) if finite else np.zeros(0)
    return (float(joined.min()), float(joined.max())) if len(joined) else (0.0, 1.0)


def values_of(surface: Drawable, quantity: str) -> np.ndarray[Any, np.dtype[np.float64]]:
    """The loss or the error as an array."""
    if quantity not in ("loss", "error"):
        raise UnknownNameError.among(quantity, ("loss", "error"), "quantity to draw")
    chosen = surface.loss if quantity == "loss" else surface.error
    if chosen is None:
        raise InputError("class labels", "a surface without error", where="quantity to draw")
    return np.asarray(chosen.numpy(), dtype=np.float64)


def _line(surface: Drawable, values: Any, ax: Axes, heights: tuple[float, float], quantity: str, log: bool) -> Any:
    axis = surface.axes[0].numpy()
    drawn = ax.plot(axis, values, color="#0072B2")
    for place in axis[surface.poles.numpy()]:
        ax.axvline(place, color="#dddddd", lw=3, zorder=0)
    if _holds_origin(surface):
        ax.plot([0], [values[int(np.abs(axis).argmin())]], marker="o", color="#D55E00", markersize=5)
    ax.set_ylabel(_label(surface, quantity))
    low, high = heights
    if log and low > 0:
        ax.set_yscale("log")
    elif high > low:
        ax.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    return drawn[0]


def _label(surface: Drawable, quantity: str) -> str:
    return f"{surface.meta.get('part', 'train')} {quantity}"


def _holds_origin(surface: Drawable) -> bool:
    return all(bool((axis == 0).any()) for axis in surface.axes)


def _levels(low: float, high: float, log: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    if not high > low:  # a surface that is flat to rounding still needs two levels
        high = low + max(abs(low), 1.0) * 1e-9
    if log and low > 0:
        return np.geomspace(low, high, LEVELS)
    if log:
        raise InputError("heights above zero for a logarithmic scale", f"{low:.3g}", where="plot")
    return np.linspace(low, high, LEVELS)


def _norm(levels: Any, log: bool) -> Any:
    from matplotlib.colors import LogNorm, Normalize

    low, high = float(levels[0]), float(levels[-1])
    return LogNorm(low, high) if log and math.isfinite(low) else Normalize(low, high)
