"""Products by finite differences against exact ones: their error, their spread, their refusals."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from networks import attention, mlp, regression, smooth, softmax_regression
from pieces import Cube
from torch import Tensor, nn

import flatscope as fs
from flatscope.curvature.finite_differences import FiniteDifferences
from flatscope.errors import InputError, NotApplicable, NumericalWarning

SMOOTH = [smooth, attention, softmax_regression]


def in_float32(build: Any) -> fs.Problem:
    tiny = build()
    x = {name: value.float() for name, value in tiny.x.items()} if isinstance(tiny.x, dict) else tiny.x.float()
    return fs.Problem(tiny.model.float(), train=(x, tiny.y), loss=tiny.loss)


def vector(size: int) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


@pytest.mark.parametrize("build", SMOOTH, ids=lambda build: build.__name__)
def test_smooth_networks_agree_and_the_spread_says_how_well(build: Any) -> None:
    for problem, error in ((build().problem(), 1e-8), (in_float32(build), 3e-4)):
        exact, found = fs.hessian(problem), fs.hessian(problem, products="finite_difference")
        v = vector(exact.size)
        expected, product = exact @ v, found @ v
        off = float((product - expected).norm() / expected.norm())
        assert off < error
        assert off < 10 * found.spread
        assert found.spread < error


def test_columns_groups_and_scales_do_not_matter() -> None:
    operator = FiniteDifferences(fs.Context(smooth().problem(batch_size=4)))
    v = torch.stack([vector(operator.size), 1e9 * vector(operator.size), torch.zeros(operator.size)], dim=1)
    found = operator @ v
    torch.testing.assert_close(found[:, 1] / 1e9, found[:, 0], rtol=1e-7, atol=1e-10)
    assert not found[:, 2].any()
    torch.testing.assert_close(found[:, 0], operator @ v[:, 0], rtol=1e-7, atol=1e-10)


def test_kinks_are_said_and_crossed_ones_are_refused() -> None:
    with pytest.warns(NumericalWarning, match=r"relu \(1\).*another quantity"):
        small = fs.hessian(mlp().problem(), products="finite_difference")
    assert small @ vector(small.size) is not None  # no kink within a step
    with pytest.warns(NumericalWarning, match="kinks"):
        crossing = fs.hessian(in_float32(regression), products="finite_difference")
    with pytest.raises(NotApplicable, match="has kinks"):
        crossing @ vector(crossing.size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fs.hessian(smooth().problem(), products="finite_difference")


def test_rounding_is_refused() -> None:
    operator = FiniteDifferences(fs.Context(in_float32(smooth)), precision=0.01, step=1e-6)
    with pytest.raises(NotApplicable, match="rounding"):
        operator @ vector(operator.size)


def test_eigenpairs_and_densities_by_differences() -> None:
    problem = in_float32(smooth)
    exact = fs.eigenpairs(problem, top=2)
    found = fs.eigenpairs(problem, top=2, products="finite_difference")
    assert ((found.values - exact.values).abs() <= found.residuals + exact.residuals).all()
    torch.testing.assert_close(found.values, exact.values, rtol=1e-3, atol=1e-5)
    assert found.meta["finite_difference"]["step"] == pytest.approx(3e-3)
    assert "By finite differences: step 0.003" in found.headline
    density = fs.spectral_density(problem, draws=2, products="finite_difference")
    assert density.range[1] == pytest.approx(float(exact.values[0]), rel=1e-3)
    assert "finite differences" in density.headline


def test_wrong_words() -> None:
    problem = smooth().problem()
    with pytest.raises(InputError, match="finite_difference"):
        fs.hessian(problem, products="finite_differences")
    with pytest.raises(InputError, match="Hessian"):
        fs.eigenpairs(problem, curvature="gauss_newton", products="finite_difference")


class Cubes(nn.Module):
    """A cube between two layers, with a derivative of it or without a second one."""

    def __init__(self, plain: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b, self.plain = nn.Linear(3, 4), nn.Linear(4, 2), plain

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        return self.b(h**3 if self.plain else Cube.apply(h))


def test_networks_without_a_second_derivative_are_served() -> None:
    torch.manual_seed(1)
    x, y = torch.randn(8, 3).double(), torch.tensor([0, 1] * 4)
    plain, without = (fs.Problem(Cubes(kind).double(), train=(x, y)) for kind in (True, False))
    with pytest.raises(NotApplicable):
        fs.hessian(without)
    operator = fs.hessian(without, products="finite_difference")
    v = vector(operator.size)
    torch.testing.assert_close(operator @ v, fs.hessian(plain) @ v, rtol=1e-6, atol=1e-8)
