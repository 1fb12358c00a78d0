"""How to read the table of measures."""

from __future__ import annotations

from markupsafe import Markup

from flatscope.registry import SYMMETRIES
from flatscope.reports.markup import badge, element

EXACT = "No estimator error: the number is right up to rounding."
ESTIMATE = (
    "Obtained by sampling; ± is one standard error of the estimator, not the spread over other data or other trainings."
)
BETTER = (
    "Which direction is expected to go with better generalization, according to the source. An expectation, not a "
    "guarantee."
)


def how_to_read_measures() -> Markup:
    """Legend of the table: its badges and columns in words, folded."""
    terms: dict[Markup | str, str] = {badge("exact"): EXACT, badge("estimate", "estimate"): ESTIMATE, "Better": BETTER}
    terms |= {badge(word, "good"): f"Invariant under: {what}." for word, what in SYMMETRIES.values()}
    rows = [element("dt", term) + element("dd", meaning) for term, meaning in terms.items()]
    summary = element("summary", "How to read this table")
    return element("details", summary, element("dl", *rows), class_="reading")
