"""Tables sent to TensorBoard and MLflow: every finite number under its name; a package that is missing is named."""

from __future__ import annotations

import importlib.util
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from test_live import NAMES, network, seed_all
from test_live import data as data  # a fixture
from test_live import offline as offline  # a fixture
from torch import Tensor, nn

import flatscope as fs
from flatscope.training import callbacks as live
from flatscope.training.callbacks import scalars, write_mlflow, write_tensorboard, write_wandb


@pytest.fixture(scope="module")
def table(data: tuple[Tensor, Tensor]) -> fs.Table:
    seed_all()
    return fs.measure(fs.Problem(network().eval(), train=data), [*NAMES, "functional_margin", "rho_unit"])


def test_scalars_name_options_layers_and_errors(table: fs.Table) -> None:
    found = scalars(table)
    assert found["hessian_trace"] == table["hessian_trace"]
    assert found["kappa_trace.0"] == table.layer("kappa_trace")["0"]
    assert found["perturbation_robustness.gamma=0.5"] > 0
    assert found["perturbation_robustness.gamma=0.5.stderr"] > 0
    assert not any(name.startswith(("functional_margin", "rho_unit")) for name in found)
    assert not any(".0" in name for name in scalars(table, layers=False) if name.startswith("kappa"))
    missing = fs.measure(fs.Problem(nn.Linear(2, 2), train=(torch.eye(2), torch.tensor([0, 1]))), "distance*")
    assert scalars(missing) == {}


def test_tensorboard_gets_what_was_measured(table: fs.Table, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        write_tensorboard(table, tmp_path, step=7)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(tmp_path))
        events.Reload()
        expected = {f"flatscope/{name}": value for name, value in scalars(table).items()}
        assert set(events.Tags()["scalars"]) == set(expected)
        for name, value in expected.items():
            (event,) = events.Scalars(name)
            assert event.step == 7
            assert event.value == pytest.approx(value, rel=1e-6)
    with pytest.raises(fs.InputError, match="SummaryWriter"):
        write_tensorboard(table, 3, step=0)


def test_mlflow_gets_what_was_measured(table: fs.Table, tmp_path: Path) -> None:
    mlflow = pytest.importorskip("mlflow")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        before = mlflow.get_tracking_uri()
        mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
        try:
            with mlflow.start_run() as run:
                write_mlflow(table, step=7)
            metrics = mlflow.get_run(run.info.run_id).data.metrics
            history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "flatscope/hessian_trace")
        finally:
            mlflow.set_tracking_uri(before)
    assert metrics["flatscope/hessian_trace"] == table["hessian_trace"]
    assert metrics["flatscope/perturbation_robustness.gamma_0.5"] > 0
    assert len(metrics) == len(scalars(table))
    assert [entry.step for entry in history] == [7]


@pytest.mark.parametrize("started", [True, False])
def test_weights_and_biases_gets_what_was_measured(
    table: fs.Table, monkeypatch: pytest.MonkeyPatch, started: bool
) -> None:
    logged: list[tuple[dict[str, float], int]] = []
    run = SimpleNamespace(log=lambda values, step: logged.append((values, step)))
    stand_in = SimpleNamespace(run=run if started else None, init=lambda: run)  # the package needs an account
    monkeypatch.setitem(sys.modules, "wandb", stand_in)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    write_wandb(table, step=7)
    write_wandb(table, step=8, prefix="")
    assert logged == [({f"flatscope/{name}": value for name, value in scalars(table).items()}, 7), (scalars(table), 8)]


def test_a_missing_package_is_named(table: fs.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(fs.InputError, match=r"pip install tensorboard.*'\.\[live\]'"):
        write_tensorboard(table, tmp_path, 0)
    with pytest.raises(fs.InputError, match="mlflow"):
        write_mlflow(table, 0)
    with pytest.raises(fs.InputError, match="pip install wandb"):
        write_wandb(table, 0)
    live.trainer_callback_class.cache_clear()
    with pytest.raises(fs.InputError, match="transformers"):
        _ = live.FlatscopeTrainerCallback
