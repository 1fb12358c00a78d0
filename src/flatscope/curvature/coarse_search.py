"""Eigenpairs that are looked for with coarse products, and made exact with a few in full.

A GPU multiplies float32 several times as fast with 10 binary digits (TF32). A search by such products ends near the
eigenvectors; the smallest space that holds what it found, widened by residuals from products in full, then gives values
and residuals of the matrix itself. Where that does not end soon, the search was in vain and goes on in full.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.memory import allowed
from flatscope.curvature.spectrum import (
    Eigenpair,
    Search,
    Wanted,
    checked_finite,
    extreme_eigenpairs,
    in_full,
    side_by_side,
)
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.errors import NumericalWarning
from flatscope.isolation import coarse_products
from flatscope.limits import STANDARD


def has_coarse_products(ctx: Context) -> bool:
    """True where float32 can be multiplied faster with fewer digits."""
    return ctx.problem.device.type == "cuda" and ctx.problem.dtype == torch.float32


def eigenpairs_by_coarse_search(
    operator: SymmetricOperator, begun: Callable[[], torch.Generator], wanted: Wanted, most_products: int
) -> tuple[list[Eigenpair], bool]:
    """Eigenpairs as `extreme_eigenpairs` gives them, and whether coarse products have found them.

    Args:
        operator: the matrix.
        begun: the generator of the search's start, at its beginning.
        wanted: which.
        most_products: give up there, coarse ones counted.
    """
    if operator.size > STANDARD.dense_matrix and _fits(operator, wanted):
        search = Search(operator.size, begun(), wanted, operator.device)
        with coarse_products(), warnings.catch_warnings(action="ignore", category=NumericalWarning):
            near = side_by_side({"": search}, wanted, partial(_by_name, operator), most_products=most_products)[""]
        found = made_exact(operator, near, wanted, most_products) if all(pair.converged for pair in near) else None
        if found is not None:
            return found, True
    return extreme_eigenpairs(operator, begun(), wanted, most_products=most_products), False


def _by_name(operator: SymmetricOperator, vectors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: operator @ vector for name, vector in vectors.items()}


def made_exact(
    operator: SymmetricOperator, near: list[Eigenpair], wanted: Wanted, most_products: int
) -> list[Eigenpair] | None:
    """Eigenpairs with the residuals that are wanted, from vectors near them; None where these are not near enough."""
    basis = _orthonormal(torch.stack([pair.vector for pair in near], dim=1).to(operator.device, torch.float64))
    products = checked_finite(operator @ basis).double()
    first = [in_full(pair, products[:, i]) for i, pair in enumerate(near)]  # how far the coarse matrix is off
    if max(pair.residual for pair in first) > STANDARD.near_share * max(abs(pair.value) for pair in first):
        return None
    taken = near[0].products + len(near)
    for _ in range(STANDARD.exact_rounds):
        values, coefficients = torch.linalg.eigh((basis.T @ products + products.T @ basis).cpu() / 2)
        chosen = wanted.of(coefficients.T).T.to(basis)
        values, vectors = wanted.of(values), basis @ chosen
        residuals = products @ chosen - vectors * values.to(basis)
        lengths = residuals.norm(dim=0).cpu()
        largest = float(values.abs().max())
        found = lengths <= wanted.tolerance * values.abs().clamp_min(wanted.share * largest)
        if bool(found.all()):
            rows = zip(first, values.tolist(), lengths.tolist(), vectors.T, strict=True)
            return [
                replace(
                    pair,
                    value=value,
                    vector=vector,
                    residual=length,
                    products=taken,
                    low=min(pair.low, value),
                    high=max(pair.high, value),
                )
                for pair, value, length, vector in rows
            ]
        if taken + int((~found).sum()) > most_products:
            return None
        more = _orthonormal(residuals[:, ~found.to(basis.device)], basis)
        basis = torch.cat([basis, more], dim=1)
        products = torch.cat([products, checked_finite(operator @ more).double()], dim=1)
        taken += more.shape[1]
    return None


def _fits(operator: SymmetricOperator, wanted: Wanted) -> bool:
    """True where the vectors of all rounds and their products fit beside a Krylov space."""
    needed = 2 * 8 * operator.size * wanted.number * (1 + STANDARD.exact_rounds)  # bytes in float64
    return needed <= allowed(STANDARD.krylov_memory, operator.device)


def _orthonormal(vectors: Tensor, to: Tensor | None = None) -> Tensor:
    """An orthonormal basis of what some vectors (p, k) add to another basis."""
    for _ in range(2 if to is not None else 1):  # twice is enough
        if to is not None:
            vectors = vectors - to @ (to.T @ vectors)
        vectors = torch.linalg.qr(vectors)[0]
    return vectors
