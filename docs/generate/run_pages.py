"""Runs the code blocks of Markdown pages, as the tests do, and writes what they print below them.

Blocks marked `python` and `sh` run in the order of the page, in one empty folder and one namespace. A block with a
title is a file, which is written to that folder; a block marked `text` that follows one holds what it printed, and
`python docs/generate/run_pages.py PAGE…` writes that anew. A page that needs a package beyond the library says so in
a comment: `<!-- needs: lightning -->`.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import shlex
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
# The first words of lines that set up a machine; they are run by CI itself, or need what a test has not.
SETUP = ("pip", "make", "git", "cd", "python", "ray", "#", "open", "export", "source", ".venv/bin/python")
BLOCK = re.compile(
    r"""^(\ *)```(python|sh|toml)(?:\ title="([^"]+)")?\n(.*?)^\1```\n   # the code
    (?:\n\1```text\n(.*?)^\1```\n)?                                     # what it printed""",
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)


class Block(NamedTuple):
    """A block of code, where it begins, and where what it printed is kept (start and end in the page, or none)."""

    kind: str
    title: str | None
    code: str
    line: int
    shown: tuple[int, int] | None


def pages() -> list[Path]:
    """Every page whose code a reader may run."""
    docs = ROOT / "docs"
    folders = [docs, docs / "how-to", docs / "concepts"]
    return [ROOT / "README.md", *(path for folder in folders for path in sorted(folder.glob("*.md")))]


def needs(page: Path) -> list[str]:
    """Packages without which the page cannot run."""
    found = re.search(r"<!-- needs: (.*?) -->", page.read_text(encoding="utf-8"))
    return found[1].split() if found else []


def blocks(text: str) -> Iterator[Block]:
    """The code of a page in order."""
    for match in BLOCK.finditer(text):
        indent = match[1]
        code = "\n".join(line.removeprefix(indent) for line in match[4].splitlines()) + "\n"
        line = text.count("\n", 0, match.start(4)) + 1
        yield Block(match[2], match[3], code, line, match.span(5) if match[5] is not None else None)


def run(page: Path) -> list[str]:
    """Run all blocks of a page in the current folder; what each printed."""
    before = set(sys.modules)
    sys.path.insert(0, os.getcwd())  # as for a script there
    try:
        return _run(page)
    finally:
        sys.path.pop(0)
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(os.getcwd()):
                del sys.modules[name]


def _run(page: Path) -> list[str]:
    namespace: dict[str, Any] = {"__name__": "page"}
    printed = []
    for block in blocks(page.read_text(encoding="utf-8")):
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            if block.title:
                Path(block.title).write_text(block.code, encoding="utf-8")
            elif block.kind == "python":
                code = "\n" * (block.line - 1) + block.code  # so that errors name the page's own line
                exec(compile(code, str(page), "exec"), namespace)
            else:
                for line in block.code.replace("\\\n", " ").splitlines():
                    _command(line)
        printed.append(out.getvalue())
    return printed


def _command(line: str) -> None:
    """Run one line of shell: a command of flatscope, in this process; lines that set up a machine are passed over."""
    words = shlex.split(line, comments=True)
    if not words or words[0] in SETUP or words[:2] == ["flatscope", "demo"] or "--address" in words:
        return  # the demo has tests of its own, and takes a while; a cluster is not there
    if words[0] == "torchrun":  # one process does the same
        words = words[words.index("-m") + 1 :]
    if words[0] != "flatscope":
        raise ValueError(f"not a command that a page may use: {line}")
    from flatscope.cli import main

    before = sys.argv
    sys.argv = words
    try:
        main()
    except SystemExit as leaving:
        if leaving.code:
            raise RuntimeError(f"{line}: exit code {leaving.code}") from leaving
    finally:
        sys.argv = before


def rewrite(page: Path) -> None:
    """Run a page in an empty folder and put what its blocks print into their `text` blocks."""
    text = page.read_text(encoding="utf-8")
    here = Path.cwd()
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        try:
            printed = run(page)
        finally:
            os.chdir(here)
    for block, shown in reversed(list(zip(blocks(text), printed, strict=True))):
        if block.shown is not None:
            lines = [line.rstrip() for line in shown.rstrip().splitlines()]
            text = text[: block.shown[0]] + "\n".join(lines) + "\n" + text[block.shown[1] :]
    page.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for name in sys.argv[1:]:
        rewrite(Path(name).resolve())
