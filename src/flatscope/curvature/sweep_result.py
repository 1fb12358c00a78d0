"""What a sweep adds up over samples and draws, in one process or over several ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from flatscope.network.not_covered import NotCovered
from flatscope.params import add_to
from flatscope.ranks import Ranks
from flatscope.sampling import degrees_of_freedom, relative_error, student_stderrs

SUMMED = ("total", "squares", "within", "within_squares")  # parts of a mean that ranks add up


def _zero() -> Tensor:
    return torch.zeros((), dtype=torch.float64)


@dataclass
class Mean:
    """Mean over samples, in float64, with two standard errors: of the draws, and of the samples being a draw.

    Sample i has an unknown value x_i, and draws of mean x_i and variance σ_i², independent of each other; an exact pass
    is a single draw without error. Passes may have different numbers of draws.
    """

    n: int = 0  # samples
    draws: int = 1  # draws of each sample, over all passes
    passes: int = 1  # passes over the data
    total: Tensor = field(default_factory=_zero)  # sum over samples and draws
    # sum over passes and samples of (sum over draws)² / draws of the pass
    squares: Tensor = field(default_factory=_zero)
    # sum over passes and samples of the squared deviations of the draws from the sample's mean
    within: Tensor = field(default_factory=_zero)
    # sum over passes and samples of (that sum)² / (draws of the pass + 1)
    within_squares: Tensor = field(default_factory=_zero)

    def add(self, sums: Tensor, squares: Tensor | None = None) -> None:
        """Let some samples in.

        Args:
            sums: over the draws of this pass, (n,) or (n, units).
            squares: sums of the draws' squares; None where there is one draw.
        """
        self.n += len(sums)
        if self.total.device != sums.device:  # stays on a GPU: moving every batch's sums would wait for it
            self.total, self.squares, self.within, self.within_squares = (
                part.to(sums.device) for part in (self.total, self.squares, self.within, self.within_squares)
            )
        self.total = self.total + sums.sum(0)
        mean_squares = sums.square() / self.draws
        self.squares = self.squares + mean_squares.sum(0)
        if squares is not None:
            within = (squares - mean_squares).clamp_min(0)
            self.within = self.within + within.sum(0)
            self.within_squares = self.within_squares + within.square().sum(0) / (self.draws + 1)

    def joined(self, other: Mean) -> Mean:
        """This and another pass over the same samples."""
        return Mean(
            self.n,
            self.draws + other.draws,
            self.passes + other.passes,
            self.total + other.total,
            self.squares + other.squares,
            self.within + other.within,
            self.within_squares + other.within_squares,
        )

    @property
    def value(self) -> Tensor:
        """The mean; () or (units,)."""
        return self.total / (self.n * self.draws)

    @property
    def stderr(self) -> Tensor:
        """Standard error of the draws, widened as `student_stderrs` does; zero for an exact pass."""
        return student_stderrs(self._spread, self.freedom)

    @property
    def freedom(self) -> Tensor:
        """Degrees of freedom of that error, over the samples by which the mean varies."""
        return degrees_of_freedom(self.within, self.within_squares).expand(self.total.shape)

    @property
    def data_stderr(self) -> Tensor:
        """Standard error that the spread of the x_i gives, without that of the draws; zero for a single sample."""
        mean_square = (self.squares - self.passes * self._noise) / (self.n * self.draws)
        variance = (mean_square - self.value.square() + self._spread.square()).clamp_min(0)
        return (variance / max(self.n - 1, 1)).sqrt()

    @property
    def _spread(self) -> Tensor:
        return (self._noise / self.draws).sqrt() / self.n

    @property
    def _noise(self) -> Tensor:
        """Σ_i σ_i²."""
        return (self.within / max(self.draws - self.passes, 1)).expand(self.total.shape)


class BatchSums:
    """Numbers of the samples of one batch by (parameter, quantity), summed over blocks of columns.

    Args:
        drawn: whether every draw is a number of its own; else all columns together make one.
    """

    def __init__(self, drawn: bool) -> None:
        self._drawn = drawn
        self._block: dict[str, Tensor] = {}
        self.sums: dict[tuple[str, str], Tensor] = {}
        self.squares: dict[tuple[str, str], Tensor] = {}

    def add(self, name: str, quantity: str, values: Tensor, column_signs: Tensor | None) -> Tensor:
        """Add one block's share.

        Args:
            name: of the parameter.
            quantity: what it is.
            values: of the columns, (n, k) or (n, k, units).
            column_signs: of the columns, (n, k), where some are negative; of a draw's two columns the second is.

        Returns:
            The values by draw in float64: (n, draws) or (n, draws, units), one "draw" where all columns are summed.
        """
        if column_signs is not None:
            values = values * column_signs.reshape(*column_signs.shape, *[1] * (values.ndim - 2))
        if not self._drawn:
            values = values.sum(1, keepdim=True)
        elif column_signs is not None:
            values = values.reshape(len(values), -1, 2, *values.shape[2:]).sum(2)
        values = values.double()
        self._add(name, quantity, values)
        return values

    def add_to_network(self, quantity: str, values: Tensor) -> None:
        """Add values by draw to a sum over the network's layers."""
        add_to(self._block, quantity, values)

    def close_block(self) -> None:
        """All layers have added their share of a block: the sums over the network are complete."""
        for quantity, values in self._block.items():
            self._add("", quantity, values)
        self._block.clear()

    def _add(self, name: str, quantity: str, values: Tensor) -> None:
        add_to(self.sums, (name, quantity), values.sum(1))
        if self._drawn:
            add_to(self.squares, (name, quantity), values.square().sum(1))


@dataclass
class Curvature:
    """Result of a sweep.

    The quantities of a weight matrix; s_c: columns at its output, u: its input patches, W̄: (out, in·taps), and
    G_c = Σ_t s_{c,t} u_tᵀ the gradient of one sample:

    trace: mean Σ_c ‖G_c‖²;  rho(j): mean Σ_c ⟨G_c, w(j)⟩², w(j) the weights of input feature or channel j, which is
    (Σ_t φ_{j,t} (Wᵀ s_c)_{j,t})²;  rho_rows(i): the same for the weights of output i;
    relative_flatness: mean Σ_c ‖W̄ᵀ G_c‖².  rho_sum and rho_rows_sum: over the units.
    """

    # by parameter and quantity, for those that were covered; under "" sums over the network: "trace" over all covered
    # parameters, "kappa_trace" (Σ ‖w_l‖² trace_l), "rho_sum" and "rho_rows_sum" over the layers
    means: dict[tuple[str, str], Mean]
    not_covered: NotCovered  # parameters whose block these columns do not give
    draws: int = 0  # random columns of each sample; 0 where all columns were taken
    missed: str = ""  # why the draws ended before every value was as precise as asked for; empty where all are

    def add(self, batch: BatchSums) -> None:
        """Let the samples of a finished batch into the means."""
        for key, values in batch.sums.items():
            mean = self.means.setdefault(key, Mean(draws=max(1, self.draws)))
            mean.add(values, batch.squares.get(key))

    def of(self, name: str, quantity: str) -> Mean | None:
        """The mean of one quantity, if it was covered."""
        return self.means.get((name, quantity))

    def joined(self, other: Curvature) -> Curvature:
        """This and another pass over the same samples."""
        means = {key: mean.joined(other.means[key]) for key, mean in self.means.items()}
        return replace(self, means=means, draws=self.draws + other.draws)

    def over(self, ranks: Ranks) -> Curvature:
        """With what the other ranks have added up; all have the same keys, since all ran the same network."""
        means = list(self.means.values())
        counts = torch.tensor([float(mean.n) for mean in means], dtype=torch.float64)
        own = [counts]
        for mean in means:
            own += [getattr(mean, name).cpu() for name in SUMMED]
        summed = iter(ranks.summed(own))
        counts = next(summed)
        together = []
        for n, mean in zip(counts.tolist(), means, strict=True):
            parts: dict[str, Any] = {name: next(summed) for name in SUMMED}
            together.append(replace(mean, n=round(n), **parts))
        return replace(self, means=dict(zip(self.means, together, strict=True)))

    def relative_errors(self, wanted: float, quantities: Sequence[str] | None = None) -> list[float]:
        """Relative standard errors of the values of the network and the layers; of units that of the largest.

        An error of too few degrees of freedom is at least so large that more draws are asked for.
        """
        rows = {name for name, quantity in self.means if not name or quantity == "relative_flatness"}
        return [  # a bias or a BatchNorm scale has no row of its own
            relative_error(mean.value, mean.stderr, freedom=mean.freedom, wanted=wanted)
            for (name, quantity), mean in self.means.items()
            if name in rows and (quantities is None or quantity in quantities)
        ]
