"""Traces and eigenvalues from products: right within their error, which covers; exact where it can be."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from networks import attention, smooth
from pieces import DiagonalOperator
from references import TWINS, Dense
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context
from flatscope.curvature import estimators
from flatscope.curvature.columns import column_sweep
from flatscope.curvature.estimators import (
    TRACE,
    Asked,
    DiagonalQuantities,
    DiagonalSums,
    cheaper_one_by_one,
    diagonal_sums,
)
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.operators import Hessian
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.spectrum import Search, Wanted, extreme_eigenpairs, lanczos_quadrature, side_by_side
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.errors import NumericalWarning
from flatscope.limits import STANDARD, MemoryShare


class Matrix(SymmetricOperator):
    """A dense symmetric matrix that counts its products."""

    def __init__(self, eigenvalues: Tensor, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        size = len(eigenvalues)
        super().__init__(size)
        basis = torch.linalg.qr(torch.randn(size, size, generator=generator, dtype=torch.float64))[0]
        self.dense = basis @ torch.diag(eigenvalues.double()) @ basis.T
        self.products = 0

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.products += 1 if vectors.ndim == 1 else vectors.shape[1]
        return self.dense @ vectors


SPECTRA = {
    "decaying": torch.arange(1, 1101).double() ** -1.5,
    "flat": torch.ones(1100) + 0.1 * torch.linspace(-1, 1, 1100),
    "negative": -(torch.arange(1, 1101).double() ** -1.0),
    "mixed": torch.cat(
        [torch.tensor([50.0, -20.0]), 0.1 * torch.randn(1098, generator=torch.Generator().manual_seed(1)) + 0.2]
    ),
}


def trace(matrix: Matrix, seed: int, precision: float, most_products: int = 1024) -> tuple[float, float, DiagonalSums]:
    """Value, standard error, and all that is known."""
    found = diagonal_sums(DiagonalQuantities(matrix), Signs(seed, "trace"), Asked(precision, most_products))
    return float(found.values[TRACE]), float(found.stderrs[TRACE]), found


def always_estimated(monkeypatch: pytest.MonkeyPatch, sketch: bool = False) -> None:
    """No sum over directions is small enough to be multiplied out, nor, without a sketch, to be spanned by one."""
    monkeypatch.setitem(vars(STANDARD), "few_directions", 0)
    monkeypatch.setitem(vars(STANDARD), "dense_weights", 0)
    if not sketch:
        monkeypatch.setitem(vars(STANDARD), "kept_memory", MemoryShare(0.0, 0.0, 0))
    monkeypatch.setattr(estimators, "cheaper_one_by_one", lambda *given: False)


@pytest.mark.parametrize("name", SPECTRA)
def test_standard_error_covers_and_accuracy_is_reached(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    always_estimated(monkeypatch, sketch=True)
    matrix = Matrix(SPECTRA[name][::4])
    true, zs = float(SPECTRA[name][::4].sum()), []
    for seed in range(200):
        value, stderr, found = trace(matrix, seed, 0.02, 4096)
        assert not found.missed
        assert not found.exact
        assert stderr <= 0.02 * abs(value)
        zs.append((value - true) / stderr)
    covered = float(np.mean(np.abs(zs) <= 1.96))
    assert covered >= 0.86, f"95 % intervals cover {covered:.0%}"
    assert 0.5 < np.std(zs) < 1.6


@pytest.mark.parametrize(("distance", "least", "most"), [(0.0, 290, 300), (3.0, 100, 200), (4.0, 20, 80), (5.0, 2, 30)])
def test_standard_errors_cover_where_draws_end_because_the_value_is_out_of_reach(
    distance: float, least: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Traces so many standard errors of 16 draws from zero; at 3 chance decides whether that looks too far."""
    always_estimated(monkeypatch)
    matrix = Matrix(torch.linspace(-1, 1, 100))
    matrix.dense.fill_diagonal_(0)
    true = distance * (2 * float(matrix.dense.square().sum())) ** 0.5 / 4
    matrix.dense.diagonal().fill_(true / 100)
    found = [trace(matrix, seed, 0.05, 256) for seed in range(300)]
    assert least <= sum(sums.products == 16 for _, _, sums in found) <= most
    covered = float(np.mean([abs(value - true) <= 1.96 * stderr for value, stderr, _ in found]))
    assert covered >= 0.89, f"95 % intervals cover {covered:.0%}"


@pytest.mark.parametrize(("size", "precision"), [(300, 0.02), (1024, 0.0)])
def test_small_matrices_are_multiplied_out(size: int, precision: float) -> None:
    matrix = Matrix(torch.randn(size, generator=torch.Generator().manual_seed(0)))
    value, stderr, found = trace(matrix, 0, precision)
    assert found.exact
    assert stderr == 0.0
    assert found.products == matrix.products == size
    assert value == pytest.approx(float(matrix.dense.trace()), rel=1e-12)


def test_where_the_time_is_up_two_draws_are_taken() -> None:
    """Also where all directions would have been multiplied out."""
    for size, products in ((300, 4), (1100, 2)):
        matrix = Matrix(torch.linspace(-1, 1, size))
        sums = diagonal_sums(DiagonalQuantities(matrix), Signs(0, "t"), Asked(0.001, 1024, late=lambda: True))
        assert not sums.exact
        assert sums.missed
        assert sums.products == 2
        assert matrix.products == products


@pytest.mark.parametrize(
    ("directions", "needed", "most_products", "expected"),
    [(1000, 1001, 1024, True), (1000, 999, 1024, False), (1000, 5000, 999, False), (1000, 1000, 1000, True)],
)
def test_one_product_per_direction_where_that_costs_no_more_than_the_estimate(
    directions: int, needed: float, most_products: int, expected: bool
) -> None:
    assert cheaper_one_by_one(directions, needed, most_products) is expected


def gelu_network(n_in: int, width: int) -> fs.Problem:
    generator = torch.Generator().manual_seed(0)
    net = nn.Sequential(nn.Linear(n_in, width), nn.GELU(), nn.Linear(width, 10)).double()
    with torch.no_grad():
        for value in net.parameters():
            value.copy_(torch.randn(value.shape, generator=generator, dtype=torch.float64) / value.shape[-1] ** 0.5)
    x = torch.randn(20, n_in, generator=generator, dtype=torch.float64)
    return fs.Problem(net, train=(x, torch.arange(20) % 10))


def test_the_trace_of_a_small_network_that_is_not_piecewise_linear_is_exact_for_every_seed() -> None:
    """488 of its 578 parameters lie before the GELU."""
    problem = gelu_network(60, 8)
    ctx = Context(problem)
    true = float((Hessian(ctx) @ torch.eye(578, dtype=torch.float64)).trace())
    for seed in (0, 1):
        table = fs.measure(
            problem, ["hessian_trace", "rho_sum", "rho", "layer_trace", "kappa_trace_sum"],
            options={"rho": {"form": "max"}}, seed=seed,
        )  # fmt: skip
        frame = table.to_frame().set_index("measure")
        assert frame["exact"].all()
        assert (frame["stderr"] == 0).all()
        assert table["hessian_trace"] == pytest.approx(true, rel=1e-12)
        assert frame.loc["hessian_trace", "passes"] == pytest.approx(488 + 1 + 10, abs=2)
        words = "2 parameter tensors by products, one for each of 488 directions: gelu (1) is not piecewise linear"
        assert table.reason("hessian_trace") == words
        assert table.reason("rho_sum") == table.reason("rho") == "1 of 2 layers: gelu (1) is not piecewise linear"
        assert frame.loc["kappa_trace_sum", "passes"] == 0, "the layers' traces are there already"


def test_above_the_limit_the_trace_is_estimated() -> None:
    table = fs.measure(gelu_network(680, 15), "hessian_trace", precision=0.5)
    (row,) = table.to_frame().to_dict("records")
    assert not row["exact"]
    assert row["stderr"] > 0
    assert row["passes"] < 100


def test_accuracy_out_of_reach_says_so() -> None:
    _, _, found = trace(Matrix(SPECTRA["mixed"]), 0, 1e-9, 1000)
    assert found.missed
    assert found.products <= 1016


def test_scale_does_not_matter() -> None:
    (plain, _, one), (tiny, _, other) = (trace(Matrix(scale * SPECTRA["decaying"]), 3, 0.05) for scale in (1.0, 1e-10))
    assert other.products == one.products
    assert tiny == pytest.approx(1e-10 * plain, rel=1e-9)


@pytest.mark.parametrize(("name", "top"), [("decaying", 1), ("negative", 0), ("mixed", 1), ("mixed", 0)])
def test_extreme_eigenvalues(name: str, top: int) -> None:
    values = SPECTRA[name].double()
    (pair,) = extreme_eigenpairs(Matrix(values), torch.Generator().manual_seed(0), Wanted(top, 1 - top, 1e-8))
    expected = float(values.max() if top else values.min())
    width = float(values.max() - values.min())
    assert pair.value == pytest.approx(expected, abs=1e-6 * width)
    assert pair.residual <= 1e-3 * width
    assert pair.vector.norm() == pytest.approx(1.0, rel=1e-8)


@pytest.mark.parametrize("name", SPECTRA)
@pytest.mark.parametrize("kept", [20, 120])
def test_both_ends_of_a_spectrum_from_one_space(name: str, kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(vars(STANDARD), "krylov_vectors", kept)
    values = SPECTRA[name].double()
    largest, found = float(values.abs().max()), []
    for order in ((0, 1), (1, 0)):  # whatever is asked first
        matrix = Matrix(values)
        search = Search(len(values), torch.Generator().manual_seed(0), Wanted(1, 1, 1e-4))
        asked = Wanted(0, 1, 1e-4, share=1.0), Wanted(1, 0, 1e-4, share=1.0)
        pairs = {place: extreme_eigenpairs(matrix, search, asked[place])[0] for place in order}
        assert pairs[0].value == pytest.approx(float(values.min()), abs=1e-3 * largest)
        assert pairs[1].value == pytest.approx(float(values.max()), abs=1e-3 * largest)
        assert all(pair.converged and pair.residual <= 1e-4 * largest for pair in pairs.values())
        assert matrix.products == max(pair.products for pair in pairs.values())
        found.append((pairs[0].value, pairs[1].value))
    assert found[0] == found[1]


def test_searches_side_by_side_find_what_each_finds_alone() -> None:
    matrices = {name: Matrix(SPECTRA[name]) for name in ("mixed", "decaying")} | {"small": Matrix(torch.arange(20.0))}
    wanted, rounds = Wanted(1, 0, 1e-4), []

    def multiply(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        rounds.append(set(vectors))
        return {name: matrices[name] @ vector for name, vector in vectors.items()}

    searches = {
        name: Search(matrix.size, torch.Generator().manual_seed(0), wanted) for name, matrix in matrices.items()
    }
    found = side_by_side(searches, wanted, multiply)
    for name, matrix in matrices.items():
        assert sum(name in names for names in rounds) == (1 if name == "small" else found[name][0].products)
        alone = extreme_eigenpairs(matrix, torch.Generator().manual_seed(0), wanted)
        assert [pair.value for pair in found[name]] == [pair.value for pair in alone]


def test_the_smallest_eigenvalue_is_not_mistaken_for_the_cloud_that_hides_it() -> None:
    """A random vector of 100,000 entries lies almost wholly in the null space, with a tiny residual there."""
    values = torch.zeros(100_000)
    values[:30] = torch.linspace(1, 100, 30)
    values[30:40] = -torch.linspace(0.5, 2, 10)
    generator = torch.Generator().manual_seed(0)
    (smallest,) = extreme_eigenpairs(DiagonalOperator(values), generator, Wanted(0, 1, 1e-3, share=1.0))
    assert smallest.value == pytest.approx(-2.0, abs=0.1)
    pairs = extreme_eigenpairs(DiagonalOperator(values), generator, Wanted(2, 1, 1e-2))
    assert pairs[-1].value == pytest.approx(-2.0, abs=0.02)


@pytest.mark.parametrize("name", SPECTRA)
def test_several_eigenvalues_of_both_ends(name: str) -> None:
    values = SPECTRA[name].double().sort().values
    width = float(values[-1] - values[0])
    matrix = Matrix(values)
    found = extreme_eigenpairs(matrix, torch.Generator().manual_seed(1), Wanted(3, 2, 1e-4))
    expected = [*values[-3:].flip(0).tolist(), *values[:2].flip(0).tolist()]
    assert [pair.value for pair in found] == pytest.approx(expected, abs=1e-4 * width)
    for pair in found:
        residual = (matrix @ pair.vector - pair.value * pair.vector).norm()
        assert float(residual) == pytest.approx(pair.residual, abs=1e-9 * width)


def test_restarts_change_nothing_but_the_number_of_products(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.linspace(0, 1, 1000).double().square()
    (wide,) = extreme_eigenpairs(Matrix(values), torch.Generator().manual_seed(0), Wanted(tolerance=1e-6))
    monkeypatch.setitem(vars(STANDARD), "krylov_memory", MemoryShare(0.0, 0.0, 0))
    (narrow,) = extreme_eigenpairs(Matrix(values), torch.Generator().manual_seed(0), Wanted(tolerance=1e-6))
    assert narrow.products > 18 + 1  # wider than the space that may be held
    assert narrow.value == pytest.approx(wide.value, rel=1e-6)
    assert narrow.residual <= 1e-6 * narrow.value


def test_a_search_that_must_end_says_how_far_it_came() -> None:
    matrix = Matrix(torch.linspace(0, 1, 1000).double())
    with pytest.warns(NumericalWarning, match="1 of 1 eigenvalues not converged after 3 products"):
        pair = extreme_eigenpairs(matrix, torch.Generator().manual_seed(0), Wanted(), most_products=3)[0]
    assert not pair.converged
    assert float((matrix @ pair.vector - pair.value * pair.vector).norm()) == pytest.approx(pair.residual)
    late = extreme_eigenpairs(matrix, torch.Generator().manual_seed(0), Wanted(), expired=lambda: True)[0]
    assert (late.converged, late.products) == (False, 1)  # without a warning: the row of a measure says so


def test_an_operator_of_low_rank_closes_its_space() -> None:
    values = torch.zeros(1000).double()
    values[:3] = torch.tensor([3.0, 2.0, 2.0])
    found = extreme_eigenpairs(Matrix(values), torch.Generator().manual_seed(0), Wanted(5))
    assert [pair.value for pair in found] == pytest.approx([3, 2, 2, 0, 0], abs=1e-9)
    assert max(pair.products for pair in found) <= 12


def test_density_has_weights_that_sum_to_one_and_the_right_moments() -> None:
    values = SPECTRA["mixed"].double()
    draws = lanczos_quadrature(Matrix(values), torch.Generator().manual_seed(0), steps=40, draws=20)
    for draw in draws:
        assert float(draw.weights.sum()) == pytest.approx(1.0, rel=1e-10)
        assert bool((draw.weights >= 0).all())
    # Each start's quadrature is exact for its own moments; their mean estimates tr(A)/p and tr(A²)/p.
    first = np.mean([float((draw.weights * draw.nodes).sum()) for draw in draws])
    second = np.mean([float((draw.weights * draw.nodes**2).sum()) for draw in draws])
    assert first == pytest.approx(float(values.mean()), abs=0.05)
    assert second == pytest.approx(float((values**2).mean()), rel=0.3)


def test_the_residual_bounds_the_error_of_a_long_vector_in_float32() -> None:
    """Sums over millions of float32 are taken in pieces: whole, some processors lose more digits than the residual."""
    values = torch.rand(3_000_000, generator=torch.Generator().manual_seed(0), dtype=torch.float64) / 2
    values[:2] = torch.tensor([1.0, 0.9])
    (pair,) = extreme_eigenpairs(DiagonalOperator(values), torch.Generator().manual_seed(0), Wanted(tolerance=1e-4))
    assert pair.vector.dtype == torch.float32
    vector = pair.vector.double()
    assert abs(pair.value - 1) <= pair.residual
    assert abs(pair.value - float(values @ vector.square() / vector.square().sum())) < 1e-6
    assert abs(float(vector.norm()) - 1) < 1e-6


def test_density_of_few_distinct_eigenvalues_is_exact() -> None:
    values = torch.tensor([1.0] * 30 + [5.0] * 10)
    shares = []
    for draw in lanczos_quadrature(Matrix(values), torch.Generator().manual_seed(0), steps=10, draws=200):
        assert draw.nodes.tolist() == pytest.approx([1.0, 5.0], abs=1e-9)
        shares.append(float(draw.weights[1]))
    assert np.mean(shares) == pytest.approx(0.25, abs=0.03)


@pytest.mark.parametrize("share", [0.003, 0.03, 0.1])
@pytest.mark.parametrize("offset", [-1.0, 0.0, 0.5, 1.0])
@pytest.mark.parametrize("equal", [2, 3, 40])
def test_few_draws_of_an_unknown_part_cover(
    equal: int, offset: float, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Quadratic forms of random signs, of which few may all be alike, and close to zero although their mean is not."""
    always_estimated(monkeypatch)
    deviation = math.sqrt(2 * equal * (equal - 1))
    matrix, known, covered, taken = Matrix(torch.ones(equal)), deviation / share, 0, []
    matrix.dense = torch.ones(equal, equal, dtype=torch.float64).fill_diagonal_(offset * deviation / equal)
    for seed in range(300):
        asked = Asked(0.02, 64, {TRACE: (known, 0.0)})
        found = diagonal_sums(DiagonalQuantities(matrix), Signs(seed, "t"), asked)
        covered += abs(float(found.values[TRACE]) - offset * deviation) <= 1.96 * float(found.stderrs[TRACE])
        taken.append(found.products)
    assert covered >= 0.84 * 300
    assert max(taken) == 16 or share > 0.003


class WrittenOut(SymmetricOperator):
    """A matrix written out group by group: as many seeds as one likes for the same products."""

    def __init__(self, matrix: SymmetricOperator) -> None:
        super().__init__(matrix.size, matrix.device, matrix.groups)
        unit = torch.eye(self.size, dtype=torch.float64)
        self._matrices = matrix.by_groups(lambda _: unit, lambda parts: [product.clone() for _, product in parts])
        assert len(self._matrices) == self.groups

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return torch.stack(self._matrices).sum(0) @ vectors

    def by_groups(self, vectors: Callable[[int], Tensor], gather: Callable[[Any], Any]) -> Any:
        return gather((group, matrix @ vectors(group)) for group, matrix in enumerate(self._matrices))


@pytest.mark.parametrize("groups", [1, 4])
@pytest.mark.parametrize("measure", ["layer_trace", "rho_unit", "relative_flatness"])
def test_estimates_by_random_signs_cover(measure: str, groups: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Force the random branch on a smooth network: network, layers and units from the same products."""
    always_estimated(monkeypatch)
    tiny = smooth()
    monkeypatch.setitem(vars(STANDARD), "least_group", tiny.problem().n_train // groups)
    quantity = measure.removeprefix("layer_").removesuffix("_unit")
    ctx = Context(tiny.problem())
    covered = ctx.cached(column_sweep)
    directions = LayerDirections(ctx, quantity, covered.not_covered)
    directions.matrix = WrittenOut(directions.matrix)
    known = {key: (float(mean.value), float(mean.stderr)) for key, mean in covered.means.items() if not key[0]}
    asked = Asked(ctx.effort.precision, 256, known)
    true = directions.read(torch.cat(list(directions.diagonal(64)))[:, None])
    zs: dict[tuple[str, str], list[Tensor]] = {key: [] for key in true}
    for seed in range(200):
        found = diagonal_sums(directions, Signs(seed, f"products for {quantity}"), asked)
        assert not found.exact
        for key, scores in zs.items():
            scores.append((found.values[key] - true[key][:, 0]) / found.stderrs[key])
    for key, scores in zs.items():
        z = torch.stack(scores)  # (seeds, units)
        share = float((z.abs() <= 1.96).double().mean(0).min())
        assert share >= 0.86, f"95 % intervals of {key} cover {share:.0%}"
        assert float(z.mean(0).abs().max()) < 0.35
    # The same by the measure itself, of layers and of units; the last seed.
    frame = fs.measure(tiny.problem(), measure, seed=199, options={measure: {"most_products": 256}}).to_frame()
    rows = frame[frame["layer"] == "0"]
    assert not rows["exact"].any()
    assert rows["value"].tolist() == pytest.approx(found.values["0.weight", quantity].tolist(), rel=1e-9)


def test_whole_trace_of_a_network_that_is_not_piecewise_linear(monkeypatch: pytest.MonkeyPatch) -> None:
    always_estimated(monkeypatch, sketch=True)
    tiny = attention()
    exact = TWINS["hessian_trace"](Dense(tiny))
    table = fs.measure(tiny.problem(), "hessian_trace", precision=0.2)
    assert 0 < table.stderr("hessian_trace") <= 0.2 * abs(table["hessian_trace"])
    assert abs(table["hessian_trace"] - exact) <= 4 * table.stderr("hessian_trace")
    assert "not piecewise linear" in table.reason("hessian_trace")
