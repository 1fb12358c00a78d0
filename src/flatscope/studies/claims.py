"""What a paper says, what came out here, and the verdict: a rule that is fixed before anything runs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from flatscope.errors import InputError

REPRODUCED = "reproduced"
PARTLY = "partly"
NOT_REPRODUCED = "not reproduced"
NOT_JUDGED = "not judged"
VERDICTS = (REPRODUCED, PARTLY, NOT_REPRODUCED, NOT_JUDGED)
NOT_RUN = "not run"  # no verdict: nothing has been looked at
SIGNS = {REPRODUCED: "✓", PARTLY: "◐", NOT_REPRODUCED: "✗", NOT_JUDGED: "–", NOT_RUN: "·"}
POSITIVE = (sys.float_info.min, math.inf)  # zero is neither more nor less
NEGATIVE = (-math.inf, -sys.float_info.min)

Range = tuple[float, float]


@dataclass(frozen=True)
class Claim:
    """One statement of a paper in a form that a number can decide.

    Attributes:
        key: short name, unique within its study.
        where: figure, table or section.
        statement: in our words.
        number: what is computed, with its unit.
        reported: what the paper gives, as text ("0.91", "smaller for random labels"); "no number" where it gives none.
        holds: the claim holds for values in this range, ends included.
        partly: a wider range in which it still holds in part (the right sign, another size).
    """

    key: str
    where: str
    statement: str
    number: str
    reported: str
    holds: Range
    partly: Range | None = None

    def __post_init__(self) -> None:
        """A range must have room, and the wider one must contain the other."""
        for name in ("holds", "partly"):
            ends = getattr(self, name)
            if ends is not None and not ends[0] <= ends[1]:
                raise InputError("a range (low, high)", repr(ends), where=f"claim {self.key}, {name}")
        if self.partly is not None and not (self.partly[0] <= self.holds[0] and self.holds[1] <= self.partly[1]):
            raise InputError("a range around `holds`", repr(self.partly), where=f"claim {self.key}, partly")


@dataclass(frozen=True)
class Estimate:
    """A number found, with its interval.

    Attributes:
        value: NaN if it could not be had; `note` says why.
        low: lower end of the interval; None where a single run gives none. Equal to `value` where it is exact.
        high: upper end.
        runs: how many networks, chains or draws it rests on.
        note: what a reader must know beside it.
        seen: what the claim is about one by one ("networks"), where `low` and `high` are the smallest and largest
            value seen among them and not a 95 % interval.
    """

    value: float
    low: float | None = None
    high: float | None = None
    runs: int = 1
    note: str = ""
    seen: str = ""

    @classmethod
    def exact(cls, value: float, note: str = "") -> Estimate:
        """A number without any chance in it: a count, a closed form."""
        return cls(value, value, value, note=note)


@dataclass(frozen=True)
class Finding:
    """A claim beside what was found."""

    claim: Claim
    estimate: Estimate
    verdict: str


def judge(claim: Claim, estimate: Estimate, scale: str) -> Finding:
    """The verdict. Nothing is judged from a smoke run, nor from a number that is not there.

    Reproduced: the whole interval lies where the claim holds. Partly: the value does but its interval reaches out
    (or there is no interval), or the whole interval lies in the claim's wider range. Otherwise: not reproduced.
    """
    value = estimate.value
    whole = None if estimate.low is None or estimate.high is None else (estimate.low, estimate.high)
    if scale == "smoke" or math.isnan(value):
        verdict = NOT_JUDGED
    elif whole and _inside(whole, claim.holds):
        verdict = REPRODUCED
    elif _inside((value, value), claim.holds) or (whole and claim.partly and _inside(whole, claim.partly)):
        verdict = PARTLY
    else:
        verdict = NOT_REPRODUCED
    return Finding(claim, estimate, verdict)


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def counted(verdicts: Iterable[str]) -> str:
    """How often each verdict was given: "9 reproduced, 2 partly"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in SIGNS if counts[word]) or "no claims"
