"""Expected sharpness with 1,000 perturbed networks, against a loop that perturbs a copy of the network each time."""

from __future__ import annotations

import copy
import statistics
from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional

import flatscope as fs
from benchmarks.timing import Row, in_turn
from flatscope.training import build

ALPHA, DRAWS, BATCH = 0.01, 1000, 64
OPTIONS = {"expected_sharpness": {"alpha": ALPHA, "draws": DRAWS, "batch": BATCH}}


def rows() -> Iterator[Row]:
    yield against_a_loop("cpu", "≥ 1.3×", 1.3)


def gpu_rows() -> Iterator[Row]:
    yield against_a_loop("cuda", "≥ 20×", 20)


def plain_loop(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> list[float]:
    """Neyshabur et al. (2017), Appendix A, as one would write it down: a draw, a mini-batch, two losses."""
    noisy = copy.deepcopy(model)
    rises = []
    with torch.no_grad():
        for _ in range(DRAWS):
            chosen = torch.randint(len(y), (BATCH,), device=y.device)
            for own, moved in zip(model.parameters(), noisy.parameters(), strict=True):
                moved.copy_(own + ALPHA * (10 * own.abs() + 1) * torch.randn_like(own))
            there = functional.cross_entropy(noisy(x[chosen]), y[chosen])
            rises.append(float(there - functional.cross_entropy(model(x[chosen]), y[chosen])))
    return rises


def against_a_loop(device: str, target: str, least: float) -> Row:
    """2,000 images of noise: the cost depends neither on the weights nor on the images."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2_000, 3, 32, 32, generator=generator).to(device)
    y = torch.randint(10, (2_000,), generator=generator).to(device)
    model = build("lenet5", seed=0).to(device).eval()
    problem = fs.Problem(model, train=(x, y))
    found = fs.measure(problem, "expected_sharpness", options=OPTIONS).to_frame().iloc[0]
    rises = plain_loop(model, x, y)
    own, error = statistics.mean(rises), statistics.stdev(rises) / len(rises) ** 0.5
    assert abs(found["value"] - own) < 5 * (found["stderr"] ** 2 + error**2) ** 0.5, (found["value"], own, error)
    ours, peer = in_turn(
        lambda: fs.measure(problem, "expected_sharpness", options=OPTIONS), lambda: plain_loop(model, x, y)
    )
    note = f"standard errors {found['stderr']:.2g} and {error:.2g}"
    what = f"expected sharpness, {DRAWS:,} draws, LeNet-5, batches of {BATCH}, {device}"
    return Row(what, ours, peer, "plain loop", target, peer / ours >= least, note)
