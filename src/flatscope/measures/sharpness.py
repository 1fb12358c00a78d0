"""Sharpness: how far the training loss rises when the weights move.

Maxima are searched, not solved: what is returned is a lower bound, and the table says so.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import chain

import torch

from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.curvature.spectrum import krylov_space
from flatscope.errors import InputError, NotApplicable, refuse_unknown
from flatscope.params import Params, count, norm, unflatten
from flatscope.perturbation import (
    Ascent,
    Move,
    ascend,
    batch_gradient,
    blocks_of_losses,
    minibatches,
    perturbed_gradients,
    perturbed_losses,
    random_normal,
    shrinking,
    unit_directions,
    within_ball,
    within_box,
)
from flatscope.registry import Value, measure
from flatscope.samples import Batch
from flatscope.stopping import draw_until_precise, out_of_time, pair_means

LAWS = ("gaussian", "ball", "sphere")
ROUGH_PRODUCTS = 10  # the top eigenvector is only a place to start from
SIGN_STEPS = 10
EVALUATIONS = 20


@measure(
    symbol=r"\max_{\|u\|_2 \le \epsilon} \frac{\hat L(w+u) - \hat L(w)}{1 + \hat L(w)}",
    paper="yi2019",
    equation="Definition 2.1, eq (1)",
    direction="lower",
    invariant_under={"permutation"},
    cost="long",
    passes={"forward": 97, "backward": 94, "curvature": 10},
    exact=False,
    on_folded=True,
    falls_with_loss=True,
    conventions="all trainable parameters, biases included; full training set; a lower bound of the maximum",
    search="lower",
)
def epsilon_flatness(
    ctx: Context, *, epsilon: float = 0.01, relative: bool = True, restarts: int = 3, steps: int = 30
) -> Value:
    """Largest relative rise of the training loss in a ball around the weights: a lower bound by ascent.

    Projected ascent along the normalised gradient of the full training set, with shrinking steps. One ascent starts
    in the direction of the gradient, one in that of the top eigenvector of the Hessian, the others at random.

    Args:
        epsilon: radius of the ball.
        relative: whether the radius is epsilon times the norm of the weights.
        restarts: number of ascents.
        steps: steps of each ascent.
    """
    _positive(epsilon=epsilon, restarts=restarts, steps=steps)
    radius = epsilon * norm(ctx.trainable) if relative else epsilon
    best = highest_in_ball(ctx, radius, restarts, steps)
    how = [f"best of {restarts} ascents, {steps} steps each", best.remark(ctx.scores().loss)]
    return _lower_bound(ctx, best.highest, how, normalised=True)


def highest_in_ball(ctx: Context, radius: float, restarts: int, steps: int) -> Ascent:
    """The largest training loss found within a distance of the weights, and the perturbation that leads there."""
    climb, project = within_ball(radius)
    directions = [{name: value[None] for name, value in ctx.gradient().items()}]
    if restarts > 1:
        directions.append(_signed_top_direction(ctx, climb))
    if restarts > 2:
        generator = ctx.generator("epsilon_flatness")
        directions.append(random_normal(ctx, generator, ctx.trainable, restarts - 2))
    starts = climb({name: torch.cat([one[name] for one in directions]) for name in ctx.trainable})
    evaluate, late = partial(perturbed_gradients, ctx), partial(out_of_time, ctx)
    return ascend(evaluate, starts, climb, project, shrinking(steps), late)


def _signed_top_direction(ctx: Context, climb: Move) -> Params:
    """The Hessian's top eigenvector, roughly, with the sign that leads higher."""
    space = krylov_space(Hessian(ctx), ctx.generator("top direction"), ROUGH_PRODUCTS)
    top = unflatten(space.vectors(space.ritz()[2][:, -1:])[0], ctx.trainable)
    both = climb({name: torch.stack([value, -value]) for name, value in top.items()})
    losses = perturbed_losses(ctx, [{name: value[i] for name, value in both.items()} for i in range(2)])
    chosen = slice(1, 2) if losses[1] > losses[0] else slice(0, 1)
    return {name: value[chosen] for name, value in both.items()}


@measure(
    symbol=r"|\mathbb{E}_u \hat L(w+u) - \hat L(w)|",
    paper="yi2019",
    equation="Definition 2.1",
    direction="lower",
    invariant_under={"permutation"},
    cost="long",
    typical={"forward": 65},
    passes={"forward": 101},
    exact=False,
    on_folded=True,
    falls_with_loss=True,
    conventions="all trainable parameters, biases included; u has mean 0 and covariance σ²I whatever its law",
)
def expected_flatness(ctx: Context, *, sigma: float = 0.01, draws: int = 100, law: str = "gaussian") -> Value:
    r"""How far the training loss changes on average when the weights are perturbed at random.

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
    _positive(sigma=sigma, draws=draws)
    refuse_unknown(law, LAWS, "law of expected_flatness")
    if draws % 2 or draws < 4:
        raise InputError("an even number of draws, at least 4", str(draws), where="draws")
    losses = pair_means(blocks_of_losses(ctx, _mirrored_draws(ctx, sigma, draws // 2, law)))
    loss = ctx.scores().loss
    rises = draw_until_precise(ctx, (block - loss for block in losses), draws // 2)
    return Value(abs(rises.means[0]), stderr=rises.stderrs[0], reason=rises.remark(each=2))


def _mirrored_draws(ctx: Context, sigma: float, pairs: int, law: str) -> Iterator[Params]:
    generator, p = ctx.generator("expected_flatness"), count(ctx.trainable.values())
    for _ in range(pairs):
        drawn = random_normal(ctx, generator, ctx.trainable)
        size = sigma
        if law != "gaussian":
            drawn = unit_directions(drawn)
            uniform = float(torch.rand((), generator=generator, dtype=torch.float64))
            size *= math.sqrt(p) if law == "sphere" else math.sqrt(p + 2) * uniform ** (1 / p)
        for sign in (size, -size):
            yield {name: sign * value[0] for name, value in drawn.items()}


@measure(
    symbol=r"\zeta_\alpha = \max_{|\nu_i| \le \alpha(|w_i|+1)} \frac{\hat L(w+\nu) - \hat L(w)}{1 + \hat L(w)}",
    paper="neyshabur2017",
    equation="Section 2.4, eq (4); Appendix A",
    direction="lower",
    invariant_under={"permutation"},
    cost="long",
    typical={"forward": 120, "backward": 100},
    exact=False,
    on_folded=True,
    headline="largest rise of the loss nearby",
    falls_with_loss=True,
    conventions="all trainable parameters, biases included; the loss, not the error; a lower bound of the maximum; "
    "batches are drawn without replacement, and depend on the order of the samples where there are more than `batch`",
    search="lower",
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
    beside it steps from corner to corner of the box by the sign of the full gradient. The larger of the two.

    Args:
        alpha: the box is |ν_i| ≤ alpha (|w_i| + 1).
        steps: steps of stochastic gradient ascent.
        batch: samples of one step; all of them where there are no more.
        lr: step size.
        momentum: of the ascent.
        normalised: whether to divide by 1 + loss; False gives the numerator.
        restarts: further stochastic ascents, from random points of the box (the paper's starts at its centre); the
            sign steps start from the corner of the gradient, a random one, and one more for each of these.
    """
    _positive(alpha=alpha, steps=steps, batch=batch, lr=lr)
    if not 0 <= momentum < 1 or restarts < 0:
        raise InputError("momentum in [0, 1) and restarts from 0", f"{momentum}, {restarts}", where="sharpness")
    box = {name: alpha * (value.double().abs() + 1) for name, value in ctx.trainable.items()}
    generator = ctx.generator("sharpness")
    ways = (stochastic_ascent(ctx, box, steps, batch, lr, momentum, generator, run > 0) for run in range(restarts + 1))
    losses = perturbed_losses(ctx, chain.from_iterable(ways)).nan_to_num(nan=-torch.inf)
    by_batches = Ascent(losses, {}, float(losses[:-1].max()) if len(losses) > 1 else ctx.scores().loss)
    by_corners = highest_corner(ctx, box, restarts + 1)
    better = by_batches if by_batches.highest >= by_corners.highest else by_corners
    way = f"stochastic ascent of {steps} steps" if better is by_batches else "sign steps between corners"
    return _lower_bound(ctx, better.highest, [f"best by {way}", better.remark(ctx.scores().loss)], normalised)


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
    _, project = within_box(box)
    whole = ctx.problem.n_train <= batch
    batches = None if whole else minibatches(ctx, batch, generator)
    every = max(1, steps // EVALUATIONS)
    for step in range(1, steps + 1):
        gradient = _gradient_at(ctx, point, None if batches is None else next(batches))
        velocity = {name: momentum * value + gradient[name] for name, value in velocity.items()}
        following = project({name: value + lr * velocity[name] for name, value in point.items()})
        # Nothing moves and every gradient pushes outwards: all further steps would stay here.
        settled = whole and all(
            torch.equal(point[name], following[name]) and bool((gradient[name] * point[name] >= 0).all())
            for name in box
        )
        point = following
        ended = step == steps or settled or out_of_time(ctx)
        if step % every == 0 or ended:
            yield point
        if ended:
            break


def highest_corner(ctx: Context, box: Params, random_corners: int) -> Ascent:
    """The largest loss met when stepping from corner to corner of the box by the sign of the full gradient."""
    climb, project = within_box(box)
    directions = {name: value[None] for name, value in ctx.gradient().items()}
    drawn = random_normal(ctx, ctx.generator("corners"), box, random_corners)
    directions = {name: torch.cat([value, drawn[name]]) for name, value in directions.items()}
    sizes = [2.0] * SIGN_STEPS  # twice the half-width: from any corner to any other
    evaluate, late = partial(perturbed_gradients, ctx), partial(out_of_time, ctx)
    return ascend(evaluate, climb(directions), climb, project, sizes, late)


def _gradient_at(ctx: Context, perturbation: Params, batch: Batch | None) -> Params:
    """Gradient of the mean loss of a batch, or of all training samples, at the perturbed weights."""
    if batch is None:
        stacked = {name: value[None] for name, value in perturbation.items()}
        return {name: value[0] for name, value in perturbed_gradients(ctx, stacked)[1].items()}
    return batch_gradient(ctx, batch, perturbation)[1]


def _lower_bound(ctx: Context, highest: float, how: list[str], normalised: bool) -> Value:
    """The rise from the loss at the weights themselves, which lie in the set: never negative."""
    loss = ctx.scores().loss
    rise = max(0.0, highest - loss)
    if normalised:
        if loss <= -1:
            raise NotApplicable("a loss above -1, since the rise is divided by 1 + loss", f"{loss:.4g}")
        rise /= 1 + loss
    return Value(rise, low=rise, exact=False, reason=f"lower bound: {'; '.join(part for part in how if part)}")


def _positive(**options: float) -> None:
    for name, value in options.items():
        if not value > 0:
            raise InputError("a positive number", str(value), where=name)
