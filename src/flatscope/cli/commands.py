"""The commands: what each does, in a line, and the module that does it; their options are in `options`.

The work is imported when a command runs. Nothing here loads torch: the help of a command, and a slip in one, should
not take seconds.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_type_hints

import typer
from typer.core import TyperCommand, TyperGroup

from flatscope.cli.options import (
    AtlasCommand,
    AuditCommand,
    BenchmarkCommand,
    CompareCommand,
    EngineOptions,
    LandscapeCommand,
    MeasureCommand,
    ReportCommand,
    SpectrumCommand,
    StabilityCommand,
    StoreRoot,
    TrainCommand,
)
from flatscope.factories import from_papers

# In the order of the help, which is that of this file: what declares a command puts it here.
Run = Callable[..., None]
COMMANDS: dict[str, Callable[..., None] | typer.Typer | None] = {}
# Several processes of these would write the same files at once, and each would do all of the work.
ALONE = ("demo", "landscape", "stability", "train", "benchmark", "sweep", "study")
SetName = Annotated[str, typer.Argument(help="digits, mnist, fashion-mnist or cifar10.")]
DataRoot = Annotated[Path | None, typer.Option("--data-root", help="Folder of the data; else FLATSCOPE_DATA.")]


def command(given: Run) -> Run:
    """Make a function a command of its name."""
    COMMANDS[given.__name__] = given
    return given


def spread(command: Callable[..., None]) -> Callable[..., None]:
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


def group(name: str, line: str) -> typer.Typer:
    """A command with commands of its own."""
    COMMANDS[name] = made = typer.Typer(help=line, no_args_is_help=True)
    return made


@command
def demo(
    out: Annotated[Path, typer.Option(help="Folder for the report, figures, tables and weights.")] = Path(
        "flatscope-demo"
    ),
    seed: Annotated[int, typer.Option(help="Of the initial weights and the sample order.")] = 0,
) -> None:
    """Train two networks on the embedded digits, measure both, write a report. Needs no download."""
    from flatscope.cli.run_demo import demonstrate

    demonstrate(out, seed)


@command
def measure(given: MeasureCommand) -> None:
    """Measure a trained model and print the table."""
    from flatscope.cli.run_measure import run_measure

    run_measure(given)


@command
def compare(given: CompareCommand) -> None:
    """Rank checkpoints by every measure that may rank them, and name those that may not."""
    from flatscope.cli.run_compare import run_compare

    run_compare(given)


@command
def audit(given: AuditCommand) -> None:
    """Rewrite a network's weights without changing its function, and see which measures move."""
    from flatscope.cli.run_network import run_audit

    run_audit(given)


@command
def landscape(given: LandscapeCommand) -> None:
    """Draw the loss around a network, in weight space or in path space, where rescaling cannot change the picture."""
    from flatscope.cli.run_network import run_landscape

    run_landscape(given)


@command
def spectrum(given: SpectrumCommand) -> None:
    """Find the largest eigenvalues of a network's Hessian and how all of them are spread."""
    from flatscope.cli.run_network import run_spectrum

    run_spectrum(given)


@command
def stability(given: StabilityCommand) -> None:
    """See whether a training stood at the edge of stability: the sharpness of its checkpoints against its step size."""
    from flatscope.cli.run_stability import run_stability

    run_stability(given)


@command
def train(context: typer.Context, given: TrainCommand) -> None:
    """Train a model with SGD, or many at once; run the same command again to resume."""
    from flatscope.cli.run_train import run_train

    run_train(given, typed=[name for name in context.params if _typed(context, name)])


def _typed(context: typer.Context, name: str) -> bool:
    source = context.get_parameter_source(name)
    return source is not None and source.name == "COMMANDLINE"


@command
def watch(
    run: Annotated[
        str, typer.Argument(help="The --out of flatscope train, of one network or many, or a sweep's --store.")
    ],
    every: Annotated[float, typer.Option(help="Seconds between two looks.")] = 5.0,
    report: Annotated[Path | None, typer.Option(help="A page that refreshes itself, .html.")] = None,
    once: Annotated[bool, typer.Option("--once", help="Look once, and do not wait for the end.")] = False,
) -> None:
    """Follow a training or a sweep while it goes on: progress, losses, measures so far."""
    from flatscope.cli.run_report import watch_run

    watch_run(run, every, report, once)


@command
def atlas(given: AtlasCommand) -> None:
    """Correlate measures with the gap along training: after every epoch, at every training loss and accuracy."""
    from flatscope.cli.run_population import run_atlas

    run_atlas(given)


@command
def report(given: ReportCommand) -> None:
    """Make one self-contained HTML page from saved results, and figures for papers."""
    from flatscope.cli.run_report import run_report

    run_report(given)


@command
def measures(
    names: Annotated[list[str] | None, typer.Argument(help="Names or globs, to be explained.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="A line for each: what it is, invariances, cost.")] = False,
) -> None:
    """List the measures and bounds by family, or explain some of them."""
    from flatscope.cli.run_measure import list_measures

    list_measures(names, everything)


@command
def benchmark(given: BenchmarkCommand) -> None:
    """Score measures, also your own, on the released population: do they rank networks as generalization does?"""
    from flatscope.cli.run_population import run_benchmark

    run_benchmark(given)


sweep = group("sweep", "Many trials, each trained and measured once; kills lose nothing.")


@sweep.command("run")
@spread
def sweep_run(
    file: Annotated[Path, typer.Argument(help="TOML file that describes the sweep.")], given: EngineOptions
) -> None:
    """Run what the store does not have; run the same command again, or `resume`, after a kill."""
    from flatscope.cli.run_sweep import run_file

    run_file(file, given)


@sweep.command("resume")
@spread
def sweep_resume(
    given: EngineOptions,
    name: Annotated[str | None, typer.Option(help="Which sweep, if the store has several.")] = None,
) -> None:
    """Go on with a sweep that the store remembers."""
    from flatscope.cli.run_sweep import run_remembered

    run_remembered(name, given)


@sweep.command("status")
def sweep_status(store: StoreRoot) -> None:
    """How far the sweeps of a store are; exit code 1 if trials failed."""
    from flatscope.cli.run_sweep import show_status

    show_status(store)


@sweep.command("export")
def sweep_export(
    out: Annotated[Path, typer.Argument(help="File to write: .parquet or .csv.")], store: StoreRoot
) -> None:
    """Write all results of a store to one table: a row per trial, its settings and its metrics."""
    from flatscope.cli.run_sweep import export_results

    export_results(out, store)


data = group("data", "The data sets: what is here, get them, check them.")


@data.command("list")
def data_list(data_root: DataRoot = None) -> None:
    """Which data sets are here, and where."""
    from flatscope.cli.run_train import list_sets

    list_sets(data_root)


@data.command("fetch")
def data_fetch(name: SetName, data_root: DataRoot = None) -> None:
    """Download a data set; every file is verified before it takes its name."""
    from flatscope.cli.run_train import fetch_set

    fetch_set(name, data_root)


@data.command("verify")
def data_verify(name: SetName, data_root: DataRoot = None) -> None:
    """Compare the files with the published ones, byte for byte; exit code 1 if one differs."""
    from flatscope.cli.run_train import verify_set

    verify_set(name, data_root)


# Studies come with the package of the papers, which is asked when it is needed.
STUDY_LINE = "Figures and tables of the four papers, re-run with a verdict."
COMMANDS["study"] = None


class Commands(TyperGroup):
    """A group that lists its commands from the table above, and builds the one that is to run."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.commands.update({name: TyperCommand(name, help=help_line(name)) for name in COMMANDS})

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that the words name, itself and not its entry in the list."""
        name, _, rest = super().resolve_command(ctx, args)
        return name, load_command(str(name)), rest


def help_line(name: str) -> str:
    """What a command does, in a line."""
    found = COMMANDS[name]
    if found is None:
        return STUDY_LINE
    return str(found.info.help) if isinstance(found, typer.Typer) else str(found.__doc__)


def load_command(name: str) -> Any:
    """One of the commands, built."""
    found = COMMANDS[name] or from_papers("command")
    if isinstance(found, typer.Typer):
        group = typer.main.get_group(found)
        group.name = name
        return group
    alone = typer.Typer(add_completion=False)
    alone.command(name)(spread(found))
    return typer.main.get_command(alone)
