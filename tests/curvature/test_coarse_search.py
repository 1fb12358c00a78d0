"""Eigenvectors that are looked for with coarse products: the number and its residual come from products in full."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.curvature import trace_by_products
from flatscope.curvature.coarse_search import eigenpairs_by_coarse_search
from flatscope.curvature.estimators import TRACE, Asked, DiagonalQuantities, DiagonalSums, diagonal_sums
from flatscope.curvature.layer_products import LayerBlocks
from flatscope.curvature.operators import CurvatureOperator
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.spectrum import Wanted, extreme_eigenpairs
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.isolation import coarse_products, own_settings, products_are_coarse
from flatscope.measures import weight_flatness
from flatscope.spectra import spectrum_functions

NAMES = ["layer_max_eigenvalue", "hessian_max_eigenvalue", "hessian_min_eigenvalue"]


def network() -> fs.Problem:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(60, 10, generator=generator), torch.randint(0, 4, (60,), generator=generator)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(10, 40), nn.ReLU(), nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 4))
    return fs.Problem(model, train=(x, y))


@pytest.fixture
def noise(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Products inside of a coarse search are off by this share, at random; nothing on a CPU is coarse by itself."""
    size, inside, generator = {"share": 0.0}, [False], torch.Generator().manual_seed(0)

    @contextmanager
    def noisy() -> Iterator[None]:
        inside[0] = True
        try:
            yield
        finally:
            inside[0] = False

    def off(product: Tensor) -> Tensor:
        if not inside[0]:
            return product
        error = torch.randn(product.shape, generator=generator, dtype=torch.float64)
        return product + size["share"] * error * product.norm() / error.norm()

    multiply, products = CurvatureOperator.__matmul__, LayerBlocks.products
    monkeypatch.setattr(weight_flatness, "coarse_products", noisy)
    monkeypatch.setattr(weight_flatness, "accepted_residual", lambda ctx, tolerance: 0.02 if tolerance is None else 0.0)
    monkeypatch.setattr(CurvatureOperator, "__matmul__", lambda self, v: off(multiply(self, v)))
    monkeypatch.setattr(
        LayerBlocks, "products", lambda self, v: {name: off(p) for name, p in products(self, v).items()}
    )
    return size


@pytest.mark.parametrize("share", [0.0, 0.003, 0.3], ids=["none", "of TF32", "useless"])
def test_the_value_is_that_of_products_in_full(share: float, noise: dict[str, float]) -> None:
    problem = network()
    exact = fs.measure(problem, NAMES, precision=0).to_frame()
    noise["share"] = share
    found = fs.measure(problem, NAMES).to_frame()
    for (_, row), (_, true) in zip(found.iterrows(), exact.iterrows(), strict=True):
        assert row["value"] == pytest.approx(true["value"], rel=1e-2 if row["measure"] == NAMES[-1] else 2e-3)
        assert row["high"] - row["low"] <= 0.06 * abs(true["value"])
        assert row["low"] <= true["value"] * (1 + 1e-5) <= row["high"] * (1 + 2e-5)
    whole = found[found["layer"] == ""]
    assert len(whole) == 2
    wide = (whole["high"] - whole["low"] > 1e-4 * whole["value"].abs()).tolist()
    assert share != 0.003 or all(wide), "how far the coarse matrix may be off counts"


def test_an_accuracy_that_is_asked_for_is_never_left_to_coarse_products() -> None:
    ctx = fs.Context(network())
    assert weight_flatness.accepted_residual(ctx, None) == 0  # on a CPU
    assert weight_flatness.accepted_residual(ctx, 0.05) == 0


def test_only_the_block_is_coarse() -> None:
    def switches() -> tuple[bool, bool]:
        return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32

    torch.backends.cudnn.allow_tf32 = True  # as torch begins with; once it is set, torch says what it does
    before = switches()
    with own_settings():
        with coarse_products():
            assert switches() == (True, True)
            with own_settings():
                assert switches() == (True, True)
        assert switches() == (False, False)
    assert switches() == before


class Rough(SymmetricOperator):
    """A matrix whose coarse products are those of another one: off by a share of the largest eigenvalue."""

    def __init__(self, share: float, size: int = 400) -> None:
        super().__init__(size)
        generator = torch.Generator().manual_seed(1)
        values = torch.linspace(-0.05, 0.05, size, dtype=torch.float64)
        values[-4:] = torch.tensor([2.0, 3.0, 5.0, 10.0], dtype=torch.float64)
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
        noise = torch.randn(size, size, generator=generator, dtype=torch.float64)
        noise = noise + noise.T
        self.values = values.sort(descending=True).values
        self._full = (basis * values) @ basis.T
        self._coarse = self._full + noise * (share * 10 / torch.linalg.matrix_norm(noise, 2))
        self.products = {True: 0, False: 0}

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.products[products_are_coarse()] += vectors.reshape(self.size, -1).shape[1]
        return (self._coarse if products_are_coarse() else self._full) @ vectors


@pytest.mark.parametrize("top", [1, 4])
@pytest.mark.parametrize("share", [0.0, 0.003])
def test_eigenpairs_of_a_coarse_search_are_those_of_the_matrix_in_full(top: int, share: float) -> None:
    matrix, wanted = Rough(share), Wanted(top)
    pairs, coarse = eigenpairs_by_coarse_search(matrix, torch.Generator, wanted, 1000)
    assert coarse
    assert matrix.products[False] <= 3 * top, "nearly all products are coarse"
    assert sum(matrix.products.values()) == pairs[0].products
    for pair, value in zip(pairs, matrix.values, strict=False):
        residual = (matrix @ pair.vector - pair.value * pair.vector).norm()
        assert pair.residual == pytest.approx(float(residual), rel=1e-6, abs=1e-12)
        assert pair.residual <= wanted.tolerance * pair.value
        assert pair.value == pytest.approx(float(value), rel=1e-5)
        assert pair.vector.norm() == pytest.approx(1)
    assert pairs[0].low <= matrix.values[0] <= pairs[0].high
    assert share == 0 or pairs[0].high - pairs[0].value > share, "how far the coarse matrix is off counts"


def test_a_search_in_vain_begins_again_in_full() -> None:
    matrix = Rough(0.3)
    pairs, coarse = eigenpairs_by_coarse_search(matrix, torch.Generator, Wanted(4, tolerance=1e-4), 1000)
    assert not coarse
    expected = extreme_eigenpairs(matrix, torch.Generator(), Wanted(4, tolerance=1e-4))
    assert [pair.value for pair in pairs] == [pair.value for pair in expected]


def test_eigenpairs_say_that_they_were_searched_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spectrum_functions, "has_coarse_products", lambda ctx: True)
    found, exact = fs.eigenpairs(network(), top=2), fs.eigenpairs(network(), top=2, tolerance=1e-6)
    assert "TF32" in found.meta["search"]
    assert "TF32" in str(found)
    assert "search" not in exact.meta, "that is too fine for it"
    assert "TF32" not in str(exact)
    torch.testing.assert_close(found.values, exact.values, rtol=1e-4, atol=0)


def trace_of_rough(shift: float, precision: float, seed: int = 0) -> tuple[Rough, DiagonalSums]:
    """A trace of 400 from a matrix whose coarse products are those of another one, shifted by a share of it."""
    matrix = Rough(0.001)
    matrix._full = matrix._full + torch.eye(400, dtype=torch.float64) * (1 - 20 / 400)
    matrix._coarse = matrix._full + shift * torch.eye(400, dtype=torch.float64)
    return matrix, diagonal_sums(
        DiagonalQuantities(matrix), Signs(seed, "trace"), Asked(precision, 300, few=0, coarse=True)
    )


def test_draws_are_coarse_where_their_bias_is_small() -> None:
    matrix, found = trace_of_rough(0.003, 0.01)
    assert found.coarse
    assert matrix.products[False] == 2, "two in full say what the others are off"
    assert matrix.products[True] >= 16
    assert sum(matrix.products.values()) == found.products
    plain = diagonal_sums(DiagonalQuantities(matrix), Signs(0, "trace"), Asked(0.01, 300, few=0))
    wider = float(found.stderrs[TRACE]) ** 2 - float(plain.stderrs[TRACE]) ** 2
    assert wider == pytest.approx((0.003 * 400) ** 2, rel=0.05), "the bias is part of the error"
    assert float(found.values[TRACE]) == pytest.approx(float(matrix._full.trace()), abs=3 * float(found.stderrs[TRACE]))


def test_draws_are_in_full_where_coarse_ones_are_off() -> None:
    matrix, found = trace_of_rough(0.005, 0.01)  # a third of the precision is 0.0033
    assert not found.coarse
    assert matrix.products[True] == 2
    exact = diagonal_sums(DiagonalQuantities(matrix), Signs(0, "trace"), Asked(0.01, 300, few=0))
    assert float(found.values[TRACE]) == pytest.approx(float(exact.values[TRACE]), rel=1e-12)
    assert float(found.stderrs[TRACE]) == pytest.approx(float(exact.stderrs[TRACE]), rel=1e-9)


def test_a_table_says_that_draws_were_coarse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace_by_products, "has_coarse_products", lambda ctx: True)
    ctx = fs.Context(network())
    found = trace_by_products.whole_trace(ctx, 0.05, 1000)
    assert found.coarse
    assert trace_by_products.IN_TF32 in ctx.remarks
