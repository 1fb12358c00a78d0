"""Petzka et al. 2019 in closed form: ridge regression, scaling laws, signs, biases, and the α-Hessian."""

from __future__ import annotations

import copy

import pytest
import torch
from forms_of_measures import value_of
from networks import _built, lenet_like, mlp, residual
from references import Dense
from torch import Tensor, nn
from torch.func import functional_call

import flatscope as fs

pytestmark = pytest.mark.fast


def test_linear_regression_gives_the_ridge_penalty() -> None:
    """κ of linear regression is ‖w‖² · 2 λ_max(mean x xᵀ)."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(30, 4, generator=generator, dtype=torch.float64)
    model = nn.Linear(4, 1, bias=False).double()
    problem = fs.Problem(model, train=(x, torch.randn(30, generator=generator, dtype=torch.float64)), loss="mse")
    expected = float(model.weight.detach().square().sum()) * 2 * float(torch.linalg.eigvalsh(x.T @ x / 30)[-1])
    assert value_of(problem, "kappa_sum") == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("build", [mlp, lenet_like], ids=lambda build: build.__name__)
def test_layer_factors_between_5_and_25(build) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    names = ["kappa", "kappa_trace", "rho_layer_sum", "relative_flatness", "layer_trace", "layer_max_eigenvalue"]
    before = fs.measure(tiny.problem(), names)
    twin = fs.rescale(tiny.model, tiny.x[:2], by="layer", low=5.0, high=25.0, seed=3)
    after = fs.measure(tiny.with_model(twin).problem(), names)
    for name in names[:4]:
        assert after.layer(name) == pytest.approx(before.layer(name), rel=1e-6 if name == "kappa" else 1e-9)
    for name in names[4:]:
        ratio = {layer: after.layer(name)[layer] / value for layer, value in before.layer(name).items()}
        norms = fs.measure(tiny.problem(), "l2_norm").layer("l2_norm")
        others = fs.measure(tiny.with_model(twin).problem(), "l2_norm").layer("l2_norm")
        for layer, factor in ratio.items():  # a block scales with the inverse square of its own layer's factor
            assert factor == pytest.approx((norms[layer] / others[layer]) ** 2, rel=1e-6)


@pytest.mark.parametrize("build", [mlp, lenet_like, residual], ids=lambda build: build.__name__)
def test_units_scaled_by_up_to_25(build) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    twin = fs.rescale(tiny.model, tiny.x[:2], by="unit", low=1 / 25, high=25.0, seed=5)
    before, after = (fs.measure(t.problem(), ["rho_unit", "kappa_trace"]) for t in (tiny, tiny.with_model(twin)))
    moved = 0.0
    for layer in tiny.layers:
        units = before.units("rho_unit", layer)
        torch.testing.assert_close(after.units("rho_unit", layer), units, rtol=1e-8, atol=1e-12 * float(units.max()))
        moved = max(moved, abs(after.layer("kappa_trace")[layer] / before.layer("kappa_trace")[layer] - 1))
    assert moved > 1e-2


def test_rho_is_the_second_derivative_along_the_column() -> None:
    """ρ(j) = ∂²/∂α_j² of the loss with W diag(1 + α), and the whole α-Hessian sums to wᵀHw."""
    tiny = mlp()
    weight = dict(tiny.model.named_parameters())["2.weight"].detach()

    def loss(alpha: Tensor) -> Tensor:
        outputs = functional_call(tiny.model, {"2.weight": weight * (1 + alpha)}, (tiny.x,))
        return nn.functional.cross_entropy(outputs, tiny.y)

    hessian = torch.autograd.functional.hessian(loss, torch.zeros(weight.shape[1], dtype=torch.float64))
    found = fs.measure(tiny.problem(), "rho_unit").units("rho_unit", "2")
    torch.testing.assert_close(found, hessian.diagonal(), rtol=1e-9, atol=1e-14)
    flat = weight.flatten()
    assert float(hessian.sum()) == pytest.approx(float(flat @ Dense(tiny).layer_hessian("2") @ flat), rel=1e-9)


def test_layer_blocks_of_relu_networks_are_positive() -> None:
    for tiny in (mlp(), lenet_like(), residual()):
        for layer in tiny.layers:
            assert float(torch.linalg.eigvalsh(Dense(tiny).layer_hessian(layer))[0]) >= -1e-9
        frame = fs.measure(tiny.problem(), ["kappa*", "rho*", "relative_flatness"]).to_frame()
        assert bool((frame["value"] >= -1e-12).all())


def test_unscaled_biases_change_the_function_and_joint_blocks_are_not_invariant() -> None:
    """Why biases scale with their layer, and why κ leaves them out."""
    tiny = mlp()
    wrong = copy.deepcopy(tiny.model)
    wrong[0].weight.data *= 3
    wrong[2].weight.data /= 3
    assert float((wrong(tiny.x) - tiny.model(tiny.x)).detach().abs().max()) > 1e-3
    twin = fs.rescale(tiny.model, tiny.x[:2], factors={"0": 3.0, "2": 0.2})
    torch.testing.assert_close(twin(tiny.x), tiny.model(tiny.x), rtol=1e-10, atol=1e-12)

    def joint(model: nn.Module) -> float:
        dense = Dense(tiny.with_model(model))
        names = ["2.weight", "2.bias"]
        return float(dense.vector(names).square().sum() * dense.hessian_of(names).trace())

    assert abs(joint(twin) / joint(tiny.model) - 1) > 1e-2


def test_hessian_of_rescaled_weights_follows_the_law() -> None:
    """∇²l(φ_c w) = D⁻¹ ∇²l(w) D⁻¹, D the factor of each weight (Yi et al. 2019, eq 4 in general form)."""
    tiny = mlp()
    twin = fs.rescale(tiny.model, tiny.x[:2], by="unit", seed=2)
    before, after = Dense(tiny), Dense(tiny.with_model(twin))
    names = list(before.params)
    factors = after.vector(names) / before.vector(names)
    expected = before.hessian / factors[:, None] / factors[None, :]
    torch.testing.assert_close(after.hessian, expected, rtol=1e-8, atol=1e-9 * float(expected.abs().max()))


def test_the_trace_grows_as_the_inverse_square_of_a_vanishing_factor() -> None:
    tiny = _built("two layers", nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3)), (3,), 3, ("0", "2"))
    traces = []
    for alpha in (1e-2, 1e-3, 1e-4):
        twin = fs.rescale(tiny.model, tiny.x[:2], factors={"0": alpha})
        traces.append(fs.measure(tiny.with_model(twin).problem(), "hessian_trace")["hessian_trace"])
    assert traces[1] / traces[0] == pytest.approx(100, rel=0.05)
    assert traces[2] / traces[1] == pytest.approx(100, rel=0.01)


def test_network_values_are_sums_and_maxima_of_the_layers() -> None:
    problem = lenet_like().problem()
    table = fs.measure(problem, ["kappa*", "rho*"])
    for name in ("kappa", "kappa_trace"):
        assert value_of(problem, f"{name}_sum") == pytest.approx(sum(table.layer(name).values()), rel=1e-12)
    assert table["rho_sum"] == pytest.approx(sum(table.layer("rho_layer_sum").values()), rel=1e-12)
    for name in ("kappa", "kappa_trace", "rho"):
        assert value_of(problem, f"{name}_max") == pytest.approx(max(table.layer(name).values()), rel=1e-12)
    for layer, value in table.layer("rho_layer_sum").items():
        assert value == pytest.approx(float(table.units("rho_unit", layer).sum()), rel=1e-12)


class _Detached(nn.Module):
    """Its first layer is run, but nothing that it gives reaches the output."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.head = nn.Linear(4, 7), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        self.unused(x)
        return self.head(x)


@pytest.mark.parametrize("reading", ["column", "row"])
def test_a_layer_that_does_not_reach_the_output_counts_nowhere(reading: str) -> None:
    problem = fs.Problem(_Detached().double().eval(), train=(torch.ones(5, 4).double(), torch.tensor([0, 1, 2, 0, 1])))
    table = fs.measure(problem, "rho_unit", options={"rho_unit": {"reading": reading}})
    assert set(table.to_frame()["layer"]) == {"head"}
