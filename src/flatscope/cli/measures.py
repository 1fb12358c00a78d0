"""`flatscope measure` and `flatscope measures`."""

from __future__ import annotations

import fnmatch
import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from flatscope.cli.options import EffortOptions, Initial, MeasureOptions, NetworkOptions
from flatscope.cli.output import (
    check_place,
    command_line,
    network_meta,
    note_found_initial,
    note_missing_weights,
    show_grid,
    show_note,
    show_table,
)
from flatscope.errors import InputError, UnknownNameError

# What loads torch is imported inside the commands: their help, and a slip in one, should not take seconds.

MISFIT = (
    "most training samples are misclassified: are these the inputs that the network was trained on? "
    "(--standardize and --no-standardize, --flatten for vectors, labels that count from 0)"
)


def measure(
    network: NetworkOptions,
    asked: MeasureOptions,
    effort: EffortOptions,
    initial: Initial = None,
    bounds: Annotated[bool, typer.Option(help="Evaluate the bounds that do not take long as well.")] = False,
    bound: Annotated[
        list[str] | None, typer.Option("--bound", help='Bound to evaluate: name or glob, or "all"; repeatable.')
    ] = None,
    delta: Annotated[float, typer.Option(help="Bounds hold with probability 1 - delta.")] = 0.05,
    dtype: Annotated[str | None, typer.Option(help="float32 or float64.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the table as JSON, nothing else on stdout.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write .parquet, .json, .csv, .md or .html; bounds to NAME-bounds.")
    ] = None,
    report: Annotated[Path | None, typer.Option(help="Write an HTML report.")] = None,
) -> None:
    """Measure a trained model and print the table."""
    from flatscope import measuring
    from flatscope.cli.sources import (
        check_measures,
        chosen_bounds,
        find_initial,
        load_problem,
        parse_dtype,
        parse_model_options,
        parse_options,
        saved_error,
        split_options,
    )
    from flatscope.cli.summary import Fit, show_measured
    from flatscope.context import Context
    from flatscope.effort import make_effort
    from flatscope.ranks import process_group
    from flatscope.registry import declarations
    from flatscope.reports.page import report as write_report
    from flatscope.table import Table
    from flatscope.training.weights import read_weights

    # Everything that can be wrong with the command is refused before any data is read.
    check_measures(asked.measures)
    certificates = chosen_bounds(bounds, bound)
    options, bound_options = split_options(parse_options(asked.option or ()), with_bounds=bool(certificates))
    parse_model_options(network.model_option)
    if not 0 < delta < 1:
        raise InputError("a probability between 0 and 1", repr(delta), where="--delta")
    make_effort(**asdict(effort))  # here to refuse what is wrong; its time runs from below
    number_type, begun = parse_dtype(dtype), find_initial(initial, network.weights)
    for path, endings in ((out, Table.ENDINGS), (report, (".html",))):
        if path is not None:
            check_place(path, endings)
    with process_group(network.device) as own_device:
        before = None if begun is None else read_weights(begun)
        problem, loaded = load_problem(network, device=own_device, dtype=number_type, initial=before)
        context = Context(problem, seed=network.seed, effort=make_effort(**asdict(effort)))
        tables = {"measures": measuring.measure(problem, asked.measures, options=options, context=context)}
        if certificates:
            tables["bounds"] = measuring.bounds(
                problem, certificates, options=bound_options, delta=delta, context=context
            )
        fit = Fit.of(context, loaded)
        if problem.ranks.rank:
            return  # every rank has the same tables; the first one shows them
    doubt = fit.doubt(saved_error(network.weights))
    for table in tables.values():
        table.meta |= network_meta(network)
        if doubt:
            table.meta["remarks"] = [*table.meta.get("remarks", []), doubt]
    if as_json:
        whole = {name: json.loads(table.to_json()) for name, table in tables.items()}
        typer.echo(json.dumps(whole, indent=1) if certificates else tables["measures"].to_json())
    else:
        show_measured(tables["measures"], fit)
        if certificates:
            show_table(tables["bounds"], title="bounds")
    show_note(str(fit))
    left = [name for name in declarations("bound") if name not in certificates]
    if bounds and left:
        show_note(f"bounds that take long were not evaluated: {', '.join(left)} (--bound NAME, or --bound all)")
    if network.weights is not None and not fit.fits:
        show_note(MISFIT)
    note_missing_weights(network.weights)
    note_found_initial(initial, begun)
    if out is not None:
        tables["measures"].save(out)
        if certificates:
            tables["bounds"].save(out.with_stem(f"{out.stem}-bounds"))
    if report is not None:
        write_report(list(tables.values()), report, command=command_line())
        show_note(f"report written to {report}")


def measures(
    names: Annotated[list[str] | None, typer.Argument(help="Names or globs; all by default.")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="The table of measures as Markdown.")] = False,
) -> None:
    """List the measures and bounds, or explain some of them."""
    from flatscope.catalogue import catalogue_markdown, measure_page
    from flatscope.registry import PAPERS, declarations

    if markdown:
        typer.echo(catalogue_markdown())
        return
    if names:
        known = declarations() | declarations("bound")
        for name in names:
            matching = fnmatch.filter(known, name)
            if not matching:
                raise UnknownNameError.among(name, known, "measure or bound")
            for match in matching:
                typer.echo(measure_page(known[match]))
        return
    for kind in ("measure", "bound"):
        rows = [
            [e.name, e.per, e.summary, ", ".join(sorted(e.invariant_under)) or "—", e.cost, PAPERS[e.paper]]
            for e in declarations(kind).values()
        ]
        show_grid(["name", "per", "what", "invariant under", "cost", "paper"], rows, title=f"{kind}s")
