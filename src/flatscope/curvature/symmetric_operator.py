"""A symmetric matrix that is known by its products: all that searches, draws and SciPy's solvers ask of one."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator
from torch import Tensor

Vectors = Callable[[int], Tensor]  # vectors (p, k) of a group of samples, by its number
Parts = Iterator[tuple[int, Tensor]]  # numbers of groups and their parts of a product
Gather = Callable[[Parts], Sequence[Tensor]]  # what is made of them: tensors to be summed over the ranks


class SymmetricOperator(ABC):
    """A symmetric p × p matrix known by its products.

    It may be a mean over samples, groups of which can be multiplied with vectors of their own: of groups that are alike
    one pass over the data then tells random draws as much as a pass for each of them.

    Args:
        size: p.
        device: where products are computed and returned.
        groups: number of groups of samples.
    """

    def __init__(self, size: int, device: torch.device | str = "cpu", groups: int = 1) -> None:
        self.size, self.device, self.groups = size, torch.device(device), groups

    @abstractmethod
    def __matmul__(self, vectors: Tensor) -> Tensor:
        """Products with a vector (p,) or with the columns of a matrix (p, k)."""

    def by_groups(self, vectors: Vectors, gather: Gather) -> list[Tensor]:
        """Sums over the ranks of what is gathered from products of every group's samples with vectors of its own.

        Args:
            vectors: (p, k) by the number of the group.
            gather: what to make of the groups' numbers and products (p, k), each a part of the mean over all samples;
                they come one by one, those of this rank's samples. It may be called again where the memory did not
                suffice.
        """
        return list(gather(iter([(0, self @ vectors(0))])))

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        return self.size, self.size

    def to_scipy(self) -> LinearOperator:
        """The same operator for SciPy's solvers, in float64 on the CPU side; it takes arrays of any numbers."""

        def product(array: np.ndarray) -> np.ndarray:
            if np.iscomplexobj(array):
                return product(array.real) + 1j * product(array.imag)
            return (self @ torch.from_numpy(np.ascontiguousarray(array, dtype=np.float64))).cpu().numpy()

        return LinearOperator(
            self.shape, matvec=product, matmat=product, rmatvec=product, rmatmat=product, dtype=np.float64
        )


@dataclass(frozen=True)
class Directions:
    """Directions b in a space of vectors, as a linear map E from coefficients."""

    count: int  # number of directions
    length: int  # of the vectors
    embed: Callable[[Tensor], Tensor]  # coefficients (count, k) -> vectors (length, k)
    pull: Callable[[Tensor], Tensor]  # vectors (length, k) -> inner products with the directions (count, k)


def joined_directions(parts: Sequence[Directions]) -> Directions:
    """Directions in several spaces as those in one, whose vectors are theirs one behind the other."""
    counts, lengths = [part.count for part in parts], [part.length for part in parts]

    def embed(coefficients: Tensor) -> Tensor:
        return torch.cat([part.embed(z) for part, z in zip(parts, torch.split(coefficients, counts), strict=True)])

    def pull(vectors: Tensor) -> Tensor:
        return torch.cat([part.pull(v) for part, v in zip(parts, torch.split(vectors, lengths), strict=True)])

    return Directions(sum(counts), sum(lengths), embed, pull)


class Congruence(SymmetricOperator):
    """EᵀAE: a matrix A as a function of coefficients of some directions.

    Args:
        matrix: A.
        directions: E.
    """

    def __init__(self, matrix: SymmetricOperator, directions: Directions) -> None:
        super().__init__(directions.count, matrix.device, matrix.groups)
        self._matrix, self._directions = matrix, directions

    def __matmul__(self, coefficients: Tensor) -> Tensor:
        return self._directions.pull(self._matrix @ self._directions.embed(coefficients))

    def by_groups(self, vectors: Vectors, gather: Gather) -> list[Tensor]:
        """Sums of what is gathered from products with coefficients of each group's own."""
        return self._matrix.by_groups(
            lambda group: self._directions.embed(vectors(group)),
            lambda parts: gather((group, self._directions.pull(product)) for group, product in parts),
        )
