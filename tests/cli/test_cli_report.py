"""`flatscope report` with folders of studies, and numbers of things in what commands say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from flatscope.cli.app import app
from flatscope.cli.run_measure import Fit
from flatscope.errors import InputError
from flatscope.formatting import numbered
from flatscope.reports.page import UNKNOWN
from flatscope_papers.study_result import StudyResult

STUDY = "petzka2019-ridge"


@pytest.fixture
def results(tmp_path: Path) -> Path:
    small = StudyResult.load(Path(__file__).parents[2] / "src" / "flatscope_papers" / "results" / STUDY / "small")
    for scale in ("small", "paper"):
        replace(small, scale=scale).save(tmp_path / "results" / STUDY / scale)
    return tmp_path / "results"


def report(*words: str | Path) -> Result:
    return CliRunner().invoke(app, ["report", *map(str, words)], catch_exceptions=False)


@pytest.mark.parametrize("name", ["", "mine="])
def test_the_folder_of_a_study_stands_for_its_scales(results: Path, tmp_path: Path, name: str) -> None:
    assert report(f"{name}{results / STUDY}", "--out", tmp_path / "all.html").exit_code == 0
    page = (tmp_path / "all.html").read_text(encoding="utf-8")
    assert [f"study run {STUDY} --scale {scale}" in page for scale in ("small", "paper")] == [True, True]
    assert report(results / STUDY / "small", "--out", tmp_path / "one.html").exit_code == 0
    page = (tmp_path / "one.html").read_text(encoding="utf-8")
    assert [f"study run {STUDY} --scale {scale}" in page for scale in ("small", "paper")] == [True, False]


def test_a_folder_of_many_studies_comes_with_the_command_for_them(results: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"study export report.html --results {results}"):
        report(results, "--out", tmp_path / "r.html")
    with pytest.raises(InputError, match="nothing there"):
        report(tmp_path / "nothere", "--out", tmp_path / "r.html")


def test_the_help_names_folders_of_studies() -> None:
    assert "results/NAME" in " ".join(report("--help").output.split())


def test_one_of_a_thing_is_said_as_one() -> None:
    assert [numbered(number, "trial") for number in (0, 1, 2)] == ["0 trials", "1 trial", "2 trials"]
    fit = Fit("mine", "as they are", 1, 0, UNKNOWN)
    assert "1 training sample, " in str(fit)


def test_the_answer_is_said_and_not_only_written(tmp_path: Path) -> None:
    """Of a table of many networks, as `flatscope sweep export` writes it."""
    table = tmp_path / "many.csv"
    rows = [f"{place / 10},{place % 3}" for place in range(12)]
    table.write_text("\n".join(["rho_sum,generalization_gap", *rows]))
    said = report(table, "--out", tmp_path / "page.html").output
    assert "No measure" in said
    assert "more networks" in said
