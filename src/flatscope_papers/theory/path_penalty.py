"""The path regulariser of Zhang et al. (2017), eq. (41), for training, and the four sides of their eq. (43).

A path goes from an input or a bias to an output and carries the product ŵ of the weights on it. It is active on a
sample if all its ReLUs are. ŵᵀΛŵ sums ŵ² over paths, each weighted by the share of samples on which it is active;
ŵᵀŵ is the square of the ℓ2 path norm. Both come from one pass of squared weights, gated by the network's own ReLUs.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from flatscope import InputError
from flatscope.network.watching import replay
from flatscope.samples import output_tensor
from flatscope_papers.theory.squared_paths import SquaredPaths

ATTACK_STEPS = 40


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
