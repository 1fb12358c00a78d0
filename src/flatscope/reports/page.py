"""`report`: one self-contained page from any mix of things that flatscope produces."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable, Mapping, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd
from markupsafe import Markup

from flatscope.comparing.verdicts import NEARLY, SETTLED
from flatscope.errors import InputError
from flatscope.files import figure_bytes
from flatscope.formatting import written
from flatscope.guards import whole_file
from flatscope.papers import from_papers
from flatscope.registry import PAPERS, SYMMETRIES
from flatscope.reports.audits import audit_notes, audit_rows, drawn_words
from flatscope.reports.bicriteria import bicriteria_chart, bicriteria_data
from flatscope.reports.charts import Colours, comparison_chart, curves_chart, distribution_chart, layers_chart
from flatscope.reports.comparison import RESCALINGS, lines
from flatscope.reports.comparisons import comparisons_part
from flatscope.reports.figure_data import (
    comparison_data,
    curves_data,
    curves_quantities,
    distribution_data,
    distribution_measures,
    layers_data,
    layers_measures,
)
from flatscope.reports.headlines import MANY, headlines
from flatscope.reports.items import by_kind
from flatscope.reports.markup import formula, fragment, source
from flatscope.reports.parts import Part, Section, charts_section
from flatscope.reports.population_page import populations_part
from flatscope.reports.simplexes import simplexes_part
from flatscope.reports.summary import comparability, network_summaries
from flatscope.reports.surfaces import surfaces_part
from flatscope.reports.units import units_chart, units_data, units_profiles
from flatscope.symmetries.audit import Audit
from flatscope.table import Table
from flatscope.version import __version__

if TYPE_CHECKING:
    from matplotlib.figure import Figure

N_COLOURS = 7
SCRIPTS = ("numbers.js", "page.js", "tables.js", "surface.js", "population.js")
STYLES = ("page.css", "figures.css")
LARGEST_SVG = 1_000_000  # bytes; a figure with more shapes than that is embedded as pixels
SYMMETRY_WORDS = {
    "layer_scaling": ("layer", "one layer times c, the next divided by c"),
    "unit_scaling": ("unit", "one unit's incoming weights times c, its outgoing ones divided by c"),
    "permutation": ("permutation", "units of a layer in another order"),
    "batchnorm_scaling": ("BatchNorm", "scale and shift of a BatchNorm times c, the next layer divided by c"),
    "output_scaling": ("output", "all outputs times c, margins scaling along"),
}
META_WORDS = {
    "version": "flatscope",
    "torch": "PyTorch",
    "python": "Python",
    "dtype": "number format",
    "n_train": "training samples",
    "passes": "passes over the data",
    "seconds": "seconds measuring",
    "time": "measured at",
}


def report(
    items: object, path: str | os.PathLike[str], *, title: str | None = None, command: str | None = None
) -> Path:
    """Write one HTML page that opens anywhere without a network, whole or not at all.

    Args:
        items: a Table, an Audit, a Comparison, a Surface, a Simplex, a population (a PopulationFrame, or a pandas frame
            with a column `generalization_gap`), a frame of training history, the result of a study, a Matplotlib
            figure; or a list or dictionary of them, nested at will. Names come from dictionaries and (name, thing)
            pairs; things with the same name belong to the same network:
            `{"small batch": [table, history], "large batch": [...]}`.
        path: where to write the page; folders are made.
        title: heading of the page.
        command: the command line that produced it, shown with the provenance.

    Returns:
        The path of the page.

    Raises:
        InputError: an item that cannot be shown, or a path that cannot be written to.

    Example:
        >>> import tempfile, torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     report({"linear": fs.measure(problem, "margin")}, f"{folder}/report.html").name
        'report.html'
    """
    if Path(path).is_dir():
        raise InputError(
            "the path of a file", f"the folder {path}", where="report", fix="Add a name such as report.html"
        )
    page = page_text(items, title=title, command=command)
    with whole_file(path) as temporary:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
    return Path(path)


def page_text(items: object, *, title: str | None = None, command: str | None = None) -> str:
    """The page that `report` writes."""
    kinds = by_kind(items)
    networks = list(dict.fromkeys(name for kind in ("measures", "bounds", "histories") for name in kinds[kind]))
    colours = {name: n % N_COLOURS for n, name in enumerate(networks)}
    parts = [renderer(kinds[kind], colours) for kind, renderer in RENDERERS.items() if kinds[kind]]
    script = "".join([*map(source, SCRIPTS), *(part.script for part in parts)])
    style = "".join([*map(source, STYLES), *(part.style for part in parts)])
    page = fragment(
        "template.html",
        title=title or _question(len(networks), {kind for kind, found in kinds.items() if found}),
        networks=colours,
        summaries=[part.summary for part in parts if part.summary],
        sections=[section for part in parts for section in part.sections],
        provenance=_provenance([part.provenance for part in parts]),
        command=command,
        version=__version__,
        written=datetime.now(UTC),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return str(page)


def _question(n_networks: int, kinds: Set[str]) -> str:
    """The title where none is given: what a reader of this page wants to know."""
    if kinds == {"studies"}:
        return "Do the claims hold?"
    if "populations" in kinds and not n_networks:
        return "What goes along with generalization?"
    return "How flat are these minima?" if n_networks > 1 else "How flat is this minimum?"


def _hash(text: str) -> str:
    """What the page's security policy allows to run: this very text and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


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


# One renderer per kind of item, in the order of the page; the kinds themselves are in items.py.
RENDERERS: dict[str, Callable[[Mapping[str, Any], Colours], Part]] = {
    "comparisons": comparisons_part,
    "measures": measures_part,
    "audits": audits_part,
    "surfaces": surfaces_part,
    "simplexes": simplexes_part,
    "populations": populations_part,
    "histories": histories_part,
    "bounds": bounds_part,
    "studies": studies_part,
    "figures": figures_part,
}


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


def _provenance(metas: list[Mapping[str, Mapping[str, Any]]]) -> dict[str, Any]:
    """Columns and rows of the provenance table; a row per thing that any of the tables says about itself."""
    columns = {name: meta for part in metas for name, meta in part.items() if meta}
    keys = dict.fromkeys(key for meta in columns.values() for key in meta if key != "name")
    rows = [(META_WORDS.get(key, key), [_plain(meta.get(key, "")) for meta in columns.values()]) for key in keys]
    return {"columns": list(columns), "rows": rows}


def _plain(value: Any) -> str:
    """A value of the provenance in words: {"forward": 2.0} becomes "forward 2"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return written(value) if isinstance(value, float) else str(value)
