"""Models, weights and options as they are written on the command line."""

from __future__ import annotations

import ast
import csv
import fnmatch
import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from flatscope.cli.options import INITIAL_FILE, DataOptions, MeasureOptions, NetworkOptions, ProblemOptions
from flatscope.cli.output import command_line
from flatscope.disk import MOST_TEXT, read_file, read_with_sum
from flatscope.errors import InputError, UnknownNameError, refuse_unknown
from flatscope.files import file_digest, from_json_bytes
from flatscope.inputs.data_set import Data, DataSource
from flatscope.inputs.factories import find_factory
from flatscope.inputs.hub_models import hub_model, is_hub_model, tokenizer_loader
from flatscope.inputs.hub_tables import is_hub_data
from flatscope.inputs.loading import load, load_or_read
from flatscope.inputs.weight_files import STATE_FILE, WEIGHTS_FILE, load_weights
from flatscope.isolation import private_randomness
from flatscope.problem import Problem
from flatscope.registry import CORE, PICTURED, declarations, select, unknown_name
from flatscope.training import models

Options = dict[str, dict[str, Any]]
DTYPES = {"float32": torch.float32, "float64": torch.float64}


def load_model(
    model: str,
    weights: Path | None = None,
    data: Data | DataSource | None = None,
    seed: int = 0,
    options: Mapping[str, Any] | None = None,
) -> nn.Module:
    """A model from `file.py:factory`, `package.module:factory`, a hub or a built-in name, in eval mode.

    Args:
        model: where the model comes from.
        weights: safetensors file, state dict or run folder to load into it.
        data: a built-in model takes its input shape and number of classes from it.
        seed: of the initial weights.
        options: for the factory or the built-in model.
    """
    given = dict(options or {})
    if is_hub_model(model):
        built = hub_model(model, given, has_weights=weights is not None, seed=seed)
    elif ":" in model:
        factory = find_factory(model)
        with private_randomness(seed):  # modules draw their weights from the global state
            built = _call_factory(factory, given, f"--model {model}")
        if not isinstance(built, nn.Module):
            raise InputError("a factory that returns a torch.nn.Module", type(built).__name__, where=f"--model {model}")
    elif model in models.available():
        fitting: dict[str, object] = {}
        if isinstance(data, Data) and "input_shape" in models.model_options(model):
            fitting = {"input_shape": data.input_shape, "classes": data.n_classes}
        built = _build_named_model(model, seed, fitting | given)
    else:
        unknown = UnknownNameError.among(model, models.available(), "model")
        unknown.fix += " A model of your own is named file.py:factory, one of a hub timm:NAME or hf:FOLDER-OR-ID"
        raise unknown
    if weights is not None:
        load_weights(built, weights)
    return built.eval()


def _call_factory(factory: Callable[..., Any], options: dict[str, Any], where: str) -> Any:
    """The factory's model; a call that does not fit its parameters is the user's slip, not a failed run."""
    try:
        inspect.signature(factory).bind(**options)
    except TypeError as problem:
        fix = f"Its parameters are {inspect.signature(factory)}; give them with --model-option name=value"
        raise InputError(
            "the parameters that the factory takes", str(problem).removeprefix("got "), where, fix
        ) from None
    except ValueError:
        pass  # no signature to be had, as of some classes written in C
    return factory(**options)


def _build_named_model(model: str, seed: int, options: dict[str, Any]) -> nn.Module:
    try:
        return models.build(model, seed=seed, **options)
    except InputError as problem:
        fix = f"{problem.fix.rstrip('.')}. " if problem.fix else ""
        fix += "Options are given as --model-option name=value, as in --model-option widths=64,32,10"
        raise InputError(problem.expected, problem.got, problem.where, fix) from problem


def parse_model_options(entries: Iterable[str] | None) -> dict[str, Any]:
    """`name=value` entries as a dictionary; values are Python literals or words."""
    options = {}
    for entry in entries or ():
        name, equals, value = entry.partition("=")
        if not (equals and name.isidentifier()):
            raise InputError("name=value, as in widths=64,32,10", repr(entry), where="--model-option")
        options[name] = _parse_literal_or_word(value)
    return options


def load_data(given: DataOptions) -> Data:
    """The samples that a command line describes, as tensors."""
    return load(**_load_arguments_with_columns(given))


def load_source(given: DataOptions) -> Data | DataSource:
    """The samples that a command line describes, for a `Problem`: also loaders, read as they come."""
    model = getattr(given, "model", "")
    name = model if isinstance(model, str) else next(iter(model), "")
    return load_or_read(**_load_arguments_with_columns(given), tokenizer=tokenizer_loader(name))


def _load_arguments_with_columns(given: DataOptions) -> dict[str, Any]:
    """Arguments of `load`, with columns by what they hold."""
    columns: dict[str, str] = {}
    for entry in given.column or ():
        role, equals, name = entry.partition("=")
        if not (equals and role and name):
            raise InputError("input=NAME or label=NAME", repr(entry), where="--column")
        columns[role] = name
    if is_hub_data(given.data) and getattr(given, "loss", "") == "next_token":
        columns.setdefault("label", "input_ids")
    return given.load_arguments() | {"columns": columns}


def make_problem(network: nn.Module, loaded: Data | DataSource, given: ProblemOptions, **settings: Any) -> Problem:
    """The problem of a network on its data; `settings` go to `Problem` before those given."""
    if ":" in given.loss:
        settings["loss"] = find_factory(given.loss)
    return Problem(network, train=loaded.train, test=loaded.test, **given.problem_arguments() | settings)


def load_problem(given: NetworkOptions, **settings: Any) -> tuple[Problem, Data | DataSource]:
    """The problem that a command line describes, and its data; `settings` go to `Problem` before those given."""
    loaded = load_source(given)
    network = load_model(given.model, given.weights, loaded, given.seed, parse_model_options(given.model_option))
    return make_problem(network, loaded, given, **settings), loaded


def network_meta(network: NetworkOptions) -> dict[str, str]:
    """Origin of a measured network, for the provenance of its results."""
    weights = str(network.weights or "")
    meta = {"model": network.model, "weights": weights, "data": network.data, "command": command_line()}
    for name, path in (("weights", Path(weights)), ("data", Path(network.data))):
        path = path / WEIGHTS_FILE if name == "weights" and path.is_dir() else path
        if path.is_file():
            meta[f"{name} checksum"] = file_digest(path)
    return meta


def saved_error(weights: Path | None) -> float | None:
    """The training error that training wrote beside these weights; None where there is none."""
    if weights is None or not (weights.is_dir() or weights.name == WEIGHTS_FILE):
        return None
    folder = weights if weights.is_dir() else weights.parent
    try:
        if (folder / "history.csv").is_file():  # of `flatscope train`
            rows = list(csv.DictReader(read_with_sum(folder / "history.csv").decode().splitlines()))
        elif (folder / STATE_FILE).is_file():  # of a checkpoint
            rows = from_json_bytes(read_file(folder / STATE_FILE, MOST_TEXT))["state"]["rows"]
        else:  # of a trial in a store
            rows = [from_json_bytes(read_file(folder / "metrics.json", MOST_TEXT))["metrics"]]
        error = float(rows[-1]["train_error"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return error if math.isfinite(error) else None


def find_initial(initial: Path | None, weights: Path | None) -> Path | None:
    """Path of the weights before training: as given, else in the folder of the trained ones; None without."""
    beside = None if weights is None else weights / INITIAL_FILE
    return beside if initial is None and beside is not None and beside.is_file() else initial


def check_measures(names: Iterable[str] | None) -> None:
    """Refuse names that no measure has; whoever names a bound learns how bounds are asked for."""
    for name in names or ():
        try:
            select([name])
        except UnknownNameError as problem:
            if fnmatch.filter(declarations("bound"), name):
                problem.fix = f"{name} is a bound: flatscope measure --bound {name}"
            raise


def asked_measures(given: MeasureOptions, report: Path | None) -> list[str] | None:
    """The measures that were named; None for the core set, with its values by layer and sample where a page is made."""
    return given.measures or ([*CORE, *PICTURED] if report is not None else None)


def names_of_bounds(default: bool, named: Iterable[str] | None) -> list[str]:
    """Names of the bounds that --bounds and --bound ask for, together."""
    asked = [*(select(None, "bound") if default else ()), *select(named or (), "bound")]
    return list(dict.fromkeys(entry.name for entry in asked))


def split_options(options: Options, with_bounds: bool) -> tuple[Options, Options]:
    """Options of measures and those of bounds, checked before any data is read.

    Args:
        options: as `parse_options` gives them.
        with_bounds: whether any bound is evaluated; options of bounds would be lost without.
    """
    parts: dict[str, Options] = {"measure": {}, "bound": {}}
    known = declarations() | declarations("bound")
    for name, given in options.items():
        if name not in known:
            raise unknown_name(name, known, "measure or bound in --option")
        entry = known[name]
        if entry.kind == "bound" and "delta" in given:
            raise InputError("one delta for all bounds", f"{name}.delta", where="--option", fix="Give it as --delta")
        if entry.kind == "bound" and not with_bounds:
            fix = f"Add --bound {name}"
            raise InputError("a bound that is evaluated", f"{name}, which is not asked for", where="--option", fix=fix)
        parts[entry.kind][name] = entry.checked_options(given)
    return parts["measure"], parts["bound"]


def parse_options(entries: Iterable[str]) -> Options:
    """`measure.option=value` entries as {measure: {option: value}}; values are Python literals or words."""
    options: Options = {}
    for entry in entries:
        name, equals, value = entry.partition("=")
        measure, dot, option = name.partition(".")
        if not (equals and dot and option):
            raise InputError("measure.option=value, as in margin.epsilon=0.1", repr(entry), where="--option")
        options.setdefault(measure, {})[option] = _parse_literal_or_word(value)
    return options


def _parse_literal_or_word(value: str) -> Any:
    """A Python literal (number, True, tuple) or, failing that, the word itself."""
    try:
        return ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return value


def parse_dtype(name: str | None) -> torch.dtype | None:
    """float32 or float64."""
    if name is None:
        return None
    refuse_unknown(name, DTYPES, "dtype")
    return DTYPES[name]
