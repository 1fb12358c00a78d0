"""The commands that train: what each does, in a line, and the module that does it.

The work is imported when a command runs. Nothing here loads torch: the help of a command, and a slip in one, should
not take seconds.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.commands import spread
from flatscope_training.terminal.training_options import (
    AtlasCommand,
    BenchmarkCommand,
    EngineOptions,
    StabilityCommand,
    StoreRoot,
    TrainCommand,
)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, figures, tables and weights.")] = Path(
        "flatscope-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the sample order.")] = 0,
) -> None:
    """Train two networks on the embedded digits, measure both, write a report. Needs no download."""
    from flatscope_training.terminal.run_demo import demonstrate

    demonstrate(out, seed)


def stability(given: StabilityCommand) -> None:
    """See whether a training stood at the edge of stability: the sharpness of its checkpoints against its step size."""
    from flatscope_training.terminal.run_stability import run_stability

    run_stability(given)


def train(context: typer.Context, given: TrainCommand) -> None:
    """Train a model with SGD, or many at once; run the same command again to resume."""
    from flatscope_training.terminal.run_train import run_train

    run_train(given, typed=[name for name in context.params if _typed(context, name)])


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


def watch(
    run: Annotated[
        str, typer.Argument(help="The --out of flatscope train, of one network or many, or a sweep's --store.")
    ],
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 5.0,
    report: Annotated[Path | None, typer.Option(help="A page that refreshes itself, .html.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, and do not wait for the end.")] = False,
) -> None:
    """Follow a training or a sweep while it goes on: progress, losses, measures so far."""
    from flatscope_training.terminal.run_watch import watch_run

    watch_run(run, every, report, once)


def atlas(given: AtlasCommand) -> None:
    """Correlate measures with the gap along training: after every epoch, at every training loss and accuracy."""
    from flatscope_training.terminal.run_population import run_atlas

    run_atlas(given)


def benchmark(given: BenchmarkCommand) -> None:
    """Score measures, also your own, on the released population: do they rank networks as generalization does?"""
    from flatscope_training.terminal.run_population import run_benchmark

    run_benchmark(given)


sweep = typer.Typer(help="Many trials, each trained and measured once; kills lose nothing.", no_args_is_help=True)


@sweep.command("run")
@spread
def sweep_run(
    file: Annotated[Path, typer.Argument(help="TOML file that describes the sweep.")], given: EngineOptions
) -> None:
    """Run what the store does not have; run the same command again, or `resume`, after a kill."""
    from flatscope_training.terminal.run_sweep import run_file

    run_file(file, given)


@sweep.command("resume")
@spread
def sweep_resume(
    given: EngineOptions,
    name: Annotated[str | None, typer.Option(help="Which sweep, if the store has several.")] = None,
) -> None:
    """Go on with a sweep that the store remembers."""
    from flatscope_training.terminal.run_sweep import run_remembered

    run_remembered(name, given)


@sweep.command("status")
def sweep_status(store: StoreRoot) -> None:
    """How far the sweeps of a store are; exit code 1 if trials failed."""
    from flatscope_training.terminal.run_sweep import show_status

    show_status(store)


@sweep.command("export")
def sweep_export(
    out: Annotated[Path, typer.Argument(help="File to write: .parquet or .csv.")], store: StoreRoot
) -> None:
    """Write all results of a store to one table: a row per trial, its settings and its metrics."""
    from flatscope_training.terminal.run_sweep import export_results

    export_results(out, store)
