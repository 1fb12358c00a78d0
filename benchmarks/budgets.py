"""Is a budget of time kept? Ten networks, 2, 5 and 20 seconds: at most 1.5 times as long, and a second.

    python -m benchmarks.budgets [--cpu-clock] [--seconds 2 5 20] [--calls all compare] [--networks gru vit]

One line for each call, each in a process of its own; exit code 1 where one took longer. A call that says in time that
the budget is too short has kept it. `--cpu-clock` puts the processor time of the process in the place of the clock, for
the budget as well: what others do on the machine then counts for nothing.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

import flatscope as fs
from flatscope.errors import FlatscopeError

SECONDS, FACTOR, GRACE = (2.0, 5.0, 20.0), 1.5, 1.0
CALLS = ("standard", "all", "compare", "bounds", "sensitivity", "diagonal")
WORST_SHOWN = 3


def numbers(*shape: int) -> Tensor:
    """Inputs, the same in every run."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def dense(*widths: int) -> nn.Sequential:
    """Dense layers with ReLU between them."""
    layers: list[nn.Module] = []
    for inside, outside in itertools.pairwise(widths):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


class Recurrent(nn.Module):
    """A GRU, read at its last step."""

    def __init__(self) -> None:
        super().__init__()
        self.steps, self.last = nn.GRU(24, 64, batch_first=True), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.last(self.steps(x)[0][:, -1])
        return found


class Transformer(nn.Module):
    """A small transformer over patches of images, or over words that it predicts."""

    def __init__(self, width: int, depth: int, words: int = 0, patches: int = 0, classes: int = 10) -> None:
        super().__init__()
        self.into = nn.Embedding(words, width) if words else nn.Linear(patches, width)
        self.places = nn.Parameter(0.02 * numbers(64, width))
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, depth, enable_nested_tensor=False)
        self.out, self.words = nn.Linear(width, words or classes), words

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x) + self.places[: x.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1]) if self.words else None
        hidden = self.blocks(hidden, mask=mask, is_causal=self.words > 0)
        found: Tensor = self.out(hidden if self.words else hidden.mean(1))
        return found


class Graph(nn.Module):
    """Two rounds of messages on a graph that each sample fills with numbers of its own."""

    def __init__(self, nodes: int = 40) -> None:
        super().__init__()
        links = (numbers(nodes, nodes) > 1).float() + torch.eye(nodes)
        self.register_buffer("links", links / links.sum(1, keepdim=True))
        self.first, self.second, self.last = nn.Linear(8, 64), nn.Linear(64, 64), nn.Linear(64, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = functional.relu(self.links @ self.first(x))
        hidden = functional.relu(self.links @ self.second(hidden))
        found: Tensor = self.last(hidden.mean(1))
        return found


class Residual(nn.Module):
    """Convolutions with BatchNorm and shortcuts."""

    def __init__(self) -> None:
        super().__init__()
        self.into = nn.Conv2d(3, 32, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Conv2d(32, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.Conv2d(32, 32, 3, padding=1)
            )
            for _ in range(4)
        )
        self.last = nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.into(x)
        for block in self.blocks:
            hidden = functional.relu(hidden + block(hidden))
        found: Tensor = self.last(hidden.mean((2, 3)))
        return found


def labels(n: int, classes: int) -> Tensor:
    """Classes in turn."""
    return torch.arange(n) % classes


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], tuple[Tensor, Tensor]], str]] = {
    "mlp": (lambda: dense(784, 256, 10), lambda: (numbers(5_000, 784), labels(5_000, 10)), ""),
    "20,000 samples": (lambda: dense(784, 1024, 1024, 10), lambda: (numbers(20_000, 784), labels(20_000, 10)), ""),
    "10,000 classes": (lambda: dense(20, 16, 10_000), lambda: (numbers(2_000, 20), labels(2_000, 10_000)), ""),
    "10 million weights": (lambda: dense(3_000, 3_333, 10), lambda: (numbers(500, 3_000), labels(500, 10)), ""),
    "50 layers": (lambda: dense(64, *[64] * 49, 10), lambda: (numbers(2_000, 64), labels(2_000, 10)), ""),
    "gru": (Recurrent, lambda: (numbers(1_000, 20, 24), labels(1_000, 10)), ""),
    "vit": (lambda: Transformer(64, 4, patches=48), lambda: (numbers(1_000, 64, 48), labels(1_000, 10)), ""),
    "language model": (
        lambda: Transformer(64, 3, words=500),
        lambda: ((words := labels(400 * 33, 500).reshape(400, 33).square() % 500)[:, :-1], words[:, 1:]),
        "next_token",
    ),
    "graph": (Graph, lambda: (numbers(1_000, 40, 8), labels(1_000, 6)), ""),
    "residual": (Residual, lambda: (numbers(500, 3, 16, 16), labels(500, 10)), ""),
}  # fmt: skip


def call(name: str, what: str, seconds: float) -> Any:
    """The result of one call with a budget; the network and its data are there before it."""
    torch.manual_seed(0)
    fs.compare, fs.measure, fs.bounds, fs.sensitivity, fs.diagonal  # noqa: B018  what they import is no part of it
    build, samples, loss = CASES[name]
    model, (x, y) = build().eval(), samples()
    words = {"loss": loss} if loss else {}
    if what == "compare":
        other = copy.deepcopy(model)
        with torch.no_grad():
            for value in other.parameters():
                value.mul_(1.01)
        return timed(lambda: fs.compare({"one": model, "other": other}, (x, y), budget=seconds, **words))
    problem = fs.Problem(model, (x, y), **words)
    if what == "bounds":
        return timed(lambda: fs.bounds(problem, "all", budget=seconds))
    if what in ("sensitivity", "diagonal"):
        return timed(lambda: getattr(fs, what)(problem, budget=seconds))
    return timed(lambda: fs.measure(problem, what, budget=seconds))


def timed(function: Callable[[], Any]) -> tuple[Any, float]:
    """What it gives, or the words in which it refuses, and how long it took."""
    begun = time.monotonic()
    try:
        found = function()
    except FlatscopeError as problem:
        found = str(problem)
    return found, time.monotonic() - begun


def longest(result: Any) -> str:
    """The measures that took longest, in words; or the refusal."""
    if isinstance(result, str):
        return f"refused: {result}"
    frame = result.to_frame() if hasattr(result, "to_frame") else None
    if frame is None or "seconds" not in frame or "value" not in frame:
        return ""
    worst = frame.groupby("measure")["seconds"].max().nlargest(WORST_SHOWN)
    done = frame.groupby("measure")["value"].apply(lambda values: values.notna().any())
    slowest = ", ".join(f"{name} {value:.1f} s" for name, value in worst.items())
    return f"{int(done.sum())} of {len(done)} measured; {slowest}"


def one(name: str, what: str, seconds: float, cpu_clock: bool) -> dict[str, Any]:
    """One call, in this process."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    if cpu_clock:
        time.monotonic = time.perf_counter = time.process_time
    result, took = call(name, what, seconds)
    return {"took": took, "longest": longest(result)}


def main() -> int:
    """Every call in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument(
        "--calls", nargs="*", default=["standard", "all", "compare", "bounds", "sensitivity", "diagonal"]
    )
    parser.add_argument("--seconds", nargs="*", type=float, default=SECONDS)
    parser.add_argument("--cpu-clock", action="store_true")
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one:
        print(json.dumps(one(given.one[0], given.one[1], float(given.one[2]), given.cpu_clock)))
        return 0
    missed = tried = 0
    for seconds in given.seconds:
        for name in given.networks:
            for what in given.calls:
                words = [sys.executable, "-m", "benchmarks.budgets", "--one", name, what, str(seconds)]
                done = subprocess.run(words + ["--cpu-clock"] * given.cpu_clock, capture_output=True, text=True)
                if done.returncode:
                    print(f"{name}, {what}, {seconds:g} s: {done.stderr.strip().splitlines()[-1]}", flush=True)
                    missed += 1
                    continue
                found = json.loads(done.stdout.splitlines()[-1])
                late = found["took"] > FACTOR * seconds + GRACE
                missed, tried = missed + late, tried + 1
                mark = "LATE" if late else "kept"
                print(f"{mark} {seconds:g} s: {found['took']:5.1f} s  {name}, {what}: {found['longest']}", flush=True)
    print(f"{tried} calls, {missed} took longer than {FACTOR:g} × their budget + {GRACE:g} s")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
