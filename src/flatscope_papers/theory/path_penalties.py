"""The path regulariser of Zhang et al. (2017), eq. (41), for training, and the four sides of their eq. (43).

A path goes from an input or a bias to an output and carries the product ŵ of the weights on it. It is active on a
sample if all its ReLUs are. ŵᵀΛŵ sums ŵ² over paths, each weighted by the share of samples on which it is active;
ŵᵀŵ is the square of the ℓ2 path norm. Both come from one pass of squared weights, gated by the network's own ReLUs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from flatscope import InputError
from flatscope.extend import output_tensor, replay
from flatscope_papers.theory.squared_paths import SquaredPaths

ATTACK_STEPS = 40


class NetworkSides(NamedTuple):
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
        model: any network of linear maps, (leaky) ReLUs, pools, sums and BatchNorm in eval mode, skips included.
            Dropout is left out, as it does nothing to the trained function. A BatchNorm is a layer of its own: fold
            it first to count its shift and the bias before it as one.
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
    signal = signal.detach() if gated else signal[:1].detach()
    paths = SquaredPaths(gated)
    paths.start(signal, torch.ones_like(signal))
    outputs = output_tensor(replay(model, signal, paths.follow))
    if not paths.knows(outputs):
        raise InputError("outputs that depend on the input", "a constant", where="path_penalty, model")
    return paths.squares(outputs).flatten(1).sum(1).mean()


def network_sides(model: nn.Module, x: Tensor, y: Tensor, radius: float, *, c: float | None = None) -> NetworkSides:
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
            raise InputError("one output per sample", f"{len(residual)} for {len(y)}", where="network_sides")
        everything = float(path_penalty(model, example=x[:1]))
        active = float(path_penalty(model, x))
    loss, n = float(residual.square().mean()), len(x)
    robust = float((y - model(_adversarial_inputs(model, x, y, radius)).reshape(-1)).detach().square().mean())
    with_norm = loss + (radius if c is None else c) * everything**0.5
    return NetworkSides(loss + radius**2 / n * everything, robust, with_norm, n * loss + radius**2 * active)


def _adversarial_inputs(model: nn.Module, x: Tensor, y: Tensor, radius: float) -> Tensor:
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
