"""m-sharpness: how far the loss of a small group of samples rises when the weights move against that group alone."""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from flatscope.ascents import ascend, shrinking_step_sizes, within_ball
from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.params import Params
from flatscope.perturbation import Evaluate, batch_gradient, measure_of_moves, minibatches, perturbed_gradients
from flatscope.registry import Value
from flatscope.samples import Batch
from flatscope.sampling import draw_until_precise


@measure_of_moves(
    symbol=r"\mathbb{E}_{|S|=m} \max_{\|u\|_2 \le \rho} \hat L_S(w+u) - \hat L_S(w)",
    paper="flatscope",
    equation="Foret et al. 2021, m-sharpness, with the one-step maximum of sharpness-aware minimization",
    invariant_under={"permutation"},
    cost="sweep",
    typical={"forward": 3, "backward": 2, "gradient": 1},
    conventions="all trainable parameters, biases included; the mean over random groups of m training samples drawn "
    "without replacement, of which the stderr is the error (samples that do not fit in memory form groups in the order "
    "of their source); all samples are one group where there are no more than m; of each group a lower bound of its "
    "maximum, never below 0",
    search="lower",
)
def m_sharpness(ctx: Context, *, rho: float = 0.05, m: int = 128, steps: int = 1, groups: int = 16) -> Value:
    """Mean over groups of m samples of the largest rise of the group's own loss in a ball around the weights.

    One step goes from the weights to the edge of the ball along the gradient of the group, as sharpness-aware
    minimization does; further ones are projected ascent from there.

    Args:
        rho: radius of the ball.
        m: samples of a group.
        steps: 1 for the paper's one-step maximum; more come closer to the true one from below.
        groups: the most random groups; fewer where the mean is precise enough before.
    """
    for name, value in {"m": m, "steps": steps}.items():
        refuse_unless_whole(value, name)
    refuse_unless_whole(groups, "groups", least=2)
    if not 0 < rho < math.inf:
        raise InputError("a positive number", repr(rho), where="rho")
    how = "lower bound: one step along the gradient" if steps == 1 else f"lower bound: {steps} steps of ascent"

    def rise(evaluate: Evaluate, loss: float, gradient: Params) -> float:
        ball = within_ball(rho)
        start = ball.climb({name: value[None] for name, value in gradient.items()})
        return max(0.0, ascend(ctx, evaluate, start, ball, shrinking_step_sizes(steps - 1)).highest - loss)

    if ctx.problem.n_train <= m:
        ascent = rise(partial(perturbed_gradients, ctx), ctx.scores().loss, ctx.gradient())
        return Value(ascent, low=ascent, reason=f"{how}; one group of all samples")

    def rises() -> Iterator[Tensor]:
        batches = minibatches(ctx, m, ctx.generator("m_sharpness"))
        whole = (batch for batch in islice(batches, 2 * groups) if len(batch[1]) == m)  # a source may end with fewer
        for batch in islice(whole, groups):
            here = batch_gradient(ctx, batch, {})
            yield torch.tensor([rise(partial(_batch_loss_and_gradient, ctx, batch), *here)], dtype=torch.float64)

    drawn = draw_until_precise(ctx, rises(), groups)
    if len(drawn.samples) < 2:
        raise NotApplicable(f"groups of {m} samples", "batches of the data that are smaller", fix="Give a smaller m")
    reason = f"{how}; {drawn.remark(unit='groups')}"
    return Value(drawn.means[0], stderr=drawn.stderrs[0], low=drawn.means[0], reason=reason)


def _batch_loss_and_gradient(ctx: Context, batch: Batch, points: Params) -> tuple[Tensor, Params]:
    """Loss of a batch, and its gradient, at one stacked point."""
    loss, gradient = batch_gradient(ctx, batch, {name: value[0] for name, value in points.items()})
    return torch.tensor([loss], dtype=torch.float64), {name: value[None] for name, value in gradient.items()}
