"""What a worker does with one unit, whichever engine it belongs to: claim its trials, run them, say how it went."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from flatscope.factories import find_factory
from flatscope.sweeps.store import Store

Report = Callable[[float, str], None]
Work = Callable[[list[dict[str, Any]], Store, Report], None]
TRACEBACK_LINES = 30


@dataclass(frozen=True)
class Outcome:
    """How an attempt at a unit ended.

    Attributes:
        kind: "done"; "busy" if another process is at some of its trials; "raised" if the work function failed.
        error: what it raised, in one line.
        details: the end of its traceback.
    """

    kind: Literal["done", "busy", "raised"]
    error: str = ""
    details: str = ""


def attempt(work: str, configs: Sequence[Mapping[str, Any]], store: Store, report: Report) -> Outcome:
    """Run the trials of a unit that are neither done nor claimed by others.

    Claims are taken in order and only up to the first trial that another process holds. Two processes that want one
    unit thus meet at its first trial, and one of them gets the whole of it.
    """
    try:
        function: Work = find_factory(work)
        with contextlib.ExitStack() as claims:
            mine, busy = [], False
            for config in configs:
                if config in store:
                    continue
                if not claims.enter_context(store.claim(config)):
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
