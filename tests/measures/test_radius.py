"""The flatness radius: closed forms, bumps, caps, masks, and answers from memory against the network itself."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from networks import batchnorm_conv, lenet_like, mlp, one_dimensional, residual, sequences
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.inputs.loading import load
from flatscope.limits import STANDARD
from flatscope.measures.losses_along_lines import (
    LossesAlongLines,
    layers_linear_in_radius,
    lines_at_once,
    moved_parameters,
)
from flatscope.measures.radius import drawn_radii, unit_normals
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.label_noise import random_labels
from flatscope.training.loop import train
from flatscope.training.models import build


class Point(nn.Module):
    """A network whose output is its weights: any function of them can be the loss."""

    def __init__(self, weights: Tensor) -> None:
        super().__init__()
        self.w = nn.Parameter(weights)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :1] * self.w


def flatness_radii(ctx: fs.Context, **options: Any) -> Tensor:
    return drawn_radii(ctx, **options).samples[:, 0]


def landscape(function, dimension: int = 6, **more) -> fs.Context:  # type: ignore[no-untyped-def]
    """A problem whose loss is `function` of the weights, at the weights 0."""
    model = Point(torch.zeros(dimension, dtype=torch.float64)).eval()
    data = (torch.ones(3, 1, dtype=torch.float64), torch.zeros(3, dtype=torch.float64))
    return fs.Context(fs.Problem(model, train=data, loss=lambda outputs, _: function(outputs), **more))


H = torch.diag(torch.tensor([0.5, 1.0, 2.0, 4.0, 8.0, 16.0], dtype=torch.float64))


def quadratic(outputs: Tensor) -> Tensor:
    return ((outputs @ H) * outputs).sum(1) / 2


def test_quadratic_closed_form_and_jensen() -> None:
    ctx, epsilon = landscape(quadratic), 0.05
    radii = flatness_radii(ctx, epsilon=epsilon, directions=200, tolerance=1e-10)
    [drawn] = unit_normals(ctx, ("w",), 200)
    curvature = ((drawn["w"] @ H) * drawn["w"]).sum(1)
    assert (radii * (curvature / (2 * epsilon)).sqrt() - 1).abs().max() < 1e-8
    assert radii.mean() >= math.sqrt(2 * epsilon * 6 / float(H.trace()))
    assert (drawn["w"].norm(dim=1) - 1).abs().max() < 1e-12


def test_a_quadratic_needs_few_evaluations() -> None:
    ctx = landscape(quadratic)
    flatness_radii(ctx, directions=50, tolerance=1e-8)
    assert ctx.passes["forward"] / 50 < 20  # plain bisection alone takes 27 after the radii are doubled


def test_value_spread_and_error_are_those_of_the_directions() -> None:
    ctx = landscape(quadratic)
    radii = flatness_radii(ctx)
    row = fs.measure(ctx.problem, "flatness_radius").to_frame().iloc[0]
    assert row["value"] == pytest.approx(float(radii.mean()), rel=1e-12)
    assert row["stderr"] == pytest.approx(float(radii.std()) / 10, rel=1e-12)
    assert row["high"] - row["value"] == pytest.approx(float(radii.std()), rel=1e-9)
    assert "sd" in row["reason"]


def test_first_crossing_is_not_the_supremum_on_a_periodic_slice() -> None:
    """1 − cos r first differs by 1 − cos(π/6) at π/6, and is back at 2π − π/6, and so on for ever."""
    ctx = landscape(lambda outputs: 1 - outputs.norm(dim=1).cos())
    epsilon = 1 - math.cos(math.pi / 6)
    first = flatness_radii(ctx, epsilon=epsilon, directions=5, tolerance=1e-10)
    assert (first - math.pi / 6).abs().max() < 1e-8
    last = flatness_radii(ctx, epsilon=epsilon, directions=5, kind="sup", limit=10.0, tolerance=1e-10)
    ends = torch.tensor([2 * math.pi * k + s * math.pi / 6 for k in range(3) for s in (1, -1)])
    assert (last > 2 * math.pi - 0.6).all()  # beyond the bump that ends the first crossing
    assert all(float((ends - r).abs().min()) < 1e-8 for r in last)


def test_supremum_of_a_loss_that_only_grows_is_the_first_crossing() -> None:
    ctx = landscape(quadratic)
    first, last = (flatness_radii(ctx, directions=20, kind=kind, tolerance=1e-10) for kind in ("first", "sup"))
    assert torch.allclose(first, last, rtol=1e-9)


def test_directions_that_never_cross_are_counted_and_not_averaged() -> None:
    """The loss depends on the first weight's sign only: half of the directions never leave."""
    ctx = landscape(lambda outputs: outputs[:, 0].clamp(min=0) ** 2)
    radii = flatness_radii(ctx, directions=60, limit=1e4)
    infinite = int(radii.isinf().sum())
    assert 10 < infinite < 50
    row = fs.measure(ctx.problem, "flatness_radius", options={"flatness_radius": {"directions": 60, "limit": 1e4}})
    row = row.to_frame().iloc[0]
    assert row["value"] == pytest.approx(float(radii[radii.isfinite()].mean()))
    assert f"{infinite} of 60 directions never cross" in row["reason"]


def test_a_constant_loss_has_an_infinite_radius() -> None:
    ctx = landscape(lambda outputs: 0 * outputs.sum(1))
    row = fs.measure(ctx.problem, "flatness_radius", options={"flatness_radius": {"directions": 4}}).to_frame().iloc[0]
    assert row["value"] == math.inf
    assert "4 of 4 directions never cross" in row["reason"]


def test_a_loss_that_jumps_at_once_has_radius_zero() -> None:
    ctx = landscape(lambda outputs: (outputs.norm(dim=1) > 0).double() + 0.0 * outputs.sum(1))
    assert (flatness_radii(ctx, directions=4) == 0).all()


def test_a_loss_that_becomes_no_number_is_outside() -> None:
    def loss(outputs: Tensor) -> Tensor:
        return torch.where(outputs.norm(dim=1) > 2, torch.nan, 0.0) + 0.0 * outputs.sum(1)

    assert (flatness_radii(landscape(loss), directions=4, tolerance=1e-9) - 2).abs().max() < 1e-7


def test_a_start_beyond_the_crossing_is_halved() -> None:
    model = Point(torch.full((6,), 1e6, dtype=torch.float64)).eval()
    data = (torch.ones(2, 1, dtype=torch.float64), torch.zeros(2, dtype=torch.float64))
    problem = fs.Problem(model, train=data, loss=lambda outputs, _: (outputs - 1e6).square().sum(1))
    radii = flatness_radii(fs.Context(problem), epsilon=1.0, directions=4, tolerance=1e-8)
    assert (radii - 1).abs().max() < 1e-6


def test_rescaling_moves_the_radius_of_a_layer_by_its_factor() -> None:
    tiny = mlp()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x, factors={"0": 10.0}))
    options = {"layers": ("0",), "directions": 20, "tolerance": 1e-9}
    one, other = (flatness_radii(fs.Context(network.problem()), **options) for network in (tiny, twin))
    weights = flatness_radii(fs.Context(tiny.problem()), **options | {"layers": "0"})
    assert torch.equal(one, weights)
    assert torch.allclose(other, 10 * one, rtol=1e-6)


def test_the_mask_of_the_top_layer_touches_nothing_else() -> None:
    ctx = fs.Context(lenet_like().problem())
    assert moved_parameters(ctx, "top") == ("fc2.weight", "fc2.bias")
    assert moved_parameters(ctx, ("conv1", "fc1")) == ("conv1.weight", "conv1.bias", "fc1.weight", "fc1.bias")
    assert set(moved_parameters(ctx, None)) == set(ctx.trainable)
    ahead = layers_linear_in_radius(ctx, moved=moved_parameters(ctx, "top"))
    assert ahead.is_output
    with pytest.raises(fs.InputError, match="layer: expected a known layer"):
        moved_parameters(ctx, "fc9")
    with pytest.raises(fs.InputError):
        moved_parameters(ctx, 3)


def naive_value(ctx: fs.Context, point: dict[str, Tensor], objective: str) -> float:
    other = ctx.at(point)
    return other.scores().loss if objective == "loss" else other.scores().error


@pytest.mark.parametrize("build", [mlp, lenet_like, residual, sequences, one_dimensional])
@pytest.mark.parametrize("layers", [None, "top"])
@pytest.mark.parametrize("objective", ["loss", "error"])
@pytest.mark.parametrize("copies", [1, 7])  # few samples run on stacked weights, many one after the other
def test_answers_from_memory_are_those_of_the_network(build, layers, objective: str, copies: int) -> None:  # type: ignore[no-untyped-def]
    tiny = build()
    tiny = replace(tiny, x=tiny.x.repeat(copies, *[1] * (tiny.x.ndim - 1)), y=tiny.y.repeat(copies))
    ctx = fs.Context(tiny.problem())
    moved = moved_parameters(ctx, layers)
    [drawn] = unit_normals(ctx, moved, 4)
    radii, which = torch.tensor([0.3, 2.0, 5.0], dtype=torch.float64), torch.tensor([2, 0, 3])
    expected = [
        naive_value(ctx, {n: ctx.params[n] + r * drawn[n][i] for n in moved}, objective)
        for r, i in zip(radii.tolist(), which.tolist(), strict=True)
    ]
    for cached in (True, False):
        lines = LossesAlongLines(ctx, drawn, objective, keep_responses=cached)
        assert lines.keeps_responses == cached
        assert torch.allclose(lines.values(radii, which), torch.tensor(expected, dtype=torch.float64), atol=1e-12)


class Inplace(nn.Module):
    """The first layer's output is overwritten, and so is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = x * 2
        z = self.a(x).relu_()
        x.zero_()
        return self.b(z)


class Twice(nn.Module):
    """The first weight is used once more, in a way that no layer call shows."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.a(x)) @ self.a.weight


@pytest.mark.parametrize(("model", "cached"), [(Inplace(), True), (Twice(), False)])
def test_unusual_networks_are_evaluated_right(model: nn.Module, cached: bool) -> None:
    model = model.double().eval()
    x = torch.randn(9, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    ctx = fs.Context(fs.Problem(model, train=(x, torch.arange(9) % 3)))
    [drawn] = unit_normals(ctx, tuple(ctx.trainable), 2)
    lines = LossesAlongLines(ctx, drawn)
    assert lines.keeps_responses == cached
    point = {n: ctx.params[n] + 1.5 * v[1] for n, v in drawn.items()}
    found = lines.values(torch.tensor([1.5], dtype=torch.float64), torch.tensor([1]))
    assert float(found) == pytest.approx(ctx.at(point).scores().loss, rel=1e-12)


def test_a_shuffling_loader_gives_the_same_radii() -> None:
    tiny = mlp()
    generator = torch.Generator().manual_seed(1)
    loader = DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=4, shuffle=True, generator=generator)
    one, other = (
        fs.measure(p, "flatness_radius")["flatness_radius"] for p in (tiny.problem(), tiny.problem(train=loader))
    )
    assert one == pytest.approx(other, rel=1e-8)  # sums of float64 in another order, through a search for a root


def test_directions_do_not_depend_on_how_many_fit_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    ctx = fs.Context(mlp().problem())
    whole = flatness_radii(ctx, directions=10)
    assert lines_at_once(ctx, tuple(ctx.trainable)) > 10
    monkeypatch.setattr("flatscope.measures.radius.lines_at_once", lambda *_: 3)
    assert torch.allclose(flatness_radii(ctx, directions=10), whole, rtol=1e-9)
    monkeypatch.setitem(vars(STANDARD), "stacked_bytes", 1)  # nothing is kept
    monkeypatch.setitem(vars(STANDARD), "kept_data", 1)
    assert torch.allclose(flatness_radii(ctx, directions=10), whole, rtol=1e-9)


def test_batchnorm_is_folded_first() -> None:
    row = fs.measure(batchnorm_conv().problem(), "flatness_radius").to_frame().iloc[0]
    assert row["folded"]


def test_error_needs_classes_and_changes_at_the_first_label_that_flips() -> None:
    x = torch.tensor([[1.0, 0.0], [0.0, 1.0]], dtype=torch.float64)
    model = nn.Linear(2, 2, bias=False).double().eval()
    model.weight.data = torch.eye(2, dtype=torch.float64)
    ctx = fs.Context(fs.Problem(model, train=(x, torch.tensor([0, 1]))))
    radii = flatness_radii(ctx, objective="error", directions=30, tolerance=1e-10)
    [drawn] = unit_normals(ctx, ("weight",), 30)
    D = drawn["weight"]
    slopes = torch.stack([D[:, 1, 0] - D[:, 0, 0], D[:, 0, 1] - D[:, 1, 1]])  # both margins are 1 − r·slope
    expected = 1 / slopes.amax(0)
    crossing = expected > 0
    assert crossing.any()
    assert not crossing.all()
    assert (radii[crossing] / expected[crossing] - 1).abs().max() < 1e-8
    assert radii[~crossing].isinf().all()
    regression = replace(mlp(), y=torch.zeros(11, 3, dtype=torch.float64), loss="mse", xt=None, yt=None).problem()
    row = (
        fs.measure(regression, "flatness_radius", options={"flatness_radius": {"objective": "error"}})
        .to_frame()
        .iloc[0]
    )
    assert math.isnan(row["value"])
    assert "class labels" in row["reason"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"epsilon": 0.0}, "a positive number"),
        ({"limit": math.inf}, "a positive number"),
        ({"tolerance": -1.0}, "a positive number"),
        ({"directions": 1}, "directions: .* at least 2"),
        ({"kind": "lst"}, "last|first"),
        ({"objective": "accuracy"}, "objective"),
        ({"layers": "nowhere"}, "layer"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, object], words: str) -> None:
    with pytest.raises(fs.InputError, match=words):
        fs.measure(mlp().problem(), "flatness_radius", options={"flatness_radius": options})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_gpu_agrees_within_the_standard_error() -> None:
    tiny = mlp()
    cpu, gpu = (fs.measure(tiny.problem(device=d), "flatness_radius") for d in ("cpu", "cuda"))
    spread = math.hypot(cpu.stderr("flatness_radius"), gpu.stderr("flatness_radius"))
    assert abs(cpu["flatness_radius"] - gpu["flatness_radius"]) < 4.5 * spread


@pytest.mark.long
def test_true_labels_lie_in_a_wider_minimum_than_random_ones() -> None:
    """Table 1 of Zhang et al. 2017 in small: images of digits, both objectives, all layers."""
    x, true = load("digits", train_size=100, test_size=0, seed=0, standardize=False).train
    radii = {}
    for name, y in (("true", true), ("random", random_labels(true, 10, 0))):
        model = build("two_layer", hidden=48, input_shape=x.shape[1:], seed=0)
        config = TrainConfig(lr=0.1, momentum=0.9, batch_size=20, epochs=1500, stop_loss=1e-3, evaluate_every=5)
        assert train(model, (x, y), config, show_progress=False).stopped_by == "loss"
        ctx = fs.Context(fs.Problem(model, train=(x, y)))
        for objective in ("loss", "error"):
            radii[name, objective] = flatness_radii(ctx, objective=objective, directions=40, tolerance=1e-3)
    for objective in ("loss", "error"):
        wide, narrow = radii["true", objective], radii["random", objective]
        assert wide.mean() - narrow.mean() > 4.5 * math.hypot(float(wide.std()), float(narrow.std())) / math.sqrt(40)
