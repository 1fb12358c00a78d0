"""Code that the library finds by name: functions of the user's, and the studies of the four papers.

A user's function is named on the command line as `file.py:name` or `package.module:name`. The package of the papers
announces itself by an entry point and is asked for four names: `study` (a function), `command` (the commands
`flatscope study …`), `report_section` (studies on the page of a report) and `load_result` (a saved result).
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from flatscope.errors import InputError, UnknownNameError


def find_factory(source: str) -> Callable[..., Any]:
    """The callable of that name. The user's own code is imported, and so run."""
    target, _, name = source.rpartition(":")
    if not target or not name:
        raise InputError("file.py:factory or package.module:factory", repr(source), where="factory")
    module = _from_file(Path(target).expanduser()) if target.endswith(".py") else _from_path(target)
    factory = getattr(module, name, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownNameError.among(name, public, f"function in {target}")
    return factory  # type: ignore[no-any-return]


def _from_path(target: str) -> ModuleType:
    try:
        with _importing_from(Path.cwd()):  # a console script does not have it on its path, unlike `python -m`
            return importlib.import_module(target)
    except Exception as error:
        fix = "A file is named with its ending: path/to/file.py:factory"
        raise InputError("a module that can be imported", _said(error), target, fix) from error


def _from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flatscope_user_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        fix = f"Check the path, from {Path.cwd()}; the function follows a colon: path/to/file.py:function"
        raise InputError("a python file", "no such file", str(path), fix)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses defined in the file look their module up there
    try:
        with _importing_from(path.parent.resolve()):  # the file may import its neighbours
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise InputError("a python file that can be imported", _said(error), where=str(path)) from error
    return module


@contextmanager
def _importing_from(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"


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
