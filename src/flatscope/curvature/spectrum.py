"""Eigenvalues at the ends of the spectrum with their residuals, and the spectral density.

One kind of search for all: a Lanczos process that grows by one product at a time and knows when it has found what it
is asked for. Searches of several matrices go on side by side, so that one pass over the data serves all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flatscope.curvature.brackets import ends
from flatscope.curvature.lanczos import Krylov
from flatscope.curvature.memory import allowed
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.errors import InputError, NotApplicable, NumericalWarning
from flatscope.limits import STANDARD

Multiply = Callable[[dict[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True)
class Eigenpair:
    """A Ritz value, its vector, ‖Av − λv‖ and the bracket of the eigenvalue.

    Within the residual there is some eigenvalue. The largest of all lies between the value, which it cannot be below,
    and `high`, which it is above with the chance that a random start hides it; the smallest between `low` and the
    value. Of those between them nothing more is known than the residual.
    """

    value: float
    vector: Tensor
    residual: float
    converged: bool
    products: int
    low: float
    high: float
    written_out: bool = False  # the matrix was, and all its eigenvalues are known


@dataclass(frozen=True)
class Ritz:
    """Spectral density as one random start sees it: nodes, and weights that sum to one.

    Within the residual of a node there is an eigenvalue.
    """

    nodes: Tensor
    weights: Tensor
    residuals: Tensor


@dataclass(frozen=True)
class Wanted:
    """Eigenvalues that a search is asked for."""

    top: int = 1  # how many of the largest
    bottom: int = 0  # how many of the smallest
    tolerance: float = 1e-3  # accuracy of each relative to its absolute value,
    share: float = 0.01  # or to this share of the largest absolute value, where that is more

    def __post_init__(self) -> None:
        if not 0 < self.tolerance < 1:
            raise InputError("a tolerance between 0 and 1", str(self.tolerance), where="eigenvalues")

    @property
    def number(self) -> int:
        """Number of eigenvalues in all."""
        return self.top + self.bottom

    def of(self, values: Tensor) -> Tensor:
        """Their entries of values in rising order (n, …), the largest first."""
        last = len(values) - 1
        return values[[*range(last, last - self.top, -1), *range(self.bottom - 1, -1, -1)]]

    def kept(self, size: int) -> list[int]:
        """The Ritz vectors that survive a restart: those wanted, and a third of the space from the same ends."""
        more = (size // 3) / self.number
        upper, lower = (n + round(more * n) for n in (self.top, self.bottom))
        return sorted({*range(lower), *range(size - upper, size)})


class RitzValues(NamedTuple):
    """Ritz values after some products, in rising order, and their residuals."""

    products: int
    values: Tensor
    residuals: Tensor
    low: float  # between these all eigenvalues lie, but for a small chance
    high: float
    closed: bool = True

    def brackets(self, wanted: Wanted) -> tuple[Tensor, Tensor]:
        """Lower and upper ends of the brackets of the wanted eigenvalues."""
        values, residuals = wanted.of(self.values), wanted.of(self.residuals)
        low, high = values - residuals, values + residuals
        if wanted.top:
            low[0], high[0] = values[0], self.high
        if wanted.bottom:
            low[-1], high[-1] = self.low, values[-1]
        return low, high

    def reached(self, wanted: Wanted, before: list[RitzValues]) -> Tensor:
        """Which of the wanted eigenvalues are found, given the looks before this one."""
        if len(self.values) < wanted.number:
            return torch.zeros(wanted.number, dtype=torch.bool)
        values, largest = wanted.of(self.values), float(self.values.abs().max())
        least = wanted.tolerance * values.abs().clamp_min(wanted.share * largest)
        found = wanted.of(self.residuals) <= least
        if self.closed:
            return found
        low, high = self.brackets(wanted)
        outermost = torch.zeros(wanted.number, dtype=torch.bool)
        outermost[: min(wanted.top, 1)] = True
        outermost[wanted.number - min(wanted.bottom, 1) :] = True
        inner = found & (self.products >= STANDARD.least_steps) & self._at_rest(wanted, least, before)
        return torch.where(outermost, found & (high - low <= least), inner)

    def _at_rest(self, wanted: Wanted, least: Tensor, before: list[RitzValues]) -> Tensor:
        """Which of the wanted Ritz values are not small beside others, or no longer move."""
        values = wanted.of(self.values)
        large = values.abs() >= STANDARD.hidden_share * float(self.values.abs().max())
        earlier = min(self.products - STANDARD.settled_steps, (1 - STANDARD.settled_share) * self.products)
        older = [look.values for look in before if look.products <= earlier and len(look.values) >= wanted.number]
        if self.products < STANDARD.hidden_steps or not older:
            return large
        return large | ((values - wanted.of(older[-1])).abs() <= least)


class Search:
    """A search for eigenvalues of one symmetric matrix; a small one is multiplied out.

    It may be asked again and again, and goes on only as far as it must. An answer does not depend on what was asked
    before: it is that of the first look that fulfilled the question.

    Args:
        size: of the matrix.
        generator: for the start vector, drawn on the CPU: repeatable.
        wanted: what it will be asked for: which ends, and of a large matrix whether digits of float32 are enough.
        device: where it goes on.
        together: size of all matrices that are searched at the same time; they share the memory.
    """

    def __init__(
        self,
        size: int,
        generator: torch.Generator,
        wanted: Wanted,
        device: torch.device | str = "cpu",
        together: int = 0,
    ) -> None:
        if wanted.top < 0 or wanted.bottom < 0 or not 1 <= wanted.number <= size:
            got = f"the largest {wanted.top} and the smallest {wanted.bottom}"
            raise InputError(f"between 1 and {size} eigenvalues in all", got, where="eigenvalues")
        self._wanted, self.products = wanted, 0
        self._looks: list[RitzValues] = []
        self._answers: dict[Wanted, tuple[int, bool]] = {}  # the look that answers it, or the next to look at
        self._space: Krylov | None = None
        self._multiplied_out = torch.zeros(0, 0, dtype=torch.float64)  # eigenvectors in columns
        if size <= max(STANDARD.dense_matrix, STANDARD.rows_an_eigenvalue * wanted.number):
            self.newest = torch.eye(size, dtype=torch.float64, device=device)
            return
        start = random_start(size, generator, device, wanted.tolerance)
        room = allowed(STANDARD.krylov_memory, start.device) // (max(size, together) * start.element_size())
        least = 2 * wanted.number + STANDARD.spare_vectors
        self._space = Krylov(start, max(least, min(STANDARD.krylov_vectors, room)), generator)
        self.newest = self._space.newest

    def take(self, product: Tensor) -> None:
        """Go on: the product with `newest`, a vector, or of a small matrix all unit vectors."""
        space = self._space
        if space is None:
            values, self._multiplied_out = torch.linalg.eigh((product + product.T).double().cpu() / 2)
            self.products, none = len(values), torch.zeros_like(values)
            self._looks.append(RitzValues(self.products, values, none, float(values[0]), float(values[-1])))
            return
        if space.full:
            space.shrink(self._wanted.kept(space.size))
        space.take(product)
        self.newest, self.products = space.newest, space.products
        if space.products % max(1, space.size // STANDARD.looks_a_doubling) == 0 or space.full or space.closed:
            self._look()

    def _look(self) -> None:
        """See what there is after the products so far."""
        if self._space is not None and not (self._looks and self._looks[-1].products == self.products):
            values, residuals, _ = self._space.ritz()
            low, high = ends(self._space, len(self.newest))
            self._looks.append(RitzValues(self.products, values, residuals, low, high, self._space.closed))

    @property
    def largest(self) -> float:
        """The largest absolute value of all that was found so far."""
        return max((float(look.values.abs().max()) for look in self._looks[-1:]), default=0.0)

    def answered(self, wanted: Wanted) -> bool:
        """True where all wanted eigenvalues are found."""
        at, found = self._answers.get(wanted, (0, False))
        while not found and at < len(self._looks):
            look = self._looks[at]
            found = bool(look.reached(wanted, self._looks[:at]).all())
            at += not found
        self._answers[wanted] = at, found
        return found

    def pairs(self, wanted: Wanted) -> list[Eigenpair]:
        """The wanted eigenpairs as far as they are found, the largest first."""
        self._look()
        at = self._answers[wanted][0] if self.answered(wanted) else len(self._looks) - 1
        look = self._looks[at]
        if self._space is None:
            vectors = wanted.of(self._multiplied_out.T)
        else:
            vectors = self._space.vectors(wanted.of(self._space.ritz()[2].T).T)
        values, residuals = wanted.of(look.values), wanted.of(look.residuals)
        numbers = (values, residuals, look.reached(wanted, self._looks[:at]), *look.brackets(wanted))
        return [
            Eigenpair(value, vector, residual, reached, look.products, low, high, self._space is None)
            for vector, value, residual, reached, low, high in zip(
                vectors, *(part.tolist() for part in numbers), strict=True
            )
        ]


def side_by_side(
    searches: Mapping[str, Search],
    wanted: Wanted,
    multiply: Multiply,
    *,
    most_products: int = 1000,
    expired: Callable[[], bool] = bool,
) -> dict[str, list[Eigenpair]]:
    """Eigenpairs of several matrices; every round takes one product for each that is still searched.

    Args:
        searches: by name.
        wanted: of each.
        multiply: from vectors to products, by name.
        most_products: give up there, with a warning and `converged=False`.
        expired: asked after each round; True ends all with what they have.
    """
    while True:
        left = {name: s for name, s in searches.items() if not s.answered(wanted) and s.products < most_products}
        late = any(s.products for s in searches.values()) and expired()
        if late or not left:
            break
        for name, product in multiply({name: search.newest for name, search in left.items()}).items():
            left[name].take(checked_finite(product))
    found = {}
    for name, search in searches.items():
        found[name] = search.pairs(wanted)
        missing = sum(not pair.converged for pair in found[name])
        if missing and not late:  # where the time was up, the row says so
            text = f"{missing} of {len(found[name])} eigenvalues not converged after {search.products} products"
            warnings.warn(text, NumericalWarning, stacklevel=3)
    return found


def extreme_eigenpairs(
    operator: SymmetricOperator,
    begun: Search | torch.Generator,
    wanted: Wanted,
    *,
    most_products: int = 1000,
    expired: Callable[[], bool] = bool,
) -> list[Eigenpair]:
    """Eigenpairs from the ends of one matrix's spectrum, the largest first.

    Args:
        operator: the matrix.
        begun: a search of it, which goes on where it stands; or for a new one the generator of its start.
        wanted: which.
        most_products: see `side_by_side`.
        expired: the same.
    """
    search = begun if isinstance(begun, Search) else Search(operator.size, begun, wanted, operator.device)

    def multiply(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {name: operator @ vector for name, vector in vectors.items()}

    return side_by_side({"": search}, wanted, multiply, most_products=most_products, expired=expired)[""]


def in_full(pair: Eigenpair, product: Tensor) -> Eigenpair:
    """The eigenvalue that a vector from coarse products stands for, and its residual, from its product in full.

    The outer end of its bracket is that of the coarse matrix. How far that may be from the matrix in full is not known
    but along the vector, from the residual: it counts twice.
    """
    vector = pair.vector.to(product) / pair.vector.to(product).norm()
    value, products = float(vector @ product), pair.products + 1
    residual = float((product - value * vector).norm())
    low = value if pair.low == pair.value else min(pair.low, value) - 2 * residual
    high = value if pair.high == pair.value else max(pair.high, value) + 2 * residual
    return replace(pair, value=value, residual=residual, products=products, low=low, high=high)


def random_start(size: int, generator: torch.Generator, device: torch.device | str, tolerance: float) -> Tensor:
    """A vector of normal numbers, drawn on the CPU."""
    return torch.randn(size, generator=generator, dtype=krylov_dtype(size, tolerance)).to(device)


def krylov_dtype(size: int, tolerance: float) -> torch.dtype:
    """The numbers that a Krylov space is held in: float32 where vectors are long and the tolerance coarse."""
    return torch.float32 if size > STANDARD.long_vector and tolerance >= STANDARD.coarse_tolerance else torch.float64


def lanczos_quadrature(
    operator: SymmetricOperator, generator: torch.Generator, *, steps: int = 64, draws: int = 8
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
    found = []
    for _ in range(draws):
        values, residuals, vectors = krylov_space(operator, generator, steps).ritz()
        found.append(Ritz(values, vectors[0].square(), residuals))
    return found


def krylov_space(
    operator: SymmetricOperator, generator: torch.Generator, steps: int, start: Tensor | None = None
) -> Krylov:
    """The space of some products from a start, a random one by default; of fewer where it is closed before."""
    if start is None:
        start = random_start(operator.size, generator, operator.device, STANDARD.coarse_tolerance)
    space = Krylov(start, steps, generator)
    while not (space.full or space.closed):
        space.take(checked_finite(operator @ space.newest))
    return space


def checked_finite(product: Tensor) -> Tensor:
    """A curvature product, or a refusal where it is not one of numbers."""
    if not product.isfinite().all():
        raise NotApplicable("finite second derivatives", "a product with NaN or infinity", "eigenvalues")
    return product
