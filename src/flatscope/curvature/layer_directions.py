"""Directions in the space of weights, whose sums of bᵀ H b are the sweep's quantities.

Unit vectors for the trace, columns of the weight for ρ, and so on: each quantity is a sum over the diagonal of EᵀHE,
where E lays coefficients out along the directions of all layers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.estimators import DiagonalQuantities, Readings
from flatscope.curvature.operators import curvature_operator, sample_groups
from flatscope.curvature.patches import by_output
from flatscope.curvature.symmetric_operator import Congruence, Directions, joined_directions
from flatscope.network.layers import Layer


def unit_vectors(weight: Tensor, layer: Layer | None = None) -> Directions:
    """All of them: their sum is the trace."""
    del layer
    return Directions(weight.numel(), weight.numel(), lambda z: z, lambda g: g)


def relative_directions(weight: Tensor, layer: Layer) -> Directions:
    """Directions whose sum is Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}: R applied to unit vectors, with RRᵀ = W̄W̄ᵀ."""
    kind = "transposed" if layer.input_first else layer.kind
    matrix = by_output(weight.double(), kind, layer.groups)  # (out, q)
    index = by_output(
        torch.arange(weight.numel(), device=weight.device).reshape(weight.shape), kind, layer.groups
    ).reshape(-1)  # where each entry of W̄ lies in the weight
    out, q = matrix.shape
    root = matrix  # of two matrices that do, the one with fewer columns
    if out < q:
        eigenvalues, vectors = torch.linalg.eigh(matrix @ matrix.T)
        root = vectors * eigenvalues.clamp_min(0).sqrt()  # (out, out)

    def embed(z: Tensor) -> Tensor:
        rows = torch.einsum("or,rqk->oqk", root, z.reshape(root.shape[1], q, -1)).reshape(out * q, -1)
        result = torch.empty_like(rows)
        result[index] = rows
        return result

    def pull(g: Tensor) -> Tensor:
        return torch.einsum("or,oqk->rqk", root, g[index].reshape(out, q, -1)).reshape(root.shape[1] * q, -1)

    return Directions(root.shape[1] * q, out * q, embed, pull)


def channel_directions(weight: Tensor, layer: Layer, incoming: bool) -> Directions:
    """The weights of every channel, one value each: outgoing ones w(j) of input j, incoming ones of output i."""
    axis = 2 if incoming == layer.input_first else 1  # of (groups, rows of a group, columns, taps)
    source = weight.reshape(layer.groups, len(weight) // layer.groups, weight.shape[1], -1, 1).double()
    kept = [size if place in (0, axis) else 1 for place, size in enumerate(source.shape[:4])]

    def embed(z: Tensor) -> Tensor:
        return (source * z.reshape(*kept, -1)).reshape(weight.numel(), -1)

    def pull(g: Tensor) -> Tensor:
        return (source * g.reshape(*source.shape[:4], -1)).sum((3 - axis, 3)).reshape(math.prod(kept), -1)

    return Directions(math.prod(kept), weight.numel(), embed, pull)


DIRECTIONS: dict[str, Callable[[Tensor, Layer], Directions]] = {
    "trace": unit_vectors,
    "rho": partial(channel_directions, incoming=False),
    "rho_rows": partial(channel_directions, incoming=True),
    "relative_flatness": relative_directions,
}


def dense_blocks(_ctx: Context) -> dict[tuple[str, str], Tensor]:
    """Blocks (p, p) that were written out, by parameter and matrix: kept by the context, through `ctx.cached`."""
    return {}


class LayerDirections(DiagonalQuantities):
    """One quantity as sums over the diagonal of EᵀHE, over all parameters that the columns leave out.

    Args:
        ctx: the network.
        quantity: see `probed`.
        not_covered: the parameters.
    """

    def __init__(self, ctx: Context, quantity: str, not_covered: Iterable[str]) -> None:
        self._ctx, self._quantity = ctx, quantity
        layers = {layer.weight: layer for layer in ctx.network if layer.weight in not_covered}
        make = DIRECTIONS[quantity]
        self._parts = {name: make(ctx.params[name], layer) for name, layer in layers.items()}
        self._norms = {name: float(ctx.params[name].double().square().sum()) for name in layers}
        if quantity == "trace":
            others = [name for name in not_covered if name not in layers]
            self._parts |= {name: unit_vectors(ctx.params[name]) for name in others}
        # One for all products: it keeps its graphs.
        matrix = curvature_operator(ctx, list(self._parts), sample_groups(ctx))
        super().__init__(Congruence(matrix, joined_directions(list(self._parts.values()))))

    def diagonal(self, width: int) -> Iterator[Tensor]:
        """One product per direction, parameter by parameter.

        Those of the trace are the dense blocks, from which the other quantities follow without a product.
        """
        blocks, matrix = self._ctx.cached(dense_blocks), self._ctx.effort.curvature
        keeps = self._quantity == "trace" and self.matrix.size <= self._ctx.effort.limits.dense_weights
        for name, part in self._parts.items():
            known = blocks.get((name, matrix))
            operator = curvature_operator(self._ctx, [name]) if known is None else known
            columns: list[Tensor] = []
            for start in range(0, part.count, width):
                stop = min(start + width, part.count)
                unit = torch.zeros(part.count, stop - start, dtype=torch.float64, device=self.matrix.device)
                unit[torch.arange(start, stop), torch.arange(stop - start)] = 1.0
                vectors = part.embed(unit)
                columns.append(operator @ vectors)
                yield (vectors * columns[-1]).sum(0)
                if not keeps:
                    columns.clear()
            if keeps:
                blocks[name, matrix] = torch.cat(columns, dim=1)

    def read(self, diagonal: Tensor) -> Readings:
        """Values (units, k) by (parameter, quantity) from the diagonal (directions, k)."""
        found: Readings = {}
        quantity, per_unit = self._quantity, self._quantity.startswith("rho")
        whole = f"{quantity}_sum" if per_unit else quantity
        counts = [part.count for part in self._parts.values()]
        for name, some in zip(self._parts, torch.split(diagonal, counts), strict=True):
            total = some.sum(0, keepdim=True)
            if per_unit:
                found[name, quantity] = some
            found[name, whole] = total
            found["", whole] = found.get(("", whole), 0.0) + total
            if quantity == "trace" and name in self._norms:
                found["", "kappa_trace"] = found.get(("", "kappa_trace"), 0.0) + self._norms[name] * total
        return found

    def has_row(self, name: str) -> bool:
        """True where a parameter has a row of its own in a table: the layers, and the network as a whole."""
        return not name or name in self._norms
