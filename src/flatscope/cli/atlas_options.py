"""Options of `flatscope atlas`; nothing here loads torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer

from flatscope.cli.options import OutputOptions


@dataclass(frozen=True, kw_only=True)
class AtlasCommand(OutputOptions):
    """Options of `flatscope atlas`."""

    source: Annotated[
        str,
        typer.Argument(
            help="Networks along training: .parquet or .csv with one row per network and epoch, or a store."
        ),
    ]
    target: Annotated[str, typer.Option(help="Column that measures should go along with; gap by default.")] = ""
    measures: Annotated[
        list[str] | None,
        typer.Option("--measure", "-m", help="Column of a measure; repeatable. Declared ones by default."),
    ] = None
    by: Annotated[list[str] | None, typer.Option(help="Setting to hold fixed, as a batch size; repeatable.")] = None
    kinds: Annotated[
        list[str] | None,
        typer.Option("--kind", help="pearson, spearman or kendall; repeatable. The first two by default."),
    ] = None
    where: Annotated[
        list[str] | None, typer.Option(help="Rows to take: COLUMN=VALUE or COLUMN!=VALUE; repeatable.")
    ] = None
    network: Annotated[str, typer.Option(help="Column that tells networks apart: network, trial, name or key.")] = ""
    resamples: Annotated[int, typer.Option(help="Of the networks, for intervals.")] = 1000
    seed: Annotated[int, typer.Option(help="Of the resamples.")] = 0
