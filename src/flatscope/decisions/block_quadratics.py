"""Predicted rise gᵀΔ + ½ΔᵀHΔ of changes of one weight each, H being the weight's own block of the Hessian.

Where the block is that of the Gauss-Newton matrix (piecewise-linear networks, a weight that is used once) it is a sum
over samples and columns, ΔᵀHΔ = mean Σ_c ⟨G_c, Δ⟩²: backward passes of the columns serve all changes of all layers at
once. Elsewhere the gradient is differentiated once more along each change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.memory import in_batches
from flatscope.curvature.operators import batch_size
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.second_derivative import refuse_wrong_second_derivative
from flatscope.curvature.sweep import backpropagated, gradient_flows, sweep_plan, sweep_shape
from flatscope.decisions.sample_means import SampleMeans, Uncertain
from flatscope.decisions.slopes import Steps, along_steps, by_weight
from flatscope.params import Params
from flatscope.samples import Batch, cut
from flatscope.sampling import TIME_IS_UP, Sampler, out_of_time, sample_until


@dataclass(frozen=True)
class Predicted:
    """Predicted rises by step, and how each was computed."""

    rises: dict[Hashable, Uncertain]
    ways: dict[Hashable, str]


def predicted_rises(ctx: Context, steps: Steps, precision: float) -> Predicted:
    """The predicted rise of every step, each of which moves one weight.

    Args:
        ctx: the network, written plainly.
        steps: changes, {weight: Δ} with a single weight.
        precision: relative standard error of ΔᵀHΔ that random columns have to reach; 0 for all columns.
    """
    refuse_wrong_second_derivative(ctx)
    not_covered = find_not_covered(ctx, "hessian")
    by_columns = {key: step for key, step in steps.items() if next(iter(step)) not in not_covered}
    others = {key: step for key, step in steps.items() if key not in by_columns}
    found = _by_columns(ctx, by_columns, precision) if by_columns else Predicted({}, {})
    more = _by_products(ctx, others)
    ways = {key: f"second derivative along it: {not_covered[next(iter(step))]}" for key, step in others.items()}
    return Predicted(found.rises | more, found.ways | ways)


def _by_columns(ctx: Context, steps: Steps, precision: float) -> Predicted:
    draws = QuadraticDraws(ctx, steps)
    if precision <= 0 or ctx.cached(sweep_shape).columns <= ctx.effort.limits.few_columns:
        return draws.all_columns()
    return sample_until(draws, precision)


class QuadraticDraws(Sampler[Predicted]):
    """Random columns by which the rises of steps are predicted; every look takes all of them again.

    Args:
        ctx: the network.
        steps: changes of single weights.
    """

    def __init__(self, ctx: Context, steps: Steps) -> None:
        self._ctx, self._steps, self._limits = ctx, steps, ctx.effort.limits
        self.first_look = self._limits.settled_draws
        self._rises: dict[Hashable, Uncertain] = {}
        self._error = 0.0

    @property
    def most(self) -> float:
        """As many as are ever drawn."""
        return self._limits.most_draws

    def draw_until(self, number: int) -> str:
        """Pass over the data once, with so many draws."""
        self.taken = min(number, self._limits.most_draws)
        self._rises, self._error = _swept(self._ctx, self._steps, self.taken)
        return TIME_IS_UP if out_of_time(self._ctx) else ""

    def relative_errors(self, precision: float) -> list[float]:
        """The largest relative standard error of the steps."""
        del precision
        return [self._error]

    def exact(self, needed: float) -> Predicted | None:
        """All columns, where they are no more than those of the draws that are needed."""
        shape, drawn = self._ctx.cached(sweep_shape), min(self.most, self._limits.look_margin * needed)
        return self.all_columns() if drawn * shape.per_draw >= shape.columns else None

    def all_columns(self) -> Predicted:
        """Without draws."""
        return Predicted(_swept(self._ctx, self._steps, None)[0], dict.fromkeys(self._steps, "exact: all columns"))

    def next_look(self, needed: float) -> int:
        """Somewhat more draws than seem to be needed: nothing is kept of those before."""
        return math.ceil(max(self._limits.least_growth * self.taken, self._limits.look_margin * needed))

    def result(self, ended: str) -> Predicted:
        """The rises, with what is missing from the precision in the words."""
        missed = f", {self._error:.2g} relative" if ended else ""
        return Predicted(self._rises, dict.fromkeys(self._steps, f"sampled, {self.taken} draws{missed}"))


def _swept(ctx: Context, steps: Steps, draws: int | None) -> tuple[dict[Hashable, Uncertain], float]:
    """Predicted rises from all columns or from draws, and the largest relative error that the draws leave."""
    of_weight = by_weight(steps)
    others = dict.fromkeys(ctx.params.keys() - of_weight.keys(), "")
    shape = ctx.cached(sweep_shape)
    columns = shape.columns if draws is None else draws * shape.per_draw

    def work(batch: Batch, numbers: Tensor, width: int) -> dict[Hashable, Tensor]:
        """By step, of every sample: slope, sum over columns (or mean over draws) of ⟨G, Δ⟩², and its variance."""
        n = len(batch[1])
        parts = {key: torch.zeros(3, n, dtype=torch.float64, device=numbers.device) for key in steps}
        for flow in gradient_flows(ctx, batch, others):
            for key, along in along_steps(ctx, flow, of_weight, steps):
                parts[key][0] += along[:, 0]
        drawn = None if draws is None else range(draws)
        block = width if draws is None else max(width // shape.per_draw, 1) * shape.per_draw
        for flows in backpropagated(ctx, batch, numbers, others, block, drawn):
            for flow in flows:
                for key, along in along_steps(ctx, flow, of_weight, steps):
                    squares = along.square() if flow.signs is None else along.square() * flow.signs
                    if draws is not None:
                        squares = squares.reshape(n, -1, shape.per_draw).sum(2)
                    parts[key][1] += squares.sum(1)
                    parts[key][2] += squares.square().sum(1)
        if draws is not None:
            for part in parts.values():
                part[1] /= draws
                part[2] = (part[2] / draws - part[1].square()).clamp_min(0) / (draws - 1)
        return {key: part.cpu() for key, part in parts.items()}

    means, quadratic, variance = SampleMeans(), SampleMeans(), SampleMeans()
    for found in in_batches(ctx, sweep_plan(ctx, columns), work):
        for key, (slope, curved, noise) in found.items():
            means.add(key, slope + 0.5 * curved)
            quadratic.add(key, curved)
            variance.add(key, noise)
    n = ctx.problem.n_train
    ctx.count("forward", 2 * n)
    ctx.count("backward", (1 + columns) * n)
    ranks = ctx.problem.ranks
    rises, curved_means = means.estimates(ranks), quadratic.estimates(ranks)
    errors = [0.0]
    if draws is not None:
        noise = variance.estimates(ranks)
        for key, mean in curved_means.items():
            error = math.sqrt(noise[key].value / n)
            errors.append(error / abs(mean.value) if mean.value else 0.0)
    return rises, max(errors)


def _by_products(ctx: Context, steps: Steps) -> dict[Hashable, Uncertain]:
    """Predicted rises by differentiating the gradient along each step, a group of samples at a time."""
    if not steps:
        return {}
    means, names = SampleMeans(), sorted({next(iter(step)) for step in steps.values()})
    size = group_size(ctx)
    for inputs, targets in ctx.share(size=size):
        for start in range(0, len(targets), size):
            batch = cut(inputs, start, start + size), targets[start : start + size]
            for key, rise in _group_rises(ctx, batch, steps, names):
                means.add(key, rise.reshape(1), len(batch[1]))
    n = ctx.problem.n_train
    for kind, passes in (("forward", 1), ("curvature", len(steps))):
        ctx.count(kind, passes * n)
    return means.estimates(ctx.problem.ranks)


def group_size(ctx: Context) -> int:
    """Samples of a group, of which there are enough to tell an error from their spread."""
    return max(1, min(batch_size(ctx), ctx.problem.batch_size, ctx.problem.n_train // ctx.effort.limits.error_groups))


def _group_rises(ctx: Context, batch: Batch, steps: Steps, names: Collection[str]) -> Iterator[tuple[Hashable, Tensor]]:
    gradients, leaves = sum_gradients(ctx, batch, names)
    for key, step in steps.items():
        ((name, delta),) = step.items()
        slope = (gradients[name] * delta.to(gradients[name])).sum()
        curved = torch.zeros_like(slope)
        if slope.requires_grad:
            (product,) = torch.autograd.grad(slope, leaves[name], retain_graph=True, materialize_grads=True)
            curved = (product.double() * delta.to(product).double()).sum()
        yield key, slope.detach().double() + 0.5 * curved


def sum_gradients(ctx: Context, batch: Batch, names: Collection[str]) -> tuple[Params, Params]:
    """Gradient of the sum of a batch's losses that can be differentiated again, and its leaves."""
    inputs, targets = batch
    leaves = ctx.leaves(names)
    with torch.enable_grad():
        loss = ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **leaves}), targets).sum()
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
    return dict(zip(leaves, found, strict=True)), leaves
