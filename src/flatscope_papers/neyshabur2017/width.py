"""Figure 4 of Neyshabur et al. (2017): two-layer perceptrons of growing width on MNIST."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.measures.desiderata import desiderata
from flatscope_papers import intervals
from flatscope_papers.claims import NEGATIVE, POSITIVE, Claim, Range
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.neyshabur2017.complexity import (
    CONVENTIONS,
    KL,
    LEVEL,
    NORMS,
    SHARPNESS,
    curves,
    draw_against,
    measured,
    norm_stage,
    over_seeds,
    perturbation_stage,
    table_of,
    verdict_note,
)
from flatscope_papers.reasons import with_reasons

SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {
        "data": {"name": "flatscope_papers.smoke_data:digits_as_mnist", "train_size": 60, "test_size": 60},
        "train": {"lr": 0.2, "momentum": 0.9, "epochs": 60, "stop_loss": 5e-2, "evaluate_every": 5},
        "widths": (8, 32, 128),
        "seeds": 2,
        "perturbations": {"steps": 10, "draws": 4, "alphas": (0.01, 0.03, 0.1)},
    },
    "small": {
        "data": {"name": "mnist", "train_size": 2_000, "test_size": 5_000},
        "train": {"lr": 0.1, "momentum": 0.9, "epochs": 400, "stop_loss": 1e-3, "evaluate_every": 5},
        "widths": (8, 16, 32, 64, 128, 256, 512, 1024),
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

EARLIER = "fewer images are fitted by narrower networks, so norms turn earlier: with 10,000 images (one seed, all else "
REASONS = {
    "small": {
        "falls_l2_norm": f"{EARLIER}alike) it fell from 4,270 to 2,610",
        "falls_l1_path_norm": f"{EARLIER}alike) it fell from 9.5 to 6.5 million",
        "spectral_beyond_512": "2,000 images and 1,024 units are far from 60,000 and the paper's largest widths",
    }
}


def stages(scale: str) -> list[Stage]:
    """One unit per width: its seeds train as one stack; then norms, then perturbations."""
    size = SIZES[scale]
    units = [[_network(size, width, seed) for seed in range(size["seeds"])] for width in size["widths"]]
    return [Stage(units, gpus=0.25), norm_stage(units), perturbation_stage(units, size["perturbations"], 0.25)]


def _network(size: Mapping[str, Any], width: int, seed: int) -> dict[str, Any]:
    return {
        "data": {**size["data"], "standardize": False},
        "model": {"name": "two_layer", "options": {"hidden": width}, "seed": seed},
        "train": {**size["train"], "batch_size": 64, "seed": seed},
    }


def networks(runs: Runs) -> pd.DataFrame:
    """One row per network: width, seed, errors, measures."""
    return measured(runs, {"model.options.hidden": "hidden", "train.seed": "seed"})


def change(rows: pd.DataFrame, column: str, first: int, last: int) -> float:
    """log10 of a measure at the width `last` minus that at `first`, for one seed; NaN where a width is missing."""
    values = rows.set_index("hidden")[column]
    if first not in values.index or last not in values.index or first == last:
        return math.nan
    return float(np.log10(values[last]) - np.log10(values[first]))


class Move(NamedTuple):
    """What the paper says of a measure between two widths; without `last`, up to the largest."""

    statement: str
    reported: str
    holds: Range
    column: str
    first: int
    last: int | None = None
    where: str = "section 3, Figure 4 middle"

    def claim(self, key: str) -> Claim:
        """The same as a claim."""
        of = {KL: f" of the KL at expected sharpness {LEVEL:g} ({KL})"}.get(self.column, " of the norm over margin")
        of = " of the capacity" if self.column in CAPACITIES else of
        number = f"log10{of} at {self.last or 'the largest width'} minus at {self.first} units, mean over seeds"
        return Claim(key, self.where, self.statement, number, self.reported, holds=self.holds)


CAPACITIES = {f"{name}_capacity": f"{NORMS[name]} with widths" for name in ("l2_path_norm", "spectral_norm")}
RIGHT = "section 3, Figure 4 right"
MOVES: dict[str, Move] = {
    f"falls_{name}": Move(f"{label} over margin decreases up to 128 hidden units", "decreases", NEGATIVE, name, 32, 128)
    for name, label in NORMS.items()
}
MOVES |= {
    f"rises_{name}": Move(
        f"{NORMS[name]} over margin increases beyond 128 hidden units", "increases", POSITIVE, name, 128
    )
    for name in ("l2_norm", "l1_path_norm")
}
MOVES["l2_path_keeps_falling"] = Move(
    "ℓ2-path norm over margin goes on decreasing beyond 128 hidden units",
    "provides some explanation",
    NEGATIVE,
    "l2_path_norm",
    128,
)
MOVES |= {
    f"counted_{name.removesuffix('_capacity')}": Move(
        f"{label} counted, as its bound has it, cannot explain the test error that falls beyond 128 hidden units",
        "does not decrease",
        POSITIVE,
        name,
        128,
        where="section 3",
    )
    for name, label in CAPACITIES.items()
}
MOVES |= {
    "spectral_beyond_512": Move(
        "spectral norm over margin increases beyond 512 hidden units",
        "some increase",
        POSITIVE,
        "spectral_norm",
        512,
        where="section 3",
    ),
    "kl_falls": Move(
        "the joint PAC-Bayes measure (KL at a fixed expected sharpness) decreases up to 128 hidden units",
        "decreases",
        NEGATIVE,
        KL,
        32,
        128,
        RIGHT,
    ),
    "kl_fails": Move(
        "beyond 128 hidden units the joint PAC-Bayes measure (KL at a fixed expected sharpness) does not decrease",
        "fails to explain",
        (0.0, math.inf),
        KL,
        128,
        where=RIGHT,
    ),
}
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
        "two-layer networks with more hidden units than are needed to fit the data generalize better",
        "test error at 32 units minus that at the largest width, mean over seeds",
        "decreases",
        holds=POSITIVE,
    ),
    *(move.claim(key) for key, move in MOVES.items()),
)


@study(
    "neyshabur2017-fig4",
    figure="Figure 4",
    title="Width of a two-layer perceptron on MNIST",
    claims=CLAIMS,
    stages=stages,
    deviations={
        "small": (
            "2,000 of the 60,000 images, pixels in [0, 1]; widths up to 1,024; three seeds, which share their images",
            "learning rate 0.1 in place of 0.01, stop at a cross-entropy of 1e-3 in place of 1e-4, at most 400 epochs",
            "100 steps of ascent in place of 2,000 and 40 perturbed networks per noise level in place of 1,000",
        ),
        "paper": ("widths 8 to 4,096 and five seeds, which share their images: the paper states neither",),
    },
    paper_cost="50 two-layer networks on 60,000 images, up to 1,000 epochs where 8 and 16 units cannot fit them.",
)
def figure_4(runs: Runs) -> Analysis:
    """Errors, measures and bi-criteria curves of two-layer networks against their number of hidden units."""
    points = networks(runs)
    last = int(points["hidden"].max())
    found = {
        "fits": intervals.largest(points[points["hidden"] >= 32]["train_error"]),
        "test_error": over_seeds(points, lambda rows: _fall(rows, 32, last)),
    }
    for key, move in MOVES.items():
        until = move.last or last
        found[key] = over_seeds(
            points,
            lambda rows, c=(move.column, move.first, until): change(rows, *c),  # type: ignore[misc]
            _where_smallest(points, move.column) if until > move.first else f"no network is wider than {last} units",
        )
    told = with_reasons(found, CLAIMS, runs.scale, REASONS.get(runs.scale, {}))
    levels = curves(runs, points[["hidden", "seed"]])

    def draw(figure: Figure) -> None:
        *others, right = draw_against(figure, points, levels, "hidden", "hidden units")
        for axes in others:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        right.legend(title="hidden units", fontsize=6, title_fontsize=7, ncol=2)

    return Analysis(table_of(points, levels), told, draw, (CONVENTIONS, _fits(points), _verdicts(points)))


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
    labels = {**NORMS, SHARPNESS: "sharpness", KL: f"KL at expected sharpness {LEVEL:g}", **CAPACITIES}
    table = desiderata(
        by_width={label: fitted[name].tolist() for name, label in labels.items()},
        width_test_errors=fitted["test_error"].tolist(),
    )
    steps = sum(later < earlier for earlier, later in itertools.pairwise(fitted["test_error"]))
    return f"{verdict_note(table)}; of {len(fitted) - 1} steps in width from 32 on, {steps} lower the test error"
