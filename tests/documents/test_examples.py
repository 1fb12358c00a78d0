"""Examples run: those in docstrings, and the files that users are told to start from."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import pkgutil
import runpy
import sys
from pathlib import Path

import pytest
import torch

import flatscope
import flatscope_papers
from flatscope import InputError, Problem, measure
from flatscope.cli.sources import load_model
from flatscope.inputs.loading import load

ROOT = Path(__file__).parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
LABELS = ROOT / "examples" / "true_and_random_labels.py"
MODULES = [
    found.name
    for package in (flatscope, flatscope_papers)
    for found in pkgutil.walk_packages(package.__path__, f"{package.__name__}.")
    if not found.name.endswith("__main__")
]


@pytest.mark.parametrize("name", MODULES)
def test_docstrings_show_what_happens(name: str) -> None:
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    assert result.failed == 0
    source = Path(module.__file__ or "").read_text()
    assert result.attempted or ">>> " not in source, "an example in a place where doctest does not look"


@pytest.mark.parametrize("name", [name for name in flatscope.__all__ if not name.startswith("__")])
def test_every_public_name_has_an_example(name: str) -> None:
    assert ">>> " in (inspect.getdoc(getattr(flatscope, name)) or "")


SMALLER = {
    "flatness_radius.py": ["--size", "60", "--directions", "20", "--lr", "0.2", "--loss", "0.01"],
    "non_vacuous_bound.py": ["--others", "--hidden", "20", "--steps", "50", "--draws", "100"],
}


@pytest.mark.long
@pytest.mark.parametrize("path", [path for path in EXAMPLES if path != LABELS], ids=lambda path: path.name)
def test_example_files_run(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    quick = ["--quick"] if "--quick" in path.read_text() else SMALLER.get(path.name, [])
    monkeypatch.setattr(sys, "argv", [str(path), *quick])
    runpy.run_path(str(path), run_name="__main__")


def check_labels(data: str, samples: int, lr: str) -> None:
    """A quick run of the study: every norm and the divergence are larger for random labels."""
    small = ["--samples", str(samples), "--hidden", "64", "--draws", "100", "--steps", "20", "--lr", lr]
    table = runpy.run_path(str(LABELS))["main"](["--data", data, *small])
    assert len(table) == 7
    assert table.notna().all(axis=None)
    judged = table.drop(index="sharpness")  # which the paper does not expect to tell them apart
    assert (judged["true < random"] == "met").all(), table
    assert (judged["random / true"] > 1.2).all(), table


def test_random_labels_are_told_from_true_ones_on_the_digits() -> None:
    check_labels("digits", 100, "0.3")


@pytest.mark.long
@pytest.mark.real_data
@pytest.mark.skipif(not os.environ.get("FLATSCOPE_DATA"), reason="FLATSCOPE_DATA names no folder")
def test_random_labels_are_told_from_true_ones_on_mnist() -> None:
    check_labels("mnist", 150, "0.1")


def test_the_users_model_can_be_measured() -> None:
    (path,) = [path for path in EXAMPLES if path.name == "my_model.py"]
    data = load("digits", train_size=40, test_size=20)
    model = load_model(f"{path}:build", seed=1)
    again = load_model(f"{path}:build", seed=1)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    table = measure(Problem(model, train=data.train, test=data.test), ["parameter_count", "kappa_trace"])
    assert list(table.layer("kappa_trace")) == ["conv", "fc1", "fc2"]
    with pytest.raises(InputError, match="train, layer conv: expected inputs that the model accepts"):
        Problem(model, train=load("digits", train_size=40, flatten=True).train)
