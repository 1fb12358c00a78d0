"""The library and the packages beside it: what they offer is there, and without them errors say what to install."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import flatscope as fs
from flatscope import parts
from flatscope.cli import commands
from flatscope.factories import find_factory
from flatscope.reports.items import ORDER, OWN_KINDS, shown_kinds
from flatscope_training import models
from flatscope_training.sweeps.work import train_and_measure

SOURCE = Path(__file__).parents[1] / "src"
WITHOUT = """
import importlib.metadata, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {packages}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)

sys.meta_path.insert(0, Blocked())
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **chosen: [] if chosen == {{"group": "flatscope.parts"}} else found(**chosen)
"""
COMMAND = "sys.argv = ['flatscope', *{words}]\nfrom flatscope.cli import main\nmain()"
MEASURE = """
import torch, pandas as pd, flatscope as fs
problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
history = pd.DataFrame({"epoch": [1, 2], "train_loss": [1.0, 0.5]})
fs.report({"net": [fs.measure(problem, "margin"), history]}, sys.argv[1])
"""


def run(code: str, *words: str, without: tuple[str, ...]) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", WITHOUT.format(packages=without) + code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_the_packages_announce_what_the_library_finds_by_name() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert set(project["entry-points"][parts.GROUP].values()) == set(parts.PACKAGES)
    assert [part.package for part in parts.parts()] == list(parts.PACKAGES)


def test_all_that_is_offered_is_there() -> None:
    offered = {name: part for part in parts.parts() for name in part.names}
    assert set(offered) == set(fs._IN_PARTS)
    for name, part in offered.items():
        assert getattr(fs, name) is getattr(importlib.import_module(part.package), name)
        assert name in dir(fs)
    assert set(commands.ORDER) == set(commands.command_names())
    assert tuple(shown_kinds()) == ORDER
    assert OWN_KINDS.keys() < set(ORDER)
    assert parts.built_in_models() is models
    for part in parts.parts():
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            importlib.import_module(part.package).nothing  # noqa: B018


def test_functions_are_found_by_the_names_that_stored_sweeps_have() -> None:
    assert find_factory("flatscope.sweeps.work:train_and_measure") is train_and_measure
    assert find_factory("flatscope.training.models:mlp") is models.mlp
    for part in parts.parts():
        for module in part.former.values():
            assert importlib.import_module(module)


@pytest.mark.parametrize("without", [("flatscope_papers",), parts.PACKAGES])
def test_the_library_measures_and_reports(tmp_path: Path, without: tuple[str, ...]) -> None:
    done = run(MEASURE, str(tmp_path / "page.html"), without=without)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()
    listed = run(COMMAND.format(words=["--help"]), without=without)
    assert listed.returncode == 0, listed.stderr
    assert " measure " in listed.stdout
    assert " study " not in listed.stdout
    assert (" train " in listed.stdout) == (without != parts.PACKAGES)


@pytest.mark.parametrize(
    ("name", "words", "package"),
    [
        ("study", ["study", "list"], "flatscope_papers"),
        ("train_population", ["train", "--help"], "flatscope_training"),
        ("Atlas", ["sweep", "status"], "flatscope_training"),
    ],
)
def test_what_is_missing_says_what_to_install(name: str, words: list[str], package: str) -> None:
    asked = run(f"import flatscope as fs\nfs.{name}", without=(package,))
    assert "InputError" in asked.stderr
    assert package in asked.stderr
    assert "pip install" in asked.stderr
    typed = run(COMMAND.format(words=words), without=(package,))
    assert typed.returncode == 2
    assert package in typed.stderr
    assert "Traceback" not in typed.stderr
