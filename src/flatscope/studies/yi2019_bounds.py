"""What section 5 of Yi et al. (2019) proves: balanced path values and Theorem 5.1, and the PAC-Bayes bound (8)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flatscope.bounds.psi import PathSpread, psi_of
from flatscope.measuring import bounds, measure
from flatscope.problem import Problem
from flatscope.studies import intervals
from flatscope.studies.claims import NEGATIVE, POSITIVE, Claim, Estimate
from flatscope.studies.study import Analysis, Runs, Stage, study
from flatscope.sweeps.store import Store
from flatscope.sweeps.stored_networks import stored_problem
from flatscope.symmetries.basis_paths import BasisPaths
from flatscope.training.loop import evaluate

Report = Callable[[float, str], None]
BALANCE_WORK = "flatscope.studies.yi2019_bounds:balance_of"
PAC_WORK = "flatscope.studies.yi2019_bounds:pac_bayes_of"
RULE = "cyclic"
EPSILON = 0.02  # common to all networks, whose skeleton weights begin at 1
RELATIVE = 0.1  # of the smallest path value, for Theorem 5.1
STARTS = (0.02, 0.05, 0.1, 0.2)
SHAPES = {"narrow": (8, 8), "wide": (32, 32), "shallow": (16,), "deep": (16, 16, 16)}
SIGMAS = tuple(10.0**k for k in (-3, -2.5, -2, -1.5, -1, -0.5, 0, 0.5))
BALANCE_READING = (
    "the paper runs nothing here: networks without biases on the embedded digits, trained to a loss of 0.05",
    "skeleton weights begin at 1, so that one ε suits all networks; cyclic skeleton",
    "flatness is the best of three ascents, a lower bound of the maximum",
    "the abstract says that the error decreases with the ratio: reversed, by the paper's own theorem",
)
PAC_READING = (
    "the paper runs nothing here: networks 64-16-10 without biases on the embedded digits",
    "the 0/1 error, since the loss must be bounded; prior N(v₀, σ²I) around the starting values; H log 2 for "
    "the signs of the frozen weights",
    "the true error is that on 360 test images",
)
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {"samples": 60, "seeds": 2, "shapes": 2, "epochs": 20, "networks": 2, "draws": 4, "starts": 2, "steps": 3},
    "small": {
        "samples": 300,
        "seeds": 6,
        "shapes": 6,
        "epochs": 500,
        "networks": 6,
        "draws": 20,
        "starts": 4,
        "steps": 30,
    },
    "paper": {
        "samples": 1_000,
        "seeds": 20,
        "shapes": 20,
        "epochs": 500,
        "networks": 10,
        "draws": 100,
        "starts": 4,
        "steps": 30,
    },
}


def _network(samples: int, hidden: tuple[int, ...], start: float, seed: int, epochs: int) -> dict[str, Any]:
    return {
        "data": {"name": "digits", "train_size": samples, "test_size": 360, "flatten": True},
        "model": {"name": "mlp", "options": {"widths": [64, *hidden, 10], "bias": False}, "seed": seed},
        "init": {"scheme": "uniform", "bound": start, "skeleton": 1.0},
        "train": {"lr": 0.02, "batch_size": 20, "epochs": epochs, "stop_loss": 0.05, "evaluate_every": 5, "seed": seed},
    }


def balance_stages(scale: str) -> list[Stage]:
    """One architecture from several starts, and four shapes from one start."""
    size = SIZES[scale]
    samples, epochs = size["samples"], size["epochs"]
    family = [
        [_network(samples, (16, 16), start, seed, epochs) for seed in range(size["seeds"])]
        for start in STARTS[-size["starts"] :]
    ]  # fmt: skip
    shapes = [
        [_network(samples, hidden, 0.1, 100 + seed, epochs) for seed in range(size["shapes"])]
        for hidden in SHAPES.values()
    ]
    looks = [
        [{"network": config, "epsilon": EPSILON, "steps": size["steps"]} for config in unit]
        for unit in (*family, *shapes)
    ]
    return [Stage([*family, *shapes], gpus=0.25), Stage(looks, BALANCE_WORK, gpus=0.25)]


def balance_of(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Balance of the path values, ψ, PSI-ε flatness, and Theorem 5.1 beside the rise that is found, in float64."""
    for number, config in enumerate(configs):
        problem = _double(stored_problem(store, config["network"], device=config.get("device")))
        log, _ = BasisPaths(problem.model, problem.example(), RULE).log_values()
        spread, depth = PathSpread(float(log.max()), float(log.min())), len(list(problem.model.parameters()))
        radius = RELATIVE * spread.inf
        loss = float(evaluate(problem.model, *_samples(problem))[0])
        searched = {"rule": RULE, "relative": False, "steps": config["steps"]}
        near, far = (
            measure(problem, "psi_epsilon", options={"psi_epsilon": {**searched, "epsilon": e}})
            for e in (radius, config["epsilon"])
        )
        options = {name: {"rule": RULE, "epsilon": RELATIVE} for name in THEOREMS}
        table = bounds(problem, THEOREMS, options=options)
        states = measure(problem, "psi_activation_radius", options={"psi_activation_radius": {"rule": RULE}})
        metrics = {
            "balance": math.exp(spread.log_sup - spread.log_inf),
            "log10_psi": math.log10(psi_of(spread, config["epsilon"], depth)),
            "psi_epsilon": far["psi_epsilon"],
            "pole": float(BasisPaths(problem.model, problem.example(), RULE).coordinates.nearest_pole),
            "radius": radius,
            "rise": near["psi_epsilon"] * (1 + loss),
            "printed": table[THEOREMS[0]],
            "corrected": table[THEOREMS[1]],
            "states_certified": bool(states["psi_activation_radius"] >= radius),
        }
        store.write(config, metrics)
        report((number + 1) / len(configs), "path values")


THEOREMS = ("psi_theorem_5_1", "psi_theorem_5_1_corrected")


def _double(problem: Problem) -> Problem:
    return Problem(problem.model, train=_samples(problem), initial=problem.initial, dtype=torch.float64)


def _samples(problem: Problem) -> tuple[Tensor, Tensor]:
    x, y = next(iter(problem.batches(size=problem.n_train)))
    assert isinstance(x, Tensor)
    return x, y


@study(
    "yi2019-balance",
    figure="Theorem 5.1",
    title="Balanced path values, PSI-ε flatness and the bound of Theorem 5.1",
    claims=(
        Claim(
            "balanced",
            "section 5",
            "a minimum with balanced path values is flatter",
            "Spearman correlation of max|v| / min|v| with PSI-ε flatness at ε = 0.02, one architecture",
            "positive",
            holds=POSITIVE,
        ),
        Claim(
            "psi",
            "Theorem 5.1",
            "flatness follows ψ(v)",
            "Spearman correlation of ψ with PSI-ε flatness at ε = 0.02, one architecture",
            "positive",
            holds=POSITIVE,
        ),
        Claim(
            "width",
            "section 5",
            "a wider network is sharper",
            "log10 of PSI-ε flatness, width 32 minus width 8",
            "larger",
            holds=POSITIVE,
        ),
        Claim(
            "depth",
            "section 5",
            "a deeper network is sharper",
            "log10 of PSI-ε flatness, three hidden layers minus one",
            "larger",
            holds=POSITIVE,
        ),
        Claim(
            "printed_bound",
            "equation (11)",
            "the rise of the loss within ε is at most the right-hand side, as printed",
            "share of networks in which the rise found at ε = 0.1 min|v| is below it",
            "always",
            holds=(1.0, 1.0),
        ),
        Claim(
            "corrected_bound",
            "equation (11)",
            "the same with the number of non-basis paths and the square root put right",
            "share of networks in which the rise found at ε = 0.1 min|v| is below it",
            "always",
            holds=(1.0, 1.0),
        ),
    ),
    stages=balance_stages,
    deviations={"small": BALANCE_READING, "paper": BALANCE_READING},
    paper_cost="160 networks of a few thousand parameters: minutes on a CPU.",
)
def balance(runs: Runs) -> Analysis:
    """Trained networks whose path values are more or less balanced, and others of four shapes."""
    frame = runs.frame(1)
    widths = [tuple(config["model"]["options"]["widths"][1:-1]) for config in runs.stages[0].configs]
    frame["hidden"] = ["-".join(map(str, width)) for width in widths]
    frame["start"] = runs.frame(0)["init.bound"].to_numpy()
    named = {"-".join(map(str, hidden)): name for name, hidden in SHAPES.items()}
    frame["shape"] = frame["hidden"].map(named).fillna("family")
    columns = ["shape", "hidden", "start", "balance", "log10_psi", "psi_epsilon", "pole", "radius", "rise"]
    table = frame[[*columns, "printed", "corrected", "states_certified"]]
    return Analysis(table, balance_found(table), lambda figure: _draw_balance(figure, table), _balance_notes(table))


def balance_found(table: pd.DataFrame) -> dict[str, Estimate]:
    """The numbers of the claims."""
    family = table[table["shape"] == "family"]
    of = {name: table[table["shape"] == name]["psi_epsilon"] for name in SHAPES}
    certified = f"no ReLU can change state in {int(table['states_certified'].sum())} of {len(table)}"
    return {
        "balanced": intervals.correlation(family["balance"], family["psi_epsilon"], "spearman"),
        "psi": intervals.correlation(family["log10_psi"], family["psi_epsilon"], "spearman"),
        "width": intervals.log_ratio(of["wide"], of["narrow"]),
        "depth": intervals.log_ratio(of["deep"], of["shallow"]),
        "printed_bound": Estimate.exact(float((table["rise"] <= table["printed"]).mean()), certified),
        "corrected_bound": Estimate.exact(float((table["rise"] <= table["corrected"]).mean()), certified),
    }


def _balance_notes(table: pd.DataFrame) -> tuple[str, ...]:
    over = {name: float(np.median(np.log10(table[name] / table["rise"]))) for name in ("printed", "corrected")}
    beyond = int((table["pole"] <= EPSILON).sum())
    return (
        f"median of log10(bound / rise): {over['printed']:.1f} as printed, {over['corrected']:.1f} corrected",
        f"{beyond} of {len(table)} networks have a pole within ε = {EPSILON}",
    )


def _draw_balance(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(10.0, 3.4)
    left, middle, right = figure.subplots(1, 3)
    family = table[table["shape"] == "family"]
    for place, (start, part) in enumerate(family.groupby("start")):
        left.loglog(part["balance"], part["psi_epsilon"], "osD^"[place % 4], ms=4, label=f"U(±{start:g})")
    left.set_xlabel("max|v| / min|v|")
    left.set_ylabel(f"PSI-ε flatness, ε = {EPSILON}")
    left.legend(fontsize=6, title="start", title_fontsize=6, framealpha=0.4)
    for place, name in enumerate(SHAPES):
        values = table[table["shape"] == name]["psi_epsilon"]
        middle.semilogy(np.full(len(values), place), values, "o", ms=4, color="C0", alpha=0.7)
        middle.plot([place - 0.2, place + 0.2], [values.median()] * 2, color="C1", lw=2)
    middle.set_xticks(
        range(len(SHAPES)), [f"{name}\n{'-'.join(map(str, h))}" for name, h in SHAPES.items()], fontsize=7
    )
    middle.set_ylabel(f"PSI-ε flatness, ε = {EPSILON}")
    for name, marker, words in (("printed", "o", "(11) as printed"), ("corrected", "s", "corrected")):
        right.loglog(table["rise"], table[name], marker, ms=3, label=words)
    ends = (float(table["rise"].min()), float(table["rise"].max()))
    right.loglog(ends, ends, "-", color="0.5", lw=0.8, label="equal")
    right.set_xlabel("rise found, ε = 0.1 min|v|")
    right.set_ylabel("bound")
    right.legend(fontsize=7)


def pac_stages(scale: str) -> list[Stage]:
    """The same kind of network, then the two sides of (8) for each noise."""
    size = SIZES[scale]
    trained = [_network(size["samples"], (16,), 0.05, seed, size["epochs"]) for seed in range(size["networks"])]
    looks = [[{"network": config, "draws": size["draws"]}] for config in trained]
    return [Stage([trained], gpus=0.25), Stage(looks, PAC_WORK, gpus=0.25)]


def pac_bayes_of(configs: list[dict[str, Any]], store: Store, report: Report) -> None:
    """Right-hand side of (8), its two terms, and the gap of the perturbed network on test samples, for every σ."""
    for number, config in enumerate(configs):
        stored = stored_problem(store, config["network"], device=config.get("device"))
        problem, draws = _double(stored), config["draws"]
        test = next(iter(stored.batches("test", size=stored.part("test").n)))
        assert isinstance(test[0], Tensor)
        x, y = _samples(problem)
        train_error = evaluate(problem.model, x.double(), y)[1]
        test_error = evaluate(problem.model, test[0].double(), test[1])[1]
        paths = BasisPaths(problem.model, problem.example(), RULE)
        generator = torch.Generator().manual_seed(number)
        rows = []
        for sigma in SIGMAS:
            options = {"sigma": sigma, "draws": draws, "prior_mean": "initial", "rule": RULE}
            table = bounds(problem, "pac_bayes_psi", options={"pac_bayes_psi": options})
            noise = sigma * torch.randn(draws, paths.count, generator=generator, dtype=torch.float64)
            noisy = [paths.to_model(paths.values() + u.to(problem.device)) for u in noise]
            errors = [evaluate(model, test[0].double(), test[1])[1] for model in noisy]
            own = [evaluate(model, x, y)[1] for model in noisy]
            flatness = abs(float(np.mean(own)) - train_error)
            gap = float(np.mean(errors)) - train_error
            rows.append({"sigma": sigma, "right": table["pac_bayes_psi"], "flatness": flatness, "left": gap})
        metrics = {"train_error": train_error, "test_error": test_error}
        store.write(config, metrics, frames={"sigmas": pd.DataFrame(rows)})
        report((number + 1) / len(configs), "PAC-Bayes")


@study(
    "yi2019-pac-bayes",
    figure="equation (8)",
    title="The PAC-Bayes bound in path space against the size of the perturbation",
    claims=(
        Claim(
            "vacuous",
            "section 5",
            "as the perturbation vanishes the KL term goes to infinity and the bound with it",
            "slope of log bound against log σ at the smallest σ, mean over networks",
            "to infinity; -1 by its formula",
            holds=(-1.05, -0.95),
            partly=NEGATIVE,
        ),
        Claim(
            "trade_off",
            "section 5",
            "a larger perturbation costs flatness: there is a trade-off",
            "PSI-expected flatness at the largest minus at the smallest σ, mean over networks",
            "trade-off",
            holds=POSITIVE,
        ),
        Claim(
            "close",
            "section 5",
            "a small perturbation brings the perturbed gap close to the real one",
            "largest distance of the perturbed gap at σ = 0.001 from test minus training error",
            "close",
            holds=(0.0, 0.01),
        ),
        Claim(
            "bound",
            "equation (8)",
            "the perturbed gap is at most the right-hand side",
            "share of networks and σ in which it is, by the gap on test samples",
            "with probability 0.95",
            holds=(0.95, 1.0),
        ),
    ),
    stages=pac_stages,
    deviations={"small": PAC_READING, "paper": PAC_READING},
    paper_cost="10 networks of 1,200 parameters: minutes on a CPU.",
)
def pac_bayes_study(runs: Runs) -> Analysis:
    """Both sides of (8) for networks on digits, over noise from a thousandth of a skeleton weight to three of them."""
    frame, parts = runs.frame(1), runs.frames("sigmas")
    gap = (frame["test_error"] - frame["train_error"]).to_numpy(float)
    table = pd.concat([part.assign(network=i, gap=gap[i]) for i, part in enumerate(parts)], ignore_index=True)
    best = table.groupby("network")["right"].min()
    at = table.loc[table.groupby("network")["right"].idxmin(), "sigma"].median()
    notes = (
        f"smallest right-hand side over σ: {best.min():.3g} to {best.max():.3g}, at σ = {at:.3g}; it says something "
        "about an error only below 1",
    )
    return Analysis(table, pac_found(table), lambda figure: _draw_pac(figure, table), notes)


def pac_found(table: pd.DataFrame) -> dict[str, Estimate]:
    """The numbers of the claims."""
    wide = {name: table.pivot(index="network", columns="sigma", values=name) for name in ("right", "flatness", "left")}
    first, second, last = SIGMAS[0], SIGMAS[1], SIGMAS[-1]
    slopes = np.log(wide["right"][second] / wide["right"][first]) / math.log(second / first)
    gaps = table.groupby("network")["gap"].first()
    distance = (wide["left"][first] - gaps).abs()
    return {
        "vacuous": intervals.mean(slopes),
        "trade_off": intervals.paired_difference(wide["flatness"][last], wide["flatness"][first]),
        "close": Estimate(float(distance.max()), float(distance.min()), float(distance.max()), len(distance)),
        "bound": Estimate.exact(float((table["left"] <= table["right"]).mean()), f"{len(table)} cases"),
    }


def _draw_pac(figure: Figure, table: pd.DataFrame) -> None:
    axes = figure.subplots()
    styles = {"right": ("-", "C0", "right-hand side of (8)"), "flatness": ("--", "C1", "PSI-expected flatness")}
    for name, (line, colour, words) in styles.items():
        found = table.groupby("sigma")[name].agg(["mean", "min", "max"])
        axes.plot(found.index, found["mean"], line, marker="o", ms=3, color=colour, label=words)
        axes.fill_between(found.index, found["min"], found["max"], color=colour, alpha=0.2)
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
