"""Predicted rise gᵀΔ + ½ΔᵀHΔ of changes of one weight each, H being the weight's own block of the Hessian.

Where the block is that of the Gauss-Newton matrix (piecewise-linear networks, a weight that is used once) it is a sum
over samples and columns, ΔᵀHΔ = mean Σ_c ⟨G_c, Δ⟩²: backward passes of the columns serve all changes of all layers at
once. Elsewhere the gradient is differentiated once more along each change.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Hashable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.memory import in_batches
from flatscope.curvature.operators import batch_size
from flatscope.curvature.per_sample_gradients import gradient_squares
from flatscope.curvature.route import find_not_covered, multiplied_out
from flatscope.curvature.second_derivative import refuse_wrong_second_derivative
from flatscope.curvature.sweep import backpropagated, sweep_plan, sweep_shape
from flatscope.decisions.sample_means import SampleMeans, Uncertain
from flatscope.decisions.slopes import Steps, gradient_products_with_steps, steps_by_weight
from flatscope.measures.weight_flatness import layer_trace
from flatscope.params import Params, count_scalars
from flatscope.registry import Value
from flatscope.samples import Batch, slice_inputs
from flatscope.sampling import TIME_IS_UP, Sampler, sample_until, time_is_over

TRACE = "trace"


@dataclass(frozen=True)
class Predicted:
    """Predicted rises by step, how each was computed, and the traces of the blocks by weight."""

    rises: dict[Hashable, Uncertain]
    ways: dict[Hashable, str]
    traces: dict[str, Uncertain]


def predicted_rises(ctx: Context, steps: Steps, precision: float) -> Predicted:
    """The predicted rise of every step, each of which moves one weight, and the traces of the weights' blocks.

    The traces come with what predicts the rises, no more precise than that makes them: on the way of columns from the
    same ones, on that of products from one more change for every group of samples, random signs.

    Args:
        ctx: the network, written plainly.
        steps: changes, {weight: Δ} with a single weight.
        precision: relative standard error of ΔᵀHΔ that random columns have to reach; 0 for all columns, exact traces.
    """
    refuse_wrong_second_derivative(ctx)
    not_covered = find_not_covered(ctx, "hessian")
    by_columns = {key: step for key, step in steps.items() if next(iter(step)) not in not_covered}
    others = {key: step for key, step in steps.items() if key not in by_columns}
    predicted = _predicted_by_columns(ctx, by_columns, precision) if by_columns else Predicted({}, {}, {})
    more, traces = _predicted_by_products(ctx, others, precision)
    ways = {key: f"second derivative along it: {not_covered[next(iter(step))]}" for key, step in others.items()}
    return Predicted(predicted.rises | more, predicted.ways | ways, predicted.traces | traces)


def _predicted_by_columns(ctx: Context, steps: Steps, precision: float) -> Predicted:
    draws = QuadraticDraws(ctx, steps)
    if precision <= 0 or ctx.cached(sweep_shape).columns <= ctx.effort.limits.few_columns:
        return draws.all_columns()
    return sample_until(draws, precision)


class QuadraticDraws(Sampler[Predicted]):
    """Random columns by which the rises of steps are predicted; every look takes all of them again.

    A rise has an error over the samples, whatever the draws: they end where they hardly add to it, if not before.

    Args:
        ctx: the network.
        steps: changes of single weights.
    """

    def __init__(self, ctx: Context, steps: Steps) -> None:
        self._ctx, self._steps, self._limits = ctx, steps, ctx.effort.limits
        self.first_look = self._limits.predicting_draws
        self._found = Swept({}, {}, {})

    @property
    def most(self) -> float:
        """As many as are ever drawn."""
        return self._limits.most_draws

    def draw_until(self, number: int) -> str:
        """Pass over the data once, with so many draws."""
        self.taken = min(number, self._limits.most_draws)
        self._found = _sums_over_columns(self._ctx, self._steps, self.taken)
        return TIME_IS_UP if time_is_over(self._ctx) else ""

    def relative_errors(self, precision: float) -> list[float]:
        """Standard errors by the draws: relative to ΔᵀHΔ, or to the error over samples of which they are a share."""
        share, predicted = self._limits.noise_share, self._found
        known = (
            (noise, max(abs(value), 2 * predicted.rises[key].stderr * share / precision))
            for key, (value, noise) in predicted.quadratics.items()
        )
        return [noise / size if size else 0.0 for noise, size in known]

    def exact(self, needed: float) -> Predicted | None:
        """All columns, where they are no more than those of the draws that are needed."""
        shape, drawn = self._ctx.cached(sweep_shape), min(self.most, self._limits.look_margin * needed)
        return self.all_columns() if drawn * shape.per_draw >= shape.columns else None

    def all_columns(self) -> Predicted:
        """Without draws."""
        sums = _sums_over_columns(self._ctx, self._steps, None)
        return Predicted(sums.rises, dict.fromkeys(self._steps, "exact: all columns"), sums.traces)

    def next_look(self, needed: float) -> int:
        """Somewhat more draws than seem to be needed: nothing is kept of those before."""
        return math.ceil(max(self._limits.least_growth * self.taken, self._limits.look_margin * needed))

    def result(self, ended: str) -> Predicted:
        """The rises, with what is missing from the precision in the words."""
        missed = ""
        if ended:
            worst = max(noise / abs(value) if value else 0.0 for value, noise in self._found.quadratics.values())
            missed = f", {worst:.2g} relative"
        ways = dict.fromkeys(self._steps, f"sampled, {self.taken} draws{missed}")
        return Predicted(self._found.rises, ways, self._found.traces)


@dataclass(frozen=True)
class Swept:
    """Sums over columns: predicted rises and ΔᵀHΔ (with the error that draws leave) by step, traces by weight."""

    rises: dict[Hashable, Uncertain]
    quadratics: dict[Hashable, Uncertain]
    traces: dict[str, Uncertain]


class _SampleSums:
    """By step, of every sample: slope, sum over columns (or mean over draws) of ⟨G, Δ⟩², its variance; ‖G‖²."""

    def __init__(self, keys: Iterable[Hashable], samples: int, device: torch.device) -> None:
        self._sums = {key: torch.zeros(3, samples, dtype=torch.float64, device=device) for key in keys}

    def add_slopes(self, key: Hashable, slopes: Tensor) -> None:
        self._sums[key][0] += slopes

    def add(self, key: Hashable, squares: Tensor, *, column_signs: Tensor | None, per_draw: int | None) -> None:
        """Add squares (samples, columns); where they are drawn, so many columns are one draw."""
        squares = squares.double() if column_signs is None else squares.double() * column_signs
        if per_draw:
            squares = squares.reshape(len(squares), -1, per_draw).sum(2)
        self._sums[key][1] += squares.sum(1)
        self._sums[key][2] += squares.square().sum(1)

    def by_key(self, draws: int | None) -> dict[Hashable, Tensor]:
        """The sums (3, samples), those over draws as mean and variance of the mean."""
        if draws is not None:
            for sums in self._sums.values():
                sums[1] /= draws
                sums[2] = (sums[2] / draws - sums[1].square()).clamp_min(0) / (draws - 1)
        return {key: sums.cpu() for key, sums in self._sums.items()}


def _sums_over_columns(ctx: Context, steps: Steps, draws: int | None) -> Swept:
    """Predicted rises and traces from all columns, or from draws."""
    of_weight = steps_by_weight(steps)
    others = ctx.params.keys() - of_weight.keys()
    shape = ctx.cached(sweep_shape)
    columns = shape.columns if draws is None else draws * shape.per_draw

    drawn = None if draws is None else range(draws)
    per_draw = None if draws is None else shape.per_draw

    def work(batch: Batch, numbers: Tensor, width: int) -> dict[Hashable, Tensor]:
        sums = _SampleSums([*steps, *((TRACE, weight) for weight in of_weight)], len(batch[1]), numbers.device)
        first = 1  # column of the gradient, in front of the first block
        block = max(width // per_draw, 1) * per_draw if per_draw else width
        for flows in backpropagated(ctx, batch, numbers, others, block, drawn, gradient=True):
            for flow in (flow for flow in flows if flow.kind != "batchnorm"):
                behind = flow.behind(first)
                add = partial(sums.add, column_signs=behind.column_signs, per_draw=per_draw)
                for key, along in gradient_products_with_steps(ctx, flow, of_weight, steps):
                    if first:
                        sums.add_slopes(key, along[:, 0])
                    add(key, along[:, first:].square())
                if flow.weight in of_weight:
                    add((TRACE, flow.weight), gradient_squares(behind, ctx.params[flow.weight]))
            first = 0
        return sums.by_key(draws)

    means, quadratic, variance = SampleMeans(), SampleMeans(), SampleMeans()
    for batch_sums in in_batches(ctx, sweep_plan(ctx, columns), work):
        for key, (slope, curved, noise) in batch_sums.items():
            means.add(key, slope + 0.5 * curved)
            quadratic.add(key, curved)
            variance.add(key, noise)
    n = ctx.problem.n_train
    ctx.charge_passes("forward", n)
    ctx.charge_passes("backward", (1 + columns) * n)
    ranks = ctx.problem.ranks
    rises, curved_means, noise = means.estimates(ranks), quadratic.estimates(ranks), variance.estimates(ranks)
    return Swept(
        {key: rises[key] for key in steps},
        {key: Uncertain(curved_means[key].value, math.sqrt(noise[key].value / n)) for key in steps},
        {weight: curved_means[TRACE, weight] for weight in of_weight},
    )


def _predicted_by_products(
    ctx: Context, steps: Steps, precision: float
) -> tuple[dict[Hashable, Uncertain], dict[str, Uncertain]]:
    """Predicted rises and traces by differentiating the gradient along each step, a group of samples at a time."""
    if not steps:
        return {}, {}
    names = sorted({next(iter(step)) for step in steps.values()})
    exact = _exact_traces(ctx, names, precision)
    generator = ctx.generator("signs of traces")
    means, size = SampleMeans(), group_size(ctx)
    for inputs, targets in ctx.share(size=size):
        for start in range(0, len(targets), size):
            batch = slice_inputs(inputs, start, start + size), targets[start : start + size]
            signs = (
                {}
                if exact
                else {(TRACE, name): {name: _random_signs_like(ctx.params[name], generator)} for name in names}
            )
            for key, slope, curved in _group_rises(ctx, batch, {**steps, **signs}, names):
                means.add(key, (curved if key in signs else slope + 0.5 * curved).reshape(1), len(batch[1]))
    n = ctx.problem.n_train
    for kind, passes in (("forward", 1), ("curvature", len(steps) + (0 if exact else len(names)))):
        ctx.charge_passes(kind, passes * n)
    estimates = means.estimates(ctx.problem.ranks)
    traces = exact or {name: estimates[TRACE, name] for name in names}
    return {key: estimates[key] for key in steps}, traces


def _exact_traces(ctx: Context, names: Collection[str], precision: float) -> dict[str, Uncertain]:
    """Traces without draws where these are asked for, or few weights make them cheap; none otherwise."""
    directions = count_scalars(ctx.params[name] for name in names)
    if not multiplied_out(ctx, names, directions, precision):
        return {}
    traces = ctx.cached(layer_trace, most_products=ctx.effort.limits.ranking_products)
    values = {layer.weight: traces[layer.name] for layer in ctx.network if layer.weight in names}
    return {name: _value_as_uncertain(value) for name, value in values.items()}


def _value_as_uncertain(value: Value) -> Uncertain:
    """The value, with the errors of estimator and samples together."""
    errors = [value.stderr, value.data_stderr]
    known = [float(error) for error in errors if error is not None and not math.isnan(float(error))]
    return Uncertain(float(value.value), math.hypot(*known) if value.data_stderr is not None else math.nan)


def _random_signs_like(like: Tensor, generator: torch.Generator) -> Tensor:
    """Random signs in the shape of a weight."""
    return (2.0 * torch.randint(2, like.shape, generator=generator) - 1.0).to(like)


def group_size(ctx: Context) -> int:
    """Samples of a group, of which there are enough to tell an error from their spread."""
    return max(1, min(batch_size(ctx), ctx.problem.batch_size, ctx.problem.n_train // ctx.effort.limits.error_groups))


def _group_rises(
    ctx: Context, batch: Batch, steps: Steps, names: Collection[str]
) -> Iterator[tuple[Hashable, Tensor, Tensor]]:
    """Sums over the samples of gᵀΔ and ΔᵀHΔ by step."""
    gradients, leaves = sum_gradients(ctx, batch, names)
    for key, step in steps.items():
        ((name, delta),) = step.items()
        slope = (gradients[name] * delta.to(gradients[name])).sum()
        curved = torch.zeros_like(slope)
        if slope.requires_grad:
            (product,) = torch.autograd.grad(slope, leaves[name], retain_graph=True, materialize_grads=True)
            curved = (product.double() * delta.to(product).double()).sum()
        yield key, slope.detach().double(), curved


def sum_gradients(ctx: Context, batch: Batch, names: Collection[str]) -> tuple[Params, Params]:
    """Gradient of the sum of a batch's losses that can be differentiated again, and its leaves."""
    inputs, targets = batch
    leaves = ctx.leaves(names)
    with torch.enable_grad():
        loss = ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **leaves}), targets).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
    return dict(zip(leaves, gradients, strict=True)), leaves
