"""The state of a sweep that every engine keeps in the same way, and what a worker does with one unit of it."""

from __future__ import annotations

import contextlib
import random
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from flatscope.errors import FlatscopeError
from flatscope.inputs.factories import find_factory
from flatscope.progress import Advance
from flatscope.training.sweeps.store import Store

Report = Callable[[float, str], None]
Work = Callable[[list[dict[str, Any]], Store, Report], None]
TRACEBACK_LINES = 30


def at_most_every(send: Report, seconds: float) -> Report:
    """The function, called at most once in so many seconds."""
    last = [0.0]

    def report(fraction: float, note: str = "") -> None:
        if time.monotonic() - last[0] > seconds:
            last[0] = time.monotonic()
            send(float(fraction), str(note))

    return report


@dataclass(frozen=True)
class Outcome:
    """End of an attempt at a unit."""

    # "done"; "busy" if another process is at some of its trials; "raised" if the work function failed
    kind: Literal["done", "busy", "raised"]
    error: str = ""  # what it raised, in one line
    details: str = ""  # the end of its traceback


def attempt_unit(work: str, configs: Sequence[Mapping[str, Any]], store: Store, report: Report) -> Outcome:
    """Run the trials of a unit that are not done and that no other process holds.

    Leases are taken in order and only up to the first trial that another process holds. Two processes that want one
    unit thus meet at its first trial, and one of them gets the whole of it.
    """
    try:
        function: Work = find_factory(work)
        with contextlib.ExitStack() as leases:
            mine, busy = [], False
            for config in configs:
                if config in store:
                    continue
                if not leases.enter_context(store.claim(config)):
                    busy = config not in store  # it may have been finished just now
                    if busy:
                        break
                    continue
                mine.append(dict(config))
            if mine:
                function(mine, store, report)
            absent = [config for config in mine if config not in store]
    except Exception as error:
        said = str(error).splitlines()
        lines = traceback.format_exc().splitlines()[-TRACEBACK_LINES:]
        return Outcome("raised", f"{type(error).__name__}: {said[0] if said else ''}", "\n".join(lines))
    if absent:
        return Outcome("raised", f"{work} came back without a result for {len(absent)} of {len(mine)} trials")
    return Outcome("busy" if busy else "done")


MAX_LOST = 4  # workers that may die over one unit before it is given up
BUSY_SECONDS = (0.2, 0.6)  # until a unit that others are at is asked for again; random, so that two do not keep step


class SweepFailed(FlatscopeError):  # noqa: N818  what happened, as the other errors are named
    """Some trials of a sweep could not be done; the others are in the store."""

    def __init__(self, errors: Mapping[str, str], total: int) -> None:
        self.errors = dict(errors)
        self._total = total
        alike: dict[str, list[str]] = {}  # missing data fail every trial, in the same words
        for key, error in errors.items():
            alike.setdefault(error, []).append(key[:8])
        shown = [
            f"{keys[0]}{f' and {len(keys) - 1} more' if len(keys) > 1 else ''}: {error}"
            for error, keys in list(alike.items())[:5]
        ]
        left = sum(map(len, list(alike.values())[5:]))
        more = [f"and {left} more"] if left else []
        kept = "The others are stored; " if len(self.errors) < total else "None is stored; "
        fix = f"{kept}running the sweep again tries only these"
        super().__init__(f"{total} trials done", f"{len(errors)} that failed ({'; '.join(shown + more)})", "sweep", fix)

    def __reduce__(self) -> tuple[type[SweepFailed], tuple[dict[str, str], int]]:
        return type(self), (self.errors, self._total)


@dataclass
class Unit:
    """Trials that one worker handles together."""

    configs: list[dict[str, Any]]  # of its trials that were not done when the sweep began
    lost: int = 0  # how many workers died over it since one of its trials was finished
    absent: int = -1  # how many of its trials were missing when a worker died last
    fraction: float = 0.0  # how far its present worker is, from 0 to 1
    not_before: float = field(default=0.0, repr=False)


class UnitQueue:
    """Units that wait, run or failed; the engine takes units from it and brings their outcomes back."""

    def __init__(self, units: Sequence[Unit], store: Store, advance: Advance) -> None:
        self._waiting = list(units)
        self._running: list[Unit] = []
        self._store, self._advance = store, advance
        self._finished = self._shown = 0.0
        self.errors: dict[str, str] = {}

    @property
    def is_finished(self) -> bool:
        """True if nothing waits and nothing runs."""
        return not self._waiting and not self._running

    @property
    def unfinished(self) -> int:
        """Number of units that wait or run."""
        return len(self._waiting) + len(self._running)

    def take(self) -> Unit | None:
        """The next unit that may run now, if there is one."""
        now = time.monotonic()
        for index, unit in enumerate(self._waiting):
            if unit.not_before <= now:
                self._running.append(self._waiting.pop(index))
                return unit
        return None

    def report(self, unit: Unit, fraction: float, note: str = "") -> None:
        """Show how far a running unit is."""
        unit.fraction = min(max(float(fraction), 0.0), 1.0)
        self._show_progress(note)

    def settle(self, unit: Unit, outcome: Outcome) -> None:
        """A worker came back with the unit."""
        self._running.remove(unit)
        unit.fraction = 0.0
        if outcome.kind == "busy":
            unit.not_before = time.monotonic() + random.uniform(*BUSY_SECONDS)
            self._waiting.append(unit)
        else:
            if outcome.kind == "raised":
                self._fail(unit, outcome.error, outcome.details)
            self._finished += len(unit.configs)
        self._show_progress()

    def lose(self, unit: Unit, reason: str) -> None:
        """The unit's worker died: run the unit again, after the others, unless it has cost too many workers.

        A worker that had finished a trial of the unit is not counted: what killed it may have been chance, and the unit
        gets done.
        """
        absent = sum(config not in self._store for config in unit.configs)
        unit.lost = unit.lost + 1 if absent == unit.absent else 1
        unit.absent = absent
        if unit.lost < MAX_LOST:
            self._running.remove(unit)
            unit.fraction = 0.0
            self._waiting.append(unit)
        else:
            text = f"its worker died {unit.lost} times, last by {reason}"
            self.settle(unit, Outcome("raised", text))

    def _fail(self, unit: Unit, error: str, details: str) -> None:
        for config in unit.configs:
            if config not in self._store:
                self.errors[self._store.key(config)] = error
                self._store.fail(config, f"{error}\n{details}".strip())

    def _show_progress(self, note: str = "") -> None:
        now = self._finished + sum(unit.fraction * len(unit.configs) for unit in self._running)
        self._advance(now - self._shown, note=note)
        self._shown = now
