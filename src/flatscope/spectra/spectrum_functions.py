"""`hessian`, `gauss_newton`, `eigenpairs`, `spectral_density`: from a problem to its curvature."""

from __future__ import annotations

import time
from functools import partial
from typing import Any

import torch

from flatscope.context import Context, make_effort
from flatscope.curvature.brackets import rounding
from flatscope.curvature.coarse_search import eigenpairs_by_coarse_search, has_coarse_products
from flatscope.curvature.finite_differences import FiniteDifferences
from flatscope.curvature.operators import CurvatureOperator, GaussNewton, Hessian, curvature_operator
from flatscope.curvature.spectrum import Wanted, extreme_eigenpairs, krylov_dtype, lanczos_quadrature
from flatscope.errors import InputError, refuse_unknown
from flatscope.isolation import own_settings
from flatscope.limits import STANDARD
from flatscope.problem import Problem
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.eigenpairs import Eigenpairs

EXACT, DIFFERENCES = "exact", "finite_difference"
TF32_SEARCH = "searched with TF32 products; values and residuals come from products in full"
PRECISION = 0.05  # of differences in searches and densities: the largest that two steps may be apart


@own_settings()
def hessian(
    problem: Problem, layer: str | None = None, *, products: str = EXACT, precision: float = 0.05
) -> CurvatureOperator:
    """The Hessian of the mean training loss as a linear operator.

    Products are exact and streamed over the data, in float64 at the outside; on several ranks of `torch.distributed`
    each takes its share of the samples and all get the same product.

    Args:
        problem: model, data, loss.
        layer: a layer's name, for the block of its weight alone; or the name of a module or parameter, for the block of
            all trainable parameters below it; the whole by default.
        products: "exact" (autograd, differentiated twice), or "finite_difference" of the gradient, where there is no
            second derivative: with two steps, refused where these differ by more than `precision`. On networks with
            ReLU, max or abs it is another quantity, and warns.
        precision: of finite differences: the most that the products of two steps may differ, relative to the largest.

    Returns:
        An operator with `op @ v` for a vector (p,) or columns (p, k), `op.shape`, `op.to_scipy()`, `op.names`,
        `op.layout`, `op.flatten(params)` and `op.unflatten(vector)`.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> problem = fs.Problem(model, train=(torch.tensor([[1.0, 0], [0, 3]]), torch.zeros(2)), loss="mse")
        >>> fs.hessian(problem) @ torch.tensor([1.0, 1.0])  # H = 2 · mean of x xᵀ
        tensor([1., 9.], dtype=torch.float64)
    """
    return _hessian_operator(*_context_and_parameters(Context(problem), layer), products, precision)


@own_settings()
def gauss_newton(problem: Problem, layer: str | None = None) -> GaussNewton:
    """The generalized Gauss-Newton matrix of the mean training loss as a linear operator.

    Mean over samples of Jᵀ (∇² loss) J, with J the Jacobian of the outputs: never negative for a convex loss, and
    equal to the Hessian within one layer of a piecewise-linear network.

    Args:
        problem: model, data, loss.
        layer: a layer's name, for the block of its weight alone; or the name of a module or parameter, for the block of
            all trainable parameters below it; the whole by default.

    Returns:
        An operator as that of `hessian`.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(2, 3), train=(torch.eye(2), torch.tensor([0, 1])))
        >>> fs.gauss_newton(problem).shape
        (9, 9)
    """
    return GaussNewton(*_context_and_parameters(Context(problem), layer))


@own_settings()
def eigenpairs(
    problem: Problem,
    top: int = 10,
    layer: str | None = None,
    curvature: str = "hessian",
    tolerance: float = 1e-3,
    *,
    bottom: int = 0,
    seed: int = 0,
    most_products: int = 1000,
    memory: int | str | None = None,
    products: str = EXACT,
) -> Eigenpairs:
    """Eigenvalues and eigenvectors from the ends of the spectrum, all out of one Krylov space.

    A value is found when its residual ‖Hv − λv‖ is at most `tolerance` times its absolute value, or times a hundredth
    of the largest absolute value where it is smaller than that: an eigenvalue lies within the residual. On a GPU the
    search is by TF32 products from a tolerance of 0.001 on; values and residuals come from products in full.

    Args:
        problem: model, data, loss.
        top: how many of the largest.
        layer: a layer's name, for the block of its weight alone; or the name of a module or parameter, for the block of
            all trainable parameters below it; the whole by default.
        curvature: "hessian" or "gauss_newton".
        tolerance: relative accuracy.
        bottom: how many of the smallest.
        seed: of the random start.
        most_products: give up there; what is not found then says so.
        memory: what a pass may use: bytes, or "8GiB"; None for a share of what is free.
        products: "exact" or "finite_difference", as for `hessian`; what two steps leave open is in the residuals.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> problem = fs.Problem(model, train=(torch.tensor([[1.0, 0], [0, 3]]), torch.zeros(2)), loss="mse")
        >>> fs.eigenpairs(problem, top=2).values.round(decimals=6)
        tensor([9., 1.], dtype=torch.float64)
    """
    started = time.perf_counter()
    ctx, operator = _curvature_operator(problem, layer, curvature, seed, memory, products)
    wanted, begun = Wanted(top, bottom, tolerance), partial(ctx.generator, f"eigenpairs {curvature} {layer or ''}")
    if products == EXACT and tolerance >= STANDARD.coarse_search and has_coarse_products(ctx):
        extreme, coarse = eigenpairs_by_coarse_search(operator, begun, wanted, most_products)
    else:
        extreme, coarse = extreme_eigenpairs(operator, begun(), wanted, most_products=most_products), False
    residuals = torch.tensor([pair.residual for pair in extreme], dtype=torch.float64)
    if isinstance(operator, FiniteDifferences):
        residuals += torch.stack([operator.left_open(pair.vector) for pair in extreme]).cpu()
    return Eigenpairs(
        torch.tensor([pair.value for pair in extreme], dtype=torch.float64),
        residuals,
        torch.tensor([pair.converged for pair in extreme]),
        tuple(operator.unflatten(pair.vector.to("cpu", problem.dtype)) for pair in extreme),
        extreme[0].products,
        layer or "",
        curvature,
        ctx.provenance(started)
        | {"tolerance": tolerance, **_finite_difference_entries(operator)}
        | ({"search": TF32_SEARCH} if coarse else {}),
    )


@own_settings()
def spectral_density(
    problem: Problem,
    draws: int = 10,
    layer: str | None = None,
    curvature: str = "hessian",
    *,
    steps: int = 64,
    seed: int = 0,
    memory: int | str | None = None,
    products: str = EXACT,
) -> SpectralDensity:
    """Density of the eigenvalues by stochastic Lanczos quadrature (Ghorbani, Krishnan and Xiao, 2019).

    Every draw is a random start and costs `steps` curvature products. Their spread gives the density a confidence band;
    the trace has a standard error, the shares of negative eigenvalues and of those near zero have intervals, and
    eigenvalues that stand alone are found exactly (`outliers`).

    Args:
        problem: model, data, loss.
        draws: number of random starts.
        layer: a layer's name, for the block of its weight alone; or the name of a module or parameter, for the block of
            all trainable parameters below it; the whole by default.
        curvature: "hessian" or "gauss_newton".
        steps: products a start; more resolve more of the spectrum.
        seed: of the random starts.
        memory: what a pass may use: bytes, or "8GiB"; None for a share of what is free.
        products: "exact" or "finite_difference", as for `hessian`; what two steps leave open is in the residuals.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> problem = fs.Problem(model, train=(torch.tensor([[1.0, 0], [0, 3]]), torch.zeros(2)), loss="mse")
        >>> density = fs.spectral_density(problem, draws=3)
        >>> density.outliers.round(decimals=6)
        tensor([9., 1.], dtype=torch.float64)
    """
    for name, value in (("draws", draws), ("steps", steps)):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError("a whole number of at least 1", repr(value), where=f"spectral_density, {name}")
    begun = time.perf_counter()
    ctx, operator = _curvature_operator(problem, layer, curvature, seed, memory, products)
    generator = ctx.generator(f"spectral density {curvature} {layer or ''}")
    quadrature = lanczos_quadrature(operator, generator, steps=steps, draws=draws)
    largest = max(float(each.nodes.abs().max()) for each in quadrature)
    moved = rounding(largest, problem.dtype, krylov_dtype(operator.size, STANDARD.coarse_tolerance))
    if isinstance(operator, FiniteDifferences):
        moved = max(moved, operator.spread * largest)
    return SpectralDensity(
        torch.cat([torch.full((len(each.nodes),), n) for n, each in enumerate(quadrature)]),
        torch.cat([each.nodes for each in quadrature]),
        torch.cat([each.weights for each in quadrature]),
        torch.cat([each.residuals for each in quadrature]),
        operator.size,
        layer or "",
        curvature,
        ctx.provenance(begun) | {"steps": steps, "rounding": moved, **_finite_difference_entries(operator)},
    )


def _curvature_operator(
    problem: Problem, layer: str | None, curvature: str, seed: int, memory: int | str | None, products: str
) -> tuple[Context, CurvatureOperator]:
    effort = make_effort(curvature=curvature, memory=memory)
    ctx = Context(problem, seed=seed, effort=effort)
    if products == EXACT:
        return ctx, curvature_operator(*_context_and_parameters(ctx, layer))
    if curvature != "hessian":
        got, fix = f"products={products!r} of {curvature}", 'Ask for curvature="hessian"'
        raise InputError("finite differences of the gradient, which give the Hessian", got, where="products", fix=fix)
    return ctx, _hessian_operator(*_context_and_parameters(ctx, layer), products, PRECISION)


def _hessian_operator(ctx: Context, names: list[str] | None, products: str, precision: float) -> CurvatureOperator:
    refuse_unknown(products, (EXACT, DIFFERENCES), "products")
    if products == EXACT:
        return Hessian(ctx, names)
    return FiniteDifferences(ctx, names, precision=precision)


def _finite_difference_entries(operator: CurvatureOperator) -> dict[str, Any]:
    """Entries of a result on finite differences: their step, and how far two steps differ."""
    if not isinstance(operator, FiniteDifferences):
        return {}
    return {"finite_difference": {"step": operator.step, "spread": operator.spread, "kinks": operator.kinks}}


def _context_and_parameters(ctx: Context, layer: str | None) -> tuple[Context, list[str] | None]:
    """The context, and the parameter tensors of a layer or of all below a name; None for all trainable ones."""
    if layer is None:
        return ctx, None
    weights = {known.name: known.weight for known in ctx.network}
    if layer in weights:
        return ctx, [weights[layer]]
    below = [name for name in ctx.params if name == layer or name.startswith(f"{layer}.")]
    if not below:
        parts = {name.rsplit(".", n)[0] for name in ctx.params for n in range(1 + name.count("."))}
        refuse_unknown(layer, [*weights, *sorted(parts - weights.keys())], "layer")
    trainable = [name for name in below if name in ctx.problem.trainable]
    if not trainable:
        fix = "Set requires_grad of those that the block is to have"
        raise InputError("trainable parameters", f"{len(below)} frozen ones", where=f"layer {layer!r}", fix=fix)
    return ctx, trainable
