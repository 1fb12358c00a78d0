"""Diagonals of curvature matrices, parameter by parameter, with standard errors.

Sums of squares of single samples' gradients of columns at the outputs give the Gauss-Newton matrix' diagonal, those of
the loss the empirical Fisher's. The layers' gradients are squared as they flow by; other parameters' are formed sample
by sample. What the columns do not give of a Hessian comes from products.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.func import grad

from flatscope.context import Context
from flatscope.curvature.coverage import find_unseen
from flatscope.curvature.memory import in_batches
from flatscope.curvature.operators import Hessian, sample_groups
from flatscope.curvature.output_hessian import output_root
from flatscope.curvature.per_sample_gradients import (
    Flow,
    matrices,
    scale_gradients,
    signed_sum,
    squares_and_along,
    vector_gradients,
)
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import backpropagated, gradient_flows, sweep_plan, sweep_shape
from flatscope.curvature.symmetric_operator import Parts
from flatscope.errors import NotApplicable
from flatscope.measures.gradient_noise import vectorises
from flatscope.params import Params, count, on_stacked
from flatscope.samples import Batch, Inputs, cut, each_part
from flatscope.stopping import out_of_time, student

STREAM, PROBES = "columns of the diagonal", "probes of the diagonal"
FEW_COLUMNS = 16  # so many are always taken all
# Multiplied out: always (eight times the most draws, which rarely tell an entry), and where exact values are asked for.
FEW_DIRECTIONS, MOST_DIRECTIONS = 2048, 16_384
FIRST_LOOK, MOST_DRAWS = 8, 256


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
        return _exact(names, _one_pass(ctx, names, None, fisher=True), "exact: gradients of single samples")
    shape = ctx.cached(sweep_shape)
    if precision <= 0 or shape.columns <= FEW_COLUMNS:
        return _exact(names, _one_pass(ctx, names, None), "exact: all columns")
    spread = DrawSpread()
    while not _settled(spread, precision, MOST_DRAWS):
        if spread.draws >= 2 and out_of_time(ctx):
            break
        if spread.draws >= FIRST_LOOK and spread.needed(precision) * shape.per_draw >= shape.columns:
            return _exact(names, _one_pass(ctx, names, None), "exact: all columns")
        spread.add(_one_pass(ctx, names, spread.draws))
    return spread.result(names, "sampled, {draws} draws", precision)


def hessian_diagonals(ctx: Context, names: Sequence[str], precision: float) -> Diagonals:
    """Diagonal of the Hessian: from the columns where a parameter's block is Gauss-Newton, from products elsewhere."""
    not_covered = find_not_covered(ctx, "hessian")
    covered = [name for name in names if name not in not_covered]
    found = output_diagonals(ctx, covered, "gauss_newton", precision) if covered else Diagonals()
    others = [name for name in names if name in not_covered]
    if others:
        found.take(_by_products(ctx, others, precision))
    return found


def _exact(names: Collection[str], values: Params, way: str) -> Diagonals:
    kept = {name: values[name] for name in names}
    return Diagonals(kept, {name: torch.zeros_like(value) for name, value in kept.items()}, dict.fromkeys(names, way))


class DrawSpread:
    """Mean and spread of draws of several tensors."""

    def __init__(self) -> None:
        self.draws = 0
        self.means: Params = {}
        self._squares: Params = {}

    def add(self, draw: Params) -> None:
        """Let one draw in."""
        self.draws += 1
        for name, value in draw.items():
            before = self.means.get(name, torch.zeros_like(value))
            mean = before + (value - before) / self.draws
            square = self._squares.get(name, torch.zeros_like(value)) + (value - before) * (value - mean)
            self.means[name], self._squares[name] = mean, square

    def stderrs(self) -> Params:
        """Standard errors of the means, widened as `student` does."""
        pairs = max(1, self.draws * (self.draws - 1))
        return {
            name: student((square / pairs).sqrt(), torch.tensor(max(1.0, self.draws - 1.0)))
            for name, square in self._squares.items()
        }

    def error(self) -> float:
        """Largest, over the tensors, of the root of the summed squared errors over that of the squared values."""
        found = [0.0]
        for name, stderr in self.stderrs().items():
            size, noise = float(self.means[name].norm()), float(stderr.norm())
            found.append(noise / size if size > 0 else math.inf if noise > 0 else 0.0)
        return max(found)

    def needed(self, precision: float) -> float:
        """Draws that the precision takes, by what is known."""
        return self.draws * (self.error() / precision) ** 2

    def result(self, names: Collection[str], way: str, precision: float) -> Diagonals:
        """The means, with what is missing from the precision in the words."""
        error, words = self.error(), way.format(draws=self.draws)
        if error > precision:
            words += f"; asked for {precision:.2g} relative, reached {error:.2g}"
        stderrs = self.stderrs()
        kept = {name: self.means[name] for name in names}
        return Diagonals(kept, {name: stderrs[name] for name in names}, dict.fromkeys(names, words))


def _settled(spread: DrawSpread, precision: float, most: int) -> bool:
    if spread.draws < FIRST_LOOK:
        return False
    at_a_look = spread.draws & (spread.draws - 1) == 0  # powers of two: looking each time would stop by luck
    return spread.draws >= most or (at_a_look and spread.error() <= precision)


def _one_pass(ctx: Context, names: Collection[str], draw: int | None, fisher: bool = False) -> Params:
    """Mean over the samples of squared gradients of all columns, of one random column, or of the loss."""
    unseen = ctx.cached(find_unseen)
    swept = [name for name in names if name not in unseen]
    others = dict.fromkeys(ctx.params.keys() - set(swept), "")
    single = [name for name in names if name in unseen]
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
        found = {name: torch.zeros(ctx.params[name].shape, dtype=torch.float64) for name in names}
        for flow in flows_of(batch, numbers, max(width, shape.per_draw)) if swept else ():
            for name, squares in _squares(ctx, flow, set(swept)):
                found[name] += squares.reshape(found[name].shape).double().cpu()
        if single:
            for values, signs in _output_columns(ctx, batch, numbers, draw, fisher):
                _add_single(ctx, found, single, batch[0], values, signs)
        return found

    total = {name: torch.zeros(ctx.params[name].shape, dtype=torch.float64) for name in names}
    for found in in_batches(ctx, sweep_plan(ctx, columns), work):
        for name, value in found.items():
            total[name] += value
    n = ctx.problem.n_train
    ctx.count("forward", n)
    ctx.count("backward", columns * n)
    summed = ctx.problem.ranks.summed(list(total.values()))
    return {name: value / n for name, value in zip(total, summed, strict=True)}


def _squares(ctx: Context, flow: Flow, wanted: set[str]) -> Iterator[tuple[str, Tensor]]:
    """Sums over samples and columns of the squared gradients of a layer's parameters."""
    if flow.bias in wanted and flow.bias is not None:
        yield flow.bias, signed_sum(vector_gradients(flow).square(), flow.signs).sum(0)
    if flow.weight not in wanted:
        return
    if flow.kind == "batchnorm":
        yield flow.weight, signed_sum(scale_gradients(flow).square(), flow.signs).sum(0)
        return
    weight = ctx.params[flow.weight]
    yield flow.weight, squares_and_along(flow, *matrices(flow, weight), weight)[0]


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
            yield block.values[0], None if block.signs is None else block.signs[0]
        return
    signs = Signs(ctx.seed, STREAM).draw(numbers, range(draw, draw + 1), root.width, outputs.dtype)
    block = root.drawn(signs)
    for place, values in enumerate(block.values):
        yield values, None if block.signs is None else block.signs[place]


def _add_single(
    ctx: Context, found: Params, names: Sequence[str], inputs: Inputs, values: Tensor, signs: Tensor | None
) -> None:
    """Add squared gradients of Σ values · outputs of every sample, of parameters that no layer call gives."""
    point = {name: ctx.params[name].detach() for name in names}
    run = _together if ctx.cached(vectorises) else _one_by_one
    step = max(1, 2**26 // (8 * count(point.values())))
    for start in range(0, len(values), step):
        some = slice(start, start + step)
        gradients = run(ctx, point, cut(inputs, start, start + step), values[some])
        for name, gradient in gradients.items():
            squares = gradient.double().square()
            if signs is not None:
                squares = squares * signs[some].reshape(-1, *[1] * (squares.ndim - 1))
            found[name] += squares.sum(0).cpu()


def _together(ctx: Context, point: Params, inputs: Inputs, values: Tensor) -> Params:
    def along(params: Params, inputs: Inputs, value: Tensor) -> Tensor:
        outputs = ctx.forward(each_part(inputs, lambda part: part[None]), {**ctx.params, **params})
        return (outputs * value[None]).sum()

    gradients: Params = on_stacked(grad(along), point, inputs, values, in_dims=(None, 0, 0))
    return {name: value.detach() for name, value in gradients.items()}


def _one_by_one(ctx: Context, point: Params, inputs: Inputs, values: Tensor) -> Params:
    rows: list[Sequence[Tensor]] = []
    for i in range(len(values)):
        leaves = {name: value.requires_grad_() for name, value in point.items()}
        with torch.enable_grad():
            outputs = ctx.forward(cut(inputs, i, i + 1), {**ctx.params, **leaves})
            along = (outputs * values[i : i + 1]).sum()
            rows.append(torch.autograd.grad(along, list(leaves.values()), materialize_grads=True))
    return {name: torch.stack([row[n] for row in rows]) for n, name in enumerate(point)}


def _by_products(ctx: Context, names: Sequence[str], precision: float) -> Diagonals:
    """Diagonal of the Hessian from products with unit vectors, or with random signs ζ: the mean of ζ∘Hζ."""
    operator = Hessian(ctx, names, sample_groups(ctx))
    size = operator.size
    if size <= FEW_DIRECTIONS or (precision <= 0 and size <= MOST_DIRECTIONS):
        return _multiplied_out(operator, names)
    if precision <= 0:
        fix = "Ask for a precision above 0, or for the diagonal of gauss_newton"
        raise NotApplicable(f"at most {MOST_DIRECTIONS:,} parameters", f"{size:,}", "exact diagonal by products", fix)
    signs, spread = Signs(ctx.seed, PROBES), DrawSpread()
    while not _settled(spread, precision, MOST_DRAWS):
        if spread.draws >= 2 and (out_of_time(ctx) or spread.draws >= MOST_DRAWS):
            break
        spread.add(operator.unflatten(_probe(operator, signs, spread.draws)))
    operator.release()
    return spread.result(names, "products with {draws} random vectors", precision)


def _multiplied_out(operator: Hessian, names: Sequence[str]) -> Diagonals:
    found = []
    for unit in torch.split(torch.eye(operator.size, dtype=torch.float64, device=operator.device), 32, dim=1):
        found.append((unit * (operator @ unit)).sum(0))
    operator.release()
    values = {name: value.cpu() for name, value in operator.unflatten(torch.cat(found)).items()}
    return _exact(names, values, f"exact: one product for each of {operator.size:,} parameters")


def _probe(operator: Hessian, signs: Signs, draw: int) -> Tensor:
    """Σ over groups of ζ∘Hζ, every group of samples with signs of its own."""

    def vector(group: int) -> Tensor:
        number = torch.tensor([group], device=operator.device)
        return signs.draw(number, range(draw, draw + 1), operator.size, torch.float64)[:, 0].T

    def gather(parts: Parts) -> Tensor:
        total = torch.zeros(operator.size, dtype=torch.float64, device=operator.device)
        for group, product in parts:
            total += (vector(group) * product)[:, 0]
        return total

    (summed,) = operator.summed([operator.by_groups(vector, gather)])
    return summed
