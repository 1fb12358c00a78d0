"""What a paper says, what came out here, and the verdict: a rule that is fixed before anything runs."""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

from flatscope import InputError

HOLDS = "holds"
CONTRADICTED = "contradicted"
INCONCLUSIVE = "inconclusive"
UNTESTABLE = "cannot be tested here"
VERDICTS = (HOLDS, CONTRADICTED, INCONCLUSIVE, UNTESTABLE)
NOT_JUDGED = "not judged"  # no verdict: a smoke run, or a number that is only told
NOT_RUN = "not run"  # no verdict: nothing has been looked at
SIGNS = {HOLDS: "✓", CONTRADICTED: "✗", INCONCLUSIVE: "?", UNTESTABLE: "–", NOT_JUDGED: "·", NOT_RUN: "·"}
EXPERIMENT, IDENTITY, OWN, ERRATUM, REMARK = "experiment", "identity", "own test", "erratum", "remark"
KINDS = {
    IDENTITY: "a theorem, an identity or a count, checked by numbers: no scale to be short of",
    EXPERIMENT: "about trained networks: at the paper's scale or at a reduced one",
    OWN: "our own test of a statement for which the paper ran nothing: it has no scale to be short of",
    ERRATUM: "a slip of the printed text, with its correction: outside the counts",
    REMARK: "a number that is told and not judged: not the paper's, unable to fail, or counted elsewhere",
}
COUNTED = (IDENTITY, EXPERIMENT, OWN)
Range = tuple[float, float]
POSITIVE: Range = (sys.float_info.min, math.inf)  # zero is neither more nor less
NEGATIVE: Range = (-math.inf, -sys.float_info.min)


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
        partly: a wider range in which it still holds in part (the right sign, another size): told, and no verdict.
        kind: one of `KINDS`.
        headline: the claim in a few words, if it is one of those that a paper is read for.
        quantity: what its number is, in a word or two.
        comment: of an erratum, what it should say; of a remark, why it is not judged.
        after_results: whether the claim, or its range, was set after first results were seen.
    """

    key: str
    where: str
    statement: str
    number: str
    reported: str
    holds: Range
    partly: Range | None = None
    kind: str = EXPERIMENT
    headline: str = ""
    quantity: str = ""
    comment: str = ""
    after_results: bool = False

    def __post_init__(self) -> None:
        """A range has room, the wider one contains the other; a slip has its correction, a remark its reason."""
        if self.kind not in KINDS:
            raise InputError(f"one of {', '.join(KINDS)}", self.kind, where=f"claim {self.key}, kind")
        if (self.kind in COUNTED) == bool(self.comment):
            got = self.comment or "none"
            raise InputError("a comment on an erratum or a remark, and on nothing else", got, where=f"claim {self.key}")
        for name in ("holds", "partly"):
            ends = getattr(self, name)
            if ends is not None and not ends[0] <= ends[1]:
                raise InputError("a range (low, high)", repr(ends), where=f"claim {self.key}, {name}")
        if self.partly is not None and not (self.partly[0] <= self.holds[0] and self.holds[1] <= self.partly[1]):
            raise InputError("a range around `holds`", repr(self.partly), where=f"claim {self.key}, partly")

    @property
    def rule(self) -> str:
        """Range in which it holds, and in which in part, in words."""
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

    @property
    def without_interval(self) -> str:
        """Why there is a number and no interval."""
        return f"{'one run' if self.runs == 1 else f'{self.runs} runs'}, no interval"

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
    def counts(self) -> bool:
        """True if its verdict is counted in sums."""
        return self.claim.kind in COUNTED

    @property
    def holds_in_wider_range(self) -> bool:
        """True if it does not hold as it is stated, but does in its wider range."""
        low, high = self.answer.low, self.answer.high
        if self.verdict not in (CONTRADICTED, INCONCLUSIVE) or low is None or high is None or not self.claim.partly:
            return False
        return _interval_lies_within((low, high), self.claim.partly)


def finding_of_claim(claim: Claim, answer: Answer, scale: str) -> Finding:
    """The verdict. Nothing is judged from a smoke run, and no remark.

    Holds: the whole interval lies where the claim holds. Contradicted: none of it does; a claim about every network is
    contradicted by one. Inconclusive: it lies on both sides, or there is no interval. A number that could not be had
    cannot be tested here.
    """
    low, high = answer.low, answer.high
    if scale == "smoke" or claim.kind == REMARK:
        verdict = NOT_JUDGED
    elif math.isnan(answer.value):
        verdict = UNTESTABLE
    elif low is None or high is None:
        verdict = INCONCLUSIVE
    elif _interval_lies_within((low, high), claim.holds):
        verdict = HOLDS
    elif answer.seen or high < claim.holds[0] or low > claim.holds[1]:
        verdict = CONTRADICTED
    else:
        verdict = INCONCLUSIVE
    return Finding(claim, answer, verdict)


def _interval_lies_within(inner: Range, outer: Range) -> bool:
    return outer[0] <= inner[0] and inner[1] <= outer[1]


def range_text(ends: Range) -> str:
    """A range in words: "above 0", "at most 0.5", "from 0.86 to 0.96", "at 1,209,866"."""
    low, high = ends
    if ends in (POSITIVE, NEGATIVE):
        return "above 0" if ends == POSITIVE else "below 0"
    if low == high:
        return f"at {number_text(low)}"
    if low == POSITIVE[0]:
        return f"above 0, at most {number_text(high)}"
    if math.isinf(low) or math.isinf(high):
        words = f"at least {number_text(low)}" if math.isinf(high) else f"at most {number_text(high)}"
        return "anywhere" if math.isinf(low) and math.isinf(high) else words
    return f"from {number_text(low)} to {number_text(high)}"


def number_text(value: float) -> str:
    """Whole numbers whole, others to six digits."""
    whole = abs(value) < 1e15 and value == int(value) if math.isfinite(value) else False
    return f"{int(value):,}" if whole else f"{value:.6g}"


def verdict_counts_in_words(verdicts: Iterable[str]) -> str:
    """Number of each verdict: "holds 9, contradicted 2"."""
    counts = Counter(verdicts)
    return ", ".join(f"{word} {counts[word]}" for word in SIGNS if counts[word]) or "no claims"


def judged_verdict_counts(findings: Iterable[Finding]) -> str:
    """Number of each verdict among the findings that sums count: neither remarks nor slips."""
    return verdict_counts_in_words(finding.verdict for finding in findings if finding.counts)
