"""The Python reference: a page for each object that docs/reference.md names, and that page as their list."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

LIST = Path(__file__).parents[1] / "reference.md"
FOLDER = "reference"
# A line of mkdocstrings, with options in the line below: `::: flatscope.measure`.
DIRECTIVE = re.compile(r"^::: (?P<path>flatscope[\w.]+)\n(?:    options: \{(?P<options>.*)\}\n)?", re.MULTILINE)


def pages() -> Iterator[tuple[str, str]]:
    """Path inside the documentation, and Markdown, of the page of each object."""
    for match in DIRECTIVE.finditer(LIST.read_text(encoding="utf-8")):
        path, options = match["path"], match["options"]
        chosen = ", ".join(filter(None, [options, "heading_level: 1"]))
        head = f"---\ntitle: {_name(path)}\ndescription: {json.dumps(_summary(path), ensure_ascii=False)}\n---\n"
        yield f"{FOLDER}/{_file(path)}", f"{head}::: {path}\n    options: {{{chosen}}}\n"


def overview(markdown: str) -> str:
    """The list of objects, each with the first line of what it says about itself."""
    listed = DIRECTIVE.sub(lambda match: _line(match["path"]), markdown)
    return re.sub(r"^(- .*\n)\n(?=- )", r"\1", listed, flags=re.MULTILINE)


def _line(path: str) -> str:
    return f"- [`{path.replace('flatscope.', 'fs.', 1)}`]({FOLDER}/{_file(path)}): {_summary(path)}\n"


def _name(path: str) -> str:
    return path.removeprefix("flatscope.")


def _file(path: str) -> str:
    """Of a class another name than of the function: some file systems take `Audit` and `audit` for one."""
    return f"{_name(path)}{'-class' if inspect.isclass(found(path)) else ''}.md"


def _summary(path: str) -> str:
    """First line of an object's docstring."""
    text = (inspect.getdoc(found(path)) or "").partition("\n\n")[0]
    return " ".join(text.split())


def found(path: str) -> Any:
    """The object with this dotted path, whose last names may be attributes of a module."""
    module, _, name = path.rpartition(".")
    try:
        return getattr(importlib.import_module(module), name)
    except ModuleNotFoundError:
        return getattr(found(module), name)
