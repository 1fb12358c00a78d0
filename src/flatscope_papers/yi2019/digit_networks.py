"""Networks behind section 5 of Yi et al. (2019): no biases, skeleton weights that begin at 1."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope import Problem
from flatscope.inputs import load
from flatscope.training import Store, build_model, builder_of, evaluate, read_trials, trial_of
from flatscope_papers.declaration import Config, Measured, each_trial

RULE = "cyclic"


def digit_network_config(samples: int, hidden: tuple[int, ...], start: float, seed: int, epochs: int) -> dict[str, Any]:
    """Configuration of a network 64-hidden-10, trained until the loss is below 0.05."""
    return {
        "data": {"name": "digits", "train_size": samples, "test_size": 360, "flatten": True},
        "model": {"name": "mlp", "options": {"widths": [64, *hidden, 10], "bias": False}, "seed": seed},
        "init": {"scheme": "uniform", "bound": start, "skeleton": 1.0},
        "train": {"lr": 0.02, "batch_size": 20, "epochs": epochs, "stop_loss": 0.05, "evaluate_every": 5, "seed": seed},
    }


@each_trial("training")
def train_above_a_floor(config: Config, store: Store) -> Measured:
    """Train networks whose weights keep their sign and stay at or above `floor` in absolute value.

    The smallest path value of an ordinary network is that of the weight which happens to be nearest to zero, so that
    the ratio of the largest to the smallest is little more than luck. A floor sets it.
    """
    data = load(**config["data"])
    assert data.test is not None
    builder = builder_of(config["model"]["name"])
    (trial,) = read_trials([trial_of(config, "0")], builder)
    model = build_model(builder, trial, data.train[0], data.n_classes)
    epochs = descend_above_floor(model, *data.train, config["train"], config["floor"])
    parts = {"train": evaluate(model, *data.train), "test": evaluate(model, *data.test)}
    metrics: dict[str, Any] = {f"{part}_loss": loss for part, (loss, _) in parts.items()}
    metrics |= {f"{part}_error": error for part, (_, error) in parts.items()} | {"epochs": epochs}
    return Measured(metrics, weights=dict(model.state_dict()))


def descend_above_floor(model: nn.Module, x: Tensor, y: Tensor, settings: Mapping[str, Any], floor: float) -> int:
    """SGD with every weight put back to its floor after every step; returns the epochs taken."""
    params = list(model.parameters())
    signs = [torch.where(p.detach() < 0, -1.0, 1.0) for p in params]
    generator = torch.Generator().manual_seed(settings["seed"])
    _lift_weights_to_floor(params, signs, floor)
    for epoch in range(1, settings["epochs"] + 1):
        for chosen in torch.split(torch.randperm(len(x), generator=generator), settings["batch_size"]):
            slopes = torch.autograd.grad(functional.cross_entropy(model(x[chosen]), y[chosen]), params)
            with torch.no_grad():
                for p, slope in zip(params, slopes, strict=True):
                    p.sub_(settings["lr"] * slope)
            _lift_weights_to_floor(params, signs, floor)
        if epoch % settings["evaluate_every"] == 0 and evaluate(model, x, y)[0] < settings["stop_loss"]:
            return epoch
    return int(settings["epochs"])


def _lift_weights_to_floor(params: list[nn.Parameter], signs: list[Tensor], floor: float) -> None:
    with torch.no_grad():
        for p, sign in zip(params, signs, strict=True):
            p.copy_(sign * (sign * p).clamp_min(floor))


def problem_in_float64(problem: Problem) -> Problem:
    """The same network on its training samples, in float64."""
    return Problem(problem.model, train=all_training_samples(problem), initial=problem.initial, dtype=torch.float64)


def all_training_samples(problem: Problem) -> tuple[Tensor, Tensor]:
    """All training samples."""
    x, y = next(iter(problem.batches(size=problem.n_train)))
    assert isinstance(x, Tensor)
    return x, y
