"""`flatscope train`: one network, or many as `--population file.toml` has them.

The file has a table `[data]` (`name` and options of `flatscope.inputs.load`), a table `[model]` (`name` and its
options, beside it or, as in a sweep, as `options = {…}` with the `seed` of the weights), a table `[train]` with what
all trials share, and what differs: `[[trials]]`, one table each, or `[grid]`, lists whose combinations are the
trials (of every entry of `[[trials]]`, if there are both).
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import typer
from torch import nn

from flatscope.cli.options import INITIAL_FILE, KEPT_FOLDER, TrainCommand
from flatscope.cli.output import check_output_folder, show_grid, show_note
from flatscope.cli.sources import load_data, load_model, parse_model_options
from flatscope.disk import write_whole
from flatscope.errors import InputError, UnknownNameError, refuse_unknown, refuse_unless_whole
from flatscope.files import csv_bytes, frame_bytes
from flatscope.formatting import numbered, readable_number
from flatscope.input_checks import usable_device
from flatscope.inputs import loading
from flatscope.inputs.weight_files import WEIGHTS_FILE, save_weights
from flatscope.training.checkpoint import TrainConfig
from flatscope.training.initialization import initialize
from flatscope.training.loop import train as train_model
from flatscope.training.population import train_population
from flatscope.training.population_result import Population
from flatscope.training.sweeps.configuration import Sweep, read_toml
from flatscope.training.trials import CONFIG_KEYS, OWN_KEYS, Build

BESIDE_POPULATION = ("population", "out", "device", "data_root")
TABLES = ("data", "model", "train", "trials", "grid")
SHOWN = 20


def run_train(given: TrainCommand, typed: list[str]) -> None:
    """Train, show, save; `typed` are the options that stand on the command line."""
    check_output_folder(given.out)
    if given.population is not None:
        _refuse_settings_beside_population_file(typed)
        train_file(given.population, given.out, given.device, given.data_root)
        return
    for name, value in (("--model", given.model), ("--data", given.data)):
        if not value:
            raise InputError(f"{name}, or --population with a file", "neither", where="flatscope train")
    settings = {name: getattr(given, name) for name in TrainConfig().to_dict() if hasattr(given, name)}
    config = TrainConfig.from_dict(settings | {"lr_steps": [_parse_rate_step(entry) for entry in given.lr_step or ()]})
    place = usable_device(given.device)
    options = parse_model_options(given.model_option)
    loaded = load_data(given)
    network = load_model(given.model, None, loaded, given.seed, options)
    if given.init is not None:
        initialize(network, given.init, given.seed)
    checkpoint = given.out / "checkpoint"
    if not (checkpoint / WEIGHTS_FILE).exists():  # a run that is taken up, or refused, keeps the weights it began with
        save_weights(network, given.out / INITIAL_FILE)
    refuse_unless_whole(given.keep_every, "--keep-every", least=0)

    def keep(epoch: int, model: nn.Module) -> None:
        if given.keep_every and epoch % given.keep_every == 0:
            save_weights(model, given.out / KEPT_FOLDER / f"epoch-{epoch:06d}.safetensors")

    result = train_model(network.to(place), loaded, config, checkpoint=checkpoint, after_epoch=keep)
    if result.resumed_from:
        show_note(f"resumed after epoch {result.resumed_from}")
    save_weights(result.model, given.out / "weights.safetensors")
    write_whole(given.out / "history.csv", csv_bytes(result.history), with_sum=True)
    last = result.history.iloc[-1]
    shown = ["epoch", "train_loss", "train_error", "test_loss", "test_error"]
    show_grid(shown, [[readable_number(float(last[name])) for name in shown]], title=f"stopped by {result.stopped_by}")
    show_note(f"weights in {given.out / 'weights.safetensors'}, before training in {given.out / INITIAL_FILE}")
    if result.diverged:
        raise typer.Exit(code=1)


def _refuse_settings_beside_population_file(typed: list[str]) -> None:
    """Settings on the command line that the file would silently overrule."""
    for name in typed:
        if name not in BESIDE_POPULATION:
            option = "--" + name.replace("_", "-")
            fix = "Write it into the file, under [train], [model] or [data]"
            raise InputError("settings in the file alone", f"{option} on the command line", "--population", fix)


def _parse_rate_step(entry: str) -> list[float]:
    """`80:0.1` as [80, 0.1]."""
    epoch, _, factor = entry.partition(":")
    try:
        return [int(epoch), float(factor)]
    except ValueError as problem:
        raise InputError("epoch:factor, as in 80:0.1", repr(entry), where="--lr-step") from problem


def train_file(path: Path, out: Path, device: str, data_root: Path | None) -> None:
    """Train what the file describes into `out`; run the same command again to resume."""
    place = usable_device(device)
    content = read_toml(path)
    for key in content:
        if key not in TABLES:
            raise UnknownNameError(f"one of {', '.join(TABLES)}", repr(key), where=str(path))
    model, options = _name_and_options(content.get("model"), "model", path)
    options, model_seed = _model_options_and_seed(options, path)
    name, settings = _name_and_options(content.get("data"), "data", path)
    trials = expand_training_grid(content, str(path))
    known = [key for key in inspect.signature(loading.load).parameters if key not in ("name", "root")]
    for key in settings:
        if key not in known:
            raise UnknownNameError(f"one of name, {', '.join(known)}", repr(key), where=f"{path}, [data]")
    # As the other commands do, so that they measure these networks on the inputs that they were trained on.
    data = loading.load(name, data_root, **({"standardize_by": "all"} | settings))
    for trial in trials:
        trial["model_options"] = {**options, **trial.get("model_options", {})}
        if model_seed is not None:
            trial.setdefault("model_seed", model_seed)

    def from_factory(trial: Mapping[str, Any]) -> nn.Module:
        return load_model(model, None, data, trial["model_seed"], trial["model_options"])

    build: Build = from_factory if ":" in model else model
    population = train_population(build, trials, data, device=place, checkpoint=out / "checkpoint")
    save_population(population, out)
    _show_population(population, out)
    if population.frame()["diverged"].all():
        raise typer.Exit(code=1)


def expand_training_grid(content: Mapping[str, Any], where: str) -> list[dict[str, Any]]:
    """One dictionary per trial, with a name: what all share, then the cell of the grid, then the trial's own."""
    given = {key: content[key] for key in ("trials", "grid") if key in content}
    sweep = Sweep.from_dict({"name": "population", "base": content.get("train", {}), **given}, where)
    trials = sweep.combinations()
    digits = len(str(len(trials) - 1))
    for position, trial in enumerate(trials):
        if sweep.grid or "name" not in trial:  # a name that several trials of the grid would share
            base = f"{trial['name']}-" if "name" in trial else ""
            trial["name"] = f"{base}{position:0{digits}d}"
        if not re.fullmatch(r"[\w.=,+-]+", str(trial["name"])) or set(str(trial["name"])) == {"."}:
            expected = "a name of letters, digits and . _ - + = , since it names a folder"
            raise InputError(expected, repr(trial["name"]), where=f"{where}, trial {position}")
        for key in trial:
            refuse_unknown(key, (*CONFIG_KEYS, *OWN_KEYS), f"setting of trial {position} in {where}")
    return trials


def save_population(population: Population, out: Path) -> None:
    """One folder per trial with weights before and after and the history, and one table of all trials."""
    for i, name in enumerate(population.names):
        folder, model = out / "trials" / name, population.model(i)
        save_weights(model, folder / "weights.safetensors")
        model.load_state_dict(population.initial(i), strict=False)
        save_weights(model, folder / "initial.safetensors")
        write_whole(folder / "history.csv", csv_bytes(population.histories[i]), with_sum=True)
    frame = population.frame()
    for column in frame:
        if any(isinstance(value, list | tuple | dict) for value in frame[column]):
            frame[column] = [json.dumps(value) for value in frame[column]]
    write_whole(out / "frame.csv", csv_bytes(frame), with_sum=True)
    write_whole(out / "frame.parquet", frame_bytes(frame))


def _name_and_options(table: Any, kind: str, path: Path) -> tuple[str, dict[str, Any]]:
    """The `name` of [model] or [data], and the other entries, which are its options."""
    if not isinstance(table, dict) or not isinstance(table.get("name"), str):
        raise InputError(f"a table [{kind}] with a name", "none", where=f"--population {path}")
    return table["name"], {key: value for key, value in table.items() if key != "name"}


def _model_options_and_seed(options: dict[str, Any], path: Path) -> tuple[dict[str, Any], Any]:
    """Options of the model, and the seed of its weights where [model] has `options` and `seed`, as in a sweep."""
    if "options" not in options:
        return options, None  # a `seed` is then an option like the others, for a factory that takes one
    beside = {key: value for key, value in options.items() if key not in ("options", "seed")}
    if beside or not isinstance(options["options"], dict):
        got = f"{next(iter(beside))} beside them" if beside else repr(options["options"])
        raise InputError("all options of the model in options = {…}", got, where=f"[model] in {path}")
    return options["options"], options.get("seed")


def _show_population(population: Population, out: Path) -> None:
    frame, (header, rows) = population.frame(), population.cells()
    show_grid(header, rows[:SHOWN], title=numbered(len(population), "network"))
    if len(frame) > SHOWN:
        show_note(f"{len(frame) - SHOWN} more in {out / 'frame.csv'}")
    if frame["diverged"].any():
        show_note(f"diverged: {', '.join(frame.loc[frame['diverged'], 'name'])}")
    show_note(f"weights and histories in {out / 'trials'}, one table in {out / 'frame.parquet'}")
