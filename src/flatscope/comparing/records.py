"""How well each measure ranked pairs of networks by their generalization gap, by what the pairs differ in.

From the released population of 1,024 small networks (`fs.benchmark`), which writes this table: two data sets, two
training losses at which they were stopped.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.resources import files

import pandas as pd

FILE = "records.csv"
RANKING = "ranking"  # the vote of all measures that count: chosen on one data set, scored on the other
# What two networks may differ in, and how people ask about it.
DIFFERENCES = {
    "training": "two trainings of one architecture",
    "architecture": "two architectures",
    "width": "two widths of one architecture",
    "start": "two sizes of the initial weights",
    "label noise": "training with and without wrong labels",
}
COLUMNS = {
    **{"measure": "object", "difference": "object", "psi": "float64", "low": "float64", "high": "float64"},
    "pairs": "int64",
}


@dataclass(frozen=True)
class Record:
    """Success of a measure at ranking such pairs.

    Attributes:
        psi: 1 where every pair was ranked rightly, 0 for a coin, −1 where every one was ranked wrongly.
        low: lower end of the 95 % interval; NaN where every pair is tied.
        high: upper end.
        pairs: number of pairs.
    """

    psi: float
    low: float
    high: float
    pairs: int

    @property
    def counts(self) -> bool:
        """True if pairs were ranked rightly more often than wrongly, beyond chance."""
        return self.low > 0

    @property
    def words(self) -> str:
        """The share of pairs that were ranked rightly, with its interval and their number."""
        if math.isnan(self.low):
            return f"equal in all of {self.pairs:,} pairs"
        return f"right in {self.share} of {self.pairs:,} pairs"

    @property
    def share(self) -> str:
        """The share of pairs that are ranked rightly, a tie counting half, with its interval."""
        return share_words(self.psi, self.low, self.high)

    @staticmethod
    def percent(psi: float) -> str:
        """Ψ as the share of pairs that are ranked rightly, a tie counting half."""
        return f"{50 + 50 * psi:.0f}"


def share_words(psi: float, low: float, high: float) -> str:
    """Ψ and its interval as the share of pairs that are ranked rightly: `56 % [54, 58]`."""
    if math.isnan(low):
        return f"{Record.percent(psi)} %"
    return f"{Record.percent(psi)} % [{Record.percent(low)}, {Record.percent(high)}]"


@functools.cache
def records_table() -> pd.DataFrame:
    """All records, a row per measure and difference."""
    with (files(__package__) / FILE).open(encoding="utf-8") as text:
        return pd.read_csv(text).astype(COLUMNS)


@functools.cache
def records_by_measure(difference: str) -> dict[str, Record]:
    """The records of the measures for one kind of difference, in the order of the table; others are missing."""
    rows = records_table()[records_table()["difference"] == difference].dropna(subset="psi")
    columns = [rows[name].tolist() for name in ("measure", "psi", "low", "high", "pairs")]
    return {name: Record(*numbers) for name, *numbers in zip(*columns, strict=True)}


def records_of_measure(measure: str) -> dict[str, Record]:
    """The records of one measure by what the networks differ in; empty where it was not scored."""
    known = {difference: records_by_measure(difference).get(measure) for difference in DIFFERENCES}
    return {difference: record for difference, record in known.items() if record is not None}


def kind_of_difference(architectures: Iterable[str]) -> str:
    """The kind of difference between networks of which these are the modules, as text.

    Networks of one architecture may differ in their start or their labels as well, which nobody can see in them.
    """
    known = set(architectures)
    if len(known) == 1:
        return "training"
    return "width" if len({re.sub(r"\d+", "#", text) for text in known}) == 1 else "architecture"
