"""Loss and accuracy over the mixtures of two or three networks, as a result that is shown and saved."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import pandas as pd
import torch
from torch import Tensor

from flatscope.charts import resized_figure
from flatscope.files import Arrays
from flatscope.formatting import readable_number
from flatscope.result import DrawnResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


LOW_BARRIER = 0.05  # of the largest loss of the networks themselves
LOST_ACCURACY = 0.01
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.75**0.5))  # of a triangle with sides of length 1


@dataclass(frozen=True, eq=False, repr=False)
class Simplex(DrawnResult):
    """Loss and accuracy over the mixtures of two or three networks.

    Attributes:
        weights: λ of every point, (p, 2) or (p, 3), float64; rows sum to 1.
        loss: mean loss at every point, (p,), float64.
        accuracy: fraction of samples classified right, (p,); None without class labels.
        meta: provenance: resolution, how BatchNorm was treated, versions, seconds.

    Example:
        >>> import torch, flatscope as fs
        >>> nets = [torch.nn.Linear(3, 2) for _ in range(2)]
        >>> line = fs.interpolate(nets, (torch.eye(3), torch.tensor([0, 1, 0])), resolution=4)
        >>> line.weights[:, 1].tolist()
        [0.0, 0.25, 0.5, 0.75, 1.0]
    """

    weights: Tensor
    loss: Tensor
    accuracy: Tensor | None
    meta: dict[str, Any] = field(default_factory=dict)

    WORD = "interpolation"
    COLUMNS = dict.fromkeys(("lambda1", "lambda2", "lambda3", "loss", "accuracy"), "float64")
    NPZ_HEAD = "meta"
    QUANTITIES = ("loss", "accuracy")

    @property
    def vertices(self) -> list[int]:
        """Rows of the networks themselves, in their order."""
        return [int(self.weights[:, i].argmax()) for i in range(self.weights.shape[1])]

    @property
    def positions(self) -> Tensor:
        """Places to draw: t from 0 to 1 on a line (p, 1); barycentric in a triangle with sides of length 1, (p, 2)."""
        if self.weights.shape[1] == 2:
            return self.weights[:, 1:]
        return self.weights @ torch.tensor(CORNERS, dtype=torch.float64)

    @property
    def barrier(self) -> float:
        """The most by which the loss exceeds the mixture λ₁L₁ + λ₂L₂ + λ₃L₃ of the networks' own losses; at least 0.

        NaN where a mixture has no loss: nobody knows how high the barrier is there.
        """
        return float((self.loss - self.weights @ self.loss[self.vertices]).clamp_min(0).max())

    def to_frame(self) -> pd.DataFrame:
        """One row per point: lambda1, lambda2 (, lambda3), loss, accuracy (NaN without class labels)."""
        columns = {f"lambda{i + 1}": self.weights[:, i].numpy() for i in range(self.weights.shape[1])}
        accuracy = torch.full_like(self.loss, torch.nan) if self.accuracy is None else self.accuracy
        return pd.DataFrame({**columns, "loss": self.loss.numpy(), "accuracy": accuracy.numpy()})

    def plot(
        self, ax: Axes | None = None, *, quantity: str = "loss", heights: tuple[float, float] | None = None
    ) -> Any:
        """Draw a line, or filled contours in a triangle with a network at each corner; blank where nothing is finite.

        Args:
            ax: Matplotlib axes; a figure of its own without any.
            quantity: "loss" or "accuracy".
            heights: lowest and highest of the scale, so that two pictures can be compared.
        """
        from matplotlib.tri import Triangulation

        if ax is None:
            return self.figure(quantity)
        known = np.isfinite(values := self.values_of(quantity))
        low, high = heights or (float(values[known].min(initial=np.inf)), float(values[known].max(initial=-np.inf)))
        places = self.positions.numpy()
        if places.shape[1] == 1:
            ax.set(xlabel="from the first network to the second", ylabel=quantity)
            if high > low:
                ax.set_ylim(low - 0.04 * (high - low), high + 0.04 * (high - low))
            return ax.plot(places[:, 0], values, color="#0072B2")[0]
        for place, ((x, y), side) in enumerate(zip(CORNERS, ("top", "top", "bottom"), strict=True), start=1):
            ax.annotate(f"network {place}", (x, y), ha="center", va=side, fontsize=9)
        ax.set_aspect("equal")
        ax.set_axis_off()
        triangles = Triangulation(places[:, 0], places[:, 1])
        if (blank := ~known[triangles.triangles].all(1)).all():
            return None
        triangles.set_mask(blank)
        levels = np.linspace(low, high if high > low else low + max(abs(low), 1.0) * 1e-9, 24)
        return ax.tricontourf(triangles, values, levels=levels, cmap="viridis", extend="both")

    def figure(self, quantity: str = "loss", *, width: float | None = None, font_size: float | None = None) -> Figure:
        """A figure of its own; width in inches, size of labels in points."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(4.6, 3.6), layout="constrained")
        drawn = self.plot(ax := figure.subplots(), quantity=quantity)
        if self.weights.shape[1] == 3 and drawn is not None:
            figure.colorbar(drawn, ax=ax, label=quantity, format="%.3g")
        return resized_figure(figure, width, font_size)

    def headline_lines(self) -> list[str]:
        """Sentences on the barrier between the networks: its height, and whether to average them."""
        barrier, highest = self.barrier, float(self.loss[self.vertices].max())
        remarks = [f"Caution: {remark}." for remark in self.meta.get("remarks", ())]
        if math.isnan(barrier):
            return [*remarks, "Some mixtures have no loss: how high the barrier is there is not known."]
        middle = float(self.loss[self.weights.sub(1 / self.weights.shape[1]).abs().sum(1).argmin()])
        barrier_in_words = f"barrier {readable_number(barrier, 3)}, "
        barrier_in_words += f"loss {readable_number(middle, 3)} in the middle, {readable_number(highest, 3)} at an end"
        if self._is_low(barrier, highest):
            worth = "Averaging is worth a try: check it on held-out data."
            return [*remarks, f"No barrier to speak of: {barrier_in_words}.", worth]
        order = "Units in another order alone make a barrier too: these need not be two minima."
        return [
            *remarks,
            f"A barrier stands between the networks: {barrier_in_words}.",
            "Do not average them as they are.",
            order,
        ]

    def _is_low(self, barrier: float, highest: float) -> bool:
        """True if mixtures are as good as the networks: by the errors where there are classes, else by the loss."""
        if self.accuracy is None:
            return barrier <= LOW_BARRIER * highest
        return float(self.accuracy.min()) >= float(self.accuracy[self.vertices].min()) - LOST_ACCURACY

    def __repr__(self) -> str:
        corners = ", ".join(readable_number(float(self.loss[i])) for i in self.vertices)
        size = f"{len(self.loss)} mixtures of {self.weights.shape[1]} networks"
        line = f"Simplex({size}: loss {corners} at the networks, barrier {readable_number(self.barrier)})"
        return "\n".join([self.headline, line])

    def _head(self) -> dict[str, Any]:
        return {"classes": self.accuracy is not None, "meta": self.meta}

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        shares = [name for name in frame if str(name).startswith("lambda")]
        arrays = {"weights": frame[shares].to_numpy(), "loss": frame["loss"].to_numpy()}
        if head["classes"]:
            arrays["accuracy"] = frame["accuracy"].to_numpy()
        return cls._from_arrays(arrays, head["meta"])

    def _npz_head(self) -> dict[str, Any]:
        return self.meta  # whether there are classes, the arrays tell

    def _arrays(self) -> dict[str, Any]:
        arrays: dict[str, Any] = {} if self.accuracy is None else {"accuracy": self.accuracy.numpy()}
        return arrays | {"weights": self.weights.numpy(), "loss": self.loss.numpy()}

    @classmethod
    def _from_arrays(cls, arrays: Arrays, head: Any) -> Self:
        tensors = {name: torch.tensor(arrays[name]) for name in arrays if name != cls.NPZ_HEAD}
        return cls(tensors["weights"], tensors["loss"], tensors.get("accuracy"), head)
