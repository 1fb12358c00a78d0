"""`flatscope audit`: which measures move when the same function is written with other weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from flatscope import auditing
from flatscope.cli.output import check_outputs, deliver, note_found_initial, note_missing_weights, show_grid, show_note
from flatscope.cli.sources import (
    check_measures,
    find_initial,
    load_problem,
    network_meta,
    parse_model_options,
    parse_options,
)
from flatscope.errors import refuse_unknown
from flatscope.ranks import process_group
from flatscope.symmetries.audit import Audit
from flatscope.symmetries.folding import has_batchnorm
from flatscope.training.weight_files import read_weights

if TYPE_CHECKING:
    from flatscope.cli.options import AuditCommand

_STYLES = {"moved": "yellow", "invariant": "green", "not tested": "dim"}


def run_audit(given: AuditCommand) -> None:
    """Audit, show, save."""
    check_measures(given.measures)
    options = parse_options(given.option or ())
    parse_model_options(given.model_option)
    begun = find_initial(given.initial, given.weights)
    for way in given.by or ():
        refuse_unknown(way, auditing.SYMMETRY_OF, "--by")
    check_outputs(given, Audit)
    with process_group(given.device) as own_device:
        before = None if begun is None else read_weights(begun)
        problem, _ = load_problem(given, device=own_device, initial=before)
        ways = given.by or [way for way in auditing.SYMMETRY_OF if way != "batchnorm" or has_batchnorm(problem.model)]
        found = auditing.audit(problem, given.measures, ways, given.trials, given.seed, options=options)
        if problem.ranks.rank:
            return  # every rank has the same audit; the first one shows it
    found.meta |= network_meta(given)
    note_missing_weights(given.weights)
    note_found_initial(given.initial, begun)
    deliver(found, given, lambda: show_audit(found))


def show_audit(found: Audit) -> None:
    """The matrix of measures and symmetries; red where a verdict contradicts the declaration."""
    rows = [
        [Text(name), *(Text(text, style="bold red" if wrong else _style(text)) for text, wrong in cells)]
        for (name, _), *cells in found.lines()
    ]
    header = ["measure", *(name.replace("_", " ") for name in found.symmetries)]
    show_grid(header, rows, title="relative change of each measure, same function")
    for reason, names in found.notes().items():
        listed = "all measures" if len(names) == len(found.measures) else ", ".join(names)
        show_note(f"{reason.rstrip('.')} ({listed})")
    wrong = found.disagrees
    for name, symmetry, declared in zip(wrong["measure"], wrong["symmetry"], wrong["declared"], strict=True):
        says = "declared invariant, and moved" if declared else "not declared invariant, yet stands still"
        show_note(f"{name} under {symmetry.replace('_', ' ')}: {says}")


def _style(text: str) -> str:
    return next((style for verdict, style in _STYLES.items() if text.startswith(verdict)), "")
