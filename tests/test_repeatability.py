"""The same numbers again: with another number of threads, and where a choice is between nearly equal numbers."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import flatscope as fs

pytestmark = pytest.mark.long

FROM_WEIGHTS = ["l2_norm", "l1_path_norm", "l2_path_norm", "psi_balance", "parameter_count", "group_norm"]
FROM_DATA = ["margin", "gradient_norm", "kappa_trace_sum", "rho_sum", "hessian_trace", "hessian_max_eigenvalue"]


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3)
    return nn.Sequential(first, nn.ReLU(), nn.MaxPool2d(2), last, nn.ReLU(), nn.Flatten(), nn.Linear(256, 5)).eval()


def test_threads_change_no_bit_of_what_weights_decide_and_only_rounding_of_the_rest() -> None:
    torch.manual_seed(1)
    data = torch.randn(64, 3, 14, 14), torch.arange(64) % 5
    kept, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 4):
            torch.set_num_threads(threads)
            found.append(fs.measure(fs.Problem(convolutional(), data), [*FROM_WEIGHTS, *FROM_DATA]))
    finally:
        torch.set_num_threads(kept)
    for other in found[1:]:
        for name in FROM_WEIGHTS:
            assert other[name] == found[0][name], name
        for name in FROM_DATA:
            assert other[name] == pytest.approx(found[0][name], rel=2e-5), name


@pytest.mark.parametrize("seed", range(5))
def test_a_tie_between_paths_is_broken_alike_before_and_after_rescaling(seed: int) -> None:
    """All weights are of one size, so every choice is a tie, and rescaling in float32 breaks it by rounding."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 7), nn.ReLU(), nn.Linear(7, 3)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter).sign() * 0.3)
        model[4].weight.mul_(torch.tensor([[1.0], [0.5], [0.25]]))
    data = torch.randn(12, 6), torch.arange(12) % 3
    twin = fs.rescale(model, data[0], by="unit", seed=seed)
    before, after = (fs.measure(fs.Problem(network, data), ["psi_balance", "psi_trace"]) for network in (model, twin))
    assert after["psi_balance"] == pytest.approx(before["psi_balance"], rel=1e-4)
    assert after["psi_trace"] == pytest.approx(before["psi_trace"], rel=1e-3)
