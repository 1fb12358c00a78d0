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
from flatscope import live, parts
from flatscope_app.cli import commands, main
from flatscope_app.reports.items import ORDER, OWN_KINDS, shown_kinds
from flatscope_app.reports.training_kinds import TRAINING_KINDS
from flatscope_training import models
from flatscope_training.callbacks import Recorder
from flatscope_training.factories import find_factory
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
COMMAND = "import runpy\nsys.argv = ['flatscope', *{words}]\nrunpy.run_module('flatscope', run_name='__main__')"
MEASURE = """
import torch, pandas as pd, flatscope as fs
problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
measured = fs.measure(problem, "margin")
"""
REPORT = """
history = pd.DataFrame({"epoch": [1, 2], "train_loss": [1.0, 0.5]})
fs.report({"net": [measured, history]}, sys.argv[1])
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
    assert set(commands.OF_PARTS) == {name for part in parts.parts() for name in part.commands}
    assert parts.command_line() is main
    assert tuple(shown_kinds()) == ORDER
    assert OWN_KINDS.keys() | TRAINING_KINDS.keys() < set(ORDER)
    for part in parts.parts():
        with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
            importlib.import_module(part.package).nothing  # noqa: B018


def test_functions_are_found_by_the_names_that_stored_sweeps_have() -> None:
    assert find_factory("flatscope.sweeps.work:train_and_measure") is train_and_measure
    assert find_factory("flatscope.training.models:mlp") is models.mlp
    assert live.Recorder is Recorder
    for part in parts.parts():
        for module in part.former.values():
            assert importlib.import_module(module)


@pytest.mark.long
def test_the_library_measures_alone() -> None:
    done = run(MEASURE, without=parts.PACKAGES)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_the_page_and_the_commands_need_no_papers(tmp_path: Path) -> None:
    done = run(MEASURE + REPORT, str(tmp_path / "page.html"), without=("flatscope_papers",))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()
    listed = run(COMMAND.format(words=["--help"]), without=("flatscope_papers",))
    assert listed.returncode == 0, listed.stderr
    assert " measure " in listed.stdout
    assert " study " not in listed.stdout


@pytest.mark.parametrize(
    ("code", "package"),
    [
        ("import flatscope as fs\nfs.study", "flatscope_papers"),
        ("import flatscope as fs\nfs.train_population", "flatscope_training"),
        ("from flatscope.live import Recorder", "flatscope_training"),
        ("import flatscope as fs\nfs.report", "flatscope_app"),
        (COMMAND.format(words=["measure", "--help"]), "flatscope_app"),
    ],
)
def test_what_is_missing_says_what_to_install(code: str, package: str) -> None:
    asked = run(code, without=(package,))
    assert asked.returncode != 0
    assert "InputError" in asked.stderr
    assert package in asked.stderr
    assert "pip install" in asked.stderr


def test_a_command_of_a_missing_package_says_what_to_install() -> None:
    typed = run(COMMAND.format(words=["study", "list"]), without=("flatscope_papers",))
    assert typed.returncode == 2
    assert "flatscope_papers" in typed.stderr
    assert "Traceback" not in typed.stderr
