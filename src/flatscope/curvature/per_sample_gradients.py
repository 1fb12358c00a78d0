"""Quadratic forms of the gradients of single samples with respect to one weight matrix, column by column.

G_c = Σ_t s_{c,t} u_tᵀ is never formed where that costs more than what is asked of it. A weight that is used several
times has the sum of its uses' gradients: further uses are further positions.

Index letters are those of `patches`: n samples, k columns, g groups, t positions.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch
from torch import Tensor

from flatscope.curvature.patches import (
    by_output,
    gradients_by_output,
    input_matrix,
    normalised,
    output_matrix,
    weight_gradients,
    weighted_inputs,
)
from flatscope.limits import STANDARD
from flatscope.network.layer_uses import LayerUse
from flatscope.params import Params


@dataclass(frozen=True)
class Flow:
    """Inputs and cotangents at the uses of one weight, of one batch."""

    uses: Sequence[LayerUse[Tensor]]
    cotangents: Sequence[Tensor]  # columns brought back to the output of each use, (n, k, …)
    back: Tensor | None  # at the input of the only use, (n, k, …), where it was asked for
    column_signs: Tensor | None  # of the columns, (n, k)

    def behind(self, first: int) -> Flow:
        """Without the first columns."""
        cotangents, column_signs = [part[:, first:] for part in self.cotangents], self.column_signs
        back = None if self.back is None else self.back[:, first:]
        return Flow(self.uses, cotangents, back, None if column_signs is None else column_signs[:, first:])

    @property
    def weight(self) -> str:
        """Name of the weight."""
        return self.uses[0].weight

    @property
    def bias(self) -> str | None:
        """Name of the bias."""
        return self.uses[0].bias

    @property
    def kind(self) -> str:
        """Kind of the layer."""
        return self.uses[0].kind

    def parts(self, samples: int) -> Iterator[Flow]:
        """Flows of so many samples at a time."""
        n = len(self.cotangents[0])
        if samples >= n:
            yield self
            return
        for start in range(0, n, samples):
            part = slice(start, start + samples)
            yield Flow(
                [replace(use, input=use.input[part]) for use in self.uses],
                [s[part] for s in self.cotangents],
                None if self.back is None else self.back[part],
                None if self.column_signs is None else self.column_signs[part],
            )


@dataclass(frozen=True)
class Forms:
    """Of each sample and column: ‖G‖² and ‖W̄ᵀG‖² (n, k), ⟨G, w(j)⟩ (n, k, in)."""

    trace: Tensor
    relative: Tensor
    along: Tensor


def matrices(flow: Flow, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Inputs (n, g, features, t) and columns (n, k, g, rows, t) of all uses, one behind the other in t."""
    inputs = [input_matrix(use.input.detach(), weight, use.kind, use.settings) for use in flow.uses]
    outputs = [
        output_matrix(s, weight, use.kind, use.settings) for use, s in zip(flow.uses, flow.cotangents, strict=True)
    ]
    return (inputs[0], outputs[0]) if len(inputs) == 1 else (torch.cat(inputs, dim=-1), torch.cat(outputs, dim=-1))


def read_together(flow: Flow, weight: Tensor) -> int:
    """Samples whose patches and gradients the caches of a CPU hold: they are used at once, and their memory again."""
    n, k = flow.cotangents[0].shape[:2]
    if weight.device.type != "cpu" or flow.kind == "batchnorm":
        return n
    entries = k * weight.numel()
    for use, s in zip(flow.uses, flow.cotangents, strict=True):
        each = s[0, 0].numel()
        rows = use.output_shape[-1] if use.kind == "dense" else use.output_shape[1]
        positions = each // rows
        if positions == 1:
            return n
        entries += positions * weight[0].numel() + k * each
    return max(1, STANDARD.reading_bytes // (entries * weight.element_size()))


def vector_gradients(flow: Flow) -> Iterator[tuple[str, Tensor]]:
    """Gradients (n, k, channels) of the parameters that are no matrix, summed over positions and uses.

    Those of a bias are the cotangents; those of a BatchNorm's scale are products with what it scales.
    """
    if flow.bias is not None:
        reached = (s for use, s in zip(flow.uses, flow.cotangents, strict=True) if use.kind != "lookup")
        yield flow.bias, reduce(torch.add, (over_positions(s, flow.kind) for s in reached))
    if flow.kind == "batchnorm":
        scaled = (normalised(use.input.detach(), use.settings)[:, None] for use in flow.uses)
        parts = (over_positions(x * s, "conv") for x, s in zip(scaled, flow.cotangents, strict=True))
        yield flow.weight, reduce(torch.add, parts)


def over_positions(values: Tensor, kind: str) -> Tensor:
    """Sum over positions: (n, k, …) -> (n, k, channels); the channel axis is last for dense layers."""
    if kind == "dense":
        return values.flatten(2, -2).sum(2) if values.ndim > 3 else values
    return values.flatten(3).sum(3) if values.ndim > 3 else values


def overlaps_are_cheaper(uses: Sequence[LayerUse[Any]], weight: Tensor, k: int) -> bool:
    """True for so few positions against weights that t × t overlaps cost less than weight gradients."""
    use = uses[0]
    if use.kind not in ("dense", "conv") or int(use.settings.get("groups", 1)) > 1:
        return False
    rows, features = weight.shape[0], weight[0].numel()
    channels = use.output_shape[-1] if use.kind == "dense" else use.output_shape[1]
    positions = sum(math.prod(use.output_shape[1:]) // channels for use in uses)
    return positions > 1 and positions * (features + k * rows) < k * rows * features


def weight_forms(flow: Flow, u: Tensor, s: Tensor, weight: Tensor) -> Forms:
    """The forms of one weight matrix from what flows through it."""
    if _one_position(flow, s):
        length = u[:, 0, :, 0].square().sum(1, keepdim=True)  # (n, 1)
        back, along = _along_one_position(u[:, 0, :, 0], s[:, :, 0, :, 0], weight)
        return Forms(length * s[:, :, 0, :, 0].square().sum(2), length * back.square().sum(2), along)
    matrix = by_output(weight, flow.kind, s.shape[2])  # W̄
    if overlaps_are_cheaper(flow.uses, weight, s.shape[1]):
        trace, relative = _by_overlaps(u[:, 0], s[:, :, 0], matrix)
        return Forms(trace, relative, along_inputs(flow, u[:, 0], s[:, :, 0], weight))
    return _by_gradients(flow, u, s, weight, matrix)


def gradient_squares(flow: Flow, weight: Tensor) -> Tensor:
    """‖G‖² of each sample and column, (n, k)."""
    u, s = matrices(flow, weight)
    if _one_position(flow, s):
        return u[:, 0, :, 0].square().sum(1, keepdim=True) * s[:, :, 0, :, 0].square().sum(2)
    if overlaps_are_cheaper(flow.uses, weight, s.shape[1]):
        u, s = u[:, 0], s[:, :, 0]
        return sum_over_pairs(s, s, u.mT @ u)
    return torch.cat([gradients.square_().flatten(2).sum(2) for _, gradients in _formed(flow, u, s, weight)])


def _one_position(flow: Flow, s: Tensor) -> bool:
    """True where gradients factorise, G_c = s_c uᵀ."""
    return s.shape[-1] == 1 and s.shape[2] == 1 and flow.kind != "transposed"


def _along_one_position(u: Tensor, s: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """W̄ᵀs, (n, k, in · taps), and ⟨s uᵀ, w(j)⟩ of every input channel, (n, k, in)."""
    back = s @ weight.reshape(len(weight), -1)
    along = back * u[:, None]
    channels = weight.shape[1]
    return back, along if along.shape[2] == channels else along.reshape(*along.shape[:2], channels, -1).sum(3)


def _by_overlaps(u: Tensor, s: Tensor, matrix: Tensor) -> tuple[Tensor, Tensor]:
    """‖G‖² = ⟨uᵀu, sᵀs⟩ over pairs of positions; G itself is never formed."""
    overlap = u.mT @ u  # (n, t, t)
    trace = sum_over_pairs(s, s, overlap)
    if matrix.shape[0] <= matrix.shape[1]:  # ‖W̄ᵀG‖² = ⟨W̄W̄ᵀ, GGᵀ⟩
        return trace, sum_over_pairs(s, torch.matmul(matrix @ matrix.T, s), overlap)
    back = matrix.T @ s  # (n, k, features, t)
    return trace, sum_over_pairs(back, back, overlap)


def sum_over_pairs(first: Tensor, second: Tensor, overlap: Tensor) -> Tensor:
    """Σ over pairs of positions ⟨first_t, second_t'⟩ overlap_tt', of columns (n, k, rows, t) and overlaps (n, t, t).

    Where there are more rows than positions, as words of a vocabulary, no array as large as the columns is made.
    """
    n, k, rows, positions = first.shape
    if rows > positions:
        return (first.mT @ second * overlap[:, None]).sum((2, 3))
    mixed = (first.reshape(n, k * rows, positions) @ overlap).reshape(first.shape)
    return (mixed * second).sum((2, 3))


def along_inputs(flow: Flow, u: Tensor, s: Tensor, weight: Tensor) -> Tensor:
    """⟨G_c, w(j)⟩ = Σ_t φ_{j,t} (Wᵀ s_c)_{j,t}, from what the backward pass sent to the input: (n, k, in)."""
    if flow.back is not None:
        return over_positions(flow.uses[0].input.detach()[:, None] * flow.back, flow.kind)
    # The network's own input has no gradient: apply the weights of one input feature at a time instead.
    by_channel = u.reshape(len(u), weight.shape[1], -1, u.shape[-1])  # (n, in, taps, t)
    taps = weight.reshape(*weight.shape[:2], -1)  # (out, in, taps)
    return torch.einsum("nkot,oia,niat->nki", s, taps, by_channel)


def _by_gradients(flow: Flow, u: Tensor, s: Tensor, weight: Tensor, matrix: Tensor) -> Forms:
    """Per-sample gradients formed and squared, some samples at a time."""
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else None  # the smaller of two products
    traces, relatives, alongs = [], [], []
    for _, gradients in _formed(flow, u, s, weight):
        laid_out = gradients_by_output(gradients, weight, flow.kind, s.shape[2])
        if gram is not None:
            products = laid_out @ laid_out.mT  # GGᵀ, (n, k, out, out)
            traces.append(products.diagonal(dim1=2, dim2=3).sum(2))
            relatives.append((products * gram).sum((2, 3)))
        else:
            traces.append(laid_out.square().sum((2, 3)))
            relatives.append((matrix.T @ laid_out).square().sum((2, 3)))
        alongs.append(_along_channels(gradients, weight, flow.kind, s.shape[2]))
    return Forms(torch.cat(traces), torch.cat(relatives), torch.cat(alongs))


def _formed(flow: Flow, u: Tensor, s: Tensor, weight: Tensor) -> Iterator[tuple[slice, Tensor]]:
    """Gradients (n, k, *) in the weight's layout, of some samples at a time."""
    step = max(1, STANDARD.gradient_bytes // (s.shape[1] * weight.numel() * weight.element_size()))
    for start in range(0, len(u), step):
        part = slice(start, start + step)
        yield part, weight_gradients(u[part], s[part], flow.kind)


def squares_and_along(flow: Flow, u: Tensor, s: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """G² summed over samples and columns, and ⟨G, w(j)⟩ of each (n, k, in)."""
    if _one_position(flow, s):
        u, s = u[:, 0, :, 0], s[:, :, 0, :, 0]
        return signed_sum(s.square(), flow.column_signs).T @ u.square(), _along_one_position(u, s, weight)[1]
    alongs, squares = [], torch.zeros((), dtype=s.dtype, device=s.device)
    for part, gradients in _formed(flow, u, s, weight):
        alongs.append(_along_channels(gradients, weight, flow.kind, s.shape[2]))
        part_signs = None if flow.column_signs is None else flow.column_signs[part]
        squares = squares + signed_sum(gradients.square_(), part_signs).sum(0)
    return squares, torch.cat(alongs)


def squared_gradients(flow: Flow, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    """G² of a layer's bias and weight, summed over samples and columns."""
    for name, gradients in vector_gradients(flow):
        yield name, signed_sum(gradients.square(), flow.column_signs).sum(0)
    if flow.kind != "batchnorm":
        yield flow.weight, squares_and_along(flow, *matrices(flow, weight), weight)[0].reshape(weight.shape)


def signed_sum(values: Tensor, column_signs: Tensor | None) -> Tensor:
    """Sum over columns, (n, k, …) -> (n, …), negative columns subtracted."""
    if column_signs is not None:
        values = values * column_signs.reshape(*column_signs.shape, *[1] * (values.ndim - 2))
    return values.sum(1)


def _along_channels(gradients: Tensor, weight: Tensor, kind: str, groups: int) -> Tensor:
    """⟨G_c, w(j)⟩ for every input channel j, from the gradients: (n, k, in)."""
    n, k = gradients.shape[:2]
    if kind == "transposed":
        return (gradients * weight.reshape(len(weight), -1)).sum(3)
    shaped = weight.reshape(groups, len(weight) // groups, weight.shape[1], -1)  # (g, out, in, taps)
    products = gradients.reshape(n, k, *shaped.shape) * shaped
    return products.sum((3, 5)).reshape(n, k, -1)


def along_rows(u: Tensor, s: Tensor, weight: Tensor, kind: str) -> Tensor:
    """⟨G_c, w⟩ restricted to the weights of one output channel: (n, k, out)."""
    along = (s * weighted_inputs(u, weight, kind)[:, None]).sum(-1)  # (n, k, g, rows)
    if kind == "transposed":  # rows are output channels times taps
        return along.reshape(*s.shape[:2], -1, weight[0, 0].numel()).sum(-1)
    return along.flatten(2)


def gradient_forms(flow: Flow, weight: Tensor, mean: Params) -> Iterator[tuple[Tensor, Tensor]]:
    """Squared lengths (n,) of single samples' gradients, and inner products with a given one, of a layer's parameters.

    Args:
        flow: the one column of the loss.
        weight: of the layer.
        mean: the given one, by parameter; those that are not there are left out.
    """
    for name, gradients in vector_gradients(flow):
        if name in mean:
            yield gradients[:, 0].square().sum(1), gradients[:, 0] @ mean[name].flatten()
    if flow.weight in mean and flow.kind != "batchnorm":
        u, s = matrices(flow, weight)  # (n, g, features, t), (n, 1, g, rows, t)
        along = (s[:, 0] * weighted_inputs(u, mean[flow.weight], flow.kind)).flatten(1).sum(1)
        yield weight_forms(flow, u, s, weight).trace[:, 0], along
