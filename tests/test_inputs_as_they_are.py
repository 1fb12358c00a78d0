"""Data as people have them: lists of samples, nested lists, bytes, channels last; read, or refused with the fix."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.errors import InputError

X = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
Y = [0, 1, 2, 0, 1, 2]


def dense() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3)).eval()


def convolution() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(2 * 6 * 6, 3)).eval()


def trace(train: Any) -> float:
    return fs.measure(fs.Problem(dense(), train), "hessian_trace")["hessian_trace"]


@pytest.mark.parametrize(
    "train",
    [
        [(x, y) for x, y in zip(X, Y, strict=True)],
        [(x.numpy(), np.int64(y)) for x, y in zip(X, Y, strict=True)],
        [(x, torch.tensor(y)) for x, y in zip(X, Y, strict=True)],
        (X.tolist(), Y),
        [X.tolist(), Y],
        (X.numpy(), Y),
        (X, Y),
        [(X[:2], torch.tensor(Y[:2])), (X[2:], torch.tensor(Y[2:]))],
    ],
    ids=["samples", "samples of arrays", "labels as tensors", "lists", "a list of lists", "array", "tensor", "batches"],
)
def test_they_are_the_same_data(train: Any) -> None:
    assert trace(train) == pytest.approx(trace((X, torch.tensor(Y))), rel=1e-6)


@pytest.mark.parametrize(
    ("x", "fixes"),
    [
        (torch.zeros(6, 3, 8, 8, dtype=torch.uint8), [r"x\.float\(\) / 255"]),
        (torch.zeros(6, 8, 8, 3), [r"x\.permute\(0, 3, 1, 2\)"]),
        (torch.zeros(6, 8, 8, 3, dtype=torch.uint8), [r"x\.float\(\) / 255", r"x\.permute\(0, 3, 1, 2\)"]),
        (torch.zeros(6, 5, 8, 8), ["Check the input shape and dtype"]),
    ],
    ids=["bytes", "channels last", "both", "neither"],
)
def test_images_that_do_not_fit_are_refused_with_the_fix(x: torch.Tensor, fixes: list[str]) -> None:
    for fix in fixes:
        with pytest.raises(InputError, match=fix):
            fs.Problem(convolution(), (x, torch.tensor(Y)))


def test_lists_of_different_lengths_are_refused_with_the_fix() -> None:
    with pytest.raises(InputError, match="Pad them"):
        fs.Problem(dense(), ([[1.0, 2.0], [1.0]], [0, 1]))
