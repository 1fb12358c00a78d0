"""The three demands of Neyshabur et al. (2017) on a complexity measure, with verdicts by hand."""

from __future__ import annotations

import math

import pytest

from flatscope.errors import InputError
from flatscope_papers.neyshabur2017.desiderata import DEMANDS, desiderata


def test_verdicts_on_planted_results() -> None:
    table = desiderata(
        true_labels={"good": [1, 2, 3], "bad": [1, 2, 3]},
        random_labels={"good": [2, 3, 4], "bad": [2, 1, 2]},
        by_width={"good": [5, 4, 3, 9], "bad": [5, 6, 5, 1]},
        width_test_errors=[0.3, 0.2, 0.1, 0.1],
        solutions={"good": [1, 2, 3, 4, 5, 6], "bad": [6, 5, 4, 3, 2, 1], "flat": [1.0] * 6},
        solution_test_errors=[0.1, 0.2, 0.3, 0.4, 0.5, 0.6],
    )
    verdicts = {(row["measure"], row["demand"]): row["verdict"] for _, row in table.iterrows()}
    assert all(verdicts["good", demand] == "met" for demand in DEMANDS)
    assert verdicts["bad", DEMANDS[0]] == verdicts["bad", DEMANDS[2]] == verdicts["flat", DEMANDS[2]] == "not met"
    assert verdicts["bad", DEMANDS[1]] == "not met"  # falls in one of two steps only: no better than chance


def test_what_cannot_be_judged_says_so() -> None:
    table = desiderata(
        true_labels={"a": [math.nan]},
        random_labels={"a": [1.0]},
        by_width={"a": [1, 2]},
        width_test_errors=[0.1, 0.2],
        solutions={"a": [1, 2]},
        solution_test_errors=[0.1, 0.2],
    )
    assert list(table["verdict"]) == ["not judged"] * 3
    assert (table["reason"] != "").all()
    with pytest.raises(InputError, match="as many values"):
        desiderata(true_labels={"a": [1.0]})
