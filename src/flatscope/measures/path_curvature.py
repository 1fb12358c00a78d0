"""Curvature along basis-path values: the Gauss-Newton part of every value from one sweep, the rest from few products.

A value moves its own edge e, and where e = π(u) for a class u, it also divides the weights that read u. Let d_e be
that direction in weight space, in units of the edge's weight, and N = Σ ∂ℓ/∂f ∇²f what the Hessian has beyond its
Gauss-Newton part. The second derivative of the loss by such a value is, up to the edge's gain squared,

    d_eᵀ (GN + N) d_e + Σ g ∂²w/∂x_e²,

with Gauss-Newton a sum of squares ⟨G_c, d_e⟩² of what the sweep's columns hold. N d_e is one product. Where units of a
chain are one layer apart nothing but the unit itself lies between its incoming edge and its outgoing weights, so that
all of a layer's edges share one product. Also the Hessian with respect to the values, known by its products.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.memory import allowed, in_batches
from flatscope.curvature.operators import Hessian
from flatscope.curvature.per_sample_gradients import (
    Flow,
    along_inputs,
    matrices,
    overlaps_are_cheaper,
    signed_sum,
    squared_gradients,
    squares_and_along,
    sum_over_pairs,
    vector_gradients,
)
from flatscope.curvature.sweep import backpropagated, sweep_plan, sweep_shape
from flatscope.curvature.symmetric_operator import Congruence, Directions, SymmetricOperator
from flatscope.network.not_covered import NotCovered
from flatscope.params import Params, add_to, count_scalars, unflatten
from flatscope.samples import Batch
from flatscope.symmetries.basis_paths import PathCoordinates

EDGES, VALUES = "", ".values"  # no names of parameters


class PathHessian(SymmetricOperator):
    """Hessian of the loss with respect to some of the path values, known by its products: JᵀHJ + Σ g_k ∇²w_k.

    Args:
        ctx: the network.
        paths: its basis paths.
        chosen: which values, as indices.
    """

    def __init__(self, ctx: Context, paths: PathCoordinates, chosen: Tensor) -> None:
        super().__init__(len(chosen), chosen.device)
        self._paths, self._chosen = paths, chosen
        self._names = [block.name for block in paths.blocks]
        self._gains = gains_of_all_values(paths)
        self._hessian = Hessian(ctx, self._names)
        self._gradient = {name: ctx.gradient()[name] for name in self._names}
        n_weights = count_scalars(paths.params[name] for name in self._names)
        most = allowed(ctx.effort.limits.block_memory, ctx.problem.device, ctx.effort.memory)
        self._width = max(1, min(ctx.effort.limits.path_products, most // (8 * n_weights)))
        at = paths.scaled_reference()
        # J from two reverse passes: torch's forward mode would load its compiler, which takes longer than all of this.
        self._pull = torch.func.vjp(self._weights, at)[1]
        self._push = torch.func.vjp(lambda w: self._pull(w)[0], self._gradient)[1]
        self._bend = torch.func.vjp(self._pulled_gradient, at)[1]  # symmetric, so that its transpose will do

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(len(vectors), -1).double().to(self._chosen.device)  # (r, k)
        parts = torch.split(columns, self._width, dim=1)  # few at a time: a batch is held once per column
        return torch.cat([self._products_with_columns(part) for part in parts], dim=1).reshape(vectors.shape)

    def _products_with_columns(self, columns: Tensor) -> Tensor:
        spread = torch.zeros(columns.shape[1], self._paths.count, dtype=torch.float64, device=columns.device)
        spread[:, self._chosen] = columns.T
        directions = spread * self._gains  # in units of weights, of length 1: float32 cannot hold a value of 1e-40
        lengths = directions.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        along = torch.vmap(self._paths.split)(directions / lengths)  # (k, *shape) by name
        moves = torch.vmap(self._push)(along)[0]
        flat = [moves[name].reshape(len(lengths), -1) for name in self._names]
        curved = self._hessian @ torch.cat(flat, dim=1).T  # (p, k)
        shaped = torch.vmap(partial(unflatten, like={name: self._paths.params[name] for name in self._names}))(curved.T)
        pulled, bent = torch.vmap(self._pull)(shaped)[0], torch.vmap(self._bend)(along)[0]
        total = torch.vmap(self._paths.join)({name: pulled[name] + bent[name] for name in self._names})
        products: Tensor = (lengths * total * self._gains)[:, self._chosen].T
        return products

    def _weights(self, scaled: Params) -> Params:
        weights = self._paths.from_scaled(scaled)
        return {name: weights[name].double() for name in self._names}

    def _pulled_gradient(self, scaled: Params) -> Params:
        result: Params = torch.func.vjp(self._weights, scaled)[1](self._gradient)[0]
        return result


def gains_of_all_values(paths: PathCoordinates) -> Tensor:
    """Weight per value of every value, (count,)."""
    names = [block.name for block in paths.blocks]
    return paths.join({name: paths.gain(name).expand(paths.params[name].shape) for name in names})


class ScalingEdges:
    """The edges π(u), whose values rescale what reads the class u: their directions in weight space.

    Args:
        paths: basis paths of a network.

    Attributes:
        gains: weight per value of each, in forward order.
        names: the weights that they move.
        simple: whether every weight belongs to one layer: one that several share is no single edge.
    """

    def __init__(self, paths: PathCoordinates) -> None:
        self._paths, layers = paths, paths.graph.layers
        values = is_scaling_value(paths)
        self.gains = gains_of_all_values(paths)[values].cpu()
        self._weights = paths.join(paths.params)[values].detach().double().cpu()
        pairs = list(zip(paths.first[0][1:].tolist(), paths.first[1][1:].tolist(), strict=True))
        self._edges = sorted(set(pairs))
        self._served = Counter(pairs)  # how many classes each edge rescales
        number = {edge: place for place, edge in enumerate(self._edges)}
        # Of every class, the ground first, which nothing rescales: it gets a column of its own, that is left out.
        self._column = torch.tensor([len(self._edges), *(number[pair] for pair in pairs)], dtype=torch.int64)
        self._frozen = {block.name: block.frozen for block in paths.blocks if not block.is_bias}
        self._layers = {layer.weight: layer for layer in layers if layer.weight in self._frozen}
        self.names = list(self._layers)
        self.simple = len({layer.weight for layer in layers}) == len(layers)
        self._own = {name: torch.zeros(2, 0, dtype=torch.int64) for name in self.names}  # places of edges, and entries
        for place, (index, entry) in enumerate(self._edges):
            name = layers[index].weight
            self._own[name] = torch.cat([self._own[name], torch.tensor([[place], [entry]])], 1)

    def __len__(self) -> int:
        return len(self._edges)

    def groups(self) -> list[Tensor]:
        """Edges whose directions share no second derivative, where the network is a chain.

        Those of one layer that rescale one class each go together; one that rescales several goes alone.
        """
        alone = [[place] for place, edge in enumerate(self._edges) if self._served[edge] > 1]
        together = [
            [place for place, edge in enumerate(self._edges) if edge[0] == index and self._served[edge] == 1]
            for index in range(len(self._paths.graph.layers))
        ]
        return [torch.tensor(group) for group in [*together, *alone] if group]

    def directions(self, coefficients: Tensor) -> Params:
        """Sums over the edges of coefficient · d_e, (k, edges) to (k, *shape) by weight, float64."""
        spread = torch.cat([-coefficients / self._weights, torch.zeros(len(coefficients), 1, dtype=torch.float64)], 1)
        directions = {}
        for name, layer in self._layers.items():
            weight = self._paths.params[name].detach().double()
            device = weight.device
            _, channel = layer.entry_channels(weight.shape)  # that an entry reads
            moved = spread[:, self._column[layer.inputs]].to(device)[:, channel.to(device)] * weight
            moved = moved.expand(len(coefficients), *weight.shape).flatten(1)
            moved[:, self._frozen[name].to(device)] = 0
            places, entries = self._own[name]
            moved[:, entries.to(device)] += coefficients[:, places].to(device)
            directions[name] = moved.reshape(-1, *weight.shape)
        return directions

    def matrix(self, over_weights: SymmetricOperator) -> Congruence:
        """A matrix over the weights `names` in units of the edges' path values: DᵀAD, D the edges' directions."""
        size, device = len(self), over_weights.device

        def embed(coefficients: Tensor) -> Tensor:
            moves = self.directions(coefficients.T.cpu() * self.gains)
            return torch.cat([moves[name].flatten(1) for name in self.names], dim=1).T  # (p, k)

        def pull(vectors: Tensor) -> Tensor:
            at = torch.zeros(size, vectors.shape[1], dtype=torch.float64, device=device, requires_grad=True)
            with torch.enable_grad():
                moved = embed(at)  # linear, so that it may be differentiated anywhere
            return torch.autograd.grad(moved, at, vectors)[0]

        return Congruence(over_weights, Directions(size, over_weights.size, embed, pull))

    def bending(self, gradient: Params) -> Tensor:
        """Σ g ∂²w/∂x_e² of each edge: 2 Σ g w / w_e² over the weights that it divides."""
        total = torch.zeros(len(self) + 1, dtype=torch.float64)
        for name, layer in self._layers.items():
            products = (self._paths.params[name].detach().double() * gradient[name]).cpu().flatten()
            products[self._frozen[name]] = 0
            total.index_add_(0, self._column[layer.edge_classes(self._paths.params[name].shape)[1]], products)
        return 2 * total[:-1] / self._weights.square()

    def inner_products(self, flow: Flow, along: Tensor, pick: Callable[[Tensor], Tensor]) -> Tensor | None:
        """One layer's share of ⟨G_c, d_e⟩ for every edge: (n, k, edges); None where the layer has none.

        Args:
            flow: what passes the layer.
            along: ⟨G_c, w(j)⟩ of every input channel, (n, k, in).
            pick: from flat entries of the weight to these entries of G_c, (n, k, entries).
        """
        if flow.weight not in self._layers:
            return None
        layer, device = self._layers[flow.weight], along.device
        places, own = self._own[flow.weight]
        frozen, weight = self._frozen[flow.weight], self._paths.params[flow.weight].detach()
        picked = pick(torch.cat([own, frozen]).to(device))
        total = along.new_zeros(*along.shape[:2], len(self) + 1)
        total.index_add_(2, self._column[layer.inputs].to(device), along)
        reads = self._column[layer.inputs[layer.entry_channels(weight.shape)[1].expand(weight.shape).flatten()[frozen]]]
        total.index_add_(2, reads.to(device), -picked[:, :, len(own) :] * weight.flatten()[frozen.to(device)])
        total = -total[:, :, :-1] / self._weights.to(total)
        return total.index_add_(2, places.to(device), picked[:, :, : len(own)])

    def squares(self, flow: Flow, u: Tensor, s: Tensor) -> Tensor:
        """Σ (gain · G)² over a layer's values that rescale nothing, its samples and columns: no G is formed.

        A gain is a factor of the output times one of the input, so that this is the trace of a layer with scaled inputs
        and columns: ⟨uᵀu, sᵀs⟩ over pairs of positions. In float64: factors differ by many orders of magnitude.

        Args:
            flow: what passes the layer, which has few positions and no groups.
            u: its inputs (n, 1, features, t).
            s: its columns (n, k, 1, rows, t).
        """
        paths, weight = self._paths, self._paths.params[flow.weight]
        logs = paths.log_gains(flow.weight)  # of the output and the input of every entry, to be broadcast
        outward, inward = (part.expand(weight.shape).flatten(1).to(s.device) for part in logs)
        rows, features, top = outward[:, 0], inward[0], outward.max() + inward.max()
        u, s = u.double(), s.double()
        left, right = (
            (rows - rows.max()).exp()[:, None] * s[:, :, 0],
            (features - features.max()).exp()[:, None] * u[:, 0],
        )
        total = sum_over_pairs(left, left, right.mT @ right)  # (n, k)
        others = torch.cat([self._own[flow.weight][1], self._frozen[flow.weight]]).to(s.device)
        gains = (outward + inward - top).flatten()[others].exp()
        total -= (_gradient_entries(u, s, weight, flow.kind, others) * gains).square().sum(2)
        return signed_sum(total, flow.column_signs).sum() * (2 * top).exp()

    def other_values(self, squares: Params) -> Tensor:
        """Σ (gain · G)² over the values that rescale nothing, from sums of G² by parameter."""
        return (
            self._paths.join(diagonals_by_path_value(self._paths, squares))[~is_scaling_value(self._paths)].sum().cpu()
        )

    def holds(self, name: str) -> bool:
        """True if this is the weight of a layer that has values."""
        return name in self._layers


def diagonals_by_path_value(paths: PathCoordinates, diagonals: Params) -> Params:
    """Second derivatives by weight as those by the value of that weight alone, zero where nothing was found."""
    result = {}
    for block in paths.blocks:
        value = paths.params[block.name]
        diagonal = diagonals.get(block.name, torch.zeros(value.shape, dtype=torch.float64))
        result[block.name] = diagonal.to(value.device) * paths.gain(block.name).square()
    return result


def is_scaling_value(paths: PathCoordinates, also: Iterable[str] = ()) -> Tensor:
    """Which values rescale a unit, or belong to one of the parameters named: (count,)."""
    marked = {
        block.name: torch.full(
            paths.params[block.name].shape, block.name in also, device=paths.params[block.name].device
        )
        for block in paths.blocks
    }
    for index, layer in enumerate(paths.graph.layers):
        if layer.weight in marked:
            entries = paths.first[1][paths.first[0] == index].to(marked[layer.weight].device)
            marked[layer.weight].view(-1)[entries] = True
    return paths.join(marked)


def covered_diagonals(ctx: Context, not_covered: NotCovered) -> Params:
    """Diagonals of the blocks that all columns at the outputs give, by parameter: one pass over the data."""
    columns, totals = sweep_shape(ctx).columns, dict[str, Tensor]()
    if set(ctx.problem.trainable) <= not_covered.keys():
        return totals

    def work(batch: Batch, numbers: Tensor, width: int) -> Params:
        sums: Params = {}
        for flows in backpropagated(ctx, batch, numbers, not_covered, width):
            for flow in flows:
                for name, squares in squared_gradients(flow, ctx.params[flow.weight]):
                    add_to(sums, name, squares.double().cpu())
        return sums

    for sums in in_batches(ctx, sweep_plan(ctx, columns), work):
        for name, share in sums.items():
            add_to(totals, name, share)
    ctx.charge_passes("forward", ctx.problem.n_train)
    ctx.charge_passes("backward", ctx.problem.n_train * columns)
    summed = ctx.problem.ranks.summed(list(totals.values()))
    covered = set(ctx.problem.trainable) - not_covered.keys()
    means = {name: value / ctx.problem.n_train for name, value in zip(totals, summed, strict=True)}
    return {name: value for name, value in means.items() if name in covered}


def path_sweep(ctx: Context, edges: ScalingEdges, draws: range | None = None) -> tuple[float, Tensor]:
    """Gauss-Newton part, means over samples: of all values that rescale nothing together, and of each scaling edge.

    One pass over the data.

    Args:
        ctx: the network.
        edges: those that rescale units.
        draws: numbers of random columns, whose mean it is; None for all columns.
    """
    shape, totals = sweep_shape(ctx), dict[str, Tensor]()
    columns = shape.columns if draws is None else shape.per_draw * len(draws)

    def work(batch: Batch, numbers: Tensor, width: int) -> Params:
        """Sums over samples: of squares by parameter, or of a layer's values at once; and along the edges."""
        sums: Params = {}
        for flows in backpropagated(ctx, batch, numbers, (), width, draws):
            along, column_signs = None, None
            for flow in flows:
                part, column_signs = _layer_share(ctx, edges, sums, flow), flow.column_signs
                if part is not None:
                    along = part if along is None else along + part
            if along is not None:
                _add_squares(sums, EDGES, along.double(), column_signs)
        return sums

    for sums in in_batches(ctx, sweep_plan(ctx, columns), work):
        for name, share in sums.items():
            add_to(totals, name, share)
    n = ctx.problem.n_train
    ctx.charge_passes("forward", n)
    ctx.charge_passes("backward", n * columns)
    along = totals.pop(EDGES, torch.zeros(len(edges), dtype=torch.float64)).cpu()
    known = totals.pop(VALUES, torch.zeros((), dtype=torch.float64)).cpu() + edges.other_values(totals)
    known, along = ctx.problem.ranks.summed([known, along])
    n *= 1 if draws is None else len(draws)
    return float(known) / n, along / n


def _add_squares(sums: Params, name: str, values: Tensor, column_signs: Tensor | None) -> None:
    """Add squares, of values (n, k, …), over samples and columns."""
    add_to(sums, name, signed_sum(values.square(), column_signs).sum(0).double())


def _layer_share(ctx: Context, edges: ScalingEdges, sums: Params, flow: Flow) -> Tensor | None:
    """Add a layer's squares; its share of the inner products, if it has edges."""
    vectors, weight = dict(vector_gradients(flow)), ctx.params[flow.weight]
    for name, gradients in vectors.items():
        _add_squares(sums, name, gradients, flow.column_signs)
    if flow.kind == "batchnorm":
        scales = vectors[flow.weight]
        return edges.inner_products(flow, scales * weight, lambda wanted: scales[:, :, wanted])
    u, s = matrices(flow, weight)
    if edges.holds(flow.weight) and overlaps_are_cheaper(flow.uses, weight, s.shape[1]):
        add_to(sums, VALUES, edges.squares(flow, u, s))
        along = along_inputs(flow, u[:, 0], s[:, :, 0], weight)
    else:
        squares, along = squares_and_along(flow, u, s, weight)
        add_to(sums, flow.weight, squares.reshape(weight.shape).double())
    return edges.inner_products(flow, along, partial(_gradient_entries, u, s, weight, flow.kind))


def _gradient_entries(u: Tensor, s: Tensor, weight: Tensor, kind: str, wanted: Tensor) -> Tensor:
    """Chosen entries of the gradients Σ_t s_t u_tᵀ: (n, k, entries)."""
    n, k, groups, rows, _ = s.shape
    width = weight[0].numel()
    first, second = wanted // width, wanted % width
    if kind == "transposed":  # (in, out of a group · taps): the first index is a feature
        group, feature, row = first // u.shape[2], first % u.shape[2], second
    else:
        group, feature, row = first // rows, second, first % rows
    columns = s.reshape(n, k, groups * rows, -1)[:, :, group * rows + row]  # (n, k, entries, t)
    return (columns * u[:, group, feature][:, None]).sum(-1)
