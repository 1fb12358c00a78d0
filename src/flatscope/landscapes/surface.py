"""Surface: loss and error on a grid around a network, how it is drawn, and what is needed to draw it again."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from flatscope.charts import label_powers, resized_figure
from flatscope.errors import InputError
from flatscope.files import Arrays
from flatscope.formatting import readable_number
from flatscope.result import DrawnResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

LEVELS = 24
FALLS = 0.01  # of the loss at the network: by so much less than there the loss falls
MOST = 1e200  # Matplotlib closes the outermost bands at 1e250
SPACES = {"weights": "weight space", "psi": "path space (PSI)"}


@dataclass(frozen=True, eq=False, repr=False)
class Surface(DrawnResult):
    """Loss and 0/1 error of a network on a line or a plane through it.

    Attributes:
        loss: mean loss at every grid point, float64, (g,) or (g, g); the entry [i, j] stands at t₁ = axes[0][i] and
            t₂ = axes[1][j]. NaN where `poles` says so.
        error: fraction of samples that are not classified right, of the same shape; None without class labels.
        axes: one tensor of coordinates (g,) per dimension, in units of the directions' lengths.
        centre: loss of the network itself, at the origin.
        space: "weights" or "psi".
        directions: "gaussian", "filter", "hessian" or "checkpoint".
        poles: where the path space has no network, or none that is reached without crossing a pole; booleans.
        meta: provenance: seed, lengths of the directions, rule, part of the data, versions, passes, seconds.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> surface = fs.landscape(problem, grid=5)
        >>> surface.loss.shape, bool(abs(surface.loss[2, 2] - surface.centre) < 1e-6)
        (torch.Size([5, 5]), True)
    """

    loss: Tensor
    error: Tensor | None
    axes: tuple[Tensor, ...]
    centre: float
    space: str
    directions: str
    poles: Tensor
    meta: dict[str, Any] = field(default_factory=dict)

    WORD = "surface"
    QUANTITIES = ("loss", "error")
    COLUMNS = dict.fromkeys(("t1", "t2", "loss", "error"), "float64") | {"pole": "bool"}

    @property
    def dimensions(self) -> int:
        """1 for a line, 2 for a plane."""
        return len(self.axes)

    @property
    def space_words(self) -> str:
        """The space as people write it."""
        return SPACES.get(self.space, self.space)

    @property
    def coordinates(self) -> tuple[Tensor, ...]:
        """t₁ (and t₂) of every grid point, each of the shape of `loss`."""
        return tuple(torch.meshgrid(*self.axes, indexing="ij"))

    @property
    def heights(self) -> tuple[float, float]:
        """Smallest and largest finite loss; NaN where there is none."""
        finite = self.loss[self.loss.isfinite()]
        return (float(finite.min()), float(finite.max())) if len(finite) else (float("nan"), float("nan"))

    def to_frame(self) -> pd.DataFrame:
        """One row per grid point: t1 (and t2), loss, error (NaN without class labels), pole."""
        columns = {f"t{i + 1}": value.flatten().numpy() for i, value in enumerate(self.coordinates)}
        error = torch.full_like(self.loss, float("nan")) if self.error is None else self.error
        columns |= {"loss": self.loss.flatten().numpy(), "error": error.flatten().numpy()}
        return pd.DataFrame(columns | {"pole": self.poles.flatten().numpy()})

    def plot(
        self,
        ax: Axes | None = None,
        *,
        heights: tuple[float, float] | None = None,
        quantity: str = "loss",
        log: bool = False,
    ) -> Any:
        """Draw a line or filled contours into Matplotlib axes; poles stay blank and hatched.

        Args:
            ax: where to draw; a figure of its own without any.
            heights: the height scale, lowest and highest; the same for two surfaces makes them comparable.
            quantity: "loss" or "error".
            log: heights on a logarithmic scale.
        """
        if ax is None:
            return self.figure(quantity=quantity, log=log)
        values = self.values_of(quantity)
        low, high = heights or common_heights([self], quantity)
        ax.set_xlabel("t₁" if len(self.axes) == 2 else "t")
        if len(self.axes) == 1:
            return _draw_loss_line(self, values, ax, (low, high), quantity, log)
        ax.set_ylabel("t₂")
        first, second = (axis.numpy() for axis in self.axes)
        blank = ~np.isfinite(values.T)
        shown = np.ma.masked_array(values.T, mask=blank)  # contour wants [row of t2, column of t1]
        if self.poles.any():
            ax.set_facecolor("#eeeeee")
            ax.fill_between(
                first[[0, -1]], second[0], second[-1], facecolor="none", edgecolor="#bbbbbb", hatch="////", lw=0
            )
        if shown.mask.all() or min(len(first), len(second)) < 2:
            ax.set_xlim(first[0], first[-1])
            ax.set_ylim(second[0], second[-1])
            return None
        levels = _contour_levels(low, high, log)
        extend = "both" if max(abs(low), abs(high)) < MOST else "neither"
        look: Any = {"norm": "log" if log else "linear", "vmin": levels[0], "vmax": levels[-1], "cmap": "viridis"}
        filled = ax.contourf(first, second, shown, levels=levels, extend=extend, **look)
        ax.contour(first, second, shown, levels=levels[::3], colors="white", linewidths=0.4, alpha=0.7)
        if _holds_origin(self):
            ax.plot([0], [0], marker="+", color="white", markersize=8, markeredgewidth=1.4)
        if path := self.meta.get("path"):
            ax.plot(*zip(*path, (0.0, 0.0), strict=True), color="white", marker="o", markersize=2.5, linewidth=1.0)
        ax.set_aspect("equal" if np.isclose(np.ptp(first), np.ptp(second)) else "auto")
        return filled

    def figure(
        self,
        *others: Surface,
        titles: tuple[str, ...] = (),
        quantity: str = "loss",
        log: bool = False,
        width: float | None = None,
        font_size: float | None = None,
    ) -> Figure:
        """A figure of this surface and others beside it, all on one height scale.

        Args:
            others: further surfaces.
            titles: one for each.
            quantity: "loss" or "error".
            log: heights on a logarithmic scale.
            width: inches, such as the width of a column of a paper; the height follows.
            font_size: points of labels, such as those of the paper.
        """
        from matplotlib.figure import Figure

        surfaces = (self, *others)
        if titles and len(titles) != len(surfaces):
            raise InputError(f"{len(surfaces)} titles", str(len(titles)), where="figure")
        heights = common_heights(surfaces, quantity)
        figure = Figure(figsize=(0.9 + 3.5 * len(surfaces), 3.4), layout="constrained")
        panels = np.atleast_1d(figure.subplots(1, len(surfaces)))
        drawn = None
        for n, (surface, ax) in enumerate(zip(surfaces, panels, strict=True)):
            mappable = surface.plot(ax, heights=heights, quantity=quantity, log=log)
            drawn = mappable if len(surface.axes) == 2 and mappable is not None else drawn
            default = f"{surface.space_words}, {surface.directions} directions"
            ax.set_title(titles[n] if titles else default, fontsize=10)
        if drawn is not None:
            figure.colorbar(drawn, ax=list(panels), label=_quantity_label(surfaces[0], quantity), format="%.3g")
        return resized_figure(figure, width, font_size)

    def headline_lines(self) -> list[str]:
        """Sentences on the rise of the loss on the picture, on falls, and on whether pictures can be compared."""
        low, high = self.heights
        centre, lowest, highest = (readable_number(loss, 3) for loss in (self.centre, low, high))
        answer = f"Loss {centre} at the network, {lowest} to {highest} around it"
        falls = math.isfinite(low) and self.centre - low > FALLS * max(abs(self.centre), 1e-12)
        lines = [f"{answer}{': it falls along some direction, so this is no minimum' if falls else ''}."]
        if self.space == "weights" and self.directions == "gaussian":
            lines.append(
                "Do not compare its width with another network's: raw steps depend on how weights are written."
            )
            lines.append('Next: directions="filter", or space="psi", for pictures that compare.')
        else:
            lines.append("A slice shows two directions of very many: it illustrates, and does not measure, flatness.")
        return lines

    def __repr__(self) -> str:
        size = "×".join(str(len(axis)) for axis in self.axes)
        low, high = self.heights
        poles = f", {int(self.poles.sum())} across poles" if bool(self.poles.any()) else ""
        return f"{self.headline}\n" + (
            f"Surface({self.space}, {self.directions}, {size}: loss {readable_number(self.centre)} at the centre, "
            f"{readable_number(low)} to {readable_number(high)}{poles})"
        )

    def _head(self) -> dict[str, Any]:
        return {
            "space": self.space,
            "directions": self.directions,
            "centre": float(self.centre).hex(),
            "shape": list(self.loss.shape),
            "classes": self.error is not None,
            "meta": self.meta,
        }

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        shape = tuple(head["shape"])
        grids = {str(name): frame[name].to_numpy().reshape(shape) for name in frame}
        arrays = {"axis0": grids["t1"].reshape(shape[0], -1)[:, 0], "poles": grids["pole"], **grids}
        return cls._from_arrays(arrays | ({"axis1": grids["t2"][0]} if len(shape) == 2 else {}), head)

    def _arrays(self) -> dict[str, Any]:
        arrays: dict[str, Any] = {f"axis{i}": axis.numpy() for i, axis in enumerate(self.axes)}
        if self.error is not None:
            arrays["error"] = self.error.numpy()
        return arrays | {"loss": self.loss.numpy(), "poles": self.poles.numpy()}

    @classmethod
    def _from_arrays(cls, arrays: Arrays, head: Any) -> Self:
        axes = tuple(torch.tensor(arrays[f"axis{i}"]) for i in range(len(head["shape"])))
        error = torch.tensor(arrays["error"]) if head["classes"] else None
        loss, poles, centre = torch.tensor(arrays["loss"]), torch.tensor(arrays["poles"]), float.fromhex(head["centre"])
        return cls(loss, error, axes, centre, head["space"], head["directions"], poles, head["meta"])


def common_heights(surfaces: Sequence[Surface], quantity: str = "loss") -> tuple[float, float]:
    """Lowest and highest finite value over all surfaces."""
    finite = [part[np.isfinite(part)] for part in (surface.values_of(quantity) for surface in surfaces)]
    joined = np.concatenate(finite) if finite else np.zeros(0)
    return (float(joined.min()), float(joined.max())) if len(joined) else (0.0, 1.0)


def _draw_loss_line(
    surface: Surface, values: Any, ax: Axes, heights: tuple[float, float], quantity: str, log: bool
) -> Any:
    axis = surface.axes[0].numpy()
    drawn = ax.plot(axis, values, color="#0072B2")
    for place in axis[surface.poles.numpy()]:
        ax.axvline(place, color="#dddddd", lw=3, zorder=0)
    if _holds_origin(surface):
        ax.plot([0], [values[int(np.abs(axis).argmin())]], marker="o", color="#D55E00", markersize=5)
    ax.set_ylabel(_quantity_label(surface, quantity))
    low, high = heights
    if log and low > 0:
        ax.set_yscale("log")
        label_powers(ax.yaxis)
    elif high > low:
        ax.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
    return drawn[0]


def _quantity_label(surface: Surface, quantity: str) -> str:
    return f"{surface.meta.get('part', 'train')} {quantity}"


def _holds_origin(surface: Surface) -> bool:
    return all(bool((axis == 0).any()) for axis in surface.axes)


def _contour_levels(low: float, high: float, log: bool) -> np.ndarray[Any, np.dtype[np.float64]]:
    if not high > low:  # a surface that is flat to rounding still needs two levels
        high = low + max(abs(low), 1.0) * 1e-9
    if log and low > 0:
        return np.geomspace(low, high, LEVELS)
    if log:
        raise InputError("heights above zero for a logarithmic scale", f"{low:.3g}", where="plot")
    return np.linspace(low, high, LEVELS)
