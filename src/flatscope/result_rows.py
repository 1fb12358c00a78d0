"""Rows of a table, made of what a measure or bound returned."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import numpy as np
from torch import Tensor

from flatscope.context import Context
from flatscope.registry import Declaration, Result, Value
from flatscope.symmetries.folding import has_batchnorm
from flatscope.table import options_text
from flatscope.version import __version__

INFINITE = "infinite: more than a float holds, or a division by zero"
NOT_A_NUMBER = (
    "not a number: the network's outputs, its derivatives or their products overflow; measure it in float64, "
    "or a network whose training did not diverge"
)
Row = dict[str, Any]


def rows_of_result(
    ctx: Context, entry: Declaration, result: Result, shown: Row, common: Row, passes: float, seconds: float
) -> Iterator[Row]:
    """The rows of a result."""
    fixed = {
        "measure": entry.name,
        "folded": entry.on_folded and has_batchnorm(ctx.problem.model),
        "passes": passes,
        "seconds": seconds,
        "seed": ctx.seed,
        "dtype": str(ctx.problem.dtype).removeprefix("torch."),
        "version": __version__,
    }
    if entry.kind == "bound":
        fixed |= {"assumptions": "; ".join(entry.assumptions), "confidence": 1 - common["delta"]}
    for layer, value in _values_by_layer(result):
        for row in _rows_by_unit_or_sample(value, entry):
            if entry.kind == "bound":
                row["vacuous"] = not row["value"] < 1
            yield fixed | row | {"layer": layer, "options": options_text({**shown, **value.options})}


def _values_by_layer(result: Result) -> Iterator[tuple[str, Value]]:
    """(layer name or "", Value) for whatever shorthand a measure returned."""
    if isinstance(result, list):
        yield from (("", value) for value in result)
        return
    for layer, value in (result if isinstance(result, dict) else {"": result}).items():
        yield layer, value if isinstance(value, Value) else Value(value)


def _rows_by_unit_or_sample(value: Value, entry: Declaration) -> Iterator[Row]:
    """One row, or one per unit or sample."""
    base = {
        "unit": None,
        "sample": None,
        "exact": entry.exact if value.exact is None else value.exact,
        "reason": value.reason,
    }
    many = isinstance(value.value, Tensor) and value.value.ndim == 1 and entry.per in ("unit", "sample")
    columns = {
        name: _value_as_array(getattr(value, name)) for name in ("value", "stderr", "data_stderr", "low", "high")
    }
    length = len(columns["value"]) if many else 1
    for index in range(length):
        place = {entry.per: index} if many else {}
        numbers = {name: float(array[index % len(array)]) for name, array in columns.items()}
        yield _row_with_reason(base | place | numbers, entry)


def _row_with_reason(row: Row, entry: Declaration) -> Row:
    """No row without a number and without a reason: a network that diverged overflows in the midst of a measure."""
    if math.isnan(row["value"]):
        said = row["reason"] and not row["exact"] and not math.isnan(row["stderr"])  # a remark on a value is no reason
        return row | {"exact": False, "reason": row["reason"] if said else NOT_A_NUMBER}
    if math.isinf(row["value"]) and not row["reason"] and "infinite" not in entry.conventions:
        return row | {"reason": INFINITE}
    return row


def _value_as_array(value: float | Tensor | None) -> np.ndarray[Any, Any]:
    if isinstance(value, Tensor):
        return value.detach().double().cpu().reshape(-1).numpy()
    return np.array([math.nan if value is None else float(value)])
