"""Correlations with bootstrap intervals (BCa: bias-corrected, accelerated), one by one and as a table of a population.

Also with hyper-parameters held fixed.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from scipy import stats

from flatscope.errors import InputError, refuse_unknown
from flatscope.noise import checked_confidence
from flatscope.stats.estimate import Estimate, Floats, columns, holm, paired
from flatscope.stats.sign_agreement import conditional_mutual_information, granulated_kendall, sign_error

Kind = Literal["pearson", "spearman", "kendall"]
Statistic = Callable[[NDArray[Any]], Floats]
KINDS: tuple[Kind, ...] = ("pearson", "spearman", "kendall")
FEWEST = 4  # below this a resample is constant so often that an interval says nothing
BATCH = 4_000_000  # numbers held at once while resampling


def correlate(
    x: Any,
    y: Any,
    kind: Kind = "pearson",
    *,
    confidence: float = 0.95,
    resamples: int = 2_000,
    permutations: int = 0,
    seed: int = 0,
) -> Estimate:
    """Correlation of two samples with a BCa bootstrap interval and a two-sided p-value.

    Samples in which x or y is missing or infinite are left out and counted. A resample in which one variable is
    constant counts as 0: nothing is known about an association there.

    Args:
        x: one number per sample.
        y: one number per sample.
        kind: "pearson", "spearman" or "kendall" (tau-b).
        confidence: level of the interval.
        resamples: bootstrap resamples; 0 for no interval.
        permutations: p-value from this many random pairings; 0 for SciPy's own (exact or asymptotic).
        seed: of the resamples and pairings.
    """
    refuse_unknown(kind, KINDS, "kind of correlation")
    if resamples < 0 or permutations < 0:
        raise InputError("0 or more", f"{min(resamples, permutations)}", where="resamples, permutations")
    level = checked_confidence(confidence)
    first, second, dropped = paired(x, y)
    n = len(first)
    blank = Estimate(math.nan, n=n, method=kind, dropped=dropped, confidence=level)
    if n < 2:
        return replace(blank, note=f"{n} samples: at least 2 are needed")
    for values, name in ((first, "x"), (second, "y")):
        if np.ptp(values) == 0:
            return replace(blank, note=f"{name} is constant")
    if n == 2 and kind == "pearson":
        return replace(blank, note="2 samples always lie on a line")
    tests = {"pearson": stats.pearsonr, "spearman": stats.spearmanr, "kendall": stats.kendalltau}
    found = tests[kind](first, second)
    value, p = float(found.statistic), float(found.pvalue)
    statistic = _over_indices(first, second, kind)
    if permutations:
        p = _permutation_p(first, second, kind, permutations, seed)
    low, high, note = bootstrap_interval(statistic, n, level, resamples, seed)
    how = f"{kind}, BCa bootstrap of {resamples}" if not math.isnan(low) else kind
    return Estimate(value, low, high, p, n, how, dropped, note, level)


def bootstrap_interval(
    statistic: Statistic, n: int, confidence: float, resamples: int, seed: int
) -> tuple[float, float, str]:
    """BCa interval of a statistic of sample numbers, (..., n) -> (...); NaN and a note where it has none."""
    if not resamples:
        return math.nan, math.nan, ""
    if n < FEWEST:
        return math.nan, math.nan, f"no interval from {n} samples"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # degenerate distributions are looked for below and named
        found = stats.bootstrap(
            (np.arange(n),),
            lambda indices, axis=-1: statistic(indices),
            n_resamples=resamples,
            batch=max(1, BATCH // n**2),
            vectorized=True,
            confidence_level=confidence,
            method="BCa",
            random_state=np.random.default_rng(seed),
        )
    if np.ptp(found.bootstrap_distribution) <= 1e-12:
        return math.nan, math.nan, "every resample gives the same value: the bootstrap sees no uncertainty"
    low, high = (float(end) for end in found.confidence_interval)
    if math.isnan(low) or math.isnan(high):
        return math.nan, math.nan, "the BCa correction is not defined for this sample"
    return low, high, ""


def _over_indices(x: Floats, y: Floats, kind: Kind) -> Statistic:
    """The correlation of x[i] and y[i] for many index vectors i at once."""
    if kind == "pearson":
        return lambda indices: row_pearson(x[indices], y[indices])
    if kind == "spearman":
        return lambda indices: row_pearson(stats.rankdata(x[indices], axis=-1), stats.rankdata(y[indices], axis=-1))
    return _kendall_over_indices(x, y)


def row_pearson(x: Floats, y: Floats) -> Floats:
    """Pearson along the last dimension; 0 where one of the two is constant."""
    x = x - x.mean(-1, keepdims=True)
    y = y - y.mean(-1, keepdims=True)
    size = np.sqrt((x * x).sum(-1) * (y * y).sum(-1))
    together = (x * y).sum(-1)
    result: Floats = np.clip(np.divide(together, size, out=np.zeros_like(together), where=size > 0), -1, 1)
    return result


def _kendall_over_indices(x: Floats, y: Floats) -> Statistic:
    """Tau-b of resamples as quadratic forms: with c_i copies of sample i, concordance is cᵀSc, S_ij = ±1 or 0."""
    sx = np.sign(x[:, None] - x[None, :])
    sy = np.sign(y[:, None] - y[None, :])
    forms = (sx * sy, np.abs(sx), np.abs(sy))

    def tau(indices: NDArray[Any]) -> Floats:
        rows = indices.reshape(-1, indices.shape[-1])
        counts = np.zeros((len(rows), len(x)))
        np.add.at(counts, (np.arange(len(rows))[:, None], rows), 1.0)
        together, untied_x, untied_y = (((counts @ form) * counts).sum(-1) for form in forms)
        size = np.sqrt(untied_x * untied_y)
        values = np.divide(together, size, out=np.zeros_like(together), where=size > 0)
        shaped: Floats = values.reshape(indices.shape[:-1])
        return shaped

    return tau


def _permutation_p(x: Floats, y: Floats, kind: Kind, permutations: int, seed: int) -> float:
    """Two-sided p-value over random pairings of x with y (all of them where there are no more)."""
    if kind == "kendall":
        sx, sy = (np.sign(v[:, None] - v[None, :]) for v in (x, y))

        def agreement(order: NDArray[Any]) -> float:
            return float((sx * sy[np.ix_(order, order)]).sum())
    else:
        first, second = (x, y) if kind == "pearson" else (stats.rankdata(x), stats.rankdata(y))

        def agreement(order: NDArray[Any]) -> float:
            return float(row_pearson(first, second[order]))

    found = stats.permutation_test(
        (np.arange(len(x)),),
        agreement,
        permutation_type="pairings",
        vectorized=False,
        n_resamples=permutations,
        random_state=np.random.default_rng(seed),
    )
    return float(found.pvalue)


EXPLAINED = 1e-10  # share of the variance that rounding alone leaves


def partial_correlation(
    frame: pd.DataFrame,
    measure: str,
    target: str,
    parameters: Sequence[str],
    kind: Literal["pearson", "spearman"] = "spearman",
    *,
    confidence: float = 0.95,
) -> Estimate:
    """Correlation of the residuals of measure and target after least squares on the hyper-parameters.

    Numerical hyper-parameters enter linearly (by rank for "spearman"), all others as one indicator per value. The
    p-value is Student's with n − 2 − k degrees of freedom, k the rank of the controls; the interval is Fisher's, with
    the variance (1 + r²/2)/(n − k − 3) of Bonett and Wright 2000 for ranks.

    Args:
        frame: one row per network.
        measure: column of the measure.
        target: column of the generalization gap.
        parameters: columns to hold fixed.
        kind: "pearson" or "spearman".
        confidence: level of the interval.
    """
    refuse_unknown(kind, ("pearson", "spearman"), "kind of partial correlation")
    level = checked_confidence(confidence)
    x, y, settings, dropped = columns(frame, measure, target, parameters)
    n, ranked = len(x), kind == "spearman"
    method = f"partial {kind} given {', '.join(parameters) or 'nothing'}"
    controls = _controls(settings, ranked)
    k = int(np.linalg.matrix_rank(controls)) - 1 if n else 0
    free = n - 2 - k
    if free < 1:
        note = f"{n} rows and {k} independent controls leave no degree of freedom"
        return Estimate(math.nan, n=n, method=method, dropped=dropped, note=note, confidence=level)
    left = []
    for values, name in ((x, measure), (y, target)):
        given = stats.rankdata(values) if ranked else values
        centred = given - given.mean()
        residual = centred - controls @ np.linalg.lstsq(controls, centred, rcond=None)[0]
        if (residual**2).sum() <= EXPLAINED * max((centred**2).sum(), np.finfo(np.float64).tiny):
            note = f"{name} is a function of {', '.join(parameters)}" if np.ptp(given) else f"{name} is constant"
            return Estimate(math.nan, n=n, method=method, dropped=dropped, note=note, confidence=level)
        left.append(residual)
    value = float(row_pearson(left[0], left[1]))
    low = high = math.nan
    note = "" if free > 1 else "too few rows for an interval"
    if abs(value) > 1 - EXPLAINED:
        p, note = 0.0, "a perfect fit has no interval"
    else:
        p = float(2 * stats.t.sf(abs(value) * math.sqrt(free / (1 - value**2)), free))
        if free > 1:
            spread = math.sqrt((1 + value**2 / 2 if ranked else 1.0) / (free - 1))
            reach = float(stats.norm.ppf(0.5 + level / 2)) * spread
            low, high = math.tanh(math.atanh(value) - reach), math.tanh(math.atanh(value) + reach)
    return Estimate(value, low, high, p, n, method, dropped, note, level)


def _controls(settings: pd.DataFrame, ranked: bool) -> Floats:
    """Design matrix: a constant, standardised numbers (or ranks), indicators of categories."""
    parts = [np.ones((len(settings), 1))]
    for name in settings.columns if len(settings) else ():
        column = settings[name]
        if pd.api.types.is_numeric_dtype(column) and not pd.api.types.is_bool_dtype(column):
            values = column.to_numpy(dtype=np.float64)
            values = stats.rankdata(values) if ranked else values
            parts.append(((values - values.mean()) / (values.std() or 1.0))[:, None])
        else:
            parts.append(pd.get_dummies(column.astype(str)).to_numpy(dtype=np.float64))
    return np.concatenate(parts, axis=1)


COLUMNS = (
    "measure", "statistic", "value", "low", "high", "p", "p_holm", "n", "dropped", "method", "note"
)  # fmt: skip


def correlation_table(
    frame: pd.DataFrame,
    measures: Sequence[str],
    target: str,
    parameters: Sequence[str] = (),
    *,
    kinds: Sequence[Kind] = KINDS,
    confidence: float = 0.95,
    resamples: int = 2_000,
    seed: int = 0,
) -> pd.DataFrame:
    """One row per measure and statistic, with p-values adjusted over the measures of each statistic (Holm).

    Without hyper-parameters: the correlations. With them also `partial_pearson`, `partial_spearman`,
    `granulated_kendall` (Ψ) with `granulated_kendall[name]` for each, `conditional_mutual_information`, `sign_error`
    and `robust_sign_error`.

    Args:
        frame: one row per network: hyper-parameters, measures, generalization gap.
        measures: columns of the measures.
        target: column of the generalization gap.
        parameters: columns of the hyper-parameters.
        kinds: correlations to compute.
        confidence: level of the intervals.
        resamples: bootstrap resamples.
        seed: of the resamples.
    """
    if isinstance(measures, str) or not measures:
        raise InputError("a list of measure columns", repr(measures), where="measures")
    rows: list[tuple[str, str, Estimate]] = []
    for name in measures:
        columns(frame, name, target, parameters)  # names checked before anything is computed
    bootstrap: Any = {"confidence": confidence, "resamples": resamples, "seed": seed}
    for name in measures:
        rows += [(name, kind, correlate(frame[name], frame[target], kind, **bootstrap)) for kind in kinds]
        if parameters:
            rows += _given_settings(frame, name, target, parameters, confidence)
    table = pd.DataFrame(
        [
            (name, statistic, e.value, e.low, e.high, e.p, e.p, e.n, e.dropped, e.method, e.note)
            for name, statistic, e in rows
        ],
        columns=list(COLUMNS),
    )
    for _, places in table.groupby("statistic").groups.items():
        table.loc[places, "p_holm"] = holm(table.loc[places, "p"])
    return table


def _given_settings(
    frame: pd.DataFrame, name: str, target: str, parameters: Sequence[str], confidence: float
) -> list[tuple[str, str, Estimate]]:
    partial = [
        (f"partial_{kind}", partial_correlation(frame, name, target, parameters, kind, confidence=confidence))
        for kind in ("pearson", "spearman")
    ]
    granulated = granulated_kendall(frame, name, target, parameters, confidence=confidence)
    signs = sign_error(frame, name, target, parameters, confidence=confidence)
    found = [
        *partial,
        ("granulated_kendall", granulated.average),
        *((f"granulated_kendall[{key}]", psi) for key, psi in granulated.by_parameter.items()),
        ("conditional_mutual_information", conditional_mutual_information(frame, name, target, parameters)),
        ("sign_error", signs.mean),
        ("robust_sign_error", signs.worst),
    ]
    return [(name, statistic, estimate) for statistic, estimate in found]
