"""Outputs of several weights side by side against the layer run with each; sums over pairs of positions."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from flatscope.curvature.patches import moved_outputs
from flatscope.curvature.per_sample_gradients import sum_over_pairs

pytestmark = pytest.mark.fast
LAYERS: dict[str, tuple[str, Any, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = {
    "vectors": ("dense", functional.linear, (5, 4), (3, 4), {}),
    "sequences": ("dense", functional.linear, (5, 6, 4), (3, 4), {}),
    "images": ("conv", functional.conv2d, (5, 4, 7, 6), (6, 4, 3, 2), {"stride": 2, "padding": (1, 0)}),
    "groups": ("conv", functional.conv2d, (5, 4, 7, 7), (6, 2, 3, 3), {"groups": 2, "dilation": 2, "padding": "same"}),
    "depthwise": ("conv", functional.conv1d, (5, 4, 9), (8, 1, 3), {"groups": 4}),
    "volumes": ("conv", functional.conv3d, (5, 2, 4, 4, 4), (3, 2, 2, 2, 2), {"padding": 1}),
    "transposed": (
        "transposed",
        functional.conv_transpose2d,
        (5, 4, 5, 5),
        (4, 3, 3, 3),
        {"stride": 2, "output_padding": 1, "groups": 2},
    ),
}


@pytest.mark.parametrize("name", LAYERS)
def test_outputs_of_several_weights_stand_side_by_side(name: str) -> None:
    kind, run, inputs, weight, settings = LAYERS[name]
    x, moves = torch.randn(inputs, dtype=torch.float64), torch.randn(3, *weight, dtype=torch.float64)
    found = moved_outputs(x, moves, kind, settings)

    def alone(move: Tensor) -> Tensor:
        return run(x, move, **settings).flatten(1)

    torch.testing.assert_close(found, torch.stack([alone(move) for move in moves], dim=1))


@pytest.mark.parametrize("rows", [3, 9])
def test_sums_over_pairs_of_positions_are_those_of_gradients(rows: int) -> None:
    generator = torch.Generator().manual_seed(0)
    u = torch.randn(2, 4, 5, generator=generator, dtype=torch.float64)
    first, second = torch.randn(2, 2, 3, rows, 5, generator=generator, dtype=torch.float64)
    gradients = [torch.einsum("nkrt,nft->nkrf", s, u) for s in (first, second)]
    expected = (gradients[0] * gradients[1]).sum((2, 3))
    torch.testing.assert_close(sum_over_pairs(first, second, u.mT @ u), expected, rtol=1e-12, atol=1e-12)


def test_a_vocabulary_takes_no_array_as_large_as_its_columns() -> None:
    sizes: list[int] = []

    class Noted(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            made = func(*args, **(kwargs or {}))
            if isinstance(made, Tensor) and not func.is_view:
                sizes.append(made.numel())
            return made

    u, s = torch.randn(2, 8, 5), torch.randn(2, 3, 5, 1000).mT
    with Noted():
        sum_over_pairs(s, s, u.mT @ u)
    assert max(sizes) < s.numel() / 10
