"""The exact sweep: one batched backward of the output-Hessian factors gives the curvature of every layer at once.

On a piecewise-linear network the Hessian block of one weight matrix is its Gauss-Newton block, a sum over samples
and factor columns of outer products of per-sample gradients G_c. Traces, ρ of every unit and relative flatness
are sums of squares of things the backward pass already holds; see the formulas at `LayerSums`.

Index letters are those of `patches`: n samples, k columns, g groups, t positions.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.coverage import find_curved, recorded_forward
from flatscope.curvature.factors import n_columns, output_columns
from flatscope.curvature.patches import (
    by_output,
    gradients_by_output,
    input_matrix,
    normalised,
    output_matrix,
    weight_gradients,
)
from flatscope.curvature.sums import Curvature, LayerSums, Mean
from flatscope.network.layers import Call
from flatscope.ranks import ALONE, Ranks
from flatscope.samples import Batch

T = TypeVar("T")

BATCH_BYTES = 48 * 2**20
GRADIENT_BYTES = 16 * 2**20
COLUMN_BLOCK = 32


@dataclass(frozen=True)
class Flow:
    """What passes one layer for one batch: input (n, …), columns at the output (n, k, …), and at the input."""

    call: Call
    x: Tensor
    s: Tensor
    back: Tensor | None
    signs: Tensor | None


def exact_sweep(ctx: Context, diagonal: bool = False, rows: bool = False) -> Curvature:
    """Sweep the training data once.

    Args:
        ctx: the network; cached there, so ask through `ctx.sweep(exact_sweep)`.
        diagonal: also the diagonal of every covered block (one number per weight).
        rows: also ρ of the rows.
    """
    k = n_columns(ctx.problem.loss, ctx.problem.n_outputs)
    ranks = ctx.problem.ranks
    result = smaller_until_it_fits(batch_size(ctx, k), lambda size: _swept(ctx, size, diagonal, rows), ranks)
    ctx.count("forward", ctx.problem.n_train)
    ctx.count("backward", ctx.problem.n_train * k)
    result.over(ranks)
    result.diagonals = {name: value / ctx.problem.n_train for name, value in result.diagonals.items()}
    return result


def _swept(ctx: Context, size: int, diagonal: bool, rows: bool) -> Curvature:
    """The sums over this rank's samples."""
    result = Curvature({}, {}, Mean(), {}, dict(ctx.sweep(find_curved)))
    for batch in ctx.share(size=size):
        sums = BatchSums()
        for flow in backpropagated(ctx, batch, result.curved):
            _add_flow(ctx, result, sums, flow, diagonal, rows)
        _add_batch(result, sums)
    return result


def backpropagated(ctx: Context, batch: Batch, curved: dict[str, str]) -> Iterator[Flow]:
    """What flows through every layer that has an exact block, layer by layer."""
    inputs, targets = batch
    _, outputs, calls = recorded_forward(ctx, inputs)
    wanted = [call for call in calls if call.edge is not None and not call.opaque]
    wanted = [call for call in wanted if call.weight not in curved or (call.bias and call.bias not in curved)]
    if not wanted:
        return
    columns = output_columns(ctx.problem.loss, outputs.detach(), targets)
    for start in range(0, len(columns.values), COLUMN_BLOCK):
        block = columns.block(start, start + COLUMN_BLOCK)
        through = [call for call in wanted if call.input.requires_grad and _by_positions(ctx, call, len(block.values))]
        ends: list[Any] = [call.edge for call in wanted] + [call.input for call in through]
        found = stacked_backward(outputs, ends, block.values)
        back = {id(call): found[len(wanted) + i] for i, call in enumerate(through)}
        signs = None if block.signs is None else block.signs.T
        for i, call in enumerate(wanted):
            s = found[i]
            found[i] = None  # freed as soon as its layer is done
            if s is not None:
                yield Flow(call, call.input.detach(), s, back.pop(id(call), None), signs)


def stacked_backward(outputs: Tensor, ends: list[Any], columns: Tensor) -> list[Tensor | None]:
    """Gradients of each column (k, n, …) at each end, stacked to (n, k, …); None where nothing flows.

    Column by column: a batched backward loops over the columns of convolution and pooling as well, and has them
    in the wrong order for the matrix products that follow.
    """
    rows = [torch.autograd.grad(outputs, ends, column, retain_graph=True, allow_unused=True) for column in columns]
    return [None if parts[0] is None else torch.stack(parts, dim=1) for parts in zip(*rows, strict=True)]


class BatchSums(dict[tuple[str, str], Tensor]):
    """Per-sample numbers of one batch by (parameter, quantity), summed over blocks of columns."""

    def add(self, name: str, quantity: str, values: Tensor) -> None:
        """Add one block's share, (n,) or (n, units)."""
        known = self.get((name, quantity))
        self[name, quantity] = values.double() if known is None else known + values.double()


def _add_batch(result: Curvature, sums: BatchSums) -> None:
    """Let the samples of a finished batch into the means."""
    total: Tensor | None = None
    for (name, quantity), values in sums.items():
        if quantity == "trace":
            result.traces.setdefault(name, Mean()).add(values)
            total = values if total is None else total + values
        if (name, "relative_flatness") in sums:
            getattr(result.layers.setdefault(name, LayerSums()), quantity).add(values)
    if total is not None:
        result.total.add(total)


def _add_flow(ctx: Context, result: Curvature, sums: BatchSums, flow: Flow, diagonal: bool, rows: bool) -> None:
    """Add what one layer's block of columns gives."""
    call, x, s, signs = flow.call, flow.x, flow.s, flow.signs
    if call.bias and call.bias not in result.curved and call.bias in ctx.problem.trainable:
        _add_vector(result, sums, call.bias, _over_positions(s, call.kind), signs, diagonal)
    if call.weight in result.curved or call.weight not in ctx.problem.trainable:
        return
    if call.kind == "batchnorm":
        gradient = _over_positions(normalised(x, call.settings)[:, None] * s, "conv")
        _add_vector(result, sums, call.weight, gradient, signs, diagonal)
        return
    weight = ctx.params[call.weight]
    u = input_matrix(x, weight, call.kind, call.settings)  # (n, g, features, t)
    out = output_matrix(s, weight, call.kind, call.settings)  # (n, k, g, rows, t)
    matrix = by_output(weight, call.kind, out.shape[2])  # W̄
    gram = matrix @ matrix.T  # ‖W̄ᵀG‖² = ⟨W̄W̄ᵀ, GGᵀ⟩
    if out.shape[-1] == 1 and out.shape[2] == 1 and call.kind != "transposed":
        trace, relative, along = _one_position(u[:, 0, :, 0], out[:, :, 0, :, 0], weight, gram, signs)
        squares = _signed_sum(out[:, :, 0, :, 0].square(), signs).T @ u[:, 0, :, 0].square() if diagonal else None
    elif _by_positions(ctx, call, out.shape[1]) and not diagonal:
        trace, relative = _by_overlaps(u[:, 0], out[:, :, 0], gram, signs)
        along, squares = _along_inputs(flow, weight), None
    else:
        trace, relative, along, squares = _by_gradients(u, out, weight, call, gram, signs, diagonal)
    sums.add(call.weight, "trace", trace)
    sums.add(call.weight, "relative_flatness", relative)
    sums.add(call.weight, "rho", _signed_sum(along.square(), signs))
    if rows:
        sums.add(call.weight, "rho_rows", _signed_sum(_along_rows(u, out, weight, call.kind).square(), signs))
    if squares is not None:
        _add_diagonal(result, call.weight, squares.reshape(weight.shape))


def _add_vector(
    result: Curvature, sums: BatchSums, name: str, gradient: Tensor, signs: Tensor | None, diagonal: bool
) -> None:
    """Add per-sample gradients (n, k, size) of a bias or a BatchNorm scale."""
    squares = _signed_sum(gradient.square(), signs)  # (n, size)
    sums.add(name, "trace", squares.sum(1))
    if diagonal:
        _add_diagonal(result, name, squares.sum(0))


def _add_diagonal(result: Curvature, name: str, squares: Tensor) -> None:
    known = result.diagonals.get(name)
    result.diagonals[name] = squares.double().cpu() + (0.0 if known is None else known)


def _signed_sum(values: Tensor, signs: Tensor | None) -> Tensor:
    """Sum over columns, (n, k, …) -> (n, …), negative columns subtracted."""
    if signs is not None:
        values = values * signs.reshape(*signs.shape, *[1] * (values.ndim - 2))
    return values.sum(1)


def _over_positions(values: Tensor, kind: str) -> Tensor:
    """Sum over positions: (n, k, …) -> (n, k, channels); the channel axis is last for dense layers."""
    if kind == "dense":
        return values.flatten(2, -2).sum(2) if values.ndim > 3 else values
    return values.flatten(3).sum(3) if values.ndim > 3 else values


def _by_positions(ctx: Context, call: Call, k: int) -> bool:
    """Whether a layer has so few positions against weights that t × t overlaps cost less than weight gradients."""
    if call.kind not in ("dense", "conv") or int(call.settings.get("groups", 1)) > 1:
        return False
    weight = ctx.params[call.weight]
    rows, features = weight.shape[0], weight[0].numel()
    channels = call.output_shape[-1] if call.kind == "dense" else call.output_shape[1]
    positions = math.prod(call.output_shape[1:]) // channels
    return positions > 1 and positions * (features + k * rows) < k * rows * features


def _one_position(
    u: Tensor, s: Tensor, weight: Tensor, gram: Tensor, signs: Tensor | None
) -> tuple[Tensor, Tensor, Tensor]:
    """One position factorises: G_c = s_c uᵀ. Traces (n,), relative flatness (n,), ⟨G_c, w(j)⟩ (n, k, in)."""
    length = u.square().sum(1)  # (n,)
    trace = length * _signed_sum(s.square().sum(2), signs)
    relative = length * _signed_sum(((s @ gram) * s).sum(2), signs)
    channels = weight.shape[1]
    along = (s @ weight.reshape(len(weight), -1)) * u[:, None]  # (n, k, in · taps)
    return trace, relative, along.reshape(*along.shape[:2], channels, -1).sum(3)


def _by_overlaps(u: Tensor, s: Tensor, gram: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor]:
    """‖G‖² = ⟨uᵀu, sᵀs⟩ over pairs of positions; G itself is never formed."""
    n, k, rows, positions = s.shape
    overlap = u.mT @ u  # (n, t, t)
    flat = s.reshape(n, k * rows, positions)
    signed = flat if signs is None else (s * signs[:, :, None, None]).reshape(n, k * rows, positions)
    weighted = torch.matmul(gram, s).reshape(n, k * rows, positions)
    trace = ((signed.mT @ flat) * overlap).sum((1, 2))
    relative = ((signed.mT @ weighted) * overlap).sum((1, 2))
    return trace, relative


def _along_inputs(flow: Flow, weight: Tensor) -> Tensor:
    """⟨G_c, w(j)⟩ = Σ_t φ_{j,t} (Wᵀ s_c)_{j,t}, from what the backward pass sent to the input: (n, k, in)."""
    call, x = flow.call, flow.x
    if flow.back is not None:
        return _over_positions(x[:, None] * flow.back, call.kind)
    # The network's own input has no gradient: apply the weights of one input feature at a time instead.
    u = input_matrix(x, weight, call.kind, call.settings)[:, 0]  # (n, in · taps, t)
    s = output_matrix(flow.s, weight, call.kind, call.settings)[:, :, 0]  # (n, k, out, t)
    by_channel = u.reshape(len(u), weight.shape[1], -1, u.shape[-1])  # (n, in, taps, t)
    taps = weight.reshape(*weight.shape[:2], -1)  # (out, in, taps)
    return torch.einsum("nkot,oia,niat->nki", s, taps, by_channel)


def _by_gradients(
    u: Tensor, s: Tensor, weight: Tensor, call: Call, gram: Tensor, signs: Tensor | None, diagonal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Per-sample gradients formed and squared, some samples at a time."""
    groups = s.shape[2]
    traces, relatives, alongs = [], [], []
    squares: Tensor | None = None
    step = max(1, GRADIENT_BYTES // (s.shape[1] * weight.numel() * weight.element_size()))
    for start in range(0, len(u), step):
        part = slice(start, start + step)
        gradients = weight_gradients(u[part], s[part], call.kind)  # (n, k, *) in the weight's layout
        part_signs = None if signs is None else signs[part]
        laid_out = gradients_by_output(gradients, weight, call.kind, groups)
        products = laid_out @ laid_out.mT  # GGᵀ, (n, k, out, out)
        traces.append(_signed_sum(products.diagonal(dim1=2, dim2=3).sum(2), part_signs))
        relatives.append(_signed_sum((products * gram).sum((2, 3)), part_signs))
        alongs.append(_along_channels(gradients, weight, call.kind, groups))
        if diagonal:
            total = _signed_sum(gradients.square(), part_signs).sum(0)
            squares = total if squares is None else squares + total
    return torch.cat(traces), torch.cat(relatives), torch.cat(alongs), squares


def _along_channels(gradients: Tensor, weight: Tensor, kind: str, groups: int) -> Tensor:
    """⟨G_c, w(j)⟩ for every input channel j, from the gradients: (n, k, in)."""
    n, k = gradients.shape[:2]
    if kind == "transposed":
        return (gradients * weight.reshape(len(weight), -1)).sum(3)
    shaped = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)  # (g, out, in, taps)
    products = gradients.reshape(n, k, *shaped.shape) * shaped
    return products.sum((3, 5)).reshape(n, k, -1)


def _along_rows(u: Tensor, s: Tensor, weight: Tensor, kind: str) -> Tensor:
    """⟨G_c, w⟩ restricted to the weights of one output channel: (n, k, out)."""
    groups = u.shape[1]
    blocks = weight.reshape(groups, weight.shape[0] // groups, -1)  # (g, rows or in, features)
    if kind == "transposed":
        taps = weight[0, 0].numel()
        moved = (s * (blocks.mT @ u)[:, None]).sum(-1)  # (n, k, g, out · taps)
        return moved.reshape(*s.shape[:2], -1, taps).sum(-1)
    return (s * (blocks @ u)[:, None]).sum(-1).flatten(2)


def batch_size(ctx: Context, k: int) -> int:
    """Samples per batch that keep the columns of all layers and the largest set of patches within the budget."""
    columns = min(k, COLUMN_BLOCK)
    item = torch.finfo(ctx.problem.dtype).bits // 8
    held = sum(math.prod(layer.output_shape) for layer in ctx.network)
    patches = [math.prod(layer.output_shape[1:]) * ctx.params[layer.weight][0].numel() for layer in ctx.network]
    per_sample = item * (2 * columns * held + max(patches, default=0))
    budget = BATCH_BYTES
    if ctx.problem.device.type == "cuda":  # a GPU wants large batches; a CPU wants what fits its caches
        budget = max(budget, torch.cuda.mem_get_info(ctx.problem.device)[0] // 8)
    return max(1, min(ctx.problem.n_train, budget // max(1, per_sample)))


def smaller_until_it_fits(size: int, run: Callable[[int], T], ranks: Ranks = ALONE) -> T:
    """`run(size)`, with half the size after each time the GPU's memory did not suffice, on any of the ranks."""
    while True:
        found: list[T] = []
        short: torch.OutOfMemoryError | None = None
        try:
            found.append(run(size))
        except torch.OutOfMemoryError as problem:
            short = problem.with_traceback(None)  # its frames would keep the tensors that did not fit
        if not ranks.anywhere(short is not None):
            return found[0]
        if size == 1:
            raise short or torch.OutOfMemoryError("the memory of another rank's GPU did not suffice")
        found.clear()
        torch.cuda.empty_cache()
        size //= 2
