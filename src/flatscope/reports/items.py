"""What a report can show, given or read from files: one entry per kind of thing, told apart by what it is."""

from __future__ import annotations

import functools
import importlib
import io
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd

from flatscope.audit_result import Audit
from flatscope.comparing.comparison import Comparison
from flatscope.decisions.forecast import Forecast
from flatscope.decisions.sensitivity import Sensitivity
from flatscope.disk import read_with_sum
from flatscope.errors import FlatscopeError, InputError
from flatscope.explaining import Explanation
from flatscope.files import foreign_parquet, from_json_bytes, from_npz_bytes, parquet_metadata
from flatscope.formatting import printable_text
from flatscope.landscapes.surface import Surface
from flatscope.reports import sections
from flatscope.reports.decisions_page import DECISION_KINDS
from flatscope.reports.figures import comparison_plot, history_plots, measured_plots
from flatscope.reports.kinds import ACCEPTED, ADDED_KINDS, ORDER, Kind, columns_in_words
from flatscope.reports.markup import Colours
from flatscope.reports.plots import Plot
from flatscope.reports.surfaces import label_of_surface, surface_plots, surfaces_part
from flatscope.reports.training_kinds import TRAINING_KINDS
from flatscope.result import Result
from flatscope.simplex import Simplex
from flatscope.spectra.density import SpectralDensity
from flatscope.spectra.eigenpairs import Eigenpairs
from flatscope.table import BOUND_COLUMNS, Table

T = TypeVar("T")


def _is_bounds(item: object) -> bool:
    return isinstance(item, Table) and set(BOUND_COLUMNS) <= set(item.to_frame().columns)


def _is_measures(item: object) -> bool:
    return isinstance(item, Table) and not _is_bounds(item)


def is_training_history(item: object) -> bool:
    """One row per epoch; the frame of a Table is not one, whatever its index is called."""
    if not isinstance(item, pd.DataFrame) or "measure" in item.columns:
        return False
    return "epoch" in item.columns or item.index.name == "epoch"


def _is_figure(item: object) -> bool:
    from matplotlib.figure import Figure  # only here: a page of tables should not wait for Matplotlib

    return isinstance(item, Figure)


def _figure_title(figure: Any) -> str:
    titles = [figure.get_suptitle(), *(axes.get_title() for axes in figure.axes)]
    return next((title for title in titles if title), "figure")


def _network_name(item: Result) -> str:
    return str(item.meta.get("name", "network"))


def _table_plots(tables: Mapping[str, Table], colours: Colours) -> Iterator[Plot]:
    yield from comparison_plot(tables, colours)
    yield from measured_plots(tables, colours)


# A new kind of thing is one entry here and one place in `ORDER`, beside the function that renders it.
OWN_KINDS: dict[str, Kind] = {
    "comparisons": Kind("a Comparison of networks", Comparison, "comparison", sections.comparisons_part),
    "surfaces": Kind(
        "a Surface of a landscape", Surface, _network_name, surfaces_part, label_of_surface, plots=surface_plots
    ),
    "measures": Kind(
        "a Table of measures",
        _is_measures,
        _network_name,
        sections.measures_part,
        plots=_table_plots,
        saved_as=(Table,),
    ),
    "audits": Kind("an Audit", Audit, "network", sections.audits_part),
    "explanations": Kind("an Explanation", Explanation, _network_name, sections.explanations_part),
    "spectra": Kind(
        "a SpectralDensity or Eigenpairs",
        (SpectralDensity, Eigenpairs),
        _network_name,
        sections.spectra_part,
        sections.label_of_spectrum,
        plots=sections.spectrum_plots,
    ),
    "simplexes": Kind(
        "a Simplex of interpolated networks",
        Simplex,
        "interpolation",
        sections.simplexes_part,
        plots=sections.simplex_plots,
    ),
    "histories": Kind(
        "a pandas frame of training history with a column `epoch`",
        is_training_history,
        "network",
        sections.histories_part,
        plots=history_plots,
    ),
    "bounds": Kind("a Table of bounds", _is_bounds, _network_name, sections.bounds_part),
    "figures": Kind(
        "a Matplotlib Figure", _is_figure, _figure_title, sections.figures_part, plots=sections.given_plots
    ),
}


# Kinds of the papers' results, loaded when a report is made.
OF_THE_PAPERS = "flatscope_papers.report_section"


def kinds_of_the_papers() -> dict[str, Kind]:
    """Kinds that the papers add; none where their package is not there."""
    try:
        kinds: dict[str, Kind] = importlib.import_module(OF_THE_PAPERS).KINDS
    except ModuleNotFoundError as missing:
        if missing.name != OF_THE_PAPERS.partition(".")[0]:
            raise
        return {}
    return kinds


def shown_kinds() -> dict[str, Kind]:
    """Kinds of things that a report shows, in the order of the page."""
    kinds = dict(_kinds_of_flatscope())
    for name, (kind, before) in ADDED_KINDS.items():
        place = list(kinds).index(before) if before in kinds else len(kinds)
        ordered = list(kinds.items())
        kinds = dict([*ordered[:place], (name, kind), *ordered[place:]])
    return kinds


@functools.cache
def _kinds_of_flatscope() -> dict[str, Kind]:
    kinds = OWN_KINDS | DECISION_KINDS | TRAINING_KINDS | kinds_of_the_papers()
    return {name: kinds[name] for name in dict.fromkeys((*ORDER, *kinds)) if name in kinds}


def by_kind(items: object) -> dict[str, dict[str, Any]]:
    """The items by kind and name: {"measures": {"small batch": table, ...}, ...}, every kind present.

    Args:
        items: a thing that can be shown, a (name, thing) pair, or a list or dictionary of these, nested at will.
    """
    named: dict[str, list[tuple[str | None, Any]]] = {kind: [] for kind in shown_kinds()}
    for name, item in _named_items(items, None):
        if (kind := _kind_of(item)) == "histories" and isinstance(item, pd.DataFrame):
            _refuse_words(item, name)
        named[kind].append((name, item))
    if not any(named.values()):
        raise InputError("at least one thing to show", "none", where="report", fix=_accepted_kinds_in_words())
    return {
        name: _uniquely_named(kind, [(given, kind.shown_as(item)) for given, item in named[name]])
        for name, kind in shown_kinds().items()
    }


def _named_items(items: object, name: str | None) -> Iterator[tuple[str | None, object]]:
    if isinstance(items, Mapping):
        for key, item in items.items():
            yield from _named_items(item, printable_text(str(key)))
    elif isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], str):
        yield from _named_items(items[1], printable_text(items[0]))
    elif isinstance(items, (list, tuple)):
        for item in items:
            yield from _named_items(item, name)
    else:
        yield name, items


def _recognised_kind(item: object) -> str | None:
    kinds = shown_kinds()
    return next((name for name in (*ADDED_KINDS, *kinds) if kinds[name].accepts(item)), None)


def _kind_of(item: object) -> str:
    if (name := _recognised_kind(item)) is not None:
        return name
    got = type(item).__name__
    if isinstance(item, pd.DataFrame):
        got = f"a frame with columns {', '.join(map(str, item.columns[:6])) or 'none'}"
    raise InputError("something a report can show", got, where="report", fix=_accepted_kinds_in_words())


def _refuse_words(history: pd.DataFrame, name: str | None) -> None:
    """Refuse a history in which something else than a number stands for a loss or an error."""
    for column in map(str, history.columns):
        if column.startswith(("epoch", "train_", "test_")) and not pd.api.types.is_numeric_dtype(history[column]):
            wrong = [value for value in history[column] if isinstance(value, str) or pd.isna(value)]
            raise InputError(
                f"numbers in the column {column}", ", ".join(map(repr, wrong[:3])), f"history of {name or 'a network'}"
            )


def _accepted_kinds_in_words() -> str:
    words = "; ".join(kind.words for kind in shown_kinds().values())
    return f"Accepted are {words}; and (name, thing) pairs, lists and dictionaries of these"


def _uniquely_named(kind: Kind, pairs: list[tuple[str | None, Any]]) -> dict[str, Any]:
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


HISTORY_FILE = "history.csv"
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
    name, path = split_name_and_path(given)
    if path.is_dir():
        return _items_of_folder(path, name or path.name)
    if not path.is_file():
        raise InputError("a file or folder", "nothing there", where=str(path), fix=ACCEPTED)
    readers = {".parquet": _read_parquet, ".json": _read_json, ".npz": _read_npz, ".csv": _read_csv}
    reader = readers.get(path.suffix.lower())
    if reader is None:
        raise _unknown_content_error(path, f"a {path.suffix or 'file without ending'}")
    item = reader(path)
    if isinstance(item, pd.DataFrame):
        item = _item_of_frame(path, item, target, measures)
    return [(name or network_name(path), item)]


def network_name(path: Path) -> str:
    """A file's name without its ending and without what it says about its content."""
    return ASPECT.sub("", path.stem) or path.stem


def split_name_and_path(given: str) -> tuple[str, Path]:
    """The parts of `name=path`; the name is empty where a path alone is given."""
    name, equals, path = given.partition("=")
    return (name, Path(path)) if equals and not Path(given).exists() else ("", Path(given))


def _items_of_folder(path: Path, name: str) -> list[tuple[str, Any]]:
    """Items of a folder: a result of its kind; or a run's history and what was measured into it."""
    for kind in shown_kinds().values():
        if kind.read_folder is not None and (path / kind.folder_file).is_file():
            return [(name, kind.read_folder(path))]
    if not (path / HISTORY_FILE).is_file():
        raise InputError(f"a folder with {HISTORY_FILE}", "a folder without", where=str(path), fix=ACCEPTED)
    history = _read_csv(path / HISTORY_FILE)
    if _recognised_kind(history) != "histories":
        raise _unknown_content_error(path / HISTORY_FILE, columns_in_words(history))
    items: list[tuple[str, Any]] = [(name, history)]
    for file in sorted(path.iterdir()):
        if file.suffix == ".npz" or (file.suffix == ".parquet" and _class_that_wrote(file)):
            items.append((name, _read_npz(file) if file.suffix == ".npz" else _read_parquet(file)))
    return items


def _read_file_content(path: Path, read: Callable[[bytes], T], words: str) -> T:
    """Content of a file by one of our readers of bytes."""
    try:
        return read(read_with_sum(path))
    except FlatscopeError:
        raise
    except (OSError, ValueError) as problem:  # what pandas cannot parse is a ValueError too
        raise InputError(f"{words} that can be read", str(problem), where=str(path), fix=ACCEPTED) from problem


def _class_that_wrote(path: Path) -> type[Result] | None:
    """Which class of results wrote a Parquet file; None for a frame of somebody else."""
    metadata = _read_file_content(path, parquet_metadata, "a Parquet file")
    return next((kind for kind in _classes_of_result_files() if kind.parquet_key() in metadata), None)


def _classes_of_result_files() -> list[type[Result]]:
    """Classes of results that files may hold."""
    return [each for kind in shown_kinds().values() for each in kind.classes]


def _read_parquet(path: Path) -> Any:
    kind = _class_that_wrote(path)
    return kind.load(path) if kind else _read_file_content(path, foreign_parquet, "a Parquet file")


def _read_json(path: Path) -> Any:
    content = _read_file_content(path, from_json_bytes, "a JSON file")
    for kind in _classes_of_result_files():
        if isinstance(content, dict) and f"flatscope_{kind.WORD}" in content:
            return kind.load(path)
    raise _unknown_content_error(path, "JSON of another kind")


def _read_npz(path: Path) -> Result:
    """Drawn result of a file (a surface, mixtures of networks, a spectrum), told by the arrays in it."""
    arrays = _read_file_content(path, from_npz_bytes, "an .npz file")
    known: dict[str, type[Result]] = {
        "weights": Simplex,
        "node": SpectralDensity,
        "converged": Eigenpairs,
        "sparsity": Sensitivity,
        "moved": Forecast,
    }
    return next((kind for array, kind in known.items() if array in arrays), Surface).load(path)


def _read_csv(path: Path) -> pd.DataFrame:
    return _read_file_content(path, lambda content: pd.read_csv(io.BytesIO(content)), "a CSV file")


def _item_of_frame(path: Path, frame: pd.DataFrame, target: str, measures: Sequence[str]) -> Any:
    if _recognised_kind(frame) == "histories":
        return frame
    for kind in shown_kinds().values():
        if kind.read_frame is not None:
            return kind.read_frame(path, frame, target, measures)
    raise InputError("a training history", columns_in_words(frame), where=str(path), fix=ACCEPTED)


def _unknown_content_error(path: Path, got: str) -> InputError:
    return InputError("something that a report can show", got, where=str(path), fix=ACCEPTED)
