"""Chains of noisy SGD: stationary variances, the noise of samples, mixing, and the same steps as the optimizer."""

from __future__ import annotations

import math

import pytest
import torch
from test_langevin import CURVATURE, walk
from torch import nn

from flatscope import SGLD
from flatscope.errors import InputError
from flatscope_papers.theory.chains import (
    SampleNoise,
    diagnose,
    gradient_of,
    run_chains,
    stationary_variance_on_parabola,
)


def test_no_global_random_state_is_touched() -> None:
    before = torch.get_rng_state()
    run_chains(lambda p: p, torch.zeros(4, 2), lr=0.1, noise=0.1, steps=5)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("momentum", [0.0, 0.6])
def test_variance_on_a_quadratic_is_the_discretised_one(momentum: float) -> None:
    curvature, lr, noise, chains = 3.0, 0.1, 0.2, 20_000
    start = torch.zeros(chains, 1, dtype=torch.float64)
    run = run_chains(
        lambda p: curvature * p, start, lr=lr, noise=noise, momentum=momentum, steps=300, burn_in=0.999, seed=1
    )
    found = float(run.values[-1].square().mean())
    exact = stationary_variance_on_parabola(curvature, lr, noise, momentum)
    assert abs(found - exact) < 4 * exact * math.sqrt(2 / chains)
    boltzmann = SGLD.temperature_of(noise, lr, momentum) / curvature
    assert abs(boltzmann - exact) > 4 * exact * math.sqrt(2 / chains)  # the difference is seen, not only computed
    assert stationary_variance_on_parabola(3.0, 1e-6, noise, momentum) == pytest.approx(
        SGLD.temperature_of(noise, 1e-6, momentum) / 3, rel=1e-5
    )


def test_chains_and_optimizer_take_the_same_step() -> None:
    """GDL on many points is the optimizer on each of them, up to the noise, which has the same size."""
    start = torch.tensor([[1.0, -2.0], [0.5, 0.5]], dtype=torch.float64)
    run = run_chains(lambda p: p @ CURVATURE, start, lr=0.1, noise=0.0, momentum=0.7, steps=6)
    for chain in range(2):
        w = nn.Parameter(start[chain].clone())
        expected = walk(SGLD([w], 0.1, noise=0.0, momentum=0.7), w, 6)
        torch.testing.assert_close(run.final[chain], expected, rtol=1e-12, atol=0)
    by_hand = start.clone()
    normal = torch.randn(3, 2, 2, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    for t in range(3):
        by_hand = by_hand - 0.1 * by_hand @ CURVATURE + 0.3 * normal[t]
    noisy = run_chains(lambda p: p @ CURVATURE, start, lr=0.1, noise=0.3, steps=3, seed=8)
    torch.testing.assert_close(noisy.final, by_hand, rtol=1e-12, atol=0)


def test_gradient_of_any_potential() -> None:
    points = torch.tensor([[1.0, -2.0], [0.5, 0.5]], dtype=torch.float64)
    found = gradient_of(lambda p: (p @ CURVATURE * p).sum(1) / 2)(points)
    torch.testing.assert_close(found, points @ CURVATURE)


def test_sample_noise_has_the_temperature_it_says() -> None:
    generator = torch.Generator().manual_seed(0)
    deviations = torch.randn(50, 1, generator=generator, dtype=torch.float64)
    deviations -= deviations.mean(0)
    source = SampleNoise(deviations, batch_size=5)
    run = run_chains(
        lambda p: p,
        torch.zeros(20_000, 1, dtype=torch.float64),
        lr=0.05,
        noise=0.0,
        sample_noise=source,
        steps=200,
        burn_in=0.99,
    )
    exact = stationary_variance_on_parabola(1.0, 0.05, 0.05 * math.sqrt(float(deviations.square().mean()) / 5))
    assert abs(float(run.values[-1].square().mean()) - exact) < 4 * exact * math.sqrt(2.5 / 20_000)
    assert run.temperature == pytest.approx(source.temperature(0.05))


def test_mixing_is_seen_and_so_is_its_absence() -> None:
    generator = torch.Generator().manual_seed(0)
    independent = torch.randn(400, 50, generator=generator, dtype=torch.float64)
    starts = torch.arange(50) % 2
    good = diagnose(independent, starts)
    assert good.mixed(0.05)
    assert good.effective_samples == pytest.approx(400 * 50, rel=0.1)
    stuck = diagnose(starts + 0.0 * independent, starts)
    assert stuck.two_start_gap == 1.0
    assert stuck.effective_samples < 60
    assert not stuck.mixed(0.5)
    correlated = torch.zeros(4000, 50, dtype=torch.float64)
    for t in range(1, 4000):
        correlated[t] = 0.9 * correlated[t - 1] + torch.randn(50, generator=generator, dtype=torch.float64)
    found = diagnose(correlated, starts).effective_samples
    assert found == pytest.approx(4000 * 50 * 0.1 / 1.9, rel=0.15)  # (1 - a)/(1 + a) of the records
    assert diagnose(torch.ones(10, 4), starts[:4]).effective_samples == 4


def test_what_chains_refuse() -> None:
    start = torch.zeros(2, 1)
    with pytest.raises(InputError, match="either temperature or noise"):
        run_chains(lambda p: p, start, lr=0.1, steps=2)
    with pytest.raises(InputError, match="chains, d"):
        run_chains(lambda p: p, torch.zeros(2), lr=0.1, noise=0.0, steps=2)
    with pytest.raises(InputError, match="burn_in"):
        run_chains(lambda p: p, start, lr=0.1, noise=0.0, steps=2, burn_in=1.0)
    with pytest.raises(InputError, match="Take a smaller lr"):
        run_chains(lambda p: p**3, start + 10, lr=1.0, noise=0.0, steps=50)
    with pytest.raises(InputError, match="lr \\* curvature"):
        stationary_variance_on_parabola(3.0, 1.0, 0.1)
