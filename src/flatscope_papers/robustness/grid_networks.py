"""The networks behind our own study, and every measure of the registry on each: as trained, and rescaled.

Long measures have a stage of their own, with smaller searches than they make by default.
"""

from __future__ import annotations

import itertools
from typing import Any

import pandas as pd
import torch

from flatscope import Problem, measure, rescale
from flatscope.registry import declarations
from flatscope.training.sweeps.store import Store
from flatscope.training.sweeps.work import stored_problem
from flatscope_papers.declaration import Config, Measured, Runs, Stage, each_trial
from flatscope_papers.tables import grid

SETTINGS = ("batch_size", "lr", "width", "depth", "init_scale", "label_noise")
# One row per measure: of those that give several, one value of the option. Eigenvalues need not be finer than ranks.
OPTIONS: dict[str, dict[str, Any]] = {
    "pac_bayes_kl": {"alpha": [0.01]},
    "perturbation_robustness": {"gammas": [0.5]},
    **{name: {"tolerance": 1e-4} for name in ("layer_max_eigenvalue", "kappa", "kappa_max", "kappa_sum")},
    **{name: {"tolerance": 1e-3} for name in ("hessian_max_eigenvalue", "hessian_min_eigenvalue")},
}
# Of the long ones, smaller searches: twice over the whole population they take some minutes of one core.
LONG: dict[str, dict[str, Any]] = {
    "expected_sharpness": {"alpha": [0.03], "draws": 200},
    "feature_robustness": {"restarts": 2, "steps": 10},
    "flatness_radius": {"directions": 40, "tolerance": 1e-3},
    "geometric_margin": {"samples": 100, "restarts": 5},
    "sharpness": {"steps": 200},
}
HASTY: dict[str, dict[str, Any]] = {
    "adaptive_sharpness": {"restarts": 1, "steps": 3},
    "effective_dimension": {"steps": 8, "draws": 2},
    "epsilon_flatness": {"restarts": 1, "steps": 3},
    "expected_flatness": {"draws": 4},
    "expected_sharpness": {"alpha": [0.03], "draws": 4},
    "feature_robustness": {"restarts": 1, "steps": 2},
    "flatness_radius": {"directions": 4, "tolerance": 1e-2},
    "geometric_margin": {"samples": 4, "restarts": 1},
    **{name: {"chains": 2, "steps": 8} for name in ("local_learning_coefficient", "wbic")},
    "psi_epsilon": {"restarts": 1, "steps": 3},
    "psi_expected": {"draws": 4},
    "sharpness": {"steps": 5},
}
SIZES = grid(__name__)
STOP_LOSS = 0.05
LONG_ORDER = [
    *("adaptive_sharpness", "feature_robustness", "geometric_margin"),
    *("condition_c1_mu", "condition_c2", "condition_c3", "expected_sharpness"),
    *("psi_epsilon", "psi_expected", "flatness_radius", "epsilon_flatness", "expected_flatness", "sharpness"),
]


def stages(scale: str) -> list[Stage]:
    """Networks of one architecture and batch size train together; each is measured as it is and rescaled."""
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
    long = {"measures": long_measures(), "measure_options": HASTY if scale == "smoke" else LONG}
    looks = [
        Stage(
            [[{"network": one, "rescaling": one["model"]["seed"], **asked} for one in unit] for unit in units.values()],
            measure_twice,
            gpus=0.25,
        )
        for asked in ({"measure_options": OPTIONS}, long)
    ]
    return [Stage(list(units.values()), gpus=0.25), *looks]


def long_measures() -> list[str]:
    """Names of the measures that are only taken when asked for; the order is part of the names of stored trials."""
    found = {entry.name for entry in declarations().values() if entry.cost == "long"}
    return [name for name in LONG_ORDER if name in found] + sorted(found - set(LONG_ORDER))


@each_trial("measuring")
def measure_twice(config: Config, store: Store) -> Measured:
    """Measures asked for, or all that are not long, of the network and of a copy with rescaled units, in float64."""
    metrics: dict[str, float] = {}
    if not store.read(config["network"]).metrics["diverged"]:
        stored = stored_problem(store, config["network"], device=config.get("device"))
        x, y = next(iter(stored.batches(size=stored.n_train)))
        problem = Problem(stored.model, train=(x, y), initial=stored.initial, dtype=torch.float64)
        twin = rescale(problem.model, problem.example(), by="unit", seed=config["rescaling"])
        rescaled = Problem(twin, train=(x, y), initial=stored.initial, dtype=torch.float64)
        for when, one in (("before", problem), ("after", rescaled)):
            table = measure(one, config.get("measures", "standard"), options=config["measure_options"])
            metrics |= {f"{when}.{name}": value for name, value in table.one_each().items()}
    return Measured(metrics)


def population(runs: Runs) -> pd.DataFrame:
    """One row per network that did not diverge: settings, gap, "before.…" and "after.…" of every measure."""
    trained = runs.frame(0)
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
    for measured in (runs.frame(1), runs.frame(2)):
        columns = [name for name in measured if str(name).startswith(("before.", "after."))]
        frame = pd.concat([frame, measured[columns]], axis=1)
    return frame[~trained["diverged"].astype(bool)].reset_index(drop=True)
