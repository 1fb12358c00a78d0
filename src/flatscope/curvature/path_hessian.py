"""The Hessian of the loss with respect to basis-path values, known by its products."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.params import Params, count, unflatten
from flatscope.symmetries.basis_paths import PathCoordinates

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
