"""What a comparison says in words: names of checkpoints, shared places, networks not trained to the end."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest
import torch
from torch import nn

import flatscope as fs
from flatscope.cli.compare import _names
from flatscope.comparing.rankings import places, tie_text


def test_without_classes_the_loss_says_which_network_is_undertrained() -> None:
    generator = torch.Generator().manual_seed(0)
    x, weights = torch.randn(40, 64, generator=generator), torch.randn(64, 1, generator=generator) / 8
    good, poor = nn.Linear(64, 1, bias=False), nn.Linear(64, 1, bias=False)
    with torch.no_grad():
        good.weight.copy_(weights.T * 0.9)
        poor.weight.copy_(weights.T * 0.5)
    problems = {n: fs.Problem(m, train=(x, x @ weights), loss="mse") for n, m in (("good", good), ("poor", poor))}
    (warning,) = fs.compare(problems, names="l2_norm").warnings()
    assert warning.startswith("poor fits the training set far less well than good (training loss")


def test_a_shared_first_place_is_said_in_words() -> None:
    frame = pd.DataFrame({"name": list("abcd"), "rank": [1.5, 1.5, 3.5, 3.5], "families_first": [2, 2, 0, 0]})
    assert places(frame) == ["tied first:", "tied first:", "tied for 3 to 4:", "tied for 3 to 4:"]
    assert "split evenly between a and b" in tie_text(frame)
    assert "mean ranks of a and b are equal" in tie_text(frame.assign(families_first=[2, 1, 1, 0]))
    frame = pd.DataFrame({"name": list("abc"), "rank": [1.0, 2.5, 2.5], "families_first": [2, 1, 1]})
    assert places(frame) == ["1.", "tied for 2 to 3:", "tied for 2 to 3:"]
    assert tie_text(frame) == ""
    frame = pd.DataFrame({"name": list("abc"), "rank": [2.0] * 3, "families_first": [1] * 3})
    assert places(frame) == ["tied first:"] * 3
    assert "between a, b and c" in tie_text(frame)


@pytest.mark.parametrize(
    ("paths", "names"),
    [
        (["runs/small/weights.safetensors", "runs/large/weights.safetensors"], ["small", "large"]),
        (["a/x/last/w.pt", "b/y/last/w.pt"], ["a/x", "b/y"]),
        (["runs/one.pt", "other/two.safetensors"], ["one", "two"]),
        (["runs/run.1", "runs/run.2"], ["run.1", "run.2"]),
        (["runs/w.pt", "runs/w.safetensors"], ["runs/w.pt", "runs/w.safetensors"]),
        (["w.pt", "runs/w.pt"], ["w.pt", "runs/w.pt"]),
    ],
)
def test_checkpoints_are_called_by_what_tells_their_paths_apart(paths: list[str], names: list[str]) -> None:
    assert _names([Path(path) for path in paths], None) == names
