"""Curvature of a network's last two dense layers, for hundreds of networks at many moments of their training.

Petzka et al. (2019) look at one layer near the output. Its Hessian depends on the layers in front of it only through
the features that they give, so the last layers are measured as a network of their own on those features: exact like
the measurement of the whole network, without its backward passes through the convolutions.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from flatscope import FlatscopeError, Problem, measure
from flatscope.errors import NotApplicable
from flatscope.guards import precise_math

MEASURES = ("layer_trace", "layer_max_eigenvalue", "kappa_trace", "kappa")
CHUNK = {"cuda": 25_000, "cpu": 2_500}


def last_layers(model: nn.Sequential, x: Tensor, y: Tensor) -> dict[str, float]:
    """Norm, trace and largest eigenvalue of both layers, and Petzka's κ and κ_τ, of the mean cross-entropy.

    Args:
        model: ends with Linear, ReLU, Linear; eval mode.
        x: inputs on the model's device.
        y: their classes.

    Returns:
        `norm/…`, `layer_trace/…`, `layer_max_eigenvalue/…`, `kappa_trace/…`, `kappa/…` by layer name; NaN for a
        network with outputs that are not finite.
    """
    tail = model[-3:]
    layers = {name: layer for name, layer in tail.named_children() if isinstance(layer, nn.Linear)}
    if [type(layer) for layer in tail.children()] != [nn.Linear, nn.ReLU, nn.Linear]:
        raise NotApplicable("a network that ends with Linear, ReLU, Linear", repr(tail), where="model")
    found = {f"norm/{name}": float(layer.weight.detach().double().norm()) for name, layer in layers.items()}
    try:
        table = measure(Problem(tail, train=(_features(model[:-3], x), y)), MEASURES, precision=0)
    except FlatscopeError:  # it is about to diverge
        return found | {f"{measured}/{name}": math.nan for measured in MEASURES for name in layers}
    return found | {f"{measured}/{name}": table.layer(measured)[name] for measured in MEASURES for name in layers}


def _features(head: nn.Module, x: Tensor) -> Tensor:
    """What the layers in front give, some samples at a time."""
    with precise_math(), torch.no_grad():
        return torch.cat([head(part) for part in torch.split(x, CHUNK.get(x.device.type, CHUNK["cpu"]))])
