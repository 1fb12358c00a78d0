"""`flatscope measure` and `flatscope measures`: fit and gap, the measures to look at first, then all by family."""

from __future__ import annotations

import fnmatch
import json
import math
import re
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from rich.text import Text

from flatscope import measuring
from flatscope.cli.measure_text import measure_list, measure_page
from flatscope.cli.options import MeasureCommand
from flatscope.cli.output import (
    check_outputs,
    note_found_initial,
    note_missing_weights,
    show_grid,
    show_headline,
    show_note,
    show_text,
    stdout_screen,
    write_and_show_result,
)
from flatscope.cli.sources import (
    asked_measures,
    check_measures,
    find_initial,
    load_problem,
    names_of_bounds,
    network_meta,
    parse_dtype,
    parse_model_options,
    parse_options,
    saved_error,
    split_options,
)
from flatscope.context import Context, make_effort
from flatscope.doubts import MOST, TRAINING_ERROR, training_error_doubt
from flatscope.errors import InputError, Interrupted
from flatscope.formatting import numbered, readable_number
from flatscope.headlines import headline_has_remark
from flatscope.inputs.data_set import Data, DataSource
from flatscope.inputs.weight_files import read_weights
from flatscope.measures.layer_values import ASKED
from flatscope.network.units import SCALES_STOP
from flatscope.network_summary import STANDING, NetworkSummary
from flatscope.progress import DELAY_SECONDS
from flatscope.ranks import process_group
from flatscope.registry import CORE, PICTURED, Declaration, declarations, family_name, unknown_name
from flatscope.reports.measured import MANY, RESCALINGS, captions_by_measure, measure_lines
from flatscope.summarising import summary_of
from flatscope.table import Table

SHORT = 34  # letters of a remark that is not put below the table
INVISIBLE = 1e-5  # of a value: an error that four digits do not show
SOME_LAYERS = re.compile(r"(\d+) of (\d+) layers: (.*)", re.DOTALL)
HOW = re.compile(
    r"sampled, |[\d,]+ parameter tensors? by "
)  # remarks on the way alone: the error says what it is worth
AS_HESSIAN = "here the same as the Hessian's"
LEGEND = "✓: stays when layers or units are rescaled; ≈: estimated, ± one s.e."
OTHERS = "others"  # measures that a table of another version has


def run_measure(given: MeasureCommand) -> None:
    """Measure, show, save."""
    # Everything that can be wrong with the command is refused before any data is read.
    check_measures(given.measures)
    certificates = names_of_bounds(given.bounds, given.bound)
    options, bound_options = split_options(parse_options(given.option or ()), with_bounds=bool(certificates))
    parse_model_options(given.model_option)
    if not 0 < given.delta < 1:
        raise InputError("a probability between 0 and 1", repr(given.delta), where="--delta")
    make_effort(**given.effort_arguments())  # here to refuse what is wrong; its time runs from below
    number_type, begun = parse_dtype(given.dtype), find_initial(given.initial, given.weights)
    check_outputs(given, Table)
    names = asked_measures(given, given.report)
    tables: dict[str, Table] = {}
    stopped: Interrupted | None = None
    try:
        with process_group(given.device) as own_device:
            before = None if begun is None else read_weights(begun)
            problem, loaded = load_problem(given, device=own_device, dtype=number_type, initial=before)
            context = Context(problem, seed=given.seed, effort=make_effort(**given.effort_arguments()))
            if not problem.ranks.rank:
                show_note(str(measuring.plan_of_measures(context, names)))
            fit = Fit.of(context, loaded)
            watch = _row_printer(speaks=not problem.ranks.rank)
            measured = measuring.measure(problem, names, options=options, context=context, watch=watch)
            tables["measures"] = measured
            if certificates:
                tables["bounds"] = measuring.bounds(
                    problem, certificates, options=bound_options, delta=given.delta, context=context, watch=watch
                )
    except Interrupted as stop:
        tables["bounds" if tables else "measures"], stopped = stop.result, stop
    if not problem.ranks.rank:  # every rank has the same tables; the first one shows them
        _write_and_show_tables(given, tables, fit, begun, unfinished=stopped is not None)
    if stopped:
        raise stopped


def _write_and_show_tables(
    given: MeasureCommand, tables: dict[str, Table], fit: Fit, begun: Path | None, *, unfinished: bool
) -> None:
    doubt = "" if given.weights is None else fit.doubt_about_fit(saved_error(given.weights))
    for table in tables.values():
        table.meta |= network_meta(given)
        # Of a network without weights it is no wonder, and with them more is known.
        remarks = [remark for remark in table.meta.pop("remarks", []) if not remark.startswith(TRAINING_ERROR)]
        if remarks or doubt:
            table.meta["remarks"] = [*remarks, *filter(None, [doubt])]
    tables["measures"].meta.setdefault(STANDING, fit.summary.to_dict())
    show_note(str(fit))
    left = [name for name in declarations("bound") if name not in names_of_bounds(given.bounds, given.bound)]
    if given.bounds and left:
        show_note(f"bounds that take long were not evaluated: {', '.join(left)} (--bound NAME, or --bound all)")
    note_missing_weights(given.model, given.weights)
    note_found_initial(given.initial, begun)

    others = {name: table for name, table in tables.items() if name != "measures"}

    def show() -> None:
        show_measured(tables["measures"], fit)
        for name, table in others.items():
            show_grid(*table.cells(), title=name)

    def as_json() -> str:
        whole = {name: json.loads(table.to_json()) for name, table in tables.items()}
        return json.dumps(whole, indent=1) if others else tables["measures"].to_json()

    page = list(tables.values())
    write_and_show_result(
        tables["measures"], given, show, page=page, beside=others, as_json=as_json, unfinished=unfinished
    )


def _row_printer(speaks: bool) -> measuring.Watch:
    """Show each result above the progress bar, where a person has waited for a while."""
    begun = time.monotonic()

    def watch(entry: Declaration, rows: list[dict[str, Any]]) -> None:
        if speaks and sys.stderr.isatty() and time.monotonic() - begun > DELAY_SECONDS:
            for line in measure_lines({"": Table(rows)}, entry.kind):
                words = [
                    (f"{c.text} ± {c.stderr}" if c.stderr else c.text, c.extent, c.reason) for c in line.cells if c
                ]
                show_text(f"{line.label}: {', '.join(filter(None, *words))}", err=True)

    return watch


def list_measures(names: list[str] | None, all_of_them: bool) -> None:
    """The measures and bounds, or pages on some of them."""
    if names:
        known = declarations() | declarations("bound")
        for name in names:
            matching = fnmatch.filter(known, name)
            if not matching:
                raise unknown_name(name, known, "measure or bound")
            for match in matching:
                typer.echo(measure_page(known[match], stdout_screen().width))
        return
    if not all_of_them:
        _show_measure_names_by_family()
        return
    typer.echo(measure_list(stdout_screen().width))


def _show_measure_names_by_family() -> None:
    """Names alone, by family: a screen that shows what there is. What an option gives besides is a mark behind it."""
    families: dict[str, list[str]] = {}
    for entry in declarations().values():
        mark = "*" if "form" in entry.options else ""
        families.setdefault(family_name(entry.family), []).append(f"{entry.name}{mark}")
    rows = [[family, ", ".join(members)] for family, members in families.items()]
    show_grid(
        ["family", "names"], [["by default", ", ".join(CORE)], *rows, ["bounds", ", ".join(declarations("bound"))]]
    )
    show_note(
        "* in several forms: --option l2_norm.form=over_margin, kappa.form=max. flatscope measures NAME explains "
        "one, flatscope measures --all lists each"
    )


@dataclass(frozen=True)
class Fit:
    """Losses and errors of a network on its data."""

    data: str
    how: str
    n_train: int
    n_test: int
    summary: NetworkSummary

    @classmethod
    def of(cls, context: Context, data: Data | DataSource) -> Fit:
        """Loss and error of the network of a context."""
        problem = context.problem
        n_test = 0 if problem.test is None else problem.test.n
        return cls(data.name, data.how, problem.n_train, n_test, summary_of(context, descends=False))

    def doubt_about_fit(self, saved: float | None) -> str:
        """Warning where most training samples are misclassified, or far more than was saved with the weights."""
        error, most, was = self.summary.error, MOST, ""
        if saved is not None:
            noise = 4 * (max(saved, 1 / self.n_train) * (1 - saved) / self.n_train) ** 0.5  # of a draw of the samples
            most, was = saved + 0.01 + noise, f", and was {100 * saved:.2f} % when these weights were saved"
        options = "--standardize and --no-standardize, --flatten for vectors, --data-seed, labels that count from 0"
        return training_error_doubt(error, most, was, options)

    def __str__(self) -> str:
        """Samples, loss and error: the line that shows when weights and data do not belong together."""
        error = "" if math.isnan(self.summary.error) else f", error {100 * self.summary.error:.2f} %"
        samples = numbered(self.n_train, "training sample")
        return f"{self.data}, {samples}, {self.how}: loss {self.summary.loss:.4g}{error}"


def show_measured(table: Table, fit: Fit) -> None:
    """The summary, and below it every number of the table."""
    screen, rows = stdout_screen(), [_Row.of(line) for line in table.lines()]
    counts = f"{fit.n_train} training and {numbered(fit.n_test, 'test sample')}"
    samples = counts if fit.n_test else numbered(fit.n_train, "training sample")
    screen.print(Text(f"{fit.data}: {samples}, {fit.how}; {numbered(fit.summary.parameters, 'parameter')}"))
    show_headline(table.headline)
    for remark in table.meta.get("remarks", ()):
        if not headline_has_remark(str(remark), table.headline):
            screen.print(Text.assemble(("To keep in mind: ", "bold yellow"), f"{remark}"))
    if all(row.is_core or row.name in PICTURED for row in rows):  # what is by layer and sample, the page shows
        # The first line has the number of parameters already.
        _show_core_rows([row for row in rows if len(rows) == 1 or row.name != "parameter_count"], edge=False)
        screen.print(Text(LEGEND))
        missing = [f"{row.name}: {row.remark.rstrip('.')}." for row in rows if row.value == "n/a"]
        if said := [*missing, *_grouped_remarks(rows)]:
            screen.print(Text(" ".join(said)))
        return
    _show_fit(fit)
    if len(rows) > MANY:
        screen.print(Text(f"First of all ({LEGEND})"))
        _show_core_rows(rows)
        screen.print(Text(_number_of_measures_in_words(table)))
    for remark, place in _show_rows_by_family(rows).items():
        screen.print(Text(f"[{place}] {remark}"))


def _number_of_measures_in_words(table: Table) -> str:
    """Number of measures in the table, and how to get the others where only long ones are missing."""
    left = [entry for entry in declarations().values() if entry.name not in table.names]
    if not left:
        return f"All {len(table.names)} measures by family"
    others = "; the long ones with -m all" if all(entry.cost == "long" for entry in left) else ""
    return f"{len(declarations()) - len(left)} of {len(declarations())} measures by family{others}"


@dataclass(frozen=True)
class _Row:
    """One line of a table, with its error beside the value."""

    name: str
    layer: str
    value: str
    remark: str

    @classmethod
    def of(cls, line: list[str]) -> _Row:
        name, layer, value, stderr, exact, remark = line
        value, _, many = value.partition(" (")  # 0.1 … 0.3 (64 values)
        # An error far below the digits that are shown says nothing, and would not fit.
        shown = stderr and ("…" in value or float(stderr) > INVISIBLE * abs(float(value)))
        known = f"{value} ± {float(stderr):.2g}" if shown else value
        remarks = "; ".join(words for words in (many.removesuffix(")"), remark) if words)
        return cls(name, layer, f"≈ {known}" if exact == "estimate" else known, remarks)

    @property
    def is_core(self) -> bool:
        """True if it is the value of the network by one of the core measures, for which a line is enough."""
        return self.name in CORE and not self.layer

    @property
    def entry(self) -> Declaration | None:
        return (declarations() | declarations("bound")).get(self.name.partition("[")[0])


def _show_fit(fit: Fit) -> None:
    summary = fit.summary
    rows = [
        [
            "loss",
            *(readable_number(value) for value in (summary.loss, summary.test_loss, summary.test_loss - summary.loss)),
        ]
    ]
    if not math.isnan(summary.error):
        shares = (summary.error, summary.test_error, summary.test_error - summary.error)
        rows.append(["error", *(f"{100 * share:.2f} %" for share in shares)])
    columns = 4 if fit.n_test else 2  # what, training, test, gap
    show_grid(["", "train", "test", "gap"][:columns], [row[:columns] for row in rows])


def _grouped_remarks(rows: list[_Row]) -> list[str]:
    """Every remark on a value once, with the measures it is about and in how many of the layers."""
    places: dict[str, dict[str, list[str]]] = {}
    for row in rows:
        for remark, extent in _layer_counts_of_remarks(row.remark if row.value != "n/a" else "").items():
            places.setdefault(remark, {}).setdefault(extent, []).append(row.name)
    return [
        f"{remark[0].upper()}{remark[1:]}: "
        + "; ".join(", ".join(names) + (f" ({extent})" if extent else "") for extent, names in named.items())
        + "."
        for remark, named in places.items()
    ]


def _layer_counts_of_remarks(remarks: str) -> dict[str, str]:
    """{remark: in how many of the layers}, empty for all of them, without remarks that tell nothing of the value."""
    counts: dict[str, tuple[int, str]] = {}
    here, of = 0, ""
    for part in filter(None, remarks.split("; ")):
        some = SOME_LAYERS.match(part)
        if some:
            here, of, part = int(some[1]), some[2], some[3]
        elif part.startswith(ASKED.strip("; ")):
            here, of = 0, ""
        # Where some layers differ from the Hessian, it goes without saying that the others do not.
        if not (of and part.endswith(AS_HESSIAN)) and not HOW.match(part):
            counts[part] = counts.get(part, (0, ""))[0] + here, of
    return {
        remark: f"{count} of {of} layers" if of and str(count) != of else "" for remark, (count, of) in counts.items()
    }


def _show_core_rows(rows: list[_Row], edge: bool = True) -> None:
    """A line each, with a mark under every rescaling that leaves the number as it is."""
    shown = []
    for name, words in captions_by_measure().items():
        # Of several options the first: the others are in the table below.
        row = next((row for row in rows if row.name.partition("[")[0] == name and not row.layer), None)
        if row is not None and SCALES_STOP not in row.remark:
            kept = row.entry.invariant_under if row.entry is not None else frozenset()
            marks = ["✓" if key in kept else "—" for key in RESCALINGS]
            options = row.name[len(name) :].strip("[]")
            shown.append(
                [name, _value_without_line_break(row.value), *marks, f"{words}, {options}" if options else words]
            )
    show_grid(
        ["measure", "value", *(key.removesuffix("_scaling") for key in RESCALINGS), "what it is"], shown, edge=edge
    )


def _show_rows_by_family(rows: list[_Row]) -> dict[str, int]:
    """Every line under the heading of its family; returns long remarks, each with the number that stands for it."""
    notes: dict[str, int] = {}
    families: dict[str, list[_Row]] = {}
    for row in rows:
        families.setdefault(OTHERS if row.entry is None else row.entry.family, []).append(row)
    shown: list[list[str | Text]] = []
    for family, members in families.items():
        heading = family_name(family)
        shown.append([Text(heading[0].upper() + heading[1:], style="bold"), "", "", ""])
        for row in members:
            remark = row.remark
            if len(remark) > SHORT:
                remark = f"[{notes.setdefault(remark, len(notes) + 1)}]"
            shown.append([f"  {row.name}", row.layer, _value_without_line_break(row.value), remark])
    show_grid(["measure", "layer", "value", "remark"], shown)
    return notes


def _value_without_line_break(value: str) -> str:
    """A value with its error, which stay on one line."""
    return value.replace(" ", "\N{NO-BREAK SPACE}")
