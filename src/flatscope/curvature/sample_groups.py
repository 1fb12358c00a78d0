"""Symmetric matrices that are means over samples, groups of which may be multiplied with vectors of their own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
Vectors = Callable[[int], Tensor]  # vectors (p, k) of a group of samples, by its number
Parts = Iterator[tuple[int, Tensor]]  # numbers of groups and their parts of a product
Key = tuple[str, str]
Readings = dict[Key, Tensor]


class Operator(Protocol):
    """Anything symmetric that can be multiplied with columns (p, k)."""

    @property
    def shape(self) -> tuple[int, int]:
        """(p, p)."""
        ...

    def __matmul__(self, vectors: Tensor) -> Tensor: ...


class GroupedOperator(Operator, Protocol):
    """A symmetric matrix that is a mean over samples, of which groups may be multiplied with other vectors."""

    @property
    def groups(self) -> int:
        """Number of groups."""
        ...

    @property
    def device(self) -> torch.device:
        """Where it multiplies."""
        ...

    def by_groups(self, vectors: Vectors, gather: Callable[[Parts], T]) -> T:
        """What `gather` makes of the groups' products with vectors of their own: those of this rank's samples."""
        ...

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Sums over the ranks."""
        ...


class DiagonalOperator(GroupedOperator, Protocol):
    """A symmetric matrix whose diagonal is added up to several values at once."""

    def entries(self, block: int) -> Iterator[Tensor]:
        """The diagonal by one product per direction, some at a time."""
        ...

    def read(self, entries: Tensor) -> Readings:
        """Values (units, k) from entries of the diagonal (p, k): linear."""
        ...

    def has_row(self, name: str) -> bool:
        """Whether the values of that name are asked for with a precision."""
        ...


class Seen:
    """EᵀAE: a matrix A seen from coefficients, which E lays out as vectors.

    Args:
        operator: A, with groups of samples.
        size: number of coefficients.
        embed: E, from coefficients (m, k) to vectors (p, k).
        pull: its transpose.
    """

    def __init__(
        self, operator: GroupedOperator, size: int, embed: Callable[[Tensor], Tensor], pull: Callable[[Tensor], Tensor]
    ) -> None:
        self._operator, self._embed, self._pull = operator, embed, pull
        self.shape, self.device = (size, size), operator.device
        self.groups, self.summed = operator.groups, operator.summed

    def __matmul__(self, coefficients: Tensor) -> Tensor:
        return self._pull(self._operator @ self._embed(coefficients))

    def by_groups(self, vectors: Vectors, gather: Callable[[Parts], T]) -> T:
        """What `gather` makes of the groups' products with coefficients of their own."""
        return self._operator.by_groups(
            lambda group: self._embed(vectors(group)),
            lambda parts: gather((group, self._pull(product)) for group, product in parts),
        )


class OneGroup:
    """A matrix without groups of samples as one with a single group; products are sums over all ranks already."""

    groups = 1

    def __init__(self, operator: Operator, device: torch.device | str = "cpu") -> None:
        self._operator, self.device, self.shape = operator, torch.device(device), operator.shape

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self._operator @ vectors

    def by_groups(self, vectors: Vectors, gather: Callable[[Parts], T]) -> T:
        """The product of the one group."""
        return gather(iter([(0, self._operator @ vectors(0))]))

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """As they are."""
        return list(tensors)


class WholeDiagonal:
    """A matrix whose diagonal is read as one number, the trace.

    Args:
        operator: symmetric, with groups of samples.
    """

    KEY: Key = ("", "trace")

    def __init__(self, operator: GroupedOperator) -> None:
        self._operator, self.device, self.shape = operator, operator.device, operator.shape
        self.groups, self.by_groups, self.summed = operator.groups, operator.by_groups, operator.summed

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self._operator @ vectors

    def entries(self, block: int) -> Iterator[Tensor]:
        """Unit vectors, some at a time."""
        for unit in torch.split(torch.eye(self.shape[0], dtype=torch.float64, device=self.device), block, dim=1):
            yield (unit * (self._operator @ unit).to(unit)).sum(0)

    def read(self, entries: Tensor) -> Readings:
        """Their sum."""
        return {self.KEY: entries.sum(0, keepdim=True)}

    def has_row(self, name: str) -> bool:
        """The one value has."""
        return not name
