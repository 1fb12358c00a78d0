"""Mixtures of two and three networks: corners, embedding, convexity, BatchNorm, against a loop over copies."""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import networks
import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope import interpolation
from flatscope.errors import InputError, UnknownNameError
from flatscope.files import figure_bytes
from flatscope.simplex import Simplex


def three(build: Any) -> tuple[networks.Tiny, list[nn.Module]]:
    tiny = build()
    found = []
    for seed in range(3):
        model = copy.deepcopy(tiny.model)
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for value in model.parameters():
                value += 0.5 * torch.randn(value.shape, generator=generator, dtype=value.dtype)
        found.append(model.eval())
    return tiny, found


def scores(model: nn.Module, x: Tensor, y: Tensor) -> tuple[float, float]:
    with torch.no_grad():
        outputs = model(x)
    return float(nn.functional.cross_entropy(outputs, y)), float((outputs.argmax(1) == y).double().mean())


@pytest.mark.parametrize("build", [networks.mlp, networks.lenet_like, networks.residual], ids=lambda b: b.__name__)
@pytest.mark.parametrize("number", [2, 3])
def test_mixtures_are_what_a_loop_over_copies_gives(build: Any, number: int) -> None:
    tiny, models = three(build)
    simplex = fs.interpolate(models[:number], (tiny.x, tiny.y), resolution=4)
    assert len(simplex.loss) == (5 if number == 2 else 15)
    assert simplex.accuracy is not None
    for row, loss, accuracy in zip(simplex.weights.tolist(), simplex.loss, simplex.accuracy, strict=True):
        assert sum(row) == pytest.approx(1, abs=1e-15)
        mixed = copy.deepcopy(models[0])
        parts = [dict(model.named_parameters()) for model in models[:number]]
        with torch.no_grad():
            for name, value in mixed.named_parameters():
                value.copy_(sum(share * part[name] for share, part in zip(row, parts, strict=True)))
        expected = scores(mixed, tiny.x, tiny.y)
        assert (float(loss), float(accuracy)) == pytest.approx(expected, rel=1e-12)
    for place, model in zip(simplex.vertices, models[:number], strict=True):
        assert simplex.weights[place].max() == 1
        loss_there, accuracy_there = scores(model, tiny.x, tiny.y)
        assert float(simplex.accuracy[place]) == accuracy_there
        assert float(simplex.loss[place]) == pytest.approx(loss_there, rel=1e-15)  # sums in another order
    assert simplex.meta["batchnorm"] == "none"


def test_barycentric_embedding() -> None:
    tiny, models = three(networks.mlp)
    simplex = fs.interpolate(models, (tiny.x, tiny.y), resolution=6)
    places = simplex.positions
    corners = places[simplex.vertices]
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert float((corners[i] - corners[j]).norm()) == pytest.approx(1, abs=1e-15)
    torch.testing.assert_close(places, simplex.weights @ corners, rtol=0, atol=1e-15)
    middle = (simplex.weights - 1 / 3).abs().sum(1).argmin()
    assert torch.cdist(places[middle][None], corners).std() < 1e-12
    line = fs.interpolate(models[:2], (tiny.x, tiny.y), resolution=5)
    assert line.positions.flatten().tolist() == [0, 0.2, 0.4, 0.6, 0.8, 1]


def test_linear_model_has_no_barrier_and_a_deep_one_may() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 5, generator=generator, dtype=torch.float64)
    y = torch.randint(0, 3, (40,), generator=generator)
    linear = [nn.Linear(5, 3).double() for _ in range(3)]
    assert fs.interpolate(linear, (x, y), resolution=12).barrier <= 1e-14
    first = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)).double().eval()
    second = copy.deepcopy(first)
    with torch.no_grad():  # the same function with its units in the reverse order
        for value, other in zip(second.parameters(), first.parameters(), strict=True):
            value.copy_(other.flip(1) if value.shape == (3, 8) else other.flip(0) if len(value) == 8 else other)
        first[0].weight *= 8
        second[0].weight *= 8
    simplex = fs.interpolate([first, second], (x, first(x).argmax(1)), resolution=10)
    assert float(simplex.loss[0]) == pytest.approx(float(simplex.loss[-1]), rel=1e-12)
    assert simplex.barrier > 0.01


def test_batchnorm_statistics_are_those_of_each_mixture() -> None:
    tiny, models = three(networks.batchnorm_conv)
    recomputed = fs.interpolate(models, (tiny.x, tiny.y), resolution=2)
    assert recomputed.meta["batchnorm"] == "recompute"
    for row, loss in zip(recomputed.weights.tolist(), recomputed.loss, strict=True):
        mixed = copy.deepcopy(models[0])
        parts = [dict(model.named_parameters()) for model in models]
        with torch.no_grad():
            for name, value in mixed.named_parameters():
                value.copy_(sum(share * part[name] for share, part in zip(row, parts, strict=True)))
            outputs = mixed.train()(tiny.x)  # all samples as one batch: their statistics, biased as in training
        assert float(loss) == pytest.approx(float(nn.functional.cross_entropy(outputs, tiny.y)), rel=1e-9)
    in_batches = fs.interpolate(models, (tiny.x, tiny.y), resolution=2, batch_size=3)
    torch.testing.assert_close(in_batches.loss, recomputed.loss, rtol=1e-11, atol=0)


def test_a_batchnorm_that_is_used_twice_has_the_statistics_of_both() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.out = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)
            self.between, self.last = nn.Linear(4, 4), nn.BatchNorm1d(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(self.out(self.norm(self.between(self.norm(self.first(x))))))

    torch.manual_seed(0)
    models = [Twice().double().eval() for _ in range(2)]
    x, y = torch.randn(12, 3, dtype=torch.float64), torch.arange(12) % 2
    simplex = fs.interpolate(models, (x, y), resolution=1, batch_size=5)
    for place, model in zip(simplex.vertices, models, strict=True):
        with torch.no_grad():
            here = model.first(x)
            # Both uses share one pair of statistics, of which the first pass knows the running ones at the second use.
            after = model.norm(here)
            rows = torch.cat([here, model.between(after)])
            model.norm.running_mean, model.norm.running_var = rows.mean(0), rows.var(0, unbiased=False)
            seen = model.out(model.norm(model.between(model.norm(here))))
            model.last.running_mean, model.last.running_var = seen.mean(0), seen.var(0, unbiased=False)
            due = nn.functional.cross_entropy(model(x), y)
        assert float(simplex.loss[place]) == pytest.approx(float(due), rel=1e-9)


def test_the_data_are_read_once_for_many_mixtures(monkeypatch: pytest.MonkeyPatch) -> None:
    read = 0

    class Counted(torch.utils.data.Dataset):  # type: ignore[type-arg]
        def __len__(self) -> int:
            return 8

        def __getitem__(self, i: int) -> tuple[torch.Tensor, int]:
            nonlocal read
            read += 1
            return torch.full((3,), float(i)), i % 2

    torch.manual_seed(0)
    models = [nn.Linear(3, 2) for _ in range(3)]
    loader = torch.utils.data.DataLoader(Counted(), batch_size=4)
    fs.interpolate(models, loader, resolution=1)
    base, read = read, 0
    many = fs.interpolate(models, loader, resolution=6)
    assert len(many.loss) == 28
    assert read == base  # 28 mixtures in as many passes as 3
    monkeypatch.setattr(interpolation, "ROOM", 1)
    torch.testing.assert_close(fs.interpolate(models, loader, resolution=6).loss, many.loss, rtol=0, atol=0)


def test_folded_batchnorm_has_the_networks_at_its_corners() -> None:
    tiny, models = three(networks.batchnorm_conv)
    simplex = fs.interpolate(models, (tiny.x, tiny.y), resolution=3, batchnorm="fold")
    assert simplex.meta["batchnorm"] == "fold"
    assert simplex.accuracy is not None
    for place, model in zip(simplex.vertices, models, strict=True):
        found = float(simplex.loss[place]), float(simplex.accuracy[place])
        assert found == pytest.approx(scores(model, tiny.x, tiny.y), rel=1e-12)


def test_networks_are_left_alone() -> None:
    tiny, models = three(networks.batchnorm_conv)
    before = [{name: value.clone() for name, value in model.state_dict().items()} for model in models]
    state = torch.get_rng_state()
    fs.interpolate(models, (tiny.x, tiny.y), resolution=2)
    assert torch.equal(state, torch.get_rng_state())
    for model, kept in zip(models, before, strict=True):
        assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
        assert not any(module._forward_pre_hooks for module in model.modules())


def test_files_and_pictures(tmp_path: Path) -> None:
    tiny, models = three(networks.mlp)
    for number in (2, 3):
        simplex = fs.interpolate(models[:number], (tiny.x, tiny.y), resolution=3)
        for ending in (".npz", ".csv", ".png", ".svg"):
            simplex.save(tmp_path / f"s{ending}")
        again = Simplex.load(tmp_path / "s.npz")
        assert torch.equal(again.loss, simplex.loss)
        assert torch.equal(again.weights, simplex.weights)
        assert again.meta == simplex.meta
        assert "<svg" in simplex._repr_html_()
        assert "barrier" in repr(simplex)
        frame = simplex.to_frame()
        assert list(frame.columns) == [f"lambda{i + 1}" for i in range(number)] + ["loss", "accuracy"]
    with pytest.raises(InputError, match="ending"):
        simplex.save(tmp_path / "s.pickle")
    whole = (tmp_path / "s.npz").read_bytes()
    for damaged in (b"no", b"", whole[:-30], whole[:60] + b"x" * 20 + whole[80:]):
        (tmp_path / "bad.npz").write_bytes(damaged)
        with pytest.raises(InputError, match="saved"):
            Simplex.load(tmp_path / "bad.npz")


@pytest.mark.parametrize("corners", [2, 3])
@pytest.mark.parametrize("missing", ["one", "all"])
def test_a_mixture_without_a_loss_is_left_blank(corners: int, missing: str, tmp_path: Path) -> None:
    tiny, models = three(networks.mlp)
    simplex = fs.interpolate(models[:corners], (tiny.x, tiny.y), resolution=4)
    assert simplex.accuracy is not None
    loss = simplex.loss.clone()
    loss[1 if missing == "one" else slice(None)] = torch.nan
    holed = Simplex(simplex.weights, loss, simplex.accuracy, simplex.meta)
    holed.save(tmp_path / "holed.png")
    assert (tmp_path / "holed.png").read_bytes() != figure_bytes(simplex.figure(), "png")
    assert "<svg" in holed._repr_html_()
    assert math.isnan(holed.barrier)
    drawn = holed.plot(holed.figure().axes[0])
    assert (drawn is None) == (missing == "all" and corners == 3)
    bars = len(holed.figure().axes) - 1
    assert bars == (1 if drawn is not None and corners == 3 else 0)


def test_regression_has_no_accuracy() -> None:
    x = torch.randn(6, 2, dtype=torch.float64)
    simplex = fs.interpolate([nn.Linear(2, 1).double() for _ in range(2)], (x, x[:, :1]), loss="mse", resolution=2)
    assert simplex.accuracy is None
    with pytest.raises(InputError, match="class labels"):
        simplex.figure("accuracy")


@pytest.mark.parametrize(
    ("change", "error", "says"),
    [
        ({"networks": [nn.Linear(4, 3)]}, InputError, "two or three"),
        ({"networks": nn.Linear(4, 3)}, InputError, "two or three"),
        ({"networks": [nn.Linear(4, 3), 3]}, InputError, "Module"),
        ({"networks": [nn.Linear(4, 3), nn.Linear(4, 2)]}, InputError, "network 2"),
        ({"resolution": 0}, InputError, "at least 1"),
        ({"batchnorm": "ignore"}, UnknownNameError, "BatchNorm"),
    ],
)
def test_bad_arguments(change: dict[str, Any], error: type[Exception], says: str) -> None:
    given: dict[str, Any] = {"networks": [nn.Linear(4, 3) for _ in range(2)], "data": (torch.ones(3, 4), [0, 1, 2])}
    with pytest.raises(error, match=says):
        fs.interpolate(**(given | change))


def test_copies_with_other_weights_are_named_and_networks_trained_a_little_further_are_not() -> None:
    tiny = networks.mlp()
    copy_of_it = fs.rescale(tiny.model, tiny.x, by="permutation", seed=1)
    found = fs.interpolate([tiny.model, copy_of_it], (tiny.x, tiny.y), resolution=4)
    assert "networks 1 and 2 are one function written with other weights" in found.meta["remarks"][0]
    assert found.meta["remarks"][0] in repr(found)
    further = fs.rescale(tiny.model, tiny.x, by="permutation", seed=1)
    further.load_state_dict({name: value * (1 + 1e-6) for name, value in tiny.model.state_dict().items()})
    for other in (further, tiny.model, three(networks.mlp)[1][1]):
        assert "remarks" not in fs.interpolate([tiny.model, other], (tiny.x, tiny.y), resolution=2).meta


def test_statistics_that_are_not_measured_anew_are_refused_where_they_differ() -> None:
    """Those of InstanceNorm were the first network's at every corner."""
    nets = []
    for shift in (0.0, 3.0):
        net = nn.Sequential(nn.Conv1d(1, 3, 3), nn.InstanceNorm1d(3, track_running_stats=True), nn.Flatten(1)).train()
        net(torch.randn(8, 1, 5) + shift)
        nets.append(net.eval())
    with pytest.raises(InputError, match=r"the same constant 1\.running_mean"):
        fs.interpolate(nets, (torch.randn(8, 1, 5), torch.arange(8)), resolution=2)
