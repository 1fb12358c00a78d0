"""The training loss, and its gradient, at many perturbed weights: the hot loop of everything that moves weights.

One pass over the data serves a block of perturbed networks. They run together on stacked weights (`torch.vmap`)
where calls cost more than arithmetic: on a GPU (LeNet-5: losses 4 times as fast, gradients twice), and on data sets of
a few samples (2 to 7 times as fast on a CPU); on larger ones a CPU is as fast or faster with one after the other, and
so is a GPU with networks of millions of weights, whose stacks would be grouped convolutions.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import islice
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.loss import Loss
from flatscope.params import Params, count_scalars, vectorised_over_points
from flatscope.registry import measure
from flatscope.samples import Batch, Inputs, joined_inputs, rows_of_inputs, tensors_of_inputs
from flatscope.sampling import Draws, draw_until_precise, pair_means

# Of measures that move the weights and look at the training loss.
measure_of_moves = partial(measure, direction="lower", cost="long", exact=False, on_folded=True, falls_with_loss=True)
Evaluate = Callable[[Params], tuple[Tensor, Params]]
Move = Callable[[Params], Params]


def perturbed_losses(ctx: Context, perturbations: Iterable[Params]) -> Tensor:
    """Mean training loss at w + u for each u: (k,), float64, on the CPU.

    Args:
        ctx: the point w; its pass counter is charged.
        perturbations: one dictionary u per value, holding the parameters that move. Read a block at a time, so
            that a generator of many draws never has them all in memory.
    """
    return torch.cat([torch.zeros(0, dtype=torch.float64), *blocks_of_losses(ctx, perturbations)])


def blocks_of_losses(ctx: Context, perturbations: Iterable[Params]) -> Iterator[Tensor]:
    """The same, a block at a time: what is not asked for is not computed."""
    source = iter(perturbations)
    while block := list(islice(source, _networks_at_once(ctx))):
        stacked = {name: torch.stack([perturbation[name] for perturbation in block]) for name in block[0]}
        yield _losses_and_gradients_by_batch(ctx, stacked, with_gradients=False)[0]


def context_with_loss(ctx: Context, loss: Loss) -> Context:
    """The same point under another loss."""
    problem = copy.copy(ctx.problem)
    problem.__dict__.pop("_rewritten", None)  # it has the loss of before
    problem.loss = loss
    return ctx.on(problem, ctx.params)


def checked_levels(given: Any, where: str, *, zero: bool = False) -> tuple[float, ...]:
    """One or several levels of noise as a tuple of positive numbers, zero among them where it is allowed, each once."""
    each = (given,) if isinstance(given, Real) else tuple(given) if isinstance(given, Sequence) else ()
    numbers = [float(a) for a in each if isinstance(a, Real) and not isinstance(a, bool)]
    numbers = [a for a in numbers if 0 <= a < math.inf and (a or zero)]
    if not each or len(set(numbers)) < len(each):
        expected = "numbers from 0 up, each once" if zero else "positive numbers, each once"
        raise InputError(expected, repr(given), where=where, fix="Give a number or several")
    return tuple(numbers)


def refuse_unless_pairs(draws: int) -> None:
    """Raise where draws do not come in two pairs or more, each a perturbation and its mirror image."""
    if draws % 2 or draws < 4:
        raise InputError("an even number of draws, at least 4", str(draws), where="draws")


def mirrored_rises(ctx: Context, perturbations: Iterable[Params], draws: int) -> Draws:
    """Rise of the training loss, mean of a perturbation and its mirror image, which follows it, until precise enough.

    Args:
        ctx: the point w.
        perturbations: as in `perturbed_losses`.
        draws: the most of them.
    """
    loss = ctx.scores().loss
    means = pair_means(blocks_of_losses(ctx, perturbations))
    return draw_until_precise(ctx, (block - loss for block in means), draws // 2)


def perturbed_gradients(ctx: Context, stacked: Params) -> tuple[Tensor, Params]:
    """Mean training loss (k,) and its gradient, stacked (k, *shape), at w + u for perturbations stacked likewise."""
    return _losses_and_gradients_by_batch(ctx, stacked, with_gradients=True)


def batch_gradient(ctx: Context, batch: Batch, perturbation: Params) -> tuple[float, Params]:
    """Mean loss of one batch at w + u, and its gradient, float64; parameters that u leaves out stay where they are."""
    at = {name: v + perturbation[name].to(v) if name in perturbation else v for name, v in ctx.trainable.items()}
    loss, gradients = loss_and_gradient(ctx, batch, at)
    for kind in ("forward", "backward"):
        ctx.charge_passes(kind, len(batch[1]))
    return float(loss), {name: gradient.double() for name, gradient in gradients.items()}


def loss_and_gradient(ctx: Context, batch: Batch, at: Params, weights: Tensor | None = None) -> tuple[Tensor, Params]:
    """Mean loss of one batch, or its sum with a weight for each sample, and the gradient; no pass is counted."""
    inputs, targets = batch
    leaves = {name: value.detach().requires_grad_() for name, value in at.items()}
    with torch.enable_grad():
        losses = ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **leaves}), targets)
        loss = losses.mean() if weights is None else (losses * weights.to(losses)).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    return loss.detach(), dict(zip(leaves, gradients, strict=True))


def joined_stacks(parts: Iterable[Params]) -> Params:
    """Stacked points of several stacks as one."""
    stacks = list(parts)
    return {name: torch.cat([stack[name] for stack in stacks]) for name in stacks[0]}


def random_normal(ctx: Context, generator: torch.Generator, like: Params, copies: int = 1) -> Params:
    """Standard normal numbers stacked (copies, *shape), float64: drawn on the CPU so that devices agree."""
    device = ctx.problem.device
    return {
        name: torch.randn(copies, *value.shape, generator=generator, dtype=torch.float64).to(device)
        for name, value in like.items()
    }


def minibatches(ctx: Context, size: int, generator: torch.Generator) -> Iterator[Batch]:
    """Training batches without end: a new random order for each pass over samples that fit in memory.

    Samples that do not fit (or whose shapes differ from batch to batch) come in the order of their source.
    """
    return (batch for batch, _ in numbered_minibatches(ctx, size, generator))


def numbered_minibatches(ctx: Context, size: int, generator: torch.Generator) -> Iterator[tuple[Batch, Tensor | None]]:
    """The same, each with the numbers of its samples; None where they come as their source gives them."""
    kept = samples_as_one_batch(ctx)
    while True:
        if kept is None:
            yield from ((batch, None) for batch in ctx.batches(size=size))
            continue
        inputs, targets = kept
        order = torch.randperm(len(targets), generator=generator)
        for start in range(0, len(order) - size + 1, size):  # every batch has the same weight: no ragged last one
            chosen = order[start : start + size]
            yield (rows_of_inputs(inputs, chosen), targets[chosen.to(targets.device)]), chosen


def can_stack_weights(ctx: Context) -> bool:
    """True if the network runs on stacked weights; tried on two samples and compared with running one by one."""
    inputs, targets = next(iter(ctx.batches(size=2)))
    points = {name: torch.stack([value, 1.01 * value]).requires_grad_() for name, value in ctx.trainable.items()}

    def losses_and_gradients(run: Callable[..., Tensor]) -> Sequence[Tensor]:
        losses = run(ctx, points, inputs, targets)
        return losses, *torch.autograd.grad(losses.sum(), list(points.values()), materialize_grads=True)

    with torch.enable_grad():
        return stacked_call_agrees(
            ctx, *(partial(losses_and_gradients, run) for run in (_losses_of_stacked_points, _losses_point_by_point))
        )


def stacked_call_agrees(
    ctx: Context, together: Callable[[], Sequence[Tensor]], one_by_one: Callable[[], Sequence[Tensor]]
) -> bool:
    """True if a call on stacked networks or samples works, and gives what they give one by one."""
    try:
        stacked = list(together())
    except (RuntimeError, TypeError, ValueError, NotImplementedError, NotApplicable):
        return False  # an operation without a batching rule, one that looks at values, or a weight that cannot be told
    try:
        pairs = list(zip(stacked, one_by_one(), strict=True))
    except (RuntimeError, TypeError, ValueError, NotImplementedError):
        return False
    return all(agree_to_rounding(ctx, *pair) for pair in pairs)


def agree_to_rounding(ctx: Context, one: Tensor, other: Tensor) -> bool:
    """True if two ways to compute the same differ by no more than the rounding of the network's numbers."""
    rounding = 1e4 * torch.finfo(ctx.problem.dtype).eps
    return bool((one - other).abs().max() <= rounding * (1 + other.abs().max()))


def _networks_at_once(ctx: Context) -> int:
    """Perturbed networks of one pass, bounded by the memory of their weights."""
    limits = ctx.effort.limits
    return max(1, min(limits.stacked_networks, limits.stacked_bytes // (8 * count_scalars(ctx.trainable.values()))))


def _losses_and_gradients_by_batch(ctx: Context, stacked: Params, with_gradients: bool) -> tuple[Tensor, Params]:
    k = stack_size(stacked)
    points = {name: (ctx.params[name] + value.to(ctx.params[name])).detach() for name, value in stacked.items()}
    losses = torch.zeros(k, dtype=torch.float64)
    gradients = {name: torch.zeros_like(point, dtype=torch.float64) for name, point in points.items()}
    limits = ctx.effort.limits
    by_arithmetic = ctx.problem.n_train > limits.stacked_samples and (
        ctx.problem.device.type == "cpu" or _networks_at_once(ctx) < limits.stacked_networks
    )
    groups, size = [slice(i, i + 1) for i in range(k)], ctx.problem.batch_size
    if k > 1 and not by_arithmetic and ctx.cached(can_stack_weights):
        groups, size = [slice(0, k)], min(size, max(1, limits.stacked_rows // k))
    run = _losses_of_stacked_points if len(groups) < k else _losses_point_by_point
    with torch.set_grad_enabled(with_gradients):
        for inputs, targets in ctx.share(size=size):
            for group in groups:  # whose graph is gone before the next begins
                leaves = {name: point[group].detach().requires_grad_(with_gradients) for name, point in points.items()}
                values = run(ctx, leaves, inputs, targets)  # (networks, n)
                losses[group] += values.detach().double().sum(1).cpu()
                if with_gradients:
                    parts = torch.autograd.grad(values.sum(), list(leaves.values()), materialize_grads=True)
                    for name, part in zip(gradients, parts, strict=True):
                        gradients[name][group] += part
    n = ctx.problem.n_train
    ctx.charge_passes("forward", k * n)
    if not with_gradients:
        return ctx.problem.ranks.summed([losses])[0] / n, {}
    ctx.charge_passes("backward", k * n)
    losses, *totals = ctx.problem.ranks.summed([losses, *gradients.values()])
    return losses / n, {name: value / n for name, value in zip(gradients, totals, strict=True)}


def _losses_point_by_point(ctx: Context, points: Params, inputs: Inputs, targets: Tensor) -> Tensor:
    """Losses (k, n) of the samples at each stacked point."""
    rows = [{name: value[i] for name, value in points.items()} for i in range(stack_size(points))]
    return torch.stack([ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **row}), targets) for row in rows])


def _losses_of_stacked_points(ctx: Context, points: Params, inputs: Inputs, targets: Tensor) -> Tensor:
    """The same on stacked weights; what no moved weight precedes is computed once."""

    def losses(*values: Tensor) -> Tensor:
        point = dict(zip(points, values, strict=True))
        return ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **point}), targets)

    result: Tensor = vectorised_over_points(
        losses, *points.values()
    )  # plain tensors: torch looks for longer through a dictionary
    return result


def samples_as_one_batch(ctx: Context, part: str = "train") -> Batch | None:
    """All samples as one batch, or None where they are too many or do not stack."""
    parts: list[Batch] = []
    kept = 0
    for inputs, targets in ctx.batches(part, ctx.problem.part(part).n):  # tensors come back as they are: no copy
        kept += sum(part.numel() * part.element_size() for part in tensors_of_inputs(inputs))
        if kept > ctx.effort.limits.kept_data:
            return None
        parts.append((inputs, targets))
    if len(parts) == 1:
        return parts[0]
    shapes = {tuple(tuple(part.shape[1:]) for part in tensors_of_inputs(inputs)) for inputs, _ in parts}
    if len(shapes) > 1:
        return None
    targets = torch.cat([targets for _, targets in parts])
    return joined_inputs([inputs for inputs, _ in parts]), targets


def stack_size(stacked: Params) -> int:
    """Number of stacked points."""
    return len(next(iter(stacked.values())))


def flat_rows(value: Tensor) -> Tensor:
    """One row (k, entries) for each stacked point."""
    return value.reshape(len(value), -1)


def expanded_over_entries(per_point: Tensor, value: Tensor) -> Tensor:
    """(k,) shaped to multiply (k, *shape)."""
    return per_point.to(value.device).reshape(-1, *[1] * (value.ndim - 1))
