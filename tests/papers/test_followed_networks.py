"""The followed networks of Petzka et al. (2019): what is seen of them does not depend on being broken off."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from flatscope.sweeps.store import Store
from flatscope_papers.petzka2019 import followed_networks
from flatscope_papers.petzka2019.followed_networks import has_settled, train_and_follow


class BrokenOff(BaseException):
    """Stands for a kill: nothing catches it."""


def config(seed: int) -> dict[str, Any]:
    return {
        "data": {"name": "flatscope_papers.smoke_data:digits_as_cifar10", "train_size": 100, "test_size": 50},
        "model": {"name": "lenet5"},
        "init": "xavier_normal",
        "train": {"lr": 0.05, "momentum": 0.9, "batch_size": 10, "epochs": 8, "stop_loss": 0.5, "seed": seed},
        "follow": {"epochs": [2, 4], "losses": [2.0, 1.5, 0.01], "patience": 4},
        "reparameterize": {"low": 5.0, "high": 25.0, "seed": seed},
    }


@pytest.mark.parametrize("epoch", [3, 4])
def test_a_population_that_is_broken_off_is_seen_as_one_that_is_not(
    epoch: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs = [config(seed) for seed in (0, 1)]
    plain, store = Store(tmp_path / "plain"), Store(tmp_path / "store")
    train_and_follow(configs, plain, lambda fraction, note: None)
    monkeypatch.setattr(followed_networks, "CHECKPOINT_SECONDS", 0.0)

    def broken_off(fraction: float, note: str) -> None:
        if note == f"epoch {epoch}":
            raise BrokenOff

    with pytest.raises(BrokenOff):
        train_and_follow(configs, store, broken_off)
    said: list[str] = []
    train_and_follow(configs, store, lambda fraction, note: said.append(note))
    assert said[0] == f"epoch {epoch}"
    for one in configs:
        seen, expected = store.read(one).frame("followed"), plain.read(one).frame("followed")
        pd.testing.assert_frame_equal(seen, expected)
        assert {"loss 2", "loss 1.5", "epoch 2", "end"} <= set(seen["rule"])
        assert "loss 0.01" not in set(seen["rule"])
        assert not seen["rule"].duplicated().any()


def test_training_has_settled_once_the_loss_finds_no_new_low() -> None:
    losses = [2.0, 1.5, 1.2, 1.3, 1.25, 1.2]
    assert [has_settled(losses[:end], 3) for end in range(7)] == [False] * 6 + [True]
    assert not has_settled([3.0, 2.0, 1.0, 0.5, 0.4], 3)
    assert not has_settled(losses, math.inf)
