"""Files and modules of the user that declare measures, bounds and kinds of results before a command runs."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from flatscope.errors import InputError
from flatscope.inputs.factories import import_user_module
from flatscope.registry import declarations
from flatscope.reports.kinds import ADDED_KINDS

_LOADED: set[str] = set()  # a file that is named twice is run once


def load_extensions(sources: Iterable[str]) -> None:
    """Import files and modules, each of which must declare something.

    Args:
        sources: `path/to/file.py` or `package.module`.
    """
    for source in sources:
        place = str(Path(source).expanduser().resolve()) if source.endswith(".py") else source
        if place in _LOADED:
            continue
        before = _declared_names()
        import_user_module(source)
        if _declared_names() == before:
            expected = "a measure, a bound or a kind for the report that the file declares"
            fix = "Write @measure(...) of flatscope.extend above a function; a file with a factory goes to --model"
            raise InputError(expected, "none", where=f"--extension {source}", fix=fix)
        _LOADED.add(place)


def _declared_names() -> set[str]:
    return {*declarations(), *declarations("bound"), *ADDED_KINDS}
