"""The networks behind Figures 1 to 4, 6, 13 to 15 and 21 to 24 of Zhang et al. (2017), and how they are trained.

All are the five-layer all-convolutional network with c channels in every hidden layer, with ReLUs or with polynomials
of degree 10 in their place. The figures look at the same networks from different sides, so the same settings give the
same entry of the store: each is trained once.
"""

from __future__ import annotations

import functools
import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.inputs import Raw, load
from flatscope.training import all_conv, build
from flatscope_papers.declaration import Runs, Stage, importable_name
from flatscope_papers.smoke_data import ten_classes
from flatscope_papers.theory.polynomial import PolynomialActivation
from flatscope_papers.toml_files import settings_by_scale

POOL = 8_000
SIZES = settings_by_scale(__name__)


@functools.cache
def halved_cifar10() -> Raw:
    """8,000 training and 2,000 test images of CIFAR-10, each 2×2 block of pixels averaged: 3×16×16.

    Kept once read: unpacking all of CIFAR-10 takes longer than training a small network.
    """
    data = load("cifar10", train_size=POOL, test_size=2_000, standardize=False)
    assert data.test is not None
    (x, y), (test_x, test_y) = data.train, data.test
    halves = [functional.avg_pool2d(images, 2).numpy() for images in (x, test_x)]
    return ten_classes("halved_cifar10", (halves[0], y.numpy()), (halves[1], test_y.numpy()))


class ClippedPolynomial(nn.Module):
    """The polynomial nearest to ReLU on [−radius, radius], constant beyond: x/2 and even powers, by plain operations.

    `PolynomialActivation` in a form that a stack of networks can be traced through. Of an even degree.
    """

    def __init__(self, radius: float, degree: int) -> None:
        super().__init__()
        fitted = PolynomialActivation(-radius, radius, degree, dtype=torch.float64).powers.tolist()
        self.radius, self.degree = radius, degree
        self.slope, self.even = fitted[1], fitted[::2]

    def forward(self, x: Tensor) -> Tensor:
        """The polynomial of each entry."""
        t = functional.hardtanh(x, -self.radius, self.radius) * (1 / self.radius)
        square = t * t
        value = square * self.even[-1] + self.even[-2]
        for coefficient in reversed(self.even[:-2]):
            value = value * square + coefficient
        result: Tensor = value + t * self.slope
        return result

    def extra_repr(self) -> str:
        """Degree and interval."""
        return f"degree={self.degree}, radius={self.radius:g}"


def polynomial_all_conv(channels: int, side: int = 32, radius: float = 5.0, degree: int = 10) -> nn.Sequential:
    """`all_conv` with a clipped polynomial in the place of every ReLU.

    Args:
        channels: of each hidden layer.
        side: of the images.
        radius: the polynomial is fitted to ReLU on [−radius, radius] and constant beyond.
        degree: of the polynomial.
    """
    network = all_conv(channels, input_shape=(3, side, side))
    parts = OrderedDict(
        (name, ClippedPolynomial(radius, degree) if isinstance(part, nn.ReLU) else part)
        for name, part in network.named_children()
    )
    return nn.Sequential(parts)


RELU, POLYNOMIAL = "all_conv", importable_name(polynomial_all_conv)


def parameter_count_of_all_conv(scale: str, channels: int) -> int:
    """Parameters of the network with so many channels; 9,370 for the paper's 16."""
    side = SIZES[scale]["side"]
    network = build("all_conv", channels=channels, input_shape=(3, side, side))
    return sum(weight.numel() for weight in network.parameters())


def all_conv_config(
    scale: str,
    channels: int,
    n: int,
    seed: int,
    *,
    random: bool = False,
    polynomial: bool = False,
    train: str = "train",
) -> dict[str, Any]:
    """Configuration of one network."""
    size = SIZES[scale]
    options: dict[str, Any] = {"channels": channels}
    if polynomial:
        options["side"] = size["side"]
    chosen: dict[str, Any] = {
        "data": {**(size["fit_data"] if train.startswith("fit") else size["data"]), "train_size": n},
        "model": {"name": POLYNOMIAL if polynomial else RELU, "options": options, "seed": seed},
        "init": "kaiming_uniform",
        "train": {**training_settings(size.get(train, size["train"]), n, size["fall"]), "seed": seed},
    }
    if random:
        chosen["labels"] = {"random": 1.0, "seed": seed}
    return chosen


def training_settings(given: Mapping[str, Any], n: int, fall: float = 0.1) -> dict[str, Any]:
    """Settings of the training on n samples: so many steps, or so many epochs; the rate falls to a share of itself."""
    settings: dict[str, Any] = {"momentum": 0.9, "stop_zero_error": True}
    settings |= {key: value for key, value in given.items() if key not in ("steps", "looks")}
    if "steps" in given:
        epochs = given.get("epochs", round(given["steps"] / math.ceil(n / given["batch_size"])))
        settings |= {"epochs": epochs, "lr_decay": fall ** (1 / epochs)}
        settings |= {"evaluate_every": max(1, epochs // given["looks"])}
    return settings


def all_conv_stage(
    scale: str,
    networks: Sequence[tuple[int, int]],
    *,
    random: bool = False,
    polynomial: bool = False,
    train: str = "train",
) -> Stage:
    """Networks (channels, n) of every seed; those of one shape on the same images train together."""
    seeds = range(SIZES[scale]["seeds"])
    how: dict[str, Any] = {"random": random, "polynomial": polynomial}
    units = [
        [
            all_conv_config(scale, c, n, seed, **how, train=settings_until_fitted(scale, c, n, random, train))
            for seed in seeds
        ]
        for c, n in networks
    ]
    return Stage(units, gpus=0.25)


def settings_until_fitted(scale: str, channels: int, n: int, random: bool, train: str) -> str:
    """The settings of a network: longer ones where the usual ones left it unfitted and a claim says that it can be."""
    size = SIZES[scale]
    if random and n in size.get("fit_sizes", []):
        return "fit_train"
    return (
        "fit_wide"
        if train == "wide_train" and n == size["fixed_size"] and channels in size.get("fit_channels", [])
        else train
    )


def networks_at_end(runs: Runs) -> pd.DataFrame:
    """One row per network as it was at the end: channels, W, n, seed, epochs, errors and their difference."""
    frame = runs.frame().rename(
        columns={"model.options.channels": "channels", "data.train_size": "n", "train.seed": "seed"}
    )
    counts = {c: parameter_count_of_all_conv(runs.scale, c) for c in frame["channels"].unique()}
    frame["W"] = frame["channels"].map(counts)
    frame["gap"] = frame["test_error"] - frame["train_error"]
    return frame[["channels", "W", "n", "seed", "epochs", "train_error", "test_error", "gap", "diverged"]]


def networks_by_epoch(runs: Runs) -> pd.DataFrame:
    """One row per network and evaluated epoch: channels, W, n, seed, polynomial or not, epoch, errors."""
    parts = []
    for stored in runs.stored():
        history = stored.frame("history")[["epoch", "train_error", "test_error"]]
        settings = stored.config
        channels = settings["model"]["options"]["channels"]
        named = {
            "channels": channels,
            "W": parameter_count_of_all_conv(runs.scale, channels),
            "n": settings["data"]["train_size"],
        }
        named |= {"seed": settings["train"]["seed"], "polynomial": settings["model"]["name"] == POLYNOMIAL}
        parts.append(history.assign(**named))
    frame = pd.concat(parts, ignore_index=True)
    frame["gap"] = frame["test_error"] - frame["train_error"]
    return frame[[*named, "epoch", "train_error", "test_error", "gap"]]


def mean_per_seed(frame: pd.DataFrame, column: str) -> npt.NDArray[np.float64]:
    """Mean of a column over the rows of each seed, in the order of the seeds; empty if there are no rows."""
    values: npt.NDArray[np.float64] = frame.groupby("seed")[column].mean().to_numpy(np.float64)
    return values
