"""Measures recorded while a network is being trained: plain loops, Lightning, Hugging Face; writers for trackers.

`FlatscopeCallback` (for lightning.pytorch or pytorch_lightning) and `FlatscopeTrainerCallback` (for transformers) are
made when they are first asked for, so that neither package is needed by those who do not train with it.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import re
import sys
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch.distributed as dist
from torch import Tensor, nn

from flatscope.errors import FlatscopeError, InputError, NumericalWarning, refuse_unless_whole
from flatscope.input_checks import independent_copy
from flatscope.isolation import own_settings
from flatscope.loss import PerSample
from flatscope.measuring import Options, measure
from flatscope.problem import Problem
from flatscope.registry import select
from flatscope.table import Table

Send = Callable[[Table, int], object]


class Recorder:
    """Measures a model in training every few epochs, without touching it.

    A copy of the model, in eval mode, is measured; mode, gradients, buffers and random state of the training stay what
    they were, so that it ends at the same bits as without. With `torch.distributed` only the first rank measures, by
    itself: the others wait for it at their next step.

    Args:
        data: the samples to measure on, the same every time: what `Problem` takes as `train`.
        names: names or globs of measures; None: the core set; "standard": all that are not "long".
        every: epochs between two records.
        test: held-out samples, for measures that need them.
        loss: as in `Problem`.
        seed: of all random streams, the same every time.
        options: {measure: {option: value}}.
        send: called with every table and its step: `write_mlflow`, `write_wandb`, or
            `lambda table, step: write_tensorboard(table, writer, step)`.

    Attributes:
        tables: what was measured, by epoch.

    Example:
        >>> import torch
        >>> model = torch.nn.Linear(3, 2)
        >>> recorder = Recorder((torch.eye(3), torch.tensor([0, 1, 0])), ["parameter_count", "margin"])
        >>> for epoch in range(3):
        ...     _ = recorder.record(model, epoch)
        >>> recorder.history["parameter_count"].tolist()
        [8.0, 8.0, 8.0]
    """

    def __init__(
        self,
        data: Any,
        names: str | Iterable[str] | None = None,
        every: int = 1,
        *,
        test: Any = None,
        loss: str | PerSample = "cross_entropy",
        seed: int = 0,
        options: Options | None = None,
        send: Send | None = None,
    ) -> None:
        refuse_unless_whole(every, "every")
        self.data, self.test, self.loss = data, test, loss
        self.names = [entry.name for entry in select(names)]
        self.every, self.seed, self.options, self.send = every, seed, options, send
        self.tables: dict[int, Table] = {}
        self.steps: dict[int, int] = {}

    def due(self, epoch: int) -> bool:
        """True if this epoch is one of those to record."""
        return epoch % self.every == 0

    def record(self, model: nn.Module, epoch: int, step: int | None = None, *, optimizer: Any = None) -> Table | None:
        """Measure the model as it is now; None on ranks other than the first.

        The first record raises what is wrong with data or names. Later a model that cannot be measured (weights that
        are no longer finite) gives a warning and no table: training goes on.

        Args:
            model: the network in training, in any mode.
            epoch: number of epochs done.
            step: number of steps done, for `send`; the epoch by default.
            optimizer: its learning rate and other settings are kept with the table.
        """
        if _process_rank() != 0:
            return None
        try:
            table = self._measured_table(model)
        except FlatscopeError as problem:
            if not self.tables:
                raise
            warnings.warn(f"nothing recorded after epoch {epoch}: {problem}", NumericalWarning, stacklevel=2)
            return None
        self.steps[epoch] = epoch if step is None else step
        table.meta |= {"epoch": epoch, "step": self.steps[epoch]}
        if optimizer is not None:
            table.meta["optimizer"] = optimizer_settings(optimizer)
        self._keep(epoch, table)
        if self.send is not None:
            self.send(table, self.steps[epoch])
        return table

    @property
    def history(self) -> pd.DataFrame:
        """One row per record: epoch, step, and the network-wide value of every measure. `fs.report` draws it."""
        rows = [
            {"epoch": epoch, "step": self.steps[epoch]} | scalars(table, layers=False, errors=False)
            for epoch, table in self.tables.items()
        ]
        return pd.DataFrame(rows) if rows else pd.DataFrame(columns=["epoch", "step"])

    def _measured_table(self, model: nn.Module) -> Table:
        with own_settings():  # hooks may be called where gradients are off or numbers are short
            return self._table_of_problem(
                Problem(independent_copy(model).eval(), self.data, self.test, self.loss, shard=False)
            )

    def _keep(self, epoch: int, table: Table) -> None:
        self.tables[epoch] = table

    def _table_of_problem(self, problem: Problem) -> Table:
        return measure(problem, self.names, self.seed, self.options)


def optimizer_settings(optimizer: Any) -> dict[str, Any]:
    """Name and settings of a torch optimizer as plain values; of those that differ between its groups a list."""
    while hasattr(optimizer, "optimizer"):  # wrapped, as Accelerate does
        optimizer = optimizer.optimizer
    settings: dict[str, Any] = {"name": type(optimizer).__name__}
    for key in optimizer.param_groups[0]:
        values = [_plain_setting(group.get(key)) for group in optimizer.param_groups if key != "params"]
        if values and isinstance(values[0], int | float | bool | tuple | str):
            settings[key] = values[0] if all(value == values[0] for value in values) else values
    return settings


def _plain_setting(value: Any) -> Any:
    return value.item() if isinstance(value, Tensor) and value.numel() == 1 else value


def _process_rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def scalars(table: Table, layers: bool = True, errors: bool = True, prefix: str = "") -> dict[str, float]:
    """The finite numbers of a table by name, as loggers want them; values per unit or sample are left out.

    Names are `margin`, `perturbation_robustness.gamma=0.1`, `kappa.fc1`, and `hessian_trace.stderr` where a value has a
    standard error.

    Args:
        table: any table of measures or bounds.
        layers: also values of single layers.
        errors: also standard errors that are not zero.
        prefix: first part of every name, before a slash; none if empty.
    """
    frame = table.to_frame()
    frame = frame[frame["unit"].isna() & frame["sample"].isna()]
    numbers: dict[str, float] = {}
    for row in frame.to_dict("records"):
        if not math.isfinite(row["value"]) or (row["layer"] and not layers):
            continue
        options = [f"{name}={value}" for name, value in json.loads(row["options"] or "{}").items()]
        name = ".".join(str(part) for part in (row["measure"], ",".join(options), row["layer"]) if part)
        name = f"{prefix}/{name}" if prefix else name
        numbers[name] = float(row["value"])
        if errors and row["stderr"] > 0:
            numbers[f"{name}.stderr"] = float(row["stderr"])
    return numbers


def write_tensorboard(table: Table, writer: str | os.PathLike[str] | Any, step: int, prefix: str = "flatscope") -> None:
    """Write the numbers of a table as scalars of TensorBoard.

    Args:
        table: any table of measures or bounds.
        writer: a `SummaryWriter` (anything with `add_scalar`), or a folder for the event file.
        step: number of the step.
        prefix: first part of every tag; none if empty.
    """
    if isinstance(writer, str | os.PathLike):
        _first_installed_class(("tensorboard",), "tensorboard")
        with importlib.import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(writer)) as opened:
            write_tensorboard(table, opened, step, prefix)
        return
    if not hasattr(writer, "add_scalar"):
        raise InputError("a SummaryWriter or a folder", type(writer).__name__, where="write_tensorboard")
    for name, value in scalars(table, prefix=prefix).items():
        writer.add_scalar(name, value, step)


def write_mlflow(table: Table, step: int, prefix: str = "flatscope") -> None:
    """Write the numbers of a table as metrics of MLflow's active run; one is started where there is none.

    Characters that MLflow does not allow in names become underscores.

    Args:
        table: any table of measures or bounds.
        step: number of the step.
        prefix: first part of every name; none if empty.
    """
    allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in scalars(table, prefix=prefix).items()}
    _first_installed_class(("mlflow",), "mlflow").log_metrics(allowed, step=step)


def write_wandb(table: Table, step: int, prefix: str = "flatscope") -> None:
    """Write the numbers of a table as metrics of the active run of Weights & Biases; one is started without any.

    Args:
        table: any table of measures or bounds.
        step: number of the step.
        prefix: first part of every name; none if empty.
    """
    wandb = _first_installed_class(("wandb",), "wandb")
    (wandb.run or wandb.init()).log(scalars(table, prefix=prefix), step=step)


Take = Callable[[nn.Module], nn.Module]


class _Hooks:
    """Common part of the callbacks: a recorder, and the function that finds the network in the trained module."""

    def __init__(self, *args: Any, network: Take | None = None, **kwargs: Any) -> None:
        super().__init__()
        given = args[0] if args and isinstance(args[0], Recorder) else None
        if given is not None and (len(args) > 1 or kwargs):
            raise InputError("a recorder, or the arguments of one", "both", where="callback")
        self.recorder, self.network = given or Recorder(*args, **kwargs), network

    def _record(self, model: nn.Module, epoch: int, step: int, optimizer: Any) -> Table | None:
        measured = model if self.network is None else self.network(model)
        return self.recorder.record(measured, epoch, step, optimizer=optimizer)


class LightningHooks(_Hooks):
    """Records every few epochs of a Lightning training, and before its first step.

    Args:
        *args: those of `Recorder`: the samples to measure on, names of measures, every how many epochs; or a recorder.
        log: also send the values to the trainer's loggers, as `flatscope/<measure>`.
        **kwargs: those of `Recorder`; `network` takes the network to measure out of the LightningModule.

    Attributes:
        recorder: holds the tables and their history.
    """

    def __init__(self, *args: Any, log: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.log = log

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """The network before its first step; a training that is taken up again goes on recording instead."""
        if trainer.current_epoch == 0:
            self._send(trainer, pl_module, 0)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """After the last step of an epoch."""
        if self.recorder.due(trainer.current_epoch + 1):
            self._send(trainer, pl_module, trainer.current_epoch + 1)

    def _send(self, trainer: Any, pl_module: nn.Module, epoch: int) -> None:
        table = None
        if trainer.is_global_zero:
            optimizers = trainer.optimizers
            table = self._record(pl_module, epoch, trainer.global_step, optimizers[0] if len(optimizers) == 1 else None)
        if table is not None and self.log:
            for logger in trainer.loggers:
                logger.log_metrics(scalars(table, prefix="flatscope"), step=trainer.global_step)


class TrainerHooks(_Hooks):
    """Records every few epochs of a Hugging Face `Trainer`, and before its first step.

    Args:
        *args: those of `Recorder`: the samples to measure on, names of measures, every how many epochs; or a recorder.
        **kwargs: those of `Recorder`; `network` takes the network to measure out of the trained model.

    Attributes:
        recorder: holds the tables and their history.
    """

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The network before its first step; a training that is taken up again goes on recording instead."""
        if state.global_step == 0 and state.is_world_process_zero:
            self._record(kwargs["model"], 0, 0, kwargs.get("optimizer"))

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step of an epoch."""
        if self.recorder.due(round(state.epoch)) and state.is_world_process_zero:
            self._record(kwargs["model"], round(state.epoch), state.global_step, kwargs.get("optimizer"))


@functools.cache
def lightning_callback_class() -> Any:
    """`FlatscopeCallback`: a Callback of whichever package of Lightning is in use."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    used = [name for name in packages if name in sys.modules]  # the base that the user's trainer knows
    bases = [importlib.import_module(name).Callback for name in used] or [
        _first_installed_class(packages, "lightning").Callback
    ]
    return _class_named("FlatscopeCallback", LightningHooks, *bases)


@functools.cache
def trainer_callback_class() -> Any:
    """`FlatscopeTrainerCallback`: a TrainerCallback of transformers."""
    return _class_named(
        "FlatscopeTrainerCallback",
        TrainerHooks,
        _first_installed_class(("transformers",), "transformers").TrainerCallback,
    )


def _class_named(name: str, *bases: type) -> type:
    # Found again by that name when a callback is pickled on its way to another process.
    return type(name, bases, {"__doc__": bases[0].__doc__, "__module__": "flatscope.training.callbacks"})


def _first_installed_class(names: tuple[str, ...], package: str) -> Any:
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return importlib.import_module(name)
    fix = f"Run pip install {package}; pip install '.[live]' in a clone brings all that a recorder can write to"
    raise InputError(f"the package {package}", "none installed", where="flatscope.training.callbacks", fix=fix)


_MADE_WHEN_ASKED = {"FlatscopeCallback": lightning_callback_class, "FlatscopeTrainerCallback": trainer_callback_class}


def __getattr__(name: str) -> Any:
    if name in _MADE_WHEN_ASKED:
        return _MADE_WHEN_ASKED[name]()
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
