"""The released population: which networks, how far they are trained (both fixed before any ran), what is measured.

Every combination of two values of nine settings on two data sets: 1,024 networks, each with a seed of its own for its
starting weights, sample order and wrong labels. Networks of one data set share the 400 training images. Each network is
taken twice: after the first epoch whose training loss (over all samples, wrong labels included) is below 0.1, and,
further along the same training, below 0.01. One that does not get there within 150 epochs stays in the table without
values. The gap is the error on all 10,000 test images, whose labels are right, less the training error, whose labels
may be wrong. Environments, in which a measure may fail, are the nine settings: one of them changes, all others stay.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from torch import Tensor, nn

from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.formatting import measure_label
from flatscope.measuring import measure
from flatscope.problem import Problem
from flatscope.registry import declarations
from flatscope.symmetries.scaling import rescale
from flatscope.table import options_text
from flatscope.training.evaluation import evaluate
from flatscope.training.group_training import PopulationView
from flatscope.training.population import train_population
from flatscope.training.sweeps.engines import run_units
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import Report, builder_of, samples_of, stored_problem, trial_of

Config = dict[str, Any]

DATA_SETS = ("cifar10", "fashion-mnist")
EMBEDDED = "digits"  # which everybody has: for a first look without a download
IMAGES = {"cifar10": (3, 32), "fashion-mnist": (1, 28), EMBEDDED: (1, 8)}  # channels and side
STOPS = (0.1, 0.01)
SETTINGS: dict[str, tuple[Any, Any]] = {
    "kind": ("dense", "convolution"),
    "width": (16, 32),
    "depth": (1, 2),
    "batch_size": (20, 60),
    "lr": (0.06, 0.15),  # of plain descent: what each optimizer makes of it, OPTIMIZERS says
    "weight_decay": (0.0, 1e-3),
    "init_scale": (1.0, 2.0),  # factor on torch's starting weights
    "label_noise": (0.0, 0.2),  # share of the training labels that are replaced by another class
    "optimizer": ("momentum", "adam"),
}
# A factor on the learning rate, and settings of training. With momentum m a factor 1 - m gives steps of the same length
# as plain descent. Adam's steps have lengths of their own: of the factors tried beforehand on corners of the design,
# 1/30 brought most networks to the last stop (docs/how-to/score-a-measure.md).
OPTIMIZERS: dict[str, tuple[float, Config]] = {
    "momentum": (1 - 0.9, {"momentum": 0.9}),
    "adam": (1 / 30, {"optimizer": "adam"}),
}
TRAIN_SIZE, MOST_EPOCHS = 400, 150
# Smaller designs vary the first of these and hold the others at their first value.
ORDER = ("label_noise", "width", "lr", "batch_size", "kind", "init_scale", "optimizer", "depth", "weight_decay")
SUBSET = 128  # networks that are rescaled, and of which measures of cost "long" are taken
OUTCOMES = ("epochs", "train_loss", "train_error", "test_loss", "test_error")
TOGETHER = 16  # networks of a unit of measuring
RESCALED = "rescaled."  # before the name of a measure: its value on the twin
RESCALINGS = (0.2, 5.0)  # a factor for each hidden unit, log-uniform
# One number per measure: of those that give several, one value of the option. Of the long ones, smaller searches.
OPTIONS: dict[str, dict[str, Any]] = {
    "pac_bayes_kl": {"alpha": [0.01]},
    "perturbation_robustness": {"gammas": [0.5]},
    "expected_sharpness": {"alpha": [0.03], "draws": 100},
    "feature_robustness": {"restarts": 1, "steps": 5},
    "flatness_radius": {"directions": 20, "tolerance": 1e-3},
    "geometric_margin": {"samples": 50, "restarts": 2},
    "batch_sharpness": {"draws": 64},
    "effective_dimension": {"steps": 30, "draws": 4},
    "sharpness": {"steps": 30},
    **{name: {"restarts": 1, "steps": 10} for name in ("adaptive_sharpness", "epsilon_flatness", "psi_epsilon")},
    **{name: {"draws": 50} for name in ("expected_flatness", "psi_expected")},
}
# What is taken of a measure besides, with other options.
FORMS: tuple[tuple[str, dict[str, Any]], ...] = (
    *(
        (name, {"form": form})
        for name in ("l1_path_norm", "l2_path_norm", "l2_norm", "spectral_norm", "l1_inf_norm", "group_norm")
        for form in ("over_margin", "capacity")
    ),
    ("spectral_norm", {"form": "lipschitz_l2"}),
    ("parameter_count", {"form": "vc_dimension"}),
    ("kappa", {"form": "max"}),
    ("kappa", {"form": "sum"}),
    ("kappa_trace", {"form": "max"}),
    ("rho", {"form": "max"}),
)
# More than 5 s for each network, and with shorter chains not to be trusted: an hour beside the hour of all others.
LEFT_OUT = {"local_learning_coefficient", "wbic"}
# As version 0.2 called it: stores find their networks by this name, and `find_factory` knows where the function is now.
NETWORK = "flatscope.benchmarking.recipe:small_network"
TRAIN_WORK, LOOK_WORK = f"{__name__}:train_networks", f"{__name__}:measure_networks"


def small_network(kind: str, width: int, depth: int, channels: int, side: int) -> nn.Sequential:
    """A convolution that cuts the image into patches of 4×4, `depth` hidden layers, and a dense layer to ten classes.

    Args:
        kind: hidden layers are "dense" or a 3×3 "convolution".
        width: of dense hidden layers; convolutions have a quarter of it as channels.
        depth: hidden layers after the first convolution.
        channels: of the image.
        side: of the image.
    """
    first, patches = width // 4, (side // 4) ** 2
    parts: list[nn.Module] = [nn.Conv2d(channels, first, 4, stride=4), nn.ReLU()]
    features = first * patches
    if kind == "dense":
        parts.append(nn.Flatten())
        for _ in range(depth):
            parts += [nn.Linear(features, width), nn.ReLU()]
            features = width
    else:
        for _ in range(depth):
            parts += [nn.Conv2d(first, first, 3, padding=1), nn.ReLU()]
        parts.append(nn.Flatten())
    return nn.Sequential(*parts, nn.Linear(features, 10))


def benchmark_networks(most: int | None = None, data_sets: Sequence[str] = ()) -> pd.DataFrame:
    """The design: a row per network with its data set, its settings and its seed, which is its number.

    Args:
        most: only so many, as a smaller design of the same kind: every combination of the first settings of `ORDER`,
            the others at their first value.
        data_sets: on which; those of the release by default.
    """
    chosen = data_sets or DATA_SETS
    cells = list(itertools.product(chosen, *SETTINGS.values()))
    frame = pd.DataFrame(cells, columns=["data", *SETTINGS]).assign(seed=range(len(cells)))
    if most is None:
        return frame
    varied = round(math.log2(max(most, 1) / len(chosen)))
    if most != len(chosen) * 2**varied or not 2 <= varied <= len(SETTINGS):
        expected = f"a power of 2 from 8 to {len(frame)}: every combination of some of the settings"
        raise InputError(expected, repr(most), where="benchmark, networks")
    held = {name: SETTINGS[name][0] for name in ORDER[varied:]}
    return frame[np.all([frame[name] == value for name, value in held.items()], axis=0)] if held else frame


def rows_as_dictionaries(rows: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows one by one, values by column."""
    return [{str(name): value for name, value in row.items()} for row in rows.to_dict("records")]


def network_configuration(row: Mapping[str, Any], stop: float) -> Config:
    """One network up to one stop, as sweeps describe it: `train_and_measure` trains the very same."""
    channels, side = IMAGES[row["data"]]
    (factor, optimizer), seed = OPTIMIZERS[row["optimizer"]], int(row["seed"])
    shape = {"width": int(row["width"]), "depth": int(row["depth"]), "channels": channels, "side": side}
    config: Config = {
        "data": {"name": row["data"], "train_size": TRAIN_SIZE},
        "model": {"name": NETWORK, "options": {"kind": row["kind"], **shape}, "seed": seed},
        "init": {"scheme": "torch", "scale": float(row["init_scale"])},
        "train": {
            "lr": float(row["lr"]) * factor,
            **optimizer,
            "weight_decay": float(row["weight_decay"]),
            "batch_size": int(row["batch_size"]),
            "epochs": MOST_EPOCHS,
            "stop_loss": stop,
            "seed": seed,
        },
    }
    if row["label_noise"]:
        config["labels"] = {"random": float(row["label_noise"]), "seed": seed, "exclude_true": True}
    return config


def train_networks(configs: list[Config], store: Store, report: Report) -> None:
    """Work of a sweep: train networks together, each once however many of its stops are asked for; store every stop."""
    begun = time.process_time()
    alike: dict[int, list[Config]] = {}
    for config in configs:
        alike.setdefault(config["model"]["seed"], []).append(config)
    wanted, data = list(alike.values()), samples_of(configs[0])
    assert data.test is not None
    test = data.test
    furthest = [min(group, key=lambda config: float(config["train"]["stop_loss"])) for group in wanted]
    kept: dict[tuple[int, float], tuple[dict[str, Any], dict[str, Tensor]]] = {}

    def after_epoch(epoch: int, view: PopulationView) -> None:
        for place in view.active:
            row = view.row(place)
            for config in wanted[place]:
                stop = config["train"]["stop_loss"]
                if (place, stop) not in kept and row.get("train_loss", math.inf) < stop:
                    loss, error = evaluate(view.model(place), *test)
                    facts = {"train_loss": row["train_loss"], "train_error": row["train_error"]}
                    facts |= {"test_loss": loss, "test_error": error, "epochs": epoch}
                    kept[place, stop] = facts, view.state(place)
        report(epoch / MOST_EPOCHS, f"epoch {epoch}")

    trials = [trial_of(config, str(place)) for place, config in enumerate(furthest)]
    build = builder_of(configs[0]["model"]["name"])
    train_population(build, trials, data.train, after_epoch=after_epoch, show_progress=False)
    seconds = (time.process_time() - begun) / len(configs)
    for place, group in enumerate(wanted):
        for config in group:
            facts, weights = kept.get((place, config["train"]["stop_loss"]), ({}, None))
            metrics = {"reached": weights is not None, "core_seconds": seconds}
            store.write(config, facts | metrics, weights=weights)


def measure_networks(configs: list[Config], store: Store, report: Report) -> None:
    """Work of a sweep: measures of stored networks, or of twins with rescaled hidden units, one number per measure."""
    for number, config in enumerate(configs):
        begun = time.process_time()
        metrics: dict[str, Any] = {}
        if store.read(config["network"]).metrics["reached"]:
            problem = stored_problem(store, config["network"])
            problem = rescaled_twin(problem, config["network"]["model"]["seed"]) if config["rescaled"] else problem
            metrics = {"measured": _numbers_by_measure(problem, config["measures"], config["options"])}
        store.write(config, metrics | {"core_seconds": time.process_time() - begun})
        report((number + 1) / len(configs), "measuring")


def _numbers_by_measure(
    problem: Problem, names: Sequence[str], options: Mapping[str, Mapping[str, Any]]
) -> dict[str, float]:
    """One number per measure, and per form of those that have several."""
    ctx = Context(problem)
    numbers = measure(problem, names, options=options, context=ctx).one_each()
    for name, form in FORMS:
        if name in names:
            table = measure(problem, name, options={name: {**options.get(name, {}), **form}}, context=ctx)
            numbers[measure_label(name, options_text(form))] = table.one_each()[name]
    ctx.forget()
    return numbers


def rescaled_twin(problem: Problem, seed: int) -> Problem:
    """The same function with other weights: every hidden unit has a factor of its own."""
    twin = rescale(problem.model, problem.example(), "unit", *RESCALINGS, seed)
    pair = next(iter(problem.batches(size=problem.n_train)))
    return Problem(twin, train=pair, initial=problem.initial)


def measuring_units(rows: pd.DataFrame, measures: Collection[str]) -> list[list[Config]]:
    """Units of `measure_networks` for these networks, the quick measures of all networks first."""
    chosen = [entry for entry in declarations().values() if entry.name in measures]
    quick, long = ([entry.name for entry in chosen if (entry.cost == "long") is wanted] for wanted in (False, True))
    few, last = rows[rows["seed"].isin(benchmark_networks(SUBSET)["seed"])], STOPS[-1:]
    parts = [(rows, STOPS, quick, False), (few, last, quick, True), (few, STOPS, long, False), (few, last, long, True)]
    units = []
    for some, stops, names, rescaled in parts:
        configs = [
            {
                "network": network_configuration(row, stop),
                "measures": names,
                "options": options_of(names),
                "rescaled": rescaled,
            }
            for row in rows_as_dictionaries(some)
            for stop in stops
            if names
        ]
        units += [configs[start : start + TOGETHER] for start in range(0, len(configs), TOGETHER)]
    return units


def options_of(names: Collection[str]) -> dict[str, dict[str, Any]]:
    """Entries of `OPTIONS` for these measures."""
    return {name: given for name, given in OPTIONS.items() if name in names}


def train_missing_networks(rows: pd.DataFrame, store: Store, *, workers: int | None = None) -> None:
    """Train what the store lacks of these networks; those of one shape, batch size and optimizer as one stack."""
    units: dict[tuple[Any, ...], list[Config]] = {}
    for row in rows_as_dictionaries(rows):
        shape = tuple(row[name] for name in ("data", "kind", "width", "depth", "batch_size", "optimizer"))
        units.setdefault(shape, []).extend(network_configuration(row, stop) for stop in STOPS)
    run_units(list(units.values()), TRAIN_WORK, store, workers=workers)


def train_and_measure_population(store: Store, *, workers: int | None = None) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Train and measure the whole population, as far as the store does not have it; the table and what it cost.

    Where the store has some of the measures, those that were declared since are taken of the same networks.
    """
    rows = benchmark_networks()
    train_missing_networks(rows, store, workers=workers)
    began = sorted({tuple(config["measures"]) for config, _ in stored_measurements(store)})
    fresh = declarations().keys() - LEFT_OUT - set(itertools.chain(*began))
    for names in (*began, fresh):
        run_units(measuring_units(rows, names), LOOK_WORK, store, workers=workers)
    return collect_stored_results(rows, store)


def collect_stored_results(rows: pd.DataFrame, store: Store) -> tuple[pd.DataFrame, dict[str, Any]]:
    """Stored results of these networks: a row per network and stop, and the seconds of one core that it took."""
    spent = {"training": 0.0, "measuring": 0.0}
    results: dict[tuple[int, float], dict[str, Any]] = {}
    for row in rows_as_dictionaries(rows):
        for stop in STOPS:
            metrics = store.read(network_configuration(row, stop)).metrics
            spent["training"] += metrics["core_seconds"]
            values = {name: metrics.get(name, math.nan) for name in OUTCOMES}
            values["gap"] = values["test_error"] - values["train_error"]
            results[row["seed"], stop] = {**row, "stop": stop, "reached": metrics["reached"], **values}
    for config, metrics in stored_measurements(store):
        seed, stop = config["network"]["train"]["seed"], config["network"]["train"]["stop_loss"]
        spent["measuring"] += metrics["core_seconds"]
        prefix = RESCALED if config["rescaled"] else ""
        results[seed, stop] |= {f"{prefix}{name}": value for name, value in metrics.get("measured", {}).items()}
    frame = pd.DataFrame(list(results.values()))
    numbers = frame.select_dtypes("float").columns.difference(["stop", *SETTINGS])
    frame = frame.astype(dict.fromkeys(numbers, "float32")).copy()  # in one piece: pandas warns of many otherwise
    return frame, {f"seconds {what}": round(s) for what, s in spent.items()}


def stored_measurements(store: Store) -> Iterator[tuple[Config, dict[str, Any]]]:
    """Stored results of `measure_networks`, with the options of today."""
    for trial in store.stored():
        if "network" in trial.config and trial.config["options"] == options_of(trial.config["measures"]):
            yield trial.config, trial.metrics
