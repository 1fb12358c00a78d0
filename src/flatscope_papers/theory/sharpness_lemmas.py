"""Steps of the theory of Neyshabur et al. 2017: Lemmas 1 and 3, the prior of unit variance, units that switch."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from flatscope import Context
from flatscope.errors import InputError
from flatscope.measures.interactions import ReluChain, relu_chain
from flatscope.params import Params, count


def lemma_3(left: Tensor, right: Tensor, sigma: float) -> float:
    """σ‖A‖_F‖B‖_F, which bounds E‖AνB‖_F for ν with entries N(0, σ²), and is the root of E‖AνB‖²_F exactly."""
    return sigma * float(left.double().norm()) * float(right.double().norm())


def lemma_1(chain: ReluChain, sample: int, sigmas: Sequence[float], mu: float) -> float:
    """Bound on how far noise moves the output of one sample while no unit switches: eq (8).

    (Π(1 + σ_i √(h_i h_{i-1}) / (μ² ‖D_iW_i‖_F)) - 1) ‖f_w(x)‖ for a network without biases.

    Args:
        chain: the network.
        sample: number of the sample.
        sigmas: standard deviation of the noise on each layer.
        mu: μ of condition C1 for this sample.
    """
    if not mu > 0 or len(sigmas) != chain.depth or any(sigma < 0 for sigma in sigmas):
        raise InputError("μ > 0 and a sigma per layer", f"{mu}, {len(sigmas)} for {chain.depth}", where="lemma_1")
    growth, widths = 0.0, chain.widths
    for level, (weight, sigma) in enumerate(zip(chain.weights, sigmas, strict=True), start=1):
        norm = float(weight[chain.pattern(level, sample)].norm())
        if norm == 0:
            return math.inf
        growth += math.log1p(sigma * math.sqrt(widths[level] * widths[level - 1]) / (mu**2 * norm))
    return math.expm1(growth) * float(chain.signals[-1][sample].norm())


def unit_prior_kl(shift: Params, sigma: float) -> float:
    """KL(N(w, σ²I) ‖ N(w₀, I)) = ½(‖w - w₀‖² + pσ² - p - p ln σ²): the prior of unit variance."""
    if not sigma > 0:
        raise InputError("a positive sigma", str(sigma), where="unit_prior_kl")
    p, squares = count(shift.values()), math.fsum(float(v.double().square().sum()) for v in shift.values())
    return 0.5 * (squares + p * sigma**2 - p - p * math.log(sigma**2))


def switching_curve(ctx: Context, deltas: Tensor, *, samples: int = 100) -> dict[str, Tensor]:
    """Per hidden layer the fraction of units with a pre-activation of at most δ (in rms units), mean over samples."""
    chain = ctx.sweep(relu_chain, samples=samples)
    curves = {}
    for name, signal in zip(chain.names[:-1], chain.signals[:-1], strict=True):
        sizes = signal.abs() / signal.square().mean(1, keepdim=True).sqrt()
        ordered = sizes.flatten().sort().values
        found = torch.searchsorted(ordered, deltas.to(ordered), right=True)
        curves[name] = (found.double() / ordered.numel()).cpu()
    return curves
