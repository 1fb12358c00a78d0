"""Saved results are what the rules of today make of their tables, and `flatscope study judge` puts others right."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from second import RESULTS
from typer.testing import CliRunner

from flatscope.cli.app import app
from flatscope_papers import find_study, load_result
from flatscope_papers.claims import CONTRADICTED, HOLDS, finding_of_claim
from flatscope_papers.rejudging import result_with_current_claims
from flatscope_papers.study_registry import studies

RUNNER = CliRunner()
FROM_TABLES = [name for name, declared in studies().items() if declared.from_table]
pytestmark = pytest.mark.filterwarnings("ignore:.*is gone")


@pytest.mark.parametrize("name", FROM_TABLES)
def test_a_changed_rule_or_formula_does_not_leave_saved_results_as_they_are(name: str) -> None:
    declared = find_study(name)
    for folder in sorted((RESULTS / name).iterdir()):
        result = load_result(folder)
        tables = {other: load_result(RESULTS / other / folder.name).table for other in {name, declared.table_of}}
        again = result_with_current_claims(declared, result, tables)
        for before, after in zip(result.findings, again.findings, strict=True):
            assert after.verdict == before.verdict, before.claim.key
            assert after.answer.value == pytest.approx(before.answer.value, rel=1e-6, abs=1e-15, nan_ok=True)
            for end in ("low", "high"):
                due, found = getattr(before.answer, end), getattr(after.answer, end)
                assert found is due is None or found == pytest.approx(due, rel=1e-6, abs=1e-12), before.claim.key


def test_studies_of_which_rules_changed_take_their_numbers_from_the_table() -> None:
    assert len(FROM_TABLES) >= 18


def test_a_wrong_number_in_a_saved_result_is_put_right_and_told(tmp_path: Path) -> None:
    name = "zhang2017-fig1"
    shutil.copytree(RESULTS / name, tmp_path / name)
    result = load_result(tmp_path / name / "paper")
    wrong = [
        finding_of_claim(f.claim, replace(f.answer, value=0.01, low=0.0, high=0.02), "paper")
        if f.claim.key == "no_generalization"
        else f
        for f in result.findings
    ]
    assert {f.claim.key: f.verdict for f in wrong}["no_generalization"] == CONTRADICTED
    replace(result, findings=tuple(wrong)).save(tmp_path / name / "paper")
    done = RUNNER.invoke(app, ["study", "judge", name, "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert f"{name} at paper scale, no_generalization: {CONTRADICTED} → {HOLDS}" in done.output
    again = load_result(tmp_path / name / "paper")
    assert [f.answer for f in again.findings] == [f.answer for f in result.findings]
    assert not RUNNER.invoke(app, ["study", "judge", name, "--results", str(tmp_path)]).output


def test_a_remark_that_is_worded_anew_is_written_again(tmp_path: Path) -> None:
    name, key = "petzka2019-fig1", "trace_common"
    shutil.copytree(RESULTS / name, tmp_path / name)
    folder = tmp_path / name / "paper"
    result = load_result(folder)
    former = [
        replace(f, claim=replace(f.claim, comment="other words")) if f.claim.key == key else f for f in result.findings
    ]
    replace(result, findings=tuple(former)).save(folder)
    done = RUNNER.invoke(app, ["study", "judge", name, "--results", str(tmp_path)])
    assert done.exit_code == 0, done.output
    assert [f.claim for f in load_result(folder).findings] == [f.claim for f in result.findings]
