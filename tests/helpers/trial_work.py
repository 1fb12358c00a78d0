"""Work functions for the tests of sweeps, in a module that workers import by name."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import torch

from flatscope.training.sweeps.store import Store

Report = Callable[[float, str], None]


def log_of(store: Store) -> Path:
    """Beside the store: a line for every trial begun and every trial completed."""
    return Path(f"{store.root}.log")


def note(store: Store, *words: object) -> None:
    with log_of(store).open("a") as file:  # opened to append: lines of several processes do not mix
        file.write(" ".join(map(str, words)) + "\n")


def completions(store: Store) -> list[str]:
    return [line.split()[1] for line in log_of(store).read_text().splitlines() if line.startswith("completed")]


def write_one(config: dict[str, Any], store: Store) -> None:
    x = float(config["x"])
    metrics = {"square": x * x, "third": 1 / (x - 3) if x != 3 else float("nan"), "note": f"x is {x}"}
    store.write(
        config,
        metrics,
        weights={"w": torch.full((4, 3), x)},
        frames={"history": pd.DataFrame({"epoch": [1, 2], "loss": [x, x / 2]})},
    )


def square(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    for index, config in enumerate(configs):
        key = store.key(config)
        note(store, "began", key, os.getpid(), time.time())
        time.sleep(config.get("seconds", 0))
        write_one(config, store)
        note(store, "completed", key, os.getpid(), time.time())
        report((index + 1) / len(configs), f"x = {config['x']}")


def square_or_raise(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    for config in configs:
        if config["x"] == 2:
            raise ValueError("two is not allowed")
        square([config], store, report)


def die_once(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """The first worker to see x = 2 is killed there, as by the system when memory runs out."""
    for config in configs:
        if config["x"] == 2 and "dying" not in log_of(store).read_text():
            note(store, "dying", os.getpid())
            os.kill(os.getpid(), signal.SIGKILL)
        square([config], store, report)


def die_always(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    for config in configs:
        if config["x"] == 2:
            note(store, "dying", os.getpid())
            sys.stderr.write("out of memory\n")
            sys.stderr.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        square([config], store, report)


def forget(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Comes back without a result."""


def tell_threads(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Prints, warns, and says how many threads it may use."""
    sys.stdout.write("this is not a message\n")
    warnings.warn("look out", UserWarning, stacklevel=1)
    for config in configs:
        metrics = {"threads": torch.get_num_threads(), "omp": os.environ["OMP_NUM_THREADS"], "process": os.getpid()}
        store.write(config, metrics)
