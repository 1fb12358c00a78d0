"""The flatness radius of a perceptron on MNIST, against a plain loop that moves a copy of the network."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

import flatscope as fs
from benchmarks.timing import Row, in_turn
from flatscope.inputs import load
from flatscope.measures.radius import START, drawn_radii
from flatscope.training import TrainConfig, build, train

EPSILON, DIRECTIONS, TOLERANCE = 0.05, 100, 1e-3


def rows() -> Iterator[Row]:
    yield from compared("cpu", directions=20, target=2.0)


def gpu_rows() -> Iterator[Row]:
    yield from compared("cuda", directions=DIRECTIONS, target=30.0)


def trained_perceptron(device: str) -> tuple[nn.Sequential, torch.Tensor, torch.Tensor]:
    """784-512-10 on 2,000 MNIST images, pixels in [0, 1], to a cross-entropy of 1e-3."""
    data = load("mnist", train_size=2_000, test_size=0, seed=0, standardize=False)
    model = build("two_layer", hidden=512, seed=0).to(device)
    config = TrainConfig(lr=0.05, momentum=0.9, batch_size=64, epochs=400, stop_loss=1e-3, evaluate_every=5)
    train(model, data.train, config, show_progress=False)
    x, y = (value.to(device) for value in data.train)
    return model.eval(), x, y  # type: ignore[return-value]


@torch.no_grad()
def plain_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor, directions: int) -> torch.Tensor:
    """Double, then halve the interval, one direction after the other: what a reader of the paper would write."""
    moved = copy.deepcopy(model)
    weights = [p.detach().clone() for p in model.parameters()]
    base = functional.cross_entropy(model(x), y).item()
    start = START * math.sqrt(sum(float(w.square().sum()) for w in weights))
    found = []
    generator = torch.Generator(x.device).manual_seed(1)
    for _ in range(directions):
        drawn = [torch.randn(w.shape, generator=generator, device=w.device) for w in weights]
        length = torch.sqrt(torch.stack([d.square().sum() for d in drawn]).sum())
        drawn = [d / length for d in drawn]

        def outside(r: float, drawn: list[torch.Tensor] = drawn) -> bool:
            for p, w, d in zip(moved.parameters(), weights, drawn, strict=True):
                torch.add(w, d, alpha=r, out=p)
            return abs(functional.cross_entropy(moved(x), y).item() - base) > EPSILON

        low, high = 0.0, start
        while not outside(high):
            low, high = high, 2 * high
        while high - low > TOLERANCE * high:
            middle = (low + high) / 2
            low, high = (low, middle) if outside(middle) else (middle, high)
        found.append((low + high) / 2)
    return torch.tensor(found)


def compared(device: str, directions: int, target: float) -> Iterator[Row]:
    model, x, y = trained_perceptron(device)
    problem = fs.Problem(model, train=(x, y))

    def ours() -> torch.Tensor:
        return drawn_radii(fs.Context(problem), directions=directions, epsilon=EPSILON, tolerance=TOLERANCE).samples[
            :, 0
        ]

    def top() -> torch.Tensor:
        context = fs.Context(problem)
        found = drawn_radii(context, directions=directions, epsilon=EPSILON, tolerance=TOLERANCE, layers="top")
        return found.samples[:, 0]

    one, other = ours(), plain_loop(model, x, y, directions)  # a warm-up as well
    spread = math.hypot(float(one.std()), float(other.std())) / math.sqrt(directions)
    assert abs(float(one.mean() - other.mean())) < 4.5 * spread, (one.mean(), other.mean(), spread)
    top()
    own, of_top, peer = in_turn(ours, top, lambda: plain_loop(model, x, y, directions))
    what = f"flatness radius to 1e-3, MLP 784-512-10, 2,000 MNIST images, {directions} directions"
    note = f"radius {one.mean():.2f} ± {one.std():.2f}, plain loop {other.mean():.2f} ± {other.std():.2f}"
    yield Row(what, own, peer, "plain loop", f"≥ {target:g}×", peer / own >= target, note)
    what = "the same in the last layer alone"
    yield Row(what, of_top, peer, "plain loop, all layers", "not slower", peer >= of_top)
