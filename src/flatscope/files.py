"""How results are kept in files: the ending chooses the form, provenance travels along, nothing that is read is run."""

from __future__ import annotations

import io
import json
import math
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flatscope.errors import FlatscopeError, InputError
from flatscope.guards import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

T = TypeVar("T")
Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
PICTURES = ("png", "svg", "pdf")


def save_as(path: str | os.PathLike[str], writers: Mapping[str, Callable[[], bytes]]) -> None:
    """Write a file, whole or not at all, by the writer of its ending."""
    suffix = Path(path).suffix.lower()
    if suffix not in writers:
        raise InputError(f"a file name ending in {', '.join(writers)}", str(path), where="save")
    write_whole(path, writers[suffix]())


def load_as(path: str | os.PathLike[str], readers: Mapping[str, Callable[[bytes], T]], what: str) -> T:
    """Read a file by the reader of its ending.

    Args:
        path: of the file.
        readers: function of the file's content, by ending.
        what: what the file should hold, in a word.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in readers:
        raise InputError(f"a {' or '.join(readers)} {what}", str(path), where="load")
    try:
        return readers[suffix](Path(path).read_bytes())
    except OSError as problem:
        raise InputError("a file that can be read", str(problem), where="load") from problem
    except FlatscopeError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError, pa.ArrowException) as problem:
        raise InputError(f"the {what} that flatscope saved", str(problem), where=str(path)) from problem


def parquet_bytes(frame: pd.DataFrame, key: bytes, head: Any) -> bytes:
    """A frame as a Parquet file, with `head` as JSON in its metadata."""
    arrow = pa.Table.from_pandas(frame, preserve_index=False)
    metadata = {**(arrow.schema.metadata or {}), key: json.dumps(head, default=str).encode()}
    buffer = io.BytesIO()
    pq.write_table(arrow.replace_schema_metadata(metadata), buffer)
    return buffer.getvalue()


def from_parquet_bytes(content: bytes, key: bytes, what: str) -> tuple[pd.DataFrame, Any]:
    """Frame and head that `parquet_bytes` wrote."""
    try:
        arrow = pq.read_table(io.BytesIO(content))
        return arrow.to_pandas(), json.loads(arrow.schema.metadata[key])
    except (pa.ArrowException, KeyError, TypeError, ValueError) as problem:
        raise InputError(f"a flatscope {what} as Parquet", str(problem), where=f"{what} file") from problem


def npz_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Arrays, by name, as a compressed .npz file."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)
    return buffer.getvalue()


def from_npz_bytes(content: bytes) -> Arrays:
    """The arrays of an .npz file; ValueError where it is damaged."""
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except (zipfile.BadZipFile, zlib.error, EOFError) as problem:
        raise ValueError(f"damaged: {problem}") from problem


def figure_bytes(figure: Figure, kind: str, *, dpi: int = 200) -> bytes:
    """A picture as png, svg or pdf; without the date, so that the same figure is the same file."""
    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata, bbox_inches="tight")
    return buffer.getvalue()


def svg_of(figure: Figure) -> str:
    """The picture as an element to put into a page."""
    svg = figure_bytes(figure, "svg").decode()
    return svg[svg.index("<svg") :]


def without_nan(value: Any) -> Any:
    """Non-finite numbers as text, since JSON has none; float() reads them back."""
    if isinstance(value, Mapping):
        return {key: without_nan(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
