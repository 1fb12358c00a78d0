"""Samples once they are read: `Data` as tensors, `Source` as a user's loaders give them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy.typing as npt
from torch import Tensor

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """Training and test samples, ready for a model, and where they come from.

    Images are float32 (n, channels, height, width); labels int64 (n,). `test` is None where there is none.
    `mean` and `std` are per channel, of the training samples (those in `train`, or all of the set), on the [0, 1]
    scale; None where nothing was standardised.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    classes: tuple[str, ...]  # empty for regression targets
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    seed: int = 0
    notes: str = ""
    scale: float = 1.0  # by which the source's numbers were divided

    @property
    def n_classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train[0].shape[1:])

    @property
    def how(self) -> str:
        """What was done to the inputs, in words."""
        divided = "as they are" if self.scale == 1 else f"divided by {self.scale:g}"
        return divided if self.mean is None else "standardised"

    def __repr__(self) -> str:
        n_test = len(self.test[1]) if self.test else 0
        shape = "x".join(str(extent) for extent in self.input_shape)
        return f"Data({self.name!r}, {len(self.train[1])} train, {n_test} test, {shape}, {self.n_classes} classes)"


@dataclass(frozen=True)
class Raw:
    """Samples as their source gives them; dividing by `scale` brings bytes to [0, 1]."""

    name: str
    train: Pair
    test: Pair | None
    classes: tuple[str, ...]
    scale: float
    notes: str
    own: bool = False  # a user's own samples, standardised only if asked
    ready: Data | None = None  # the user's own `Data`: not to be scaled again


@dataclass(frozen=True)
class Source:
    """A user's own samples, read as they come: whatever `Problem` takes as data, for training and test."""

    name: str
    train: Any
    test: Any = None
    notes: str = ""
    how = "as they are"
