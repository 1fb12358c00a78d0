"""Allocation: bits by layer of the smallest measured rise for a size, as an integer program."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from numbers import Real
from typing import Any

import numpy as np
import pandas as pd
from scipy.optimize import Bounds, LinearConstraint, milp

from flatscope.charts import Bars
from flatscope.errors import InputError, refuse_unknown, refuse_unless_whole
from flatscope.formatting import number
from flatscope.result import DRAWN, Result, reading

TIE = 0.01  # of the smallest rise that counts: the most that all steps together may weigh against it


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
        rises = number(self.sum_of_rises, 3)
        return f"Allocation({number(self.mean_bits, 3)} bits a weight, sum of single rises {rises}; {inner})"

    def to_json(self) -> str:
        """As JSON: one entry a layer with its bits, its parameter, how it is rounded; "bits": null is left as it is."""
        layers = {
            layer: {
                "bits": None if layer in self.unchanged else bits,
                **dict(zip(("weight", "part"), _parted(self.weights.get(layer, "")), strict=True)),
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
        told = f"{number(self.mean_bits, 3)} bits a weight on average; the layers' single rises of the loss add up to"
        return [f"{told} {number(self.sum_of_rises, 3)}.", "Next: s.apply(model, allocation) rounds all and measures."]

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


def _parted(weight: str) -> tuple[str, str]:
    """The parameter that holds a layer's weight, and what makes it the weight; "" where it is that as it stands."""
    name, bracket, rest = weight.partition("[")
    return name, bracket + rest


def allocate(
    frame: pd.DataFrame, mean_bits: float, unchanged_bits: int, layers: Sequence[str] | None, rounding: str
) -> Allocation:
    """The allocation of smallest rise: one choice a layer, "as it is" among them.

    A rise below its standard error counts as zero; among choices that cost the same the one that moves the weights
    least is taken.

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
    choices = [
        (str(row["layer"]), int(row["bits"]), _counted(float(row["measured"]), float(row["measured_stderr"])))
        for row in rows.to_dict("records")
    ]
    choices += [(layer, unchanged_bits, 0.0) for layer in sizes]
    picked = _solved(choices, sizes, float(mean_bits), set(sizes))
    bits = {layer: picked[layer][0] for layer in sizes}
    unchanged = [layer for layer in sizes if picked[layer][1]]
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


def _counted(rise: float, stderr: float) -> float:
    """The rise, or zero where it is below its error."""
    return rise if rise > (0.0 if math.isnan(stderr) else stderr) else 0.0


def _solved(
    choices: list[tuple[str, int, float]], sizes: Mapping[str, int], mean_bits: float, layers: set[str]
) -> dict[str, tuple[int, bool]]:
    """By layer its bits and whether it is left as it is; `choices` end with one "as it is" for each layer."""
    total, first_unchanged = sum(sizes.values()), len(choices) - len(sizes)
    taken = np.array([sizes[layer] * bits / total for layer, bits, _ in choices])
    costs = np.array([cost for _, _, cost in choices])
    counted = costs[costs > 0]
    scale = float(counted.min()) if len(counted) else 1.0
    # Of choices that cost the same the finer one: its squared step is the smaller, weights counted alike.
    steps = np.array([sizes[layer] / total * 4.0 ** -min(bits, 30) for layer, bits, _ in choices])
    steps[first_unchanged:] = 0.0
    names = list(sizes)
    one_each = np.array([[float(layer == name) for layer, _, _ in choices] for name in names])
    result = milp(
        costs / scale + TIE * steps,
        integrality=np.ones(len(choices)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(one_each, 1, 1), LinearConstraint(taken[None], -np.inf, mean_bits * (1 + 1e-12))],
        options={"mip_rel_gap": 0.0},
    )
    if result.x is None:
        least = sum(min(bits for layer, bits, _ in choices if layer == name) * sizes[name] for name in names) / total
        fix = "Ask for more bits, or try fewer bits in sensitivity"
        raise InputError(f"at least {number(least)} bits a weight", number(mean_bits), where="mean_bits", fix=fix)
    chosen = [n for n, x in enumerate(result.x) if x > 0.5]
    return {choices[n][0]: (choices[n][1], n >= first_unchanged) for n in chosen}
