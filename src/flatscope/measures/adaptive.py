"""Flatness that no rescaling changes because every step is measured by the size of the weights themselves."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from flatscope.ascents import Ascent, within_ball, within_box
from flatscope.context import Context
from flatscope.curvature.second_derivative import refuse_wrong_jacobian_products
from flatscope.errors import InputError, NotApplicable
from flatscope.loss import Loss
from flatscope.params import Params, count_scalars
from flatscope.perturbation import (
    context_with_loss,
    measure_of_moves,
    mirrored_rises,
    perturbed_gradients,
    random_normal,
)
from flatscope.registry import FUNCTION_SYMMETRIES, Value, measure
from flatscope.searching import bracketed_rise, highest_loss_by_ascents, number_of_further_starts, uphill_directions

Mode = Literal["worst", "average"]
Norm = Literal["l2", "linf"]
Labels = Literal["data", "model"]
Scale = Literal["weights", "none"]
Logits = Literal["as given", "normalised"]


@measure_of_moves(
    symbol=r"\max_{\|u\| \le \rho} \hat L(w + |w| \odot u) - \hat L(w)",
    paper="flatscope",
    equation="Kwon et al. 2021 for the worst case; Andriushchenko et al. 2023 for the average, and for normalised "
    "logits",
    invariant_under=FUNCTION_SYMMETRIES,
    typical={"forward": 180, "backward": 180},
    conventions="all trainable parameters, biases included; elementwise |w|, to which nothing is added; full training "
    "set; the worst case is a lower bound of the maximum; symmetries are those of scale='weights'",
    search="lower",
    bracketed=True,
)
def adaptive_sharpness(
    ctx: Context,
    *,
    rho: float = 0.5,
    norm: Norm = "l2",
    mode: Mode = "worst",
    scale: Scale = "weights",
    logits: Logits = "as given",
    restarts: int = 3,
    steps: int = 30,
    draws: int = 100,
) -> Value:
    """Rise of the training loss when every weight moves in proportion to its size: the largest, or the mean.

    Args:
        rho: radius of the ball of relative moves u.
        norm: of u: "l2", or "linf" (each weight by at most the fraction rho).
        mode: "worst": projected ascent from the gradient and from gradients with random weights of the samples;
            "average": over Gaussian u of the length rho in the mean (l2), or of standard deviation rho (linf, as
            Andriushchenko et al. have it).
        scale: "weights": weights move by |w| u; "none": by u itself, whatever their size: plain sharpness.
        logits: "as given", or "normalised": the logits of each sample divided by their standard deviation over the
            classes, so that scaling all of them changes nothing; for classifiers by cross-entropy.
        restarts: number of ascents that are taken to the end, the best of three times as many and one that are begun;
            high is above the value by as much as their ends are apart, and 10 % at the least. 1: along the gradient.
        steps: steps of each ascent.
        draws: the most perturbed networks for the average, mirror images included; even.
    """
    if not 0 < rho < math.inf or restarts < 1 or steps < 1 or draws < 4 or draws % 2:
        got = f"{rho}, {restarts}, {steps}, {draws}"
        raise InputError("rho > 0, at least one ascent and step, an even number of at least 4 draws", got)
    if logits == "normalised":
        ctx = ctx.cached(with_normalised_logits)
    sizes = _weight_sizes(ctx, scale)
    if mode == "average":
        rises = mirrored_rises(ctx, _relative_noise(ctx, sizes, rho, norm, draws // 2), draws)
        return Value(rises.means[0], stderr=rises.stderrs[0], reason=rises.remark(each=2))
    best = _highest_loss_in_relative_ball(ctx, sizes, rho, norm, restarts, steps)
    return bracketed_rise(ctx, best, f"best of {restarts} ascents, {steps} steps each")


def with_normalised_logits(ctx: Context) -> Context:
    """The same point, where the logits of each sample are divided by their standard deviation before the loss."""
    loss = ctx.problem.loss
    if loss.name != "cross_entropy" or not ctx.problem.classification:
        raise NotApplicable(f"normalised logits need one class per sample and cross-entropy, not {loss.name}")

    def of_normalised(outputs: Tensor, targets: Tensor) -> Tensor:
        return loss(outputs / outputs.std(1, correction=0, keepdim=True), targets)

    return context_with_loss(ctx, Loss("cross_entropy of normalised logits", of_normalised))


def _weight_sizes(ctx: Context, scale: str) -> Params:
    sizes = {name: value.detach().double().abs() for name, value in ctx.trainable.items()}
    return sizes if scale == "weights" else {name: torch.ones_like(value) for name, value in sizes.items()}


def _relative_noise(ctx: Context, sizes: Params, rho: float, norm: str, pairs: int) -> Iterator[Params]:
    generator = ctx.generator("adaptive_sharpness")
    sigma = rho / math.sqrt(count_scalars(sizes.values())) if norm == "l2" else rho
    for _ in range(pairs):
        drawn = random_normal(ctx, generator, sizes)
        for sign in (sigma, -sigma):
            yield {name: sign * value[0] * sizes[name] for name, value in drawn.items()}


def _highest_loss_in_relative_ball(
    ctx: Context, sizes: Params, rho: float, norm: str, restarts: int, steps: int
) -> Ascent:
    """The largest loss met by ascents in the ball of relative moves."""

    def evaluate(points: Params) -> tuple[Tensor, Params]:
        losses, gradients = perturbed_gradients(ctx, {name: u * sizes[name] for name, u in points.items()})
        return losses, {name: gradient * sizes[name] for name, gradient in gradients.items()}

    cube = {name: torch.full_like(value, rho) for name, value in sizes.items()}
    region = within_box(cube) if norm == "linf" else within_ball(rho)
    uphill = uphill_directions(ctx, "adaptive_sharpness starts", number_of_further_starts(restarts))
    starts = region.climb({name: value * sizes[name] for name, value in uphill.items()})
    return highest_loss_by_ascents(ctx, evaluate, starts, region, restarts, steps)


@measure(
    symbol=r"\|w\|_{\mathrm{fr}} = \sqrt{\mathbb{E}\, \langle w, \nabla_w \ell(f_w(x), y) \rangle^2}",
    paper="flatscope",
    equation="Liang et al. 2019: the root of their wᵀ I(w) w, I(w) the mean of the gradients' outer products",
    direction="lower",
    invariant_under=FUNCTION_SYMMETRIES,
    passes={"forward": 1, "backward": 2},
    caption="change as weights grow",
    falls_with_loss=True,
    conventions="all trainable parameters as they are given, biases included; the norm, not its square; nothing is "
    "divided by the depth: without biases and with activations such as ReLU, d layers of weights give d times the root "
    "mean square of ⟨∂ℓ/∂f, f⟩, which is the paper's closed form with d = L + 1",
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
    refuse_wrong_jacobian_products(ctx)
    total = 0.0
    for inputs, targets in ctx.batches():
        outputs, along = _derivative_along_weights(ctx, inputs)
        ctx.charge_passes("forward", len(targets))
        ctx.charge_passes("backward", 2 * len(targets))
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
        total += float((slope.double() * along).reshape(len(targets), -1).sum(1).square().sum())
    return math.sqrt(total / ctx.problem.n_train)


def _derivative_along_weights(ctx: Context, inputs: object) -> tuple[Tensor, Tensor]:
    """Outputs f, and d f_{(1+t)w} / dt at t = 0, float64: the derivative of vᵀJ w with respect to v."""
    leaves = {name: value.detach().requires_grad_() for name, value in ctx.trainable.items()}
    with torch.enable_grad():
        outputs = ctx.forward(inputs, {**ctx.params, **leaves})  # type: ignore[arg-type]
        v = torch.zeros_like(outputs, requires_grad=True)
        gradients = torch.autograd.grad(outputs, list(leaves.values()), v, create_graph=True, materialize_grads=True)
        products = [(g * w.detach()).sum() for g, w in zip(gradients, leaves.values(), strict=True)]
        along = torch.autograd.grad(torch.stack(products).sum(), v, materialize_grads=True)[0]
    return outputs.detach(), along.detach().double()
