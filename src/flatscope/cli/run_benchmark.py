"""`flatscope benchmark`: the leaderboard, a user's measure on it, and the population that it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatscope.benchmarking.leaderboard import Leaderboard, benchmark, rebuild
from flatscope.cli.output import check_folder, check_outputs, deliver, show_grid, show_note
from flatscope.errors import InputError

if TYPE_CHECKING:
    from flatscope.cli.options import BenchmarkCommand


def run_benchmark(given: BenchmarkCommand) -> None:
    """Show the leaderboard, with measures of the user's own where some are named."""
    check_outputs(given, Leaderboard)
    count: int | str = given.networks if given.networks == "all" else _whole(given.networks)
    if given.rebuild is not None:
        if given.store is None or given.measures:
            raise InputError("--store FOLDER and no measures", "something else", where="--rebuild")
        check_folder(given.rebuild)
        board = rebuild(given.rebuild, given.store, workers=given.workers)
        show_note(f"table and leaderboard written to {given.rebuild}")
    else:
        board = benchmark(given.measures, networks=count, store=given.store, workers=given.workers)
    deliver(board, given, lambda: show_grid(*board.cells()))


def _whole(text: str) -> int:
    if not text.isdigit():
        raise InputError("a number of networks, or all", repr(text), where="--networks")
    return int(text)
