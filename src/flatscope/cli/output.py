"""How results, notes and errors look on a terminal; standard output carries results only."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flatscope.errors import InputError

if TYPE_CHECKING:
    from flatscope.table import Table

RIGHT = ("value", "± s.e.", "train", "test", "classes", "bytes")


def show_error(message: str) -> None:
    """An error, in red, on stderr."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), message))


def say(message: str) -> None:
    """What a command is doing, on stderr."""
    Console(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)


def show_note(message: str) -> None:
    """A remark on stderr."""
    Console(stderr=True, soft_wrap=True).print(Text.assemble(("Note: ", "bold yellow"), message))


def note_missing_weights(weights: Path | None) -> None:
    """Say where the numbers come from if no weights were given."""
    if weights is None:
        show_note("no --weights were given: these are the weights that the factory made")


def note_found_initial(given: Path | None, used: Path | None) -> None:
    """Say where the weights before training come from if nobody named them."""
    if given is None and used is not None:
        show_note(f"weights before training are those in {used}")


def command_line() -> str:
    """The command as it was typed, for the provenance of what it writes."""
    return shlex.join(["flatscope", *sys.argv[1:]])


def show_warning(message: Any, *_: Any, **__: Any) -> None:
    """A Python warning as a note, without file and line."""
    show_note(str(message))


def check_place(path: Path, endings: Iterable[str]) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    if path.suffix.lower() not in endings:
        raise InputError(f"a file name ending in {', '.join(endings)}", str(path), where="output")
    _refuse_unwritable(path, path.parent)


def check_folder(folder: Path) -> None:
    """Refuse a folder in which no file could be written, before the work whose results it is to hold."""
    _refuse_unwritable(folder, folder)


def _refuse_unwritable(path: Path, folder: Path) -> None:
    try:
        found = "a folder of that name" if path != folder and path.is_dir() else _hindrance(folder)
    except OSError as problem:  # a name that is too long, a folder that may not be looked into
        found = problem.strerror or str(problem)
    if found:
        raise InputError("a place that can be written to", found, where=str(path), fix="Choose another path")


def _hindrance(folder: Path) -> str:
    """Why nothing could be written into a folder, which need not be there yet; nothing is left behind."""
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not existing.is_dir():
        return f"{existing}, which is not a folder"
    # Tried and not asked: some file systems, as that of /proc, permit by their modes what they do not do. A name of
    # its own in the nearest folder that is there, since several processes may look at one place at once.
    attempt = tempfile.TemporaryFile if existing == folder else tempfile.TemporaryDirectory
    try:
        with attempt(dir=existing):
            return ""
    except OSError as problem:
        return f"{existing}, which may not be written to ({problem.strerror or problem})"


def show_table(table: Table, title: str = "") -> None:
    """A measured table for people."""
    show_grid(["measure", "layer", "value", "± s.e.", "exact", "remark"], table.lines(), title)


def show_grid(header: list[str], rows: list[list[str]], title: str = "") -> None:
    """Rows of text as a table on stdout; values to the right."""
    grid = Grid(title=title or None, title_justify="left", header_style="bold")
    for name in header:
        grid.add_column(name, justify="right" if name in RIGHT else "left", overflow="fold")
    for row in rows:
        grid.add_row(*[Text(cell) for cell in row])
    console().print(grid)


def console() -> Console:
    """Where results go; piped to a file or a pager there is no width to fit."""
    screen = Console()
    return screen if screen.is_terminal else Console(width=160)
