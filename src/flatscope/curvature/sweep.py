"""The exact sweep: one batched backward of the output-Hessian factors gives the curvature of every layer at once.

On a piecewise-linear network the Hessian block of one weight matrix is its Gauss-Newton block, a sum over samples
and factor columns of outer products of per-sample gradients G_c. Traces, ρ of every unit and relative flatness
are sums of squares of things the backward pass already holds; see the formulas at `LayerSums`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.factors import Columns, n_columns, output_columns
from flatscope.curvature.linearity import curved_parameters
from flatscope.curvature.patches import input_matrix, output_matrix, rows_by_output, weight_gradients
from flatscope.layers import Call, recorded
from flatscope.params import Params
from flatscope.samples import Batch, Inputs

BATCH_BYTES = 192 * 2**20
GRADIENT_BYTES = 64 * 2**20


@dataclass
class Mean:
    """Running mean over samples, in float64, with the standard error that the samples' spread gives."""

    n: int = 0
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    squares: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add(self, values: Tensor) -> None:
        """Values of some samples: (n,) or (n, units)."""
        values = values.detach().double().cpu()
        self.n += len(values)
        self.total = self.total + values.sum(0)
        self.squares = self.squares + values.square().sum(0)

    @property
    def value(self) -> Tensor:
        """The mean; () or (units,)."""
        return self.total / self.n

    @property
    def stderr(self) -> Tensor:
        """Standard error over samples; zero for a single sample."""
        variance = (self.squares / self.n - self.value.square()).clamp_min(0)
        return (variance / max(self.n - 1, 1)).sqrt()


@dataclass
class LayerSums:
    """Sums over the data for one weight matrix; s_c: columns at its output, u: its input patches, W̄: (out, in·taps).

    trace: mean Σ_c ‖G_c‖²;  rho(j): mean Σ_c (Σ_t φ_{j,t} (Wᵀ s_c)_{j,t})², j an input feature or channel;
    rho_rows(i): the same for rows;  relative_flatness: mean Σ_c ‖W̄ᵀ G_c‖²;  diagonal: mean Σ_c G_c².
    """

    trace: Mean = field(default_factory=Mean)
    rho: Mean = field(default_factory=Mean)
    rho_rows: Mean = field(default_factory=Mean)
    relative_flatness: Mean = field(default_factory=Mean)


@dataclass
class Curvature:
    """Result of the sweep.

    Attributes:
        layers: sums by weight parameter, forward order, for those whose block is exact.
        traces: trace of the Hessian block of each parameter tensor that was covered.
        total: sum of those traces, per-sample spread included.
        diagonals: Hessian diagonal of each covered tensor, if asked for.
        curved: {parameter: reason} for those the sweep cannot give exactly.
    """

    layers: dict[str, LayerSums]
    traces: dict[str, Mean]
    total: Mean
    diagonals: Params
    curved: dict[str, str]


def exact_sweep(ctx: Context, diagonal: bool = False) -> Curvature:
    """Sweep the training data once.

    Args:
        ctx: the network; cached there, so ask through `ctx.sweep(exact_sweep)`.
        diagonal: also the diagonal of every covered block (one number per weight).
    """
    from flatscope.curvature.probe import disagreeing_parameters

    curved = dict(ctx.sweep(find_curved))
    curved |= disagreeing_parameters(ctx, curved)
    result = Curvature({}, {}, Mean(), {}, curved)
    k = n_columns(ctx.problem.loss, ctx.problem.n_outputs)
    for batch in ctx.batches(size=batch_size(ctx, k)):
        per_sample: Tensor | float = 0.0
        for call, x, s, back, signs in backpropagated(ctx, batch, curved):
            per_sample = per_sample + _add_call(ctx, result, call, x, s, back, signs, diagonal)
        if isinstance(per_sample, Tensor):
            result.total.add(per_sample)
        ctx.count("forward", len(batch[1]))
        ctx.count("backward", len(batch[1]) * k)
    result.diagonals = {name: value / ctx.problem.n_train for name, value in result.diagonals.items()}
    return result


def find_curved(ctx: Context) -> dict[str, str]:
    """{parameter: reason} for trainable parameters whose block the sweep cannot give, read off the graph."""
    leaves, outputs, calls = recorded_forward(ctx, ctx.problem.example())
    curved = curved_parameters(outputs, leaves, calls)
    seen = {call.weight for call in calls} | {call.bias for call in calls if call.bias}
    for name in leaves:
        if name not in seen:
            curved.setdefault(name, "not the weight, bias or BatchNorm parameter of a recorded layer")
    return {name: curved[name] for name in ctx.problem.trainable if name in curved}


def recorded_forward(ctx: Context, inputs: Inputs) -> tuple[Params, Tensor, list[Call]]:
    """Run the network forward with every layer on its own view of its input; leaves, outputs, calls."""
    leaves = {name: ctx.params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    params = {**ctx.params, **leaves}
    with torch.enable_grad(), recorded(ctx.problem, params, isolate=True) as recorder:
        outputs = ctx.problem.forward(inputs, params)
    return leaves, outputs, recorder.calls


def backpropagated(
    ctx: Context, batch: Batch, curved: dict[str, str]
) -> Iterator[tuple[Call, Tensor, Tensor, Tensor | None, Tensor | None]]:
    """(call, input, columns at its output, columns at its input, signs) of every exact layer, in blocks of columns."""
    inputs, targets = batch
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.detach().requires_grad_()  # so that the first layer's input has a gradient too
    _, outputs, calls = recorded_forward(ctx, inputs)
    wanted = [call for call in calls if call.edge is not None and not call.opaque]
    wanted = [call for call in wanted if call.weight not in curved or (call.bias or call.weight) not in curved]
    columns = output_columns(ctx.problem.loss, outputs.detach(), targets)
    targets_of_grad: list[Any] = [call.edge for call in wanted]
    inner = [call for call in wanted if call.kind != "batchnorm" and call.input.requires_grad]
    targets_of_grad += [call.input for call in inner]
    width = max(1, len(columns.values)) if len(columns.values) <= 64 else 32
    for start in range(0, len(columns.values), width):
        block = columns.block(start, start + width)
        found = _batched_backward(outputs, targets_of_grad, block)
        at_input = {id(call): found[len(wanted) + i] for i, call in enumerate(inner)}
        for call, s in zip(wanted, found, strict=False):
            if s is not None:
                yield call, call.input.detach(), s, at_input.get(id(call)), block.signs


def _batched_backward(outputs: Tensor, wanted: list[Any], block: Columns) -> list[Tensor | None]:
    """Gradients of all columns at once, (k, n, …) each; None where nothing flows."""
    found = torch.autograd.grad(
        outputs, wanted, block.values, retain_graph=True, allow_unused=True, is_grads_batched=True
    )
    return list(found)


def _add_call(
    ctx: Context,
    result: Curvature,
    call: Call,
    x: Tensor,
    s: Tensor,
    back: Tensor | None,
    signs: Tensor | None,
    diagonal: bool,
) -> Tensor:
    """Add one layer's block of columns; gives the per-sample traces, (n,)."""
    per_sample = x.new_zeros(len(x), dtype=torch.float64)
    if call.bias and call.bias not in result.curved and call.bias in ctx.problem.trainable:
        gradient = _bias_gradient(s, call.kind)  # (k, n, out)
        per_sample += _tally(result, call.bias, gradient, signs, diagonal)
    if call.weight in result.curved or call.weight not in ctx.problem.trainable:
        return per_sample
    if call.kind == "batchnorm":
        gradient = _scale_gradient(x, s, call.settings)
        return per_sample + _tally(result, call.weight, gradient, signs, diagonal)
    weight = ctx.params[call.weight]
    u = input_matrix(x, weight, call.kind, call.settings)  # (n, g, features, t)
    out = output_matrix(s, weight, call.kind, call.settings)  # (k, n, g, rows, t)
    trace, relative, diagonals = _squares(u, out, weight, call, signs, diagonal)
    sums = result.layers.setdefault(call.weight, LayerSums())
    sums.trace.add(trace)
    sums.relative_flatness.add(relative)
    if back is None:
        back = torch.zeros_like(x).expand(len(s), *x.shape)
    sums.rho.add(_signed_sum(_over_positions(x[None] * back, call.kind).square(), signs))
    sums.rho_rows.add(_signed_sum(_along_rows(u, out, weight, call.kind).square(), signs))
    result.traces.setdefault(call.weight, Mean()).add(trace)
    if diagonals is not None:
        total = result.diagonals.get(call.weight, 0.0)
        result.diagonals[call.weight] = total + diagonals.double().cpu().reshape(weight.shape)
    return per_sample + trace.double()


def _tally(result: Curvature, name: str, gradient: Tensor, signs: Tensor | None, diagonal: bool) -> Tensor:
    """Add per-sample gradients (k, n, size) of a small parameter; gives the per-sample trace."""
    squares = _signed_sum(gradient.square(), signs)  # (n, size)
    trace = squares.sum(1)
    result.traces.setdefault(name, Mean()).add(trace)
    if diagonal:
        result.diagonals[name] = result.diagonals.get(name, 0.0) + squares.double().sum(0).cpu()
    return trace.double()


def _signed_sum(values: Tensor, signs: Tensor | None) -> Tensor:
    """Sum over columns, (k, n, …) -> (n, …), negative columns subtracted."""
    if signs is not None:
        values = values * signs.reshape(*signs.shape, *[1] * (values.ndim - 2))
    return values.sum(0)


def _over_positions(values: Tensor, kind: str) -> Tensor:
    """Sum over positions: (k, n, …) -> (k, n, channels); the channel axis is last for dense layers."""
    if kind == "dense":
        return values.flatten(2, -2).sum(2) if values.ndim > 3 else values
    return values.flatten(3).sum(3) if values.ndim > 3 else values


def _along_rows(u: Tensor, s: Tensor, weight: Tensor, kind: str) -> Tensor:
    """⟨G_c, w⟩ restricted to each row of the weight (one output channel): (k, n, out)."""
    groups = u.shape[1]
    blocks = weight.reshape(groups, weight.shape[0] // groups, -1)  # (g, rows or in, features)
    if kind == "transposed":
        taps = weight[0, 0].numel()
        moved = (s * (blocks.mT @ u)).sum(-1)  # (k, n, g, out · taps)
        return moved.reshape(*s.shape[:2], -1, taps).sum(-1)
    return (s * (blocks @ u)).sum(-1).flatten(2)


def _bias_gradient(s: Tensor, kind: str) -> Tensor:
    return _over_positions(s, "dense" if kind == "dense" else "conv")


def _scale_gradient(x: Tensor, s: Tensor, settings: dict[str, Any]) -> Tensor:
    """Gradient with respect to BatchNorm's scale: the normalised input times the columns, (k, n, channels)."""
    shape = (1, -1, *[1] * (x.ndim - 2))
    spread = (settings["running_var"] + (1e-5 if settings["eps"] is None else settings["eps"])).sqrt()
    normalised = (x - settings["running_mean"].reshape(shape)) / spread.reshape(shape)
    return _over_positions(normalised[None] * s, "conv")


def _squares(
    u: Tensor, s: Tensor, weight: Tensor, call: Call, signs: Tensor | None, diagonal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Σ_c ‖G_c‖² and Σ_c ‖W̄ᵀ G_c‖² per sample, and Σ_{n,c} G_c² per weight if asked for.

    Three ways to the same numbers, by cost: one position factorises; otherwise per-sample gradients are formed,
    or, where positions are few against weights, only the t × t Gram matrices of patches and columns.
    """
    k, n, groups, rows, positions = s.shape
    features = u.shape[2]
    by_output = rows_by_output(weight, call.kind, groups)
    gram = by_output @ by_output.T  # (out, out): ‖W̄ᵀG‖² = tr(Gᵀ W̄W̄ᵀ G)
    if groups == 1 and call.kind != "transposed":
        if positions == 1:
            return _one_position(u[:, 0, :, 0], s[:, :, 0, :, 0], gram, signs, diagonal)
        if not diagonal and positions * (features + k * rows) < k * rows * features:
            return _by_grams(u[:, 0], s[:, :, 0], gram, signs)
    return _by_gradients(u, s, weight, call, gram, signs, diagonal)


def _one_position(
    u: Tensor, s: Tensor, gram: Tensor, signs: Tensor | None, diagonal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    length = u.square().sum(1)  # (n,)
    trace = length * _signed_sum(s.square().sum(2), signs)
    relative = length * _signed_sum(((s @ gram) * s).sum(2), signs)
    return trace, relative, _signed_sum(s.square(), signs).T @ u.square() if diagonal else None


def _by_grams(u: Tensor, s: Tensor, gram: Tensor, signs: Tensor | None) -> tuple[Tensor, Tensor, None]:
    k, n, rows, positions = s.shape
    overlap = u.mT @ u  # (n, t, t)
    signed = s if signs is None else s * signs[:, :, None, None]
    left = signed.permute(1, 3, 0, 2).reshape(n, positions, k * rows)  # (n, t, k·out)
    right = s.permute(1, 0, 2, 3).reshape(n, k * rows, positions)
    weighted = (gram @ s).permute(1, 0, 2, 3).reshape(n, k * rows, positions)
    trace = ((left @ right) * overlap).sum((1, 2))
    relative = ((left @ weighted) * overlap).sum((1, 2))
    return trace, relative, None


def _by_gradients(
    u: Tensor, s: Tensor, weight: Tensor, call: Call, gram: Tensor, signs: Tensor | None, diagonal: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    traces, relatives = [], []
    squares: Tensor | None = None
    step = max(1, GRADIENT_BYTES // (s.shape[0] * weight.numel() * weight.element_size()))
    for start in range(0, len(u), step):
        part = slice(start, start + step)
        gradients = weight_gradients(u[part], s[:, part], call.kind)  # (k, n, *) in the weight's layout
        part_signs = None if signs is None else signs[:, part]
        squared = gradients.square()
        traces.append(_signed_sum(squared.sum((2, 3)), part_signs))
        by_output = gradients
        if call.kind == "transposed":
            shape = (*gradients.shape[:2], *weight.shape)
            groups = s.shape[2]
            by_output = torch.stack(
                [rows_by_output(g, call.kind, groups) for g in gradients.reshape(-1, *weight.shape)]
            ).reshape(*shape[:2], len(gram), -1)
        relatives.append(_signed_sum(((gram @ by_output) * by_output).sum((2, 3)), part_signs))
        if diagonal:
            total = _signed_sum(squared, part_signs).sum(0)
            squares = total if squares is None else squares + total
    return torch.cat(traces), torch.cat(relatives), squares


def batch_size(ctx: Context, k: int) -> int:
    """Samples per batch that keep the columns of all layers within the memory budget."""
    sizes = [sum(_numel(shape) for shape in (layer.input_shape, layer.output_shape)) for layer in ctx.network]
    patches = [_numel(layer.output_shape) * ctx.params[layer.weight][0].numel() for layer in ctx.network]
    item = torch.finfo(ctx.problem.dtype).bits // 8
    per_sample = item * (2 * min(k, 64) * sum(sizes) + max(patches, default=0) // max(1, k))
    return max(1, min(ctx.problem.n_train, BATCH_BYTES // max(1, per_sample)))


def _numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())
