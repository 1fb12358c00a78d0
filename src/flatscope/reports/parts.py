"""What one kind of item adds to the page."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from markupsafe import Markup

from flatscope.reports.charts import Chart
from flatscope.reports.markup import fragment


class Section(NamedTuple):
    """A part of the page with its own heading and place in the contents."""

    anchor: str
    title: str
    body: Markup


class Part(NamedTuple):
    """Words for the summary, sections of their own, and where the things shown come from."""

    summary: Markup
    sections: list[Section]
    provenance: Mapping[str, Mapping[str, Any]]
    style: str = ""  # rules and a script that only this part needs
    script: str = ""


def charts_section(anchor: str, title: str, charts: list[Chart], *, wide: bool = False) -> Section:
    """A section of figures; its body is empty where there are none."""
    return Section(anchor, title, fragment("charts.html", charts=charts, wide=wide) if charts else Markup(""))
