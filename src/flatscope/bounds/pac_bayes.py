"""PAC-Bayes bounds on the expected error of a network whose weights get Gaussian noise (Neyshabur et al. 2017, §2.4).

The prior may not depend on the data. The noise of the trained network may: the bound holds for all of it at once.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.errors import InputError, NotApplicable, UnknownNameError
from flatscope.loss import Loss
from flatscope.measures.pac_bayes import checked_alphas, noise_scale
from flatscope.params import Params
from flatscope.perturbation import perturbed_losses, random_normal
from flatscope.registry import Value, bound

FORMS = ("eq5", "eq6", "maurer")
# Standard deviations of the prior, fixed before any data is seen: ten per decade.
PRIOR_SIGMAS = tuple(10 ** (k / 10) for k in range(-50, 11))


def complexity_term(kl: float, n: int, delta: float, form: str = "eq5") -> float:
    """What a PAC-Bayes bound adds to the training error of the perturbed network.

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
        own = sigma[name].double()
        prior = prior_sigma[name].double() if isinstance(prior_sigma, dict) else torch.full_like(own, prior_sigma)
        parts = (prior / own).log() + (own.square() + distance.double().square()) / (2 * prior.square()) - 0.5
        total += float(parts.sum())
    return max(total, 0.0)


@bound(
    symbol=r"\mathbb{E}_\nu \hat L(w+\nu) + \sqrt{\tfrac1n (\mathrm{KL}(w+\nu \| P) + \ln\tfrac{2n}{\delta})}",
    paper="neyshabur2017",
    equation="(5), (6)",
    assumptions=(
        "loss in [0, 1]: the 0/1 error (so by construction)",
        "prior independent of the data: mean zero or the weights before training, its variance from a fixed grid "
        "whose size is paid for",
        "bounds the error of the network with noisy weights, not of the network itself",
        "samples drawn independently (cannot be checked)",
    ),
    needs={"classes"},
    cost="long",
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

    The training error of the noisy network is a mean over draws on the full training set. Its standard error is
    given; `high` adds what makes up for the draws with a further chance of error of delta / 100.

    Args:
        ctx: the network.
        delta: the bound holds with probability at least 1 - delta.
        form: "eq5", "eq6" (refused where it is not known to hold) or "maurer" (the tightest).
        noise: "per_parameter": σ_i = alpha (10|w_i| + 1); "equal": σ_i = alpha.
        prior: "grid": one standard deviation for all weights, from a fixed grid of 61; "matched": that of the noise,
            as in eq (6), for equal noise only, since a prior may not take its variances from the trained weights.
        prior_mean: "zero", or "initial" for the weights before training.
        alpha: noise levels to choose from.
        draws: noisy networks per level.
    """
    if draws < 2:
        raise InputError("at least 2 draws", str(draws), where="draws")
    if prior == "matched" and noise != "equal":
        raise NotApplicable("a prior with the variances of the noise would depend on the trained weights")
    shift = _shift(ctx, prior_mean)
    alphas = checked_alphas(alpha)
    grid = alphas if prior == "matched" else PRIOR_SIGMAS
    errors = ctx.sweep(noisy_errors, alphas=alphas, noise=noise, draws=draws)  # (alphas, draws)
    levels = []
    for a, found in zip(alphas, errors, strict=True):
        sigma = _sigma(ctx, a, noise)
        kl, chosen = min((gaussian_kl(shift, sigma, s), s) for s in ((a,) if prior == "matched" else grid))
        error = float(found.mean())
        total = error + complexity_term(kl, ctx.problem.n_train, delta / len(grid), form)
        levels.append(_Level(total, error, kl, a, chosen, float(found.std()) / math.sqrt(draws)))
    best = min(levels, key=lambda level: level.value)
    by_draws = math.sqrt(math.log(100 * len(alphas) / delta) / (2 * draws))  # Hoeffding, for every level at once
    return Value(
        best.value,
        stderr=best.stderr,
        high=best.value + by_draws,
        exact=False,
        reason=f"training error with noise {best.error:.4g}, KL {best.kl:.4g} at alpha {best.alpha:g}, prior sigma "
        f"{best.prior:.3g} of a grid of {len(grid)}",
    )


@dataclass(frozen=True)
class _Level:
    value: float
    error: float
    kl: float
    alpha: float
    prior: float
    stderr: float


def _shift(ctx: Context, prior_mean: str) -> Params:
    initial = ctx.problem.initial  # none where BatchNorm was folded
    if prior_mean == "zero":
        return ctx.trainable
    if initial is None or not set(ctx.trainable) <= set(initial):
        way = "pass initial= (on the command line --initial)"
        raise NotApplicable(f"needs the weights before training, and no BatchNorm; {way}")
    return {name: value.double() - initial[name].double() for name, value in ctx.trainable.items()}


def _sigma(ctx: Context, alpha: float, noise: str) -> Params:
    return {name: alpha * value for name, value in noise_scale(ctx, 10.0 if noise == "per_parameter" else 0.0).items()}


def noisy_errors(ctx: Context, *, alphas: tuple[float, ...], noise: str, draws: int) -> Tensor:
    """0/1 training error of each noisy network: (alphas, draws); all levels see the same draws."""
    problem = copy.copy(ctx.problem)
    problem.loss = Loss("zero_one", zero_one)
    other = Context(problem, ctx.params, seed=ctx.seed)
    other.passes = ctx.passes

    def perturbations() -> Iterator[Params]:
        for a in alphas:
            generator, sigma = ctx.generator("pac_bayes"), _sigma(ctx, a, noise)
            for _ in range(draws):
                drawn = random_normal(ctx, generator, sigma)
                yield {name: value[0] * sigma[name] for name, value in drawn.items()}

    return perturbed_losses(other, perturbations()).reshape(len(alphas), draws)


def zero_one(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the label does not have the strictly largest output, undefined outputs included."""
    return 1.0 - (sample_margins(outputs, targets) > 0).double()
