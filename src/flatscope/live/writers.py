"""Tables sent to TensorBoard and to MLflow."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import os
import re
from typing import Any

from flatscope.errors import InputError
from flatscope.table import Table


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


def _refuse_missing(package: str) -> None:
    if importlib.util.find_spec(package) is None:
        fix = 'Run pip install "flatscope[live]"'
        raise InputError(f"the package {package}", "none installed", where="flatscope.live", fix=fix)
