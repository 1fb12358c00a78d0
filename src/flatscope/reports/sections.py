"""Sections of the page: what each kind of thing adds to it, from tables of measures to pictures of others."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import pandas as pd
from markupsafe import Markup

from flatscope.audit_result import Audit
from flatscope.comparing.comparison import ERRORS, Comparison
from flatscope.explaining import Explanation
from flatscope.files import figure_bytes
from flatscope.formatting import first_of_names, numbered, typeset, written
from flatscope.registry import SYMMETRIES, Declaration
from flatscope.reports.figures import comparison_plot, history_plots, measured_plots
from flatscope.reports.markup import (
    Cell,
    Colours,
    PagePart,
    Section,
    answer_and_list,
    badge,
    breakable,
    bullet_list,
    element,
    formula_as_mathml,
    table,
)
from flatscope.reports.measure_legend import how_to_read_measures
from flatscope.reports.measured import MANY, Line, MeasuredCell, measure_lines
from flatscope.reports.plots import (
    Plot,
    content_of_first_plots,
    figure_fitted_to_page,
    first_plot_for_top,
    plot_cards,
    plots_section,
)
from flatscope.result import Result
from flatscope.simplex import Simplex
from flatscope.spectra.density import MATRIX_WORDS, SpectralDensity
from flatscope.spectra.eigenpairs import Eigenpairs
from flatscope.table import Table

if TYPE_CHECKING:
    from matplotlib.figure import Figure

LARGEST_SVG = 1_000_000  # bytes; a figure with more shapes than that is embedded as pixels
BADGES = {"comparable": "good", "not comparable": "poor"}
AUDIT_BADGES = {"invariant": "good", "moved": "poor"}
REWRITTEN = (
    "The same function was written with other weights and measured again. A measure that moves says as much about how "
    "the network is written as about what it computes."
)
TOP = 2  # figures of measures that may stand at the top
MOST_ROWS = 40  # of the table that stands for the picture of an interpolation


def comparisons_part(comparisons: Mapping[str, Comparison], colours: Colours) -> PagePart:
    """Ratios of the measures that may be compared, and the order and verdict of every one."""
    sections, top = [], Markup("")
    repeated: tuple[Markup, ...] = ()
    for n, (name, comparison) in enumerate(comparisons.items()):
        left_out = [label for labels in comparison.not_comparable().values() for label in labels]
        plots = list(comparison_plot(comparison.tables, colours, left_out))
        top, repeated = top or first_plot_for_top(plots), repeated or content_of_first_plots(plots)
        remarks = [] if len(comparison.distinct) < 2 or not comparison.counting else comparison.ranking_remarks()
        rows = [
            [_measure_name_markup(line[0]), *line[1:-1], badge(line[-1], BADGES.get(line[-1], "")) if line[-1] else ""]
            for line in comparison.lines()
        ]
        refused = [f"{reason}: {', '.join(labels)}" for reason, labels in comparison.not_comparable().items()]
        body = Markup("").join(
            (
                plot_cards(plots),
                bullet_list(remarks),
                element("h3", "Every measure, best network first"),
                element("p", f"> better, ≳ better within the error, = equal. {ERRORS}", class_="quiet"),
                table(f"Order and verdict of every measure, {name}", comparison.header, rows, tall=len(rows) > MANY),
                element("p", "Why some are not comparable:", class_="quiet note") if refused else "",
                bullet_list(refused),
            )
        )
        asked = len(comparison.tables[comparison.names[0]].names)
        counting = f"{len(comparison.counting)} {'counts' if len(comparison.counting) == 1 else 'count'} in the ranking"
        count = f"{len(comparison.comparable)} of {asked} measures may be compared, {counting}"
        title = "Comparison" if len(comparisons) == 1 else f"Comparison: {name}"
        sections.append(Section(f"comparison-{n}" if n else "comparison", title, body, count))
    provenance = {name: comparison.meta for name, comparison in comparisons.items()}
    return PagePart(Markup(""), sections, provenance, picture=top, below=repeated)


def measures_part(tables: Mapping[str, Table], colours: Colours) -> PagePart:
    """The table of measures, and what there is by layer, unit and sample."""
    rows = measure_lines(tables)
    cells = [
        [
            Cell(_described_measure(line), line.label),
            *(_value_cell(cell) for cell in line.cells),
            Cell(_direction_badge(line.entry), "" if line.entry is None else line.entry.direction, "direction"),
            Cell(_invariance_badge(line), str(len(line.symmetries_kept)) if line.entry else "-1", "symmetries"),
            Cell(*_source_and_sort_key(line.entry), "source"),
        ]
        for line in rows
    ]
    body = table(
        f"Measures of {', '.join(tables)}. Column headers sort.",
        ["Measure", *tables, "Better", "Invariant under", "Source"],
        cells,
        class_="measures",
        id_="measure-table",
        sorts=["text", *["number"] * len(tables), "text", "number", "text"],
        invariances=[line.invariance for line in rows],
        tall=len(rows) > MANY,
    )
    body += how_to_read_measures()
    missing = {line.label: [c.reason for c in line.cells if c is not None and c.exact is None] for line in rows}
    n_missing = sum(bool(reasons) for reasons in missing.values())
    gist = f"{numbered(len(rows), 'measure')}" + (f", {n_missing} could not be computed" if n_missing else "")
    sections = [Section("measures", "Measures", body, gist)]
    plots = list(measured_plots(tables, colours))
    sections += plots_section("profiles", "By sample, layer and unit", plots, numbered(len(plots), "figure"))
    provenance = {name: measured.meta for name, measured in tables.items()}
    return PagePart(
        Markup(""),
        sections,
        provenance,
        picture=first_plot_for_top(plots, TOP),
        below=content_of_first_plots(plots, TOP),
    )


def _measure_name_markup(label: str) -> Markup:
    return element("span", breakable(label), class_="name")


def _described_measure(line: Line) -> Markup:
    """Name, options, formula and what the measure is."""
    parts = [_measure_name_markup(line.name)]
    if line.options:
        parts.append(element("small", line.options, class_="options"))
    if line.entry is not None:
        parts.append(element("span", formula_as_mathml(line.entry.symbol), class_="formula"))
        parts.append(element("small", line.entry.summary.replace("`", "")))
    return Markup("").join(parts)


def _value_cell(cell: MeasuredCell | None) -> Cell:
    if cell is None:
        return Cell(element("span", "not asked for", class_="quiet"), "", "number")
    if cell.exact is None:
        return Cell(element("span", "n/a", class_="none") + element("small", cell.reason), "", "number")
    error = element("span", f" ± {cell.stderr}", class_="error") if cell.stderr else ""
    shown = element("span", cell.text, error, class_="value")
    marks = [badge("exact") if cell.exact else badge("estimate", "estimate"), badge("folded") if cell.folded else ""]
    notes = [element("small", text) for text in (cell.extent, cell.interval, cell.reason) if text]
    return Cell(Markup("").join((shown, *marks, *notes)), cell.sort_key, "number")


def _direction_badge(entry: Declaration | None) -> Markup:
    arrows = {"lower": "↓ lower", "higher": "↑ higher"}
    if entry is None or entry.direction not in arrows:
        return element("span", "neither", class_="quiet")
    return element("span", arrows[entry.direction])


def _invariance_badge(line: Line) -> Markup:
    if line.entry is None:
        return element("span", "not declared here", class_="quiet")
    marks = [badge(word, "good", what) for key, (word, what) in SYMMETRIES.items() if key in line.symmetries_kept]
    return Markup(" ").join(marks) if marks else element("span", "nothing", class_="quiet")


def _source_and_sort_key(entry: Declaration | None) -> tuple[Markup, str]:
    if entry is None:
        return Markup(""), ""
    return element("span", entry.citation, element("small", entry.equation)), entry.citation


def bounds_part(tables: Mapping[str, Table], _: Colours) -> PagePart:
    """Bounds that say something, each with what it assumes; those that say nothing in a line."""
    frames = {name: bounds.to_frame().drop_duplicates(["measure", "options"]) for name, bounds in tables.items()}
    empty = [dict(zip(f["measure"], f["vacuous"], strict=True)) for f in frames.values()]
    assumed = {m: a for f in frames.values() for m, a in zip(f["measure"], f["assumptions"], strict=True)}
    levels = sorted({float(c) for f in frames.values() for c in f["confidence"]})
    groups: dict[str, list[Line]] = {state: [] for state in ("informative", "vacuous", "without value")}
    for line in measure_lines(tables, "bound"):
        groups[
            min(
                _state_of_bound(cell, line.name, vacuous_by_name)
                for cell, vacuous_by_name in zip(line.cells, empty, strict=True)
            )
        ].append(line)
    informative, vacuous, refused = groups.values()
    chance = ", ".join(f"{level:g}" for level in levels)
    meaning = f"Each holds with probability at least {chance} if its assumptions do. Vacuous: 1 or more on an error."
    parts = [element("p", meaning, class_="quiet")]
    if informative:
        rows = [
            [
                _described_measure(line),
                *(_value_cell(cell) for cell in line.cells),
                element("small", assumed.get(line.name, "")),
                _source_and_sort_key(line.entry)[0],
            ]
            for line in informative
        ]
        parts.append(table("Informative bounds", ["Bound", *tables, "Assumes", "Source"], rows))
    if vacuous:
        parts.append(element("p", element("b", "Vacuous: "), f"{', '.join(line.label for line in vacuous)}."))
    if refused:
        words = _reasons_for_missing_bounds(refused)
        parts.append(element("details", element("summary", f"{len(refused)} do not apply here"), bullet_list(words)))
    gist = f"{len(informative)} informative, {len(vacuous)} vacuous"
    provenance = {f"{name}, bounds": bounds.meta for name, bounds in tables.items()}
    return PagePart(Markup(""), [Section("bounds", "Bounds", Markup("").join(parts), gist)], provenance)


def _state_of_bound(cell: MeasuredCell | None, name: str, vacuous: Mapping[str, bool]) -> str:
    """Informative, vacuous, or without a value, for one network."""
    if cell is None or cell.exact is None:
        return "without value"
    return "vacuous" if vacuous.get(name) else "informative"


def _reasons_for_missing_bounds(refused: Sequence[Line]) -> list[str]:
    """Bounds without a value by their reason, each reason once."""
    labels: dict[str, list[str]] = {}
    for line in refused:
        reason = next((cell.reason for cell in line.cells if cell is not None and cell.reason), "no value")
        labels.setdefault(reason, []).append(line.label)
    return [f"{', '.join(names)}: {reason}" for reason, names in labels.items()]


def audits_part(audits: Mapping[str, Audit], _: Colours) -> PagePart:
    """Part of the page on audits: changes of each measure when the same function has other weights."""
    trials = ", ".join(map(str, sorted({int(audit.meta.get("trials", 0)) for audit in audits.values()})))
    parts = [element("p", f"{REWRITTEN} Draws of each kind: {trials}; the largest change is shown.", class_="quiet")]
    answers = []
    for name, audit in audits.items():
        header = ["Measure", *(SYMMETRIES.get(s, (s,))[0].capitalize() for s in audit.symmetries)]
        rows = [
            [_measure_name_markup(line[0][0]), *(_audit_cell(*cell) for cell in line[1:])] for line in audit.lines()
        ]
        notes = bullet_list(
            f"{reason.rstrip('.')} ({first_of_names(names, 4)})" for reason, names in audit.notes().items()
        )
        parts += [element("h3", name)] if len(audits) > 1 else []
        parts += [table(f"Audit of {name}", header, rows), notes]
        answers.append(audit_in_words(name, audit))
    provenance = {f"{name}, audit": audit.meta for name, audit in audits.items()}
    gist = "which measures change when the weights are rewritten"
    return PagePart(answer_and_list(answers), [Section("audit", "Audit", Markup("").join(parts), gist)], provenance)


def explanations_part(explanations: Mapping[str, Explanation], _: Colours) -> PagePart:
    """Part of the page on how each network was read, with the route of every parameter's curvature."""
    parts, answers = [], []
    for name, explanation in explanations.items():
        parts += [element("h3", name)] if len(explanations) > 1 else []
        parts += [table(f"How {name} is read", *explanation.cells()), bullet_list(explanation.details())]
        answers.append(" ".join(explanation.headline_lines()[:2]))
    provenance = {f"{name}, explanation": explained.meta for name, explained in explanations.items()}
    section = Section("explanation", "How it is read", Markup("").join(parts), "the way of every parameter, and why")
    return PagePart(answer_and_list(answers), [section], provenance)


def audit_in_words(name: str, audit: Audit) -> str:
    """Sentence with the number of measures that stayed unchanged."""
    frame = audit.to_frame()
    tested = frame[frame["verdict"] != "not tested"]
    moved = list(dict.fromkeys(tested.loc[tested["verdict"] == "moved", "measure"]))
    kept = [measure for measure in dict.fromkeys(tested["measure"]) if measure not in moved]
    whole = f"{len(kept)} of {len(kept) + len(moved)} audited measures of {name} are invariant"
    return f"{whole}: {first_of_names(kept, 6)}." if kept else f"{whole}."


def _audit_cell(text: str, wrong: bool) -> Markup:
    """A cell of the audit's matrix: its verdict marked, the change below it."""
    verdict = next((word for word in AUDIT_BADGES if text.startswith(word)), "")
    if not verdict:
        return element("span", text or "not tested", class_="quiet")
    change = element("small", f"relative change {typeset(text.removeprefix(verdict).strip())}")
    against = element("small", "against its declaration", class_="none") if wrong else ""
    return Markup("").join((badge(verdict, AUDIT_BADGES[verdict]), change, against))


def histories_part(histories: Mapping[str, pd.DataFrame], colours: Colours) -> PagePart:
    """Training curves, one figure per recorded quantity."""
    plots = list(history_plots(histories, colours))
    section = plots_section("training", "Training", plots, "curves by epoch")
    return PagePart(Markup(""), section, {}, picture=first_plot_for_top(plots), below=content_of_first_plots(plots))


def drawn_part(title: str, gist: str, plots: Iterable[Plot], results: Mapping[str, Result]) -> PagePart:
    """The figures in a section of their own, what each shows in words, where they come from."""
    shown, anchor = list(plots), title.lower()
    answer = answer_and_list([f"{plot.title}: {plot.caption}" for plot in shown])
    provenance = {f"{name}, {anchor}": result.meta for name, result in results.items()}
    section = plots_section(anchor, title, shown, gist)
    return PagePart(answer, section, provenance, picture=first_plot_for_top(shown), below=content_of_first_plots(shown))


def spectrum_plots(spectra: Mapping[str, SpectralDensity | Eigenpairs], _: Colours) -> Iterator[Plot]:
    """The density of eigenvalues, or those found one by one, as each draws itself."""
    for name, spectrum in spectra.items():
        header, rows = spectrum.cells()
        make = partial(spectrum.figure, caption=False) if isinstance(spectrum, SpectralDensity) else spectrum.figure
        yield Plot(f"spectrum-{name}", name, spectrum_in_words(spectrum), figure_fitted_to_page(make), header, rows)


def label_of_spectrum(spectrum: SpectralDensity | Eigenpairs) -> str:
    """Label that tells the spectra of one network apart."""
    what = "density of eigenvalues" if isinstance(spectrum, SpectralDensity) else "eigenvalues"
    return f"layer {spectrum.layer}, {what}" if spectrum.layer else what


def spectrum_in_words(spectrum: SpectralDensity | Eigenpairs) -> str:
    """Sentence on a spectrum."""
    matrix = MATRIX_WORDS[spectrum.curvature]
    if isinstance(spectrum, Eigenpairs):
        missing = int((~spectrum.converged).sum())
        left = f"; {missing} of {len(spectrum)} not found to the accuracy asked for" if missing else ""
        return f"Largest eigenvalue of the {matrix} {written(float(spectrum.values[0]))}{left}."
    trace, error = spectrum.trace
    zero = f"±{written(spectrum.radius, 2)}"
    low, high = spectrum.range
    return (
        f"{written(spectrum.size)} eigenvalues of the {matrix} from {written(low)} to {written(high)}; "
        f"{len(spectrum.outliers)} of them stand out; trace {written(trace)} ± {written(error, 2)}; "
        f"{typeset(str(spectrum.negative()))} negative, {typeset(str(spectrum.near_zero()))} within {zero} of zero."
        + (" Shaded: 95 % band over draws." if spectrum.draws > 1 else "")
    )


def spectra_part(spectra: Mapping[str, SpectralDensity | Eigenpairs], colours: Colours) -> PagePart:
    """One figure per density or list of eigenvalues."""
    return drawn_part("Spectrum", "eigenvalues", spectrum_plots(spectra, colours), spectra)


def simplex_plots(simplexes: Mapping[str, Simplex], _: Colours) -> Iterator[Plot]:
    """Loss along a line, or over a triangle with a network at each corner."""
    for name, simplex in simplexes.items():
        values, accuracy = simplex.loss.numpy(), simplex.accuracy
        shown = sorted({*range(0, len(values), max(1, -(-len(values) // MOST_ROWS))), *simplex.vertices})
        rows = [
            [
                " + ".join(f"{share:.3g}" for share in simplex.weights[n].tolist()),
                written(float(values[n])),
                *([f"{100 * float(accuracy[n]):.3g}\u202f%"] if accuracy is not None else []),
            ]
            for n in shown
        ]
        header = ["mixture", "loss", *(["accuracy"] if accuracy is not None else [])]
        stem = f"interpolation-{name.removeprefix('interpolation')}"
        yield Plot(stem, name, simplex_in_words(simplex), simplex.figure, header, rows)


def simplex_in_words(simplex: Simplex) -> str:
    """Losses at the networks, and the barrier between them."""
    corners = [float(simplex.loss[n]) for n in simplex.vertices]
    words = f"Loss {', '.join(written(loss, 3) for loss in corners)} at the networks; "
    if not np.isfinite(simplex.loss.numpy()).all():
        return words + "some mixtures have no finite loss."
    if simplex.barrier <= 1e-3 * max(map(abs, corners)):
        return words + "no barrier between them: no mixture has more loss than the networks mixed in it."
    return words + f"between them a barrier of {written(simplex.barrier, 3)}."


def simplexes_part(simplexes: Mapping[str, Simplex], colours: Colours) -> PagePart:
    """One figure per interpolation, and whether a barrier lies between the networks."""
    gist = "loss of mixtures of the networks"
    return drawn_part("Interpolation", gist, simplex_plots(simplexes, colours), simplexes)


def given_plots(figures: Mapping[str, Figure], _: Colours) -> Iterator[Plot]:
    """Figures that somebody else drew."""
    for title, figure in figures.items():
        axes = [f"{a.get_ylabel()} over {a.get_xlabel()}" for a in figure.axes if a.get_xlabel() and a.get_ylabel()]
        yield Plot(title, title, "; ".join(axes), lambda figure=figure: figure)  # type: ignore[misc]


def figures_part(figures: Mapping[str, Figure], colours: Colours) -> PagePart:
    """Figures that somebody else drew, as pictures that keep to themselves."""
    shown = []
    for plot in given_plots(figures, colours):
        figure = plot.make()
        content, media = figure_bytes(figure, "svg"), "image/svg+xml"
        if len(content) > LARGEST_SVG:
            content, media = figure_bytes(figure, "png"), "image/png"
        address = f"data:{media};base64,{base64.b64encode(content).decode()}"
        alt = f"{plot.title}: {plot.caption}" if plot.caption else plot.title
        image = element("img", class_="paper", alt=alt, src=address)
        shown.append(element("figure", element("figcaption", element("h3", plot.title)), image, class_="card"))
    return PagePart(Markup(""), [Section("figures", "Figures", element("div", *shown, class_="charts"), open=True)], {})
