"""Fixed masks of weights: zeros and ones that a network multiplies a parameter with before it multiplies a signal."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatscope.network.planned import plan_of


def fixed_mask(parameter: Tensor, value: Tensor) -> Tensor | None:
    """Zeros and ones that a weight is the product of a parameter with; None where it is made in another way.

    Args:
        parameter: the only one that the weight is computed from.
        value: the weight, on the autograd graph, in the parameter's layout or transposed.
    """
    if not value.requires_grad or not parameter.requires_grad or parameter.ndim < 2:
        return None
    drawn = torch.randn(value.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(value)
    (slope,) = torch.autograd.grad(value, parameter, drawn, retain_graph=True, allow_unused=True)
    if slope is None:
        return None
    for slopes, whole in ((slope, parameter), (slope.transpose(-2, -1), parameter.transpose(-2, -1))):
        mask: Tensor = slopes != 0
        if mask.shape == value.shape and torch.equal(slopes, drawn * mask) and torch.equal(whole * mask, value):
            return mask
    return None


def mask_name(weight: str) -> str:
    """Name of the buffer with the mask of a new parameter, if it has one."""
    return f"{weight}:mask"


def masks_of(model: nn.Module) -> dict[str, Tensor]:
    """The fixed masks of a plain network's weights, by the names of their buffers."""
    plan, buffers = plan_of(model), dict(model.named_buffers())
    return {} if plan is None else {name: buffers[name] for name in plan.masks.values()}
