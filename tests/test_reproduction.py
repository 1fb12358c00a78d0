"""The committed results of studies: small, judged by today's rule, and all on the page."""

from __future__ import annotations

from pathlib import Path

import pytest

from flatscope.studies import studies
from flatscope.studies.claims import judge
from flatscope.studies.reproduction import load_results, reproduction_markdown
from flatscope.studies.result import StudyResult

ROOT = Path(__file__).parents[1]
RESULTS = load_results(ROOT / "results")
SAVED = [result for by_scale in RESULTS.values() for result in by_scale.values()]
by_result = pytest.mark.parametrize("result", SAVED, ids=lambda result: f"{result.name}-{result.scale}")


def test_the_page_is_that_of_the_saved_results() -> None:
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == reproduction_markdown(RESULTS)


@by_result
def test_no_result_is_of_a_smoke_run(result: StudyResult) -> None:
    assert result.scale != "smoke"


@by_result
def test_claims_and_verdicts_are_those_of_the_declaration(result: StudyResult) -> None:
    declared = studies()[result.name]
    assert [finding.claim for finding in result.findings] == list(declared.claims)
    for finding in result.findings:
        assert finding.verdict == judge(finding.claim, finding.estimate, result.scale).verdict


@by_result
def test_files_are_small(result: StudyResult) -> None:
    for path in (ROOT / "results" / result.name / result.scale).iterdir():
        assert path.stat().st_size < 1_000_000, path
