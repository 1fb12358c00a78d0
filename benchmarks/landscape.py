"""A 25×25 landscape of a trained LeNet-5 on real images, against loss-landscapes and, on a GPU, a loop like it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from torch import nn

import flatscope as fs
from benchmarks.timing import Row, in_turn, trained_lenet
from flatscope.landscapes import directions

STEPS = 25


def rows() -> Iterator[Row]:
    model, x, y = trained_lenet()
    assert_same_heights(model, x, y)
    problem = fs.Problem(model, train=(x, y))
    fs.landscape(problem, directions="filter", grid=3)
    ours, peer = in_turn(lambda: plane(problem), lambda: their_plane(model, x, y), repeats=2)
    what = f"{STEPS}×{STEPS} landscape, LeNet-5, 2,000 CIFAR-10 images: loss and error"
    yield Row(what, ours, peer, "loss-landscapes random_plane, loss only", "≥ 1.2×", peer / ours >= 1.2)
    path_space = in_turn(lambda: plane(problem, "psi"), repeats=1)[0]
    yield Row(
        f"the same in path space, {STEPS}×{STEPS}", path_space, peer, "loss-landscapes, weight space", "none", True
    )


def gpu_rows() -> Iterator[Row]:
    model, x, y = trained_lenet(device="cuda")
    assert_same_heights(model, x, y)
    problem = fs.Problem(model, train=(x, y))
    plane(problem)
    ours, peer, path_space = in_turn(
        lambda: plane(problem), lambda: looped_plane(model, x, y), lambda: plane(problem, "psi"), repeats=3
    )
    what = f"{STEPS}×{STEPS} landscape, LeNet-5, 2,000 CIFAR-10 images: loss and error"
    yield Row(what, ours, peer, "a loop: one model, one forward a point", "≥ 10×", peer / ours >= 10)
    yield Row("the same in path space", path_space, peer, "the same loop, weight space", "none", True)


def plane(problem: fs.Problem, space: str = "weights") -> fs.Surface:
    if space == "psi":
        return fs.landscape(problem, "psi", grid=STEPS, relative=True)
    return fs.landscape(problem, directions="filter", grid=STEPS)


def their_plane(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> object:
    from loss_landscapes import random_plane
    from loss_landscapes.metrics import Loss

    with torch.no_grad():  # it asks for no gradients after its first call; a user's first one should not cost more
        metric = Loss(nn.functional.cross_entropy, x, y)
        return random_plane(model, metric, distance=1, steps=STEPS, normalization="filter", deepcopy_model=True)


def looped_plane(
    model: nn.Module, x: torch.Tensor, y: torch.Tensor, ways: list[dict[str, torch.Tensor]] | None = None
) -> list[list[float]]:
    """What loss-landscapes does: one copy of the model, moved in place from point to point, one forward at each."""
    moved = copy.deepcopy(model).eval()
    params = [value.requires_grad_(False) for value in moved.parameters()]
    if ways is None:
        ways = [{name: torch.randn_like(v) * 0.01 for name, v in moved.named_parameters()} for _ in range(2)]
    first, second = ([way[name].to(v) for name, v in moved.named_parameters()] for way in ways)
    half = STEPS // 2
    for value, d1, d2 in zip(params, first, second, strict=True):
        value.sub_(d1, alpha=1).sub_(d2, alpha=1)
    heights = []
    for _ in range(STEPS):
        column = []
        for j in range(STEPS):
            column.append(nn.functional.cross_entropy(moved(x), y).item())
            if j < STEPS - 1:
                for value, d2 in zip(params, second, strict=True):
                    value.add_(d2, alpha=1 / half)
        for value, d1, d2 in zip(params, first, second, strict=True):
            value.add_(d1, alpha=1 / half).sub_(d2, alpha=2)
        heights.append(column)
    return heights


def assert_same_heights(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> None:
    """The loop and ours on the same plane, a tenth of the images."""
    problem = fs.Problem(model, train=(x[:200], y[:200]))
    ways = directions.filter_normalised_directions(fs.Context(problem), 2)
    expected = torch.tensor(looped_plane(model, x[:200], y[:200], ways), dtype=torch.float64)
    found = plane(problem).loss
    assert float(((found - expected) / expected.abs().clamp_min(1)).abs().max()) < 1e-3
