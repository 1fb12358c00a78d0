"""Functions that are found by name: `file.py:name` or `package.module:name`, on the command line and in sweeps."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

from flatscope.errors import InputError, UnknownNameError

# Modules by the names that stores of earlier versions have for them, and where they are now.
MOVED = {"flatscope.benchmarking.recipe": "flatscope.training.benchmarking.recipe"}


def find_factory(source: str) -> Callable[..., Any]:
    """The callable of that name. The user's own code is imported, and so run."""
    target, _, name = source.rpartition(":")
    if not target or not name:
        raise InputError("file.py:factory or package.module:factory", repr(source), where="factory")
    module = import_user_module(target)
    factory = getattr(module, name, None)
    if not callable(factory):
        public = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise UnknownNameError.among(name, public, f"function in {target}")
    return factory  # type: ignore[no-any-return]


def import_user_module(target: str) -> ModuleType:
    """The module of a name, or of a file whose name ends in .py; its code is run."""
    return _module_from_file(Path(target).expanduser()) if target.endswith(".py") else _module_from_path(target)


def _module_from_path(target: str) -> ModuleType:
    try:
        with _folder_on_import_path(Path.cwd()):  # a console script does not have it on its path, unlike `python -m`
            return importlib.import_module(MOVED.get(target, target))
    except Exception as error:
        fix = "A file is named with its ending: path/to/file.py, and a function in it path/to/file.py:factory"
        raise InputError("a module that can be imported", _error_in_words(error), target, fix) from error


def _module_from_file(path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"flatscope_user_{path.stem}", path)
    if not path.is_file() or spec is None or spec.loader is None:
        fix = f"Check the path, from {Path.cwd()}; a function follows a colon: path/to/file.py:function"
        raise InputError("a python file", "no such file", str(path), fix)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses defined in the file look their module up there
    try:
        with _folder_on_import_path(path.parent.resolve()):  # the file may import its neighbours
            spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[spec.name]
        raise InputError("a python file that can be imported", _error_in_words(error), where=str(path)) from error
    return module


@contextmanager
def _folder_on_import_path(folder: Path) -> Iterator[None]:
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        if str(folder) in sys.path:
            sys.path.remove(str(folder))


def _error_in_words(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
