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
    CONTRADICTED,
    ERRATUM,
    HOLDS,
    INCONCLUSIVE,
    NEGATIVE,
    NOT_JUDGED,
    POSITIVE,
    REMARK,
    UNTESTABLE,
    Answer,
    Claim,
    finding_of_claim,
    verdict_counts_in_words,
)
from flatscope_papers.declaration import Analysis, Study
from flatscope_papers.reproduction import load_results, result_at_largest_scale
from flatscope_papers.study_result import StudyResult, answer_text
from flatscope_papers.study_runs import judged_study_result
from flatscope_papers.toml_files import Words

CLAIM = Claim("size", "Figure 1", "it is near two", "a size", "2.0", holds=(1.9, 2.1), partly=POSITIVE)


@pytest.mark.parametrize(
    ("value", "low", "high", "verdict"),
    [
        (2.0, 1.95, 2.05, HOLDS),
        (2.0, 1.9, 2.1, HOLDS),  # the ends belong to the range
        (2.0, 2.0, 2.0, HOLDS),
        (2.0, 1.8, 2.2, INCONCLUSIVE),  # the value holds, its interval reaches out
        (2.0, None, None, INCONCLUSIVE),  # one run has no interval
        (3.0, None, None, INCONCLUSIVE),
        (1.8, 1.5, 1.95, INCONCLUSIVE),  # the value does not hold, its interval reaches in
        (3.0, 2.5, 3.5, CONTRADICTED),
        (-1.0, -2.0, -0.5, CONTRADICTED),
        (math.nan, None, None, UNTESTABLE),
        (math.inf, math.inf, math.inf, CONTRADICTED),
    ],
)
def test_verdicts(value: float, low: float | None, high: float | None, verdict: str) -> None:
    assert finding_of_claim(CLAIM, Answer(value, low, high), "small").verdict == verdict
    assert finding_of_claim(CLAIM, Answer(value, low, high), "paper").verdict == verdict
    assert finding_of_claim(CLAIM, Answer(value, low, high), "smoke").verdict == NOT_JUDGED


@pytest.mark.parametrize("value", [0.07, -0.07])
def test_noise_around_zero_is_inconclusive_whatever_its_sign(value: float) -> None:
    for holds in (POSITIVE, NEGATIVE):
        claim = Claim("sign", "Figure 1", "it has a sign", "a difference", "more", holds=holds)
        assert finding_of_claim(claim, Answer(value, value - 0.4, value + 0.4), "small").verdict == INCONCLUSIVE


def test_one_network_contradicts_a_claim_about_every_one() -> None:
    claim = Claim("most", "Figure 1", "never above one", "largest", "1", holds=(0.0, 1.0))
    assert finding_of_claim(claim, Answer(1.2, 0.1, 1.2, 20, seen="networks"), "small").verdict == CONTRADICTED
    assert finding_of_claim(claim, Answer(1.2, 0.1, 2.3, 20), "small").verdict == INCONCLUSIVE
    assert finding_of_claim(claim, Answer(0.9, 0.1, 0.9, 20, seen="networks"), "small").verdict == HOLDS


@pytest.mark.parametrize(
    ("answer", "in_part"),
    [
        (Answer(3.0, 2.5, 3.5), True),
        (Answer(2.0, 1.5, 2.5), True),  # inconclusive, and of the right sign all the same
        (Answer(2.0, 1.95, 2.05), False),  # holds, not only in part
        (Answer(0.5, -0.1, 1.1), False),
        (Answer(3.0), False),
    ],
)
def test_the_wider_range_is_told_and_changes_no_verdict(answer: Answer, in_part: bool) -> None:
    assert finding_of_claim(CLAIM, answer, "small").holds_in_wider_range == in_part
    strict = replace(CLAIM, partly=None)
    assert finding_of_claim(strict, answer, "small").verdict == finding_of_claim(CLAIM, answer, "small").verdict
    assert not finding_of_claim(strict, answer, "small").holds_in_wider_range


def test_remarks_have_no_verdict_and_slips_are_outside_the_counts() -> None:
    remark, slip = (replace(CLAIM, kind=kind, comment="for a reason") for kind in (REMARK, ERRATUM))
    assert finding_of_claim(remark, Answer(2.0, 1.95, 2.05), "small").verdict == NOT_JUDGED
    assert finding_of_claim(slip, Answer(3.0, 2.5, 3.5), "small").verdict == CONTRADICTED
    assert [finding_of_claim(claim, Answer(2.0), "small").counts for claim in (CLAIM, remark, slip)] == [
        True,
        False,
        False,
    ]
    for changes in ({"kind": REMARK}, {"kind": ERRATUM}, {"comment": "of no use"}, {"kind": "other"}):
        with pytest.raises(InputError):
            replace(CLAIM, **changes)


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
    return judged_study_result(declared(), scale, analysis, facts)


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
        judged_study_result(declared(), "small", Analysis(pd.DataFrame(), found, draw), {})


def test_smoke_results_do_not_reach_the_page(tmp_path: Path) -> None:
    smoke, small = result(Answer(2.0, 2.0, 2.0), "smoke"), result(Answer(3.0), "small")
    for found in (smoke, small):
        found.save(tmp_path / found.name / found.scale)
    loaded = load_results(tmp_path)[small.name]
    assert result_at_largest_scale(loaded) is loaded["small"]
    assert result_at_largest_scale({"smoke": smoke}) is None


def test_estimates_in_words() -> None:
    assert answer_text(Answer(0.91234567, 0.85, 0.95)) == "0.9123 [0.85, 0.95]"
    assert answer_text(Answer.exact(43758)) == "43,758 (exact)"
    assert answer_text(Answer(1.5)) == "1.5 (one run, no interval)"
    assert answer_text(Answer(1.5, runs=3)) == "1.5 (3 runs, no interval)"
    assert answer_text(Answer(math.nan)) == "—"


def test_verdicts_are_counted_in_words() -> None:
    assert verdict_counts_in_words([CONTRADICTED, HOLDS, HOLDS]) == "holds 2, contradicted 1"
    assert verdict_counts_in_words([]) == "no claims"


def test_the_verdict_of_a_file_is_that_of_its_answer(tmp_path: Path) -> None:
    """Files of other versions have other words, and a word that somebody wrote there decides nothing."""
    folder = result(Answer(2.0, 1.95, 2.05)).save(tmp_path / "r")
    saved = json.loads((folder / "verdicts.json").read_text())
    # 0.1 had no checksums
    old = {name: value for name, value in saved.items() if name not in ("checksum", "has checksum", "files")}
    old["findings"][0]["verdict"] = "reproduced"
    (folder / "verdicts.json").write_text(json.dumps(old))
    assert [finding.verdict for finding in StudyResult.load(folder).findings] == [HOLDS]


def test_a_result_without_pictures_can_be_kept(tmp_path: Path) -> None:
    folder = result(Answer(2.0)).save(tmp_path / "r")
    for name in ("figure.svg", "figure.png"):
        (folder / name).unlink()
    assert (StudyResult.load(folder).svg, StudyResult.load(folder).png) == ("", b"")
    StudyResult.load(folder).save(tmp_path / "again")
    assert sorted(path.name for path in (tmp_path / "again").iterdir()) == ["table.csv", "verdicts.json"]


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
    assert rule((POSITIVE[0], 0.1), POSITIVE) == "holds above 0, at most 0.1; in part above 0"
    assert rule((0.95, math.inf)) == "holds at least 0.95"
