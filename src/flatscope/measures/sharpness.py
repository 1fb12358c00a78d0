"""Sharpness: how far the training loss rises when the weights move.

Maxima are searched, not solved: what is returned is a lower bound, and the table says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import chain

import torch

from flatscope.ascents import Ascent, unit_directions, within_ball, within_box
from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.curvature.spectrum import krylov_space
from flatscope.errors import InputError, refuse_unknown
from flatscope.params import Params, count_scalars, norm, unflatten
from flatscope.perturbation import (
    Move,
    batch_gradient,
    joined_stacks,
    measure_of_moves,
    minibatches,
    mirrored_rises,
    perturbed_gradients,
    perturbed_losses,
    random_normal,
    refuse_unless_pairs,
)
from flatscope.registry import Value
from flatscope.sampling import time_is_over
from flatscope.searching import bracketed_rise, highest_loss_by_ascents, number_of_further_starts, uphill_directions

LAWS = ("gaussian", "ball", "sphere")
ROUGH_PRODUCTS = 10  # the top eigenvector is only a place to start from
SIGN_STEPS, LEAST_CORNERS = 20, 2
EVALUATIONS = 20


@measure_of_moves(
    symbol=r"\max_{\|u\|_2 \le \epsilon} \frac{\hat L(w+u) - \hat L(w)}{1 + \hat L(w)}",
    paper="yi2019",
    equation="Definition 2.1, eq (1)",
    invariant_under={"permutation"},
    passes={"forward": 195, "backward": 192, "curvature": 10},
    conventions="all trainable parameters, biases included; full training set; a lower bound of the maximum",
    search="lower",
    bracketed=True,
)
def epsilon_flatness(
    ctx: Context, *, epsilon: float = 0.01, relative: bool = True, restarts: int = 3, steps: int = 30
) -> Value:
    """Largest relative rise of the training loss in a ball around the weights: a lower bound by ascent.

    Projected ascent along the normalised gradient of the full training set, with shrinking steps. One ascent starts
    in the direction of the gradient, one in that of the top eigenvector of the Hessian, the others along gradients with
    random weights of the samples.

    Args:
        epsilon: radius of the ball.
        relative: whether the radius is epsilon times the norm of the weights.
        restarts: number of ascents that are taken to the end, the best of three times as many and two that are begun;
            high is above the value by as much as their ends are apart, and 10 % at the least. 1: along the gradient.
        steps: steps of each ascent.
    """
    _check_positive(epsilon=epsilon, restarts=restarts, steps=steps)
    radius = epsilon * norm(ctx.trainable) if relative else epsilon
    ball = within_ball(radius)
    directions = [uphill_directions(ctx, "epsilon_flatness", number_of_further_starts(restarts))]
    if restarts > 1:
        directions.append(_signed_top_direction(ctx, ball.climb))
    starts = ball.climb(joined_stacks(directions))
    best = highest_loss_by_ascents(ctx, partial(perturbed_gradients, ctx), starts, ball, restarts, steps)
    return bracketed_rise(ctx, best, f"best of {restarts} ascents, {steps} steps each", normalised=True)


def _signed_top_direction(ctx: Context, climb: Move) -> Params:
    """The Hessian's top eigenvector, roughly, with the sign that leads higher."""
    space = krylov_space(Hessian(ctx), ctx.generator("top direction"), ROUGH_PRODUCTS)
    top = unflatten(space.vectors(space.ritz()[2][:, -1:])[0], ctx.trainable)
    both = climb({name: torch.stack([value, -value]) for name, value in top.items()})
    losses = perturbed_losses(ctx, [{name: value[i] for name, value in both.items()} for i in range(2)])
    chosen = slice(1, 2) if losses[1] > losses[0] else slice(0, 1)
    return {name: value[chosen] for name, value in both.items()}


@measure_of_moves(
    symbol=r"|\mathbb{E}_u \hat L(w+u) - \hat L(w)|",
    paper="yi2019",
    equation="Definition 2.1",
    invariant_under={"permutation"},
    typical={"forward": 65},
    passes={"forward": 101},
    conventions="all trainable parameters, biases included; u has mean 0 and covariance σ²I whatever its law",
)
def expected_flatness(ctx: Context, *, sigma: float = 0.01, draws: int = 100, law: str = "gaussian") -> Value:
    r"""Mean change of the training loss when the weights are perturbed at random.

    Every draw is evaluated on the full training set, and comes with its mirror image −u, which has the same law:
    the first-order term cancels and the standard error is that of the curvature alone. Where the loss is quadratic
    the value is :math:`\tfrac{\sigma^2}{2} |\operatorname{tr} \nabla^2 \hat L(w)|` for each of the laws.

    Args:
        sigma: standard deviation of each coordinate of u.
        draws: the most perturbed networks, mirror images included; even. Fewer where the precision that is asked for
            is reached before.
        law: "gaussian": N(0, σ²I); "ball": uniform in the ball of radius σ√(p+2), p the number of parameters;
            "sphere": uniform on the sphere of radius σ√p.
    """
    _check_positive(sigma=sigma, draws=draws)
    refuse_unknown(law, LAWS, "law of expected_flatness")
    refuse_unless_pairs(draws)
    rises = mirrored_rises(ctx, _mirrored_draws(ctx, sigma, draws // 2, law), draws)
    return Value(abs(rises.means[0]), stderr=rises.stderrs[0], reason=rises.remark(each=2))


def _mirrored_draws(ctx: Context, sigma: float, pairs: int, law: str) -> Iterator[Params]:
    generator, p = ctx.generator("expected_flatness"), count_scalars(ctx.trainable.values())
    for _ in range(pairs):
        drawn = random_normal(ctx, generator, ctx.trainable)
        size = sigma
        if law != "gaussian":
            drawn = unit_directions(drawn)
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            size *= math.sqrt(p) if law == "sphere" else math.sqrt(p + 2) * uniform ** (1 / p)
        for sign in (size, -size):
            yield {name: sign * value[0] for name, value in drawn.items()}


@measure_of_moves(
    symbol=r"\zeta_\alpha = \max_{|\nu_i| \le \alpha(|w_i|+1)} \frac{\hat L(w+\nu) - \hat L(w)}{1 + \hat L(w)}",
    paper="neyshabur2017",
    equation="Section 2.4, eq (4); Appendix A",
    invariant_under={"permutation"},
    typical={"forward": 190, "backward": 170},
    caption="largest rise of the loss nearby",
    conventions="all trainable parameters, biases included; the loss, not the error; a lower bound of the maximum; "
    "batches are drawn without replacement, and depend on the order of the samples where there are more than `batch`",
    search="lower",
    bracketed=True,
)
def sharpness(
    ctx: Context,
    *,
    alpha: float = 5e-4,
    steps: int = 2000,
    batch: int = 64,
    lr: float = 0.01,
    momentum: float = 0.9,
    normalised: bool = True,
    restarts: int = 0,
) -> Value:
    """Largest relative rise of the training loss in a box around the weights: a lower bound by ascent.

    The paper's stochastic gradient ascent, kept in the box, its iterates compared on the full training set; and
    beside it steps by the sign of the full gradient, first from corner to corner of the box, then shorter ones. The
    larger of the two; high is above it by as much as the ends of these are apart, and 10 % at the least.

    Args:
        alpha: the box is |ν_i| ≤ alpha (|w_i| + 1).
        steps: steps of stochastic gradient ascent.
        batch: samples of one step; all of them where there are no more.
        lr: step size.
        momentum: of the ascent.
        normalised: whether to divide by 1 + loss; False gives the numerator.
        restarts: further stochastic ascents, from random points of the box (the paper's starts at its centre); the
            sign steps are taken to the end from two corners, and one more for each of these: the best of three times as
            many, along gradients with random weights of the samples, and that of the gradient.
    """
    _check_positive(alpha=alpha, steps=steps, batch=batch, lr=lr)
    if not 0 <= momentum < 1 or restarts < 0:
        raise InputError("momentum in [0, 1) and restarts from 0", f"{momentum}, {restarts}", where="sharpness")
    box = {name: alpha * (value.double().abs() + 1) for name, value in ctx.trainable.items()}
    generator = ctx.generator("sharpness")
    ways = (stochastic_ascent(ctx, box, steps, batch, lr, momentum, generator, run > 0) for run in range(restarts + 1))
    losses = perturbed_losses(ctx, chain.from_iterable(ways)).nan_to_num(nan=-torch.inf)
    by_batches = Ascent(losses, {}, float(losses[:-1].max()) if len(losses) > 1 else ctx.scores().loss)
    by_corners = highest_corner(ctx, box, restarts + LEAST_CORNERS)
    better, way = by_corners, "sign steps between corners"
    if by_batches.highest > by_corners.highest:  # one more end beside those of the corners
        ends = torch.cat([by_corners.losses, losses.max()[None]])
        better, way = replace(by_batches, losses=ends), f"stochastic ascent of {steps} steps"
    return bracketed_rise(ctx, better, f"best by {way}", normalised)


def stochastic_ascent(
    ctx: Context,
    box: Params,
    steps: int,
    batch: int,
    lr: float,
    momentum: float,
    generator: torch.Generator,
    random_start: bool = False,
) -> Iterator[Params]:
    """Perturbations along a stochastic gradient ascent in the box, twenty of them evenly spaced, the last included.

    With no more samples than `batch` every step sees all of them, and the ascent ends as soon as it cannot move.
    """
    point = {name: torch.zeros_like(value) for name, value in box.items()}
    if random_start:
        draw = {name: torch.rand(value.shape, generator=generator, dtype=torch.float64) for name, value in box.items()}
        point = {name: (2 * draw[name].to(value.device) - 1) * value for name, value in box.items()}
    velocity = {name: torch.zeros_like(value) for name, value in box.items()}
    whole = ctx.problem.n_train <= batch
    batches = minibatches(ctx, batch, generator)
    every = max(1, steps // EVALUATIONS)
    for step in range(1, steps + 1):
        if whole:
            stacked = perturbed_gradients(ctx, {name: value[None] for name, value in point.items()})[1]
            gradient = {name: value[0] for name, value in stacked.items()}
        else:
            gradient = batch_gradient(ctx, next(batches), point)[1]
        velocity = {name: momentum * value + gradient[name] for name, value in velocity.items()}
        following = within_box(box).project({name: value + lr * velocity[name] for name, value in point.items()})
        # Nothing moves and every gradient pushes outwards: all further steps would stay here.
        settled = whole and all(
            torch.equal(point[name], following[name]) and bool((gradient[name] * point[name] >= 0).all())
            for name in box
        )
        point = following
        ended = step == steps or settled or time_is_over(ctx)
        if step % every == 0 or ended:
            yield point
        if ended:
            break


def highest_corner(ctx: Context, box: Params, restarts: int) -> Ascent:
    """The largest loss met when stepping by the sign of the full gradient, at first from corner to corner."""
    region = within_box(box)
    starts = region.climb(uphill_directions(ctx, "corners", number_of_further_starts(restarts)))
    return highest_loss_by_ascents(ctx, partial(perturbed_gradients, ctx), starts, region, restarts, SIGN_STEPS)


def _check_positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise InputError("a positive number", str(value), where=name)
