"""Sensitivity: what rounding or pruning each layer costs, predicted and measured, as a table and a picture."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from torch import nn

from flatscope.charts import resized_figure
from flatscope.decisions.allocation import Allocation, allocate
from flatscope.decisions.applying import Rounded, apply_allocation
from flatscope.errors import InputError
from flatscope.formatting import first_of_names, numbered, readable_number
from flatscope.problem import Problem
from flatscope.result import DrawnResult, checked_columns, plain

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

NUMBERS = (
    "predicted",
    "predicted_stderr",
    "by_trace",
    "by_trace_stderr",
    "by_trapezoid",
    "by_trapezoid_stderr",
    "measured",
    "measured_stderr",
    "error_change",
    "error_change_stderr",
)
COLUMNS = {
    "layer": "object",
    "weight": "object",
    "parameters": "int64",
    "what": "object",
    "bits": "Int64",
    "sparsity": "float64",
    **dict.fromkeys(NUMBERS, "float64"),
    "way": "object",
    "reason": "object",
}
RESOLVED = 2.0  # standard errors from which on a rise is told from none
CURVE_POINTS = 25


class Sensitivity(DrawnResult):
    """Rise of the loss by rounding and pruning, layer by layer.

    Attributes:
        meta: provenance; the loss and the error of the network, the rounding, remarks.
        problem: on which it was measured; None where it was read from a file.

    Columns of `to_frame()`: layer, weight (its parameter; `w[0:4]` for a part, `w[:].T` where its outputs stand on the
    second axis; empty where it is computed), parameters (their number), what, bits, sparsity; predicted
    (gᵀΔ + ½ΔᵀHΔ, the layer's own block), by_trace (½ (Tr H/n) ‖Δ‖², HAWQ-V2), by_trapezoid (½ (g(w) + g(w+Δ))·Δ),
    measured (L(w+Δ) − L(w)) and error_change, each with its standard error over the samples; way (how the prediction
    was computed), reason (why a number is missing).

    Example:
        >>> import torch, flatscope as fs
        >>> x, y = torch.eye(3), torch.tensor([0, 1, 0])
        >>> s = fs.sensitivity(fs.Problem(torch.nn.Linear(3, 2), train=(x, y)), bits=(8, 4), sparsity=())
        >>> s.to_frame()["what"].tolist()
        ['8 bits', '4 bits']
    """

    WORD = "sensitivity"
    COLUMNS = COLUMNS
    ENDINGS = (".json", ".parquet", ".npz", ".csv", ".png", ".svg", ".pdf")
    READABLE = (".json", ".parquet", ".npz")

    def __init__(self, frame: pd.DataFrame, meta: Mapping[str, Any], problem: Problem | None = None) -> None:
        self._frame = checked_columns(frame, COLUMNS, "sensitivity")
        self.meta: dict[str, Any] = plain(meta)
        self.problem = problem

    def to_frame(self) -> pd.DataFrame:
        """One row for every layer and change."""
        return self._frame.copy()

    @property
    def layers(self) -> list[str]:
        """Names of the layers, in forward order."""
        return list(dict.fromkeys(self._frame["layer"]))

    def headline_lines(self) -> list[str]:
        """Rise of the loss at each number of bits, and what to do next."""
        known = self._frame[self._frame["measured"].notna()]
        rounded = known[known["bits"].notna()]
        lines = [
            _sentence_on_bits(rounded[rounded["bits"] == b], f"{b} bits")
            for b in sorted(rounded["bits"].unique())[::-1]
        ][-3:]
        if not lines and len(known):
            lines = [_sentence_on_bits(known, "these shares of zeros")]
        if left_out := self.meta.get("left_out"):
            share = 100 * float(self.meta["left_out_share"])
            lines = lines[-2:]
            lines.insert(
                0,
                f"{readable_number(share, 2)} % of the weights are in no layer that was looked at "
                f"({first_of_names(list(left_out), 2)}): what their rounding costs is not in these numbers.",
            )
        if missing := len(self._frame) - len(known):
            lines.insert(0, f"{missing} of {numbered(len(self._frame), 'change')} could not be measured: see `reason`.")
        if len(rounded):
            lines.append("Next: `allocate(mean_bits=4)` chooses bits by layer, `apply` rounds a copy and measures it.")
        return lines

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Layer, parameters, change, predicted and measured rise, change of the error."""
        header = ["layer", "parameters", "what", "predicted", "by trace", "by trapezoid", "measured", "± s.e.", "error"]
        names = ("predicted", "by_trace", "by_trapezoid", "measured", "measured_stderr", "error_change")
        rows = [
            [row["layer"], f"{row['parameters']:,}", row["what"], *(readable_number(row[name], 3) for name in names)]
            for row in self._frame.to_dict("records")
        ]
        return header, rows

    def allocate(
        self, mean_bits: float, *, unchanged_bits: int | None = None, layers: Sequence[str] | None = None
    ) -> Allocation:
        """Bits of every layer with the smallest sum of measured rises whose mean size is at most `mean_bits`.

        Args:
            mean_bits: over the weights of these layers, by their number.
            unchanged_bits: what a weight that is left as it is takes; by default the bits of its dtype.
            layers: those among which to choose; all by default. Others stay as they are.

        Example:
            >>> import torch, flatscope as fs
            >>> x, y = torch.eye(3), torch.tensor([0, 1, 0])
            >>> s = fs.sensitivity(fs.Problem(torch.nn.Linear(3, 2), train=(x, y)), bits=(8, 4), sparsity=())
            >>> dict(s.allocate(mean_bits=4))
            {'weight': 4}
        """
        kept = int(self.meta["dtype_bits"]) if unchanged_bits is None else unchanged_bits
        return allocate(self._frame, mean_bits, kept, layers, str(self.meta["rounding"]))

    def apply(self, model: nn.Module, allocation: Mapping[str, int], problem: Problem | None = None) -> Rounded:
        """A copy of the model with its layers rounded, and its loss measured; the model itself stays as it is.

        Args:
            model: the model of the problem, or one of the same architecture.
            allocation: {layer: bits}, as `allocate` gives it; a layer whose bits were not tried stays as it is.
            problem: data to measure on; by default those of the sensitivity.
        """
        used = problem or self.problem
        if used is None:
            fix = "s.apply(model, allocation, problem=problem)"
            raise InputError("a problem to measure on", "a sensitivity from a file", where="apply", fix=fix)
        return apply_allocation(self._frame, str(self.meta["rounding"]), model, allocation, used)

    def figure(self, *, width: float | None = None, font_size: float | None = None) -> Figure:
        """A heat map of layers by changes, and size against loss; width in inches, size of labels in points."""
        from matplotlib.figure import Figure

        figure = Figure(figsize=(8.2, max(2.8, 0.9 + 0.22 * len(self.layers))), layout="constrained")
        left, right = figure.subplots(1, 2, width_ratios=(1.5, 1))
        drawn = self.plot_heat(left)
        if drawn is not None:
            figure.colorbar(drawn, ax=left, label="measured rise of the loss")
        self.plot_sizes(right)
        return resized_figure(figure, width, font_size)

    def plot(self, ax: Axes | None = None) -> Any:
        """Draw the heat map of layers by changes into axes; without any, a figure with both pictures."""
        return self.figure() if ax is None else self.plot_heat(ax)

    def plot_heat(self, ax: Axes) -> Any:
        """Draw the measured rises, layers by changes; a cross where the rise is within two standard errors of zero."""
        from matplotlib.colors import LogNorm

        whats = list(dict.fromkeys(self._frame["what"]))
        table = self._frame.pivot(index="layer", columns="what", values="measured").reindex(self.layers)[whats]
        errors = self._frame.pivot(index="layer", columns="what", values="measured_stderr").reindex(self.layers)[whats]
        heights = table.to_numpy()
        resolved = heights > RESOLVED * np.nan_to_num(errors.to_numpy(), nan=math.inf)
        shown = np.where(resolved & (heights > 0), heights, np.nan)
        drawn = None
        if np.isfinite(shown).any():
            low, high = np.nanmin(shown), np.nanmax(shown)
            norm = LogNorm(low, high if high > low else 2 * low)
            drawn = ax.imshow(shown, aspect="auto", cmap="viridis", norm=norm)
        else:
            ax.imshow(np.zeros_like(heights), aspect="auto", cmap="Greys")
        for row, column in zip(*np.nonzero(np.isnan(shown)), strict=True):
            ax.text(column, row, "?" if math.isnan(heights[row, column]) else "×", ha="center", va="center", fontsize=8)
        ax.set_xticks(range(len(whats)), whats, rotation=45, ha="right")
        ax.set_yticks(range(len(self.layers)), self.layers)
        ax.set_xlabel("× not told from no rise")
        return drawn

    def sizes(self) -> pd.DataFrame:
        """Mean bits and sum of the single rises of the best allocations, from the smallest size to the largest."""
        bits = sorted(int(b) for b in self._frame["bits"].dropna().unique())
        if not bits:
            return pd.DataFrame({"mean_bits": [], "rise": []})
        wanted = np.unique(np.linspace(bits[0], bits[-1], CURVE_POINTS))
        rise_by_size = {round(a.mean_bits, 9): a.sum_of_rises for a in map(self.allocate, wanted.tolist())}
        return pd.DataFrame({"mean_bits": list(rise_by_size), "rise": list(rise_by_size.values())}).sort_values(
            "mean_bits"
        )

    def plot_sizes(self, ax: Axes) -> Any:
        """Draw the sum of single rises over the mean number of bits, and what the same bits everywhere would cost."""
        curve = self.sizes()
        if curve.empty:
            ax.set_axis_off()
            return None
        (line,) = ax.plot(curve["mean_bits"], curve["rise"], color="#0072B2", marker=".", label="best allocation")
        uniform = self._frame[self._frame["bits"].notna()].groupby("bits")["measured"].sum()
        ax.plot(list(uniform.index), list(uniform), "D", color="#D55E00", label="same bits everywhere")
        ax.set_xlabel("mean bits a weight")
        ax.set_ylabel("sum of single rises")
        ax.set_yscale("symlog", linthresh=max(1e-6, 1e-3 * float(np.nanmax(np.abs(uniform), initial=1e-3))))
        ax.legend(frameon=False)
        return line

    @classmethod
    def load(cls, path: str | Path) -> Sensitivity:  # type: ignore[override]
        """Read what was saved as .json, .parquet or .npz; it then has no problem to measure on."""
        return super().load(path)

    def _arrays(self) -> dict[str, Any]:
        arrays = {}
        for name, column in self._frame.items():
            kind = COLUMNS[str(name)]
            arrays[str(name)] = (
                column.astype("float64").to_numpy()
                if kind == "Int64"
                else column.to_numpy(dtype=str if kind == "object" else kind)
            )
        return arrays


def _rise_in_words(row: Any) -> str:
    return f"{readable_number(float(row['measured']), 2)} ± {readable_number(float(row['measured_stderr']), 2)}"


def _sentence_on_bits(rows: pd.DataFrame, what: str) -> str:
    """Sentence on the rise of the loss at one number of bits."""
    total, worst = float(rows["measured"].sum()), rows.iloc[int(rows["measured"].argmax())]
    free = rows["measured"] <= RESOLVED * rows["measured_stderr"].fillna(math.inf)  # of one sample
    return (
        f"At {what}, {int(free.sum())} of {numbered(len(rows), 'layer')} cost nothing that these samples resolve; "
        f"most sensitive: {worst['layer']} ({_rise_in_words(worst)}); sum of single rises {readable_number(total, 2)}."
    )
