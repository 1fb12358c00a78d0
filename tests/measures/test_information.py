"""Effective dimension and Takeuchi's trace: closed forms, enclosures, refusals, and what rescaling does to each."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import Tiny, mlp, regression, smooth, softmax_regression
from references import Dense
from references_information import gauss_newton_of, second_moment
from test_pac_bayes import least_squares
from torch import nn

import flatscope as fs
from flatscope.errors import InputError
from flatscope.limits import STANDARD
from flatscope.measures import information


def row(problem: fs.Problem, name: str, seed: int = 0, precision: float = 0.02, **options: Any) -> Any:
    return fs.measure(problem, name, seed, {name: options}, precision=precision).to_frame().iloc[0]


def of_low_rank() -> Tiny:
    """So few samples that a random vector has come to its end after a few steps."""
    tiny = smooth()
    return replace(tiny, x=tiny.x[:4], y=tiny.y[:4])


@pytest.fixture
def sampled(monkeypatch: pytest.MonkeyPatch) -> None:
    """No network is small enough to be written out."""
    monkeypatch.setitem(vars(STANDARD), "inverted_matrix", 0)


def test_a_linear_model_has_as_many_dimensions_as_its_data_decide() -> None:
    problem, _ = least_squares()
    [(x, _)] = list(problem.train.batches())
    eigenvalues = torch.linalg.eigvalsh(2 * x.T @ x / len(x))
    for alpha in (1e-6, 0.1, 10.0):
        exact = sum(float(v / (v + alpha)) for v in eigenvalues)
        assert row(problem, "effective_dimension", alpha=alpha)["value"] == pytest.approx(exact, rel=1e-12)
    assert row(problem, "effective_dimension", alpha=1e-9)["value"] == pytest.approx(5)


@pytest.mark.parametrize("alpha", [1e-3, 0.1])
@pytest.mark.usefixtures("sampled")
def test_random_vectors_find_the_effective_dimension(alpha: float) -> None:
    tiny = of_low_rank()
    G = gauss_newton_of(Dense(tiny))
    exact = float(torch.linalg.solve(G + alpha * torch.eye(len(G)).double(), G).trace())
    zs, problem = [], tiny.problem()
    for seed in range(12):
        found = row(problem, "effective_dimension", seed, alpha=alpha, draws=8, precision=0)
        assert not found["exact"]
        zs.append((found["value"] - exact) / found["stderr"])
    assert sum(abs(z) <= 2.4 for z in zs) >= 10  # seven degrees of freedom
    assert 0.4 < float(torch.tensor(zs).std()) < 1.8


@pytest.mark.usefixtures("sampled")
def test_few_steps_leave_much_open_and_say_so() -> None:
    """Of any number of steps the enclosure holds, and it narrows."""
    tiny = smooth()
    G = gauss_newton_of(Dense(tiny))
    ctx = fs.Context(tiny.problem())
    operator, generator = information.GaussNewton(ctx), torch.Generator().manual_seed(1)
    widths = []
    for steps in (2, 4, 8, 60):
        start = torch.randn(len(G), generator=torch.Generator().manual_seed(4), dtype=torch.float64)
        v = start / start.norm()
        exact = float(v @ torch.linalg.solve(G + 0.01 * torch.eye(len(G)).double(), v))
        high, low = information._quadrature_bounds(operator, start, 0.01, steps, generator)[0].tolist()
        assert low * (1 - 1e-9) <= exact <= high * (1 + 1e-9)
        widths.append(high - low)
    assert widths == sorted(widths, reverse=True)
    assert widths[0] > 0.1 * exact
    assert widths[-1] < 1e-6 * exact
    vague, sharp = (row(tiny.problem(), "effective_dimension", steps=steps)["stderr"] for steps in (2, 30))
    assert vague > 3 * sharp


def test_takeuchis_trace_of_a_well_specified_model_is_its_number_of_parameters() -> None:
    """At the maximum of a likelihood that is right, H = C but for the samples' noise."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(20_000, 3, generator=generator, dtype=torch.float64)
    model = nn.Linear(3, 2).double()
    chances = model(x).detach().softmax(1)
    y = torch.multinomial(chances, 1, generator=generator)[:, 0]
    found = row(fs.Problem(model, (x, y)), "takeuchi_trace")
    assert found["exact"]
    assert found["value"] == pytest.approx(4, rel=0.05)  # 8 parameters, of which softmax sees the difference of halves


def test_residuals_of_least_squares_scale_it() -> None:
    """H = 2X²/n, C = 4 Σ r² x xᵀ/n: for residuals of one size r, Tr(H⁻¹C) = 2 r² d."""
    problem, _ = least_squares()
    [(x, _)] = list(problem.train.batches())
    signs = torch.where(torch.arange(len(x)) % 2 == 0, 1.0, -1.0).double()
    y = x @ problem.params["weight"][0] + 0.3 * signs
    found = row(fs.Problem(problem.model, (x, y), loss="mse"), "takeuchi_trace")
    assert found["value"] == pytest.approx(2 * 0.09 * 5, rel=1e-10)
    centred = row(fs.Problem(problem.model, (x, y), loss="mse"), "takeuchi_trace", centred=True)
    gradient = 2 * x.T @ (-0.3 * signs) / len(x)
    moment = float(gradient @ torch.linalg.solve(2 * x.T @ x / len(x), gradient))
    assert centred["value"] == pytest.approx(2 * 0.09 * 5 - moment, rel=1e-9)


def test_a_network_that_fits_anything_has_the_closed_form() -> None:
    """Three samples, 33 parameters that move their outputs freely: the weights say nothing."""
    tiny = smooth()
    problem = tiny.problem(train=(tiny.x[:3], tiny.y[:3]))
    p = tiny.model(tiny.x[:3]).detach().softmax(1)[torch.arange(3), tiny.y[:3]]
    assert row(problem, "takeuchi_trace")["value"] == pytest.approx(float((1 / p - 1).sum()), rel=1e-6)


def test_no_rescaling_moves_the_trace_and_damping_or_the_ratio_do() -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", low=0.2, high=5.0, seed=1))
    for options, moves in (({}, False), ({"damping": 0.1}, True), ({"way": "ratio"}, True)):
        one, two = (row(t.problem(), "takeuchi_trace", **options)["value"] for t in (tiny, twin))
        assert (one != pytest.approx(two, rel=1e-3)) == moves


def test_damping_and_ratio_by_definition() -> None:
    for tiny in (mlp(), smooth(), regression()):
        dense = Dense(tiny)
        G, H, C = gauss_newton_of(dense), dense.hessian, second_moment(dense)
        damped = float(torch.linalg.solve(G + 0.1 * torch.eye(len(G)).double(), C).trace())
        assert row(tiny.problem(), "takeuchi_trace", damping=0.1)["value"] == pytest.approx(damped, rel=1e-9)
        for matrix, written in (("gauss_newton", G), ("hessian", H)):
            found = row(tiny.problem(), "takeuchi_trace", way="ratio", matrix=matrix)
            assert found["value"] == pytest.approx(float(C.trace() / written.trace()), rel=1e-9)


@pytest.mark.parametrize("centred", [False, True])
@pytest.mark.usefixtures("sampled")
def test_random_sums_of_gradients_find_the_damped_trace(centred: bool) -> None:
    tiny = of_low_rank()
    dense = Dense(tiny)
    G, C = gauss_newton_of(dense), second_moment(dense)
    if centred:
        gradient = torch.autograd.functional.jacobian(
            lambda v: dense.loss_of(v, list(dense.params)), dense.vector(list(dense.params))
        )
        C = C - torch.outer(gradient, gradient)
    exact = float(torch.linalg.solve(G + 0.05 * torch.eye(len(G)).double(), C).trace())
    zs, problem = [], tiny.problem()
    for seed in range(12):
        found = row(problem, "takeuchi_trace", seed, damping=0.05, centred=centred, precision=0, draws=12)
        zs.append((found["value"] - exact) / found["stderr"])
    assert sum(abs(z) <= 2.2 for z in zs) >= 10
    assert 0.4 < float(torch.tensor(zs).std()) < 1.8


@pytest.mark.usefixtures("sampled")
def test_large_networks_need_damping() -> None:
    for options in ({}, {"damping": 0.1, "matrix": "hessian"}):
        found = row(mlp().problem(), "takeuchi_trace", **options)
        assert found["value"] != found["value"]
        assert "Give damping above 0" in found["reason"]
    assert row(mlp().problem(), "takeuchi_trace", way="ratio")["value"] > 0


def test_a_hessian_that_is_not_positive_is_refused() -> None:
    """These weights are no minimum: the Hessian is negative somewhere, where there are gradients too."""
    found = row(mlp().problem(), "takeuchi_trace", matrix="hessian")
    assert "where it is zero or negative" in found["reason"]
    low = float(torch.linalg.eigvalsh(Dense(mlp()).hessian)[0])
    assert low < 0
    assert "damping above" in row(mlp().problem(), "takeuchi_trace", matrix="hessian", damping=-low / 2)["reason"]
    damped = row(mlp().problem(), "takeuchi_trace", matrix="hessian", damping=-2 * low)
    dense = Dense(mlp())
    H = dense.hessian - 2 * low * torch.eye(len(dense.hessian)).double()
    assert damped["value"] == pytest.approx(float(torch.linalg.solve(H, second_moment(dense)).trace()), rel=1e-8)


def test_a_loss_that_is_not_convex_in_the_outputs_is_refused() -> None:
    tiny = softmax_regression()

    def hat(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return -outputs.square().sum(1)

    problem = tiny.problem(loss=hat)
    assert "convex in the outputs" in row(problem, "effective_dimension")["reason"]
    assert "where it is zero or negative" in row(problem, "takeuchi_trace")["reason"]


def test_wrong_options() -> None:
    for options in ({"alpha": 0.0}, {"alpha": -1.0}, {"steps": 1}, {"draws": 1}):
        with pytest.raises(InputError):
            row(mlp().problem(), "effective_dimension", **options)
    for options in ({"damping": -1.0}, {"way": "guess"}, {"matrix": "identity"}):
        with pytest.raises(InputError):
            row(mlp().problem(), "takeuchi_trace", **options)
