"""The committed results of studies: small, judged by today's rule, and all on the page."""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest

from flatscope_papers import studies
from flatscope_papers.claims import judge
from flatscope_papers.pages.reproduction_page import reproduction_markdown
from flatscope_papers.reproduction import load_results
from flatscope_papers.study_result import StudyResult

ROOT = Path(__file__).parents[2]
RESULTS = load_results(ROOT / "results")
SAVED = [result for by_scale in RESULTS.values() for result in by_scale.values()]
by_result = pytest.mark.parametrize("result", SAVED, ids=lambda result: f"{result.name}-{result.scale}")


def test_the_page_is_that_of_the_saved_results() -> None:
    page = reproduction_markdown(RESULTS)
    assert (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8") == page


def test_every_figure_on_the_page_is_there() -> None:
    page = (ROOT / "docs" / "reproduction.md").read_text(encoding="utf-8")
    figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page)
    assert len(figures) == len(RESULTS)
    for figure in figures:
        assert (ROOT / "docs" / figure).is_file()


@by_result
def test_no_result_is_of_a_smoke_run(result: StudyResult) -> None:
    assert result.scale != "smoke"


@by_result
def test_claims_and_verdicts_are_those_of_the_declaration(result: StudyResult) -> None:
    declared = studies()[result.name]
    assert [finding.claim for finding in result.findings] == list(declared.claims)
    for finding in result.findings:
        assert finding.verdict == judge(finding.claim, finding.answer, result.scale).verdict


@by_result
def test_files_are_small(result: StudyResult) -> None:
    for path in (ROOT / "results" / result.name / result.scale).iterdir():
        assert path.stat().st_size < 1_000_000, path


@by_result
def test_intervals_contain_their_value_and_say_what_they_are(result: StudyResult) -> None:
    for finding in result.findings:
        answer = finding.answer
        if answer.low is None or answer.high is None or math.isnan(answer.value):
            continue
        assert answer.low <= answer.value <= answer.high, finding.claim.key
        if answer.low == answer.high and answer.runs > 1:
            # Alike runs are not exact: either the claim is about each of them, or there is no interval.
            assert answer.seen, finding.claim.key
