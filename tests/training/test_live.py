"""Recording while training: the values of `measure`, and a training that ends at the same bits as without."""

from __future__ import annotations

import copy
import importlib.metadata
import importlib.util
import os
import pickle
import random
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

import flatscope as fs
from flatscope.training import callbacks as live
from flatscope.training.callbacks import Recorder, scalars

NAMES = ["hessian_trace", "margin", "kappa_trace", "l1_path_norm", "perturbation_robustness"]


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_DISABLE_TELEMETRY", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, "true" if name.startswith("MLFLOW") else "1")
    monkeypatch.setenv("DO_NOT_TRACK", "1")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")  # the small package has no database


@pytest.fixture(scope="module")
def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(48, 6, generator=generator)
    return x, (x[:, 0] + x[:, 1] > 0).long() + (x[:, 2] > 0.5).long()


def network() -> nn.Module:
    """Dropout draws random numbers and BatchNorm counts batches: both would show a disturbance."""
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.2), nn.Linear(8, 3))


def seed_all() -> None:
    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def same_bits(one: nn.Module, other: nn.Module) -> bool:
    ours, theirs = one.state_dict(), other.state_dict()
    return ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


def values_now(model: nn.Module, data: tuple[Tensor, Tensor]) -> dict[str, float]:
    return scalars(fs.measure(fs.Problem(copy.deepcopy(model).eval(), train=data), NAMES))


# Plain loops


def plain_loop(data: tuple[Tensor, Tensor], visit: Callable[[nn.Module, int], object]) -> nn.Module:
    seed_all()
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(4):
        for x, y in DataLoader(TensorDataset(*data), batch_size=16, shuffle=True):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        visit(model, epoch + 1)
    return model


def test_a_plain_loop_ends_at_the_same_bits(data: tuple[Tensor, Tensor]) -> None:
    recorder = Recorder(data, NAMES, every=2)
    untouched = plain_loop(data, lambda model, epoch: None)

    def visit(model: nn.Module, epoch: int) -> None:
        if not recorder.due(epoch):
            return
        gradients = {name: value.grad.clone() for name, value in model.named_parameters() if value.grad is not None}
        table = recorder.record(model, epoch)
        assert table is not None
        assert model.training
        assert all(module.training for module in model.modules())
        assert all(torch.equal(value.grad, gradients[name]) for name, value in model.named_parameters())  # type: ignore[arg-type]
        assert scalars(table) == values_now(model, data)

    recorded = plain_loop(data, visit)
    assert same_bits(untouched, recorded)
    assert list(recorder.tables) == [2, 4]
    history = recorder.history
    assert history["epoch"].tolist() == [2, 4]
    assert history["hessian_trace"].iloc[0] != history["hessian_trace"].iloc[1]
    # A visitor that does leave a trace is seen by this very comparison.
    assert not same_bits(untouched, plain_loop(data, lambda model, epoch: torch.rand(1)))
    assert not same_bits(untouched, plain_loop(data, lambda model, epoch: model(data[0])))


def test_a_record_is_made_where_gradients_are_off(data: tuple[Tensor, Tensor]) -> None:
    seed_all()
    model = network()
    expected = values_now(model, data)
    for mode in (torch.no_grad(), torch.inference_mode(), torch.autocast("cpu", torch.bfloat16)):
        with mode:
            table = Recorder(data, NAMES).record(model, 0)
        assert table is not None
        assert scalars(table) == expected


def test_training_goes_on_after_divergence_and_not_with_a_bad_setting(data: tuple[Tensor, Tensor]) -> None:
    model = network()
    recorder = Recorder(data, "margin")
    recorder.record(model, 0)
    with torch.no_grad():
        model[0].weight.fill_(torch.nan)  # type: ignore[index,union-attr,operator]
    with pytest.warns(fs.NumericalWarning, match="after epoch 1"):
        assert recorder.record(model, 1) is None
    assert list(recorder.tables) == [0]
    with pytest.raises(fs.InputError, match="finite weights"):
        Recorder(data, "margin").record(model, 0)
    with pytest.raises(fs.InputError, match="known measure"):
        Recorder(data, "margn")
    with pytest.raises(fs.InputError, match="every"):
        Recorder(data, every=0)


def test_tables_are_sent_as_they_come(data: tuple[Tensor, Tensor]) -> None:
    sent: list[tuple[fs.Table, int]] = []
    recorder = Recorder(data, "margin", send=lambda table, step: sent.append((table, step)))
    table = recorder.record(network(), 3, step=40)
    assert sent == [(table, 40)]


def test_the_network_inside_a_wrapper_is_measured(data: tuple[Tensor, Tensor]) -> None:
    seed_all()
    model = network()
    table = Recorder(data, NAMES).record(nn.DataParallel(model), 0)
    assert table is not None
    assert scalars(table) == values_now(model, data)

    class FullyShardedDataParallel(nn.Sequential):
        pass

    with pytest.raises(fs.InputError, match="FullyShardedDataParallel"):
        Recorder(data, NAMES).record(FullyShardedDataParallel(model), 0)


RANKS = """
import os, sys, torch, torch.distributed as dist
from flatscope.training.callbacks import Recorder
folder, other = sys.argv[1], os.fork()  # what takes seconds to import is imported once
rank = 0 if other else 1
dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=2)
torch.manual_seed(rank)  # ranks that measured together would refuse different weights
recorder = Recorder((torch.eye(4), torch.tensor([0, 1, 0, 1])), "margin")
table = recorder.record(torch.nn.Linear(4, 2), 1)
dist.barrier()
open(f"{folder}/{rank}", "w").write("none" if table is None else f"{table['margin']}")
dist.destroy_process_group()
if other:
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(other, 0)[1]))
"""


@pytest.mark.long
@pytest.mark.skipif(os.name != "posix", reason="processes are forked")
def test_only_the_first_rank_measures(tmp_path: Path) -> None:
    command = [sys.executable, "-c", RANKS, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert float((tmp_path / "0").read_text())
    assert (tmp_path / "1").read_text() == "none"


def test_a_misspelt_name_is_none_of_its_names() -> None:
    with pytest.raises(AttributeError, match="FlatscopeCallbak"):
        _ = live.FlatscopeCallbak  # type: ignore[attr-defined]


# Lightning


@pytest.fixture(scope="module")
def lightning() -> Iterator[Any]:
    if importlib.util.find_spec("lightning") is None:
        pytest.skip("lightning is not installed")
    patch = pytest.MonkeyPatch()
    try:
        import torchvision  # noqa: F401
    except Exception:  # built for another torch, or not there; Lightning's metrics would fail on it, and need it not
        version = importlib.metadata.version

        def hiding(name: str) -> str:
            if name == "torchvision":
                raise importlib.metadata.PackageNotFoundError(name)
            return version(name)

        patch.setattr(importlib.metadata, "version", hiding)
        patch.setitem(sys.modules, "torchvision", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import lightning.pytorch as found
    yield found
    patch.undo()


def lightning_training(
    lightning: Any,
    data: tuple[Tensor, Tensor],
    folder: Path,
    callbacks: list[Any],
    logger: Any = False,
    schedule: Any = None,
) -> Any:
    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.inner = network()

        def forward(self, x: Tensor) -> Tensor:
            found: Tensor = self.inner(x)
            return found

        def training_step(self, batch: Any, _: int) -> Tensor:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)
            return ([optimizer], [schedule(optimizer)]) if schedule else optimizer

    seed_all()
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=4,
        accelerator="cpu",
        logger=logger,
        callbacks=callbacks,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=folder,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # on workers and log intervals
        trainer.fit(module, DataLoader(TensorDataset(*data), batch_size=16, shuffle=True))
    return module


def test_lightning_trains_to_the_same_bits(lightning: Any, data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    untouched = lightning_training(lightning, data, tmp_path, [])
    callback = live.FlatscopeCallback(data, NAMES, every=2)
    assert isinstance(callback, lightning.Callback)
    recorded = lightning_training(lightning, data, tmp_path, [callback])
    assert same_bits(untouched, recorded)
    assert list(callback.recorder.tables) == [0, 2, 4]
    assert callback.recorder.history["step"].tolist() == [0, 6, 12]
    now = {
        name.replace("kappa_trace.", "kappa_trace.inner."): v for name, v in values_now(recorded.inner, data).items()
    }
    assert scalars(callback.recorder.tables[4]) == pytest.approx(now, rel=1e-12)

    class Disturbing(lightning.Callback):  # type: ignore[misc,name-defined]
        def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
            torch.rand(1)

    assert not same_bits(untouched, lightning_training(lightning, data, tmp_path, [Disturbing()]))


def test_lightning_logs_values_and_takes_the_inner_network(
    lightning: Any, data: tuple[Tensor, Tensor], tmp_path: Path
) -> None:
    logger = lightning.loggers.CSVLogger(tmp_path)
    callback = live.FlatscopeCallback(data, ["margin", "kappa_trace"], network=lambda module: module.inner)
    module = lightning_training(lightning, data, tmp_path, [callback], logger)
    assert list(callback.recorder.tables[4].layer("kappa_trace")) == ["0", "4"]
    logger.save()
    text = next(tmp_path.rglob("metrics.csv")).read_text()
    assert "flatscope/margin" in text.splitlines()[0]
    assert repr(callback.recorder.tables[4]["margin"]) in text
    assert callback.recorder.tables[4]["margin"] == values_now(module.inner, data)["margin"]


def test_other_ranks_of_lightning_do_not_measure(lightning: Any, data: tuple[Tensor, Tensor]) -> None:
    class Other:
        is_global_zero, current_epoch, global_step = False, 0, 0

    callback = live.FlatscopeCallback(data, NAMES)
    callback.on_train_start(Other(), network())
    callback.on_train_epoch_end(Other(), network())
    assert callback.recorder.tables == {}


def test_callbacks_go_to_other_processes(lightning: Any, data: tuple[Tensor, Tensor]) -> None:
    callback = live.FlatscopeCallback(data, NAMES, every=3)
    again = pickle.loads(pickle.dumps(callback))
    assert type(again) is live.FlatscopeCallback
    assert again.recorder.every == 3


# Hugging Face


class Pairs(Dataset[dict[str, Tensor]]):
    def __init__(self, data: tuple[Tensor, Tensor]) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data[0])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"x": self.data[0][index], "labels": self.data[1][index]}


class Classifier(nn.Module):
    """As the Trainer wants it: batches are dictionaries, the loss comes from the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = network()

    def forward(self, x: Tensor, labels: Tensor | None = None) -> dict[str, Tensor]:
        logits = self.inner(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


def trainer_training(data: tuple[Tensor, Tensor], folder: Path, callbacks: list[Any], **changes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    seed_all()
    model = Classifier()
    settings = transformers.TrainingArguments(
        output_dir=str(folder),
        num_train_epochs=4,
        per_device_train_batch_size=16,
        learning_rate=0.05,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        seed=0,
        **changes,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        transformers.Trainer(model, settings, train_dataset=Pairs(data), callbacks=callbacks).train()
    return model


def test_the_trainer_trains_to_the_same_bits(data: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    untouched = trainer_training(data, tmp_path, [])
    x, y = data
    callback = live.FlatscopeTrainerCallback(({"x": x}, y), NAMES, every=2)
    assert isinstance(callback, transformers.TrainerCallback)
    recorded = trainer_training(data, tmp_path, [callback])
    assert same_bits(untouched, recorded)
    assert list(callback.recorder.tables) == [0, 2, 4]
    assert callback.recorder.history["step"].tolist() == [0, 6, 12]
    now = values_now(recorded.inner, data)  # type: ignore[arg-type]
    found = scalars(callback.recorder.tables[4])
    assert found["margin"] == now["margin"]
    assert found["hessian_trace"] == pytest.approx(now["hessian_trace"], rel=1e-12)

    class Disturbing(transformers.TrainerCallback):  # type: ignore[misc,name-defined]
        def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            torch.rand(1)

    assert not same_bits(untouched, trainer_training(data, tmp_path, [Disturbing()]))
