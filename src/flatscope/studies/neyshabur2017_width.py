"""Figure 4 of Neyshabur et al. (2017): two-layer perceptrons of growing width on MNIST."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.measures.desiderata import desiderata
from flatscope.studies.claims import NEGATIVE, POSITIVE, Claim, Estimate
from flatscope.studies.neyshabur2017_complexity import (
    CONVENTIONS,
    EPSILON,
    KL,
    LEVEL,
    NORMS,
    NORMS_WORK,
    PERTURBATIONS_WORK,
    SHARPNESS,
    curves,
    draw_curves,
    draw_lines,
    draw_relative,
    over_seeds,
    three_panels,
    verdict_note,
)
from flatscope.studies.study import Analysis, Runs, Stage, study

CAPACITIES = ("l2_path_norm_capacity", "spectral_norm_capacity")
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {
        "data": {"name": "flatscope.studies.smoke_data:digits_as_mnist", "train_size": 60, "test_size": 60},
        "train": {"lr": 0.2, "momentum": 0.9, "epochs": 60, "stop_loss": 5e-2, "evaluate_every": 5},
        "widths": (8, 32, 128),
        "seeds": 2,
        "perturbations": {"steps": 10, "draws": 4, "alphas": (0.01, 0.03, 0.1)},
    },
    "small": {
        "data": {"name": "mnist", "train_size": 2_000, "test_size": 5_000},
        "train": {"lr": 0.1, "momentum": 0.9, "epochs": 400, "stop_loss": 1e-3, "evaluate_every": 5},
        "widths": (8, 16, 32, 64, 128, 256, 512),
        "seeds": 3,
        "perturbations": {"steps": 100, "draws": 40, "alphas": (0.005, 0.01, 0.018, 0.032, 0.056, 0.1)},
    },
    "paper": {
        "data": {"name": "mnist"},
        "train": {"lr": 0.01, "momentum": 0.9, "epochs": 1_000, "stop_loss": 1e-4},
        "widths": (8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096),
        "seeds": 5,
        "perturbations": {
            "steps": 2_000,
            "draws": 1_000,
            "alphas": (1e-3, 3e-3, 5.6e-3, 1e-2, 1.8e-2, 3.2e-2, 5.6e-2, 1e-1),
        },
    },
}


def stages(scale: str) -> list[Stage]:
    """One unit per width: its seeds train as one stack; then norms, then perturbations."""
    size = SIZES[scale]
    units = [[_network(size, width, seed) for seed in range(size["seeds"])] for width in size["widths"]]
    settings = size["perturbations"]
    return [
        Stage(units, gpus=0.25),
        Stage([[{"network": c, "norms": {"epsilons": [EPSILON]}} for c in u] for u in units], NORMS_WORK, 0.25),
        Stage([[{"network": c, "perturbations": settings} for c in u] for u in units], PERTURBATIONS_WORK, 0.25),
    ]


def _network(size: Mapping[str, Any], width: int, seed: int) -> dict[str, Any]:
    return {
        "data": {**size["data"], "standardize": False},
        "model": {"name": "two_layer", "options": {"hidden": width}, "seed": seed},
        "train": {**size["train"], "batch_size": 64, "seed": seed},
    }


def networks(runs: Runs) -> pd.DataFrame:
    """One row per network: width, seed, errors, measures."""
    trained, normed, perturbed = (runs.frame(stage) for stage in range(3))
    return pd.DataFrame(
        {
            "hidden": trained["model.options.hidden"],
            "seed": trained["train.seed"],
            "train_error": trained["train_error"],
            "test_error": trained["test_error"],
            "train_loss": trained["train_loss"],
            "epochs": trained["epochs"],
            **{name: normed[name] for name in (*NORMS, *CAPACITIES)},
            SHARPNESS: perturbed[SHARPNESS],
            KL: perturbed[KL],
        }
    )


def change(rows: pd.DataFrame, column: str, first: int, last: int) -> float:
    """log10 of a measure at the width `last` minus that at `first`, for one seed; NaN where a width is missing."""
    values = rows.set_index("hidden")[column]
    if first not in values.index or last not in values.index or first == last:
        return math.nan
    return float(np.log10(values[last]) - np.log10(values[first]))


def _moves(key: str, where: str, statement: str, number: str, reported: str, holds: tuple[float, float]) -> Claim:
    return Claim(key, where, statement, f"log10 of {number}, mean over seeds", reported, holds=holds)


WHERE = "section 3, Figure 4 middle"
CLAIMS = (
    Claim(
        "fits",
        "section 3, Figure 4 left",
        "32 hidden units are enough to fit the training data",
        "largest training error of networks with 32 units or more",
        "0",
        holds=(0.0, 0.0),
        partly=(0.0, 1e-3),
    ),
    Claim(
        "test_error",
        "section 3, Figure 4 left",
        "wider networks generalize better",
        "test error at 32 units minus that at the largest width, mean over seeds",
        "decreases",
        holds=POSITIVE,
    ),
    *(
        _moves(
            f"falls_{n}",
            WHERE,
            f"{label} over margin decreases up to 128 units",
            "128 / 32 units",
            "decreases",
            NEGATIVE,
        )
        for n, label in NORMS.items()
    ),
    *(
        _moves(
            f"rises_{name}",
            WHERE,
            f"{NORMS[name]} over margin increases beyond 128 units",
            "largest width / 128 units",
            "increases",
            POSITIVE,
        )
        for name in ("l2_norm", "l1_path_norm")
    ),
    _moves(
        "l2_path_keeps_falling",
        WHERE,
        "ℓ2-path norm over margin goes on decreasing beyond 128 units",
        "largest width / 128 units",
        "provides some explanation",
        NEGATIVE,
    ),
    *(
        _moves(
            f"counted_{name}",
            "section 3",
            f"with the widths that belong to it the {NORMS[name]} cannot explain the falling test error",
            "capacity at the largest width / at 128 units",
            "does not decrease",
            POSITIVE,
        )
        for name in ("l2_path_norm", "spectral_norm")
    ),
    _moves(
        "spectral_beyond_512",
        "section 3",
        "spectral norm over margin increases beyond 512 units",
        "largest width / 512 units",
        "some increase",
        POSITIVE,
    ),
    _moves(
        "kl_falls",
        "section 3, Figure 4 right",
        "the joint PAC-Bayes measure decreases up to 128 units",
        f"the KL at expected sharpness {LEVEL:g}, 128 / 32 units",
        "decreases",
        NEGATIVE,
    ),
    _moves(
        "kl_fails",
        "section 3, Figure 4 right",
        "beyond 128 units the joint PAC-Bayes measure does not decrease any more",
        f"the KL at expected sharpness {LEVEL:g}, largest width / 128 units",
        "fails to explain",
        (0.0, math.inf),
    ),
)


@study(
    "neyshabur2017-fig4",
    figure="Figure 4",
    title="Width of a two-layer perceptron on MNIST",
    claims=CLAIMS,
    stages=stages,
    deviations={
        "small": (
            "2,000 of the 60,000 images, pixels in [0, 1]; widths up to 512, so nothing is said of wider networks; "
            "three seeds, which share their images",
            "learning rate 0.1 in place of 0.01, stop at a cross-entropy of 1e-3 in place of 1e-4, at most 400 epochs",
            "100 steps of ascent in place of 2,000 and 40 perturbed networks per noise level in place of 1,000",
        ),
        "paper": ("widths 8 to 4,096 and five seeds, which share their images: the paper states neither",),
    },
    paper_cost="50 two-layer networks on 60,000 images, up to 1,000 epochs where 8 and 16 units cannot fit them: of "
    "the order of two hours on one H200, five networks of a width as one stack; not timed.",
)
def figure_4(runs: Runs) -> Analysis:
    """Errors, measures and bi-criteria curves of two-layer networks against their number of hidden units."""
    points = networks(runs)
    last = int(points["hidden"].max())
    found = {
        "fits": Estimate.exact(
            float(points[points["hidden"] >= 32]["train_error"].max()),
            f"over {(points['hidden'] >= 32).sum()} networks",
        ),
        "test_error": over_seeds(points, lambda rows: _fall(rows, 32, last)),
    }
    asked = {f"falls_{name}": (name, 32, 128) for name in NORMS}
    asked |= {f"rises_{name}": (name, 128, last) for name in ("l2_norm", "l1_path_norm")}
    asked |= {f"counted_{name.removesuffix('_capacity')}": (name, 128, last) for name in CAPACITIES}
    asked |= {
        "l2_path_keeps_falling": ("l2_path_norm", 128, last),
        "spectral_beyond_512": ("spectral_norm", 512, last),
        "kl_falls": (KL, 32, 128),
        "kl_fails": (KL, 128, last),
    }
    for key, (column, first, until) in asked.items():
        found[key] = over_seeds(
            points,
            lambda rows, c=(column, first, until): change(rows, *c),  # type: ignore[misc]
            _where_smallest(points, column) if until > first else f"no network is wider than {first} units",
        )
    lines = curves(runs.stored(2), points[["hidden", "seed"]])
    everything = pd.concat([points.assign(kind="network"), lines.assign(kind="noise level")], ignore_index=True)
    return Analysis(
        everything, found, lambda figure: _draw(figure, points, lines), (CONVENTIONS, _fits(points), _verdicts(points))
    )


def _fall(rows: pd.DataFrame, first: int, last: int) -> float:
    errors = rows.set_index("hidden")["test_error"]
    return float(errors[first] - errors[last]) if first in errors.index and first != last else math.nan


def _where_smallest(points: pd.DataFrame, column: str) -> str:
    means = points.groupby("hidden")[column].mean().dropna()
    return f"smallest at {means.index[int(means.to_numpy().argmin())]} units" if len(means) else ""


def _fits(points: pd.DataFrame) -> str:
    means = points.groupby("hidden")[["train_error", "test_error"]].mean()
    told = [f"{width}: {row.train_error:.4f} / {row.test_error:.4f}" for width, row in means.iterrows()]
    return f"Training / test error by width (means over seeds): {', '.join(told)}"


def _verdicts(points: pd.DataFrame) -> str:
    """Demand (ii) over widths that fit the data, means over seeds."""
    fitted = points[points["hidden"] >= 32].groupby("hidden").mean().sort_index()
    labels = {**NORMS, SHARPNESS: "sharpness", KL: f"KL at expected sharpness {LEVEL:g}"}
    labels |= dict(zip(CAPACITIES, ("ℓ2-path norm with widths", "spectral norm with widths"), strict=True))
    table = desiderata(
        by_width={label: fitted[name].tolist() for name, label in labels.items()},
        width_test_errors=fitted["test_error"].tolist(),
    )
    steps = sum(later < earlier for earlier, later in itertools.pairwise(fitted["test_error"]))
    return f"{verdict_note(table)}; of {len(fitted) - 1} steps in width from 32 on, {steps} lower the test error"


def _draw(figure: Figure, points: pd.DataFrame, lines: pd.DataFrame) -> None:
    left, middle, right = three_panels(figure)
    draw_lines(left, points, "hidden", {"train_error": "training error", "test_error": "test error"}, log=False)
    left.set_ylabel("error (share of images)")
    draw_relative(middle, points, "hidden", {**NORMS, SHARPNESS: "sharpness"})
    for axes in (left, middle):
        axes.set_xscale("log", base=2)
        axes.set_xlabel("hidden units")
        axes.legend(fontsize=7)
    draw_curves(right, lines, "hidden")
    right.legend(title="hidden units", fontsize=6, title_fontsize=7, ncol=2)
