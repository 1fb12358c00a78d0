"""Singular learning theory at one minimum: WBIC and the local learning coefficient, from Langevin chains around it.

The chains sample the density exp(−nβ L̂(w') − γ‖w' − w‖²/2) at the inverse temperature β = 1/log n, where the mean of
n L̂ is Watanabe's information criterion. The noise of a step is the mean of two draws, of which the next step uses the
second again (Leimkuhler and Matthews, 2013): for a quadratic loss the density is then right at any length of steps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from scipy.special import fdtri, stdtrit  # scipy.stats takes half a second to load
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.curvature.spectrum import krylov_space
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.params import Params
from flatscope.perturbation import (
    batch_gradient,
    measure_of_moves,
    numbered_minibatches,
    perturbed_gradients,
    random_normal,
)
from flatscope.registry import Value, declared, derived
from flatscope.samples import Batch
from flatscope.stopping import out_of_time

ROUGH_PRODUCTS = 10  # the largest curvature only sets the length of steps
CHANCE = 1e-3  # that chains which agree are said not to


@measure_of_moves(
    symbol=r"\hat\lambda(w) = \tfrac{n}{\log n} \left(\mathbb{E}_{w'} \hat L(w') - \hat L(w)\right)",
    paper="flatscope",
    equation="Lau et al. 2023, local learning coefficient with localisation γ",
    invariant_under={"permutation"},
    typical={"forward": 400, "backward": 400, "curvature": 10},
    conventions="all trainable parameters, biases included; the loss of a sample is taken as its negative "
    "log-likelihood (the squared error as that of Gaussian noise of variance 1/2, without its constant); local: the "
    "prior is a Gaussian of precision γ around the weights; grows with n; where there are more samples than `batch`, "
    "batches are drawn without replacement and their noise heats the chains a little",
)
def local_learning_coefficient(
    ctx: Context, *, gamma: float = 100.0, chains: int = 8, steps: int = 400, length: float = 0.5, batch: int = 64
) -> Value:
    r"""Half the number of directions in which the loss rises around the weights: d/2 at a regular minimum.

    Where the loss is quadratic with curvatures h the value is
    :math:`\tfrac12 \sum_i n\beta h_i / (n\beta h_i + \gamma)`; flat directions count nothing.

    Args:
        gamma: precision of the Gaussian that holds the chains around the weights.
        chains: number of independent chains; the standard error is that of their means.
        steps: steps of each chain, of which the second half counts.
        length: of the steps, in units of the shortest time scale 1 / (nβ λ_max + γ); stable below 2.
        batch: samples of one step; all of them where there are no more.
    """
    found = ctx.sweep(sample_chains, gamma=gamma, chains=chains, steps=steps, length=length, batch=batch)
    each = found.tempered * found.rises
    return Value(float(each.mean()), stderr=found.stderr(each), reason=found.remark())


@derived(
    local_learning_coefficient,
    symbol=r"\mathrm{WBIC} = n\, \mathbb{E}_{w'} \hat L(w'),\ \beta = 1/\log n",
    equation="Watanabe 2013; around the weights as in Lau et al. 2023",
)
def wbic(ctx: Context, **options: Any) -> Value:
    """Watanabe's information criterion around the weights: n times the mean loss of the posterior at 1/log n.

    n times the training loss, plus log n times the local learning coefficient; from the same chains as that.
    """
    found = ctx.sweep(sample_chains, **{**declared(local_learning_coefficient).options, **options})
    each = ctx.problem.n_train * (ctx.scores().loss + found.rises)
    return Value(float(each.mean()), stderr=found.stderr(each), reason=found.remark())


@dataclass(frozen=True)
class PosteriorChains:
    """What Langevin chains around the weights have seen of the loss."""

    halves: Tensor  # mean rise of the loss over the third and the last quarter of each chain, (chains, 2)
    tempered: float  # nβ = n / log n
    steps: int  # of each chain

    @property
    def rises(self) -> Tensor:
        """Mean rise of each chain, (chains,)."""
        return self.halves.mean(1)

    @staticmethod
    def stderr(each: Tensor) -> float:
        """Standard error of the mean of a value per chain."""
        return float(each.std()) / math.sqrt(len(each))

    def remark(self) -> str:
        """How many chains, and what speaks against them."""
        n, moved = len(self.halves), self.halves[:, 1] - self.halves[:, 0]
        parts = [f"{n} chains of {self.steps:,} steps"]
        if float(moved.mean().abs()) > float(-stdtrit(n - 1, CHANCE / 2)) * self.stderr(moved):
            parts.append("they still drift: take more steps")
        within = float(moved.square().mean()) / 4  # of a chain's mean, by its two halves
        if float(self.rises.var()) > float(fdtri(n - 1, n, 1 - CHANCE)) * within:
            parts.append("they disagree by more than they move: take more steps")
        if float(self.rises.mean()) < -2 * self.stderr(self.rises):
            parts.append("they went downhill: the weights are no minimum")
        return "; ".join(parts)


def sample_chains(ctx: Context, *, gamma: float, chains: int, steps: int, length: float, batch: int) -> PosteriorChains:
    """Run the chains; arguments as in `local_learning_coefficient`."""
    refuse_unless_whole(chains, "chains", least=2)
    refuse_unless_whole(steps, "steps", least=8)
    refuse_unless_whole(batch, "batch")
    if not 0 <= gamma < math.inf or not 0 < length < 2:
        raise InputError("gamma from 0 and a length between 0 and 2", f"{gamma}, {length}")
    n = ctx.problem.n_train
    if n < 3:
        raise NotApplicable("at least 3 samples, for the temperature log n", str(n))
    tempered = n / math.log(n)
    ritz = krylov_space(Hessian(ctx), ctx.generator("learning coefficient steps"), ROUGH_PRODUCTS).ritz()[0]
    stiffest = tempered * float(ritz.abs().max()) + gamma
    if stiffest == 0:
        raise NotApplicable("a loss that curves, or gamma above 0", "neither")
    time = length / stiffest
    generator, quarter = ctx.generator("learning coefficient"), steps // 4
    moved = {name: torch.zeros(chains, *v.shape, dtype=torch.float64).to(v.device) for name, v in ctx.trainable.items()}
    sums = torch.zeros(chains, 2, dtype=torch.float64)
    streams = []
    if n > batch:
        own = (ctx.generator(f"learning coefficient batches {chain}") for chain in range(chains))
        streams = [numbered_minibatches(ctx, batch, stream) for stream in own]
    before = random_normal(ctx, generator, ctx.trainable, chains)
    for step in range(4 * quarter):
        rises, gradients = _rises(ctx, moved, streams)
        if not rises.isfinite().all():
            raise NotApplicable("chains that stay around the weights", "a loss that overflows", fix="Lower length")
        if step >= 2 * quarter:
            sums[:, step // quarter - 2] += rises
        if out_of_time(ctx):
            raise NotApplicable("the time was up before the chains were long enough")
        fresh = random_normal(ctx, generator, ctx.trainable, chains)
        for name, value in moved.items():
            uphill = tempered * gradients[name] + gamma * value
            moved[name] = value - time * uphill + math.sqrt(time / 2) * (before[name] + fresh[name])
        before = fresh
    return PosteriorChains(sums / quarter, tempered, 4 * quarter)


def _rises(ctx: Context, moved: Params, streams: list[Iterator[tuple[Batch, Tensor | None]]]) -> tuple[Tensor, Params]:
    """Rise of the loss (chains,) and its stacked gradients: on all samples, or each chain on a batch of its stream."""
    own = ctx.scores()
    if not streams:
        losses, gradients = perturbed_gradients(ctx, moved)
        return losses - own.loss, gradients
    rises, parts = [], []
    for chain, stream in enumerate(streams):
        batch, numbers = next(stream)
        loss, gradient = batch_gradient(ctx, batch, {name: value[chain] for name, value in moved.items()})
        # The same samples at the weights themselves: most of what a batch differs from all samples cancels.
        here = batch_gradient(ctx, batch, {})[0] if numbers is None else float(own.losses[numbers].mean())
        rises.append(loss - here)
        parts.append(gradient)
    return torch.tensor(rises, dtype=torch.float64), {name: torch.stack([g[name] for g in parts]) for name in moved}
