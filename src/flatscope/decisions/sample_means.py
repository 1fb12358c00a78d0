"""Means over samples with standard errors, from sums that ranks can add up."""

from __future__ import annotations

import math
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from flatscope.formatting import readable_number
from flatscope.ranks import Ranks
from flatscope.sampling import student_stderrs


class Uncertain(NamedTuple):
    """A number and its standard error; NaN where there is none."""

    value: float
    stderr: float = math.nan

    @property
    def words(self) -> str:
        """The number with its error."""
        return f"{readable_number(self.value, 3)} ± {readable_number(self.stderr, 2)}"


NOTHING = Uncertain(math.nan)


class SampleMeans:
    """Means over samples by key, and standard errors from the spread over groups of them.

    A group is a single sample, or several of which only the sum is known.
    """

    def __init__(self) -> None:
        self._sums: dict[Hashable, Tensor] = {}

    def add(self, key: Hashable, sums: Tensor, sizes: Tensor | float = 1.0) -> None:
        """Let some groups in: the sum over each of them, (groups,), and their numbers of samples."""
        s = sums.detach().double()
        n = torch.as_tensor(sizes, dtype=torch.float64, device=s.device).expand(s.shape)
        parts = (torch.ones_like(s), n, s, s * s, n * s, n * n)
        total = torch.stack([part.sum() for part in parts]).cpu()
        self._sums[key] = self._sums[key] + total if key in self._sums else total

    def estimates(self, ranks: Ranks) -> dict[Any, Uncertain]:
        """Means over all ranks, which have the same keys."""
        keys = list(self._sums)
        summed = ranks.summed([torch.stack([self._sums[key] for key in keys])])[0] if keys else torch.zeros(0, 6)
        return {key: _estimate_of_row(row) for key, row in zip(keys, summed.tolist(), strict=True)}


def _estimate_of_row(row: list[float]) -> Uncertain:
    groups, n, total, squares, mixed, sizes = row
    mean = total / n
    if not math.isfinite(mean) or groups < 2:
        return Uncertain(mean)
    spread = max(0.0, squares - 2 * mean * mixed + mean * mean * sizes)  # Σ (s − n_b · mean)²
    stderr = math.sqrt(groups / (groups - 1) * spread) / n
    freedom = torch.tensor(groups - 1.0, dtype=torch.float64)
    return Uncertain(mean, float(student_stderrs(torch.tensor(stderr, dtype=torch.float64), freedom)))
