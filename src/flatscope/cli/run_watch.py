"""`flatscope watch`: how far a training or a sweep is."""

from __future__ import annotations

import io
import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from flatscope.cli.output import check_output_file, command_line, show_grid, show_note
from flatscope.cli.run_sweep import sweep_status_rows
from flatscope.disk import MOST_TEXT, read_file, read_with_sum
from flatscope.errors import InputError
from flatscope.files import from_json_bytes
from flatscope.formatting import readable_number
from flatscope.inputs.weight_files import STATE_FILE
from flatscope.reports.items import HISTORY_FILE
from flatscope.reports.page import report
from flatscope.result import reading
from flatscope.tensor_files import read_tensors
from flatscope.training.group_training import STATE_KEY
from flatscope.training.populations.population_frame import PopulationFrame, is_population
from flatscope.training.sweeps.store import Store

DRAWN = 7  # networks whose curves a page can tell apart by colour
SHOWN = ("epoch", "train_loss", "train_error", "test_loss", "test_error")


class Moment(NamedTuple):
    """State of a run at one moment: a table, things for a page, and whether anything is still to come."""

    header: list[str]
    rows: list[list[str]]
    items: list[Any]
    over: bool


def watch_run(place: str, every: float, page: Path | None, once: bool) -> None:
    """Show, wait, show again, until it is over."""
    if every <= 0:
        raise InputError("a time above zero", repr(every), where="--every")
    if page is not None:
        check_output_file(page, (".html",))
    shown: list[list[str]] = []
    while True:
        moment = moment_of_run(place)
        if moment.rows != shown:
            show_grid(moment.header, moment.rows)
            shown = moment.rows
        last = moment.over or once
        if page is not None and moment.items:
            report(moment.items, page, command=command_line(), refresh=None if last else every)
        if last:
            break
        time.sleep(every)
    if page is not None and moment.items:
        show_note(f"report written to {page}")


def moment_of_run(place: str) -> Moment:
    """A training, or one of many networks, by its folder; a sweep by its store."""
    folder = Path(place)
    for state in (folder / "checkpoint" / STATE_FILE, folder / STATE_FILE):
        if state.is_file():
            return _moment_of_training(folder.name, state)
    if (folder / HISTORY_FILE).is_file():
        with reading("the history of a training", str(folder / HISTORY_FILE)):
            return _moment_of_histories(
                {folder.name: pd.read_csv(io.BytesIO(read_with_sum(folder / HISTORY_FILE)))}, over=True
            )
    if histories := _population_histories(folder / "checkpoint"):
        return _moment_of_histories(histories, over=(folder / "frame.parquet").is_file())
    store = Store(place)
    if not store.sweeps() and not store.damaged_sweeps():
        fix = "Name the --out of flatscope train, or the --store of flatscope sweep"
        raise InputError("a training or a sweep", "neither", where=place, fix=fix)
    header, rows = sweep_status_rows(store)
    frame = store.frame()
    items = [PopulationFrame(frame)] if len(frame) > 1 and is_population(frame) else []
    waiting = sum(int(row[header.index(name)]) for row in rows for name in ("running", "waiting"))
    return Moment(header, rows, items, over=waiting == 0)


def _moment_of_training(name: str, path: Path) -> Moment:
    with reading("the state of a training", str(path)):
        state = from_json_bytes(read_file(path, MOST_TEXT))["state"]
        history = pd.DataFrame([{key: float(value) for key, value in row.items()} for row in state["rows"]])
        return _moment_of_histories({name: history}, over=bool(state.get("stopped_by")))


def _population_histories(checkpoint: Path) -> dict[str, pd.DataFrame]:
    """The histories of networks that train at once, from their groups' checkpoints."""
    histories: dict[str, pd.DataFrame] = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        with reading("a checkpoint of networks that train at once", str(path)):
            saved = json.loads(read_tensors(path)[1].get(STATE_KEY, "{}"))
            for trial, record in zip(saved.get("trials", ()), saved.get("records", ()), strict=True):
                histories[str(trial["name"])] = pd.DataFrame(record["rows"], dtype="float64")
    return histories


def _moment_of_histories(histories: Mapping[str, pd.DataFrame], over: bool) -> Moment:
    begun = {name: history for name, history in histories.items() if len(history)}
    columns = [column for column in SHOWN if any(column in history for history in begun.values())]
    rows = [[name, *(readable_number(float(h[c].iloc[-1])) for c in columns)] for name, h in begun.items()]
    return Moment(["network", *columns], rows, list(begun.items())[:DRAWN], over)
