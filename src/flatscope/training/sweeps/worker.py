"""A worker process of the local engine: `python -m flatscope.training.sweeps.worker`, started by `engines`.

Units come in on standard input and reports go out on standard output, one JSON text a line. When the input ends, the
driver is gone, whatever it died of, and the worker leaves at once: a half-written trial does not count. Where it can,
the system ends the worker with its driver, also while it loads packages and cannot read.
"""
# ruff: noqa: E402  what is asked of the system comes before torch is loaded, which takes seconds

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import os
import queue
import signal
import sys
import threading
import warnings
from typing import Any

SET_DEATH_SIGNAL = 1  # of Linux's prctl
if __name__ == "__main__" and sys.platform == "linux":
    with contextlib.suppress(OSError, AttributeError):  # a C library without it: the end of the input must do
        ctypes.CDLL(None).prctl(SET_DEATH_SIGNAL, signal.SIGKILL)
    if sys.argv[1:] and os.getppid() != int(sys.argv[1]):  # the driver died before it was asked for
        os._exit(0)

import torch

from flatscope.training.sweeps.configuration import from_json
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.unit_queue import at_most_every, attempt_unit

REPORT_SECONDS = 0.2


def main() -> None:
    """Do units until the input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the whole group; the driver decides what it means
    # Results have standard output to themselves: what a work function prints goes to standard error.
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    lock = threading.Lock()

    def send(**message: Any) -> None:
        with lock:
            out.write(json.dumps(message) + "\n")
            out.flush()

    units: queue.Queue[dict[str, Any]] = queue.Queue()
    threading.Thread(target=_read_units, args=(units,), daemon=True).start()
    first = units.get()
    torch.set_num_threads(first["threads"])
    torch.set_num_interop_threads(1)
    store = Store(first["store"])
    warnings.showwarning = lambda message, *_, **__: send(warning=str(message))
    report = at_most_every(lambda fraction, note: send(fraction=fraction, note=note), REPORT_SECONDS)
    send(ready=True)
    while True:
        unit = units.get()
        outcome = attempt_unit(first["work"], from_json(unit["configs"]), store, report)
        send(outcome=dataclasses.asdict(outcome))


def _read_units(units: queue.Queue[dict[str, Any]]) -> None:
    for line in sys.stdin:
        units.put(json.loads(line))
    os._exit(0)


if __name__ == "__main__":
    main()
