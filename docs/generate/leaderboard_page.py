"""The page of the leaderboard, from the scores that come with the package; and the page that the command writes."""

from __future__ import annotations

from flatscope.benchmarking.leaderboard import released_leaderboard
from flatscope.benchmarking.scores import SCORES
from flatscope.reports.leaderboard_page import TITLES, leaderboard_sentences
from flatscope.reports.page import page_text

WHOLE = "leaderboard-page.html"


def page() -> str:
    """What it shows in words, then every measure with its scores."""
    board = released_leaderboard()
    header, rows = board.cells()
    linked = [[row[0], f"`{row[1]}`", *row[2:]] for row in rows]
    lines = ["| " + " | ".join(row) + " |" for row in [header, ["---"] * len(header), *linked]]
    spent = {key: value for key, value in board.meta.items() if key.startswith("seconds")}
    cost = ", ".join(f"{value:,} {key} on one core" for key, value in spent.items())
    first, *others = leaderboard_sentences(board)
    return "\n".join(
        [
            "# Leaderboard",
            "",
            f"**{first}** {' '.join(others)}",
            "",
            f"The [whole page]({WHOLE}) sorts, and has every score with its interval. What the networks are, and how a "
            "measure of yours joins with one command: [Score a measure](how-to/score-a-measure.md).",
            "",
            *(f"- **{TITLES[score]}**: {said}; best {best:g}." for score, (said, best) in SCORES.items()),
            "",
            f"Ψ with 95 % intervals on each data set at each training loss; other scores averaged. {cost}, "
            f"flatscope {board.meta.get('version', '')}, {board.meta.get('date', '')}.",
            "",
            *lines,
            "",
        ]
    )


def pages() -> dict[str, bytes]:
    """The self-contained page."""
    return {WHOLE: page_text(released_leaderboard(), command="flatscope benchmark --report leaderboard.html").encode()}
