"""`flatscope benchmark`: the leaderboard, a user's measure on it, and the population that it rests on."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flatscope.benchmarking.leaderboard import Leaderboard, benchmark, rebuild, released_leaderboard
from flatscope.benchmarking.recipe import SUBSET
from flatscope.cli.output import check_folder, check_outputs, deliver, show_grid, show_note
from flatscope.errors import InputError

if TYPE_CHECKING:
    from flatscope.cli.options import BenchmarkCommand


def run_benchmark(given: BenchmarkCommand) -> None:
    """Show the leaderboard, with measures of the user's own where some are named."""
    check_outputs(given, Leaderboard)
    count = int(given.networks) if given.networks is not None and given.networks.isdigit() else given.networks
    page: object = None
    if given.rebuild is not None:
        if given.store is None or given.measures:
            raise InputError("--store FOLDER and no measures", "something else", where="--rebuild")
        check_folder(given.rebuild)
        board = rebuild(given.rebuild, given.store, workers=given.workers)
        show_note(f"table and leaderboards written to {given.rebuild}")
    else:
        board = benchmark(given.measures, networks=count, store=given.store, workers=given.workers)
    if not given.measures and count is None and given.rebuild is None:
        few = released_leaderboard(few=True)
        page = {"All networks": board, f"{few.meta['networks']} networks, also the long measures": few}
        show_note(f"measures that take long are scored on {few.meta['networks']} networks: --networks {SUBSET}")
    deliver(board, given, lambda: show_grid(*board.cells()), page=page)
