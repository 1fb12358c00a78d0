"""Disturbed weights, open paths and sample sizes of Zhang et al. (2017), against closed forms."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor, nn

from flatscope_papers.theory.robust_weights import (
    first_order_path_change,
    largest_robust_path_value,
    robust_loss,
    sides_of_robust_inequality,
)
from flatscope_papers.theory.sample_sizes import log10_size_ratio, multitask_gain, size_ratio, stability_beta, vc_gap


def test_robust_optimisation_of_a_linear_model_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20, 3, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 2, (20,), generator=generator) * 2 - 1
    model = nn.Linear(3, 1, bias=False, dtype=torch.float64).requires_grad_(False)

    def logistic(output: Tensor, target: Tensor) -> Tensor:
        return nn.functional.softplus(-target * output[0])

    due = nn.functional.softplus(-y * (x @ model.weight[0]) + 0.3 * x.norm(dim=1)).mean()
    assert robust_loss(model, x, y, 0.3, loss=logistic) == pytest.approx(float(due), rel=1e-9)
    plain = nn.functional.softplus(-y * (x @ model.weight[0])).mean()
    assert robust_loss(model, x, y, 0.0, loss=logistic) == pytest.approx(float(plain), rel=1e-12)


def test_robust_loss_of_a_network_grows_with_the_radius_and_is_reached() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).double().eval()
    x, y = torch.randn(6, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
    losses = [robust_loss(model, x, y, radius) for radius in (0.0, 0.05, 0.2)]
    assert losses[0] == pytest.approx(float(nn.functional.cross_entropy(model(x), y).detach()))
    assert losses == sorted(losses)
    slope = torch.autograd.grad(nn.functional.cross_entropy(model(x[:1]), y[:1]), list(model.parameters()))
    length = math.sqrt(sum(float(part.square().sum()) for part in slope))
    assert robust_loss(model, x[:1], y[:1], 1e-4) - robust_loss(model, x[:1], y[:1], 0) == pytest.approx(
        1e-4 * length, rel=1e-3
    )


def test_changes_of_open_paths() -> None:
    w, d = torch.tensor([2.0, 3.0, 5.0]), torch.tensor([0.1, 0.2, 0.3])
    assert float(first_order_path_change(w, d)) == pytest.approx(15 * 0.1 + 10 * 0.2 + 6 * 0.3)
    weights = torch.rand(20_000, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    change = first_order_path_change(weights, torch.ones(3, dtype=torch.float64))
    epsilon = change.sqrt()  # Δp = ε²
    limit = torch.tensor([largest_robust_path_value(float(e), 3) for e in epsilon], dtype=torch.float64)
    assert bool((weights.prod(1) <= limit * (1 + 1e-12)).all())
    assert bool((limit <= epsilon**3).all())
    assert float((weights <= epsilon[:, None]).all(1).double().mean()) < 0.9  # though single weights are above ε


def test_the_direction_of_proposition_2_is_the_other_one() -> None:
    one = torch.ones(1, dtype=torch.float64)
    sides = sides_of_robust_inequality(torch.tensor([0.9], dtype=torch.float64), one[:, None], one, 0.3)
    assert sides["ridge"] == pytest.approx(0.1**2 + 0.27**2)
    assert sides["ridge"] < sides["robust"] <= sides["above"]
    moved = (0.9 + torch.linspace(-0.27, 0.27, 101, dtype=torch.float64) - 1).square().max()
    assert sides["robust"] == pytest.approx(float(moved))


def test_printed_numbers_of_sample_sizes() -> None:
    assert log10_size_ratio(0.1, 10_000) == pytest.approx(1e4)
    assert log10_size_ratio(0.1, 8, 2.0, "sizes") == pytest.approx(-math.log10(size_ratio(0.1, 8, 2.0, "sizes")))
    assert multitask_gain(1000, 5.0, 50.0) == pytest.approx(math.sqrt(55 / 5.05))
    assert vc_gap(100, 10_000) == 0.1
    assert stability_beta(2.0, 0.5, 100) == 0.04
