"""The handful of measures to look at first: one or two of each family, in a few words each."""

from __future__ import annotations

from flatscope.registry import declarations
from flatscope.reports.comparison import Line

MANY = 20  # lines of a table beyond which these come first


def headlines(lines: list[Line]) -> list[tuple[Line, str]]:
    """Those of the lines whose declarations have a headline, in their order, with their words; of options the first."""
    found: dict[str, Line] = {}
    for line in lines:
        found.setdefault(line.name, line)
    return [(found[name], words) for name, words in headline_words().items() if name in found]


def headline_words() -> dict[str, str]:
    """{measure: its headline} of those that have one."""
    return {name: entry.headline for name, entry in declarations().items() if entry.headline}
