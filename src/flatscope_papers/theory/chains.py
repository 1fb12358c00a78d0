"""Langevin gradient descent on any potential, thousands of chains at once, with a diagnosis of their mixing.

GDL of Zhang et al. (2017) is w ← w − γ∇U(w) + γ'ξ with the full gradient; with sample noise it is their SGD, where
the gradient of a mini-batch takes the place of ∇U. What a histogram of the chains shows is worth something only if
the chains forgot where they started, so every result carries the gap between starts and the effective sample size.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatscope import SGLD, InputError
from flatscope.extend import progress_bar

Field = Callable[[Tensor], Tensor]
Floats = npt.NDArray[np.float64]
NOISE_BLOCK = 2**16  # normal numbers drawn at once: the calls cost more than the numbers for few chains
BAR_EVERY = 500


@dataclass(frozen=True)
class SampleNoise:
    """Gradients of samples less their mean, ∇V_i − ∇U, the same at every point: what makes GDL into SGD.

    Attributes:
        deviations: (n, d), summing to zero.
        batch_size: b samples, drawn with replacement for every chain and step.
    """

    deviations: Tensor
    batch_size: int

    def draw(self, chains: int, generator: torch.Generator) -> Tensor:
        """One mini-batch mean per chain, (chains, d)."""
        shape = (chains, self.batch_size)
        picked = torch.randint(len(self.deviations), shape, generator=generator, device=self.deviations.device)
        return self.deviations[picked].mean(1)

    def temperature(self, lr: float) -> float:
        """γs²/(2b), s² the mean variance of a coordinate: what isotropic sample noise is worth (their eq. (9))."""
        return lr * float(self.deviations.square().mean()) / (2 * self.batch_size)


@dataclass(frozen=True)
class Mixing:
    """Diagnosis of whether chains forgot their start.

    Attributes:
        two_start_gap: largest difference between the means of groups of chains with different starts.
        effective_samples: how many independent draws the mean is worth.
        standard_error: of the mean over all chains and times.
    """

    two_start_gap: float
    effective_samples: float
    standard_error: float

    def mixed(self, tolerance: float = 0.02) -> bool:
        """The starts differ by less than `tolerance`, in units of what was recorded, and noise explains no more."""
        return self.two_start_gap <= tolerance and self.standard_error <= tolerance


@dataclass(frozen=True)
class Histogram:
    """A density on bins, with the mixing of what it shows.

    Attributes:
        edges: (bins + 1,).
        density: (bins,); integrates to the share of values inside the edges.
        mixing: of the mean of the values.
    """

    edges: Floats
    density: Floats
    mixing: Mixing


@dataclass(frozen=True)
class ChainRun:
    """Records of the chains after the burn-in.

    Attributes:
        values: (records, chains, k), what `record` returned.
        final: (chains, d), the last points.
        starts: (chains,), the number of each chain's group of equal starts.
        lr, noise, temperature: γ, γ' and T; sample noise is counted in T.
        steps: all steps, those of the burn-in included.
        seconds: time of the run.
    """

    values: Tensor
    final: Tensor
    starts: Tensor
    lr: float
    noise: float
    temperature: float
    steps: int
    seconds: float

    def share(self, test: Callable[[Tensor], Tensor]) -> tuple[float, Mixing]:
        """Share of records in which a condition holds, and how well that number is mixed.

        Args:
            test: called with the values (records, chains, k), returns booleans (records, chains).
        """
        held = test(self.values).to(torch.float64)
        return float(held.mean()), diagnose(held, self.starts)

    def histogram(self, column: int = 0, bins: int = 60, span: tuple[float, float] | None = None) -> Histogram:
        """Density of one recorded column; `span` is from its smallest to its largest value by default."""
        series = self.values[..., column]
        density, edges = np.histogram(series.cpu().numpy(), bins=bins, range=span)
        scale = series.numel() * np.diff(edges)
        return Histogram(edges.astype(np.float64), density / scale, diagnose(series, self.starts))


def _noise_power(temperature: float | None, noise: float | None, lr: float, momentum: float) -> float:
    """γ', given as it is or as a temperature."""
    if (temperature is None) == (noise is None):
        raise InputError("either temperature or noise", "both or neither", where="run_chains")
    return noise if noise is not None else SGLD.noise_of(temperature or 0.0, lr, momentum)


def _refuse_settings(start: Tensor, steps: int, record_every: int, burn_in: float) -> None:
    """Refuse starts that are no points, and numbers of steps that leave nothing to record."""
    if start.dim() != 2 or not start.is_floating_point():
        got = f"{tuple(start.shape)} of {start.dtype}"
        raise InputError("a start (chains, d) of real numbers", got, where="run_chains")
    if steps < 1 or record_every < 1 or not 0 <= burn_in < 1:
        got = f"steps {steps}, record_every {record_every}, burn_in {burn_in}"
        raise InputError("steps and record_every >= 1, burn_in in [0, 1)", got, where="run_chains")


def run_chains(
    gradient: Field,
    start: Tensor,
    *,
    lr: float,
    steps: int,
    temperature: float | None = None,
    noise: float | None = None,
    momentum: float = 0.0,
    sample_noise: SampleNoise | None = None,
    project: Callable[[Tensor], Tensor] | None = None,
    record: Field | None = None,
    record_every: int = 10,
    burn_in: float = 0.5,
    starts: Tensor | None = None,
    seed: int = 0,
    show_progress: bool = False,
) -> ChainRun:
    """Run Langevin chains side by side, on the device of `start`.

    Args:
        gradient: ∇U of many points at once, (chains, d) to (chains, d); `gradient_of` makes it from U.
        start: (chains, d), where each chain begins.
        lr: γ.
        steps: of each chain.
        temperature: T of the added noise; either this or `noise`, as for `SGLD`.
        noise: γ'.
        momentum: β, with the noise in the velocity.
        sample_noise: makes the gradient that of a mini-batch.
        project: puts points (chains, d) back into the allowed set.
        record: what to keep of points (chains, d), as (chains, k); the points themselves by default.
        record_every: steps between two records.
        burn_in: share of the steps before the first record.
        starts: (chains,) whole numbers, one per group of equal starts; found from `start` by default.
        seed: of all noise.
        show_progress: a bar on terminals, for runs of more than two seconds.

    Raises:
        InputError: settings that do not fit, or chains that left for infinity.

    Example:
        >>> run = run_chains(lambda w: 3 * w, torch.zeros(500, 1), lr=0.1, noise=0.2, steps=400)
        >>> abs(float(run.values.var()) - 0.0784) < 0.005
        True
    """
    _refuse_settings(start, steps, record_every, burn_in)
    power = _noise_power(temperature, noise, lr, momentum)
    generator = torch.Generator(start.device).manual_seed(seed)
    begun, first = time.perf_counter(), int(steps * burn_in)
    point, velocity = start.clone(), torch.zeros_like(start)
    block = max(1, NOISE_BLOCK // max(1, point.numel()))
    kept: list[Tensor] = []
    with torch.no_grad(), progress_bar("chains", total=steps) as advance:
        for step in range(steps):
            if step % block == 0 and power:
                size = (min(block, steps - step), *point.shape)
                kicks = torch.randn(size, generator=generator, device=point.device, dtype=point.dtype).mul_(power)
            drift = gradient(point)
            if sample_noise is not None:
                drift = drift + sample_noise.draw(len(point), generator)
            if momentum:
                point += velocity.mul_(momentum).sub_(drift, alpha=lr).add_(kicks[step % block] if power else 0)
            else:
                point.sub_(drift, alpha=lr)
                if power:
                    point += kicks[step % block]
            if project is not None:
                point = project(point)
            if step >= first and (step - first) % record_every == 0:
                kept.append(record(point) if record is not None else point.clone())
            if show_progress and step % BAR_EVERY == BAR_EVERY - 1:
                advance(BAR_EVERY)
    if not bool(point.isfinite().all()):
        raise InputError("chains that stay finite", "an overflow", where="run_chains", fix="Take a smaller lr")
    groups = starts if starts is not None else torch.unique(start, dim=0, return_inverse=True)[1]
    total = SGLD.temperature_of(power, lr, momentum)
    if sample_noise is not None:
        total += sample_noise.temperature(lr) / (1 - momentum)
    seconds = time.perf_counter() - begun
    return ChainRun(torch.stack(kept), point, groups, lr, power, total, steps, seconds)


def gradient_of(energy: Field) -> Field:
    """∇U by automatic differentiation, for any potential U of many points: (chains, d) to (chains,)."""

    def gradient(points: Tensor) -> Tensor:
        with torch.enable_grad():
            free = points.detach().requires_grad_()
            (result,) = torch.autograd.grad(energy(free).sum(), free)
        return result

    return gradient


def diagnose(series: Tensor, starts: Tensor) -> Mixing:
    """Mixing of the mean of a recorded quantity.

    Autocorrelations are taken around the mean of all chains, so that chains which never leave their well look
    correlated for ever, and summed while pairs of them stay positive (Geyer 1992).

    Args:
        series: (records, chains).
        starts: (chains,) group of each chain; every chain its own group, or one group, leaves the gap at 0.
    """
    series = series.to(torch.float64)
    records, chains = series.shape
    labels, inverse = torch.unique(starts.to(series.device), return_inverse=True)
    gap = 0.0
    if 1 < len(labels) < chains:
        sums = torch.zeros(len(labels), dtype=torch.float64, device=series.device)
        means = sums.index_add(0, inverse, series.mean(0)) / torch.bincount(inverse)
        gap = float(means.max() - means.min())
    centred = series - series.mean()
    variance = float(centred.square().mean())
    if variance == 0:  # nothing ever changed: no number of records tells more than one
        return Mixing(gap, float(chains), 0.0)
    spectrum = torch.fft.rfft(centred, n=2 * records, dim=0)
    covariance = torch.fft.irfft(spectrum.abs().square().mean(1), n=2 * records)[:records] / records
    correlation = (covariance / variance).cpu().numpy()
    pairs = correlation[: records // 2 * 2].reshape(-1, 2).sum(1)  # lags 0 + 1, 2 + 3, ...
    positive = int(np.argmax(pairs <= 0)) if bool((pairs <= 0).any()) else len(pairs)
    time_scale = max(1.0, 2 * float(pairs[:positive].sum()) - 1) if len(pairs) else 1.0
    effective = records * chains / time_scale
    return Mixing(gap, effective, (variance / effective) ** 0.5)


def stationary_variance_on_parabola(curvature: float, lr: float, noise: float, momentum: float = 0.0) -> float:
    """Exact stationary variance on U = kx²/2: (1 + β)γ'²/((1 − β)γk(2 + 2β − γk)), for any stable step.

    The Boltzmann value T/k is its limit for small steps; the difference is the error of the discretisation
    (without momentum γ'²/(2γk − γ²k²)). It follows from x_{t+1} = (1 + β − γk)x_t − βx_{t−1} + γ'ξ_t.

    Raises:
        InputError: the recursion is not stable, γk outside (0, 2 + 2β).

    Example:
        >>> round(stationary_variance_on_parabola(curvature=3.0, lr=0.1, noise=0.2), 4)
        0.0784
    """
    step, limit = lr * curvature, 2 * (1 + momentum)
    if not 0 < step < limit:
        raise InputError(f"lr * curvature in (0, {limit:g})", f"{step:g}", where="stationary_variance_on_parabola")
    return (1 + momentum) * noise**2 / ((1 - momentum) * step * (limit - step))
