"""The page in plain words: what was measured, what is reliable, what may be compared, what is missing."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flatscope.comparing.verdicts import NEARLY, SETTLED
from flatscope.formatting import written
from flatscope.noise import Readings, excess
from flatscope.reports.comparison import Cell, Line, lines
from flatscope.table import Table

NEGLIGIBLE = 1e-3  # of the largest eigenvalue


class Verdict(NamedTuple):
    """Whether this is a minimum at all: "yes", "nearly", "no" or "unknown", and the sentence that says so."""

    level: str
    text: str


class NetworkSummary(NamedTuple):
    """What can be said about one network; measures by label."""

    network: str
    measured: str
    minimum: Verdict
    exact: list[str]
    estimates: list[tuple[str, str]]
    missing: list[tuple[str, str]]
    remarks: list[tuple[str, str]]
    warnings: list[str]  # about the model or the data, and so about every measure


class Comparability(NamedTuple):
    """Which measures may be compared between networks, and what those that may be say."""

    all: list[str]
    some: list[str]
    none: list[str]
    unknown: list[str]
    findings: list[tuple[str, str]]  # measure, what it says


def network_summaries(tables: Mapping[str, Table]) -> list[NetworkSummary]:
    """One summary per network."""
    rows = lines(tables)
    return [_network(name, table, rows, n) for n, (name, table) in enumerate(tables.items())]


def _network(name: str, table: Table, rows: list[Line], column: int) -> NetworkSummary:
    cells = [(line.label, cell) for line in rows if (cell := line.cells[column]) is not None]
    valued = [(label, cell) for label, cell in cells if cell.exact is not None]
    meta = table.meta
    parts = [f"{len(cells)} measure{'s' if len(cells) != 1 else ''}"]
    if "n_train" in meta:
        parts.append(f"on {written(float(meta['n_train']))} training samples")
    if "loss" in meta:
        parts.append(f"with {str(meta['loss']).replace('_', '-')} loss")
    return NetworkSummary(
        network=name,
        measured=" ".join(parts),
        minimum=minimum_verdict(table),
        exact=[label for label, cell in valued if cell.exact],
        estimates=[(label, _error_words(cell)) for label, cell in valued if not cell.exact],
        missing=[(label, cell.reason) for label, cell in cells if cell.exact is None],
        remarks=[(label, cell.reason) for label, cell in valued if cell.reason],
        warnings=[f"{words[0].upper()}{words[1:]}" for words in meta.get("remarks", ())],
    )


def _error_words(cell: Cell) -> str:
    value = f"{cell.text} ± {cell.stderr}" if cell.stderr else f"{cell.text}, error not known"
    return f"{value} ({100 * cell.relative:.2g}\u202f%)" if math.isfinite(cell.relative) and cell.stderr else value


def minimum_verdict(table: Table) -> Verdict:
    """Judge the gradient norm, and the smallest Hessian eigenvalue where it is known: flatness is about minima."""
    if "gradient_norm" not in table:
        return Verdict("unknown", "gradient_norm was not measured, so nothing here says that this is a minimum")
    value = _first_value(table, "gradient_norm")
    if math.isnan(value):
        return Verdict("unknown", f"gradient_norm has no value: {table.reason('gradient_norm') or 'no reason given'}")
    shown = f"gradient norm {written(value, 3)}{_downward(table)}"
    if value <= SETTLED:
        return Verdict("yes", f"Close to a stationary point: {shown}")
    if value <= NEARLY:
        return Verdict("nearly", f"Nearly settled: {shown}")
    return Verdict("no", f"Still on a slope: {shown}. Curvature here describes where training stopped, not a minimum")


def _downward(table: Table) -> str:
    """A remark if the loss clearly curves down along some direction; tiny negative eigenvalues are rounding."""
    smallest, largest = (_first_value(table, f"hessian_{end}_eigenvalue") for end in ("min", "max"))
    if not (smallest < 0 and -smallest > NEGLIGIBLE * largest):
        return ""
    return f", and along some direction the loss curves down (smallest Hessian eigenvalue {written(smallest, 3)})"


def _first_value(table: Table, name: str) -> float:
    """The network-wide value with the options that come first; NaN where there is none."""
    rows = table.to_frame()
    found = rows.loc[(rows["measure"] == name) & (rows["layer"] == ""), "value"]
    return float(found.iloc[0]) if len(found) else math.nan


def comparability(tables: Mapping[str, Table]) -> Comparability:
    """Sort the measures by what rescaling does to them, and say what the comparable ones show."""
    rows = lines(tables)
    groups: dict[str, list[str]] = {"all": [], "some": [], "none": [], "unknown": []}
    for line in rows:
        groups[line.standing].append(line.label)
    findings = [(line.label, text) for line in rows if len(tables) > 1 and (text := _finding(line, list(tables)))]
    return Comparability(**groups, findings=findings)


def _finding(line: Line, networks: list[str]) -> str:
    """A sentence about a comparable measure with a direction, if there is one in all networks."""
    if line.standing != "all" or line.entry is None or line.entry.direction == "none":
        return ""
    cells = [cell for cell in line.cells if cell is not None and not cell.extent and math.isfinite(cell.value)]
    if len(cells) < len(networks):
        return ""
    sign = 1 if line.entry.direction == "higher" else -1
    order = sorted(range(len(cells)), key=lambda n: -sign * cells[n].value)
    best, worst = cells[order[0]], cells[order[-1]]
    first, last = (
        Readings.one(cell.value, cell.relative * abs(cell.value) if math.isfinite(cell.relative) else 0.0)
        for cell in (best, worst)
    )
    if excess(first, last, scale=max(abs(best.value), abs(worst.value)), rounding=0.0)[0] <= 1:
        return "does not tell the networks apart: they differ by no more than their standard errors explain."
    ranked = ", ".join(f"{networks[n]} ({cells[n].text})" for n in order)
    scale = "" if "output_scaling" in line.entry.invariant_under else "; not corrected for the scale of the outputs"
    return f"ranks, best first: {ranked}. {line.entry.direction.capitalize()} is expected to be better{scale}."
