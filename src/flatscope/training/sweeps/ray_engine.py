"""Units on a Ray cluster: a running one by its address, or one started here for the length of the sweep."""

from __future__ import annotations

import os
import socket
import sys
import time
from typing import Any

from flatscope.errors import InputError
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.unit_queue import MAX_LOST, Outcome, Unit, UnitQueue, at_most_every, attempt_unit

POLL_SECONDS = 0.2
REPORT_SECONDS = 1.0
ANSWER_SECONDS = 10.0
OBJECT_STORE_BYTES = 100 * 2**20  # results go through the store of trials, not through Ray's memory


def run_on_ray(
    pending: UnitQueue, work: str, store: Store, *, workers: int | None, address: str | None, cpus: float, gpus: float
) -> None:
    """All units as Ray tasks, each with its declared cores and GPUs; Ray runs those of a lost worker again."""
    ray = _import_ray()
    if not store.is_shared:
        raise InputError("a store that Ray's workers can see", repr(store.root), "sweep", "Take a folder or a bucket")
    started = not ray.is_initialized()
    if started:
        _connect_to_ray(ray, workers, address, cpus)
    try:
        _Tasks(ray, work, store, cpus, gpus).run(pending, workers)
    finally:
        if started:
            ray.shutdown()


def _import_ray() -> Any:
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # tasks without a GPU keep what they see
    os.environ.setdefault("RAY_DEDUP_LOGS", "0")
    try:
        import ray
    except ImportError as error:
        fix = "pip install ray, or take engine='local'"
        raise InputError("the package ray", "a machine without it", "sweep, engine='ray'", fix) from error
    return ray


def _connect_to_ray(ray: Any, workers: int | None, address: str | None, cpus: float) -> None:
    fix = "Start one with `ray start --head`, or leave the address out"
    host, _, port = (address or "").removeprefix("ray://").rpartition(":")
    if port.isdigit():  # not so for "auto"
        try:
            socket.create_connection((host, int(port)), timeout=ANSWER_SECONDS).close()
        except OSError as error:  # Ray itself would go on asking for minutes
            got = error.strerror or str(error)
            raise InputError("a Ray cluster that answers", got, f"address {address}", fix) from error
    quiet = {"log_to_driver": False, "logging_level": "error"}
    try:
        if address is not None:
            ray.init(address=address, **quiet)
        else:
            cores = None if workers is None else max(1, round(max(workers, 1) * cpus))
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            ray.init(num_cpus=cores, object_store_memory=OBJECT_STORE_BYTES, include_dashboard=False, **quiet)
    except (ConnectionError, RuntimeError, ValueError, TimeoutError) as error:
        got = str(error).splitlines()[0]
        raise InputError("a Ray cluster that answers", got, f"address {address}", fix) from error


class _Reports:
    """Lives on the cluster: how far each unit is, as its worker last said."""

    def __init__(self) -> None:
        self._last: dict[int, tuple[float, str]] = {}

    def put(self, number: int, fraction: float, note: str) -> None:
        self._last[number] = (fraction, note)

    def take(self) -> dict[int, tuple[float, str]]:
        last, self._last = self._last, {}
        return last


def _run_unit_as_task(
    work: str, configs: Any, root: str, threads: int, number: int, reports: Any, paths: list[str]
) -> Outcome:
    """Do the trials of a unit, as a task of the cluster."""
    import torch

    sys.path += [path for path in paths if path not in sys.path]
    torch.set_num_threads(threads)
    report = at_most_every(lambda fraction, note: reports.put.remote(number, fraction, note), REPORT_SECONDS)
    return attempt_unit(work, configs, Store(root), report)


class _Tasks:
    """The tasks under way and the units they stand for."""

    def __init__(self, ray: Any, work: str, store: Store, cpus: float, gpus: float) -> None:
        self._ray, self._work, self._store, self._threads = ray, work, store, max(1, int(cpus))
        self._submit = ray.remote(num_cpus=cpus, num_gpus=gpus, max_retries=MAX_LOST - 1)(_run_unit_as_task)
        self._reports = ray.remote(num_cpus=0)(_Reports).remote()
        self._running: dict[Any, tuple[int, Unit]] = {}
        self._count = 0

    def run(self, pending: UnitQueue, workers: int | None) -> None:
        """Keep the cluster busy until every unit is done."""
        slots = workers or max(1, int(self._ray.cluster_resources().get("CPU", 1)))
        asked = time.monotonic()
        try:
            while not pending.is_finished:
                while len(self._running) < slots and (unit := pending.take()) is not None:
                    self._start(unit)
                finished, _ = self._ray.wait(list(self._running), timeout=POLL_SECONDS) if self._running else ([], [])
                if not self._running:
                    time.sleep(POLL_SECONDS)
                for task in finished:
                    self._settle_task(task, pending)
                if time.monotonic() - asked > REPORT_SECONDS:
                    asked = time.monotonic()
                    self._show_progress(pending)
        finally:
            for task in self._running:
                self._ray.cancel(task, force=True)

    def _start(self, unit: Unit) -> None:
        self._count += 1
        task = self._submit.remote(
            self._work, unit.configs, self._store.root, self._threads, self._count, self._reports, sys.path
        )
        self._running[task] = (self._count, unit)

    def _settle_task(self, task: Any, pending: UnitQueue) -> None:
        _, unit = self._running.pop(task)
        try:
            outcome = self._ray.get(task)
        except self._ray.exceptions.RayError as error:  # it has been tried as often as a unit may be
            said = str(error).splitlines()
            outcome = Outcome("raised", f"{type(error).__name__}: {said[0] if said else ''}", str(error))
        pending.settle(unit, outcome)

    def _show_progress(self, pending: UnitQueue) -> None:
        units = dict(self._running.values())
        try:
            last = self._ray.get(self._reports.take.remote(), timeout=REPORT_SECONDS)
        except self._ray.exceptions.RayError:
            return  # the reporter is late or lost; only the bar suffers
        for number, (fraction, note) in last.items():
            if number in units:
                pending.report(units[number], fraction, note)
