"""Section 4 and appendix B of Neyshabur et al. (2017): Theorem 1, its lemmas, and sharpness under rescaling."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor

from flatscope import Context, Problem, measure, rescale
from flatscope.generalization_bounds.pac_bayes import (
    TheoremConstants,
    flip_constant,
    simplified_theorem_1_bound,
    theorem_1_bound,
)
from flatscope.measures.interactions import ReluChain, relu_chain
from flatscope.training import Store, stored_problem, train_and_measure
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.sharpness_lemmas import output_change_under_noise
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
SHARES = (0.01, 0.1, 0.5)  # of a layer's root mean square weight: the noise on it
DEPTHS = (4, 8, 16, 32, 64)
FACTOR = 100.0
SAMPLES = 100
DELTA = 0.05


def noisy_network_stages(scale: str) -> list[Stage]:
    """Trained networks without biases, then what noise does to each."""
    size = SIZES[scale]
    units = [[_noisy_network_config(size, depth, seed) for seed in range(size["seeds"])] for depth in size["depths"]]
    looks = [
        [{"study": "noise", "network": network, "draws": size["draws"], "steps": size["steps"]}]
        for unit in units
        for network in unit
    ]
    return [Stage(units, train_and_measure), Stage(looks, look_at_noise, 0)]


def _noisy_network_config(size: Mapping[str, Any], depth: int, seed: int) -> dict[str, Any]:
    widths = [64, *[size["width"]] * (depth - 1), 10]
    return {
        "data": {"name": "digits", "train_size": size["samples"], "test_size": 360, "flatten": True},
        "model": {"name": "mlp", "options": {"widths": widths, "bias": False}, "seed": seed},
        "init": "kaiming_uniform",
        "train": {"lr": 0.02, "batch_size": 20, "epochs": size["epochs"], "stop_loss": 0.01, "seed": seed},
    }


@each_trial("noise")
def look_at_noise(config: Config, store: Store) -> Measured:
    """Theorem 1, (7), Lemma 2, and what rescaling and shuffled units do, on one trained network."""
    problem = stored_problem(store, config["network"])
    chain = relu_chain(Context(problem), samples=SAMPLES)
    generator = torch.Generator().manual_seed(config["network"]["train"]["seed"])
    constants = theorem_constants(problem, chain)
    n, depth = problem.n_train, chain.depth
    flips = [flip_constant(width, DELTA / depth) for width in chain.widths[1:]]
    rows = []
    for share in SHARES:
        sigmas = [share * float(weight.square().mean().sqrt()) for weight in chain.weights]
        draws = [weight_noise(chain, sigmas, generator) for _ in range(config["draws"])]
        parts = [output_change_under_noise(chain, noise) for noise in draws]
        rows.append(
            {
                "share": share,
                "rise": float(np.mean([_test_loss_rise_under_noise(problem, chain, noise) for noise in draws])),
                "bound": theorem_1_bound(constants, sigmas, flips, n, DELTA),
                "split": max(float((one.moved / (one.fixed + one.error)).nan_to_num().max()) for one in parts),
            }
        )
    first_only = [weight_noise(chain, [sigmas[0], *[0.0] * (depth - 1)], generator) for _ in range(config["draws"])]
    twin = rescale(problem.model, chain.inputs[:2].to(problem.dtype), factors={chain.names[0]: FACTOR})
    steps = {"sharpness": {"steps": config["steps"]}}
    sharp = [
        measure(Problem(model, train=problem.train), ["sharpness"], options=steps)["sharpness"]
        for model in (problem.model, twin)
    ]
    metrics = {
        "depth": depth,
        "switched": float(
            np.mean(
                [float(output_change_under_noise(chain, noise).switched[1].double().mean()) for noise in first_only]
            )
        ),
        "sharpness_ratio": sharp[1] / sharp[0],
        "shuffled_ratio": relative_output_change_by_noise(chain_with_shuffled_units(chain, generator), generator)
        / relative_output_change_by_noise(chain, generator),
    }
    return Measured(metrics, frames={"noise": pd.DataFrame(rows)})


def theorem_constants(problem: Problem, chain: ReluChain) -> TheoremConstants:
    """Constants of Theorem 1 for the cross-entropy, which is √2-Lipschitz."""
    names = ["condition_c1_mu", "condition_c2", "condition_c3"]
    table = measure(problem, names, options={name: {"samples": SAMPLES} for name in names})
    norms = tuple(float(weight.norm()) for weight in chain.weights)
    outputs = float(chain.signals[-1].norm(dim=1).mean())
    mu, c2, c3 = (table[name] for name in names)
    return TheoremConstants(chain.widths, norms, mu, c2, c3, outputs, math.sqrt(2))


def weight_noise(chain: ReluChain, sigmas: list[float], generator: torch.Generator) -> list[Tensor]:
    """Independent normal noise on every weight of a layer."""
    return [
        sigma * torch.randn(weight.shape, generator=generator, dtype=torch.float64)
        for weight, sigma in zip(chain.weights, sigmas, strict=True)
    ]


def _test_loss_rise_under_noise(problem: Problem, chain: ReluChain, noise: list[Tensor]) -> float:
    """Test loss with the noise minus training loss without it."""
    assert problem.test is not None
    losses = []
    for part, own in (("test", noise), ("train", [torch.zeros_like(one) for one in noise])):
        x, y = next(iter(problem.batches(part, size=10_000)))
        assert isinstance(x, Tensor)
        signal = x.flatten(1).double()
        for level, (weight, change) in enumerate(zip(chain.weights, own, strict=True), start=1):
            signal = signal @ (weight + change).T
            signal = signal.clamp_min(0) if level < chain.depth else signal
        losses.append(float(torch.nn.functional.cross_entropy(signal, y)))
    return losses[0] - losses[1]


def chain_with_shuffled_units(chain: ReluChain, generator: torch.Generator) -> ReluChain:
    """The same norms of every layer, but no unit reads the one below that it was trained with."""
    weights = [chain.weights[0]]
    weights += [weight[:, torch.randperm(weight.shape[1], generator=generator)] for weight in chain.weights[1:]]
    signals: list[Tensor] = []
    for weight in weights:
        signals.append((signals[-1].clamp_min(0) if signals else chain.inputs) @ weight.T)
    return replace(chain, weights=tuple(weights), signals=tuple(signals))


def relative_output_change_by_noise(
    chain: ReluChain, generator: torch.Generator, share: float = 0.1, draws: int = 20
) -> float:
    """Change of the outputs by noise, as a share of their size: sharpness without the scale of the outputs."""
    sigmas = [share * float(weight.square().mean().sqrt()) for weight in chain.weights]
    moved = [
        float(output_change_under_noise(chain, weight_noise(chain, sigmas, generator)).moved.mean())
        for _ in range(draws)
    ]
    return float(np.mean(moved)) / float(chain.signals[-1].norm(dim=1).mean())


@study("neyshabur2017-theorem1", stages=noisy_network_stages)
def theorem_study(runs: Runs) -> Analysis:
    """Noise on the weights of small trained networks: the theorem, the two terms of (7), Lemma 2, and two claims."""
    table = runs.frame()[["depth", "switched", "sharpness_ratio", "shuffled_ratio"]]
    noise = pd.concat([frame.assign(network=i) for i, frame in enumerate(runs.frames("noise"))], ignore_index=True)
    both = pd.concat([table.assign(kind="network"), noise.assign(kind="noise")], ignore_index=True)
    times = (noise["bound"] / noise["rise"].clip(lower=1e-9)).median()
    note = f"the right-hand side of Theorem 1 is {times:.3g} times the left (median)"
    return Analysis(both, noise_claim_answers(table, noise), lambda figure: _draw_noise_study(figure, noise), (note,))


def noise_claim_answers(table: pd.DataFrame, noise: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    return {
        "theorem": intervals.holds_every_time(
            noise.groupby("network").apply(lambda own: bool((own["rise"] <= own["bound"]).all()))
        ),
        "depth": Answer.exact(depth_exponent_of_bound(), "d · √d: the square root is over d² times a sum of d terms"),
        "split": intervals.largest_over_networks(noise.groupby("network")["split"].max()),
        "lemma_2": intervals.mean_over_runs(table["switched"], bounds=(0.0, math.inf)),
        "rescaled": intervals.log10_ratio_of_means(table["sharpness_ratio"], np.ones(len(table))),
        "shuffled": intervals.log10_ratio_of_means(table["shuffled_ratio"], np.ones(len(table))),
    }


def depth_exponent_of_bound() -> float:
    """Slope of log of the simplified bound against log d, for equal widths and all constants the same."""
    values = []
    for depth in DEPTHS:
        same = TheoremConstants((100,) * (depth + 1), (1.0,) * depth, 1.0, 1.0, 1.0, 0.0, 1.0)
        values.append(simplified_theorem_1_bound(same, 1.0, 1, 1 - 1e-12))
    return float(np.polyfit(np.log(DEPTHS), np.log(values), 1)[0])


def _draw_noise_study(figure: Figure, noise: pd.DataFrame) -> None:
    axes = figure.subplots()
    axes.loglog(noise["rise"].clip(lower=1e-6), noise["bound"], "o", ms=4)
    axes.set_xlabel("test loss with noise − training loss")
    axes.set_ylabel("right-hand side of Theorem 1")
