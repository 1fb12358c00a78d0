"""Changes of the data and of the weights side by side: section 9.7 and (49) to (51) of Zhang et al. (2017)."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad

from flatscope import InputError


class LossResponses(NamedTuple):
    """Changes of the mean loss U and its gradient with one other sample and with other weights.

    Attributes:
        gradient: ‖∇U‖.
        loss_after_swap: U' − U = (V(z'_j) − V(z_j))/n; the paper leaves the 1/n out.
        gradient_after_swap: ‖∇U' − ∇U‖.
        loss_after_scaling: U(w + τw) − U(w).
        gradient_after_scaling: ‖∇U(w + τw) − ∇U(w)‖.
        first_order: ‖H·τw‖, its value for small τ.
        as_printed: τ‖∇U‖, what the paper has in its place; right for the chain rule in w alone.
    """

    gradient: float
    loss_after_swap: float
    gradient_after_swap: float
    loss_after_scaling: float
    gradient_after_scaling: float
    first_order: float
    as_printed: float


def loss_responses(
    model: nn.Module,
    loss: Callable[[Tensor, Tensor], Tensor],
    x: Tensor,
    y: Tensor,
    *,
    replaced: int,
    by: tuple[Tensor, Tensor],
    tau: float,
) -> LossResponses:
    """Exchange sample z_j for z'_j, or the weights w for w + τw, and see what moves.

    Args:
        model: in eval mode; left as it is.
        loss: loss(outputs, targets), the mean over the samples.
        x: inputs (n, ...).
        y: targets (n, ...).
        replaced: j.
        by: z'_j = (input (...), target (...)).
        tau: τ.
    """
    if not 0 <= replaced < len(x):
        raise InputError(f"a sample from 0 to {len(x) - 1}", str(replaced), where="loss_responses, replaced")
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    others = {name: p.detach() for name, p in model.named_parameters() if not p.requires_grad}
    others |= dict(model.named_buffers())

    def mean_loss(weights: dict[str, Tensor], inputs: Tensor, targets: Tensor) -> Tensor:
        return loss(functional_call(model, {**weights, **others}, (inputs,)), targets)

    swapped_x, swapped_y = x.clone(), y.clone()
    swapped_x[replaced], swapped_y[replaced] = by
    scaled = {name: p + tau * p for name, p in params.items()}
    slope = grad(mean_loss)
    before = slope(params, x, y)
    step = {name: tau * p for name, p in params.items()}

    def along_step(weights: dict[str, Tensor]) -> Tensor:
        return torch.stack([(part * step[name]).sum() for name, part in slope(weights, x, y).items()]).sum()

    value = mean_loss(params, x, y)
    return LossResponses(
        _norm_of_tensors(before),
        float(mean_loss(params, swapped_x, swapped_y) - value),
        _norm_of_tensors(_difference_of_weights(slope(params, swapped_x, swapped_y), before)),
        float(mean_loss(scaled, x, y) - value),
        _norm_of_tensors(_difference_of_weights(slope(scaled, x, y), before)),
        _norm_of_tensors(grad(along_step)(params)),  # H·τw is the gradient of ⟨∇U, τw⟩
        abs(tau) * _norm_of_tensors(before),
    )


def relative_factors(depth: int, delta: float) -> tuple[float, float]:
    """Factors of a path by a relative change Δ of every weight (50) and of the input (51): (1 + Δ)^d and 1 + Δ.

    Example:
        >>> [round(f, 2) for f in relative_factors(8, 0.1)]
        [2.14, 1.1]
    """
    return (1 + delta) ** depth, 1 + delta


def _difference_of_weights(left: dict[str, Tensor], right: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: left[name] - right[name] for name in left}


def _norm_of_tensors(tensors: dict[str, Tensor]) -> float:
    return float(torch.stack([t.double().norm() for t in tensors.values()]).norm())
