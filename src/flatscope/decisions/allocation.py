"""Allocation: bits by layer of the smallest measured rise for a size, as an integer program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import Bounds, LinearConstraint, milp

from flatscope.charts import Bars
from flatscope.errors import InputError, refuse_unknown, refuse_unless_whole
from flatscope.formatting import readable_number
from flatscope.result import DRAWN, Result, reading

# Objectives are given to the solver with their largest coefficient at this size: it stops within 10⁻⁶ of the best.
SOLVER_SCALE = 1e6


class Allocation(dict[str, int], Result):
    """Bits of every layer: {layer: bits}. A layer with more bits than were tried is left as it is.

    Attributes:
        mean_bits: over the weights, by their number.
        sum_of_rises: of the measured single rises.
        rounding: with which they were measured.
        weights: {layer: its parameter, followed by what makes it the weight, as `w[0:4]`}.

    Example:
        >>> allocation = Allocation({"fc1": 8, "fc2": 4}, {"fc1": 100, "fc2": 300})
        >>> allocation.mean_bits
        5.0
    """

    WORD = "allocation"
    ENDINGS = (".json", ".csv", ".md", ".html", *DRAWN)
    READABLE = (".json",)

    def __init__(
        self,
        bits: Mapping[str, int],
        sizes: Mapping[str, int],
        *,
        sum_of_rises: float = math.nan,
        rounding: str = "channel",
        weights: Mapping[str, str] | None = None,
        unchanged: Sequence[str] = (),
    ) -> None:
        super().__init__(bits)
        self.sizes = dict(sizes)
        self.sum_of_rises, self.rounding = sum_of_rises, rounding
        self.weights, self.unchanged = dict(weights or {}), tuple(unchanged)

    @property
    def mean_bits(self) -> float:
        """Bits of a weight on average."""
        total = sum(self.sizes.values())
        return sum(self[layer] * n for layer, n in self.sizes.items()) / total if total else math.nan

    def __repr__(self) -> str:
        inner = ", ".join(f"{layer}: {bits}" for layer, bits in self.items())
        rises = readable_number(self.sum_of_rises, 3)
        return f"Allocation({readable_number(self.mean_bits, 3)} bits a weight, sum of single rises {rises}; {inner})"

    def to_json(self) -> str:
        """As JSON: one entry a layer with its bits, its parameter, how it is rounded; "bits": null is left as it is."""
        layers = {
            layer: {
                "bits": None if layer in self.unchanged else bits,
                **dict(zip(("weight", "part"), _parameter_and_place(self.weights.get(layer, "")), strict=True)),
                "parameters": self.sizes.get(layer, 0),
                "symmetric": True,
                "rounding": self.rounding,
            }
            for layer, bits in self.items()
        }
        facts = {
            "mean_bits": self.mean_bits,
            "sum_of_rises": None if math.isnan(self.sum_of_rises) else self.sum_of_rises,
            "rounding": self.rounding,
            "bits": dict(self),
        }
        return json.dumps({"flatscope_allocation": 1, **facts, "layers": layers}, indent=1, allow_nan=False)

    @property
    def meta(self) -> dict[str, Any]:
        """Rule of rounding, mean number of bits, and sum of the expected rises."""
        return {"rounding": self.rounding, "mean_bits": self.mean_bits, "sum_of_rises": self.sum_of_rises}

    def to_frame(self) -> pd.DataFrame:
        """One row per layer: bits, how many weights it has, whether it stays as it is."""
        rows = [(layer, bits, self.sizes.get(layer, 0), layer in self.unchanged) for layer, bits in self.items()]
        return pd.DataFrame(rows, columns=["layer", "bits", "parameters", "unchanged"])

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Layer, bits, number of weights."""
        rows = [
            [layer, "as it is" if layer in self.unchanged else str(bits), f"{self.sizes.get(layer, 0):,}"]
            for layer, bits in self.items()
        ]
        return ["layer", "bits", "weights"], rows

    def headline_lines(self) -> list[str]:
        """Bits on average, what that is expected to cost, what to do next."""
        mean = readable_number(self.mean_bits, 3)
        answer = f"{mean} bits a weight on average; the layers' single rises of the loss add up to"
        return [
            f"{answer} {readable_number(self.sum_of_rises, 3)}.",
            "Next: s.apply(model, allocation) rounds all and measures.",
        ]

    def chart(self) -> Bars:
        """Bits of every layer."""
        return Bars(list(self), {"bits": [float(bits) for bits in self.values()]}, axis="bits a weight")

    @classmethod
    def from_json(cls, text: str) -> Allocation:
        """The allocation that `to_json` wrote."""
        with reading("an allocation that flatscope saved", f"{cls.WORD} file"):
            content: Any = json.loads(text)
            layers = content["layers"]
            rises = content["sum_of_rises"]
            if layers.keys() != content["bits"].keys():
                raise ValueError("bits of other layers than it describes")
            return cls(
                {layer: int(bits) for layer, bits in content["bits"].items()},
                {layer: int(entry["parameters"]) for layer, entry in layers.items()},
                sum_of_rises=math.nan if rises is None else float(rises),
                rounding=str(content["rounding"]),
                weights={layer: str(entry["weight"]) + str(entry.get("part", "")) for layer, entry in layers.items()},
                unchanged=[layer for layer, entry in layers.items() if entry["bits"] is None],
            )


def named_layers(names: Sequence[str] | None, known: Sequence[str]) -> list[str]:
    """Layers of these names, a single one among them as it is; all for None."""
    wanted = list(known) if names is None else [names] if isinstance(names, str) else list(names)
    for name in wanted:
        refuse_unknown(name, known, "layer")
    if not wanted:
        raise InputError("names of layers", "none", where="layers", fix="Leave it out for all layers")
    return wanted


def _parameter_and_place(weight: str) -> tuple[str, str]:
    """The parameter that holds a layer's weight, and what makes it the weight; "" where it is that as it stands."""
    name, bracket, rest = weight.partition("[")
    return name, bracket + rest


def allocate(
    frame: pd.DataFrame, mean_bits: float, unchanged_bits: int, layers: Sequence[str] | None, rounding: str
) -> Allocation:
    """The allocation of smallest rise: one choice a layer, "as it is" among them.

    A rise below its standard error counts as zero, and fewer bits of a layer never as less than more of them. Of
    choices that cost the same those are taken that are expected to cost least, by the larger of the predicted and the
    measured rise (a prediction alone is too low at few bits), and of these the ones with more bits.

    Args:
        frame: of a `Sensitivity`.
        mean_bits: the most, over the weights of the layers.
        unchanged_bits: of a weight that is left as it is.
        layers: those among which to choose; all by default.
        rounding: its name.
    """
    if isinstance(mean_bits, bool) or not isinstance(mean_bits, Real) or not 0 < mean_bits < math.inf:
        raise InputError("a positive number of bits", repr(mean_bits), where="mean_bits")
    refuse_unless_whole(unchanged_bits, "unchanged_bits")
    known = list(dict.fromkeys(frame["layer"]))
    wanted = named_layers(layers, known)
    rows = frame[frame["bits"].notna() & frame["measured"].notna() & frame["layer"].isin(wanted)]
    if rows.empty:
        fix = "Pass bits=(8, 4, 3, 2) to sensitivity"
        raise InputError("layers whose rounding was measured", "none", where="allocate", fix=fix)
    sizes = {str(layer): int(part["parameters"].iloc[0]) for layer, part in rows.groupby("layer", sort=False)}
    choices = [Choice(layer, unchanged_bits, 0.0, 0.0, unchanged=True) for layer in sizes]
    for layer, part in rows.groupby("layer", sort=False):
        choices += _choices(str(layer), part)
    picked = _allocation_by_layer(choices, sizes, float(mean_bits))
    bits = {layer: picked[layer].bits for layer in sizes}
    unchanged = [layer for layer in sizes if picked[layer].unchanged]
    return Allocation(
        bits,
        sizes,
        sum_of_rises=sum(
            float(row["measured"])
            for row in rows.to_dict("records")
            if bits[row["layer"]] == row["bits"] and row["layer"] not in unchanged
        ),
        rounding=rounding,
        weights={str(row["layer"]): str(row["weight"]) for row in rows.to_dict("records")},
        unchanged=unchanged,
    )


@dataclass(frozen=True)
class Choice:
    """Bits that a layer may have."""

    layer: str
    bits: int
    rise: float  # measured, as it counts
    expected: float  # the larger of the predicted and the measured rise, whatever their errors
    unchanged: bool = False  # whether the layer is left as it is


def _choices(layer: str, rows: pd.DataFrame) -> list[Choice]:
    """The bits that were tried, from the most to the fewest: rises count at least as much as with more bits."""
    choices, rise, expected = [], 0.0, 0.0
    for row in rows.sort_values("bits", ascending=False).to_dict("records"):
        measured = float(row["measured"])
        rise = max(rise, _rise_above_error(measured, float(row["measured_stderr"])))
        expected = max(expected, measured, float(np.nan_to_num(row["predicted"])))
        choices.append(Choice(layer, int(row["bits"]), rise, expected))
    return choices


def _rise_above_error(rise: float, stderr: float) -> float:
    """The rise, or zero where it is below its error."""
    return rise if rise > (0.0 if math.isnan(stderr) else stderr) else 0.0


def _allocation_by_layer(choices: list[Choice], sizes: Mapping[str, int], mean_bits: float) -> dict[str, Choice]:
    """One choice for each layer: of least measured rise, then of least expected, then with the finest steps."""
    total, names = sum(sizes.values()), list(sizes)
    shares = np.array([sizes[choice.layer] / total for choice in choices])
    one_each = np.array([[float(choice.layer == name) for choice in choices] for name in names])
    size = shares * np.array([choice.bits for choice in choices])
    constraints = [LinearConstraint(one_each, 1, 1), LinearConstraint(size[None], -np.inf, mean_bits * (1 + 1e-12))]
    steps = shares * [0.0 if choice.unchanged else 4.0 ** -min(choice.bits, 30) for choice in choices]  # squared
    picked: list[int] = []
    for costs in (
        np.array([choice.rise for choice in choices]),
        np.array([choice.expected for choice in choices]),
        steps,
    ):
        scaled = costs * (SOLVER_SCALE / costs.max()) if costs.any() else costs
        result = milp(
            scaled,
            integrality=np.ones(len(choices)),
            bounds=Bounds(0, 1),
            constraints=constraints,
            options={"mip_rel_gap": 0.0},
        )
        if result.x is None:
            if picked:  # the solver found none within its own rounding of the best
                continue
            least = sum(min(c.bits for c in choices if c.layer == name) * sizes[name] for name in names) / total
            fix = "Ask for more bits, or try fewer bits in sensitivity"
            raise InputError(
                f"at least {readable_number(least)} bits a weight",
                readable_number(mean_bits),
                where="mean_bits",
                fix=fix,
            )
        picked = [n for n, x in enumerate(result.x) if x > 0.5]
        best = float(scaled[picked].sum())
        constraints.append(LinearConstraint(scaled[None], -np.inf, best + 1e-9 * max(1.0, best)))
    return {choices[n].layer: choices[n] for n in picked}
