"""Every figure and table of the four papers as a study with claims and verdicts.

The library finds this package by the entry point `flatscope.papers` and asks it for the names in `_HOMES`.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flatscope_papers.known_studies import find_study, studies
    from flatscope_papers.pages.section import report_section
    from flatscope_papers.study_commands import app as command
    from flatscope_papers.study_result import load_result
    from flatscope_papers.study_runs import study

__all__ = ["command", "find_study", "load_result", "report_section", "studies", "study"]

# Loaded when first asked for: the help of a command should not wait for torch and Matplotlib.
_HOMES = {
    "command": ("study_commands", "app"),
    "find_study": ("known_studies", "find_study"),
    "load_result": ("study_result", "load_result"),
    "report_section": ("pages.section", "report_section"),
    "studies": ("known_studies", "studies"),
    "study": ("study_runs", "study"),
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _HOMES[name]
    return getattr(importlib.import_module(f"{__name__}.{module}"), attribute)
