"""Names of code in documents exist: what a page calls `fs.measure` or `ctx.scores()` is there under that name."""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import flatscope as fs

ROOT = Path(__file__).parents[2]
# Records tell how things were; the changelog too.
DOCUMENTS = [
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.parent.name != "records"),
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *sorted((ROOT / "src").rglob("README.md")),
]
SPAN = re.compile(r"(?<!`)`([^`\n]+)`(?!`)")
DOTTED = re.compile(r"^([A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+)")
BARE = re.compile(r"^@?([A-Za-z_]\w*)(?:\(.*\))?$")
CODE = (".py", ".pyi", ".toml", ".js", ".cu")
# Bare names that pages mention and that are none of ours: of other packages, of torch, and of flatscope as it was.
OF_OTHERS = {"FqnToConfig", "IntxWeightOnlyConfig", "compress_weights", "ignored_scope", "special_expit", "sam"}
OF_OTHERS |= {"flatscope_app", "flatscope_training"}
# What pages and examples may import; a search inside a measure is the subject of one example, a table that of a page.
PUBLIC = {"flatscope", *(f"flatscope.{name}" for name in ("errors", "extend", "inputs", "stats", "training"))}
PUBLIC |= {"flatscope.training.callbacks", "flatscope.measures.margin_search", "flatscope.comparing.records"}
IMPORTED = re.compile(r"^[ >.]*(?:from|import) (flatscope[\w.]*)", re.MULTILINE)
FILE = re.compile(r"^((?:src|tests|docs|benchmarks|examples)/[\w./-]+)$")


@functools.cache
def roots() -> dict[str, Any]:
    """What pages call by a short name, each as pages mean it."""
    problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
    context, table = fs.Context(problem), fs.measure(problem, "margin")
    return {"fs": fs, "ctx": context, "context": context, "problem": problem, "table": table}


def names(text: str) -> Iterator[str]:
    """Spans of code outside blocks."""
    yield from SPAN.findall(re.sub(r"```.*?```", "", text, flags=re.DOTALL))


@functools.cache
def words_of_code() -> frozenset[str]:
    """Words of the source, tests, tools and examples."""
    folders = ("src", "tests", "docs/generate", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*") if path.suffix in CODE]
    files = [path for path in files if path != Path(__file__)]
    texts = (path.read_text(encoding="utf-8") for path in (*files, ROOT / "Makefile", ROOT / "pyproject.toml"))
    return frozenset(word for text in texts for word in re.findall(r"[A-Za-z_]\w*", text))


def missing(span: str) -> str:
    """The part of a dotted name or path that does not exist; nothing where all of it does."""
    if path := FILE.match(span):
        return "" if any(ROOT.glob(path[1].rstrip("/"))) else path[1]
    if bare := BARE.match(span):
        return "" if bare[1] in words_of_code() | OF_OTHERS else bare[1]
    dotted = DOTTED.match(span)
    if dotted is None:
        return ""
    first, *rest = dotted[1].split(".")
    if first in ("flatscope", "flatscope_papers"):
        place: Any = importlib.import_module(first)
    elif first in roots():
        place = roots()[first]
    else:
        return ""
    known = first
    for name in rest:
        known += f".{name}"
        if not hasattr(place, name):
            try:
                place = importlib.import_module(known)
            except ImportError:
                return known
        else:
            place = getattr(place, name)
    return ""


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_names_of_code_in_documents_exist(page: Path) -> None:
    assert sorted({word for span in names(page.read_text(encoding="utf-8")) if (word := missing(span))}) == []


def test_a_name_that_does_not_exist_is_noticed() -> None:
    assert missing("ctx.loss_at(…)") == "ctx.loss_at"
    assert (
        missing("fs.measure(problem)") == missing("flatscope.training.loop") == missing("src/flatscope/limits.py") == ""
    )
    assert missing("flatscope.live.Recorder") == "flatscope.live"
    assert missing("src/flatscope/nowhere.py") == "src/flatscope/nowhere.py"
    assert list(names("a `b` and\n```py\n`c`\n```")) == ["b"]
    assert missing("deliver_it(frame)") == missing("@deliver_it") == "deliver_it"
    assert missing("write_and_show_result") == missing("@each_trial(…)") == ""


def test_pages_and_examples_import_public_modules() -> None:
    files = [path for path in DOCUMENTS if ROOT / "src" not in path.parents]  # there they are for who changes them
    files += [*(ROOT / "examples").rglob("*.py"), *(ROOT / "docs").rglob("*.ipynb")]
    texts = {path: path.read_text(encoding="utf-8").replace('"from ', "\nfrom ") for path in files}
    imported = {(path.name, name) for path, text in texts.items() for name in IMPORTED.findall(text)}
    own = {(page, name) for page, name in imported if not name.startswith("flatscope_papers")}
    assert {(page, name) for page, name in own if name not in PUBLIC} == set()
    assert ("geometric_margins.py", "flatscope.measures.margin_search") in own
