"""Verdicts follow one rule, fixed before the runs; results survive the disk."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
from matplotlib.figure import Figure

from flatscope.errors import DataFileError, InputError, UnknownNameError
from flatscope_papers import study as run_study
from flatscope_papers.claims import (
    NEGATIVE,
    NOT_JUDGED,
    NOT_REPRODUCED,
    PARTLY,
    POSITIVE,
    REPRODUCED,
    Answer,
    Claim,
    counted,
    judge,
)
from flatscope_papers.declaration import Analysis, Study
from flatscope_papers.reproduction import latest, load_results
from flatscope_papers.study_result import StudyResult, answer_text
from flatscope_papers.study_runs import judged
from flatscope_papers.tables import Words

CLAIM = Claim("size", "Figure 1", "it is near two", "a size", "2.0", holds=(1.9, 2.1), partly=POSITIVE)


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (2.0, 1.95, 2.05, REPRODUCED),
        (2.0, 1.9, 2.1, REPRODUCED),  # the ends belong to the range
        (2.0, 2.0, 2.0, REPRODUCED),
        (2.0, 1.8, 2.2, PARTLY),  # the value holds, its interval reaches out
        (2.0, None, None, PARTLY),  # one run has no interval
        (3.0, 2.5, 3.5, PARTLY),  # only the sign is right
        (3.0, None, None, NOT_REPRODUCED),
        (0.5, -0.1, 1.1, NOT_REPRODUCED),
        (-1.0, -2.0, -0.5, NOT_REPRODUCED),
        (math.nan, None, None, NOT_JUDGED),
        (math.inf, math.inf, math.inf, PARTLY),
    ],
)
def test_verdicts(value: float, low: float | None, high: float | None, verdict: str) -> None:
    assert judge(CLAIM, Answer(value, low, high), "small").verdict == verdict
    assert judge(CLAIM, Answer(value, low, high), "paper").verdict == verdict
    assert judge(CLAIM, Answer(value, low, high), "smoke").verdict == NOT_JUDGED


def test_without_a_wider_range_only_the_value_can_save_it() -> None:
    strict = Claim("size", "Figure 1", "it is near two", "a size", "2.0", holds=(1.9, 2.1))
    assert judge(strict, Answer(3.0, 2.5, 3.5), "small").verdict == NOT_REPRODUCED


@pytest.mark.parametrize(
    "ranges", [{"holds": (2.0, 1.0)}, {"holds": (1.0, 2.0), "partly": (1.5, 3.0)}, {"holds": (math.nan, 1.0)}]
)
def test_ranges_that_cannot_be_meant(ranges: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        Claim("size", "Figure 1", "it is near two", "a size", "2.0", **ranges)


def draw(figure: Figure) -> None:
    figure.subplots().plot([0, 1], [0, 1])


def declared(**changes: Any) -> Study:
    settings: dict[str, Any] = {
        "name": "zhang2017-fig0",
        "paper": "zhang2017",
        "words": Words("Figure 0", "Nothing", (CLAIM,), {"small": ("fewer networks",)}, "", {}),
        "stages": lambda scale: [],
        "analyse": lambda runs: None,
    }
    return Study(**settings | changes)


def result(answer: Answer, scale: str = "small") -> StudyResult:
    analysis = Analysis(pd.DataFrame({"x": [1.0, 2.5]}), {"size": answer}, draw, notes=("all well",))
    facts = {"seconds": 1.0, "device": "a CPU", "date": "2026-01-01", "command": "flatscope study run x"}
    return judged(declared(), scale, analysis, facts)


@pytest.mark.parametrize(
    "answer", [Answer(2.0, 1.95, 2.05, runs=5), Answer(math.nan, note="none"), Answer(math.inf, 1.0, math.inf)]
)
def test_a_result_comes_back_from_the_disk_as_it_was(tmp_path: Path, answer: Answer) -> None:
    written = result(answer)
    read = StudyResult.load(written.save(tmp_path / "r"))
    assert repr(read.findings) == repr(written.findings)
    assert (read.svg, read.png, read.notes, read.deviations) == (
        written.svg,
        written.png,
        written.notes,
        written.deviations,
    )
    pd.testing.assert_frame_equal(read.table, written.table)
    json.loads((tmp_path / "r" / "verdicts.json").read_text(), parse_constant=pytest.fail)


def test_the_same_figure_is_the_same_file() -> None:
    assert result(Answer(2.0)).svg == result(Answer(2.0)).svg


@pytest.mark.parametrize("left", [0, 100, "null", '"words"', "[]"])
def test_a_torn_result_is_refused(tmp_path: Path, left: int | str) -> None:
    folder = result(Answer(2.0)).save(tmp_path / "a-study" / "small")
    text = (folder / "verdicts.json").read_text()
    (folder / "verdicts.json").write_text(left if isinstance(left, str) else text[:left])
    with pytest.raises(DataFileError, match="flatscope study run a-study --scale small"):
        StudyResult.load(folder)


@pytest.mark.parametrize("found", [{}, {"size": Answer(1.0), "other": Answer(1.0)}])
def test_every_claim_must_be_answered_and_no_other(found: dict[str, Answer]) -> None:
    with pytest.raises(InputError, match="zhang2017-fig0"):
        judged(declared(), "small", Analysis(pd.DataFrame(), found, draw), {})


def test_smoke_results_do_not_reach_the_page(tmp_path: Path) -> None:
    smoke, small = result(Answer(2.0, 2.0, 2.0), "smoke"), result(Answer(3.0), "small")
    for found in (smoke, small):
        found.save(tmp_path / found.name / found.scale)
    loaded = load_results(tmp_path)[small.name]
    assert latest(loaded) is loaded["small"]
    assert latest({"smoke": smoke}) is None


def test_estimates_in_words() -> None:
    assert answer_text(Answer(0.91234567, 0.85, 0.95)) == "0.9123 [0.85, 0.95]"
    assert answer_text(Answer.exact(43758)) == "43,758 (exact)"
    assert answer_text(Answer(1.5)) == "1.5 (one run, no interval)"
    assert answer_text(Answer(1.5, runs=3)) == "1.5 (3 runs, no interval)"
    assert answer_text(Answer(math.nan)) == "—"


def test_verdicts_are_counted_in_words() -> None:
    assert counted([PARTLY, REPRODUCED, REPRODUCED]) == "2 reproduced, 1 partly"
    assert counted([]) == "no claims"


@pytest.mark.parametrize(
    ("facts", "words"),
    [
        ({"configurations": 5, "of which run now": 5}, "small scale, 1 s on a CPU, 2026-01-01"),
        ({"configurations": 5, "of which run now": 2}, "1 s on a CPU, 2026-01-01; 3 of 5 trials were there already"),
        ({"configurations": 5, "of which run now": 0}, "analysed again on 2026-01-01 from 5 stored trials"),
        ({"configurations": 5, "of which run now": 0, "stored on": "2025-01-01"}, "5 stored trials of 2025-01-01"),
        ({}, "small scale, 1 s on a CPU, 2026-01-01"),
    ],
)
def test_seconds_of_reading_the_store_are_not_told_as_a_cost(facts: dict[str, Any], words: str) -> None:
    found = result(Answer(2.0))
    told = replace(found, provenance={**found.provenance, **facts}).how
    assert words in told
    assert ("1 s" in told) == (facts.get("of which run now", 1) > 0)


def test_unknown_study_and_scale() -> None:
    with pytest.raises(UnknownNameError):
        run_study("zhang2017-fig999")
    with pytest.raises(UnknownNameError):
        run_study("zhang2017-fig999", "large")


def test_a_rule_in_words() -> None:
    def rule(holds: tuple[float, float], partly: tuple[float, float] | None = None) -> str:
        return Claim("k", "w", "s", "n", "r", holds=holds, partly=partly).rule

    assert rule(POSITIVE) == "holds above 0"
    assert rule(NEGATIVE, (-math.inf, 0.5)) == "holds below 0; in part at most 0.5"
    assert rule((0.86, 0.96), (0.7, 1.0)) == "holds from 0.86 to 0.96; in part from 0.7 to 1"
    assert rule((1209866, 1209866)) == "holds at 1,209,866"
    assert rule((0.95, math.inf)) == "holds at least 0.95"


@pytest.mark.parametrize(
    ("low", "high", "seen", "undecided"),
    [(-1.0, -0.1, "", False), (-1.0, 0.2, "", True), (-1.0, 0.2, "networks", False), (None, None, "", False)],
)
def test_what_more_runs_could_turn_is_undecided(
    low: float | None, high: float | None, seen: str, undecided: bool
) -> None:
    finding = judge(Claim("k", "w", "s", "n", "r", holds=POSITIVE), Answer(-0.5, low, high, seen=seen), "small")
    assert finding.verdict == NOT_REPRODUCED
    assert finding.undecided == undecided
    partly = judge(Claim("k", "w", "s", "n", "r", holds=(-0.6, 1.0)), Answer(-0.5, -1.0, 0.2), "small")
    assert not partly.undecided
