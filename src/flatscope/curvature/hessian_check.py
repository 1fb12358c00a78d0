"""A numerical check of the exact sweep: along random directions it must agree with a true Hessian product.

The graph says which blocks are Gauss-Newton; if it was misread (a weight that is also used outside its layer, an
operation that only looks linear) the two disagree and the parameter falls back to products, by name.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.curved_operations import BendColumns, BendRecorder, Places, watched_in_parts
from flatscope.curvature.output_hessian import output_root
from flatscope.curvature.patches import input_matrix, normalised, output_matrix
from flatscope.curvature.per_sample_gradients import over_positions
from flatscope.network.layers import Call, recorded
from flatscope.params import Params, add_to
from flatscope.samples import Batch, Inputs, joined_inputs, moved, parts_of, rows_of_inputs
from flatscope.stopping import end_in_time

PROBED_SAMPLES = 4
CANDIDATES = 64
STEP = 1e-3
TOLERANCE = 1e-5
TOGETHER = 1e-9  # of all parameters at once: each has a share of about one in their number
ROUNDING = 1e-13
NOTHING = 1e-6  # of the parameter that moves the outputs most: what moves them less counts less, as it may be rounding


def disagreeing_parameters(ctx: Context, curved: dict[str, str], bends: Places | None = None) -> dict[str, str]:
    """{parameter: reason} for exact-looking parameters whose true second derivative is another.

    Args:
        ctx: the network.
        curved: parameters that are not looked at.
        bends: operations whose own curvature the sweep adds.
    """
    names = [name for name in ctx.problem.trainable if name not in curved]
    if not names:
        return {}
    inputs, targets = ctx.structural(telling_samples)
    generator = ctx.generator("probe of the exact sweep")
    # Gaussian and not signs: a bias direction of equal signs is in the null space of the softmax Hessian.
    directions = {name: _gaussian(ctx.params[name], generator) for name in names}
    if _agree_together(ctx, inputs, targets, directions, bends):
        return {}
    by_factors, outputs_moved = _quadratic_forms_by_factors(ctx, inputs, targets, directions, bends)
    by_hessian = _quadratic_forms_by_hessian(ctx, inputs, targets, directions)
    # Some parameters, such as a bias of attention's keys, move nothing: what is found for them is rounding.
    least = ROUNDING * max(map(abs, by_hessian.values()))
    return {
        name: "its second derivative differs from the Gauss-Newton block"
        for name in names
        if abs(by_factors.get(name, 0.0) - by_hessian[name])
        > TOLERANCE * abs(by_hessian[name]) + ROUNDING * outputs_moved.get(name, 0.0) + least
    }


def _agree_together(
    ctx: Context, inputs: Inputs, targets: Tensor, directions: dict[str, Tensor], bends: Places | None
) -> bool:
    """Whether both ways agree along one direction of all parameters together, each of which counts about as much.

    Between two layers the Hessian also has what a product of a weight and an activation is bent: 2⟨δ, v_W (dh)⟩, with δ
    the gradient at the layer's output and dh how far the direction moves its input. So two passes, whatever the number
    of parameters, clear most networks; where they do not agree each parameter is looked at by itself.
    """
    run = _RecordedPass(ctx, inputs, targets, directions, bends, between=True)
    if not run.along:
        return False
    sizes = {name: abs(float(value.detach())) for name, value in run.along.items()}
    least = NOTHING * max(sizes.values())
    scales = {name: 1 / max(size, least) if size else 1.0 for name, size in sizes.items()}
    moves, *others = run.moves(sum(scales[name] * value for name, value in run.along.items()))
    scaled = {name: scales.get(name, 1.0) * v for name, v in directions.items()}
    parts = [float(run.root.forms(moves).sum()), run.bent(others), 2 * run.between(others, scaled)]
    leaves, gradients = _gradients(ctx, inputs, targets, directions)
    along = sum((gradients[name] * v).sum() for name, v in scaled.items())
    if not isinstance(along, Tensor) or not along.requires_grad:
        return False
    products = torch.autograd.grad(along, list(leaves.values()), materialize_grads=True)
    true = sum(float((product * scaled[name]).sum()) for name, product in zip(leaves, products, strict=True))
    allowed = TOGETHER * sum(map(abs, parts)) + 2 * ROUNDING * float(moves.square().sum())
    return abs(sum(parts) - true) <= allowed


def telling_samples(ctx: Context) -> Batch:
    """A few samples on which a misreading would show: drawn at random, and of those the ones with most curvature.

    Samples of which the network is sure, or which are blank, have no second derivative to compare: how much of it
    there is shows in how far the outputs move along a random direction, seen through the factors of the loss.
    """
    n, generator = ctx.problem.n_train, ctx.generator("samples of the probe")
    chosen = torch.randperm(n, generator=generator)[:CANDIDATES].sort().values
    inputs, targets = picked(ctx, chosen)
    step = {name: STEP * _gaussian(ctx.params[name], generator).to(ctx.params[name]) for name in ctx.problem.trainable}
    with torch.no_grad():
        outputs = ctx.forward(inputs)
        moved_outputs = ctx.forward(inputs, {**ctx.params, **{name: ctx.params[name] + v for name, v in step.items()}})
    size = output_root(ctx.problem.loss, outputs, targets).forms(moved_outputs - outputs).abs().nan_to_num().cpu()
    drawn = torch.randperm(len(targets), generator=generator)[: PROBED_SAMPLES // 2].tolist()
    top = [i for i in size.argsort(descending=True).tolist() if i not in drawn][: PROBED_SAMPLES - len(drawn)]
    kept = torch.tensor(sorted(drawn + top), device=targets.device)
    return rows_of_inputs(inputs, kept), targets[kept]


def picked(ctx: Context, chosen: Tensor) -> Batch:
    """The samples of these numbers, in one batch; of texts padded to other lengths those of the commonest length."""
    parts: list[Batch] = []
    start = 0
    for inputs, targets in ctx.batches():
        here = chosen[(chosen >= start) & (chosen < start + len(targets))] - start
        if len(here):
            parts.append((rows_of_inputs(inputs, here.to(targets.device)), targets[here.to(targets.device)]))
        start += len(targets)
        if start > int(chosen[-1]):
            break
    shapes = [tuple(part.shape[1:] for part in (*parts_of(inputs), targets)) for inputs, targets in parts]
    counts: Counter[object] = Counter()
    for shape, (_, targets) in zip(shapes, parts, strict=True):
        counts[shape] += len(targets)
    (common, _), *_ = counts.most_common(1)
    alike = [part for shape, part in zip(shapes, parts, strict=True) if shape == common]
    return joined_inputs([inputs for inputs, _ in alike]), torch.cat([targets for _, targets in alike])


def _gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)


def in_precision(ctx: Context, inputs: Inputs, dtype: torch.dtype) -> tuple[Inputs, Params, Params]:
    """Inputs, parameters and buffers in a floating-point type: float64, where float32 products keep no digit."""
    params, buffers = (
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}
        for values in (ctx.params, ctx.problem.buffers)
    )
    return moved(inputs, ctx.problem.device, dtype), params, buffers


def _quadratic_forms_by_hessian(
    ctx: Context, inputs: Inputs, targets: Tensor, directions: dict[str, Tensor]
) -> dict[str, float]:
    """vᵀ H v per parameter, by double backward."""
    leaves, gradients = _gradients(ctx, inputs, targets, directions)
    forms = {}
    for name, gradient in gradients.items():
        end_in_time(ctx)
        forms[name] = 0.0
        if gradient.requires_grad:
            v = directions[name]
            (product,) = torch.autograd.grad(gradient, leaves[name], v, retain_graph=True, materialize_grads=True)
            forms[name] = float((product.detach() * v).sum())
    return forms


def _gradients(ctx: Context, inputs: Inputs, targets: Tensor, names: Iterable[str]) -> tuple[Params, Params]:
    """Leaves and the loss's gradients by them, to be differentiated once more; zeros where it depends on none."""
    inputs, params, buffers = in_precision(ctx, inputs, torch.float64)
    leaves = {name: params[name].detach().requires_grad_() for name in names}
    with torch.enable_grad(), FastConvolutions():
        outputs = ctx.problem.forward(inputs, {**params, **leaves}, buffers)
        loss = ctx.problem.loss(outputs, _double_targets(targets)).sum()
        if not loss.requires_grad:
            return leaves, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        gradients = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
    return leaves, dict(zip(leaves, gradients, strict=True))


def _quadratic_forms_by_factors(
    ctx: Context, inputs: Inputs, targets: Tensor, directions: dict[str, Tensor], bends: Places | None = None
) -> tuple[dict[str, float], dict[str, float]]:
    """Σ_c ⟨G_c, v⟩² per parameter from what the sweep records, and 2‖Jv‖²: how far v moves the outputs.

    ⟨G, v⟩ is linear in the column that is sent back, so its derivative by the column is Jv as the sweep sees it: one
    more backward pass for each parameter, however many columns there are. Where the network is sure of its samples the
    Hessian product is a small difference of numbers of size ‖Jv‖², so their rounding is the least that it can be off.
    """
    run = _RecordedPass(ctx, inputs, targets, directions, bends)
    forms, lengths = {}, {}
    for name, total in run.along.items():
        end_in_time(ctx)
        moves, *others = run.moves(total)  # Jv, (n, …)
        forms[name] = float(run.root.forms(moves).sum()) + run.bent(others)
        lengths[name] = 2 * float(moves.square().sum())
    return forms, lengths


class _RecordedPass:
    """A forward pass as the sweep records it: ⟨G_c, v⟩ of each direction as a function of the column c sent back."""

    def __init__(
        self,
        ctx: Context,
        inputs: Inputs,
        targets: Tensor,
        directions: dict[str, Tensor],
        bends: Places | None,
        between: bool = False,
    ) -> None:
        inputs, params, buffers = in_precision(ctx, inputs, torch.float64)
        params |= {name: params[name].detach().requires_grad_() for name in directions}
        rule = BendRecorder(bends or Places())
        with torch.enable_grad(), recorded(ctx.problem.model, params, True, ctx.network.axes) as recorder:
            with watched_in_parts(rule.follow):
                outputs = ctx.problem.forward(inputs, params, buffers)
            self.root = output_root(ctx.problem.loss, outputs, _double_targets(targets))
            numbers = torch.arange(len(targets), device=targets.device)
            loss = ctx.problem.loss(outputs, _double_targets(targets)).sum()
            self._local = BendColumns(rule.bends, loss, numbers, ctx.seed) if rule.bends else None
            inner = self._local.inputs if self._local else []
            calls = [call for call in recorder.calls if call.weight in directions or call.bias in directions]
            self._calls = [call for call in calls if call.edge is not None]
            self._moved = [call for call in self._calls if call.input.grad_fn is not None] if between else []
            edges = [call.edge for call in self._calls if call.edge is not None]
            given = [outputs, *inner, *(call.input for call in self._moved)]
            first = torch.randn(outputs.shape, generator=ctx.generator("column of the probe"), dtype=torch.float64)
            self._columns = [first.to(outputs).requires_grad_()]
            self._columns += [torch.zeros_like(value, requires_grad=True) for value in given[1:]]
            self._params, self.along = params, dict[str, Tensor]()
            self._slopes: Sequence[Tensor | None] = ()
            if edges:
                sent = torch.autograd.grad(given, edges, self._columns, create_graph=True, allow_unused=True)
                for call, s in zip(self._calls, sent, strict=True):
                    for name, value in [] if s is None else _along(call, s[:, None], params, directions):
                        add_to(self.along, name, value.sum())
            if self._moved:
                ends = [call.edge for call in self._moved if call.edge is not None]
                self._slopes = torch.autograd.grad(loss, ends, allow_unused=True)

    def moves(self, total: Tensor | float) -> list[Tensor]:
        """How far a direction moves the outputs, the inputs of curved operations and those of layers."""
        assert isinstance(total, Tensor)
        return list(torch.autograd.grad(total, self._columns, retain_graph=True, materialize_grads=True))

    def bent(self, others: list[Tensor]) -> float:
        """What curved operations add to the quadratic form."""
        return float(self._local.forms(others)) if self._local else 0.0

    def between(self, others: list[Tensor], directions: dict[str, Tensor]) -> float:
        """Σ ⟨δ, v_W (dh)⟩ over the layers."""
        total = 0.0
        moved_inputs = others[len(others) - len(self._moved) :]
        for call, slope, dh in zip(self._moved, self._slopes, moved_inputs, strict=True):
            if slope is not None and call.weight in directions:
                weight_only = {call.weight: directions[call.weight]}
                ((_, value),) = _along(call, slope[:, None], self._params, weight_only, dh)
                total += float(value.sum())
        return total


def _along(
    call: Call, s: Tensor, params: dict[str, Tensor], directions: dict[str, Tensor], change: Tensor | None = None
) -> list[tuple[str, Tensor]]:
    """⟨G_c, v⟩ of weight and bias, (n, k) each; with a change of the input in place of the input its derivative."""
    found: list[tuple[str, Tensor]] = []
    if call.bias is not None and call.bias in directions:
        found.append((call.bias, over_positions(s, call.kind) @ directions[call.bias]))
    if call.weight in directions:
        v, x = directions[call.weight], call.input.detach() if change is None else change
        if call.kind == "batchnorm":
            level = 0.0 if change is None else normalised(torch.zeros_like(x), call.settings)
            value = over_positions((normalised(x, call.settings) - level)[:, None] * s, call.kind) @ v
        else:
            value = directional(call, x, s, params[call.weight].detach(), v)
        found.append((call.weight, value))
    return found


def directional(call: Call, x: Tensor, s: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """⟨G_c, v⟩ for a weight-shaped v, without forming G_c: (n, k)."""
    u = input_matrix(x, weight, call.kind, call.settings)  # (n, g, features, t)
    out = output_matrix(s, weight, call.kind, call.settings)  # (n, k, g, rows, t)
    groups = u.shape[1]
    blocks = v.reshape(groups, v.shape[0] // groups, -1)  # (g, rows or in, features)
    moved_u = (blocks.mT if call.kind == "transposed" else blocks) @ u  # (n, g, rows, t)
    return (out * moved_u[:, None]).flatten(2).sum(2)


def _double_targets(targets: Tensor) -> Tensor:
    return targets.double() if targets.is_floating_point() else targets
