"""`report`: one self-contained page from any mix of things that flatscope produces, and the answer at its top."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import replace
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flatscope.comparing.comparison import Comparison
from flatscope.disk import whole_file
from flatscope.errors import InputError
from flatscope.formatting import with_error, written
from flatscope.headlines import headline_has_remark, minimum_verdict
from flatscope.network_summary import STANDING, NetworkSummary
from flatscope.reports.figures import save_plots
from flatscope.reports.items import by_kind, shown_kinds
from flatscope.reports.markup import (
    Cell,
    PagePart,
    Section,
    breakable,
    bullet_list,
    element,
    table,
    text_of_package_file,
)
from flatscope.reports.measured import MeasuredCell, captions_by_measure, measure_lines
from flatscope.reports.page_frame import page_with_frame
from flatscope.reports.plots import COLOURS
from flatscope.table import Table

SCRIPTS = ("page.js", "tables.js", "surface.js")
# Which pictures stand at the top, where there are several.
PICTURES_FROM = (
    "leaderboards",
    "atlases",
    "populations",
    "surfaces",
    "comparisons",
    "stability",
    "spectra",
    "simplexes",
    "histories",
    "measures",
)
COLOURED = ("measures", "bounds", "histories", "stability")
DETAILS = ("surfaces", "spectra", "simplexes")  # said at the top only where nothing was measured
# Titles of pages with things of one kind alone.
QUESTIONS = {
    "studies": "Do the claims hold?",
    "stability": "Is this training at the edge of stability?",
    "audits": "Which measures depend on how the weights are written?",
    "leaderboards": "Which measures go along with generalization?",
    "atlases": "When does a measure go along with generalization?",
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
UNKNOWN = NetworkSummary("", 0, math.nan, math.nan, math.nan, math.nan, rescalable=True)
MARKS = {"yes": "✓ yes", "nearly": "≈ nearly", "no": "! no", "open": "? open", "unknown": "? not known"}
ONE_TRAINING = "± is a standard error of the measures: another training could give another order."
PAGE_ENDINGS = (".html", ".htm")
MOST_HEADLINES = 5
MOST_SIDE_BY_SIDE = 4  # networks that fit beside each other; a table of more scrolls


def report(
    items: object,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    command: str | None = None,
    refresh: float | None = None,
) -> Path:
    """Write one HTML page that opens anywhere without a network, whole or not at all.

    Args:
        items: a Table, an Audit, a Comparison, a Surface, a SpectralDensity, Eigenpairs, a Simplex, an Atlas, a
            population (a PopulationFrame, or a pandas frame with a column `generalization_gap`), a frame of training
            history, the result of a study, a Matplotlib figure; or a list or dictionary of them, nested at will. Names
            come from dictionaries and (name, thing) pairs; things with the same name belong to the same network:
            `{"small batch": [table, history], "large batch": [...]}`.
        path: where to write the page; folders are made.
        title: heading of the page.
        command: the command line that produced it, shown with the provenance.
        refresh: seconds after which a browser reads the page anew, for one that is written again and again.

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
        raise InputError("the path of a file", f"the folder {path}", "report", "Add a name such as report.html")
    if Path(path).suffix.lower() not in PAGE_ENDINGS:
        fix = "For pictures of the same items in PDF: save_figures, or --figures FOLDER --format pdf"
        raise InputError(
            f"a name ending in {' or '.join(PAGE_ENDINGS)}: the report is a web page", str(path), "report", fix
        )
    page = page_text(items, title=title, command=command, refresh=refresh)
    with whole_file(path) as temporary:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))
    return Path(path)


def save_figures(items: object, folder: str | os.PathLike[str], formats: str | Iterable[str] = ("png",)) -> list[Path]:
    """Write every figure that the items allow, for papers and slides.

    Args:
        items: as for `report`: tables, landscapes, populations, histories, Matplotlib figures; named or not.
        folder: made if it is not there.
        formats: of "png", "svg" and "pdf".

    Returns:
        The files, in the order of the report.
    """
    kinds = kinds_with_comparison(by_kind(items))
    colours = _colours_by_network(kinds)
    plots = (plot for name, kind in shown_kinds().items() for plot in kind.plots(kinds[name], colours))
    return save_plots(plots, folder, formats)


def page_text(
    items: object, *, title: str | None = None, command: str | None = None, refresh: float | None = None
) -> str:
    """The page that `report` writes."""
    kinds = kinds_with_comparison(by_kind(items))
    colours = _colours_by_network(kinds)
    parts = {name: kind.render(kinds[name], colours) for name, kind in shown_kinds().items() if kinds[name]}
    script = "".join([*map(text_of_package_file, SCRIPTS), *(part.script for part in parts.values())])
    style = "".join([text_of_package_file("page.css"), *(part.style for part in parts.values())])
    drawn = [name for name in PICTURES_FROM if name in parts and parts[name].picture]
    shown = drawn[: 3 if drawn[:1] == ["surfaces"] else 2]  # as high as the facts beside them; maps are low
    sections = [s for name, part in parts.items() for s in _without_repeats(part, at_the_top=name in shown)]
    measured = answer_block(kinds)
    others = [part.answer for name, part in parts.items() if not (measured and name in DETAILS)]
    return page_with_frame(
        title or _default_title(len(colours), {kind for kind, things in kinds.items() if things}),
        [measured, *others],
        [parts[name].picture for name in shown],
        [section._replace(open=True) for section in sections] if len(sections) == 1 else sections,
        provenance=_provenance_table([part.provenance for part in parts.values()]),
        networks=colours,
        style=style,
        script=script,
        command=command,
        refresh=refresh,
    )


def _without_repeats(part: PagePart, *, at_the_top: bool) -> Iterator[Section]:
    """The sections of a part, without the picture that stands at the top, and without what held nothing else."""
    for section in part.sections:
        body = section.body
        for repeated in filter(None, part.below if at_the_top else ()):
            body = body.replace(repeated, "")
        if body:
            yield section._replace(body=Markup(body))


def _colours_by_network(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """A colour for every network that something on the page is about."""
    networks = dict.fromkeys(name for kind in COLOURED for name in kinds.get(kind, ()))
    return {name: n % len(COLOURS) for n, name in enumerate(networks)}


def _default_title(n_networks: int, kinds: Set[str]) -> str:
    """The title where none is given: what a reader of this page wants to know."""
    if len(kinds) == 1 and (only := next(iter(kinds))) in QUESTIONS:
        return QUESTIONS[only]
    if "populations" in kinds and not n_networks:
        return "What goes along with generalization?"
    return "How flat are these minima?" if n_networks > 1 else "How flat is this minimum?"


def _provenance_table(metas: list[Mapping[str, Mapping[str, Any]]]) -> Markup:
    """A row per thing that any of the results says about itself."""
    columns = {name: meta for part in metas for name, meta in part.items() if meta}
    keys = dict.fromkeys(key for meta in columns.values() for key in meta if key not in ("name", STANDING))
    rows = [
        [META_WORDS.get(key, key), *(_provenance_value_in_words(meta.get(key, "")) for meta in columns.values())]
        for key in keys
    ]
    return table("Where the numbers come from", ["", *columns], rows, class_="plain") if rows else Markup("")


def _provenance_value_in_words(value: Any) -> str:
    """A value of the provenance in words: {"forward": 2.0} becomes "forward 2"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_provenance_value_in_words(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_provenance_value_in_words, value))
    return written(value) if isinstance(value, float) else str(value)


def kinds_with_comparison(kinds: dict[str, dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """The tables of given comparisons among the measures; several tables without a comparison get one."""
    tables: dict[str, Table] = dict(kinds["measures"])
    for comparison in kinds["comparisons"].values():
        tables = comparison.tables | tables
    comparisons = dict(kinds["comparisons"])
    if not comparisons and len(tables) > 1:
        summaries = {name: network_summary_of_table(table) for name, table in tables.items()}
        loss = next((table.meta["loss"] for table in tables.values() if "loss" in table.meta), "")
        comparisons["comparison"] = Comparison(tables, summaries, meta={"loss": loss})
    return {**kinds, "measures": tables, "comparisons": comparisons}


def network_summary_of_table(table: Table) -> NetworkSummary:
    """Summary of the network of a table, as far as its metadata tell."""
    return NetworkSummary.from_dict(table.meta[STANDING]) if STANDING in table.meta else UNKNOWN


def answer_block(kinds: Mapping[str, Mapping[str, Any]]) -> Markup:
    """The sentence that answers, the networks side by side, and what to keep in mind; empty without measures."""
    tables, comparisons = kinds["measures"], kinds["comparisons"]
    names = list(dict.fromkeys([*tables, *kinds["histories"]]))
    if not names:
        return Markup("")
    results = list(comparisons.values()) or ([*tables.values()] if len(tables) == 1 else [])
    lines_of = [result.headline.splitlines() for result in results]
    sentences = [
        element("p", line, class_="held-out" if place else "conclusion")
        for lines in lines_of
        for place, line in enumerate(lines)
    ]
    said = {line for lines in lines_of for line in lines}
    if comparisons and any(comparison.conclusion.voices for comparison in comparisons.values()):
        sentences.append(element("p", ONE_TRAINING, class_="quiet"))
    warnings = [
        str(remark) for comparison in comparisons.values() for remark in comparison.warnings() if remark not in said
    ]
    for measured in tables.values():
        remarks = [str(words).rstrip(".") for words in measured.meta.get("remarks", ())]
        warnings += [
            f"{words[0].upper()}{words[1:]}." for words in remarks if not headline_has_remark(words, "\n".join(said))
        ]
    rows = [
        *_loss_and_error_rows(names, kinds),
        *_row_on_minimum(names, tables),
        *_headline_rows(names, tables, comparisons),
    ]
    few = "facts" if len(names) <= MOST_SIDE_BY_SIDE else "plain"
    facts = table("The networks side by side", ["", *names], rows, class_=few) if rows else Markup("")
    return Markup("").join((*sentences, facts, bullet_list(dict.fromkeys(warnings))))


def _loss_and_error_rows(names: list[str], kinds: Mapping[str, Mapping[str, Any]]) -> list[list[object]]:
    """Loss, test error and the gap between test and training samples, where they are known."""
    known = [_summary_of_network(name, kinds) for name in names]
    n_test = next((int(comparison.meta.get("n_test") or 0) for comparison in kinds["comparisons"].values()), 0)
    classes = not all(math.isnan(summary.error) for summary in known)
    what = "error" if classes else "loss"
    gaps = [getattr(summary, f"test_{what}") - getattr(summary, what) for summary in known]
    shown = [
        ("Training loss", [summary.loss for summary in known], False, 0),
        ("Test loss", [summary.test_loss for summary in known], False, 0),
        ("Test error", [summary.test_error for summary in known], True, n_test),
        (f"Gap of the {what}", gaps, classes, 0),
    ]
    return [
        [words, *(_formatted_value(value, share, spread) for value in values)]
        for words, values, share, spread in shown
        if not all(map(math.isnan, values))
    ]


def _formatted_value(value: float, share: bool, n: int) -> str:
    if math.isnan(value):
        return "n/a"
    if not share:
        return written(value, 3)
    error = f" ± {100 * math.sqrt(value * (1 - value) / n):.1f}" if n and 0 < value < 1 else ""
    return f"{100 * value:.2f}{error}\u202f%".replace("-", "−")


def _summary_of_network(name: str, kinds: Mapping[str, Mapping[str, Any]]) -> NetworkSummary:
    """From a comparison, else from the table's metadata, else the last line of a training history."""
    for comparison in kinds["comparisons"].values():
        known: NetworkSummary = comparison.networks.get(name, UNKNOWN)
        if not math.isnan(known.loss):
            return known
    of_table = network_summary_of_table(kinds["measures"][name]) if name in kinds["measures"] else UNKNOWN
    history = kinds["histories"].get(name)
    if history is None or not math.isnan(of_table.loss):
        return of_table
    columns = {"loss": "train_loss", "error": "train_error", "test_loss": "test_loss", "test_error": "test_error"}
    last: dict[str, Any] = {field: float(history.iloc[-1].get(name, math.nan)) for field, name in columns.items()}
    return replace(UNKNOWN, **last)


def _row_on_minimum(names: list[str], tables: Mapping[str, Table]) -> list[list[object]]:
    """Row of the table that says of each network whether it is at a minimum: flatness is about minima."""
    if not tables:
        return []
    row: list[object] = ["At a minimum?"]
    for name in names:
        if name not in tables:
            row.append(element("span", "n/a"))
            continue
        level, words = minimum_verdict(tables[name].to_frame(), tables[name].meta, briefly=True)
        row.append(Cell(element("span", MARKS[level], element("small", words)), class_=f"minimum {level}"))
    return [row]


def _headline_rows(
    names: list[str], tables: Mapping[str, Table], comparisons: Mapping[str, Comparison]
) -> list[list[object]]:
    """The measures that the conclusion rests on; of one network, the invariant ones to look at first."""
    voices = [voice.measure for comparison in comparisons.values() for voice in comparison.conclusion.voices]
    words = captions_by_measure()
    rows: list[list[object]] = []
    for line in measure_lines(tables) if tables else []:
        first = line.invariance == "all" and line.name in words if not comparisons else line.label in voices
        if not first or len(rows) >= MOST_HEADLINES:
            continue
        cells = dict(zip(tables, line.cells, strict=True))
        name, gist = element("span", breakable(line.label), class_="name"), element("small", words.get(line.name, ""))
        label = element("span", name, gist)
        rows.append([label, *(_cell_value_in_words(cells.get(name)) for name in names)])
    return rows


def _cell_value_in_words(cell: MeasuredCell | None) -> str:
    """A value with what is known of its error: of the draws of an estimate, of the samples being a draw."""
    if cell is None:
        return "n/a"
    text, error = with_error(cell.value, cell.relative * abs(cell.value))
    return f"{text} ±\N{NO-BREAK SPACE}{error}" if error else cell.text
