"""The bi-criteria curve against closed forms, and its read-off against planted values."""

from __future__ import annotations

import pytest
import torch
from networks import batchnorm_conv, mlp
from sklearn.datasets import load_digits
from test_pac_bayes import ALPHAS, least_squares, rows
from torch import nn

import flatscope as fs
from flatscope.errors import InputError, NotApplicable
from flatscope_papers.neyshabur2017.bi_criteria import (
    NoiseLevel,
    bi_criteria,
    kl_at_sharpness,
    noise_level_at_sharpness,
)


def test_divergence_falls_with_the_square_of_the_noise() -> None:
    curve = bi_criteria(fs.Context(mlp().problem()), ALPHAS, draws=4)
    products = [point.kl * point.alpha**2 for point in curve]
    assert products == pytest.approx([products[0]] * 3, rel=1e-13)


def planted(alphas: tuple[float, ...], power: float) -> list[NoiseLevel]:
    return [NoiseLevel(a, 7 / a**2, 40 * a**power) for a in alphas]


@pytest.mark.parametrize("power", [2.0, 1.3])
def test_read_off_returns_the_planted_value(power: float) -> None:
    found = noise_level_at_sharpness(planted((1e-3, 1e-2, 1e-1), power), 0.05)
    alpha = (0.05 / 40) ** (1 / power)
    assert found.alpha == pytest.approx(alpha, rel=1e-10)
    assert found.kl == pytest.approx(7 / alpha**2, rel=1e-10)


def test_read_off_at_a_point_of_the_curve_and_from_a_negative_estimate() -> None:
    curve = [NoiseLevel(0.01, 100.0, -0.05), NoiseLevel(0.1, 1.0, 0.15)]
    assert noise_level_at_sharpness(curve, 0.15) == curve[1]
    assert noise_level_at_sharpness(curve, 0.05).kl == pytest.approx(10.0)  # half-way in sharpness, half-way in log KL


def test_read_off_refuses_a_curve_that_does_not_bracket_the_level() -> None:
    for level in (1e-9, 1e9):
        with pytest.raises(NotApplicable, match="brackets"):
            noise_level_at_sharpness(planted(ALPHAS, 2), level)


@pytest.mark.parametrize("start", [(1e-5, 2e-5), (1e-3, 1e-2), (3.0, 5.0)])
def test_grid_is_extended_until_it_contains_the_level(start: tuple[float, ...]) -> None:
    problem, _ = least_squares()
    ctx = fs.Context(problem)
    found = kl_at_sharpness(ctx, 0.05, alpha=start, draws=200)
    [there] = bi_criteria(ctx, found.alpha, draws=200)
    assert there.sharpness == pytest.approx(0.05, rel=1e-9)  # quadratic: the interpolation is exact
    assert there.kl == pytest.approx(found.kl, rel=1e-9)


def fitted(y: torch.Tensor, x: torch.Tensor) -> fs.Problem:
    """A small network trained to a cross-entropy of 0.01."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(2000):
        loss = nn.functional.cross_entropy(model(x), y)
        if float(loss.detach()) < 0.01:
            break
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return fs.Problem(model, train=(x, y))


def test_random_labels_cost_more_divergence_at_the_same_expected_sharpness() -> None:
    digits = load_digits()
    x, y = torch.from_numpy(digits.data[:200] / 16), torch.from_numpy(digits.target[:200])
    shuffled = y[torch.randperm(200, generator=torch.Generator().manual_seed(0))]
    true, random = (kl_at_sharpness(fs.Context(fitted(labels, x)), 0.05, draws=200).kl for labels in (y, shuffled))
    assert random > 2 * true


def test_batchnorm_must_be_folded_first() -> None:
    tiny = batchnorm_conv()
    with pytest.raises(InputError, match="fold_batchnorm"):
        bi_criteria(fs.Context(tiny.problem()))
    folded = tiny.with_model(fs.fold_batchnorm(tiny.model, tiny.x)).problem(initial=None)
    measured = rows(tiny.problem(), "pac_bayes_kl", alpha=0.1)
    assert bi_criteria(fs.Context(folded), 0.1, draws=4)[0].kl == pytest.approx(measured[0][0], rel=1e-12)
