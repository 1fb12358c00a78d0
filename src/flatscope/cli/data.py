"""`flatscope data list|fetch|verify`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.output import show_grid, show_note
from flatscope.formatting import numbered

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.

app = typer.Typer(help="The data sets: what is here, get them, check them.", no_args_is_help=True)

Name = Annotated[str, typer.Argument(help="digits, mnist, fashion-mnist or cifar10.")]
Root = Annotated[Path | None, typer.Option("--data-root", help="Folder of the data; else FLATSCOPE_DATA.")]


@app.command("list")
def list_sets(data_root: Root = None) -> None:
    """Which data sets are here, and where."""
    from flatscope.training.data import available
    from flatscope.training.data import data_root as folder_of_data

    rows = []
    for entry in available(data_root):
        n_files = numbered(len(entry.missing), "file") if entry.status == "absent" else ", ".join(entry.missing)
        shape = "x".join(str(extent) for extent in entry.shape)
        row = [entry.name, entry.status, str(entry.n_train), str(entry.n_test), shape, str(entry.n_classes)]
        rows.append([*row, str(entry.folder or ""), n_files])
    show_grid(["data set", "status", "train", "test", "shape", "classes", "folder", "missing"], rows)
    show_note(f"the folder of data sets is {folder_of_data(data_root)}; `flatscope data fetch NAME` downloads")


@app.command("fetch")
def fetch(name: Name, data_root: Root = None) -> None:
    """Download a data set; every file is verified before it takes its name."""
    from flatscope.training.data import fetch as fetch_files

    paths = fetch_files(name, data_root)
    for path in paths:
        typer.echo(str(path))
    if not paths:
        show_note(f"{name} is embedded: there is nothing to download")


@app.command("verify")
def verify(name: Name, data_root: Root = None) -> None:
    """Compare the files with the published ones, byte for byte; exit code 1 if one differs."""
    from flatscope.training.data import verify as verify_files

    checks = verify_files(name, data_root)
    if not checks:
        show_note(f"{name} is embedded: there is no file to verify")
        return
    rows = [[check.name, check.status, str(check.expected_size), check.where, check.detail] for check in checks]
    show_grid(["file", "status", "bytes", "where", "detail"], rows)
    if any(check.status != "ok" for check in checks):
        raise typer.Exit(code=1)
