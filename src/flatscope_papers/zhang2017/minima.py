"""The minimisers that Figures 11, 12 and 20 and Table 1 of Zhang et al. (2017) look at, trained once for all of them.

The paper names neither the networks nor where training stopped. On MNIST a perceptron with 512 hidden units comes
closest to the radii of Table 1 among those tried; for CIFAR-10 nothing tried does. All networks stop at the same
training loss, since the loss at which training ends moves every radius.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pandas as pd

from flatscope.extend import coarse_products
from flatscope_papers.declaration import Runs
from flatscope_papers.toml_files import settings_by_scale

LABELS = ("natural", "random")
TITLES = {"mnist": "MNIST", "cifar": "CIFAR-10"}
COLOURS = {"natural": "#0072B2", "random": "#D55E00"}
STOP_LOSS = 0.01
EVALUATE_EVERY = 2  # epochs
SIZES = settings_by_scale(__name__)


def minimiser_config(scale: str, data: str, labels: str, seed: int) -> dict[str, Any]:
    """Configuration of one minimiser.

    Args:
        scale: of the study.
        data: "mnist" or "cifar".
        labels: "natural" or "random".
        seed: of starting weights and sample order; the images and the random labels are the same for all.
    """
    size = SIZES[scale]
    name, options = size["model"][data]
    # Pixels in [0, 1] on MNIST; CIFAR-10 standardised, which is nearest to the whitening of this group's other work.
    cut = {"standardize": False} if data == "mnist" else {"crop": 28}
    config: dict[str, Any] = {
        "data": {**size[data], "test_size": 0, **cut},
        "model": {"name": name, "options": options, "seed": seed},
        "train": {
            "lr": size["rate"][data],
            "momentum": 0.9,
            "batch_size": size["batch"],
            "epochs": size["epochs"][data],
            "stop_loss": STOP_LOSS,
            "evaluate_every": EVALUATE_EVERY,
            "seed": seed,
            **({"precision": size["precision"]} if "precision" in size else {}),
            **({"lr_decay": size["fall"][data]} if "fall" in size else {}),
        },
    }
    return config if labels == "natural" else {**config, "labels": {"random": 1.0, "seed": 0}}


def minimiser_configs(scale: str, data: str, labels: str, most: int | None = None) -> list[dict[str, Any]]:
    """Configurations of all minimisers of one kind, or of the first few."""
    count = SIZES[scale]["minima"]
    return [minimiser_config(scale, data, labels, seed) for seed in range(count if most is None else min(most, count))]


def training_errors_by_kind(runs: Runs) -> pd.DataFrame:
    """Training error of every minimiser of the first stage, indexed by its data and labels."""
    frame = runs.frame(0)
    data = ["mnist" if name.endswith("mnist") else "cifar" for name in frame["data.name"]]
    random = frame["labels.random"] if "labels.random" in frame else pd.Series(0.0, frame.index)
    labels = ["random" if share > 0 else "natural" for share in random.fillna(0.0)]
    return frame[["train_error"]].set_index(pd.MultiIndex.from_arrays([data, labels]))


def product_precision_of_config(config: Mapping[str, Any]) -> AbstractContextManager[None]:
    """Products on a GPU with ten binary digits inside the block where the configuration asks for that, else in full."""
    return coarse_products() if config.get("products") == "tf32" else nullcontext()
