"""Flatness that no rescaling changes because every step is measured by the size of the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from typing import Literal

import torch

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.measures.margins import FUNCTION_SYMMETRIES
from flatscope.params import Params, count
from flatscope.perturbation import (
    Ascent,
    ascend,
    blocks_of_losses,
    perturbed_gradients,
    random_normal,
    shrinking,
    unit_directions,
)
from flatscope.registry import Value, measure
from flatscope.stopping import draw_until_precise, out_of_time, pair_means

Mode = Literal["worst", "average"]
Norm = Literal["l2", "linf"]
Labels = Literal["data", "model"]


@measure(
    symbol=r"\max_{\|u\| \le \rho} \hat L(w + |w| \odot u) - \hat L(w)",
    paper="flatscope",
    equation="Kwon et al. 2021 for the worst case; Andriushchenko et al. 2023 for the average",
    direction="lower",
    invariant_under=FUNCTION_SYMMETRIES,
    cost="long",
    typical={"forward": 94, "backward": 94},
    exact=False,
    on_folded=True,
    falls_with_loss=True,
    conventions="all trainable parameters, biases included; elementwise |w|; full training set; the worst case is a "
    "lower bound of the maximum",
    search="lower",
)
def adaptive_sharpness(
    ctx: Context,
    *,
    rho: float = 0.5,
    norm: Norm = "l2",
    mode: Mode = "worst",
    restarts: int = 3,
    steps: int = 30,
    draws: int = 100,
) -> Value:
    """Rise of the training loss when every weight moves in proportion to its size: the largest, or the mean.

    Args:
        rho: radius of the ball of relative moves u.
        norm: of u: "l2", or "linf" (each weight by at most the fraction rho).
        mode: "worst": projected ascent from the gradient and from random directions; "average": over Gaussian u of
            the length rho in the mean (l2), or of standard deviation rho (linf).
        restarts: number of ascents, the first along the gradient.
        steps: steps of each ascent.
        draws: the most perturbed networks for the average, mirror images included; even.
    """
    if not 0 < rho < math.inf or restarts < 1 or steps < 1 or draws < 4 or draws % 2:
        got = f"{rho}, {restarts}, {steps}, {draws}"
        raise InputError("rho > 0, at least one ascent and step, an even number of at least 4 draws", got)
    loss = ctx.scores().loss
    if mode == "average":
        losses = pair_means(blocks_of_losses(ctx, _relative_noise(ctx, rho, norm, draws // 2)))
        rises = draw_until_precise(ctx, (block - loss for block in losses), draws // 2)
        return Value(rises.means[0], stderr=rises.stderrs[0], reason=rises.remark(each=2))
    best = _highest(ctx, rho, norm, restarts, steps)
    rise, how = max(0.0, best.highest - loss), f"lower bound: best of {restarts} ascents, {steps} steps each"
    return Value(rise, low=rise, reason="; ".join(part for part in (how, best.remark(loss)) if part))


def _sizes(ctx: Context) -> Params:
    return {name: value.detach().double().abs() for name, value in ctx.trainable.items()}


def _relative_noise(ctx: Context, rho: float, norm: str, pairs: int) -> Iterator[Params]:
    sizes, generator = _sizes(ctx), ctx.generator("adaptive_sharpness")
    sigma = rho / math.sqrt(count(sizes.values())) if norm == "l2" else rho
    for _ in range(pairs):
        drawn = random_normal(ctx, generator, sizes)
        for sign in (sigma, -sigma):
            yield {name: sign * value[0] * sizes[name] for name, value in drawn.items()}


def _highest(ctx: Context, rho: float, norm: str, restarts: int, steps: int) -> Ascent:
    """The largest loss met by ascents in the ball of relative moves."""
    sizes = _sizes(ctx)

    def evaluate(points: Params) -> tuple[torch.Tensor, Params]:
        losses, gradients = perturbed_gradients(ctx, {name: u * sizes[name] for name, u in points.items()})
        return losses, {name: gradient * sizes[name] for name, gradient in gradients.items()}

    def climb(gradients: Params) -> Params:
        if norm == "linf":
            return {name: rho * value.sign() for name, value in gradients.items()}
        return {name: rho * value for name, value in unit_directions(gradients).items()}

    def project(points: Params) -> Params:
        if norm == "linf":
            return {name: value.clamp(-rho, rho) for name, value in points.items()}
        squares = torch.stack([value.square().flatten(1).sum(1) for value in points.values()]).sum(0)
        shrink = (rho / squares.sqrt()).clamp(max=1)  # a point in the centre: ρ/0 = ∞, cut to 1
        return {name: value * shrink.reshape(-1, *[1] * (value.ndim - 1)) for name, value in points.items()}

    starts = {name: (value * sizes[name])[None] for name, value in ctx.gradient().items()}
    if restarts > 1:
        drawn = random_normal(ctx, ctx.generator("adaptive_sharpness starts"), sizes, restarts - 1)
        starts = {name: torch.cat([value, drawn[name]]) for name, value in starts.items()}
    return ascend(evaluate, climb(starts), climb, project, shrinking(steps), partial(out_of_time, ctx))


@measure(
    symbol=r"\|w\|_{\mathrm{fr}} = \sqrt{\mathbb{E}\, \langle w, \nabla_w \ell(f_w(x), y) \rangle^2}",
    paper="flatscope",
    equation="Liang et al. 2019",
    direction="lower",
    invariant_under=FUNCTION_SYMMETRIES,
    passes={"forward": 1, "backward": 2},
    falls_with_loss=True,
    conventions="all trainable parameters as they are given, biases included; the norm, not its square",
)
def fisher_rao_norm(ctx: Context, *, labels: Labels = "data") -> float:
    """Length of the weights in the metric of the Fisher information: how fast the loss changes as all weights grow.

    The derivative of the outputs along w comes from two backward passes for all samples of a batch at once.

    Args:
        labels: "data": labels as they are (the empirical Fisher information); "model": labels drawn from the
            network's own probabilities, in closed form, for cross-entropy.
    """
    if labels == "model" and ctx.problem.loss.name != "cross_entropy":
        raise NotApplicable(f"labels drawn from the network need cross-entropy, not {ctx.problem.loss.name}")
    total = 0.0
    for inputs, targets in ctx.batches():
        outputs, along = _derivative_along_weights(ctx, inputs)
        ctx.count("forward", len(targets))
        ctx.count("backward", 2 * len(targets))
        if labels == "model":
            if outputs.ndim > 2:
                raise NotApplicable("labels drawn from the network need one class per sample")
            p = outputs.double().softmax(1)  # (n, C)
            mean = (p * along).sum(1, keepdim=True)
            total += float((p * (along - mean).square()).sum())
            continue
        leaf = outputs.requires_grad_()
        with torch.enable_grad():
            slope = torch.autograd.grad(ctx.problem.loss(leaf, targets).sum(), leaf)[0]
        total += float((slope.double() * along).flatten(1).sum(1).square().sum())
    return math.sqrt(total / ctx.problem.n_train)


def _derivative_along_weights(ctx: Context, inputs: object) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs f, and d f_{(1+t)w} / dt at t = 0, float64: the derivative of vᵀJ w with respect to v."""
    leaves = {name: value.detach().requires_grad_() for name, value in ctx.trainable.items()}
    with torch.enable_grad():
        outputs = ctx.forward(inputs, {**ctx.params, **leaves})  # type: ignore[arg-type]
        v = torch.zeros_like(outputs, requires_grad=True)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), v, create_graph=True, materialize_grads=True)
        products = [(g * w.detach()).sum() for g, w in zip(gradients, leaves.values(), strict=True)]
        along = torch.autograd.grad(torch.stack(products).sum(), v, materialize_grads=True)[0]
    return outputs.detach(), along.detach().double()
