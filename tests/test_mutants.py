"""The list of mutants fits the source: every change can be made, and the test that must notice it is there."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from mutants import ROOT, Mutant, main, mutants, verdict

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("mutant", mutants(), ids=lambda mutant: mutant.name)
def test_the_change_can_be_made_and_the_test_is_there(mutant: Mutant) -> None:
    changed = mutant.changed((ROOT / mutant.file).read_text(encoding="utf-8"))
    ast.parse(changed)
    file, _, name = mutant.test.partition("::")
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    assert name.partition("[")[0] in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


def test_names_tell_them_apart_and_they_are_spread_over_the_library() -> None:
    listed = mutants()
    assert len({one.name for one in listed}) == len(listed) >= 15
    assert len({Path(one.file).parts[2] for one in listed}) >= 8


def test_a_text_that_has_changed_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "a.py").write_text("x = 1\nx = 1\n")
    for old in ("x = 1", "x = 2"):
        gone = Mutant("gone", "src/a.py", old, "x = 3", "tests/test_mutants.py::nothing")
        assert verdict(gone, tmp_path / "src").startswith("error: gone: the old text is")
    assert (tmp_path / "src" / "a.py").read_text() == "x = 1\nx = 1\n"


def test_nothing_chosen_is_no_success() -> None:
    assert main(["no mutant has this name"]) == 1
