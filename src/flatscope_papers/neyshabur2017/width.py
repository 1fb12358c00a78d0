"""Figure 4 of Neyshabur et al. (2017): two-layer perceptrons of growing width on MNIST."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope_papers import intervals
from flatscope_papers.claims import NEGATIVE, POSITIVE, Claim, Range
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.neyshabur2017 import complexity
from flatscope_papers.neyshabur2017.desiderata import desiderata
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)


def width_stages(scale: str) -> list[Stage]:
    """One unit per width: its seeds train as one stack; then norms, then perturbations."""
    size = SIZES[scale]
    units = [[_width_network_config(size, width, seed) for seed in range(size["seeds"])] for width in size["widths"]]
    return [
        Stage(units, gpus=0.25),
        complexity.norm_stage(units),
        complexity.perturbation_stage(units, size["perturbations"], 0.25),
    ]


def _width_network_config(size: Mapping[str, Any], width: int, seed: int) -> dict[str, Any]:
    return {
        "data": {**size["data"], "standardize": False},
        "model": {"name": "two_layer", "options": {"hidden": width}, "seed": seed},
        "train": {**size["train"], "batch_size": 64, "seed": seed},
    }


def width_networks_table(runs: Runs) -> pd.DataFrame:
    """One row per network: width, seed, errors, measures."""
    return complexity.measured_networks(runs, {"model.options.hidden": "hidden", "train.seed": "seed"})


def log10_change_between_widths(rows: pd.DataFrame, column: str, first: int, last: int) -> float:
    """log10 of a measure at the width `last` minus that at `first`, for one seed; NaN where a width is missing."""
    values = rows.set_index("hidden")[column]
    if first not in values.index or last not in values.index or first == last:
        return math.nan
    return float(np.log10(values[last]) - np.log10(values[first]))


class Move(NamedTuple):
    """Change of a measure between two widths that the paper states; without `last`, up to the largest."""

    statement: str
    reported: str
    holds: Range
    column: str
    first: int
    last: int | None = None
    where: str = "section 3, Figure 4 middle"

    def claim(self, key: str) -> Claim:
        """The same as a claim."""
        of = {complexity.KL: f" of the KL at expected sharpness {complexity.LEVEL:g} ({complexity.KL})"}.get(
            self.column, " of the norm over margin"
        )
        of = " of the capacity" if self.column in CAPACITIES else of
        number = f"log10{of} at {self.last or 'the largest width'} minus at {self.first} units, mean over seeds"
        return Claim(key, self.where, self.statement, number, self.reported, holds=self.holds)


CAPACITIES = {f"{name}_capacity": f"{complexity.NORMS[name]} with widths" for name in complexity.WITH_WIDTHS}
RIGHT = "section 3, Figure 4 right"
MOVES: dict[str, Move] = {
    f"falls_{name}": Move(f"{label} over margin decreases up to 128 hidden units", "decreases", NEGATIVE, name, 32, 128)
    for name, label in complexity.NORMS.items()
}
MOVES |= {
    f"rises_{name}": Move(
        f"{complexity.NORMS[name]} over margin increases beyond 128 hidden units", "increases", POSITIVE, name, 128
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
        complexity.KL,
        32,
        128,
        RIGHT,
    ),
    "kl_fails": Move(
        "beyond 128 hidden units the joint PAC-Bayes measure (KL at a fixed expected sharpness) does not decrease",
        "fails to explain",
        (0.0, math.inf),
        complexity.KL,
        128,
        where=RIGHT,
    ),
}


@study("neyshabur2017-fig4", stages=width_stages)
def figure_4(runs: Runs) -> Analysis:
    """Errors, measures and bi-criteria curves of two-layer networks against their number of hidden units."""
    points = width_networks_table(runs)
    last = int(points["hidden"].max())
    answers = {
        "fits": intervals.largest_over_networks(points[points["hidden"] >= 32]["train_error"]),
        "test_error": complexity.mean_over_seeds(points, lambda rows: _fall_between_widths(rows, 32, last)),
    }
    for key, move in MOVES.items():
        until = move.last or last
        answers[key] = complexity.mean_over_seeds(
            points,
            lambda rows, c=(move.column, move.first, until): log10_change_between_widths(rows, *c),  # type: ignore[misc]
            _width_of_smallest_value_in_words(points, move.column)
            if until > move.first
            else f"no network is wider than {last} units",
        )
    levels = complexity.bi_criteria_curves(runs, points[["hidden", "seed"]])

    def draw(figure: Figure) -> None:
        *others, right = complexity.draw_errors_measures_and_curves(figure, points, levels, "hidden", "hidden units")
        for axes in others:
            axes.set_xscale("log", base=2)
            axes.xaxis.set_major_formatter("{x:.0f}")
        right.legend(title="hidden units", fontsize=6, title_fontsize=7, ncol=2)

    return Analysis(
        complexity.networks_and_curves_table(points, levels),
        answers,
        draw,
        (complexity.CONVENTIONS, _fitting_widths_in_words(points), _width_demand_in_words(points)),
    )


def _fall_between_widths(rows: pd.DataFrame, first: int, last: int) -> float:
    errors = rows.set_index("hidden")["test_error"]
    return float(errors[first] - errors[last]) if first in errors.index and first != last else math.nan


def _width_of_smallest_value_in_words(points: pd.DataFrame, column: str) -> str:
    means = points.groupby("hidden")[column].mean().dropna()
    return f"smallest at {means.index[int(means.to_numpy().argmin())]} units" if len(means) else ""


def _fitting_widths_in_words(points: pd.DataFrame) -> str:
    means = points.groupby("hidden")[["train_error", "test_error"]].mean()
    errors = [f"{width}: {row.train_error:.4f} / {row.test_error:.4f}" for width, row in means.iterrows()]
    return f"Training / test error by width (means over seeds): {', '.join(errors)}"


def _width_demand_in_words(points: pd.DataFrame) -> str:
    """Demand (ii) over widths that fit the data, means over seeds."""
    fitted = points[points["hidden"] >= 32].groupby("hidden").mean().sort_index()
    labels = {
        **complexity.NORMS,
        complexity.SHARPNESS: "sharpness",
        complexity.KL: f"KL at expected sharpness {complexity.LEVEL:g}",
        **CAPACITIES,
    }
    table = desiderata(
        by_width={label: fitted[name].tolist() for name, label in labels.items()},
        width_test_errors=fitted["test_error"].tolist(),
    )
    steps = sum(later < earlier for earlier, later in itertools.pairwise(fitted["test_error"]))
    demands = complexity.desiderata_note(table)
    return f"{demands}; of {len(fitted) - 1} steps in width from 32 on, {steps} lower the test error"
