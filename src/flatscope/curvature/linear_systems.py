"""(A + δI) x = v by products alone: conjugate gradients where A is not negative, MINRES where it may be.

Both minimise over the same Krylov space, CG the quadratic, MINRES the residual, and both come to know whether A + δI
has a direction of negative curvature in it: CG when a step has one, MINRES by the curvature of its residuals (Liu and
Roosta, 2022). A solution x is then no minimum of ½ xᵀ(A + δI)x − vᵀx, which has none; so it is reported.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from flatscope.errors import InputError, refuse_unless_whole
from flatscope.formatting import readable_number
from flatscope.limits import STANDARD

if TYPE_CHECKING:
    from flatscope.curvature.symmetric_operator import SymmetricOperator

NOISE = 100.0  # roundings of the largest curvature met, below zero by which a direction counts as negative


class Found(NamedTuple):
    """End of a method: x, a direction that may be negative, products, the largest curvature that was met."""

    x: Tensor
    direction: Tensor | None
    products: int
    largest: float


@dataclass(frozen=True, eq=False, repr=False)
class Solution:
    """Solution of (A + δI) x = v, and how good it is.

    Attributes:
        vector: x, (p,) in float64.
        residual: ‖(A + δI) x − v‖ / ‖v‖, from a product of its own.
        converged: whether that is at most the tolerance.
        products: that it took, this one included.
        negative: a direction d of length one with dᵀ(A + δI)d < 0, where one was met; else None.
        curvature: dᵀAd of that direction, without δ; NaN without any.
        damping: δ.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> problem = fs.Problem(model, train=(torch.tensor([[1.0, 0], [0, 3]]), torch.zeros(2)), loss="mse")
        >>> found = fs.gauss_newton(problem).solve(torch.tensor([1.0, 9.0]))  # the matrix is diagonal: 1, 9
        >>> found.vector.round(decimals=6), found.converged
        (tensor([1., 1.], dtype=torch.float64), True)
    """

    vector: Tensor
    residual: float
    converged: bool
    products: int
    negative: Tensor | None
    curvature: float
    damping: float

    def __repr__(self) -> str:
        state = "converged" if self.converged else "NOT converged"
        met = ""
        if self.negative is not None:
            met = f"; a direction of curvature {readable_number(self.curvature, 3)} was met: this is no minimum"
        return (
            f"Solution({state}, relative residual {readable_number(self.residual, 2)}, {self.products} products{met})"
        )


def solved(
    operator: SymmetricOperator,
    v: Tensor,
    damping: float,
    tolerance: float,
    most_products: int,
    *,
    convex: bool,
    eps: float = 0.0,
) -> Solution:
    """The solution by the method that suits the matrix.

    Args:
        operator: A.
        v: (p,).
        damping: δ.
        tolerance: relative residual to end at.
        most_products: give up there.
        convex: whether A should have no negative eigenvalue.
        eps: relative rounding of a product.
    """
    _refuse_wrong(operator, v, damping, tolerance, most_products)
    right = v.to(operator.device, torch.float64)
    size = float(right.norm())
    if size == 0:
        return Solution(torch.zeros_like(right), 0.0, True, 0, None, math.nan, float(damping))

    def apply(vector: Tensor) -> Tensor:
        return (operator @ vector).double() + damping * vector

    method = _conjugate_gradients if convex else _minimum_residual
    found = method(apply, right, tolerance * size, most_products)
    x, products = found.x, found.products
    residual = float((apply(x) - right).norm()) / size
    negative, curvature = None, math.nan
    if found.direction is not None:
        unit = found.direction / found.direction.norm()
        curvature = float(unit @ apply(unit)) - damping
        products += 1
        negative = unit if curvature + damping < -NOISE * eps * found.largest else None
    return Solution(
        vector=x,
        residual=residual,
        converged=residual <= tolerance,
        products=products + 1,
        negative=negative,
        curvature=curvature if negative is not None else math.nan,
        damping=float(damping),
    )


def _refuse_wrong(operator: SymmetricOperator, v: Tensor, damping: float, tolerance: float, most_products: int) -> None:
    if not isinstance(v, Tensor) or v.shape != (operator.size,) or v.is_complex():
        got = f"{v.dtype} of shape {tuple(v.shape)}" if isinstance(v, Tensor) else type(v).__name__
        fix = "Solve for one vector at a time; `op.flatten` makes one of tensors by name, `torch.as_tensor` of an array"
        raise InputError(f"a real vector of length {operator.size}", got, where="solve", fix=fix)
    if not bool(v.isfinite().all()):
        raise InputError("finite numbers", "NaN or infinity", where="solve")
    for name, value, least in (("damping", damping, 0.0), ("tolerance", tolerance, 1e-15)):
        if isinstance(value, bool) or not isinstance(value, Real) or not least <= value < math.inf:
            raise InputError(f"a number from {least:g} up", repr(value), where=f"solve, {name}")
    refuse_unless_whole(most_products, "most_products")


def _conjugate_gradients(apply: Callable[[Tensor], Tensor], v: Tensor, wanted: float, most: int) -> Found:
    x, r = torch.zeros_like(v), v.clone()
    p, square = r.clone(), float(v @ v)
    least, since, products, largest = math.sqrt(square), 0, 0, 0.0
    while products < most and math.sqrt(square) > wanted and since < STANDARD.stalled_products:
        product = apply(p)
        products += 1
        curved = float(p @ product)
        largest = max(largest, abs(curved) / float(p @ p))
        if curved <= 0:
            return Found(x, p, products, largest)
        x += square / curved * p
        r -= square / curved * product
        before, square = square, float(r @ r)
        p = r + square / before * p
        least, since = (math.sqrt(square), 0) if math.sqrt(square) < least else (least, since + 1)
    return Found(x, None, products, largest)


def _minimum_residual(apply: Callable[[Tensor], Tensor], v: Tensor, wanted: float, most: int) -> Found:
    """By the recurrences of Paige and Saunders (1975): Lanczos vectors, a rotation for each, short sums."""
    x, residual, negative = torch.zeros_like(v), v.clone(), None
    phi = float(v.norm())
    before, vector = torch.zeros_like(v), v / phi
    older, old = torch.zeros_like(v), torch.zeros_like(v)  # directions of x
    c, s, delta, epsilon, coupling = -1.0, 0.0, 0.0, 0.0, 0.0
    products, since, largest = 0, 0, 0.0
    while products < most and phi > wanted and since < STANDARD.stalled_products:
        product = apply(vector)
        products += 1
        alpha = float(vector @ product)
        largest = max(largest, abs(alpha))
        product = product - alpha * vector - coupling * before
        next_coupling = float(product.norm())
        gamma = s * delta - c * alpha
        if negative is None and c * gamma >= 0:  # −c · gamma times its square is the residual's curvature
            negative = residual.clone()
        length = math.hypot(gamma, next_coupling)
        if length == 0:
            break
        step = (vector - (c * delta + s * alpha) * old - epsilon * older) / length
        delta, epsilon = -c * next_coupling, s * next_coupling
        c, s = gamma / length, next_coupling / length
        x += c * phi * step
        since = since + 1 if s > 1 - 1e-9 else 0
        phi *= s
        older, old = old, step
        if next_coupling <= 1e-14 * largest:  # the space is exhausted
            break
        before, vector, coupling = vector, product / next_coupling, next_coupling
        residual = s * s * residual - phi * c * vector
    return Found(x, negative, products, largest)
