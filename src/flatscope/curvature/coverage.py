"""Which parameters the sweep covers exactly, and one forward pass with every layer's call recorded.

The Gauss-Newton matrix needs no linearity, only the gradients: the sum over the recorded uses of a parameter must be
all of it. A numerical check says so: for a random column it must be what autograd gives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.checked_pass import SharedPass
from flatscope.curvature.curved_operations import NO_PLACES, CurvedRecorder, find_curved_places
from flatscope.curvature.hessian_check import not_covered_by_numbers
from flatscope.curvature.lookups import has_lookups, lookup_gradient
from flatscope.curvature.memory import plan_for
from flatscope.curvature.patches import weight_gradients
from flatscope.curvature.per_sample_gradients import Flow, matrices, vector_gradients
from flatscope.curvature.second_derivative import refuse_wrong_second_derivative
from flatscope.network.layer_uses import LayerRecorder, LayerUse
from flatscope.network.linearity import Linearity
from flatscope.network.not_covered import NotCovered
from flatscope.network.pass_recording import in_parts
from flatscope.network.structure import Structure
from flatscope.params import Params, add_to
from flatscope.reading import recorded_structure
from flatscope.samples import Inputs, tensors_of_inputs


@dataclass(frozen=True)
class LayerUseCoverage:
    """Uses of the parameters in recorded passes."""

    curved: NotCovered  # those in which the outputs are not piecewise linear
    uses: Counter[str]  # how often a pass uses each of them in a layer
    not_covered: NotCovered  # those whose gradients of single samples the layers' uses do not give
    lookups: NotCovered  # those that are looked up in such a way that only `flatscope.curvature.lookups` gives them
    rows: dict[str, list[float]]  # rows of the input for each sample, in every use of a weight or bias


def coverage_by_layer_uses(ctx: Context) -> LayerUseCoverage:
    """Uses in passes of the first samples, or of all where their values or shapes decide what is computed."""
    found = _coverage_of(ctx.structure, ctx.problem.trainable)
    if not ctx.problem.samples_decide:
        return found
    alike: dict[Any, LayerUseCoverage] = {}  # by the shapes of the samples
    program = ctx.structure.program
    held = 2 * program.held_bytes() / program.n_samples  # the record keeps copies of what layers receive
    size = min(ctx.problem.batch_size, plan_for(ctx, 1, held, 0.0).samples)
    for inputs, _ in ctx.batches(size=size):
        more = _coverage_of(recorded_structure(ctx.problem, inputs), ctx.problem.trainable)
        like = alike.setdefault(tuple(part.shape[1:] for part in tensors_of_inputs(inputs)), more)
        names = [name for name in like.rows | more.rows if like.rows.get(name) != more.rows.get(name)]
        changing = NotCovered(dict.fromkeys(names, "not every sample passes it in the same way"))
        found = LayerUseCoverage(
            more.curved | found.curved,
            more.uses | found.uses,  # the larger count of each
            changing | more.not_covered | found.not_covered,
            more.lookups | found.lookups,
            more.rows,
        )
    ctx.charge_passes("forward", 2 * ctx.problem.n_train)
    return found


def _coverage_of(structure: Structure, names: Iterable[str]) -> LayerUseCoverage:
    program, axes = structure.program, structure.axes
    linearity = Linearity(program, names)
    found, lookups = NotCovered(), NotCovered()
    rows: dict[str, list[float]] = {}
    for use in program.layer_uses():
        for name in (use.weight, use.bias):
            if name is None:
                continue
            length = use.input.shape[axes.get(use.weight, 0)] if use.input.shape else 1
            rows.setdefault(name, []).append(length / program.n_samples)
            if not use.follows and name in linearity.reached:
                found.note(name, "used inside an operation that cannot be followed")
            if use.kind == "lookup":
                changed = use.settings.get("max_norm") is not None or use.settings.get("scale_grad_by_freq")
                (found if changed else lookups).note(name, "a lookup")
            if use.opaque:
                found.note(name, "used through a view of it")
            if use.masked and name == use.weight:
                found.note(name, "a mask holds some of its entries at zero")
            if use.weight in structure.mixing:
                found.note(name, "its input does not have the samples as its first axis")
    for name, uses in rows.items():
        if linearity.reads[name] > len(uses):
            found.note(name, "also used outside of its layer")
    for name in linearity.reached - rows.keys():  # what the outputs do not depend on has no curvature
        found.note(name, "not the weight, bias or BatchNorm parameter of a layer")
    uses_of_each = Counter({name: len(uses) for name, uses in rows.items()})
    return LayerUseCoverage(linearity.curved, uses_of_each, found, lookups, rows)


def not_covered_by_record(ctx: Context, lookups: bool) -> NotCovered:
    """Trainable parameters whose gradients of single samples the sweep cannot form.

    Args:
        ctx: the network.
        lookups: whether tables in which rows are looked up can be.
    """
    coverage = ctx.structural(coverage_by_layer_uses)
    found = coverage.not_covered if lookups else coverage.not_covered | coverage.lookups
    return found.among(ctx.problem.trainable)


def not_covered_by_columns(ctx: Context, at_curved: bool = False, lookups: bool = False) -> NotCovered:
    """Trainable parameters whose Hessian block the sweep does not give.

    By the program, then by what the sweep can form at all, then by a numerical probe.

    Args:
        ctx: the network.
        at_curved: whether the sweep also has columns at curved operations.
        lookups: whether it gives tables in which rows are looked up.
    """
    places = ctx.structural(find_curved_places) if at_curved else None
    shared = SharedPass(ctx, places or NO_PLACES)
    refuse_wrong_second_derivative(ctx, shared)
    found = ctx.structural(coverage_by_layer_uses)
    not_covered = NotCovered() if at_curved else NotCovered(found.curved)
    for name, times in found.uses.items():
        if times > 1:
            not_covered.note(name, f"{name} is used {times} times")
    not_covered = not_covered_by_record(ctx, lookups) | not_covered
    return (not_covered | not_covered_by_numbers(shared, not_covered)).among(ctx.problem.trainable)


def recorded_forward(
    ctx: Context, inputs: Inputs, curved: CurvedRecorder | None = None
) -> tuple[Params, Tensor, list[LayerUse[Tensor]]]:
    """Run the network forward with every layer on its own view of its input; leaves, outputs, uses."""
    leaves = ctx.leaves()
    params = {**ctx.params, **leaves}
    recorder = LayerRecorder(params, isolate=True, axes=ctx.network.axes)
    curved_rules = [in_parts(curved.follow)] if curved else []
    with torch.enable_grad():
        outputs = ctx.forward(inputs, params, [*curved_rules, recorder.follow])
    return leaves, outputs, recorder.uses


def rows_per_sample(ctx: Context) -> dict[str, int]:
    """{weight: rows of its input for each sample}: 1, or the positions of a sequence that was flattened into rows."""
    program = ctx.structure.program
    axes = ctx.network.axes
    return {
        use.weight: max(1, use.input.shape[axes.get(use.weight, 0)] // program.n_samples)
        for use in program.layer_uses()
    }


CHECKED_SAMPLES = 3
ByWeight = list[list[LayerUse[Tensor]]]


def by_weight(uses: list[LayerUse[Tensor]]) -> ByWeight:
    """The uses whose flow was seen, those of one weight together; those that multiply before those that look up."""
    found: dict[tuple[str, str | None, str], list[LayerUse[Tensor]]] = {}
    for use in uses:
        if use.edge is not None and not use.opaque:
            found.setdefault((use.weight, use.bias, use.kind), []).append(use)
    for table in [key for key in found if key[2] == "lookup"]:
        products = [key for key in found if key[0] == table[0] and key[2] == "dense"]
        if len(products) == 1:
            found[products[0]] += found.pop(table)
    return list(found.values())


def not_covered_by_uses(ctx: Context, lookups: bool = False) -> NotCovered:
    """Trainable parameters whose gradients the recorded layers do not give.

    Args:
        ctx: the network.
        lookups: whether tables in which rows are looked up are to be given too.
    """
    inputs, _ = next(iter(ctx.batches(size=CHECKED_SAMPLES)))
    leaves, outputs, uses = recorded_forward(ctx, inputs)
    column = torch.randn(outputs.shape, generator=ctx.generator("check of recorded gradients"), dtype=torch.float64)
    column = column.to(outputs)
    given = torch.autograd.grad(outputs, list(leaves.values()), column, retain_graph=True, allow_unused=True)
    known = not_covered_by_record(ctx, lookups)
    covered = [group for group in by_weight(uses) if group[0].weight not in known]
    found, times = recorded_gradients(ctx, outputs, covered, column)
    eps = torch.finfo(outputs.dtype).eps
    lengths = [0.0 if gradient is None else float(gradient.norm()) for gradient in given]
    least = 10 * eps * max(lengths, default=0.0)  # some are zero but for rounding, as of a bias of attention's keys
    not_covered = NotCovered()
    for name, gradient, length in zip(leaves, given, lengths, strict=True):
        if gradient is None or name in known:  # the outputs do not depend on it, or it is known already
            continue
        if name not in found:
            not_covered[name] = "not the weight, bias or BatchNorm parameter of a recorded layer"
        elif times[name] > 1:
            not_covered[name] = "used by layers of several kinds"
        elif float((found[name].reshape(gradient.shape) - gradient).norm()) > 100 * eps**0.75 * length + least:
            not_covered[name] = "also used where no layer was recorded"
    return known | not_covered


def recorded_gradients(
    ctx: Context, outputs: Tensor, groups: ByWeight, column: Tensor
) -> tuple[dict[str, Tensor], Counter[str]]:
    """Gradients of one column by parameter, summed over the samples, and the groups of uses that they come from."""
    edges = [use.edge for uses in groups for use in uses if use.edge is not None]
    if not edges:
        return {}, Counter()
    rows = iter(torch.autograd.grad(outputs, edges, column, retain_graph=True, allow_unused=True))
    found: dict[str, Tensor] = {}
    times: Counter[str] = Counter()
    for uses in groups:
        reached = [(use, s[:, None]) for use in uses if (s := next(rows)) is not None]
        if not reached:
            continue
        flow = Flow([use for use, _ in reached], [s for _, s in reached], None, None)
        parts = dict(vector_gradients(flow))
        if has_lookups(flow):
            parts[flow.weight] = lookup_gradient(flow, ctx.params[flow.weight])[None, None]
        elif flow.kind != "batchnorm":
            parts[flow.weight] = weight_gradients(*matrices(flow, ctx.params[flow.weight]), flow.kind)
        for name, gradients in parts.items():
            times[name] += 1
            add_to(found, name, gradients.sum((0, 1)))
    return found, times
