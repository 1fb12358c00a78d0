"""The released population and its leaderboards: read as they come with the package, or made anew."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

import pandas as pd

from flatscope.comparing.records import FILE as RECORDS_FILE
from flatscope.disk import write_whole
from flatscope.files import csv_bytes, from_parquet_bytes, parquet_bytes
from flatscope.training.benchmarking.differences import scores_by_difference
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.benchmarking.recipe import (
    STOPS,
    SUBSET,
    train_and_measure_population,
)
from flatscope.training.benchmarking.recipe import benchmark_networks as design
from flatscope.training.benchmarking.scores import (
    BASELINES,
    CONTROLS,
    ORACLE,
    SECOND,
    columns_with_values,
    population_with_controls,
    score_all,
)
from flatscope.training.sweeps.store import Store
from flatscope.version import __version__

POPULATION_FILE, POPULATION_KEY = "population.parquet", b"flatscope_benchmark"
LEADERBOARD_FILE, LEADERBOARD_OF_FEW = "leaderboard.parquet", "leaderboard-of-few.parquet"


def population_counts(population: pd.DataFrame) -> dict[str, Any]:
    """Number of networks, and of those that did not reach each stop."""
    missed = population[~population["reached"]].groupby("stop").size()
    return {
        "networks": int(population["seed"].nunique()),
        "not reached": {f"{stop:g}": int(missed.get(stop, 0)) for stop in STOPS},
    }


def released_population() -> tuple[pd.DataFrame, dict[str, Any]]:
    """The table of the release: a row per network and stop; and where it comes from."""
    return from_parquet_bytes((files(__package__) / POPULATION_FILE).read_bytes(), POPULATION_KEY)


def released_leaderboard(few: bool = False) -> Leaderboard:
    """The scores of the measures on all networks, or those of all measures on the few of which all were taken."""
    file = LEADERBOARD_OF_FEW if few else LEADERBOARD_FILE
    return Leaderboard.from_parquet((files(__package__) / file).read_bytes())


def rebuild_release(folder: Path, store: str, *, workers: int | None = None) -> Leaderboard:
    """Train and measure the whole population anew, and write the files of a release into a folder.

    Args:
        folder: for the table and the two leaderboards.
        store: for the networks; a run that was broken off goes on from it.
        workers: processes; None for one per core, 0 for this one.
    """
    population, spent = train_and_measure_population(Store(store), workers=workers)
    return write_release(population, spent, folder)


def write_release(population: pd.DataFrame, spent: Mapping[str, Any], folder: Path) -> Leaderboard:
    """Score the measures of a table on all networks and on the few; write the table and both leaderboards."""
    some = population[population["seed"].isin(design(SUBSET)["seed"])].reset_index(drop=True)
    about = {**spent, "version": __version__, "date": f"{datetime.now(UTC):%Y-%m-%d}"}
    write_whole(
        folder / POPULATION_FILE, parquet_bytes(population, POPULATION_KEY, population_counts(population) | about)
    )
    boards = []
    for part, file in ((some, LEADERBOARD_OF_FEW), (population, LEADERBOARD_FILE)):
        scores = score_all(population_with_controls(part), [*columns_with_values(part), *CONTROLS])
        boards.append(Leaderboard(scores, population_counts(part) | about))
        boards[-1].save(folder / file)
    names = [*columns_with_values(population), *BASELINES, ORACLE, SECOND]
    by_difference = scores_by_difference(population_with_controls(population), names).round(3)
    write_whole(folder / RECORDS_FILE, csv_bytes(by_difference), with_sum=True)
    return boards[-1]
