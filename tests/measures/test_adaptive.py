"""Adaptive sharpness and the Fisher-Rao norm against closed forms; the demands on measures on planted results."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from networks import mlp, regression, smooth
from test_pac_bayes import least_squares
from torch.func import functional_call, jacrev
from torch.nn.utils.parametrizations import weight_norm

import flatscope as fs
from flatscope.errors import InputError
from flatscope.generalization_bounds.pac_bayes import zero_one_loss
from flatscope.loss import Loss
from flatscope.perturbation import context_with_loss


def value(problem: fs.Problem, name: str, **options: Any) -> float:
    return fs.measure(problem, name, options={name: options})[name]


def quadratic() -> tuple[fs.Problem, torch.Tensor, torch.Tensor]:
    """Least squares as ½ uᵀ A u + gᵀ u in relative moves u."""
    problem, _ = least_squares()
    [(x, y)] = list(problem.train.batches())
    w = problem.params["weight"][0]
    scaled = x * w.abs()
    return problem, 2 * scaled.T @ scaled / len(x), 2 * scaled.T @ (x @ w - y[:, 0]) / len(x)


def test_worst_case_of_least_squares_in_a_ball() -> None:
    problem, A, g = quadratic()
    best = 0.0
    for shift in np.geomspace(1e-9, 1e3, 20_000):  # stationary points on the sphere: (λI - A) u = g, λ above the top
        eigenvalue = float(torch.linalg.eigvalsh(A)[-1]) + shift
        u = torch.linalg.solve(eigenvalue * torch.eye(len(g)).double() - A, g)
        if float(u.norm()) <= 0.1:
            u = 0.1 * u / u.norm()
            best = max(best, float(0.5 * u @ A @ u + g @ u))
    found = value(problem, "adaptive_sharpness", rho=0.1, steps=200)
    assert found == pytest.approx(best, rel=1e-3)


def test_worst_case_of_least_squares_in_a_box_is_at_a_corner() -> None:
    problem, A, g = quadratic()
    corners = torch.cartesian_prod(*[torch.tensor([-0.1, 0.1]).double()] * len(g))
    best = max(float(0.5 * u @ A @ u + g @ u) for u in corners)
    assert value(problem, "adaptive_sharpness", rho=0.1, norm="linf", restarts=8) == pytest.approx(best, rel=1e-6)


@pytest.mark.parametrize(("norm", "variance"), [("l2", 0.01 / 5), ("linf", 0.01)])
def test_average_of_least_squares_is_half_the_scaled_trace(norm: str, variance: float) -> None:
    problem, A, _ = quadratic()
    options = {"adaptive_sharpness": {"rho": 0.1, "norm": norm, "mode": "average", "draws": 2000}}
    table = fs.measure(problem, "adaptive_sharpness", options=options)
    exact = 0.5 * variance * float(A.trace())
    assert abs(table["adaptive_sharpness"] - exact) <= 4 * table.stderr("adaptive_sharpness")
    assert 0 < table.stderr("adaptive_sharpness") < 0.1 * exact


@pytest.mark.parametrize("mode", ["worst", "average"])
def test_rescaling_changes_neither_mode(mode: str) -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", seed=1))
    one, two = (value(t.problem(), "adaptive_sharpness", mode=mode) for t in (tiny, twin))
    assert one == pytest.approx(two, rel=1e-8)


def test_without_scaling_it_is_plain_sharpness_of_random_directions() -> None:
    problem, _ = least_squares()
    [(x, _)] = list(problem.train.batches())
    options = {"adaptive_sharpness": {"rho": 0.1, "mode": "average", "scale": "none", "draws": 2000}}
    table = fs.measure(problem, "adaptive_sharpness", options=options)
    exact = 0.5 * 0.01 / 5 * float(2 * x.square().mean(0).sum())
    assert abs(table["adaptive_sharpness"] - exact) <= 4 * table.stderr("adaptive_sharpness")
    assert 0 < table.stderr("adaptive_sharpness") < 0.1 * exact
    sigma = {"expected_flatness": {"sigma": 0.1 / math.sqrt(5), "draws": 2000}}
    known = fs.measure(problem, "expected_flatness", options=sigma)
    error = math.hypot(known.stderr("expected_flatness"), table.stderr("adaptive_sharpness"))
    assert abs(table["adaptive_sharpness"] - known["expected_flatness"]) <= 4 * error


def test_without_scaling_a_rescaling_moves_it() -> None:
    tiny = smooth()
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3)).double()
    model.load_state_dict(tiny.model.state_dict())
    tiny = tiny.with_model(model)
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, by="unit", low=0.2, high=5.0, seed=1))
    for scale, moves in (("weights", False), ("none", True)):
        one, two = (value(t.problem(), "adaptive_sharpness", scale=scale) for t in (tiny, twin))
        assert (one != pytest.approx(two, rel=0.05)) == moves


@pytest.mark.parametrize("mode", ["worst", "average"])
def test_normalised_logits_take_the_scale_out_of_the_outputs(mode: str) -> None:
    tiny = mlp()
    louder = tiny.with_model(torch.nn.Sequential(*tiny.model[:-1], torch.nn.Linear(5, 3).double()))
    for name in ("weight", "bias"):
        getattr(louder.model[-1], name).data = 7 * getattr(tiny.model[-1], name).data
    for logits, same in (("as given", False), ("normalised", True)):
        one, two = (value(t.problem(), "adaptive_sharpness", mode=mode, logits=logits) for t in (tiny, louder))
        assert (one == pytest.approx(two, rel=1e-6)) == same


def test_another_loss_holds_for_the_network_written_plainly_as_well() -> None:
    model = weight_norm(torch.nn.Linear(3, 2))
    ctx = fs.Context(fs.Problem(model, train=(torch.eye(3), torch.tensor([0, 1, 0]))))
    assert ctx.problem.plain is not ctx.problem
    other = context_with_loss(ctx, Loss("zero_one", zero_one_loss)).problem
    assert other.plain.loss is other.loss is not ctx.problem.loss


def test_normalised_logits_have_unit_deviation() -> None:
    """The same as measuring a network that divides its logits by their standard deviation."""

    class Normalised(torch.nn.Module):
        def __init__(self, inner: torch.nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            z = self.inner(x)
            deviation = (z - z.mean(1, keepdim=True)).square().mean(1, keepdim=True).sqrt()
            return z / deviation

    tiny = smooth()
    outside = value(tiny.with_model(Normalised(tiny.model)).problem(initial=None), "adaptive_sharpness", steps=10)
    assert value(tiny.problem(), "adaptive_sharpness", steps=10, logits="normalised") == pytest.approx(outside)
    options = {"adaptive_sharpness": {"logits": "normalised"}}
    [reason] = fs.measure(regression().problem(), "adaptive_sharpness", options=options).to_frame()["reason"]
    assert "cross-entropy, not mse" in reason


def test_fisher_rao_norm_is_the_length_in_the_fisher_metric() -> None:
    tiny = smooth()
    params = {name: p.detach() for name, p in tiny.model.named_parameters()}
    w = torch.cat([p.flatten() for p in params.values()])
    jacobians = jacrev(lambda p: functional_call(tiny.model, p, (tiny.x,)))(params)
    J = torch.cat([j.flatten(2) for j in jacobians.values()], dim=2)  # (n, C, p)
    p = tiny.model(tiny.x).detach().softmax(1)
    labels = torch.nn.functional.one_hot(tiny.y, p.shape[1]).double()
    gradients = torch.einsum("nc,ncp->np", p - labels, J)
    assert value(tiny.problem(), "fisher_rao_norm") == pytest.approx(math.sqrt(float((gradients @ w).square().mean())))
    S = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    fisher = torch.einsum("ncp,ncd,ndq->pq", J, S, J) / len(tiny.x)
    found = value(tiny.problem(), "fisher_rao_norm", labels="model")
    assert found == pytest.approx(math.sqrt(float(w @ fisher @ w)), rel=1e-10)


def test_homogeneous_networks_have_the_closed_form() -> None:
    """Without biases ⟨w, ∇f⟩ = d f, so the norm is d times the root mean square of ⟨∂ℓ/∂f, f⟩."""
    tiny = mlp()
    for module in tiny.model:
        if isinstance(module, torch.nn.Linear):
            module.bias = None
    outputs = tiny.model(tiny.x).detach()
    labels = torch.nn.functional.one_hot(tiny.y, 3).double()
    inner = ((outputs.softmax(1) - labels) * outputs).sum(1)
    expected = 3 * math.sqrt(float(inner.square().mean()))
    assert value(tiny.problem(), "fisher_rao_norm") == pytest.approx(expected, rel=1e-12)


def test_wrong_options_and_losses() -> None:
    for options in ({"norm": "l3"}, {"mode": "median"}, {"rho": 0.0}, {"draws": 3}, {"steps": 0}, {"scale": "filter"}):
        with pytest.raises(InputError):
            value(mlp().problem(), "adaptive_sharpness", **options)
    with pytest.raises(InputError):
        value(mlp().problem(), "fisher_rao_norm", labels="none")
    frame = fs.measure(
        regression().problem(), "fisher_rao_norm", options={"fisher_rao_norm": {"labels": "model"}}
    ).to_frame()
    assert "cross-entropy" in frame["reason"].iloc[0]


def test_fisher_norm_of_a_network_with_one_number_for_each_sample() -> None:
    torch.manual_seed(0)
    model, x, y = torch.nn.Linear(3, 1), torch.randn(6, 3), torch.arange(6) % 2
    flat = torch.nn.Sequential(model, torch.nn.Flatten(0))
    found = [
        fs.measure(fs.Problem(net, train=(x, y), loss="bce"), "fisher_rao_norm")["fisher_rao_norm"]
        for net in (model, flat)
    ]
    assert found[0] == pytest.approx(found[1], rel=1e-6)
