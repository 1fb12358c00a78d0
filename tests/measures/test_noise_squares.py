"""Noise of gradients: of large networks from what passes the layers, without a gradient of any single sample."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from networks import (
    Tiny,
    attending,
    attention,
    batchnorm_conv,
    binary,
    lenet_like,
    one_dimensional,
    regression,
    residual,
    sequences,
)
from torch import nn

import flatscope as fs
from flatscope.context import Context
from flatscope.limits import STANDARD
from flatscope.measures.gradient_noise import noise_parts, noise_squares, sample_gradients

BUILDERS = [attending, attention, batchnorm_conv, binary, lenet_like, one_dimensional, regression, residual, sequences]


class Transposed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ConvTranspose2d(2, 4, 3, stride=2, groups=2)
        self.norm, self.scale = nn.LayerNorm(7), nn.Parameter(torch.tensor(1.5))
        self.last = nn.Conv2d(4, 6, 3, groups=2, padding=1, bias=False)
        self.head = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.scale * self.norm(self.first(x))
        out: torch.Tensor = self.head(torch.relu(self.last(h)).mean((2, 3)))
        return out


def transposed() -> fs.Problem:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(9, 2, 3, 3, generator=generator).double(), torch.arange(9) % 3
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return fs.Problem(Transposed().double(), train=(x, y), batch_size=4)


@pytest.mark.parametrize("build", [*BUILDERS, transposed])
def test_layers_give_what_single_gradients_give(
    build: Callable[[], Tiny | fs.Problem], monkeypatch: pytest.MonkeyPatch
) -> None:
    built = build()
    problem = built if isinstance(built, fs.Problem) else built.problem()
    gradients = torch.cat(list(sample_gradients(Context(problem))))
    expected = (gradients - gradients.mean(0)).square().sum(1)
    torch.testing.assert_close(noise_squares(Context(problem)), expected, rtol=1e-10, atol=1e-14)
    along = (gradients - gradients.mean(0)) @ gradients.mean(0)
    torch.testing.assert_close(noise_parts(Context(problem))[:, 1], along, rtol=1e-9, atol=1e-13)
    monkeypatch.setitem(vars(STANDARD), "transformed_samples", 10**9)
    torch.testing.assert_close(noise_squares(Context(problem)), expected, rtol=1e-9, atol=1e-13)
    torch.testing.assert_close(noise_parts(Context(problem))[:, 1], along, rtol=1e-9, atol=1e-13)


def test_millions_of_float32_are_added_up_in_float64() -> None:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 2000, generator=generator), torch.randn(6, 1000, generator=generator)
    model = nn.Linear(2000, 1000, bias=False)
    nn.init.zeros_(model.weight)
    found, expected = (
        fs.measure(fs.Problem(model, train=(x, y), loss="mse", dtype=dtype), "gradient_noise")["gradient_noise"]
        for dtype in (torch.float32, torch.float64)
    )
    assert found == pytest.approx(expected, rel=1e-5)
