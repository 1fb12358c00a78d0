"""The answer that a comparison gives: which network is flatter, by which measures, and how surely."""

from __future__ import annotations

import math
from typing import Any

import pytest
from test_report import row

from flatscope.comparing.comparison import Comparison
from flatscope.comparing.verdicts import SameFunction, Standing
from flatscope.table import Table


def comparison(*networks: dict[str, tuple[float, float]], losses: tuple[float, ...] = (), **more: Any) -> Comparison:
    """Networks a, b, … by {measure: (value, standard error)}, all of one architecture and at a loss of 0.1."""
    names = "abc"[: len(networks)]
    tables = {
        name: Table([row(m, v, stderr=e, exact=e == 0) for m, (v, e) in values.items()])
        for name, values in zip(names, networks, strict=True)
    }
    at = losses or (0.1,) * len(networks)
    standings = {
        n: Standing("net", 9, loss, 0.0, loss, 0.0, rescalable=True) for n, loss in zip(names, at, strict=True)
    }
    return Comparison(tables, standings, meta={"loss": "cross_entropy"}, **more)


def test_the_flatter_network_is_named_with_factor_and_error() -> None:
    found = comparison(
        {"rho_sum": (1.0, 0.05), "psi_trace": (10.0, 0.0), "hessian_trace": (9.0, 0.0)},
        {"rho_sum": (2.0, 0.1), "psi_trace": (30.0, 0.0), "hessian_trace": (1.0, 0.0)},
    ).conclusion
    assert (found.code, found.winner) == ("flatter", "a")
    assert [voice.measure for voice in found.voices] == ["rho_sum", "psi_trace"]  # the trace is moved by rescaling
    assert found.voices[0].factor == pytest.approx(2.0)
    assert found.voices[0].stderr == pytest.approx(2 * math.hypot(0.05, 0.05))
    assert found.voices[1].stderr == 0.0
    for words in ("a is flatter than b", "2.00 ± 0.14 times", "rho_sum", "3 times", "psi_trace"):
        assert words in str(found)


@pytest.mark.parametrize(
    ("first", "second", "code", "winner"),
    [
        ({"rho_sum": (1.0, 0.5)}, {"rho_sum": (1.3, 0.5)}, "alike", ""),
        ({"rho_sum": (1.0, 0.0)}, {"rho_sum": (1.05, 0.0)}, "alike", ""),  # no error known: a rule of thumb
        (
            {"rho_sum": (1.0, 0.0), "psi_trace": (5.0, 0.0)},
            {"rho_sum": (2.0, 0.0), "psi_trace": (1.0, 0.0)},
            "split",
            "",
        ),
        ({"hessian_trace": (1.0, 0.0)}, {"hessian_trace": (2.0, 0.0)}, "untold", ""),
        ({"margin": (1.0, 0.0)}, {"margin": (2.0, 0.0)}, "untold", ""),  # no measure of flatness
        ({"rho_sum": (-1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}, "flatter", "a"),
    ],
)
def test_what_is_not_clear_is_not_said(first: Any, second: Any, code: str, winner: str) -> None:
    found = comparison(first, second).conclusion
    assert (found.code, found.winner) == (code, winner)


def test_losses_far_apart_leave_the_question_open() -> None:
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}, losses=(0.1, 0.9)).conclusion
    assert found.code == "untold"
    assert "loss" in str(found)


def test_copies_are_one_function() -> None:
    pair = SameFunction("a", "b", 0.0, 50, "units rescaled")
    found = comparison({"rho_sum": (1.0, 0.0)}, {"rho_sum": (1.0, 0.0)}, same_function=[pair]).conclusion
    assert found.code == "one function"


def test_of_several_the_flattest_is_compared_with_the_next() -> None:
    found = comparison({"rho_sum": (3.0, 0.0)}, {"rho_sum": (1.0, 0.0)}, {"rho_sum": (2.0, 0.0)}).conclusion
    assert (found.code, found.winner) == ("flatter", "b")
    assert (found.voices[0].next, found.voices[0].factor) == ("c", 2.0)
