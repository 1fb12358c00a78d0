"""The readmes of the two folders at the heart: what they print is what the code gives."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "flatscope"


@pytest.mark.parametrize("readme", sorted(SOURCE.glob("*/README.md")), ids=lambda path: path.parent.name)
def test_the_worked_example_is_true(readme: Path) -> None:
    found = doctest.testfile(str(readme), module_relative=False, optionflags=doctest.NORMALIZE_WHITESPACE)
    assert found.attempted > 5
    assert not found.failed


@pytest.mark.parametrize("folder", ["curvature", "network"])
def test_every_file_has_a_place_in_the_reading_order(folder: str) -> None:
    text = (SOURCE / folder / "README.md").read_text()
    names = {path.name for path in (SOURCE / folder).glob("*.py")} - {"__init__.py"}
    missing = {name for name in names if name not in text}
    assert not missing


def test_nobody_is_told_to_install_what_no_registry_has() -> None:
    root = Path(__file__).parents[2]
    pages = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    told = [str(page) for page in pages if re.search(r"pip install\b[^\n`]*\bflatscope\b", page.read_text("utf-8"))]
    assert told == []
    assert "pip install ." in (root / "docs" / "install.md").read_text("utf-8")
