"""Measures of a network's last layers, for hundreds of networks at many moments of their training.

Petzka et al. (2019) look at one layer near the output. Its Hessian depends on the layers in front of it only through
the features that they give, so the last layers are measured as a network of their own on those features: exact like
the measurement of the whole network, without its backward passes through the convolutions.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatscope import FlatscopeError, Problem, measure
from flatscope.guards import precise_math
from flatscope.sweeps.work import table_metrics

CHUNK = {"cuda": 25_000, "cpu": 2_500}


def measured(model: nn.Module, x: Tensor, y: Tensor, names: Sequence[str], tail: int = 0) -> dict[str, float]:
    """Exact values by "measure/layer", or "measure" where it is one of the whole network.

    Args:
        model: in eval mode; a Sequential where only its tail is measured.
        x: inputs on the model's device.
        y: their classes.
        names: of the measures.
        tail: how many of the last modules to measure; 0 for all.

    Returns:
        Nothing for a network with outputs that are not finite.
    """
    if tail:
        assert isinstance(model, nn.Sequential)
        head, model = model[:-tail], model[-tail:]
        x = _features(head, x)
    try:
        found = table_metrics(measure(Problem(model, train=(x, y)), names, precision=0))
    except FlatscopeError:  # it is about to diverge
        return {}
    return {name: value for name, value in found.items() if math.isfinite(value)}


def _features(head: nn.Module, x: Tensor) -> Tensor:
    """What the layers in front give, some samples at a time."""
    with precise_math(), torch.no_grad():
        return torch.cat([head(part) for part in torch.split(x, CHUNK.get(x.device.type, CHUNK["cpu"]))])
