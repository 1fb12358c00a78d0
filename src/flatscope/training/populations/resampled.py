"""Correlations of whole networks resampled, many points at once: every network with the number of its copies.

One set of resamples serves all points of a curve, so that intervals can be made that hold at all of them together.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from scipy import stats

from flatscope.stats.estimate import Codes, Floats

FEWEST = 10  # networks; with fewer, resampling says too little about an interval
PERFECT = 1 - 1e-6  # further resamples count as this: Fisher's scale has no end


class Intervals(NamedTuple):
    """Half-widths on Fisher's scale: the interval of a correlation r is tanh(atanh(r) ± reach).

    Attributes:
        reach: of each point by itself; NaN where there is none.
        factor: by which all of them grow to hold at once.
    """

    reach: Floats
    factor: float


def copies_in_resamples(strata: Codes, resamples: int, seed: int) -> Floats:
    """Number of copies of each network in each resample: (1 + resamples, networks), first all of them once.

    Every stratum keeps its size.
    """
    generator = np.random.default_rng(seed)
    counts = np.ones((1 + resamples, len(strata)))
    for stratum in np.unique(strata):
        places = np.flatnonzero(strata == stratum)
        counts[1:, places] = generator.multinomial(len(places), np.full(len(places), 1 / len(places)), size=resamples)
    return counts


def weighted_correlation(x: Floats, y: Floats, counts: Floats, kind: str, groups: Codes) -> Floats:
    """The correlation within groups of every resample; 0 where nothing varies, and so nothing is known.

    "pearson" is that of what is left when the means of the groups are taken away, "spearman" the same of the ranks
    among all networks, "kendall" tau-b over the pairs of networks of one group.

    Args:
        x: one number per network.
        y: the same.
        counts: copies of each network: (resamples, networks).
        kind: "pearson", "spearman" or "kendall".
        groups: number of each network's group; all the same for a correlation over all networks.
    """
    together, of_x, of_y = (_concordant_pairs if kind == "kendall" else _sums_of_products)(x, y, counts, kind, groups)
    size = np.sqrt(of_x * of_y)
    correlations: Floats = np.clip(np.divide(together, size, out=np.zeros_like(size), where=size > 0), -1, 1)
    return correlations


def _sums_of_products(x: Floats, y: Floats, counts: Floats, kind: str, groups: Codes) -> tuple[Floats, Floats, Floats]:
    """Sums of products of deviations from the means of the groups."""
    member = (groups[:, None] == np.unique(groups)).astype(np.float64)  # (networks, groups)
    if kind == "spearman":
        a, b = (counts * _ranks_in_resamples(values, counts) for values in (x, y))
        (ma, mb), c = (a @ member, b @ member), np.maximum(counts, 1)  # where a network is not drawn, a and b are 0
        sums = [(p * q / c).sum(1) for p, q in ((a, b), (a, a), (b, b))]
    else:  # numbers that no resample changes
        u, v = (_standardised_within_groups(values, member) for values in (x, y))
        ma, mb = counts @ (member * u[:, None]), counts @ (member * v[:, None])
        sums = list((counts @ np.stack([u * v, u * u, v * v], axis=1)).T)
    size = np.maximum(counts @ member, 1)
    means = [(p * q / size).sum(1) for p, q in ((ma, mb), (ma, ma), (mb, mb))]
    # Squares that are less than rounding leaves of them are those of a constant.
    of_x, of_y = (np.where(s - m > 1e-10 * s, s - m, 0.0) for s, m in zip(sums[1:], means[1:], strict=True))
    return sums[0] - means[0], of_x, of_y


def _standardised_within_groups(values: Floats, member: Floats) -> Floats:
    """Values without the means of the groups, scaled: large means would cost digits, correlations stay."""
    centred = values - values.mean()
    within = centred - member @ (centred @ member / member.sum(0))
    spread = math.sqrt((within * within).mean())
    # Less than that is rounding: constant in every group.
    return within / spread if spread > 1e-10 * np.abs(centred).max() else np.zeros_like(within)


def _ranks_in_resamples(values: Floats, counts: Floats) -> Floats:
    """Mean ranks of all copies in every resample: (resamples, networks)."""
    _, inverse = np.unique(values, return_inverse=True)
    order = np.argsort(inverse, kind="stable")
    starts = np.searchsorted(inverse[order], np.arange(inverse.max() + 1))
    of_value = np.add.reduceat(counts[:, order], starts, axis=1)
    ranks: Floats = (np.cumsum(of_value, axis=1) - of_value / 2 + 0.5)[:, inverse]
    return ranks


def _concordant_pairs(x: Floats, y: Floats, counts: Floats, kind: str, groups: Codes) -> tuple[Floats, Floats, Floats]:
    """Concordant less discordant pairs, and pairs that differ in x and in y, each pair twice."""
    same = groups[:, None] == groups[None, :]
    dx, dy = (np.sign(v[:, None] - v[None, :]) * same for v in (x, y))
    together, of_x, of_y = (((counts @ form) * counts).sum(1) for form in (dx * dy, np.abs(dx), np.abs(dy)))
    return together, of_x, of_y


def correlation_intervals(drawn: Floats, networks: Codes, groups: Codes, confidence: float) -> Intervals:
    """Intervals on Fisher's scale from the spread of the resamples, of each point and of all together.

    The reach of a point is the quantile of how far resamples are from the correlation, widened as Student's t is
    against the normal distribution.

    Args:
        drawn: correlations, those of the networks themselves first: (1 + resamples, points).
        networks: how many each point has.
        groups: into how many groups these fall.
        confidence: level of the intervals.
    """
    z = np.arctanh(np.clip(drawn, -PERFECT, PERFECT))
    far, free = np.abs(z[1:] - z[0]), networks - groups
    usable = (networks >= FEWEST) & (free >= FEWEST - 1) & (np.abs(drawn[0]) < PERFECT)
    plain = np.quantile(far, confidence, axis=0)
    usable &= plain > 0
    if not usable.any():
        return Intervals(np.full(len(plain), math.nan), math.nan)
    student = stats.t.ppf((1 + confidence) / 2, np.maximum(free - 1, 1)) / stats.norm.ppf((1 + confidence) / 2)
    reach = np.where(usable, plain * student, math.nan)
    furthest = (far[:, usable] / plain[usable]).max(axis=1)
    return Intervals(reach, max(1.0, float(np.quantile(furthest, confidence))))
