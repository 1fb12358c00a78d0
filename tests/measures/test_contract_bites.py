"""Each check of the contract fails on a measure that breaks it: a check that cannot fail checks nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import checks
import pytest
import references
import torch
from networks import attending, batchnorm_conv, mlp, smooth
from references import Dense, dense

from flatscope import isolation, problem, registry
from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.registry import Declaration, Value, declarations, measure

FACTS = {"symbol": "x", "paper": "flatscope", "equation": "none", "conventions": "wrong on purpose"}


@contextmanager
def declared(function: Callable[..., Any], twin: str | None = None, **facts: Any) -> Iterator[Declaration]:
    """A measure that exists only inside the block."""
    measure(**(FACTS | facts))(function)
    if twin:
        references.TWINS[function.__name__] = references.TWINS[twin]
    try:
        yield declarations()[function.__name__]
    finally:
        del registry._REGISTRY[function.__name__]
        references.TWINS.pop(function.__name__, None)


def refused(check: Callable[..., None], *arguments: Any, match: str, **options: Any) -> None:
    with pytest.raises(AssertionError, match=match):
        check(*arguments, **options)


def test_a_value_that_is_off_by_one_percent() -> None:
    def wrong_trace(ctx: Context) -> float:
        """Trace, one percent too large."""
        return 1.01 * float((Hessian(ctx) @ torch.eye(Hessian(ctx).size)).trace())

    with declared(wrong_trace, twin="hessian_trace") as entry:
        refused(checks.equals_its_twin, entry, dense("mlp", mlp), match="against")


def test_a_measure_without_a_twin() -> None:
    def without_twin(ctx: Context) -> float:
        """No twin."""
        return 1.0

    with declared(without_twin) as entry:
        refused(checks.equals_its_twin, entry, Dense(mlp()), match="no naive twin")


def test_an_exact_value_with_a_standard_error() -> None:
    def exact_with_error(ctx: Context) -> Value:
        """Exact, yet with an error."""
        return Value(float(sum(v.numel() for v in ctx.params.values())), stderr=0.5, exact=True)

    with declared(exact_with_error, twin="parameter_count") as entry:
        refused(checks.equals_its_twin, entry, Dense(mlp()), match="yet with a standard error")


def test_an_error_bar_that_is_too_short() -> None:
    def overconfident(ctx: Context) -> Value:
        """An estimate five percent off with an error of one per mille."""
        value = 1.05 * float((Hessian(ctx) @ torch.eye(Hessian(ctx).size)).trace())
        return Value(value, stderr=1e-3 * value, exact=False)

    with declared(overconfident, twin="hessian_trace", exact=False) as entry:
        refused(checks.equals_its_twin, entry, dense("mlp", mlp), match="±")


def test_a_mean_of_batch_means() -> None:
    def mean_of_means(ctx: Context) -> float:
        """Every batch weighs the same, however small."""
        means = [ctx.problem.loss(ctx.forward(x), y).mean() for x, y in ctx.batches()]
        return float(torch.stack(means).mean())

    with declared(mean_of_means) as entry:
        refused(checks.same_for_any_batches, entry, mlp(), match="ragged")


def test_a_value_that_depends_on_the_first_sample() -> None:
    def first_sample(ctx: Context) -> float:
        """Loss of the first sample."""
        return float(ctx.scores().losses[0])

    with declared(first_sample) as entry:
        refused(checks.same_for_any_order, entry, mlp(), match="order")


def test_a_sum_in_place_of_a_mean() -> None:
    def summed(ctx: Context) -> float:
        """Sum of the losses."""
        return float(ctx.scores().losses.sum())

    with declared(summed) as entry:
        refused(checks.same_for_repeated_data, entry, mlp(), match="repeated")


def test_a_random_value_that_is_called_exact() -> None:
    def secretly_random(ctx: Context) -> float:
        """Random, but says it is exact."""
        return float(torch.rand(1, generator=ctx.generator("secret")))

    with declared(secretly_random) as entry:
        refused(checks.seed_matters_only_to_estimates, entry, mlp(), match="called exact")


def test_a_value_that_the_seed_does_not_repeat() -> None:
    calls = itertools.count()

    def unrepeatable(ctx: Context) -> Value:
        """Different every time."""
        return Value(float(next(calls)), stderr=10.0, exact=False)

    with declared(unrepeatable, exact=False) as entry:
        refused(checks.seed_matters_only_to_estimates, entry, mlp(), match="same seed")


def test_two_seeds_that_disagree() -> None:
    def scattered(ctx: Context) -> Value:
        """Seeds far apart, errors tiny."""
        return Value(float(ctx.seed), stderr=1e-3, exact=False)

    with declared(scattered, exact=False) as entry:
        refused(checks.seed_matters_only_to_estimates, entry, mlp(), match="two seeds differ")


def test_a_measure_that_uses_up_global_randomness(monkeypatch: pytest.MonkeyPatch) -> None:
    def draws_globally(ctx: Context) -> float:
        """Draws from the global generator."""
        return float(torch.rand(1))

    with declared(draws_globally) as entry:
        checks.leaves_everything_untouched(entry, mlp())  # the guard around every measure puts it back
        monkeypatch.setattr(isolation, "untouched_randomness", lambda *_: nullcontext())
        refused(checks.leaves_everything_untouched, entry, mlp(), match="torch rng was changed|loader rng was changed")


def test_a_measure_that_changes_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    def changes_weights(ctx: Context) -> float:
        """Moves the weights of the module it was given."""
        for parameter in ctx.problem.model.parameters():
            parameter.data += 1.0
        return 1.0

    with declared(changes_weights) as entry:
        checks.leaves_everything_untouched(entry, mlp())  # it got a copy
        monkeypatch.setattr(problem, "independent_copy", lambda model: model)
        refused(checks.leaves_everything_untouched, entry, mlp(), match="was changed")


def test_a_measure_that_costs_more_than_it_declares() -> None:
    def expensive(ctx: Context) -> float:
        """Two passes, declared as one."""
        for _ in range(2):
            for x, y in ctx.batches():
                ctx.forward(x)
                ctx.charge_passes("forward", len(y))
        return 1.0

    with declared(expensive, passes={"forward": 1}) as entry:
        refused(checks.costs_what_it_declares, entry, mlp(), match="passes")


def test_a_value_that_float32_destroys() -> None:
    def cancels(ctx: Context) -> float:
        """A small difference of large numbers."""
        loss = torch.cat([ctx.problem.loss(ctx.forward(x), y) for x, y in ctx.batches()]).mean()
        return float((loss + 1e6) - 1e6)

    with declared(cancels) as entry:
        refused(checks.close_in_float32, entry, mlp(), match="float32")


def test_declarations_that_say_too_little() -> None:
    def undocumented(ctx: Context, *, knob: int = 1) -> float:
        """An option that nobody explains."""
        return float(knob)

    with declared(undocumented) as entry:
        refused(checks.declares_itself, entry, match="not documented")
    with declared(undocumented, conventions="") as entry:
        refused(checks.declares_itself, entry, match="no conventions")


@pytest.mark.parametrize(
    ("like", "symmetry", "tiny"),
    [
        ("hessian_trace", "layer_scaling", mlp),
        ("hessian_trace", "unit_scaling", mlp),
        ("gradient_norm", "batchnorm_scaling", batchnorm_conv),
        ("hessian_max_eigenvalue", "attention_scaling", attending),
        ("gradient_norm", "norm_scaling", attending),
        ("margin", "output_scaling", mlp),
    ],
)
def test_an_invariance_that_does_not_hold(like: str, symmetry: str, tiny: Callable[[], Any]) -> None:
    right = declarations()[like]

    def boastful(ctx: Context) -> Any:
        """Claims a symmetry that it does not have."""
        return right.function(ctx)

    with declared(boastful, invariant_under={symmetry}) as entry:
        refused(checks.keeps_its_symmetries, entry, tiny(), symmetry, match="declared invariant")


@pytest.mark.parametrize("symmetry", ["layer_scaling", "unit_scaling", "permutation"])
def test_an_invariance_that_is_not_declared(symmetry: str) -> None:
    def modest(ctx: Context) -> float:
        """Depends on the function alone, and does not say so."""
        return ctx.scores().loss

    with declared(modest) as entry:
        refused(checks.keeps_its_symmetries, entry, mlp(), symmetry, match="not declared")


def test_a_permutation_that_moves_a_value() -> None:
    def ordered(ctx: Context) -> float:
        """Looks at one weight by its place."""
        return float(ctx.params["2.weight"][0, 0])

    with declared(ordered, invariant_under={"permutation"}) as entry:
        refused(checks.keeps_its_symmetries, entry, mlp(), "permutation", match="declared invariant")


@pytest.mark.parametrize(("factor", "match"), [(0.2, "cover the true value"), (10.0, "times too large")])
def test_standard_errors_of_the_wrong_size(factor: float, match: str) -> None:
    def misjudged(ctx: Context) -> Value:
        """A good estimate with a bad error."""
        return Value(float(torch.randn(1, generator=ctx.generator("m"))), stderr=factor, exact=False)

    with declared(misjudged, exact=False) as entry:
        refused(checks.standard_error_covers, entry, smooth(), 0.0, match=match)


def test_a_good_measure_passes() -> None:
    for check in (checks.same_for_any_batches, checks.same_for_any_order, checks.costs_what_it_declares):
        check(declarations()["gradient_norm"], mlp())
    checks.equals_its_twin(declarations()["gradient_norm"], dense("mlp", mlp))
