"""The 144 LeNet-5 of Petzka et al. (2019), section 3: which are trained, and how they look at each stop rule.

The paper trains "until convergence" with "the standard SGD optimizer", which may or may not have momentum. Two variants
are run: `momentum` (0.9), which was expected to converge sooner and is judged, and `plain`, shown beside it. The judged
stop rule was fixed before the runs: the first epoch at which the loss on the whole training set is below 0.1, the last
epoch for networks that do not get there.
Networks that have not learned anything by then are no minima: they are counted, and left out.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import pandas as pd

from flatscope_papers import intervals
from flatscope_papers.declaration import Runs, Stage
from flatscope_papers.petzka2019.followed_networks import train_and_follow
from flatscope_papers.tables import grid

RULE = "loss 0.1"
INITS: Mapping[str, dict[str, Any]] = {
    "xavier_normal": {},
    "kaiming_uniform": {},
    "uniform": {"bound": 0.1},
    "normal": {"variance": 0.1},
}
RATES = {4: 0.001, 32: 0.008, 64: 0.02, 512: 0.1}  # batch size: learning rate, as printed
MOMENTUM = {"momentum": 0.9, "plain": 0.0}
JUDGED = "momentum"
SIZES = grid(__name__)


def stages(scale: str) -> list[Stage]:
    """One unit per variant and batch size: its networks train as one stack."""
    size = SIZES[scale]
    units = []
    for variant, batch in itertools.product(size["epochs"], size["batches"]):
        setups = itertools.product(size["inits"], range(size["seeds"]))
        units.append([_config(size, variant, init, batch, number) for init, number in setups])
    return [Stage(units, train_and_follow)]


def _config(size: Mapping[str, Any], variant: str, init: str, batch: int, number: int) -> dict[str, Any]:
    epochs, seed = size["epochs"][variant], number
    if size.get("own_seeds"):
        setup = size["inits"].index(init) * len(size["batches"]) + size["batches"].index(batch)
        seed += size["seeds"] * setup
    train = {
        "lr": RATES[batch],
        "momentum": MOMENTUM[variant],
        "batch_size": batch,
        "epochs": epochs,
        "stop_loss": 0.01,  # a tenth of the level that is judged: nothing is looked at below it
        "seed": seed,
        "init_options": INITS[init],
    }
    return {
        "variant": variant,
        "data": size["data"],
        "model": {"name": "lenet5"},
        "init": init,
        "train": train,
        "follow": {**size["follow"], "epochs": [epoch for epoch in size["follow"]["epochs"] if epoch <= epochs]},
        "reparameterize": {"low": 5.0, "high": 25.0, "seed": 1000 * seed + batch},
    }


def followed(runs: Runs) -> pd.DataFrame:
    """One row per network and stop rule: settings, gap, and curvature before and after reparameterization.

    `gap` is the mean test loss minus the mean training loss: the paper's 5 Σ_test − Σ_train over 50,000. `learned` says
    whether the network is away from chance by then.
    """
    parts = []
    for number, stored in enumerate(runs.stored()):
        frame = stored.frame("followed")
        config = stored.config
        settings = {
            "network": number,
            "variant": config["variant"],
            "init": config["init"],
            "batch": config["train"]["batch_size"],
            "seed": config["train"]["seed"],
        }
        parts.append(frame.assign(**settings))
    seen = pd.concat([part for part in parts if len(part)], ignore_index=True)
    seen["gap"] = seen["test_loss"] - seen["train_loss"]
    seen["learned"] = seen["train_loss"] < SIZES[runs.scale]["chance"]
    return seen


def at_rule(seen: pd.DataFrame, rule: str, variant: str = JUDGED) -> pd.DataFrame:
    """Each network where the rule stops it, at its end where the rule never does; without those at chance there."""
    chosen = seen[(seen["variant"] == variant) & seen["rule"].isin((rule, "end"))]
    by_rule = chosen.assign(late=(chosen["rule"] != rule).astype(int)).sort_values(["network", "late"], kind="stable")
    points = by_rule.drop_duplicates("network").drop(columns="late")
    return points[points["learned"]]


def correlations(seen: pd.DataFrame) -> pd.DataFrame:
    """Pearson and Spearman of every measure with the gap, for every variant, stop rule and layer."""
    rows = []
    for variant, rule in seen[["variant", "rule"]].drop_duplicates().itertuples(index=False):
        points = seen[(seen["variant"] == variant) & (seen["rule"] == rule) & seen["learned"]]
        for column in [name for name in seen.columns if name.startswith(("before/", "after/")) and "norm/" not in name]:
            when, measure, layer = column.split("/")
            row = {"variant": variant, "rule": rule, "when": when, "measure": measure, "layer": layer}
            for kind in ("pearson", "spearman"):
                found = intervals.correlation(points[column], points["gap"], kind)
                row |= {kind: found.value, f"{kind}_low": found.low, f"{kind}_high": found.high, "networks": found.runs}
            rows.append(row)
    return pd.DataFrame(rows)


def summary_notes(seen: pd.DataFrame, runs: Runs) -> tuple[str, ...]:
    """How many networks there are, how long that took, how far they came, and which are left out."""
    units = runs.stages[0].units
    trained = sum(map(len, units))
    ends = [max(float(runs.store.read(c).frame("history")["seconds"].iloc[-1]) for c in unit) for unit in units]
    notes = [
        f"{trained} networks trained and followed in {sum(ends) / 60:.1f} minutes: the {len(units)} units, one after "
        "the other"
    ]
    if lost := trained - seen["network"].nunique():
        notes.append(f"{lost} of {trained} networks overflowed before anything could be seen of them")
    for variant, rows in seen[seen["rule"] == "end"].groupby("variant", sort=False):
        of_variant = seen[seen["variant"] == variant]
        reached = of_variant[of_variant["rule"] == RULE]["network"].nunique()
        notes.append(
            f"{variant}: {len(rows)} networks with finite weights at their end, training loss there "
            f"{rows['train_loss'].median():.3g} (median), {reached} of them below 0.1 before it"
        )
        out = rows[~rows["learned"]]
        if len(out):
            setups = Counter(f"{init}/{batch}" for init, batch in zip(out["init"], out["batch"], strict=True))
            listed = ", ".join(f"{count} {setup}" for setup, count in setups.items())
            are = "network at chance at its end is" if len(out) == 1 else "networks at chance at their end are"
            notes.append(f"{variant}: {len(out)} {are} left out there ({listed})")
    return (*notes, *missing_notes(at_rule(seen, RULE), [c for c in runs.stages[0].configs if c["variant"] == JUDGED]))


def missing_notes(points: pd.DataFrame, trained: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    """Initialisations of which no network is left to be judged."""
    per_init = Counter(config["init"] for config in trained)
    return tuple(
        f"none of the {number} networks with the initialisation '{init}' is among the {len(points)} judged"
        for init, number in per_init.items()
        if init not in set(points["init"])
    )
