"""The bound of a network whose noise is trained for it (Dziugaite and Roy 2017).

Weights are drawn from a Gaussian Q with a mean and a standard deviation of its own for every weight, both trained to
make the bound small. The bound holds for all Q at once, so that nothing is paid for the training. How the training goes
decides how small the number is, never whether it is true: what is returned is computed afresh from Q.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.context import Context, sample_margins
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.generalization_bounds.pac_bayes import gaussian_kl, zero_one_loss
from flatscope.generalization_bounds.relative_entropy import (
    STEPS_PER_E,
    certified_error,
    log_price_of_prior_variance,
    prior_variance_of,
)
from flatscope.params import Params, flatten, unflatten
from flatscope.perturbation import samples_as_one_batch
from flatscope.progress import progress_bar
from flatscope.registry import Value, bound
from flatscope.samples import Batch, rows_of_inputs

GRID = 3000  # the largest j that is looked at; all of them are paid for
# Where training starts: on the way from the prior's mean to the network's weights, with noise relative to the size of
# the weights; the best of all pairs by so many batches each. The loss counts half: steps lower it fast, KL slowly.
WAYS, SIZES, LOOKS = (0.0, 0.25, 0.5, 0.75, 1.0), (0.25, 0.5, 1.0), 4
PARTS, FLAT = 5, 1e-3  # training ends where a part of its steps lowered the objective by less than this
TEST_SHARE = 10  # one draw for the test error to so many for the training error


@dataclass(frozen=True)
class Posterior:
    """Independent normal weights."""

    mean: Params
    sigma: Params

    def drawn(self, generator: torch.Generator) -> Params:
        """One vector of all weights."""
        return {
            name: mean + self.sigma[name] * torch.randn(mean.shape, generator=generator, dtype=mean.dtype).to(mean)
            for name, mean in self.mean.items()
        }


def best_prior(posterior: Posterior, centre: Params, largest: float) -> tuple[float, int]:
    """KL(Q‖N(centre, λ_j)) and j, where the sum of KL and 2 ln j is smallest.

    Args:
        posterior: Q.
        centre: mean of the prior.
        largest: c of the grid of variances.
    """
    shift = {name: mean.double() - centre[name].double() for name, mean in posterior.mean.items()}
    variances = flatten(posterior.sigma).double().square()
    total = float((flatten(shift).square() + variances).sum())
    index = torch.arange(1, GRID + 1, dtype=torch.float64)
    log_variance = math.log(largest) - index / STEPS_PER_E
    price = (total / log_variance.exp() + len(variances) * log_variance) / 2 + 2 * index.log()  # but for constants
    best = int(price.argmin()) + 1
    return gaussian_kl(shift, posterior.sigma, math.sqrt(prior_variance_of(best, largest))), best


def surrogate_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy in bits, per sample: at least 1 wherever the label is not the most probable class."""
    one = outputs.ndim == 1 or outputs.shape[1] == 1
    losses = (
        functional.softplus(-sample_margins(outputs, targets))
        if one
        else functional.cross_entropy(outputs, targets, reduction="none")
    )
    return losses / math.log(2)


@dataclass(frozen=True)
class Training:
    """Settings of the training of the prior and of the posterior."""

    steps: int
    batch: int
    lr: float


Slopes = Callable[[Batch], tuple[float, float, list[Tensor]]]


def trained_posterior(
    ctx: Context, samples: Batch, weights: Params, centre: Params, largest: float, delta: float, training: Training
) -> Posterior:
    """Q by steps on the surrogate, with a draw of the weights for each batch, plus √((KL + ln …) / 2(n-1)).

    The prior's variance is at each step the best one for the Q of that step: it needs no training of its own.

    Args:
        ctx: the network.
        samples: those that the prior has not seen.
        weights: of the network, near which Q begins.
        centre: mean of the prior.
        largest: c of the grid of the prior's variances.
        delta: as in `certified_error`.
        training: steps, batch and rate.
    """
    n, origin, generator = len(samples[1]), flatten(centre), ctx.generator("pac_bayes_optimised, noise")
    scale = _root_mean_square_weight(weights)
    whole = (flatten(weights) - origin) / scale
    offset, log_sigma = whole.clone(), torch.zeros_like(whole)  # of the mean from the centre, in units of the scale

    def slopes(batch: Batch) -> tuple[float, float, list[Tensor]]:
        shift, sigma = scale * offset, log_sigma.exp()
        noise = torch.randn(len(offset), generator=generator, dtype=offset.dtype).to(offset.device)
        # A draw and its mirror image on the same samples: what is linear in the noise cancels.
        sides = (_loss_and_slope(ctx, batch, origin + shift + sign * sigma * noise, weights) for sign in (1, -1))
        (right, up), (left, down) = sides
        squares = sigma.square()
        total = float((squares + shift.square()).sum(dtype=torch.float64))
        variance = min(total / len(offset), prior_variance_of(1, largest))
        index = STEPS_PER_E * math.log(largest / variance)
        kl = (total / variance + len(offset) * (math.log(variance) - 1)) / 2 - float(log_sigma.sum(dtype=torch.float64))
        cost = math.sqrt((max(kl, 0.0) + log_price_of_prior_variance(index, n, delta)) / (2 * (n - 1)))
        weight = 1 / (4 * (n - 1) * cost)  # of a derivative of KL in that of the cost
        by_offset = scale * ((up + down) / 2 + weight / variance * shift)
        by_sigma = (up - down) / 2 * noise * sigma + weight * (squares / variance - 1)
        return (right + left) / 2, cost, [by_offset, by_sigma]

    looks = ctx.generator("pac_bayes_optimised, looks")

    def objective(way: float, size: float) -> float:
        offset.copy_(way * whole)
        log_sigma.fill_(math.log(size * scale))
        values = [slopes(random_batch(samples, training.batch, looks)) for _ in range(LOOKS)]
        return sum(loss / 2 + cost for loss, cost, _ in values)

    objective(*min(itertools.product(WAYS, SIZES), key=lambda pair: objective(*pair)))
    _adam_descent(ctx, "Posterior", samples, [offset, log_sigma], slopes, training, share=0.6)
    return Posterior(unflatten(origin + scale * offset, weights), unflatten(log_sigma.exp(), weights))


def trained_weights(ctx: Context, samples: Batch, start: Params, training: Training) -> Params:
    """Weights after training on these samples alone, without noise."""
    origin, scale = flatten(start), _root_mean_square_weight(start)
    offset = torch.zeros_like(origin)

    def slopes(batch: Batch) -> tuple[float, float, list[Tensor]]:
        loss, slope = _loss_and_slope(ctx, batch, origin + scale * offset, start)
        return loss, 0.0, [scale * slope]

    _adam_descent(ctx, "Prior", samples, [offset], slopes, training, share=0.3)
    return unflatten(origin + scale * offset, start)


def _root_mean_square_weight(weights: Params) -> float:
    """The root mean square of all weights: a step changes one by lr times that at most."""
    return math.sqrt(float(flatten(weights).square().mean(dtype=torch.float64))) or 1.0


def _loss_and_slope(ctx: Context, batch: Batch, weights: Tensor, like: Params) -> tuple[float, Tensor]:
    inputs, targets = batch
    leaves = {name: value.detach().requires_grad_() for name, value in unflatten(weights, like).items()}
    loss = surrogate_loss(ctx.forward(inputs, {**ctx.params, **leaves}), targets).mean()
    slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    ctx.charge_passes("forward", len(targets))
    ctx.charge_passes("backward", len(targets))
    return float(loss.detach()), torch.cat([slope.flatten() for slope in slopes])


def _adam_descent(
    ctx: Context, what: str, samples: Batch, moved: list[Tensor], slopes: Slopes, training: Training, share: float
) -> None:
    """Steps of Adam on these tensors, with a rate that falls to zero; they end early on flat ground, or by the clock.

    Args:
        ctx: its deadline is kept.
        what: for the bar.
        samples: to draw batches from.
        moved: tensors that are changed in place.
        slopes: batch -> loss, cost of the divergence, and the derivatives of their sum.
        training: steps, batch and rate.
        share: of the time that is left, where there is a deadline.
    """
    optimizer = torch.optim.Adam(moved, lr=training.lr, fused=True)
    generator = ctx.generator(f"pac_bayes_optimised, {what}")
    spent, part = _share_of_time_spent(ctx, share), max(1, training.steps // PARTS)
    losses: list[float] = []
    with progress_bar(what, total=training.steps, lines=True) as advance:
        for step in range(training.steps):
            done = max(step / training.steps, spent())
            if done >= 1 or (step % part == 0 and _has_stopped_falling(losses, part)):
                break
            for group in optimizer.param_groups:
                group["lr"] = training.lr * (1 - done)
            loss, cost, derivatives = slopes(random_batch(samples, training.batch, generator))
            for tensor, derivative in zip(moved, derivatives, strict=True):
                tensor.grad = derivative
            optimizer.step()
            losses.append(loss + cost)
            advance()


def _has_stopped_falling(objectives: list[float], part: int) -> bool:
    before, last = objectives[-2 * part : -part], objectives[-part:]
    return len(before) == part and math.fsum(before) - math.fsum(last) < FLAT * part


def _share_of_time_spent(ctx: Context, share: float) -> Callable[[], float]:
    """Fraction spent of this share of the time left, the same on every rank; 0 where there is no deadline."""
    begun, deadline, ranks = time.monotonic(), ctx.effort.deadline, ctx.problem.ranks
    if deadline is None:
        return lambda: 0.0
    whole = max(share * (deadline - begun), 1e-9)

    def spent() -> float:
        time_share = torch.tensor([(time.monotonic() - begun) / whole], dtype=torch.float64)
        return float(ranks.summed([time_share])[0]) / ranks.size

    return spent


def random_batch(samples: Batch, size: int, generator: torch.Generator) -> Batch:
    """Samples drawn with replacement; all of them, once, where no more are asked for."""
    n = len(samples[1])
    return samples if size >= n else _rows_of_batch(samples, torch.randint(n, (size,), generator=generator))


def sampled_errors(
    ctx: Context, posterior: Posterior, samples: Batch, draws: int, batch: int, part: str, share: float
) -> Tensor:
    """0/1 error of each of so many draws of all weights, each on a batch of its own: (draws,), float64.

    They are independent, and their mean is in expectation the error on all samples: that is all that Chernoff's
    inequality needs, so that many draws on a few samples say more than few draws on all. By the clock it ends early.
    """
    generator, spent = ctx.generator(f"pac_bayes_optimised, {part}"), _share_of_time_spent(ctx, share)
    errors: list[Tensor] = []
    with torch.no_grad(), progress_bar("Draws", total=draws, lines=True) as advance:
        while len(errors) < draws and not (len(errors) > 1 and spent() >= 1):
            inputs, targets = random_batch(samples, batch, generator)
            outputs = ctx.forward(inputs, {**ctx.params, **posterior.drawn(generator)})
            errors.append(zero_one_loss(outputs, targets).mean())
            ctx.charge_passes("forward", len(targets))
            advance()
    return torch.stack(errors).double().cpu()


@bound(
    symbol=r"\mathrm{kl}^{-1}\!\left(\mathrm{kl}^{-1}\!\left(\hat e,\ \tfrac{1}{k}\ln\tfrac{1}{\delta'}\right),\ "
    r"\frac{\mathrm{KL}(Q \parallel N(w_0, \lambda_j)) + \ln\frac{\pi^2 j^2 n}{6 \delta}}{n-1}\right)",
    paper="flatscope",
    equation="Dziugaite and Roy (2017), Theorem 1 and Section 3",
    assumptions=(
        "bounds the expected 0/1 error of the STOCHASTIC classifier, which draws its weights from Q for each input, "
        "not of the network itself",
        "samples drawn independently of each other from one distribution (cannot be checked)",
        "prior independent of the samples that are counted: weights before training, frozen ones and buffers must not "
        "depend on them, nor the scaling of inputs (cannot be checked)",
        "variance of the prior from a fixed grid, every value of which is paid for; Q may depend on everything",
        "draws of the weights by a pseudo-random generator count as independent",
    ),
    needs={"classes"},
    cost="long",
    typical={"sample": 1.2e7},
    exact=False,
    on_folded=True,
)
def pac_bayes_optimised(
    ctx: Context,
    *,
    delta: float,
    prior: Literal["initial", "zero", "half"] = "initial",
    steps: int = 5000,
    batch: int = 128,
    lr: float = 0.02,
    draws: int = 10_000,
    sampling: float = 0.2,
    prior_variance: float = 0.1,
) -> Value:
    """Expected error of the network with weights drawn from a Gaussian that was trained to make this bound small.

    Its mean starts between the prior's and the weights of the network, where that is best. The value holds all that is
    paid for: the training samples, the prior's grid and the draws of the weights.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        prior: its mean: "initial" for the weights before training (refused where they are not given, or BatchNorm was
            folded), "zero", or "half": the weights before training, trained on one half of the samples drawn at random;
            the bound then counts the other half alone.
        steps: of training, at most; each draws one vector of weights for a batch of samples.
        batch: samples of a step and of a draw.
        lr: rate of the first step: by how much a logarithm of a standard deviation changes at most.
        draws: of all weights, to estimate the training error; the value makes up for their number.
        sampling: share of delta that is spent on these draws.
        prior_variance: c of the grid of variances c exp(-j/100), j = 1, 2, …
    """
    for number, where, least in ((steps, "steps", 1), (batch, "batch", 1), (draws, "draws", 2)):
        refuse_unless_whole(number, where, least)
    if not (0 < sampling < 1 and prior_variance > 0 and lr > 0):
        got = f"{sampling}, {prior_variance}, {lr}"
        raise InputError("0 < sampling < 1, prior_variance > 0, lr > 0", got, where="pac_bayes_optimised")
    samples, training = _samples_of_part(ctx, "train"), Training(steps, batch, lr)
    if len(samples[1]) < (fewest := 4 if prior == "half" else 2):
        raise NotApplicable(f"at least {fewest} samples", str(len(samples[1])))
    centre = _prior_centre(ctx, prior)
    if prior == "half":
        # Two halves drawn at random, whatever is in them.
        order = torch.randperm(len(samples[1]), generator=ctx.generator("pac_bayes_optimised, halves"))
        seen, samples = (_rows_of_batch(samples, half) for half in order.tensor_split(2))
        centre = trained_weights(ctx, seen, centre, training)
    n, (by_posterior, by_draws) = len(samples[1]), (delta * (1 - sampling), delta * sampling)
    posterior = trained_posterior(ctx, samples, ctx.trainable, centre, prior_variance, by_posterior, training)
    kl, index = best_prior(posterior, centre, prior_variance)
    if not math.isfinite(kl):
        raise NotApplicable("the noise diverged in training; the option lr takes a smaller rate")
    said = ""
    if ctx.problem.test is not None:
        few = max(2, draws // TEST_SHARE)
        tested = sampled_errors(ctx, posterior, _samples_of_part(ctx, "test"), few, batch, "test", share=0.1)
        said = f", test error {_mean_with_stderr(tested)}"
    errors = sampled_errors(ctx, posterior, samples, draws, batch, "train", share=0.9)
    value = certified_error(float(errors.mean()), len(errors), kl, index, n, by_posterior, by_draws)
    return Value(
        value,
        reason=f"of the stochastic classifier: training error {_mean_with_stderr(errors)}{said}; "
        f"KL {kl:.4g} from a prior at {_MEANS[prior]} with variance "
        f"{prior_variance_of(index, prior_variance):.3g} (j = {index}); n = {n:,}; delta {by_posterior:g} and "
        f"{by_draws:g} for {len(errors):,} draws",
    )


_MEANS = {"initial": "the weights before training", "zero": "zero", "half": "weights trained on the other half"}


def _mean_with_stderr(errors: Tensor) -> str:
    return f"{float(errors.mean()):.4f} ± {float(errors.std()) / math.sqrt(len(errors)):.1g}"


def _samples_of_part(ctx: Context, part: str) -> Batch:
    batch = samples_as_one_batch(ctx, part)
    if batch is None:
        raise NotApplicable(f"needs {part} samples of one shape that fit in memory, to draw batches from")
    return batch


def _prior_centre(ctx: Context, prior: str) -> Params:
    """Weights that the training data have not touched; for "half" those from which the prior's training starts."""
    if prior == "zero":
        return {name: torch.zeros_like(value) for name, value in ctx.trainable.items()}
    initial = ctx.problem.initial  # none where BatchNorm was folded: its statistics are of the training data
    if initial is None or not set(ctx.trainable) <= set(initial):
        way = 'pass initial= (on the command line --initial), or the option prior="zero"'
        raise NotApplicable(f"needs the weights before training, and no BatchNorm; {way}")
    if all(torch.equal(initial[name], value) for name, value in ctx.trainable.items()):
        raise NotApplicable("weights before training that equal the trained ones are no prior: they may know the data")
    return {name: initial[name] for name in ctx.trainable}


def _rows_of_batch(samples: Batch, rows: Tensor) -> Batch:
    inputs, targets = samples
    return rows_of_inputs(inputs, rows), targets[rows.to(targets.device)]
