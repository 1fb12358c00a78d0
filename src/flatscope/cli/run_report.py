"""`flatscope report`: one page from saved results."""

from __future__ import annotations

from flatscope.cli.options import ReportCommand
from flatscope.cli.output import check_output_file, check_output_folder, command_line, show_headline, show_note
from flatscope.errors import InputError
from flatscope.files import PICTURES
from flatscope.formatting import numbered
from flatscope.reports.items import HISTORY_FILE, read_item, shown_kinds, split_name_and_path
from flatscope.reports.page import report, save_figures
from flatscope.result import Result

MOST_ANSWERS = 4  # first lines of what is on the page


def run_report(given: ReportCommand) -> None:
    """Read, write the page and the figures."""
    check_output_file(given.out, (".html",))
    if given.figures is not None:
        check_output_folder(given.figures)
    chosen = [name.strip().lower() for name in given.formats.split(",") if name.strip()]
    for name in chosen or [""]:
        if name not in PICTURES:
            raise InputError(f"formats of {', '.join(PICTURES)}", repr(given.formats), where="--format")
    places = [place for item in given.items for place in _paths_with_study_scales(item)]
    items = [pair for place in places for pair in read_item(place, given.target, given.measures or ())]
    page = report(items, given.out, title=given.title, command=command_line())
    for name, thing in items[:MOST_ANSWERS]:
        if isinstance(thing, Result) and (answer := thing.headline):
            show_headline(f"{name}: {answer.splitlines()[0]}" if len(items) > 1 else answer)
    show_note(f"report written to {page}, {page.stat().st_size / 1e6:.1f} MB")
    if given.figures is not None:
        saved = save_figures(items, given.figures, chosen)
        show_note(f"{numbered(len(saved), 'figure')} written to {given.figures}")


def _paths_with_study_scales(given: str) -> list[str]:
    """Paths as given; for the folder of a study, the folders of the scales at which it was run."""
    name, folder = split_name_and_path(given)
    marks = [kind.folder_file for kind in shown_kinds().values() if kind.folder_file]
    if any((folder / file).is_file() for file in (HISTORY_FILE, *marks)):
        return [given]
    scales = [marked.parent for mark in marks for marked in sorted(folder.glob(f"*/{mark}"))]
    if not scales and any(any(folder.glob(f"*/*/{mark}")) for mark in marks):
        fix = f"Name one of them, or make a page of all: flatscope study export report.html --results {folder}"
        raise InputError("the folder of one study", "a folder of several", where=str(folder), fix=fix)
    return [f"{name or folder.name}={scale}" for scale in scales] or [given]
