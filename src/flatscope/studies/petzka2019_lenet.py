"""Figures 1 and 2 of Petzka et al. (2019): LeNet-5 on CIFAR-10, curvature of one layer against the generalization gap.

The paper trains "until convergence" with "the standard SGD optimizer". At its learning rates plain SGD is far from
converged after any number of epochs that can be paid for here, so two variants are run: `momentum` (0.9), which
converges and is judged, and `plain`, as printed, shown beside it. The judged stop rule was fixed before the runs: the
first epoch at which the loss on the whole training set is below 0.1, the last epoch for networks that do not get there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.studies import intervals
from flatscope.studies.claims import POSITIVE, Claim, Estimate
from flatscope.studies.study import Analysis, Runs, Stage, study

WORK = "flatscope.studies.petzka2019_population:train_and_follow"
RULE = "loss 0.1"
LEVELS = (1.0, 0.5, 0.1)
EPOCHS = (10, 20)
INITS: Mapping[str, dict[str, Any]] = {
    "xavier_normal": {},
    "kaiming_uniform": {},
    "uniform": {"bound": 0.1},
    "normal": {"variance": 0.1},
}
RATES = {4: 0.001, 32: 0.008, 64: 0.02, 512: 0.1}  # batch size: learning rate, as printed
MOMENTUM = {"momentum": 0.9, "plain": 0.0}
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {
        "data": {"name": "flatscope.studies.smoke_data:digits_as_cifar10", "train_size": 200, "test_size": 100},
        "inits": ("xavier_normal", "uniform"),
        "batches": (32, 64),
        "seeds": 1,
        "epochs": {"momentum": 2},
    },
    "small": {
        "data": {"name": "cifar10", "train_size": 1_000, "test_size": 2_000},
        "inits": ("xavier_normal", "kaiming_uniform", "uniform"),
        "batches": (32, 64, 512),
        "seeds": 3,
        "epochs": {"momentum": 40},
    },
    "paper": {
        "data": {"name": "cifar10"},
        "inits": tuple(INITS),
        "batches": tuple(RATES),
        "seeds": 9,
        "epochs": {"momentum": 25, "plain": 10},
    },
}
DEVIATIONS = {
    "small": (
        "1,000 training images in place of 50,000, three initialisations, batch sizes 32, 64 and 512, three seeds: "
        "27 networks in place of 144",
    ),
    "paper": ("the paper names no momentum; the judged variant has 0.9 so that training converges",),
}
READINGS = {"fc3": "layer 5 read as the output matrix", "fc2": "layer 5 read as the last hidden matrix"}


def stages(scale: str) -> list[Stage]:
    """One unit per variant and batch size: its networks train as one stack."""
    size = SIZES[scale]
    units = []
    for variant, batch in itertools.product(size["epochs"], size["batches"]):
        epochs = size["epochs"][variant]
        units.append(
            [
                _config(size["data"], variant, init, batch, seed, epochs)
                for init, seed in itertools.product(size["inits"], range(size["seeds"]))
            ]
        )
    return [Stage(units, WORK)]


def _config(data: dict[str, Any], variant: str, init: str, batch: int, seed: int, epochs: int) -> dict[str, Any]:
    train = {
        "lr": RATES[batch],
        "momentum": MOMENTUM[variant],
        "batch_size": batch,
        "epochs": epochs,
        "stop_loss": 0.01,  # a tenth of the level that is judged: nothing is looked at below it
        "seed": seed,
        "init_options": INITS[init],
    }
    followed = {"epochs": [epoch for epoch in EPOCHS if epoch <= epochs], "losses": LEVELS}
    factor = {"low": 5.0, "high": 25.0, "seed": 1000 * seed + batch}
    return {
        "variant": variant,
        "data": data,
        "model": {"name": "lenet5"},
        "init": init,
        "train": train,
        "follow": followed,
        "reparameterize": factor,
    }


def followed(runs: Runs) -> pd.DataFrame:
    """One row per network and stop rule: settings, gap, and curvature before and after reparameterization.

    `gap` is the mean test loss minus the mean training loss: the paper's 5 Σ_test − Σ_train over 50,000.
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
    return seen


def at_rule(seen: pd.DataFrame, rule: str, variant: str = "momentum") -> pd.DataFrame:
    """Each network where the rule stops it; at its end where the rule never does."""
    chosen = seen[(seen["variant"] == variant) & seen["rule"].isin((rule, "end"))]
    by_rule = chosen.assign(late=(chosen["rule"] != rule).astype(int)).sort_values(["network", "late"], kind="stable")
    return by_rule.drop_duplicates("network")


def correlations(seen: pd.DataFrame) -> pd.DataFrame:
    """Pearson and Spearman of every measure with the gap, for every variant, stop rule and layer."""
    rows = []
    for variant, rule in seen[["variant", "rule"]].drop_duplicates().itertuples(index=False):
        points = seen[(seen["variant"] == variant) & (seen["rule"] == rule)]
        for column in [name for name in seen.columns if name.startswith(("before/", "after/")) and "norm/" not in name]:
            when, measure, layer = column.split("/")
            row = {"variant": variant, "rule": rule, "when": when, "measure": measure, "layer": layer}
            for kind in ("pearson", "spearman"):
                found = intervals.correlation(points[column], points["gap"], kind)
                row |= {kind: found.value, f"{kind}_low": found.low, f"{kind}_high": found.high, "networks": found.runs}
            rows.append(row)
    return pd.DataFrame(rows)


def _summary_notes(seen: pd.DataFrame) -> tuple[str, ...]:
    notes = []
    for variant, rows in seen[seen["rule"] == "end"].groupby("variant", sort=False):
        reached = seen[(seen["variant"] == variant) & (seen["rule"] == RULE)]["network"].nunique()
        notes.append(
            f"{variant}: {len(rows)} networks with finite weights, training loss at the end "
            f"{rows['train_loss'].median():.3g} (median), {reached} of them below 0.1 before it"
        )
    return tuple(notes)


CLAIMS_1 = (
    Claim(
        "trace",
        "section 3, Figure 1",
        "κ_τ of layer 5 correlates strongly with the generalization error",
        "Pearson correlation over networks, output matrix",
        "0.91",
        holds=(0.86, 0.96),
        partly=POSITIVE,
    ),
    Claim(
        "trace_hidden",
        "section 3, Figure 1",
        "the same, layer 5 read as the matrix in front of it",
        "Pearson correlation over networks, last hidden matrix",
        "0.91",
        holds=(0.86, 0.96),
        partly=POSITIVE,
    ),
    Claim(
        "eigenvalue",
        "section 3, Figure 1",
        "κ of layer 5 correlates significantly with the generalization error",
        "Pearson correlation over networks, output matrix",
        "significant, below 0.91",
        holds=POSITIVE,
    ),
    Claim(
        "stronger",
        "section 3",
        "the correlation is stronger for κ_τ than for κ",
        "difference of the two Pearson correlations, bootstrap over networks",
        "positive",
        holds=POSITIVE,
    ),
)


@study(
    "petzka2019-fig1",
    figure="Figure 1",
    title="Relative flatness of layer 5 against the generalization error, LeNet-5 on CIFAR-10",
    claims=CLAIMS_1,
    stages=stages,
    deviations=DEVIATIONS,
    paper_cost="about 12 s per epoch for all 144 networks on an H200: five minutes for 25 epochs with momentum, "
    "two for 10 without, and half as much again for the curvature along the way.",
)
def figure_1(runs: Runs) -> Analysis:
    """κ and κ_τ of LeNet-5's layer 5 against the generalization error.

    Four initialisations, four batch sizes, nine seeds; each network is followed along training, and the correlation
    is shown as a function of the stop rule.
    """
    seen = followed(runs)
    points = at_rule(seen, RULE)
    found = {
        "trace": intervals.correlation(points["before/kappa_trace/fc3"], points["gap"]),
        "trace_hidden": intervals.correlation(points["before/kappa_trace/fc2"], points["gap"]),
        "eigenvalue": intervals.correlation(points["before/kappa/fc3"], points["gap"]),
        "stronger": intervals.of_correlations(
            points, ["before/kappa_trace/fc3", "before/kappa/fc3"], "gap", lambda r: float(r[0] - r[1])
        ),
    }
    columns = {"before/kappa_trace/fc3": "κ_τ⁵", "before/kappa/fc3": "κ⁵", "before/kappa_trace/fc2": "κ_τ, fc2"}
    along = correlations(seen)
    return Analysis(
        pd.concat([points.assign(kind="network"), along.assign(kind="correlation")], ignore_index=True),
        found,
        lambda figure: _draw(figure, points, along, columns, "before"),
        notes=_summary_notes(seen),
    )


CLAIMS_2 = (
    Claim(
        "invariant",
        "section 3, Figure 2",
        "κ and κ_τ are not affected by the reparameterization",
        "largest relative change over networks and both measures",
        "0",
        holds=(0.0, 1e-3),
    ),
    Claim(
        "trace_after",
        "section 3, Figure 2",
        "the correlation of κ_τ stays the same after it",
        "Pearson correlation after reparameterization, output matrix",
        "0.91",
        holds=(0.86, 0.96),
        partly=POSITIVE,
    ),
    Claim(
        "hessian_trace",
        "section 3, Figure 2",
        "after it the trace of the Hessian correlates only very weakly",
        "absolute Pearson correlation of Tr H of layer 5 after reparameterization",
        "very weak",
        holds=(0.0, 0.3),
    ),
    Claim(
        "hessian_eigenvalue",
        "section 3, Figure 2",
        "after it the largest eigenvalue of the Hessian correlates only very weakly",
        "absolute Pearson correlation of λ_max of layer 5 after reparameterization",
        "very weak",
        holds=(0.0, 0.3),
    ),
)


@study(
    "petzka2019-fig2",
    figure="Figure 2",
    title="The same networks after a random layer-wise reparameterization",
    claims=CLAIMS_2,
    stages=stages,
    deviations={
        scale: (*words, "which layers are scaled, and the law of the factors, are our reading")
        for scale, words in DEVIATIONS.items()
    },
    paper_cost="the networks of petzka2019-fig1; nothing is trained again.",
)
def figure_2(runs: Runs) -> Analysis:
    """What a random factor from [5, 25] on one layer and its inverse on layer 5 does to the correlations."""
    seen = followed(runs)
    points = at_rule(seen, RULE)
    changes = [
        ((points[f"after/{name}/fc3"] - points[f"before/{name}/fc3"]).abs() / points[f"before/{name}/fc3"]).max()
        for name in ("kappa", "kappa_trace")
    ]
    found = {
        "invariant": Estimate.exact(float(max(changes)), note=f"over {len(points)} networks"),
        "trace_after": intervals.correlation(points["after/kappa_trace/fc3"], points["gap"]),
        "hessian_trace": _absolute(intervals.correlation(points["after/layer_trace/fc3"], points["gap"])),
        "hessian_eigenvalue": _absolute(intervals.correlation(points["after/layer_max_eigenvalue/fc3"], points["gap"])),
    }
    columns = {
        "after/kappa/fc3": "κ⁵",
        "after/layer_max_eigenvalue/fc3": "λ_max",
        "after/kappa_trace/fc3": "κ_τ⁵",
        "after/layer_trace/fc3": "Tr H",
    }
    along = correlations(seen)
    return Analysis(
        pd.concat([points.assign(kind="network"), along.assign(kind="correlation")], ignore_index=True),
        found,
        lambda figure: _draw(figure, points, along, columns, "after"),
        notes=_summary_notes(seen),
    )


def _absolute(estimate: Estimate) -> Estimate:
    """|r| and the interval that follows; an interval across zero begins at zero."""
    if estimate.low is None or estimate.high is None:
        return Estimate(abs(estimate.value), runs=estimate.runs, note=estimate.note)
    ends = sorted((abs(estimate.low), abs(estimate.high)))
    low = 0.0 if estimate.low <= 0 <= estimate.high else ends[0]
    return Estimate(abs(estimate.value), low, ends[1], runs=estimate.runs, note=estimate.note)


def _draw(figure: Figure, points: pd.DataFrame, along: pd.DataFrame, columns: Mapping[str, str], when: str) -> None:
    """Scatter panels as in the paper (brighter for larger batches), and the correlation at every stop rule."""
    figure.set_size_inches(9.0, 5.4)
    halves: Any = figure.subfigures(2, 1, height_ratios=(1.1, 1))
    top, bottom = halves
    shades = {batch: place for place, batch in enumerate(sorted(points["batch"].unique()))}
    for axes, (column, label) in zip(top.subplots(1, len(columns), sharey=True), columns.items(), strict=True):
        colours = [shades[batch] for batch in points["batch"]]
        axes.scatter(points[column], points["gap"], c=colours, cmap="viridis", s=12)
        axes.set_xscale("log")
        axes.set_xlabel(label)
        value = intervals.correlation(points[column], points["gap"]).value
        axes.set_title(f"r = {value:.2f}", fontsize=9)
    top.axes[0].set_ylabel("test − training loss")
    top.suptitle(f"stopped at {RULE.replace('loss', 'training loss')}; brighter: larger batch", fontsize=9)
    _draw_rules(bottom.subplots(1, 1), along[along["when"] == when], columns)


def _draw_rules(axes: Any, along: pd.DataFrame, columns: Mapping[str, str]) -> None:
    rules = sorted(along["rule"].unique(), key=_place)
    styles = {"momentum": "-", "plain": "--"}
    for colour, (column, label) in enumerate(columns.items()):
        _, measure, layer = column.split("/")
        for variant, style in styles.items():
            chosen = (along["variant"] == variant) & (along["measure"] == measure) & (along["layer"] == layer)
            line = along[chosen].set_index("rule").reindex(rules)
            if line["pearson"].isna().all():
                continue
            places = np.arange(len(rules))
            axes.plot(places, line["pearson"], style, marker="o", ms=3, color=f"C{colour}", label=f"{label}, {variant}")
            if variant == "momentum":
                low, high = line["pearson_low"].astype(float), line["pearson_high"].astype(float)
                axes.fill_between(places, low, high, color=f"C{colour}", alpha=0.12)
    axes.axhline(0.91, color="0.5", lw=0.8)
    axes.annotate("0.91", (0, 0.91), fontsize=7, color="0.4", va="bottom")
    axes.set_xticks(np.arange(len(rules)), rules, rotation=30, ha="right")
    axes.set_ylim(-1.05, 1.05)
    axes.set_ylabel("Pearson correlation")
    axes.set_xlabel("stop rule (level of the training loss, epoch, last epoch)")
    axes.legend(fontsize=6, ncol=2)


def _place(rule: str) -> tuple[int, float]:
    """Losses from high to low, then epochs, then the end."""
    kind, _, value = rule.partition(" ")
    return {"loss": 0, "epoch": 1}.get(kind, 2), (-float(value) if kind == "loss" else float(value or 0))
