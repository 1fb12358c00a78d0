"""`run`: every trial of a sweep once, on this machine's cores or on a Ray cluster, whatever dies on the way."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pandas as pd

from flatscope.errors import InputError, UnknownNameError
from flatscope.factories import find_factory
from flatscope.progress import Advance, progress
from flatscope.sweeps.board import Board, SweepFailed, Unit
from flatscope.sweeps.configuration import key_of, plain
from flatscope.sweeps.local_engine import run_here, run_local
from flatscope.sweeps.store import Store

__all__ = ["ENGINES", "SweepFailed", "SweepInterrupted", "run"]

ENGINES = ("local", "ray")


class SweepInterrupted(KeyboardInterrupt):
    """Ctrl-C during a sweep: everything finished is stored, and the same call goes on from there."""


def run(
    units: Sequence[Sequence[Mapping[str, Any]]],
    work: str,
    store: Store,
    *,
    engine: str = "local",
    workers: int | None = None,
    address: str | None = None,
    cpus: float = 1,
    gpus: float = 0,
    show_progress: bool = True,
) -> pd.DataFrame:
    """Run the trials that the store does not have, and return the results of all.

    A trial that the store has, whole, is not run again. Several runs may share a store at the same time, also from
    several machines: they divide the trials between them.

    Args:
        units: lists of configurations; one worker handles the trials of a list together.
        work: "package.module:function" or "file.py:function": a function of (configurations, store, report) that writes
            each trial to the store as it finishes; `report(fraction, note)` says how far it is.
        store: where results go.
        engine: "local" for processes on this machine, "ray" for a Ray cluster.
        workers: how many at once; None for as many as fit, 0 to stay in this process (local only).
        address: of a running Ray cluster; None starts one on this machine for the length of the run.
        cpus: cores for each unit: the number of threads, and of workers that fit.
        gpus: GPUs for each unit; a fraction shares one.
        show_progress: a bar with time left, on a terminal.

    Returns:
        `store.frame()` of these configurations, in the order of `units`.

    Raises:
        SweepFailed: some trials could not be done, after all others were.
        SweepInterrupted: Ctrl-C; the same call goes on where this one stopped.
    """
    if engine not in ENGINES:
        raise UnknownNameError.among(str(engine), ENGINES, "engine")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise InputError("a number of workers, or 0 for none but this process", repr(workers), "sweep, workers")
    if not cpus > 0 or not gpus >= 0:
        raise InputError("more than 0 cores and no less than 0 GPUs", f"{cpus} and {gpus}", "sweep, cpus and gpus")
    find_factory(work)  # a slip in the name is found here and not in every worker

    resolved = _once_each(units)
    store.clear_leftovers()
    missing = [Unit([config for config in configs if not store.is_sound(config)]) for configs in resolved]
    missing = [unit for unit in missing if unit.configs]
    for unit in missing:
        for config in unit.configs:
            store.forgive(config)
    total, left = sum(map(len, resolved)), sum(len(unit.configs) for unit in missing)

    bar: AbstractContextManager[Advance] = (
        progress("trials", total=total) if show_progress else nullcontext(lambda *_, **__: None)
    )
    with bar as advance:
        advance(total - left)
        board = Board(missing, store, advance)
        try:
            if not missing:
                pass
            elif engine == "ray":
                from flatscope.sweeps.ray_engine import run_ray

                run_ray(board, work, store, workers=workers, address=address, cpus=cpus, gpus=gpus)
            elif workers == 0:
                run_here(board, work, store)
            else:
                run_local(board, work, store, workers=workers, cpus=cpus, gpus=gpus)
        except KeyboardInterrupt:
            done = sum(config in store for configs in resolved for config in configs)
            text = f"sweep stopped with {done} of {total} trials in {store.root}; the same call goes on from there"
            raise SweepInterrupted(text) from None
    if board.errors:
        raise SweepFailed(board.errors, total)
    return store.frame(config for configs in resolved for config in configs)


def _once_each(units: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[dict[str, Any]]]:
    """Plain configurations, each where it comes first."""
    seen: set[str] = set()
    resolved: list[list[dict[str, Any]]] = []
    for index, unit in enumerate(units):
        if isinstance(unit, Mapping | str):
            fix = "A single trial is a list of one: [config]"
            raise InputError("lists of configurations", type(unit).__name__, f"sweep, unit {index}", fix)
        fresh = []
        for config in unit:
            if (key := key_of(config)) not in seen:
                seen.add(key)
                fresh.append(plain(config))
        resolved.append(fresh)
    return resolved
