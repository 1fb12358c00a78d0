"""Changes of weights and changes of inputs that do the same to a network's outputs.

A matrix on a layer's features (Petzka et al. 2019, Appendices C.1 and D), and the change of the output that a flat
minimum allows for a change of the input (Zhang et al. 2017, Section 5.4).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from flatscope import Context
from flatscope.errors import InputError
from flatscope.extend import Layer
from flatscope.measures.feature_robustness import weights_by_input_feature, weights_from_feature_rows


def robustness_to(ctx: Context, layer: Layer, matrix: Tensor, delta: float) -> float:
    """F(δ, S, A) of one layer for a given matrix A: (features, features), or one per group."""
    weight = ctx.params[layer.weight].double()
    moved = weight + delta * times_features(weight, matrix.to(weight), layer)
    there = ctx.at({**ctx.params, layer.weight: moved.to(ctx.params[layer.weight])})
    return there.scores().loss - ctx.scores().loss


def times_features(weight: Tensor, matrix: Tensor, layer: Layer) -> Tensor:
    """The product wA, shaped as the weight. A: (features, features), or (groups, …, …) with one block per group."""
    rows = weights_by_input_feature(weight[None], layer)  # (1, groups, rows, features)
    features = rows.shape[-1]
    if matrix.shape not in ((features, features), (layer.groups, features, features)):
        expected = f"a matrix {features} × {features}" + (f", or {layer.groups} of them" if layer.groups > 1 else "")
        raise InputError(expected, f"shape {tuple(matrix.shape)}", where=f"layer {layer.name}")
    return weights_from_feature_rows(rows @ matrix, weight, layer)[0]


def matrix_sending(sources: Tensor, targets: Tensor) -> Tensor:
    """The smallest matrix A with A·source = target for each column: zxᵀ/‖x‖² for one pair (Appendix D.2).

    Sending two nearly equal features to different places needs a large norm: why bounds for all ‖A‖ ≤ 1 say
    little about adversarial changes.
    """
    sources, targets = (value.reshape(len(value), -1) for value in (sources, targets))
    result: Tensor = targets @ torch.linalg.pinv(sources)
    return result


def convolution_matrix(weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """W with Wx = w * x for inputs (channels, *shape): stride 1, no padding; (out · positions, in · positions)."""
    inputs = weight.shape[1] * math.prod(shape)
    basis = torch.eye(inputs, dtype=weight.dtype, device=weight.device).reshape(inputs, weight.shape[1], *shape)
    convolve = (torch.conv1d, torch.conv2d, torch.conv3d)[len(shape) - 1]
    return convolve(basis, weight).reshape(inputs, -1).T


def equivalent_input_change(weight: Tensor, changed: Tensor, x: Tensor, delta: float) -> Tensor:
    """The change of x that does to w * x what w → w + δ·changed does: δVW_Ax with V = Wᵀ(WWᵀ)⁻¹ (Appendix D.3).

    Exists when W has full row rank: fewer outputs than inputs.
    """
    W, W_A = (convolution_matrix(kernel, tuple(x.shape[1:])) for kernel in (weight, changed))
    if torch.linalg.matrix_rank(W) < len(W):
        raise InputError("a convolution whose outputs are independent", f"rank below {len(W)}", where="weight")
    solved: Tensor = torch.linalg.solve(W @ W.T, W_A @ x.reshape(-1))
    return (delta * (W.T @ solved)).reshape(x.shape)


def input_change_bound(
    first_norm: float, input_norm: float, weight_change: float, weight_radius: float, curvature: float, radius: float
) -> float:
    """δ' = r' ‖W₁‖₂ (δ/r + M r/2) / ‖x‖: the completed statement of Zhang et al. 2017, Section 5.4.

    A function whose value moves by at most δ while the weights stay within r, and whose Hessian in the weights has
    norm at most M there, has a gradient of at most δ/r + M r/2; the first layer then bounds the input gradient. So
    |f(x') − f(x)| ≤ δ' for all x' within r' of x in the same linear region.

    Args:
        first_norm: ‖W₁‖₂ of a dense first layer.
        input_norm: ‖x‖.
        weight_change: δ.
        weight_radius: r.
        curvature: M.
        radius: r'.
    """
    positive, others = (input_norm, weight_radius), (first_norm, weight_change, curvature, radius)
    if not (min(positive) > 0 and min(others) >= 0 and max(positive + others) < math.inf):
        raise InputError("‖x‖ and r above 0, the others from 0 up", f"{positive}, {others}", where="input_change_bound")
    return radius * first_norm * (weight_change / weight_radius + curvature * weight_radius / 2) / input_norm
