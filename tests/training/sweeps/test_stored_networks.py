"""A stored network measured again gives what was measured when it was trained, with its own labels and start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flatscope.training.sweeps import engines
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import stored_problem

MEASURES = ["hessian_trace", "distance_from_initialization", "margin", "l2_norm", "parameter_count"]
NETWORK: dict[str, Any] = {
    "data": {"name": "digits", "train_size": 60, "test_size": 30, "flatten": True},
    "labels": {"random": 0.5, "seed": 3},
    "model": {"name": "mlp", "options": {"widths": [64, 8, 10]}, "seed": 4},
    "init": {"scheme": "xavier_normal", "scale": 2.0},
    "train": {"lr": 0.1, "epochs": 3, "batch_size": 20, "loss": "mse", "seed": 5},
}
TRAIN, MEASURE = "flatscope.training.sweeps.work:train_and_measure", "flatscope.training.sweeps.work:measure_stored"


def test_measured_later_is_measured_at_once(tmp_path: Path) -> None:
    store = Store(tmp_path)
    at_once = engines.run_units([[{**NETWORK, "measures": MEASURES}]], TRAIN, store, workers=0).iloc[0]
    engines.run_units([[NETWORK]], TRAIN, store, workers=0)
    later = engines.run_units([[{"network": NETWORK, "measures": MEASURES}]], MEASURE, store, workers=0).iloc[0]
    for name in MEASURES:
        assert later[name] == pytest.approx(at_once[name], rel=1e-6, nan_ok=True), name
    assert later["distance_from_initialization"] > 0


def test_the_problem_has_the_networks_own_labels_and_loss(tmp_path: Path) -> None:
    store = Store(tmp_path)
    engines.run_units([[NETWORK]], TRAIN, store, workers=0)
    problem = stored_problem(store, NETWORK)
    clean = stored_problem_labels({**NETWORK, "labels": None}, store)
    targets = torch.cat([targets for _, targets in problem.batches("train")])
    changed = (targets != clean).double().mean()
    assert 0.3 < float(changed) < 0.6  # half drawn again, one in ten of these true by chance
    assert problem.loss.name == "mse"


def stored_problem_labels(network: dict[str, Any], store: Store) -> torch.Tensor:
    engines.run_units([[network]], TRAIN, store, workers=0)
    return torch.cat([targets for _, targets in stored_problem(store, network).batches("train")])
