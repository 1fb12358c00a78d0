"""What a paper says, what came out here, and the verdict: a rule that is fixed before anything runs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from flatscope import InputError

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

    @property
    def rule(self) -> str:
        """Where it holds, and where in part, in words."""
        wider = f"; in part {range_text(self.partly)}" if self.partly else ""
        return f"holds {range_text(self.holds)}{wider}"


@dataclass(frozen=True)
class Answer:
    """The number found for a claim, with its interval.

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
    def exact(cls, value: float, note: str = "") -> Answer:
        """A number without any chance in it: a count, a closed form."""
        return cls(value, value, value, note=note)


@dataclass(frozen=True)
class Finding:
    """A claim beside what was found."""

    claim: Claim
    answer: Answer
    verdict: str

    @property
    def undecided(self) -> bool:
        """Whether it is not reproduced although its interval reaches where the claim holds: more runs could turn it."""
        low, high = self.answer.low, self.answer.high
        if self.verdict != NOT_REPRODUCED or low is None or high is None or self.answer.seen:
            return False
        return low <= self.claim.holds[1] and self.claim.holds[0] <= high


def judge(claim: Claim, answer: Answer, scale: str) -> Finding:
    """The verdict. Nothing is judged from a smoke run, nor from a number that is not there.

    Reproduced: the whole interval lies where the claim holds. Partly: the value does but its interval reaches out
    (or there is no interval), or the whole interval lies in the claim's wider range. Otherwise: not reproduced.
    """
    value = answer.value
    whole = None if answer.low is None or answer.high is None else (answer.low, answer.high)
    if scale == "smoke" or math.isnan(value):
        verdict = NOT_JUDGED
    elif whole and _inside(whole, claim.holds):
        verdict = REPRODUCED
    elif _inside((value, value), claim.holds) or (whole and claim.partly and _inside(whole, claim.partly)):
        verdict = PARTLY
    else:
        verdict = NOT_REPRODUCED
    return Finding(claim, answer, verdict)


def _inside(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def range_text(ends: Range) -> str:
    """A range in words: "above 0", "at most 0.5", "from 0.86 to 0.96", "at 1,209,866"."""
    low, high = ends
    if ends in (POSITIVE, NEGATIVE):
        return "above 0" if ends == POSITIVE else "below 0"
    if low == high:
        return f"at {number_text(low)}"
    if math.isinf(low) or math.isinf(high):
        words = f"at least {number_text(low)}" if math.isinf(high) else f"at most {number_text(high)}"
        return "anywhere" if math.isinf(low) and math.isinf(high) else words
    return f"from {number_text(low)} to {number_text(high)}"


def number_text(value: float) -> str:
    """Whole numbers whole, others to six digits."""
    whole = abs(value) < 1e15 and value == int(value) if math.isfinite(value) else False
    return f"{int(value):,}" if whole else f"{value:.6g}"


def counted(verdicts: Iterable[str]) -> str:
    """How often each verdict was given: "9 reproduced, 2 partly"."""
    counts = Counter(verdicts)
    return ", ".join(f"{counts[word]} {word}" for word in SIGNS if counts[word]) or "no claims"
