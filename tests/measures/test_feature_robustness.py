"""Feature robustness: the identity of features and weights, its bound, and the matrices of Petzka et al. (2019)."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import checks
import pytest
import torch
from networks import Tiny, binary, mlp, regression
from references import Dense
from torch import Tensor, nn

import flatscope as fs
from flatscope import registry
from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.measures import feature_robustness as family
from flatscope.network.layers import Layer
from flatscope_papers.theory import input_changes


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def layers_of(ctx: Context) -> dict[str, Layer]:
    return {layer.name: layer for layer in ctx.network}


def every_kind() -> Tiny:
    """Dense layers and convolutions with stride, padding, dilation, groups, and a transposed one."""
    model = nn.Sequential(
        nn.Conv2d(3, 4, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(4, 6, 2, groups=2, dilation=2),
        nn.ReLU(),
        nn.ConvTranspose2d(6, 4, 2, groups=2),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(36, 3),
    ).double()
    for i, parameter in enumerate(model.parameters()):
        parameter.data = 0.4 * normal(*parameter.shape, seed=i)
    y = torch.randint(0, 3, (9,), generator=torch.Generator().manual_seed(1))
    return Tiny("every kind", model.eval(), normal(9, 3, 8, 8), y, ("0", "2", "4", "7"))


def loss_with_changed_features(tiny: Tiny, layer: str, change: Callable[[Tensor], Tensor]) -> float:
    """Mean loss when the layer is given φ + change(φ)."""
    module = dict(tiny.model.named_modules())[layer]
    handle = module.register_forward_pre_hook(lambda _module, given: (given[0] + change(given[0]),))
    try:
        return float(Dense(tiny).loss().detach())
    finally:
        handle.remove()


def on_channels(blocks: Tensor, delta: float, features: Tensor) -> Tensor:
    """δAφ at every position; A block-diagonal with one block per group."""
    A = torch.block_diag(*blocks)
    return delta * torch.einsum("ij,nj...->ni...", A, features)


@pytest.mark.parametrize("name", ["0", "2", "4", "7"])
def test_changed_features_are_changed_weights(name: str) -> None:
    tiny = every_kind()
    ctx = Context(tiny.problem())
    layer = layers_of(ctx)[name]
    d = family.weights_by_input_feature(ctx.params[layer.weight][None], layer).shape[-1]
    blocks = normal(layer.groups, d, d, seed=3)
    expected = loss_with_changed_features(tiny, name, partial(on_channels, blocks, 0.3)) - ctx.scores().loss
    assert input_changes.robustness_to(ctx, layer, blocks, 0.3) == pytest.approx(expected, rel=1e-12, abs=1e-14)


def test_rows_and_weights_are_the_same_numbers_in_another_order() -> None:
    ctx = Context(every_kind().problem())
    for layer in ctx.network:
        weight = ctx.params[layer.weight]
        rows = family.weights_by_input_feature(weight[None], layer)
        assert torch.equal(family.weights_from_feature_rows(rows, weight, layer)[0], weight)
        assert rows.shape[1] == layer.groups
        assert rows.shape[1] * rows.shape[3] == layer.input_shape[0]


def test_a_matrix_of_another_size_is_refused() -> None:
    ctx = Context(mlp().problem())
    with pytest.raises(InputError, match="4 × 4"):
        input_changes.robustness_to(ctx, layers_of(ctx)["0"], torch.eye(3), 0.1)


def test_norm_lemma() -> None:
    """‖A‖₂ ≤ 1 gives ‖wA‖_F ≤ ‖w‖_F, and the parametrisation by C reaches every wA."""
    ctx = Context(every_kind().problem())
    for layer in ctx.network:
        acting, weight = family.Acting(ctx, layer), ctx.params[layer.weight]
        groups, d, _ = acting.right.shape
        for seed in range(5):
            A = normal(groups, d, d, seed=seed)
            A = A / torch.linalg.matrix_norm(A, 2)[:, None, None]
            moved = input_changes.times_features(weight, A, layer)
            assert moved.norm() <= weight.norm() * (1 + 1e-12)
            assert torch.allclose(acting.moves((acting.right.mT @ A)[None])[0], moved, atol=1e-12)
        assert bool((acting.left.diagonal(dim1=-2, dim2=-1) > 0).all()), "factors that depend on the device"


def softmax_minimum() -> Tiny:
    """Softmax regression on labels that overlap, polished by Newton steps to the minimum."""
    x, y = normal(60, 3, seed=4), torch.randint(0, 3, (60,), generator=torch.Generator().manual_seed(5))
    tiny = Tiny("softmax minimum", nn.Sequential(nn.Linear(3, 3)).double().eval(), x, y, ("0",))
    for parameter in tiny.model.parameters():
        parameter.data.zero_()  # a shift common to all classes changes no output, but it would change κ
    for _ in range(12):
        dense = Dense(tiny)
        names = list(dense.params)
        gradient = torch.autograd.functional.jacobian(
            lambda v, d=dense: d.loss_of(v, list(d.params)), dense.vector(names)
        )
        moved = dense.vector(names) - torch.linalg.pinv(dense.hessian, rtol=1e-10) @ gradient
        with torch.no_grad():
            nn.utils.vector_to_parameters(moved, tiny.model.parameters())
    return tiny


@pytest.mark.parametrize("delta", [0.3, 0.1, 0.01, 1e-3])
def test_the_bound_at_a_critical_point(delta: float) -> None:
    """max F ≤ (δ²/2) κ + O(δ³): with a zero gradient the upper end is the paper's."""
    tiny = softmax_minimum()
    table = fs.measure(
        tiny.problem(),
        ["feature_robustness", "kappa", "gradient_norm"],
        options={"feature_robustness": {"delta": delta}},
    )
    assert table["gradient_norm"] < 1e-13
    row = table.to_frame().query("measure == 'feature_robustness'").iloc[0]
    kappa = table.layer("kappa")["0"]
    assert row["high"] == pytest.approx(delta**2 / 2 * kappa, rel=1e-6)
    assert 0.5 * delta**2 / 2 * kappa < row["value"] <= delta**2 / 2 * kappa * (1 + delta)
    assert row["low"] == row["value"]
    assert not row["exact"]


def test_away_from_a_critical_point_the_gradient_term_is_part_of_the_upper_end() -> None:
    """Squared error of the last layer is quadratic: the upper end holds without any O(δ³), and κ alone does not."""
    tiny = regression()
    for delta in (0.01, 0.1, 1.0):
        table = fs.measure(
            tiny.problem(), ["feature_robustness", "kappa"], options={"feature_robustness": {"delta": delta}}
        )
        row = table.to_frame().query("measure == 'feature_robustness' and layer == '2'").iloc[0]
        assert row["value"] <= row["high"]
        assert "gradient" in row["reason"]
    assert (
        fs.measure(tiny.problem(), "feature_robustness", options={"feature_robustness": {"delta": 0.01}}).layer(
            "feature_robustness"
        )["2"]
        > 0.01**2 / 2 * table.layer("kappa")["2"]
    )


@pytest.mark.parametrize("seed", range(5))
def test_two_features_by_brute_force(seed: int) -> None:
    """The loss of a linear layer is convex in A, so the maximum is an orthogonal matrix: a rotation or a reflection."""
    x, y = normal(20, 2, seed=8), torch.randint(0, 3, (20,), generator=torch.Generator().manual_seed(9))
    tiny = Tiny("plane", nn.Sequential(nn.Linear(2, 3)).double().eval(), x, y, ("0",))
    tiny.model[0].weight.data, tiny.model[0].bias.data = normal(3, 2, seed=10), normal(3, seed=seed)
    ctx = Context(tiny.problem())
    layer, highest = layers_of(ctx)["0"], -math.inf
    for angle in torch.linspace(0, 2 * math.pi, 361).tolist():
        c, s = math.cos(angle), math.sin(angle)
        for A in ([[c, -s], [s, c]], [[c, s], [s, -c]]):
            highest = max(highest, input_changes.robustness_to(ctx, layer, torch.tensor(A, dtype=torch.float64), 0.5))
    found = fs.measure(tiny.problem(), "feature_robustness", options={"feature_robustness": {"delta": 0.5}})
    assert found.layer("feature_robustness")["0"] == pytest.approx(highest, rel=1e-3)
    assert found.layer("feature_robustness")["0"] >= highest * (1 - 1e-9)  # an ascent, against a fine grid


def test_random_matrices_average_to_relative_flatness() -> None:
    """E vec(wA)ᵀH vec(wA) = Σ ⟨w_s, w_s'⟩ Tr H_ss' / d for orthogonal A; exact where the loss is quadratic."""
    tiny = regression()
    options = {"feature_robustness": {"kind": "random", "delta": 0.2, "draws": 400}}
    table = fs.measure(tiny.problem(), ["feature_robustness", "relative_flatness"], options=options)
    exact = 0.2**2 / 2 * table.layer("relative_flatness")["2"] / 5
    stderr = table.stderr("feature_robustness", layer="2")
    assert abs(table.layer("feature_robustness")["2"] - exact) <= 4.5 * stderr
    assert 0 < stderr < 0.1 * exact


def test_random_matrices_average_to_noise_on_the_features() -> None:
    """Appendix D.1: noise on each sample's own features, uniform on the sphere of their norm, has the same mean."""
    tiny, generator, losses = mlp(), torch.Generator().manual_seed(6), []

    def noise(features: Tensor) -> Tensor:
        drawn = torch.randn(features.shape, generator=generator, dtype=torch.float64)
        return 0.5 * drawn / drawn.norm(dim=1, keepdim=True) * features.norm(dim=1, keepdim=True)

    for _ in range(1500):
        losses.append(loss_with_changed_features(tiny, "2", noise))
    rises = torch.tensor(losses, dtype=torch.float64) - float(Dense(tiny).loss())
    options = {"feature_robustness": {"kind": "random", "delta": 0.5, "draws": 3000}}
    table = fs.measure(tiny.problem(), "feature_robustness", options=options)
    spread = math.hypot(float(rises.std()) / math.sqrt(len(rises)), table.stderr("feature_robustness", layer="2"))
    assert abs(table.layer("feature_robustness")["2"] - float(rises.mean())) <= 4 * spread


def test_smallest_matrix_that_sends_one_feature_to_another() -> None:
    x, z = normal(5, seed=1), normal(5, seed=2)
    A = input_changes.matrix_sending(x, z)
    assert torch.allclose(A @ x, z, rtol=1e-12)
    assert float(torch.linalg.matrix_norm(A, 2)) == pytest.approx(float(z.norm() / x.norm()), rel=1e-12)
    assert torch.allclose(A, torch.outer(z, x) / x.square().sum(), rtol=1e-12)


@pytest.mark.parametrize("gap", [0.1, 0.01])
def test_separating_near_features_needs_a_large_matrix(gap: float) -> None:
    sources = torch.tensor([[1.0, 1.0], [0.0, gap]], dtype=torch.float64)
    A = input_changes.matrix_sending(sources, torch.eye(2, dtype=torch.float64))
    assert torch.allclose(A, torch.tensor([[1.0, -1 / gap], [0.0, 1 / gap]], dtype=torch.float64), rtol=1e-10)
    assert torch.linalg.matrix_norm(A, 2) >= math.sqrt(2) / gap


@pytest.mark.parametrize("shape", [(7,), (5, 4)])
def test_changed_kernels_are_changed_inputs(shape: tuple[int, ...]) -> None:
    """Appendix D.3 as corrected: W(x + δVW_Ax) = (w + δwA) * x, with W of full row rank and WV = I."""
    convolve = (torch.conv1d, torch.conv2d)[len(shape) - 1]
    weight, x = normal(2, 3, *[2] * len(shape), seed=11), normal(3, *shape, seed=12)
    layer = Layer("w", "w", None, "conv", 1, x.shape, (), {"groups": 1})
    changed = input_changes.times_features(weight, normal(3, 3, seed=13), layer)
    change = input_changes.equivalent_input_change(weight, changed, x, 0.1)
    assert torch.allclose(convolve((x + change)[None], weight), convolve(x[None], weight + 0.1 * changed), rtol=1e-10)
    W = input_changes.convolution_matrix(weight, shape)
    assert W.shape[0] < W.shape[1]
    assert torch.allclose(W @ x.flatten(), convolve(x[None], weight).flatten(), rtol=1e-12)
    assert torch.allclose(W @ (W.T @ torch.linalg.inv(W @ W.T)), torch.eye(len(W), dtype=W.dtype), atol=1e-10)
    with pytest.raises(InputError):
        input_changes.equivalent_input_change(normal(9, 3, *[1] * len(shape)), normal(9, 3, *[1] * len(shape)), x, 0.1)


def test_a_layer_without_effect_has_none() -> None:
    tiny = mlp()
    tiny.model[4].weight.data.zero_()
    values = fs.measure(tiny.problem(), "feature_robustness").layer("feature_robustness")
    assert values == {"0": 0.0, "2": 0.0, "4": 0.0}


@pytest.mark.parametrize("options", [{"kind": "best"}, {"delta": 0.0}, {"draws": 3}, {"restarts": 0}])
def test_options_without_a_meaning_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        fs.measure(mlp().problem(), "feature_robustness", options={"feature_robustness": options})


def _leaves_the_ball(ctx: Context) -> dict[str, registry.Value]:
    """Wrong: lets A grow to norm 1.05."""
    return family.feature_robustness(ctx, delta=0.105)


def _stops_early(ctx: Context) -> dict[str, registry.Value]:
    """Wrong: gives up below the maximum."""
    found = family.feature_robustness(ctx)
    return {name: replace(value, value=0.97 * value.value) for name, value in found.items()}


@pytest.mark.parametrize("wrong", [_leaves_the_ball, _stops_early])
def test_the_contract_rejects_a_wrong_search(wrong: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    entry = registry.declarations()["feature_robustness"]
    checks.equals_its_twin(entry, Dense(binary()))
    monkeypatch.setitem(registry._REGISTRY, entry.name, replace(entry, function=wrong))
    with pytest.raises(AssertionError):
        checks.equals_its_twin(registry.declarations()[entry.name], Dense(binary()))
