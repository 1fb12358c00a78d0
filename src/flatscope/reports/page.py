"""`report`: one self-contained page from any mix of things that flatscope produces."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Iterable, Mapping, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from markupsafe import Markup

from flatscope.comparing.verdicts import STANDING
from flatscope.errors import InputError
from flatscope.formatting import written
from flatscope.guards import whole_file
from flatscope.reports.answer import answer, with_comparison
from flatscope.reports.figures import save_plots
from flatscope.reports.items import KINDS, by_kind
from flatscope.reports.markup import fragment, source, table
from flatscope.reports.plots import COLOURS
from flatscope.version import __version__

SCRIPTS = ("page.js", "tables.js", "surface.js")
STYLES = ("page.css",)
# Which pictures stand at the top, where there are several.
PICTURES_FROM = ("populations", "surfaces", "comparisons", "spectra", "simplexes", "histories", "measures")
DETAILS = ("spectra", "simplexes")  # said at the top only where nothing was measured
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
    items: object,
    path: str | os.PathLike[str],
    *,
    title: str | None = None,
    command: str | None = None,
    refresh: float | None = None,
) -> Path:
    """Write one HTML page that opens anywhere without a network, whole or not at all.

    Args:
        items: a Table, an Audit, a Comparison, a Surface, a SpectralDensity, Eigenpairs, a Simplex, a population (a
            PopulationFrame, or a pandas frame with a column `generalization_gap`), a frame of training history, the
            result of a study, a Matplotlib figure; or a list or dictionary of them, nested at will. Names come from
            dictionaries and (name, thing) pairs; things with the same name belong to the same network:
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
        raise InputError(
            "the path of a file", f"the folder {path}", where="report", fix="Add a name such as report.html"
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
    kinds = with_comparison(by_kind(items))
    colours = _colours(kinds)
    plots = (plot for name, kind in KINDS.items() for plot in kind.plots(kinds[name], colours))
    return save_plots(plots, folder, formats)


def page_text(
    items: object, *, title: str | None = None, command: str | None = None, refresh: float | None = None
) -> str:
    """The page that `report` writes."""
    kinds = with_comparison(by_kind(items))
    colours = _colours(kinds)
    parts = {name: kind.render(kinds[name], colours) for name, kind in KINDS.items() if kinds[name]}
    script = "".join([*map(source, SCRIPTS), *(part.script for part in parts.values())])
    style = "".join([*map(source, STYLES), *(part.style for part in parts.values())])
    sections = [section for part in parts.values() for section in part.sections]
    drawn = [name for name in PICTURES_FROM if name in parts and parts[name].picture]
    shown = drawn[: 2 if drawn[:1] == ["surfaces"] else 1]  # maps are low, and leave room below them
    measured = answer(kinds)
    others = [part.answer for name, part in parts.items() if not (measured and name in DETAILS)]
    page = fragment(
        "template.html",
        title=title or _question(len(colours), {kind for kind, found in kinds.items() if found}),
        networks=colours,
        answers=[measured, *others],
        pictures=[parts[name].picture for name in shown],
        sections=[section._replace(open=True) for section in sections] if len(sections) == 1 else sections,
        provenance=_provenance([part.provenance for part in parts.values()]),
        command=command,
        refresh=None if refresh is None else f"{refresh:g}",
        version=__version__,
        written=datetime.now(UTC),
        style=Markup(style),
        script=Markup(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )
    return str(page)


def _colours(kinds: Mapping[str, Mapping[str, Any]]) -> dict[str, int]:
    """A colour for every network that something on the page is about."""
    networks = dict.fromkeys(name for kind in ("measures", "bounds", "histories") for name in kinds[kind])
    return {name: n % len(COLOURS) for n, name in enumerate(networks)}


def _question(n_networks: int, kinds: Set[str]) -> str:
    """The title where none is given: what a reader of this page wants to know."""
    if kinds == {"studies"}:
        return "Do the claims hold?"
    if kinds == {"audits"}:
        return "Which measures depend on how the weights are written?"
    if "populations" in kinds and not n_networks:
        return "What goes along with generalization?"
    return "How flat are these minima?" if n_networks > 1 else "How flat is this minimum?"


def _hash(text: str) -> str:
    """What the page's security policy allows to run: this very text and nothing else."""
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()


def _provenance(metas: list[Mapping[str, Mapping[str, Any]]]) -> Markup:
    """A row per thing that any of the results says about itself."""
    columns = {name: meta for part in metas for name, meta in part.items() if meta}
    keys = dict.fromkeys(key for meta in columns.values() for key in meta if key not in ("name", STANDING))
    rows = [[META_WORDS.get(key, key), *(_plain(meta.get(key, "")) for meta in columns.values())] for key in keys]
    return table("Where the numbers come from", ["", *columns], rows, class_="plain") if rows else Markup("")


def _plain(value: Any) -> str:
    """A value of the provenance in words: {"forward": 2.0} becomes "forward 2"."""
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_plain(inner)}" for key, inner in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value))
    return written(value) if isinstance(value, float) else str(value)
