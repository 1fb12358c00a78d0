"""Products of vectors with the Hessian and with the Gauss-Newton matrix of one batch: the mathematics of both.

Each function does once what no vector is needed for, and returns the product as a function of a stack of vectors.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from flatscope.errors import lack_of_memory

# A stack of vectors, one tensor (k, *shape) for each parameter tensor, to the stack of their products.
Product = Callable[[Sequence[Tensor]], list[Tensor]]


def hessian_product(loss: Tensor, params: Sequence[Tensor]) -> Product:
    """V ↦ Hv: the gradient g, differentiated once more along v, since Hv = ∂⟨g, v⟩/∂w."""
    return partial(vector_jacobian, differentiable_gradient(loss, params), params)


def gauss_newton_product(outputs: Tensor, params: Sequence[Tensor], loss: Callable[[Tensor], Tensor]) -> Product:
    """V ↦ JᵀLJv, with J the Jacobian of the outputs and L the Hessian of the loss with respect to them.

    Jv = ∂⟨Jᵀu, v⟩/∂u whatever u is, since Jᵀu is linear in it: two backward passes take the place of a forward one,
    which not every operation has.
    """
    u = torch.zeros_like(outputs, requires_grad=True)
    pulled = differentiable_gradient(outputs, params, u)  # Jᵀu
    leaf = outputs.detach().requires_grad_()
    slope = differentiable_gradient(loss(leaf), [leaf])

    def product(vectors: Sequence[Tensor]) -> list[Tensor]:
        pushed = vector_jacobian(pulled, [u], vectors)  # Jv
        curved = vector_jacobian(slope, [leaf], [part.detach() for part in pushed])  # LJv
        return vector_jacobian([outputs], params, curved)  # JᵀLJv

    return product


def differentiable_gradient(value: Tensor, params: Sequence[Tensor], along: Tensor | None = None) -> list[Tensor]:
    """Gradient of a number, or of ⟨value, along⟩, that can be differentiated again; zero where nothing depends."""
    if not value.requires_grad:
        return [torch.zeros_like(param) for param in params]
    return list(torch.autograd.grad(value, params, along, create_graph=True, materialize_grads=True))


def vector_jacobian(outputs: Sequence[Tensor], inputs: Sequence[Tensor], vectors: Sequence[Tensor]) -> list[Tensor]:
    """∂Σ⟨outputs, vectors⟩/∂inputs for a stack of vectors (k, …) at once; one by one where an operation forbids it.

    Outputs without a graph (of what is unused, or used linearly) are constants.
    """
    k = len(vectors[0])
    pairs = [pair for pair in zip(outputs, vectors, strict=True) if pair[0].requires_grad]
    if not pairs:
        return [value.new_zeros(k, *value.shape) for value in inputs]
    outputs, vectors = zip(*pairs, strict=True)
    if k > 1:
        try:
            stacks = torch.autograd.grad(
                outputs, inputs, vectors, retain_graph=True, allow_unused=True, is_grads_batched=True
            )
            return [
                value.new_zeros(k, *value.shape) if stack is None else stack
                for stack, value in zip(stacks, inputs, strict=True)
            ]
        except RuntimeError as problem:  # an operation that takes no stacks: what else is wrong comes up again below
            if isinstance(problem, torch.OutOfMemoryError) or lack_of_memory(problem):
                raise
    rows = [
        torch.autograd.grad(outputs, inputs, [v[i] for v in vectors], retain_graph=True, materialize_grads=True)
        for i in range(k)
    ]
    return [torch.stack(parts) for parts in zip(*rows, strict=True)]
