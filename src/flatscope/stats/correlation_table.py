"""All statistics of all measures of a population in one frame."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from flatscope.errors import InputError
from flatscope.stats.correlation import KINDS, Kind, correlate, partial_correlation
from flatscope.stats.estimate import Estimate, columns, holm
from flatscope.stats.sign_agreement import conditional_mutual_information, granulated_kendall, sign_error

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
    for name in measures:
        for kind in kinds:
            found = correlate(
                frame[name],
                frame[target],
                kind,
                confidence=confidence,
                resamples=resamples,
                seed=seed,
            )
            rows.append((name, kind, found))
        if parameters:
            rows += _given_settings(frame, name, target, parameters, confidence, resamples, seed)
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
    frame: pd.DataFrame,
    name: str,
    target: str,
    parameters: Sequence[str],
    confidence: float,
    resamples: int,
    seed: int,
) -> list[tuple[str, str, Estimate]]:
    partial = [
        (f"partial_{kind}", partial_correlation(frame, name, target, parameters, kind, confidence=confidence))
        for kind in ("pearson", "spearman")
    ]
    granulated = granulated_kendall(
        frame, name, target, parameters, confidence=confidence, resamples=resamples, seed=seed
    )
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
