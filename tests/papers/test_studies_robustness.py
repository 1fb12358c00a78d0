"""Every measure against the gap: the study runs through, and its numbers are those of populations made by hand."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from flatscope.registry import declarations, select
from flatscope_papers import find_study, study
from flatscope_papers.claims import CONTRADICTED, HOLDS, NOT_JUDGED, judge
from flatscope_papers.robustness.grid_networks import SETTINGS, SIZES, stages
from flatscope_papers.robustness.robustness_of_measures import found_in, kendalls, lead_of_best, ranked, summary

CLAIMS = find_study("robustness-of-measures").claims

INVARIANT, OTHERS = ("fisher_rao_norm", "l2_path_norm", "rho_sum"), ("hessian_trace", "l2_norm", "kappa_max")


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::UserWarning")  # four networks: SciPy warns about such short samples
def test_smoke(tmp_path: Path) -> None:
    result = study("robustness-of-measures", "smoke", workers=0, store=tmp_path, device="cpu")
    assert {finding.verdict for finding in result.findings} == {NOT_JUDGED}
    assert len(result.table) > 50
    assert {"sharpness", "geometric_margin", "feature_robustness"} <= set(result.table["measure"])  # long ones
    assert "<svg" in result.svg
    assert all(math.isfinite(finding.answer.value) for finding in result.findings)


@pytest.mark.parametrize("scale", ["small", "paper"])
def test_the_population_is_large_and_varied(scale: str) -> None:
    configs = stages(scale)[0].configs
    assert len(configs) >= 100
    assert len({config["model"]["seed"] for config in configs}) == len(configs)
    assert all(len(values) > 1 for values in SIZES[scale]["grid"])
    assert len(SIZES[scale]["grid"]) == len(SETTINGS)


@pytest.mark.parametrize("scale", ["smoke", "small", "paper"])
def test_no_measure_of_the_registry_is_left_out(scale: str) -> None:
    _, usual, long = (stage.configs[0] for stage in stages(scale))
    assert "measures" not in usual  # all that are not long
    assert {*long["measures"], *(entry.name for entry in select("standard"))} == set(declarations())
    assert set(long["measure_options"]) <= set(long["measures"])


def test_kendall_of_resamples_is_scipys() -> None:
    generator = np.random.default_rng(0)
    x, y = generator.integers(5, size=(2, 12)).astype(float)
    chosen = generator.integers(12, size=12)
    counts = np.stack([np.ones(12), np.bincount(chosen, minlength=12)]).astype(float)
    found = kendalls([(x, y)], counts)[0]
    assert found[0] == pytest.approx(stats.kendalltau(x, y).statistic)
    assert found[1] == pytest.approx(stats.kendalltau(x[chosen], y[chosen]).statistic)
    x[3], y[5] = math.nan, math.inf
    known = np.isfinite(x) & np.isfinite(y)
    without = kendalls([(x, y)], counts)[0]
    assert without[0] == pytest.approx(stats.kendalltau(x[known], y[known]).statistic)


def planted(shuffled: tuple[str, ...], sign: float = 1.0) -> pd.DataFrame:
    """Networks in which measures go with the gap (or against it), and rescaling shuffles some of them."""
    generator = np.random.default_rng(0)
    n = 64
    settings = {name: (np.arange(n) >> place) % 2 for place, name in enumerate(SETTINGS)}
    gap = sum(settings.values()) + 0.1 * generator.normal(size=n)
    columns: dict[str, object] = {**settings, "gap": gap, "train_loss": 0.01}
    for name in (*INVARIANT, *OTHERS):
        value = sign * gap + 0.3 * generator.normal(size=n)
        columns[f"before.{name}"] = value
        columns[f"after.{name}"] = generator.permutation(value) if name in shuffled else value
    return pd.DataFrame(columns)


@pytest.mark.parametrize(("shuffled", "due"), [(OTHERS, HOLDS), (INVARIANT, CONTRADICTED)])
def test_planted_populations_get_their_verdict(shuffled: tuple[str, ...], due: str) -> None:
    frame = planted(shuffled)
    table = summary(frame)
    assert set(table["measure"]) == {*INVARIANT, *OTHERS}
    found = found_in(frame, table, 200)
    verdicts = {claim.key: judge(claim, found[claim.key], "small").verdict for claim in CLAIMS}
    assert verdicts.pop("wrong_way") != CONTRADICTED
    assert set(verdicts.values()) == {due}


def test_the_lead_of_the_best_is_covered_though_the_best_is_chosen() -> None:
    generator, samples = np.random.default_rng(0), 150
    held = chance = 0
    for _ in range(samples):
        gap, drawn = generator.normal(size=60), generator.normal(size=(12, 60))
        counts = np.vstack([np.ones(60), generator.multinomial(60, np.full(60, 1 / 60), size=100)]).astype(float)
        tau = kendalls([(row, gap) for row in drawn], counts)  # ten against two, none of which goes with the gap
        found = lead_of_best(tau[:10], tau[10:], 60)
        assert found.low <= found.value <= found.high
        held += found.low <= 0 <= found.high
        low = np.percentile(tau[:10, 1:].max(0) - tau[10:, 1:].max(0), 2.5)
        chance += low > 0
    assert held / samples >= 0.95
    assert chance / samples > 0.05  # what the plain percentile interval would call a lead


@pytest.mark.parametrize("sign", [1.0, -1.0])
def test_measures_are_grouped_and_ordered(sign: float) -> None:
    table = summary(planted(OTHERS, sign))
    assert table["invariant"].tolist() == [True] * 3 + [False] * 3
    for _, part in table.groupby("invariant"):
        assert part["as_declared"].is_monotonic_decreasing
        assert (np.sign(part["as_declared"]) == sign).all()


def test_measures_that_go_the_wrong_way_are_counted() -> None:
    frame = planted(OTHERS, sign=-1.0)
    found = found_in(frame, summary(frame), 20)["wrong_way"]
    assert found.value == 1
    assert judge(CLAIMS[2], found, "small").verdict == CONTRADICTED


def test_measures_without_an_order_are_named() -> None:
    frame = planted(OTHERS)
    frame["before.l2_norm"] = 1.0
    frame["after.kappa_max"] = math.nan
    kept, left_out = ranked(frame)
    assert set(kept) == {*INVARIANT, "hessian_trace"}
    assert left_out["l2_norm"] == "the same on all networks"
    assert left_out["kappa_max"] == "no value on these networks"
