"""`report`: one self-contained page from any mix of things that flatscope produces."""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Mapping, Set
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from flatscope.errors import InputError
from flatscope.formatting import written
from flatscope.guards import whole_file
from flatscope.reports.items import KINDS, by_kind
from flatscope.reports.markup import fragment, source
from flatscope.version import __version__

if TYPE_CHECKING:
    pass

N_COLOURS = 7
SCRIPTS = ("numbers.js", "page.js", "tables.js", "surface.js", "population.js")
STYLES = ("page.css", "figures.css")
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
        items: a Table, an Audit, a Comparison, a Surface, a SpectralDensity, Eigenpairs, a Simplex, a population (a
            PopulationFrame, or a pandas frame with a column `generalization_gap`), a frame of training history, the
            result of a study, a Matplotlib figure; or a list or dictionary of them, nested at will. Names come from
            dictionaries and (name, thing) pairs; things with the same name belong to the same network:
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
    parts = [kind.render(kinds[name], colours) for name, kind in KINDS.items() if kinds[name]]
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
