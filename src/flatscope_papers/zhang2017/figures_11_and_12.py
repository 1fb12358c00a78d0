"""Figures 11 and 12 of Zhang et al. (2017): training accuracy of mixtures of three minimisers.

The paper shows surfaces and calls those of natural labels flatter. Here the flat region around a minimum is the share
of the mixtures nearest to it that still classify nine tenths of the training images. The three corners of a triangle
share their mixtures, so that a triangle is one run: the mean over its corners, and no interval from a single one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope import interpolate
from flatscope.training import Store, stored_problem
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.fitting import answer_if_networks_fitted, notes_on_unfitted_networks
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.zhang2017.minima import (
    EVALUATE_EVERY,
    LABELS,
    TITLES,
    minimiser_configs,
    product_precision_of_config,
    training_errors_by_kind,
)
from flatscope_papers.zhang2017.minima import SIZES as MINIMA

SIZES = settings_by_scale(__name__)
FLAT = 0.9  # training accuracy
LAMBDAS = ["lambda1", "lambda2", "lambda3"]
CORNERS = ((0.0, 0.0), (1.0, 0.0), (0.5, 0.75**0.5))  # of the drawn triangle


@each_trial("mixing")
def mix(config: Config, store: Store) -> Measured:
    """Loss and accuracy over the mixtures of three stored networks; how far coarse products move the corners."""
    problems = [stored_problem(store, one, device=config.get("device")) for one in config["networks"]]
    # Networks of one study have the same images and labels; those of the first stand for all.
    networks, samples = [problem.model for problem in problems], problems[0].train
    with product_precision_of_config(config):
        mixtures = interpolate(networks, samples, config["resolution"])
    metrics = {"barrier": mixtures.barrier}
    if "products" in config:
        corners = interpolate(networks, samples, 1)
        metrics["coarse_loss"] = float((mixtures.loss[mixtures.vertices] - corners.loss[corners.vertices]).abs().max())
    return Measured(metrics, frames={"simplex": mixtures.to_frame()})


def _interpolation_stages(*sets: str) -> Callable[[str], list[Stage]]:
    def stages(scale: str) -> list[Stage]:
        chosen = [(data, labels) for data in sets for labels in LABELS]
        three = [
            [
                {
                    "study": "three points",
                    "set": data,
                    "kind": labels,
                    "networks": minimiser_configs(scale, data, labels)[first : first + 3],
                    **SIZES[scale],
                }
                for first in range(0, MINIMA[scale]["minima"] - 2, 3)
            ]
            for data, labels in chosen
        ]
        return [
            Stage([minimiser_configs(scale, data, labels) for data, labels in chosen], gpus=0.5),
            Stage(three, mix, 0.5),
        ]

    return stages


def plateau_shares_of_corners(simplex: pd.DataFrame, *, ties: bool = True) -> list[float]:
    """Of each corner: the share of the mixtures nearest to it whose training accuracy is at least 0.9.

    Args:
        simplex: one row per mixture.
        ties: mixtures that are as near to another corner count for both; otherwise for none.
    """
    weights, flat = simplex[LAMBDAS].to_numpy(), simplex["accuracy"].to_numpy() >= FLAT
    nearest = weights >= weights.max(axis=1, keepdims=True) - 1e-9
    if not ties:
        nearest &= nearest.sum(axis=1, keepdims=True) == 1
    return [float(flat[nearest[:, corner]].mean()) for corner in range(3)]


Surfaces = Mapping[tuple[str, str], Sequence[pd.DataFrame]]  # by data and labels: one for each triangle


def _accuracy_surfaces(runs: Runs) -> Surfaces:
    frames_by_panel: dict[tuple[str, str], list[pd.DataFrame]] = {}
    for stored in runs.stored():
        frames_by_panel.setdefault((stored.config["set"], stored.config["kind"]), []).append(stored.frame("simplex"))
    return frames_by_panel


def flat_regions_of_triangles(simplices: Sequence[pd.DataFrame]) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Of each triangle: the flat region around a minimum, mean over its three corners."""
    return np.array([np.mean(plateau_shares_of_corners(simplex)) for simplex in simplices])


def _flat_region_difference_answer(surfaces: Surfaces, data: str) -> Any:
    """By how much regions are larger with natural than with random labels, triangles of the same seeds compared."""
    natural, random = (flat_regions_of_triangles(surfaces[data, labels]) for labels in LABELS)
    return natural - random


def _draw_accuracy_surfaces(figure: Figure, surfaces: Sequence[pd.DataFrame], title: str) -> None:
    figure.set_size_inches(8.6, 4.0)
    figure.suptitle(title)
    for place, (labels, simplex) in enumerate(zip(LABELS, surfaces, strict=True), start=1):
        axes: Any = figure.add_subplot(1, 2, place, projection="3d")
        x, y = (simplex[LAMBDAS].to_numpy() @ np.array(CORNERS)).T
        drawn = axes.plot_trisurf(x, y, simplex["accuracy"], cmap="viridis", vmin=0, vmax=1, linewidth=0.1)
        axes.set_zlim(0, 1)
        axes.set_title(f"{labels} labels", fontsize=9)
        axes.set_box_aspect((4, 3.5, 3), zoom=1.2)
        axes.view_init(elev=25, azim=-75)
        axes.set_xticks([])
        axes.set_yticks([])
        for number, (u, v) in enumerate(CORNERS, start=1):
            axes.text(u, v, 1.08, f"$w_{number}$", fontsize=9, ha="center")
    figure.colorbar(drawn, ax=figure.axes, label="training accuracy", shrink=0.6)


def _plateau_table(surfaces: Surfaces, data: str) -> pd.DataFrame:
    parts = [
        simplex.assign(labels=labels, triangle=number)
        for labels in LABELS
        for number, simplex in enumerate(surfaces[data, labels])
    ]
    return pd.concat(parts, ignore_index=True)[["labels", "triangle", *LAMBDAS, "accuracy", "loss"]]


def _interpolation_notes(surfaces: Surfaces, data: str) -> tuple[str, ...]:
    centre = {}
    for labels in LABELS:
        simplex = surfaces[data, labels][0]
        middle = int(np.abs(simplex[LAMBDAS].to_numpy() - 1 / 3).sum(axis=1).argmin())
        centre[labels] = simplex["accuracy"].iloc[middle]
    strict = [
        np.mean([plateau_shares_of_corners(one, ties=False) for one in surfaces[data, labels]]) for labels in LABELS
    ]
    return (
        f"training accuracy in the middle: {centre['natural']:.2f} natural, {centre['random']:.2f} random labels",
        f"share with training accuracy of at least 0.9 without the mixtures that are as near to another minimum: "
        f"{strict[0]:.3f} natural, {strict[1]:.3f} random labels, {strict[0] - strict[1]:.3f} apart",
    )


@study("zhang2017-fig11", stages=_interpolation_stages("cifar"))
def figure_11(runs: Runs) -> Analysis:
    """Three networks per kind of labels, trained from different starts, and the training accuracy of their mixtures."""
    surfaces = _accuracy_surfaces(runs)
    return Analysis(
        _plateau_table(surfaces, "cifar"),
        {"wider": intervals.mean_over_runs(_flat_region_difference_answer(surfaces, "cifar"))},
        lambda figure: _draw_accuracy_surfaces(
            figure, [surfaces["cifar", labels][0] for labels in LABELS], TITLES["cifar"]
        ),
        _interpolation_notes(surfaces, "cifar"),
    )


@study("zhang2017-fig12", stages=_interpolation_stages("mnist", "cifar"))
def figure_12(runs: Runs) -> Analysis:
    """As Figure 11 on MNIST; the networks of Figure 11 are there to be compared with."""
    surfaces = _accuracy_surfaces(runs)
    answers = {
        "wider": intervals.mean_over_runs(_flat_region_difference_answer(surfaces, "mnist")),
        "regions": intervals.mean_over_runs(flat_regions_of_triangles(surfaces["mnist", "natural"]), bounds=(0, 1)),
        "wells": intervals.mean_over_runs(flat_regions_of_triangles(surfaces["mnist", "random"]), bounds=(0, 1)),
        "harder": slowdown_by_random_labels(epochs_to_fit(runs)),
        "clearer": intervals.difference_of_means(
            *(_flat_region_difference_answer(surfaces, data) for data in ("mnist", "cifar"))
        ),
    }
    left = notes_on_unfitted_networks(training_errors_by_kind(runs))
    if ("mnist", "random") in left:
        answers["harder"] = replace(
            answers["harder"], note=f"at least: {left['mnist', 'random']}; {answers['harder'].note}"
        )
    about = {"wider": ["mnist"], "regions": [], "wells": ["mnist"], "harder": [], "clearer": ["mnist", "cifar"]}
    judged = {
        key: answer_if_networks_fitted(answer, itertools.product(about[key], LABELS), left)
        for key, answer in answers.items()
    }
    return Analysis(
        _plateau_table(surfaces, "mnist"),
        judged,
        lambda figure: _draw_accuracy_surfaces(
            figure, [surfaces["mnist", labels][0] for labels in LABELS], TITLES["mnist"]
        ),
        _interpolation_notes(surfaces, "mnist"),
    )


def epochs_to_fit(runs: Runs) -> dict[tuple[str, str], list[float]]:
    """Epochs that each network took to the loss at which training stops, by data and labels."""
    epochs: dict[tuple[str, str], list[float]] = {}
    for stored in runs.stored(0):
        data = "mnist" if "standardize" in stored.config["data"] else "cifar"
        labels = "random" if stored.config.get("labels") else "natural"
        epochs.setdefault((data, labels), []).append(stored.metrics["epochs"])
    return epochs


def slowdown_by_random_labels(epochs: Mapping[tuple[str, str], Sequence[float]]) -> Answer:
    """By how much more random labels slow training down on MNIST than on CIFAR-10, in powers of ten, per seed."""
    logs = {cell: np.log10(took) for cell, took in epochs.items()}
    mnist, cifar = (logs[data, "random"] - logs[data, "natural"] for data in ("mnist", "cifar"))
    words = ", ".join(f"{TITLES[data]} {labels} {np.mean(took):.0f}" for (data, labels), took in epochs.items())
    counted = float(np.log10(1 + EVALUATE_EVERY / min(min(took) for took in epochs.values())))
    return intervals.mean_over_runs(mnist - cifar, f"mean epochs: {words}", resolution=counted)
