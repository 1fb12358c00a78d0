"""The LeNet-5 of Petzka et al. (2019), section 3: which are trained, and what is seen of them.

Nine seeds of four initialisations and four batch sizes, with plain SGD at the printed rates: 144 networks. "Variance
0.1" of the normal initialisation is read as its standard deviation: with a variance of 0.1 few learned (`wide_normal`,
no longer run). Variants change one thing: `script` has the inputs (x − ½)/½ and the one order of the authors' released
script, `momentum` 0.9, `constant_ratio` rates with the same ratio to the batch size, which the printed ones are said to
have and have not.

The rules at which the correlations are judged were fixed before anything ran: `RULES`, and the last epoch. That they
are also looked at when the mean of their mini-batch losses first falls below a limit, and that only those with an
accuracy below 15 % are left out, is newer than the first results: with looks every 20 to 40 epochs a training loss of
0.1 is not seen where it happens, and spikes above the loss of chance are no networks at chance.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd

from flatscope.inputs import Data, load
from flatscope_papers.declaration import Runs, Stage
from flatscope_papers.petzka2019.followed_networks import train_and_follow
from flatscope_papers.petzka2019.stop_rules import Rule
from flatscope_papers.toml_files import settings_by_scale

RULES = (Rule("train_loss", 0.1), Rule("train_loss", 0.01), Rule("gradient", 1e-5))
LOOK_BELOW = (1.0, 0.5, 0.3, 0.2, 0.1, 0.03, 0.01)  # mean of the mini-batch losses of an epoch
EVENTS = tuple(Rule("below", limit) for limit in LOOK_BELOW)
LAYERS = {"fc3": "84→10", "fc2": "120→84"}  # the one that the authors' script measures, and the one before it
MEASURES = {
    "kappa_trace": "κ_τ",
    "kappa": "κ",
    "layer_trace": "Tr H",
    "layer_max_eigenvalue": "λ_max",
    "rho": "ρ",
    "rho_layer_sum": "ρ_σ",
}
COLUMNS = [f"{measure}/{layer}" for layer in LAYERS for measure in MEASURES]
INITS: Mapping[str, dict[str, Any]] = {
    "xavier_normal": {"scheme": "xavier_normal"},
    "kaiming_uniform": {"scheme": "kaiming_uniform"},
    "uniform": {"scheme": "uniform", "bound": 0.1},
    "normal": {"scheme": "normal", "variance": 0.01},
    "wide_normal": {"scheme": "normal", "variance": 0.1},
}
OTHER_READING = "wide_normal"
RATES = {4: 0.001, 32: 0.008, 64: 0.02, 512: 0.1}  # batch size: learning rate, as printed
JUDGED = "plain"
CENTRED = f"{__name__}:centred_cifar10"
ROUNDED = "flatscope_papers.rounded_data:cifar10_in_33_levels"
VARIANTS: Mapping[str, dict[str, Any]] = {
    "plain": {},
    "rounded": {"data": ROUNDED, "looks": ()},
    "script": {"data": CENTRED, "shuffle": False},
    "momentum": {"momentum": 0.9},
    "constant_ratio": {"rates": {4: 0.001, 32: 0.008, 64: 0.016, 512: 0.128}},
}
EVALUATE_EVERY = 10  # epochs; a look then need not evaluate again
CHANCE = 0.99 * float(np.log(10))  # the loss of a network that tells no class from another, but for one per cent
LARGEST_ERROR = 0.85  # above it a network has not learned; left out
SIZES = settings_by_scale(__name__)


def centred_cifar10() -> Data:
    """CIFAR-10 as (x − ½)/½ of pixels in [0, 1]."""
    data = load("cifar10", standardize=False)
    assert data.test is not None
    train, test = (((x - 0.5) / 0.5, y) for x, y in (data.train, data.test))
    return Data(data.name, train, test, data.classes, notes=data.notes)


def lenet_stages(scale: str) -> list[Stage]:
    """One unit per variant: all its networks train side by side."""
    size = SIZES[scale]
    setups = [
        (init, batch) for init, batch, _ in itertools.product(size["inits"], size["batches"], range(size["seeds"]))
    ]
    units = [
        [_lenet_config(size, variant, number, *setup) for number, setup in enumerate(setups)]
        for variant in size["epochs"]
    ]
    return [Stage(units, train_and_follow)]


def _lenet_config(size: Mapping[str, Any], variant: str, number: int, init: str, batch: int) -> dict[str, Any]:
    train_settings, epochs = VARIANTS[variant], size["epochs"][variant]
    data = dict(size["data"])
    if data["name"] == "cifar10":
        data["name"] = train_settings.get("data", "cifar10")
    train: dict[str, Any] = {
        "lr": train_settings.get("rates", RATES)[batch] * size.get("faster", 1),
        "batch_size": batch,
        "epochs": epochs,
        "seed": number,  # no two networks share random numbers
        "evaluate_every": min(EVALUATE_EVERY if train_settings.get("looks", True) else epochs, epochs),
    }
    train |= {name: train_settings[name] for name in ("momentum", "shuffle") if name in train_settings}
    return {
        "variant": variant,
        "setup": init,
        "data": data,
        "model": {"name": "lenet5"},
        "init": INITS[init],
        "train": train,
        "follow": {
            "epochs": [epoch for epoch in train_settings.get("looks", size["looks"]) if epoch <= epochs],
            **({"losses": list(LOOK_BELOW)} if size.get("events") else {}),
            "measures": list(MEASURES),
            "layers": list(LAYERS),
            "factor": int(np.random.RandomState(number).randint(5, 26)),
        },
    }


def lenet_look_table(runs: Runs) -> pd.DataFrame:
    """One row per network and look: settings, errors, gaps, measures.

    `gap` is the mean test loss minus the mean training loss: the paper's 5 Σ_test − Σ_train over 50,000. Networks are
    left out while fewer than 15 % of their training images are right: they are no minima.
    """
    parts = []
    for number, stored in enumerate(runs.stored()):
        config = stored.config
        settings = {
            "network": number,
            "variant": config["variant"],
            "init": config["setup"],
            "batch": config["train"]["batch_size"],
            "factor": config["follow"]["factor"],
        }
        parts.append(stored.frame("followed").assign(**settings))
    return looks_with_gaps(pd.concat([part for part in parts if len(part)], ignore_index=True), runs.scale)


def looks_with_gaps(seen: pd.DataFrame, scale: str) -> pd.DataFrame:
    """The looks at networks that have learned, with both gaps; `former`, whether the first rule had left them in."""
    seen = seen.copy()
    for target, of in (("gap", "loss"), ("error_gap", "error")):
        seen[target] = seen[f"test_{of}"] - seen[f"train_{of}"]
    if "below" not in seen:
        seen["below"] = np.nan
    seen["former"] = (seen["train_loss"] < CHANCE) | (scale == "smoke")
    worst = np.inf if scale == "smoke" else LARGEST_ERROR
    return seen[seen["train_error"] <= worst].reset_index(drop=True)


def stop_rule_in_looks(seen: pd.DataFrame, rule: Rule) -> Rule:
    """The rule as these looks have it: a training loss is met where mini-batches fall below it, if that was seen."""
    if rule.column == "train_loss" and seen["below"].notna().any():
        return Rule("below", rule.limit)
    return rule


def event_looks(seen: pd.DataFrame) -> pd.DataFrame:
    """Looks at the judged networks where their losses first fall below a limit; else those on rounded pixels."""
    fallen = seen[seen["below"].notna()]
    judged = fallen[fallen["variant"] == JUDGED]
    return judged if len(judged) else fallen[fallen["variant"] == "rounded"]


def looks_by_reading_of_variance(seen: pd.DataFrame, variant: str = JUDGED) -> dict[str, pd.DataFrame]:
    """The networks of a variant, with either reading of the variance of the normal initialisation."""
    of_variant = seen[seen["variant"] == variant]
    narrow = {"σ = 0.1": of_variant[of_variant["init"] != OTHER_READING]}
    return narrow | (
        {"σ² = 0.1": of_variant[of_variant["init"] != "normal"]} if OTHER_READING in set(of_variant["init"]) else {}
    )


def number_of_judged_networks(scale: str) -> int:
    """Number of networks in the judged correlations, lost ones included."""
    size = SIZES[scale]
    return len([init for init in size["inits"] if init != OTHER_READING]) * len(size["batches"]) * int(size["seeds"])


def lenet_training_notes(seen: pd.DataFrame, runs: Runs) -> tuple[str, ...]:
    """Notes on the training: the losses reached, where the rules stopped, and networks that never learned."""
    notes = []
    configs = runs.stages[0].configs
    for variant, rows in seen.groupby("variant", sort=False):
        trained = [config for config in configs if config["variant"] == variant]
        ends = rows[rows["epoch"] == rows["epoch"].max()]
        events = EVENTS if rows["below"].notna().any() else ()
        reached = ", ".join(f"{rule.name}: {len(rule.stops(rows))}" for rule in (*RULES, *events))
        notes.append(
            f"{variant}: {len(trained)} networks, {int(rows['epoch'].max())} epochs, training loss there "
            f"{ends['train_loss'].median():.3g} (median; {ends['train_loss'].quantile(0.1):.3g} to "
            f"{ends['train_loss'].quantile(0.9):.3g} for eight in ten); networks by rule: {reached}"
        )
        per_setup = Counter((config["setup"], config["train"]["batch_size"]) for config in trained)
        there = Counter(zip(ends["init"], ends["batch"], strict=True))
        lost = {setup: number - there[setup] for setup, number in per_setup.items() if there[setup] < number}
        if lost:
            listed = ", ".join(f"{number} {init}/{batch}" for (init, batch), number in lost.items())
            notes.append(f"{variant}: {sum(lost.values())} networks at chance or lost at the end ({listed})")
    return tuple(notes)
