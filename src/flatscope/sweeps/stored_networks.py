"""Work on networks that a store already has: another measurement does not train them again.

A configuration of `measure_stored` is plain JSON:

    network          configuration under which `train_and_measure` stored the network
    measures, bounds, measure_options, measure_seed, device      as in `train_and_measure`
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from typing import Any

import pandas as pd
import torch

from flatscope.inspection import usable_device
from flatscope.problem import Problem
from flatscope.sweeps.store import Store
from flatscope.sweeps.work import builder_of, table_metrics, tables_of, training_pair, trial_of
from flatscope.training.data import Data, load
from flatscope.training.population_group import fill, tensors_of
from flatscope.training.trials import build_model, count_classes, read_trials, trial_data

Report = Callable[[float, str], None]


def measure_stored(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Measure networks of the store and store the numbers, named as `train_and_measure` names them, and the table."""
    for number, config in enumerate(configs):
        problem = stored_problem(store, config["network"], device=config.get("device"))
        tables = tables_of(problem, config)
        metrics: dict[str, Any] = {}
        for table in tables:
            metrics |= table_metrics(table)
        store.write(config, metrics, frames={"table": pd.concat([table.to_frame() for table in tables])})
        report((number + 1) / len(configs), "measuring")


def stored_problem(store: Store, network: Mapping[str, Any], *, device: str | None = None) -> Problem:
    """A network of the store with its own training data and labels, the test data and its starting weights.

    Args:
        store: where the network is.
        network: the configuration it was trained under.
        device: where to put it; the CPU by default.
    """
    data = _loaded(json.dumps(dict(network["data"]), sort_keys=True))
    build = builder_of(network["model"]["name"])
    (trial,) = read_trials([trial_of(network, "0")], build)
    x, y = training_pair(data, network.get("labels"))
    n_classes = count_classes(data, y)
    part = trial_data(trial, x, y, n_classes)
    model = build_model(build, trial, part.images, n_classes)
    initial = {name: value.clone() for name, value in tensors_of(model).items()}
    fill(model, store.read(network).weights())
    parameters = {name for name, _ in model.named_parameters()}
    starting = {name: value for name, value in initial.items() if name in parameters}
    place: torch.device = usable_device(device or "cpu")
    return Problem(
        model.eval(),
        train=part.pair(),
        test=data.test,
        loss=trial.config.loss,
        initial=starting,
        device=place,
    )


@functools.lru_cache(maxsize=2)
def _loaded(settings: str) -> Data:
    """Samples as `load` gives them; the networks of a study share theirs."""
    return load(**json.loads(settings))
