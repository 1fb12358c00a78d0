"""`flatscope atlas` and `flatscope benchmark`: measures against generalization, over many networks."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pandas as pd

from flatscope.cli.output import (
    check_output_folder,
    check_outputs,
    command_line,
    show_grid,
    show_note,
    show_text,
    write_and_show_result,
)
from flatscope.cli.population_options import AtlasCommand, BenchmarkCommand
from flatscope.disk import read_with_sum
from flatscope.errors import InputError, refuse_unknown
from flatscope.files import foreign_parquet
from flatscope.formatting import first_of_names
from flatscope.reports.leaderboard_page import leaderboard_sentences
from flatscope.result import reading
from flatscope.training.benchmarking.leaderboard import benchmark
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.benchmarking.recipe import SUBSET
from flatscope.training.benchmarking.release import rebuild_release, released_leaderboard
from flatscope.training.populations.atlas_curves import Atlas
from flatscope.training.populations.atlas_making import atlas
from flatscope.training.populations.population_frame import measure_columns
from flatscope.training.sweeps.configuration import flat_values
from flatscope.training.sweeps.store import Store

SCORES_SHOWN = (
    "Ψ, τ, info: 1 is best, 0 chance (Ψ: pairs that differ in one setting, τ: all pairs, info: what settings do not "
    "tell); worst: how often the setting that it misreads most is misread, 0 is best; survival: 1 where rescaling "
    "moves nothing."
)


def run_atlas(given: AtlasCommand) -> None:
    """Correlations along training: read, correlate, show, save."""
    check_outputs(given, Atlas)
    looks = rows_meeting_conditions(read_table_of_looks(given.source), given.where or ())
    chosen: dict[str, Any] = {"kinds": given.kinds} if given.kinds else {}
    curves = atlas(
        looks, given.measures or (), target=given.target, by=given.by or (), network=given.network,
        resamples=given.resamples, seed=given.seed, **chosen,
    )  # fmt: skip
    curves.meta |= {"source": given.source, "rows": len(looks), "command": command_line()}
    write_and_show_result(curves, given, lambda: show_grid(*curves.cells()))


def read_table_of_looks(source: str) -> pd.DataFrame:
    """The table in a file, or the looks of the trials in a store with their settings."""
    path = Path(source)
    if path.is_file():
        ending = path.suffix.lower()
        if ending not in (".parquet", ".csv"):
            raise InputError("a .parquet or .csv table, or a store", path.name, where=source)
        with reading("a table that can be read", source):
            content = read_with_sum(path)
            return (
                foreign_parquet(content) if ending == ".parquet" else pd.read_csv(io.BytesIO(content), low_memory=False)
            )
    if "://" not in source and not path.is_dir():
        raise InputError("a .parquet or .csv table, or a store", "nothing there", where=source)
    parts = []
    for stored in Store(source).stored():
        for frame in map(stored.frame, stored.frames):
            if "epoch" in frame and len(measure_columns(frame)):
                settings = {name: value for name, value in flat_values(stored.config).items() if name not in frame}
                parts.append(frame.assign(**settings, network=stored.key))
                break
    if not parts:
        fix = "Trials need a frame with a column epoch and measures, as those of the study petzka2019-fig1 have"
        raise InputError("trials measured along training", "none", where=source, fix=fix)
    return pd.concat(parts, ignore_index=True)


def rows_meeting_conditions(looks: pd.DataFrame, conditions: Sequence[str]) -> pd.DataFrame:
    """The rows that fulfil every condition `COLUMN=VALUE` or `COLUMN!=VALUE`."""
    for condition in conditions:
        name, equals, value = condition.partition("=")
        column = name.removesuffix("!")
        if not equals or not column:
            raise InputError("COLUMN=VALUE or COLUMN!=VALUE", condition, where="--where")
        refuse_unknown(column, list(looks), "column")
        known = looks[column]
        numbers = pd.api.types.is_numeric_dtype(known) and not pd.api.types.is_bool_dtype(known)
        wanted: Any = pd.to_numeric(value, errors="coerce") if numbers else value
        fits = (known if numbers else known.astype(str)) == wanted
        kept = looks[~fits if name.endswith("!") else fits]
        if not len(kept):
            got = f"none; {column} has {first_of_names([str(value) for value in known.dropna().unique()], 6)}"
            raise InputError(f"rows with {condition}", got, where="--where")
        looks = kept
    return looks


def run_benchmark(given: BenchmarkCommand) -> None:
    """Show the leaderboard, with measures of the user's own where some are named."""
    check_outputs(given, Leaderboard)
    count = int(given.networks) if given.networks is not None and given.networks.isdigit() else given.networks
    page: object = None
    if given.rebuild is not None:
        if given.store is None or given.measures:
            raise InputError("--store FOLDER and no measures", "something else", where="--rebuild")
        check_output_folder(given.rebuild)
        board = rebuild_release(given.rebuild, given.store, workers=given.workers)
        show_note(f"table and leaderboards written to {given.rebuild}")
    else:
        board = benchmark(given.measures, networks=count, data=given.data, store=given.store, workers=given.workers)
    if not (given.measures or given.data) and count is None and given.rebuild is None:
        few = released_leaderboard(few=True)
        page = {"All networks": board, f"{few.meta['networks']} networks, also the long measures": few}
        show_note(f"measures that take long are scored on {few.meta['networks']} networks: --networks {SUBSET}")

    def show() -> None:
        for sentence in leaderboard_sentences(board):
            show_text(sentence)
        show_grid(*board.cells())
        show_text(SCORES_SHOWN)

    write_and_show_result(board, given, show, page=page)
