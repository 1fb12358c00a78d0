"""The kinds of samples that a network meets: what is read off one sample of each kind holds for all of that kind."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor

from flatscope.context import Context
from flatscope.samples import Inputs, map_inputs, slice_inputs, tensors_of_inputs


def kinds_of_samples(ctx: Context, *, everything: bool = True) -> Iterator[Inputs]:
    """One sample of every shape, or all samples where other inputs than real numbers, such as masks, tell them apart.

    Args:
        ctx: the network and its data; test samples count as well.
        everything: whether values other than real numbers matter; else only shapes do.
    """
    example = ctx.problem.example(1)
    everything &= not all(part.is_floating_point() for part in tensors_of_inputs(example))
    if not everything and not ctx.problem.uneven:
        yield example
        return
    seen = set[tuple[tuple[int, ...], ...]]()
    for part in ("train", "test") if ctx.problem.test is not None else ("train",):
        for inputs, _ in ctx.batches(part):
            shapes = tuple(tuple(value.shape[1:]) for value in tensors_of_inputs(inputs))
            if everything:
                yield inputs
            elif shapes not in seen:
                seen.add(shapes)
                yield slice_inputs(inputs, 0, 1)


def free_inputs(inputs: Inputs) -> Inputs:
    """Copies whose real numbers take part in differentiation, and may be written over."""

    def free(part: Tensor) -> Tensor:
        return part.detach().requires_grad_().clone() if part.is_floating_point() else part

    return map_inputs(inputs, free)
