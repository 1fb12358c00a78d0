"""What makes training steps fast on a GPU: lower precision of products, fitting memory layout, one graph per step."""

from __future__ import annotations

import copy
import importlib.util
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.isolation import private_randomness
from flatscope.network.interception import Operation, replay
from flatscope.network.operations import LEAVES_TORCH
from flatscope.switches import float32_products

# Packages whose modules do the same in every step; whatever else a forward pass does in Python happens once in a graph.
STEADY_PACKAGES = ("torch", "flatscope")
# Compiling takes some 20 s and spares a fifth of an epoch of a network such as PlainNet-18: 0.25 s of 50,000 images.
# A run that may still stop soon is left alone: so many samples must have been seen, and so many must be to come.
COMPILE_AFTER, COMPILE_FOR = 1_000_000, 4_000_000


def product_precision(precision: str) -> AbstractContextManager[None]:
    """Products on a GPU in full precision for "float32", with TF32 otherwise; whatever the caller has set."""
    return float32_products(coarse=precision != "float32")


def activation_precision(precision: str, device: torch.device) -> torch.autocast:
    """Inside the block a forward pass has activations of bfloat16 for "bf16"; weights are cast where they are used."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16", cache_enabled=False)


def wants_channels_last(precision: str, images: Tensor) -> bool:
    """True if convolutions run faster with the channels as innermost axis: those on matrix units do."""
    return precision != "float32" and images.is_cuda and images.dim() == 4


def step_is_the_same_every_time(model: nn.Module, inputs: Tensor) -> bool:
    """True if every step of a training is the same to Python, so that a graph can stand for it."""
    for part in model.modules():
        if type(part).__module__.partition(".")[0] not in STEADY_PACKAGES:
            return False
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks:
            return False
    waits = False

    def rule(op: Operation) -> Any:
        nonlocal waits
        result = op.run()
        waits |= op.name in LEAVES_TORCH and not isinstance(result, Tensor)
        return result

    with private_randomness(0, inputs.device), torch.no_grad():
        replay(copy.deepcopy(model).train(), inputs, rule)
    return not waits


def is_worth_compiling(model: nn.Module, precision: str, samples: int, epoch: int, epochs: int) -> bool:
    """True if `torch.compile` pays from this epoch on: in bf16, whose many passes over activations it joins.

    Random numbers of a compiled network are others than those of the network, so one with dropout is not compiled.
    """
    if precision != "bf16" or any(isinstance(part, nn.modules.dropout._DropoutNd) for part in model.modules()):
        return False
    if importlib.util.find_spec("triton") is None:
        return False
    return epoch * samples >= COMPILE_AFTER and (epochs - epoch) * samples >= COMPILE_FOR
