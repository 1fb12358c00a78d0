"""`run`: every trial of a sweep once, on this machine's cores or on a Ray cluster, whatever dies on the way.

Worker processes of this machine are started afresh (not forked), have threads of their own and are replaced if lost.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import warnings
from collections.abc import Mapping, Sequence
from typing import IO, Any

import pandas as pd
import torch

from flatscope.errors import InputError, Interrupted, refuse_unknown
from flatscope.inputs.factories import find_factory
from flatscope.progress import progress_bar
from flatscope.training.sweeps.configuration import key_of, plain_value, to_json
from flatscope.training.sweeps.ray_engine import run_on_ray
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.unit_queue import Outcome, SweepFailed, Unit, UnitQueue, attempt_unit

POLL_SECONDS = 0.1
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def run_in_this_process(pending: UnitQueue, work: str, store: Store) -> None:
    """All units one after the other in this very process."""
    while not pending.is_finished:
        unit = pending.take()
        if unit is None:
            threading.Event().wait(POLL_SECONDS)
            continue
        pending.settle(unit, attempt_unit(work, unit.configs, store, functools.partial(pending.report, unit)))


def run_on_worker_processes(
    pending: UnitQueue, work: str, store: Store, *, workers: int | None, cpus: float, gpus: float
) -> None:
    """All units on `workers` processes (as many as cores and GPUs allow, if None)."""
    if not store.is_shared:
        fix = "Take a folder, or workers=0 to stay in this process"
        raise InputError("a store that worker processes can see", repr(store.root), "sweep", fix)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = _gpus_of_workers(gpus)
    slots = max(1, int(cores / cpus)) if workers is None else workers
    slots = min(slots, pending.unfinished, len(devices) if gpus else slots)
    processes = _Workers(work, store, threads=max(1, int(cpus)))
    try:
        for slot in range(slots):
            processes.start(devices[slot] if gpus else None)
        while not pending.is_finished:
            processes.give_work(pending)
            processes.listen(pending)
    finally:
        processes.stop()
    for text in dict.fromkeys(processes.warnings):
        warnings.warn(text, stacklevel=3)


def _gpus_of_workers(gpus: float) -> list[str]:
    """For each worker that fits, the GPUs it may see."""
    if gpus <= 0:
        return []
    count = torch.cuda.device_count()
    seen = os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",") if os.environ.get("CUDA_VISIBLE_DEVICES") else []
    names = seen[:count] or [str(index) for index in range(count)]
    if gpus < 1:
        devices = [name for name in names for _ in range(int(1 / gpus))]
    else:
        each = math.ceil(gpus)
        devices = [",".join(names[start : start + each]) for start in range(0, len(names) - each + 1, each)]
    if not devices:
        raise InputError(f"{gpus:g} GPUs for each worker", f"{count} in this machine", where="sweep, gpus")
    return devices


class _Worker:
    """A process, the unit it is at, and a thread that passes on what it says."""

    def __init__(self, command: dict[str, Any], device: str | None, heard: queue.Queue[tuple[_Worker, Any]]) -> None:
        self.device, self.ready = device, False
        self.unit: Unit | None = None
        environment = dict(os.environ) | dict.fromkeys(THREAD_SETTINGS, str(command["threads"]))
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        if device is not None:
            environment["CUDA_VISIBLE_DEVICES"] = device
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed when the worker has ended
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flatscope.training.sweeps.worker", str(os.getpid())],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            env=environment,
            text=True,
            encoding="utf-8",
        )
        self._listener = threading.Thread(target=self._listen, args=(heard,), daemon=True)
        self._listener.start()
        self.say(command)

    def say(self, message: dict[str, Any]) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it is dead: the listener will say so
            self.process.stdin.write(json.dumps(message) + "\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Tell it that nothing more will come: it leaves."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()

    def end(self) -> str:
        """End the process if it has not ended; what it died of."""
        self.close()
        try:
            self.process.wait(timeout=2)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._listener.join()
        if self.process.stdout is not None:
            self.process.stdout.close()
        self.errors.seek(0)
        said = self.errors.read().decode(errors="replace").strip().splitlines()
        self.errors.close()
        code = self.process.returncode
        reason = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return f"{reason} ({said[-1]})" if said else reason

    def _listen(self, heard: queue.Queue[tuple[_Worker, Any]]) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):  # a line without end is the last word of a killed process
                heard.put((self, json.loads(line)))
        heard.put((self, None))


class _Workers:
    """The workers of one sweep."""

    def __init__(self, work: str, store: Store, threads: int) -> None:
        self._command = {"work": work, "store": store.root, "threads": threads}
        self._heard: queue.Queue[tuple[_Worker, Any]] = queue.Queue()
        self._workers: list[_Worker] = []
        self._failed_starts = 0
        self.warnings: list[str] = []

    def start(self, device: str | None) -> None:
        self._workers.append(_Worker(self._command, device, self._heard))

    def give_work(self, pending: UnitQueue) -> None:
        for worker in self._workers:
            if worker.unit is None and worker.ready:
                worker.unit = pending.take()
                if worker.unit is not None:
                    worker.say({"configs": to_json(worker.unit.configs)})

    def listen(self, pending: UnitQueue) -> None:
        try:
            worker, message = self._heard.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if message is None:
            self._replace_dead_worker(worker, pending)
        elif "ready" in message:
            worker.ready = True
        elif "warning" in message:
            self.warnings.append(message["warning"])
        elif worker.unit is not None and "outcome" in message:
            unit, worker.unit = worker.unit, None
            pending.settle(unit, Outcome(**message["outcome"]))
        elif worker.unit is not None:
            pending.report(worker.unit, message["fraction"], message["note"])

    def stop(self) -> None:
        for worker in self._workers:
            worker.close()  # all at once, so that they leave together
        for worker in self._workers:
            worker.end()

    def _replace_dead_worker(self, worker: _Worker, pending: UnitQueue) -> None:
        self._workers.remove(worker)
        reason = worker.end()
        self._failed_starts = 0 if worker.ready else self._failed_starts + 1
        if self._failed_starts > 3:
            fix = "Try `python -m flatscope.training.sweeps.worker`: it should wait silently for input"
            raise InputError("workers that start", f"several that died at once by {reason}", "sweep", fix)
        if worker.unit is not None:
            pending.lose(worker.unit, reason)
        self.start(worker.device)


ENGINES = ("local", "ray")


def run_units(
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
        show_progress: a bar with time left on a terminal, a line every ten seconds elsewhere.

    Returns:
        `store.frame()` of these configurations, in the order of `units`.

    Raises:
        SweepFailed: some trials could not be done, after all others were.
        Interrupted: Ctrl-C; the same call goes on where this one stopped.
    """
    _check_engine_settings(engine, workers, cpus, gpus)
    find_factory(work)  # a slip in the name is found here and not in every worker

    resolved = _units_without_repeats(units)
    store.clear_leftovers()
    missing = [Unit([config for config in configs if not store.is_sound(config)]) for configs in resolved]
    missing = [unit for unit in missing if unit.configs]
    for unit in missing:
        for config in unit.configs:
            store.forgive(config)
    total, left = sum(map(len, resolved)), sum(len(unit.configs) for unit in missing)

    with progress_bar("trials", total=total, lines=True, shown=show_progress) as advance:
        advance(total - left)
        pending = UnitQueue(missing, store, advance)
        try:
            if not missing:
                pass
            elif engine == "ray":
                run_on_ray(pending, work, store, workers=workers, address=address, cpus=cpus, gpus=gpus)
            elif workers == 0:
                run_in_this_process(pending, work, store)
            else:
                run_on_worker_processes(pending, work, store, workers=workers, cpus=cpus, gpus=gpus)
        except KeyboardInterrupt:
            done = sum(config in store for configs in resolved for config in configs)
            text = f"sweep stopped with {done} of {total} trials in {store.root}; the same call goes on from there"
            raise Interrupted(text) from None
    if pending.errors:
        raise SweepFailed(pending.errors, total)
    return store.frame(config for configs in resolved for config in configs)


def _check_engine_settings(engine: str, workers: int | None, cpus: float, gpus: float) -> None:
    """Refuse unknown engines and numbers that no machine has."""
    refuse_unknown(engine, ENGINES, "engine")
    if workers is not None and (isinstance(workers, bool) or not isinstance(workers, int) or workers < 0):
        raise InputError("a number of workers, or 0 for none but this process", repr(workers), "sweep, workers")
    if not cpus > 0 or not gpus >= 0:
        raise InputError("more than 0 cores and no less than 0 GPUs", f"{cpus} and {gpus}", "sweep, cpus and gpus")


def _units_without_repeats(units: Sequence[Sequence[Mapping[str, Any]]]) -> list[list[dict[str, Any]]]:
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
                fresh.append(plain_value(config))
        resolved.append(fresh)
    return resolved
