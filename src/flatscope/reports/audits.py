"""The audit on the page: what each rewriting of the network did to each measure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import NamedTuple

from flatscope.formatting import written
from flatscope.symmetries.audit import Audit


class AuditCell(NamedTuple):
    """One measure under one symmetry."""

    verdict: str
    change: str
    wrong: bool


class AuditRow(NamedTuple):
    """One measure under all symmetries."""

    name: str
    cells: list[AuditCell]


def audit_rows(audit: Audit) -> list[AuditRow]:
    """The matrix of measures and symmetries, in the audit's order."""
    wrong = set(zip(audit.disagrees["measure"], audit.disagrees["symmetry"], strict=True))
    found = {}
    for row in audit.to_frame().to_dict("records"):
        place = (str(row["measure"]), str(row["symmetry"]))
        change, stderr = float(row["relative_change"]), float(row["stderr"])
        text = "" if math.isnan(change) else written(change, 2)
        if text and stderr > 0:
            text += f" ± {written(stderr, 2)}"
        found[place] = AuditCell(str(row["verdict"]), text, place in wrong)
    empty = AuditCell("not tested", "", False)
    return [AuditRow(name, [found.get((name, s), empty) for s in audit.symmetries]) for name in audit.measures]


def audit_notes(audit: Audit, most_names: int = 4) -> list[str]:
    """Reasons why something was not tested, each with the measures concerned."""
    notes = []
    for reason, names in audit.notes().items():
        more = f" and {len(names) - most_names} more" if len(names) > most_names else ""
        notes.append(f"{reason.rstrip('.')} ({', '.join(names[:most_names])}{more})")
    return notes


def drawn_words(audits: Mapping[str, Audit]) -> str:
    """How the other weights were drawn."""
    trials = sorted({int(audit.meta.get("trials", 0)) for audit in audits.values()})
    return f"Draws of each kind: {', '.join(map(str, trials))}; the largest change is shown."
