"""A progress bar with time left, for work that takes more than two seconds on a terminal; silent elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

DELAY_SECONDS = 2.0

Advance = Callable[..., None]


@contextmanager
def progress(description: str, total: float | None, *, console: Console | None = None) -> Iterator[Advance]:
    """Yield `advance(steps=1, note="")`; the bar appears on stderr once the work has run for two seconds.

    Args:
        description: what is being done, in one or two words.
        total: how many steps there will be; None if unknown.
        console: where to draw; stderr by default, so that stdout stays clean for `--json`.
    """
    console = console or Console(stderr=True)
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":  # of several ranks the first one speaks
        yield lambda steps=1, note="": None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True)
    task = bar.add_task(description, total=total, note="")
    begun = time.monotonic()
    shown = False

    def advance(steps: float = 1, note: str = "") -> None:
        nonlocal shown
        bar.update(task, advance=steps, note=note)
        if not shown and time.monotonic() - begun > DELAY_SECONDS:
            bar.start()
            shown = True

    try:
        yield advance
    finally:
        if shown:
            bar.stop()
