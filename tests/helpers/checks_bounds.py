"""The contract that every bound keeps, as functions that raise AssertionError; driven by its declaration."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from typing import Any, NamedTuple

import checks
from networks import Tiny
from references import Dense
from references_bounds import BOUND_TWINS, AssumptionFailsError
from references_bounds_noise import Estimate, Trained

import flatscope as fs
from flatscope.context import make_effort
from flatscope.generalization_bounds import optimised_posterior
from flatscope.registry import Declaration

ROUNDING = 1e-9
DELTA = 0.05
# Enough draws that a wrong term shows, few enough steps to be quick, all samples where some would be drawn.
SETTINGS: dict[str, dict[str, Any]] = {
    "pac_bayes": {"draws": 400},
    "pac_bayes_psi": {"draws": 400},
    "pac_bayes_optimised": {"steps": 30, "draws": 200},
    "sharpness_theorem_1": {"samples": 1000},
}
# Options that say how much work is done, or how the noise is trained: no formula has them.
OF_THE_WORK = {"draws", "samples", "steps", "batch", "lr"}
TRAINED = ("pac_bayes_optimised",)
NOT_USED = "delta: not used"


class Row(NamedTuple):
    """What a bound says of one network."""

    value: float
    stderr: float
    high: float
    exact: bool
    vacuous: bool
    confidence: float
    reason: str


Rows = dict[str, Row]


def rows_of(entry: Declaration, place: fs.Problem | fs.Context, delta: float = DELTA, **options: Any) -> Rows:
    """{options: row}, with all the draws that the options ask for."""
    ctx = place if isinstance(place, fs.Context) else context(place)
    given = SETTINGS.get(entry.name, {}) | options
    frame = fs.bounds(ctx.problem, entry.name, options={entry.name: given}, delta=delta, context=ctx).to_frame()
    columns = [frame[name].tolist() for name in ("options", *Row._fields)]
    rows = {}
    for shown, *numbers in zip(*columns, strict=True):
        row = Row(*numbers)
        assert shown not in rows, f"two rows of {shown}"
        rows[shown] = row
    return rows


def context(problem: fs.Problem, seed: int = 0) -> fs.Context:
    return fs.Context(problem, seed=seed, effort=make_effort(precision=0))


def values_of(entry: Declaration, place: fs.Problem | fs.Context, delta: float = DELTA, **options: Any) -> list[float]:
    return [row.value for row in rows_of(entry, place, delta, **options).values()]


@contextmanager
def noise_kept() -> Iterator[list[Trained]]:
    """What the training of the noise leads to inside the block, and the error of its draws, for the twin to begin with.

    The error is the last that is drawn before the block ends: that on the training samples.
    """
    kept: list[Trained] = []
    train, draw = optimised_posterior.trained_posterior, optimised_posterior.sampled_errors

    def keeping(ctx: Any, samples: Any, weights: Any, centre: Any, *more: Any) -> Any:
        posterior = train(ctx, samples, weights, centre, *more)
        kept.append(Trained(posterior.mean, posterior.sigma, centre, samples, error=0.0))
        return posterior

    def drawing(*given: Any, **more: Any) -> Any:
        errors = draw(*given, **more)
        kept[-1] = kept[-1]._replace(error=float(errors.mean()))
        return errors

    optimised_posterior.trained_posterior, optimised_posterior.sampled_errors = keeping, drawing
    try:
        yield kept
    finally:
        optimised_posterior.trained_posterior, optimised_posterior.sampled_errors = train, draw


def equals_its_twin(entry: Declaration, dense: Dense, delta: float = DELTA, seed: int = 0, **options: Any) -> Rows:
    """Every row has the twin's value, or is refused where the twin says that an assumption fails."""
    assert entry.name in BOUND_TWINS, f"{entry.name} has no naive twin in tests/helpers/references_bounds.py"
    with noise_kept() as kept:
        rows = rows_of(entry, context(dense.tiny.problem(), seed), delta, **options)
    given = SETTINGS.get(entry.name, {}) | options
    if "trained" in inspect.signature(BOUND_TWINS[entry.name]).parameters:
        given["trained"] = kept[-1] if kept else None
    try:
        expected = BOUND_TWINS[entry.name](dense, delta, seed, **given)
    except AssumptionFailsError as refusal:
        _is_refused(rows, str(refusal))
        return rows
    for shown, row in rows.items():
        if isinstance(expected, dict):
            norm = shown.partition('"norm": "')[2].partition('"')[0]
            _is_close(row, expected.get(norm, math.nan), shown)
        else:
            _is_close(row, expected, shown)
    if isinstance(expected, dict):
        assert len(rows) >= len(expected), f"rows {sorted(rows)} for {sorted(expected)}"
    return rows


def _is_refused(rows: Rows, assumption: str) -> None:
    for row in rows.values():
        assert math.isnan(row.value), f"{row.value}, though the twin refuses: {assumption}"
        assert row.reason, "no reason"
        assert not row.reason.startswith("failed"), row.reason


def _is_close(row: Row, expected: float | Estimate, shown: str) -> None:
    value, stderr = expected if isinstance(expected, Estimate) else (expected, 0.0)
    if math.isnan(value):
        assert math.isnan(row.value), f"{shown}: {row.value}, against no value"
        return
    if math.isinf(value):
        assert row.value == value, f"{shown}: {row.value} against {value}"
        return
    allowed = 4.5 * math.hypot(row.stderr, stderr) + ROUNDING * abs(value)
    assert abs(row.value - value) <= allowed, f"{shown}: {row.value} ± {row.stderr} against {value} ± {stderr}"
    if row.exact:
        assert row.stderr == 0.0, f"exact, yet with a standard error {row.stderr}"


def is_marked_vacuous_from_one_up(entry: Declaration, tiny: Tiny) -> None:
    for delta in (0.05, 0.3):
        for row in rows_of(entry, tiny.problem(), delta).values():
            assert row.vacuous == (math.isnan(row.value) or row.value >= 1), f"{row.value}: vacuous {row.vacuous}"
            assert row.confidence == 1 - delta, f"confidence {row.confidence} at delta {delta}"
            assert not row.high < row.value, f"high end {row.high} below {row.value}"


def falls_with_delta(entry: Declaration, tiny: Tiny) -> None:
    """More certainty costs more; where the docstring says that δ is not used the value does not have it."""
    unused = NOT_USED in (entry.function.__doc__ or "")
    columns = [values_of(entry, tiny.problem(), delta) for delta in (0.3, 0.05, 1e-3, 1e-9)]
    for smaller, larger in pairwise(columns):
        for loose, strict in zip(smaller, larger, strict=True):
            assert math.isnan(loose) == math.isnan(strict)
            if unused:
                assert loose == strict or math.isnan(loose), f"delta is not used, yet {loose} and {strict}"
            elif math.isfinite(loose):
                assert loose < strict, f"{loose} at a larger delta, {strict} at a smaller one"


def same_for_any_batches_and_order(entry: Declaration, tiny: Tiny) -> None:
    """Trained noise takes its batches as they come: with all samples in each, the order of a sum is what is left."""
    once = values_of(entry, tiny.problem())
    for variant in (
        "batches of 5 and a ragged one of 1",
        "a loader with a ragged batch",
        "another order of the samples",
    ):
        _same(once, values_of(entry, checks.VARIANTS[variant](tiny)), 1e-7, variant)


def _same(values: list[float], others: list[float], tolerance: float, what: str) -> None:
    for one, other in zip(values, others, strict=True):
        close = abs(one - other) <= tolerance * abs(one) or one == other  # the latter of infinities
        assert close or (math.isnan(one) and math.isnan(other)), f"{what}: {other} against {one}"


def seed_matters_only_to_estimates(entry: Declaration, tiny: Tiny) -> None:
    first, again, other = (rows_of(entry, context(tiny.problem(), seed)) for seed in (1, 1, 0))
    for shown, row in first.items():
        assert row.value == again[shown].value or math.isnan(row.value), "the same seed gives other numbers"
        if row.exact:
            assert abs(row.value - other[shown].value) <= ROUNDING * abs(row.value), (
                "called exact, changes with the seed"
            )
        elif row.stderr:
            spread = math.hypot(row.stderr, other[shown].stderr)
            assert abs(row.value - other[shown].value) <= 5 * spread, "two seeds differ by more than their error"


def close_in_float32(entry: Declaration, tiny: Tiny) -> None:
    if entry.name in TRAINED:  # on other draws, where the generator gives other numbers
        return
    double, single = (values_of(entry, checks.VARIANTS[kind](tiny)) for kind in ("as given", "float32"))
    _same(double, single, 2e-3, "float32")


def leaves_everything_untouched(entry: Declaration, tiny: Tiny) -> None:
    _, model, generator, ctx = checks._owned(tiny)
    before = checks._state(model, generator)
    rows_of(entry, ctx)
    checks._same_state(before, checks._state(model, generator))


def keeps_its_symmetries(entry: Declaration, tiny: Tiny, symmetry: str) -> None:
    """A declared symmetry leaves the bound as it is, an undeclared one moves it; as in the contract of measures."""
    before = rows_of(entry, context(tiny.problem()))
    after = rows_of(entry, context(checks.transformed(tiny, symmetry).problem()))
    pairs = [(row, after[shown]) for shown, row in before.items() if math.isfinite(row.value)]
    if not pairs:
        return
    moves = [abs(one.value - other.value) / abs(one.value) for one, other in pairs]
    noise = max(4.5 * math.hypot(one.stderr, other.stderr) / abs(one.value) for one, other in pairs)
    if symmetry in entry.invariant_under:
        assert max(moves) <= 1e-7 + noise, f"declared invariant under {symmetry}, moved by {max(moves):.2g}"
    else:
        assert max(moves) > 1e-4 + noise, f"not declared invariant under {symmetry}, moved by {max(moves):.2g} only"


def declares_itself(entry: Declaration) -> None:
    assert entry.symbol, "no symbol"
    assert entry.equation, "no equation"
    assert entry.assumptions, "no assumptions"
    assert entry.per == "network"
    assert len(entry.summary) <= 120, "first docstring line too long"
    doc = entry.function.__doc__ or ""
    for option in entry.options:
        assert f"{option}:" in doc, f"option {option} is not documented"
    said = any(note.startswith("NOT CERTIFIED") or note.startswith("NOT PROVED") for note in entry.assumptions)
    random = "probability" in doc
    assert said or random or NOT_USED in doc, "neither certain with some probability nor said not to be"


def moves_with(entry: Declaration, dense: Dense, option: str, other: Any, base: dict[str, Any]) -> None:
    """An option changes bound and twin alike, and does change them."""
    before = equals_its_twin(entry, dense, **base)
    after = equals_its_twin(entry, dense, **base | {option: other})
    first, second = ([row.value for row in rows.values()] for rows in (before, after))
    assert any(not math.isnan(value) for value in first), "no value to change"
    assert first != second, f"{option} = {other!r} changes nothing"


def options_of(entry: Declaration) -> set[str]:
    return set(entry.options) - OF_THE_WORK - {"delta"}
