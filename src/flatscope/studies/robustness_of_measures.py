"""Our own study: every measure against the generalization gap, and what a rescaling of the weights leaves of it.

One population with six settings varied at once. Every network is measured twice: as trained, and after a random
rescaling of its hidden units that changes its weights and not its function. A number that says something about the
function cannot care.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from numpy.typing import NDArray

from flatscope.measuring import measure
from flatscope.problem import Problem
from flatscope.registry import declarations, select
from flatscope.stats.correlation import correlate
from flatscope.stats.summary import correlation_table
from flatscope.studies import intervals
from flatscope.studies.claims import POSITIVE, Claim, Estimate
from flatscope.studies.study import Analysis, Runs, Stage, study
from flatscope.sweeps.store import Store
from flatscope.sweeps.stored_networks import stored_problem
from flatscope.symmetries.scaling import rescale
from flatscope.table import Table

Report = Callable[[float, str], None]
Floats = NDArray[np.float64]
WORK = "flatscope.studies.robustness_of_measures:measure_twice"
SETTINGS = ("batch_size", "lr", "width", "depth", "init_scale", "label_noise")
# One row per measure: of those that give several, one value of the option. Eigenvalues need not be finer than ranks.
OPTIONS: dict[str, dict[str, Any]] = {
    "pac_bayes_kl": {"alpha": [0.01]},
    "perturbation_robustness": {"gammas": [0.5]},
    **{name: {"tolerance": 1e-4} for name in ("layer_max_eigenvalue", "kappa", "kappa_max", "kappa_sum")},
    **{name: {"tolerance": 1e-3} for name in ("hessian_max_eigenvalue", "hessian_min_eigenvalue")},
}
SIGNS = {"lower": 1.0, "higher": -1.0}  # a good network has a low value: it should rise with the gap
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {
        "data": {"name": "digits", "train_size": 60, "test_size": 100, "flatten": True},
        "grid": ((8, 30), (0.2,), (16,), (1,), (1.0,), (0.0, 0.1)),
        "epochs": 60,
        "seeds": 1,
        "inputs": 64,
    },
    "small": {
        "data": {"name": "digits", "train_size": 300, "test_size": 360, "flatten": True},
        "grid": ((16, 100), (0.1, 0.4), (12, 32), (1, 2), (1.0, 2.0), (0.0, 0.1)),
        "epochs": 1_000,
        "seeds": 2,
        "inputs": 64,
    },
    "paper": {
        "data": {"name": "cifar10", "train_size": 5_000, "test_size": 10_000, "flatten": True},
        "grid": ((32, 512), (0.01, 0.05), (64, 256), (2, 4), (1.0, 2.0), (0.0, 0.1)),
        "epochs": 300,
        "seeds": 3,
        "inputs": 3_072,
    },
}
STOP_LOSS = 0.05
FEWEST = 10  # networks with a value, below which a measure is not ranked


def stages(scale: str) -> list[Stage]:
    """Networks of one architecture and batch size train together; then each is measured as it is and rescaled."""
    size = SIZES[scale]
    units: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for number, (setting, seed) in enumerate(itertools.product(itertools.product(*size["grid"]), range(size["seeds"]))):
        batch, rate, width, depth, start, noise = setting
        config: dict[str, Any] = {
            "data": size["data"],
            "model": {"name": "mlp", "options": {"widths": [size["inputs"], *[width] * depth, 10]}, "seed": number},
            "init": {"scheme": "torch", "scale": start},
            "train": {
                "lr": rate,
                "batch_size": batch,
                "epochs": size["epochs"],
                "stop_loss": STOP_LOSS,
                "evaluate_every": 5,
                "seed": number,
            },
        }
        if noise:
            config["labels"] = {"random": noise, "seed": seed, "exclude_true": True}
        units.setdefault((width, depth, batch), []).append(config)
    looks = [
        [{"network": one, "rescaling": one["model"]["seed"], "measure_options": OPTIONS} for one in unit]
        for unit in units.values()
    ]
    return [Stage(list(units.values()), gpus=0.25), Stage(looks, WORK, gpus=0.25)]


def measure_twice(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Every measure that is not long, on the network and on a copy with rescaled units, in float64."""
    for number, config in enumerate(configs):
        metrics: dict[str, float] = {}
        if not store.read(config["network"]).metrics["diverged"]:
            stored = stored_problem(store, config["network"], device=config.get("device"))
            x, y = next(iter(stored.batches(size=stored.n_train)))
            problem = Problem(stored.model, train=(x, y), initial=stored.initial, dtype=torch.float64)
            twin = rescale(problem.model, problem.example(), by="unit", seed=config["rescaling"])
            rescaled = Problem(twin, train=(x, y), initial=stored.initial, dtype=torch.float64)
            for when, one in (("before", problem), ("after", rescaled)):
                table = measure(one, None, options=config["measure_options"])
                metrics |= {f"{when}.{name}": value for name, value in one_each(table)}
        store.write(config, metrics)
        report((number + 1) / len(configs), "measuring")


def one_each(table: Table) -> Iterator[tuple[str, float]]:
    """One number per measure: that of the network, else the mean over its layers, units or samples."""
    for name, part in table.to_frame().groupby("measure", sort=False):
        whole = part[part["layer"].eq("") & part["unit"].isna() & part["sample"].isna()]
        yield str(name), float((whole if len(whole) else part)["value"].mean())


def population(runs: Runs) -> pd.DataFrame:
    """One row per network that did not diverge: settings, gap, "before.…" and "after.…" of every measure."""
    trained, measured = runs.frame(0), runs.frame(1)
    configs = runs.stages[0].configs
    widths = [config["model"]["options"]["widths"] for config in configs]
    frame = pd.DataFrame(
        {
            "batch_size": trained["train.batch_size"],
            "lr": trained["train.lr"],
            "width": [width[1] for width in widths],
            "depth": [len(width) - 2 for width in widths],
            "init_scale": trained["init.scale"],
            "label_noise": [(config.get("labels") or {}).get("random", 0.0) for config in configs],
            "train_loss": trained["train_loss"],
            "gap": trained["test_error"] - trained["train_error"],
        }
    )
    columns = [name for name in measured if str(name).startswith(("before.", "after."))]
    frame = pd.concat([frame, measured[columns]], axis=1)
    return frame[~trained["diverged"].astype(bool)].reset_index(drop=True)


def ranked(frame: pd.DataFrame) -> tuple[list[str], dict[str, str]]:
    """Measures that can be ranked over this population, and why the others cannot."""
    kept, left_out = [], {}
    for name in (entry.name for entry in select(None)):
        values = [frame[f"{when}.{name}"] for when in ("before", "after") if f"{when}.{name}" in frame]
        finite = [int(np.isfinite(part.to_numpy(float)).sum()) for part in values]
        if len(values) < 2 or min(finite) < min(FEWEST, len(frame)):
            left_out[name] = "no value on these networks"
        elif any(part.nunique() < 2 for part in values):
            left_out[name] = "the same on all networks"
        else:
            kept.append(name)
    return kept, left_out


def summary(frame: pd.DataFrame, resamples: int) -> pd.DataFrame:
    """One row per measure: correlations with the gap, granulated Kendall, and how far its order survives."""
    names, _ = ranked(frame)
    known = declarations()
    before = frame.rename(columns={f"before.{name}": name for name in names})
    varied = [name for name in SETTINGS if frame[name].nunique() > 1]
    table = correlation_table(before, names, "gap", varied, kinds=("spearman", "kendall"), resamples=resamples)
    rows = []
    for name in names:
        part = table[table["measure"] == name].set_index("statistic")
        kept = correlate(frame[f"before.{name}"], frame[f"after.{name}"], "kendall", resamples=resamples)
        row: dict[str, Any] = {
            "measure": name,
            "paper": known[name].paper,
            "direction": known[name].direction,
            "invariant": "unit_scaling" in known[name].invariant_under,
        }
        for statistic in ("spearman", "kendall", "granulated_kendall"):
            row |= {f"{statistic}{end}": part.loc[statistic, column] for end, column in ENDS.items()}
        row |= {"kendall_p_holm": part.loc["kendall", "p_holm"], "networks": part.loc["kendall", "n"]}
        row |= {"kept": kept.value, "kept_low": kept.low, "kept_high": kept.high}
        row["kendall_after"] = correlate(frame[f"after.{name}"], frame["gap"], "kendall", resamples=0).value
        rows.append(row)
    return pd.DataFrame(rows).sort_values("granulated_kendall", key=lambda v: -v.abs(), ignore_index=True)


ENDS = {"": "value", "_low": "low", "_high": "high"}


def kendalls(pairs: Sequence[tuple[Floats, Floats]], counts: Floats) -> Floats:
    """Tau-b of each pair of columns in each resample, (pairs, resamples); `counts` says how often each row is in it."""
    found = []
    for x, y in pairs:
        known = np.isfinite(x) & np.isfinite(y)  # a network without a value takes part in no comparison
        sx, sy = (np.sign(v[:, None] - v[None, :]) for v in (np.where(known, v, 0.0) for v in (x, y)))
        sx, sy = (np.where(known[:, None] & known[None, :], signs, 0.0) for signs in (sx, sy))
        together, first, second = (((counts @ form) * counts).sum(-1) for form in (sx * sy, np.abs(sx), np.abs(sy)))
        size = np.sqrt(first * second)
        found.append(np.divide(together, size, out=np.zeros_like(together), where=size > 0))
    return np.array(found)


def found_in(frame: pd.DataFrame, table: pd.DataFrame, resamples: int) -> dict[str, Estimate]:
    """The numbers of the claims; intervals resample networks, all measures together."""
    fragile = table[~table["invariant"]]["measure"].tolist()
    sound = table[table["invariant"] & table["direction"].isin(SIGNS)]["measure"].tolist()
    n = len(frame)
    generator = np.random.default_rng(0)
    counts = np.vstack([np.ones(n), generator.multinomial(n, np.full(n, 1 / n), size=resamples)]).astype(float)

    def of(name: str, when: str) -> Floats:
        return np.asarray(frame[f"{when}.{name}"], dtype=np.float64)

    def against_gap(names: Sequence[str], when: str) -> Floats:
        gap = np.asarray(frame["gap"], dtype=np.float64)
        return kendalls([(of(name, when), gap) for name in names], counts)

    kept = kendalls([(of(name, "before"), of(name, "after")) for name in fragile], counts)
    loss = np.abs(against_gap(fragile, "before")).mean(0) - np.abs(against_gap(fragile, "after")).mean(0)
    signs = declarations()
    best = [
        np.array([SIGNS[signs[name].direction] for name in names])[:, None] * against_gap(names, "after")
        for names in (sound, [name for name in fragile if signs[name].direction in SIGNS])
    ]
    ahead = best[0].max(0) - best[1].max(0)
    directed = table[table["direction"].isin(SIGNS)]
    sign = directed["direction"].map(SIGNS)
    wrong = np.where(sign > 0, directed["granulated_kendall_high"] < 0, directed["granulated_kendall_low"] > 0)
    least = table[table["invariant"]].sort_values("kept").iloc[0]
    return {
        "invariant_kept": Estimate.exact(float(least["kept"]), f"{least['measure']}, of {table['invariant'].sum()}"),
        "others_lost": _percentiles(np.median(kept, axis=0), f"{len(fragile)} measures"),
        "wrong_way": intervals.share(wrong, ", ".join(directed["measure"][wrong])),
        "link_lost": _percentiles(loss, f"{len(fragile)} measures"),
        "best_invariant": _percentiles(ahead, f"best as declared: {sound[int(best[0][:, 0].argmax())]}"),
    }


def _percentiles(draws: Floats, note: str) -> Estimate:
    """The first is the population itself, the others its resamples."""
    low, high = np.percentile(draws[1:], [2.5, 97.5])
    return Estimate(float(draws[0]), float(low), float(high), len(draws) - 1, note)


CLAIMS = (
    Claim(
        "invariant_kept",
        "all measures",
        "measures declared invariant to the scale of units rank rescaled networks as they ranked the originals",
        "smallest Kendall coefficient between ranks before and after, over these measures",
        "1",
        holds=(0.999, 1.0),
        partly=(0.95, 1.0),
    ),
    Claim(
        "others_lost",
        "all measures",
        "of the others, the typical one loses more than half of its order",
        "median Kendall coefficient between ranks before and after, bootstrap over networks",
        "below 0.5",
        holds=(-1.0, 0.5),
        partly=(-1.0, 0.9),
    ),
    Claim(
        "wrong_way",
        "all measures",
        "few measures go against their declared direction",
        "share of measures whose 95 % interval of the granulated Kendall coefficient lies on the wrong side of zero",
        "at most a quarter",
        holds=(0.0, 0.25),
        partly=(0.0, 0.5),
    ),
    Claim(
        "link_lost",
        "all measures",
        "rescaling takes away part of what measures that depend on scale say about the gap",
        "mean |Kendall coefficient| with the gap of these measures, before minus after, bootstrap over networks",
        "less after",
        holds=POSITIVE,
    ),
    Claim(
        "best_invariant",
        "all measures",
        "once weights are rescaled, the best measure is one that does not depend on scale",
        "best Kendall coefficient with the gap in the declared direction, invariant minus other measures, after",
        "positive",
        holds=POSITIVE,
    ),
)


@study(
    "robustness-of-measures",
    figure="our own",
    title="Every measure against the generalization gap, and what rescaling leaves of its order",
    claims=CLAIMS,
    stages=stages,
    deviations={
        "small": (
            "128 fully connected networks on 300 of the embedded digits; the gap is known from 360 test images",
            "stopped at a training loss of 0.05, looked at every five epochs, or after 1,000 epochs",
            "measures declared long are left out",
        ),
        "paper": (
            "fully connected networks on 5,000 images of CIFAR-10, three seeds of each setting",
            "measures declared long are left out",
        ),
    },
    paper_cost="192 networks with up to 980,000 parameters, measured twice: not timed; some hours on one GPU.",
)
def robustness(runs: Runs) -> Analysis:
    """Correlations over a population with six settings varied, before and after a random rescaling of every network."""
    frame = population(runs)
    resamples = 200 if runs.scale == "smoke" else 1_000
    table = summary(frame, resamples)
    _, left_out = ranked(frame)
    long = [entry.name for entry in declarations().values() if entry.cost == "long"]
    reached = int((frame["train_loss"] < STOP_LOSS).sum())
    notes = [
        f"{len(frame)} networks, {reached} of them below a training loss of {STOP_LOSS:g}; "
        f"gaps of the 0/1 error from {frame['gap'].min():.3f} to {frame['gap'].max():.3f}",
        f"long, not measured: {', '.join(long)}",
        *(f"left out: {name}, {why}" for name, why in left_out.items()),
    ]
    return Analysis(table, found_in(frame, table, resamples), lambda figure: _draw(figure, table), tuple(notes))


def _draw(figure: Figure, table: pd.DataFrame) -> None:
    """Measures sorted by what they say about the gap; beside it what is left of their order."""
    figure.set_size_inches(9.5, 1.2 + 0.165 * len(table))
    left, right = figure.subplots(1, 2, sharey=True)
    places = np.arange(len(table))[::-1]
    for invariant, colour, marker, words in (
        (True, "C0", "o", "invariant to the scale of units"),
        (False, "C1", "D", "not invariant"),
    ):
        own = (table["invariant"] == invariant).to_numpy()
        part = table[own]
        for axes, name in ((left, "granulated_kendall"), (right, "kept")):
            middle = part[name].to_numpy(float)
            ends = [np.clip(middle - part[f"{name}_low"], 0, None), np.clip(part[f"{name}_high"] - middle, 0, None)]
            axes.errorbar(
                middle, places[own], xerr=np.nan_to_num(ends), fmt=marker, ms=4, lw=0.9, color=colour, label=words
            )
    labels = [
        f"{name} ({ARROWS[direction]})" for name, direction in zip(table["measure"], table["direction"], strict=True)
    ]
    left.set_yticks(places, labels, fontsize=6.5)
    left.axvline(0, color="0.5", lw=0.8)
    left.set_xlabel("granulated Kendall coefficient with the gap")
    right.set_xlabel("Kendall coefficient of ranks before and after rescaling")
    right.set_xlim(min(0.0, float(np.nanmin(table["kept_low"].fillna(table["kept"])))) - 0.05, 1.05)
    right.legend(fontsize=7, loc="lower left")
    for axes in (left, right):
        axes.grid(axis="y", lw=0.3, color="0.85")
        axes.set_ylim(-1, len(table))


ARROWS = {"lower": "low is good", "higher": "high is good", "none": "no direction"}
