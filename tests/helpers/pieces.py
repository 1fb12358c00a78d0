"""What networks and operators of several tests are made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from flatscope.curvature.symmetric_operator import SymmetricOperator


class Net(nn.Module):
    """A module made of named parts and a function of (parts, input); tensors are buffers unless parameters."""

    def __init__(self, forward: Callable[..., Tensor], **parts: Any) -> None:
        super().__init__()
        self._run = forward
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._run(self, *args, **kwargs)


class Cube(torch.autograd.Function):
    """x³ whose backward cannot be differentiated."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *slopes: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * slopes[0]


class DiagonalOperator(SymmetricOperator):
    """A diagonal matrix, never written out."""

    def __init__(self, values: Tensor) -> None:
        super().__init__(len(values))
        self.values = values.double()

    def __matmul__(self, vectors: Tensor) -> Tensor:
        return self.values * vectors
