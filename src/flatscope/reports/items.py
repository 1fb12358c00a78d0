"""What a report can show, given or read from files: one entry per kind of thing, told apart by what it is."""

from __future__ import annotations

import io
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import pandas as pd

from flatscope.auditing import Audit
from flatscope.benchmarking.leaderboard import Leaderboard
from flatscope.comparing.comparison import Comparison
from flatscope.errors import InputError
from flatscope.factories import from_papers
from flatscope.files import foreign_parquet, from_json_bytes, from_npz_bytes, parquet_metadata
from flatscope.formatting import printable
from flatscope.interpolation import Simplex
from flatscope.landscapes.surface import Surface
from flatscope.reports.atlas_curves import Atlas
from flatscope.reports.atlas_page import atlas_plots, atlases_part
from flatscope.reports.figures import comparison_plot, history_plots, measured_plots
from flatscope.reports.leaderboard_page import leaderboard_plots, leaderboards_part
from flatscope.reports.markup import Colours, Part
from flatscope.reports.plots import Plot
from flatscope.reports.population_frame import PopulationFrame, is_population, target_column
from flatscope.reports.population_page import population_plots, populations_part
from flatscope.reports.sections import (
    audits_part,
    bounds_part,
    comparisons_part,
    figures_part,
    given_plots,
    histories_part,
    measures_part,
    simplex_plots,
    simplexes_part,
    spectra_part,
    spectrum_kind,
    spectrum_plots,
    studies_part,
)
from flatscope.reports.stability_page import stability_part, stability_plots
from flatscope.reports.surfaces import surface_plots, surface_words, surfaces_part
from flatscope.results import Result
from flatscope.spectra.density import Eigenpairs, SpectralDensity
from flatscope.stability.sharpness_record import Stability
from flatscope.table import BOUND_COLUMNS, Table

T = TypeVar("T")


def _no_plots(items: Mapping[str, Any], colours: Colours) -> Iterable[Plot]:
    return ()


class Kind(NamedTuple):
    """How a kind of thing is recognised, called in messages, shown, drawn, and named where the caller gives no name."""

    words: str
    of: type[Result] | tuple[type[Result], ...] | Callable[[object], bool]  # its classes, or what recognises it
    name: str | Callable[[Any], str]
    render: Callable[[Mapping[str, Any], Colours], Part]
    aspect: Callable[[Any], str] = lambda item: ""  # tells apart things of one kind that belong to one network
    plots: Callable[[Mapping[str, Any], Colours], Iterable[Plot]] = _no_plots  # its figures as files

    @property
    def classes(self) -> tuple[type[Result], ...]:
        """Classes of results, all of which are of this kind."""
        return self.of if isinstance(self.of, tuple) else (self.of,) if isinstance(self.of, type) else ()

    def accepts(self, item: object) -> bool:
        """Whether the item is of this kind."""
        return isinstance(item, self.of) if isinstance(self.of, type | tuple) else self.of(item)

    def name_of(self, item: Any) -> str:
        """What to call an item."""
        return self.name if isinstance(self.name, str) else self.name(item)


def _is_bounds(item: object) -> bool:
    return isinstance(item, Table) and set(BOUND_COLUMNS) <= set(item.to_frame().columns)


def _is_measures(item: object) -> bool:
    return isinstance(item, Table) and not _is_bounds(item)


def is_history(item: object) -> bool:
    """One row per epoch; the frame of a Table is not one, whatever its index is called."""
    if not isinstance(item, pd.DataFrame) or "measure" in item.columns or is_population(item):
        return False
    return "epoch" in item.columns or item.index.name == "epoch"


def _is_population(item: object) -> bool:
    return isinstance(item, PopulationFrame) or (isinstance(item, pd.DataFrame) and is_population(item))


def _is_figure(item: object) -> bool:
    from matplotlib.figure import Figure  # only here: a page of tables should not wait for Matplotlib

    return isinstance(item, Figure)


def _figure_title(figure: Any) -> str:
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return next((title for title in titles if title), "figure")


def _network_name(item: Any) -> str:
    named = (Table, Surface, SpectralDensity, Eigenpairs)
    return str(item.meta.get("name", "network")) if isinstance(item, named) else "network"


def _is_study(item: object) -> bool:
    """By its parts: the class stands on Matplotlib, for which a page of tables should not wait."""
    return all(hasattr(item, part) for part in ("findings", "rows", "svg", "scale", "provenance"))


def _scale(study: Any) -> str:
    return f"{study.scale} scale"


def _table_plots(tables: Mapping[str, Table], colours: Colours) -> Iterator[Plot]:
    yield from comparison_plot(tables, colours)
    yield from measured_plots(tables, colours)


# In the order of the page. A new kind of thing is one entry here, beside the function that renders it.
KINDS: dict[str, Kind] = {
    "leaderboards": Kind(
        "a Leaderboard of measures", Leaderboard, "leaderboard", leaderboards_part, plots=leaderboard_plots
    ),
    "comparisons": Kind("a Comparison of networks", Comparison, "comparison", comparisons_part),
    "populations": Kind(
        "a PopulationFrame, or a pandas frame with a column `generalization_gap` and columns named after measures",
        _is_population,
        "population",
        populations_part,
        plots=population_plots,
    ),
    "atlases": Kind("an Atlas of correlations along training", Atlas, "atlas", atlases_part, plots=atlas_plots),
    "surfaces": Kind(
        "a Surface of a landscape", Surface, _network_name, surfaces_part, surface_words, plots=surface_plots
    ),
    "stability": Kind("a Stability of a training", Stability, "training", stability_part, plots=stability_plots),
    "measures": Kind("a Table of measures", _is_measures, _network_name, measures_part, plots=_table_plots),
    "audits": Kind("an Audit", Audit, _network_name, audits_part),
    "spectra": Kind(
        "a SpectralDensity or Eigenpairs",
        (SpectralDensity, Eigenpairs),
        _network_name,
        spectra_part,
        spectrum_kind,
        plots=spectrum_plots,
    ),
    "simplexes": Kind(
        "a Simplex of interpolated networks", Simplex, "interpolation", simplexes_part, plots=simplex_plots
    ),
    "histories": Kind(
        "a pandas frame of training history with a column `epoch`",
        is_history,
        "network",
        histories_part,
        plots=history_plots,
    ),
    "bounds": Kind("a Table of bounds", _is_bounds, _network_name, bounds_part),
    "studies": Kind("the result of a study", _is_study, lambda item: str(item.name), studies_part, _scale),
    "figures": Kind("a Matplotlib Figure", _is_figure, _figure_title, figures_part, plots=given_plots),
}
# What files may hold: these, and two classes that are recognised by what they contain.
RESULTS: tuple[type[Result], ...] = (
    *(each for kind in KINDS.values() for each in kind.classes),
    PopulationFrame,
    Table,
)


def by_kind(items: object) -> dict[str, dict[str, Any]]:
    """The items by kind and name: {"measures": {"small batch": table, ...}, ...}, every kind present.

    Args:
        items: a thing that can be shown, a (name, thing) pair, or a list or dictionary of these, nested at will.
    """
    named: dict[str, list[tuple[str | None, Any]]] = {kind: [] for kind in KINDS}
    for name, item in _flat(items, None):
        named[_kind_of(item)].append((name, item))
    if not any(named.values()):
        raise InputError("at least one thing to show", "none", where="report", fix=_accepted())
    populations = named["populations"]
    named["populations"] = [(n, PopulationFrame(i) if isinstance(i, pd.DataFrame) else i) for n, i in populations]
    return {kind: _unique(KINDS[kind], pairs) for kind, pairs in named.items()}


def _flat(items: object, name: str | None) -> Iterator[tuple[str | None, object]]:
    if isinstance(items, Mapping):
        for key, item in items.items():
            yield from _flat(item, printable(str(key)))
    elif isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], str):
        yield from _flat(items[1], printable(items[0]))
    elif isinstance(items, (list, tuple)):
        for item in items:
            yield from _flat(item, name)
    else:
        yield name, items


def _kind_of(item: object) -> str:
    for name, kind in KINDS.items():
        if kind.accepts(item):
            return name
    got = type(item).__name__
    if isinstance(item, pd.DataFrame):
        got = f"a frame with columns {', '.join(map(str, item.columns[:6])) or 'none'}"
    raise InputError("something a report can show", got, where="report", fix=_accepted())


def _accepted() -> str:
    kinds = "; ".join(kind.words for kind in KINDS.values())
    return f"Accepted are {kinds}; and (name, thing) pairs, lists and dictionaries of these"


def _unique(kind: Kind, pairs: list[tuple[str | None, Any]]) -> dict[str, Any]:
    """Names given or made up, told apart by a number where they are equal."""
    names = [kind.name_of(item) if name is None else name for name, item in pairs]
    aspects = [kind.aspect(item) for _, item in pairs]
    names = [f"{name}, {aspect}" if aspect else name for name, aspect in zip(names, aspects, strict=True)]
    taken = {name for name in names if names.count(name) == 1}
    result: dict[str, Any] = {}
    for name, (_, item) in zip(names, pairs, strict=True):
        unique, n = name, 1
        while name not in taken and (unique == name or unique in taken or unique in result):
            unique, n = f"{name} {n}", n + 1
        result[unique] = item
    return result


HISTORY_FILE, VERDICTS_FILE = "history.csv", "verdicts.json"
ACCEPTED = (
    "Accepted are tables, audits, atlases, leaderboards and recorded stability (.parquet, .json), comparisons "
    "(.json), surfaces, interpolations and spectra (.npz, .parquet, .json), populations and training histories "
    "(.parquet, .csv), and folders of a training run with history.csv or of a study with verdicts.json"
)
# What the names of files add to the name of the network: small-bounds.parquet belongs to small.parquet.
ASPECT = re.compile(
    r"[-_ ](bounds|measures|table|audit|atlas|landscape|surface|spectrum|stability|weights|psi|history)$"
)


def read_item(given: str, target: str = "", measures: Sequence[str] = ()) -> list[tuple[str, Any]]:
    """The things in one file or folder, each with the name of its network.

    Args:
        given: a path, or `name=path`.
        target: column of the generalization gap, for a population that does not call it so.
        measures: columns of its measures, for one that does not name them after declared measures.

    Raises:
        InputError: nothing there, or nothing that a report can show.
    """
    name, path = _named(given)
    if path.is_dir():
        return _folder(path, name or path.name)
    if not path.is_file():
        raise InputError("a file or folder", "nothing there", where=str(path), fix=ACCEPTED)
    readers = {".parquet": _parquet, ".json": _json, ".npz": _npz, ".csv": _csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _unknown(path, f"a {path.suffix or 'file without ending'}")
    item = reader(path)
    if isinstance(item, pd.DataFrame):
        item = _frame(path, item, target, measures)
    return [(name or network_name(path), item)]


def network_name(path: Path) -> str:
    """A file's name without its ending and without what it says about its content."""
    return ASPECT.sub("", path.stem) or path.stem


def _named(given: str) -> tuple[str, Path]:
    name, equals, path = given.partition("=")
    return (name, Path(path)) if equals and not Path(given).exists() else ("", Path(given))


def _folder(path: Path, name: str) -> list[tuple[str, Any]]:
    """The result of a study; or a training run: its history, and what was measured into the same folder."""
    if (path / VERDICTS_FILE).is_file():
        return [(name, from_papers("load_result")(path))]
    if not (path / HISTORY_FILE).is_file():
        raise InputError(f"a folder with {HISTORY_FILE}", "a folder without", where=str(path), fix=ACCEPTED)
    history = _csv(path / HISTORY_FILE)
    if not is_history(history):
        raise _unknown(path / HISTORY_FILE, _columns_words(history))
    found: list[tuple[str, Any]] = [(name, history)]
    for file in sorted(path.iterdir()):
        if file.suffix == ".npz" or (file.suffix == ".parquet" and _written_as(file)):
            found.append((name, _npz(file) if file.suffix == ".npz" else _parquet(file)))
    return found


def _content(path: Path, read: Callable[[bytes], T], words: str) -> T:
    """What is in a file, as one of our readers of bytes gives it."""
    try:
        return read(path.read_bytes())
    except (OSError, ValueError) as problem:  # what pandas cannot parse is a ValueError too
        raise InputError(f"{words} that can be read", str(problem), where=str(path), fix=ACCEPTED) from problem


def _written_as(path: Path) -> type[Result] | None:
    """Which class of results wrote a Parquet file; None for a frame of somebody else."""
    metadata = _content(path, parquet_metadata, "a Parquet file")
    return next((kind for kind in RESULTS if kind.parquet_key() in metadata), None)


def _parquet(path: Path) -> Any:
    kind = _written_as(path)
    return kind.load(path) if kind else _content(path, foreign_parquet, "a Parquet file")


def _json(path: Path) -> Any:
    content = _content(path, from_json_bytes, "a JSON file")
    for kind in RESULTS:
        if isinstance(content, dict) and f"flatscope_{kind.WORD}" in content:
            return kind.load(path)
    raise _unknown(path, "JSON of another kind")


def _npz(path: Path) -> Result:
    """What is drawn (a surface, mixtures of networks, a spectrum), told apart by the arrays that each keeps."""
    arrays = _content(path, from_npz_bytes, "an .npz file")
    known: dict[str, type[Result]] = {"weights": Simplex, "node": SpectralDensity, "converged": Eigenpairs}
    return next((kind for array, kind in known.items() if array in arrays), Surface).load(path)


def _csv(path: Path) -> pd.DataFrame:
    return _content(path, lambda content: pd.read_csv(io.BytesIO(content)), "a CSV file")


def _frame(path: Path, frame: pd.DataFrame, target: str, measures: Sequence[str]) -> Any:
    if is_history(frame):
        return frame
    if target or measures or is_population(frame):
        return PopulationFrame(frame, target, tuple(measures), meta={"file": str(path)})
    if target_column(map(str, frame.columns)):
        fix = "Add a column named after each measure; a sweep (flatscope sweep run, then export) has them"
        raise InputError("a population with measures", "a gap, but no column of a measure", where=str(path), fix=fix)
    fix = "Name the column of the generalization gap with --target, and the measures with --measure. " + ACCEPTED
    raise InputError("a training history or a population", _columns_words(frame), where=str(path), fix=fix)


def _columns_words(frame: pd.DataFrame) -> str:
    shown = ", ".join(map(str, frame.columns[:6]))
    return f"columns {shown}{', …' if len(frame.columns) > 6 else ''}"


def _unknown(path: Path, got: str) -> InputError:
    return InputError("something that a report can show", got, where=str(path), fix=ACCEPTED)
