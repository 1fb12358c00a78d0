"""Public names, commands and sections of the report: each is there, listed once, and loaded when it is asked for."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flatscope as fs
import flatscope_papers
from flatscope import extend
from flatscope.cli import commands
from flatscope.lazy_names import lazy_names
from flatscope.reports.items import OWN_KINDS, shown_kinds
from flatscope.reports.kinds import ORDER
from flatscope.reports.training_kinds import TRAINING_KINDS

SOURCE = Path(__file__).parents[1] / "src"
WITHOUT_PAPERS = """
import sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flatscope_papers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
"""
MEASURE = """
import torch, pandas as pd, flatscope as fs
problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
measured = fs.measure(problem, "margin")
"""
REPORT = """
history = pd.DataFrame({"epoch": [1, 2], "train_loss": [1.0, 0.5]})
fs.report({"net": [measured, history]}, sys.argv[1])
"""
# Who asks first for what a measurement does without. pandas, which tables are made of, looks for pyarrow by itself.
ASKED = """
import sys

class Noted:
    def find_spec(self, name, path=None, target=None):
        if name in {"typer", "jinja2", "matplotlib", "sklearn", "pyarrow"}:
            frame = sys._getframe(1)
            while frame.f_globals["__name__"].startswith(("importlib", "_frozen_importlib")):
                frame = frame.f_back
            print(name, "for", frame.f_globals["__name__"])

sys.meta_path.insert(0, Noted())
"""
HELP = "import runpy\nsys.argv = ['flatscope', '--help']\nrunpy.run_module('flatscope', run_name='__main__')"


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    return subprocess.run(
        [sys.executable, "-c", WITHOUT_PAPERS + code, *words], capture_output=True, text=True, env=env, check=False
    )


@pytest.mark.parametrize("package", [fs, flatscope_papers, extend])
def test_every_name_of_the_stub_is_there_and_comes_from_where_it_says(package: object) -> None:
    load, names, public = lazy_names(package.__name__)  # type: ignore[attr-defined]
    assert public
    assert set(public) <= set(names())
    assert all(getattr(package, name) is load(name) for name in public)
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        load("nothing")


def test_names_for_additions_are_few_and_each_is_explained() -> None:
    page = (SOURCE.parent / "docs" / "how-to" / "extend.md").read_text(encoding="utf-8")
    assert len(extend.__all__) <= 40, "each is a promise: give what it does to one that is there, or to its user"
    assert {name for name in extend.__all__ if f"`{name}`" not in page} == set()


def test_commands_and_kinds_of_the_report_are_listed() -> None:
    assert set(commands.OF_THE_PAPERS) == {"study"}
    assert all(commands.declared_command(name) for name in commands.command_names())
    assert tuple(shown_kinds()) == ORDER
    assert OWN_KINDS.keys() | TRAINING_KINDS.keys() < set(ORDER)


def test_nothing_of_the_library_imports_the_papers() -> None:
    assert run(MEASURE).returncode == 0
    assert importlib.util.find_spec("flatscope_papers")


@pytest.mark.long
def test_the_page_and_the_commands_need_no_papers(tmp_path: Path) -> None:
    done = run(MEASURE + REPORT, str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()
    listed = run(HELP)
    assert listed.returncode == 0, listed.stderr
    assert " measure " in listed.stdout


def test_a_measurement_loads_no_library_of_commands_pictures_or_reports() -> None:
    done = run(ASKED + MEASURE.replace("pandas as pd, ", ""))
    assert done.returncode == 0, done.stderr
    assert {line.split(".")[0] for line in done.stdout.splitlines()} <= {"pyarrow for pandas"}
    assert "sklearn for __main__" in run(ASKED + "import sklearn").stdout
