"""Equation (8) of Yi et al. (2019): the PAC-Bayes bound in path space as the perturbation grows."""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flatscope import BasisPaths, Problem
from flatscope.generalization_bounds.psi import pac_bayes_gap
from flatscope.training import Store, evaluate, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.yi2019.digit_networks import RULE, all_training_samples

DELTA = 0.05
SIGMAS = tuple(10.0**k for k in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5))
SATURATED = "the error cannot exceed that of guessing: beyond some σ more noise costs nothing, and the KL term falls on"
SIZES = settings_by_scale(__name__)


def path_space_bound_stages(scale: str) -> list[Stage]:
    """Networks of one hidden layer, then the two sides of (8) for each noise."""
    size = SIZES[scale]
    trained = [
        {
            "data": {**size["data"], "flatten": True},
            "model": {"name": "mlp", "options": {"widths": [784, 16, 10], "bias": False}, "seed": seed},
            "init": {"scheme": "uniform", "bound": 0.02, "skeleton": 1.0},
            "train": {"lr": 0.05, "batch_size": 100, "epochs": 3, "seed": seed},
        }
        for seed in range(size["networks"])
    ]
    looks = [[{"network": config, "draws": size["draws"], "sigmas": SIGMAS, "delta": DELTA}] for config in trained]
    return [Stage([trained], gpus=0.25), Stage(looks, pac_bayes_of, gpus=0.25)]


@each_trial("PAC-Bayes")
def pac_bayes_of(config: Config, store: Store) -> Measured:
    """Right-hand side of (8), its flatness, and the gap of the perturbed network on test samples, for every σ."""
    problem = stored_problem(store, config["network"], device=config.get("device"))
    test_x, test_y = next(iter(problem.batches("test", size=problem.part("test").n)))
    assert isinstance(test_x, Tensor)
    x, y = all_training_samples(problem)
    train_error, test_error = evaluate(problem.model, x, y)[1], evaluate(problem.model, test_x, test_y)[1]
    paths = BasisPaths(problem.model, problem.example(), RULE)
    generator = torch.Generator().manual_seed(config["network"]["train"]["seed"])
    rows = []
    for sigma in config["sigmas"]:
        noise = sigma * torch.randn(config["draws"], paths.count, generator=generator)
        noisy = [paths.to_model(paths.values() + u.to(problem.device)) for u in noise]
        flatness = abs(float(np.mean([evaluate(model, x, y)[1] for model in noisy])) - train_error)
        perturbed = float(np.mean([evaluate(model, test_x, test_y)[1] for model in noisy]))
        right = pac_bayes_gap(flatness, path_space_divergence(problem, paths, sigma), len(y), config["delta"])
        rows.append({"sigma": sigma, "right": right, "flatness": flatness, "left": perturbed - train_error})
    metrics = {"train_error": train_error, "test_error": test_error}
    return Measured(metrics, frames={"sigmas": pd.DataFrame(rows)})


def path_space_divergence(problem: Problem, paths: BasisPaths, sigma: float) -> float:
    """KL(v + u ‖ P) for u ~ N(0, σ²I) and P = N(v₀, σ²I), with H log 2 for the signs of the frozen weights."""
    assert problem.initial is not None
    start = paths.values_of({name: value.double() for name, value in problem.initial.items()})
    distance = float((paths.values().double() - start).square().sum())
    return distance / (2 * sigma**2) + paths.n_classes * math.log(2)


@study("yi2019-pac-bayes", stages=path_space_bound_stages)
def pac_bayes_study(runs: Runs) -> Analysis:
    """Both sides of (8) for networks on MNIST, over noise from a thousandth of a skeleton weight to three of them."""
    frame, parts = runs.frame(1), runs.frames("sigmas")
    gap = (frame["test_error"] - frame["train_error"]).to_numpy(float)
    table = pd.concat([part.assign(network=i, gap=gap[i]) for i, part in enumerate(parts)], ignore_index=True)
    best = table.groupby("network")["right"].min()
    at = table.loc[table.groupby("network")["right"].idxmin(), "sigma"].median()
    notes = (
        f"smallest right-hand side over σ: {best.min():.3g} to {best.max():.3g}, at σ = {at:.3g}; it says something "
        "about an error only below 1",
        f"test minus training error: {gap.min():.2g} to {gap.max():.2g}",
    )
    return Analysis(table, pac_bayes_claim_answers(table), lambda figure: _draw_path_space_bound(figure, table), notes)


def pac_bayes_claim_answers(table: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    wide = {name: table.pivot(index="network", columns="sigma", values=name) for name in ("right", "flatness", "left")}
    right, first, second, last = wide["right"], SIGMAS[0], SIGMAS[1], SIGMAS[-1]
    slopes = np.log(right[second] / right[first]) / math.log(second / first)
    gaps = table.groupby("network")["gap"].first()
    free = f"the right-hand side exceeds 1, so that nothing could break it, in {int((table['right'] >= 1).sum())} of "
    return {
        "vacuous": intervals.mean_over_runs(slopes),
        "trade_off": intervals.paired_difference(wide["flatness"][last], wide["flatness"][first]),
        "best_between": intervals.paired_difference(right[last], right.drop(columns=last).min(axis=1), SATURATED),
        "close": intervals.largest_over_networks((wide["left"][first] - gaps).abs()),
        "bound": intervals.share_of_cases(
            table["left"] <= table["right"],
            f"{free}{len(table)} cases",
            groups=table["network"],
            least=1 - DELTA,
        ),
    }


def _draw_path_space_bound(figure: Figure, table: pd.DataFrame) -> None:
    axes = figure.subplots()
    styles = {"right": ("-", "C0", "right-hand side of (8)"), "flatness": ("--", "C1", "PSI-expected flatness")}
    for name, (line, colour, words) in styles.items():
        spread = table.groupby("sigma")[name].agg(["mean", "min", "max"])
        axes.plot(spread.index, spread["mean"], line, marker="o", ms=3, color=colour, label=words)
        axes.fill_between(spread.index, spread["min"], spread["max"], color=colour, alpha=0.2)
    left = table.groupby("sigma")["left"].mean()
    axes.plot(left.index, left, ":", marker="s", ms=3, color="C2", label="perturbed gap on test samples")
    axes.axhline(table["gap"].mean(), color="0.4", lw=0.8, label="test − training error")
    axes.axhline(1.0, color="0.8", lw=0.8)
    axes.set_xscale("log")
    axes.set_yscale("symlog", linthresh=0.1)
    axes.set_ylim(min(-0.02, 1.1 * float(table["left"].min())), 2 * float(table["right"].max()))
    axes.set_xlabel("σ of the perturbation of path values")
    axes.set_ylabel("0/1 error")
    axes.legend(fontsize=8)
