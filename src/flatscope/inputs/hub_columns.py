"""Samples from tables of a hub: which column is the label, which are inputs; pictures, tokens, texts, numbers."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from flatscope.errors import DataFileError, InputError, first_line, refuse_unknown
from flatscope.inputs.data_set import Array, DataSource, Pair, Raw, checked_raw_samples
from flatscope.inputs.hub_tables import HubTable, held_out_splits, hub_splits, training_split
from flatscope.samples import LABEL_KEYS

TOKENS, MASKS = "input_ids", ("attention_mask", "token_type_ids")
MORE_LABELS = ("class", "fine_label", "category", "score")
NOT_A_TOKEN = -100  # what losses leave out
LONGEST = 4096  # tokens of a text, where the tokenizer names no limit
ROLES = ("input", "label")
Columns = Mapping[str, str]
Tokenizer = Callable[..., Any]


def samples_from_hub(
    name: str, columns: Columns, tokenizer: Callable[[], Tokenizer] | None, with_test: bool
) -> Raw | DataSource:
    """Training and test samples of the data set `hf:PLACE`.

    Args:
        name: with its `hf:`.
        columns: {"input": name or names with commas, "label": name, or "input_ids" for the next tokens}; what
            is not named is found where only one will do.
        tokenizer: makes that of the model; None where the model has none.
        with_test: whether a part that is held out is wanted.
    """
    for role in columns:
        refuse_unknown(role, ROLES, "column (--column)")
    parts = hub_splits(name)
    training = training_split(parts, name)
    train = parts[training]
    label, inputs = _label_column(train, columns.get("label")), _input_columns(train, columns)
    reading = _Reading(label, inputs, tokenizer)
    test = _held_out_table(parts, training, label) if with_test else None
    tables = [table for table in (train, test) if table is not None]
    notes = f"{name}, inputs {', '.join(inputs)}, label {label or 'the tokens themselves'}"
    if reading.has_tokens(train):
        made = [reading.token_batch(table) for table in tables]
        return DataSource(Path(name).name, made[0], made[1] if len(made) > 1 else None, notes)
    pairs = [reading.input_and_label_arrays(table) for table in tables]
    classes = (train.classes.get(label or "") or None) if pairs[0][1].dtype.kind in "iu" else None
    return checked_raw_samples(Path(name).name, pairs[0], pairs[1] if len(pairs) > 1 else None, classes, notes)


def _label_column(table: HubTable, named: str | None) -> str | None:
    """The column of the labels; None where the tokens themselves are to be predicted, and where there is none."""
    columns = table.rows.column_names
    if named == TOKENS:
        return None
    if named is not None:
        refuse_unknown(named, columns, f"column of {table.where}")
        return named
    candidates = [name for name in (*LABEL_KEYS, *MORE_LABELS) if name in columns] or list(table.classes)
    return candidates[0] if candidates else None


def _input_columns(table: HubTable, columns: Columns) -> tuple[str, ...]:
    """The columns of the inputs, as named or where only one will do."""
    names, label = table.rows.column_names, _label_column(table, columns.get("label"))
    if "input" in columns:
        asked = tuple(part.strip() for part in columns["input"].split(","))
        for name in asked:
            refuse_unknown(name, names, f"column of {table.where}")
        return asked
    if TOKENS in names:
        return TOKENS, *(name for name in MASKS if name in names)
    known = {*LABEL_KEYS, *MORE_LABELS, *table.classes} if label is None else {label}
    others = [name for name in names if name not in known]
    kinds = {name: _type_of_column(table.rows.schema.field(name).type) for name in others}
    for kind in ("picture", "text", "array"):
        of_kind = [name for name in others if kinds[name] == kind]
        if len(of_kind) == 1:
            return (of_kind[0],)
        if of_kind:
            got = f"several of {kind}s: {', '.join(of_kind)}"
            fix = f"Name it: --column input={of_kind[0]} (several with commas)"
            raise InputError("one column of inputs", got, table.where, fix)
    numbers = tuple(
        name for name in others if kinds[name] == "number" and not name.startswith(("idx", "__index", "Unnamed"))
    )
    if not numbers:
        shown = ", ".join(f"{name} ({table.rows.schema.field(name).type})" for name in names)
        raise InputError("a column of inputs", shown, table.where, "Name it: --column input=NAME")
    return numbers


def _type_of_column(of: pa.DataType) -> str:
    """Kind of values in a column: picture, text, array, number, or nothing that a network reads."""
    if isinstance(of, pa.ExtensionType):
        of = of.storage_type
    if pa.types.is_struct(of) and "bytes" in {field.name for field in of}:
        return "picture"
    if pa.types.is_string(of) or pa.types.is_large_string(of):
        return "text"
    if pa.types.is_list(of) or pa.types.is_large_list(of) or pa.types.is_fixed_size_list(of):
        return "array" if _type_of_column(of.value_type) in ("number", "array") else ""
    return "number" if pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_boolean(of) else ""


def _held_out_table(parts: dict[str, HubTable], training: str, label: str | None) -> HubTable | None:
    """The first part to test on whose labels are known: some sets keep those of the test part to themselves."""
    for name in held_out_splits(parts, training):
        table = parts[name]
        if label is None or label not in table.rows.column_names:
            if label is None:
                return table
            continue
        labels = table.rows.column(label)
        if labels.null_count < len(labels) and not (
            pa.types.is_integer(labels.type) and set(labels.unique().to_pylist()) == {-1}
        ):
            return table
    return None


class _Reading:
    """Rules by which the columns of a data set become samples."""

    def __init__(self, label: str | None, inputs: Sequence[str], tokenizer: Callable[[], Tokenizer] | None) -> None:
        self.label, self.inputs, self.tokenizer = label, inputs, tokenizer

    def has_tokens(self, table: HubTable) -> bool:
        """True if samples are tokens: ready ones, or texts."""
        return self.inputs[0] == TOKENS or self._kind(table) == "text"

    def _kind(self, table: HubTable) -> str:
        return _type_of_column(table.rows.schema.field(self.inputs[0]).type)

    def token_batch(self, table: HubTable) -> dict[str, Any]:
        """All samples as one batch by name, padded to the longest."""
        batch = self._tokenized_texts(table) if self._kind(table) == "text" else self._padded_tokens(table)
        if self.label is not None:
            batch["labels"] = self._label_array(table)
        else:  # next tokens: places that were filled up count for nothing
            mask = batch.get("attention_mask")
            tokens = batch[TOKENS]
            batch["labels"] = tokens if mask is None else np.where(mask == 0, NOT_A_TOKEN, tokens)
        return batch

    def _tokenized_texts(self, table: HubTable) -> dict[str, Any]:
        if self.tokenizer is None:
            fix = "Name a model with its tokenizer (--model hf:FOLDER), or save the data with a column input_ids"
            raise InputError("a tokenizer for texts", "a model without one", f"{table.where}, {self.inputs[0]}", fix)
        tokenizer = self.tokenizer()
        texts = [table.rows.column(name).to_pylist() for name in self.inputs]
        if any(not isinstance(text, str) for column in texts for text in column):
            raise DataFileError("texts", "rows without any", f"{table.where}, {', '.join(self.inputs)}")
        longest = min(int(getattr(tokenizer, "model_max_length", LONGEST)), LONGEST)
        if getattr(tokenizer, "pad_token", "") is None:  # of models that only predict next tokens
            tokenizer.pad_token = tokenizer.eos_token  # type: ignore[attr-defined]
        try:
            encoded = tokenizer(*texts, padding=True, truncation=True, max_length=longest, return_tensors="np")
        except Exception as problem:
            raise InputError("texts that the tokenizer takes", first_line(problem), table.where) from problem
        return {name: np.asarray(values) for name, values in encoded.items()}

    def _padded_tokens(self, table: HubTable) -> dict[str, Any]:
        rows = {name: table.rows.column(name).to_pylist() for name in self.inputs}
        longest = max(map(len, rows[TOKENS]), default=0)
        uneven = any(len(row) < longest for row in rows[TOKENS])
        batch = {name: np.array([[*row, *[0] * (longest - len(row))] for row in rows[name]]) for name in rows}
        if uneven and "attention_mask" not in batch:
            lengths = np.array(list(map(len, rows[TOKENS])))
            batch["attention_mask"] = (np.arange(longest) < lengths[:, None]).astype(np.int64)
        return batch

    def input_and_label_arrays(self, table: HubTable) -> Pair:
        """Inputs and labels as arrays."""
        if self.label is None:
            shown = ", ".join(table.rows.column_names)
            raise InputError("a column of labels", f"columns {shown}", table.where, "Name it: --column label=NAME")
        first = table.rows.column(self.inputs[0])
        if self._kind(table) == "picture":
            return _image_array(first, table.where), self._label_array(table)
        columns = [_numeric_array(table.rows.column(name), f"{table.where}, {name}") for name in self.inputs]
        x = columns[0] if len(columns) == 1 and columns[0].ndim > 1 else np.stack(columns, 1)
        return x if x.dtype == np.uint8 else x.astype(np.float32), self._label_array(table)

    def _label_array(self, table: HubTable) -> Array:
        assert self.label is not None
        where = f"{table.where}, {self.label}"
        if _type_of_column(table.rows.schema.field(self.label).type) == "text":
            seen = table.rows.column(self.label).unique().to_pylist()[:3]
            fix = "Number them from 0 in the order of the model's outputs (dataset.class_encode_column, or a map)"
            raise InputError("labels as numbers", f"texts such as {', '.join(map(repr, seen))}", where, fix)
        return _numeric_array(table.rows.column(self.label), where)


def _numeric_array(column: pa.ChunkedArray, where: str) -> Array:
    """A column of numbers, or of lists of them, as an array."""
    if column.null_count:
        got = f"{column.null_count} empty ones"
        raise DataFileError("a number in every row", got, where, "Drop these rows (dataset.filter)")
    try:
        values = np.array(column.to_pylist()) if _type_of_column(column.type) == "array" else column.to_numpy()
    except ValueError as problem:
        fix = "Pad or crop them to one"
        raise DataFileError("rows of one shape", "rows of several", where, fix) from problem
    if values.dtype == object:
        raise DataFileError("numbers", f"a column of {column.type}", where)
    return values


def _image_array(column: pa.ChunkedArray, where: str) -> Array:
    """Images (n, channels, height, width) in bytes."""
    from PIL import Image

    images = []
    for row in column.to_pylist():
        try:
            place: Any = io.BytesIO(row["bytes"]) if row["bytes"] else row["path"]
            with Image.open(place) as image:
                images.append(np.asarray(image if image.mode in ("L", "RGB") else image.convert("RGB")))
        except (OSError, TypeError, ValueError) as problem:
            raise DataFileError("pictures", first_line(problem), where) from problem
    shapes = {image.shape for image in images}
    if len(shapes) > 1:
        sizes = ", ".join("×".join(map(str, shape)) for shape in sorted(shapes, key=str)[:3])
        fix = "Resize them in the data set, or in a function of your own: --data file.py:function"
        raise InputError("pictures of one size", sizes, where, fix)
    joined = np.stack(images)
    return joined[:, None] if joined.ndim == 3 else np.moveaxis(joined, -1, 1)
