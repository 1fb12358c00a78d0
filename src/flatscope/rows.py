"""Rows of a table: those of one level, and how the value of a search reads."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

from flatscope.formatting import number_within_interval


def rows_of(frame: pd.DataFrame, level: str) -> pd.DataFrame:
    """The rows of a table's frame with values of the "network", of every "layer", "unit" or "sample"."""
    if level in ("unit", "sample"):
        return frame[frame[level].notna()]
    whole = frame["unit"].isna() & frame["sample"].isna()
    return frame[whole & (frame["layer"].eq("") if level == "network" else frame["layer"].ne(""))]


def searched_text(row: pd.Series[Any]) -> str:
    """The value of a row that a search ended at, by its interval; empty where it is not such a row."""
    value, low, high = (float(row[name]) for name in ("value", "low", "high"))
    if row["exact"] or row["stderr"] > 0 or not (math.isfinite(value) and math.isfinite(low) and math.isfinite(high)):
        return ""
    return number_within_interval(value, low, high)
