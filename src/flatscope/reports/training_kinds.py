"""Kinds of things on a report that are about training: leaderboards, populations, atlases, stability."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pandas as pd

from flatscope.errors import InputError
from flatscope.reports.atlas_page import atlas_plots, atlases_part
from flatscope.reports.kinds import ACCEPTED, Kind, columns_in_words
from flatscope.reports.leaderboard_page import leaderboard_plots, leaderboards_part
from flatscope.reports.population_page import population_plots, populations_part
from flatscope.reports.stability_page import stability_part, stability_plots
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.populations.atlas_curves import Atlas
from flatscope.training.populations.population_frame import PopulationFrame, is_population, target_column
from flatscope.training.stability.sharpness_record import Stability


def _is_population(item: object) -> bool:
    return isinstance(item, PopulationFrame) or (isinstance(item, pd.DataFrame) and is_population(item))


def _item_of_population(item: PopulationFrame | pd.DataFrame) -> PopulationFrame:
    return PopulationFrame(item) if isinstance(item, pd.DataFrame) else item


def _read_population(path: Path, frame: pd.DataFrame, target: str, measures: Sequence[str]) -> PopulationFrame:
    if target or measures or is_population(frame):
        return PopulationFrame(frame, target, tuple(measures), meta={"file": str(path)})
    if target_column(map(str, frame.columns)):
        fix = "Add a column named after each measure; a sweep (flatscope sweep run, then export) has them"
        raise InputError("a population with measures", "a gap, but no column of a measure", where=str(path), fix=fix)
    fix = "Name the column of the generalization gap with --target, and the measures with --measure. " + ACCEPTED
    raise InputError("a training history or a population", columns_in_words(frame), where=str(path), fix=fix)


TRAINING_KINDS: dict[str, Kind] = {
    "leaderboards": Kind(
        "a Leaderboard of measures", Leaderboard, "leaderboard", leaderboards_part, plots=leaderboard_plots
    ),
    "populations": Kind(
        "a PopulationFrame, or a pandas frame with a column `generalization_gap` and columns named after measures",
        _is_population,
        "population",
        populations_part,
        plots=population_plots,
        saved_as=(PopulationFrame,),
        read_frame=_read_population,
        shown_as=_item_of_population,
    ),
    "atlases": Kind("an Atlas of correlations along training", Atlas, "atlas", atlases_part, plots=atlas_plots),
    "stability": Kind("a Stability of a training", Stability, "training", stability_part, plots=stability_plots),
}
