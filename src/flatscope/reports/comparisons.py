"""Comparisons on the page: the ranking, what keeps measures from ranking, and every value with its verdict."""

from __future__ import annotations

from collections.abc import Mapping

from flatscope.comparing import Comparison
from flatscope.comparing.comparison import ERRORS
from flatscope.comparing.rankings import places
from flatscope.reports.charts import Colours
from flatscope.reports.markup import fragment
from flatscope.reports.parts import Part, Section

BADGES = {"comparable": "good", "not comparable": "poor"}


def comparisons_part(comparisons: Mapping[str, Comparison], _: Colours) -> Part:
    """Warnings and ranking in the summary; the table of orders and verdicts as a section."""
    ranked = {n: found.ranking() for n, found in comparisons.items() if len(found.distinct) > 1 and found.comparable}
    rankings = {name: frame.assign(place=places(frame)).to_dict("records") for name, frame in ranked.items()}
    summary = fragment("comparison_summary.html", comparisons=comparisons, rankings=rankings)
    body = fragment("comparisons.html", comparisons=comparisons, badges=BADGES, errors=ERRORS)
    provenance = {name: found.meta for name, found in comparisons.items()}
    return Part(summary, [Section("ranking", "Ranking", body)], provenance)
