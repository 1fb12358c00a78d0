"""Every claim of the four papers with its verdict, from the results that were saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from flatscope.errors import DataFileError
from flatscope_papers.claims import NOT_RUN, Answer, Finding
from flatscope_papers.declaration import SCALES, Study
from flatscope_papers.known_studies import studies
from flatscope_papers.study_result import VERDICTS_FILE, StudyResult, answer_text


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
    found: dict[str, dict[str, StudyResult]] = {}
    for path in sorted(Path(folder).glob(f"*/*/{VERDICTS_FILE}")):
        try:
            result = StudyResult.load(path.parent)
        except DataFileError as problem:
            if damaged is None:
                raise
            damaged[path.parts[-3], path.parts[-2]] = problem
            continue
        found.setdefault(result.name, {})[result.scale] = result
    return found


def by_size(results: Mapping[str, StudyResult]) -> list[StudyResult]:
    """Results at all scales, the largest first; a smoke run is no result."""
    return [results[scale] for scale in reversed(SCALES) if scale in results and scale != "smoke"]


def latest(results: Mapping[str, StudyResult]) -> StudyResult | None:
    """The result at the largest scale."""
    return next(iter(by_size(results)), None)


def claim_rows(results: Mapping[str, Mapping[str, StudyResult]]) -> list[dict[str, str]]:
    """One row per claim of every declared study, at the largest scale there is; those without a result say so."""
    return [row for declared in studies().values() for row in rows_of(declared, results)]


def claim_frame(results: Mapping[str, Mapping[str, StudyResult]]) -> pd.DataFrame:
    """The same as a table, with answers and ranges as numbers too; NaN for an end that is not there."""
    rows = []
    for declared in studies().values():
        result = latest(results.get(declared.name, {}))
        nothing = (Finding(claim, Answer(math.nan), NOT_RUN) for claim in declared.claims)
        findings = result.findings if result else nothing
        rows += [{**row, **_numbers(of)} for row, of in zip(rows_of(declared, results), findings, strict=True)]
    return pd.DataFrame(rows).astype({"runs": int})


def _numbers(finding: Finding) -> dict[str, str | float]:
    claim, answer = finding.claim, finding.answer
    ranges = {"interval": (answer.low, answer.high), "holds": claim.holds, "partly": claim.partly or (None, None)}
    found: dict[str, str | float] = {"key": claim.key, "value": answer.value}
    for name, (low, high) in ranges.items():
        found[f"{name}_low"] = math.nan if low is None else low
        found[f"{name}_high"] = math.nan if high is None else high
    return found


def rows_of(declared: Study, results: Mapping[str, Mapping[str, StudyResult]]) -> list[dict[str, str]]:
    """The rows of one study, as text; `elsewhere` is what came out at other scales."""
    found = by_size(results.get(declared.name, {}))
    if not found:
        return [_row_without_result(declared, number) for number in range(len(declared.claims))]
    result, *others = found
    rows = []
    for finding, row in zip(result.findings, result.rows(), strict=True):
        there = [f"{other.scale} scale: {words}" for other in others if (words := _outcome(other, finding.claim.key))]
        rows.append({**row, "paper": result.paper, "scale": result.scale, "elsewhere": "; ".join(there)})
    return rows


def _outcome(result: StudyResult, key: str) -> str:
    """What came out for a claim, in words; nothing where the result does not know the claim."""
    found = [finding for finding in result.findings if finding.claim.key == key]
    return f"{answer_text(found[0].answer)}, {found[0].verdict}" if found else ""


def _row_without_result(declared: Study, number: int) -> dict[str, str]:
    claim = declared.claims[number]
    return {
        "study": declared.name,
        "paper": declared.paper,
        "where": claim.where,
        "statement": claim.statement,
        "number": claim.number,
        "reported": claim.reported,
        "rule": claim.rule,
        "found": "—",
        "runs": "0",
        "scale": "—",
        "verdict": NOT_RUN,
        "undecided": "",
        "note": "",
        "elsewhere": "",
    }
