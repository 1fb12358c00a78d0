"""Naive twins of the noise measures and of the conditions of Theorem 1: plain draws, loops over units and triples."""

from __future__ import annotations

import math

import torch
from references import Dense, twin
from references_sharpness import STARTS, STRONG_OPTIONS, _folded, _gradient, _highest, _normals
from torch import Tensor, nn

LAST_ALPHA = 0.1  # of the rows of one measure the contract compares the last

# Noise nearly in proportion to the weights hides a rescaling; the same noise on every weight shows it.
_EQUAL = {"alpha": 0.3, "slope": 0.0}
STRONG_OPTIONS |= {
    ("expected_sharpness", "layer_scaling"): _EQUAL | {"draws": 1000},
    ("expected_sharpness", "unit_scaling"): _EQUAL,
    ("expected_sharpness", "batchnorm_scaling"): _EQUAL,
    ("expected_sharpness", "attention_scaling"): _EQUAL,
    ("expected_sharpness", "norm_scaling"): _EQUAL,
    ("pac_bayes_kl", "unit_scaling"): _EQUAL,
    ("condition_c1_mu", "unit_scaling"): {"triples": "inner"},  # the smallest ratio of all may be of one unit's path
}


@twin
def expected_sharpness(dense: Dense, alpha: float = LAST_ALPHA, draws: int = 1000) -> float:
    dense = _folded(dense)
    names = list(dense.params)
    w = dense.vector(names)
    sigma = alpha * (10 * w.abs() + 1)
    losses = dense.losses_of(w + sigma * torch.stack(_normals(draws, len(w))), names)
    return float((losses - dense.loss()).mean())


@twin
def pac_bayes_kl(dense: Dense, alpha: float = LAST_ALPHA) -> float:
    dense = _folded(dense)
    total = 0.0
    for value in dense.params.values():
        for w in value.flatten().tolist():
            sigma = alpha * (10 * abs(w) + 1)
            total += w**2 / (2 * sigma**2)
    return total


def dense_chain(dense: Dense) -> list[tuple[Tensor, Tensor]] | None:
    """(weight, bias) of each layer where the network is Linear, ReLU, Linear, …; None for any other.

    Zeros where a layer has no bias; what stands where a BatchNorm was folded does nothing.
    """
    modules = list(dense.tiny.model) if isinstance(dense.tiny.model, nn.Sequential) else [None]
    modules = [module for module in modules if not isinstance(module, nn.Identity)]
    expected = [nn.Linear if i % 2 == 0 else nn.ReLU for i in range(len(modules))]
    if not all(isinstance(module, kind) for module, kind in zip(modules, expected, strict=True)):
        return None
    layers = [module for module in modules if isinstance(module, nn.Linear)]
    return [(m.weight.detach(), 0 * m.weight[:, 0].detach() if m.bias is None else m.bias.detach()) for m in layers]


def passes_through(layers: list[tuple[Tensor, Tensor]], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """For one sample: [x, D_1W_1, …, W_d] as matrices, and the pre-activations of the hidden layers."""
    matrices, signals = [x[:, None]], []
    for i, (weight, bias) in enumerate(layers):
        z = weight @ x + bias
        on = (z > 0).double() if i < len(layers) - 1 else torch.ones_like(z)
        matrices.append(torch.diag(on) @ weight)
        signals.append(z)
        x = on * z
    return matrices, signals[:-1]


def product(matrices: list[Tensor]) -> Tensor:
    result = matrices[0]
    for matrix in matrices[1:]:
        result = matrix @ result
    return result


@twin
def condition_c1_mu(dense: Dense) -> dict[str, float]:
    layers = dense_chain(dense)
    if layers is None:
        return {}
    ratios = []
    for x in dense.tiny.x:
        m, _ = passes_through(layers, x)
        for b in range(len(m)):
            for c in range(b):
                for a in range(c + 1):
                    parts = product(m[c + 1 : b + 1]).norm() * product(m[a : c + 1]).norm()
                    ratios.append(float(math.sqrt(m[c].shape[0]) * product(m[a : b + 1]).norm() / parts))
    return {"": min(ratio for ratio in ratios if ratio > 0)}


@twin
def condition_c2(dense: Dense, floor: float = 0.1) -> dict[str, float]:
    layers = dense_chain(dense)
    if layers is None or len(layers) < 2:
        return {}
    worst = [0.0] * (len(layers) - 1)
    for x in dense.tiny.x:
        for k, z in enumerate(passes_through(layers, x)[1]):
            sizes = [abs(v) / math.sqrt(float((z * z).mean())) for v in z.tolist()]
            for delta in [floor, *(s for s in sizes if s >= floor)]:
                worst[k] = max(worst[k], sum(s <= delta for s in sizes) / len(sizes) / delta)
    return {"": max(worst)} | dict(zip(dense.tiny.layers, worst, strict=False))


@twin
def condition_c3(dense: Dense) -> dict[str, float]:
    layers = dense_chain(dense)
    if layers is None:
        return {}
    worst = [0.0] * len(layers)
    for x in dense.tiny.x:
        for i, matrix in enumerate(passes_through(layers, x)[0][1:]):
            if not matrix.any():  # every unit of this layer is off
                continue
            row = max(math.sqrt(sum(w * w for w in r)) for r in layers[i][0].tolist())
            worst[i] = max(worst[i], row * math.sqrt(len(matrix)) / float(matrix.norm()))
    return {"": max(worst)} | dict(zip(dense.tiny.layers, worst, strict=True))


@twin
def adaptive_sharpness(dense: Dense, rho: float = 0.5) -> float:
    """Over directions z, at w + |w| ρ z/‖z‖: the maximum of these tiny networks lies on the sphere."""
    dense = _folded(dense)
    names = list(dense.params)
    w, loss = dense.vector(names), float(dense.loss())
    starts = [_gradient(dense, names) * w.abs(), *_normals(STARTS, len(w))]
    highest = _highest(lambda z: dense.loss_of(w + w.abs() * rho * z / z.norm(), names), [s / s.norm() for s in starts])
    return highest - loss


@twin
def fisher_rao_norm(dense: Dense) -> float:
    """By central differences of each sample's loss along the weights."""
    tiny, step = dense.tiny, 1e-5

    def losses(factor: float) -> Tensor:
        outputs = dense.outputs({name: factor * value for name, value in dense.params.items()}).detach()
        if tiny.loss == "mse":
            return (outputs - tiny.y).square().sum(1)
        return torch.logsumexp(outputs, 1) - outputs[torch.arange(len(tiny.y)), tiny.y]

    slopes = (8 * (losses(1 + step) - losses(1 - step)) - (losses(1 + 2 * step) - losses(1 - 2 * step))) / (12 * step)
    return math.sqrt(float(slopes.square().mean()))


def optimised_bound(
    error: float,
    draws: int,
    weights: list[tuple[float, float, float]],
    n: int,
    delta: float,
    sampling_delta: float,
    variance: float = 0.1,
) -> float:
    """Dziugaite and Roy (2017), letter by letter in 40 digits, from the (mean, centre, deviation) of every weight."""
    from mpmath import exp, log, mp, mpf, pi

    def inverse(q: mpf, entropy: mpf) -> mpf:
        low, high = q, mpf(1)
        for _ in range(120):
            p = (low + high) / 2
            first = q * log(q / p) if q > 0 else mpf(0)
            low, high = (p, high) if first + (1 - q) * log((1 - q) / (1 - p)) <= entropy else (low, p)
        return high

    with mp.workdps(40):
        triples = [tuple(map(mpf, triple)) for triple in weights]
        squares = sum(((m - c) ** 2 + s**2 for m, c, s in triples), mpf(0))
        logs = sum((log(s**2) for _, _, s in triples), mpf(0))
        best = None
        for j in range(1, 1500):
            own = mpf(variance) * exp(-mpf(j) / 100)
            kl = (squares / own - len(triples) + len(triples) * log(own) - logs) / 2
            price = kl + log(n * pi**2 * j**2 / (6 * mpf(delta)))  # of a union over j, each with 6 δ / (π j)²
            best = price if best is None else min(best, price)
        sampled = inverse(mpf(error), log(1 / mpf(sampling_delta)) / draws)
        return float(inverse(sampled, best / (n - 1)))
