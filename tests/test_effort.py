"""How much a measurement may cost: what people write, and what is refused."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.context import Context, bytes_from_memory, make_effort, seconds_from_budget
from flatscope.errors import InputError
from flatscope.formatting import time_in_words

pytestmark = pytest.mark.fast


@pytest.fixture
def problem() -> fs.Problem:
    torch.manual_seed(0)
    return fs.Problem(nn.Linear(3, 2), (torch.eye(3), torch.tensor([0, 1, 0])))


@pytest.mark.parametrize(
    ("written", "seconds"), [("90s", 90), ("10m", 600), ("2h", 7200), ("1.5 h", 5400), ("45", 45), (7, 7), (0.5, 0.5)]
)
def test_times_are_read_as_people_write_them(written: float | str, seconds: float) -> None:
    assert seconds_from_budget(written) == seconds


@pytest.mark.parametrize(
    ("written", "size"), [("8GiB", 8 * 2**30), ("500MB", 500_000_000), ("2 g", 2 * 2**30), ("64KiB", 65536), (100, 100)]
)
def test_memory_is_read_as_people_write_it(written: int | str, size: int) -> None:
    assert bytes_from_memory(written) == size


@pytest.mark.parametrize("written", ["", "10 parsecs", "-5m", "0s", 0, -1, float("nan"), float("inf"), True, "m"])
def test_a_budget_that_is_no_time_is_refused_with_examples(problem: fs.Problem, written: Any) -> None:
    with pytest.raises(InputError, match=r'budget: expected "90s", "10m", "2h"'):
        fs.measure(problem, "parameter_count", budget=written)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"precision": -0.1}, "precision: expected a relative standard error"),
        ({"precision": 1.0}, "precision: expected a relative standard error"),
        ({"precision": float("nan")}, "precision: expected a relative standard error"),
        ({"precision": "2%"}, "precision: expected a relative standard error"),
        ({"memory": "8 apples"}, 'memory: expected "8GiB"'),
        ({"curvature": "gauss-newton"}, "gauss_newton"),
    ],
)
def test_other_limits_are_checked_as_well(problem: fs.Problem, options: dict[str, Any], message: str) -> None:
    for function in (fs.measure, fs.bounds):
        with pytest.raises(InputError, match=message):
            function(problem, **options)


def test_the_time_of_a_budget_runs_from_the_call_on() -> None:
    begun = time.monotonic()
    effort = make_effort(budget="10m", memory="1GiB", precision=0.1, curvature="gauss_newton")
    assert effort.deadline is not None
    assert begun + 600 <= effort.deadline < begun + 610
    assert (effort.memory, effort.precision, effort.curvature) == (2**30, 0.1, "gauss_newton")


def test_a_context_brings_its_own_effort(problem: fs.Problem) -> None:
    context = Context(problem, effort=make_effort(precision=0.5))
    assert len(fs.measure(problem, "parameter_count", context=context)) == 1
    with pytest.raises(InputError, match="beside a context"):
        fs.measure(problem, "parameter_count", precision=0.1, context=context)


def test_a_context_of_another_problem_is_refused(problem: fs.Problem) -> None:
    other = fs.Problem(nn.Linear(3, 2), (torch.eye(3), torch.tensor([0, 1, 0])))
    with pytest.raises(InputError, match="a context of this problem"):
        fs.measure(problem, "parameter_count", context=Context(other))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.2, "1 s"), (42, "42 s"), (240, "4 min"), (99, "99 s"), (9000, "2 h"), (10**6, "278 h")],
)
def test_times_are_told_in_one_unit(seconds: float, text: str) -> None:
    assert time_in_words(seconds) == text
