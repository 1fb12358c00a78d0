"""Frames, arrays and pictures as the content of files, and back; nothing that is read is run."""

from __future__ import annotations

import io
import json
import math
import zipfile
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flatscope.errors import InputError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
PICTURES = ("png", "svg", "pdf")


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
