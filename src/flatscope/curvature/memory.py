"""How many samples and columns go together in a sweep, and what happens when they do not fit after all."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import lack_of_memory
from flatscope.limits import MemoryShare
from flatscope.samples import Batch, slice_inputs
from flatscope.sampling import refuse_out_of_time

T = TypeVar("T")


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


def free_bytes(device: torch.device) -> int | None:
    """Memory that is free on a GPU, with what torch holds unused; None on a CPU."""
    if device.type != "cuda":
        return None
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + unused


def allowed(share: MemoryShare, device: torch.device, asked: int | None = None) -> int:
    """Bytes that one kind of pass may take.

    Args:
        share: of the memory.
        device: where it runs.
        asked: bytes that the caller allows for everything; None for what is there.
    """
    if asked is not None:
        return int(share.asked * asked)
    free = free_bytes(device)
    if free is None:
        return share.least
    return max(min(share.least, free // 2), int(share.free * free))


def plan_for(ctx: Context, columns: int, per_sample: float, per_column: float) -> Plan:
    """The largest plan within the budget; fewer columns rather than hardly any samples.

    Args:
        ctx: the network.
        columns: those that every sample has.
        per_sample: bytes that one sample takes whatever its columns.
        per_column: bytes that one column of one sample takes.
    """
    limits, asked, device = ctx.effort.limits, ctx.effort.memory, ctx.problem.device
    budget, width = allowed(limits.sweep_memory, device, asked), min(columns, limits.most_columns_together)
    if asked is None and device.type == "cpu":
        few = limits.few_samples * (per_sample + min(limits.few_columns_together, width) * per_column)
        budget = max(budget, int(min(limits.small_sweep, few)))
    while width > 1 and budget < limits.few_samples * (per_sample + width * per_column):
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
            refuse_out_of_time(ctx)
            stop = min(done + plan.samples, len(targets))
            numbers = torch.arange(start + done, start + stop, device=ctx.problem.device)
            found = fitted(lambda: work((slice_inputs(inputs, done, stop), targets[done:stop]), numbers, plan.columns))  # noqa: B023  called at once
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


def saved_bytes(run: Callable[[], object], ignored: set[int]) -> int | None:
    """Bytes that autograd keeps for the backward pass of what `run` computes; None inside torch.func, which hides it.

    Args:
        run: the forward pass.
        ignored: addresses of storages that are there anyway (parameters).
    """
    storages: dict[int, int] = {}

    def note(value: Tensor) -> Tensor:
        if value.layout != torch.strided:  # a sparse constant, which is there anyway
            return value
        storages[value.untyped_storage().data_ptr()] = value.untyped_storage().nbytes()
        return value

    try:
        with torch.autograd.graph.saved_tensors_hooks(note, lambda value: value):
            run()
    except RuntimeError as problem:
        if "saved tensor hooks" not in str(problem):
            raise
        return None
    return sum(size for address, size in storages.items() if address not in ignored)
