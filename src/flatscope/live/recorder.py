"""Recorder: chosen measures on fixed samples while the weights change, sent to trackers if wanted."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
import warnings
from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch.distributed as dist
from torch import nn

from flatscope.errors import FlatscopeError, InputError, NumericalWarning
from flatscope.guards import own_settings
from flatscope.inspection import replica
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
        names: names or globs of measures; None: every one that is not "long".
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
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise InputError("a whole number of epochs of at least 1", repr(every), where="every")
        self.data, self.test, self.loss = data, test, loss
        self.names = [entry.name for entry in select(names)]
        self.every, self.seed, self.options, self.send = every, seed, options, send
        self.tables: dict[int, Table] = {}
        self.steps: dict[int, int] = {}

    def due(self, epoch: int) -> bool:
        """Whether this epoch is one of those to record."""
        return epoch % self.every == 0

    def record(self, model: nn.Module, epoch: int, step: int | None = None) -> Table | None:
        """Measure the model as it is now; None on ranks other than the first.

        The first record raises what is wrong with data or names. Later a model that cannot be measured (weights that
        are no longer finite) gives a warning and no table: training goes on.

        Args:
            model: the network in training, in any mode.
            epoch: number of epochs done.
            step: number of steps done, for `send`; the epoch by default.
        """
        if _rank() != 0:
            return None
        try:
            table = self._measured(model)
        except FlatscopeError as problem:
            if not self.tables:
                raise
            warnings.warn(f"nothing recorded after epoch {epoch}: {problem}", NumericalWarning, stacklevel=2)
            return None
        self.steps[epoch] = epoch if step is None else step
        table.meta |= {"epoch": epoch, "step": self.steps[epoch]}
        self.tables[epoch] = table
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

    def _measured(self, model: nn.Module) -> Table:
        with own_settings():  # hooks may be called where gradients are off or numbers are short
            problem = Problem(replica(model).eval(), self.data, self.test, self.loss, shard=False)
            return measure(problem, self.names, self.seed, self.options)


def _rank() -> int:
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def scalars(table: Table, layers: bool = True, errors: bool = True) -> dict[str, float]:
    """The finite numbers of a table by name, as loggers want them; values per unit or sample are left out.

    Names are `margin`, `perturbation_robustness.gamma=0.1`, `kappa.fc1`, and `hessian_trace.stderr` where a value has a
    standard error.

    Args:
        table: any table of measures or bounds.
        layers: also values of single layers.
        errors: also standard errors that are not zero.
    """
    frame = table.to_frame()
    frame = frame[frame["unit"].isna() & frame["sample"].isna()]
    found: dict[str, float] = {}
    for row in frame.to_dict("records"):
        if not math.isfinite(row["value"]) or (row["layer"] and not layers):
            continue
        options = [f"{name}={value}" for name, value in json.loads(row["options"] or "{}").items()]
        name = ".".join(str(part) for part in (row["measure"], ",".join(options), row["layer"]) if part)
        found[name] = float(row["value"])
        if errors and row["stderr"] > 0:
            found[f"{name}.stderr"] = float(row["stderr"])
    return found


def write_tensorboard(table: Table, writer: str | os.PathLike[str] | Any, step: int, prefix: str = "flatscope") -> None:
    """Write the numbers of a table as scalars of TensorBoard.

    Args:
        table: any table of measures or bounds.
        writer: a `SummaryWriter` (anything with `add_scalar`), or a folder for the event file.
        step: number of the step.
        prefix: first part of every tag; none if empty.
    """
    if isinstance(writer, str | os.PathLike):
        _refuse_missing("tensorboard")
        with importlib.import_module("torch.utils.tensorboard").SummaryWriter(os.fspath(writer)) as own:
            write_tensorboard(table, own, step, prefix)
        return
    if not hasattr(writer, "add_scalar"):
        raise InputError("a SummaryWriter or a folder", type(writer).__name__, where="write_tensorboard")
    for name, value in scalars(table).items():
        writer.add_scalar(f"{prefix}/{name}" if prefix else name, value, step)


def write_mlflow(table: Table, step: int, prefix: str = "flatscope") -> None:
    """Write the numbers of a table as metrics of MLflow's active run; one is started where there is none.

    Characters that MLflow does not allow in names become underscores.

    Args:
        table: any table of measures or bounds.
        step: number of the step.
        prefix: first part of every name; none if empty.
    """
    _refuse_missing("mlflow")
    named = {f"{prefix}/{name}" if prefix else name: value for name, value in scalars(table).items()}
    allowed = {re.sub(r"[^\w\-. :/]", "_", name): value for name, value in named.items()}
    importlib.import_module("mlflow").log_metrics(allowed, step=step)


def write_wandb(table: Table, step: int, prefix: str = "flatscope") -> None:
    """Write the numbers of a table as metrics of the active run of Weights & Biases; one is started without any.

    Args:
        table: any table of measures or bounds.
        step: number of the step.
        prefix: first part of every name; none if empty.
    """
    _refuse_missing("wandb")
    wandb = importlib.import_module("wandb")
    run = wandb.run or wandb.init()
    run.log({f"{prefix}/{name}" if prefix else name: value for name, value in scalars(table).items()}, step=step)


def _refuse_missing(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        fix = "Run pip install wandb" if package == "wandb" else 'Run pip install "flatscope[live]"'
        raise InputError(f"the package {package}", "none installed", where="flatscope.live", fix=fix)
