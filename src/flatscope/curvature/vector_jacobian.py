"""Vector-Jacobian products of a whole block of vectors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatscope.errors import lack_of_memory


def batched_gradient(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """Vector-Jacobian products for a stack of vectors (k, ...) at once; one by one where an operation forbids it."""
    k = vectors[0].shape[0] if vectors else 1
    if not outputs:
        return [value.new_zeros(k, *value.shape) for value in inputs]
    if k > 1:
        try:
            found = torch.autograd.grad(
                outputs, inputs, vectors, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            return [
                value.new_zeros(k, *value.shape) if part is None else part
                for part, value in zip(found, inputs, strict=True)
            ]
        except RuntimeError as problem:  # an operation that takes no stacks: what else is wrong comes up again below
            if isinstance(problem, torch.OutOfMemoryError) or lack_of_memory(problem):
                raise
    rows = [
        torch.autograd.grad(outputs, inputs, [v[i] for v in vectors], retain_graph=True, materialize_grads=True)
        for i in range(k)
    ]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
