"""What a study costs: seconds by kind of work, from timed epochs and measurements, kept beside its results."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from flatscope.errors import DataFileError
from flatscope.guards import write_whole

TRAINING, MEASURING = "training", "measuring"
NAMED_ROWS = 3  # of the largest, in one sentence


@dataclass(frozen=True)
class CostRow:
    """Work of one kind.

    Attributes:
        part: "training" or "measuring".
        what: what is done once, in words.
        number: how often: stacks of networks, or measurements.
        each: seconds of the largest of them: of an epoch, or of a measurement.
        total: seconds of all; None where nothing could be timed.
        epochs: up to how many epochs of the largest; 0 for a measurement.
        images: training images of the largest.
        timed_on: training images of the epochs that were timed; for a measurement, the share of its repetitions
            or images.
        like: a kind that was timed in place of this one, from which this one is reckoned by its multiply-adds.
        problem: why nothing was timed.
        kind: that of its pieces: what has it takes the same time.
    """

    part: str
    what: str
    number: int
    each: float | None = None
    total: float | None = None
    epochs: int = 0
    images: int = 0
    timed_on: float = 0.0
    like: str = ""
    problem: str = ""
    kind: str = ""

    def text(self) -> str:
        """The row in one phrase."""
        times = f"{self.number:,} × {self.what}"
        if self.each is None:
            return f"{times}: not timed: {self.problem}"
        if self.part == MEASURING:
            timed = "" if self.timed_on >= 1 else f", timed on {self.timed_on:.2g} of it"
            return f"{times}, {duration(self.each)} each{timed}"
        timed = "" if self.timed_on >= self.images else f", timed on {self.timed_on:,.0f}"
        kin = "the same with other settings" if self.like == self.what else self.like
        timed = f", reckoned from {kin}" if kin else timed
        largest = f"up to {self.epochs:,} epochs of {duration(self.each)} ({self.images:,} images{timed})"
        in_all = "" if self.number == 1 else f"{duration(self.total or 0.0)} in all, the largest "
        return f"{times}, {in_all}{largest}"


@dataclass(frozen=True)
class Cost:
    """What one run of a study costs on one device, unit after unit, without set-up, analysis and figure.

    Attributes:
        name: of the study.
        scale: of the study.
        rows: one per kind of work.
        additional: seconds that are left where the studies in `shared` have been run before.
        shared: studies with which it shares networks or measurements, of those costed before it.
        provenance: version, command, device, torch, date.
    """

    name: str
    scale: str
    rows: tuple[CostRow, ...]
    additional: float
    shared: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        """Of everything that was timed."""
        return sum(row.total or 0.0 for row in self.rows)

    @property
    def untimed(self) -> tuple[CostRow, ...]:
        """Rows without a time."""
        return tuple(row for row in self.rows if row.total is None)

    def part(self, name: str) -> float:
        """Seconds of "training" or of "measuring"."""
        return sum(row.total or 0.0 for row in self.rows if row.part == name)

    def text(self) -> str:
        """One sentence: the time in all, what takes it, and what is shared with other studies."""
        without = "; ".join(f"{problem} ({kinds})" for problem, kinds in untimed_kinds([self]).items())
        if len(self.untimed) == len(self.rows):
            return f"not timed: {without or 'nothing to run'}"
        bound = self._bound()
        rows = sorted((row for row in self.rows if row.total is not None), key=lambda row: -(row.total or 0.0))
        told = [row.text() for row in rows[:NAMED_ROWS]]
        if rows[NAMED_ROWS:]:
            told.append(f"{_kinds(len(rows) - NAMED_ROWS)} that take{'s' * (len(rows) == NAMED_ROWS + 1)} less")
        if without:
            told.append(f"not timed: {without}")
        words = f"{bound} {duration(self.seconds)}{', what was not timed left out,' if self.untimed else ''}"
        words += f" on one {self.provenance.get('device', 'device')}: {'; '.join(told)}"
        if self.shared:
            left = f"{duration(self.additional)} more" if self.additional else "nothing more"
            words += f"; {left} once {', '.join(self.shared)} {'has' if len(self.shared) == 1 else 'have'} run"
        return words

    def _bound(self) -> str:
        """What the time in all is: stop rules may end training early, and what was not timed comes on top."""
        if any(row.like for row in self.rows) or (self.untimed and any(row.epochs for row in self.rows)):
            return "about"
        return "more than" if self.untimed else "at most" if self.part(TRAINING) else "about"

    def save(self, folder: str | Path) -> Path:
        """Write `folder/<study>/<scale>-cost.json`, whole; the path of the file."""
        target = Path(folder) / self.name / cost_file(self.scale)
        write_whole(target, (json.dumps(asdict(self), indent=1, allow_nan=False) + "\n").encode())
        return target

    @classmethod
    def load(cls, path: str | Path) -> Cost:
        """The cost that `save` wrote."""
        try:
            saved = json.loads(Path(path).read_text(encoding="utf-8"))
            rows = tuple(CostRow(**row) for row in saved.pop("rows"))
            return cls(rows=rows, shared=tuple(saved.pop("shared")), **saved)
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as problem:
            got = f"{type(problem).__name__}: {problem}"
            fix = f"Remove it and time it again: flatscope study cost {Path(path).parent.name}"
            raise DataFileError("the cost of a study", got, where=str(path), fix=fix) from problem


def load_costs(folder: str | Path, scale: str = "paper") -> dict[str, Cost]:
    """Saved costs by study, from `folder/<study>/<scale>-cost.json`."""
    found = [Cost.load(path) for path in sorted(Path(folder).glob(f"*/{cost_file(scale)}"))]
    return {cost.name: cost for cost in found}


def untimed_kinds(costs: Iterable[Cost]) -> dict[str, str]:
    """By the reason why they were not timed: the kind of work if it is one, else how many."""
    kinds: dict[str, dict[str, None]] = {}
    for row in (row for cost in costs for row in cost.untimed):
        kinds.setdefault(row.problem, {})[row.what] = None
    return {problem: next(iter(what)) if len(what) == 1 else _kinds(len(what)) for problem, what in kinds.items()}


def _kinds(number: int) -> str:
    return f"{number} kind{'s' * (number != 1)} of work"


def cost_file(scale: str) -> str:
    """Name of the file with the cost at that scale."""
    return f"{scale}-cost.json"


def duration(seconds: float) -> str:
    """Seconds, minutes or hours, whichever says it in few digits."""
    for size, unit in ((3600, "hours"), (60, "minutes")):
        if seconds >= 2 * size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds:.2g} s" if seconds < 100 else f"{seconds:.0f} s"
