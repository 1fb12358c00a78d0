"""How well a measure does on a population: six scores, each for one data set and one stop, each with an interval.

Networks are what is independent: each has a seed of its own. Intervals of tau resample them (BCa bootstrap), those of Ψ
and of the information add up or leave out whole networks, and those of the worst environment rest on pairs that share
no network, since a setting has two values and every combination of settings was trained once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from importlib.resources import files
from io import BytesIO
from typing import Any

import numpy as np
import pandas as pd

from flatscope.registry import declarations, select
from flatscope.stats import (
    Estimate,
    conditional_mutual_information,
    correlate,
    granulated_kendall,
    sign_error,
)
from flatscope.training.benchmarking.recipe import RESCALED, SETTINGS, STOPS
from flatscope.training.populations.population_frame import base_name

TARGET = "gap"
# What each says, and the best that can be reached.
SCORES: dict[str, tuple[str, float]] = {
    "tau": ("Kendall’s tau with the gap over all networks", 1.0),
    "psi": ("granulated Ψ (Jiang et al. 2020): tau when one setting at a time changes, averaged over settings", 1.0),
    "information": ("conditional mutual information (Jiang et al. 2020), least over two settings given", 1.0),
    "worst_error": (
        "sign-error in the worst environment (Dziugaite et al. 2020): a setting whose change it misreads",
        0.0,
    ),
    "survival": ("Kendall’s tau between the networks and twins with rescaled units that compute the same", 1.0),
    "tau_rescaled": ("Kendall’s tau with the gap, measured on the rescaled twins", 1.0),
}
SURVIVES = 0.99  # Kendall's tau from which on rescaling is said to leave a measure alone
OF_TWINS = ("survival", "tau_rescaled")  # taken at the last stop, of the networks that have a twin
SIGNS = {"lower": 1.0, "higher": -1.0, "none": 1.0}  # low is good: it should rise with the gap
# What is known of a network without measuring anything, and what of it should go with a smaller gap.
BASELINES = {"epochs": "lower", "train_loss": "lower", "width": "higher"}
ORACLE, CHANCE = "oracle", "chance"  # the test error itself, and random numbers: what measures lie between
# The gap of the same settings trained once more from another seed: as far as settings alone decide.
SECOND, SECOND_FILE = "second seed", "second-seed.parquet"
CONTROLS = {
    ORACLE: "the test error itself",
    SECOND: "the gap of another training with the same settings",
    CHANCE: "random numbers, mean of many draws",
    "epochs": "epochs until the loss was reached",
    "train_loss": "the training loss reached",
    "width": "the wider network is expected to be better",
}
DRAWS = 40  # of random numbers
SMALLEST_DIFFERENCE = 0.01  # of two gaps: two standard errors of an error on 10,000 test images
COLUMNS = {
    **{"measure": "object", "data": "object", "stop": "float64", "score": "object"},
    **{"value": "float64", "low": "float64", "high": "float64", "networks": "int64", "note": "object"},
}


def population_with_controls(population: pd.DataFrame) -> pd.DataFrame:
    """The population with columns of what no measure can beat, what every one should, and a second seed's gap."""
    draws = np.random.RandomState(0).standard_normal((2, len(population)))
    seconds = pd.read_parquet(BytesIO((files(__package__) / SECOND_FILE).read_bytes()))
    again = population[["seed", "stop"]].merge(seconds, on=["seed", "stop"], how="left")["gap"].to_numpy(float)
    there = population["reached"].to_numpy(bool)
    twins = there & (population["stop"] == STOPS[-1]).to_numpy()
    made: dict[str, Any] = {
        ORACLE: population["test_error"],
        f"{RESCALED}{ORACLE}": population["test_error"].where(twins),
    }
    made |= {CHANCE: np.where(there, draws[0], math.nan), f"{RESCALED}{CHANCE}": np.where(twins, draws[1], math.nan)}
    return population.assign(**made, **{SECOND: np.where(there, again, math.nan)})


def columns_named(table: pd.DataFrame, named: Sequence[str]) -> list[str]:
    """Columns by their names, and measures by names or globs; all columns of measures where nothing is named."""
    known = measure_columns_of(table)
    chosen = [[name] if name in known else [entry.name for entry in select(name)] for name in named]
    return list(dict.fromkeys(itertools.chain(*chosen))) if named else known


def measure_columns_of(table: pd.DataFrame) -> list[str]:
    """Columns of measures, with options in brackets, those of one measure together; not those of rescaled twins."""
    columns: dict[str, list[str]] = {name: [] for name in declarations()}
    for column in table.columns:
        if not column.startswith(RESCALED) and base_name(column) in columns:
            columns[base_name(column)].append(column)
    return list(itertools.chain(*columns.values()))


def columns_with_values(population: pd.DataFrame) -> list[str]:
    """Columns of measures that were taken of these networks, not of a few of them."""
    there = population[population["reached"]]
    return [name for name in measure_columns_of(there) if there[name].notna().mean() > 0.5]


def score_all(population: pd.DataFrame, names: Iterable[str]) -> pd.DataFrame:
    """All scores of these columns of a population, for each of its data sets and stops.

    Args:
        population: a row per network and stop: settings, `gap`, a column per measure, and `rescaled.…` of twins.
        names: columns of measures, with options in brackets; of those that are not declared, low is taken to be good.
    """
    known = {name: entry.direction for name, entry in declarations().items()}
    directions = {name: known.get(base_name(name), BASELINES.get(name, "lower")) for name in names}
    rows = []
    for (data, stop), part in population[population["reached"]].groupby(["data", "stop"], sort=False):
        for name, direction in directions.items():
            sign, twins = SIGNS[direction], stop == STOPS[-1]
            scores = (
                _scores_of_random_numbers(part, twins=twins)
                if name == CHANCE
                else _scores_of_measure(part, name, sign, twins=twins)
            )
            for score, estimate in scores.items():
                ends = (estimate.value, estimate.low, estimate.high, estimate.n, estimate.note)
                rows.append((name, data, stop, score, *ends))
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def _scores_of_random_numbers(part: pd.DataFrame, *, twins: bool) -> dict[str, Estimate]:
    """The scores of random numbers: their means over draws, and where 95 % of the draws lie."""
    random = np.random.RandomState(1)
    drawn: dict[str, list[float]] = {}
    for _ in range(DRAWS):
        values = random.standard_normal((2, len(part)))
        one = part.assign(**{CHANCE: values[0], f"{RESCALED}{CHANCE}": values[1]})
        for score, estimate in _scores_of_measure(one, CHANCE, 1.0, twins=twins).items():
            drawn.setdefault(score, []).append(estimate.value)
    note = f"mean of {DRAWS} draws, and where 95 % of them lie"
    scores = {}
    for score, values_of in drawn.items():
        low, high = (float(np.nanpercentile(np.asarray(values_of), end)) for end in (2.5, 97.5))
        scores[score] = Estimate(float(np.nanmean(values_of)), low, high, n=len(part), note=note)
    return scores


def _scores_of_measure(part: pd.DataFrame, name: str, sign: float, *, twins: bool) -> dict[str, Estimate]:
    """The scores of one measure on the networks of one data set at one stop."""
    settings = [setting for setting in SETTINGS if part[setting].nunique() > 1]
    turned = part.assign(turned=sign * part[name].astype(float)) if name in part else part.assign(turned=math.nan)
    turned = turned[np.isfinite(turned["turned"])]
    constant = turned["turned"].nunique() < 2
    if len(turned) < 2 or constant or not settings:
        note = "the same on all networks" if len(turned) > 1 and constant else "no values"
        return {
            score: Estimate(math.nan, n=len(turned), note=note) for score in SCORES if twins or score not in OF_TWINS
        }
    signs = sign_error(turned, "turned", TARGET, settings, smallest_difference=SMALLEST_DIFFERENCE)
    estimates = {
        "tau": correlate(turned["turned"], turned[TARGET], "kendall"),
        "psi": granulated_kendall(turned, "turned", TARGET, settings).average,
        "information": conditional_mutual_information(turned, "turned", TARGET, settings),
        "worst_error": _with_note(signs.worst, signs.worst_environment),
    }
    if twins:
        after = (
            sign * turned[f"{RESCALED}{name}"].astype(float)
            if f"{RESCALED}{name}" in turned
            else turned["turned"] * math.nan
        )
        estimates["survival"] = correlate(turned["turned"], after, "kendall")
        estimates["tau_rescaled"] = correlate(after, turned[TARGET], "kendall")
    return estimates


def _with_note(estimate: Estimate, note: str) -> Estimate:
    return Estimate(estimate.value, estimate.low, estimate.high, n=estimate.n, method=estimate.method, note=note)


def score_in_words(row: pd.Series[Any] | None) -> str:
    """`0.62 [0.31, 0.81]`."""
    if row is None or math.isnan(row["value"]):
        return "n/a"
    ends = "" if math.isnan(row["low"]) else f" [{score_number(row['low'])}, {score_number(row['high'])}]"
    return f"{score_number(row['value'])}{ends}"


def score_number(value: float) -> str:
    """Two decimals; no minus before a zero."""
    return "n/a" if math.isnan(value) else f"{round(value, 2) + 0.0:.2f}".replace("-", "−")


def place_of_own_measure_in_words(own: str, ranked: Sequence[str], share: str, survival: float) -> str:
    """A sentence on a user's own measure: its place, how many pairs it ranks rightly, whether rescaling moves it.

    Args:
        own: its name.
        ranked: all measures that have a score, the best first.
        share: of the pairs that it ranks rightly, in words.
        survival: how far its order stays where the same functions are written with other weights.
    """
    if own not in ranked:
        return f"{own}: no score on these networks."
    right = f"right in {share} that differ in one setting"
    moved = f"; rescaling, which changes no function, moves it (survival {survival:.2f})" if survival < SURVIVES else ""
    return f"{own}: place {ranked.index(own) + 1} of {len(ranked)}, {right}{moved}."
