"""Table 2 of Zhang et al. (2017): four architectures on CIFAR-10 without any regulariser."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from flatscope.training.models import build
from flatscope_papers import intervals
from flatscope_papers.claims import POSITIVE, Claim, Estimate
from flatscope_papers.declaration import Analysis, Runs, Stage, study

# Name in the paper, parameters, test accuracy in per cent.
NETWORKS = {
    "mlp_1x512": ("MLP 1×512", 1_209_866, 50.51),
    "small_alexnet": ("Alexnet", 1_387_786, 76.07),
    "small_inception": ("Inception", 1_649_402, 85.75),
    "wide_resnet": ("Wide Resnet", 8_949_210, 88.21),
}
ORDER = list(NETWORKS)
SMALL: dict[str, Any] = {"momentum": 0.9, "lr": 0.01, "batch_size": 50, "epochs": 40, "evaluate_every": 5}
SIZES: Mapping[str, dict[str, Any]] = {
    "smoke": {
        "data": {
            "name": "flatscope_papers.smoke_data:digits_as_cifar10",
            "train_size": 20,
            "test_size": 20,
            "crop": 28,
        },
        "networks": ("mlp_1x512", "small_alexnet"),
        "train": {"lr": 0.01, "batch_size": 20, "epochs": 1},
        "seeds": 2,
    },
    "small": {
        "data": {"name": "cifar10", "train_size": 1_000, "test_size": 1_000, "crop": 28},
        "networks": ("mlp_1x512", "small_alexnet", "small_inception"),
        "train": {**SMALL, "stop_zero_error": True},
        "own": {"small_alexnet": {"epochs": 100}, "small_inception": {"epochs": 100}},
        "seeds": 3,
    },
    "paper": {
        "data": {"name": "cifar10", "crop": 28},
        "networks": ("mlp_1x512", "small_alexnet", "small_inception", "wide_resnet"),
        "train": {"momentum": 0.9, "lr_decay": 0.95, "batch_size": 128, "epochs": 100, "stop_zero_error": True},
        "own": {
            "mlp_1x512": {"lr": 0.01},
            "small_alexnet": {"lr": 0.01},
            "small_inception": {"lr": 0.1},
            "wide_resnet": {"lr": 0.1},
        },
        "seeds": 5,
    },
}
UNSTATED = "how the networks were trained is not stated: SGD of momentum 0.9, rate 0.01 (0.1 for Inception and Wide "
UNSTATED += "Resnet), times 0.95 per epoch"
DEVIATIONS = {
    "small": (
        "1,000 images, batches of 50, constant rate 0.01, three seeds, until no training error is left or at most 40 "
        "(MLP) and 100 epochs: the paper's test accuracies, from 50,000 images, are not to be expected and not judged, "
        "only their order; Wide Resnet costs too much on two cores, only its parameters are counted",
        UNSTATED,
    ),
    "paper": (UNSTATED, "images standardised per channel; at most 100 epochs; five seeds"),
}


def _claims() -> tuple[Claim, ...]:
    claims = []
    for name, (title, count, accuracy) in NETWORKS.items():
        claims += [
            Claim(
                f"parameters/{name}",
                "Table 2",
                f"{title} has {count:,} parameters",
                "trainable parameters of the network built here",
                f"{count:,}",
                holds=(count, count),
            ),
            Claim(
                f"training/{name}",
                "Table 2",
                f"{title} reaches a training accuracy of 100 %",
                "training accuracy in per cent, smallest over seeds",
                "100.0",
                holds=(99.95, 100.05),
                partly=(99.0, 101.0),
            ),
            Claim(
                f"test/{name}",
                "Table 2",
                f"{title} reaches a test accuracy of {accuracy} %",
                "test accuracy in per cent, mean over seeds",
                f"{accuracy}",
                holds=(accuracy - 2, accuracy + 2),
                partly=(accuracy - 5, accuracy + 5),
            ),
        ]
    for smaller, larger in itertools.pairwise(ORDER):
        first, second = NETWORKS[smaller], NETWORKS[larger]
        claims.append(
            Claim(
                f"better/{larger}",
                "Table 2",
                f"test performance improves from {first[0]} to {second[0]}, which is larger",
                "difference of the test accuracies in points",
                f"{second[2] - first[2]:.2f}",
                holds=POSITIVE,
            )
        )
    return tuple(claims)


def _stages(scale: str) -> list[Stage]:
    size = SIZES[scale]
    units = []
    for name in size["networks"]:
        own = size.get("own", {}).get(name, {})
        units.append(
            [
                {
                    "data": size["data"],
                    "model": {"name": name, "seed": seed},
                    "train": {**size["train"], **own, "seed": seed},
                }
                for seed in range(size["seeds"])
            ]
        )
    return [Stage(units)]


def counts() -> dict[str, int]:
    """Trainable parameters of the four networks as built here."""
    return {name: sum(p.numel() for p in build(name).parameters() if p.requires_grad) for name in NETWORKS}


def found(points: pd.DataFrame, built: Mapping[str, int], *, full: bool) -> dict[str, Estimate]:
    """Estimates of the claims.

    Args:
        points: columns network, seed, train_accuracy, test_accuracy.
        built: parameters of each network.
        full: whether the networks saw all training images, so that their accuracies are the paper's to compare.
    """
    estimates: dict[str, Estimate] = {}
    per_network = {name: points[points["network"] == name] for name in NETWORKS}
    for name, own in per_network.items():
        estimates[f"parameters/{name}"] = Estimate.exact(float(built[name]))
        if len(own) == 0:
            missing = Estimate(float("nan"), runs=0, note="too costly at this scale: not trained")
            estimates |= {f"training/{name}": missing, f"test/{name}": missing}
            continue
        estimates[f"training/{name}"] = intervals.smallest(own["train_accuracy"])
        test = intervals.mean(own["test_accuracy"])
        reason = f"{test.value:.1f} on a fiftieth of the images: not the paper's number"
        estimates[f"test/{name}"] = test if full else Estimate(float("nan"), runs=test.runs, note=reason)
    for smaller, larger in itertools.pairwise(ORDER):
        first, second = per_network[smaller], per_network[larger]
        note = "" if len(first) and len(second) else "too costly at this scale: not trained"
        estimates[f"better/{larger}"] = intervals.difference(second["test_accuracy"], first["test_accuracy"], note)
    return estimates


@study(
    "zhang2017-table2",
    figure="Table 2",
    title="Architectures of growing size on CIFAR-10 without regularisers",
    claims=_claims(),
    stages=_stages,
    deviations=DEVIATIONS,
    paper_cost="20 networks, of which five WRN-40-4 and five Inceptions at 100 epochs take nearly all of the time.",
)
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
    built = counts()
    points.insert(1, "parameters", points["network"].map(built))
    estimates = found(points, built, full=runs.scale == "paper")
    return Analysis(points, estimates, lambda figure: _draw(figure, points, built))


def _draw(figure: Figure, points: pd.DataFrame, built: Mapping[str, int]) -> None:
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
