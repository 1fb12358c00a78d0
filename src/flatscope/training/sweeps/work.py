"""The usual work of a sweep: train the networks of a unit together, measure each, store each.

A configuration is plain JSON; only `data`, `model` and `train` are needed:

    data             arguments of `load`: name, train_size, test_size, seed, standardize, standardize_by, flatten, crop
    labels           None; {"random": share, "seed": …, "exclude_true": …}; or a confusion set:
                     {"confusion": size, "true_size": …, "seed": …}
    model            {"name": built-in or "file.py:factory", "options": {…}, "seed": of the starting weights}
    init             None; a scheme of `initialize`; {"scheme": …, "scale": …, and its other options}
    train            fields of `TrainConfig`; also `noise_temperature`
    measures         names or globs of measures, or "all"
    bounds           the same for bounds
    measure_options  {measure or bound: {option: value}}
    measure_seed     of the estimators, 0 by default
    device           where to train and measure
"""

from __future__ import annotations

import functools
import inspect
import json
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from torch import Tensor, nn

from flatscope.context import Context
from flatscope.errors import FlatscopeError, InputError, UnknownNameError, refuse_unknown
from flatscope.input_checks import usable_device
from flatscope.inputs.data_set import Data
from flatscope.inputs.factories import find_factory
from flatscope.inputs.known_files import SETS
from flatscope.inputs.loading import load
from flatscope.inputs.public_sets import EMBEDDED, data_root, locate_set_files
from flatscope.measuring import bounds, measure
from flatscope.problem import Problem
from flatscope.registry import declarations, select, unknown_name
from flatscope.table import Table
from flatscope.training import models
from flatscope.training.group_training import PopulationView
from flatscope.training.initialization import schemes
from flatscope.training.label_noise import confusion_set
from flatscope.training.population import train_population
from flatscope.training.population_result import Population
from flatscope.training.sweeps.configuration import to_json
from flatscope.training.sweeps.store import Store
from flatscope.training.trials import (
    CONFIG_KEYS,
    OWN_KEYS,
    build_model,
    copy_state_into,
    count_classes,
    detached_tensors,
    read_trials,
    trial_data,
)

Report = Callable[[float, str], None]
Config = Mapping[str, Any]
Find = Callable[[str], object]

PARTS = ("data", "labels", "model", "init", "train", "measures", "bounds", "measure_options", "measure_seed", "device")
FINAL = ("train_loss", "train_error", "test_loss", "test_error", "distance")
GAPS = ("loss_gap", "error_gap")  # test less training; the second only of classes, neither without test data
CHECKPOINT_SECONDS = 60.0  # a unit that is broken off loses about that much of its training
GPU_BATCH = 4096  # samples of stored networks that are measured at once on a GPU
TRAINING_SHARE = 0.7  # of the progress bar, where there is something to measure afterwards


def train_and_measure(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Train the unit's networks, those on the same data together, then measure and store them one by one.

    Stored of each: the metrics of its last epoch, `loss_gap` and `error_gap`, `epochs`, `stopped_by`, `diverged`, every
    network-wide value under its measure's name and those of layers as "measure/layer"; the frames "history" and
    "table"; the trained weights. A diverged network is stored without measurements.
    """
    for config in configs:
        check_keys_of_configuration(config)
    alike: dict[str, list[dict[str, Any]]] = {}
    for config in configs:
        shared = {"data": config["data"], "model": config["model"]["name"], "device": config.get("device")}
        alike.setdefault(to_json(shared), []).append(config)
    before, problems = 0.0, []
    for group in alike.values():
        share = len(group) / len(configs)
        with store.unfinished(group) as folder:
            problems += _run_group(group, store, folder, _report_on_portion(report, before, share))
        before += share
    if problems:
        raise problems[0]


def table_metrics(table: Table) -> dict[str, float]:
    """Numbers of a table by name: "measure" for the network, "measure/layer" for a layer.

    Where a measure has several rows in one place, each is named with its options: `expected_sharpness{"alpha": 0.1}`.
    Values of units and samples stay in the table.
    """
    frame = table.to_frame()
    frame = frame[frame["unit"].isna() & frame["sample"].isna()]
    per_place = frame.groupby(["measure", "layer"], dropna=False)["value"].transform("size")
    metrics: dict[str, float] = {}
    for row, several in zip(frame.to_dict("records"), per_place, strict=True):
        name = f"{row['measure']}{row['options']}" if several > 1 else row["measure"]
        metrics[f"{name}/{row['layer']}" if row["layer"] else name] = float(row["value"])
    return metrics


def _run_group(group: Sequence[Config], store: Store, folder: Path | None, report: Report) -> list[Exception]:
    """Train networks together, store each; what went wrong with single ones."""
    share = TRAINING_SHARE if any(config.get("measures") or config.get("bounds") for config in group) else 1.0
    population = _train_group(group, folder, _report_on_portion(report, 0.0, share))
    problems: list[Exception] = []
    for i, config in enumerate(group):
        try:
            _measure_and_store(population, i, config, store)
        except (FlatscopeError, RuntimeError, ValueError) as problem:
            problems.append(problem)  # one network that cannot be measured does not cost the others
        report(share + (1 - share) * (i + 1) / len(group), "measuring")
    return problems


def _report_on_portion(report: Report, start: float, share: float) -> Report:
    return lambda fraction, note: report(start + share * fraction, note)


def _measure_and_store(population: Population, i: int, config: Config, store: Store) -> None:
    history = population.histories[i]
    last = history.iloc[-1]
    row = population.frame().iloc[i]
    stopped_by = str(row["stopped_by"])
    metrics: dict[str, Any] = {name: float(last[name]) for name in FINAL}
    metrics |= {name: float(row[name]) for name in GAPS if name in row}
    diverged = stopped_by == "diverged"
    metrics |= {"epochs": int(last["epoch"]), "stopped_by": stopped_by, "diverged": diverged}
    numbers, frames = ({}, {}) if diverged else _measured_metrics_and_frames(population.problem(i), config)
    store.write(config, metrics | numbers, weights=population.state(i), frames={"history": history, **frames})


def _measured_metrics_and_frames(problem: Problem, config: Config) -> tuple[dict[str, float], dict[str, pd.DataFrame]]:
    """Numbers by name, and the frame "table" of them all where anything was asked for."""
    tables = tables_of(problem, config)
    numbers = {name: value for table in tables for name, value in table_metrics(table).items()}
    return numbers, {"table": pd.concat([table.to_frame() for table in tables])} if tables else {}


def tables_of(problem: Problem, config: Config) -> list[Table]:
    """Tables that the configuration asks for, measured in one context so that sweeps are shared."""
    context = Context(problem, seed=config.get("measure_seed", 0))
    options = config.get("measure_options") or {}
    tables = []
    for kind, function in (("measure", measure), ("bound", bounds)):
        names = config.get(f"{kind}s")
        if names:
            known_options = {name: given for name, given in options.items() if name in declarations(kind)}
            tables.append(function(problem, names, options=known_options, context=context))
    context.forget()
    return tables


def _train_group(group: Sequence[Config], folder: Path | None, report: Report) -> Population:
    device = usable_device(group[0].get("device") or "cpu")
    data = load(**group[0]["data"])
    trials = [trial_of(config, str(i)) for i, config in enumerate(group)]
    epochs = dict.fromkeys(range(len(group)), 0.0)

    def after_epoch(epoch: int, view: PopulationView) -> None:
        for i in view.trials:
            over = view.stopped_by(i) is not None
            epochs[i] = 1.0 if over else epoch / max(epoch, group[i]["train"].get("epochs", 10))
        report(math.fsum(epochs.values()) / len(group), f"epoch {epoch}")

    return train_population(
        builder_of(group[0]["model"]["name"]),
        trials,
        data,
        pairs=lambda trial: training_pair(data, group[int(trial["name"])].get("labels")),
        device=device,
        checkpoint=folder,
        checkpoint_seconds=CHECKPOINT_SECONDS,
        after_epoch=after_epoch,
        show_progress=False,
    )


def measure_stored(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Measure networks that `train_and_measure` stored, without training them again; numbers have the same names.

    A configuration names the network by `network`, its own configuration, and has `measures`, `bounds`,
    `measure_options`, `measure_seed` and `device` as in `train_and_measure`.
    """
    for number, config in enumerate(configs):
        problem = stored_problem(store, config["network"], device=config.get("device"))
        metrics, frames = _measured_metrics_and_frames(problem, config)
        store.write(config, metrics, frames=frames)
        report((number + 1) / len(configs), "measuring")


def stored_problem(store: Store, network: Mapping[str, Any], *, device: str | None = None) -> Problem:
    """A network of the store with its own training data and labels, the test data and its starting weights.

    Args:
        store: where the network is.
        network: the configuration it was trained under.
        device: where to put it; the CPU by default.
    """
    data = samples_of(network)
    build = builder_of(network["model"]["name"])
    (trial,) = read_trials([trial_of(network, "0")], build)
    x, y = training_pair(data, network.get("labels"))
    n_classes = count_classes(data, y)
    part = trial_data(trial, x, y, n_classes)
    model = build_model(build, trial, part.images, n_classes)
    initial = {name: value.clone() for name, value in detached_tensors(model).items()}
    copy_state_into(model, store.read(network).weights())
    parameters = {name for name, _ in model.named_parameters()}
    starting = {name: value for name, value in initial.items() if name in parameters}
    place = usable_device(device or "cpu")
    # On a GPU the samples lie where the network is, and so many go at once that calls do not take longer than products.
    pair = tuple(tensor.to(place) for tensor in part.pair())
    return Problem(
        model.eval(),
        train=pair,
        test=data.test,
        loss=trial.config.loss,
        initial=starting,
        device=place,
        batch_size=None if place.type == "cpu" else GPU_BATCH,
    )


def samples_of(config: Config) -> Data:
    """The data of a configuration, kept in memory for the next with the same."""
    return _loaded_samples(json.dumps(dict(config["data"]), sort_keys=True))


@functools.lru_cache(maxsize=2)
def _loaded_samples(settings: str) -> Data:
    """Samples as `load` gives them; the networks of a study share theirs."""
    return load(**json.loads(settings))


def builder_of(name: str) -> str | Callable[[Mapping[str, Any]], nn.Module]:
    """Builder of networks for `train_population`: a built-in name, or a function of the trial."""
    if ":" not in name:
        return name
    factory = find_factory(name)
    return lambda trial: factory(**trial["model_options"])


def trial_of(config: Config, name: str) -> dict[str, Any]:
    """The configuration as `train_population` wants it."""
    model, labels, init = config["model"], config.get("labels") or {}, config.get("init") or {}
    trial = {**config["train"], "name": name, "model_options": model.get("options") or {}}
    trial["model_seed"] = model.get("seed", config["train"].get("seed", 0))
    if labels and "confusion" not in labels:
        trial["labels"] = labels
    if isinstance(init, str):
        trial["init"] = init
    elif init:
        trial |= {"init": init.get("scheme", "torch")}
        trial["init_options"] = {key: value for key, value in init.items() if key != "scheme"}
    return trial


def training_pair(data: Data, labels: Mapping[str, Any] | None) -> tuple[Tensor, Tensor]:
    """Training samples of a trial; `train_population` itself draws labels again where "random" says so."""
    if not labels or "confusion" not in labels:
        return data.train
    settings = {"seed": 0, **{key: value for key, value in labels.items() if key != "confusion"}}
    return confusion_set(data, labels["confusion"], **settings).train


MODEL_KEYS, CONFUSION_KEYS = ("name", "options", "seed"), ("confusion", "true_size", "seed")
DATA_KEYS = tuple(inspect.signature(load).parameters)
SAMPLE_KEYS = ("train_size", "test_size", "crop")  # of these, what the data at hand cannot fulfil


def check_keys_of_configuration(config: Config) -> None:
    """Refuse a configuration with parts that are not known, or without those that are needed."""
    _refuse_unknown_keys(config, (*PARTS, "name"), "configuration")
    for name in ("data", "model", "train"):
        if not isinstance(config.get(name), Mapping):
            raise InputError(f"a dictionary {name!r}", repr(config.get(name)), where="configuration")
    for name in ("data", "model"):
        if not isinstance(config[name].get("name"), str):
            raise InputError("a name", repr(config[name].get("name")), where=f"configuration, {name}")
    known = declarations() | declarations("bound")
    for name in config.get("measure_options") or {}:
        if name not in known:
            raise unknown_name(name, known, "measure in measure_options")


def check_configurations(configs: Iterable[Config], where: str) -> None:
    """Refuse the first configuration of `train_and_measure` that cannot be run, before any of them is.

    Raises:
        InputError: what is wrong, and in which trial of `where`.
    """
    find = functools.cache(find_factory)  # the user's function, looked for once however many trials name it
    looked_at: set[str] = set()
    for number, config in enumerate(configs):
        try:
            check_keys_of_configuration(config)
            _check_data(config["data"], find)
            _check_samples(config["data"], looked_at)
            _check_model(config["model"], find)
            _check_training(config)
            _check_measures(config)
        except InputError as problem:
            problem.where = f"{where}, trial {number}, {problem.where}".removesuffix(", ")
            raise


def _check_data(data: Config, find: Find) -> None:
    _refuse_unknown_keys(data, DATA_KEYS, "key of data")
    name = data["name"]
    if ":" in name and not name.endswith(".npz"):
        find(name)
    elif name not in (EMBEDDED, *SETS) and not name.endswith(".npz") and not Path(name).exists():
        raise UnknownNameError.among(name, [EMBEDDED, *SETS], "data set")


def _check_samples(data: Config, looked_at: set[str]) -> None:
    """Refuse more samples, or larger images, than there are; data that are not at hand are left to the trials."""
    name = data["name"]
    asked = {key: data[key] for key in ("name", "root", *SAMPLE_KEYS) if data.get(key) is not None}
    key = json.dumps(asked, sort_keys=True, default=str)
    if key in looked_at or not any(key in asked for key in SAMPLE_KEYS):
        return
    looked_at.add(key)
    is_public = name in SETS and len(locate_set_files(SETS[name], data_root(data.get("root")))) == len(SETS[name].files)
    if is_public or name == EMBEDDED or (name.endswith(".npz") and Path(name).expanduser().is_file()):
        load(**asked, standardize=False)


def _check_model(model: Config, find: Find) -> None:
    _refuse_unknown_keys(model, MODEL_KEYS, "key of model")
    name, options = model["name"], model.get("options") or {}
    if ":" in name:
        find(name)
        return
    _refuse_unknown([name], models.available(), "model")
    if not isinstance(options, Mapping):
        raise InputError("a dictionary", repr(options), where="model, options")
    _refuse_unknown(options, models.model_options(name), f"option of model {name}")


def _check_training(config: Config) -> None:
    _refuse_unknown(config["train"], (*CONFIG_KEYS, *OWN_KEYS), "training setting")
    labels = config.get("labels") or {}
    if "confusion" in labels:
        _refuse_unknown_keys(labels, CONFUSION_KEYS, "key of labels")
    trial = trial_of(config, "0")
    read_trials([trial], lambda _: nn.Identity())  # which is not called: the settings are read, nothing is built
    if trial.get("init") is not None:
        _refuse_unknown([str(trial["init"])], schemes(), "initialisation scheme")


def _check_measures(config: Config) -> None:
    for kind in ("measure", "bound"):
        if config.get(f"{kind}s"):
            select(config[f"{kind}s"], kind)
    known = declarations() | declarations("bound")
    for name, given in (config.get("measure_options") or {}).items():
        known[name].checked_options(given)


def _refuse_unknown_keys(given: Mapping[str, Any], known: Iterable[str], kind: str) -> None:
    for name in given:
        if name not in known:
            raise UnknownNameError(f"one of {', '.join(known)}", repr(name), where=kind)


def _refuse_unknown(names: Iterable[str], known: Collection[str], kind: str) -> None:
    for name in names:
        refuse_unknown(name, known, kind)
