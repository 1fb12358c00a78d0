"""Does the measure move the way generalization moves? Pairs of networks, hyper-parameters known (Jiang et al. 2020)."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy.special import stdtrit, xlogy

from flatscope.errors import InputError, refuse_unless_whole
from flatscope.significance import checked_confidence, wilson
from flatscope.stats.estimate import Codes, Estimate, Floats, coded_settings, finite_columns, group_numbers

METHOD = "granulated Kendall, pairs that share a network"


@dataclass(frozen=True)
class Granulated:
    """Granulated Kendall coefficients: one per hyper-parameter, and their average Ψ."""

    by_parameter: dict[str, Estimate]
    average: Estimate

    def __str__(self) -> str:
        """Ψ first, then one line per hyper-parameter."""
        lines = [f"Ψ = {self.average}"]
        return "\n".join(lines + [f"  ψ({name}) = {psi}" for name, psi in self.by_parameter.items()])


@dataclass(frozen=True)
class SignError:
    """Share of pairs that a measure ranks wrongly: over all pairs, by environment, and in the worst environment.

    Attributes:
        mean: over all pairs.
        worst: the environment with the largest error: the robust sign-error. Its interval allows for the choice among
            all of them.
        worst_environment: its name.
        by_environment: (hyper-parameter, one value, other value) -> error.
    """

    mean: Estimate
    worst: Estimate
    worst_environment: str
    by_environment: dict[tuple[str, str, str], Estimate]

    def __str__(self) -> str:
        """Both numbers in one line."""
        return f"sign-error {self.mean}; robust (worst: {self.worst_environment}) {self.worst}"


def granulated_kendall(
    frame: pd.DataFrame, measure: str, target: str, parameters: Sequence[str], *, confidence: float = 0.95
) -> Granulated:
    """Granulated Kendall coefficient of Jiang et al. 2020: rank agreement when one hyper-parameter at a time moves.

    ψ_i averages Kendall's coefficient (sign agreement, ties count 0) over the groups of networks that share every
    hyper-parameter but the i-th; only pairs in which the i-th differs count, so repeats with other seeds do not mix in.
    Ψ is the mean of the ψ_i. Pairs that share a network depend on each other, and one network is in pairs of every
    hyper-parameter: standard errors add up the products of all pairs that share one (Aronow et al. 2015), and
    intervals are taken on Fisher's scale. Resampled groups, as if they were independent, cover 80 to 88 % of 95.

    Args:
        frame: one row per network.
        measure: column of the measure.
        target: column of the generalization gap.
        parameters: columns of the hyper-parameters; the seed is not one unless it is named.
        confidence: level of the intervals.
    """
    level = checked_confidence(confidence)
    names = _at_least_one(parameters)
    x, y, settings, dropped = finite_columns(frame, measure, target, names)
    codes = coded_settings(settings)
    by_parameter: dict[str, Estimate] = {}
    blank = Estimate(math.nan, dropped=dropped, confidence=level)
    parts = []  # what each pair adds to its ψ_i, less what it would add on average
    for place, name in enumerate(names):
        first, second, groups = pairs_differing_in_one_column(codes, place)
        if not len(first):
            note = f"no two networks differ in {name} alone"
            by_parameter[name] = replace(blank, method="granulated Kendall", note=note)
            continue
        agree = np.sign(x[first] - x[second]) * np.sign(y[first] - y[second])
        sizes = np.bincount(groups)
        value = float(np.mean(np.bincount(groups, agree) / sizes))
        part = first, second, (agree - value) / (sizes[groups] * len(sizes))
        parts.append(part)
        ends = _fisher_ends(value, shared_error(*part, len(x)), len(sizes), len(x), level)
        by_parameter[name] = Estimate(value, *ends[:2], math.nan, len(sizes), METHOD, dropped, ends[2], level)
    if not parts:
        note = "no two networks differ in one hyper-parameter alone"
        return Granulated(by_parameter, replace(blank, method="Ψ", note=note))
    known = [psi for psi in by_parameter.values() if psi.n]
    value = float(np.mean([psi.value for psi in known]))
    first, second, off = (np.concatenate(side) for side in zip(*parts, strict=True))
    error = shared_error(first, second, off / len(parts), len(x))
    low, high, note = _fisher_ends(value, error, min(psi.n for psi in known), len(x), level)
    left_out = [name for name, psi in by_parameter.items() if not psi.n]
    note = f"without {', '.join(left_out)}" if left_out else note
    method = f"mean of {len(known)} granulated Kendall coefficients"
    return Granulated(by_parameter, Estimate(value, low, high, math.nan, len(x), method, dropped, note, level))


def sign_error(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    parameters: Sequence[str],
    *,
    smallest_difference: float = 0.0,
    confidence: float = 0.95,
) -> SignError:
    """Sign-error of Dziugaite et al. 2020: ½(1 − sign of the measure's change · sign of the target's change).

    Pairs differ in exactly one hyper-parameter. An environment is one change of one hyper-parameter, between two of its
    values, averaged over everything else; the robust sign-error is that of the worst environment. 0 is always right,
    ½ a coin, 1 always wrong; a measure that ties counts ½.

    Pairs that share a network depend on each other. Intervals are Wilson's with as many pairs as theirs are worth by
    the standard error that adds up the products of all pairs that share one.

    Args:
        frame: one row per network.
        measure: column of the measure.
        target: column of the generalization gap.
        parameters: columns of the hyper-parameters.
        smallest_difference: pairs whose targets differ by no more than this (noise) are left out.
        confidence: level of the intervals.
    """
    level = checked_confidence(confidence)
    names = _at_least_one(parameters)
    if not smallest_difference >= 0:
        raise InputError("0 or more", repr(smallest_difference), where="smallest_difference")
    x, y, settings, dropped = finite_columns(frame, measure, target, names)
    codes = coded_settings(settings)
    pooled: dict[tuple[str, str, str], tuple[Floats, Codes, Codes]] = {}  # wrong or not, and both networks
    for place, name in enumerate(names):
        labels = dict(zip(codes[:, place].tolist(), map(str, settings[name]), strict=True))
        first, second, _ = pairs_differing_in_one_column(codes, place)
        a, b = np.sort([codes[first, place], codes[second, place]], axis=0)
        counted = np.abs(y[first] - y[second]) > smallest_difference
        wrong = (1 - np.sign(x[first] - x[second]) * np.sign(y[first] - y[second])) / 2
        for low, high in dict.fromkeys(zip(a[counted].tolist(), b[counted].tolist(), strict=True)):
            in_environment = counted & (a == low) & (b == high)
            pooled[name, labels[low], labels[high]] = (
                wrong[in_environment],
                first[in_environment],
                second[in_environment],
            )
    method = "sign-error, Wilson"
    if not pooled:
        note = "no pair differs in one hyper-parameter alone and in the target"
        nothing = Estimate(math.nan, method=method, dropped=dropped, note=note, confidence=level)
        return SignError(nothing, nothing, "", {})
    by_environment = {key: _sign_error_estimate(*pairs, level, dropped) for key, pairs in pooled.items()}
    key = max(by_environment, key=lambda k: by_environment[k].value)
    wrong, first, second = (np.concatenate(side) for side in zip(*pooled.values(), strict=True))
    mean = _sign_error_estimate(wrong, first, second, level, dropped)
    # Whichever is worst here was picked for it: its lower end must hold for all of them at once.
    together = [_sign_error_estimate(*pairs, 1 - (1 - level) / len(pooled), dropped).low for pairs in pooled.values()]
    highest = max(error.high for error in by_environment.values())
    worst = replace(by_environment[key], low=max(together), high=highest, method=f"worst of {len(pooled)}, Wilson")
    return SignError(mean, worst, f"{key[0]} {key[1]} to {key[2]}", by_environment)


def _sign_error_estimate(wrong: Floats, first: Codes, second: Codes, level: float, dropped: int) -> Estimate:
    value, networks = float(wrong.mean()), np.unique(np.concatenate([first, second]))
    error = shared_error(first, second, (wrong - value) / len(wrong), int(networks[-1]) + 1)
    # Pairs that agree throughout say as much as those of them that share no network.
    worth = min(value * (1 - value) / error**2 if error else len(networks) / 2, float(len(wrong)))
    low, high = wilson(value * worth, worth, confidence=level)
    return Estimate(value, low, high, math.nan, len(wrong), "sign-error, Wilson", dropped, "", level)


def _at_least_one(parameters: Sequence[str]) -> list[str]:
    if isinstance(parameters, str) or not parameters:
        raise InputError("a list of hyper-parameter columns", repr(parameters), where="parameters")
    return list(parameters)


def pairs_differing_in_one_column(codes: Codes, place: int) -> tuple[Codes, Codes, Codes]:
    """The pairs of networks that differ in one column alone: both networks, and the group that the pair is of.

    A group agrees in every other column; those with a pair are numbered from 0, and their pairs follow each other.
    """
    groups = group_numbers(np.delete(codes, place, axis=1))
    order = np.argsort(groups, kind="stable")
    starts = np.flatnonzero(np.diff(groups[order], prepend=-1))
    sizes = np.diff(starts, append=len(order))
    pairs_by_group = [np.zeros((3, 0), dtype=np.int64)]
    for size in np.unique(sizes):  # groups are many, and most of one size
        (chosen,) = np.nonzero(sizes == size)
        one, other = (order[starts[chosen, None] + side] for side in np.triu_indices(size, 1))
        pairs_by_group.append(np.stack([one, other, np.broadcast_to(chosen[:, None], one.shape)]).reshape(3, -1))
    pairs = np.concatenate(pairs_by_group, axis=1)
    pairs = pairs[:, codes[pairs[0], place] != codes[pairs[1], place]]
    first, second, group = pairs[:, np.argsort(pairs[2], kind="stable")]
    return first, second, np.cumsum(np.diff(group, prepend=group[:1]) > 0)


def shared_error(first: Codes, second: Codes, off: Floats, networks: int) -> float:
    """Standard error of a sum over pairs in which pairs that share a network go together."""
    by_network = np.bincount(first, off, networks) + np.bincount(second, off, networks)
    alone = float(off @ off)
    return math.sqrt(max(float(by_network @ by_network) - alone, alone))


def _fisher_ends(value: float, error: float, groups: int, networks: int, level: float) -> tuple[float, float, str]:
    """Ends of an interval on Fisher's scale, and why there are none."""
    if groups < 2:
        return math.nan, math.nan, "one group: no interval"
    if abs(value) >= 1 or error == 0:
        return math.nan, math.nan, "no spread over pairs: no interval"
    reach = float(stdtrit(networks - 1, (1 + level) / 2)) * error / (1 - value**2)
    return math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach), ""


def conditional_mutual_information(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    parameters: Sequence[str],
    *,
    most: int = 2,
    confidence: float = 0.95,
) -> Estimate:
    """Least normalised conditional mutual information between the signs of change of measure and target.

    Over ordered pairs of networks, V_μ and V_g are the signs of the differences in measure and target, and U_S the
    values of the hyper-parameters S of both networks. The score is the minimum over |S| ≤ `most` of
    I(V_μ; V_g | U_S) / H(V_g | U_S): 1 when the measure's sign settles the target's, 0 when it says no more than some
    hyper-parameters already do. Pairs with equal targets have no sign to predict and are left out; a tie of the
    measure is a third symbol. Sets S that settle V_g by themselves (H = 0) have no score and are passed over.
    The competition printed 100 times this, for |S| = 2 alone and with every value of U_S weighted alike.

    The interval is that of the jackknife over networks, the minimum taken anew without each of them; scores near 0 are
    too high by about 1/networks, and so is their interval.

    Args:
        frame: one row per network.
        measure: column of the measure.
        target: column of the generalization gap.
        parameters: columns of the hyper-parameters.
        most: largest number of hyper-parameters to condition on.
        confidence: level of the interval.
    """
    refuse_unless_whole(most, "most", least=0)
    level = checked_confidence(confidence)
    x, y, settings, dropped = finite_columns(frame, measure, target, parameters)
    n, codes = len(x), coded_settings(settings)
    goals = np.sign(y[:, None] - y[None, :])  # 0 leaves out every network with itself as well
    method = f"least normalised conditional mutual information, up to {most} given, jackknife"
    blank = Estimate(math.nan, n=n, method=method, dropped=dropped, confidence=level)
    if not goals.any():
        return replace(blank, note="no two networks differ in the target")
    signs = np.sign(x[:, None] - x[None, :])
    outcomes = np.stack([(signs == sign) & (goals == goal) for sign in (-1, 0, 1) for goal in (-1, 1)])
    outcomes = outcomes.astype(np.float32)  # sums over networks are whole numbers, which have room in it
    least, given = np.full(n + 1, math.inf), ""
    for size in range(min(most, len(parameters)) + 1):
        for chosen in itertools.combinations(range(len(parameters)), size):
            shares = _information_shares(group_numbers(codes[:, chosen]), outcomes)
            if shares[0] < least[0]:
                given = ", ".join(parameters[place] for place in chosen) or "nothing"
            least = np.minimum(least, shares)
    if math.isinf(least[0]):
        return replace(blank, note="hyper-parameters settle every comparison")
    value, note = float(least[0]), f"least given {given}"
    error = math.sqrt((n - 1) / n * float(((least[1:] - least[1:].mean()) ** 2).sum()))
    if not 0 < error < math.inf:
        return replace(blank, value=value, note=f"{note}; no spread over networks: no interval")
    reach = float(stdtrit(n - 1, (1 + level) / 2)) * error
    return replace(blank, value=value, low=max(0.0, value - reach), high=min(1.0, value + reach), note=note)


def _information_shares(groups: Codes, outcomes: NDArray[np.float32]) -> Floats:
    """I(signs; goals | both groups) / H(goals | both groups): over all pairs, then without each network in turn.

    Outcomes are 1 where a pair has this sign and this goal: (3 · 2, networks, networks).

    Both are sums over cells (group of one network, group of the other), and a cell and its mirror image add the same.
    So without a network only the cells change in which it is the first, twice over where there is a mirror image.
    """
    n, k = len(groups), int(groups.max()) + 1
    members = (groups[:, None] == np.arange(k)).astype(np.float32)
    counts = np.moveaxis(outcomes @ members, 0, -1).reshape(n, k, 3, 2).astype(np.float64)  # pairs that begin with it
    whole = np.zeros((k, k, 3, 2))
    np.add.at(whole, groups, counts)
    with_it, at_home = whole[groups], (np.arange(n), groups)
    without = with_it - counts
    without[at_home] -= counts[at_home][:, ::-1, ::-1]  # of its own group it is the second as well
    times = np.full((n, k), 2.0)
    times[at_home] = 1.0
    sums = _information_and_entropy(whole).sum((1, 2))
    changes = ((_information_and_entropy(without) - _information_and_entropy(with_it)) * times).sum(2)
    information, entropy = np.concatenate([sums[:, None], sums[:, None] + changes], axis=1)
    known = entropy > 1e-12 * whole.sum()
    return np.where(known, np.clip(information / np.where(known, entropy, 1.0), 0.0, 1.0), math.inf)


def _information_and_entropy(counts: Floats) -> Floats:
    """Information and entropy of each cell times its number of pairs: (2, ...) from counts (..., signs, goals)."""

    def weighted(values: Floats, *axes: int) -> Floats:
        sums: Floats = xlogy(values, values).sum(axes)
        return sums

    goals, cell = weighted(counts.sum(-2), -1), weighted(counts.sum((-2, -1)))
    return np.stack([weighted(counts, -2, -1) + cell - goals - weighted(counts.sum(-1), -1), cell - goals])
