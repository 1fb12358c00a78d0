"""The usual work of a sweep: the stored numbers are those of plain training and plain measuring."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import torch

from flatscope.errors import InputError
from flatscope.inputs.loading import load
from flatscope.measuring import measure
from flatscope.problem import Problem
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.initialization import initialize
from flatscope.training.label_noise import confusion_set, corrupt_labels
from flatscope.training.loop import train
from flatscope.training.models import build
from flatscope.training.sweeps.engines import run_units
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.unit_queue import SweepFailed
from flatscope.training.sweeps.work import table_metrics, train_and_measure

DATA = {"name": "digits", "train_size": 80, "test_size": 40, "seed": 1, "flatten": True}
TRAIN = {"lr": 0.1, "epochs": 3, "batch_size": 20, "seed": 4}
BASE: dict[str, Any] = {
    "data": DATA,
    "model": {"name": "mlp", "options": {"widths": [64, 12, 10]}, "seed": 7},
    "train": TRAIN,
    "measures": ["l2_norm", "kappa_trace*", "distance_from_initialization", "expected_flatness", "rho_unit"],
    "measure_options": {"expected_flatness": {"draws": 4}},
}


def config(**changes: Any) -> dict[str, Any]:
    return {**BASE, **changes}


def test_stored_numbers_are_those_of_plain_training_and_measuring(tmp_path: Path) -> None:
    store = Store(tmp_path)
    wild = {**TRAIN, "lr": 1e6, "momentum": 0.9, "loss": "mse"}
    trials = [
        config(),
        config(train={**TRAIN, "lr": 0.02, "batch_size": 16}, init={"scheme": "uniform", "bound": 0.2, "scale": 2.0}),
        config(labels={"random": 0.5, "seed": 3}),
        config(labels={"confusion": 20, "true_size": 50, "seed": 2}, bounds=["parameter_counting"]),
        config(train=wild),
    ]
    said = []
    train_and_measure(trials, store, lambda fraction, note: said.append(fraction))
    assert said == sorted(said)
    assert said[-1] == pytest.approx(1)

    data = load(**DATA)
    x, y = data.train
    noisy, _ = corrupt_labels(y, 0.5, 10, 3)
    pairs = [(x, y), (x, y), (x, noisy), confusion_set(data, 20, 2, true_size=50).train]
    for trial, pair in zip(trials, pairs, strict=False):
        model = build("mlp", seed=7, widths=[64, 12, 10])
        if "init" in trial:
            initialize(model, "uniform", 7, bound=0.2, scale=2.0)
        initial = {name: value.clone() for name, value in model.state_dict().items()}
        plain = train(model, pair, TrainConfig.from_dict(trial["train"]), test=data.test)
        stored = store.read(trial)
        last = plain.history.iloc[-1]
        for name in ("train_loss", "train_error", "test_loss", "test_error", "distance"):
            assert stored.metrics[name] == pytest.approx(last[name], rel=1e-4), name
        assert (stored.metrics["epochs"], stored.metrics["stopped_by"], stored.metrics["diverged"]) == (
            3,
            "epochs",
            False,
        )
        for name, value in stored.weights().items():
            torch.testing.assert_close(value, model.state_dict()[name], rtol=1e-3, atol=1e-5)
        model.load_state_dict(stored.weights())
        problem = Problem(model, train=pair, test=data.test, initial=initial)
        table = measure(problem, trial["measures"], options=trial["measure_options"])
        for name, value in table_metrics(table).items():
            assert stored.metrics[name] == pytest.approx(value, rel=1e-5), name
        assert f"kappa_trace/{next(iter(table.layer('kappa_trace')))}" in stored.metrics
        assert not any(name.startswith("rho_unit") for name in stored.metrics)
        assert set(stored.frames) == {"history", "table"}
        assert stored.frame("history")["epoch"].tolist() == [1, 2, 3]
        assert len(stored.frame("table")) == len(table) + ("bounds" in trial)
    assert math.isfinite(store.read(trials[3]).metrics["parameter_counting"])

    diverged = store.read(trials[4])
    assert (diverged.metrics["diverged"], diverged.metrics["stopped_by"]) == (True, "diverged")
    assert math.isnan(diverged.metrics["train_loss"])
    assert "l2_norm" not in diverged.metrics


def test_several_rows_of_one_measure_are_told_apart() -> None:
    problem = Problem(build("mlp", widths=[3, 4, 2]), train=(torch.eye(3), torch.tensor([0, 1, 0])))
    options = {"expected_sharpness": {"alpha": (0.01, 0.1), "draws": 4}}
    found = table_metrics(measure(problem, ["expected_sharpness", "parameter_count"], options=options))
    assert len(found) == 3
    assert found["parameter_count"] == 26
    assert len({name for name in found if name.startswith("expected_sharpness{")}) == 2


def test_models_of_ones_own_and_mistakes(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from torch import nn\n"
        "def net(width):\n"
        "    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))\n"
    )
    store = Store(tmp_path / "store")
    model = {"name": f"{file}:net", "options": {"width": 5}}
    trials = [config(model={**model, "seed": seed}, measures=["parameter_count"]) for seed in (0, 1)]
    frame = run_units([trials], "flatscope.training.sweeps.work:train_and_measure", store, workers=0)
    assert frame["parameter_count"].tolist() == [64 * 5 + 5 + 50 + 10] * 2
    assert frame["train_loss"].nunique() == 2
    assert frame["model.seed"].tolist() == [0, 1]
    for bad, message in (
        (config(trian=TRAIN), "train"),
        ({"data": DATA, "train": TRAIN}, "'model'"),
        (config(model={"options": {}}), "a name"),
        (config(measure_options={"l2_norn": {}}), "l2_norm"),
        (config(device="cuda:99"), "cuda"),
    ):
        with pytest.raises(InputError, match=message):
            train_and_measure([bad], store, lambda fraction, note: None)
    # A measure that cannot be had costs its own trial, not the one that was trained beside it.
    good, wrong = config(measures=["l2_norm"]), config(measures=["no_such_measure"])
    with pytest.raises(SweepFailed, match="no_such_measure"):
        run_units([[wrong, good]], "flatscope.training.sweeps.work:train_and_measure", store, workers=0)
    assert good in store
    assert isinstance(store.read(good).frame("table"), pd.DataFrame)


class BrokenOff(BaseException):
    """Stands for a kill: nothing catches it."""


def broken_off_after(epoch: int) -> Any:
    def report(fraction: float, note: str) -> None:
        if note == f"epoch {epoch}":
            raise BrokenOff

    return report


def test_a_unit_that_is_broken_off_goes_on_from_its_checkpoint(tmp_path: Path, monkeypatch: Any) -> None:
    trials = [
        {"data": DATA, "model": BASE["model"], "train": {**TRAIN, "epochs": 8, "momentum": 0.9, "seed": seed}}
        for seed in (0, 1)
    ]
    plain, store = Store(tmp_path / "plain"), Store(tmp_path / "store")
    train_and_measure(trials, plain, lambda fraction, note: None)
    assert not any((tmp_path / "plain" / ".unfinished").iterdir())
    with pytest.raises(BrokenOff):  # too short for a checkpoint
        train_and_measure(trials, store, broken_off_after(5))
    monkeypatch.setattr("flatscope.training.sweeps.work.CHECKPOINT_SECONDS", 0.0)
    with pytest.raises(BrokenOff):
        train_and_measure(trials, store, broken_off_after(5))
    assert not any(trial in store for trial in trials)
    said: list[str] = []
    train_and_measure(trials, store, lambda fraction, note: said.append(note))
    assert said[0] == "epoch 5"  # the fifth was not saved when the report broke it off
    assert not any((tmp_path / "store" / ".unfinished").iterdir())
    for trial in trials:
        ours, theirs = store.read(trial), plain.read(trial)
        assert ours.frame("history")["epoch"].tolist() == list(range(1, 9))
        assert ours.metrics["train_loss"] == theirs.metrics["train_loss"]
        for name, value in theirs.weights().items():
            assert torch.equal(ours.weights()[name], value)


def test_other_units_do_not_find_the_checkpoint_and_a_store_elsewhere_has_none(tmp_path: Path) -> None:
    store = Store(tmp_path)
    first, second = config(), config(labels={"random": 0.5})
    with store.unfinished([first, second]) as folder, store.unfinished([first]) as other:
        assert folder is not None
        assert folder != other
        folder.mkdir(parents=True)
    assert not folder.exists()
    assert store.frame().empty
    with Store("memory://nowhere").unfinished([first]) as nothing:
        assert nothing is None


def test_checkpoints_of_another_version_are_not_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a half-trained network looks like inside may change from version to version; finished trials stay."""
    store = Store(tmp_path / "store")
    with store.unfinished([{"x": 1}]) as folder:
        pass
    monkeypatch.setattr("flatscope.training.sweeps.store.__version__", "0.0.1")
    with store.unfinished([{"x": 1}]) as other:
        pass
    assert folder is not None
    assert other is not None
    assert folder != other
    assert store.key({"x": 1}) == Store(tmp_path / "elsewhere").key({"x": 1})
