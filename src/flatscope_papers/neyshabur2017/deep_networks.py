"""What Figures 5 to 8 of Neyshabur et al. (2017) show: conditions C1 to C3 at the start and at the end of training.

A network has ten hidden layers, ReLU and no biases, as the theorem has it; pixels lie in [0, 1].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
import torch

from flatscope import Context
from flatscope.measures.interactions import (
    ReluChain,
    all_triples,
    condition_c3,
    interaction_ratios,
    largest_slope_of_distribution,
    relu_chain,
)
from flatscope.training import Store, stored_problem
from flatscope_papers.declaration import Config, Measured, Runs, Stage, each_trial
from flatscope_papers.toml_files import settings_by_scale

WEIGHTS = {"initial": "random initialization", "learned": "learned weights"}
HIDDEN_LAYERS = 10
FLOOR = 0.1  # smallest δ of C2 in units of a layer's rms: at 0 the single smallest pre-activation decides
DELTAS = np.round(np.concatenate([np.linspace(0, 0.1, 21), np.linspace(0.12, 1.5, 70)]), 6)
SHARES = ("share", "relative_share")  # of units within δ of switching; within δ times the rms of their layer
PANELS = {"all": "all a ≤ c ≤ b − 1", "inner": "a < c < b − 1", "edge": "c = a or c = b − 1"}
SIZES = settings_by_scale(__name__)
CONVENTIONS = (
    "Loss: cross-entropy in training; the conditions use none. Margin ε: not used. Pooling: none. Biases: none. h_i: "
    "units of a layer, 10 for the last. BatchNorm: none to fold. C1 runs over a ≤ c < b with the image as W_0 and no "
    "ReLU behind the last layer. C2 counts |pre-activations| at most δ: without the absolute value all inactive units "
    "do. C3 of the figure is a row norm over the mean row norm; that of the condition divides by ‖D_iW_i‖_F/√h_i."
)


def deep_network_stages(scale: str) -> list[Stage]:
    """Train all seeds as one stack; then the conditions before and after training."""
    size = SIZES[scale]
    networks = [_deep_network_config(size, seed) for seed in range(size["seeds"])]
    asked = [[{"network": net, "weights": which, "samples": size["samples"]} for which in WEIGHTS] for net in networks]
    return [Stage([networks]), Stage(asked, conditions)]


def _deep_network_config(size: Mapping[str, Any], seed: int) -> dict[str, Any]:
    widths = [784, *[size["width"]] * HIDDEN_LAYERS, 10]
    train = {"lr": 0.01, "momentum": 0.9, "batch_size": 64, "epochs": size["epochs"], "stop_loss": size["stop_loss"]}
    return {
        "data": {**size["data"], "standardize": False},
        "model": {"name": "mlp", "options": {"widths": widths, "bias": False}, "seed": seed},
        "init": "kaiming_uniform",
        "train": {**train, "seed": seed},
    }


@each_trial("conditions")
def conditions(config: Config, store: Store) -> Measured:
    """The three conditions of a stored network, at its starting or its learned weights, and their distributions."""
    problem = stored_problem(store, config["network"], device=config.get("device"))
    ctx = Context(problem)
    if config["weights"] == "initial":
        ctx = ctx.at(problem.initial or {})
    samples = config["samples"]
    products = _inverse_mu_by_sample_and_triple(ctx, samples["products"])
    chain = ctx.cached(relu_chain, samples=samples["signals"])
    metrics = {**_largest_inverse_mu(products), **_switching_constants(chain)}
    for reading in ("condition", "figure"):
        c3 = condition_c3(ctx, reading=reading, samples=samples["signals"])
        metrics[f"c3_{reading}"] = float(c3[""].value)
    outputs = chain.signals[-1].cpu().numpy()
    metrics["output_rms"] = float(np.sqrt((outputs**2).mean()))
    frames = {
        "products": products,
        "switching": _near_switching_curves(chain),
        "rows": _relative_row_norms(chain),
        "outputs": pd.DataFrame({"output": outputs.ravel()}),
    }
    return Measured(metrics, frames=frames)


def _inverse_mu_by_sample_and_triple(ctx: Context, samples: int) -> pd.DataFrame:
    """1/μ of every sample and triple (a, c, b); infinite where a product of layers is zero."""
    ratios = ctx.cached(interaction_ratios, samples=samples).cpu().numpy()  # (samples, triples)
    chain = ctx.cached(relu_chain, samples=samples)
    triples = np.array(all_triples(chain.depth))
    with np.errstate(divide="ignore"):
        inverse = 1 / ratios.ravel()
    a, c, b = np.tile(triples, (len(ratios), 1)).T
    edge = (c == a) | (c == b - 1)
    return pd.DataFrame(
        {"sample": np.repeat(np.arange(len(ratios)), len(triples)), "edge": edge, "inverse_mu": inverse}
    )


def triples_of_panel(products: pd.DataFrame, panel: str) -> pd.DataFrame:
    """The triples of one column of Figure 6."""
    return products if panel == "all" else products[products["edge"] == (panel == "edge")]


def _largest_inverse_mu(products: pd.DataFrame) -> dict[str, float]:
    numbers: dict[str, float] = {}
    for panel in PANELS:
        values = triples_of_panel(products, panel)["inverse_mu"]
        alive = values[np.isfinite(values)]
        numbers |= {f"inverse_mu_max/{panel}": float(alive.max()), f"inverse_mu_median/{panel}": float(alive.median())}
    numbers["mu"] = 1 / numbers["inverse_mu_max/all"]
    numbers["dead_products"] = float(np.isinf(products["inverse_mu"]).sum())
    return numbers


def _switching_constants(chain: ReluChain) -> dict[str, float]:
    """C2 of each sample, worst hidden layer: for any δ or none too small, with pixels as they are or ‖x‖ = 1."""
    lengths = chain.inputs.norm(dim=1)
    constants = {}
    for name, floor in (("any", 0.0), ("floor", FLOOR)):
        worst = torch.zeros_like(lengths)
        for signal in chain.signals[:-1]:
            scale = signal.square().mean(1).sqrt()
            value = largest_slope_of_distribution(signal.abs() / scale[:, None], floor) / scale
            worst = torch.maximum(worst, value.nan_to_num(nan=math.inf, posinf=math.inf))  # a layer that is all zero
        for unit, values in (("pixels", worst), ("unit", worst * lengths)):
            constants[f"c2_{name}_{unit}/max"] = float(values.max())
            constants[f"c2_{name}_{unit}/median"] = float(values.median())
            constants[f"c2_{name}_{unit}/share_up_to_5"] = float((values <= 5).double().mean())
    return constants


def _near_switching_curves(chain: ReluChain) -> pd.DataFrame:
    """Per hidden layer the share of units with a pre-activation of size at most δ, mean over samples.

    With δ as it is, and in units of the root mean square of the layer's pre-activations on that sample.
    """
    parts = []
    for name, signal in zip(chain.names[:-1], chain.signals[:-1], strict=True):
        sizes = signal.abs(), signal.abs() / signal.square().mean(1, keepdim=True).sqrt()
        ordered = [np.sort(size.cpu().numpy().ravel()) for size in sizes]
        shares = [np.searchsorted(part, DELTAS, side="right") / len(part) for part in ordered]
        parts.append(pd.DataFrame({"layer": name, "delta": DELTAS, **dict(zip(SHARES, shares, strict=True))}))
    return pd.concat(parts, ignore_index=True)


def _relative_row_norms(chain: ReluChain) -> pd.DataFrame:
    """Norm of the incoming weights of each unit over the mean of its layer."""
    parts = []
    for name, weight in zip(chain.names, chain.weights, strict=True):
        norms = weight.norm(dim=1).cpu().numpy()
        parts.append(pd.DataFrame({"layer": name, "ratio": norms / norms.mean()}))
    return pd.concat(parts, ignore_index=True)


def deep_networks_table(runs: Runs) -> pd.DataFrame:
    """One row per network and kind of weights: seed and all metrics."""
    measured, trained = runs.frame(1), runs.frame(0).set_index("train.seed")
    settings = [name for name in measured.columns if name.startswith(("network.", "samples."))]
    points = measured.drop(columns=[*settings, "key", "device"], errors="ignore")
    points.insert(0, "seed", measured["network.train.seed"])
    for name in ("train_loss", "train_error", "test_error"):
        points[name] = [
            trained[name][seed] if which == "learned" else math.nan
            for seed, which in zip(points["seed"], points["weights"], strict=True)
        ]
    return points


def frames_by_kind_of_weights(runs: Runs, name: str) -> dict[str, pd.DataFrame]:
    """A frame of all networks together, by kind of weights, with a column `seed`."""
    parts: dict[str, list[pd.DataFrame]] = {which: [] for which in WEIGHTS}
    for stored in runs.stored(1):
        frame = stored.frame(name).assign(seed=stored.config["network"]["train"]["seed"])
        parts[stored.config["weights"]].append(frame)
    return {which: pd.concat(frames, ignore_index=True) for which, frames in parts.items()}


def histogram_table(values: Any, over: Any = None, bins: int = 40, **settings: Any) -> pd.DataFrame:
    """Shares of the finite values by bin, as rows of a table; bins over the range of `over`, or of the values."""
    finite, given = (np.asarray(part, float) for part in (values, values if over is None else over))
    finite, given = finite[np.isfinite(finite)], given[np.isfinite(given)]
    counts, edges = np.histogram(finite, np.linspace(given.min(), given.max(), bins + 1))
    share = counts / max(1, len(finite))
    return pd.DataFrame({**settings, "low": edges[:-1], "high": edges[1:], "share": share})


def training_note(points: pd.DataFrame) -> str:
    """Note on how the networks were trained."""
    learned = points[points["weights"] == "learned"]
    return (
        f"{len(learned)} networks, training cross-entropy {learned['train_loss'].max():.2g} or less, test error "
        f"{learned['test_error'].mean():.3f} (mean); products of layers that are zero: "
        f"{int(points['dead_products'].sum())}"
    )
