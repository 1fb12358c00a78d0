"""Polynomials as linear operators on monomials, and binary trees, whose polynomials are sparse.

Section 9.10 and eqs. (20)-(22) of Zhang et al. (2017). A polynomial of degree k is linear in the monomials of its
inputs, so that least squares has the minimum-norm solution YV†, and gradient descent from 0 goes there.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter

import torch
from torch import Tensor, nn

from flatscope import InputError

LARGEST = 20_000  # monomials: beyond this, matrices of them are too large to be meant


def monomial_count(dimension: int, degree: int, *, homogeneous: bool = False) -> int:
    """C(d + k, k) monomials of degree at most k, or C(d − 1 + k, k) of degree exactly k.

    Example:
        >>> monomial_count(8, 10), monomial_count(8, 10, homogeneous=True)
        (43758, 19448)
    """
    return math.comb(dimension - homogeneous + degree, degree)


def monomials(X: Tensor, degree: int, *, homogeneous: bool = False, symmetric: bool = True) -> Tensor:
    """All monomials of each row, (n, count).

    Args:
        X: inputs (n, d).
        degree: k.
        homogeneous: those of degree exactly k only.
        symmetric: weigh each by the root of how often it occurs in the k-fold tensor power of x (of (1, x), if not
            homogeneous). Lengths of coefficient vectors are then those of the operator on that tensor power, and
            products of features are (1 + ⟨x, x'⟩)^k or ⟨x, x'⟩^k.
    """
    n, d = X.shape
    count = monomial_count(d, degree, homogeneous=homogeneous)
    if count > LARGEST:
        raise InputError(f"at most {LARGEST} monomials", str(count), where="monomials", fix="Take a smaller degree")
    source = X if homogeneous else torch.cat([X.new_ones(n, 1), X], dim=1)
    columns = []
    for chosen in itertools.combinations_with_replacement(range(source.shape[1]), degree):
        column = source[:, list(chosen)].prod(1)
        columns.append(column * math.sqrt(_number_of_orderings(chosen)) if symmetric else column)
    return torch.stack(columns, dim=1)


def _number_of_orderings(chosen: tuple[int, ...]) -> int:
    """In how many orders the same factors can stand."""
    result = math.factorial(len(chosen))
    for repeats in Counter(chosen).values():
        result //= math.factorial(repeats)
    return result


def ridge_rank(dimension: int, degree: int, directions: int, *, seed: int = 0) -> int:
    """Number of independent polynomials ⟨w_i, x⟩^k among that many random directions.

    All of the C(d − 1 + k, k) homogeneous ones are reached with that many directions, eq. (63), and not with fewer.
    """
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(directions, dimension, generator=generator, dtype=torch.float64)
    W = W / W.norm(dim=1, keepdim=True)
    # ⟨w, x⟩^k has the coefficients of w's own weighted monomials, in the basis of weighted monomials of x.
    return int(torch.linalg.matrix_rank(monomials(W, degree, homogeneous=True), rtol=1e-10))


class BinaryTree(nn.Module):
    """The binary tree network of eqs. (20)-(22): 2^L inputs, nodes that see two nodes below, P ReLUs per node.

    No biases, as in the paper. Its last ReLU, which allows no negative output, is left out unless asked for.

    Args:
        depth: L levels above the inputs.
        units: P.
        final_relu: as printed in eq. (22).
        seed: of the weights, normal with variance 2/fan-in.
    """

    def __init__(self, depth: int, units: int = 1, *, final_relu: bool = False, seed: int = 0) -> None:
        super().__init__()
        if depth < 1 or units < 1:
            raise InputError("depth and units of 1 or more", f"{depth} and {units}", where="BinaryTree")
        generator = torch.Generator().manual_seed(seed)
        weights = []
        for level in range(1, depth + 1):
            outputs = units if level < depth else 1
            fan_in = 2 * (units if level > 1 else 1)
            drawn = torch.randn(2 ** (depth - level), outputs, fan_in, generator=generator)  # (nodes, P, fan-in)
            weights.append(nn.Parameter(drawn * math.sqrt(2 / fan_in)))
        self.weights = nn.ParameterList(weights)
        self.relus = nn.ModuleList([nn.ReLU() for _ in range(depth - 1 + final_relu)])

    def forward(self, x: Tensor) -> Tensor:
        """Outputs (n, 1) of inputs (n, 2^L)."""
        if x.shape[1:] != (2 ** len(self.weights),):
            raise InputError(f"inputs (n, {2 ** len(self.weights)})", str(tuple(x.shape)), where="BinaryTree")
        for level, weight in enumerate(self.weights):
            nodes, _, fan_in = weight.shape
            x = torch.einsum("nbf,bpf->nbp", x.reshape(len(x), nodes, fan_in), weight)
            if level < len(self.relus):
                x = self.relus[level](x)
        return x.reshape(len(x), 1)

    def fan_in_bound(self) -> float:
        """α, the largest ℓ1 norm of the weights into a unit."""
        return max(float(w.detach().abs().sum(2).max()) for w in self.weights)

    def robustness(self, cell: float) -> float:
        """ε = α^L·γ: how far the output moves at most when no input moves by more than γ (Xu and Mannor 2012)."""
        return float(self.fan_in_bound() ** len(self.weights) * cell)
