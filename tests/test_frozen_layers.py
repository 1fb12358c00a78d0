"""Networks of which only vectors are to be trained, as in tuning biases or norms; numbers that are none."""

from __future__ import annotations

import math

import pytest
import torch
from own_double import OwnDouble
from torch import Tensor, nn

import flatscope as fs

torch.set_num_threads(1)
X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(9) % 3
NAMES = """
layer_trace layer_max_eigenvalue kappa kappa_max kappa_sum kappa_trace kappa_trace_max kappa_trace_sum rho_unit rho
rho_max rho_layer_sum rho_sum relative_flatness feature_robustness
"""
LAYERS = NAMES.split()


@pytest.mark.parametrize("batchnorm", [False, True])
def test_without_a_layer_to_train_curvature_of_layers_is_refused_and_the_rest_is_measured(batchnorm: bool) -> None:
    torch.manual_seed(0)
    middle = [nn.BatchNorm1d(5)] if batchnorm else []
    model = nn.Sequential(nn.Linear(4, 5), *middle, nn.ReLU(), nn.Linear(5, 3)).double().eval()
    for value in model.parameters():
        value.requires_grad_(value.ndim == 1)
    problem = fs.Problem(model, train=(X, Y))
    table = fs.measure(problem, [*LAYERS, "hessian_trace", "l2_norm"])
    reasons = {row.measure: row.reason for row in table.to_frame().itertuples() if row.measure in LAYERS}
    assert set(reasons) == set(LAYERS)
    for name, reason in reasons.items():
        assert "no weight matrix is to be trained, all 2 are frozen" in reason, (name, reason)
    assert not table.to_frame().set_index("measure").loc[LAYERS, "value"].notna().any()
    own = OwnDouble(model, X, Y, "cross_entropy")
    assert table["hessian_trace"] == pytest.approx(float(own.hessian.trace()), rel=1e-9)
    assert table["l2_norm"] > 0


class LogOfSoftmax(nn.Module):
    """Finite outputs whose second derivatives overflow: probabilities below the root of the smallest number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return (300 * torch.tanh(9 * self.head(torch.tanh(self.inner(x))))).softmax(1).log()


def test_a_value_that_is_not_a_number_says_so_and_not_how_it_was_sampled() -> None:
    torch.manual_seed(0)
    problem = fs.Problem(LogOfSoftmax().double().eval(), train=(X, Y))
    frame = fs.measure(problem, ["hessian_trace", "layer_trace", "rho_unit", "psi_trace"], precision=0.3).to_frame()
    rows = frame[frame["value"].isna()]
    assert len(rows)
    for row in rows.itertuples():
        assert row.reason.startswith("not a number") or "finite" in row.reason, (row.measure, row.reason)
        assert not row.exact
        assert math.isnan(row.value)
