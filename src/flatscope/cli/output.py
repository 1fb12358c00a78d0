"""How results, notes and errors look on a terminal; standard output carries results only."""

from __future__ import annotations

import shlex
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer
from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table as Grid
from rich.text import Text

from flatscope.cli.options import OutputOptions
from flatscope.errors import FlatscopeError, InputError
from flatscope.formatting import printable_text

if TYPE_CHECKING:
    from flatscope.result import Result

PADDING = 3  # columns of blank beside each column of a table
RIGHT = ("value", "± s.e.", "train", "test", "classes", "bytes")


class Screen(Console):
    """A terminal that no text can steer: names in files are as their writers pleased."""

    def print(self, *objects: Any, **settings: Any) -> None:
        """As rich prints, without control characters in texts."""
        super().print(*(_without_control_characters(each) for each in objects), **settings)


def _without_control_characters(shown: Any) -> Any:
    if isinstance(shown, str):
        return printable_text(shown)
    if isinstance(shown, Text):
        shown = shown.copy()
        shown.plain = printable_text(shown.plain)  # as long as before: what is bold stays so
    return shown


def show_error(message: str) -> None:
    """An error, in red, on stderr."""
    Screen(stderr=True, soft_wrap=True).print(Text.assemble(("Error: ", "bold red"), message))


def show_progress_line(message: str) -> None:
    """Print the progress of a command to stderr."""
    Screen(stderr=True, soft_wrap=True).print(message, markup=False, highlight=False)


def show_note(message: str) -> None:
    """A remark on stderr."""
    Screen(stderr=True, soft_wrap=True).print(Text.assemble(("Note: ", "bold yellow"), message))


def note_missing_weights(model: str, weights: Path | None) -> None:
    """Say where the numbers come from if no weights were given; those of a hub come with the model."""
    if weights is None and not model.startswith(("timm:", "hf:")):
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


def check_output_file(path: Path, endings: Iterable[str]) -> None:
    """Refuse a file that could not be written, before the work whose result it is to hold."""
    if path.suffix.lower() not in endings:
        raise InputError(f"a file name ending in {', '.join(endings)}", str(path), where="output")
    _refuse_unwritable(path, path.parent)


def check_output_folder(folder: Path) -> None:
    """Refuse a folder in which no file could be written, before the work whose results it is to hold."""
    _refuse_unwritable(folder, folder)


def _refuse_unwritable(path: Path, folder: Path) -> None:
    try:
        reason = "a folder of that name" if path != folder and path.is_dir() else _reason_unwritable(folder)
    except OSError as problem:  # a name that is too long, a folder that may not be looked into
        reason = problem.strerror or str(problem)
    if reason:
        raise InputError("a place that can be written to", reason, where=str(path), fix="Choose another path")


def _reason_unwritable(folder: Path) -> str:
    """Why nothing could be written into a folder, which need not be there yet; nothing is left behind."""
    existing = next((place for place in (folder, *folder.parents) if place.exists()), folder)
    if not existing.is_dir():
        return f"{existing}, which is not a folder"
    if existing != folder and existing == Path(existing.anchor) and folder.is_absolute():
        return f"{folder}, for which a folder would be made in {existing} itself"  # most likely a slip
    # Tried and not asked: some file systems, as that of /proc, permit by their modes what they do not do. A name of
    # its own in the nearest folder that is there, since several processes may look at one place at once.
    attempt = tempfile.TemporaryFile if existing == folder else tempfile.TemporaryDirectory
    try:
        with attempt(dir=existing):
            return ""
    except OSError as problem:
        return f"{existing}, which may not be written to ({problem.strerror or problem})"


def check_outputs(given: OutputOptions, kind: type[Result]) -> None:
    """Refuse files and a page that could not be written."""
    for path in given.out or ():
        check_output_file(path, tuple(dict.fromkeys((*kind.ENDINGS, ".html"))))
    if given.report is not None:
        check_output_file(given.report, (".html",))


def write_and_show_result(
    result: Result,
    given: OutputOptions,
    show: Callable[[], None],
    *,
    page: object = None,
    beside: Mapping[str, Result] | None = None,
    as_json: Callable[[], str] | None = None,
    unfinished: bool = False,
) -> None:
    """Write what was asked for, and only then show it: whoever reads the first lines alone still has the files.

    Where writing fails, it is shown before that is said: the work of minutes is not lost with a full disk.

    Args:
        result: what --out writes.
        given: the options.
        show: prints it for people.
        page: what a page shows; the result by default.
        beside: results that go to files beside that of --out, by what their names end with.
        as_json: what --json prints; the result by default.
        unfinished: whether it was interrupted: its files are named so, and whole ones of an earlier run stay.
    """

    def tell() -> None:
        if given.as_json:
            typer.echo((as_json or result.to_json)())
        else:
            show()

    try:
        _write_result_files(result, given, page, beside or {}, "-unfinished" if unfinished else "")
    except (FlatscopeError, OSError):
        tell()
        raise
    tell()


def _write_result_files(
    result: Result, given: OutputOptions, page: object, beside: Mapping[str, Result], mark: str
) -> None:
    pages = [given.report.with_stem(f"{given.report.stem}{mark}")] if given.report is not None else []
    for path in (path.with_stem(f"{path.stem}{mark}") for path in given.out or ()):
        if path.suffix.lower() == ".html" and ".html" not in result.ENDINGS:
            pages.append(path)
            continue
        result.save(path)
        show_note(f"{result.WORD} written to {path}")
        for ending, other in beside.items():
            named = path.with_stem(f"{path.stem}-{ending}")
            other.save(named)
            show_note(f"{ending} written to {named}")
    for path in pages:
        from flatscope.reports.page import report  # the pages of every kind of result

        report(page or result, path, command=command_line())
        show_note(f"report written to {path}")


def show_text(text: str, err: bool = False) -> None:
    """Lines on stdout, or stderr, as wide as they are: what somebody else may have written among them."""
    typer.echo(printable_text(text), err=err)


def show_headline(headline: str) -> None:
    """The answer first, its first line in bold."""
    for number, line in enumerate(headline.splitlines()):
        stdout_screen().print(Text(printable_text(line), style="" if number else "bold"))


def show_grid(header: Sequence[str], rows: Iterable[Sequence[str | Text]], title: str = "", edge: bool = True) -> None:
    """Rows of text as a table on stdout, values to the right.

    No word is broken: where the columns do not fit, further ones come as a second table with the first column again.
    Without an edge it is as small as it can be, with no empty line above and below.
    """
    screen = stdout_screen()
    shown = [
        [_without_control_characters(Text(cell) if isinstance(cell, str) else cell) for cell in row] for row in rows
    ]
    header, title = [printable_text(name) for name in header], printable_text(title)
    widths = [
        max(map(_longest_word_width, column)) for column in zip([Text(name) for name in header], *shown, strict=True)
    ]
    for part in _columns_by_table(widths, screen.width):
        grid = Grid(title=title or None, title_justify="left", title_style="bold", header_style="bold", box=SIMPLE_HEAD)
        grid.show_edge, grid.collapse_padding, grid.pad_edge = edge, not edge, edge
        for place in part:
            justify: Any = "right" if header[place] in RIGHT else "left"
            least = min(widths[place], screen.width // 2)
            longest = max(cell_len(header[place]), *(row[place].cell_len for row in shown), 0)
            # A column of words cannot shrink: asked to, it would push the last ones off the screen.
            grid.add_column(header[place], justify=justify, min_width=least, no_wrap=longest <= least)
        for row in shown:
            grid.add_row(*(row[place] for place in part))
        screen.print(grid)
        title = ""


def _longest_word_width(cell: Text) -> int:
    """Its width, with what the cell is indented by: a line that is too short for both would break between them."""
    indent = len(cell.plain) - len(cell.plain.lstrip(" "))
    return indent + max((cell_len(word) for word in cell.plain.split()), default=1)


def _columns_by_table(widths: Sequence[int], room: int) -> list[list[int]]:
    """Columns by the tables that hold them, each beginning with the first."""
    parts, taken = [[0]], widths[0]
    for place, width in enumerate(widths[1:], start=1):
        if len(parts[-1]) > 1 and taken + width + PADDING * (len(parts[-1]) + 1) > room:
            parts.append([0])
            taken = widths[0]
        parts[-1].append(place)
        taken += width
    return parts


def stdout_screen() -> Screen:
    """Screen on stdout; without a width where it is piped to a file or a pager."""
    screen = Screen()
    return screen if screen.is_terminal else Screen(width=160)
