"""Table 2 of Zhang et al. (2017): four architectures on CIFAR-10 without any regulariser."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.training import build
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Runs, Stage, study
from flatscope_papers.toml_files import settings_by_scale

# Name in the paper, parameters, test accuracy in per cent.
NETWORKS = {
    "mlp_1x512": ("MLP 1×512", 1_209_866, 50.51),
    "small_alexnet": ("Alexnet", 1_387_786, 76.07),
    "small_inception": ("Inception", 1_649_402, 85.75),
    "wide_resnet": ("Wide Resnet", 8_949_210, 88.21),
}
ORDER = list(NETWORKS)
FULL = 99.95  # per cent that are 100.0 as printed
SIZES = settings_by_scale(__name__)


def _architecture_stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    units = []
    for name in size["networks"]:
        own_settings_of_network = size.get("own", {}).get(name, {})
        units.append(
            [
                {
                    "data": size["data"],
                    "model": {"name": name, "seed": seed},
                    "train": {**size["train"], **own_settings_of_network, "seed": seed},
                }
                for seed in range(size["seeds"])
            ]
        )
    return [Stage(units)]


def parameter_counts() -> dict[str, int]:
    """Trainable parameters of the four networks as built here."""
    return {name: sum(p.numel() for p in build(name).parameters() if p.requires_grad) for name in NETWORKS}


def architecture_answers(points: pd.DataFrame, built: Mapping[str, int], *, full: bool) -> dict[str, Answer]:
    """Estimates of the claims.

    Args:
        points: columns network, seed, train_accuracy, test_accuracy.
        built: parameters of each network.
        full: whether the networks saw all training images, so that their accuracies are the paper's to compare.
    """
    answers: dict[str, Answer] = {}
    per_network = {name: points[points["network"] == name] for name in NETWORKS}
    for name, networks in per_network.items():
        answers[f"parameters/{name}"] = Answer.exact(float(built[name]))
        if len(networks) == 0:
            missing = Answer(float("nan"), runs=0, note="too costly at this scale: not trained")
            answers |= {f"training/{name}": missing, f"test/{name}": missing}
            continue
        training, test = (
            intervals.smallest_over_networks(networks["train_accuracy"]),
            intervals.mean_over_runs(networks["test_accuracy"]),
        )
        for what, seen in (("training", training), ("test", test)):
            reason = f"{seen.value:.1f} on a fiftieth of the images, which any of these networks fits: not the number"
            answers[f"{what}/{name}"] = (
                _answer_if_fitted(seen, what) if full else Answer(float("nan"), runs=seen.runs, note=reason)
            )
    for smaller, larger in itertools.pairwise(ORDER):
        first, second = per_network[smaller], per_network[larger]
        note = "" if len(first) and len(second) else "too costly at this scale: not trained"
        answers[f"better/{larger}"] = intervals.difference_of_means(
            second["test_accuracy"], first["test_accuracy"], note
        )
    return answers


def _answer_if_fitted(seen: Answer, what: str) -> Answer:
    """The answer; of training no number where it ended before a network fitted."""
    if what == "test" or seen.value >= FULL:
        return seen
    words = f"not all networks were trained until they fit: {seen.value:.2f} % at least"
    return Answer(float("nan"), runs=seen.runs, note=words)


@study("zhang2017-table2", stages=_architecture_stages)
def table_2(runs: Runs) -> Analysis:
    """Each architecture trained on CIFAR-10 cropped to 28×28 until no training error is left; accuracies at the end."""
    frame = runs.frame()
    points = pd.DataFrame(
        {
            "network": frame["model.name"],
            "seed": frame["train.seed"],
            "epochs": frame["epochs"],
            "train_accuracy": 100 * (1 - frame["train_error"]),
            "test_accuracy": 100 * (1 - frame["test_error"]),
        }
    )
    built = parameter_counts()
    points.insert(1, "parameters", points["network"].map(built))
    answers = architecture_answers(points, built, full=runs.scale == "paper")
    return Analysis(points, answers, lambda figure: _draw_architectures(figure, points, built))


def _draw_architectures(figure: Figure, points: pd.DataFrame, built: Mapping[str, int]) -> None:
    axes: Any = figure.subplots()
    places = np.arange(len(NETWORKS))
    for shift, column, colour, words in (
        (-0.2, "train_accuracy", "#0072b2", "training"),
        (0.2, "test_accuracy", "#d55e00", "test"),
    ):
        grouped = points.groupby("network")[column]
        means, spread = grouped.mean(), grouped.std().fillna(0)
        at = np.array([ORDER.index(name) for name in means.index])
        axes.bar(at + shift, means, 0.36, yerr=spread, color=colour, capsize=3, label=words)
    reported = [accuracy for _, _, accuracy in NETWORKS.values()]
    axes.scatter(places + 0.2, reported, marker="D", color="black", s=18, zorder=3, label="test, in the paper")
    for place, name in enumerate(ORDER):
        if name not in set(points["network"]):
            axes.text(place, 2, "not trained\nat this scale", ha="center", fontsize=8)
    labels = [f"{title}\n{built[name]:,}" for name, (title, _, _) in NETWORKS.items()]
    axes.set_xticks(places, labels)
    axes.set(ylabel="accuracy (%)", xlabel="architecture and number of parameters")
    figure.legend(loc="outside upper center", ncols=3)
