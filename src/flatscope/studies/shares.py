"""Means over runs of numbers that lie between 0 and 1."""

from __future__ import annotations

from typing import Any

from flatscope.studies import intervals
from flatscope.studies.claims import Estimate


def mean_share(values: Any, note: str = "") -> Estimate:
    """Mean of shares over runs; Student's interval knows no bounds, so it is cut to what a share can be."""
    found = intervals.mean(values, note)
    if found.low is None or found.high is None:
        return found
    return Estimate(found.value, max(0.0, found.low), min(1.0, found.high), found.runs, found.note)
