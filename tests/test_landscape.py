"""Landscapes against a loop that sets one network's weights at a time, and what must and must not change a picture."""

from __future__ import annotations

import copy
import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path
from typing import Any

import networks
import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.errors import InputError, NumericalWarning, UnknownNameError
from flatscope.landscape import Surface, directions, evaluation, making
from flatscope.landscape.charts import PathPlane
from flatscope.landscape.evaluation import GridLosses

TINY = [networks.mlp, networks.lenet_like, networks.batchnorm_conv, networks.residual]
every_network = pytest.mark.parametrize("build", TINY, ids=lambda build: build.__name__)


def folded(tiny: networks.Tiny) -> nn.Module:
    return fs.fold_batchnorm(tiny.model, tiny.x[:2])


def loss_and_error(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    """One forward pass of a module, as anyone would write it."""
    with torch.no_grad():
        outputs = model(x)
    return float(nn.functional.cross_entropy(outputs, y)), float((outputs.argmax(1) != y).double().mean())


def naive_plane(model: nn.Module, first: Any, second: Any, axis: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Copy the module, write the weights, run it: one grid point after the other."""
    found = torch.zeros(2, len(axis), len(axis), dtype=torch.float64)
    for i, s in enumerate(axis):
        for j, t in enumerate(axis):
            moved = copy.deepcopy(model)
            with torch.no_grad():
                for name, value in moved.named_parameters():
                    value += float(s) * first[name] + float(t) * second[name]
            found[0, i, j], found[1, i, j] = loss_and_error(moved, x, y)
    return found[0], found[1]


def drawn(tiny: networks.Tiny, kind: str, seed: int = 0) -> tuple[fs.Context, list[dict[str, Tensor]]]:
    """The directions that a landscape of this seed takes."""
    ctx = fs.Context(tiny.with_model(folded(tiny)).problem(initial=None), seed=seed)
    if kind == "filter":
        return ctx, directions.filter_normalised(ctx, 2)
    size = sum(value.numel() for value in ctx.trainable.values())
    make = directions.gaussian if kind == "gaussian" else directions.hessian
    return ctx, make(ctx, 2, 0.05 * math.sqrt(size))


@every_network
@pytest.mark.parametrize("kind", ["gaussian", "filter", "hessian"])
def test_plane_is_what_a_loop_over_copies_gives(build: Any, kind: str) -> None:
    tiny = build()
    surface = fs.landscape(tiny.problem(), directions=kind, grid=5, seed=3)
    _, (first, second) = drawn(tiny, kind, seed=3)
    loss, error = naive_plane(folded(tiny), first, second, surface.axes[0], tiny.x, tiny.y)
    torch.testing.assert_close(surface.loss, loss, rtol=1e-11, atol=1e-12)
    assert surface.error is not None
    torch.testing.assert_close(surface.error, error, rtol=0, atol=1e-12)
    assert float(surface.loss[2, 2]) == surface.centre
    assert surface.centre == pytest.approx(fs.Context(tiny.problem()).scores().loss, rel=1e-12)
    assert not surface.poles.any()


@pytest.mark.parametrize("n", [30, 150])
@pytest.mark.parametrize("stacked", [True, False])
def test_ways_of_evaluating_agree(monkeypatch: pytest.MonkeyPatch, n: int, stacked: bool) -> None:
    tiny = networks.lenet_like()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(n, 1, 6, 6, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (n,), generator=generator)
    monkeypatch.setattr(evaluation, "FEW_SAMPLES", 1000 if stacked else 0)
    streamed = fs.Problem(tiny.model, train=(x, y), batch_size=7)
    surface = fs.landscape(streamed, grid=5, directions="filter")
    monkeypatch.setattr(evaluation, "KEPT_BYTES", 0)  # nothing kept from row to row
    again = fs.landscape(fs.Problem(tiny.model, train=(x, y)), grid=5, directions="filter")
    torch.testing.assert_close(surface.loss, again.loss, rtol=1e-12, atol=1e-13)
    _, (first, second) = drawn(tiny, "filter")
    loss, _ = naive_plane(tiny.model, first, second, surface.axes[0], x, y)
    torch.testing.assert_close(surface.loss, loss, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("space", "layers"), [("weights", {"conv1.weight"}), ("psi", {"conv1.weight"})])
def test_first_layer_is_not_run_again_at_every_point(space: str, layers: set[str]) -> None:
    ctx = fs.Context(networks.lenet_like().problem())
    chart, _ = making._chart(ctx, ctx.problem.model, space, "gaussian", (), 2, 0.01, True, "max_product", None)
    assert set(GridLosses(ctx, chart, "train")._layers) == layers


class TwoReaders(nn.Module):
    """The input goes to two layers, one weight is used twice, and activations work in place."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right, self.twice, self.head = (nn.Linear(*s) for s in ((4, 5), (4, 5), (5, 5), (5, 3)))
        self.relu = nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.relu(self.left(x)) + self.relu(self.right(x))
        hidden = self.relu(self.twice(hidden))
        return self.head(self.relu(self.twice(hidden)) + torch.tanh(x @ self.left.weight.T))


@pytest.mark.parametrize("space", ["weights", "psi"])
def test_shared_weights_and_two_layers_on_the_input(space: str) -> None:
    tiny = networks._built("two-readers", TwoReaders(), (4,), 3, ())
    ctx = fs.Context(tiny.problem(initial=None))
    if space == "weights":
        _, (first, second) = drawn(tiny, "gaussian")
        surface = fs.landscape(ctx.problem, grid=3)
        expected, _ = naive_plane(tiny.model, first, second, surface.axes[0], tiny.x, tiny.y)
        torch.testing.assert_close(surface.loss, expected, rtol=1e-11, atol=1e-12)
    else:
        surface = fs.landscape(ctx.problem, space, grid=3, relative=True, noise=0.01)
        assert surface.centre == pytest.approx(ctx.scores().loss, rel=1e-12)


@pytest.mark.parametrize("build", [networks.attention, networks.sequences, networks.smooth], ids=lambda b: b.__name__)
@pytest.mark.parametrize("space", ["weights", "psi"])
def test_networks_with_walls_and_sequences(build: Any, space: str) -> None:
    tiny = build()
    surface = fs.landscape(tiny.problem(), space, grid=3, relative=True)
    assert surface.centre == pytest.approx(fs.Context(tiny.problem()).scores().loss, rel=1e-12)
    assert float(surface.loss.std()) > 0
    if space == "weights":
        ctx = fs.Context(tiny.problem())
        length = 0.05 * math.sqrt(sum(float(v.square().sum()) for v in ctx.trainable.values()))
        first, second = directions.gaussian(ctx, 2, length)
        expected, _ = naive_plane(tiny.model, first, second, surface.axes[0], tiny.x, tiny.y)
        torch.testing.assert_close(surface.loss, expected, rtol=1e-10, atol=1e-12)


def test_shuffling_loader_and_frozen_weights() -> None:
    tiny = networks.mlp()
    loader = DataLoader(TensorDataset(tiny.x, tiny.y), batch_size=4, shuffle=True)
    shuffled = fs.landscape(fs.Problem(tiny.model, train=loader), grid=3)
    torch.testing.assert_close(shuffled.loss, fs.landscape(tiny.problem(), grid=3).loss, rtol=1e-12, atol=1e-13)
    tiny.model[0].weight.requires_grad_(False)  # type: ignore[index]
    frozen = fs.Problem(tiny.model, train=(tiny.x, tiny.y))
    assert fs.landscape(frozen, grid=3).meta["parameters"] == shuffled.meta["parameters"] - 24
    with pytest.raises(fs.FlatscopeError, match="trainable"):
        fs.landscape(frozen, "psi", grid=3)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("build", TINY, ids=lambda build: build.__name__)
@pytest.mark.parametrize("space", ["weights", "psi"])
def test_replayed_passes_on_a_gpu_are_those_of_the_cpu(build: Any, space: str) -> None:
    tiny = build()
    options: dict[str, Any] = {"grid": 5, "relative": True}
    here = fs.landscape(tiny.problem(), space, **options)
    there = fs.landscape(tiny.problem(device="cuda"), space, **options)
    torch.testing.assert_close(here.loss, there.loss, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(here.error, there.error, rtol=0, atol=1e-12)


# Directions


@every_network
def test_gaussian_directions_are_orthogonal_of_the_stated_length_and_not_one_sided(build: Any) -> None:
    tiny = build()
    ctx, pair = drawn(tiny, "gaussian")
    first, second = (torch.cat([v.flatten() for v in direction.values()]) for direction in pair)
    m = len(first)
    assert float(first.norm()) == pytest.approx(0.05 * math.sqrt(m), rel=1e-12)
    assert float(second.norm()) == pytest.approx(0.05 * math.sqrt(m), rel=1e-12)
    assert abs(float(first @ second)) < 1e-12
    assert abs(float(first.mean() / first.std())) < 5 / math.sqrt(m)
    surface = fs.landscape(tiny.problem(), grid=3, relative=True)
    weights = math.sqrt(sum(float(v.square().sum()) for v in ctx.trainable.values()))
    assert surface.meta["lengths"] == pytest.approx([0.05 * weights] * 2, rel=1e-12)


def test_filter_normalisation_by_hand() -> None:
    tiny = networks.batchnorm_conv()
    ctx, pair = drawn(tiny, "filter")
    weights = {name: value.detach() for name, value in folded(tiny).named_parameters()}
    for direction in pair:
        for layer in ("0", "3", "7"):
            for unit in range(len(weights[f"{layer}.bias"])):
                moved = [direction[f"{layer}.weight"][unit].flatten(), direction[f"{layer}.bias"][unit : unit + 1]]
                own = [weights[f"{layer}.weight"][unit].flatten(), weights[f"{layer}.bias"][unit : unit + 1]]
                assert float(torch.cat(moved).norm()) == pytest.approx(float(torch.cat(own).norm()), rel=1e-12)
    assert abs(directions.cosine(*pair)) < 1e-12
    assert ctx.params.keys() == weights.keys()


def test_filters_of_transposed_convolutions_and_of_what_is_no_layer() -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.head = nn.ConvTranspose1d(2, 3, 2), nn.Linear(12, 2)
            self.slope = nn.Parameter(torch.rand(3, 1))
            self.shift = nn.Parameter(torch.rand(12))

        def forward(self, x: Tensor) -> Tensor:
            return self.head((self.up(x) * self.slope).flatten(1) + self.shift)

    model = Odd().double().eval()
    x = torch.randn(5, 2, 3, dtype=torch.float64)
    ctx = fs.Context(fs.Problem(model, train=(x, torch.tensor([0, 1, 0, 1, 1]))))
    (direction,) = directions.filter_normalised(ctx, 1)
    joined = torch.cat([direction["up.weight"].movedim(1, 0).flatten(1), direction["up.bias"][:, None]], 1)
    own = torch.cat([model.up.weight.movedim(1, 0).flatten(1), model.up.bias[:, None]], 1)
    torch.testing.assert_close(joined.norm(dim=1), own.norm(dim=1).detach())
    torch.testing.assert_close(direction["slope"].abs(), model.slope.detach().abs())
    assert float(direction["shift"].norm()) == pytest.approx(float(model.shift.detach().norm()))


def test_hessian_directions_are_the_two_sharpest() -> None:
    tiny = networks.mlp()
    ctx, pair = drawn(tiny, "hessian")
    matrix = fs.Context(tiny.problem())
    from flatscope.curvature.operators import Hessian

    dense = Hessian(matrix) @ torch.eye(len(torch.cat([v.flatten() for v in ctx.trainable.values()])))
    values, vectors = torch.linalg.eigh(dense.double())
    for place, direction in zip((-1, -2), pair, strict=True):
        vector = torch.cat([v.flatten() for v in direction.values()])
        assert abs(float(vector @ vectors[:, place]) / float(vector.norm())) == pytest.approx(1, abs=1e-9)
    surface = fs.landscape(tiny.problem(), directions="hessian", grid=3)
    assert surface.meta["eigenvalues"] == pytest.approx([float(values[-1]), float(values[-2])], rel=1e-6)


# Lines to other networks


@every_network
@pytest.mark.parametrize("as_module", [True, False])
def test_line_to_another_network_ends_at_its_loss(build: Any, as_module: bool) -> None:
    tiny = build()
    other = copy.deepcopy(tiny.model)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for value in other.parameters():
            value += 0.3 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        for module in other.modules():
            if isinstance(module, nn.modules.batchnorm._BatchNorm):
                module.running_mean += 0.2
    target = other if as_module else other.state_dict()
    surface = fs.landscape(tiny.problem(), directions=target, dimensions=1, grid=6)
    assert surface.axes[0][[0, -1]].tolist() == [0.0, 1.0]
    ends = [loss_and_error(tiny.model, tiny.x, tiny.y), loss_and_error(other, tiny.x, tiny.y)]
    assert surface.error is not None
    for place, (loss, error) in zip((0, -1), ends, strict=True):
        assert float(surface.loss[place]) == pytest.approx(loss, rel=1e-11)
        assert float(surface.error[place]) == pytest.approx(error, abs=1e-12)
    plane = fs.landscape(tiny.problem(), directions=target, grid=3)
    assert float(plane.loss[-1, 1]) == pytest.approx(ends[1][0], rel=1e-11)
    assert abs(plane.meta["cosine"]) < 1e-12
    assert plane.meta["lengths"][0] == pytest.approx(plane.meta["lengths"][1], rel=1e-12)


def test_other_networks_that_do_not_fit() -> None:
    problem = networks.mlp().problem()
    with pytest.raises(InputError, match="state dict"):
        fs.landscape(problem, directions={"0.weight": torch.ones(6, 4)})
    with pytest.raises(InputError, match=r"0\.weight"):
        fs.landscape(problem, directions=nn.Sequential(nn.Linear(2, 2)))
    model = networks.mlp().model
    with pytest.raises(InputError, match="at most 1"):
        fs.landscape(problem, directions=(model, model), dimensions=1)


# Path space


@every_network
@pytest.mark.parametrize("relative", [True, False])
@pytest.mark.parametrize("rule", ["max_product", "cyclic"])
def test_path_space_has_one_picture_for_every_way_of_writing_a_function(build: Any, relative: bool, rule: str) -> None:
    tiny = build()
    twin = tiny.with_model(fs.rescale(tiny.model, tiny.x[:2], by="unit", seed=4)).problem(initial=None)
    problem = tiny.problem(initial=None)
    options = {"grid": 7, "noise": 0.05 if relative else 0.005, "relative": relative, "rule": rule}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", NumericalWarning)
        here, there = (fs.landscape(p, "psi", **options) for p in (problem, twin))
    assert torch.equal(here.poles, there.poles)
    free = ~here.poles
    assert free.sum() > 3
    torch.testing.assert_close(here.loss[free], there.loss[free], rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(here.error, there.error, rtol=0, atol=0, equal_nan=True)
    assert here.centre == pytest.approx(fs.Context(problem).scores().loss, rel=1e-12)
    in_weights = [fs.landscape(p, "weights", grid=7).loss for p in (problem, twin)]
    assert float((in_weights[0] - in_weights[1]).abs().max()) > 1e-3


def test_path_space_in_float32_stands_still_to_rounding() -> None:
    tiny = networks.lenet_like()
    options: dict[str, Any] = {"space": "psi", "grid": 5, "relative": True, "noise": 0.05}
    twin = fs.rescale(tiny.model, tiny.x[:2], by="unit", seed=1)
    pictures = [
        fs.landscape(fs.Problem(model.float(), train=(tiny.x.float(), tiny.y)), **options).loss
        for model in (copy.deepcopy(tiny.model), twin)
    ]
    torch.testing.assert_close(pictures[0], pictures[1], rtol=2e-6, atol=2e-7)


@every_network
def test_path_plane_is_what_the_exact_inverse_gives_one_point_at_a_time(build: Any) -> None:
    tiny = build()
    surface = fs.landscape(tiny.problem(), "psi", grid=3, seed=2, noise=0.001)
    paths = fs.BasisPaths(tiny.model, tiny.x[:2])
    values = paths.values()
    ctx = fs.Context(tiny.with_model(folded(tiny)).problem(initial=None), seed=2)
    xi, eta = directions.orthogonal_normals(ctx.generator("landscape"), paths.count, 2)
    assert float(xi @ eta) == pytest.approx(0, abs=1e-10)
    assert surface.meta["lengths"] == pytest.approx([0.001 * math.sqrt(paths.count)] * 2, rel=1e-12)
    for i, s in enumerate(surface.axes[0]):
        for j, t in enumerate(surface.axes[1]):
            there = paths.to_model(values + 0.001 * (float(s) * xi + float(t) * eta))
            assert float(surface.loss[i, j]) == pytest.approx(loss_and_error(there, tiny.x, tiny.y)[0], rel=1e-10)


def test_poles_are_marked_and_never_painted_over() -> None:
    """One hidden unit with in·out = 0.5·2 = 1: its pole is where ξ moves that value to 0, and nowhere else."""
    model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU(), nn.Linear(1, 2, bias=False)).double()
    with torch.no_grad():
        model[0].weight.fill_(0.5)
        model[2].weight.copy_(torch.tensor([[2.0], [-1.0]]))
    problem = fs.Problem(model.eval(), train=(torch.ones(3, 1).double(), torch.tensor([0, 1, 0])))
    with pytest.warns(NumericalWarning, match="pole"):
        surface = fs.landscape(problem, "psi", dimensions=1, grid=101, noise=1.0, span=20.0)
    ctx = fs.Context(problem)
    (xi,) = directions.orthogonal_normals(ctx.generator("landscape"), 2, 1)
    own_path = 1 + surface.axes[0] * float(xi[0])  # values: the unit's own path, then the other output
    assert torch.equal(surface.poles, own_path <= 0)
    assert 0 < int(surface.poles.sum()) < 101
    assert torch.equal(surface.loss.isnan(), surface.poles)
    assert surface.error is not None
    assert torch.equal(surface.error.isnan(), surface.poles)
    enough = surface.meta["largest_noise"]
    clean = fs.landscape(problem, "psi", dimensions=1, grid=101, noise=0.999 * enough, span=20.0)
    assert not clean.poles.any()
    with pytest.warns(NumericalWarning, match="pole"):
        assert fs.landscape(problem, "psi", dimensions=1, grid=101, noise=1.001 * enough, span=20.0).poles.any()


def test_weights_that_are_not_finite_are_poles(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = networks.mlp().problem()
    plain = PathPlane.weights

    def overflowing(self: PathPlane, points: Tensor) -> dict[str, Tensor]:
        found = plain(self, points)
        found["0.weight"] = torch.where((points[:, -1] == 1)[:, None, None], torch.inf, found["0.weight"])
        return found

    monkeypatch.setattr(PathPlane, "weights", overflowing)
    with pytest.warns(NumericalWarning, match="5 of 25"):
        surface = fs.landscape(problem, "psi", grid=5, relative=True)
    assert surface.poles[:, -1].all()
    assert not surface.poles[:, :-1].any()
    assert surface.loss[:, -1].isnan().all()


def test_deep_network_whose_path_values_are_too_small_for_floats() -> None:
    layers: list[nn.Module] = []
    for _ in range(40):
        layers += [nn.Linear(4, 4), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(4, 2)).eval()
    with torch.no_grad():
        for i, value in enumerate(model.parameters()):
            drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(i))
            value.copy_(1e-2 * drawn.abs())
    problem = fs.Problem(model, train=(torch.rand(9, 4), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1, 1])))
    surface = fs.landscape(problem, "psi", grid=3, relative=True)
    assert surface.loss.isfinite().all()
    assert surface.meta["path_values"]["min"] < 1e-60


# Reproducible, resumable, harmless


def test_seed_decides_and_nothing_else_is_touched() -> None:
    tiny = networks.batchnorm_conv()
    problem = tiny.problem()
    before = {name: value.clone() for name, value in tiny.model.state_dict().items()}
    state = torch.get_rng_state()
    first, second, other = (fs.landscape(problem, grid=3, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(first.loss, second.loss)
    assert not torch.allclose(first.loss, other.loss)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(value, before[name]) for name, value in tiny.model.state_dict().items())
    assert all(value.grad is None for value in tiny.model.parameters())
    assert first.meta["passes"]["forward"] == pytest.approx(10)  # the centre once, then nine points
    assert first.meta["folded"]


def test_grid_is_symmetric_and_a_line_is_the_middle_of_its_plane() -> None:
    problem = networks.mlp().problem()
    plane = fs.landscape(problem, grid=7, span=0.7)
    for axis in plane.axes:
        assert torch.equal(axis, -axis.flip(0))
        assert float(axis[-1]) == 0.7
    line = fs.landscape(problem, grid=7, span=0.7, dimensions=1)
    torch.testing.assert_close(line.loss, plane.loss[:, 3], rtol=1e-13, atol=1e-14)
    assert [tuple(c.shape) for c in plane.coordinates] == [(7, 7), (7, 7)]
    frame = plane.to_frame()
    assert list(frame.columns) == ["t1", "t2", "loss", "error", "pole"]
    row = frame[(frame["t1"] == float(plane.axes[0][1])) & (frame["t2"] == float(plane.axes[1][5]))]
    assert row["loss"].tolist() == [float(plane.loss[1, 5])]


def test_test_part_and_regression() -> None:
    tiny = networks.mlp()
    assert tiny.xt is not None
    assert tiny.yt is not None
    surface = fs.landscape(tiny.problem(), grid=3, part="test")
    loss, error = loss_and_error(tiny.model, tiny.xt, tiny.yt)
    assert surface.centre == pytest.approx(loss, rel=1e-12)
    assert surface.meta["centre_error"] == pytest.approx(error)
    targets = torch.randn(11, 3, dtype=torch.float64)
    squared_error = float((tiny.model(tiny.x) - targets).detach().square().sum(1).mean())
    regression = fs.landscape(fs.Problem(tiny.model, train=(tiny.x, targets), loss="mse"), grid=3)
    assert regression.error is None
    assert regression.centre == pytest.approx(squared_error, rel=1e-12)
    with pytest.raises(InputError, match="error"):
        regression.figure(quantity="error")


@pytest.mark.parametrize("kind", ["gaussian", "hessian"])
def test_finished_rows_are_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    problem = networks.mlp().problem()
    whole = fs.landscape(problem, directions=kind, grid=5)
    kept = fs.landscape(problem, directions=kind, grid=5, checkpoint=tmp_path)
    (tmp_path / "row-00003.npz").unlink()
    (tmp_path / "row-00001.npz").write_bytes(b"half a fi")
    asked: list[int] = []
    run = GridLosses.__call__

    def counted(self: GridLosses, points: Tensor) -> Any:
        asked.append(len(points))
        return run(self, points)

    monkeypatch.setattr(GridLosses, "__call__", counted)
    again = fs.landscape(problem, directions=kind, grid=5, checkpoint=tmp_path)
    assert asked == [1, 5, 5]  # the centre and the two rows that were not there
    assert torch.equal(again.loss, kept.loss)
    torch.testing.assert_close(kept.loss, whole.loss, rtol=1e-9, atol=1e-12)
    with pytest.raises(InputError, match="another one"):
        fs.landscape(problem, directions=kind, grid=5, span=0.5, checkpoint=tmp_path)
    shifted = fs.Problem(networks.mlp().model, train=(networks.mlp().x + 1, networks.mlp().y))
    with pytest.raises(InputError, match="data"):
        fs.landscape(shifted, directions="gaussian", grid=5, checkpoint=_copied(tmp_path, problem))


def _copied(folder: Path, problem: fs.Problem) -> Path:
    target = folder / "again"
    fs.landscape(problem, grid=5, checkpoint=target)
    return target


KILLED = """
import os, signal, sys, torch, flatscope as fs
sys.path.insert(0, {tests!r})
import networks
from flatscope.landscape.rows import KeptRows

write = KeptRows.write
def killing(self, number, row):
    write(self, number, row)
    if number == 2:
        os.kill(os.getpid(), signal.SIGKILL)

KeptRows.write = killing
fs.landscape(networks.mlp().problem(), grid=5, checkpoint={folder!r})
"""


def test_landscape_goes_on_after_a_kill(tmp_path: Path) -> None:
    folder = tmp_path / "rows"
    script = textwrap.dedent(KILLED).format(tests=str(Path(__file__).parent), folder=str(folder))
    done = subprocess.run([sys.executable, "-c", script], env={**os.environ}, check=False, capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    assert sorted(path.name for path in folder.glob("row-*")) == [f"row-0000{i}.npz" for i in range(3)]
    resumed = fs.landscape(networks.mlp().problem(), grid=5, checkpoint=folder)
    torch.testing.assert_close(resumed.loss, fs.landscape(networks.mlp().problem(), grid=5).loss, rtol=1e-12, atol=0)
    assert resumed.meta["passes"]["forward"] == pytest.approx(11)


# Files and pictures


@pytest.mark.parametrize("ending", [".npz", ".parquet"])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_saved_surface_comes_back(tmp_path: Path, ending: str, dimensions: int) -> None:
    with pytest.warns(NumericalWarning, match="pole"):
        surface = fs.landscape(networks.lenet_like().problem(), "psi", grid=7, dimensions=dimensions, noise=0.2)
    surface.save(tmp_path / f"s{ending}")
    again = Surface.load(tmp_path / f"s{ending}")
    for name in ("loss", "error", "poles"):
        torch.testing.assert_close(getattr(again, name), getattr(surface, name), rtol=0, atol=0, equal_nan=True)
    assert all(torch.equal(a, b) for a, b in zip(again.axes, surface.axes, strict=True))
    assert (again.centre, again.space, again.directions, again.meta) == (
        surface.centre,
        surface.space,
        surface.directions,
        surface.meta,
    )


def test_files_that_are_no_surface(tmp_path: Path) -> None:
    surface = fs.landscape(networks.mlp().problem(), grid=3)
    with pytest.raises(InputError, match="ending"):
        surface.save(tmp_path / "s.pickle")
    np.savez(tmp_path / "other.npz", a=np.ones(3))
    (tmp_path / "bad.parquet").write_bytes(b"nothing")
    for name in ("other.npz", "bad.parquet", "missing.npz", "s.json"):
        with pytest.raises(InputError):
            Surface.load(tmp_path / name)
    np.savez(tmp_path / "evil.npz", head=np.array([{"a": 1}], dtype=object))
    with pytest.raises(InputError, match="surface"):
        Surface.load(tmp_path / "evil.npz")


@pytest.mark.parametrize("ending", [".png", ".svg", ".pdf", ".csv"])
@pytest.mark.parametrize("dimensions", [1, 2])
def test_pictures(tmp_path: Path, ending: str, dimensions: int) -> None:
    surface = fs.landscape(networks.mlp().problem(), grid=5, dimensions=dimensions)
    surface.save(tmp_path / f"s{ending}")
    assert (tmp_path / f"s{ending}").stat().st_size > 100
    assert surface._repr_html_().startswith("<svg")
    assert "loss" in repr(surface)


def test_two_surfaces_share_one_height_scale_and_poles_stay_blank() -> None:
    problem = networks.lenet_like().problem()
    low = fs.landscape(problem, grid=5, span=0.1)
    high = fs.landscape(problem, grid=5, span=3.0)
    figure = low.figure(high, titles=("near", "far"))
    limits = [ax.collections[0].get_clim() for ax in figure.axes[:2]]
    assert limits[0] == limits[1]
    assert limits[0][1] == pytest.approx(high.heights[1])
    with pytest.warns(NumericalWarning, match="pole"):
        holed = fs.landscape(problem, "psi", grid=7, noise=0.2)
    values = holed.figure().axes[0].collections
    assert any(collection.get_hatch() for collection in values)
    with pytest.raises(InputError, match="2 titles"):
        low.figure(high, titles=("one",))


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"space": "wieghts"}, UnknownNameError, "weights"),
        ({"directions": "filters"}, UnknownNameError, "filter"),
        ({"grid": 4}, InputError, "odd"),
        ({"grid": 1}, InputError, "at least 3"),
        ({"grid": 5.0}, InputError, "whole number"),
        ({"span": 0.0}, InputError, "above 0"),
        ({"noise": float("nan")}, InputError, "above 0"),
        ({"dimensions": 3}, InputError, "1 or 2"),
        ({"part": "validation"}, InputError, "train or test"),
        ({"space": "psi", "directions": "filter"}, InputError, "gaussian"),
        ({"space": "psi", "rule": "best"}, InputError, "best"),
        ({"directions": 3}, InputError, "state dict"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        fs.landscape(networks.mlp().problem(), **change)


# The command line


def test_command_writes_surface_picture_and_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from flatscope.cli.app import main

    model = Path(__file__).parents[1] / "examples" / "my_model.py"
    files = [tmp_path / f"plane.{ending}" for ending in ("npz", "png", "html")]
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # put back what main replaces
    common = ["flatscope", "landscape", "--model", f"{model}:build", "--data", "digits", "--train-size", "60"]

    def run(*words: str) -> tuple[int, str]:
        monkeypatch.setattr(sys, "argv", [*common, *words])
        with pytest.raises(SystemExit) as leaving:
            main()
        shown = capsys.readouterr()
        return int(leaving.value.code or 0), shown.out + shown.err

    outs = [word for path in files for word in ("--out", str(path))]
    code, text = run("--space", "psi", "--relative", "--grid", "3", *outs)
    assert code == 0, text
    assert "psi, rule max_product" in text
    surface = Surface.load(files[0])
    assert (surface.space, tuple(surface.loss.shape)) == ("psi", (3, 3))
    assert surface.meta["data"] == "digits"
    assert files[1].read_bytes().startswith(b"\x89PNG")
    assert "<html" in files[2].read_text()
    code, text = run("--grid", "3", "--json", "--directions", "filter", "--dimensions", "1")
    assert code == 0, text
    assert len(json.loads(text[: text.rindex("}") + 1])["loss"]) == 3
    code, text = run("--grid", "4")
    assert code == 2
    assert "odd" in text
    code, text = run("--to", "x.safetensors", "--directions", "filter")
    assert code == 2
    assert "either" in text
