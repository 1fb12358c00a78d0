"""The door to the studies of the four papers, which live in a package of their own.

The library never imports that package by name for its own work: the package announces itself by an entry point, and
what is found there is asked for by three names: `study` (a function), `command` (the commands `flatscope study …`)
and `report_section` (studies on the page of a report); `load_result` reads a saved result.
"""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from typing import Any

from flatscope.errors import InputError

GROUP = "flatscope.papers"
PACKAGE = "flatscope_papers"  # found by this name where the source runs without being installed


def from_papers(name: str) -> Any:
    """What the package of the papers offers under that name.

    Raises:
        InputError: the package is not there; the error says what to install.
    """
    for point in entry_points(group=GROUP):
        return getattr(point.load(), name)
    try:
        return getattr(importlib.import_module(PACKAGE), name)
    except ModuleNotFoundError as missing:
        if missing.name != PACKAGE:
            raise
        fix = f"Install the whole of flatscope (pip install flatscope), which brings {PACKAGE}"
        raise InputError(f"the package {PACKAGE}", "not installed", where="studies", fix=fix) from missing
