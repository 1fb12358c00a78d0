"""Sections of the page: what each kind of thing adds to it, from tables of measures to pictures of others."""

from __future__ import annotations

import base64
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import pandas as pd
from markupsafe import Markup

from flatscope.comparing.comparison import ERRORS, Comparison
from flatscope.comparing.rankings import places
from flatscope.comparing.verdicts import NEARLY, SETTLED
from flatscope.files import figure_bytes
from flatscope.formatting import written
from flatscope.papers import from_papers
from flatscope.registry import PAPERS, SYMMETRIES
from flatscope.reports.charts import (
    Colours,
    bicriteria_chart,
    charts_section,
    comparison_chart,
    curves_chart,
    distribution_chart,
    layers_chart,
    units_chart,
)
from flatscope.reports.figure_data import (
    bicriteria_data,
    comparison_data,
    curves_data,
    curves_quantities,
    distribution_data,
    distribution_measures,
    layers_data,
    layers_measures,
    units_data,
    units_profiles,
)
from flatscope.reports.markup import Part, Section, formula, fragment
from flatscope.reports.measured import MANY, RESCALINGS, comparability, headlines, lines, network_summaries
from flatscope.symmetries.audit import Audit
from flatscope.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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


LARGEST_SVG = 1_000_000  # bytes; a figure with more shapes than that is embedded as pixels
SYMMETRY_WORDS = {
    "layer_scaling": ("layer", "one layer times c, the next divided by c"),
    "unit_scaling": ("unit", "one unit's incoming weights times c, its outgoing ones divided by c"),
    "permutation": ("permutation", "units of a layer in another order"),
    "batchnorm_scaling": ("BatchNorm", "scale and shift of a BatchNorm times c, the next layer divided by c"),
    "output_scaling": ("output", "all outputs times c, margins scaling along"),
}
BADGES = {"comparable": "good", "not comparable": "poor"}


def comparisons_part(comparisons: Mapping[str, Comparison], _: Colours) -> Part:
    """Warnings and ranking in the summary; the table of orders and verdicts as a section."""
    ranked = {n: found.ranking() for n, found in comparisons.items() if len(found.distinct) > 1 and found.comparable}
    rankings = {name: frame.assign(place=places(frame)).to_dict("records") for name, frame in ranked.items()}
    summary = fragment("comparison_summary.html", comparisons=comparisons, rankings=rankings)
    body = fragment("comparisons.html", comparisons=comparisons, badges=BADGES, errors=ERRORS)
    provenance = {name: found.meta for name, found in comparisons.items()}
    return Part(summary, [Section("ranking", "Ranking", body)], provenance)


def measures_part(tables: Mapping[str, Table], colours: Colours) -> Part:
    """Summary, table of measures, comparison, distributions, the two criteria, profiles of layers and units."""
    summary = fragment(
        "summary.html",
        networks=network_summaries(tables),
        colours=colours,
        comparability=comparability(tables),
        settled=f"{SETTLED:g}",
        nearly=f"{NEARLY:g}",
    )
    rows = lines(tables)
    body = fragment(
        "measures.html",
        lines=rows,
        headlines=headlines(rows) if len(rows) > MANY else [],
        rescalings=RESCALINGS,
        networks=list(tables),
        colours=colours,
        formula=formula,
        papers=PAPERS,
        symmetries=SYMMETRIES,
        words=SYMMETRY_WORDS,
    )
    sections = [Section("measures", "Measures", body)]
    if len(tables) > 1 and (data := comparison_data(tables)).measures:
        sections.append(charts_section("comparison", "Comparison", [comparison_chart(data, colours)], wide=True))
    found = [distribution_chart(distribution_data(tables, m), colours) for m in distribution_measures(tables)]
    sections.append(charts_section("distributions", "Distributions", found))
    if (criteria := bicriteria_data(tables)).curves:
        chart = bicriteria_chart(criteria, colours)
        sections.append(charts_section("bicriteria", "Two criteria", [chart], wide=True))
    found = [layers_chart(layers_data(tables, m), colours) for m in layers_measures(tables)]
    sections.append(charts_section("layers", "Layers", found))
    found = [units_chart(units_data(tables, *profile), colours) for profile in units_profiles(tables)]
    sections.append(charts_section("units", "Units", found))
    return Part(summary, [s for s in sections if s.body], {name: table.meta for name, table in tables.items()})


def bounds_part(tables: Mapping[str, Table], colours: Colours) -> Part:
    """The table of bounds, each with what it assumes and whether it says anything."""
    frames = {name: table.to_frame().drop_duplicates(["measure", "options"]) for name, table in tables.items()}
    body = fragment(
        "bounds.html",
        lines=lines(tables, "bound"),
        networks=list(tables),
        colours=colours,
        vacuous=[dict(zip(f["measure"], f["vacuous"], strict=True)) for f in frames.values()],
        assumptions={m: a for f in frames.values() for m, a in zip(f["measure"], f["assumptions"], strict=True)},
        confidence=sorted({float(c) for f in frames.values() for c in f["confidence"]}),
        formula=formula,
        papers=PAPERS,
    )
    provenance = {f"{name}, bounds": table.meta for name, table in tables.items()}
    return Part(Markup(""), [Section("bounds", "Bounds", body)], provenance)


def audits_part(audits: Mapping[str, Audit], _: Colours) -> Part:
    """What happened to each measure when the same function was written with other weights."""
    body = fragment(
        "audits.html",
        audits=audits,
        rows={name: audit_rows(audit) for name, audit in audits.items()},
        notes={name: audit_notes(audit) for name, audit in audits.items()},
        drawn=drawn_words(audits),
        words=SYMMETRY_WORDS,
    )
    return Part(Markup(""), [Section("audit", "Audit", body)], {f"{n}, audit": a.meta for n, a in audits.items()})


def histories_part(histories: Mapping[str, pd.DataFrame], colours: Colours) -> Part:
    """Training curves, one figure per recorded quantity."""
    found = [curves_chart(curves_data(histories, q), colours) for q in curves_quantities(histories)]
    section = charts_section("training", "Training", found)
    return Part(Markup(""), [section] if section.body else [], {})


def studies_part(studies: Mapping[str, Any], colours: Colours) -> Part:
    """Claims and verdicts, as the package of the papers shows them."""
    part: Part = from_papers("report_section")(studies, colours)
    return part


def figures_part(figures: Mapping[str, Figure], _: Colours) -> Part:
    """Figures that somebody else drew, as pictures."""
    images = [(title, *_image(figure), _described(title, figure)) for title, figure in figures.items()]
    return Part(Markup(""), [Section("figures", "Figures", fragment("figures.html", images=images))], {})


def _image(figure: Figure) -> tuple[str, str]:
    """Media type and base64 text."""
    content, media = figure_bytes(figure, "svg"), "image/svg+xml"
    if len(content) > LARGEST_SVG:
        content, media = figure_bytes(figure, "png"), "image/png"
    return media, base64.b64encode(content).decode()


def _described(title: str, figure: Figure) -> str:
    """What a picture shows, from its own labels."""
    axes = [f"{ax.get_ylabel()} over {ax.get_xlabel()}" for ax in figure.axes if ax.get_xlabel() and ax.get_ylabel()]
    return f"{title}: {'; '.join(axes)}" if axes else title
