"""Basis paths of each stage of a network by itself, BatchNorm left alone, as the code behind Yi et al. (2019) has it.

The weights of a stage's convolutions are written as values of basis paths from the stage's input channels to its output
channels; BatchNorm between them is not looked at. Rescaling a channel with its BatchNorm, which leaves the function as
it is, changes these values: they are not positively scale-invariant, and serve to redraw the paper's figure only.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatscope import BasisPaths
from flatscope.errors import InputError

SIDE = 5  # of the images that the stages are traced with


class StagePaths:
    """Values of the basis paths of every stage (`gsgd_blocks`), by the cyclic skeleton.

    Args:
        model: a network; not changed.
        stages: names of the convolutions of each stage, in forward order. All have strides and biases left out.
    """

    def __init__(self, model: nn.Module, stages: Sequence[Sequence[str]]) -> None:
        self._model, self._stages = copy.deepcopy(model).eval(), [list(stage) for stage in stages]
        self._paths = [self._traced(stage) for stage in self._stages]

    @property
    def counts(self) -> list[int]:
        """Number of basis paths of each stage."""
        return [paths.count for paths in self._paths]

    def values(self) -> Tensor:
        """Stage after stage."""
        return torch.cat([paths.values() for paths in self._paths])

    def to_model(self, values: Tensor) -> nn.Module:
        """The network with these values; everything but the stages' convolutions is as it was."""
        model = copy.deepcopy(self._model)
        for stage, paths, own in zip(self._stages, self._paths, torch.split(values, self.counts), strict=True):
            written = [m for m in paths.to_model(own).modules() if isinstance(m, nn.Conv2d)]
            for name, layer in zip(stage, written, strict=True):
                with torch.no_grad():
                    model.get_parameter(f"{name}.weight").copy_(layer.weight)
        return model

    def _traced(self, stage: Sequence[str]) -> BasisPaths:
        parts: list[nn.Module] = []
        for name in stage:
            layer = self._model.get_submodule(name)
            if not isinstance(layer, nn.Conv2d) or layer.groups != 1:
                raise InputError("convolutions without groups", type(layer).__name__, where=f"stage layer {name}")
            rows, columns = layer.kernel_size
            bare = nn.Conv2d(layer.in_channels, layer.out_channels, (rows, columns), padding="same", bias=False)
            bare.weight = nn.Parameter(layer.weight.detach().clone())
            parts += [bare, nn.ReLU()]
        first = parts[0]
        assert isinstance(first, nn.Conv2d)
        return BasisPaths(
            nn.Sequential(*parts[:-1]), torch.ones_like(first.weight[:1, :, :1, :1]).expand(1, -1, SIDE, SIDE), "cyclic"
        )
