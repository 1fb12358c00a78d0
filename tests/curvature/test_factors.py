"""Factors of the output Hessian keep their digits where the network is sure of every sample."""

from __future__ import annotations

import itertools

import pytest
import torch
from torch import Tensor

from flatscope.curvature.output_hessian import Columns, output_root
from flatscope.loss import Loss, as_loss

pytestmark = pytest.mark.fast


def output_columns(loss: Loss, outputs: Tensor, targets: Tensor) -> Columns:
    """All columns of a few samples."""
    root = output_root(loss, outputs, targets)
    return root.exact(0, root.count)


def sure(gap: float, top: int) -> tuple[Tensor, Tensor]:
    """Outputs in float32 with one class ahead, and their Hessian of about e^-gap without the cancellation of 1 − p."""
    outputs = torch.tensor([[0.3, -0.2, 0.1, 0.7]])
    outputs[0, top] += gap
    p = outputs.double().softmax(1)
    rest = p.clone()
    rest[0, top] = 0.0
    hessian = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
    hessian[0, top, top] = p[0, top] * rest.sum()
    return outputs, hessian


@pytest.mark.parametrize("gap", [10.0, 20.0, 40.0])
@pytest.mark.parametrize("top", [0, 1, 3])
def test_softmax_columns_keep_their_digits_in_float32(gap: float, top: int) -> None:
    """Every entry to 1e-5 of its size."""
    outputs, hessian = sure(gap, top)
    columns = output_columns(as_loss("cross_entropy"), outputs, torch.tensor([top])).values.double()
    torch.testing.assert_close(torch.einsum("kni,knj->nij", columns, columns), hessian, rtol=2e-5, atol=0.0)


@pytest.mark.parametrize("gap", [0.0, 10.0, 40.0])
def test_random_columns_are_right_in_the_mean_over_all_signs(gap: float) -> None:
    outputs, hessian = sure(gap, 1)
    root = output_root(as_loss("cross_entropy"), outputs, torch.tensor([1]))
    signs = torch.tensor(list(itertools.product([-1.0, 1.0], repeat=root.width)))[:, None]
    columns = root.drawn(signs).values.double()
    found = torch.einsum("kni,knj->nij", columns, columns) / len(signs)
    size = hessian.diagonal(dim1=1, dim2=2).sqrt()  # of the columns: what is averaged away is rounded at this size
    scale = size[:, :, None] * size[:, None, :]
    torch.testing.assert_close(found / scale, hessian / scale, rtol=0.0, atol=2e-6)
