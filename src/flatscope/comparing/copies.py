"""Which of several networks are the same function, and how one was written from the other."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.errors import FlatscopeError
from flatscope.guards import own_settings
from flatscope.problem import Problem
from flatscope.symmetries.basis_paths import BasisPaths

# Weights stored in float32 and multiplied by random factors change the outputs by some 1e-6 of the largest one; moving
# one weight of a small network by a few per cent, by more than 1e-5.
TOLERANCE = 1e-5
MOST_SAMPLES = 2_000
_SAME_PATH = 1e-4  # relative: a path value is a product and quotient of as many stored weights as there are layers


@dataclass(frozen=True)
class SameFunction:
    """Two networks that give the same outputs.

    Attributes:
        first: name of one.
        second: name of the other.
        difference: largest difference of the outputs over the samples, relative to the largest output.
        samples: how many samples were looked at.
        how: "equal weights", "units rescaled", "units rescaled and exchanged", or "written otherwise".
    """

    first: str
    second: str
    difference: float
    samples: int
    how: str

    def __str__(self) -> str:
        if self.how == "equal weights":
            return f"{self.second} has the weights of {self.first}"
        return (
            f"{self.second} is the same function as {self.first} written with other weights ({self.how}; outputs "
            f"equal to {self.difference:.1g} on {self.samples} samples)"
        )


def find_copies(problems: Mapping[str, Problem], tolerance: float = TOLERANCE) -> list[SameFunction]:
    """Pairs of networks whose outputs on the training samples agree, up to 2,000 of them.

    Args:
        problems: the networks by name, without BatchNorm and in float64, on the same data.
        tolerance: largest difference of the outputs, relative to the largest output.
    """
    gaps, samples = _gaps(problems)
    alike = {pair: gap for pair, gap in gaps.items() if gap <= tolerance}
    return [
        SameFunction(one, other, gap, samples, _how(problems[one], problems[other]))
        for (one, other), gap in alike.items()
    ]


def _gaps(problems: Mapping[str, Problem]) -> tuple[dict[tuple[str, str], float], int]:
    """Relative difference of the outputs of every pair, and the number of samples, in one pass over the data."""
    reader = next(iter(problems.values()))
    largest = dict.fromkeys(problems, 0.0)
    gaps = dict.fromkeys(itertools.combinations(problems, 2), 0.0)
    samples = 0
    with own_settings(reader.generators), torch.no_grad():
        # The batches of one of them for all: loaders that shuffle would give every network another order.
        for inputs, targets in reader.batches():
            outputs = {name: problem.forward(inputs).double().cpu() for name, problem in problems.items()}
            for name, found in outputs.items():
                largest[name] = max(largest[name], float(found.abs().max()))
            for pair in gaps:
                one, other = (outputs[name] for name in pair)
                gap = float((one - other).abs().max()) if one.shape == other.shape else math.inf
                gaps[pair] = max(gaps[pair], gap if math.isfinite(gap) else math.inf)  # NaN compares with nothing
            samples += len(targets)
            if samples >= MOST_SAMPLES:
                break
    return {pair: gap / (max(largest[name] for name in pair) or 1.0) for pair, gap in gaps.items()}, samples


def _how(one: Problem, other: Problem) -> str:
    """The way from one network to the other, where their path values tell it."""
    layout = {name: value.shape for name, value in one.params.items()}
    if str(one.model) != str(other.model) or layout != {name: value.shape for name, value in other.params.items()}:
        return "written otherwise"
    if all(_to_rounding(one.params[name], other.params[name]) for name in layout):
        return "equal weights"
    try:
        paths = BasisPaths(one.model, one.example())
        # On the skeleton of the first: two of nearly equal strength may be chosen differently after rounding.
        if _agree(paths.values().double(), paths.values_of(other.params)):
            return "units rescaled"
        if _agree(_sorted_values(paths), _sorted_values(BasisPaths(other.model, other.example()))):
            return "units rescaled and exchanged"
    except FlatscopeError:
        pass  # a zero weight on every way through a unit, or a network that cannot be traced: no path values
    return "written otherwise"


def _to_rounding(one: Tensor, other: Tensor) -> bool:
    """Equal up to what folding a BatchNorm in float32 leaves."""
    return not one.numel() or float((one - other).abs().max()) <= 1e-6 * float(one.abs().max())


def _sorted_values(paths: BasisPaths) -> Tensor:
    return paths.values().double().sort().values


def _agree(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and torch.allclose(one, other, rtol=_SAME_PATH, atol=0.0)
