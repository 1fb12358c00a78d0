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

import itertools
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.layer_forms import Flow, matrices, scale_gradients, signed_sum, vector_gradients, weight_forms
from flatscope.curvature.memory import in_batches
from flatscope.curvature.operators import GradientGraph, Hessian
from flatscope.curvature.sweep import backpropagated, sweep_plan, sweep_shape
from flatscope.params import Params, count, unflatten
from flatscope.samples import Batch
from flatscope.symmetries.basis_paths import PathCoordinates
from flatscope.symmetries.path_skeleton import edge_classes

BLOCK_BYTES = 256 * 2**20
COLUMNS = 8


class PathHessian:
    """Hessian of the loss with respect to some of the path values, known by its products: JᵀHJ + Σ g_k ∇²w_k.

    Args:
        ctx: the network.
        paths: its basis paths.
        chosen: which values, as indices.
    """

    def __init__(self, ctx: Context, paths: PathCoordinates, chosen: Tensor) -> None:
        self._paths, self._chosen, self._ctx = paths, chosen, ctx
        self._names = [block.name for block in paths.blocks]
        self._gains = paths.join({name: paths.gain(name).expand(paths.params[name].shape) for name in self._names})
        self._hessian = Hessian(ctx, self._names)
        self._gradient = {name: ctx.gradient()[name] for name in self._names}
        n_weights = count(paths.params[name] for name in self._names)
        self._width = max(1, min(COLUMNS, BLOCK_BYTES // (8 * n_weights)))
        at = paths.scaled_reference()
        # J from two reverse passes: torch's forward mode would load its compiler, which takes longer than all of this.
        self._pull = torch.func.vjp(self._weights, at)[1]
        self._push = torch.func.vjp(lambda w: self._pull(w)[0], self._gradient)[1]
        self._bend = torch.func.vjp(self._pulled_gradient, at)[1]  # symmetric, so that its transpose will do

    @property
    def shape(self) -> tuple[int, int]:
        """(values, values)."""
        return len(self._chosen), len(self._chosen)

    def __matmul__(self, vectors: Tensor) -> Tensor:
        columns = vectors.reshape(len(vectors), -1).double().to(self._chosen.device)  # (r, k)
        parts = torch.split(columns, self._width, dim=1)  # few at a time: a batch is held once per column
        return torch.cat([self._products(part) for part in parts], dim=1).reshape(vectors.shape)

    def _products(self, columns: Tensor) -> Tensor:
        spread = torch.zeros(columns.shape[1], self._paths.count, dtype=torch.float64, device=columns.device)
        spread[:, self._chosen] = columns.T
        directions = spread * self._gains  # in units of weights, of length 1: float32 cannot hold a value of 1e-40
        lengths = directions.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        along = torch.vmap(self._paths.split)(directions / lengths)  # (k, *shape) by name
        moves = torch.vmap(self._push)(along)[0]
        curved = self._hessian @ torch.cat([moves[name].flatten(1) for name in self._names], dim=1).T  # (p, k)
        shaped = torch.vmap(partial(unflatten, like={name: self._paths.params[name] for name in self._names}))(curved.T)
        pulled, bent = torch.vmap(self._pull)(shaped)[0], torch.vmap(self._bend)(along)[0]
        total = torch.vmap(self._paths.join)({name: pulled[name] + bent[name] for name in self._names})
        products: Tensor = (lengths * total * self._gains)[:, self._chosen].T
        return products

    def _weights(self, scaled: Params) -> Params:
        found = self._paths.from_scaled(scaled)
        return {name: found[name].double() for name in self._names}

    def _pulled_gradient(self, scaled: Params) -> Params:
        result: Params = torch.func.vjp(self._weights, scaled)[1](self._gradient)[0]
        return result


@dataclass
class PathSums:
    """Gauss-Newton part: of every parameter by itself (sum over samples), and along each scaling edge's direction."""

    diagonals: Params = field(default_factory=dict)
    along: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))

    def add_diagonal(self, name: str, squares: Tensor) -> None:
        """Add a batch's share for one parameter."""
        known = self.diagonals.get(name)
        self.diagonals[name] = squares.double() if known is None else known + squares.double()

    def add(self, other: PathSums) -> None:
        """Add another batch."""
        for name, squares in other.diagonals.items():
            self.add_diagonal(name, squares)
        self.along = self.along.to(other.along.device) + other.along


class ScalingEdges:
    """The edges π(u), whose values rescale what reads the class u: their directions in weight space.

    Args:
        paths: basis paths of a network.
    """

    def __init__(self, paths: PathCoordinates) -> None:
        self.paths, self.layers = paths, paths.graph.layers
        pairs = list(zip(paths.first[0][1:].tolist(), paths.first[1][1:].tolist(), strict=True))
        self.edges = sorted(set(pairs))
        self.served = Counter(pairs)  # how many classes each edge rescales
        number = {edge: place for place, edge in enumerate(self.edges)}
        # Of every class, the ground first, which nothing rescales: it gets a column of its own, that is left out.
        self.column = torch.tensor([len(self.edges), *(number[pair] for pair in pairs)], dtype=torch.int64)
        self.own = {
            layer.weight: torch.tensor([[place, entry] for place, (at, entry) in enumerate(self.edges) if at == index])
            for index, layer in enumerate(self.layers)
        }
        self._by_weight = {layer.weight: layer for layer in self.layers}
        self._frozen = {block.name: block.frozen for block in paths.blocks if not block.is_bias}
        values, gains = [torch.zeros(0, dtype=torch.float64)], [torch.zeros(0, dtype=torch.float64)]
        for at, group in itertools.groupby(self.edges, key=lambda edge: edge[0]):
            weight = paths.params[self.layers[at].weight].detach()
            entries = torch.tensor([entry for _, entry in group], device=weight.device)
            values.append(weight.flatten()[entries].double().cpu())
            gains.append(paths.gain(self.layers[at].weight).expand(weight.shape).flatten()[entries].cpu())
        self.weights, self.gains = torch.cat(values), torch.cat(gains)

    @property
    def simple(self) -> bool:
        """Whether every weight belongs to one layer: one that several share is no single edge."""
        return len(self._by_weight) == len(self.layers)

    def groups(self) -> list[Tensor]:
        """Edges whose directions share no second derivative, where the network is a chain.

        Those of one layer that rescale one class each go together; one that rescales several goes alone.
        """
        alone = [[place] for place, edge in enumerate(self.edges) if self.served[edge] > 1]
        together = [
            [place for place, edge in enumerate(self.edges) if edge[0] == index and self.served[edge] == 1]
            for index in range(len(self.layers))
        ]
        return [torch.tensor(group) for group in [*together, *alone] if group]

    def directions(self, coefficients: Tensor) -> Params:
        """Sums over the edges of coefficient · d_e, (k, edges) to (k, *shape) by weight, float64."""
        spread = torch.cat([-coefficients / self.weights, torch.zeros(len(coefficients), 1, dtype=torch.float64)], 1)
        found = {}
        for layer in self.layers:
            weight = self.paths.params[layer.weight].detach().double()
            device = weight.device
            _, channel = layer.entry_channels(weight.shape)  # that an entry reads
            moved = spread[:, self.column[layer.inputs]].to(device)[:, channel.to(device)] * weight
            moved = moved.expand(len(coefficients), *weight.shape).flatten(1)
            moved[:, self._frozen[layer.weight].to(device)] = 0
            own = self.own[layer.weight]
            if len(own):
                moved[:, own[:, 1].to(device)] += coefficients[:, own[:, 0]].to(device)
            found[layer.weight] = moved.reshape(-1, *weight.shape)
        return found

    def bending(self, gradient: Params) -> Tensor:
        """Σ g ∂²w/∂x_e² of each edge: 2 Σ g w / w_e² over the weights that it divides."""
        total = torch.zeros(len(self.edges) + 1, dtype=torch.float64)
        for layer in self.layers:
            products = (self.paths.params[layer.weight].detach().double() * gradient[layer.weight]).cpu().flatten()
            products[self._frozen[layer.weight]] = 0
            total.index_add_(0, self.column[edge_classes(layer, self.paths.params[layer.weight].shape)[1]], products)
        return 2 * total[:-1] / self.weights.square()

    def inner_products(self, flow: Flow, gradients: Tensor, along: Tensor) -> Tensor:
        """One layer's share of ⟨G_c, d_e⟩ for every edge: (n, k, edges).

        Args:
            flow: what passes the layer.
            gradients: its entries `wanted(weight)`, (n, k, entries).
            along: ⟨G_c, w(j)⟩ of every input channel, (n, k, in).
        """
        layer, device = self._by_weight[flow.weight], along.device
        own, frozen = self.own[flow.weight], self._frozen[flow.weight]
        total = along.new_zeros(*along.shape[:2], len(self.edges) + 1)
        total.index_add_(2, self.column[layer.inputs].to(device), along)
        weight = self.paths.params[flow.weight].detach().flatten()
        if len(frozen):
            reads = self.column[edge_classes(layer, self.paths.params[flow.weight].shape)[1][frozen]]
            total.index_add_(2, reads.to(device), -gradients[:, :, len(own) :] * weight[frozen.to(device)])
        total = -total[:, :, :-1] / self.weights.to(total)
        if len(own):
            total.index_add_(2, own[:, 0].to(device), gradients[:, :, : len(own)])
        return total

    def wanted(self, weight: str) -> Tensor:
        """Flat entries of a weight whose gradients are needed by themselves: scaling edges, then frozen ones."""
        own = self.own[weight]
        return torch.cat([own[:, 1] if len(own) else own.new_zeros(0, dtype=torch.int64), self._frozen[weight]])


def per_value(paths: PathCoordinates, diagonals: Params) -> Params:
    """Second derivatives by weight as those by the value of that weight alone, zero where nothing was found."""
    result = {}
    for block in paths.blocks:
        value = paths.params[block.name]
        found = diagonals.get(block.name, torch.zeros(value.shape, dtype=torch.float64))
        result[block.name] = found.to(value.device) * paths.gain(block.name).square()
    return result


def scaling_values(paths: PathCoordinates, also: Iterable[str] = ()) -> Tensor:
    """Which values rescale a unit, or belong to one of the parameters named: (count,)."""
    marked = {
        block.name: torch.full(
            paths.params[block.name].shape, block.name in also, device=paths.params[block.name].device
        )
        for block in paths.blocks
    }
    for index, layer in enumerate(paths.graph.layers):
        entries = paths.first[1][paths.first[0] == index].to(marked[layer.weight].device)
        marked[layer.weight].view(-1)[entries] = True
    return paths.join(marked)


def path_sweep(ctx: Context, edges: ScalingEdges) -> PathSums:
    """One pass over the data with all columns; means over samples."""
    shape, result = ctx.sweep(sweep_shape), PathSums()

    def work(batch: Batch, numbers: Tensor, width: int) -> PathSums:
        sums = PathSums()
        for flows in backpropagated(ctx, batch, {}, width):
            along, signs = None, None
            for flow in flows:
                part, signs = _layer_share(ctx, edges, sums, flow), flow.signs
                if part is not None:
                    along = part if along is None else along + part
            if along is not None:
                sums.add(PathSums(along=signed_sum(along.double().square(), signs).sum(0)))
        return sums

    for sums in in_batches(ctx, sweep_plan(ctx, shape.columns), work):
        result.add(sums)
    n, ranks = ctx.problem.n_train, ctx.problem.ranks
    ctx.count("forward", n)
    ctx.count("backward", n * shape.columns)
    along, *totals = ranks.summed([result.along.expand(len(edges.edges)).clone(), *result.diagonals.values()])
    diagonals = {name: total / n for name, total in zip(result.diagonals, totals, strict=True)}
    return PathSums(diagonals, along.cpu() / n)


def _layer_share(ctx: Context, edges: ScalingEdges, sums: PathSums, flow: Flow) -> Tensor | None:
    """Add a layer's diagonal; its share of the inner products, if it has edges."""
    if flow.bias:
        sums.add_diagonal(flow.bias, signed_sum(vector_gradients(flow).square(), flow.signs).sum(0))
    weight = ctx.params[flow.weight]
    if flow.kind == "batchnorm":
        gradients = scale_gradients(flow)
        sums.add_diagonal(flow.weight, signed_sum(gradients.square(), flow.signs).sum(0))
        entries, along = gradients, gradients * weight
    else:
        u, s = matrices(flow, weight)
        forms = weight_forms(flow, u, s, weight, diagonal=True)
        assert forms.squares is not None
        sums.add_diagonal(flow.weight, forms.squares.reshape(weight.shape))
        along = forms.along
        entries = None
    if flow.weight not in edges.own:
        return None
    wanted = edges.wanted(flow.weight).to(along.device)
    picked = entries[:, :, wanted] if entries is not None else _entries(u, s, weight, flow.kind, wanted)
    return edges.inner_products(flow, picked, along)


def _entries(u: Tensor, s: Tensor, weight: Tensor, kind: str, wanted: Tensor) -> Tensor:
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


class BeyondGaussNewton(Hessian):
    """Σ ∂ℓ/∂f_c ∇²f_c, averaged over samples: the Hessian without its Gauss-Newton part."""

    def _graph(self, batch: Batch) -> GradientGraph:
        inputs, targets = batch
        leaves = self._leaves()
        tensors = list(leaves.values())
        with torch.enable_grad():
            outputs = self._outputs(inputs, leaves)
            leaf = outputs.detach().requires_grad_()
            slope = torch.autograd.grad(self.ctx.problem.loss(leaf, targets).sum(), leaf)[0]
        if not outputs.requires_grad:
            return GradientGraph(tensors, {})
        gradients = torch.autograd.grad((outputs * slope).sum(), tensors, create_graph=True, materialize_grads=True)
        return GradientGraph(tensors, {i: gradient for i, gradient in enumerate(gradients) if gradient.requires_grad})


class EdgeCurvature:
    """N along the directions of scaling edges, in units of their path values.

    Args:
        ctx: the network.
        edges: its scaling edges.
    """

    def __init__(self, ctx: Context, edges: ScalingEdges) -> None:
        self._edges = edges
        self._names = [layer.weight for layer in edges.layers]
        self._operator = BeyondGaussNewton(ctx, self._names)

    def quadratic(self, coefficients: Tensor) -> Tensor:
        """dᵀ N d for d = Σ_e coefficient · d_e, of several (k, edges) at once: (k,)."""
        moves = self._edges.directions(coefficients * self._edges.gains)
        flat = torch.cat([moves[name].flatten(1) for name in self._names], dim=1)  # (k, p)
        lengths = flat.norm(dim=1, keepdim=True).clamp_min(torch.finfo(torch.float64).tiny)
        flat = flat / lengths  # float32 cannot hold gains of 1e40
        found: Tensor = lengths[:, 0].square() * (flat.T * (self._operator @ flat.T)).sum(0)
        return found.cpu()

    def release(self) -> None:
        """Let go of what products keep."""
        self._operator.release()
