"""A way to write a network with other weights that a paper uses, made of `rescale` with given factors."""

from __future__ import annotations

import math

from torch import Tensor, nn

from flatscope import fold_batchnorm, rescale
from flatscope.errors import InputError


def shrink_layer(model: nn.Module, example: Tensor, layer: str, epsilon: float) -> nn.Module:
    """Sharp by construction: the same function with the norm of one layer's weight equal to ε.

    Theorem 3.2 of Yi et al. (2019): c_i = ε / (√h ‖w_i‖) on the h units of the layer, w_i the incoming weights of
    unit i. The ball of radius ε around the new weights then contains a network whose layer is zero, so that
    ε-sharpness is at least the loss of that network, whatever the function.
    """
    base = fold_batchnorm(model, example)
    module = base.get_submodule(layer)
    weight = base.get_parameter(f"{layer}.weight").detach().double().cpu()
    if isinstance(module, nn.modules.conv._ConvTransposeNd):  # (in, out / groups, taps)
        weight = weight.reshape(module.groups, -1, *weight.shape[1:]).transpose(1, 2).flatten(0, 1)
    norms = weight.flatten(1).norm(dim=1)
    if bool((norms == 0).any()):
        unit = int((norms == 0).nonzero()[0])
        raise InputError("non-zero incoming weights", "a zero vector", where=f"layer {layer}, unit {unit}")
    return rescale(base, example, factors={layer: epsilon / (math.sqrt(len(norms)) * norms)})
