"""The two sides of a PAC-Bayes bound as functions of the noise: how far it raises the loss, and what it costs.

Weights get Gaussian noise with standard deviations σ_i = α(10|w_i| + 1) (Neyshabur et al. 2017, Appendix A). A flat
minimum bears much noise, and much noise makes the divergence from the prior small.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import islice, repeat
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.params import Params, count_scalars, vectorised_over_points
from flatscope.perturbation import (
    can_stack_weights,
    checked_levels,
    measure_of_moves,
    numbered_minibatches,
)
from flatscope.registry import Value, measure
from flatscope.samples import Batch
from flatscope.sampling import draw_until_precise

ALPHAS = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
SLOPE = 10.0


@measure_of_moves(
    symbol=r"\mathbb{E}_\nu \hat L(w+\nu) - \hat L(w),\ \nu_i \sim N(0, \alpha^2 (10|w_i|+1)^2)",
    paper="neyshabur2017",
    equation="Section 2.4, eq (5); Appendix A",
    invariant_under={"permutation"},
    typical={"forward": 30},
    passes={"forward": 5500},
    caption="rise of the loss under noise",
    conventions="all trainable parameters, biases included; the loss, not the error; the loss at w is taken on the "
    "same mini-batch; batches depend on the order of the samples where there are more than `batch`; a GPU draws other "
    "noise of the same law than a CPU",
)
def expected_sharpness(
    ctx: Context, *, alpha: Any = ALPHAS, draws: int = 1000, batch: int = 64, slope: float = SLOPE
) -> list[Value]:
    """Mean rise of the training loss when every weight gets noise in proportion to its size.

    Every draw comes with its mirror image −ν, which has the same law, on the same mini-batch: the first-order term
    cancels. All alphas see the same draws and batches, so that the curve is smooth in alpha.

    Args:
        alpha: noise levels, a row each; or one number.
        draws: the most perturbed networks of each level, mirror images included; even. Fewer where a level has
            reached the precision that is asked for.
        batch: samples on which a draw is evaluated; all of them where there are no more.
        slope: σ_i = alpha (slope |w_i| + 1); 0 for the same noise on every weight.
    """
    alphas = checked_alphas(alpha)
    values = []
    for a in alphas:  # each begins the same draws anew, and stops by itself
        rises = paired_rises(ctx, alphas=(a,), draws=draws, batch=batch, slope=slope)
        drawn = draw_until_precise(ctx, rises, draws // 2)
        value = Value(drawn.means[0], stderr=drawn.stderrs[0], options={"alpha": a}, reason=drawn.remark(each=2))
        values.append(value)
    return values


@measure(
    symbol=r"\mathrm{KL} = \tfrac{1}{2\alpha^2} \sum_i \left(\tfrac{w_i}{10|w_i|+1}\right)^2",
    paper="neyshabur2017",
    equation="Section 2.4; Appendix A",
    direction="lower",
    invariant_under={"permutation"},
    passes={},
    on_folded=True,
    conventions="all trainable parameters, biases included; the true divergence, with the ½ that Appendix A leaves "
    "out; the prior N(0, σ²) takes σ from the trained weights: a measure, no bound",
)
def pac_bayes_kl(ctx: Context, *, alpha: Any = ALPHAS, appendix: bool = False, slope: float = SLOPE) -> list[Value]:
    """Divergence of the perturbed weights N(w, σ²) from the prior N(0, σ²), at each noise level alpha.

    Args:
        alpha: noise levels, a row each; or one number.
        appendix: twice the value, as the paper's figures have it.
        slope: σ_i = alpha (slope |w_i| + 1); 0 gives ‖w‖² / 2α², the divergence of eq (6).
    """
    alphas, scale = checked_alphas(alpha), noise_scale(ctx, slope)
    squares = (float((value.double() / scale[name]).square().sum()) for name, value in ctx.trainable.items())
    unit = math.fsum(squares) / (1 if appendix else 2)  # α² KL does not depend on α
    return [Value(unit / a**2, options={"alpha": a}) for a in alphas]


def checked_alphas(alpha: Any) -> tuple[float, ...]:
    """Noise levels as a tuple of positive numbers, each once."""
    return checked_levels(alpha, "alpha")


def noise_scale(ctx: Context, slope: float = SLOPE) -> Params:
    """σ_i / α = slope |w_i| + 1 for every trainable parameter, float64."""
    if not 0 <= slope < math.inf:
        raise InputError("a slope of at least 0", str(slope), where="slope")
    return {name: slope * value.detach().double().abs() + 1 for name, value in ctx.trainable.items()}


def paired_rises(
    ctx: Context, *, alphas: tuple[float, ...], draws: int, batch: int, slope: float = SLOPE
) -> Iterator[Tensor]:
    """Rise of the loss, mean of a draw and its mirror image, for each pair and noise level: (pairs, alphas).

    Some pairs at a time, draws / 2 in all: what is not asked for is not computed.
    """
    if draws % 2 or draws < 4 or batch < 1:
        raise InputError("an even number of draws, at least 4, and batches of at least 1", f"{draws}, {batch}")
    n = ctx.problem.n_train
    drawn = numbered_minibatches(ctx, min(batch, n), ctx.generator("expected_sharpness batches"))
    samples: Iterator[tuple[list[Batch], Tensor | None]] = (([part], chosen) for part, chosen in drawn)
    if n <= batch:
        parts, chosen = next(samples)
        everything = parts if len(parts[0][1]) == n else list(ctx.batches())  # other shapes do not stack
        samples = repeat((everything, chosen))
    # Stacks of one network have so much arithmetic that its ten sizes together take longer than one by one.
    calls_are_dear = (
        ctx.problem.device.type != "cpu" or n <= ctx.effort.limits.stacked_samples
    ) and _pairs_drawn_together(ctx) > 1
    run = _losses_on_stacks if calls_are_dear and ctx.cached(can_stack_weights) else _losses_one_by_one
    both_signs = [sign * a for a in alphas for sign in (1, -1)]
    for noise in _noise_draws(ctx, draws // 2, slope):
        each, numbers = zip(*islice(samples, len(next(iter(noise.values())))), strict=True)
        if None in numbers:
            sizes = torch.tensor([0.0, *both_signs], dtype=torch.float64)
            here, moved = run(ctx, noise, sizes, each).tensor_split([1], dim=1)
        else:  # the losses of all samples at w itself are known after one pass
            sizes = torch.tensor(both_signs, dtype=torch.float64)
            moved = run(ctx, noise, sizes, each)  # (pairs, sizes)
            here = torch.stack([ctx.scores().losses.cpu().double()[chosen].mean() for chosen in numbers])[:, None]
        ctx.charge_passes("forward", sum(len(targets) for parts in each for _, targets in parts) * len(sizes))
        yield moved.reshape(len(each), len(alphas), 2).mean(2) - here


def _noise_draws(ctx: Context, pairs: int, slope: float) -> Iterator[Params]:
    """Draws of ν / α in stacks, whose size depends on the network alone: the same draws whatever else is asked."""
    scale, device = noise_scale(ctx, slope), ctx.problem.device
    # A GPU draws for itself (other numbers of the same law): to draw and send them took more than half of the time.
    generator = torch.Generator(device).manual_seed(ctx.generator("expected_sharpness").initial_seed())
    block = _pairs_drawn_together(ctx)
    for start in range(0, pairs, block):
        copies = min(block, pairs - start)
        # Single precision: eight times as fast to draw.
        yield {
            name: torch.randn(copies, *value.shape, generator=generator, device=device, dtype=torch.float32) * value
            for name, value in scale.items()
        }


def _pairs_drawn_together(ctx: Context) -> int:
    """Pairs of networks that are drawn together."""
    limits = ctx.effort.limits
    return max(1, min(limits.drawn_pairs, limits.stacked_bytes // (128 * count_scalars(ctx.trainable.values()))))


def _losses_one_by_one(ctx: Context, noise: Params, sizes: Tensor, each: Sequence[list[Batch]]) -> Tensor:
    """Mean loss (pairs, sizes) at w + size · noise, each pair on samples of its own."""
    names, rows = list(noise), []
    here = [ctx.params[name] for name in names]
    for index, parts in enumerate(each):
        drawn, row = [noise[name][index] for name in names], []
        for size in sizes.tolist():  # few calls, none of which waits for a GPU
            steps = [step.to(at) for step, at in zip(torch._foreach_mul(drawn, size), here, strict=True)]
            moved = dict(zip(names, torch._foreach_add(here, steps), strict=True)) if size else {}
            with torch.no_grad():
                losses = [ctx.problem.loss(ctx.forward(x, {**ctx.params, **moved}), y) for x, y in parts]
            row.append(torch.cat(losses).double().mean())
        rows.append(torch.stack(row))
    return torch.stack(rows).cpu()


def _losses_on_stacks(ctx: Context, noise: Params, sizes: Tensor, each: Sequence[list[Batch]]) -> Tensor:
    """The same on stacked weights and stacked batches."""
    firsts = [parts[0] for parts in each]
    alike = all(isinstance(inputs, Tensor) and len(targets) == len(firsts[0][1]) for inputs, targets in firsts)
    if not alike or len(each[0]) > 1:
        return _losses_one_by_one(ctx, noise, sizes, each)

    def mean_loss(point: Params, inputs: Tensor, targets: Tensor) -> Tensor:
        return ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **point}), targets).double().mean()

    points = {}
    for name, value in noise.items():
        shaped = sizes.to(value.device).reshape(1, -1, *[1] * (value.ndim - 1))
        points[name] = ctx.params[name] + (shaped * value[:, None]).to(ctx.params[name])  # (pairs, sizes, ...)
    inputs = torch.stack([torch.as_tensor(part) for part, _ in firsts])
    targets = torch.stack([part for _, part in firsts])
    with torch.no_grad():
        over_sizes = torch.vmap(mean_loss, in_dims=(0, None, None))
        losses: Tensor = vectorised_over_points(over_sizes, points, inputs, targets)
    return losses.cpu()
