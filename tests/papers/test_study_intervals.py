"""Estimates of studies: intervals cover what they say, and say what they are."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
from scipy.stats import ttest_ind

from flatscope.errors import InputError
from flatscope.stats.correlation import correlate
from flatscope_papers import intervals
from flatscope_papers.claims import CONTRADICTED, HOLDS, INCONCLUSIVE, UNTESTABLE, Answer, Claim, finding_of_claim
from flatscope_papers.correlation_intervals import pearson_interval
from flatscope_papers.study_result import answer_text

SAMPLES = 240
CORRECT = 0.95 - 3 * math.sqrt(0.95 * 0.05 / SAMPLES)  # three standard errors of so many samples
LAYERS = ["a", "b", "c", "d"]


def networks(generator: np.random.Generator, correlations: list[float], n: int, between: float = 0.6) -> pd.DataFrame:
    """Measures that correlate with the gap as told, and with each other."""
    size = len(correlations) + 1
    matrix = np.full((size, size), between)
    matrix[-1, :-1] = matrix[:-1, -1] = correlations
    np.fill_diagonal(matrix, 1.0)
    return pd.DataFrame(
        generator.multivariate_normal(np.zeros(size), matrix, size=n), columns=[*LAYERS[: size - 1], "gap"]
    )


def coverage(
    found: Callable[[pd.DataFrame], tuple[float, float]],
    truth: float,
    correlations: list[float],
    samples: int = SAMPLES,
) -> float:
    generator = np.random.default_rng(1)
    ends = [found(networks(generator, correlations, n=24)) for _ in range(samples)]
    return float(np.mean([low <= truth <= high for low, high in ends]))


def spread_ends(frame: pd.DataFrame) -> tuple[float, float]:
    found = intervals.spread_of_correlations(frame, LAYERS, "gap", resamples=300)
    assert found.low is not None
    assert found.high is not None
    assert found.low <= found.value <= found.high
    return found.low, found.high


def percentile_ends(frame: pd.DataFrame) -> tuple[float, float]:
    """The plain percentile interval of the largest minus the smallest correlation."""
    generator = np.random.default_rng(0)
    values = frame.to_numpy().T

    def spread(rows: np.ndarray) -> float:
        found = np.corrcoef(values[:, rows])[:-1, -1]
        return float(found.max() - found.min())

    low, high = np.percentile([spread(generator.integers(24, size=24)) for _ in range(300)], [2.5, 97.5])
    return float(low), float(high)


@pytest.mark.parametrize("correlations", [[0.6] * 4, [0.0] * 4, [0.8, 0.6, 0.6, 0.3]])
def test_the_spread_of_correlations_is_covered(correlations: list[float]) -> None:
    assert coverage(spread_ends, max(correlations) - min(correlations), correlations) >= CORRECT


def test_the_percentile_interval_of_the_spread_never_reaches_equal_correlations() -> None:
    assert coverage(percentile_ends, 0.0, [0.6] * 4, samples=60) < 0.05


@pytest.mark.parametrize("correlations", [[0.6] * 4, [0.8, 0.7, 0.6, 0.3], [0.7, 0.7], [0.9, 0.6]])
def test_the_lead_of_a_correlation_is_covered(correlations: list[float]) -> None:
    others = LAYERS[1 : len(correlations)]

    def ends(frame: pd.DataFrame) -> tuple[float, float]:
        found = intervals.lead_of_correlations(frame, "a", others, "gap", resamples=300)
        assert found.low is not None
        assert found.high is not None
        assert found.low <= found.value <= found.high
        return found.low, found.high

    assert coverage(ends, correlations[0] - max(correlations[1:]), correlations) >= CORRECT


@pytest.mark.parametrize("truth", [0.0, 0.6, 0.9])
def test_a_correlation_is_covered(truth: float) -> None:
    def ends(frame: pd.DataFrame) -> tuple[float, float]:
        found = pearson_interval(frame["a"].to_numpy(), frame["gap"].to_numpy(), resamples=300)
        assert found is not None
        return found

    assert coverage(ends, truth, [truth]) >= CORRECT
    frame = networks(np.random.default_rng(0), [truth], n=24)
    found = intervals.correlation_with_interval(frame["a"], frame["gap"])
    assert found.low is not None
    assert found.high is not None
    assert found.value == pytest.approx(frame["a"].corr(frame["gap"]))
    assert -1 <= found.low <= found.value <= found.high <= 1


def test_correlations_without_an_interval_say_so() -> None:
    line = np.arange(6.0)
    for x, y in ((line, 2 * line + 1), (line[:3], line[:3] ** 2), (line, 0 * line)):
        found = intervals.correlation_with_interval(x, y)
        assert found.low is None
        assert found.note
    gaps = intervals.correlation_with_interval([*line, math.nan], [1.0, 0.0, 3.0, 2.0, 5.0, 4.0, 1.0])
    assert gaps.runs == 6
    assert gaps.low is not None


def test_rank_correlations_keep_their_interval() -> None:
    frame = networks(np.random.default_rng(0), [0.8], n=30)
    found, theirs = (
        intervals.correlation_with_interval(frame["a"], frame["gap"], "spearman"),
        correlate(frame["a"], frame["gap"], "spearman"),
    )
    assert (found.value, found.low, found.high) == (theirs.value, theirs.low, theirs.high)


def test_spread_and_lead_are_what_they_are_called() -> None:
    frame = networks(np.random.default_rng(0), [0.8, 0.6, 0.4, 0.2], n=60)
    found = frame[LAYERS].corrwith(frame["gap"])
    spread = intervals.spread_of_correlations(frame, LAYERS, "gap")
    lead = intervals.lead_of_correlations(frame, "b", ["a", "c", "d"], "gap")
    assert spread.value == pytest.approx(found.max() - found.min())
    assert lead.value == pytest.approx(found["b"] - found.drop("b").max())
    assert (spread.runs, lead.runs) == (60, 60)


def test_a_lead_of_size_does_not_see_signs() -> None:
    frame = networks(np.random.default_rng(0), [0.8, 0.5], n=60)
    turned = frame.assign(a=-frame["a"])
    plain = intervals.lead_of_correlations(frame, "a", ["b"], "gap")
    sized = intervals.lead_of_correlations(turned, "a", ["b"], "gap", of_size=True)
    assert (sized.value, sized.low, sized.high) == pytest.approx((plain.value, plain.low, plain.high))
    assert intervals.lead_of_correlations(turned, "a", ["b"], "gap").value < -1


def test_a_measure_against_itself_leads_by_exactly_nothing() -> None:
    frame = networks(np.random.default_rng(0), [0.8, 0.6], n=30).assign(same=lambda rows: rows["a"])
    found = intervals.lead_of_correlations(frame, "a", ["same"], "gap")
    assert (found.value, found.low, found.high) == (0.0, 0.0, 0.0)


def test_networks_without_a_value_are_left_out_and_counted() -> None:
    frame = networks(np.random.default_rng(0), [0.8, 0.6], n=30)
    whole = intervals.spread_of_correlations(frame, ["a", "b"], "gap")
    frame.loc[30] = [math.nan, 1.0, 1.0]
    found = intervals.spread_of_correlations(frame, ["a", "b"], "gap")
    assert (found.value, found.low, found.runs) == (whole.value, whole.low, 30)
    assert "1 networks" in found.note
    few = intervals.spread_of_correlations(frame.head(3), ["a", "b"], "gap")
    assert math.isnan(few.value)
    assert few.low is None


def test_a_mean_over_alike_runs_has_no_interval_unless_its_resolution_is_known() -> None:
    alike = intervals.mean_over_runs([0.7, 0.7, 0.7])
    assert (alike.value, alike.low, alike.runs) == (pytest.approx(0.7), None, 3)
    assert "the same in all 3 runs" in alike.note
    counted = intervals.mean_over_runs([1.0, 1.0, 1.0], resolution=0.1, bounds=(0.0, 1.0))
    assert counted.high == 1.0
    assert counted.low == pytest.approx(1 - 4.302653 * 0.1 / math.sqrt(12) / math.sqrt(3))
    coarse, fine = (intervals.mean_over_runs([1.0, 2.0, 4.0], resolution=resolution) for resolution in (0.1, 0.0))
    assert coarse == fine  # a spread that can be seen is the one that counts


def test_bounds_cut_the_interval_and_never_the_value() -> None:
    found = intervals.mean_over_runs([0.0, 0.0, 0.3], bounds=(0.0, 1.0))
    assert (found.low, found.value) == (0.0, pytest.approx(0.1))


def test_differences_without_spread_have_no_interval() -> None:
    assert intervals.difference_of_means([1.0, 1.0], [0.0, 0.0]).low is None
    assert intervals.difference_of_means([1.0, 1.0], [0.0, 0.1]).low is not None


def test_the_interval_of_a_difference_is_that_of_welch() -> None:
    first, second = [1.0, 2.0, 4.0, 4.5], [0.5, 0.7, 0.1]
    found = intervals.difference_of_means(first, second)
    welch = ttest_ind(first, second, equal_var=False).confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((welch.low, welch.high))


def test_a_mean_covers_at_its_level() -> None:
    generator = np.random.default_rng(0)
    for level in (0.8, 0.95):
        found = [intervals.mean_over_runs(generator.normal(size=3), level=level) for _ in range(2_000)]
        covered = float(np.mean([answer.low <= 0 <= answer.high for answer in found]))
        assert covered == pytest.approx(level, abs=3 * math.sqrt(level * (1 - level) / 2_000))


def held(ends: list[Answer], truth: float) -> float:
    """How often the interval had the truth in it."""
    return float(np.mean([answer.low <= truth <= answer.high for answer in ends]))


def test_a_geometric_mean_covers_where_a_plain_one_does_not() -> None:
    """Extremes and ratios are skewed: three lognormal numbers."""
    generator = np.random.default_rng(0)
    samples = generator.lognormal(sigma=1.5, size=(1_500, 3))
    found = [intervals.geometric_mean_over_runs(values) for values in samples]
    assert held(found, 1.0) == pytest.approx(0.95, abs=3 * math.sqrt(0.95 * 0.05 / 1_500))
    plain = [intervals.mean_over_runs(values) for values in samples]
    assert held(plain, math.exp(1.5**2 / 2)) < 0.85
    assert intervals.geometric_mean_over_runs([1.0, 10.0, 100.0]).value == pytest.approx(10.0)
    for bad in ([1.0, 0.0], [1.0, math.inf], [1.0, math.nan]):
        assert math.isnan(intervals.geometric_mean_over_runs(bad).value)


def test_differences_and_log_ratios_cover() -> None:
    generator = np.random.default_rng(0)
    draws = [(generator.normal(size=5), generator.normal(1.0, 3.0, size=4)) for _ in range(1_500)]
    error = 3 * math.sqrt(0.95 * 0.05 / 1_500)
    assert held([intervals.difference_of_means(a, b) for a, b in draws], -1.0) >= 0.95 - error
    assert held([intervals.log10_ratio_of_means(10**a, 10**b) for a, b in draws], -1.0) >= 0.95 - error
    assert held([intervals.paired_difference(a[:4], b) for a, b in draws], -1.0) == pytest.approx(0.95, abs=error)


@pytest.mark.parametrize("truth", [0.1, 0.5, 0.95])
def test_shares_cover(truth: float) -> None:
    """Wilson's interval is off by up to two per cent for single shares, and never by more."""
    generator = np.random.default_rng(0)
    free = [intervals.share_of_cases(generator.random(40) < truth) for _ in range(1_000)]
    tied = [
        intervals.share_of_cases(np.repeat(generator.random(20) < truth, 3), groups=np.repeat(np.arange(20), 3))
        for _ in free
    ]
    for found in (free, tied):
        assert held(found, truth) >= 0.92


def test_rank_correlations_cover() -> None:
    generator = np.random.default_rng(1)
    truth = 6 / math.pi * math.asin(0.6 / 2)  # Spearman's of a normal pair whose Pearson's is 0.6
    frames = [networks(generator, [0.6], n=24) for _ in range(120)]
    found = [intervals.correlation_with_interval(frame["a"], frame["gap"], "spearman") for frame in frames]
    assert held(found, truth) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 120)


def test_the_farthest_of_several_covers() -> None:
    generator, level = np.random.default_rng(0), intervals.joint_confidence_level(3)
    groups = generator.normal([0.0, 0.5, -1.0], size=(600, 12, 3))
    found = [
        intervals.answer_farthest_from_zero([intervals.mean_over_runs(one, level=level) for one in group.T])
        for group in groups
    ]
    assert held(found, 1.0) >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 600)


def test_so_few_cases_that_nothing_could_be_told_have_no_answer() -> None:
    few, enough = intervals.share_of_cases([True] * 12, least=0.95), intervals.share_of_cases([True] * 73, least=0.95)
    assert math.isnan(few.value)
    assert "73 would be needed" in few.note
    assert enough.low >= 0.95
    assert intervals.share_of_cases([True] * 2 + [False] * 10, least=0.95).value == pytest.approx(
        1 / 6
    )  # enough to see it fail


def test_shares_of_dependent_cases_count_groups() -> None:
    free, tied = intervals.share_of_cases([True] * 12), intervals.share_of_cases([True] * 12, groups=[1, 2, 3] * 4)
    assert (free.runs, tied.runs) == (12, 3)
    assert tied.low == intervals.share_of_cases([True] * 3).low
    assert free.low > tied.low
    mixed = intervals.share_of_cases([True, True, True, False], groups=[1, 1, 2, 2])
    assert mixed.low <= mixed.value == 0.75 <= mixed.high


def test_extremes_are_named_as_what_was_seen() -> None:
    found = intervals.largest_over_networks([0.1, 0.4, 0.2])
    assert (found.value, found.low, found.high, found.runs, found.seen) == (0.4, 0.1, 0.4, 3, "networks")
    assert answer_text(found) == "0.4 (largest of 3 networks, smallest 0.1)"
    assert (
        answer_text(intervals.smallest_over_networks([3.0, 2.0], of="minima")) == "2 (smallest of 2 minima, largest 3)"
    )
    assert answer_text(intervals.largest_over_networks([0.0] * 18)) == "0 (all 18 networks)"
    assert "84 % of such networks lie no higher" in intervals.largest_over_networks([0.0] * 18).note
    assert intervals.largest_over_networks([0.4]).low is None
    assert math.isnan(intervals.largest_over_networks([0.1, math.nan]).value)


def test_the_share_that_an_extreme_covers_is_right() -> None:
    generator = np.random.default_rng(0)
    below = [float(generator.uniform(size=18).max()) for _ in range(4_000)]  # the share of a uniform law below it
    assert np.mean(np.array(below) >= 0.05 ** (1 / 18)) == pytest.approx(0.95, abs=0.011)


def test_every_time_or_a_share() -> None:
    always, mostly = intervals.holds_every_time([True] * 48), intervals.holds_every_time([True] * 47 + [False])
    assert answer_text(always) == "1 (all 48 networks)"
    assert "93 %" in always.note
    assert not mostly.seen
    assert mostly == intervals.share_of_cases([True] * 47 + [False])


CLAIM = Claim("none", "Figure 1", "all fit", "largest error", "0", holds=(0.0, 0.0), partly=(0.0, 0.1))


def test_an_extreme_is_judged_by_all_that_was_seen() -> None:
    assert finding_of_claim(CLAIM, intervals.largest_over_networks([0.0, 0.0]), "small").verdict == HOLDS
    assert finding_of_claim(CLAIM, intervals.largest_over_networks([0.0, 0.05]), "small").verdict == CONTRADICTED
    assert (
        finding_of_claim(CLAIM, intervals.largest_over_networks([0.0]), "small").verdict == INCONCLUSIVE
    )  # one shows nothing about others
    assert finding_of_claim(CLAIM, intervals.mean_over_runs([0.0, 0.0, 0.0]), "small").verdict == INCONCLUSIVE
    assert finding_of_claim(CLAIM, intervals.largest_over_networks([0.0, math.nan]), "small").verdict == UNTESTABLE


def test_the_smallest_of_several_estimates_pays_for_the_choice() -> None:
    generator, level, covered, alone = np.random.default_rng(0), intervals.joint_confidence_level(4), 0, 0
    assert level == pytest.approx(0.9875)
    for _ in range(600):
        groups = generator.normal(size=(4, 20))
        found = intervals.smallest_answer([intervals.mean_over_runs(group, level=level) for group in groups])
        own = min((intervals.mean_over_runs(group) for group in groups), key=lambda answer: answer.value)
        covered += found.low <= 0 <= found.high
        alone += own.low <= 0 <= own.high
        assert found.value == own.value
    assert covered / 600 >= 0.95 - 3 * math.sqrt(0.95 * 0.05 / 600)
    assert alone / 600 < 0.93


def test_extremes_of_estimates() -> None:
    some = [Answer(-3.0, -4.0, -2.0), Answer(1.0, -1.0, 3.0)]
    assert intervals.answer_farthest_from_zero(some) == Answer(3.0, 2.0, 4.0)
    assert intervals.smallest_answer([*some, Answer(0.0)]) == Answer(-3.0)
    assert math.isnan(intervals.smallest_answer([*some, Answer(math.nan)]).value)
    assert intervals.absolute_answer(some[1]) == Answer(1.0, 0.0, 3.0)
    with pytest.raises(InputError, match="at least one"):
        intervals.smallest_answer([])
