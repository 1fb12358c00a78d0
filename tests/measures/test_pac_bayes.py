"""The noise measures against closed forms."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from networks import lenet_like, mlp
from torch import nn
from torch.distributions import Normal, kl_divergence

import flatscope as fs
from flatscope.errors import InputError
from flatscope.measures.pac_bayes import paired_rises

ALPHAS = (1e-3, 1e-2, 1e-1)


def least_squares(n: int = 40, d: int = 5) -> tuple[fs.Problem, torch.Tensor]:
    """A linear model, whose loss is quadratic, and the diagonal of its Hessian."""
    generator = torch.Generator().manual_seed(1)
    model = nn.Linear(d, 1, bias=False).double()
    model.weight.data = torch.randn(1, d, generator=generator, dtype=torch.float64)
    x = torch.randn(n, d, generator=generator, dtype=torch.float64)
    y = x @ model.weight.data.T + 0.1 * torch.randn(n, 1, generator=generator, dtype=torch.float64)
    return fs.Problem(model, train=(x, y), loss="mse"), 2 * x.square().mean(0)


def rows(problem: fs.Problem, name: str, **options: Any) -> list[tuple[float, float]]:
    frame = fs.measure(problem, name, options={name: options}).to_frame()
    return list(zip(frame["value"], frame["stderr"], strict=True))


@pytest.mark.parametrize("batch", [64, 16])
def test_expected_sharpness_of_least_squares_is_half_the_trace(batch: int) -> None:
    problem, diagonal = least_squares()
    w = problem.params["weight"][0]
    for alpha, (value, stderr) in zip(
        ALPHAS, rows(problem, "expected_sharpness", alpha=ALPHAS, batch=batch), strict=True
    ):
        exact = 0.5 * float((diagonal * (alpha * (10 * w.abs() + 1)) ** 2).sum())
        assert abs(value - exact) <= 4 * stderr
        assert stderr <= 0.1 * exact


def test_paired_estimator_is_unbiased_on_mini_batches() -> None:
    """Mirror images cancel the first-order term on every batch, so a least-squares rise is quadratic draw by draw."""
    problem, _ = least_squares()
    ctx = fs.Context(problem)
    small, large = (torch.cat(list(paired_rises(ctx, alphas=(a,), draws=40, batch=16))) for a in (1e-3, 1e-2))
    torch.testing.assert_close(large, 100 * small, rtol=1e-9, atol=0)


def test_alphas_share_their_draws_and_a_scalar_gives_one_row() -> None:
    problem = mlp().problem()
    several, one = (rows(problem, "expected_sharpness", alpha=a, draws=40) for a in (ALPHAS, ALPHAS[1]))
    assert len(one) == 1
    assert one[0] == pytest.approx(several[1])


def test_stacked_networks_equal_one_by_one() -> None:
    tiny = lenet_like()
    x, y = torch.cat([tiny.x] * 10), torch.cat([tiny.y] * 10)
    whole = fs.Context(tiny.problem())
    many = fs.Context(tiny.problem(train=(x, y)))
    stacked = torch.cat(list(paired_rises(whole, alphas=ALPHAS, draws=20, batch=64)))
    plain = torch.cat(list(paired_rises(many, alphas=ALPHAS, draws=20, batch=200)))
    torch.testing.assert_close(stacked, plain, rtol=1e-9, atol=1e-14)


def test_divergence_is_that_of_two_gaussians() -> None:
    tiny = mlp()
    w = torch.cat([value.detach().flatten() for value in tiny.model.parameters()])
    for alpha, (value, _) in zip(ALPHAS, rows(tiny.problem(), "pac_bayes_kl", alpha=ALPHAS), strict=True):
        sigma = alpha * (10 * w.abs() + 1)
        assert value == pytest.approx(float(kl_divergence(Normal(w, sigma), Normal(0 * w, sigma)).sum()), rel=1e-12)
        assert value <= len(w) / (200 * alpha**2)


def test_equal_noise_gives_the_divergence_of_equation_6() -> None:
    tiny = mlp()
    squares = sum(float(value.detach().square().sum()) for value in tiny.model.parameters())
    [(value, _)] = rows(tiny.problem(), "pac_bayes_kl", alpha=0.3, slope=0.0)
    assert value == pytest.approx(squares / (2 * 0.3**2), rel=1e-12)


def test_appendix_form_is_twice_the_divergence() -> None:
    problem = mlp().problem()
    true, printed = (rows(problem, "pac_bayes_kl", alpha=0.01, appendix=a)[0][0] for a in (False, True))
    assert printed == pytest.approx(2 * true, rel=1e-14)


def test_noise_measures_move_under_a_rescaling_and_path_norms_do_not() -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", seed=3))
    names = ["pac_bayes_kl", "expected_sharpness", "l1_path_norm"]
    options = {"pac_bayes_kl": {"alpha": 0.1}, "expected_sharpness": {"alpha": 0.1}}
    before, after = (fs.measure(t.problem(), names, options=options) for t in (tiny, twin))
    for name in names[:2]:
        noise = math.hypot(before.stderr(name), after.stderr(name))
        assert abs(before[name] - after[name]) > 4 * noise + 0.01 * before[name]
    assert after["l1_path_norm"] == pytest.approx(before["l1_path_norm"], rel=1e-12)


def test_a_trade_between_two_layers_moves_sharpness_and_divergence() -> None:
    """(cW_1, W_2/c) is the same function: ζ and KL take other values at every c, path norms do not."""
    torch.manual_seed(0)
    x, y = torch.randn(40, 4, dtype=torch.float64), torch.randint(0, 3, (40,))
    values: dict[str, list[float]] = {"sharpness": [], "pac_bayes_kl": [], "l1_path_norm": [], "l2_path_norm": []}
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3, bias=False)).double()
    options = {"pac_bayes_kl": {"alpha": 0.1}, "sharpness": {"steps": 100}}
    for c in (0.1, 1.0, 10.0, 100.0):
        other = copy.deepcopy(model)
        other[0].weight.data *= c
        other[2].weight.data /= c
        torch.testing.assert_close(other(x), model(x), rtol=1e-12, atol=1e-12)
        table = fs.measure(fs.Problem(other, train=(x, y)), list(values), options=options)
        for name, found in values.items():
            found.append(table[name])
    for name, found in values.items():
        if name.endswith("path_norm"):
            assert found == pytest.approx(found[:1] * 4, rel=1e-12)
        else:
            assert all(abs(a / b - 1) > 0.01 for i, a in enumerate(found) for b in found[:i]), (name, found)
            assert max(found) > 1.2 * min(found)


@pytest.mark.parametrize(
    "options",
    [
        {"alpha": 0},
        {"alpha": ()},
        {"alpha": "a"},
        {"alpha": (1, 1)},
        {"draws": 5},
        {"draws": 2},
        {"batch": 0},
        {"slope": -1.0},
    ],
)
def test_bad_options_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        fs.measure(mlp().problem(), "expected_sharpness", options={"expected_sharpness": options})
