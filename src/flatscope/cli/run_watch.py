"""`flatscope watch`: how far a training or a sweep is, on the terminal and on a page that refreshes."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, NamedTuple

import pandas as pd

from flatscope.cli.output import check_place, command_line, show_grid, show_note
from flatscope.cli.run_sweep import status_rows
from flatscope.errors import InputError
from flatscope.formatting import number
from flatscope.reports.items import HISTORY_FILE
from flatscope.reports.page import report
from flatscope.reports.population_frame import PopulationFrame, is_population
from flatscope.sweeps.store import Store
from flatscope.training.checkpoint import STATE_FILE

SHOWN = ("epoch", "train_loss", "train_error", "test_loss", "test_error")


class Moment(NamedTuple):
    """What there is to see at one moment: a table, things for a page, and whether anything is still to come."""

    header: list[str]
    rows: list[list[str]]
    items: list[Any]
    over: bool


def watch_run(place: str, every: float, page: Path | None, once: bool) -> None:
    """Show, wait, show again, until it is over."""
    if every <= 0:
        raise InputError("a time above zero", repr(every), where="--every")
    if page is not None:
        check_place(page, (".html",))
    shown: list[list[str]] = []
    while True:
        found = look(place)
        if found.rows != shown:
            show_grid(found.header, found.rows)
            shown = found.rows
        last = found.over or once
        if page is not None and found.items:
            report(found.items, page, command=command_line(), refresh=None if last else every)
        if last:
            break
        time.sleep(every)
    if page is not None and found.items:
        show_note(f"report written to {page}")


def look(place: str) -> Moment:
    """A training by its folder, or a sweep by its store."""
    folder = Path(place)
    for state in (folder / "checkpoint" / STATE_FILE, folder / STATE_FILE):
        if state.is_file():
            return _training(folder.name, state)
    if (folder / HISTORY_FILE).is_file():
        history = pd.read_csv(folder / HISTORY_FILE)
        return _curves(folder.name, history, over=True)
    store = Store(place)
    if not store.plans():
        fix = "Name the --out of flatscope train, or the --store of flatscope sweep"
        raise InputError("a training or a sweep", "neither", where=place, fix=fix)
    header, rows = status_rows(store)
    frame = store.frame()
    items = [PopulationFrame(frame)] if len(frame) > 1 and is_population(frame) else []
    waiting = sum(int(row[header.index(name)]) for row in rows for name in ("running", "waiting"))
    return Moment(header, rows, items, over=waiting == 0)


def _training(name: str, path: Path) -> Moment:
    try:
        state = json.loads(path.read_text(encoding="utf-8"))["state"]
        history = pd.DataFrame([{key: float(value) for key, value in row.items()} for row in state["rows"]])
    except (ValueError, KeyError, TypeError) as problem:
        raise InputError("the state of a training", str(problem), where=str(path)) from problem
    return _curves(name, history, over=bool(state.get("stopped_by")))


def _curves(name: str, history: pd.DataFrame, over: bool) -> Moment:
    header = [column for column in SHOWN if column in history.columns]
    last = history.iloc[-1:] if len(history) else history
    rows = [[number(float(value)) for value in row] for row in last[header].itertuples(index=False)]
    return Moment(header, rows, [(name, history)] if len(history) else [], over)
