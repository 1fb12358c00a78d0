"""`flatscope data list|fetch|verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.output import show_grid
from flatscope.training.data import available
from flatscope.training.data import fetch as fetch_files
from flatscope.training.data import verify as verify_files

app = typer.Typer(help="The data sets: what is here, get them, check them.", no_args_is_help=True)

Root = Annotated[Path | None, typer.Option("--data-root", help="Folder of the data; else FLATSCOPE_DATA.")]


@app.command("list")
def list_sets(data_root: Root = None) -> None:
    """Which data sets are here, and where."""
    rows = [
        [entry.name, entry.status, str(entry.folder or ""), ", ".join(entry.missing)] for entry in available(data_root)
    ]
    show_grid(["data set", "status", "folder", "missing"], rows)


@app.command("fetch")
def fetch(name: str, data_root: Root = None) -> None:
    """Download a data set; every file is verified before it takes its name."""
    for path in fetch_files(name, data_root):
        typer.echo(str(path))


@app.command("verify")
def verify(name: str, data_root: Root = None) -> None:
    """Compare the files with the published ones, byte for byte; exit code 1 if one differs."""
    checks = verify_files(name, data_root)
    show_grid(["file", "status", "detail"], [[check.where, check.status, check.detail] for check in checks])
    if any(check.status != "ok" for check in checks):
        raise typer.Exit(code=1)
