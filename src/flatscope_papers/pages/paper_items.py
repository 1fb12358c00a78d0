"""Every item of the four papers on one page: where it is here, how a user reaches it, what checks it."""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.resources import files

from flatscope_papers.pages.markdown import capitalised, escaped_words, table_lines
from flatscope_papers.toml_files import FOUR_PAPERS

SAYS = """\
Definitions, assumptions, numbered equations, theorems, figures, tables, experiments and named statements of the four
papers. What is weaker here is said beside it; verdicts are on [the first page](../reproduction.md)."""


@dataclass(frozen=True)
class Row:
    """Items of a paper that one part of the code serves.

    Attributes:
        items: as the paper names them.
        where: file of the source.
        by: how a user reaches them: "fs.name", "measure name", "bound name", "study name", or a dotted name.
        check: a test, "file::name", or "claim study key".
        lacks: what is weaker than in the paper.
    """

    items: Sequence[str]
    where: str
    by: Sequence[str]
    check: Sequence[str]
    lacks: str = ""


@functools.cache
def coverage_rows() -> dict[str, tuple[Row, ...]]:
    """The rows of every paper."""
    whole = tomllib.loads(files(__package__).joinpath("coverage.toml").read_text(encoding="utf-8"))
    return {paper: tuple(Row(**row) for row in rows) for paper, rows in whole.items()}


def coverage_page() -> str:
    """One line for every item."""
    rows = coverage_rows()
    number = sum(len(row.items) for own in rows.values() for row in own)
    weaker = sum(len(row.items) for own in rows.values() for row in own if row.lacks)
    lines = ["# Coverage", "", SAYS, "", f"{number} items; {weaker} of them are weaker here than in the paper.", ""]
    for paper, own in rows.items():
        count = sum(len(row.items) for row in own)
        lines += [f"## {capitalised(FOUR_PAPERS[paper])}", ""]
        lines += [f'<details markdown="1"><summary>{count} items</summary>', ""]
        cells = [_coverage_cells(item, row) for row in own for item in row.items]
        lines += [*table_lines(["item", "where", "reached by", "checked by", "weaker"], cells), "", "</details>", ""]
    return "\n".join(lines)


def _coverage_cells(item: str, row: Row) -> list[str]:
    reached = ", ".join(_code_place_in_words(way) for way in row.by)
    checked = ", ".join(_code_place_in_words(check) for check in row.check)
    return [escaped_words(item), f"`{row.where}`", reached, checked, escaped_words(row.lacks)]


def _code_place_in_words(name: str) -> str:
    """A way or a check in code, with what it is in words before it; a claim leads to its study."""
    kind, _, own = name.rpartition(" ") if not name.startswith("claim ") else ("claim", "", name.removeprefix("claim "))
    if kind == "claim":
        study, key = own.split()
        return f"[{study}: {escaped_words(key)}]({study.partition('-')[0]}.md#{study})"
    if "::" in own:
        file, _, test = own.partition("::")
        return f"`{file.rpartition('/')[2]}: {test}`"
    return f"{kind} `{own}`".strip()
