"""Files beside the code of a paper: claims, texts and reasons are read whole, and a slip in them is named."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Callable
from importlib.resources import files
from typing import Any

import pandas as pd
import pytest

from flatscope.errors import InputError
from flatscope.inputs.data_set import Raw
from flatscope.inputs.loading import load
from flatscope.training.sweeps.store import Store
from flatscope_papers import studies
from flatscope_papers.claims import NEGATIVE
from flatscope_papers.declaration import Config, Measured, each_trial, importable_name
from flatscope_papers.smoke_data import digits_as_cifar10, digits_as_mnist
from flatscope_papers.study_registry import FOLDERS
from flatscope_papers.toml_files import study_words_of_table

FILE = """
[texts]
few = "few networks"

[study]
figure = "Figure 1"
title = "More"
differs.small = ["@few", "other data"]

[[study.claims]]
key = "less"
where = "Figure 1"
statement = "it falls"
number = "a slope"
reported = "falls"
holds = "below 0"
partly = [-inf, 0.5]
reason.small = "@few"

[[study.claims]]
key = "near"
where = "Figure 1"
statement = "it is near two"
number = "a size"
reported = "2"
holds = [1, 3.0]
reason = "luck"
"""


def read(text: str = FILE) -> Any:
    return study_words_of_table(tomllib.loads(text), "study", "a file")


def test_texts_ranges_and_reasons_are_read() -> None:
    words = read()
    assert words.differs == {"small": ("few networks", "other data")}
    assert words.at_paper_scale == ""
    less, near = words.claims
    assert (less.holds, less.partly) == (NEGATIVE, (-math.inf, 0.5))
    assert (near.holds, near.partly) == ((1.0, 3.0), None)
    assert words.reasons_at("small") == {"less": "few networks", "near": "luck"}
    assert words.reasons_at("paper") == {"near": "luck"}


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("[study]", "[other]", "study"),
        ('"near"', '"less"', "different keys"),
        ('"@few", "other', '"@fwe", "other', "@fwe"),
        ("title =", "titel =", "titel"),
        ("reported =", "repotred =", "repotred"),
        ('"below 0"', '"under 0"', "under 0"),
        ("[1, 3.0]", "[3.0, 1]", "near"),
        ("[1, 3.0]", "[1]", "near"),
    ],
)
def test_a_slip_is_refused_by_name(old: str, new: str, named: str) -> None:
    assert old in FILE
    text = FILE.replace(old, new).replace("[[study", "[[other") if new == "[other]" else FILE.replace(old, new)
    with pytest.raises(InputError, match=named):
        read(text)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.__name__)
def test_every_table_is_a_study_and_every_text_is_used(folder: Any) -> None:
    text = files(folder).joinpath("studies.toml").read_text(encoding="utf-8")
    whole = tomllib.loads(text)
    declared = {name for name, entry in studies().items() if entry.analyse.__module__.startswith(folder.__name__)}
    assert set(whole) - {"texts", "paper"} == declared
    assert set(whole.get("texts", {})) == set(re.findall(r'"@(\w+)"', text))


@each_trial("adding")
def add(config: Config, store: Store) -> Measured:
    """The work of a unit, one trial at a time."""
    return Measured({"sum": config["a"] + config["b"]}, frames={"rows": pd.DataFrame({"x": [config["a"]]})})


def test_a_function_of_one_trial_does_a_unit() -> None:
    store, heard = Store("memory://each_trial"), []
    configs = [{"a": 1, "b": 2}, {"a": 3, "b": 4}]
    add(configs, store, lambda fraction, note: heard.append((fraction, note)))
    assert [store.read(config).metrics["sum"] for config in configs] == [3, 7]
    assert store.read(configs[1]).frame("rows")["x"].tolist() == [3]
    assert heard == [(0.5, "adding"), (1.0, "adding")]
    assert importable_name(add) == f"{__name__}:add"


@pytest.mark.parametrize("function", [digits_as_mnist, digits_as_cifar10])
def test_images_of_smoke_runs_are_standardised_as_named_sets_are(function: Callable[[], Raw]) -> None:
    x, _ = load(importable_name(function), train_size=100, test_size=0).train
    assert x.mean(dim=(0, 2, 3)).abs().max() < 1e-5
    assert (x.std(dim=(0, 2, 3)) - 1).abs().max() < 1e-2
    plain, _ = load(importable_name(function), train_size=100, test_size=0, standardize=False).train
    assert (plain.min(), plain.max()) == (0, 1)
