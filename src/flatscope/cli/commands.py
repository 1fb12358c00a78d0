"""The commands, and the module that does the work of each; their options, and what each does in a line, in `options`.

The work is imported when a command runs. Nothing here loads torch: the help of a command, and a slip in one, should
not take seconds.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from flatscope.cli.decision_options import DiagonalCommand, ForecastCommand, SensitivityCommand
from flatscope.cli.options import (
    AuditCommand,
    CompareCommand,
    EngineOptions,
    ExplainCommand,
    Extensions,
    LandscapeCommand,
    MeasureCommand,
    ReportCommand,
    SpectrumCommand,
    StabilityCommand,
    StoreRoot,
    TrainCommand,
)
from flatscope.cli.population_options import AtlasCommand, BenchmarkCommand

Run = Callable[..., None]
# Several processes of these would write the same files at once, and each would do all of the work.
ALONE = (
    "demo",
    "landscape",
    "sensitivity",
    "forecast",
    "diagonal",
    "stability",
    "train",
    "benchmark",
    "sweep",
    "study",
)
SetName = Annotated[str, typer.Argument(help="digits, mnist, fashion-mnist or cifar10.")]
DataRoot = Annotated[Path | None, typer.Option("--data-root", help="Folder of the data; else FLATSCOPE_DATA.")]


def spread_option_bundles(command: Callable[..., None]) -> Callable[..., None]:
    """The command as typer wants it: every parameter that is a bundle as one parameter per field of the bundle."""
    hints = get_type_hints(command, include_extras=True)
    bundles: dict[str, Any] = {}
    parameters: list[inspect.Parameter] = []
    for given in inspect.signature(command).parameters.values():
        kind = hints[given.name]
        if not is_dataclass(kind):
            parameters.append(given.replace(kind=inspect.Parameter.KEYWORD_ONLY, annotation=kind))
            continue
        bundles[given.name] = kind
        types = get_type_hints(kind, include_extras=True)
        for field in sorted(fields(kind), key=lambda field: field.default is not MISSING):  # what is needed first
            default = inspect.Parameter.empty if field.default is MISSING else field.default
            kind_of = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(field.name, kind_of, default=default, annotation=types[field.name]))

    def run(**values: Any) -> None:
        made = {
            name: kind(**{field.name: values.pop(field.name) for field in fields(kind)})
            for name, kind in bundles.items()
        }
        command(**made, **values)

    run.__name__, run.__doc__ = command.__name__, command.__doc__
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return run


def handing_options_to(options: type, place: str) -> Run:
    """A command that hands its options to "module:function" of this package; its line is that of the options."""

    def run(given: Any) -> None:
        _load_extensions(getattr(given, "extension", None))
        module, _, function = place.partition(":")
        getattr(importlib.import_module(f"flatscope.cli.{module}"), function)(given)

    run.__annotations__["given"], run.__doc__ = options, options.__doc__
    return run


def _load_extensions(sources: list[str] | None) -> None:
    if sources:
        from flatscope.cli.extensions import load_extensions

        load_extensions(sources)


def measures(
    names: Annotated[list[str] | None, typer.Argument(help="Names or globs, to be explained.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="A line for each: what it is, invariances, cost.")] = False,
    extension: Extensions = None,
) -> None:
    """List the measures and bounds by family, or explain some of them."""
    _load_extensions(extension)
    from flatscope.cli.run_measure import list_measures

    list_measures(names, everything)


def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, figures, tables and weights.")] = Path(
        "flatscope-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the sample order.")] = 0,
) -> None:
    """Train two networks on the embedded digits, measure both, write a report. Needs no download."""
    from flatscope.cli.run_demo import run_demo

    run_demo(out, seed)


def watch(
    run: Annotated[
        str, typer.Argument(help="The --out of flatscope train, of one network or many, or a sweep's --store.")
    ],
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 5.0,
    report: Annotated[Path | None, typer.Option(help="A page that refreshes itself, .html.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, and do not wait for the end.")] = False,
) -> None:
    """Follow a training or a sweep while it goes on: progress, losses, measures so far."""
    from flatscope.cli.run_watch import watch_run

    watch_run(run, every, report, once)


def train(context: typer.Context, given: TrainCommand) -> None:
    """Train a model with SGD, or many at once; run the same command again to resume."""
    from flatscope.cli.run_train import run_train

    run_train(given, typed=[name for name in context.params if _is_typed_option(context, name)])


def _is_typed_option(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


sweep = typer.Typer(help="Many trials, each trained and measured once; kills lose nothing.", no_args_is_help=True)


@sweep.command("run")
@spread_option_bundles
def sweep_run(
    file: Annotated[Path, typer.Argument(help="TOML file that describes the sweep.")], given: EngineOptions
) -> None:
    """Run what the store does not have; run the same command again, or `resume`, after a kill."""
    from flatscope.cli.run_sweep import run_sweep_file

    run_sweep_file(file, given)


@sweep.command("resume")
@spread_option_bundles
def sweep_resume(
    given: EngineOptions,
    name: Annotated[str | None, typer.Option(help="Which sweep, if the store has several.")] = None,
) -> None:
    """Go on with a sweep that the store remembers."""
    from flatscope.cli.run_sweep import resume_sweep

    resume_sweep(name, given)


@sweep.command("status")
def sweep_status(store: StoreRoot) -> None:
    """Print the progress of the sweeps in a store; exit code 1 if trials failed."""
    from flatscope.cli.run_sweep import show_sweep_status

    show_sweep_status(store)


@sweep.command("export")
def sweep_export(
    out: Annotated[Path, typer.Argument(help="File to write: .parquet or .csv.")], store: StoreRoot
) -> None:
    """Write all results of a store to one table: a row per trial, its settings and its metrics."""
    from flatscope.cli.run_sweep import export_sweep_results

    export_sweep_results(out, store)


data = typer.Typer(help="The data sets: what is here, get them, check them.", no_args_is_help=True)


@data.command("list")
def data_list(data_root: DataRoot = None) -> None:
    """Which data sets are here, and where."""
    from flatscope.cli.run_data import list_sets

    list_sets(data_root)


@data.command("fetch")
def data_fetch(name: SetName, data_root: DataRoot = None) -> None:
    """Download a data set; every file is verified before it takes its name."""
    from flatscope.cli.run_data import fetch_set

    fetch_set(name, data_root)


@data.command("verify")
def data_verify(name: SetName, data_root: DataRoot = None) -> None:
    """Compare the files with the published ones, byte for byte; exit code 1 if one differs."""
    from flatscope.cli.run_data import verify_set

    verify_set(name, data_root)


# In the order of the help; those of the papers come last.
OWN_COMMANDS: dict[str, Run | typer.Typer] = {
    "demo": demo,
    "measure": handing_options_to(MeasureCommand, "run_measure:run_measure"),
    "compare": handing_options_to(CompareCommand, "run_compare:run_compare"),
    "audit": handing_options_to(AuditCommand, "run_network:run_audit"),
    "explain": handing_options_to(ExplainCommand, "run_network:run_explain"),
    "landscape": handing_options_to(LandscapeCommand, "run_network:run_landscape"),
    "spectrum": handing_options_to(SpectrumCommand, "run_network:run_spectrum"),
    "sensitivity": handing_options_to(SensitivityCommand, "run_decisions:run_sensitivity"),
    "forecast": handing_options_to(ForecastCommand, "run_decisions:run_forecast"),
    "diagonal": handing_options_to(DiagonalCommand, "run_decisions:run_diagonal"),
    "stability": handing_options_to(StabilityCommand, "run_stability:run_stability"),
    "train": train,
    "watch": watch,
    "atlas": handing_options_to(AtlasCommand, "run_population:run_atlas"),
    "report": handing_options_to(ReportCommand, "run_report:run_report"),
    "measures": measures,
    "benchmark": handing_options_to(BenchmarkCommand, "run_population:run_benchmark"),
    "sweep": sweep,
    "data": data,
}
# The papers are an application of the library: their commands are known by line and place, and loaded to be run.
OF_THE_PAPERS = {
    "study": (
        "Figures and tables of the four papers, re-run with a verdict.",
        "flatscope_papers.study_commands:app",
    )
}


class Commands(TyperGroup):
    """A group that lists its commands, those of the papers too, and builds the one that is to run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=help_line(name)) for name in command_names()})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name, itself and not its entry in the list."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def command_names() -> list[str]:
    """Names of all commands, in the order of the help."""
    return [*OWN_COMMANDS, *OF_THE_PAPERS]


def help_line(name: str) -> str:
    """One line that describes a command."""
    own_command = OWN_COMMANDS.get(name)
    if own_command is None:
        return OF_THE_PAPERS[name][0]
    return str(own_command.info.help) if isinstance(own_command, typer.Typer) else str(own_command.__doc__)


def declared_command(name: str) -> Run | typer.Typer:
    """The function of a command, or its group."""
    if name in OWN_COMMANDS:
        return OWN_COMMANDS[name]
    module, _, name_there = OF_THE_PAPERS[name][1].partition(":")
    command: Run | typer.Typer = getattr(importlib.import_module(module), name_there)
    return command


def load_command(name: str) -> Any:
    """One of the commands, built."""
    command = declared_command(name)
    if isinstance(command, typer.Typer):
        group = typer.main.get_group(command)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(spread_option_bundles(command))
    return typer.main.get_command(alone)
