"""Options of the commands about many networks at once: `flatscope atlas` and `flatscope benchmark`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.options import OutputOptions


@dataclass(frozen=True, kw_only=True)
class AtlasCommand(OutputOptions):
    """Correlate measures with the gap along training: after every epoch, at every training loss and accuracy."""

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


@dataclass(frozen=True, kw_only=True)
class BenchmarkCommand(OutputOptions):
    """Score measures, also your own, on the released population: do they rank networks as generalization does?"""

    measures: Annotated[
        list[str] | None,
        typer.Argument(
            help="Names or globs of measures; file.py:function for your own. All of the library by default."
        ),
    ] = None
    networks: Annotated[
        str | None,
        typer.Option(help="How many, a power of 2 from 8 up, or all; by default all, 64 for measures of your own."),
    ] = None
    data: Annotated[
        str | None, typer.Option(help="digits: networks on the embedded digits, for a first look without a download.")
    ] = None
    store: Annotated[
        str | None, typer.Option(help="Folder of the trained networks; else one in the user's cache folder.")
    ] = None
    workers: Annotated[int | None, typer.Option(help="Processes that train; 0 for none but this one.")] = None
    rebuild: Annotated[
        Path | None, typer.Option(help="Train and measure the whole population; write its table into this folder.")
    ] = None
