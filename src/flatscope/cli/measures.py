"""`flatscope measure` and `flatscope measures`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from flatscope import measuring
from flatscope.catalogue import catalogue_markdown, measure_page
from flatscope.cli.output import show_grid, show_note, show_table
from flatscope.cli.sources import load_model, parse_dtype, parse_options
from flatscope.context import Context
from flatscope.problem import Problem
from flatscope.registry import PAPERS, declarations, select
from flatscope.report.page import report as write_report
from flatscope.training.data import load
from flatscope.training.weights import read_weights


def measure(
    model: Annotated[str, typer.Option(help="file.py:factory, package.module:factory, or a built-in name.")],
    data: Annotated[str, typer.Option(help="digits, mnist, fashion-mnist, cifar10, file.npz or module:factory.")],
    weights: Annotated[Path | None, typer.Option(help="safetensors or state dict.")] = None,
    initial: Annotated[Path | None, typer.Option(help="Weights before training, for distances.")] = None,
    measures: Annotated[list[str] | None, typer.Option("--measure", "-m", help="Name or glob; repeatable.")] = None,
    option: Annotated[list[str] | None, typer.Option(help="measure.option=value; repeatable.")] = None,
    bounds: Annotated[bool, typer.Option(help="Evaluate the bounds as well.")] = False,
    loss: Annotated[str, typer.Option(help="cross_entropy or mse.")] = "cross_entropy",
    data_root: Annotated[Path | None, typer.Option(help="Folder of the data; else FLATSCOPE_DATA.")] = None,
    train_size: Annotated[int | None, typer.Option(help="Use a class-balanced subset of the training data.")] = None,
    test_size: Annotated[int | None, typer.Option(help="Use a class-balanced subset of the test data.")] = None,
    seed: Annotated[int, typer.Option(help="Of all random streams.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, …")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Samples evaluated at once; changes no value.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    out: Annotated[Path | None, typer.Option(help="Write .parquet, .json, .csv, .md or .html.")] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
) -> None:
    """Measure a trained model and print the table."""
    select(measures, "measure")  # refuse a wrong name before any data is read
    loaded = load(data, data_root, train_size=train_size, test_size=test_size, seed=seed)
    problem = Problem(
        load_model(model, weights, loaded, seed),
        train=loaded.train,
        test=loaded.test,
        loss=loss,
        initial=None if initial is None else read_weights(initial),
        device=device,
        dtype=parse_dtype(dtype),
        batch_size=batch_size,
    )
    context = Context(problem, seed=seed)
    tables = [measuring.measure(problem, measures, options=parse_options(option or ()), context=context)]
    if bounds:
        tables.append(measuring.bounds(problem, context=context))
    for table in tables:
        table.meta |= {"model": model, "weights": str(weights or ""), "data": data, "command": shlex.join(sys.argv)}
    if out is not None:
        tables[0].save(out)
    if report is not None:
        write_report(tables, report, command=shlex.join(sys.argv))
        show_note(f"report written to {report}")
    if as_json:
        typer.echo(tables[0].to_json())
    else:
        for table in tables:
            show_table(table)


def measures(
    names: Annotated[list[str] | None, typer.Argument(help="Names or globs; all by default.")] = None,
    markdown: Annotated[bool, typer.Option(help="The whole catalogue as Markdown.")] = False,
) -> None:
    """List the measures and bounds, or explain some of them."""
    if markdown:
        typer.echo(catalogue_markdown())
        return
    if names:
        for name in names:
            kind = "bound" if name in declarations("bound") else "measure"
            for entry in select(name, kind):
                typer.echo(measure_page(entry))
        return
    for kind in ("measure", "bound"):
        rows = [
            [e.name, e.per, e.summary, ", ".join(sorted(e.invariant_under)) or "—", e.cost, PAPERS[e.paper]]
            for e in declarations(kind).values()
        ]
        show_grid(["name", "per", "what", "invariant under", "cost", "paper"], rows, title=f"{kind}s")
