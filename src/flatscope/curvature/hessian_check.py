"""A numerical check of the exact sweep: along random directions it must agree with a true Hessian product.

The graph says which blocks are Gauss-Newton; if it was misread (a weight that is also used outside its layer, an
operation that only looks linear) the two disagree and the parameter falls back to products, by name.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.checked_pass import CheckedPass, SharedPass, random_direction
from flatscope.curvature.curved_operations import CurvedColumns
from flatscope.curvature.lookups import looked_up
from flatscope.curvature.output_hessian import output_root
from flatscope.curvature.patches import input_matrix, normalised, output_matrix, weighted_inputs
from flatscope.curvature.per_sample_gradients import over_positions
from flatscope.network.layer_uses import LayerUse
from flatscope.network.not_covered import NotCovered
from flatscope.params import Params, add_to
from flatscope.sampling import refuse_out_of_time

TOLERANCE = 1e-5
TOGETHER = 1e-9  # of all parameters at once: each has a share of about one in their number
ROUNDING = 1e-13
NOTHING = 1e-6  # of the parameter that moves the outputs most: what moves them less counts less, as it may be rounding


def not_covered_by_numbers(shared: SharedPass, known: Collection[str]) -> NotCovered:
    """Parameters whose true second derivative is another than what the sweep reads.

    Args:
        shared: a pass of the network, which this check may share with others.
        known: parameters that the sweep is known not to cover.
    """
    ctx = shared.ctx
    names = [name for name in ctx.problem.trainable if name not in known]
    if not names:
        return NotCovered()
    generator = ctx.generator("probe of the exact sweep")
    # Not signs: a bias direction of equal signs is in the null space of the softmax Hessian.
    directions = {name: random_direction(ctx.params[name], generator) for name in names}
    run = shared.run
    swept, true = _Swept(ctx, run, directions), shared.as_it_runs(run)
    if _agree_together(swept, true, directions):
        return NotCovered()
    by_factors, outputs_moved = _quadratic_forms_by_factors(ctx, swept)
    by_hessian = _quadratic_forms_by_hessian(ctx, true, directions)
    # Some parameters, such as a bias of attention's keys, move nothing: what is found for them is rounding.
    least = ROUNDING * max(map(abs, by_hessian.values()))
    wrong = (
        name
        for name in names
        if abs(by_factors.get(name, 0.0) - by_hessian[name])
        > TOLERANCE * abs(by_hessian[name]) + ROUNDING * outputs_moved.get(name, 0.0) + least
    )
    return NotCovered(dict.fromkeys(wrong, "its second derivative differs from the Gauss-Newton block"))


def _agree_together(swept: _Swept, run: CheckedPass, directions: Params) -> bool:
    """True where both ways agree along one direction of all parameters together, each of which counts about as much.

    Between two layers the Hessian also has the second derivative of weight times activation, 2⟨δ, v_W (dh)⟩, with δ
    the gradient at the layer's output and dh how far the direction moves its input. So two products, whatever the
    number of parameters, clear most networks; where they do not agree each parameter is looked at by itself.
    """
    if not swept.along:
        return False
    sizes = {name: abs(float(value.detach())) for name, value in swept.along.items()}
    least = NOTHING * max(sizes.values())
    scales = {name: 1 / max(size, least) if size else 1.0 for name, size in sizes.items()}
    moves, *others = swept.moves(sum(scales[name] * value for name, value in swept.along.items()))
    scaled = {name: scales.get(name, 1.0) * v for name, v in directions.items()}
    parts = [float(swept.root.forms(moves).sum()), swept.at_curved(others), 2 * swept.between(others, scaled)]
    along = sum((run.gradients[name] * v).sum() for name, v in scaled.items())
    if not isinstance(along, Tensor) or not along.requires_grad:
        return False
    leaves = [run.leaves[name] for name in scaled]
    products = torch.autograd.grad(along, leaves, retain_graph=True, materialize_grads=True)
    true = sum(float((product * v).sum()) for product, v in zip(products, scaled.values(), strict=True))
    allowed = TOGETHER * sum(map(abs, parts)) + 2 * ROUNDING * float(moves.square().sum())
    return abs(sum(parts) - true) <= allowed


def _quadratic_forms_by_hessian(ctx: Context, run: CheckedPass, directions: Params) -> dict[str, float]:
    """vᵀ H v per parameter, by double backward."""
    forms = {}
    for name, v in directions.items():
        refuse_out_of_time(ctx)
        forms[name], gradient = 0.0, run.gradients[name]
        if gradient.requires_grad:
            leaf = run.leaves[name]
            (product,) = torch.autograd.grad(gradient, leaf, v, retain_graph=True, materialize_grads=True)
            forms[name] = float((product.detach() * v).sum())
    return forms


def _quadratic_forms_by_factors(ctx: Context, swept: _Swept) -> tuple[dict[str, float], dict[str, float]]:
    """Σ_c ⟨G_c, v⟩² per parameter from what the sweep records, and 2‖Jv‖²: how far v moves the outputs.

    ⟨G, v⟩ is linear in the column that is sent back, so its derivative by the column is Jv as the sweep sees it: one
    more backward pass for each parameter, however many columns there are. Where the network is sure of its samples the
    Hessian product is a small difference of numbers of size ‖Jv‖², so their rounding is the least that it can be off.
    """
    forms, lengths = {}, {}
    for name, total in swept.along.items():
        refuse_out_of_time(ctx)
        moves, *others = swept.moves(total)  # Jv, (n, …)
        forms[name] = float(swept.root.forms(moves).sum()) + swept.at_curved(others)
        lengths[name] = 2 * float(moves.square().sum())
    return forms, lengths


class _Swept:
    """⟨G_c, v⟩ of each direction v as the sweep reads it of a pass, as a function of the column c sent back.

    Args:
        ctx: the network.
        run: the pass.
        directions: one of each parameter that is looked at.
    """

    def __init__(self, ctx: Context, run: CheckedPass, directions: Params) -> None:
        self.root = output_root(ctx.problem.loss, run.outputs, run.targets)
        numbers = torch.arange(len(run.targets), device=run.targets.device)
        self._local = CurvedColumns(run.curved_calls, run.loss, numbers, ctx.seed) if run.curved_calls else None
        inner = self._local.inputs if self._local else []
        uses = [use for use in run.uses if use.weight in directions or use.bias in directions]
        uses = [use for use in uses if use.edge is not None]
        self._moved = [use for use in uses if use.input.grad_fn is not None]
        edges = [use.edge for use in uses if use.edge is not None]
        given = [run.outputs, *inner, *(use.input for use in self._moved)]
        first = torch.randn(run.outputs.shape, generator=ctx.generator("column of the probe"), dtype=torch.float64)
        self._columns = [first.to(run.outputs).requires_grad_()]
        self._columns += [torch.zeros_like(value, requires_grad=True) for value in given[1:]]
        self._leaves, self.along = run.leaves, dict[str, Tensor]()
        self._slopes: Sequence[Tensor | None] = ()
        if edges:
            sent = torch.autograd.grad(given, edges, self._columns, create_graph=True, allow_unused=True)
            for use, s in zip(uses, sent, strict=True):
                for name, value in [] if s is None else _along(use, s[:, None], run.leaves, directions):
                    add_to(self.along, name, value.sum())
        if self._moved:
            ends = [use.edge for use in self._moved if use.edge is not None]
            self._slopes = torch.autograd.grad(run.loss, ends, retain_graph=True, allow_unused=True)

    def moves(self, total: Tensor | float) -> list[Tensor]:
        """Movements of the outputs, the inputs of curved operations and those of layers along a direction."""
        assert isinstance(total, Tensor)
        return list(torch.autograd.grad(total, self._columns, retain_graph=True, materialize_grads=True))

    def at_curved(self, others: list[Tensor]) -> float:
        """Part of the quadratic form that comes from curved operations."""
        return float(self._local.forms(others[: len(self._local.inputs)])) if self._local else 0.0

    def between(self, others: list[Tensor], directions: Params) -> float:
        """Σ ⟨δ, v_W (dh)⟩ over the layers."""
        total = 0.0
        moved_inputs = others[len(others) - len(self._moved) :]
        for use, slope, dh in zip(self._moved, self._slopes, moved_inputs, strict=True):
            if slope is not None and use.weight in directions:
                weight_only = {use.weight: directions[use.weight]}
                ((_, value),) = _along(use, slope[:, None], self._leaves, weight_only, dh)
                total += float(value.sum())
        return total


def _along(
    use: LayerUse[Tensor], s: Tensor, leaves: Params, directions: Params, change: Tensor | None = None
) -> list[tuple[str, Tensor]]:
    """⟨G_c, v⟩ of weight and bias, (n, k) each; with a change of the input in place of the input its derivative."""
    found: list[tuple[str, Tensor]] = []
    if use.bias is not None and use.bias in directions:
        found.append((use.bias, over_positions(s, use.kind) @ directions[use.bias]))
    if use.weight in directions:
        v, x = directions[use.weight], use.input.detach() if change is None else change
        if use.kind == "batchnorm":
            level = 0.0 if change is None else normalised(torch.zeros_like(x), use.settings)
            value = over_positions((normalised(x, use.settings) - level)[:, None] * s, use.kind) @ v
        else:
            value = directional(use, x, s, leaves[use.weight].detach(), v)
        found.append((use.weight, value))
    return found


def directional(use: LayerUse[Tensor], x: Tensor, s: Tensor, weight: Tensor, v: Tensor) -> Tensor:
    """⟨G_c, v⟩ for a weight-shaped v, without forming G_c: (n, k)."""
    if use.kind == "lookup":
        return (s * looked_up(use, v)[:, None]).flatten(2).sum(2)
    u = input_matrix(x, weight, use.kind, use.settings)  # (n, g, features, t)
    out = output_matrix(s, weight, use.kind, use.settings)  # (n, k, g, rows, t)
    return (out * weighted_inputs(u, v, use.kind)[:, None]).flatten(2).sum(2)
