"""Each check of the contract of bounds fails on a bound that breaks it: a check that cannot fail checks nothing."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import checks_bounds as checks
import pytest
from networks import mlp, regression
from references import Dense
from references_bounds import BOUND_TWINS
from test_bounds_contract import fitted

from flatscope import measuring, registry
from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.registry import Declaration, Value, bound, declarations

FACTS = {"symbol": "x", "paper": "flatscope", "equation": "none", "assumptions": ("wrong on purpose",)}
RIGHT = declarations("bound")["parameter_counting"]


@contextmanager
def declared(
    function: Callable[..., Any], twin: str | None = "parameter_counting", **facts: Any
) -> Iterator[Declaration]:
    """A bound that exists only inside the block."""
    bound(**(FACTS | facts))(function)
    if twin:
        BOUND_TWINS[function.__name__] = BOUND_TWINS[twin]
    try:
        yield declarations("bound")[function.__name__]
    finally:
        del registry._REGISTRY[function.__name__]
        BOUND_TWINS.pop(function.__name__, None)


def refused(check: Callable[..., Any], *arguments: Any, match: str) -> None:
    with pytest.raises(AssertionError, match=match):
        check(*arguments)


def wrong(ctx: Context, *, delta: float) -> float:
    """Counted weights, a part in a million too many."""
    return 1.000001 * RIGHT.function(ctx, delta=delta).value


def test_a_value_that_is_off_by_a_millionth() -> None:
    with declared(wrong) as entry:
        refused(checks.equals_its_twin, entry, Dense(mlp()), match="against")


def test_a_bound_without_a_twin() -> None:
    with declared(wrong, twin=None) as entry:
        refused(checks.equals_its_twin, entry, Dense(mlp()), match="no naive twin")


def test_a_bound_that_refuses_too_little_or_too_much() -> None:
    def never_refuses(ctx: Context, *, delta: float) -> float:
        """One, with labels and without."""
        return 1.0

    def always_refuses(ctx: Context, *, delta: float) -> float:
        """Nothing."""
        raise NotApplicable("something else")

    with declared(never_refuses, twin="rademacher_l1") as entry:
        refused(checks.equals_its_twin, entry, Dense(regression()), match="though the twin refuses")
    with declared(always_refuses) as entry:
        refused(checks.equals_its_twin, entry, Dense(mlp()), match="nan")


def test_a_bound_that_fails_where_it_should_refuse() -> None:
    def stumbles(ctx: Context, *, delta: float) -> float:
        """An error in place of a reason."""
        raise ZeroDivisionError

    with declared(stumbles, twin="rademacher_l1") as entry, pytest.warns(RuntimeWarning, match="failed"):
        refused(checks.equals_its_twin, entry, Dense(regression()), match="failed")


def test_an_error_bar_that_is_too_short() -> None:
    def overconfident(ctx: Context, *, delta: float) -> Value:
        """One percent off, with an error of one per mille."""
        value = 1.01 * RIGHT.function(ctx, delta=delta).value
        return Value(value, stderr=1e-3 * value, exact=False)

    with declared(overconfident) as entry:
        refused(checks.equals_its_twin, entry, Dense(mlp()), match="±")


def test_more_certainty_for_less() -> None:
    def backwards(ctx: Context, *, delta: float) -> float:
        """Falls where it has to rise."""
        return 1 - math.log(1 / delta)

    def uses_it(ctx: Context, *, delta: float) -> float:
        """One and a bit.

        Args:
            delta: not used.
        """
        return 1 + delta

    for function, match in ((backwards, "at a smaller one"), (uses_it, "not used, yet")):
        with declared(function) as entry:
            refused(checks.falls_with_delta, entry, mlp(), match=match)


def test_a_vacuous_bound_that_is_not_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = measuring.rows_of_result

    def unmarked(*given: Any) -> Iterator[dict[str, Any]]:
        yield from (row | {"vacuous": False} for row in whole(*given))

    monkeypatch.setattr(measuring, "rows_of_result", unmarked)
    refused(checks.is_marked_vacuous_from_one_up, RIGHT, mlp(), match="vacuous False")


def test_a_high_end_below_the_value() -> None:
    def low(ctx: Context, *, delta: float) -> Value:
        """One, and at most one half."""
        return Value(1.0, high=0.5, stderr=0.1, exact=False)

    with declared(low) as entry:
        refused(checks.is_marked_vacuous_from_one_up, entry, mlp(), match="high end")


def test_a_value_of_the_first_sample() -> None:
    def first_sample(ctx: Context, *, delta: float) -> float:
        """Loss of the first sample."""
        return float(ctx.scores().losses[0])

    def mean_of_means(ctx: Context, *, delta: float) -> float:
        """Every batch weighs the same."""
        losses = [float(ctx.problem.loss(ctx.forward(x), y).mean()) for x, y in ctx.batches()]
        return sum(losses) / len(losses)

    for function in (first_sample, mean_of_means):
        with declared(function) as entry:
            refused(checks.same_for_any_batches_and_order, entry, mlp(), match="against")


def test_a_random_value_that_is_called_exact_or_cannot_be_repeated() -> None:
    calls = itertools.count()

    def secretly_random(ctx: Context, *, delta: float) -> float:
        """Follows the seed, and says it is exact."""
        return float(ctx.seed)

    def unrepeatable(ctx: Context, *, delta: float) -> float:
        """Another number at every call."""
        return float(next(calls))

    for function, match in ((secretly_random, "called exact"), (unrepeatable, "the same seed")):
        with declared(function) as entry:
            refused(checks.seed_matters_only_to_estimates, entry, mlp(), match=match)


def test_a_symmetry_that_is_boasted_of_or_kept_quiet() -> None:
    with declared(wrong) as entry:
        refused(checks.keeps_its_symmetries, entry, fitted(), "unit_scaling", match="not declared invariant")

    def of_the_norm(ctx: Context, *, delta: float) -> float:
        """Length of the weights."""
        return sum(float(value.square().sum()) for value in ctx.params.values())

    with declared(of_the_norm, invariant_under={"unit_scaling"}) as entry:
        refused(checks.keeps_its_symmetries, entry, fitted(), "unit_scaling", match="declared invariant")


def test_an_option_that_nobody_explains_or_that_does_nothing() -> None:
    def idle(ctx: Context, *, delta: float, bits: int = 32) -> float:
        """Counted weights."""
        return float(RIGHT.function(ctx, delta=delta).value)

    with declared(idle) as entry:
        refused(checks.declares_itself, entry, match="not documented")
        refused(checks.moves_with, entry, Dense(mlp()), "bits", 8, {}, match="against")


def test_a_good_bound_passes() -> None:
    for check in (checks.is_marked_vacuous_from_one_up, checks.falls_with_delta, checks.same_for_any_batches_and_order):
        check(RIGHT, mlp())
