"""`flatscope report`: one page from saved tables, audits, landscapes, populations, training runs and studies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.output import check_folder, check_place, command_line, show_note
from flatscope.errors import InputError
from flatscope.formatting import numbered

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.


def report(
    items: Annotated[
        list[str],
        typer.Argument(
            help="Tables, audits, surfaces, populations (.parquet, .json, .npz, .csv), folders of training runs or of "
            "studies (results/NAME, or results/NAME/SCALE); name=path gives a name, things with one name belong to "
            "one network."
        ),
    ],
    out: Annotated[Path, typer.Option(help="The page to write, .html.")] = Path("report.html"),
    title: Annotated[str | None, typer.Option(help="Heading of the page.")] = None,
    target: Annotated[str, typer.Option(help="Column of the generalization gap in a population.")] = "",
    measures: Annotated[
        list[str] | None, typer.Option("--measure", "-m", help="Column of a measure in a population; repeatable.")
    ] = None,
    figures: Annotated[Path | None, typer.Option(help="Folder for static figures of the same data.")] = None,
    formats: Annotated[str, typer.Option("--format", help="Of pdf, svg, png; several with commas.")] = "png",
) -> None:
    """Make one self-contained HTML page from saved results, and figures for papers."""
    from flatscope.files import PICTURES
    from flatscope.reports.figures import save_figures
    from flatscope.reports.items import read_item
    from flatscope.reports.page import report as write_report

    check_place(out, (".html",))
    if figures is not None:
        check_folder(figures)
    chosen = [name.strip().lower() for name in formats.split(",") if name.strip()]
    for name in chosen or [""]:
        if name not in PICTURES:
            raise InputError(f"formats of {', '.join(PICTURES)}", repr(formats), where="--format")
    places = [place for given in items for place in _with_scales(given)]
    found = [pair for given in places for pair in read_item(given, target, measures or ())]
    page = write_report(found, out, title=title, command=command_line())
    show_note(f"report written to {page}, {page.stat().st_size / 1e6:.1f} MB")
    if figures is not None:
        saved = save_figures(found, figures, chosen)
        show_note(f"{numbered(len(saved), 'figure')} written to {figures}")


def _with_scales(given: str) -> list[str]:
    """What was given; for the folder of a study, the folders of the scales at which it was run."""
    from flatscope.reports.items import HISTORY_FILE, VERDICTS_FILE

    name, equals, path = given.partition("=")
    name, folder = (name, Path(path)) if equals and not Path(given).exists() else ("", Path(given))
    if any((folder / file).is_file() for file in (HISTORY_FILE, VERDICTS_FILE)):
        return [given]
    scales = [verdicts.parent for verdicts in sorted(folder.glob(f"*/{VERDICTS_FILE}"))]
    if not scales and any(folder.glob(f"*/*/{VERDICTS_FILE}")):
        fix = f"Name one of them, or make a page of all: flatscope study export report.html --results {folder}"
        raise InputError("the folder of one study", "a folder of several", where=str(folder), fix=fix)
    return [f"{name or folder.name}={scale}" for scale in scales] or [given]
