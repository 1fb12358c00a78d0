"""Leaks: test samples that are training samples, by a hash of the inputs of every sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

MOST_HASHED = 1_000_000  # samples of each set that are looked at: some 100 MB of hashes
LEAKED = 0.1  # share of test samples, more than repeats explain, from which on they decide nothing
MANY_AGAIN = 0.05  # share of test samples that are training samples too, from which on it is said


@dataclass(frozen=True)
class Overlap:
    """Number of test samples that have the inputs of training samples.

    Attributes:
        again: their number.
        n: number of test samples that were looked at.
        usual: share of training samples whose inputs another one has: of new samples as many are expected to.
        whole: number of all test samples.
    """

    again: int
    n: int
    usual: float
    whole: int

    @property
    def leaked(self) -> bool:
        """True if so many are training samples that test errors decide nothing."""
        return self.again > (LEAKED + self.usual) * self.n

    @property
    def remark(self) -> str:
        """A sentence where test samples are training samples too and still decide; empty elsewhere."""
        if self.leaked or self.again < MANY_AGAIN * self.n:
            return ""
        if self.again > (MANY_AGAIN + self.usual) * self.n:
            return f"Caution: {self}: test errors are lower than on new samples."
        shared = f"{self.again:,} of {self.n:,} test samples have inputs of training samples"
        return f"{shared}, as {100 * self.usual:.0f} % of the training samples have of one another."

    def __str__(self) -> str:
        return f"{self.again:,} of {self.n:,} test samples are training samples"

    @property
    def doubt(self) -> str:
        """Words on test samples that are no new ones, for who measures one network; empty where few are known."""
        if self.again <= (MANY_AGAIN + self.usual) * self.n:
            return ""
        looked = f"{self.n:,} of {self.whole:,} were looked at; " if self.n < self.whole else ""
        overlap_in_words = f"{self.again:,} of {self.n:,} test samples have the inputs of training samples"
        return f"{overlap_in_words}: {looked}they are not held out"

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any]) -> Self | None:
        """Overlap that a comparison stored; None where nobody looked."""
        return cls(**meta["overlap"]) if meta.get("overlap") else None


def overlap_of(train: Sequence[bytes], test: Sequence[bytes], whole: int) -> Overlap:
    """Number of test samples that are training samples too.

    Args:
        train: hashes of the inputs of the training samples.
        test: of the test samples that were looked at.
        whole: number of all test samples.
    """
    known = Counter(train)
    repeated = sum(count for count in known.values() if count > 1)
    return Overlap(sum(each in known for each in test), len(test), repeated / len(train), whole)
