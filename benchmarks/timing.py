"""Time two ways of doing the same thing in turn, so that a busy moment of the machine hits both."""

from __future__ import annotations

import platform
import resource
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flatscope.inputs import load
from flatscope.training import TrainConfig, build, train


@dataclass(frozen=True)
class Row:
    """One line of the result: what was done, how long ours and the peer's took, and the target."""

    what: str
    ours: float
    peer: float
    peer_name: str
    target: str
    met: bool
    note: str = ""

    def cells(self) -> list[str]:
        ratio = f"{self.peer / self.ours:.2f}×" if self.ours else "—"
        return [
            self.what,
            f"{self.ours:.2f} s",
            f"{self.peer:.2f} s ({self.peer_name})",
            ratio,
            self.target,
            "yes" if self.met else "NO",
            self.note,
        ]


def in_turn(*functions: Callable[[], Any], repeats: int = 3) -> list[float]:
    """Best time of each function; the functions take turns."""
    best = [float("inf")] * len(functions)
    for _ in range(repeats):
        for i, function in enumerate(functions):
            begun = time.perf_counter()
            function()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            best[i] = min(best[i], time.perf_counter() - begun)
    return best


def trained_lenet(n: int = 2_000, device: str = "cpu") -> tuple[torch.nn.Sequential, torch.Tensor, torch.Tensor]:
    """LeNet-5 trained for a few epochs on n real CIFAR-10 images."""
    data = load("cifar10", train_size=n, test_size=0, seed=0)
    model = build("lenet5", seed=0).to(device)
    train(model, data.train, TrainConfig(lr=0.02, momentum=0.9, batch_size=64, epochs=12), show_progress=False)
    x, y = (value.to(device) for value in data.train)
    return model, x, y  # type: ignore[return-value]


class PeakMemory:
    """Largest resident memory inside a block above what it had at the start; sampled 50 times a second."""

    def __enter__(self) -> PeakMemory:
        self._start = self._peak = self._now()
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    @property
    def above_start_mib(self) -> float:
        return (self._peak - self._start) / 2**20

    def _watch(self) -> None:
        while not self._done.wait(0.02):
            self._peak = max(self._peak, self._now())

    @staticmethod
    def _now() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def machine() -> str:
    cpu = next(
        (line.split(":")[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line),
        platform.machine(),
    )
    gpu = f", {torch.cuda.get_device_name()}" if torch.cuda.is_available() else ""
    return (
        f"{cpu}, {torch.get_num_threads()} threads{gpu}, torch {torch.__version__}, Python {platform.python_version()}"
    )
