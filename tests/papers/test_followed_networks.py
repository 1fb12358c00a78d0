"""The followed networks of Petzka et al. (2019): what is seen of them is right, broken off in between or not."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn import functional

import flatscope as fs
from flatscope.sweeps.store import Store
from flatscope.training.data import load
from flatscope.training.initialization import initialize
from flatscope.training.models import build
from flatscope_papers.petzka2019 import followed_networks
from flatscope_papers.petzka2019.followed_networks import moved_by_rewriting, train_and_follow
from flatscope_papers.petzka2019.last_layers import measured

DATA = {"name": "flatscope_papers.smoke_data:digits_as_cifar10", "train_size": 60, "test_size": 30}
NAMES = ["layer_trace", "layer_max_eigenvalue", "kappa", "kappa_trace", "rho"]


class BrokenOff(BaseException):
    """Stands for a kill: nothing catches it."""


def config(seed: int) -> dict[str, Any]:
    return {
        "data": DATA,
        "model": {"name": "lenet5"},
        "init": {"scheme": "normal", "variance": 0.01},
        "train": {"lr": 0.05, "batch_size": 25, "epochs": 5, "seed": seed, "shuffle": False},
        "follow": {"epochs": [2, 4], "measures": ["kappa_trace"], "tail": 3, "factor": 7},
    }


def test_a_population_that_is_broken_off_is_seen_as_one_that_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [config(seed) for seed in (0, 1)]
    plain, store = Store(tmp_path / "plain"), Store(tmp_path / "store")
    train_and_follow(configs, plain, lambda fraction, note: None)
    monkeypatch.setattr(followed_networks, "CHECKPOINT_SECONDS", 0.0)

    def broken_off(fraction: float, note: str) -> None:
        if note == "epoch 4":  # the look was made, the checkpoint is of epoch 3
            raise BrokenOff

    with pytest.raises(BrokenOff):
        train_and_follow(configs, store, broken_off)
    said: list[str] = []
    train_and_follow(configs, store, lambda fraction, note: said.append(note))
    assert said[0] == "epoch 4"
    for one in configs:
        seen, expected = store.read(one).frame("followed"), plain.read(one).frame("followed")
        pd.testing.assert_frame_equal(seen, expected)
        assert seen["epoch"].tolist() == [2, 4]
        assert store.read(one).metrics["moved"] < 1e-9


def test_the_mean_gradient_is_that_of_the_steps_that_were_taken(tmp_path: Path) -> None:
    one, store = config(0), Store(tmp_path)
    train_and_follow([one], store, lambda fraction, note: None)
    x, y = load(**DATA).train
    model = initialize(build("lenet5", seed=0), "normal", 0, variance=0.01)
    sgd = torch.optim.SGD(model.parameters(), lr=0.05)
    means = []
    for _ in range(4):
        gradients = []
        for batch in torch.arange(60).split(25):
            sgd.zero_grad()
            functional.cross_entropy(model(x[batch]), y[batch]).backward()
            gradients.append(model.get_submodule("fc3").weight.grad.clone())
            sgd.step()
        means.append(float(torch.stack(gradients).mean(0).abs().max()))
    assert store.read(one).frame("followed")["gradient"].tolist() == pytest.approx([means[1], means[3]], rel=1e-3)


def test_last_layers_on_their_features_equal_those_of_the_whole_network() -> None:
    x, y = load(**DATA).train
    model = build("lenet5", seed=3).double().eval()
    found = measured(model, x.double(), y, NAMES, tail=3)
    table = fs.measure(fs.Problem(model, train=(x.double(), y)), NAMES)
    assert set(found) == {f"{name}/{layer}" for name in NAMES for layer in ("fc2", "fc3")}
    for name, value in found.items():
        measure, layer = name.split("/")
        assert value == pytest.approx(table.layer(measure)[layer], rel=1e-9)


def test_a_network_that_diverged_has_no_curvature() -> None:
    x, y = load(**DATA).train
    model = build("lenet5", seed=3).eval()
    with torch.no_grad():
        model.get_submodule("fc1").weight.fill_(math.inf)
    assert measured(model, x, y, NAMES, tail=3) == {}


def test_what_a_reparameterization_moves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    x, y = load(**DATA).train
    model = build("lenet5", seed=3).double().eval()
    follow = {"measures": NAMES, "tail": 3, "factor": 9}
    assert moved_by_rewriting(model, x.double(), y, follow) < 1e-9
    monkeypatch.setattr(followed_networks, "law", lambda *_: 1.0)  # as if trace and eigenvalue had to stay
    assert moved_by_rewriting(model, x.double(), y, follow) > 0.9
