"""The committed results of studies: small, judged by today's rule, and all on the page."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path

import pytest

from flatscope_papers import studies
from flatscope_papers.claims import finding_of_claim
from flatscope_papers.pages.overview import overview_page
from flatscope_papers.pages.page_files import pages_by_file_name
from flatscope_papers.reproduction import load_results, result_at_largest_scale
from flatscope_papers.study_result import StudyResult

ROOT = Path(__file__).parents[2]
RESULTS = load_results(ROOT / "src" / "flatscope_papers" / "results")
SAVED = [result for by_scale in RESULTS.values() for result in by_scale.values()]
by_result = pytest.mark.parametrize("result", SAVED, ids=lambda result: f"{result.name}-{result.scale}")


def test_the_pages_are_those_of_the_saved_results() -> None:
    docs = ROOT / "docs"
    assert (docs / "reproduction.md").read_text(encoding="utf-8") == overview_page(RESULTS)
    for name, page in pages_by_file_name(RESULTS).items():
        assert (docs / "papers" / name).read_text(encoding="utf-8") == page, name


def test_every_figure_on_the_pages_is_there() -> None:
    shown = set()
    for page in (ROOT / "docs" / "papers").glob("*.md"):
        figures = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", page.read_text(encoding="utf-8"))
        shown |= {(page.parent / figure).resolve() for figure in figures}
    assert len(shown) == len(RESULTS)
    assert shown == {path.resolve() for path in (ROOT / "docs" / "papers" / "images").iterdir()}


@by_result
def test_no_result_is_of_a_smoke_run(result: StudyResult) -> None:
    assert result.scale != "smoke"


@by_result
def test_claims_and_verdicts_are_those_of_the_declaration(result: StudyResult) -> None:
    declared = studies()[result.name]
    known = list(declared.claims)
    if (
        result_at_largest_scale(RESULTS[result.name]) is not result
    ):  # a smaller scale may lack what has been restated since
        known = [claim for claim in known if claim.key in {finding.claim.key for finding in result.findings}]
    words = {"headline": "", "quantity": ""}  # for pages, which take them from the declaration
    stored = [replace(finding.claim, **words) for finding in result.findings]
    assert stored == [replace(claim, **words) for claim in known]
    for finding in result.findings:
        assert finding.verdict == finding_of_claim(finding.claim, finding.answer, result.scale).verdict


@by_result
def test_files_are_small(result: StudyResult) -> None:
    for path in (ROOT / "src" / "flatscope_papers" / "results" / result.name / result.scale).iterdir():
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
