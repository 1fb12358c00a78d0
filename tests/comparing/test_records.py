"""What a measure is worth by what two networks differ in: recomputed from the released population, and by hand."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from flatscope.comparing.records import DIFFERENCES, RANKING, kind_of_difference, records_by_measure, records_table
from flatscope.stats import granulated_kendall
from flatscope.training.benchmarking.differences import (
    CHANGED,
    agreement_over_pairs,
    measures_that_count,
    parts_of_population,
    records_on_population,
    scores_by_difference,
    vote_on_the_other,
)
from flatscope.training.benchmarking.recipe import SETTINGS
from flatscope.training.benchmarking.release import released_population
from flatscope.training.benchmarking.scores import population_with_controls


@pytest.fixture(scope="module")
def population() -> pd.DataFrame:
    return population_with_controls(released_population()[0])


def test_the_stored_records_are_those_of_the_released_population(population: pd.DataFrame) -> None:
    stored = records_table()
    names = [name for name in stored["measure"].unique() if name != RANKING]
    made = scores_by_difference(population, names)
    keys = ["measure", "difference"]
    both = stored.merge(made, on=keys, suffixes=("", "_made"))
    assert len(both) == len(stored) == len(made)
    for column in ("psi", "low", "high"):
        assert np.allclose(both[column], both[f"{column}_made"], atol=6e-4, equal_nan=True), column
    assert (both["pairs"] == both["pairs_made"]).all()


def test_over_all_settings_of_one_part_it_is_granulated_kendall(population: pd.DataFrame) -> None:
    part = parts_of_population(population)[0]
    values = part.frame["rho_sum"].to_numpy(dtype=float)
    value, error, *_ = agreement_over_pairs([part], [lambda i, j: np.sign(values[i] - values[j])], list(SETTINGS))
    found = granulated_kendall(part.frame, "rho_sum", "gap", list(SETTINGS)).average
    assert value == pytest.approx(found.value)
    assert 2 * 1.96 * error == pytest.approx(found.high - found.low, rel=0.02)


def test_pairs_are_those_that_differ_in_one_setting_by_a_plain_loop(population: pd.DataFrame) -> None:
    part = parts_of_population(population)[3]
    rows = part.frame.to_dict("records")
    agree: dict[str, list[float]] = {}
    for i, one in enumerate(rows):
        for other in rows[:i]:
            changed = [name for name in SETTINGS if one[name] != other[name]]
            if len(changed) == 1 and changed[0] in CHANGED["training"]:
                sign = np.sign((one["l2_path_norm"] - other["l2_path_norm"]) * (one["gap"] - other["gap"]))
                agree.setdefault(changed[0], []).append(sign)
    values = part.frame["l2_path_norm"].to_numpy(dtype=float)
    found = agreement_over_pairs([part], [lambda i, j: np.sign(values[i] - values[j])], CHANGED["training"])
    assert found[0] == pytest.approx(np.mean([np.mean(signs) for signs in agree.values()]))
    assert found[2] == sum(map(len, agree.values()))


def test_the_question_at_hand_decides_what_a_measure_is_worth() -> None:
    training, width = records_by_measure("training"), records_by_measure("width")
    assert training["rho_sum"].low < 0 < training["rho_sum"].high, "flatness is at chance between two trainings"
    assert width["rho_sum"].low > 0.7
    assert not training["rho_sum"].counts
    assert not records_by_measure("label noise")["psi_trace"].counts
    assert training["l2_path_norm"].counts
    assert training["l2_path_norm"].percent(0.12) == "56"
    assert set(DIFFERENCES) == set(CHANGED)


def test_every_share_of_pairs_has_its_interval_and_their_number(population: pd.DataFrame) -> None:
    assert records_by_measure("training")["rho_sum"].words == "right in 51 % [48, 53] of 3,677 pairs"
    few = population[population["seed"].isin(range(0, 1024, 64)) & (population["stop"] == 0.1)]
    record = records_on_population(few.assign(psi_trace=few["gap"]), "psi_trace")["architecture"]  # right in every pair
    n = len(few) // 2  # pairs without a network in common
    assert record.psi == pytest.approx(1)
    assert record.low == pytest.approx(2 * 0.025 ** (1 / n) - 1)  # all of n right: Clopper and Pearson
    assert (record.high, record.words.split(" [")[0]) == (1, "right in 100 %")
    assert f"of {record.pairs} pairs" in record.words
    tied = records_on_population(few.assign(psi_trace=1.0), "psi_trace")["architecture"]
    assert (tied.counts, tied.words) == (False, f"equal in all of {tied.pairs} pairs")


def test_the_vote_is_chosen_on_one_data_set_and_scored_on_the_other(population: pd.DataFrame) -> None:
    parts = parts_of_population(population)
    names = ["rho_sum", "l2_path_norm", "psi_trace", "margin"]
    value, error, pairs, _ = vote_on_the_other(parts, names, "width")
    # What is true on one data set alone is not chosen for it: a measure that cheats there does not help.
    first = parts[0].data
    cheat = population.assign(psi_trace=np.where(population["data"] == first, population["gap"], -population["gap"]))
    chosen = measures_that_count([p for p in parts_of_population(cheat) if p.data != first], ["psi_trace"], "width")
    assert chosen == []
    assert 0.5 < value < 1
    assert error > 0
    assert pairs > 500


def test_measures_that_rank_wrongly_or_have_no_direction_do_not_count(population: pd.DataFrame) -> None:
    parts = parts_of_population(population)
    assert measures_that_count(parts, ["psi_trace", "parameter_count", "epochs", "oracle", "margin"], "training") == []


@pytest.mark.parametrize(
    ("architectures", "difference"),
    [
        (["Linear(4, 8)", "Linear(4, 8)"], "training"),
        (["Linear(4, 8)", "Linear(4, 16)"], "width"),
        (["Linear(4, 8)", "Linear(4, 8), ReLU()"], "architecture"),
        (["Linear(4, 8)", "Linear(4, 16)", "Conv(4, 16)"], "architecture"),
    ],
)
def test_what_networks_differ_in_is_read_off_their_modules(architectures: list[str], difference: str) -> None:
    assert kind_of_difference(architectures) == difference
