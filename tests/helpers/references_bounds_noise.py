"""Naive twins of the bounds on networks with noise on their weights or path values, and of Theorem 5.1.

The noise is drawn anew, many times; paths are walked one by one in references_paths.py.
"""

from __future__ import annotations

import copy
import math
from typing import Any, NamedTuple

import torch
from references import Dense
from references_bounds import AssumptionFailsError, bound_twin, n_classes, refuse_unless, sizes_of, wrong
from references_pac_bayes import condition_c1_mu, condition_c2, condition_c3, dense_chain, optimised_bound
from references_paths import ChainPaths
from references_psi import InPathSpace
from references_sharpness import _folded
from torch import Tensor, nn
from torch.func import functional_call, vmap

DRAWS = 3000


class Estimate(NamedTuple):
    """The mean of draws, and its standard error."""

    value: float
    stderr: float


def errors_of(dense: Dense, vectors: Tensor, x: Tensor, y: Tensor) -> Tensor:
    """0/1 error of the network with each row as its trained weights."""
    sizes = sizes_of(dense)

    def error(vector: Tensor) -> Tensor:
        params, start = dict(dense.params), 0
        for name, size in sizes.items():
            params[name] = vector[start : start + size].reshape(params[name].shape)
            start += size
        return wrong(functional_call(dense.tiny.model, params, (x,)), y).mean()

    found: Tensor = vmap(error, chunk_size=250)(vectors)
    return found


def standard_normal(draws: int, size: int, seed: int) -> Tensor:
    return torch.randn(draws, size, generator=torch.Generator().manual_seed(900 + seed), dtype=torch.float64)


def added(kl: float, n: int, delta: float, form: str) -> float:
    """What (5), (6) or Maurer's form adds; (6) is known to hold only where it is above Maurer's."""
    maurer = math.sqrt((kl + math.log(2 * math.sqrt(n) / delta)) / (2 * n))
    if form == "eq6":
        printed = math.sqrt((kl + math.log(1 / delta)) / n)
        refuse_unless(printed >= maurer, "(6) above Maurer's form")
        return printed
    return maurer if form == "maurer" else math.sqrt((kl + math.log(2 * n / delta)) / n)


@bound_twin
def pac_bayes(
    dense: Dense,
    delta: float,
    seed: int,
    form: str = "eq5",
    noise: str = "per_parameter",
    prior: str = "grid",
    prior_mean: str = "zero",
    alpha: Any = (0.01, 0.03, 0.1, 0.3),
    draws: int = 20,
) -> Estimate:
    n_classes(dense)
    refuse_unless(prior == "grid" or noise == "equal", "a prior that does not look at the weights")
    refuse_unless(prior_mean == "zero" or dense is _folded(dense), "weights before training")
    dense = _folded(dense)
    names, n = list(sizes_of(dense)), len(dense.tiny.x)
    w = dense.vector(names)
    centre = torch.zeros_like(w)
    if prior_mean == "initial":
        refuse_unless(bool(dense.tiny.initial), "weights before training")
        centre = torch.cat([dense.tiny.initial[name].flatten() for name in names])
    levels = (alpha,) if isinstance(alpha, float) else alpha
    priors = levels if prior == "matched" else [10 ** (k / 10) for k in range(-50, 11)]
    found = []
    for a in levels:
        sigma = a * (10 * w.abs() + 1) if noise == "per_parameter" else torch.full_like(w, a)
        kl = math.inf
        for s in [a] if prior == "matched" else priors:
            sizes = zip((w - centre).tolist(), sigma.tolist(), strict=True)
            terms = [math.log(s / own) + (own**2 + d**2) / (2 * s**2) - 0.5 for d, own in sizes]
            kl = min(kl, math.fsum(terms))
        errors = errors_of(dense, w + sigma * standard_normal(DRAWS, len(w), seed), dense.tiny.x, dense.tiny.y)
        value = float(errors.mean()) + added(max(kl, 0.0), n, delta / len(priors), form)
        found.append(Estimate(value, float(errors.std()) / math.sqrt(DRAWS)))
    return min(found)


@bound_twin
def sharpness_theorem_1(
    dense: Dense,
    delta: float,
    seed: int,
    form: str = "theorem",
    samples: int = 20,
    flip_delta: float = 0.01,
    corrected: bool = False,
    lipschitz: float = 0.0,
) -> float:
    """Theorem 1 letter by letter at γ_i = σ / (C_δ d), or its simplification; the best of 20 values of σ a decade."""
    c_l = lipschitz_of(dense, lipschitz)
    dense = _folded(dense)
    if (chain := dense_chain(dense)) is None:
        raise AssumptionFailsError("a chain of dense layers with ReLU")
    d, n = len(chain), len(dense.tiny.x)
    h = [chain[0][0].shape[1], *(len(weight) for weight, _ in chain)]
    norms = [math.sqrt(sum(v * v for v in weight.flatten().tolist())) for weight, _ in chain]
    mu, c3 = condition_c1_mu(dense)[""], condition_c3(dense)[""]
    c2 = condition_c2(dense).get("", 0.0)
    outputs = sum(math.sqrt(sum(v * v for v in row)) for row in dense.outputs().tolist()) / n
    flips = [(1 + flip_delta) * math.sqrt(2 * math.log(max(width, 2))) for width in h[1:]]
    if corrected:
        flips = [math.sqrt(2 * math.log(2 * max(width, 2) / flip_delta)) for width in h[1:]]
    best = math.inf
    for step in range(-120, 81):
        sigma = 10 ** (step / 20)
        kept, first, second, third = 0.0, 1.0, 1.0, 1.0
        for i in range(1, d + 1):
            gamma, c_delta = sigma / (flips[i - 1] * d), flips[i - 1]
            own = gamma * mu**2 * norms[i - 1] / math.sqrt(h[i] * h[i - 1])  # σ_i, from γ_i
            first *= 1 + gamma
            second *= 1 + gamma * c2 * c3
            third *= 1 + gamma * c_delta * c2
            kept += norms[i - 1] ** 2 / own**2
        rise = (first - 1 + second * (third - 1)) * c_l * outputs
        if form == "simplified":
            squares = [c**2 if corrected else 1.0 for c in flips]
            kept = d**2 / mu**4 * sum(s * h[i + 1] * h[i] for i, s in enumerate(squares)) / sigma**2
            rise = sigma * (1 + (1 + sigma * c2 * c3) * c2) * c_l * outputs
        best = min(best, rise + math.sqrt((kept + math.log(1 / delta)) / n))
    return best


def lipschitz_of(dense: Dense, given: float) -> float:
    refuse_unless(given > 0 or dense.tiny.loss == "cross_entropy", "a loss that is Lipschitz in the outputs")
    return given or math.sqrt(2)


class Trained(NamedTuple):
    """What training the noise has led to: the twin begins there."""

    mean: dict[str, Tensor]
    sigma: dict[str, Tensor]
    centre: dict[str, Tensor]
    samples: tuple[Tensor, Tensor]
    error: float  # mean over the draws of the bound


@bound_twin
def pac_bayes_optimised(
    dense: Dense,
    delta: float,
    seed: int,
    trained: Trained | None = None,
    prior: str = "initial",
    draws: int = 10_000,
    sampling: float = 0.2,
    prior_variance: float = 0.1,
    **how_it_is_trained: Any,
) -> float:
    """Dziugaite and Roy (2017) at that posterior and with that training error, which other draws have to agree with."""
    n_classes(dense)
    if prior != "zero":
        refuse_unless(dense is _folded(dense) and bool(dense.tiny.initial), "weights before training")
    dense, names = _folded(dense), list(sizes_of(dense))
    assert trained is not None
    mean, sigma, centre = (
        torch.cat([part[name].flatten() for name in names]) for part in (trained.mean, trained.sigma, trained.centre)
    )
    for name in names:
        before = {"zero": 0 * dense.params[name]}.get(prior, dense.tiny.initial.get(name))
        assert prior == "half" or torch.equal(trained.centre[name], before), f"{name}: the prior is not at {prior}"
    x, y = trained.samples
    n = len(dense.tiny.x) // 2 if prior == "half" else len(dense.tiny.x)
    errors = errors_of(dense, mean + sigma * standard_normal(DRAWS, len(mean), seed), x, y)
    spread = float(errors.std()) * math.sqrt(1 / DRAWS + 1 / draws)
    assert abs(trained.error - float(errors.mean())) <= 4.5 * spread + 1e-9, (
        f"error {trained.error}, not {errors.mean()}"
    )
    weights = list(zip(mean.tolist(), centre.tolist(), sigma.tolist(), strict=True))
    shares = delta * (1 - sampling), delta * sampling
    return optimised_bound(trained.error, draws, weights, n, *shares, variance=prior_variance)


# Path values


@bound_twin
def psi_theorem_5_1(
    dense: Dense,
    delta: float,
    seed: int,
    rule: str = "max_product",
    epsilon: float = 0.1,
    relative: bool = True,
    depth_convention: str = "weight_layers",
    lipschitz: float = 0.0,
) -> float:
    """(11) with L the number of weight layers, or of hidden ones."""
    paths, c_l = paths_of(dense, rule), lipschitz_of(dense, lipschitz)
    sizes = [abs(v) for v in paths.basis]
    if min(sizes) == 0:
        return math.inf
    radius = epsilon * min(sizes) if relative else epsilon
    depth = len(paths.chain) - (depth_convention == "hidden_layers")
    d_0, d_1, d_l = paths.widths[0], max(paths.widths[1:-1]), paths.widths[-1]
    psi = max(
        radius ** (s - 1) * max(sizes) ** (2 * depth + 1 - s) / min(sizes) ** (2 * depth) for s in range(1, depth + 1)
    )
    inner = 1 + 2 ** ((3 * depth + 4) / 2) * (depth - 1) * d_1 * d_l * psi
    return 2 * max(paths.input_norms(dense.tiny.x)) * c_l * d_0 * d_1 ** (depth - 1) * d_l * inner * radius


@bound_twin
def psi_theorem_5_1_corrected(
    dense: Dense,
    delta: float,
    seed: int,
    rule: str = "max_product",
    epsilon: float = 0.1,
    relative: bool = True,
    lipschitz: float = 0.0,
) -> float:
    """C_L C √N min(q ‖v_all‖, ε + √(number of paths outside the basis) q max|v|), biases as inputs that are one."""
    paths, c_l = paths_of(dense, rule), lipschitz_of(dense, lipschitz)
    smallest = min(abs(v) for v in paths.basis)
    radius = epsilon * smallest if relative else epsilon
    if smallest == 0 or radius >= smallest:
        return math.inf
    depth, r = len(paths.chain), radius / smallest
    q = (1 + r) ** depth / (1 - r) ** (depth - 1) - 1
    values = [abs(value) for _, value in paths.walked]
    choices = {(start, hidden) for (start, hidden, _), _ in paths.walked}
    c = paths.input_norms(dense.tiny.x)[0]
    if any(start == "bias" for start, _ in choices):
        c = max(c, 1.0)
    length = math.sqrt(math.fsum(v * v for v in values))
    outside = math.sqrt(len(values) - len(paths.basis))
    return c_l * c * math.sqrt(len(choices)) * min(q * length, radius + outside * q * max(values))


def paths_of(dense: Dense, rule: str) -> ChainPaths:
    refuse_unless(all(p.requires_grad for p in dense.tiny.model.parameters()), "units that can all be rescaled")
    chain = dense_chain(_folded(dense))
    if chain is None or len(chain) < 2:
        raise AssumptionFailsError("a fully connected ReLU network with a hidden layer")
    modules = [m for m in _folded(dense).tiny.model if isinstance(m, nn.Linear)]
    return ChainPaths(chain, [m.bias is not None for m in modules], rule)


@bound_twin
def pac_bayes_psi(
    dense: Dense,
    delta: float,
    seed: int,
    rule: str = "cyclic",
    sigma: float = 0.05,
    prior_mean: str = "zero",
    sign_penalty: bool = True,
    loss: str = "error",
    draws: int = 100,
) -> Estimate:
    """(8) with KL = ‖v - v₀‖² / 2σ², and H log 2 for the signs; u normal."""
    refuse_unless(loss == "clipped" or dense.tiny.loss != "mse", "a loss in [0, 1]")
    refuse_unless(prior_mean == "zero" or (dense is _folded(dense) and bool(dense.tiny.initial)), "initial weights")
    refuse_unless(all(p.requires_grad for p in dense.tiny.model.parameters()), "trainable weights only")
    x, y, n = dense.tiny.x, dense.tiny.y, len(dense.tiny.x)
    model, chain = _folded(dense).tiny.model, dense_chain(_folded(dense))
    if chain is not None:
        biased = [m.bias is not None for m in model if isinstance(m, nn.Linear)]
        paths = ChainPaths(chain, biased, rule)
        v, hidden, run = torch.tensor(paths.basis, dtype=torch.float64), sum(paths.widths[1:-1]), paths.run
    else:
        space = InPathSpace(dense, rule)
        v, hidden = space.v, space.paths.n_classes

        def run(values: Tensor, inputs: Tensor) -> Tensor:
            return space.dense.outputs({**space.dense.params, **space.paths.params_of(values)}, inputs)

    centre = torch.zeros_like(v)
    if prior_mean == "initial":
        if chain is None:
            centre = space.paths.values_of(dense.tiny.initial)
        else:
            before = dense_chain(Dense(dense.tiny.with_model(with_weights(model, dense.tiny.initial))))
            assert before is not None
            centre = torch.tensor(ChainPaths(before, biased, rule).basis, dtype=torch.float64)

    def bounded(values: Tensor) -> Tensor:
        outputs = run(values, x)
        if loss == "error":
            return wrong(outputs, y).mean()
        if dense.tiny.loss == "mse":
            return (outputs - y).square().sum(1).clamp(max=1).mean()
        return (torch.logsumexp(outputs, 1) - outputs[torch.arange(n), y]).clamp(max=1).mean()

    kl = math.fsum(float(d) ** 2 for d in v - centre) / (2 * sigma**2) + (hidden * math.log(2) if sign_penalty else 0.0)
    u = sigma * standard_normal(DRAWS, len(v), seed)
    with torch.no_grad():
        changes = vmap(bounded, chunk_size=250)(v + u) - bounded(v)
    gap = abs(float(changes.mean())) + 4 * math.sqrt((kl + math.log(2 * n / delta)) / n)
    return Estimate(gap, float(changes.std()) / math.sqrt(DRAWS))


def with_weights(model: nn.Module, weights: dict[str, Tensor]) -> nn.Module:
    other = copy.deepcopy(model)
    other.load_state_dict(weights, strict=False)
    return other
