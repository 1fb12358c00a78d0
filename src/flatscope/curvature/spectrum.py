"""Eigenvalues at the ends of the spectrum with their residuals, and the spectral density."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.curvature.estimators import Operator
from flatscope.curvature.lanczos import Krylov
from flatscope.errors import InputError, NumericalWarning

DENSE_SIZE = 256
WIDEST = 128
KRYLOV_BYTES = 2**30
# Above this size the vectors take more time and memory than their last digits are worth at a coarse tolerance.
LARGE = 2**20
COARSE = 1e-4
# Eigenvalues are found relative to their own size down to this share of the largest one.
SMALL_SHARE = 0.01
# No search ends before so many products; one for an eigenvalue that is small beside others takes more.
LEAST_STEPS, HIDDEN_STEPS, SETTLED_STEPS = 5, 20, 5
HIDDEN = 0.1


@dataclass(frozen=True)
class Eigenpair:
    """An eigenvalue, its vector and ‖Av − λv‖, which bounds its error."""

    value: float
    vector: Tensor
    residual: float
    converged: bool
    products: int


@dataclass(frozen=True)
class Ritz:
    """What one random start tells about a spectrum: nodes, and weights that sum to one.

    Within the residual of a node there is an eigenvalue.
    """

    nodes: Tensor
    weights: Tensor
    residuals: Tensor


def never() -> bool:
    """No limit of time."""
    return False


def extreme_eigenpairs(
    operator: Operator,
    generator: torch.Generator,
    *,
    top: int = 1,
    bottom: int = 0,
    tolerance: float = 1e-3,
    most_products: int = 1000,
    expired: Callable[[], bool] = never,
) -> list[Eigenpair]:
    """Eigenpairs from the ends of the spectrum, out of one Krylov space: the largest first, falling.

    Lanczos with restarts until every residual is below the tolerance; small matrices are multiplied out. Each is found
    to `tolerance` times its own absolute value, or times a hundredth of the largest absolute value where it is smaller
    than that: scaling the loss changes nothing.

    Args:
        operator: symmetric p × p.
        generator: for the start vector, drawn on the CPU: repeatable.
        top: how many of the largest.
        bottom: how many of the smallest.
        tolerance: relative accuracy.
        most_products: give up there, with a warning and `converged=False`.
        expired: asked after each product; True ends the search with what it has.
    """
    size = operator.shape[0]
    if not 0 < tolerance < 1:
        raise InputError("a tolerance between 0 and 1", str(tolerance), where="eigenvalues")
    if top < 0 or bottom < 0 or not 1 <= top + bottom <= size:
        raise InputError(f"between 1 and {size} eigenvalues", f"{top} and {bottom}", where="eigenvalues")
    if size <= max(DENSE_SIZE, 3 * (top + bottom)):
        matrix = (operator @ torch.eye(size, dtype=torch.float64)).cpu()
        values, vectors = torch.linalg.eigh((matrix + matrix.T) / 2)
        return [Eigenpair(float(values[i]), vectors[:, i], 0.0, True, size) for i in _places(size, top, bottom)]
    start = random_start(operator, generator, tolerance)
    narrowest = 2 * (top + bottom) + 16
    width = max(narrowest, min(WIDEST, KRYLOV_BYTES // (size * start.element_size())))
    space = Krylov(operator, start, width, generator)
    looks: list[tuple[int, Tensor]] = []  # number of products, values at the ends
    while True:
        space.step()
        # Where many steps are needed, one eighth more of them is cheaper than a look after each.
        if space.size < top + bottom or (space.products % max(1, space.size // 8) and not (space.full or space.closed)):
            continue
        values, residuals, coefficients = space.ritz()
        wanted = _places(space.size, top, bottom)
        sizes = values.abs()
        least = tolerance * sizes.clamp_min(SMALL_SHARE * float(sizes.max()))[wanted]
        looks.append((space.products, values[wanted]))
        hidden = (values[wanted].abs() < HIDDEN * float(values.abs().max())) & (not space.closed)
        reached = (residuals[wanted] <= least) & (~hidden | _settled(looks, least))
        done = bool(reached.all()) and (space.products >= LEAST_STEPS or space.closed)
        if done or space.products >= most_products or expired():
            break
        if space.full and not space.closed:
            space.shrink(_kept(space.size, top, bottom))
    release(operator)
    if not done and not expired():  # where the time was up, the row says so
        message = f"{int((~reached).sum())} of {len(wanted)} eigenvalues not converged after {space.products} products"
        warnings.warn(message, NumericalWarning, stacklevel=2)
    vectors = space.vectors(coefficients[:, wanted]).double().cpu()
    return [
        Eigenpair(float(values[i]), vectors[n], float(residuals[i]), bool(reached[n]), space.products)
        for n, i in enumerate(wanted)
    ]


def _settled(looks: list[tuple[int, Tensor]], least: Tensor) -> Tensor:
    """Which of the values have come to rest, compared with those of a fifth of the products before.

    A small residual alone shows that some eigenvalue is near, not that it is the last one: a random vector lies mostly
    in the cloud around zero, and looks for the first steps like the smallest eigenvalue.
    """
    products, values = looks[-1]
    before = [old for n, old in looks if n <= min(products - SETTLED_STEPS, 0.8 * products)]
    if products < HIDDEN_STEPS or not before:
        return torch.zeros(len(values), dtype=torch.bool)
    return (values - before[-1]).abs() <= least


def random_start(operator: Operator, generator: torch.Generator, tolerance: float) -> Tensor:
    """A vector of normal numbers on the operator's device; in float32 where it is long and the tolerance coarse."""
    size = operator.shape[0]
    dtype = torch.float32 if size > LARGE and tolerance >= COARSE else torch.float64
    return torch.randn(size, generator=generator, dtype=dtype).to(getattr(operator, "device", "cpu"))


def release(operator: Operator) -> None:
    """Let an operator that keeps something between products drop it."""
    drop = getattr(operator, "release", None)
    if drop is not None:
        drop()


def _places(size: int, top: int, bottom: int) -> list[int]:
    """Where the wanted eigenvalues stand in rising order; named from the largest to the smallest."""
    return [*range(size - 1, size - 1 - top, -1), *range(bottom - 1, -1, -1)]


def _kept(size: int, top: int, bottom: int) -> list[int]:
    """The Ritz vectors that survive a restart: those wanted, and a third of the space from the same ends."""
    more = size // 3
    upper = top + round(more * top / (top + bottom)) if top else 0
    lower = bottom + round(more * bottom / (top + bottom)) if bottom else 0
    return sorted({*range(lower), *range(size - upper, size)})


def lanczos_quadrature(
    operator: Operator, generator: torch.Generator, *, steps: int = 64, draws: int = 8
) -> list[Ritz]:
    """Stochastic Lanczos quadrature: for each random start its own estimate of the spectral density.

    A start gives a tridiagonal matrix whose eigenvalues are nodes and whose eigenvectors' squared first entries are
    their weights; the mean over starts approximates the density of eigenvalues (Ghorbani, Krishnan and Xiao, 2019).

    Args:
        operator: symmetric p × p.
        generator: for the starts.
        steps: Lanczos steps (products) per start.
        draws: number of random starts.
    """
    if steps < 1 or draws < 1:
        raise InputError("at least one step and one draw", f"{steps}, {draws}", where="spectral_density")
    size = operator.shape[0]
    found = []
    for _ in range(draws):
        space = Krylov(operator, random_start(operator, generator, COARSE), min(steps, size), generator)
        while not (space.full or space.closed):
            space.step()
        values, residuals, vectors = space.ritz()
        found.append(Ritz(values, vectors[0].square(), residuals))
    release(operator)
    return found
