"""Equations (26), (32) and (33) of Yi et al. (2019), appendix: how far path values may move before a ReLU switches.

The certificate of the library, `psi_activation_radius`, takes the place of (32); its own tests search for flips in it.
"""

from __future__ import annotations

import math

import pandas as pd
import torch
from matplotlib.figure import Figure

from flatscope.training import Store
from flatscope_papers import intervals
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.activation_radius import (
    output_difference_bound,
    printed_activation_radius,
    units_flipped_within_radius,
)
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
SHARES = (0.1, 0.3, 0.98)


def printed_radius_stages(scale: str) -> list[Stage]:
    """Random networks."""
    size = SIZES[scale]
    configs = [{"study": "radius", "width": size["width"], "seed": seed} for seed in range(size["networks"])]
    return [Stage([configs], look_for_flips, 0)]


@each_trial("flips")
def look_for_flips(config: Config, store: Store) -> Measured:
    """The radius of one random network, and what changes of its path values of some share of it do."""
    generator = torch.Generator().manual_seed(config["seed"])
    d = config["width"]
    first, second, last, x = (torch.randn(n, d, generator=generator, dtype=torch.float64) for n in (d, d, 2, 8))
    second = second.fill_diagonal_(1.0)
    x = x / x.norm(dim=1, keepdim=True)
    radius, nearest = printed_activation_radius(first, second, x), float((x @ first.T).abs().min())
    metrics: dict[str, float] = {"radius": radius, "nearest": nearest}
    for share in SHARES:
        metrics[f"flips_{share:g}"] = sum(units_flipped_within_radius(first, second, x, share * radius))
    metrics["first_layer"] = units_flipped_within_radius(first, second, x, 0.98 * nearest)[0]
    weights = [first, second, last]
    ratios = []
    for _ in range(20):
        moved = [w * (1 + 1e-6 * torch.randn(w.shape, generator=generator, dtype=torch.float64)) for w in weights]
        apart = (_outputs_of_weights(moved, x) - _outputs_of_weights(weights, x)).norm(dim=1)
        ratios.append(float((apart / output_difference_bound(weights, moved, x).clamp_min(1e-300)).nan_to_num().max()))
    return Measured(metrics | {"ratio": max(ratios)})


def _outputs_of_weights(weights: list[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights[:-1]:
        x = (x @ weight.T).clamp_min(0)
    return x @ weights[-1].T


@study("yi2019-radius", stages=printed_radius_stages)
def radius_study(runs: Runs) -> Analysis:
    """Random networks of equal widths: does any change of the path values within the printed radius switch a ReLU?"""
    table = runs.frame().drop(columns=["study", "device", "key"])
    answers = {
        "radius": intervals.share_of_cases(
            table["flips_0.98"] == 0, "flips were searched for at 0.98 of the radius with η = 0"
        ),
        "first_layer": intervals.holds_every_time(table["first_layer"] == 0),
        "difference": intervals.largest_over_networks(table["ratio"]),
    }
    words = ", ".join(f"{(table[f'flips_{share:g}'] > 0).mean():.2f} at {share:g}" for share in SHARES)
    notes = (f"share of networks in which a ReLU switches within a share of the radius: {words}",)
    return Analysis(table, answers, lambda figure: _draw_printed_radius(figure, table), notes)


def _draw_printed_radius(figure: Figure, table: pd.DataFrame) -> None:
    axes = figure.subplots()
    axes.plot(SHARES, [(table[f"flips_{share:g}"] > 0).mean() for share in SHARES], "o-")
    axes.set_xlabel("length of the change of path values, as a share of the printed radius")
    axes.set_ylabel("networks in which a ReLU switches")
    axes.set_ylim(-0.02, max(0.1, math.ceil(10 * (table["flips_0.98"] > 0).mean() + 1) / 10))
