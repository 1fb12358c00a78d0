"""PAC-Bayes bounds on the expected error of a network whose weights get Gaussian noise (Neyshabur et al. 2017, §2.4).

The prior may not depend on the data. The noise of the trained network may: the bound holds for all of it at once.
Theorem 1 of the paper on the sharpness of ReLU networks is evaluated as printed and certifies nothing: its Lemma 2
drops a term of the order that it keeps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.errors import InputError, NotApplicable, UnknownNameError, refuse_unless_whole
from flatscope.loss import Loss
from flatscope.measures.interactions import condition_c1_mu, condition_c2, condition_c3, relu_chain
from flatscope.measures.pac_bayes import noise_scale
from flatscope.params import Params
from flatscope.perturbation import blocks_of_losses, checked_levels, context_with_loss, random_normal
from flatscope.registry import Value, bound
from flatscope.samples import as_rows
from flatscope.sampling import draw_until_precise, rows_from_blocks

FORMS = ("eq5", "eq6", "maurer")
# Standard deviations of the prior, fixed before any data is seen: ten per decade.
PRIOR_SIGMAS = tuple(10 ** (k / 10) for k in range(-50, 11))


def complexity_term(kl: float, n: int, delta: float, form: str = "eq5") -> float:
    """Complexity term that a PAC-Bayes bound adds to the training error of the perturbed network.

    Args:
        kl: divergence of the perturbed weights from the prior.
        n: number of samples.
        delta: the bound holds with probability at least 1 - delta.
        form: "eq5": √((KL + ln(2n/δ)) / n); "eq6": √((KL + ln(1/δ)) / n), which is known to hold only where
            KL + ln(1/δ) ≥ ln(2√n), and is refused elsewhere; "maurer": √((KL + ln(2√n/δ)) / 2n), the tightest;
            "mcallester": √((KL + ln(2n/δ)) / 2(n-1)), from which (5) follows.
    """
    if not kl >= 0 or n < 2 or not 0 < delta < 1:
        raise InputError("KL ≥ 0, at least two samples, 0 < delta < 1", f"{kl}, {n}, {delta}", where="pac_bayes")
    if form == "eq5":
        return math.sqrt((kl + math.log(2 * n / delta)) / n)
    if form == "maurer":
        return math.sqrt((kl + math.log(2 * math.sqrt(n) / delta)) / (2 * n))
    if form == "mcallester":
        return math.sqrt((kl + math.log(2 * n / delta)) / (2 * (n - 1)))
    if form != "eq6":
        raise UnknownNameError.among(form, (*FORMS, "mcallester"), "form of pac_bayes")
    if kl + math.log(1 / delta) < math.log(2 * math.sqrt(n)):
        raise NotApplicable("eq (6) is known to hold only where KL + ln(1/δ) ≥ ln(2√n)", f"KL {kl:.4g} at n = {n}")
    return math.sqrt((kl + math.log(1 / delta)) / n)


def gaussian_kl(shift: Params, sigma: Params, prior_sigma: float | Params) -> float:
    """KL(N(w, σ²) ‖ N(w₀, s²)) = Σ ln(s/σ) + (σ² + (w - w₀)²) / 2s² - ½ over all parameters, shift = w - w₀."""
    total = 0.0
    for name, distance in shift.items():
        posterior = sigma[name].double()
        prior = prior_sigma[name].double() if isinstance(prior_sigma, dict) else torch.full_like(posterior, prior_sigma)
        parts = (
            (prior / posterior).log() + (posterior.square() + distance.double().square()) / (2 * prior.square()) - 0.5
        )
        total += float(parts.sum())
    return max(total, 0.0)


@bound(
    symbol=r"\mathbb{E}_\nu \hat L(w+\nu) + \sqrt{\tfrac1n (\mathrm{KL}(w+\nu \parallel P) + \ln\tfrac{2n}{\delta})}",
    paper="neyshabur2017",
    equation="(5), (6)",
    invariant_under={"permutation"},
    assumptions=(
        "loss in [0, 1]: the 0/1 error (so by construction)",
        "prior independent of the data: mean zero or the weights before training, its variance from a fixed grid "
        "whose size is paid for",
        "bounds the error of the network with noisy weights, not of the network itself",
        "samples drawn independently (cannot be checked)",
    ),
    needs={"classes"},
    cost="long",
    typical={"forward": 80},
    exact=False,
    on_folded=True,
)
def pac_bayes(
    ctx: Context,
    *,
    delta: float,
    form: Literal["eq5", "eq6", "maurer"] = "eq5",
    noise: Literal["per_parameter", "equal"] = "per_parameter",
    prior: Literal["grid", "matched"] = "grid",
    prior_mean: Literal["zero", "initial"] = "zero",
    alpha: Any = (1e-2, 3e-2, 1e-1, 3e-1),
    draws: int = 20,
) -> Value:
    """Expected error of the network with Gaussian noise on its weights; the best of several noise levels.

    The training error of the noisy network is a mean over draws on the full training set: as many as make the bound
    precise. Its standard error is given; `high` adds what makes up for the draws with a further chance of error of
    delta / 100.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        form: "eq5", "eq6" (refused where it is not known to hold) or "maurer" (the tightest).
        noise: "per_parameter": σ_i = alpha (10|w_i| + 1); "equal": σ_i = alpha.
        prior: "grid": one standard deviation for all weights, from a fixed grid of 61; "matched": that of the noise,
            as in eq (6), for equal noise only, since a prior may not take its variances from the trained weights.
        prior_mean: "zero", or "initial" for the weights before training.
        alpha: noise levels to choose from.
        draws: the most noisy networks per level.
    """
    refuse_unless_whole(draws, "draws", least=2)
    if prior == "matched" and noise != "equal":
        raise NotApplicable("a prior with the variances of the noise would depend on the trained weights")
    shift = _shift_from_prior_mean(ctx, prior_mean)
    alphas = checked_levels(alpha, "alpha")
    grid = alphas if prior == "matched" else PRIOR_SIGMAS
    priors, added = [], []
    for a in alphas:
        sigma = _noise_scale_of_weights(ctx, a, noise)
        priors.append(min((gaussian_kl(shift, sigma, s), s) for s in ((a,) if prior == "matched" else grid)))
        added.append(complexity_term(priors[-1][0], ctx.problem.n_train, delta / len(grid), form))
    errors = noisy_errors(ctx, alphas, noise, draws)
    # Precise is what the whole bound is, at every level.
    drawn = draw_until_precise(ctx, (rows + torch.tensor(added, dtype=torch.float64) for rows in errors), draws)
    value, best = min((mean, level) for level, mean in enumerate(drawn.means))
    # Hoeffding, for every level and every number of draws after which it might have stopped.
    by_draws = math.sqrt(math.log(100 * len(alphas) * draws / delta) / (2 * len(drawn.samples)))
    error, (kl, chosen) = round(value - added[best], 12), priors[best]
    return Value(
        value,
        stderr=drawn.stderrs[best],
        high=value + by_draws,
        exact=False,
        reason=f"training error with noise {error:.4g}, KL {kl:.4g} at alpha {alphas[best]:g}, "
        f"prior sigma {chosen:.3g} of a grid of {len(grid)}; {drawn.remark()}",
    )


def _shift_from_prior_mean(ctx: Context, prior_mean: str) -> Params:
    initial = ctx.problem.initial  # none where BatchNorm was folded
    if prior_mean == "zero":
        return ctx.trainable
    if initial is None or not set(ctx.trainable) <= set(initial):
        way = "pass initial= (on the command line --initial)"
        raise NotApplicable(f"needs the weights before training, and no BatchNorm; {way}")
    return {name: value.double() - initial[name].double() for name, value in ctx.trainable.items()}


def _noise_scale_of_weights(ctx: Context, alpha: float, noise: str) -> Params:
    return {name: alpha * value for name, value in noise_scale(ctx, 10.0 if noise == "per_parameter" else 0.0).items()}


def noisy_errors(ctx: Context, alphas: tuple[float, ...], noise: str, draws: int) -> Iterator[Tensor]:
    """0/1 training error of noisy networks, some draws at a time: (draws, alphas); all levels see the same draws."""
    other, sigmas = (
        context_with_loss(ctx, Loss("zero_one", zero_one_loss)),
        [_noise_scale_of_weights(ctx, a, noise) for a in alphas],
    )

    def perturbations() -> Iterator[Params]:
        generator = ctx.generator("pac_bayes")
        for _ in range(draws):
            drawn = random_normal(ctx, generator, sigmas[0])
            for sigma in sigmas:
                yield {name: value[0] * sigma[name] for name, value in drawn.items()}

    return rows_from_blocks(blocks_of_losses(other, perturbations()), len(alphas))


def zero_one_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the label does not have the strictly largest output, undefined outputs included."""
    return 1.0 - (sample_margins(outputs, targets) > 0).double()


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
    """Constants of a network that stand in the theorem."""

    widths: tuple[int, ...]  # h_0 … h_d
    norms: tuple[float, ...]  # ‖W_i‖_F
    mu: float  # of condition C1
    c2: float  # of condition C2
    c3: float  # of condition C3
    outputs: float  # mean norm of the outputs
    lipschitz: float  # C_L of the loss

    def __post_init__(self) -> None:
        """Refuse what would give no number."""
        if not self.mu > 0 or len(self.norms) != len(self.widths) - 1 or any(not norm > 0 for norm in self.norms):
            raise InputError("μ > 0 and a positive norm for each layer", f"{self.mu}, {self.norms}", where="Theorem 1")

    @property
    def units(self) -> list[float]:
        """σ_i / γ_i = μ² ‖W_i‖_F / √(h_i h_{i-1}) of each layer."""
        sizes = zip(self.norms, self.widths[1:], self.widths, strict=False)
        return [self.mu**2 * norm / math.sqrt(above * below) for norm, above, below in sizes]


def theorem_1_bound(
    c: TheoremConstants, sigmas: Sequence[float], flips: Sequence[float], n: int, delta: float
) -> float:
    """The right-hand side of Theorem 1 with the O replaced by one.

    Args:
        c: constants of the network.
        sigmas: σ_i of each layer.
        flips: C_{δ_i} of each layer.
        n: number of samples.
        delta: of the PAC-Bayes term.
    """
    gammas = [sigma / unit for sigma, unit in zip(sigmas, c.units, strict=True)]
    fixed = _product_of_numbers(gammas) - 1
    flipped = _product_of_numbers([g * c.c2 * c.c3 for g in gammas])
    flipped *= _product_of_numbers([g * flip * c.c2 for g, flip in zip(gammas, flips, strict=True)]) - 1
    kl = sum((norm / sigma) ** 2 for norm, sigma in zip(c.norms, sigmas, strict=True))
    return (fixed + flipped) * c.lipschitz * c.outputs + math.sqrt((kl + math.log(1 / delta)) / n)


def simplified_theorem_1_bound(
    c: TheoremConstants, sigma: float, n: int, delta: float, flips: Sequence[float] | None = None
) -> float:
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
    invariant_under={"layer_scaling", "permutation"},
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
        delta: the second term is meant to hold with probability at least 1 - delta.
        form: "theorem" or "simplified".
        samples: training samples on which μ, C₂ and C₃ are measured.
        flip_delta: δ_i of C_{δ_i}.
        corrected: use √(2 ln(2h/δ_i)) for C_{δ_i}, and keep C²_{δ_i} in the simplified form.
        lipschitz: C_L of the loss in the outputs; 0 takes √2 for cross-entropy and refuses others.
    """
    if not 0 < flip_delta < 1:
        raise InputError("0 < flip_delta < 1", str(flip_delta), where="sharpness_theorem_1")
    n = ctx.problem.n_train
    c = _theorem_1_constants(ctx, samples, loss_constant(ctx, lipschitz))
    constant = flip_constant_corrected if corrected else flip_constant
    flips = [constant(max(width, 2), flip_delta) for width in c.widths[1:]]

    def at(sigma: float) -> float:
        if form == "simplified":
            return simplified_theorem_1_bound(c, sigma, n, delta, flips if corrected else None)
        sigmas = [sigma / (flip * len(flips)) * unit for flip, unit in zip(flips, c.units, strict=True)]
        return theorem_1_bound(c, sigmas, flips, n, delta)

    value, sigma = min((at(sigma), sigma) for sigma in SIGMAS)
    return Value(value, exact=False, reason=f"σ {sigma:.3g}; μ {c.mu:.3g}, C2 {c.c2:.3g}, C3 {c.c3:.3g}")


def loss_constant(ctx: Context, given: float) -> float:
    """C_L of the loss in the outputs, as given; where it is 0, √2 for cross-entropy."""
    if given > 0:
        return given
    if ctx.problem.loss.name == "cross_entropy":
        return math.sqrt(2)
    raise NotApplicable(f"needs a loss that is Lipschitz in the outputs, not {ctx.problem.loss.name}; pass lipschitz=")


def _theorem_1_constants(ctx: Context, samples: int, lipschitz: float) -> TheoremConstants:
    chain = ctx.cached(relu_chain, samples=samples)
    mu = float(condition_c1_mu(ctx, samples=samples).value)
    # A network without hidden layers has no unit that could switch.
    c2 = float(condition_c2(ctx, samples=samples)[""].value) if chain.depth > 1 else 0.0
    c3 = float(condition_c3(ctx, samples=samples)[""].value)
    norms = tuple(float(weight.norm()) for weight in chain.weights)
    total = 0.0
    with torch.no_grad():
        for inputs, targets in ctx.batches():
            total += float(as_rows(ctx.forward(inputs).double()).norm(dim=1).sum())
            ctx.charge_passes("forward", len(targets))
    return TheoremConstants(chain.widths, norms, mu, c2, c3, total / ctx.problem.n_train, lipschitz)


def _product_of_numbers(parts: Sequence[float]) -> float:
    log = math.fsum(math.log1p(part) for part in parts)
    return math.exp(log) if log < 700 else math.inf
