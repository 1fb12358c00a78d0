"""Units on worker processes of this machine: started afresh (not forked), with their own threads, replaced if lost."""

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
from typing import IO, Any

import torch

from flatscope.errors import InputError
from flatscope.sweeps.attempt import Outcome, attempt
from flatscope.sweeps.board import Board, Unit
from flatscope.sweeps.configuration import to_json
from flatscope.sweeps.store import Store

POLL_SECONDS = 0.1
THREAD_SETTINGS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS", "NUMEXPR_NUM_THREADS")


def run_here(board: Board, work: str, store: Store) -> None:
    """All units one after the other in this very process."""
    while not board.is_finished:
        unit = board.take()
        if unit is None:
            threading.Event().wait(POLL_SECONDS)
            continue
        board.settle(unit, attempt(work, unit.configs, store, functools.partial(board.report, unit)))


def run_local(board: Board, work: str, store: Store, *, workers: int | None, cpus: float, gpus: float) -> None:
    """All units on `workers` processes (as many as cores and GPUs allow, if None)."""
    if not store.is_shared:
        fix = "Take a folder, or workers=0 to stay in this process"
        raise InputError("a store that worker processes can see", repr(store.root), "sweep", fix)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    devices = _devices(gpus)
    slots = max(1, int(cores / cpus)) if workers is None else workers
    slots = min(slots, board.unfinished, len(devices) if gpus else slots)
    crew = _Crew(work, store, threads=max(1, int(cpus)))
    try:
        for slot in range(slots):
            crew.hire(devices[slot] if gpus else None)
        while not board.is_finished:
            crew.give_work(board)
            crew.listen(board)
    finally:
        crew.dismiss()
    for text in dict.fromkeys(crew.warnings):
        warnings.warn(text, stacklevel=3)


def _devices(gpus: float) -> list[str]:
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
        self.errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115  closed when the worker is buried
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flatscope.sweeps.worker"],
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

    def bury(self) -> str:
        """End the process if it has not ended; what it died of."""
        if self.process.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self.process.stdin.close()
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


class _Crew:
    """The workers of one sweep."""

    def __init__(self, work: str, store: Store, threads: int) -> None:
        self._command = {"work": work, "store": store.root, "threads": threads}
        self._heard: queue.Queue[tuple[_Worker, Any]] = queue.Queue()
        self._workers: list[_Worker] = []
        self._stillborn = 0
        self.warnings: list[str] = []

    def hire(self, device: str | None) -> None:
        self._workers.append(_Worker(self._command, device, self._heard))

    def give_work(self, board: Board) -> None:
        for worker in self._workers:
            if worker.unit is None and worker.ready:
                worker.unit = board.take()
                if worker.unit is not None:
                    worker.say({"configs": to_json(worker.unit.configs)})

    def listen(self, board: Board) -> None:
        try:
            worker, message = self._heard.get(timeout=POLL_SECONDS)
        except queue.Empty:
            return
        if message is None:
            self._replace(worker, board)
        elif "ready" in message:
            worker.ready = True
        elif "warning" in message:
            self.warnings.append(message["warning"])
        elif worker.unit is not None and "outcome" in message:
            unit, worker.unit = worker.unit, None
            board.settle(unit, Outcome(**message["outcome"]))
        elif worker.unit is not None:
            board.report(worker.unit, message["fraction"], message["note"])

    def dismiss(self) -> None:
        for worker in self._workers:
            if worker.process.stdin is not None:
                with contextlib.suppress(BrokenPipeError):
                    worker.process.stdin.close()  # all at once, so that they leave together
        for worker in self._workers:
            worker.bury()

    def _replace(self, worker: _Worker, board: Board) -> None:
        self._workers.remove(worker)
        reason = worker.bury()
        self._stillborn = 0 if worker.ready else self._stillborn + 1
        if self._stillborn > 3:
            fix = "Try `python -m flatscope.sweeps.worker`: it should wait silently for input"
            raise InputError("workers that start", f"several that died at once by {reason}", "sweep", fix)
        if worker.unit is not None:
            board.lose(worker.unit, reason)
        self.hire(worker.device)
