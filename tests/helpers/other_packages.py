"""How the models of other packages are imported: from this environment or a folder of their own, else skipped.

`make models` puts the packages into .venv/models without what they ask for; FLATSCOPE_MODELS names another folder.
What a package imports for its data and never runs here (readers of sound, cutters of pictures) is a stub meanwhile.
"""

from __future__ import annotations

import contextlib
import fnmatch
import importlib
import importlib.util
import os
import sys
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor, nn

FOLDER = Path(os.environ.get("FLATSCOPE_MODELS", Path(sys.prefix) / "models"))
if FOLDER.is_dir() and str(FOLDER) not in sys.path:
    sys.path.append(str(FOLDER))  # last: what the environment has itself goes first


class Stub(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (nn.Module,), {})
        setattr(self, name, made)
        return made


@contextlib.contextmanager
def stubs(names: tuple[str, ...]) -> Iterator[None]:
    """Empty modules of these names, whether they could be imported or not; gone afterwards."""
    kept = {name: module for name, module in sys.modules.items() if name in names}
    for name in names:
        sys.modules[name] = Stub(name)
    try:
        yield
    finally:
        for name in names:
            del sys.modules[name]
        sys.modules.update(kept)


def package(name: str, without: tuple[str, ...] = ()) -> Any:
    """An imported module; the test is skipped where the package is missing or cannot be imported."""
    top = name.partition(".")[0]
    if top not in sys.modules and importlib.util.find_spec(top) is None:
        pytest.skip(f"the package {top} is not installed; `make models` installs it")
    try:
        with stubs(without), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return importlib.import_module(name)
    except ImportError as problem:
        pytest.skip(f"the package {top} cannot be imported here: {problem}")


def file_of(name: str, path: str) -> Path:
    """A file inside a package, without importing the package."""
    found = importlib.util.find_spec(name)
    if found is None or not found.submodule_search_locations:
        pytest.skip(f"the package {name} is not installed; `make models` installs it")
    return Path(next(iter(found.submodule_search_locations))) / path


def inside(name: str, module: str, without: tuple[str, ...] = ()) -> Any:
    """A module of a package whose own __init__ asks for more than the module needs, which is not run."""
    place = file_of(name, "")
    hollow = types.ModuleType(name)
    hollow.__path__ = [str(place)]
    kept = {key: value for key, value in sys.modules.items() if key.partition(".")[0] == name}
    for key in kept:
        del sys.modules[key]
    sys.modules[name] = hollow
    try:
        return package(f"{name}.{module}", without)
    finally:
        for key in [key for key in sys.modules if key.partition(".")[0] == name]:
            del sys.modules[key]
        sys.modules.update(kept)


def only(model: nn.Module, *patterns: str) -> nn.Module:
    """The network with the parameters of these names to be trained, and all others frozen."""
    chosen = 0
    for name, value in model.named_parameters():
        value.requires_grad_(any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns))
        chosen += value.requires_grad
    assert chosen, patterns
    return model


class Reads(nn.Module):
    """A network and how a tensor is got from what it takes and gives."""

    def __init__(self, model: nn.Module, read: Any) -> None:
        super().__init__()
        self.model, self.read = model, read

    def forward(self, *inputs: Tensor) -> Tensor:
        found: Tensor = self.read(self.model, *inputs)
        return found


def reads(model: nn.Module, read: Any) -> nn.Module:
    """That network in float64 and eval mode."""
    return Reads(model, read).double().eval()


def weights(path: Path) -> Any:
    """What a file of weights holds; nothing in it is executed."""
    return torch.load(path, map_location="cpu", weights_only=True)
