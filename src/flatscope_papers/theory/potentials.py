"""Two potentials whose minima are equally deep but not equally wide, in any dimension, and where noise leaves them.

They stand for the unpublished ones of Figures 7-10 of Zhang et al. (2017): two flat balls, one twice as wide in
every direction (Figure 7), and a valley, degenerate in all directions but one, against a point (Figures 8-10).
The share of exp(−U/T) that lies in the wide basin or in the valley is known by quadrature, whatever the dimension.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from scipy.special import ndtr
from torch import Tensor

from flatscope import InputError
from flatscope_papers.theory.chains import ChainRun, Floats, Mixing, SampleNoise, run_chains

NEGLIGIBLE = 40.0  # energies of this many temperatures are left out of integrals: exp(-40)
ALONG, ACROSS = 1500, 800  # points of the quadrature along axis 1 and in the distance from it
CELLS = 1000  # cells for the squared distance of a coordinate on the torus


class Potential(Protocol):
    """Interface of a potential for the chains and the figures; points are (chains, d)."""

    @property
    def dimension(self) -> int:
        """Number of coordinates of a point."""

    def energy(self, points: Tensor) -> Tensor:
        """U, (chains,)."""

    def gradient(self, points: Tensor) -> Tensor:
        """∇U, (chains, d)."""

    def in_flat(self, points: Tensor) -> Tensor:
        """True if a point belongs to the flatter minimum, (chains,)."""

    def project(self, points: Tensor) -> Tensor:
        """The points as points of the space, which may be a torus in some directions."""

    def minima(self) -> Tensor:
        """One point of the sharper and one of the flatter minimum, (2, d)."""

    def flat_share(self, temperature: float) -> float:
        """Probability of the flatter minimum under exp(−U/T), by quadrature."""

    def closed_form(self, temperature: float) -> float:
        """The same with each minimum taken as if it were alone."""

    def marginal(self, first: Floats, temperature: float) -> Floats:
        """Density of the first coordinate under exp(−U/T)."""


@dataclass(frozen=True)
class TwoBasins:
    """U = min_i max(‖w − c_i‖/s_i − 1, 0)²: flat balls of radii s around 0 and a second centre on axis 1.

    Alone, a ball holds a mass proportional to s^D at any temperature: with radii 1 : 2 the wide one is
    2^D times as likely.

    Attributes:
        dimension: D.
        barrier: energy on the straight way from one ball to the other; sets the distance of the centres.
        radii: of the narrow and of the wide ball.
    """

    dimension: int
    barrier: float = 0.25
    radii: tuple[float, float] = (0.5, 1.0)

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.barrier <= 0 or not 0 < self.radii[0] <= self.radii[1]:
            raise InputError("dimension >= 1, barrier > 0, radii growing from > 0", repr(self), where="TwoBasins")

    @property
    def separation(self) -> float:
        """Distance of the centres, (s_1 + s_2)(1 + √b)."""
        return sum(self.radii) * (1 + math.sqrt(self.barrier))

    def energy(self, points: Tensor) -> Tensor:
        """U, (chains,)."""
        return torch.minimum(*self._ratios(points)).sqrt().sub(1).clamp_min(0).square()

    def gradient(self, points: Tensor) -> Tensor:
        """∇U, (chains, d): 2/s²·(1 − s/r)₊ times the way from the nearer centre, r its length."""
        narrow, wide = self._ratios(points)
        in_wide = wide < narrow
        pull = torch.minimum(narrow, wide).rsqrt_().neg_().add_(1).clamp_min_(0)  # −∞ at a centre becomes 0
        pull *= torch.where(in_wide, 2 / self.radii[1] ** 2, 2 / self.radii[0] ** 2)
        result = points * pull.unsqueeze(1)
        result[:, 0].sub_(pull.mul_(in_wide), alpha=self.separation)
        return result

    def _ratios(self, points: Tensor) -> tuple[Tensor, Tensor]:
        """Squared distances to the two centres in units of the squared radii, each (chains,)."""
        squared = points.square().sum(1)
        towards = points[:, 0].mul(-2 * self.separation).add_(self.separation**2)
        return squared / self.radii[0] ** 2, squared.add_(towards).clamp_min_(0).div_(self.radii[1] ** 2)

    def in_flat(self, points: Tensor) -> Tensor:
        """True if the wide ball's part of U is the smaller one."""
        narrow, wide = self._ratios(points)
        return wide < narrow

    def project(self, points: Tensor) -> Tensor:
        """The points themselves: the space is flat and open."""
        return points

    def minima(self) -> Tensor:
        """The two centres."""
        centres = torch.zeros(2, self.dimension, dtype=torch.float64)
        centres[1, 0] = self.separation
        return centres

    def closed_form(self, temperature: float) -> float:
        """1/(1 + (s_1/s_2)^D), at any temperature."""
        return 1 / (1 + (self.radii[0] / self.radii[1]) ** self.dimension)

    def flat_share(self, temperature: float) -> float:
        """By quadrature over axis 1 and the distance from it."""
        axis, _ = _midpoints_of_cells(*self._range(temperature), ALONG)
        everything, wide = self._slices(axis, temperature)
        return float(wide.sum() / everything.sum())

    def marginal(self, first: Floats, temperature: float) -> Floats:
        """Density of w_1, by the same quadrature."""
        axis, width = _midpoints_of_cells(*self._range(temperature), ALONG)
        total = self._slices(axis, temperature)[0].sum() * width
        return np.asarray(self._slices(np.asarray(first, dtype=np.float64), temperature)[0] / total)

    def _range(self, temperature: float) -> tuple[float, float]:
        """Interval on axis 1 in which exp(−U/T) is not negligible."""
        narrow, wide = (s * (1 + math.sqrt(NEGLIGIBLE * temperature)) for s in self.radii)
        return min(-narrow, self.separation - wide), max(narrow, self.separation + wide)

    def _slices(self, first: Floats, temperature: float) -> tuple[Floats, Floats]:
        """∫exp(−U/T) over all w with the given w_1, of both basins and of the wide one; up to one constant."""
        if self.dimension == 1:
            distance, weight = np.zeros(1), np.ones(1)
        else:
            reach = self.radii[1] * (1 + math.sqrt(NEGLIGIBLE * temperature))
            distance, _ = _midpoints_of_cells(0.0, reach, ACROSS)
            weight = distance ** (self.dimension - 2)  # the area of a sphere around the axis
        everything, wide_part = np.empty(len(first)), np.empty(len(first))
        for begin in range(0, len(first), 256):
            part = slice(begin, begin + 256)
            narrow = np.hypot(first[part, None], distance) / self.radii[0]
            wide = np.hypot(first[part, None] - self.separation, distance) / self.radii[1]
            mass = np.exp(-(np.maximum(np.minimum(narrow, wide) - 1, 0) ** 2) / temperature) * weight
            everything[part], wide_part[part] = mass.sum(1), (mass * (wide < narrow)).sum(1)
        return everything, wide_part


@dataclass(frozen=True)
class ValleyAndPoint:
    """U = min((w_1 − valley)², (w_1 − point)² + Σ_{j≥2} w_j²), with w_2, ..., w_D on a torus of length L.

    The valley is degenerate in D − 1 directions, the point in none. (The caption of Figure 9 in Zhang et al. (2017)
    calls the minimum at 2 the degenerate one; its own text and the histogram need it to be the other.)

    Attributes:
        dimension: D.
        length: L; coordinates 2 to D lie between −L/2 and L/2.
        point: w_1 of the non-degenerate minimum.
        valley: w_1 of the degenerate one, above `point`.
    """

    dimension: int
    length: float = 4.0
    point: float = 2.0
    valley: float = 4.0

    def __post_init__(self) -> None:
        if self.dimension < 1 or self.length <= 0 or self.valley <= self.point:
            raise InputError("dimension >= 1, length > 0, valley > point", repr(self), where="ValleyAndPoint")

    def energy(self, points: Tensor) -> Tensor:
        """U, (chains,)."""
        degenerate = (points[:, 0] - self.valley).square()
        single = (points[:, 0] - self.point).square() + points[:, 1:].square().sum(1)
        return torch.minimum(degenerate, single)

    def gradient(self, points: Tensor) -> Tensor:
        """∇U, (chains, d)."""
        in_valley = self.in_flat(points)
        result = points * torch.where(in_valley, 0.0, 2.0).unsqueeze(1)
        result[:, 0] = (points[:, 0] - torch.where(in_valley, self.valley, self.point)).mul_(2)
        return result

    def in_flat(self, points: Tensor) -> Tensor:
        """True if the valley's part of U is the smaller one."""
        sideways = points[:, 1:].square().sum(1).div_(2 * (self.valley - self.point))
        return sideways.add_(points[:, 0]) > (self.valley + self.point) / 2

    def project(self, points: Tensor) -> Tensor:
        """Coordinates 2 to D back on the torus, in place."""
        if self.dimension > 1:
            points[:, 1:].sub_((points[:, 1:] / self.length).round_(), alpha=self.length)
        return points

    def minima(self) -> Tensor:
        """The point, and the valley at 0."""
        places = torch.zeros(2, self.dimension, dtype=torch.float64)
        places[0, 0], places[1, 0] = self.point, self.valley
        return places

    def closed_form(self, temperature: float) -> float:
        """1 − 1/(1 + (L/√(πT))^{D−1})."""
        return 1 - 1 / (1 + (self.length / math.sqrt(math.pi * temperature)) ** (self.dimension - 1))

    def flat_share(self, temperature: float) -> float:
        """Gaussian integrals over w_1, averaged over the distribution of Σ_{j≥2} w_j² on the torus."""
        single, degenerate = self._masses(temperature)
        return degenerate / (degenerate + single)

    def marginal(self, first: Floats, temperature: float) -> Floats:
        """Density of w_1, by the same average."""
        sideways, mass = self._sideways()
        result = np.empty(len(first))
        for n, value in enumerate(first):
            energy = np.minimum((value - self.valley) ** 2, (value - self.point) ** 2 + sideways)
            result[n] = mass @ np.exp(-energy / temperature)
        return result / (sum(self._masses(temperature)) * math.sqrt(math.pi * temperature))

    def _masses(self, temperature: float) -> tuple[float, float]:
        """∫exp(−U/T) over the two basins, in units of √(πT)L^{D−1}."""
        sideways, mass = self._sideways()
        distance = self.valley - self.point
        border = sideways / (2 * distance)  # the basins meet at the middle less this
        scale = math.sqrt(2 / temperature)
        single = float(mass @ (np.exp(-sideways / temperature) * ndtr((distance / 2 - border) * scale)))
        return single, float(mass @ ndtr((distance / 2 + border) * scale))

    def _sideways(self) -> tuple[Floats, Floats]:
        """Values of Σ_{j≥2} w_j² and their probabilities for w_j uniform on the torus."""
        largest = (self.length / 2) ** 2
        edges = np.linspace(0, largest, CELLS + 1)
        one = np.diff(np.sqrt(edges / largest))  # the distribution function of w² is √(q/largest)
        mass = np.ones(1)
        for _ in range(self.dimension - 1):
            mass = _convolve_densities(mass, one)
        step = largest / CELLS
        return np.asarray((np.arange(len(mass)) + 0.5 * (self.dimension - 1)) * step), mass


@dataclass(frozen=True)
class FlatShare:
    """Share of time that noise spends in the flatter minimum, beside that of exp(−U/T).

    Attributes:
        simulated: share of all records after the burn-in.
        exact: by quadrature, at the run's temperature.
        closed_form: with each minimum taken as if it were alone.
        mixing: of the simulated share.
        run: the records: columns w_1, w_2 (0 in one dimension) and whether the point was in the flatter minimum.
    """

    simulated: float
    exact: float
    closed_form: float
    mixing: Mixing
    run: ChainRun


def simulate(
    potential: Potential,
    temperature: float,
    *,
    lr: float = 0.01,
    steps: int = 30_000,
    chains: int = 400,
    sample_noise: SampleNoise | None = None,
    record_every: int = 10,
    seed: int = 0,
    device: str | torch.device = "cpu",
    show_progress: bool = False,
) -> FlatShare:
    """Langevin chains on a potential, half of them started in each minimum, the second half of the steps kept.

    Args:
        potential: where they run.
        temperature: T of noise and mini-batches together; noise is added for what the mini-batches leave.
        lr: γ.
        steps: of each chain.
        chains: how many, rounded up to an even number.
        sample_noise: for SGD and SGDL, see `white_sample_noise`.
        record_every: steps between two records.
        seed: of all noise.
        device: where the chains run.
        show_progress: a bar on terminals.

    Example:
        >>> found = simulate(ValleyAndPoint(2), temperature=0.25, lr=0.04, steps=3000)
        >>> abs(found.simulated - found.exact) < 0.1
        True
    """
    supplied = 0.0 if sample_noise is None else sample_noise.temperature(lr)
    if supplied > temperature * (1 + 1e-9):
        got = f"mini-batches with {supplied:.4g}"
        raise InputError(f"sample noise of temperature {temperature:.4g} at most", got, where="simulate")
    half = (chains + 1) // 2
    # Normal numbers of single precision cost a tenth; a rounding is far below the width of a bin.
    start = potential.minima().repeat_interleave(half, dim=0).to(device, torch.float32)
    if sample_noise is not None:
        sample_noise = SampleNoise(sample_noise.deviations.to(start), sample_noise.batch_size)

    def record(points: Tensor) -> Tensor:
        second = points[:, 1] if points.shape[1] > 1 else torch.zeros_like(points[:, 0])
        return torch.stack([points[:, 0], second, potential.in_flat(points).to(points.dtype)], dim=1)

    run = run_chains(
        potential.gradient,
        start,
        lr=lr,
        steps=steps,
        temperature=max(0.0, temperature - supplied),
        sample_noise=sample_noise,
        project=potential.project,
        record=record,
        record_every=record_every,
        starts=torch.arange(2, device=start.device).repeat_interleave(half),
        seed=seed,
        show_progress=show_progress,
    )
    share, mixing = run.share(lambda values: values[..., 2] > 0.5)
    exact, alone = potential.flat_share(run.temperature), potential.closed_form(run.temperature)
    return FlatShare(share, exact, alone, mixing, run)


def white_sample_noise(
    dimension: int, temperature: float, lr: float, *, n: int = 200, batch_size: int = 5, seed: int = 0
) -> SampleNoise:
    """Sample losses V_i(w) = U(w) + ⟨s z_i, w⟩ with Σz_i = 0 and covariance exactly 1, for any U.

    Mini-batches of b of them, drawn with replacement, have the temperature T = γs²/(2b), which gives s. The noise is
    the same everywhere; that of a network that fits all its samples vanishes at the minimum, where SGD then stays
    and exp(−U/T) says nothing. Each z_i comes with −z_i: a skewed set pushes through the saddle in one direction
    more easily, which moves the shares by as much as 0.03 at γ = 0.04.

    Args:
        dimension: of w.
        temperature: T.
        lr: γ.
        n: how many samples, an even number.
        batch_size: b.
        seed: of the z_i.
    """
    if n % 2 or n < 2 * dimension:
        got = f"{n} samples in {dimension} dimensions"
        raise InputError("an even number of samples, twice the dimension or more", got, where="white_sample_noise")
    generator = torch.Generator().manual_seed(seed)
    drawn = torch.randn(n // 2, dimension, generator=generator, dtype=torch.float64)
    orthogonal = torch.linalg.qr(drawn).Q * math.sqrt(n / 2)
    scale = math.sqrt(2 * batch_size * temperature / lr)
    return SampleNoise(scale * torch.cat([orthogonal, -orthogonal]), batch_size)


def _midpoints_of_cells(low: float, high: float, cells: int) -> tuple[Floats, float]:
    width = (high - low) / cells
    return np.asarray(low + width * (np.arange(cells) + 0.5)), width


def _convolve_densities(left: Floats, right: Floats) -> Floats:
    """By FFT; direct sums would take seconds for thousands of cells."""
    size = len(left) + len(right) - 1
    both = np.fft.rfft(left, size) * np.fft.rfft(right, size)
    return np.asarray(np.maximum(np.fft.irfft(both, size), 0.0))
