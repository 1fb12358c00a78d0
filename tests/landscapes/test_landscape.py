"""Landscapes against a loop that sets one network's weights at a time, and what must and must not change a picture."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import flatscope as fs
from flatscope.errors import InputError, NumericalWarning
from flatscope.landscapes import directions, landscape_function
from flatscope.landscapes.directions import PathPlane
from flatscope.landscapes.grid_losses import GridLosses
from flatscope.limits import STANDARD

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
        return ctx, directions.filter_normalised_directions(ctx, 2)
    size = sum(value.numel() for value in ctx.trainable.values())
    make = directions.gaussian_directions if kind == "gaussian" else directions.hessian_eigenvector_directions
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
    monkeypatch.setitem(vars(STANDARD), "stacked_samples", 1000 if stacked else 0)
    streamed = fs.Problem(tiny.model, train=(x, y), batch_size=7)
    surface = fs.landscape(streamed, grid=5, directions="filter")
    monkeypatch.setitem(vars(STANDARD), "kept_data", 0)  # nothing kept from row to row
    again = fs.landscape(fs.Problem(tiny.model, train=(x, y)), grid=5, directions="filter")
    torch.testing.assert_close(surface.loss, again.loss, rtol=1e-12, atol=1e-13)
    _, (first, second) = drawn(tiny, "filter")
    loss, _ = naive_plane(tiny.model, first, second, surface.axes[0], x, y)
    torch.testing.assert_close(surface.loss, loss, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize(("space", "layers"), [("weights", {"conv1.weight"}), ("psi", {"conv1.weight"})])
def test_first_layer_is_not_run_again_at_every_point(space: str, layers: set[str]) -> None:
    ctx = fs.Context(networks.lenet_like().problem())
    if space == "psi":
        plane, _ = landscape_function._path_plane(ctx, 2, 0.01, True, "max_product")
    else:
        plane, _ = landscape_function._weight_plane(ctx, ctx.problem.model, "gaussian", (), 2, 0.01, None)
    assert {weight for weight, _ in GridLosses(ctx, plane, "train")._layers} == layers


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
        surface = fs.landscape(ctx.problem, directions="gaussian", grid=3)
        expected, _ = naive_plane(tiny.model, first, second, surface.axes[0], tiny.x, tiny.y)
        torch.testing.assert_close(surface.loss, expected, rtol=1e-11, atol=1e-12)
    else:
        surface = fs.landscape(ctx.problem, space, grid=3, relative=True, noise=0.01)
        assert surface.centre == pytest.approx(ctx.scores().loss, rel=1e-12)


@pytest.mark.parametrize("build", [networks.attention, networks.sequences, networks.smooth], ids=lambda b: b.__name__)
@pytest.mark.parametrize("space", ["weights", "psi"])
def test_networks_with_walls_and_sequences(build: Any, space: str) -> None:
    tiny = build()
    surface = fs.landscape(tiny.problem(), space, "gaussian", grid=3, relative=True)
    assert surface.centre == pytest.approx(fs.Context(tiny.problem()).scores().loss, rel=1e-12)
    assert float(surface.loss.std()) > 0
    if space == "weights":
        ctx = fs.Context(tiny.problem())
        length = 0.05 * math.sqrt(sum(float(v.square().sum()) for v in ctx.trainable.values()))
        first, second = directions.gaussian_directions(ctx, 2, length)
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
    in_paths = fs.landscape(frozen, "psi", grid=3)
    assert float(in_paths.loss[1, 1]) == pytest.approx(float(shuffled.loss[1, 1]), rel=1e-12)


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
    surface = fs.landscape(tiny.problem(), directions="gaussian", grid=3, relative=True)
    weights = math.sqrt(sum(float(v.square().sum()) for v in ctx.trainable.values()))
    assert surface.meta["lengths"] == pytest.approx([0.05 * weights] * 2, rel=1e-12)


def test_the_default_is_what_the_page_recommends() -> None:
    problem = networks.mlp().problem()
    default, chosen = fs.landscape(problem, grid=3), fs.landscape(problem, directions="filter", grid=3)
    assert default.directions == "filter"
    assert torch.equal(default.loss, chosen.loss)
    assert fs.landscape(problem, "psi", grid=3, relative=True).directions == "gaussian"


@pytest.mark.parametrize("change", [{"noise": 0.1}, {"relative": True}, {"noise": 0.1, "directions": "filter"}])
def test_a_length_is_refused_where_directions_have_their_own(change: dict[str, Any]) -> None:
    with pytest.raises(fs.InputError, match=r'directions="filter".*span'):
        fs.landscape(networks.mlp().problem(), grid=3, **change)


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
    assert abs(directions.cosine_of_directions(*pair)) < 1e-12
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
    (direction,) = directions.filter_normalised_directions(ctx, 1)
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
    in_weights = [fs.landscape(p, "weights", "gaussian", grid=7).loss for p in (problem, twin)]
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


def moved(network: nn.Module, *ways: tuple[float, int]) -> nn.Module:
    """The network with multiples of fixed directions added to its weights."""
    twin = copy.deepcopy(network)
    with torch.no_grad():
        for share, seed in ways:
            generator = torch.Generator().manual_seed(seed)
            for value in twin.parameters():
                value += share * torch.randn(value.shape, generator=generator, dtype=value.dtype)
    return twin


def test_the_plane_of_a_path_holds_its_networks_where_it_says() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)).double()
    data = (torch.eye(3, dtype=torch.float64), torch.tensor([0, 1, 0]))
    problem = fs.Problem(network, train=data)

    straight = [moved(network, (share, 1)) for share in (0.9, 0.6, 0.3)]
    line = fs.landscape(problem, directions=straight, grid=7, dimensions=1)
    assert line.meta["explained"] == [pytest.approx(1.0)]
    for twin, (place,) in zip(straight, line.meta["path"], strict=True):
        nearest = int((line.axes[0] - place).abs().argmin())
        assert float(line.axes[0][nearest]) == pytest.approx(place)
        own = torch.nn.functional.cross_entropy(twin(data[0]), data[1])
        assert float(line.loss[nearest]) == pytest.approx(float(own.detach()))

    bent = [moved(network, (a, 1), (b, 2)) for a, b in ((0.9, 0.0), (0.5, 0.4), (0.2, -0.1))]
    plane = fs.landscape(problem, directions=bent, grid=5)
    assert sum(plane.meta["explained"]) == pytest.approx(1.0)  # a path in a plane is seen whole
    assert plane.meta["cosine"] == pytest.approx(0.0, abs=1e-12)
    for axis in range(2):
        assert max(abs(point[axis]) for point in plane.meta["path"]) == pytest.approx(1.0)
    assert plane.directions == "path"
    assert "<svg" in plane._repr_html_()

    with pytest.raises(InputError, match="at least 2 networks"):
        fs.landscape(problem, directions=bent[:1], grid=3)
    with pytest.raises(InputError, match="in fewer"):
        fs.landscape(problem, directions=straight, grid=3)
