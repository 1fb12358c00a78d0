"""The score of the PGDL competition (Jiang et al. 2020): information left when hyper-parameters are known."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

import numpy as np
import pandas as pd

from flatscope.errors import InputError
from flatscope.stats.estimate import Codes, Estimate, Floats, coded, columns


def conditional_mutual_information(
    frame: pd.DataFrame, measure: str, target: str, parameters: Sequence[str], *, most: int = 2
) -> Estimate:
    """Least normalised conditional mutual information between the signs of change of measure and target.

    Over ordered pairs of networks, V_μ and V_g are the signs of the differences in measure and target, and U_S the
    values of the hyper-parameters S of both networks. The score is the minimum over |S| ≤ `most` of
    I(V_μ; V_g | U_S) / H(V_g | U_S): 1 when the measure's sign settles the target's, 0 when it says no more than some
    hyper-parameters already do. Pairs with equal targets have no sign to predict and are left out; a tie of the
    measure is a third symbol. Sets S that settle V_g by themselves (H = 0) have no score and are passed over.
    The competition printed 100 times this, for |S| = 2 alone and with every value of U_S weighted alike.

    Args:
        frame: one row per network.
        measure: column of the measure.
        target: column of the generalization gap.
        parameters: columns of the hyper-parameters.
        most: largest number of hyper-parameters to condition on.
    """
    if isinstance(most, bool) or not isinstance(most, int) or most < 0:
        raise InputError("a whole number from 0 up", repr(most), where="most")
    x, y, settings, dropped = columns(frame, measure, target, parameters)
    n, codes = len(x), coded(settings)
    first, second = (side.reshape(-1) for side in np.indices((n, n)))
    kept = y[first] != y[second]  # leaves out every network with itself as well
    first, second = first[kept], second[kept]
    method = f"least normalised conditional mutual information, up to {most} given"
    if len(first) == 0:
        note = "no two networks differ in the target"
        return Estimate(math.nan, n=n, method=method, dropped=dropped, note=note)
    signs = np.sign(x[first] - x[second]).astype(np.int64) + 1
    goals = (y[first] > y[second]).astype(np.int64)
    best, given = math.inf, ""
    for size in range(min(most, len(parameters)) + 1):
        for chosen in itertools.combinations(range(len(parameters)), size):
            cells = _numbered(codes[:, chosen], first, second)
            score = _normalised(signs, goals, cells)
            if score < best:
                best, given = score, ", ".join(parameters[place] for place in chosen) or "nothing"
    if math.isinf(best):
        note = "hyper-parameters settle every comparison"
        return Estimate(math.nan, n=n, method=method, dropped=dropped, note=note)
    return Estimate(best, n=n, method=method, dropped=dropped, note=f"least given {given}")


def _numbered(codes: Codes, first: Codes, second: Codes) -> Codes:
    """One number per pair of networks: which values the chosen hyper-parameters have in both."""
    number = np.zeros(len(first), dtype=np.int64)
    for column in codes.T:
        base = int(column.max()) + 1
        number = np.unique(number * base**2 + column[first] * base + column[second], return_inverse=True)[1]
    return number


def _normalised(signs: Codes, goals: Codes, cells: Codes) -> float:
    """I(signs; goals | cells) / H(goals | cells); infinite where the entropy is 0."""
    table = np.zeros((int(cells.max()) + 1, 3, 2))
    np.add.at(table, (cells, signs, goals), 1.0)
    table /= table.sum()
    cell = table.sum((1, 2), keepdims=True)
    by_goal, by_sign = table.sum(1, keepdims=True), table.sum(2, keepdims=True)
    entropy = -_weighted_log(by_goal, by_goal, cell)
    if entropy <= 1e-12:
        return math.inf
    information = _weighted_log(table, table * cell, by_goal * by_sign)
    return min(max(information / entropy, 0.0), 1.0)


def _weighted_log(weight: Floats, over: Floats, under: Floats) -> float:
    """Σ weight · log(over / under), nothing where the weight is 0."""
    weight, over, under = np.broadcast_arrays(weight, over, under)
    there = weight > 0
    return float((weight[there] * np.log(over[there] / under[there])).sum())
