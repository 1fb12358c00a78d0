"""Potentials with known stationary distributions: gradients, quadratures, closed forms, and chains on them."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from flatscope.errors import InputError
from flatscope_papers.theory.chains import gradient_of
from flatscope_papers.theory.potentials import Potential, TwoBasins, ValleyAndPoint, simulate, white_sample_noise

KINDS = (TwoBasins, ValleyAndPoint)
TEMPERATURES = {TwoBasins: 0.15, ValleyAndPoint: 0.25}


def somewhere(dimension: int, n: int = 300) -> torch.Tensor:
    generator = torch.Generator().manual_seed(dimension)
    points = 1.5 * torch.randn(n, dimension, generator=generator, dtype=torch.float64)
    points[:, 0] += 2
    return points


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dimension", [1, 2, 5])
def test_gradients_are_those_of_the_energy(kind: type, dimension: int) -> None:
    potential: Potential = kind(dimension)
    points = potential.project(somewhere(dimension))
    torch.testing.assert_close(potential.gradient(points), gradient_of(potential.energy)(points))
    minima = potential.minima()
    assert potential.energy(minima).tolist() == [0.0, 0.0]
    assert potential.gradient(minima).abs().max() == 0
    assert potential.in_flat(minima).tolist() == [False, True]


def test_barrier_is_the_energy_between_the_balls() -> None:
    basins = TwoBasins(3, barrier=0.4)
    way = torch.zeros(4001, 3, dtype=torch.float64)
    way[:, 0] = torch.linspace(0, basins.separation, 4001, dtype=torch.float64)
    assert float(basins.energy(way).max()) == pytest.approx(0.4, abs=1e-3)


def test_shares_are_those_of_the_closed_forms() -> None:
    wide = [TwoBasins(d).flat_share(0.15) for d in range(1, 6)]
    assert wide == pytest.approx([2**d / (1 + 2**d) for d in range(1, 6)], abs=1e-3)
    assert wide == pytest.approx([TwoBasins(d).closed_form(0.15) for d in range(1, 6)], abs=1e-3)
    assert wide == sorted(wide)
    point = [1 - ValleyAndPoint(d).flat_share(0.25) for d in range(1, 6)]
    assert point == pytest.approx([1 - ValleyAndPoint(d).closed_form(0.25) for d in range(1, 6)], abs=1e-3)
    assert point == pytest.approx([0.5, 0.181, 0.047, 0.0108, 0.0024], abs=5e-4)


@pytest.mark.parametrize("kind", KINDS)
def test_quadrature_agrees_with_a_plain_grid(kind: type) -> None:
    """The same integral in three dimensions with no use of any symmetry."""
    potential: Potential = kind(3)
    temperature = TEMPERATURES[kind]
    step = 0.08
    sideways = np.arange(-2, 2, step) + step / 2 if kind is ValleyAndPoint else np.arange(-4, 4, step) + step / 2
    first = np.arange(-3, 7, step) + step / 2
    grid = torch.from_numpy(np.stack(np.meshgrid(first, sideways, sideways, indexing="ij"), -1).reshape(-1, 3))
    mass = (-potential.energy(grid) / temperature).exp()
    share = float(mass[potential.in_flat(grid)].sum() / mass.sum())
    assert potential.flat_share(temperature) == pytest.approx(share, abs=2e-3)
    marginal = mass.reshape(len(first), -1).sum(1).numpy()
    marginal /= marginal.sum() * step
    assert np.abs(potential.marginal(first, temperature) - marginal).max() < 5e-3 * marginal.max()


@pytest.mark.parametrize("kind", KINDS)
def test_marginals_integrate_to_one(kind: type) -> None:
    first = np.linspace(-4, 8, 3001)
    for dimension in (1, 4):
        density = kind(dimension).marginal(first, 0.2)
        assert np.trapezoid(density, first) == pytest.approx(1, abs=1e-3)


@pytest.mark.long
@pytest.mark.parametrize(("kind", "dimension"), list(itertools.product(KINDS, (1, 2, 3))))
def test_chains_find_what_the_quadrature_says(kind: type, dimension: int) -> None:
    lr = {TwoBasins: 0.02, ValleyAndPoint: 0.04}[kind]
    found = simulate(kind(dimension), TEMPERATURES[kind], lr=lr, steps=8000, chains=2000, record_every=20)
    assert abs(found.simulated - found.exact) < 0.02
    assert found.mixing.two_start_gap < 0.02
    assert found.mixing.mixed()


def test_too_few_steps_are_seen_as_such() -> None:
    found = simulate(TwoBasins(5, barrier=1.0), 0.15, lr=0.005, steps=400, chains=100)
    assert found.mixing.two_start_gap > 0.3
    assert not found.mixing.mixed()
    histogram = found.run.histogram(span=(-2, 6))
    assert not histogram.mixing.mixed()
    assert float((histogram.density * np.diff(histogram.edges)).sum()) == pytest.approx(1, abs=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("sgd_share", [1.0, 0.5])
def test_sgd_and_sgdl_on_sample_losses_have_the_same_share(sgd_share: float) -> None:
    noise = white_sample_noise(2, sgd_share * 0.25, 0.04)
    found = simulate(ValleyAndPoint(2), 0.25, lr=0.04, steps=8000, chains=1000, sample_noise=noise, record_every=20)
    assert found.run.temperature == pytest.approx(0.25)
    assert (found.run.noise == pytest.approx(0, abs=1e-6)) == (sgd_share == 1.0)
    assert abs(found.simulated - found.exact) < 0.02


def test_sample_noise_is_white_and_sums_to_zero() -> None:
    noise = white_sample_noise(4, temperature=0.3, lr=0.02, n=50, batch_size=3)
    z = noise.deviations
    torch.testing.assert_close(z.sum(0), torch.zeros(4, dtype=torch.float64), rtol=0, atol=1e-10)
    torch.testing.assert_close(z.T @ z / 50, 2 * 3 * 0.3 / 0.02 * torch.eye(4, dtype=torch.float64))
    assert noise.temperature(0.02) == pytest.approx(0.3)


def test_what_is_refused() -> None:
    with pytest.raises(InputError, match="barrier > 0"):
        TwoBasins(2, barrier=0.0)
    with pytest.raises(InputError, match="valley > point"):
        ValleyAndPoint(2, point=4.0, valley=2.0)
    with pytest.raises(InputError, match="an even number of samples"):
        white_sample_noise(5, 0.1, 0.1, n=5)
    with pytest.raises(InputError, match="sample noise of temperature"):
        simulate(ValleyAndPoint(2), 0.1, lr=0.01, sample_noise=white_sample_noise(2, 0.5, 0.01))
