"""Correlations within strata: by hand, whatever the strata do to the pooled one, with intervals that cover."""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy import stats

from flatscope_papers.stratified import correlation_within_strata


def drawn(rho: float, sizes: tuple[int, ...], seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Normal pairs with a correlation, and shifts of the strata that go the other way."""
    generator = np.random.default_rng(seed)
    strata = np.repeat(np.arange(len(sizes)), sizes)
    x, noise = generator.normal(size=(2, len(strata)))
    y = rho * x + math.sqrt(1 - rho**2) * noise
    return x + 5 * strata, y - 5 * strata, strata


@pytest.mark.parametrize("kind", ["spearman", "pearson"])
def test_by_hand(kind: str) -> None:
    x, y, strata = drawn(0.7, (7, 12, 5), 0)
    sums = np.zeros(3)
    for stratum in range(3):
        a, b = x[strata == stratum], y[strata == stratum]
        if kind == "spearman":
            a, b = stats.rankdata(a) / len(a), stats.rankdata(b) / len(b)
        sums += [np.sum((a - a.mean()) * (b - b.mean())), np.sum((a - a.mean()) ** 2), np.sum((b - b.mean()) ** 2)]
    found = correlation_within_strata(x, y, strata, kind)  # type: ignore[arg-type]
    assert found.value == pytest.approx(sums[0] / math.sqrt(sums[1] * sums[2]))
    assert found.runs == 24
    assert found.low is not None
    assert found.high is not None
    assert found.low < found.value < found.high
    assert np.corrcoef(x, y)[0, 1] < -0.5 < 0.3 < found.value  # the strata turn the pooled one


def test_one_stratum_is_the_plain_correlation() -> None:
    x, y, _ = drawn(0.5, (30,), 1)
    assert correlation_within_strata(x, y, np.zeros(30)).value == pytest.approx(stats.spearmanr(x, y).statistic)
    assert correlation_within_strata(x, y, np.zeros(30), "pearson").value == pytest.approx(
        stats.pearsonr(x, y).statistic
    )


def test_strata_that_say_nothing_are_left_out() -> None:
    x, y, strata = drawn(0.5, (10, 10), 2)
    more = [np.append(x, [1.0, 2.0, 5.0, 5.0, 5.0]), np.append(y, [1.0, 2.0, 1.0, 2.0, 3.0])]
    found = correlation_within_strata(*more, np.append(strata, [7, 7, 8, 8, 8]))
    assert found.value == pytest.approx(correlation_within_strata(x, y, strata).value)
    assert found.runs == 20
    assert math.isnan(correlation_within_strata([1.0, 2.0], [1.0, 2.0], [0, 0]).value)
    perfect = correlation_within_strata(x, x, strata)
    assert perfect.value == pytest.approx(1.0)
    assert perfect.low is None
    gap = x.copy()
    gap[0] = math.nan
    assert correlation_within_strata(gap, y, strata).runs == 19


@pytest.mark.parametrize(
    ("kind", "rho", "sizes"),
    [
        ("spearman", 0.0, (10,) * 4),
        ("spearman", 0.8, (20,) * 5),
        ("pearson", 0.6, (10,) * 4),
        ("spearman", 0.5, (5, 10, 10, 9, 10)),
    ],
)
def test_intervals_cover(kind: str, rho: float, sizes: tuple[int, ...]) -> None:
    """At least 92 of 100 where 95 are asked for (400 draws: 90 would be three standard errors below)."""
    truth = rho if kind == "pearson" else 6 / math.pi * math.asin(rho / 2)
    covered = 0
    for seed in range(400):
        found = correlation_within_strata(*drawn(rho, sizes, seed), kind)  # type: ignore[arg-type]
        assert found.low is not None
        assert found.high is not None
        covered += found.low <= truth <= found.high
    assert covered >= 0.92 * 400, covered
