"""The followed networks of Petzka et al. (2019): what is seen of them is right, broken off in between or not."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch
from torch.nn import functional

import flatscope as fs
from flatscope.inputs.loading import load
from flatscope.training.evaluation import evaluate
from flatscope.training.group_training import PopulationView
from flatscope.training.initialization import initialize
from flatscope.training.models import build
from flatscope.training.sweeps.store import Store
from flatscope_papers.petzka2019 import followed_networks
from flatscope_papers.petzka2019.followed_networks import change_by_layer_rescaling, train_and_follow

DATA = {"name": "flatscope_papers.smoke_data:digits_as_cifar10", "train_size": 60, "test_size": 30}


class BrokenOff(BaseException):
    """Stands for a kill: nothing catches it."""


def config(seed: int) -> dict[str, Any]:
    return {
        "data": DATA,
        "model": {"name": "lenet5"},
        "init": {"scheme": "normal", "variance": 0.01},
        "train": {"lr": 0.05, "batch_size": 25, "epochs": 5, "seed": seed, "shuffle": False},
        "follow": {"epochs": [2, 4], "measures": ["kappa_trace"], "layers": ["fc3", "fc2"], "factor": 7},
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
        assert seen["moved"].iloc[-1] < 1e-4


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


def test_what_is_seen_is_what_the_library_measures(tmp_path: Path) -> None:
    one, store = config(0), Store(tmp_path)
    one["follow"]["epochs"] = [5]
    train_and_follow([one, config(1)], store, lambda fraction, note: None)
    data = load(**DATA)
    model = build("lenet5")
    model.load_state_dict(store.read(one).weights())
    [row] = store.read(one).frame("followed").to_dict("records")
    table = fs.measure(fs.Problem(model.eval(), train=data.train), ["kappa_trace"])
    for layer in ("fc2", "fc3"):
        assert row[f"kappa_trace/{layer}"] == pytest.approx(table.layer("kappa_trace")[layer], rel=1e-4)
    for part, samples in (("train", data.train), ("test", data.test)):
        assert (row[f"{part}_loss"], row[f"{part}_error"]) == pytest.approx(evaluate(model, *samples), rel=1e-5)


def test_what_a_reparameterization_moves_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    names, moved = ["layer_trace", "layer_max_eigenvalue", "kappa", "kappa_trace", "rho"], []

    def after_epoch(epoch: int, view: fs.training.PopulationView) -> None:
        moved.append(change_by_layer_rescaling(view, [0, 1], names, ["fc3", "fc2"], [9, 25]))

    trials = [{"seed": seed, "epochs": 2} for seed in (0, 1)]
    fs.train_population("lenet5", trials, load(**DATA), after_epoch=after_epoch)
    assert max(moved[0].values()) < 1e-4
    monkeypatch.setattr(
        followed_networks, "predicted_factor_of_layer_measure", lambda *_: 1.0
    )  # as if trace and eigenvalue had to stay
    fs.train_population("lenet5", trials, load(**DATA), after_epoch=after_epoch)
    assert min(moved[-1].values()) > 0.9


def test_a_network_is_looked_at_where_its_mini_batches_first_fall_below_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Against the means of every epoch; broken off and resumed it is looked at no second time."""
    configs = [config(0), config(1)]
    means: dict[tuple[int, int], float] = {}
    look = followed_networks._Followed.look

    def listening(self: Any, epoch: int, view: PopulationView) -> None:
        means.update({(trial, epoch): view.batch_loss(trial) for trial in view.active})
        look(self, epoch, view)

    monkeypatch.setattr(followed_networks._Followed, "look", listening)
    monkeypatch.setattr(followed_networks, "CHECKPOINT_SECONDS", 0.0)
    train_and_follow(configs, Store(tmp_path / "first"), lambda *_: None)
    last = max(means[trial, 5] for trial in range(2))
    limits = [10.0, max(means.values()), (last + means[0, 1]) / 2, last + 1e-6, 1e-9]
    for one in configs:
        one["follow"] |= {"epochs": [5], "losses": limits}
    stores = [Store(tmp_path / name) for name in ("plain", "broken")]
    train_and_follow(configs, stores[0], lambda *_: None)

    def broken_off(fraction: float, note: str) -> None:
        if note == "epoch 3":
            raise BrokenOff

    with pytest.raises(BrokenOff):
        train_and_follow(configs, stores[1], broken_off)
    train_and_follow(configs, stores[1], lambda *_: None)
    for trial, one in enumerate(configs):
        due: dict[int, float] = {}
        for limit in limits:  # of several in one epoch the smallest
            epochs = [epoch for (t, epoch), mean in means.items() if t == trial and mean < limit]
            due |= {min(epochs): limit} if epochs else {}
        assert len(due) > 1
        for store in stores:
            seen = store.read(one).frame("followed")
            assert seen["epoch"].tolist() == sorted({*due, 5})
            assert seen.dropna(subset="below").set_index("epoch")["below"].to_dict() == due
