"""Progress with time left: a bar on a terminal, for work of over two seconds; a line every ten seconds elsewhere.

The time left is said where it is known, and no share of the work is shown where it is not: from what has been done so
far, or from what the thing in hand tells of itself (`tell`: draws taken of those that seem to be needed).
"""

from __future__ import annotations

import _thread
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from rich.console import Console
from rich.markup import escape
from rich.progress import MofNCompleteColumn, Progress, ProgressColumn, TextColumn
from rich.progress import Task as BarTask
from rich.progress_bar import ProgressBar
from rich.text import Text

from flatscope.formatting import printable_text, time_in_words

DELAY_SECONDS = 2.0
LINE_SECONDS = 10.0
KNOWN_SHARE = 0.05  # of the work, before which the time left is not guessed from what has been done
INNER_SHARE = 0.02  # of the thing in hand, before which its time left is not guessed from what it tells

Advance = Callable[..., None]
_work: ContextVar[Work | None] = ContextVar("work in hand", default=None)


class Work:
    """Done share of some work, and the expected time that is left.

    Args:
        total: how many steps there will be; None if unknown.
    """

    def __init__(self, total: float | None) -> None:
        self.total, self.done, self.coming, self.note, self.slow = total, 0.0, 0.0, "", ""
        self.begun = self.last = time.monotonic()
        self._forget_inner_progress()

    def _forget_inner_progress(self) -> None:
        self._taken, self._needed, self._unit, self._spent = 0.0, 0.0, "", 0.0

    def advance(self, steps: float = 1, note: str = "", coming: float = 0.0, slow: str = "") -> None:
        """Steps that are done, and what comes now, with its expected steps and advice if it is slow."""
        if steps or coming:
            self.last = time.monotonic()
            self._forget_inner_progress()
        self.done, self.note, self.coming, self.slow = self.done + steps, note, coming, slow

    def tell(self, taken: float, needed: float | None, unit: str) -> None:
        """Report the progress of the current step."""
        self._taken, self._unit = taken, unit
        self._needed = self._needed if needed is None else needed

    def spend(self, steps: float) -> None:
        """Count finished steps of the current one; its own report is better."""
        self._spent += steps

    @property
    def _share_of_current_step(self) -> float:
        """Share of the thing in hand that is done; 0 where nothing tells."""
        if self._unit:
            return self._taken / self._needed if self._needed > 0 else 0.0
        return self._spent / self.coming if self.coming > 0 else 0.0

    @property
    def inner(self) -> str:
        """Progress of the current step in words, with advice where it takes more than expected; or empty."""
        return ", ".join(filter(None, [self._unit_words, self.slow if self._spent > self.coming > 0 else ""]))

    @property
    def _unit_words(self) -> str:
        if not self._unit:
            return ""
        if self._unit.startswith("%"):
            return f"{self._taken:.0f} {self._unit}"
        of = f" of about {self._needed:,.0f}" if self._taken < self._needed else ""
        return f"{self._taken:,.0f}{of} {self._unit}"

    def left(self, now: float) -> float | None:
        """Seconds until all is done; None where nothing tells."""
        if not self.total:
            return None
        elapsed, share = now - self.last, self._share_of_current_step
        known, remaining = INNER_SHARE <= share < 1, max(self.total - self.done - self.coming, 0.0)
        pace = (self.last - self.begun) / self.done if self.done > KNOWN_SHARE * self.total else None
        if pace is None and known and self.coming:
            pace = elapsed / share / self.coming
        if pace is None or (remaining + self.coming <= 0 and not known):
            return None
        if known:
            return elapsed * (1 - share) / share + remaining * pace
        left = (self.coming + remaining) * pace - elapsed
        return left if left > 0 and (not self.coming or elapsed <= self.coming * pace) else None

    def share(self, now: float) -> float | None:
        """Share of the time that is over; None where the time left is not known."""
        left, spent = self.left(now), now - self.begun
        if left is None:
            return None
        return spent / (spent + left) if spent + left > 0 else 0.0

    def words(self, now: float) -> str:
        """The line that is said where there is no terminal."""
        share, left = self.share(now), self.left(now)
        part = f" {share:.0%}" if share is not None else ""
        time_left = f", about {time_in_words(left)} left" if left is not None else ""
        what = ", ".join(filter(None, [self.note, self.inner]))
        return f"{part} after {now - self.begun:.0f} s{time_left}{f': {what}' if what else ''}"


def tell(taken: float, needed: float | None, unit: str) -> None:
    """Say how far the thing in hand is to whoever shows the progress of the whole; nothing where nobody does.

    Args:
        taken: draws, products or passes so far.
        needed: how many seem to be needed; None for as many as before.
        unit: their name, in the plural.
    """
    work = _work.get()
    if work is not None:
        work.tell(taken, needed, unit)


def spend(steps: float) -> None:
    """Say that so many of the expected steps of the thing in hand are done."""
    work = _work.get()
    if work is not None:
        work.spend(steps)


@contextmanager
def progress_bar(
    description: str,
    total: float | None,
    *,
    console: Console | None = None,
    lines: bool = False,
    counted: bool = True,
    shown: bool = True,
) -> Iterator[Advance]:
    """Yield `advance(steps=1, note="", coming=0, slow="")`; the bar appears on stderr after two seconds.

    `note` says what is being done, `coming` how many steps it is expected to take, `slow` what to do where it takes
    more. What is printed to stderr meanwhile stands above the bar. Inside of another progress nothing is drawn: its
    steps are told there.

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
    work = Work(total)
    if shown and _work.get() is not None:
        yield _telling(work, description)
        return
    before = _work.set(work if shown else _work.get())
    try:
        if shown and console.is_terminal:
            with _bar(description, work, console, counted):
                yield work.advance
        elif shown and lines:
            with _lines(description, work, console):
                yield work.advance
        else:
            yield work.advance
    finally:
        _work.reset(before)


def _telling(work: Work, description: str) -> Advance:
    """Steps of a part of some work, told to the whole."""

    def advance(steps: float = 1, note: str = "", coming: float = 0.0, slow: str = "") -> None:
        work.advance(steps, note, coming, slow)
        if work.total:
            tell(100 * work.done / work.total, 100, f"% of {description}{f' {note}' if note else ''}")

    return advance


class _Share(ProgressColumn):
    """The bar: how much of the time is over, moving where that is not known."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._state = work

    def render(self, task: BarTask) -> ProgressBar:
        """Share of the time that is over."""
        share = self._state.share(time.monotonic())
        return ProgressBar(1.0, share or 0.0, width=30, pulse=share is None, animation_time=task.get_time())


class _Left(ProgressColumn):
    """Time so far and time left, and how far the thing in hand is."""

    def __init__(self, work: Work) -> None:
        super().__init__()
        self._state = work

    def render(self, task: BarTask) -> Text:
        """In words."""
        del task
        now = time.monotonic()
        left = self._state.left(now)
        rest = f"{time_in_words(left)} left" if left is not None else f"after {time_in_words(now - self._state.begun)}"
        return Text(", ".join(filter(None, [rest, self._state.inner])))


@contextmanager
def _bar(description: str, work: Work, console: Console, counted: bool) -> Iterator[None]:
    count = (MofNCompleteColumn(),) if counted else ()
    columns = (TextColumn("{task.description}"), _Share(work), *count, _Left(work), TextColumn("{task.fields[note]}"))
    bar = Progress(*columns, console=console, transient=True)
    task = bar.add_task(description, total=work.total, note="")
    visible, plain = threading.Event(), work.advance

    def advance(steps: float = 1, note: str = "", coming: float = 0.0, slow: str = "") -> None:
        plain(steps, note, coming, slow)
        bar.update(task, completed=work.done, note=escape(printable_text(note)))

    def appear() -> None:
        if not over.wait(DELAY_SECONDS):
            visible.set()
            bar.start()

    over = threading.Event()
    work.advance = advance  # type: ignore[method-assign]
    waiting = threading.Thread(target=appear, daemon=True)
    waiting.start()
    try:
        yield
    finally:
        over.set()
        waiting.join()
        if visible.is_set():
            bar.stop()


@contextmanager
def _lines(description: str, work: Work, console: Console) -> Iterator[None]:
    """A line every ten seconds, by a thread: one step may take minutes.

    Most work is over in milliseconds: nobody waits for the thread to begin or to end. It says nothing after the end.
    """
    over = False
    working, speaking = threading.Lock(), threading.Lock()
    working.acquire()

    def speak() -> None:
        while not working.acquire(timeout=LINE_SECONDS):
            with speaking:
                if over:
                    return
                text = printable_text(f"{description}:{work.words(time.monotonic())}")
                console.print(text, soft_wrap=True, markup=False)

    _thread.start_new_thread(speak, ())
    try:
        yield
    finally:
        with speaking:
            over = True
        working.release()
