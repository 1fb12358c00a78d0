"""Theorem 5.1 of Yi et al. (2019) and the text around it: balance of the path values, size, and order of the measures.

The ratio of the largest to the smallest path value is looked at in two families of one architecture: networks as
training leaves them, and networks whose smallest weight is held at a floor, so that the ratio is set and not found.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from flatscope import BasisPaths, bounds, measure
from flatscope.generalization_bounds.psi import PathSpread, psi_of_path_values
from flatscope.training import Store, evaluate, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.stratified import correlation_within_strata
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.yi2019.digit_networks import (
    RULE,
    all_training_samples,
    digit_network_config,
    problem_in_float64,
    train_above_a_floor,
)

FLATNESSES = ("psi_epsilon", "psi_expected", "psi_trace")
THEOREMS = ("psi_theorem_5_1", "psi_theorem_5_1_corrected")
EPSILON = 0.02  # common to all networks, whose skeleton weights begin at 1
RELATIVE = 0.1  # of the smallest path value, for Theorem 5.1
STARTS = (0.02, 0.05, 0.1, 0.2)
FLOORS = (0.001, 0.003, 0.01, 0.03, 0.1)
SHAPES = {"narrow": (8, 8), "wide": (32, 32), "shallow": (16,), "deep": (16, 16, 16)}
SIZES = settings_by_scale(__name__)


def balance_stages(scale: str) -> list[Stage]:
    """One architecture from several starts and above several floors, and four shapes from one start."""
    size = SIZES[scale]
    samples, epochs, seeds = size["samples"], size["epochs"], range(size["seeds"])
    family = [
        [digit_network_config(samples, (16, 16), start, seed, epochs) for seed in seeds]
        for start in STARTS[-size["starts"] :]
    ]
    shapes = [
        [digit_network_config(samples, hidden, 0.1, 100 + seed, epochs) for seed in seeds] for hidden in SHAPES.values()
    ]
    lifted = [
        [{**digit_network_config(samples, (16, 16), 0.1, 200 + seed, epochs), "floor": floor} for seed in seeds]
        for floor in FLOORS[-size["floors"] :]
    ]
    looked = {"epsilon": EPSILON, "relative": RELATIVE, "steps": size["steps"]}
    looks = [
        [{"network": config, "ordered": place < size["ordered"], **looked} for place, config in enumerate(unit)]
        for unit in (*family, *shapes, *lifted)
    ]
    return [
        Stage([*family, *shapes], gpus=0.25),
        Stage(lifted, train_above_a_floor, gpus=0.25),
        Stage(looks, balance_of, gpus=0.25),
    ]


@each_trial("path values")
def balance_of(config: Config, store: Store) -> Measured:
    """Balance of the path values, ψ, PSI-ε flatness, and Theorem 5.1 beside the rise that is found, in float64.

    Where a configuration says `ordered`, the other two PSI measures as well.
    """
    stored = stored_problem(store, config["network"], device=config.get("device"))
    problem = problem_in_float64(stored)
    paths = BasisPaths(problem.model, problem.example(), RULE)
    log, _ = paths.log_values()
    spread, depth = PathSpread(float(log.max()), float(log.min())), len(list(problem.model.parameters()))
    radius = config["relative"] * spread.inf
    loss = float(evaluate(problem.model, *all_training_samples(problem))[0])
    ball = {"rule": RULE, "relative": False}
    near = measure(
        problem, "psi_epsilon", options={"psi_epsilon": {**ball, "epsilon": radius, "steps": config["steps"]}}
    )
    options: dict[str, dict[str, Any]] = {
        "psi_epsilon": {**ball, "epsilon": config["epsilon"], "steps": config["steps"]},
        "psi_activation_radius": {"rule": RULE},
    }
    if config["ordered"]:
        options |= {"psi_expected": {**ball, "epsilon": config["epsilon"]}, "psi_trace": {"rule": RULE}}
    measured = measure(problem, list(options), options=options)
    table = bounds(
        problem, THEOREMS, options={name: {"rule": RULE, "epsilon": config["relative"]} for name in THEOREMS}
    )
    metrics = {
        "loss": loss,
        "test_error": store.read(config["network"]).metrics["test_error"],
        "balance": math.exp(spread.log_sup - spread.log_inf),
        "largest": math.exp(spread.log_sup),
        "log10_psi": math.log10(psi_of_path_values(spread, config["epsilon"], depth)),
        "values": paths.count,
        "pole": float(paths.nearest_pole),
        **{name: measured[name] if name in options else math.nan for name in FLATNESSES},
        "radius": radius,
        "rise": near["psi_epsilon"] * (1 + loss),
        "printed": table[THEOREMS[0]],
        "corrected": table[THEOREMS[1]],
        "states_certified": bool(measured["psi_activation_radius"] >= radius),
    }
    return Measured(metrics)


def balance_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Claims, figure and notes; they need no more than the table, at any scale."""
    del scale
    return Analysis(
        table, balance_claim_answers(table), lambda figure: _draw_balance(figure, table), _balance_notes(table)
    )


@study("yi2019-balance", stages=balance_stages, from_table=balance_of_table)
def balance(runs: Runs) -> Analysis:
    """Trained networks whose path values are more or less balanced, by chance and by a floor, and four shapes."""
    frame = runs.frame()
    configs = [config["network"] for config in runs.stages[-1].configs]
    hidden = ["-".join(map(str, config["model"]["options"]["widths"][1:-1])) for config in configs]
    named = {"-".join(map(str, widths)): name for name, widths in SHAPES.items()}
    frame["hidden"] = hidden
    frame["start"] = [config["init"]["bound"] for config in configs]
    frame["floor"] = [config.get("floor", 0.0) for config in configs]
    frame["shape"] = np.where(frame["floor"] > 0, "floor", frame["hidden"].map(named).fillna("family"))
    columns = ["shape", "hidden", "start", "floor", "loss", "test_error", "balance", "largest", "log10_psi", "values"]
    measured = ["pole", "radius", "rise", "printed", "corrected", "states_certified"]
    return balance_of_table(frame[[*columns, *FLATNESSES, *measured]], runs.scale)


def balance_claim_answers(table: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    family, lifted = (table[table["shape"] == name] for name in ("family", "floor"))
    of = {name: table[table["shape"] == name] for name in SHAPES}
    certified = f"no ReLU can change state in {int(table['states_certified'].sum())} of {len(table)}"
    ordered = table[table["psi_trace"].notna()]
    trace = EPSILON**2 * ordered["psi_trace"] / ordered["values"]
    return {
        "balanced": _rank_correlation_within_groups(family, "balance", "psi_epsilon", "start"),
        "balance_set": _rank_correlation_within_groups(lifted, "balance", "psi_epsilon", "floor", DIVISORS),
        "balance_error": _rank_correlation_within_groups(lifted, "balance", "test_error", "floor"),
        "pole": _rank_correlation_within_groups(lifted, "pole", "psi_epsilon", "floor"),
        "psi": intervals.correlation_with_interval(family["log10_psi"], family["psi_epsilon"], "spearman", SAME_RANKS),
        "width": intervals.log10_ratio_of_means(
            of["wide"]["psi_epsilon"],
            of["narrow"]["psi_epsilon"],
            f"largest path value and nearest pole (medians): {of['wide']['largest'].median():.2g} and "
            f"{of['wide']['pole'].median():.2g} if wide, {of['narrow']['largest'].median():.2g} and "
            f"{of['narrow']['pole'].median():.2g} if narrow; the bound counts all paths at their worst",
        ),
        "depth": intervals.log10_ratio_of_means(of["deep"]["psi_epsilon"], of["shallow"]["psi_epsilon"]),
        "order_trace": intervals.holds_every_time(
            ordered["psi_epsilon"] >= trace,
            f"{_margin_factor_in_words(ordered['psi_epsilon'], trace)}; "
            "a factor ½ is missing: with equal eigenvalues it fails",
        ),
        "order_expected": intervals.holds_every_time(
            ordered["psi_epsilon"] >= ordered["psi_expected"],
            _margin_factor_in_words(ordered["psi_epsilon"], ordered["psi_expected"]),
        ),
        **{
            f"{name}_bound": intervals.holds_every_time(
                table["rise"] <= table[name], f"{_margin_factor_in_words(table[name], table['rise'])}; {certified}"
            )
            for name in ("printed", "corrected")
        },
    }


def _rank_correlation_within_groups(networks: pd.DataFrame, one: str, other: str, held: str, note: str = "") -> Answer:
    """Rank correlation among networks of one starting scale or floor; beside it the pooled one and the medians'."""
    pooled = networks[one].corr(networks[other], method="spearman")
    medians = networks.groupby(held)[[one, other]].median()
    between = float(medians.corr("spearman").to_numpy()[0, 1])
    words = f"pooled over all {held}s {pooled:.2f}, of the medians of each {between:.2f}"
    return correlation_within_strata(
        networks[one], networks[other], networks[held], note="; ".join(filter(None, (words, note)))
    )


def _margin_factor_in_words(above: pd.Series, below: pd.Series) -> str:
    """Sentence on the factor by which one side exceeds the other; a large one nearly cannot fail."""
    factors = np.log10((above / below).to_numpy(float))
    ends = float(factors.min()), float(np.median(factors))
    words = [f"{10**value:.3g}" if value < 4 else f"10^{value:.1f}" for value in ends]
    hardly = "; nearly cannot fail" if ends[0] > 1 else ""
    return f"margin: a factor of at least {words[0]}, {words[1]} in the median{hardly}"


DIVISORS = (
    "a higher floor balances the values and brings a pole nearer (only paths along the skeleton are divided by, "
    "Lemma 5.1), so that pooled over floors the sign turns"
)
SAME_RANKS = (
    "the same number as for balanced path values: where max|v| ≥ ε, as here, ψ is the ratio max|v| / min|v| to the "
    "power 2L, and this can only repeat that claim"
)


def _balance_notes(table: pd.DataFrame) -> tuple[str, ...]:
    over = {name: float(np.median(np.log10(table[name] / table["rise"]))) for name in ("printed", "corrected")}
    beyond = int((table["pole"] <= EPSILON).sum())
    medians = table[table["shape"] == "floor"].groupby("floor")[["balance", "psi_epsilon", "test_error"]].median()
    words = "; ".join(
        f"{floor:g}: {row['balance']:.2g}, {row['psi_epsilon']:.2g}, {row['test_error']:.3g}"
        for floor, row in medians.iterrows()
    )
    return (
        f"median of log10(bound / rise): {over['printed']:.1f} as printed, {over['corrected']:.1f} corrected",
        f"{beyond} of {len(table)} networks have a pole within ε = {EPSILON}",
        f"floor: ratio, PSI-ε flatness, test error (medians): {words}",
    )


def _draw_balance(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(13.0, 4.0)
    left, second, third, right = figure.subplots(1, 4)
    panels = ((left, "family", "start", "U(±{:g})"), (second, "floor", "floor", "|w| ≥ {:g}"))
    for axes, shape, column, words in panels:
        for place, (value, part) in enumerate(table[table["shape"] == shape].groupby(column)):
            axes.loglog(
                part["balance"], part["psi_epsilon"], "osD^v"[place % 5], ms=4, label=words.format(float(str(value)))
            )
        axes.set_xlabel("max|v| / min|v|")
        axes.set_ylabel(f"PSI-ε flatness, ε = {EPSILON}")
        _legend_above(axes, columns=3, title=column)
    for place, name in enumerate(SHAPES):
        values = table[table["shape"] == name]["psi_epsilon"]
        third.semilogy(np.full(len(values), place), values, "o", ms=4, color="C0", alpha=0.7)
        third.plot([place - 0.2, place + 0.2], [values.median()] * 2, color="C1", lw=2)
    third.set_xticks(range(len(SHAPES)), [f"{name}\n{'-'.join(map(str, h))}" for name, h in SHAPES.items()], fontsize=7)
    third.set_ylabel(f"PSI-ε flatness, ε = {EPSILON}")
    for name, marker, words in (("printed", "o", "(11) as printed"), ("corrected", "s", "corrected")):
        right.loglog(table["rise"], table[name], marker, ms=3, label=words)
    ends = (float(table["rise"].min()), float(table["rise"].max()))
    right.loglog(ends, ends, "-", color="0.5", lw=0.8, label="equal")
    right.set_xlabel("rise found, ε = 0.1 min|v|")
    right.set_ylabel("bound")
    _legend_above(right, columns=2)


def _legend_above(axes: Axes, columns: int, title: str | None = None) -> None:
    """Over the panel: points are everywhere within it."""
    axes.legend(fontsize=7, title=title, title_fontsize=7, ncols=columns, loc="lower center", bbox_to_anchor=(0.5, 1.0))
