"""`flatscope compare`: several checkpoints, ranked, with what the ranking rests on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from flatscope.cli.options import CheckpointsOptions, MeasureOptions
from flatscope.cli.output import check_place, command_line, show_grid, show_note
from flatscope.errors import InputError

if TYPE_CHECKING:
    from flatscope.comparing import Comparison
    from flatscope.problem import Problem

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.


def compare(
    checkpoints: Annotated[
        list[Path], typer.Argument(help="Two or more: safetensors, state dicts, or folders of checkpoints.")
    ],
    networks: CheckpointsOptions,
    asked: MeasureOptions,
    name: Annotated[list[str] | None, typer.Option(help="What to call a checkpoint; repeatable, in order.")] = None,
    tolerance: Annotated[
        float, typer.Option(help="Relative difference of outputs up to which two checkpoints are one function.")
    ] = 1e-5,
    as_json: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON, nothing else.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write .json, .csv, .md or .html.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
) -> None:
    """Rank checkpoints by every measure that may rank them, and name those that may not."""
    from flatscope import comparing
    from flatscope.cli.sources import (
        check_measures,
        load_loss,
        load_model,
        load_source,
        parse_model_options,
        parse_options,
    )
    from flatscope.comparing import Comparison
    from flatscope.problem import Problem
    from flatscope.ranks import process_group
    from flatscope.reports.page import report as write_report

    check_measures(asked.measures)
    options, factory_options = parse_options(asked.option or ()), parse_model_options(networks.model_option)
    for path, endings in ((out, Comparison.ENDINGS), (report, (".html",))):
        if path is not None:
            check_place(path, endings)
    model = networks.model
    if len(model) not in (1, len(checkpoints)):
        raise InputError(f"--model once, or {len(checkpoints)} times", f"{len(model)} times", where="--model")
    names = _names(checkpoints, name)
    loaded = load_source(networks)
    with process_group(networks.device) as own_device:
        problems: dict[str, Problem] = {}
        for called, path, factory in zip(names, checkpoints, model * (len(checkpoints) // len(model)), strict=True):
            network = load_model(factory, path, loaded, networks.seed, factory_options)
            settings = load_loss(networks) | {"device": own_device}
            problems[called] = Problem(network, train=loaded.train, test=loaded.test, **settings)
        found = comparing.compare(
            problems, names=asked.measures, seed=networks.seed, options=options, tolerance=tolerance
        )
        if next(iter(problems.values())).ranks.rank:
            return  # every rank has the same comparison; the first one shows it
    command = command_line()
    found.meta |= {"model": ", ".join(model), "data": networks.data, "command": command}
    if as_json:
        typer.echo(found.to_json())
    else:
        show_comparison(found)
    if out is not None:
        found.save(out)
    if report is not None:
        write_report([found, found.tables], report, command=command)
        show_note(f"report written to {report}")


def show_comparison(found: Comparison) -> None:
    """The table, and below it what it says."""
    show_grid(found.header, found.lines(), title="best first: > better, ≳ better within the error, = equal")
    console = Console(soft_wrap=True)
    for line in found.summary().splitlines():
        console.print(line, markup=False, highlight=False)


def _names(checkpoints: list[Path], given: list[str] | None) -> list[str]:
    """What to call the checkpoints: as told, or by the file, or by the part of the path that tells them apart."""
    if len(checkpoints) < 2:
        fix = "Measure one with flatscope measure"
        raise InputError("at least two checkpoints", str(len(checkpoints)), where="flatscope compare", fix=fix)
    if given is not None and (len(given) != len(checkpoints) or len(set(given)) != len(given)):
        raise InputError(f"{len(checkpoints)} different names", ", ".join(given), where="--name")
    if given is not None:
        return given
    short = [path.with_suffix("").name if _has_ending(path) else path.name for path in checkpoints]
    if len(set(short)) != len(short):
        short = _differing(checkpoints)
    if len(set(short)) != len(short):
        raise InputError("different checkpoints", "one of them twice", where="flatscope compare", fix="Use --name")
    return short


def _differing(checkpoints: list[Path]) -> list[str]:
    """What is left of the paths without the folders and the file name that all of them share."""
    parts = [list((path.with_suffix("") if _has_ending(path) else path).parts) for path in checkpoints]
    for end in (0, -1):
        while all(parts) and len({part[end] for part in parts}) == 1:
            for part in parts:
                part.pop(end)
    left = ["/".join(part) for part in parts]
    return left if all(left) and len(set(left)) == len(left) else [str(path) for path in checkpoints]


def _has_ending(path: Path) -> bool:
    """Whether the name ends as a file's does: in `run.1` the last part is a number."""
    return path.suffix[1:].isalpha()
