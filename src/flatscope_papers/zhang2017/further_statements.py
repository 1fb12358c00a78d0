"""Conjectures 2 and 3, Propositions 1 and 3, (37), (38) and Section 9.7 of Zhang et al. (2017) on small problems."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn
from torch.nn import functional

from flatscope import SGLD
from flatscope.inputs import load
from flatscope.training import Store, build
from flatscope_papers import intervals
from flatscope_papers.claims import Answer
from flatscope_papers.declaration import Analysis, Config, Measured, Runs, Stage, each_trial, study
from flatscope_papers.theory.compositional import TreeNetwork, compositional_target, shallow_of_size
from flatscope_papers.theory.linear import robust_hinge
from flatscope_papers.theory.linear_dynamics import learning_times_of_modes, residual_layer_norm
from flatscope_papers.theory.loss_responses import loss_responses, relative_factors
from flatscope_papers.theory.robust_weights import robust_loss
from flatscope_papers.toml_files import settings_by_scale

SIZES = settings_by_scale(__name__)
LOSS, SETTLING = 0.02, 300  # training loss at which networks are compared, and the most epochs until there
TEMPERATURE, RADIUS = 1e-4, 0.3  # of the added noise; of the changes of the weights in (10)
ERROR = 0.05  # share of training samples that a change of the weights, or of the inputs, is to make wrong
DEPTH, DELTA = 8, 0.1  # of Section 9.6.1


def further_statement_stages(scale: str) -> list[Stage]:
    """Small problems, one after the other."""
    size = SIZES[scale]
    configs = [{"study": "further statements", "seed": seed, **size} for seed in range(size["problems"])]
    return [Stage([[config] for config in configs], try_further, 0)]


@each_trial("statements")
def try_further(config: Config, store: Store) -> Measured:
    """One problem for each of the statements."""
    seed = config["seed"]
    data = load("digits", train_size=config["samples"], test_size=100, flatten=True, seed=seed)
    plain, noisy = (
        _network_trained_with_noise(seed, data.train, config["epochs"], heat) for heat in (0.0, TEMPERATURE)
    )
    parts = [_robust_error_of_network(model, data.train) for model in (plain, noisy)]
    weights, inputs = _weight_and_input_tolerances(plain, *data.train, seed)
    metrics = {
        "robust_sgd": parts[0],
        "robust_sgdl": parts[1],
        "weight_tolerance": weights,
        "input_tolerance": inputs,
        **_errors_on_compositional_function(seed, config["samples"], config["steps"]),
        **_linear_network_statements(seed),
        **_exact_identities(seed),
    }
    return Measured(metrics)


def _network_trained_with_noise(
    seed: int, samples: tuple[Tensor, Tensor], epochs: int, temperature: float
) -> nn.Module:
    """SGD, with noise for some epochs and without it until the training loss is there."""
    model, (x, y) = build("mlp", seed=seed, widths=(input_size(samples), 32, 10)), samples
    generator = torch.Generator().manual_seed(seed)
    for heat, most in ((temperature, epochs), (0.0, SETTLING)):
        optimizer = SGLD(model.parameters(), lr=0.1, temperature=heat, seed=1000 + seed)
        for _ in range(most):
            for chosen in torch.split(torch.randperm(len(x), generator=generator), 20):
                optimizer.zero_grad()
                torch.autograd.backward(functional.cross_entropy(model(x[chosen]), y[chosen]))
                optimizer.step()
            with torch.no_grad():
                if not heat and float(functional.cross_entropy(model(x), y)) <= LOSS and most == SETTLING:
                    break
    return model.eval()


def input_size(samples: tuple[Tensor, Tensor]) -> int:
    """Numbers of an input."""
    return int(samples[0].shape[1])


def _robust_error_of_network(model: nn.Module, samples: tuple[Tensor, Tensor]) -> float:
    x, y = samples
    return robust_loss(model, x[:100], y[:100], RADIUS, steps=5)


def _weight_and_input_tolerances(model: nn.Module, x: Tensor, y: Tensor, seed: int) -> tuple[float, float]:
    """Relative changes of all weights, and of the inputs alike for all samples, that make five in a hundred wrong."""
    generator = torch.Generator().manual_seed(seed)
    signs = {name: [_random_signs_like(p, generator) for _ in range(10)] for name, p in model.named_parameters()}
    of_inputs = [_random_signs_like(x[0], generator) for _ in range(10)]

    def by_weights(size: float) -> float:
        wrong = []
        for draw in range(10):
            moved = {name: p * (1 + size * signs[name][draw]) for name, p in model.named_parameters()}
            wrong.append(_classification_error(torch.func.functional_call(model, moved, (x,)), y))
        return float(np.mean(wrong))

    def by_inputs(size: float) -> float:
        return float(np.mean([_classification_error(model(x * (1 + size * sign)), y) for sign in of_inputs]))

    with torch.no_grad():
        return _perturbation_size_at_error(by_weights), _perturbation_size_at_error(by_inputs)


def _random_signs_like(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator).to(like.dtype) * 2 - 1


def _classification_error(outputs: Tensor, y: Tensor) -> float:
    return float((outputs.argmax(1) != y).double().mean())


def _perturbation_size_at_error(error: Callable[[float], float]) -> float:
    """Size at which the error comes to `ERROR`, by bisection of its logarithm; infinite if it never does."""
    low, high = 1e-3, 30.0
    if error(high) < ERROR:
        return math.inf
    for _ in range(14):
        middle = math.sqrt(low * high)
        low, high = (low, middle) if error(middle) >= ERROR else (middle, high)
    return math.sqrt(low * high)


def _errors_on_compositional_function(seed: int, samples: int, steps: int) -> dict[str, float]:
    """A tree and a shallow network of as many weights on a function that is a tree, and on random signs."""
    generator = torch.Generator().manual_seed(seed)
    x, test = (2 * torch.rand(n, 8, generator=generator) - 1 for n in (samples, 2000))
    target = compositional_target(seed)
    signs = _random_signs_like(x[:, 0], generator)
    errors = {}
    for name, make in (("deep", TreeNetwork), ("shallow", shallow_of_size)):
        for what, y in (("target", target(x)), ("random", signs)):
            model = make(seed)
            loss = _fit_by_adam(model, x, y, steps)
            if what == "target":
                error = (model(test)[:, 0] - target(test)).square().mean() / target(test).var()
                errors[f"{name}_test"] = float(error.detach())
            else:
                errors[f"{name}_random"] = 1 - loss
    return errors


def _fit_by_adam(model: nn.Module, x: Tensor, y: Tensor, steps: int) -> float:
    """Mean square loss after so many steps of Adam on all samples."""
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = (model(x)[:, 0] - y).square().mean()
        torch.autograd.backward(loss)
        optimizer.step()
    return float((model(x)[:, 0] - y).detach().square().mean())


def _linear_network_statements(seed: int) -> dict[str, float]:
    """Dynamics of a deep linear network beside those of its coefficients, and the norm of linear residual layers."""
    deep, direct, distance = learning_times_of_modes(seed)
    norms = [residual_layer_norm(seed, layers) for layers in (2, 4, 8, 16, 32)]
    slope = np.polyfit(np.log([2, 4, 8, 16, 32]), np.log(norms), 1)[0]
    return {
        "deep_ratio": float((deep[:, 1] / deep[:, 0]).max()),
        "direct_ratio": float((direct[:, 1] / direct[:, 0]).min()),
        "in_order": float((np.diff(deep[:, 0]) > 0).all()),
        "same_end": distance,
        "norm_slope": float(slope),
    }


def _exact_identities(seed: int) -> dict[str, float]:
    """(37) and (38), (49) to (51), and what Section 9.7 prints of changed samples and weights."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    X, y, w = normal(30, 4), torch.sign(normal(30)), normal(4)
    worst, above = robust_hinge(w, 0.1, X, y, 0.3)
    net = nn.Sequential(*(part for _ in range(DEPTH) for part in (nn.Linear(6, 6, bias=False), nn.ReLU())))[
        :-1
    ].double()
    for p in net.parameters():
        p.data = normal(6, 6)
    x = normal(20, 6)
    by_weights, by_inputs = relative_factors(DEPTH, DELTA)
    before = net(x).detach()
    data = net(by_inputs * x).detach() - by_inputs * before
    for p in net.parameters():
        p.data *= 1 + DELTA
    moved = net(x).detach() - by_weights * before
    model, targets = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1)).double(), normal(30, 1)
    for p in model.parameters():
        p.data = normal(*p.shape)
    new = (normal(4), normal(1))
    responses = loss_responses(model, functional.mse_loss, X, targets, replaced=3, by=new, tau=0.01)
    one = functional.mse_loss(model(new[0]), new[1]) - functional.mse_loss(model(X[3]), targets[3])
    return {
        "hinge": worst / above,
        "factors": float(max(moved.abs().max(), data.abs().max()) / before.abs().max()),
        "swap": abs(float(responses.loss_after_swap / one.detach()) - 1),
        "scaled": abs(responses.as_printed / responses.gradient_after_scaling - 1),
    }


def further_of_table(table: pd.DataFrame, scale: str) -> Analysis:
    """Claims and figure; they need no more than the table."""
    del scale
    return Analysis(table, further_statement_answers(table), lambda figure: _draw_further_statements(figure, table))


@study("zhang2017-further", stages=further_statement_stages, from_table=further_of_table)
def further_study(runs: Runs) -> Analysis:
    """Digits with and without added noise, functions that are trees, linear networks, and identities."""
    return further_of_table(runs.frame().drop(columns=["study", "device", "key"]), runs.scale)


def further_statement_answers(table: pd.DataFrame) -> dict[str, Answer]:
    """The numbers of the claims."""
    tolerances = table["input_tolerance"] / table["weight_tolerance"]
    noise = f"temperature {TEMPERATURE:g}, then without noise to a training loss of {LOSS}"
    return {
        "conjecture_2": intervals.mean_over_runs(np.log10(table["robust_sgdl"] / table["robust_sgd"]), noise),
        "conjecture_3": intervals.mean_over_runs(np.log10(tolerances)),
        "factors": intervals.largest_over_networks(table["factors"], of="networks"),
        "proposition_1": intervals.mean_over_runs(np.log10(table["deep_test"] / table["shallow_test"])),
        "complexity": intervals.paired_difference(table["deep_random"], table["shallow_random"]),
        "stages": intervals.largest_over_networks(
            table["deep_ratio"], f"{table['direct_ratio'].min():.3g} for the coefficients"
        ),
        "order": intervals.holds_every_time(table["in_order"] == 1, of="networks"),
        "same_end": intervals.largest_over_networks(table["same_end"], of="networks"),
        "residual_norm": intervals.mean_over_runs(table["norm_slope"]),
        "hinge": intervals.largest_over_networks(table["hinge"], of="problems"),
        "swap": intervals.largest_over_networks(table["swap"], of="problems"),
        "scaled": intervals.largest_over_networks(table["scaled"], of="problems"),
    }


def _draw_further_statements(figure: Figure, table: pd.DataFrame) -> None:
    figure.set_size_inches(7.0, 3.4)
    pairs = (
        ("robust_sgd", "robust_sgdl", "robust loss (10)", "SGD", "SGD with noise"),
        ("weight_tolerance", "input_tolerance", "relative change that makes 5 % wrong", "of weights", "of inputs"),
        ("shallow_test", "deep_test", "test error over variance", "shallow", "tree"),
    )
    for axes, (x, y, title, one, other) in zip(figure.subplots(1, len(pairs)), pairs, strict=True):
        axes.loglog(table[x], table[y], "o", ms=3)
        ends = [table[[x, y]].min().min(), table[[x, y]].max().max()]
        axes.plot(ends, ends, color="0.6", lw=0.8)
        axes.set(xlabel=one, ylabel=other)
        axes.set_title(title, fontsize=8)
