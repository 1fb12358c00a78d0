"""Networks as polynomials: fits, twins of any model, degrees, the operator on monomials, binary trees."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError
from flatscope_papers.theory.polynomial import PolynomialActivation, polynomial_twin
from flatscope_papers.theory.polynomial_operator import (
    BinaryTree,
    monomial_count,
    monomials,
    ridge_rank,
)


class Calling(nn.Module):
    """ReLU as functions of all forms, one of them in place with its return value thrown away."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.layers[0](x))
        x = self.layers[1](x)
        functional.relu_(x)
        x = functional.relu(self.layers[2](x), inplace=True) + x
        return self.relu(self.layers[3](x).relu() - 0.1)


class OneModuleTwice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.relu = nn.Linear(4, 4), nn.Linear(4, 2), nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(10 * self.second(self.relu(self.first(x))))


def seeded(model: nn.Module) -> nn.Module:
    generator = torch.Generator().manual_seed(0)
    for p in model.parameters():
        p.data = torch.randn(p.shape, generator=generator, dtype=torch.float64) / 2
    return model.double()


def inputs(n: int = 50, d: int = 4) -> Tensor:
    return torch.randn(n, d, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


@pytest.mark.parametrize("radius", [1.0, 5.0, 40.0])
def test_fit_has_the_known_error_and_explodes_outside(radius: float) -> None:
    fit = PolynomialActivation(-radius, radius, degree=10, dtype=torch.float64)
    assert fit.max_error() == pytest.approx(0.0278 * radius, abs=1e-4 * radius)
    zero = fit(torch.zeros(1, dtype=torch.float64))
    assert float(zero) == pytest.approx(fit.max_error())
    assert float(fit(torch.tensor([1.5 * radius]).double())) == pytest.approx(58 * radius, rel=0.01)


def test_fit_is_the_least_squares_one() -> None:
    expected = [0.1388, 0.5, 0.3608, 0, -0.0481, 0, 0.003925, 0, -0.000152, 0, 2e-6]
    fit = PolynomialActivation(-5.0, 5.0, degree=10, dtype=torch.float64)
    assert fit.monomial_coefficients() == pytest.approx(expected, abs=6e-5)
    uneven = PolynomialActivation(-2.0, 7.0, degree=6, dtype=torch.float64)
    x = np.linspace(-2, 7, 200_001)
    grid = np.polynomial.Polynomial.fit(x, np.maximum(x, 0), 6)
    found = uneven(torch.from_numpy(x[::1000])).numpy()
    np.testing.assert_allclose(found, grid(x[::1000]), atol=1e-4)
    values = np.polynomial.Polynomial(uneven.monomial_coefficients())(x[::1000])
    np.testing.assert_allclose(found, values, atol=1e-9)
    positive = PolynomialActivation(1.0, 3.0, degree=4, dtype=torch.float64)
    torch.testing.assert_close(positive(torch.tensor([1.5, 2.5]).double()), torch.tensor([1.5, 2.5]).double())


def test_outside_can_be_held() -> None:
    far = torch.tensor([-30.0, 30.0], dtype=torch.float64)
    clipped = PolynomialActivation(-2.0, 2.0, outside="clip", dtype=torch.float64)
    torch.testing.assert_close(clipped(far), clipped(far.clamp(-2, 2)))
    assert PolynomialActivation(-2.0, 2.0, outside="relu")(far).tolist() == [0.0, 30.0]
    with pytest.raises(InputError, match="an interval"):
        PolynomialActivation(2.0, -2.0)


def test_powers_and_recursion_are_the_same_polynomial() -> None:
    t = torch.linspace(-1.2, 1.2, 101, dtype=torch.float64)
    for degree in (1, 2, 10, 12):
        fit = PolynomialActivation(-3.0, 4.0, degree=degree, dtype=torch.float64)
        torch.testing.assert_close(fit._by_powers(t), fit._by_recursion(t), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", [Calling, OneModuleTwice])
def test_every_relu_of_any_model_is_replaced(kind: type[nn.Module]) -> None:
    model, x = seeded(kind()), inputs()
    before = model(x).detach().clone()
    errors = []
    for degree in (4, 20):
        twin = polynomial_twin(model, x, degree=degree, stretch=1.2)
        errors.append(float((twin.model(x) - before).detach().abs().max()))
        assert all(a.degree == degree for a in twin.activations.values())
    assert errors[1] < 0.3 * float(before.abs().max())
    assert errors[1] < errors[0]
    assert errors[1] > 1e-6  # a ReLU left in place would not be wrong at all
    assert torch.equal(model(x), before)
    assert len(twin.activations) == {Calling: 5, OneModuleTwice: 1}[kind]


def test_no_relu_is_left_anywhere() -> None:
    """A polynomial has vanishing differences of high order along a line; one ReLU would spoil that."""
    for kind in (Calling, OneModuleTwice):
        model, x = seeded(kind()), inputs()
        twin = polynomial_twin(model, x, degree=1)
        line = inputs(1) + torch.linspace(-3, 3, 9, dtype=torch.float64)[:, None] * inputs(2)[1:]
        second = torch.diff(twin.model(line).detach(), n=2, dim=0)
        assert float(second.abs().max()) < 1e-12
        assert float(torch.diff(model(line).detach(), n=2, dim=0).abs().max()) > 1e-2


def test_layers_multiply_their_degrees() -> None:
    net = seeded(nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 3), nn.ReLU(), nn.Linear(3, 1)))
    twin = polynomial_twin(net, inputs(), degree=2)
    assert twin.degree == 4
    line = inputs(1) + torch.linspace(-1, 1, 13, dtype=torch.float64)[:, None] * inputs(2)[1:]
    values = twin.model(line).detach()
    scale = float(values.abs().max())
    assert float(torch.diff(values, n=5, dim=0).abs().max()) < 1e-10 * scale
    assert float(torch.diff(values, n=4, dim=0).abs().max()) > 1e-6 * scale


def test_ranges_are_recorded_and_values_outside_counted() -> None:
    net, x = seeded(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.MaxPool1d(2), nn.Linear(3, 2))), inputs()
    twin = polynomial_twin(net, x, stretch=1.0)
    z = net[0](x).detach()
    activation = twin.activations["1"]
    assert (activation.low, activation.high) == pytest.approx((float(z.min()), float(z.max())))
    assert twin.outside_share(x) == {"1": pytest.approx(0.0, abs=2 / z.numel())}  # the ends themselves may round out
    far = net[0](3 * x).detach()
    expected = float(((far < activation.low) | (far > activation.high)).double().mean())
    assert twin.outside_share(3 * x) == {"1": pytest.approx(expected)}
    assert expected > 0.1
    assert twin.remaining == ("MaxPool1d",)
    assert twin.degree is None
    fixed = polynomial_twin(net, x, radius=5.0)
    assert (fixed.activations["1"].low, fixed.activations["1"].high) == (-5.0, 5.0)
    with pytest.raises(InputError, match="a network that calls ReLU"):
        polynomial_twin(nn.Linear(4, 2).double(), x)


@pytest.mark.parametrize("kind", [Calling, OneModuleTwice])
def test_twins_can_be_trained_and_saved(kind: type[nn.Module]) -> None:
    model, x = seeded(kind()), inputs()
    twin = polynomial_twin(model, x, degree=6, stretch=3.0)
    loss = twin.model(x).square().mean()
    loss.backward()
    assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in twin.model.parameters())
    assert len(list(twin.model.parameters())) == len(list(model.parameters()))
    again = polynomial_twin(model, 2 * x, degree=6)
    again.model.load_state_dict(twin.model.state_dict())


def test_monomials_are_counted_and_weighted() -> None:
    assert monomial_count(8, 10) == 43_758
    X = inputs(6, 3)
    for degree in (1, 2, 4):
        for homogeneous in (False, True):
            V = monomials(X, degree, homogeneous=homogeneous)
            assert V.shape == (6, monomial_count(3, degree, homogeneous=homogeneous))
            kernel = (X @ X.T + (not homogeneous)) ** degree
            torch.testing.assert_close(V @ V.T, kernel)
    assert monomials(X, 2, homogeneous=True, symmetric=False)[0, 1] == X[0, 0] * X[0, 1]
    with pytest.raises(InputError, match="monomials"):
        monomials(inputs(1, 30), 10)


@pytest.mark.parametrize(("dimension", "degree"), [(2, 3), (3, 3), (4, 2)])
def test_ridge_functions_span_all_polynomials_with_enough_directions(dimension: int, degree: int) -> None:
    count = math.comb(dimension - 1 + degree, degree)
    assert ridge_rank(dimension, degree, count) == count
    assert ridge_rank(dimension, degree, count - 1) == count - 1
    assert ridge_rank(dimension, degree, count + 5) == count


def test_binary_tree_is_the_written_recursion() -> None:
    for units in (1, 3):
        tree = BinaryTree(3, units, seed=2).double()
        x = inputs(20, 8)
        level = [x[:, i : i + 1] for i in range(8)]
        for depth, weight in enumerate(tree.weights):
            pairs = [torch.cat(level[i : i + 2], dim=1) for i in range(0, len(level), 2)]
            level = [pair @ weight[node].T for node, pair in enumerate(pairs)]
            if depth < 2:
                level = [values.clamp_min(0) for values in level]
        torch.testing.assert_close(tree(x), level[0])
        assert [tuple(w.shape) for w in tree.weights] == [(4, units, 2), (2, units, 2 * units), (1, 1, 2 * units)]
        moved = x + 0.01 * torch.sign(inputs(20, 8))
        assert float((tree(moved) - tree(x)).detach().abs().max()) <= tree.robustness(0.01)
        expected = max(float(w.detach().abs().sum(2).max()) for w in tree.weights)
        assert tree.fan_in_bound() == expected
    assert bool((BinaryTree(2, 2, final_relu=True)(inputs().float()) >= 0).all())
    with pytest.raises(InputError, match="inputs"):
        BinaryTree(3)(torch.ones(2, 4))


def test_a_polynomial_tree_is_a_sparse_polynomial() -> None:
    """With nodes of degree 2, no monomial joins variables of different subtrees with more than their share."""
    tree = BinaryTree(2, 2, seed=0).double()
    twin = polynomial_twin(tree, inputs(), degree=2)
    assert twin.degree == 2
    x = torch.zeros(4, dtype=torch.float64)
    hessian = torch.autograd.functional.hessian(lambda v: twin.model(v[None]).sum(), x)
    assert float(hessian[:2, 2:].abs().max()) == 0.0  # the last node is linear: the two halves only add up
    assert float(hessian[0, 1].abs()) > 0
