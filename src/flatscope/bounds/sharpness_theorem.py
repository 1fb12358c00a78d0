"""Theorem 1 of Neyshabur et al. 2017 on the sharpness of ReLU networks, as stated.

Its Lemma 2 drops a term of the order that it keeps, so the theorem and its simplification are evaluated as printed and
certify nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.measures.interactions import condition_c1_mu, condition_c2, condition_c3, relu_chain
from flatscope.registry import Value, bound

SIGMAS = tuple(10 ** (k / 20) for k in range(-120, 81))


def flip_constant(width: int, delta: float) -> float:
    """C_δ = (1 + δ)√(2 ln h), as printed; too small for small δ, see `flip_constant_corrected`."""
    return (1 + delta) * math.sqrt(2 * math.log(width))


def flip_constant_corrected(width: int, delta: float) -> float:
    """√(2 ln(2h/δ)): the largest of h standard normal numbers exceeds it with probability at most δ."""
    if width < 1 or not 0 < delta < 1:
        raise InputError("a width and 0 < delta < 1", f"{width}, {delta}", where="flip_constant_corrected")
    return math.sqrt(2 * math.log(2 * width / delta))


@dataclass(frozen=True)
class TheoremConstants:
    """What the theorem needs to know of a network.

    Attributes:
        widths: h_0 … h_d.
        norms: ‖W_i‖_F.
        mu: of condition C1.
        c2: of condition C2.
        c3: of condition C3.
        outputs: mean norm of the outputs.
        lipschitz: C_L of the loss.
    """

    widths: tuple[int, ...]
    norms: tuple[float, ...]
    mu: float
    c2: float
    c3: float
    outputs: float
    lipschitz: float

    def __post_init__(self) -> None:
        """Refuse what would give no number."""
        if not self.mu > 0 or len(self.norms) != len(self.widths) - 1 or any(not norm > 0 for norm in self.norms):
            raise InputError("μ > 0 and a positive norm for each layer", f"{self.mu}, {self.norms}", where="Theorem 1")


def theorem_1(c: TheoremConstants, sigmas: Sequence[float], flips: Sequence[float], n: int, delta: float) -> float:
    """The right-hand side of Theorem 1 with the O replaced by one.

    Args:
        c: constants of the network.
        sigmas: σ_i of each layer.
        flips: C_{δ_i} of each layer.
        n: number of samples.
        delta: of the PAC-Bayes term.
    """
    gammas = [
        sigma * math.sqrt(above * below) / (c.mu**2 * norm)
        for sigma, above, below, norm in zip(sigmas, c.widths[1:], c.widths, c.norms, strict=False)
    ]
    fixed = _product(gammas) - 1
    flipped = _product([g * c.c2 * c.c3 for g in gammas])
    flipped *= _product([g * flip * c.c2 for g, flip in zip(gammas, flips, strict=True)]) - 1
    kl = sum((norm / sigma) ** 2 for norm, sigma in zip(c.norms, sigmas, strict=True))
    return (fixed + flipped) * c.lipschitz * c.outputs + math.sqrt((kl + math.log(1 / delta)) / n)


def simplified(c: TheoremConstants, sigma: float, n: int, delta: float, flips: Sequence[float] | None = None) -> float:
    """The simplified bound that follows Theorem 1, with the O replaced by one.

    σ(1 + (1 + σC₂C₃)C₂) C_L mean‖f(x)‖ + √((d²/μ⁴ Σ h_i h_{i-1} / σ² + ln(1/δ)) / n). With `flips` the factors
    C²_{δ_i}, which the substitution leaves in the sum and the paper drops.
    """
    factors = [1.0] * len(c.norms) if flips is None else [flip**2 for flip in flips]
    depth = len(c.norms)
    weights = sum(f * above * below for f, above, below in zip(factors, c.widths[1:], c.widths, strict=False))
    kl = depth**2 / c.mu**4 * weights / sigma**2
    rise = sigma * (1 + (1 + sigma * c.c2 * c.c3) * c.c2) * c.lipschitz * c.outputs
    return rise + math.sqrt((kl + math.log(1 / delta)) / n)


@bound(
    symbol=r"[\prod(1+\gamma_i) - 1 + \prod(1+\gamma_iC_2C_3)(\prod(1+\gamma_iC_{\delta_i}C_2) - 1)]"
    r"\, C_L \overline{\|f_w\|} + \sqrt{\tfrac1n (\sum_i \|W_i\|_F^2/\sigma_i^2 + \ln\tfrac1\delta)}",
    paper="neyshabur2017",
    equation="Theorem 1 and its simplification",
    assumptions=(
        "NOT CERTIFIED: evaluated as stated with the O replaced by one; its Lemma 2 has a gap",
        "a chain of dense layers with ReLU between them (checked); biases not counted",
        "conditions C1 to C3 with the constants measured on training samples, δ of C2 in rms units from 0.1 up",
        "the loss is C_L-Lipschitz in the outputs",
    ),
    cost="long",
    on_folded=True,
)
def sharpness_theorem_1(
    ctx: Context,
    *,
    delta: float,
    form: Literal["theorem", "simplified"] = "theorem",
    samples: int = 20,
    flip_delta: float = 0.01,
    corrected: bool = False,
    lipschitz: float = 0.0,
) -> Value:
    """Gap of the network with noisy weights by Theorem 1 as stated, at the best noise level; not certified.

    The noise is chosen as in the paper, γ_i = σ / (C_{δ_i} d), and σ from a grid.

    Args:
        ctx: the network.
        delta: the second term is meant to hold with probability at least 1 - delta.
        form: "theorem" or "simplified".
        samples: training samples on which μ, C₂ and C₃ are measured.
        flip_delta: δ_i of C_{δ_i}.
        corrected: use √(2 ln(2h/δ_i)) for C_{δ_i}, and keep C²_{δ_i} in the simplified form.
        lipschitz: C_L of the loss in the outputs; 0 takes √2 for cross-entropy and refuses others.
    """
    if not 0 < delta < 1 or not 0 < flip_delta < 1:
        raise InputError("0 < delta < 1", f"{delta}, {flip_delta}", where="sharpness_theorem_1")
    if lipschitz <= 0:
        if ctx.problem.loss.name != "cross_entropy":
            raise NotApplicable(f"needs a Lipschitz loss, not {ctx.problem.loss.name}; pass lipschitz=")
        lipschitz = math.sqrt(2)
    n = ctx.problem.n_train
    c = _constants(ctx, samples, lipschitz)
    constant = flip_constant_corrected if corrected else flip_constant
    flips = [constant(max(width, 2), flip_delta) for width in c.widths[1:]]

    def at(sigma: float) -> float:
        if form == "simplified":
            return simplified(c, sigma, n, delta, flips if corrected else None)
        gammas = [sigma / (flip * len(flips)) for flip in flips]
        sigmas = [
            g * c.mu**2 * norm / math.sqrt(above * below)
            for g, norm, above, below in zip(gammas, c.norms, c.widths[1:], c.widths, strict=False)
        ]
        return theorem_1(c, sigmas, flips, n, delta)

    value, sigma = min((at(sigma), sigma) for sigma in SIGMAS)
    return Value(value, exact=False, reason=f"σ {sigma:.3g}; μ {c.mu:.3g}, C2 {c.c2:.3g}, C3 {c.c3:.3g}")


def _constants(ctx: Context, samples: int, lipschitz: float) -> TheoremConstants:
    chain = ctx.sweep(relu_chain, samples=samples)
    mu = float(condition_c1_mu(ctx, samples=samples).value)
    c2, c3 = (float(found[""].value) for found in (_c2(ctx, samples), condition_c3(ctx, samples=samples)))
    norms = tuple(float(weight.norm()) for weight in chain.weights)
    total = 0.0
    with torch.no_grad():
        for inputs, targets in ctx.batches():
            total += float(ctx.forward(inputs).double().flatten(1).norm(dim=1).sum())
            ctx.count("forward", len(targets))
    return TheoremConstants(chain.widths, norms, mu, c2, c3, total / ctx.problem.n_train, lipschitz)


def _c2(ctx: Context, samples: int) -> dict[str, Value]:
    """A network without hidden layers has no unit that could switch."""
    chain = ctx.sweep(relu_chain, samples=samples)
    return {"": Value(0.0)} if chain.depth < 2 else condition_c2(ctx, samples=samples)


def _product(parts: Sequence[float]) -> float:
    log = math.fsum(math.log1p(part) for part in parts)
    return math.exp(log) if log < 700 else math.inf
