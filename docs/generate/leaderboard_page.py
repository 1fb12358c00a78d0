"""The page of the leaderboard, from the scores that come with the package; and the page that the command writes."""

from __future__ import annotations

from flatscope.reports.leaderboard_page import TITLES, leaderboard_sentences
from flatscope.reports.page import page_text
from flatscope.training.benchmarking.leaderboard_result import Leaderboard
from flatscope.training.benchmarking.release import released_leaderboard
from flatscope.training.benchmarking.scores import SCORES

WHOLE = "leaderboard-page.html"
FEW = "A few networks, also the measures that take long"


def page() -> str:
    """What it shows in words, then every measure with its scores."""
    board, few = released_leaderboard(), released_leaderboard(few=True)
    spent = {key: value for key, value in board.meta.items() if key.startswith("seconds")}
    cost = ", ".join(f"{value:,} {key}" for key, value in spent.items())
    first, *others = leaderboard_sentences(board)
    parts = [
        f"# Leaderboard\n\n**{first}** {' '.join(others)}",
        f"The [whole page]({WHOLE}) sorts, and has every score with its interval. What the networks are, and how a "
        "measure of yours joins with one command: [Score a measure](how-to/score-a-measure.md).",
        "\n".join(f"- **{TITLES[score]}**: {said}; best {best:g}." for score, (said, best) in SCORES.items()),
        "Ψ has 95 % intervals on each data set at each training loss; the other scores are averages of the four. "
        f"{cost}, on one core; flatscope {board.meta.get('version', '')}, {board.meta.get('date', '')}.",
        f"## All {board.meta['networks']:,} networks",
        _table(board),
        f"## {few.meta['networks']} networks, also the measures that take long",
        "Fewer settings vary here: compare within this table, not with the one above.",
        _table(few),
    ]
    return "\n\n".join(parts) + "\n"


def _table(board: Leaderboard) -> str:
    header, rows = board.cells()
    linked = [[row[0], f"`{row[1]}`", *row[2:]] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *linked])


def pages() -> dict[str, bytes]:
    """The self-contained page."""
    boards = {"All networks": released_leaderboard(), FEW: released_leaderboard(few=True)}
    return {WHOLE: page_text(boards, command="flatscope benchmark --report leaderboard.html").encode()}
