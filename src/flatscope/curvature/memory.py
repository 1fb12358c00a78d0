"""How many samples and columns go together in a sweep, and what happens when they do not fit after all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import lack_of_memory
from flatscope.network.watching import Operation, tensors_in, watched
from flatscope.samples import Batch, cut
from flatscope.stopping import end_in_time

T = TypeVar("T")

CPU_BYTES = 48 * 2**20  # what fits the caches: more is slower there
# But calls for hardly any samples are slower still: a few samples and columns go together up to here.
CPU_MOST, FEW_COLUMNS = 256 * 2**20, 4
GPU_SHARE = 0.5
MOST_COLUMNS = 32
FEW_SAMPLES = 8


@dataclass(frozen=True)
class Plan:
    """Samples and columns of each that go together."""

    samples: int
    columns: int

    def smaller(self) -> Plan:
        """Half of it."""
        if self.samples > 1:
            return replace(self, samples=self.samples // 2)
        if self.columns > 1:
            return replace(self, columns=self.columns // 2)
        raise torch.OutOfMemoryError("the memory does not suffice for one column of one sample")


def memory_budget(ctx: Context) -> int:
    """Bytes that a sweep may use: what was asked for, half of what is free on a GPU, a cache's worth on a CPU."""
    if ctx.effort.memory is not None:
        return ctx.effort.memory
    if ctx.problem.device.type == "cuda":
        free = torch.cuda.mem_get_info(ctx.problem.device)[0]
        unused = torch.cuda.memory_reserved(ctx.problem.device) - torch.cuda.memory_allocated(ctx.problem.device)
        return int(GPU_SHARE * (free + unused))
    return CPU_BYTES


def plan_for(ctx: Context, columns: int, per_sample: float, per_column: float) -> Plan:
    """The largest plan within the budget; fewer columns rather than hardly any samples.

    Args:
        ctx: the network.
        columns: those that every sample has.
        per_sample: bytes that one sample takes whatever its columns.
        per_column: bytes that one column of one sample takes.
    """
    budget, width = memory_budget(ctx), min(columns, MOST_COLUMNS)
    if ctx.effort.memory is None and ctx.problem.device.type == "cpu":
        few = FEW_SAMPLES * (per_sample + min(FEW_COLUMNS, width) * per_column)
        budget = max(budget, int(min(CPU_MOST, few)))
    while width > 1 and budget < FEW_SAMPLES * (per_sample + width * per_column):
        width //= 2
    fitting = int(budget / max(1.0, per_sample + width * per_column))
    return Plan(max(1, min(ctx.problem.n_train, fitting)), width)


def in_batches(ctx: Context, plan: Plan, work: Callable[[Batch, Tensor, int], T]) -> Iterator[T]:
    """Results of `work(batch, numbers of its samples, columns)` over this rank's share of the data.

    Where the memory does not suffice, what has failed is let go and tried again with half as many samples, or columns:
    `work` must leave nothing behind but its result.
    """
    start = ctx.problem.ranks.share(ctx.problem.n_train)[0]
    for inputs, targets in ctx.share(size=plan.samples):
        done = 0
        while done < len(targets):
            end_in_time(ctx)
            stop = min(done + plan.samples, len(targets))
            numbers = torch.arange(start + done, start + stop, device=ctx.problem.device)
            found = fitted(lambda: work((cut(inputs, done, stop), targets[done:stop]), numbers, plan.columns))  # noqa: B023  called at once
            if found is None:
                plan = plan.smaller()
                continue
            yield found
            done = stop
        start += len(targets)


def fitted(work: Callable[[], T]) -> T | None:
    """The result, or None where the memory did not suffice; then nothing is kept of what failed."""
    try:
        return work()
    except (RuntimeError, MemoryError) as problem:
        if not (isinstance(problem, torch.OutOfMemoryError) or lack_of_memory(problem)):
            raise
    # Only here is the exception gone, and with it the frames that hold the tensors.
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def saved_bytes(run: Callable[[], T], ignored: set[int]) -> tuple[int, T]:
    """Bytes that autograd keeps for the backward pass of what `run` computes, shared storages once; and the result.

    Args:
        run: the forward pass.
        ignored: addresses of storages that are there anyway (parameters).
    """
    storages: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        if value.layout != torch.strided:  # a sparse constant, which is there anyway
            return value
        storage = value.untyped_storage()
        if storage.data_ptr() not in ignored:
            storages[storage.data_ptr()] = storage.nbytes()
        return value

    def follow(op: Operation) -> Any:
        result = op.run()
        for tensor in tensors_in(result):
            if not torch._C._functorch.is_functorch_wrapped_tensor(tensor):
                note(tensor)
        return result

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            result = run()
    except RuntimeError as problem:  # torch.func has no such hooks: then all that is computed counts as kept
        if "saved tensor hooks" not in str(problem):
            raise
        storages.clear()
        with watched(follow):
            result = run()
    return sum(storages.values()), result
