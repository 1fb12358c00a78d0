"""Result: what every result has in common, a frame of numbers and metadata, how it looks and how it is kept in files.

A class of results says what its frame is (`to_frame`), what the numbers mean (`headline_lines`), what else is needed to
make it again (`_head`, `_from_rows`) and which endings it can be written with; reading, writing, comparing and showing
are the same for all of them.
"""

from __future__ import annotations

import html
import json
import os
import sys
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Self, TextIO

import numpy as np
import pandas as pd
import pyarrow as pa

from flatscope.charts import Chart, figure_of_chart, resized_figure
from flatscope.disk import read_file, write_whole
from flatscope.errors import FlatscopeError, InputError, refuse_unknown
from flatscope.files import (
    Arrays,
    csv_bytes,
    figure_bytes,
    from_json_bytes,
    from_npz_bytes,
    from_parquet_bytes,
    json_bytes,
    npz_bytes,
    parquet_bytes,
    svg_of,
    without_nan,
)
from flatscope.formatting import printable_text

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_NOTHING_RUNS = f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">'
MOST_LINES = 5  # of a headline
DRAWN = (".png", ".svg", ".pdf")  # endings of pictures, which every result can be saved as
_UNREADABLE = (
    ValueError, KeyError, TypeError, AttributeError, IndexError, OverflowError, RecursionError, pa.ArrowException,
)  # fmt: skip


class Result(ABC):
    """Numbers as a frame, with their metadata.

    Attributes:
        WORD: what such a result is called in messages and in files.
        ENDINGS: of the files that it can be written to.
        READABLE: of the files that give it back.
        COLUMNS: the frame's columns with their types, where they are always the same.
        meta: provenance: versions, device, time, command. Kept by every file that can be read again.
    """

    WORD: ClassVar[str]
    ENDINGS: ClassVar[tuple[str, ...]] = (".parquet", ".json", ".md", ".csv", ".html", *DRAWN)
    READABLE: ClassVar[tuple[str, ...]] = (".parquet", ".json")
    COLUMNS: ClassVar[Mapping[str, str]] = {}
    meta: Any

    @abstractmethod
    def to_frame(self) -> pd.DataFrame:
        """The numbers as a pandas frame."""

    @abstractmethod
    def cells(self) -> tuple[list[str], list[list[str]]]:
        """The numbers as text for people: the header, then the rows."""

    @abstractmethod
    def headline_lines(self) -> list[str]:
        """The lines of `headline`: one to five plain sentences, each with a full stop, without numbers nobody needs.

        In this order, as far as there is something to say: the answer, what it rests on, what it is worth, what to do
        next. A caution that could turn the answer round comes first.
        """

    @property
    def headline(self) -> str:
        """The answer in at most five lines of plain English: what was found, what it is worth, what to do next."""
        return "\n".join(self.headline_lines()[:MOST_LINES])

    def summary(self) -> str:
        """The headline, and what there is to say beyond it."""
        return self.headline

    def _head(self) -> Mapping[str, Any]:
        """Entries of a file beside the frame."""
        return dict(self.meta)

    @classmethod
    def _from_rows(cls, frame: pd.DataFrame, head: Any) -> Self:
        """The result of which `to_frame` and `_head` gave these."""
        return cls(frame, head)  # type: ignore[call-arg]

    def __eq__(self, other: object) -> bool:
        """Equal numbers (NaN equals NaN) and equal metadata."""
        if type(other) is not type(self):
            return False
        return plain(self._head()) == plain(other._head()) and self.to_frame().equals(other.to_frame())

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return printable_text(f"{self.headline}\n\n{self._grid()}")

    def _repr_html_(self) -> str:
        return f"{self._headline_html()}{self.to_html()}"

    def _headline_html(self) -> str:
        return "".join(f"<p>{html.escape(line)}</p>\n" for line in self.headline.splitlines())

    def _grid(self) -> str:
        """The numbers for people, as text."""
        header, rows = self.cells()
        return printable_text(pd.DataFrame(rows, columns=header).to_string(index=False, max_colwidth=48))

    def show(self, file: TextIO | None = None) -> None:
        """Write what people read to standard output, or to an open file."""
        (file or sys.stdout).write(f"{self!r}\n")

    def to_markdown(self) -> str:
        """The numbers for people, as a Markdown table."""
        header, rows = self.cells()
        body = [[_markdown_cell(cell) for cell in row] for row in rows]
        lines = [[_markdown_cell(name) for name in header], ["---"] * len(header), *body]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def to_html(self) -> str:
        """The numbers for people, as an HTML table."""
        header, rows = self.cells()
        with pd.option_context("display.max_colwidth", None):  # pandas would cut remarks after 50 letters
            return pd.DataFrame(rows, columns=header).to_html(index=False, border=0, classes="flatscope")

    def to_json(self) -> str:
        """Rows and metadata as JSON; numbers that JSON cannot hold are written as strings."""
        content = {f"flatscope_{self.WORD}": 1, "meta": plain(self._head()), "rows": _records(self.to_frame())}
        return json.dumps(content, indent=1, allow_nan=False)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """The result that `to_json` wrote."""
        with reading(f"a flatscope {cls.WORD} as JSON", f"{cls.WORD} file"):
            content = json.loads(text)
            floats = {name for name, kind in cls.COLUMNS.items() if kind == "float64"}
            rows = [{k: float(v) if k in floats else v for k, v in row.items()} for row in content["rows"]]
            frame = pd.DataFrame(rows, columns=list(rows[0]) if rows else [])
            return cls._from_rows(frame, content["meta"])

    @classmethod
    def parquet_key(cls) -> bytes:
        """By which the metadata of a Parquet file are found."""
        return f"flatscope_{cls.WORD}".encode()

    def to_parquet(self) -> bytes:
        """Rows and metadata as a Parquet file."""
        return parquet_bytes(self.to_frame(), self.parquet_key(), plain(self._head()))

    @classmethod
    def from_parquet(cls, content: bytes) -> Self:
        """The result that `to_parquet` wrote."""
        with reading(f"a flatscope {cls.WORD} as Parquet", f"{cls.WORD} file"):
            return cls._from_rows(*from_parquet_bytes(content, cls.parquet_key()))

    def chart(self) -> Chart:
        """Chart that `plot` draws, where a class has no picture of another kind; refused where it has none at all."""
        fix = f"Its numbers are in to_frame(); to draw them, give {type(self).__name__} a method `chart`"
        raise InputError("a result that has a picture", f"a {self.WORD}, which has none", where="plot", fix=fix)

    def plot(self, ax: Axes | None = None) -> Any:
        """Draw into Matplotlib axes that you have; without any, a figure of its own."""
        if ax is None:
            return self.figure()
        self.chart().draw(ax)
        return ax

    def figure(self, *, width: float | None = None, font_size: float | None = None) -> Figure:
        """A Matplotlib figure of its own.

        Args:
            width: inches, such as the width of a column of a paper; the height follows.
            font_size: points of labels, such as those of the paper.
        """
        return resized_figure(figure_of_chart(self.chart()), width, font_size)

    def save(self, path: str | os.PathLike[str], *, width: float | None = None, font_size: float | None = None) -> None:
        """Write a file, whole or not at all; its ending, one of `ENDINGS`, says in which form.

        Args:
            path: where to.
            width: of a picture, in inches: 3.3 is a column of many papers.
            font_size: of its labels, in points.
        """
        ending = Path(path).suffix.lower()
        if ending not in self.ENDINGS:
            raise InputError(f"a file name ending in {', '.join(self.ENDINGS)}", str(path), where="save")
        sized = width is not None or font_size is not None
        if sized and ending not in DRAWN:
            raise InputError(f"a picture ({', '.join(DRAWN)}) for width and font_size", str(path), where="save")
        if sized:
            figure = self.figure(width=width, font_size=font_size)
            content = figure_bytes(figure, ending[1:], tight=width is None)
        else:
            content = self._content(ending)
        write_whole(path, content, with_sum=ending == ".csv")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Self:
        """Read what was saved with one of the endings `READABLE`; nothing in the file is run."""
        ending = Path(path).suffix.lower()
        if ending not in cls.READABLE:
            readable = f"a {' or '.join(cls.READABLE)} {cls.WORD}" if cls.READABLE else f"no file: a {cls.WORD} is not"
            raise InputError(readable, str(path), where="load")
        with reading(f"the {cls.WORD} that flatscope saved", str(path)):
            try:
                content = read_file(path)
            except OSError as problem:
                raise InputError("a file that can be read", str(problem), where="load") from problem
            return cls._from_content(ending, content)

    def _content(self, ending: str) -> bytes:
        """Of a file with that ending."""
        if ending == ".parquet":
            return self.to_parquet()
        if ending in DRAWN:
            return figure_bytes(self.figure(), ending[1:])
        if ending == ".html":
            title = html.escape(self.WORD)
            head = f'<!doctype html><meta charset="utf-8">{_NOTHING_RUNS}<title>{title}</title>'
            return f"{head}\n{self._repr_html_()}\n".encode()
        if ending == ".json":
            return json_bytes(self.to_json())
        if ending == ".csv":
            return csv_bytes(self.to_frame())
        return (self.to_markdown().rstrip("\n") + "\n").encode()

    @classmethod
    def _from_content(cls, ending: str, content: bytes) -> Self:
        if ending == ".parquet":
            return cls.from_parquet(content)
        from_json_bytes(content)  # its checksum, before anything is made of it
        return cls.from_json(content.decode())


class DrawnResult(Result):
    """A result that is looked at as a picture: it shows itself as one, and keeps its arrays bit by bit in .npz."""

    ENDINGS = (".npz", ".parquet", ".json", ".csv", *DRAWN)
    READABLE = (".npz", ".parquet", ".json")
    NPZ_HEAD: ClassVar[str] = "head"
    QUANTITIES: ClassVar[tuple[str, ...]] = ()  # tensors that can be drawn, by name

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Every number of the frame as text."""
        frame = self.to_frame()
        return [str(name) for name in frame], frame.astype("str").to_numpy().tolist()

    def values_of(self, quantity: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        """One of the `QUANTITIES` as an array; refused where there are no class labels."""
        refuse_unknown(quantity, self.QUANTITIES, "quantity to draw")
        chosen = getattr(self, quantity)
        if chosen is None:
            raise InputError("class labels", f"a {self.WORD} without {quantity}", where="quantity to draw")
        return np.asarray(chosen.numpy(), dtype=np.float64)

    def _arrays(self) -> dict[str, Any]:
        """Arrays of an .npz file beside the head: the columns of the frame, unless a class keeps more."""
        return {str(name): column.to_numpy() for name, column in self.to_frame().items()}

    @classmethod
    def _from_arrays(cls, arrays: Arrays, head: Any) -> Self:
        """The result of which `_arrays` gave these."""
        return cls._from_rows(pd.DataFrame({name: arrays[name] for name in cls.COLUMNS}), head)

    def _repr_html_(self) -> str:
        return f"{self._headline_html()}{svg_of(self.figure())}"

    def _content(self, ending: str) -> bytes:
        if ending == ".npz":
            head = np.array(json.dumps(self._npz_head(), default=str))
            return npz_bytes({**self._arrays(), self.NPZ_HEAD: head})
        return super()._content(ending)

    @classmethod
    def _from_content(cls, ending: str, content: bytes) -> Self:
        if ending != ".npz":
            return super()._from_content(ending, content)
        arrays = from_npz_bytes(content)
        return cls._from_arrays(arrays, json.loads(str(arrays[cls.NPZ_HEAD])))

    def _npz_head(self) -> Mapping[str, Any]:
        return self._head()


def plain(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Metadata as JSON gives it back; what JSON cannot hold (paths, NaN) as text."""
    again: dict[str, Any] = json.loads(json.dumps(dict(meta), default=str), parse_constant=str)
    return again


def checked_columns(frame: pd.DataFrame, types: Mapping[str, str], where: str) -> pd.DataFrame:
    """These columns of a frame with these types; refused where one is missing."""
    missing = [name for name in types if name not in frame.columns]
    if missing and len(frame):
        raise InputError(f"columns {', '.join(types)}", f"none called {', '.join(missing)}", where=where)
    if list(frame.columns) != list(types):
        frame = frame.reindex(columns=list(types))
    frame = frame.reset_index(drop=True)
    # One by one: pandas takes milliseconds to convert columns that need no conversion, on every table.
    present = dict(zip(frame.columns, frame.dtypes, strict=True))
    wrong = [name for name, kind in types.items() if present[name] != _dtype(kind)]
    return frame.astype({name: _dtype(types[name]) for name in wrong}) if wrong else frame


@cache
def _dtype(kind: str) -> Any:
    return pd.api.types.pandas_dtype(kind)


def columns_of(rows: Iterable[Mapping[str, Any]], types: Mapping[str, str], where: str) -> pd.DataFrame:
    """As `checked_columns` of rows; each is made with its type, where pandas would look for one in the values first."""
    rows = list(rows)
    if not rows or not all(types.keys() <= row.keys() for row in rows):
        return checked_columns(pd.DataFrame(rows), types, where)
    columns = {}
    for name, kind in types.items():
        values, dtype = [row[name] for row in rows], _dtype(kind)
        columns[name] = np.array(values, dtype) if isinstance(dtype, np.dtype) else pd.array(values, dtype)
    return pd.DataFrame(columns, copy=False)


@contextmanager
def reading(expected: str, where: str) -> Iterator[None]:
    """Context that turns what is wrong with the content of a file into an error of ours."""
    try:
        yield
    except FlatscopeError:
        raise
    except _UNREADABLE as problem:
        raise InputError(expected, str(problem), where=where) from problem


def _records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    columns = [str(name) for name in frame.columns]
    return [
        {name: _jsonable(value) for name, value in zip(columns, row, strict=True)}
        for row in frame.itertuples(index=False, name=None)
    ]


def _jsonable(value: Any) -> Any:
    if value is pd.NA:
        return None
    return without_nan(value.item() if hasattr(value, "item") else value)


def _markdown_cell(text: str) -> str:
    """Layers have the names that users gave them, which may be read as markup."""
    return " ".join(text.replace("|", "\\|").replace("<", "&lt;").splitlines())
