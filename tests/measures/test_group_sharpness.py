"""m-sharpness: groups that depend on neither batches nor order, a bound from below, closed forms of least squares."""

from __future__ import annotations

from typing import Any

import checks
import pytest
import torch
from networks import mlp
from test_pac_bayes import least_squares
from torch import Tensor

import flatscope as fs
from flatscope.errors import InputError
from flatscope.registry import declarations


def row(problem: fs.Problem, seed: int = 0, precision: float = 0.0, **options: Any) -> Any:
    return fs.measure(problem, "m_sharpness", seed, {"m_sharpness": options}, precision=precision).to_frame().iloc[0]


def data(problem: fs.Problem) -> tuple[Tensor, Tensor]:
    [(x, y)] = list(problem.train.batches())
    return x, y


def one_step(x: Tensor, y: Tensor, w: Tensor, rho: float) -> float:
    """Rise of the squared error of some samples one step up their own gradient."""
    residual = x @ w - y[:, 0]
    gradient = 2 * x.T @ residual / len(x)
    return float((x @ (w + rho * gradient / gradient.norm()) - y[:, 0]).square().mean() - residual.square().mean())


def mean_over_groups(problem: fs.Problem, m: int, rho: float, draws: int = 5_000) -> float:
    (x, y), generator = data(problem), torch.Generator().manual_seed(3)
    found = []
    for _ in range(draws):
        chosen = torch.randperm(len(x), generator=generator)[:m]
        found.append(one_step(x[chosen], y[chosen], problem.params["weight"][0], rho))
    return sum(found) / draws


def test_the_standard_error_covers_the_mean_over_all_groups() -> None:
    problem, _ = least_squares()
    exact = mean_over_groups(problem, 8, 0.05)
    zs = []
    for seed in range(40):
        found = row(problem, seed, m=8)
        zs.append((found["value"] - exact) / found["stderr"])
    assert sum(abs(z) <= 2 for z in zs) >= 34
    assert 0.5 < float(torch.tensor(zs).std()) < 1.5


def test_small_groups_are_sharper_than_all_samples() -> None:
    """The gradients of few samples do not cancel: what the paper asks m-sharpness for."""
    problem, _ = least_squares()
    values = [row(problem, m=m, groups=400)["value"] for m in (1, 4, 16, 40)]
    assert values == sorted(values, reverse=True)
    x, y = data(problem)
    assert values[-1] == pytest.approx(one_step(x, y, problem.params["weight"][0], 0.05), rel=1e-12)


def test_batches_change_nothing_and_the_order_no_more_than_the_error() -> None:
    problem, _ = least_squares()
    x, y = data(problem)
    other = fs.Problem(problem.model, (x.flip(0), y.flip(0)), loss="mse")
    small = fs.Problem(problem.model, (x, y), loss="mse", batch_size=3)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=7)
    found, turned = row(problem, m=8, groups=200), row(other, m=8, groups=200)
    for same in (small, fs.Problem(problem.model, loader, loss="mse")):
        assert row(same, m=8, groups=200)["value"] == pytest.approx(found["value"], rel=1e-9)
    assert turned["value"] != found["value"]
    assert abs(turned["value"] - found["value"]) < 4 * (turned["stderr"] ** 2 + found["stderr"] ** 2) ** 0.5


def test_more_steps_come_closer_to_the_maximum_from_below() -> None:
    problem, _ = least_squares()
    (x, y), w, rho = data(problem), problem.params["weight"][0], 0.02
    A, g = 2 * x.T @ x / len(x), 2 * x.T @ (x @ w - y[:, 0]) / len(x)
    values, vectors = torch.linalg.eigh(A)
    low, high = float(values[-1]), float(values[-1]) + 100.0
    for _ in range(200):  # the multiplier λ at which (λI − A)⁻¹ g has the length ρ
        middle = (low + high) / 2
        long = float((vectors.T @ g / (middle - values)).norm()) > rho
        low, high = (middle, high) if long else (low, middle)
    u = vectors @ (vectors.T @ g / (high - values))
    exact = float(0.5 * u @ A @ u + g @ u)
    rises = [row(problem, rho=rho, m=64, steps=steps)["value"] for steps in (1, 3, 60)]
    assert rises[0] < rises[1] < rises[2] <= exact * (1 + 1e-12)
    assert rises[2] == pytest.approx(exact, rel=1e-3)
    assert rises[0] == pytest.approx(one_step(x, y, w, rho), rel=1e-12)


def test_it_stops_where_it_is_precise_and_says_what_it_did() -> None:
    problem, _ = least_squares(n=400)
    found = row(problem, m=100, groups=1000, precision=0.05)
    assert found["stderr"] <= 0.05 * found["value"]
    assert "of 1,000 groups" in found["reason"]
    assert found["reason"].startswith("lower bound: one step along the gradient")
    whole = row(problem, m=400)
    assert (whole["stderr"], whole["exact"]) == (0.0, False)
    assert "one group of all samples" in whole["reason"]


def test_a_group_of_samples_that_do_not_stack_is_refused() -> None:
    class Mean(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = torch.nn.Linear(3, 2)

        def forward(self, words: Tensor) -> Tensor:
            return self.last(words.mean(1))

    generator = torch.Generator().manual_seed(0)
    texts = [{"words": torch.randn(4, length, 3, generator=generator)} for length in (2, 3, 4)]
    batches = [(text, torch.tensor([0, 1, 0, 1])) for text in texts]
    found = fs.measure(fs.Problem(Mean(), batches), "m_sharpness", options={"m_sharpness": {"m": 8}}).to_frame()
    assert found["value"].isna().all()
    assert "Give a smaller m" in found["reason"].iloc[0]
    assert row(fs.Problem(Mean(), batches), m=4)["value"] > 0  # the batches as they come
    assert row(fs.Problem(Mean(), batches), m=12)["value"] > 0  # all of them


def test_wrong_options() -> None:
    for options in ({"rho": 0.0}, {"m": 0}, {"steps": 0}, {"groups": 1}):
        with pytest.raises(InputError):
            row(mlp().problem(), **options)


def test_a_longer_step_would_not_pass_for_it() -> None:
    """The twin notices a radius that is wrong by one per mille."""
    entry = declarations()["m_sharpness"]
    [(value, *_)] = checks.values_of(entry, mlp().problem(), rho=0.05005).values()
    [(right, *_)] = checks.values_of(entry, mlp().problem()).values()
    assert abs(value - right) > 1e5 * checks.EXACT * right
