"""What a kind of thing is to a report: how it is recognised, read, called, shown and drawn."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from flatscope.errors import InputError, refuse_unknown
from flatscope.reports.markup import Colours, PagePart
from flatscope.reports.plots import Plot
from flatscope.result import Result

ACCEPTED = (
    "Accepted are tables, audits, atlases, leaderboards and recorded stability (.parquet, .json), comparisons "
    "(.json), surfaces, interpolations, spectra, sensitivities and forecasts (.npz, .parquet, .json), populations and "
    "training histories "
    "(.parquet, .csv), and folders of a training run with history.csv or of a study with verdicts.json"
)

# In the order of the page; a test asks that every kind is named.
ORDER = (
    "leaderboards",
    "comparisons",
    "populations",
    "atlases",
    "surfaces",
    "stability",
    "measures",
    "audits",
    "explanations",
    "spectra",
    "sensitivities",
    "forecasts",
    "simplexes",
    "histories",
    "bounds",
    "studies",
    "figures",
)


class Kind(NamedTuple):
    """Kind of thing on a page: how it is recognised, called in messages, shown, drawn, and named by default."""

    words: str
    of: type[Result] | tuple[type[Result], ...] | Callable[[object], bool]  # its classes, or what recognises it
    name: str | Callable[[Any], str]
    render: Callable[[Mapping[str, Any], Colours], PagePart]
    aspect: Callable[[Any], str] = lambda item: ""  # tells apart things of one kind that belong to one network
    plots: Callable[[Mapping[str, Any], Colours], Iterable[Plot]] = lambda items, colours: ()  # its figures as files

    # What its files hold, where the classes above do not say it; how a frame or a folder with a certain file is read.
    saved_as: tuple[type[Result], ...] = ()
    read_frame: Callable[[Path, pd.DataFrame, str, Sequence[str]], Any] | None = None
    folder_file: str = ""
    read_folder: Callable[[Path], Any] | None = None
    shown_as: Callable[[Any], Any] = lambda item: item  # the item as `render` and `plots` want it

    @property
    def classes(self) -> tuple[type[Result], ...]:
        """Classes of results that files of this kind hold."""
        declared = self.of if isinstance(self.of, tuple) else (self.of,) if isinstance(self.of, type) else ()
        return (*declared, *self.saved_as)

    def accepts(self, item: object) -> bool:
        """True if the item is of this kind."""
        return isinstance(item, self.of) if isinstance(self.of, type | tuple) else self.of(item)

    def name_of(self, item: Any) -> str:
        """Name of an item."""
        return self.name if isinstance(self.name, str) else self.name(item)

    def register(self, plural: str, *, before: str = "") -> None:
        """Let every report of this process show things of this kind, in a section of their own.

        Args:
            plural: name of the kind, and its anchor on the page; no other kind has it.
            before: kind that its section stands before; by default it comes last.
        """
        if not plural.isidentifier():
            raise InputError("a name of letters, digits and underscores", repr(plural), where="Kind.register")
        if plural in (*ORDER, *ADDED_KINDS):
            raise InputError("a name that no other kind has", repr(plural), where="Kind.register")
        refuse_unknown(before or plural, (*ORDER, *ADDED_KINDS, plural), "kind that a section stands before")
        ADDED_KINDS[plural] = (self, before)


def columns_in_words(frame: pd.DataFrame) -> str:
    """The first columns of a frame, for an error."""
    shown = ", ".join(map(str, frame.columns[:6]))
    return f"columns {shown}{', …' if len(frame.columns) > 6 else ''}"


ADDED_KINDS: dict[str, tuple[Kind, str]] = {}  # by `Kind.register`, each with the kind that it stands before
