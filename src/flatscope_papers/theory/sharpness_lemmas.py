"""Steps of the theory of Neyshabur et al. 2017: Lemmas 1 to 3, (7), rebalanced layers, capacities, switching units."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope import Context
from flatscope.errors import InputError
from flatscope.extend import Params, count_scalars
from flatscope.measures.interactions import ReluChain, relu_chain


def lemma_3_noise_product_bound(left: Tensor, right: Tensor, sigma: float) -> float:
    """σ‖A‖_F‖B‖_F, which bounds E‖AνB‖_F for ν with entries N(0, σ²), and is the root of E‖AνB‖²_F exactly."""
    return sigma * float(left.double().norm()) * float(right.double().norm())


def lemma_1_output_change_bound(chain: ReluChain, sample: int, sigmas: Sequence[float], mu: float) -> float:
    """Bound on how far noise moves the output of one sample while no unit switches: eq (8).

    (Π(1 + σ_i √(h_i h_{i-1}) / (μ² ‖D_iW_i‖_F)) - 1) ‖f_w(x)‖ for a network without biases.

    Args:
        chain: the network.
        sample: number of the sample.
        sigmas: standard deviation of the noise on each layer.
        mu: μ of condition C1 for this sample.
    """
    if not mu > 0 or len(sigmas) != chain.depth or any(sigma < 0 for sigma in sigmas):
        raise InputError(
            "μ > 0 and a sigma per layer", f"{mu}, {len(sigmas)} for {chain.depth}", where="lemma_1_output_change_bound"
        )
    growth, widths = 0.0, chain.widths
    for level, (weight, sigma) in enumerate(zip(chain.weights, sigmas, strict=True), start=1):
        norm = float(weight[chain.pattern(level, sample)].norm())
        if norm == 0:
            return math.inf
        growth += math.log1p(sigma * math.sqrt(widths[level] * widths[level - 1]) / (mu**2 * norm))
    return math.expm1(growth) * float(chain.signals[-1][sample].norm())


@dataclass(frozen=True)
class Perturbed:
    """Effect of noise on the weights on each sample, as (7) takes it apart.

    Attributes:
        moved: ‖f_{w+ν}(x) − f_w(x)‖.
        fixed: the same with the activation pattern of w: the first term.
        error: ‖Err_d‖, what the units that switch add: the second term.
        switched: units of each hidden layer that switch, (layers, samples).
    """

    moved: Tensor
    fixed: Tensor
    error: Tensor
    switched: Tensor


def output_change_under_noise(chain: ReluChain, noise: Sequence[Tensor]) -> Perturbed:
    """The two terms of (7) for one draw of the noise; their sum is at least `moved`."""
    true, fixed, switched = chain.inputs, chain.inputs, []
    for level, (weight, bias, layer_noise) in enumerate(zip(chain.weights, chain.biases, noise, strict=True)):
        true, fixed = (signal @ (weight + layer_noise).T + bias for signal in (true, fixed))
        if level < chain.depth - 1:
            on = chain.signals[level] > 0
            switched.append(((true > 0) != on).sum(1))
            true, fixed = true.clamp_min(0), fixed * on
    before = chain.signals[-1]
    moved, unswitched, error = (term.norm(dim=1) for term in (true - before, fixed - before, true - fixed))
    return Perturbed(moved, unswitched, error, torch.stack(switched))


def lemma_2_switching_bound(chain: ReluChain, level: int, sigmas: Sequence[float], c2: float, flip: float) -> Tensor:
    """C₂ h_k C_δ σ_k ‖f^(k−1)‖, to which Lemma 2 limits the units of hidden layer k = `level` that switch, O left out.

    It counts the noise on layer k alone. The noise on the layers below changes the signal that comes in by as much,
    and is left out of its proof as if it were of second order.
    """
    below = chain.inputs if level == 1 else chain.signals[level - 2].clamp_min(0)
    limits: Tensor = c2 * chain.widths[level] * flip * sigmas[level - 1] * below.norm(dim=1)
    return limits


def rebalancing_layer_factors(chain: ReluChain, sample: int) -> list[float]:
    """Factors of the layers, of product 1, after which all ‖D_iW_i‖_F/√h_i of a sample are the same (footnote 5)."""
    sizes = [
        float(weight[chain.pattern(level, sample)].norm()) / math.sqrt(chain.widths[level])
        for level, weight in enumerate(chain.weights, start=1)
    ]
    if min(sizes) == 0:
        raise InputError("a unit that is on in every layer", "none", where="rebalancing_layer_factors")
    mean = math.exp(math.fsum(map(math.log, sizes)) / len(sizes))
    return [mean / size for size in sizes]


def log_lipschitz_capacity(lipschitz: float, margin: float, dimension: int, diameter: float = 1.0) -> float:
    """Logarithm of (C·diam/γ)^n: covers of inputs of this diameter by balls in which no margin is lost (Section 2.3).

    The paper writes (C/γ)^n diam; the diameter belongs under the power. With C = Π‖W_i‖₂ and diameter 1 it is the
    capacity (Π‖W_i‖₂/γ)^n of the same section. Exponential in the number of inputs, so that only its log is a number.
    """
    if not min(lipschitz, margin, diameter) > 0 or dimension < 1:
        got = f"{lipschitz}, {margin}, {dimension}, {diameter}"
        raise InputError("positive numbers", got, where="log_lipschitz_capacity")
    return dimension * math.log(lipschitz * diameter / margin)


def unit_prior_kl(shift: Params, sigma: float) -> float:
    """KL(N(w, σ²I) ‖ N(w₀, I)) = ½(‖w - w₀‖² + pσ² - p - p ln σ²): the prior of unit variance."""
    if not sigma > 0:
        raise InputError("a positive sigma", str(sigma), where="unit_prior_kl")
    p, squares = count_scalars(shift.values()), math.fsum(float(v.double().square().sum()) for v in shift.values())
    return 0.5 * (squares + p * sigma**2 - p - p * math.log(sigma**2))


def switching_curve(ctx: Context, deltas: Tensor, *, samples: int = 100) -> dict[str, Tensor]:
    """Per hidden layer the fraction of units with a pre-activation of at most δ (in rms units), mean over samples."""
    chain = ctx.cached(relu_chain, samples=samples)
    curves = {}
    for name, signal in zip(chain.names[:-1], chain.signals[:-1], strict=True):
        sizes = signal.abs() / signal.square().mean(1, keepdim=True).sqrt()
        ordered = sizes.flatten().sort().values
        counts = torch.searchsorted(ordered, deltas.to(ordered), right=True)
        curves[name] = (counts.double() / ordered.numel()).cpu()
    return curves
