"""Trace of an operator from random products, with a standard error that can be trusted."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from flatscope.errors import InputError, NumericalWarning

# Directions that are always taken one by one, and those that are where nothing is left to estimate then.
FEW = 512
MULTIPLIED_OUT = 1024
COLUMNS = 32


class Operator(Protocol):
    """Anything symmetric that can be multiplied with columns (p, k)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        ...

    def __matmul__(self, vectors: Tensor) -> Tensor: ...


@dataclass(frozen=True)
class Estimate:
    """A number with the standard error of its estimator and the products it took."""

    value: float
    stderr: float
    products: int
    exact: bool
    converged: bool


def multiplied_out(counts: Sequence[int], most_products: int) -> list[bool]:
    """Which of several sums over directions take one product per direction, and are exact, instead of an estimate.

    At most 512 directions always do. More do where that replaces the estimate, which serves all of them at once, at
    no more products than it may take: all sums of more than 512 together at most 1,024, and at most `most_products`.
    The limit does not grow with `most_products`: an estimate that may take more mostly stops long before.

    Args:
        counts: number of directions of each sum.
        most_products: what the estimate may take.
    """
    few = min(FEW, most_products)
    replaced = sum(count for count in counts if count > few) <= min(MULTIPLIED_OUT, most_products)
    return [count <= few or replaced for count in counts]


def trace(
    operator: Operator,
    generator: torch.Generator,
    *,
    accuracy: float = 0.01,
    sketch: int = 16,
    most_products: int = 1024,
    block: int = 16,
    offset: float = 0.0,
) -> Estimate:
    """Trace to a requested relative standard error (Hutch++ with sequential stopping).

    A sketch catches the few large eigenvalues exactly: tr(QᵀAQ) with Q an orthonormal basis of A applied to
    random signs. The rest, (I−QQᵀ)A(I−QQᵀ), is estimated with independent random signs; their spread is the
    standard error. It is looked at only after 32, 64, 128, … signs: stopping at the first moment that looks good
    would stop by luck. A matrix of at most 1,024 columns is multiplied out instead if `most_products` allows: exact.

    Args:
        operator: symmetric matrix.
        generator: random signs are drawn from it on the CPU.
        accuracy: stop when the standard error is below this fraction of the absolute value.
        sketch: columns of Q; 0 gives plain Hutchinson.
        most_products: give up there, with a warning and `converged=False`.
        block: columns multiplied together.
        offset: a known part of the whole: accuracy is asked of `offset + trace`, the trace alone is returned.
    """
    size = operator.shape[0]
    first_look = 32
    if accuracy <= 0 or most_products < 1 or sketch < 0 or block < 1:
        raise InputError(
            "positive accuracy, products and block", f"{accuracy}, {most_products}, {block}", where="trace"
        )
    if multiplied_out([size], most_products)[0]:
        return Estimate(_trace_of_columns(operator, torch.eye(size, dtype=torch.float64)), 0.0, size, True, True)
    basis = torch.zeros(size, 0, dtype=torch.float64)
    top = 0.0
    if sketch:
        basis = torch.linalg.qr((operator @ _signs(size, sketch, generator)).cpu())[0]  # (p, sketch)
        top = _trace_of_columns(operator, basis)
    samples = torch.zeros(0, dtype=torch.float64)
    products, look = 2 * sketch, first_look
    while True:
        wanted = min(look, max(2, most_products - 2 * sketch))
        while len(samples) < wanted:
            signs = _signs(size, min(block, wanted - len(samples)), generator)
            rest = signs - basis @ (basis.T @ signs)  # (p, k)
            samples = torch.cat([samples, (rest * (operator @ rest).cpu()).sum(0)])
            products += rest.shape[1]
        value = top + float(samples.mean())
        stderr = float(samples.std()) / math.sqrt(len(samples))
        if stderr <= accuracy * abs(offset + value):
            return Estimate(value, stderr, products, False, True)
        if products >= most_products:
            warnings.warn(
                f"trace: standard error {stderr:.2g} of {value:.4g} after {products} products, asked for "
                f"{accuracy:.2g} relative; raise most_products",
                NumericalWarning,
                stacklevel=2,
            )
            return Estimate(value, stderr, products, False, False)
        look *= 2


def _signs(size: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (size, columns), generator=generator, dtype=torch.float64) * 2 - 1


def _trace_of_columns(operator: Operator, columns: Tensor) -> float:
    parts = torch.split(columns, COLUMNS, dim=1)  # all at once they would take more memory, and no less time
    return sum(float((part * (operator @ part).cpu()).sum()) for part in parts)
