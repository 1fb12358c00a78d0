"""Every claim of the four papers with its verdict, from the results that were saved."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd

from flatscope.errors import DataFileError
from flatscope_papers.claims import IDENTITY, NOT_RUN, OWN, Answer, Finding
from flatscope_papers.declaration import SCALES, Study
from flatscope_papers.study_registry import studies
from flatscope_papers.study_result import VERDICTS_FILE, StudyResult

Results = Mapping[str, Mapping[str, StudyResult]]  # by study and scale
# Kinds of claims as they are counted; an experiment at the paper's scale is not added to one at a smaller scale.
AT_PAPER_SCALE, REDUCED = "experiment, paper scale", "experiment, reduced scale"
GROUPS = {
    IDENTITY: "identity or theorem",
    AT_PAPER_SCALE: AT_PAPER_SCALE,
    REDUCED: REDUCED,
    OWN: "our own test of a statement",
    NOT_RUN: NOT_RUN,
}


@dataclass(frozen=True)
class Entry:
    """A claim of a study with what was found at the largest scale, and at others.

    Attributes:
        study: what it is a claim of.
        finding: at the largest scale; verdict "not run" without one.
        scale: of the finding; empty without one.
        others: findings at smaller scales, by scale.
    """

    study: Study
    finding: Finding
    scale: str
    others: Mapping[str, Finding]

    @property
    def group(self) -> str:
        """Group in which the claim is counted: one of GROUPS."""
        if not self.scale:
            return NOT_RUN
        if self.finding.claim.kind in (IDENTITY, OWN):
            return self.finding.claim.kind
        return AT_PAPER_SCALE if self.scale == "paper" else REDUCED

    @property
    def turned(self) -> Mapping[str, Finding]:
        """Findings at smaller scales with another verdict."""
        return {scale: other for scale, other in self.others.items() if other.verdict != self.finding.verdict}


def load_results(
    folder: str | Path, damaged: dict[tuple[str, str], DataFileError] | None = None
) -> dict[str, dict[str, StudyResult]]:
    """Saved results by study and scale, from `folder/<study>/<scale>/`.

    Args:
        folder: of all results.
        damaged: is given, by the folders of study and scale, what is wrong with results that cannot be read; they
            are left out then.

    Raises:
        DataFileError: a result cannot be read, and `damaged` is not there to say so.
    """
    results: dict[str, dict[str, StudyResult]] = {}
    for path in sorted(Path(folder).glob(f"*/*/{VERDICTS_FILE}")):
        try:
            result = StudyResult.load(path.parent)
        except DataFileError as problem:
            if damaged is None:
                raise
            damaged[path.parts[-3], path.parts[-2]] = problem
            continue
        results.setdefault(result.name, {})[result.scale] = result
    return results


def results_by_scale(results: Mapping[str, StudyResult]) -> list[StudyResult]:
    """Results at all scales, the largest first; a smoke run is no result."""
    return [results[scale] for scale in reversed(SCALES) if scale in results and scale != "smoke"]


def result_at_largest_scale(results: Mapping[str, StudyResult]) -> StudyResult | None:
    """The result at the largest scale."""
    return next(iter(results_by_scale(results)), None)


def claim_entries(results: Results) -> list[Entry]:
    """Every claim of every declared study, in their order; those without a result say so."""
    return [entry for declared in studies().values() for entry in claim_entries_of_study(declared, results)]


def claim_entries_of_study(declared: Study, results: Results) -> list[Entry]:
    """The claims of one study as it is declared; what a result lacks, or has by another number, is not run."""
    sizes = results_by_scale(results.get(declared.name, {}))
    entries: list[Entry] = []
    for claim in declared.claims:
        same = [(result.scale, f) for result in sizes for f in result.findings if f.claim.key == claim.key]
        known = {scale: finding for scale, finding in same if finding.claim.number == claim.number}
        scale = next(iter(known), "")
        for place, finding in known.items():  # a number is told in today's words
            reworded = replace(finding.claim, headline=claim.headline, quantity=claim.quantity)
            known[place] = replace(finding, claim=reworded)
        finding = known.pop(scale) if scale else Finding(claim, Answer(math.nan, runs=0), NOT_RUN)
        entries.append(Entry(declared, finding, scale, known))
    return entries


def verdict_counts_by_group(entries: Iterable[Entry]) -> dict[tuple[str, str], Counter[str]]:
    """Numbers of verdicts, by paper and group of claims."""
    counts: dict[tuple[str, str], Counter[str]] = {}
    for entry in entries:
        if entry.finding.counts:
            counts.setdefault((entry.study.paper, entry.group), Counter())[entry.finding.verdict] += 1
    return counts


def claim_frame(results: Results) -> pd.DataFrame:
    """A row for every claim: words, answers and ranges; NaN for an end that is not there."""
    rows = []
    for entry in claim_entries(results):
        claim, answer = entry.finding.claim, entry.finding.answer
        row: dict[str, str | float] = {
            "study": entry.study.name,
            "paper": entry.study.paper,
            "key": claim.key,
            "where": claim.where,
            "statement": claim.statement,
            "number": claim.number,
            "reported": claim.reported,
            "kind": claim.kind,
            "scale": entry.scale,
            "verdict": entry.finding.verdict,
            "in_part": entry.finding.holds_in_wider_range,
            "after_results": claim.after_results,
            "runs": answer.runs,
            "value": answer.value,
            "note": answer.note or claim.comment,
        }
        ranges = {"interval": (answer.low, answer.high), "holds": claim.holds, "partly": claim.partly or (None, None)}
        for name, (low, high) in ranges.items():
            row |= {f"{name}_low": math.nan if low is None else low, f"{name}_high": math.nan if high is None else high}
        rows.append(row)
    return pd.DataFrame(rows)
