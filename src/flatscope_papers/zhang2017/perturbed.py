"""Figures 19 and 20 of Zhang et al. (2017): training images with Gaussian noise, and networks that see them."""

from __future__ import annotations

import json
import math
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure

from flatscope.inputs import load
from flatscope.training import Store, measure_stored
from flatscope_papers import curves, intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.toml_files import settings_by_scale
from flatscope_papers.zhang2017.minima import COLOURS, LABELS, SIZES, TITLES, minimiser_configs

SHOWN = (0.0, 0.1, 0.2, 0.5, 1.0, 2.0)
GAMMAS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.75, 1.0, 1.5, 2.0, 3.0, 5.0)
ZOOM = 1.0
NETWORKS = 5  # of each kind of labels, where there are as many
IMAGES = settings_by_scale(__name__)


@each_trial("perturbing")
def perturb(config: Config, store: Store) -> Measured:
    """Add Gaussian noise to training images; store by how much they changed, and the first of them as it looks."""
    data = load(**config["data"])
    generator = torch.Generator().manual_seed(0)
    mean, std = (torch.tensor(moments).reshape(-1, 1, 1) for moments in (data.mean, data.std))
    sizes: list[dict[str, float]] = []
    pixels: dict[str, Any] = {}
    for image in data.train[0]:
        for gamma in config["gammas"]:
            changed = image + gamma * torch.randn(image.shape, generator=generator)
            sizes.append({"gamma": gamma, "change": float((changed - image).square().mean().sqrt())})
            if len(pixels) < len(config["gammas"]):
                pixels[f"{gamma:g}"] = (changed * std + mean).clamp(0, 1).flatten().numpy()
    metrics = {"images": len(data.train[0]), "shape": list(data.train[0].shape[1:])}
    return Measured(metrics, frames={"sizes": pd.DataFrame(sizes), "pixels": pd.DataFrame(pixels)})


def _figure_19_stages(scale: str) -> list[Stage]:
    data = {**SIZES[scale]["cifar"], "train_size": IMAGES[scale]["images"], "test_size": 0}
    return [Stage([[{"study": "perturbed images", "data": data, "gammas": list(SHOWN)}]], perturb, 0)]


@study("zhang2017-fig19", stages=_figure_19_stages)
def figure_19(runs: Runs) -> Analysis:
    """One training image at six sizes of Gaussian noise; nothing is trained."""
    (stored,) = runs.stored()
    sizes = stored.frame("sizes")
    some = sizes[sizes["gamma"] > 0]
    answers = {"size": intervals.mean_over_runs(some["change"] / some["gamma"])}

    def draw(figure: Figure) -> None:
        figure.set_size_inches(9.0, 1.9)
        pixels, shape = stored.frame("pixels"), stored.metrics["shape"]
        panels: Any = figure.subplots(1, len(pixels.columns))
        for axes, gamma in zip(np.ravel(panels), pixels.columns, strict=True):
            axes.imshow(pixels[gamma].to_numpy().reshape(shape).transpose(1, 2, 0))
            axes.set_title(f"γ = {gamma}", fontsize=9)
            axes.set_axis_off()

    return Analysis(sizes, answers, draw)


def _figure_20_stages(scale: str) -> list[Stage]:
    networks = [minimiser_configs(scale, "cifar", labels, NETWORKS) for labels in LABELS]
    options = {"gammas": list(GAMMAS), "draws": 2}
    looks = [
        [
            {
                "kind": labels,
                "network": one,
                "measures": ["perturbation_robustness"],
                "measure_options": {"perturbation_robustness": options},
            }
            for one in group
        ]
        for labels, group in zip(LABELS, networks, strict=True)
    ]
    return [Stage(networks, gpus=0.5), Stage(looks, measure_stored, 0.5)]


def input_noise_answers(errors: pd.DataFrame) -> dict[str, Answer]:
    """The claims' numbers from one row per network and size of noise."""
    start = errors[errors["gamma"] == 0]["error"]
    some = errors[errors["gamma"] > 0]
    wide, near = (part.groupby(["labels", "network"])["error"].mean() for part in (some, some[some["gamma"] <= ZOOM]))
    return {
        "fitted": _largest_error_without_noise(start),
        "worse": intervals.difference_of_means(wide["random"], wide["natural"]),
        "worse-near": intervals.difference_of_means(near["random"], near["natural"]),
        "random-low": intervals.mean_over_runs(near["random"], bounds=(0, 1)),
    }


def _largest_error_without_noise(errors: pd.Series[float]) -> Answer:
    """The largest error without noise; no number where a network does not fit perfectly, which the claim is about."""
    if errors.max() == 0:
        return intervals.largest_over_networks(errors)
    words = f"{int((errors > 0).sum())} of {len(errors)} networks do not fit perfectly: errors up to {errors.max():.4f}"
    return Answer(math.nan, runs=len(errors), note=words)


@study("zhang2017-fig20", stages=_figure_20_stages)
def figure_20(runs: Runs) -> Analysis:
    """The networks of Figure 11 on their own training images with Gaussian noise of growing size."""
    parts = []
    for stored in runs.stored():
        table = stored.frame("table")
        gammas = [json.loads(text)["gamma"] for text in table["options"]]
        seed = stored.config["network"]["model"]["seed"]
        parts.append(
            pd.DataFrame(
                {"labels": stored.config["kind"], "network": seed, "gamma": gammas, "error": table["value"].to_numpy()}
            )
        )
    errors = pd.concat(parts, ignore_index=True)
    return Analysis(errors, input_noise_answers(errors), lambda figure: _draw_errors_by_noise(figure, errors))


def _draw_errors_by_noise(figure: Figure, errors: pd.DataFrame) -> None:
    figure.set_size_inches(8.6, 3.4)
    figure.suptitle(f"{TITLES['cifar']}, networks on their own training images", fontsize=9)
    panels: Any = figure.subplots(1, 2)
    for axes, most in zip(panels, (max(GAMMAS), ZOOM), strict=True):
        for labels, style in (("natural", "o-"), ("random", "s--")):
            part = errors[(errors["gamma"] <= most) & (errors["labels"] == labels)]
            how = {"fmt": style, "ms": 4, "label": f"{labels} labels"}
            drawn = curves.runs_as_columns(part, "gamma", "error", run="network")
            curves.draw_error_bars(axes, drawn, COLOURS[labels], deviations=True, **how)
        axes.set_xlabel("size of the perturbation γ")
        axes.set_ylabel("error on perturbed images")
    panels[0].legend(fontsize=8)
