"""Eigenpairs: eigenvalues at an end of the spectrum with their vectors; each says how far it may be off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import pandas as pd
import torch
from torch import Tensor

from flatscope.charts import resized_figure
from flatscope.files import Arrays
from flatscope.formatting import readable_number
from flatscope.params import Params
from flatscope.result import DrawnResult, Result, checked_columns

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


def finite_differences_in_words(entries: Mapping[str, Any]) -> str:
    """Sentence on the uncertainty that finite differences leave."""
    kinks = "; kinks that a step crosses are counted: this is not the exact Hessian" if entries["kinks"] else ""
    return (
        f"By finite differences: step {readable_number(entries['step'], 2)} of the weights, two steps differ by up to "
        f"{readable_number(100 * entries['spread'], 2)} %{kinks}."
    )


@dataclass(frozen=True, eq=False, repr=False)
class Eigenpairs(DrawnResult):
    """Some eigenvalues and eigenvectors of a Hessian or a Gauss-Newton matrix, the largest first.

    Attributes:
        values: (k,), float64, falling.
        residuals: ‖Hv − λv‖ of each: an eigenvalue lies within this distance of the value.
        converged: whether each has the accuracy that was asked for.
        vectors: one dictionary of tensors a pair, by parameter name, of length one together; kept by .npz files alone.
        products: curvature products that it took.
        layer: the layer whose block it is; empty for all trainable parameters.
        curvature: "hessian" or "gauss_newton".
        meta: provenance: seed, tolerance, versions, seconds.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> pairs = fs.eigenpairs(problem, top=2)
        >>> pairs.values.shape, bool(pairs.values[0] >= pairs.values[1])
        (torch.Size([2]), True)
    """

    values: Tensor
    residuals: Tensor
    converged: Tensor
    vectors: tuple[Params, ...]
    products: int
    layer: str
    curvature: str
    meta: dict[str, Any] = field(default_factory=dict)

    WORD = "eigenpairs"
    COLUMNS = {"value": "float64", "residual": "float64", "converged": "bool"}  # noqa: RUF012  a ClassVar of the base

    def __len__(self) -> int:
        """Number of pairs."""
        return len(self.values)

    def to_frame(self) -> pd.DataFrame:
        """One row per pair: value, residual, converged."""
        columns = (self.values, self.residuals, self.converged)
        return pd.DataFrame({name: c.numpy() for name, c in zip(self.COLUMNS, columns, strict=True)})

    def headline_lines(self) -> list[str]:
        """The largest eigenvalue, whether the search ended, what it means for a step."""
        largest, missed = float(self.values[0]), int((~self.converged).sum())
        lines = [
            f"The largest of {len(self)} eigenvalues is {readable_number(largest)} "
            f"± {readable_number(float(self.residuals[0]), 2)}."
        ]
        if missed:
            lines.append(f"{missed} did not converge: ask for fewer, or raise the tolerance.")
        lines.append(
            "Eigenvalues belong to the weights as written, and change with a rescaling that changes no output."
        )
        if "search" in self.meta:
            lines.append(f"It was {self.meta['search']}.")
        if "finite_difference" in self.meta:
            lines.append(finite_differences_in_words(self.meta["finite_difference"]))
        if largest > 0 and not self.layer:
            lines.append(
                f"Gradient descent from here is stable up to a rate of about {readable_number(2 / largest, 2)}."
            )
        return lines

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The pairs as text for people."""
        rows = [
            [
                str(n + 1),
                readable_number(float(value)),
                f"± {readable_number(float(residual), 2)}",
                "" if converged else "not converged",
            ]
            for n, (value, residual, converged) in enumerate(
                zip(self.values, self.residuals, self.converged, strict=True)
            )
        ]
        return ["", "eigenvalue", "residual", "remark"], rows

    def figure(self, *, width: float | None = None, font_size: float | None = None) -> Figure:
        """Eigenvalues by their number; its width in inches and the size of its labels in points, for papers."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(5.0, 3.0), layout="constrained")
        self.plot(figure.add_subplot())
        return resized_figure(figure, width, font_size)

    def plot(self, ax: Axes | None = None) -> Any:
        """Draw eigenvalues by their number, with residuals as error bars; a figure of its own without axes."""
        if ax is None:
            return self.figure()
        places = range(1, len(self) + 1)
        ax.errorbar(places, self.values.numpy(), yerr=self.residuals.numpy(), fmt="o", markersize=4, capsize=2)
        ax.axhline(0, color="0.7", linewidth=0.8)
        ax.set_xlabel("number")
        ax.set_ylabel("eigenvalue")
        ax.spines[["top", "right"]].set_visible(False)
        return ax

    def _repr_html_(self) -> str:
        return Result._repr_html_(self)

    def _head(self) -> dict[str, Any]:
        return {"products": self.products, "layer": self.layer, "curvature": self.curvature, "meta": self.meta}

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        frame = checked_columns(frame, cls.COLUMNS, cls.WORD)
        values, residuals, converged = (torch.tensor(frame[name].to_numpy()) for name in cls.COLUMNS)
        place = head["products"], head["layer"], head["curvature"], head["meta"]
        return cls(values, residuals, converged, (), *place)

    def _arrays(self) -> dict[str, Any]:
        names = self.vectors[0] if self.vectors else {}
        stacked = {f"vectors/{name}": torch.stack([v[name] for v in self.vectors]).cpu().numpy() for name in names}
        return stacked | super()._arrays()

    @classmethod
    def _from_arrays(cls, arrays: Arrays, head: Any) -> Self:
        pairs = super()._from_arrays(arrays, head)
        stacked = {
            name.removeprefix("vectors/"): torch.from_numpy(array)
            for name, array in arrays.items()
            if name.startswith("vectors/")
        }
        places = range(len(pairs) if stacked else 0)
        return replace(pairs, vectors=tuple({name: value[i] for name, value in stacked.items()} for i in places))
