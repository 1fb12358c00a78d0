"""`flatscope watch`: what it sees of a training and of a sweep, and the page that refreshes until the end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from test_cli import Run
from test_cli import run as run  # a fixture

from flatscope.cli.run_watch import moment_of_run
from flatscope.errors import InputError
from flatscope.files import from_json_bytes, json_bytes
from flatscope.inputs.loading import load
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.loop import train
from flatscope.training.population import train_population
from flatscope.training.sweeps.configuration import Sweep
from flatscope.training.sweeps.store import Store


@pytest.fixture
def training(tmp_path: Path) -> Path:
    data = load("digits", train_size=40, test_size=20, flatten=True)
    train(torch.nn.Linear(64, 10), data, TrainConfig(epochs=3), checkpoint=tmp_path / "mine" / "checkpoint")
    return tmp_path / "mine"


def test_a_training_is_seen_by_its_checkpoint(training: Path) -> None:
    found = moment_of_run(str(training))
    assert found.over
    assert found.header[:2] == ["network", "epoch"]
    assert found.rows[0][:2] == ["mine", "3"]
    ((name, history),) = found.items
    assert name == "mine"
    assert history["epoch"].tolist() == [1, 2, 3]


def test_one_that_goes_on_is_looked_at_again_until_it_is_over(
    run: Run, training: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = training / "checkpoint" / "state.json"
    finished = state.read_bytes()
    going_on = from_json_bytes(finished)
    going_on["state"]["stopped_by"] = None
    state.write_bytes(json_bytes(json.dumps(going_on, indent=1)))
    page = training / "page.html"
    seen = []

    def wait(seconds: float) -> None:
        seen.append((seconds, 'http-equiv="refresh" content="2"' in page.read_text()))
        state.write_bytes(finished)

    monkeypatch.setattr("flatscope.cli.run_watch.time.sleep", wait)
    outcome = run("watch", training, "--every", 2, "--report", page)
    assert outcome.code == 0
    assert seen == [(2.0, True)]
    assert 'http-equiv="refresh"' not in page.read_text()  # nothing more is to come
    assert outcome.out.count("epoch") == 1  # shown again only where something changed


def test_networks_that_train_at_once_are_seen_by_their_checkpoints(tmp_path: Path) -> None:
    data = load("digits", train_size=40, test_size=20, flatten=True)
    trials = [{"name": name, "lr": rate, "epochs": 2} for name, rate in (("slow", 0.01), ("fast", 0.1))]
    train_population(lambda _: torch.nn.Linear(64, 10), trials, data, checkpoint=tmp_path / "checkpoint")
    found = moment_of_run(str(tmp_path))
    assert [row[:2] for row in found.rows] == [["slow", "2"], ["fast", "2"]]
    assert [name for name, _ in found.items] == ["slow", "fast"]
    assert not found.over
    (tmp_path / "frame.parquet").touch()  # what the command writes at its end
    assert moment_of_run(str(tmp_path)).over


def test_a_sweep_is_seen_by_its_store(run: Run, tmp_path: Path) -> None:
    plan = {"name": "rates", "work": "trial_work:square", "base": {"x": 1}, "grid": {"x": [1, 2, 3]}}
    sweep, store = Sweep.from_dict(plan), Store(tmp_path)
    store.remember(sweep.name, sweep.to_dict())
    store.write(sweep.configs()[0], metrics={"y": 1.0})
    found = moment_of_run(str(tmp_path))
    assert dict(zip(found.header, found.rows[0], strict=True)) == {
        "sweep": "rates", "trials": "3", "done": "1", "running": "0", "failed": "0", "waiting": "2",
    }  # fmt: skip
    assert not found.over
    assert "rates" in run("watch", tmp_path, "--once").out


def test_what_is_neither_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="a training or a sweep"):
        moment_of_run(str(tmp_path))
