"""The sweep's quantities from Hessian products, for parameters whose block is not Gauss-Newton.

Each quantity is a sum Σ_b bᵀ H_l b over some directions b of one weight matrix: unit vectors for the trace, columns
of the weight for ρ, and so on. Few directions are multiplied out one by one: exact. Many are mixed with random
signs ζ: with v = Σ_b ζ_b b, the number ζ_b bᵀ(Hv) has mean bᵀHb, for all layers and units from the same products.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.estimators import multiplied_out
from flatscope.curvature.operators import Hessian
from flatscope.curvature.patches import by_output
from flatscope.errors import NumericalWarning
from flatscope.network.layers import Layer

BLOCK = 16
FIRST_LOOK = 32


@dataclass(frozen=True)
class Directions:
    """Directions b in the space of one weight matrix, as a linear map from coefficients, and what they sum to.

    Attributes:
        count: number of directions.
        embed: coefficients (count, k) -> weight-shaped vectors (numel, k).
        pull: weight-shaped vectors (numel, k) -> inner products with the directions (count, k).
        units: number of values; count of them for one value per direction, 1 for their sum.
    """

    count: int
    embed: Callable[[Tensor], Tensor]
    pull: Callable[[Tensor], Tensor]
    units: int


@dataclass(frozen=True)
class Estimated:
    """Values (units,) of one layer with standard errors, and the samples behind them if any."""

    value: Tensor
    stderr: Tensor
    samples: Tensor | None

    @property
    def exact(self) -> bool:
        """Whether every direction was multiplied out."""
        return self.samples is None


def trace_directions(weight: Tensor, layer: Layer) -> Directions:
    """Unit vectors: their sum is the trace."""
    del layer
    return Directions(weight.numel(), lambda z: z, lambda g: g, 1)


def column_directions(weight: Tensor, layer: Layer) -> Directions:
    """The columns w(j): outgoing weights of input feature or channel j; one value each."""
    if layer.kind == "transposed" or layer.groups == 1:
        axis = 0 if layer.kind == "transposed" else 1
        return _sliced(weight, axis)
    # A grouped convolution stores only its own group's channels: input channel j of group g is column j of its rows.
    grouped = weight.reshape(layer.groups, weight.shape[0] // layer.groups, weight.shape[1], -1)  # (g, out, in, taps)
    return _directions_along(weight, grouped, (0, 2))


def row_directions(weight: Tensor, layer: Layer) -> Directions:
    """The rows: incoming weights of output unit i; one value each."""
    if layer.kind == "transposed" and layer.groups > 1:
        grouped = weight.reshape(layer.groups, weight.shape[0] // layer.groups, weight.shape[1], -1)
        return _directions_along(weight, grouped, (0, 2))
    return _sliced(weight, 1 if layer.kind == "transposed" else 0)


def relative_directions(weight: Tensor, layer: Layer) -> Directions:
    """Directions whose sum is Σ_{s,s'} ⟨w_s, w_s'⟩ Tr H_{s,s'}: a root of W̄W̄ᵀ applied to unit vectors."""
    matrix = by_output(weight.double(), layer.kind, layer.groups)  # (out, q)
    eigenvalues, vectors = torch.linalg.eigh(matrix @ matrix.T)
    root = vectors * eigenvalues.clamp_min(0).sqrt()  # (out, out)
    index = by_output(
        torch.arange(weight.numel(), device=weight.device).reshape(weight.shape), layer.kind, layer.groups
    ).reshape(-1)  # where each entry of W̄ lies in the weight
    out, q = matrix.shape

    def embed(z: Tensor) -> Tensor:
        rows = torch.einsum("or,rqk->oqk", root, z.reshape(out, q, -1)).reshape(out * q, -1)
        result = torch.empty_like(rows)
        result[index] = rows
        return result

    def pull(g: Tensor) -> Tensor:
        return torch.einsum("or,oqk->rqk", root, g[index].reshape(out, q, -1)).reshape(out * q, -1)

    return Directions(out * q, embed, pull, 1)


def _sliced(weight: Tensor, axis: int) -> Directions:
    return _directions_along(weight, weight.reshape(*weight.shape[:2], -1), (axis,))


def _directions_along(weight: Tensor, shaped: Tensor, axes: tuple[int, ...]) -> Directions:
    """One direction per index of the given axes of the reshaped weight."""
    kept = [shaped.shape[axis] if axis in axes else 1 for axis in range(shaped.ndim)]
    summed = [axis for axis in range(shaped.ndim) if axis not in axes]
    source = shaped.double()[..., None]

    def embed(z: Tensor) -> Tensor:
        return (source * z.reshape(*kept, -1)).reshape(weight.numel(), -1)

    def pull(g: Tensor) -> Tensor:
        return (source * g.reshape(*shaped.shape, -1)).sum(summed).reshape(math.prod(kept), -1)

    return Directions(math.prod(kept), embed, pull, math.prod(kept))


def by_products(
    ctx: Context,
    layers: tuple[Layer, ...],
    directions_of: Callable[[Tensor, Layer], Directions],
    accuracy: float = 0.02,
    most_products: int = 1024,
) -> dict[str, Estimated]:
    """Values by layer name; exact where there are few directions, otherwise to `accuracy` or `most_products`."""
    wanted = {layer: directions_of(ctx.params[layer.weight], layer) for layer in layers}
    chosen = multiplied_out([found.count for found in wanted.values()], most_products)
    few = {layer: found for (layer, found), out in zip(wanted.items(), chosen, strict=True) if out}
    many = {layer: found for layer, found in wanted.items() if layer not in few}
    result = {layer.name: _multiplied_out(ctx, layer, found) for layer, found in few.items()}
    if many:
        result |= _mixed(ctx, many, f"by_products {directions_of.__name__}", accuracy, most_products)
    return {layer.name: result[layer.name] for layer in layers}


def _multiplied_out(ctx: Context, layer: Layer, directions: Directions) -> Estimated:
    hessian = Hessian(ctx, [layer.weight])
    forms = []
    for start in range(0, directions.count, BLOCK):
        stop = min(start + BLOCK, directions.count)
        unit = torch.zeros(directions.count, stop - start, dtype=torch.float64, device=ctx.problem.device)
        unit[torch.arange(start, stop), torch.arange(stop - start)] = 1.0
        vectors = directions.embed(unit)
        forms.append((vectors * (hessian @ vectors)).sum(0))
    values = torch.cat(forms).cpu()
    values = values if directions.units > 1 else values.sum(0, keepdim=True)
    return Estimated(values, torch.zeros_like(values), None)


def _mixed(
    ctx: Context, wanted: dict[Layer, Directions], stream: str, accuracy: float, most_products: int
) -> dict[str, Estimated]:
    """Random signs for all layers at once; looked at after 32, 64, 128, … so as not to stop by luck."""
    generator = ctx.generator(stream)
    hessian = Hessian(ctx, [layer.weight for layer in wanted])
    samples: dict[Layer, list[Tensor]] = {layer: [] for layer in wanted}
    products, look = 0, FIRST_LOOK
    while True:
        while products < min(look, most_products):
            k = min(BLOCK, min(look, most_products) - products)
            signs = {layer: _signs(found.count, k, generator).to(ctx.problem.device) for layer, found in wanted.items()}
            vectors = torch.cat([found.embed(signs[layer]) for layer, found in wanted.items()])
            curved, start = hessian @ vectors, 0
            for layer, found in wanted.items():
                size = ctx.params[layer.weight].numel()
                pulled = signs[layer] * found.pull(curved[start : start + size])  # (count, k)
                grouped = pulled if found.units > 1 else pulled.sum(0, keepdim=True)
                samples[layer].append(grouped.cpu())
                start += size
            products += k
        estimates = {layer.name: _summary(torch.cat(parts, dim=1)) for layer, parts in samples.items()}
        reached = all(float(e.stderr.max()) <= accuracy * float(e.value.abs().max()) for e in estimates.values())
        if reached or products >= most_products:
            if not reached:
                warnings.warn(
                    f"{accuracy:.2g} relative accuracy not reached in {products} products; see the standard errors",
                    NumericalWarning,
                    stacklevel=2,
                )
            return estimates
        look *= 2


def _summary(samples: Tensor) -> Estimated:
    count = samples.shape[1]
    return Estimated(samples.mean(1), samples.std(1) / math.sqrt(count), samples)


def _signs(size: int, columns: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, (size, columns), generator=generator, dtype=torch.float64) * 2 - 1
