"""`flatscope demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, figures, tables and weights.")] = Path(
        "flatscope-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the sample order.")] = 0,
) -> None:
    """Train two networks on the embedded digits, measure both, write a report. Needs no download."""
    from flatscope.cli.demonstration import demonstrate  # loads torch, which the help should not wait for

    demonstrate(out, seed)
