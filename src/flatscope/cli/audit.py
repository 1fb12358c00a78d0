"""`flatscope audit`: which measures move when the same function is written with other weights."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.table import Table as Grid
from rich.text import Text

from flatscope.cli.options import (
    BatchSize,
    DataName,
    DataRoot,
    DataSeed,
    Device,
    Flatten,
    Initial,
    LossName,
    MeasureNames,
    MeasureOptions,
    ModelName,
    ModelOptions,
    Standardize,
    StandardizeBy,
    TestSize,
    TrainSize,
    Weights,
)
from flatscope.cli.output import check_place, command_line, console, note_found_initial, note_missing_weights, show_note
from flatscope.errors import UnknownNameError

if TYPE_CHECKING:
    from flatscope.symmetries.audit import Audit

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.

_STYLES = {"moved": "yellow", "invariant": "green", "not tested": "dim"}


def audit(
    model: ModelName,
    data: DataName,
    weights: Weights = None,
    initial: Initial = None,
    measures: MeasureNames = None,
    by: Annotated[
        list[str] | None,
        typer.Option(help="layer, unit, permutation, batchnorm; repeatable. All that the network can have by default."),
    ] = None,
    trials: Annotated[int, typer.Option(help="Networks to draw of each kind.")] = 3,
    option: MeasureOptions = None,
    loss: LossName = "cross_entropy",
    model_option: ModelOptions = None,
    data_root: DataRoot = None,
    train_size: TrainSize = None,
    test_size: TestSize = None,
    standardize: Standardize = True,
    standardize_by: StandardizeBy = "all",
    flatten: Flatten = False,
    data_seed: DataSeed = 0,
    seed: Annotated[int, typer.Option(help="Of the draws and of all random streams.")] = 0,
    device: Device = None,
    batch_size: BatchSize = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the audit as JSON, nothing else on stdout.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write .parquet, .json, .csv, .md or .html.")] = None,
) -> None:
    """Rewrite a network's weights without changing its function, and see which measures move."""
    from flatscope import auditing
    from flatscope.cli.sources import check_measures, find_initial, load_problem, parse_model_options, parse_options
    from flatscope.ranks import process_group
    from flatscope.symmetries.audit import Audit
    from flatscope.symmetries.folding import has_batchnorm
    from flatscope.training.weights import read_weights

    check_measures(measures)
    options, factory_options = parse_options(option or ()), parse_model_options(model_option)
    begun = find_initial(initial, weights)
    for way in by or ():
        if way not in auditing.SYMMETRY_OF:
            raise UnknownNameError.among(way, auditing.SYMMETRY_OF, "--by")
    if out is not None:
        check_place(out, Audit.ENDINGS)
    with process_group(device) as own_device:
        problem, _ = load_problem(
            model,
            data,
            weights,
            model_options=factory_options,
            data_root=data_root,
            train_size=train_size,
            test_size=test_size,
            standardize=standardize,
            standardize_by=standardize_by,
            flatten=flatten,
            data_seed=data_seed,
            seed=seed,
            loss=loss,
            initial=None if begun is None else read_weights(begun),
            device=own_device,
            batch_size=batch_size,
        )
        ways = by or [way for way in auditing.SYMMETRY_OF if way != "batchnorm" or has_batchnorm(problem.model)]
        found = auditing.audit(problem, measures, ways, trials, seed, options=options)
        if problem.ranks.rank:
            return  # every rank has the same audit; the first one shows it
    command = command_line()
    found.meta |= {"model": model, "weights": str(weights or ""), "data": data, "command": command}
    if as_json:
        typer.echo(found.to_json())
    else:
        show_audit(found)
    note_missing_weights(weights)
    note_found_initial(initial, begun)
    if out is not None:
        found.save(out)


def show_audit(found: Audit) -> None:
    """The matrix of measures and symmetries; red where a verdict contradicts the declaration."""
    grid = Grid(title="relative change of each measure, same function", title_justify="left", header_style="bold")
    for name in ("measure", *found.symmetries):
        grid.add_column(name.replace("_", " "), overflow="fold")
    for (name, _), *cells in found.lines():
        shown = [Text(text, style="bold red" if wrong else _style(text)) for text, wrong in cells]
        grid.add_row(Text(name), *shown)
    console().print(grid)
    for reason, names in found.notes().items():
        listed = "all measures" if len(names) == len(found.measures) else ", ".join(names)
        show_note(f"{reason.rstrip('.')} ({listed})")
    wrong = found.disagrees
    for name, symmetry, declared in zip(wrong["measure"], wrong["symmetry"], wrong["declared"], strict=True):
        says = "declared invariant, and moved" if declared else "not declared invariant, yet stands still"
        show_note(f"{name} under {symmetry.replace('_', ' ')}: {says}")


def _style(text: str) -> str:
    return next((style for verdict, style in _STYLES.items() if text.startswith(verdict)), "")
