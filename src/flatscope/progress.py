"""Progress with time left: a bar on a terminal, for work of over two seconds; a line every ten seconds elsewhere."""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from flatscope.formatting import printable

DELAY_SECONDS = 2.0
LINE_SECONDS = 10.0
KNOWN_SHARE = 0.05  # of the work, before which the time left is not guessed
NEARLY_ALL = 0.99  # said of work that takes longer than expected

Advance = Callable[..., None]


@contextmanager
def progress(
    description: str,
    total: float | None,
    *,
    console: Console | None = None,
    lines: bool = False,
    counted: bool = True,
    shown: bool = True,
) -> Iterator[Advance]:
    """Yield `advance(steps=1, note="")`; the bar appears on stderr once the work has run for two seconds.

    `note` says what is being done. What is printed to stderr meanwhile stands above the bar.

    Args:
        description: what is being done, in one or two words.
        total: how many steps there will be; None if unknown.
        console: where to draw; stderr by default, so that stdout stays clean for `--json`.
        lines: whether to print a line every ten seconds where there is no terminal; silent there by default.
        counted: whether steps are things to count; False where they are shares of the work.
        shown: False where the caller wants no progress.
    """
    console = console or Console(stderr=True)
    shown = shown and os.environ.get("RANK", "0") == "0"  # of several ranks the first one speaks
    if shown and console.is_terminal:
        with _bar(description, total, console, counted) as advance:
            yield advance
    elif shown and lines:
        with _lines(description, total, console) as advance:
            yield advance
    else:
        yield lambda steps=1, note="": None


@contextmanager
def _bar(description: str, total: float | None, console: Console, counted: bool) -> Iterator[Advance]:
    count = (MofNCompleteColumn(),) if counted else ()
    columns = (TextColumn("{task.description}"), BarColumn(), *count, TimeRemainingColumn())
    bar = Progress(*columns, TextColumn("{task.fields[note]}"), console=console, transient=True)
    task = bar.add_task(description, total=total, note="")
    begun = time.monotonic()
    visible = False

    def advance(steps: float = 1, note: str = "") -> None:
        nonlocal visible
        bar.update(task, advance=steps, note=escape(printable(note)))
        if not visible and time.monotonic() - begun > DELAY_SECONDS:
            bar.start()
            visible = True

    try:
        yield advance
    finally:
        if visible:
            bar.stop()


@contextmanager
def _lines(description: str, total: float | None, console: Console) -> Iterator[Advance]:
    """A line every ten seconds, by a thread: one step may take minutes.

    Most work is over in milliseconds: nobody waits for the thread to begin or to end. It says nothing after the end.
    """
    begun = last = time.monotonic()
    done, doing, over = 0.0, "", False
    working, speaking = threading.Lock(), threading.Lock()
    working.acquire()

    def advance(steps: float = 1, note: str = "") -> None:
        nonlocal done, doing, last
        done, doing, last = done + steps, note, time.monotonic() if steps else last

    def speak() -> None:
        while not working.acquire(timeout=LINE_SECONDS):
            with speaking:
                if over:
                    return
                line()

    def line() -> None:
        spent = time.monotonic() - begun
        share = done / total if total else 0.0
        left = ""
        if KNOWN_SHARE < share < 1:  # guessed when the last step ended: a long one must not raise it while it runs
            whole = (last - begun) / share
            left = f", about {whole - spent:.0f} s left" if whole > spent else ", longer than expected"
            share = max(share, min(spent / whole, NEARLY_ALL))  # else it stands still while the time left runs out
        part = f" {share:.0%}" if total else ""
        what = f": {doing}" if doing else ""
        console.print(printable(f"{description}:{part} after {spent:.0f} s{left}{what}"), soft_wrap=True, markup=False)

    _thread.start_new_thread(speak, ())
    try:
        yield advance
    finally:
        with speaking:
            over = True
        working.release()
