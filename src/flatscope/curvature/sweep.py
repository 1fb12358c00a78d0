"""The sweep: backward passes of columns of the output Hessian's root give the curvature of every layer at once.

Each block of the Gauss-Newton matrix is a sum over samples and columns of outer products of per-sample gradients G_c;
on a piecewise-linear network it is the Hessian's. Traces, ρ of every unit and relative flatness are sums of squares of
things the backward pass already holds; see `Curvature`. All columns give them exactly; random ones without bias.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.coverage import ByWeight, by_weight, recorded_forward
from flatscope.curvature.curved_operations import NO_PLACES, CurvedColumns, CurvedRecorder, Places
from flatscope.curvature.lookups import along_lookup_rows, has_lookups, lookup_forms
from flatscope.curvature.memory import Plan, in_batches, plan_for, saved_bytes
from flatscope.curvature.output_hessian import Columns, Root, output_root
from flatscope.curvature.per_sample_gradients import (
    Flow,
    along_rows,
    matrices,
    overlaps_are_cheaper,
    read_together,
    vector_gradients,
    weight_forms,
)
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.sweep_result import BatchSums, Curvature
from flatscope.errors import NotApplicable
from flatscope.network.layer_uses import LayerUse, by_samples
from flatscope.network.layers import layer_name
from flatscope.network.not_covered import NotCovered
from flatscope.network.operations import TABLE
from flatscope.samples import Batch, slice_inputs, tensors_of_inputs

STREAM = "columns of the sweep"


@dataclass(frozen=True)
class SweepShape:
    """Needs of one sample: columns in all, columns of a draw, bytes of one column and of what is read from it."""

    columns: int
    per_draw: int
    per_column: float
    read: float


def sweep_shape(ctx: Context) -> SweepShape:
    """Read off the recorded program."""
    return ctx.structural(_recorded_shape, dtype=ctx.problem.dtype)


def _recorded_shape(ctx: Context, dtype: torch.dtype) -> SweepShape:
    _, targets = next(iter(ctx.batches(size=1)))
    root = output_root(ctx.problem.loss, ctx.problem.first_output.to(dtype), targets)
    program, item = ctx.structure.program, torch.finfo(dtype).bits // 8
    uses, n = ctx.structure.uses_by_samples(), program.n_samples
    sizes = [math.prod(use.output_shape) // n for use in uses]
    most = ctx.effort.limits.most_columns_together
    sizes += [math.prod(use.input.shape) // n for use in uses if not use.opaque and _also_at_input(ctx, [use], n, most)]
    patches = [
        math.prod(use.output_shape[2:]) * ctx.params[use.weight][0].numel()
        for use in uses
        if use.kind not in ("batchnorm", "lookup") and not use.opaque
    ]
    # One column is there twice, as it comes and where it is kept.
    read = item * (sum(sizes) + max(patches, default=0) + 2 * root.width)
    return SweepShape(root.count, root.per_draw, item * (sum(sizes) + 2 * root.width), read)


def sweep_plan(ctx: Context, columns: int, curved: bool = False) -> Plan:
    """Numbers of samples and columns that go together.

    What autograd keeps of a sample is no more than everything that is computed; it is measured where memory binds.
    """
    shape = sweep_shape(ctx)
    # Curved operations have a graph of their own beside the network's, and columns of the size of its activations.
    times, limits = 2 if curved else 1, ctx.effort.limits
    most = limits.kept_of_computed * ctx.structural(_computed_bytes)
    plan = plan_for(ctx, columns, times * (most + shape.read), times * shape.per_column)
    if plan.samples == ctx.problem.n_train and plan.columns == min(columns, limits.most_columns_together):
        return plan
    kept = ctx.structural(_kept_bytes, dtype=ctx.problem.dtype)
    return plan_for(ctx, columns, times * (kept + shape.read), times * shape.per_column)


def _computed_bytes(ctx: Context) -> float:
    """Bytes of all numbers that are computed of one sample; infinite where an operation is not known, or not seen."""
    program = ctx.structure.program
    if any(step.reads and step.name not in TABLE for step in program.steps) or program.has_hidden_parts():
        return math.inf
    return program.held_bytes() / program.n_samples


def _kept_bytes(ctx: Context, dtype: torch.dtype) -> float:
    """Bytes that autograd keeps of one sample, measured on one and on two."""
    inputs, _ = next(iter(ctx.batches(size=2)))
    there = [*ctx.params.values(), *tensors_of_inputs(inputs)]  # two samples are a view of all of them
    known = {value.untyped_storage().data_ptr() for value in there}
    several = saved_bytes(lambda: recorded_forward(ctx, inputs), known)
    one = saved_bytes(lambda: recorded_forward(ctx, slice_inputs(inputs, 0, 1)), known)
    if several is None or one is None:  # then all that is computed counts as kept
        return ctx.structure.program.held_bytes() / ctx.structure.program.n_samples
    return max(several - one, one / 2)


def sweep_pass(
    ctx: Context,
    draws: range | None,
    not_covered: NotCovered,
    rows: bool = False,
    places: Places = NO_PLACES,
) -> Curvature:
    """Curvature by one pass over the data, with these random columns or with all columns.

    Args:
        ctx: the network.
        draws: numbers of the random columns; None for all columns.
        not_covered: parameters that the columns do not give.
        rows: also ρ of the rows.
        places: curved operations, at whose inputs random columns have parts too.
    """
    shape = sweep_shape(ctx)
    columns = shape.columns if draws is None else len(draws) * (2 if places else shape.per_draw)
    covered = set(ctx.problem.trainable) - not_covered.keys()
    result = Curvature({}, not_covered, 0 if draws is None else len(draws))

    def work(batch: Batch, numbers: Tensor, width: int) -> BatchSums:
        sums = BatchSums(draws is not None)
        for flows in backpropagated(ctx, batch, numbers, not_covered, width, draws, places):
            for flow in flows:
                _add_flow(ctx, sums, flow, covered, rows)
            sums.close_block()
        return sums

    for sums in in_batches(ctx, sweep_plan(ctx, columns, bool(places)), work):
        result.add(sums)
    ctx.charge_passes("forward", ctx.problem.n_train)
    ctx.charge_passes("backward", ctx.problem.n_train * columns)
    return result.over(ctx.problem.ranks)


def backpropagated(
    ctx: Context,
    batch: Batch,
    numbers: Tensor,
    without: Collection[str],
    width: int,
    draws: range | None = None,
    places: Places = NO_PLACES,
    gradient: bool = False,
) -> Iterator[Iterator[Flow]]:
    """For each block of columns, what flows through every layer that they cover, layer by layer.

    Args:
        ctx: the network.
        batch: some samples.
        numbers: of these samples.
        without: parameters that are not asked for, or not covered.
        width: columns of a block.
        draws: numbers of the random columns; None for all columns.
        places: curved operations, at whose inputs random columns have parts too.
        gradient: whether the first column of the first block is the gradient of each sample's loss.
    """
    inputs, targets = batch
    rule = CurvedRecorder(places)
    _, outputs, uses = recorded_forward(ctx, inputs, rule if places else None)
    if not rule.complete:
        ways = "a batch of samples takes another way through the network than the first ones"
        raise NotApplicable(f"{ways}; precision=0 (on the command line --precision 0) takes products")
    groups = _covered_uses(ctx, uses, without, len(targets))
    if not groups:
        return
    root, local = output_root(ctx.problem.loss, outputs, targets), None
    if places:
        with torch.enable_grad():
            local = CurvedColumns(rule.calls, ctx.problem.loss(outputs, targets).sum(), numbers, ctx.seed)
    given = [outputs, *(local.inputs if local else ())]
    blocks: Iterator[Columns]
    if draws is None:
        blocks = (root.exact(start, start + width) for start in range(0, root.count, width))
    else:
        blocks = _drawn_blocks(
            root,
            width,
            draws,
            partial(Signs(ctx.seed, STREAM).draw, numbers, size=root.width, dtype=outputs.dtype),
            local,
        )
    slope = _slope(ctx, outputs, targets) if gradient else None
    for block in blocks:
        yield _flows(ctx, given, len(targets), groups, block if slope is None else block.after(slope))
        slope = None


def gradient_flows(ctx: Context, batch: Batch, without: Collection[str]) -> Iterator[Flow]:
    """Flows through the layers of a single column: the gradient of every sample's loss."""
    inputs, targets = batch
    _, outputs, uses = recorded_forward(ctx, inputs)
    groups = _covered_uses(ctx, uses, without, len(targets))
    column = Columns(_slope(ctx, outputs, targets)[None])
    return _flows(ctx, [outputs], len(targets), groups, column) if groups else iter(())


def _slope(ctx: Context, outputs: Tensor, targets: Tensor) -> Tensor:
    """Gradients of the samples' losses at the outputs."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(ctx.problem.loss(leaf, targets).sum(), leaf)
    return slope


def _covered_uses(ctx: Context, uses: list[LayerUse[Tensor]], without: Collection[str], n: int) -> ByWeight:
    """The uses of covered parameters by weight.

    Samples that pass a layer in another way than those by which it was judged have no columns there.
    """
    covered = set(ctx.problem.trainable) - set(without)
    for use in uses:
        if covered & {use.weight, use.bias} and (use.opaque or len(by_samples(use, n).input) != n):
            layer = layer_name(use.weight, dict(ctx.problem.model.named_modules()))
            raise NotApplicable(f"values of the samples decide how {layer} is used, differently in some batches")
    return [group for group in by_weight(uses) if covered & {group[0].weight, group[0].bias}]


def _drawn_blocks(
    root: Root, width: int, draws: range, signs: Callable[[range], Tensor], local: CurvedColumns | None
) -> Iterator[Columns]:
    """Random columns, at most `width` at a time but those of one draw together."""
    step = max(1, width // (2 if local else root.per_draw))
    for start in range(draws.start, draws.stop, step):
        some = range(start, min(start + step, draws.stop))
        block = root.drawn(signs(some))
        yield block.with_inner(local.drawn(some)) if local else block


def _flows(ctx: Context, given: list[Tensor], n: int, groups: ByWeight, block: Columns) -> Iterator[Flow]:
    """Flows through the layers of a block of columns at the outputs, and at the inputs of curved operations."""
    k = len(block.values)
    uses_with_output = [use for uses in groups for use in uses]
    uses_with_input = [uses[0] for uses in groups if _also_at_input(ctx, uses, n, k)]
    tensors: list[Any] = [use.edge for use in uses_with_output] + [use.input for use in uses_with_input]
    cotangents = stacked_backward(given, tensors, [block.values, *block.inner])
    at_outputs, at_inputs = cotangents[: len(uses_with_output)], cotangents[len(uses_with_output) :]
    del cotangents  # so that each is freed as soon as its layer is done
    at_input_of = {id(use): cotangent for use, cotangent in zip(uses_with_input, at_inputs, strict=True)}
    del at_inputs
    column_signs = None if block.column_signs is None else block.column_signs.T
    start = 0
    for uses in groups:
        stop = start + len(uses)
        uses_reached = [(use, s) for use, s in zip(uses, at_outputs[start:stop], strict=True) if s is not None]
        at_outputs[start:stop] = [None] * len(uses)
        start = stop
        if uses_reached:
            at_input = at_input_of.pop(id(uses_reached[0][0]), None)
            of_samples = [s if len(s) == n else _columns_by_samples(s, n) for _, s in uses_reached]
            yield Flow([by_samples(use, n) for use, _ in uses_reached], of_samples, at_input, column_signs)


def _also_at_input(ctx: Context, uses: Sequence[LayerUse[Any]], n: int, k: int) -> bool:
    """True where k columns are also asked for at the input of a layer, beside its output."""
    use = uses[0]
    return (
        len(uses) == 1
        and use.kind != "batchnorm"
        and use.input.requires_grad
        and use.input.shape[0] == n
        and overlaps_are_cheaper(uses, ctx.params[use.weight], k)
    )


def _columns_by_samples(s: Tensor, n: int) -> Tensor:
    """Columns (n · rows, k, …) of a layer that has positions in its first axis, as (n, k, rows, …)."""
    return s.reshape(n, -1, *s.shape[1:]).transpose(1, 2)


def stacked_backward(given: list[Tensor], ends: list[Any], columns: list[Tensor]) -> list[Tensor | None]:
    """Gradients of each column (k, n, …) of each given tensor at each end, stacked to (n, k, …); None where none flows.

    Column by column: a batched backward loops over the columns of convolution and pooling as well, and has them
    in the wrong order for the matrix products that follow. Each is copied to its place while the caches hold it.
    """
    several = len(columns[0])
    stacks: list[Tensor | None] = []
    for number, column in enumerate(zip(*columns, strict=True)):
        rows = torch.autograd.grad(given, ends, list(column), retain_graph=True, allow_unused=True)
        if several == 1:
            return [None if row is None else row[:, None] for row in rows]
        if not stacks:
            stacks = [None if row is None else row.new_empty(len(row), several, *row.shape[1:]) for row in rows]
        for stack, row in zip(stacks, rows, strict=True):
            if stack is not None and row is not None:
                stack[:, number] = row
        del rows, row
    return stacks


def _add_flow(ctx: Context, sums: BatchSums, flow: Flow, covered: Collection[str], rows: bool) -> None:
    """Add what one layer's block of columns gives."""
    column_signs = flow.column_signs
    for name, gradients in vector_gradients(flow):
        if name in covered:
            sums.add_to_network("trace", sums.add(name, "trace", gradients.square().sum(2), column_signs))
    if flow.kind == "batchnorm" or flow.weight not in covered:
        return
    weight = ctx.params[flow.weight]
    forms, alongs = [], []
    if has_lookups(flow):
        forms.append(lookup_forms(flow, weight))
        alongs += [along_lookup_rows(flow, weight)] if rows else []
    for part in () if forms else flow.parts(read_together(flow, weight)):
        u, s = matrices(part, weight)
        forms.append(weight_forms(part, u, s, weight))
        if rows:
            alongs.append(along_rows(u, s, weight, flow.kind))
    trace = sums.add(flow.weight, "trace", torch.cat([form.trace for form in forms]), column_signs)
    sums.add_to_network("trace", trace)
    sums.add_to_network("kappa_trace", trace * float(weight.double().square().sum()))
    sums.add(flow.weight, "relative_flatness", torch.cat([form.relative for form in forms]), column_signs)
    _add_units(sums, flow.weight, "rho", torch.cat([form.along for form in forms]), column_signs)
    if rows:
        _add_units(sums, flow.weight, "rho_rows", torch.cat(alongs), column_signs)


def _add_units(sums: BatchSums, name: str, quantity: str, along: Tensor, column_signs: Tensor | None) -> None:
    """Add the squares of inner products (n, k, units), and their sum over the units."""
    units = sums.add(name, quantity, along.square(), column_signs)
    total = sums.add(name, f"{quantity}_sum", units.sum(2), None)
    sums.add_to_network(f"{quantity}_sum", total)
