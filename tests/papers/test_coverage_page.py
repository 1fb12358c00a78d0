"""The page of all items of the papers: complete, and every name on it leads to what it names."""

from __future__ import annotations

import ast
import importlib
from collections import Counter
from pathlib import Path

import pytest

import flatscope as fs
from flatscope.registry import declarations
from flatscope_papers import find_study
from flatscope_papers.pages.markdown import escaped_words
from flatscope_papers.pages.paper_items import Row, coverage_page, coverage_rows

ROOT = Path(__file__).parents[2]
ROWS = [(paper, row) for paper, rows in coverage_rows().items() for row in rows]
every_row = pytest.mark.parametrize(("paper", "row"), ROWS, ids=lambda value: value if isinstance(value, str) else "")
# Equations of each paper, definitions, theorems and the like, figures, tables: counted in the papers.
NUMBERED = {"yi2019": (38, 3, 0), "petzka2019": (3, 6, 1), "neyshabur2017": (8, 8, 0), "zhang2017": (64, 25, 2)}
NAMED = {
    "yi2019": {"Definition": 4, "Theorem": 4, "Lemma": 1, "Assumption": 2},
    "petzka2019": {"Definition": 1, "Theorem": 2},
    "neyshabur2017": {"Theorem": 1, "Lemma": 3},
    "zhang2017": {"Definition": 4, "Theorem": 5, "Lemma": 4, "Proposition": 3, "Conjecture": 3, "Corollary": 1},
}


def test_nothing_that_the_papers_number_is_left_out() -> None:
    for paper, rows in coverage_rows().items():
        items = [item for row in rows for item in row.items]
        assert max(Counter(items).values()) == 1, paper
        equations, figures, tables = NUMBERED[paper]
        due = {f"({n})" for n in range(1, equations + 1)} | {f"Figure {n}" for n in range(1, figures + 1)}
        assert due | {f"Table {n}" for n in range(1, tables + 1)} <= set(items), paper
        for kind, number in NAMED[paper].items():
            assert sum(item.split()[0] == kind for item in items) == number, (paper, kind)
    assert sum(len(row.items) for _, row in ROWS) == 260


@every_row
def test_every_item_has_its_code_and_its_door(paper: str, row: Row) -> None:
    assert (ROOT / "src" / row.where).is_file(), row.where
    assert row.by
    for way in row.by:
        kind, _, name = way.rpartition(" ")
        if kind in ("measure", "bound"):
            assert name in declarations(kind), way
        elif kind == "study":
            assert find_study(name).paper == paper, way
        elif name.startswith("fs."):
            assert callable(getattr(fs, name.removeprefix("fs."))), way
        else:
            module, _, attribute = name.rpartition(".")
            assert callable(getattr(importlib.import_module(module), attribute)), way


@every_row
def test_every_check_is_there(paper: str, row: Row) -> None:
    assert row.check
    for check in row.check:
        if check.startswith("claim "):
            _, study, key = check.split()
            assert key in {claim.key for claim in find_study(study).claims}, check
            assert find_study(study).paper == paper
        else:
            file, _, test = check.partition("::")
            tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
            assert test in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, check


def test_the_page_has_a_line_for_every_item() -> None:
    lines = coverage_page().splitlines()
    for paper, row in ROWS:
        for item in row.items:
            shown = [line for line in lines if line.startswith(f"| {escaped_words(item)} | `{row.where}`")]
            assert len(shown) == 1, (paper, item)
            assert escaped_words(row.lacks) in shown[0]
