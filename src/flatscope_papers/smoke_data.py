"""The embedded digits enlarged to the shapes of MNIST and CIFAR-10, for runs of seconds on any machine."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from sklearn.datasets import load_digits

from flatscope.inputs import Raw

Samples = tuple[npt.NDArray[Any], npt.NDArray[Any]]

HELD_OUT = 360


def digits_as_mnist() -> Raw:
    """Digits as 1×28×28: each pixel three times in each direction, in a frame of two zeros."""
    return _train_and_test_digits("digits_as_mnist", np.pad(_enlarged_digits(3), ((0, 0), (0, 0), (2, 2), (2, 2))))


def digits_as_cifar10() -> Raw:
    """Digits as 3×32×32: each pixel four times in each direction, the same in all colours."""
    return _train_and_test_digits("digits_as_cifar10", np.repeat(_enlarged_digits(4), 3, axis=1))


def _enlarged_digits(times: int) -> npt.NDArray[np.float32]:
    images = load_digits().images.astype(np.float32)[:, None] / 16
    return np.kron(images, np.ones((1, 1, times, times), dtype=np.float32))


def ten_classes(name: str, train: Samples, test: Samples) -> Raw:
    """Images in [0, 1] as a set of the library's own: standardised unless told otherwise, as MNIST and CIFAR-10 are."""
    return Raw(name, train, test, tuple("0123456789"), 1.0, "images in [0, 1]")


def _train_and_test_digits(name: str, images: npt.NDArray[np.float32]) -> Raw:
    labels = load_digits().target.astype(np.int64)
    order = np.random.RandomState(0).permutation(len(labels))
    images, labels = images[order], labels[order]
    return ten_classes(name, (images[HELD_OUT:], labels[HELD_OUT:]), (images[:HELD_OUT], labels[:HELD_OUT]))
