"""Solutions, traces and blocks of operators against dense matrices; what is wrong is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from networks import batchnorm_conv, mlp, residual, smooth
from references import dense
from scipy.sparse.linalg import eigsh, minres
from torch import Tensor

import flatscope as fs
from flatscope.curvature.linear_systems import solved
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.errors import InputError, UnknownNameError

BUILDERS = [mlp, smooth, residual, batchnorm_conv]


class Written(SymmetricOperator):
    """A dense matrix, its products rounded to float32 if asked for."""

    def __init__(self, matrix: Tensor, digits: torch.dtype = torch.float64) -> None:
        super().__init__(len(matrix))
        self.matrix, self.products, self.digits = matrix, 0, digits

    def __matmul__(self, vectors: Tensor) -> Tensor:
        self.products += 1
        return (self.matrix.to(self.digits) @ vectors.to(self.digits)).double()


def symmetric(eigenvalues: Tensor, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    q, _ = torch.linalg.qr(torch.randn(len(eigenvalues), len(eigenvalues), generator=generator, dtype=torch.float64))
    return q @ torch.diag(eigenvalues) @ q.T


def vector(size: int, seed: int = 1) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_solutions_are_those_of_the_dense_matrix(build: Any) -> None:
    written_out = dense(build.__name__, build)
    problem = written_out.tiny.problem()
    for operator in (fs.hessian(problem), fs.gauss_newton(problem)):
        matrix = operator @ torch.eye(operator.size, dtype=torch.float64)
        v, damping = vector(operator.size), 0.3
        found = operator.solve(v, damping, tolerance=1e-11)
        exact = torch.linalg.solve(matrix + damping * torch.eye(operator.size, dtype=torch.float64), v)
        assert found.converged
        torch.testing.assert_close(found.vector, exact, rtol=1e-7, atol=1e-8)
        shifted = torch.linalg.eigvalsh(matrix) + damping
        assert (found.negative is not None) == bool(shifted[0] < -1e-9)
        if found.negative is not None:
            assert float(found.negative @ matrix @ found.negative) == pytest.approx(found.curvature, abs=1e-12)
            assert found.curvature + damping < 0
            assert float(found.negative.norm()) == pytest.approx(1)


def test_tensors_by_name_are_taken() -> None:
    operator = fs.gauss_newton(mlp().problem())
    v = vector(operator.size)
    named = operator.solve(operator.unflatten(v), 0.1)
    assert torch.equal(named.vector, operator.solve(v, 0.1).vector)


@pytest.mark.parametrize("convex", [True, False])
@pytest.mark.parametrize("scale", [1e-9, 1.0, 1e9])
def test_residual_and_products_are_as_counted(convex: bool, scale: float) -> None:
    operator = Written(scale * symmetric(torch.linspace(0.1, 1, 30, dtype=torch.float64)))
    v = vector(30)
    found = solved(operator, v, 0.0, 1e-9, 500, convex=convex)
    assert found.converged
    assert found.negative is None
    assert found.products == operator.products
    assert found.residual == pytest.approx(float((operator.matrix @ found.vector - v).norm() / v.norm()), abs=1e-14)


@pytest.mark.parametrize("seed", range(20))
def test_a_negative_direction_is_met_where_there_is_one_and_only_there(seed: int) -> None:
    values = torch.linspace(0.1, 1, 12, dtype=torch.float64)
    values[3] = -0.05 if seed % 2 else 0.05
    matrix = symmetric(values, seed)
    found = solved(Written(matrix), vector(12, seed), 0.0, 1e-10, 500, convex=False)
    assert found.converged
    assert (found.negative is not None) == bool(seed % 2)
    by_gradients = solved(Written(matrix), vector(12, seed), 0.0, 1e-10, 500, convex=True)
    assert (by_gradients.negative is not None) <= bool(seed % 2)
    assert "curvature -" in repr(found) or not seed % 2


def test_rounding_is_no_negative_direction() -> None:
    values = torch.cat([torch.zeros(20, dtype=torch.float64), torch.logspace(-3, 3, 20, dtype=torch.float64)])
    operator = Written(symmetric(values), torch.float32)
    for convex in (True, False):
        found = solved(operator, vector(40), 0.0, 1e-9, 400, convex=convex, eps=torch.finfo(torch.float32).eps)
        assert found.negative is None
        assert not found.converged  # half of v is outside of what the matrix reaches


def test_what_cannot_be_solved_ends_and_says_so() -> None:
    matrix = torch.diag(torch.tensor([1.0, 0.0], dtype=torch.float64))
    for convex in (True, False):
        found = solved(Written(matrix), torch.ones(2).double(), 0.0, 1e-9, 500, convex=convex)
        assert not found.converged
        assert "NOT converged" in repr(found)
    zero = solved(Written(matrix), torch.zeros(2).double(), 0.0, 1e-9, 500, convex=False)
    assert zero.converged
    assert not zero.vector.any()


@pytest.mark.parametrize(
    ("v", "words", "match"),
    [
        (torch.ones(3), {}, "real vector of length 43"),
        (torch.ones(43, 1), {}, "one vector at a time"),
        (torch.ones(43, dtype=torch.complex64), {}, "real vector"),
        (torch.full((43,), torch.nan), {}, "finite"),
        ([1.0] * 43, {}, "real vector"),
        (torch.ones(43), {"damping": -1.0}, "from 0 up"),
        (torch.ones(43), {"damping": True}, "from 0 up"),
        (torch.ones(43), {"tolerance": 0.0}, "tolerance"),
        (torch.ones(43), {"most_products": 0}, "most_products"),
        ({"0.weight": torch.ones(1)}, {}, "none for"),
    ],
)
def test_refusals(v: Any, words: dict[str, Any], match: str) -> None:
    operator = fs.hessian(mlp().problem())
    if isinstance(v, Tensor) and v.shape[0] == 43:
        v = torch.ones(operator.size, *v.shape[1:], dtype=v.dtype) * v.reshape(-1)[0]
    with pytest.raises(InputError, match=match.replace("43", str(operator.size))):
        operator.solve(v, **words)


def test_products_carry_no_graph() -> None:
    problem = dense("mlp", mlp).tiny.problem()
    operator = fs.hessian(problem)
    assert not (operator @ torch.ones(operator.size, dtype=torch.float64, requires_grad=True)).requires_grad
    assert repr(operator).startswith("Hessian of ")
    assert operator.solve(torch.ones(operator.size), np.float32(10)).damping == 10  # type: ignore[arg-type]


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_blocks_below_a_module_are_those_of_the_whole(build: Any) -> None:
    problem = build().problem()
    whole = fs.hessian(problem)
    matrix = whole @ torch.eye(whole.size, dtype=torch.float64)
    layers = {layer.name for layer in fs.Context(problem).network}
    for module in {name.split(".")[0] for name in whole.names}:
        names = [name for name in whole.names if name.startswith(f"{module}.")]
        if module in layers or not names:
            continue
        rows = torch.cat([torch.arange(whole.size)[whole.layout[name]] for name in names])
        block = fs.hessian(problem, layer=module)
        assert block.names == tuple(names)
        expected = matrix[rows][:, rows]
        torch.testing.assert_close(block @ torch.eye(len(rows), dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)
        assert block.trace(0.0).value == pytest.approx(float(expected.trace()), rel=1e-9, abs=1e-12)
        largest = float(torch.linalg.eigvalsh(expected)[-1])
        found = fs.eigenpairs(problem, top=1, layer=module)
        assert float(found.values[0]) == pytest.approx(largest, rel=1e-3, abs=1e-9)
        assert set(found.vectors[0]) == set(names)
        assert fs.spectral_density(problem, draws=2, layer=module).size == len(rows)


def test_a_block_of_two_modules_deep_and_of_one_parameter() -> None:
    torch.manual_seed(0)

    class Nested(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            inner = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 3))
            self.h = torch.nn.ModuleList([inner, torch.nn.Linear(3, 2)])

        def forward(self, x: Tensor) -> Tensor:
            return 3 * self.h[1](self.h[0](x))

    model, data = Nested().double(), (torch.randn(6, 3).double(), torch.tensor([0, 1, 0, 1, 1, 0]))
    problem = fs.Problem(model, train=data)
    assert fs.hessian(problem, layer="h.0").names == ("h.0.0.weight", "h.0.0.bias", "h.0.2.weight", "h.0.2.bias")
    assert fs.hessian(problem, layer="h.0.0").names == ("h.0.0.weight",)  # a layer: its weight alone
    assert fs.gauss_newton(problem, layer="h.1.bias").names == ("h.1.bias",)
    assert fs.hessian(problem, layer="h").size == fs.hessian(problem).size
    with pytest.raises(UnknownNameError, match=r"h\.0"):
        fs.hessian(problem, layer="h.O")
    for parameter in model.h[0].parameters():
        parameter.requires_grad_(False)
    frozen = fs.Problem(model, train=data)
    with pytest.raises(InputError, match="4 frozen"):
        fs.hessian(frozen, layer="h.0")
    assert fs.hessian(frozen, layer="h").names == ("h.1.weight", "h.1.bias")


def test_traces_are_within_their_errors() -> None:
    written_out = dense("residual", residual)
    operator = fs.hessian(written_out.tiny.problem())
    exact = operator.trace()
    assert exact.value == pytest.approx(float(written_out.hessian.trace()), rel=1e-9)
    assert exact.stderr == 0
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(40, 60), torch.nn.Tanh(), torch.nn.Linear(60, 3)).double()
    problem = fs.Problem(model, train=(torch.randn(8, 40).double(), torch.randint(0, 3, (8,))))

    large = fs.gauss_newton(problem)
    drawn = large.trace(0.1)
    truth = float((large @ torch.eye(large.size, dtype=torch.float64)).trace())
    assert 0 < drawn.stderr <= 0.1 * abs(drawn.value)
    assert abs(drawn.value - truth) < 5 * drawn.stderr
    assert drawn.products < large.size


NUMBERS = ["float16", "float32", "float64", "longdouble", "int8", "int64", "uint8", "bool", "complex64", "complex128"]


@pytest.mark.parametrize("dtype", [*NUMBERS, ">f8"])
@pytest.mark.parametrize("shape", [(), (1,), (3,)])
def test_scipy_sends_numbers_of_any_type(dtype: str, shape: tuple[int, ...]) -> None:
    operator = fs.hessian(mlp().problem())
    matrix = (operator @ torch.eye(operator.size, dtype=torch.float64)).numpy()
    values = np.random.default_rng(0).integers(0, 2, (operator.size, *shape)).astype(dtype)
    if "complex" in dtype:
        values = values * (1 + 2j)
    linear = operator.to_scipy()
    wide = values.astype(np.complex128 if "complex" in dtype else np.float64)
    for found in (linear @ values, linear.T @ values, linear.H @ values):
        assert found.shape == values.shape
        np.testing.assert_allclose(found, matrix @ wide, rtol=1e-10, atol=1e-13)
    if not shape:
        assert linear.matvec(values[:, None]).shape == (operator.size, 1)
    np.testing.assert_allclose(linear @ values[::-1], matrix @ wide[::-1], rtol=1e-10, atol=1e-13)


def test_scipy_solvers_run_on_it() -> None:
    operator = fs.hessian(smooth().problem())
    matrix = (operator @ torch.eye(operator.size, dtype=torch.float64)).numpy()
    value = eigsh(operator.to_scipy(), k=1, which="LA", return_eigenvectors=False)[0]
    assert value == pytest.approx(np.linalg.eigvalsh(matrix)[-1], rel=1e-6)
    v = vector(operator.size)
    theirs, _ = minres(operator.to_scipy(), v.numpy(), shift=-0.5, rtol=1e-12)
    ours = operator.solve(v, 0.5, tolerance=1e-11).vector.numpy()
    np.testing.assert_allclose(ours, theirs, rtol=1e-6, atol=1e-7)
