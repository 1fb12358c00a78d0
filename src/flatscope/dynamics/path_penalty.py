"""The path regulariser of Zhang et al. (2017), eq. (41), for training, and the four sides of their eq. (43).

A path goes from an input or a bias to an output and carries the product ŵ of the weights on it. It is active on a
sample if all its ReLUs are. ŵᵀΛŵ sums ŵ² over paths, each weighted by the share of samples on which it is active;
ŵᵀŵ is the square of the ℓ2 path norm. Both come from one pass of squared weights, gated by the network's own ReLUs.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError

ATTACK_STEPS = 40


class Sides(NamedTuple):
    """Both sides of eq. (43) and what stands between them, at given weights, as numbers.

    The paper orders their minima as they stand here. Its proof does not hold, and at given weights the order may
    fail, so nothing is claimed.

    Attributes:
        ridge: mean square loss + (ρ²/n)·ŵᵀŵ.
        robust: mean of the largest square loss in a ball of radius ρ around each input; from below, by gradient
            ascent, except for linear models, where it is exact.
        with_norm: mean square loss + c·‖ŵ‖.
        active_ridge: Σ of square losses + ρ²·ŵᵀΛŵ, without 1/n, as printed.
    """

    ridge: float
    robust: float
    with_norm: float
    active_ridge: float


def path_penalty(model: nn.Module, inputs: Tensor | None = None, *, example: Tensor | None = None) -> Tensor:
    """ŵᵀΛŵ over the given inputs, or ŵᵀŵ over all paths; differentiable, to be added to a training loss.

    Eq. (41) adds (ρ²/n) times it to the mean square loss.

    Args:
        model: an `nn.Sequential` (nested ones too) of Linear, Conv2d, ReLU, max and average pools, Flatten, Dropout.
            Dropout is left out, as it does nothing to the trained function.
        inputs: a batch (b, ...); every path counts with the share of these samples on which it is active.
        example: instead, one input (1, ...) for its shape: every path counts, that is Λ = 1; max pools then
            pass on the largest sum of squares.

    Raises:
        InputError: a part of the model that this pass does not know.

    Example:
        >>> net = nn.Sequential(nn.Linear(2, 1, bias=False), nn.ReLU())
        >>> _ = net[0].weight.data.copy_(torch.tensor([[1.0, 2.0]]))
        >>> x = torch.tensor([[1.0, 0.0], [-1.0, 0.0]])
        >>> path_penalty(net, x).item(), path_penalty(net, example=x).item()
        (2.5, 5.0)
    """
    if (inputs is None) == (example is None):
        raise InputError("either inputs or an example", "both or neither", where="path_penalty")
    signal = inputs if inputs is not None else example
    assert signal is not None
    gated = inputs is not None
    squares = torch.ones_like(signal if gated else signal[:1])
    for part in _parts(model):
        signal, squares = _through(part, signal, squares, gated)
    return squares.flatten(1).sum(1).mean()


def _parts(model: nn.Module) -> Iterator[nn.Module]:
    if isinstance(model, nn.Sequential):
        for child in model:
            yield from _parts(child)
    else:
        yield model


def _through(part: nn.Module, signal: Tensor, squares: Tensor, gated: bool) -> tuple[Tensor, Tensor]:
    """The signal and the sums of squared paths behind one part; without gates the signal is left as it is."""
    if isinstance(part, nn.Dropout | nn.Identity):
        return signal, squares
    if isinstance(part, nn.Flatten):
        return part(signal) if gated else signal, part(squares)
    if isinstance(part, nn.ReLU):
        if not gated:
            return signal, squares
        return signal.clamp_min(0), squares * (signal > 0)
    if isinstance(part, nn.Linear):
        bias = _squared(part.bias)
        return part(signal) if gated else signal, functional.linear(squares, part.weight.square(), bias)
    if isinstance(part, nn.Conv2d) and part.padding_mode == "zeros":
        squared = functional.conv2d(
            squares, part.weight.square(), _squared(part.bias), part.stride, part.padding, part.dilation, part.groups
        )
        return part(signal) if gated else signal, squared
    if isinstance(part, nn.MaxPool2d):
        if not gated:
            return signal, part(squares)
        shape = (part.kernel_size, part.stride, part.padding, part.dilation, part.ceil_mode)
        pooled, where = functional.max_pool2d(signal, *shape, return_indices=True)
        return pooled, squares.flatten(2).gather(2, where.flatten(2)).view_as(where)
    if isinstance(part, nn.AvgPool2d) and part.padding == 0 and not part.ceil_mode:
        size = part.kernel_size if isinstance(part.kernel_size, tuple) else (part.kernel_size, part.kernel_size)
        return part(signal) if gated else signal, part(squares) / (size[0] * size[1])  # edges 1/k, squared
    raise InputError(
        "a Sequential of Linear, Conv2d, ReLU, pools, Flatten and Dropout", str(part), where="path_penalty, model"
    )


def _squared(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.square()


def robust_sides(model: nn.Module, x: Tensor, y: Tensor, radius: float, *, c: float | None = None) -> Sides:
    """The four numbers of eq. (43) for a network with one output, at its present weights.

    Args:
        model: as for `path_penalty`, in eval mode.
        x: inputs (n, ...).
        y: real targets (n,).
        radius: ρ.
        c: factor of the norm in the third number; ρ by default.
    """
    with torch.no_grad():
        residual = y - model(x).reshape(-1)
        if residual.shape != y.shape:
            raise InputError("one output per sample", f"{len(residual)} for {len(y)}", where="robust_sides")
        everything = float(path_penalty(model, example=x[:1]))
        active = float(path_penalty(model, x))
    loss, n = float(residual.square().mean()), len(x)
    robust = float((y - model(_attacked(model, x, y, radius)).reshape(-1)).detach().square().mean())
    with_norm = loss + (radius if c is None else c) * everything**0.5
    return Sides(loss + radius**2 / n * everything, robust, with_norm, n * loss + radius**2 * active)


def _attacked(model: nn.Module, x: Tensor, y: Tensor, radius: float) -> Tensor:
    """Inputs in the balls with large square losses: steps on the sphere along the gradient, best kept per sample."""
    best, best_loss = x, (y - model(x).reshape(-1)).square().detach()
    point = x
    for _ in range(ATTACK_STEPS):
        free = point.detach().requires_grad_()
        output = model(free).reshape(-1)
        (slope,) = torch.autograd.grad(output.sum(), free)
        away = torch.sign(output - y).detach()
        away = torch.where(away == 0, 1.0, away).view(-1, *[1] * (x.dim() - 1))
        length = slope.flatten(1).norm(dim=1).clamp_min(1e-30).view(-1, *[1] * (x.dim() - 1))
        point = x + radius * away * slope / length
        with torch.no_grad():
            loss = (y - model(point).reshape(-1)).square()
            better = loss > best_loss
            best_loss = torch.where(better, loss, best_loss)
            best = torch.where(better.view(-1, *[1] * (x.dim() - 1)), point, best)
    return best
