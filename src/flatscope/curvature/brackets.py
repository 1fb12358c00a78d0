"""Between which numbers the eigenvalues of a matrix lie, and which share of them lies below one.

Both come from what a Lanczos process with a random start has seen. An eigenvalue can stay unseen only where the start
has next to no part in its eigenvector, of which the chance is known whatever the matrix (van Dorsselaer, Hochstenbach
and van der Vorst, 2000).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatscope.curvature.lanczos import Krylov

UNSEEN = 0.01  # chance that the start hides the outermost eigenvalue
# Products in floating point are those of another matrix, so many times the rounding of one number (relative to the
# largest eigenvalue) away from the one that is meant.
ROUNDINGS = 100
STEPS = 400  # distances that are looked at, a fifth apart


def log_least_part(size: int, unseen: float = UNSEEN) -> float:
    """Logarithm of the squared part in a given direction that a random unit vector exceeds but for this chance.

    The density of the part at zero, √(p / 2π) at most, bounds the chance of a smaller one.
    """
    return math.log(unseen**2 * math.pi / (2 * size))


def ends(space: Krylov, size: int) -> tuple[float, float]:
    """Between which numbers all eigenvalues lie, but for the chance `UNSEEN` at either end, and for rounding.

    The outermost Ritz values are themselves bounds from inside: an eigenvalue at least as far out exists.
    """
    values = space.ritz()[0]
    lowest, highest = float(values[0]), float(values[-1])
    if space.closed_once:
        return lowest, highest
    scale, least = float(values.abs().max()) + space.coupling, log_least_part(size)
    steps = scale * torch.logspace(-17, 17, STEPS, dtype=torch.float64)
    return lowest - _reach(space, lowest, -steps, least), highest + _reach(space, highest, steps, least)


def _reach(space: Krylov, place: float, steps: Tensor, least: float) -> float:
    """The first distance beyond which no part as large as is likely could have stayed unseen: there parts only fall."""
    hidden = space.log_parts(place, steps) > least
    last = int(hidden.nonzero().max()) if hidden.any() else -1
    return float(steps[min(last + 1, len(steps) - 1)].abs())


def share_below(nodes: Tensor, weights: Tensor, residuals: Tensor, place: float) -> tuple[float, float]:
    """Least and largest share of a start's square that may lie in eigenvectors with eigenvalues below a place.

    The rule of the nodes is widened by one node at the place itself: what it has below that is no more than the truth,
    and with the place's own weight no less (Chebyshev, Markov and Stieltjes). No narrower interval holds for every
    spectrum that the process cannot tell from this one.

    Args:
        nodes: Ritz values of one start, (k,), rising.
        weights: their weights, (k,).
        residuals: of the Ritz values, (k,); all zero where the process came to its end, which leaves nothing open.
        place: on the axis of eigenvalues.
    """
    if bool((nodes == place).any()):
        place = math.nextafter(place, -math.inf)
    k = len(nodes)
    coupled = residuals * (-1.0) ** torch.arange(k, dtype=torch.float64)  # last entries of eigenvectors alternate
    widened = torch.zeros(k + 1, k + 1, dtype=torch.float64)
    widened[:k, :k] = torch.diag(nodes)
    widened[:k, k] = widened[k, :k] = coupled
    widened[k, k] = place + (coupled.square() / (nodes - place)).sum()
    values, vectors = torch.linalg.eigh(widened)
    shares = (weights.sqrt() @ vectors[:k]).square()
    at = int((values - place).abs().argmin())
    least = float(shares[:at].sum())
    return least, min(1.0, least + float(shares[at]))


def rounding(largest: float, *dtypes: torch.dtype) -> float:
    """Largest change of an eigenvalue by rounding, where products are computed in such numbers."""
    return ROUNDINGS * max(torch.finfo(dtype).eps for dtype in dtypes) * abs(largest)
