"""Langevin chains around the weights, for the density exp(−nβ L̂(w') − γ‖w' − w‖²/2) at β = 1/log n.

The noise of a step is the mean of two draws, of which the next step uses the second again (Leimkuhler and Matthews
2013): for a quadratic loss the density is then right at any length of steps.

A gradient is that at the weights themselves, over all samples, and how much it changes on the way from there, over a
batch (Baker et al. 2019). What noise is left heats the chains: where steps are t long and the noise of a gradient of
nβ L̂ has the power s, nβ times the mean rise is too large by at most ts/(2(2 − length)). The power is read off the two
halves of each batch, and batches grow until the heat is small beside the error that is asked for.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from scipy.special import fdtri, stdtrit  # scipy.stats takes half a second to load
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.curvature.spectrum import krylov_space
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.params import Params, vectorised_over_points
from flatscope.perturbation import (
    batch_gradient,
    joined_stacks,
    minibatches,
    perturbed_gradients,
    random_normal,
    samples_as_one_batch,
    stacked_call_agrees,
)
from flatscope.samples import Batch, Inputs, as_rows, joined_inputs, map_inputs, rows_of_inputs, slice_inputs
from flatscope.sampling import time_is_over

ROUGH_PRODUCTS = 10  # the largest curvature only sets the length of steps
CHANCE = 1e-3  # that chains which agree are said not to
HEAT = 0.5  # of the error that is asked for, or that was reached: what the noise of batches may add
GROWTH = 16  # of the batch from one round to the next, at most
MOST_ROUNDS = 50  # of as many steps as were asked for, until a weak γ has pulled the chains back once


@dataclass(frozen=True)
class PosteriorChains:
    """Losses that Langevin chains around the weights have visited."""

    halves: Tensor  # mean rise of the loss over the third and the last quarter of each chain, (chains, 2)
    tempered: float  # nβ = n / log n
    steps: int  # of each chain
    batch: int | None = None  # samples of a step; None for all of them
    heat: float = 0.0  # the most by which the noise of batches makes nβ times the mean rise too large
    remembers: bool = False  # whether γ had no time to pull the chains back from where they began

    @property
    def rises(self) -> Tensor:
        """Mean rise of each chain, (chains,)."""
        return self.halves.mean(1)

    @property
    def learning_coefficient(self) -> float:
        """nβ times the mean rise."""
        return self.tempered * float(self.rises.mean())

    @property
    def stderr(self) -> float:
        """Standard error of that, by the means of the chains, and what the noise of batches may have added."""
        return math.hypot(self.tempered * _standard_error_over_chains(self.rises), self.heat)

    def remark(self) -> str:
        """Number of chains, and what speaks against them."""
        n, moved = len(self.halves), self.halves[:, 1] - self.halves[:, 0]
        parts = [f"{n} chains of {self.steps:,} steps"]
        if self.batch is not None:
            parts.append(f"batches of {self.batch:,}, whose noise adds at most {self.heat:.1g}")
        if float(moved.mean().abs()) > float(-stdtrit(n - 1, CHANCE / 2)) * _standard_error_over_chains(moved):
            parts.append("they still drift: take more steps")
        within = float(moved.square().mean()) / 4  # of a chain's mean, by its two halves
        if float(self.rises.var()) > float(fdtri(n - 1, n, 1 - CHANCE)) * within:
            parts.append("they disagree by more than they move: take more steps")
        if self.remembers:
            parts.append("gamma pulls so weakly that they may remember where they began: take more steps")
        if float(self.rises.mean()) < -2 * _standard_error_over_chains(self.rises):
            parts.append("they went downhill: the weights are no minimum")
        return "; ".join(parts)


def _standard_error_over_chains(each: Tensor) -> float:
    """Standard error of the mean of a value per chain."""
    return float(each.std()) / math.sqrt(len(each))


def sample_chains(ctx: Context, *, gamma: float, chains: int, steps: int, length: float, batch: int) -> PosteriorChains:
    """Run the chains; arguments as in `local_learning_coefficient`."""
    refuse_unless_whole(chains, "chains", least=2)
    refuse_unless_whole(steps, "steps", least=8)
    refuse_unless_whole(batch, "batch")
    if not 0 <= gamma < math.inf or not 0 < length < 2:
        raise InputError("gamma from 0 and a length between 0 and 2", f"{gamma}, {length}")
    if ctx.problem.n_train < 3:
        raise NotApplicable("at least 3 samples, for the temperature log n", str(ctx.problem.n_train))
    run = _Langevin(ctx, gamma, chains, length)
    run.take(batch if ctx.effort.precision else ctx.problem.n_train)
    while True:  # rounds that only warm up: each may find that batches must grow, or meet more curvature
        half = max(steps // 4 * 2, min(math.ceil(run.steps_to_forget), MOST_ROUNDS * steps))
        warm = run.round(half, warming=True)
        allowed = HEAT * max(
            ctx.effort.precision * run.tempered * float(warm.rises.mean()),
            run.tempered * _standard_error_over_chains(warm.rises),
        )
        if run.size is not None and not warm.heat <= allowed:
            run.take(math.ceil(run.size * min(max(warm.heat / allowed, 2), GROWTH) if allowed > 0 else GROWTH))
        elif half >= min(run.steps_to_forget, MOST_ROUNDS * steps):
            break
    seen = [run.round(half // 2) for _ in range(2)]
    halves, heat = torch.stack([part.rises for part in seen], 1), max(part.heat for part in seen)
    return PosteriorChains(halves, run.tempered, 2 * half, run.size, heat, half < run.steps_to_forget)


class _Seen(NamedTuple):
    rises: Tensor  # mean rise of the loss, (chains,)
    heat: float  # the most by which noise makes nβ times their mean too large


class _Ground(NamedTuple):
    rises: Tensor  # of the loss, (chains,)
    gradients: Params  # stacked, (chains, *shape)
    power: float  # trace of the covariance of a gradient, mean over the chains


class _Langevin:
    """The chains at one moment."""

    def __init__(self, ctx: Context, gamma: float, chains: int, length: float) -> None:
        self.ctx, self.gamma, self.chains, self.length = ctx, gamma, chains, length
        n = ctx.problem.n_train
        self.tempered = n / math.log(n)
        ritz = krylov_space(Hessian(ctx), ctx.generator("learning coefficient steps"), ROUGH_PRODUCTS).ritz()[0]
        self.stiffest = self.tempered * float(ritz.abs().max()) + gamma
        if self.stiffest == 0:
            raise NotApplicable("a loss that curves, or gamma above 0", "neither")
        self.size: int | None = None
        self.noise = ctx.generator("learning coefficient")
        self.rows = ctx.generator("learning coefficient batches")
        self._start_at_weights()

    def _start_at_weights(self) -> None:
        """All chains at the weights."""
        self.moved = {name: torch.zeros_like(value) for name, value in self._normal_noise().items()}
        self.drawn = self._normal_noise()

    def _normal_noise(self) -> Params:
        return random_normal(self.ctx, self.noise, self.ctx.trainable, self.chains)

    def take(self, size: int) -> None:
        """Set the number of samples of a step; all of them where that is half of them or more."""
        self.size = None if 2 * size >= self.ctx.problem.n_train else 2 * math.ceil(size / 2)
        self.batches = self._batches_of_step()

    @property
    def steps_to_forget(self) -> float:
        """Steps in which γ alone pulls a chain back to where it would have been."""
        return self.stiffest / (self.gamma * self.length) if self.gamma else 0.0

    def round(self, steps: int, warming: bool = False) -> _Seen:
        """Go on by so many steps; of those that warm up, the second half is looked at."""
        begun, sums, power = steps // 2 if warming else 0, torch.zeros(self.chains, dtype=torch.float64), 0.0
        batch: Batch | None = None
        before: dict[str, tuple[Tensor, Tensor]] = {}  # point and gradient of the last step
        for step in range(steps):
            if time_is_over(self.ctx):
                raise NotApplicable("the time was up before the chains were long enough")
            again = warming and step % 2 == 1  # on the same samples, so that the change of the gradient is curvature
            batch = batch if again else next(self.batches)
            slope = self._loss_and_gradients(batch)
            if not slope.rises.isfinite().all():
                if warming and self.size is not None:
                    self._start_at_weights()  # heated until it left
                    return _Seen(slope.rises, math.inf)
                raise NotApplicable("chains that stay around the weights", "a loss that overflows", fix="Lower length")
            uphill: Params = {
                name: self.tempered * slope.gradients[name] + self.gamma * u for name, u in self.moved.items()
            }
            if again:
                self.stiffest = max(self.stiffest, _largest_curvature_of_step(before, uphill, self.moved))
            before = {name: (self.moved[name], uphill[name]) for name in uphill}
            if step >= begun:
                sums += slope.rises
                power += slope.power
            self._langevin_step(uphill)
        counted = steps - begun
        time = self.length / self.stiffest
        heat = time * self.tempered**2 * power / counted / (2 * (2 - self.length))
        return _Seen(sums / counted, heat)

    def _langevin_step(self, uphill: Params) -> None:
        time, fresh = self.length / self.stiffest, self._normal_noise()
        for name, value in self.moved.items():
            self.moved[name] = value - time * uphill[name] + math.sqrt(time / 2) * (self.drawn[name] + fresh[name])
        self.drawn = fresh

    def _batches_of_step(self) -> Iterator[Batch | None]:
        """Samples of a step, `size` for each chain; None for all samples."""
        ctx, size = self.ctx, self.size
        kept = None if size is None else samples_as_one_batch(ctx)
        if size is None:
            while True:
                yield None
        elif kept is not None:
            inputs, targets = kept
            while True:
                rows = torch.randint(len(targets), (self.chains * size,), generator=self.rows)
                yield rows_of_inputs(inputs, rows), targets[rows.to(targets.device)]
        else:  # in the order of their source, the same for all chains
            for inputs, targets in minibatches(ctx, size, self.rows):
                even = len(targets) // 2 * 2
                if even:
                    part = [slice_inputs(inputs, 0, even)] * self.chains
                    yield joined_inputs(part), torch.cat([targets[:even]] * self.chains)

    def _loss_and_gradients(self, batch: Batch | None) -> _Ground:
        """The loss around the chains, less that at the weights: on all samples, or on two halves of a batch each."""
        ctx = self.ctx
        if batch is None:
            losses, gradients = perturbed_gradients(ctx, self.moved)
            return _Ground(losses - ctx.scores().loss, gradients, 0.0)
        there = {name: value.repeat_interleave(2, 0) for name, value in self.moved.items()}
        here = {name: torch.zeros_like(value) for name, value in there.items()}
        inputs, targets = batch
        k = 2 * self.chains
        losses, stacked = losses_and_gradients_of_chains(
            ctx, joined_stacks([there, here]), joined_inputs([inputs, inputs]), torch.cat([targets, targets])
        )
        changes = {name: torch.unflatten(value[:k] - value[k:], 0, (self.chains, 2)) for name, value in stacked.items()}
        gradients = {name: value.mean(1) + ctx.gradient()[name] for name, value in changes.items()}
        apart = sum(float((value[:, 0] - value[:, 1]).square().sum()) for value in changes.values())
        # The rise less its first-order term on these samples, and with that on all of them.
        first_order = {name: (ctx.gradient()[name] - value[k:]) * there[name] for name, value in stacked.items()}
        slant = torch.stack([as_rows(value).sum(1) for value in first_order.values()]).sum(0).cpu()
        rises = (losses[:k] - losses[k:] + slant).reshape(self.chains, 2).mean(1)
        return _Ground(rises, gradients, apart / 4 / self.chains)


def _largest_curvature_of_step(before: dict[str, tuple[Tensor, Tensor]], uphill: Params, moved: Params) -> float:
    """The largest change of a gradient over the step that made it, of all chains."""

    def squares(parts: list[Tensor]) -> Tensor:
        return torch.stack([as_rows(part).square().sum(1) for part in parts]).sum(0)

    steps = squares([moved[name] - was for name, (was, _) in before.items()])
    changes = squares([uphill[name] - was for name, (_, was) in before.items()])
    return float((changes / steps).sqrt().nan_to_num(nan=0.0, posinf=0.0).max())


def losses_and_gradients_of_chains(
    ctx: Context, stacked: Params, inputs: Inputs, targets: Tensor
) -> tuple[Tensor, Params]:
    """Mean losses (k,) and stacked gradients at w + u, each on samples of its own: as many for one as for another."""
    k = len(next(iter(stacked.values())))
    few = ctx.problem.device.type != "cpu" or len(targets) <= k * ctx.effort.limits.chain_samples
    run = _chains_in_one_call if few and ctx.cached(can_stack_weights_and_samples) else _chains_one_by_one
    if run is _chains_in_one_call:
        ctx.charge_passes("forward", len(targets))
        ctx.charge_passes("backward", len(targets))
    losses, gradients = run(ctx, stacked, inputs, targets)
    return losses.double().cpu(), gradients


def can_stack_weights_and_samples(ctx: Context) -> bool:
    """True if the network runs on stacked weights and stacked samples; tried on two and compared with one by one."""
    inputs, targets = next(iter(ctx.batches(size=2)))
    if len(targets) < 2:
        return False
    points = {name: torch.stack([0 * value, 0.01 * value]).double() for name, value in ctx.trainable.items()}

    def losses_and_gradients(run: object) -> list[Tensor]:
        losses, gradients = run(ctx, points, inputs, targets)  # type: ignore[operator]
        return [losses, *gradients.values()]

    return stacked_call_agrees(
        ctx, *(partial(losses_and_gradients, run) for run in (_chains_in_one_call, _chains_one_by_one))
    )


def _chains_in_one_call(ctx: Context, stacked: Params, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Params]:
    k = len(next(iter(stacked.values())))
    leaves = {
        name: (ctx.params[name] + u.to(ctx.params[name])).detach().requires_grad_() for name, u in stacked.items()
    }

    def loss(inputs: Inputs, targets: Tensor, *values: Tensor) -> Tensor:
        point = dict(zip(leaves, values, strict=True))
        return ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **point}), targets).mean()

    with torch.enable_grad():
        apart = map_inputs(inputs, lambda part: torch.unflatten(part, 0, (k, -1)))
        losses = vectorised_over_points(loss, apart, torch.unflatten(targets, 0, (k, -1)), *leaves.values())
        gradients = torch.autograd.grad(losses.sum(), list(leaves.values()), materialize_grads=True)
    return losses.detach(), {name: part.double() for name, part in zip(leaves, gradients, strict=True)}


def _chains_one_by_one(ctx: Context, stacked: Params, inputs: Inputs, targets: Tensor) -> tuple[Tensor, Params]:
    k = len(next(iter(stacked.values())))
    size, losses, parts = len(targets) // k, [], []
    for i in range(k):
        chain_rows = slice(i * size, (i + 1) * size)
        point = {name: value[i] for name, value in stacked.items()}
        loss, gradient = batch_gradient(
            ctx, (slice_inputs(inputs, chain_rows.start, chain_rows.stop), targets[chain_rows]), point
        )
        losses.append(loss)
        parts.append({name: value[None] for name, value in gradient.items()})
    return torch.tensor(losses, dtype=torch.float64), joined_stacks(parts)
