"""What a report can show: one entry per kind of thing, and how a mixed bag is sorted into kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pandas as pd

from flatscope.comparing import Comparison
from flatscope.errors import InputError
from flatscope.interpolation import Simplex
from flatscope.landscapes import Surface
from flatscope.reports.population import PopulationFrame, is_population
from flatscope.reports.surface_data import SPACE_WORDS
from flatscope.symmetries.audit import Audit
from flatscope.table import BOUND_COLUMNS, Table


class Kind(NamedTuple):
    """How one kind of thing is recognised, called in messages, and named when the caller gives no name."""

    words: str
    accepts: Callable[[object], bool]
    default_name: Callable[[Any], str]
    aspect: Callable[[Any], str] = lambda item: ""  # tells apart things of one kind that belong to one network


def _is_bounds(item: object) -> bool:
    return isinstance(item, Table) and set(BOUND_COLUMNS) <= set(item.to_frame().columns)


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
    return str(item.meta.get("name", "network")) if isinstance(item, (Table, Surface)) else "network"


def _space(surface: Surface) -> str:
    return SPACE_WORDS.get(surface.space, surface.space)


def _is_study(item: object) -> bool:
    """By its parts: the class stands on Matplotlib, for which a page of tables should not wait."""
    return all(hasattr(item, part) for part in ("findings", "rows", "svg", "scale", "provenance"))


def _scale(study: Any) -> str:
    return f"{study.scale} scale"


# The order is the order of the page. A new kind is one line here and one renderer in page.py.
KINDS: dict[str, Kind] = {
    "bounds": Kind("a Table of bounds", _is_bounds, _network_name),
    "measures": Kind("a Table of measures", lambda item: isinstance(item, Table), _network_name),
    "comparisons": Kind(
        "a Comparison of networks", lambda item: isinstance(item, Comparison), lambda item: "comparison"
    ),
    "audits": Kind("an Audit", lambda item: isinstance(item, Audit), _network_name),
    "surfaces": Kind("a Surface of a landscape", lambda item: isinstance(item, Surface), _network_name, _space),
    "simplexes": Kind(
        "a Simplex of interpolated networks", lambda item: isinstance(item, Simplex), lambda item: "interpolation"
    ),
    "populations": Kind(
        "a PopulationFrame, or a pandas frame with a column `generalization_gap` and columns named after measures",
        _is_population,
        lambda item: "population",
    ),
    "histories": Kind("a pandas frame of training history with a column `epoch`", is_history, _network_name),
    "studies": Kind("the result of a study", _is_study, lambda item: str(item.name), _scale),
    "figures": Kind("a Matplotlib Figure", _is_figure, _figure_title),
}


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
            yield from _flat(item, str(key))
    elif isinstance(items, tuple) and len(items) == 2 and isinstance(items[0], str):
        yield from _flat(items[1], items[0])
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
    names = [kind.default_name(item) if name is None else name for name, item in pairs]
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
