"""Batch sharpness: how curved the loss of a mini-batch is along its own gradient, which is where SGD steps."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.second_derivative import refuse_wrong_second_derivative
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.registry import Value, measure
from flatscope.samples import Batch, joined_inputs, shape_text, slice_inputs
from flatscope.sampling import draw_until_precise


@measure(
    symbol=r"\mathbb{E}_B\, \frac{g_B^\top H_B\, g_B}{\|g_B\|^2}",
    paper="flatscope",
    equation="Andreyev and Beneventano 2024, batch sharpness",
    invariant_under={"permutation"},
    cost="sweep",
    passes={"forward": 1, "backward": 1, "curvature": 1},
    falls_with_loss=True,
    conventions="all trainable parameters; B is a set of different training samples, all equally likely; mean of the "
    "ratios, not the ratio of means; exact where there are no more sets than draws",
)
def batch_sharpness(ctx: Context, *, batch: int = 1, draws: int = 256, weight_decay: float = 0.0) -> Value:
    r"""Expected curvature of a mini-batch's loss along its own gradient; SGD settles where it is 2 / learning rate.

    .. math:: \mathbb{E}_B\, \frac{g_B^\top H_B\, g_B}{\|g_B\|^2}, \quad g_B = \nabla L_B(w),\ H_B = \nabla^2 L_B(w)

    With all samples in the batch it is the curvature along the gradient of gradient descent.

    Args:
        batch: samples of a mini-batch; take the batch size of the training.
        draws: the most mini-batches; fewer where the precision of the call is reached before.
        weight_decay: of the training: half of it times the squared weights is added to the loss.
    """
    n = ctx.problem.n_train
    if not 1 <= batch <= n:
        raise InputError(f"a batch of at least 1 and at most {n} samples", str(batch), where="batch")
    refuse_unless_whole(draws, "draws", least=2)
    if not 0 <= weight_decay < math.inf:
        raise InputError("a number of at least 0", str(weight_decay), where="weight_decay")
    refuse_wrong_second_derivative(ctx)
    everything = math.comb(n, batch) <= draws
    ratios = (
        torch.tensor([_curvature_along_gradient(ctx, pieces, weight_decay)], dtype=torch.float64)
        for pieces in _mini_batches(ctx, batch, draws)
    )
    if everything:
        return Value(float(torch.cat(list(ratios)).mean()), exact=True)
    drawn = draw_until_precise(ctx, ratios, draws)
    return Value(drawn.means[0], drawn.stderrs[0], exact=False, reason=drawn.remark(unit="mini-batches"))


def _mini_batches(ctx: Context, batch: int, draws: int) -> Iterator[list[Batch]]:
    """All sets of so many samples where they are few, else random ones; a pass over the data collects several."""
    n, generator = ctx.problem.n_train, ctx.generator("batch_sharpness")
    if math.comb(n, batch) <= draws:
        yield from _batches_of_samples(ctx, [list(chosen) for chosen in itertools.combinations(range(n), batch)])
        return
    step = ctx.effort.limits.collected_batches
    for start in range(0, draws, step):
        together = range(start, min(start + step, draws))
        yield from _batches_of_samples(ctx, [torch.randperm(n, generator=generator)[:batch].tolist() for _ in together])


def _batches_of_samples(ctx: Context, chosen: list[list[int]]) -> Iterator[list[Batch]]:
    """The samples of each list of numbers, those of one shape as one batch: texts may be padded to other lengths."""
    wanted, batches, seen = set(itertools.chain(*chosen)), dict[int, Batch](), 0
    for inputs, targets in ctx.batches():
        for i in wanted & set(range(seen, seen + len(targets))):
            batches[i] = slice_inputs(inputs, i - seen, i - seen + 1), targets[i - seen : i - seen + 1]
        seen += len(targets)
    for numbers in chosen:
        shapes: dict[str, list[Batch]] = {}
        for i in numbers:
            shapes.setdefault(f"{shape_text(batches[i][0])} {tuple(batches[i][1].shape)}", []).append(batches[i])
        yield [(joined_inputs([x for x, _ in alike]), torch.cat([y for _, y in alike])) for alike in shapes.values()]


def _curvature_along_gradient(ctx: Context, pieces: list[Batch], weight_decay: float) -> float:
    """gᵀHg / ‖g‖² of the mean loss over some samples, weight decay included."""
    leaves = ctx.leaves()
    tensors, size = list(leaves.values()), sum(len(targets) for _, targets in pieces)
    with torch.enable_grad():
        losses = [ctx.problem.loss(ctx.forward(x, {**ctx.params, **leaves}), y).sum() for x, y in pieces]
        loss: Tensor = torch.stack(losses).sum() / size
        slopes = torch.autograd.grad(loss, tensors, create_graph=True, materialize_grads=True)
        along = [(slope + weight_decay * w).detach() for slope, w in zip(slopes, tensors, strict=True)]
        slope_along = torch.stack([(slope * v).sum() for slope, v in zip(slopes, along, strict=True)]).sum()
        curved = [torch.zeros_like(v) for v in along]
        if slope_along.requires_grad:  # a gradient that does not depend on the weights has no curvature
            curved = list(torch.autograd.grad(slope_along, tensors, materialize_grads=True))
    for kind in ("forward", "backward", "curvature"):
        ctx.charge_passes(kind, size)
    square = sum(float(v.double().square().sum()) for v in along)
    if not square:
        reason = "the gradient of some mini-batch is zero, so that it has no direction"
        raise NotApplicable(reason, where="batch_sharpness")
    bend = sum(float((v.double() * h.double()).sum()) for v, h in zip(along, curved, strict=True))
    return bend / square + weight_decay
