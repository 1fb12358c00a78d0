"""The library without the package of the papers: everything else works, and studies say what to install."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from flatscope import factories

SOURCE = Path(__file__).parents[1] / "src"
WITHOUT = """
import importlib.metadata, sys

class Blocked:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "flatscope_papers":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocked())
found = importlib.metadata.entry_points
importlib.metadata.entry_points = lambda **chosen: [] if chosen == {"group": "flatscope.papers"} else found(**chosen)
"""
STUDY = "import flatscope as fs\nfs.study"
COMMAND = "sys.argv = ['flatscope', *{words}]\nfrom flatscope.cli import main\nmain()"
MEASURE = """
import torch, flatscope as fs
problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
fs.report(fs.measure(problem, "margin"), sys.argv[1])
"""


def run(code: str, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(SOURCE)}
    command = [sys.executable, "-c", WITHOUT + code, *words]
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False)


def test_the_package_announces_itself_with_the_names_that_the_library_asks_for() -> None:
    project = tomllib.loads((SOURCE.parent / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    (package,) = project["entry-points"][factories.GROUP].values()
    assert package == factories.PACKAGE
    asked = set()
    for path in (SOURCE / "flatscope").rglob("*.py"):
        asked |= set(re.findall(r'from_papers\("(\w+)"\)', path.read_text(encoding="utf-8")))
    assert asked == {"command", "load_result", "report_section", "study"}
    for name in asked:
        assert factories.from_papers(name) is getattr(importlib.import_module(package), name)


def test_the_library_measures_and_reports(tmp_path: Path) -> None:
    done = run(MEASURE, str(tmp_path / "page.html"))
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "page.html").is_file()
    listed = run(COMMAND.format(words=["--help"]))
    assert listed.returncode == 0, listed.stderr
    assert "study" in listed.stdout


def test_studies_say_what_to_install() -> None:
    asked = run(STUDY)
    assert "InputError" in asked.stderr
    assert "flatscope_papers" in asked.stderr
    assert "pip install" in asked.stderr
    typed = run(COMMAND.format(words=["study", "list"]))
    assert typed.returncode == 2
    assert "flatscope_papers" in typed.stderr
    assert "Traceback" not in typed.stderr
