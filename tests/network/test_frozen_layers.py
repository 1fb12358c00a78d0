"""Networks of which a part is frozen, as in tuning biases, norms or adapters; values that are not numbers."""

from __future__ import annotations

import math

import pytest
import torch
from own_double import OwnDouble
from torch import Tensor, nn

import flatscope as fs
from flatscope.context import Context
from flatscope.measures.psi_flatness import path_coordinates

torch.set_num_threads(1)
X, Y = torch.randn(9, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(9) % 3
NAMES = """
layer_trace layer_max_eigenvalue kappa kappa_trace kappa_trace_sum rho_unit rho
rho_layer_sum rho_sum relative_flatness feature_robustness
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


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter beside it, as LoRA writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(4, 6), nn.Linear(6, 3)
        self.down, self.up = nn.Linear(4, 2, bias=False), nn.Linear(2, 6, bias=False)
        self.base.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.relu(self.base(x) + self.up(self.down(x))))


class Stack(nn.Module):
    """Three layers, some of them (or the bias of the middle one) frozen."""

    def __init__(self, *frozen: int, middle_bias: bool = True) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 3))
        for place in frozen:
            self.layers[place].requires_grad_(False)
        self.layers[2].bias.requires_grad_(middle_bias and 2 not in frozen)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)


# Free scale classes by hand: a unit counts if every weight that it writes or is written by is trainable.
FREE = {
    "adapter": (Adapted, 2),
    "first": (lambda: Stack(0), 5),
    "middle": (lambda: Stack(2), 0),
    "last": (lambda: Stack(4), 6),
    "bias": (lambda: Stack(middle_bias=False), 6),
}


@pytest.mark.parametrize("name", FREE)
def test_path_values_are_those_of_the_trainable_weights_where_some_are_frozen(name: str) -> None:
    torch.manual_seed(1)
    build, free = FREE[name]
    model = build().double().eval()
    problem = fs.Problem(model, train=(X, Y))
    paths = path_coordinates(Context(problem), "max_product")
    trainable = [n for n, value in model.named_parameters() if value.requires_grad]
    assert paths.n_classes == free
    assert paths.count == sum(model.get_parameter(n).numel() for n in trainable) - free

    def loss(values: Tensor) -> Tensor:
        weights = paths.params_of(values)
        assert all(torch.equal(weights[n], p) for n, p in model.named_parameters() if n not in trainable)
        return nn.functional.cross_entropy(torch.func.functional_call(model, weights, (X,)), Y)

    twin = torch.autograd.functional.hessian(loss, paths.values_of(paths.params)).trace()
    table = fs.measure(problem, ["psi_trace", "psi_epsilon"], precision=0)
    assert table["psi_trace"] == pytest.approx(float(twin), rel=1e-9)
    assert table["psi_epsilon"] > 0
    bound = fs.bounds(problem, ["pac_bayes_psi"]).to_frame()["reason"][0]
    assert "trainable weights only" in bound


def test_the_scale_between_the_factors_of_an_adapter_moves_no_path_value() -> None:
    torch.manual_seed(1)
    model = Adapted().double().eval()
    table = fs.measure(fs.Problem(model, train=(X, Y)), ["psi_trace", "psi_balance", "hessian_trace"])
    with torch.no_grad():
        model.down.weight[0] *= 7
        model.up.weight[:, 0] /= 7
    other = fs.measure(fs.Problem(model, train=(X, Y)), ["psi_trace", "psi_balance", "hessian_trace"])
    assert other["psi_trace"] == pytest.approx(table["psi_trace"], rel=1e-9)
    assert other["psi_balance"] == pytest.approx(table["psi_balance"], rel=1e-9)
    assert other["hessian_trace"] != pytest.approx(table["hessian_trace"], rel=0.1)


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
