"""CIFAR-10 with its pixels rounded to 33 levels: small enough to be sent to a machine that takes 64 MiB and no more.

Rounding moves a pixel by 2.3 of 255 on average (root mean square), a thirtieth of what pixels vary by.
"""

from __future__ import annotations

import functools

import numpy as np

from flatscope.inputs import Raw, load
from flatscope_papers.smoke_data import ten_classes

STEP = 8  # of the 256 values of a pixel


@functools.cache
def cifar10_in_33_levels() -> Raw:
    """All of CIFAR-10, every pixel at the nearest multiple of eight (255 for 256)."""
    data = load("cifar10", standardize=False)
    assert data.test is not None
    parts = [(pixels_at_33_levels((x * 255).round().byte().numpy()), y.numpy()) for x, y in (data.train, data.test)]
    return ten_classes("cifar10_in_33_levels", parts[0], parts[1])


def pixels_at_33_levels(
    pixels: np.ndarray[tuple[int, ...], np.dtype[np.uint8]],
) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """Pixels at the nearest multiple of the step, in [0, 1]."""
    levels = (pixels.astype(np.int16) + STEP // 2) // STEP
    return (levels * STEP).clip(max=255).astype(np.float32) / np.float32(255)
