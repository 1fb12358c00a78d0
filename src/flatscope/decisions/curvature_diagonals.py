"""Diagonals of curvature matrices, parameter by parameter, with standard errors.

Sums of squares of single samples' gradients of columns at the outputs give the Gauss-Newton matrix' diagonal, those of
the loss the empirical Fisher's. The layers' gradients are squared as they flow by; other parameters' are formed sample
by sample. What the columns do not give of a Hessian comes from products.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from flatscope.context import Context
from flatscope.curvature.estimators import DiagonalQuantities
from flatscope.curvature.memory import in_batches
from flatscope.curvature.operators import Hessian, sample_groups
from flatscope.curvature.output_hessian import output_root
from flatscope.curvature.per_sample_gradients import Flow, squared_gradients
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import backpropagated, gradient_flows, sweep_plan, sweep_shape
from flatscope.curvature.symmetric_operator import Parts
from flatscope.errors import NotApplicable
from flatscope.measures.gradient_noise import can_vectorise_sample_gradients
from flatscope.params import Params, count_scalars, vectorised_over_points
from flatscope.samples import Batch, Inputs, map_inputs, slice_inputs
from flatscope.sampling import TIME_IS_UP, Sampler, sample_until, student_stderrs, time_is_over

STREAM, PROBES = "columns of the diagonal", "probes of the diagonal"


@dataclass
class Diagonals:
    """Diagonals by parameter, standard errors of their entries, and how each was computed."""

    values: Params = field(default_factory=dict)
    stderrs: Params = field(default_factory=dict)
    ways: dict[str, str] = field(default_factory=dict)

    def take(self, other: Diagonals) -> None:
        """Add other parameters."""
        self.values |= other.values
        self.stderrs |= other.stderrs
        self.ways |= other.ways


def output_diagonals(ctx: Context, names: Collection[str], matrix: str, precision: float) -> Diagonals:
    """Diagonal of the "gauss_newton" matrix, or of the "empirical_fisher", of some parameters."""
    if matrix == "empirical_fisher":
        return _exact_diagonals(
            names, _squared_gradients_in_one_pass(ctx, names, None, fisher=True), "exact: gradients of single samples"
        )
    shape = ctx.cached(sweep_shape)

    def all_columns() -> Diagonals:
        return _exact_diagonals(names, _squared_gradients_in_one_pass(ctx, names, None), "exact: all columns")

    if precision <= 0 or shape.columns <= ctx.effort.limits.few_columns:
        return all_columns()
    by_draw, columns = partial(_squared_gradients_in_one_pass, ctx, names), shape.columns / shape.per_draw
    return sample_until(TensorDraws(ctx, by_draw, "sampled, {} draws", precision, columns, all_columns), precision)


def hessian_diagonals(ctx: Context, names: Sequence[str], precision: float) -> Diagonals:
    """Diagonal of the Hessian: from the columns where a parameter's block is Gauss-Newton, from products elsewhere."""
    not_covered = find_not_covered(ctx, "hessian")
    covered = [name for name in names if name not in not_covered]
    diagonals = output_diagonals(ctx, covered, "gauss_newton", precision) if covered else Diagonals()
    others = [name for name in names if name in not_covered]
    if others:
        diagonals.take(_diagonals_by_products(ctx, others, precision))
    return diagonals


def _exact_diagonals(names: Collection[str], values: Params, way: str) -> Diagonals:
    exact = {name: values[name] for name in names}
    return Diagonals(exact, {name: torch.zeros_like(value) for name, value in exact.items()}, dict.fromkeys(names, way))


class TensorDraws(Sampler[Diagonals]):
    """Independent draws of several tensors.

    Args:
        ctx: its effort says how many at most, and until when.
        by_draw: the tensors of a draw, by its number.
        way: words, with a place for the number of draws.
        precision: that is asked for, for the words.
        exact_draws: what the exact tensors cost, in draws.
        exactly: these.
    """

    def __init__(
        self,
        ctx: Context,
        by_draw: Callable[[int], Params],
        way: str,
        precision: float,
        exact_draws: float = math.inf,
        exactly: Callable[[], Diagonals] | None = None,
    ) -> None:
        self._ctx, self._by_draw, self._way, self._precision = ctx, by_draw, way, precision
        self._exact_draws, self._exactly = exact_draws, exactly
        self.first_look = ctx.effort.limits.settled_draws
        self._means: Params = {}
        self._squares: Params = {}

    @property
    def most(self) -> float:
        """As many as are ever drawn."""
        return self._ctx.effort.limits.most_draws

    def draw_until(self, number: int) -> str:
        """Add draws to the running means, one after the other, until there are so many or the time is up."""
        while self.taken < min(number, self.most):
            if self.taken >= 2 and time_is_over(self._ctx):
                return TIME_IS_UP
            self._add_draw(self._by_draw(self.taken))
        return ""

    def _add_draw(self, draw: Params) -> None:
        self.taken += 1
        for name, value in draw.items():
            before = self._means.get(name, torch.zeros_like(value))
            mean = before + (value - before) / self.taken
            square = self._squares.get(name, torch.zeros_like(value)) + (value - before) * (value - mean)
            self._means[name], self._squares[name] = mean, square

    def _stderrs(self) -> Params:
        """Standard errors of the means, widened as `student_stderrs` does."""
        pairs = max(1, self.taken * (self.taken - 1))
        return {
            name: student_stderrs((square / pairs).sqrt(), torch.tensor(max(1.0, self.taken - 1.0)))
            for name, square in self._squares.items()
        }

    def relative_errors(self, precision: float) -> list[float]:
        """Relative error of every tensor: the root of its entries' summed squared errors over that of their squares."""
        del precision
        lengths = [(float(self._means[name].norm()), float(noise.norm())) for name, noise in self._stderrs().items()]
        return [noise / size if size > 0 else math.inf if noise > 0 else 0.0 for size, noise in lengths]

    def exact(self, needed: float) -> Diagonals | None:
        """All columns, where they are no more than those of the draws that are needed."""
        return self._exactly() if self._exactly is not None and needed >= self._exact_draws else None

    def result(self, ended: str) -> Diagonals:
        """The means, with what is missing from the precision in the words."""
        words = self._way.format(self.taken)
        if ended:
            words += f"; asked for {self._precision:.2g} relative, reached {max(self.relative_errors(0)):.2g}"
        return Diagonals(self._means, self._stderrs(), dict.fromkeys(self._means, words))


def _squared_gradients_in_one_pass(
    ctx: Context, names: Collection[str], draw: int | None, fisher: bool = False
) -> Params:
    """Mean over the samples of squared gradients of all columns, of one random column, or of the loss."""
    not_covered = find_not_covered(ctx, "gauss_newton")
    swept = [name for name in names if name not in not_covered]
    others = ctx.params.keys() - set(swept)
    single = [name for name in names if name in not_covered]
    drawn = None if draw is None else range(draw, draw + 1)
    shape = ctx.cached(sweep_shape)
    columns = 1 if fisher else shape.columns if draw is None else shape.per_draw

    def flows_of(batch: Batch, numbers: Tensor, width: int) -> Iterator[Flow]:
        if fisher:
            yield from gradient_flows(ctx, batch, others)
            return
        for flows in backpropagated(ctx, batch, numbers, others, width, drawn):
            yield from flows

    def work(batch: Batch, numbers: Tensor, width: int) -> Params:
        sums = {name: torch.zeros(ctx.params[name].shape, dtype=torch.float64) for name in names}
        for flow in flows_of(batch, numbers, max(width, shape.per_draw)) if swept else ():
            for name, squares in squared_gradients(flow, ctx.params[flow.weight]):
                if name in swept:
                    sums[name] += squares.reshape(sums[name].shape).double().cpu()
        if single:
            for values, column_signs in _output_columns(ctx, batch, numbers, draw, fisher):
                _add_squared_gradients(ctx, sums, single, batch[0], values, column_signs)
        return sums

    total = {name: torch.zeros(ctx.params[name].shape, dtype=torch.float64) for name in names}
    for batch_squares in in_batches(ctx, sweep_plan(ctx, columns), work):
        for name, value in batch_squares.items():
            total[name] += value
    n = ctx.problem.n_train
    ctx.charge_passes("forward", n)
    ctx.charge_passes("backward", columns * n)
    summed = ctx.problem.ranks.summed(list(total.values()))
    return {name: value / n for name, value in zip(total, summed, strict=True)}


def _output_columns(
    ctx: Context, batch: Batch, numbers: Tensor, draw: int | None, fisher: bool
) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Columns (n, *output) at the outputs of a batch, with signs (n,) where some are negative."""
    inputs, targets = batch
    outputs = ctx.forward(inputs).detach()
    if fisher:
        leaf = outputs.requires_grad_()
        with torch.enable_grad():
            yield torch.autograd.grad(ctx.problem.loss(leaf, targets).sum(), leaf)[0], None
        return
    root = output_root(ctx.problem.loss, outputs, targets)
    if draw is None:
        for start in range(root.count):
            block = root.exact(start, start + 1)
            yield block.values[0], None if block.column_signs is None else block.column_signs[0]
        return
    signs = Signs(ctx.seed, STREAM).draw(numbers, range(draw, draw + 1), root.width, outputs.dtype)
    block = root.drawn(signs)
    for place, values in enumerate(block.values):
        yield values, None if block.column_signs is None else block.column_signs[place]


def _add_squared_gradients(
    ctx: Context, sums: Params, names: Sequence[str], inputs: Inputs, values: Tensor, column_signs: Tensor | None
) -> None:
    """Add squared gradients of Σ values · outputs of every sample, of parameters that no layer call gives."""
    point = {name: ctx.params[name].detach() for name in names}
    run = _sample_gradients_in_one_call if ctx.cached(can_vectorise_sample_gradients) else _sample_gradients_one_by_one
    step = max(1, ctx.effort.limits.transformed_bytes // (8 * count_scalars(point.values())))
    for start in range(0, len(values), step):
        some = slice(start, start + step)
        gradients = run(ctx, point, slice_inputs(inputs, start, start + step), values[some])
        for name, gradient in gradients.items():
            squares = gradient.double().square()
            if column_signs is not None:
                squares = squares * column_signs[some].reshape(-1, *[1] * (squares.ndim - 1))
            sums[name] += squares.sum(0).cpu()


def _sample_gradients_in_one_call(ctx: Context, point: Params, inputs: Inputs, values: Tensor) -> Params:
    def along(params: Params, inputs: Inputs, value: Tensor) -> Tensor:
        outputs = ctx.forward(map_inputs(inputs, lambda part: part[None]), {**ctx.params, **params})
        return (outputs * value[None]).sum()

    gradients: Params = vectorised_over_points(grad(along), point, inputs, values, in_dims=(None, 0, 0))
    return {name: value.detach() for name, value in gradients.items()}


def _sample_gradients_one_by_one(ctx: Context, point: Params, inputs: Inputs, values: Tensor) -> Params:
    rows: list[Sequence[Tensor]] = []
    for i in range(len(values)):
        leaves = {name: value.requires_grad_() for name, value in point.items()}
        with torch.enable_grad():
            outputs = ctx.forward(slice_inputs(inputs, i, i + 1), {**ctx.params, **leaves})
            along = (outputs * values[i : i + 1]).sum()
            rows.append(torch.autograd.grad(along, list(leaves.values()), materialize_grads=True))
    return {name: torch.stack([row[n] for row in rows]) for n, name in enumerate(point)}


def _diagonals_by_products(ctx: Context, names: Sequence[str], precision: float) -> Diagonals:
    """Diagonal of the Hessian from products with unit vectors, or with random signs ζ: the mean of ζ∘Hζ."""
    operator, limits = Hessian(ctx, names, sample_groups(ctx)), ctx.effort.limits
    size = operator.size
    if size <= limits.few_entries or (precision <= 0 and size <= limits.most_directions):
        return _diagonals_by_unit_vectors(operator, names)
    if precision <= 0:
        expected = f"at most {limits.most_directions:,} parameters"
        fix = "Ask for a precision above 0, or for the diagonal of gauss_newton"
        raise NotApplicable(expected, f"{size:,}", "exact diagonal by products", fix)
    signs = Signs(ctx.seed, PROBES)

    def by_draw(number: int) -> Params:
        return operator.unflatten(_signed_product(operator, signs, number))

    return sample_until(TensorDraws(ctx, by_draw, "products with {} random vectors", precision), precision)


def _diagonals_by_unit_vectors(operator: Hessian, names: Sequence[str]) -> Diagonals:
    diagonal = torch.cat(list(DiagonalQuantities(operator).diagonal(32)))
    values = {name: value.cpu() for name, value in operator.unflatten(diagonal).items()}
    return _exact_diagonals(names, values, f"exact: one product for each of {operator.size:,} parameters")


def _signed_product(operator: Hessian, signs: Signs, draw: int) -> Tensor:
    """Σ over groups of ζ∘Hζ, every group of samples with signs of its own."""

    def vector(group: int) -> Tensor:
        number = torch.tensor([group], device=operator.device)
        return signs.draw(number, range(draw, draw + 1), operator.size, torch.float64)[:, 0].T

    def gather(parts: Parts) -> list[Tensor]:
        total = torch.zeros(operator.size, dtype=torch.float64, device=operator.device)
        for group, product in parts:
            total += (vector(group) * product)[:, 0]
        return [total]

    (summed,) = operator.by_groups(vector, gather)
    return summed
