"""What files hold and how it comes back: JSON, frames, arrays, pictures. Nothing that is read is run.

What flatscope writes carries a checksum of its content, and is refused where that does not fit any more. Files of
others have none and are taken as they are. Sizes that a file declares are compared with what it holds before memory
is taken. Readers raise ValueError with the reason; the caller knows which file it was.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
import math
import os
import re
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from flatscope.disk import open_file
from flatscope.errors import InputError, first_line

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Arrays = dict[str, np.ndarray[Any, np.dtype[Any]]]
PICTURES = ("png", "svg", "pdf")
CHECKSUM, FRAME_KEY, SCHEMA_KEY = "flatscope_checksum", b"flatscope_frame", b"flatscope_types"
JSON_CHECKSUM, ANNOUNCED = "checksum", "has checksum"
CHANGED = "its bytes are not those that were written (the checksum differs)"
LEAST_LIMIT, LARGEST_RATIO = 1 << 30, 50  # unpacked content: a gibibyte, or 50 times the file where that is more
_SEAL = re.compile(rb'\n"checksum": "([0-9a-f]{32})"\n}\n\Z')


def digest(parts: Iterable[bytes | memoryview]) -> str:
    """Checksum of bytes: 32 hexadecimal digits."""
    checksum = hashlib.blake2b(digest_size=16)
    for part in parts:
        checksum.update(part)
    return checksum.hexdigest()


def file_digest(path: str | os.PathLike[str]) -> str:
    """Checksum of a file as it is: what `b2sum -l 128` prints."""
    with open_file(path) as file:
        return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).hexdigest()


def json_bytes(text: str) -> bytes:
    """The text of a JSON object, indented as people read it, with a checksum at its end; its beginning announces it."""
    inside = text.strip().removeprefix("{").removesuffix("}").strip("\n")
    body = f'{{\n "{ANNOUNCED}": true,{chr(10) if inside else ""}{inside}{"," if inside else ""}'.encode()
    return body + f'\n"{JSON_CHECKSUM}": "{digest([body])}"\n}}\n'.encode()


def from_json_bytes(
    content: bytes, object_hook: Callable[[dict[str, Any]], Any] | None = None, *, sealed_only: bool = False
) -> Any:
    """Content of a JSON file, without its checksum; `sealed_only` refuses a file that has none."""
    sealed = _SEAL.search(content)
    if (sealed_only and not sealed) or (sealed and sealed[1].decode() != digest([content[: sealed.start()]])):
        raise ValueError(CHANGED)
    try:
        decoded = json.loads(content, object_hook=object_hook)
        if b"\\ud" in content.lower():
            json.dumps(decoded, ensure_ascii=False, default=str).encode()  # refuses halves of characters
    except RecursionError:
        raise ValueError("JSON nested too deeply") from None
    if isinstance(decoded, dict):
        announced, checksum = decoded.pop(ANNOUNCED, False), decoded.pop(JSON_CHECKSUM, None)
        if not sealed and (announced or isinstance(checksum, str)):
            raise ValueError(CHANGED)
    return decoded


def csv_bytes(frame: pd.DataFrame, float_format: str | None = None) -> bytes:
    """A frame as a CSV file that every reader takes apart as it was put together.

    Before Python 3.13 a carriage return in a text is not quoted, and ends the row for whoever reads it.
    """
    text = frame.to_csv(index=False, float_format=float_format)
    if "\r" in text:
        text = frame.to_csv(index=False, float_format=float_format, quoting=csv.QUOTE_NONNUMERIC)
    return text.encode()


def parquet_bytes(frame: pd.DataFrame, key: bytes, head: Any) -> bytes:
    """A frame as a Parquet file, with `head` as JSON in its metadata."""
    arrow = pa.Table.from_pandas(frame, preserve_index=False)
    text = json.dumps(head, default=str).encode()
    sums = {CHECKSUM.encode(): _frame_digest(arrow, text).encode(), SCHEMA_KEY: _schema_digest(arrow.schema).encode()}
    metadata = {**(arrow.schema.metadata or {}), key: text, **sums}
    buffer = io.BytesIO()
    pq.write_table(arrow.replace_schema_metadata(metadata), buffer)
    return buffer.getvalue()


def from_parquet_bytes(content: bytes, key: bytes) -> tuple[pd.DataFrame, Any]:
    """Frame and head that `parquet_bytes` wrote."""
    arrow = _arrow_table(content)
    text, checksum = (arrow.schema.metadata or {}).get(key), (arrow.schema.metadata or {}).get(CHECKSUM.encode())
    if text is None:
        raise ValueError(f"no {key.decode()} in its metadata")
    if checksum is not None and checksum.decode(errors="replace") != _frame_digest(arrow, text):
        raise ValueError(CHANGED)
    _refuse_other_types(arrow)
    return _pandas_frame(arrow), json.loads(text)


def frame_bytes(frame: pd.DataFrame) -> bytes:
    """A frame with any columns as a Parquet file with a checksum, which `foreign_parquet` compares."""
    return parquet_bytes(frame, FRAME_KEY, {})


def foreign_parquet(content: bytes) -> pd.DataFrame:
    """The frame of anybody's Parquet file; one of ours is compared with its checksum."""
    arrow = _arrow_table(content)
    metadata = arrow.schema.metadata or {}
    if (checksum := metadata.get(CHECKSUM.encode())) is not None:
        heads = [text for key, text in metadata.items() if key.startswith(b"flatscope") and key != CHECKSUM.encode()]
        if checksum.decode(errors="replace") not in [_frame_digest(arrow, text) for text in heads]:
            raise ValueError(CHANGED)
    _refuse_other_types(arrow)
    return _pandas_frame(arrow)


def parquet_metadata(content: bytes) -> dict[bytes, bytes]:
    """Metadata of a Parquet file."""
    try:
        return dict(pq.read_schema(io.BytesIO(content)).metadata or {})
    except (pa.ArrowException, OSError, ValueError) as problem:
        raise ValueError(first_line(problem)) from problem


def npz_bytes(arrays: Mapping[str, Any]) -> bytes:
    """Arrays, by name, as a compressed .npz file."""
    plain = {name: np.asarray(array) for name, array in arrays.items()}
    buffer = io.BytesIO()
    named: dict[str, Any] = {**plain, CHECKSUM: np.array(_array_digest(plain))}
    np.savez_compressed(buffer, **named)
    return buffer.getvalue()


def from_npz_bytes(content: bytes, *, sealed_only: bool = False) -> Arrays:
    """The arrays of an .npz file, without their checksum; `sealed_only` refuses a file that has none."""
    return read_npz(io.BytesIO(content), len(content), sealed_only=sealed_only)


def read_npz(file: Any, size: int, *, sealed_only: bool = False) -> Arrays:
    """The same from an open file, or whatever can be read and sought."""
    refuse_bombs(file, size)
    try:
        with np.load(file, allow_pickle=False) as stored:
            arrays = {name: stored[name] for name in stored.files}
    except (zipfile.BadZipFile, zlib.error, EOFError, MemoryError, NotImplementedError, RuntimeError) as problem:
        raise ValueError(f"damaged: {first_line(problem)}") from problem
    if strange := [name for name, value in arrays.items() if not isinstance(value, np.ndarray)]:
        raise ValueError(f"{strange[0]} in it is no array")
    checksum = arrays.pop(CHECKSUM, None)
    if sealed_only if checksum is None else str(checksum) != _array_digest(arrays):
        raise ValueError(CHANGED)
    return arrays


def refuse_bombs(file: Any, size: int) -> None:
    """Refuse a zip of arrays that would unpack to far more than it holds; ValueError says what it declares."""
    limit = max(LEAST_LIMIT, LARGEST_RATIO * size)
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if (total := sum(entry.file_size for entry in entries)) > limit:
                raise ValueError(f"{total:,} bytes once unpacked, from a file of {size:,}")
            for entry in entries:
                if entry.filename.endswith(".npy"):
                    with archive.open(entry) as member:
                        _refuse_wrong_shape(member, entry.filename, entry.file_size)
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, OSError) as problem:
        raise ValueError(f"damaged: {first_line(problem)}") from problem
    finally:
        file.seek(0)


def figure_bytes(figure: Figure, kind: str, *, dpi: int = 200, tight: bool = True) -> bytes:
    """A picture as png, svg or pdf; without the date, so that the same figure is the same file.

    Args:
        figure: the picture.
        kind: of file.
        dpi: dots per inch.
        tight: without blank margins; else in the very size of the figure.
    """
    from matplotlib import rc_context

    buffer = io.BytesIO()
    metadata = {"svg": {"Date": None}, "pdf": {"CreationDate": None}}.get(kind)
    try:
        with rc_context({"pdf.fonttype": 42, "ps.fonttype": 42}):  # TrueType: publishers refuse Type 3
            figure.savefig(buffer, format=kind, dpi=dpi, metadata=metadata, bbox_inches="tight" if tight else None)
    except (TypeError, ValueError) as problem:  # a title that is no text, or no formula
        raise InputError("a figure that Matplotlib can draw", first_line(problem), where="figure") from problem
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


def _arrow_table(content: bytes) -> pa.Table:
    try:
        file = pq.ParquetFile(io.BytesIO(content), page_checksum_verification=True)
        held = file.metadata
        declared = sum(held.row_group(group).total_byte_size for group in range(held.num_row_groups))
        cells = held.num_rows * held.num_columns
        if max(declared, cells) > max(LEAST_LIMIT, LARGEST_RATIO * len(content)):
            raise ValueError(f"{held.num_rows:,} rows of {held.num_columns} columns in {len(content):,} bytes")
        return file.read()
    except (pa.ArrowException, OSError, MemoryError, OverflowError) as problem:
        raise ValueError(first_line(problem)) from problem


def _pandas_frame(arrow: pa.Table) -> pd.DataFrame:
    try:
        frame: pd.DataFrame = arrow.to_pandas()
    except Exception as problem:  # what a file says about its own columns may be wrong in any way
        raise ValueError(f"{type(problem).__name__}: {first_line(problem)}") from problem
    return frame


def _frame_digest(arrow: pa.Table, head: bytes) -> str:
    """Of the cells as Python writes them, which no version of pandas or Arrow changes."""
    parts = [head]
    for name in arrow.column_names:
        parts.append(f"\n{name}\n{json.dumps(arrow.column(name).to_pylist(), default=str)}".encode())
    return digest(parts)


def _refuse_other_types(arrow: pa.Table) -> None:
    """Refuse columns whose types are not those that were written; files of version 0.2 do not say which these were."""
    written = (arrow.schema.metadata or {}).get(SCHEMA_KEY)
    if written is not None and written.decode(errors="replace") != _schema_digest(arrow.schema):
        raise ValueError(CHANGED)


def _schema_digest(schema: pa.Schema) -> str:
    """Of the columns' types, and of what pandas wrote beside them."""
    return digest([str(schema.types).encode(), (schema.metadata or {}).get(b"pandas", b"")])


def _array_digest(arrays: Mapping[str, Any]) -> str:
    parts: list[bytes | memoryview] = []
    for name in sorted(arrays):
        array = np.ascontiguousarray(arrays[name])
        parts += [f"\n{name} {array.dtype.str} {np.shape(arrays[name])}\n".encode(), array.tobytes()]
    return digest(parts)


def _refuse_wrong_shape(member: Any, name: str, size: int) -> None:
    """An array says its shape first, and memory for it is taken before the rest is read."""
    version = np.lib.format.read_magic(member)
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if (declared := math.prod(shape) * dtype.itemsize) > size:
        raise ValueError(f"{name} declares {shape} of {dtype}, {declared:,} bytes, and holds {size:,}")
