"""What is wrong with a configuration that can be seen without training: names and settings that do not exist."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import nn

from flatscope.errors import InputError, UnknownNameError
from flatscope.factories import find_factory
from flatscope.registry import declarations, select
from flatscope.sweeps.work import Config, check_parts, trial_of
from flatscope.training import models
from flatscope.training.data import load
from flatscope.training.initialization import schemes
from flatscope.training.known_files import SETS
from flatscope.training.public_sets import EMBEDDED
from flatscope.training.trials import CONFIG_KEYS, OWN_KEYS, read_trials

MODEL_KEYS, CONFUSION_KEYS = ("name", "options", "seed"), ("confusion", "true_size", "seed")
DATA_KEYS = tuple(inspect.signature(load).parameters)


def check_configs(configs: Iterable[Config], where: str) -> None:
    """Refuse the first configuration of `train_and_measure` that cannot be run, before any of them is.

    Raises:
        InputError: what is wrong, and in which trial of `where`.
    """
    found: set[str] = set()
    for number, config in enumerate(configs):
        try:
            check_parts(config)
            _check_data(config["data"], found)
            _check_model(config["model"], found)
            _check_training(config)
            _check_measures(config)
        except InputError as problem:
            problem.where = f"{where}, trial {number}, {problem.where}".removesuffix(", ")
            raise


def _check_data(data: Config, found: set[str]) -> None:
    _known_keys(data, DATA_KEYS, "key of data")
    name = data["name"]
    if ":" in name and not name.endswith(".npz"):
        _find(name, found)
    elif name not in (EMBEDDED, *SETS) and not name.endswith(".npz") and not Path(name).exists():
        raise UnknownNameError.among(name, [EMBEDDED, *SETS], "data set")


def _check_model(model: Config, found: set[str]) -> None:
    _known_keys(model, MODEL_KEYS, "key of model")
    name, options = model["name"], model.get("options") or {}
    if ":" in name:
        _find(name, found)
        return
    if name not in models.available():
        raise UnknownNameError.among(name, models.available(), "model")
    if not isinstance(options, Mapping):
        raise InputError("a dictionary", repr(options), where="model, options")
    for option in options:
        if option not in models.model_options(name):
            raise UnknownNameError.among(option, models.model_options(name), f"option of model {name}")


def _check_training(config: Config) -> None:
    known = (*CONFIG_KEYS, *OWN_KEYS)
    for name in config["train"]:
        if name not in known:
            raise UnknownNameError.among(name, known, "training setting")
    labels = config.get("labels") or {}
    if "confusion" in labels:
        _known_keys(labels, CONFUSION_KEYS, "key of labels")
    trial = trial_of(config, "0")
    read_trials([trial], lambda _: nn.Identity())  # which is not called: the settings are read, nothing is built
    if trial.get("init") is not None and trial["init"] not in schemes():
        raise UnknownNameError.among(str(trial["init"]), schemes(), "initialisation scheme")


def _check_measures(config: Config) -> None:
    for kind in ("measure", "bound"):
        if config.get(f"{kind}s"):
            select(config[f"{kind}s"], kind)
    known = declarations() | declarations("bound")
    for name, given in (config.get("measure_options") or {}).items():
        known[name].checked_options(given)


def _known_keys(given: Mapping[str, Any], known: Iterable[str], kind: str) -> None:
    for name in given:
        if name not in known:
            raise UnknownNameError(f"one of {', '.join(known)}", repr(name), where=kind)


def _find(source: str, found: set[str]) -> None:
    """The user's function, looked for once however many trials name it."""
    if source not in found:
        find_factory(source)
        found.add(source)
