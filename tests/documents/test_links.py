"""Links of documents lead to files that a reader of the repository can read; what only the site has is said so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from flatscope.reports.page_frame import LOGO

ROOT = Path(__file__).parents[2]
GENERATED = ROOT / "docs" / "generated.md"
DOCUMENTS = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md")), ROOT / "benchmarks" / "RESULTS.md"]
READABLE = {".md", ".py", ".toml", ".cff", ".png", ".svg", ".ipynb", ".txt", ""}  # as text or as a picture


def broken(page: Path, text: str) -> list[str]:
    """Links within the repository that lead to no file, to one that is no text or picture, or to no heading of it."""
    wrong = []
    for link in re.findall(r"\]\((?![a-z]+:)([^)\s]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)):
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        there = target.exists() and target.suffix in READABLE
        if not there or (anchor and target.suffix == ".md" and anchor not in anchors(target.read_text("utf-8"))):
            wrong.append(link)
    return wrong


def anchors(text: str) -> set[str]:
    """Names of the headings of a document, as hosts of repositories and the site make them; its own names."""
    headings = re.findall(r"^#+ (.+)$", re.sub(r"```.*?```", "", text, flags=re.DOTALL), re.MULTILINE)
    words = [
        re.sub(r"[^\w\- ]", "", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading)).strip().lower()
        for heading in headings
    ]
    return {word.replace(" ", "-") for word in words} | set(re.findall(r'<a id="([^"]+)"', text))


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere_wherever_a_document_is_read(page: Path) -> None:
    assert broken(page, page.read_text("utf-8")) == []


def test_the_check_bites() -> None:
    text = "[a](install.md) [b](gone.md) [c](networks.json) [d](install.md#which-extras) [e](install.md#gone) [f](https://x.y)"
    assert broken(ROOT / "docs" / "limits.md", text) == ["gone.md", "networks.json", "install.md#gone"]


def test_pages_that_only_the_site_has_are_named_with_what_they_are_made_of() -> None:
    text = GENERATED.read_text("utf-8")
    for name in re.findall(r"^## (\w+)$", text, re.MULTILINE):
        assert not (ROOT / "docs" / f"{name}.md").exists()
        assert f'pages["{name}.md"]' in (ROOT / "docs" / "generate" / "hooks.py").read_text("utf-8")
    for path in re.findall(r"`((?:docs|src)/[^`]+)`", text):
        assert (ROOT / path).is_file(), path


def test_the_logo_of_the_site_is_that_of_the_report() -> None:
    (drawn,) = re.findall(r'<path d="([^"]+)"', LOGO)
    for picture in ("docs/generate/theme/.icons/flatscope/logo.svg", "docs/images/icon.svg"):
        assert f'd="{drawn}"' in (ROOT / picture).read_text("utf-8"), picture
    colours = re.findall(
        r"--(c0|c1|paper|ink): light-dark\((#\w+), (#\w+)\)", (ROOT / "src/flatscope/reports/page.css").read_text()
    )
    style = (ROOT / "docs/style.css").read_text("utf-8")
    assert len(colours) == 4
    assert all(light in style and dark in style for _, light, dark in colours)
