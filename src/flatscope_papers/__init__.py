"""Every figure and table of the four papers as a study with claims and verdicts.

The library finds this package by the entry point `flatscope.papers` and asks it for the names in `_HOMES`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatscope_papers.catalogue import find_study, studies
    from flatscope_papers.commands import app as command
    from flatscope_papers.pages.section import report_section
    from flatscope_papers.result import load_result
    from flatscope_papers.running import study

__all__ = ["command", "find_study", "load_result", "report_section", "studies", "study"]

# Loaded when first asked for: the help of a command should not wait for torch and Matplotlib.
_HOMES = {
    "command": ("commands", "app"),
    "find_study": ("catalogue", "find_study"),
    "load_result": ("result", "load_result"),
    "report_section": ("pages.section", "report_section"),
    "studies": ("catalogue", "studies"),
    "study": ("running", "study"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
