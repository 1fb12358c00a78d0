"""`flatscope data`: which sets are here, get them, check them."""

from __future__ import annotations

from pathlib import Path

import typer

from flatscope.cli.output import show_grid, show_note, show_text
from flatscope.formatting import numbered
from flatscope.inputs import public_sets


def list_sets(data_root: Path | None) -> None:
    """Which data sets are here, and where."""
    rows = []
    for entry in public_sets.available(data_root):
        n_files = numbered(len(entry.missing), "file") if entry.status == "absent" else ", ".join(entry.missing)
        shape = "x".join(str(extent) for extent in entry.shape)
        row = [entry.name, entry.status, str(entry.n_train), str(entry.n_test), shape, str(entry.n_classes)]
        rows.append([*row, str(entry.folder or ""), n_files])
    show_grid(["data set", "status", "train", "test", "shape", "classes", "folder", "missing"], rows)
    show_note(f"the folder of data sets is {public_sets.data_root(data_root)}; `flatscope data fetch NAME` downloads")


def fetch_set(name: str, data_root: Path | None) -> None:
    """Download a data set."""
    paths = public_sets.fetch(name, data_root)
    for path in paths:
        show_text(str(path))
    if not paths:
        show_note(f"{name} is embedded: there is nothing to download")


def verify_set(name: str, data_root: Path | None) -> None:
    """Compare the files with the published ones."""
    checks = public_sets.verify(name, data_root)
    if not checks:
        show_note(f"{name} is embedded: there is no file to verify")
        return
    rows = [[check.name, check.status, str(check.expected_size), check.where, check.detail] for check in checks]
    show_grid(["file", "status", "bytes", "where", "detail"], rows)
    if any(check.status != "ok" for check in checks):
        raise typer.Exit(code=1)
