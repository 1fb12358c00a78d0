"""Surface: loss and error on a grid around a network, with what is needed to draw it again."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
import torch
from torch import Tensor

from flatscope.files import Arrays
from flatscope.formatting import number
from flatscope.landscapes.drawing import draw, side_by_side
from flatscope.results import DrawnResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


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
    COLUMNS = dict.fromkeys(("t1", "t2", "loss", "error"), "float64") | {"pole": "bool"}

    @property
    def dimensions(self) -> int:
        """1 for a line, 2 for a plane."""
        return len(self.axes)

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
        ax: Axes,
        *,
        heights: tuple[float, float] | None = None,
        quantity: str = "loss",
        log: bool = False,
    ) -> Any:
        """Draw a line or filled contours into Matplotlib axes; poles stay blank and hatched.

        Args:
            ax: where to draw.
            heights: the height scale, lowest and highest; the same for two surfaces makes them comparable.
            quantity: "loss" or "error".
            log: heights on a logarithmic scale.
        """
        return draw(self, ax, heights=heights, quantity=quantity, log=log)

    def figure(
        self, *others: Surface, titles: tuple[str, ...] = (), quantity: str = "loss", log: bool = False
    ) -> Figure:
        """A figure of this surface and others beside it, all on one height scale."""
        return side_by_side((self, *others), titles=titles, quantity=quantity, log=log)

    def __repr__(self) -> str:
        size = "×".join(str(len(axis)) for axis in self.axes)
        low, high = self.heights
        poles = f", {int(self.poles.sum())} across poles" if bool(self.poles.any()) else ""
        return (
            f"Surface({self.space}, {self.directions}, {size}: loss {number(self.centre)} at the centre, "
            f"{number(low)} to {number(high)}{poles})"
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
        columns = {str(name): torch.tensor(frame[name].to_numpy()).reshape(shape) for name in frame}
        first = columns["t1"] if len(shape) == 1 else columns["t1"][:, 0]
        axes = (first,) if len(shape) == 1 else (first, columns["t2"][0])
        error = columns["error"] if head["classes"] else None
        return cls._of(head, columns["loss"], error, tuple(axis.clone() for axis in axes), columns["pole"])

    def _arrays(self) -> dict[str, Any]:
        arrays: dict[str, Any] = {f"axis{i}": axis.numpy() for i, axis in enumerate(self.axes)}
        if self.error is not None:
            arrays["error"] = self.error.numpy()
        return arrays | {"loss": self.loss.numpy(), "poles": self.poles.numpy()}

    @classmethod
    def _from_arrays(cls, arrays: Arrays, head: Any) -> Self:
        axes = tuple(torch.from_numpy(arrays[f"axis{i}"]) for i in range(len(head["shape"])))
        error = torch.from_numpy(arrays["error"]) if head["classes"] else None
        return cls._of(head, torch.from_numpy(arrays["loss"]), error, axes, torch.from_numpy(arrays["poles"]))

    @classmethod
    def _of(
        cls, head: dict[str, Any], loss: Tensor, error: Tensor | None, axes: tuple[Tensor, ...], poles: Tensor
    ) -> Self:
        centre = float.fromhex(head["centre"])
        return cls(loss, error, axes, centre, head["space"], head["directions"], poles, head["meta"])
