"""How results, notes and errors look on a terminal; standard output carries results only."""

from __future__ import annotations

import os
import shlex
import sys
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
    existing = next((folder for folder in path.parents if folder.exists()), path.parent)
    if path.is_dir() or not existing.is_dir() or not os.access(existing, os.W_OK):
        no_folder = "is not a folder" if not existing.is_dir() else "may not be written to"
        found = "a folder of that name" if path.is_dir() else f"{existing}, which {no_folder}"
        raise InputError("a place that can be written to", found, where=str(path), fix="Choose another path")


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
