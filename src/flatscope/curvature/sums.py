"""What the exact sweep adds up over samples, in one process or over several ranks."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatscope.params import Params
from flatscope.ranks import Ranks


@dataclass
class Mean:
    """Running mean over samples, in float64, with the standard error that the samples' spread gives."""

    n: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, values: Tensor) -> None:
        """Values of some samples: (n,) or (n, units)."""
        values = values.detach().double().cpu()
        self.n += len(values)
        self.total = self.total + values.sum(0)
        self.squares = self.squares + values.square().sum(0)

    @property
    def value(self) -> Tensor:
        """The mean; () or (units,)."""
        return self.total / self.n

    @property
    def stderr(self) -> Tensor:
        """Standard error over samples; zero for a single sample."""
        variance = (self.squares / self.n - self.value.square()).clamp_min(0)
        return (variance / max(self.n - 1, 1)).sqrt()


@dataclass
class LayerSums:
    """Sums over the data for one weight matrix; s_c: columns at its output, u: its input patches, W̄: (out, in·taps).

    trace: mean Σ_c ‖G_c‖²;  rho(j): mean Σ_c ⟨G_c, w(j)⟩², w(j) the weights of input feature or channel j, which is
    (Σ_t φ_{j,t} (Wᵀ s_c)_{j,t})²;  rho_rows(i): the same for the weights of output i;
    relative_flatness: mean Σ_c ‖W̄ᵀ G_c‖².
    """

    trace: Mean = field(default_factory=Mean)
    rho: Mean = field(default_factory=Mean)
    rho_rows: Mean = field(default_factory=Mean)
    relative_flatness: Mean = field(default_factory=Mean)


@dataclass
class Curvature:
    """Result of the sweep.

    Attributes:
        layers: sums by weight parameter, forward order, for those whose block is exact.
        traces: trace of the Hessian block of each parameter tensor that was covered.
        total: sum of those traces, per-sample spread included.
        diagonals: Hessian diagonal of each covered tensor, if asked for.
        curved: {parameter: reason} for those the sweep cannot give exactly.
    """

    layers: dict[str, LayerSums]
    traces: dict[str, Mean]
    total: Mean
    diagonals: Params
    curved: dict[str, str]

    def over(self, ranks: Ranks) -> None:
        """Let in what the other ranks have added up; all have the same keys, since all ran the same network."""
        means = [self.total, *self.traces.values()]
        for layer in self.layers.values():
            means += [layer.trace, layer.rho, layer.rho_rows, layer.relative_flatness]
        counts = torch.tensor([float(mean.n) for mean in means], dtype=torch.float64)
        own = [counts, *self.diagonals.values()]
        own += [mean.total for mean in means] + [mean.squares for mean in means]
        summed = iter(ranks.summed(own))
        counts = next(summed)
        self.diagonals = {name: next(summed) for name in self.diagonals}
        for n, mean in zip(counts.tolist(), means, strict=True):
            mean.n, mean.total = round(n), next(summed)
        for mean in means:
            mean.squares = next(summed)
