"""Several processes of `torch.distributed` that share one measurement: who takes which samples, and how sums meet.

Every reduction does nothing in a process that is alone, so the sweeps are written once for both.
"""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from types import FunctionType

import torch
import torch.distributed as dist
from torch import Tensor

from flatscope.errors import FlatscopeError, InputError

PATIENCE = timedelta(minutes=5)


def _let_torch_keep_no_group() -> None:
    """Functions of torch that took the process group as a default argument take the group of the call instead.

    `torch.func` loads their module at its first use, and a group that exists by then stays in these defaults after it
    was destroyed. Its threads then drop their tensors while the interpreter closes, which now and then aborts a rank
    whose work is done. A module loaded before there is a group has None there, the group of the call.
    """
    import torch.distributed.nn.functional as functions

    for function in vars(functions).values():
        if isinstance(function, FunctionType) and function.__defaults__:
            kept = (None if isinstance(default, dist.ProcessGroup) else default for default in function.__defaults__)
            function.__defaults__ = tuple(kept)


if dist.is_available():
    _let_torch_keep_no_group()


@dataclass(frozen=True)
class Ranks:
    """The processes that measure together, seen from one of them."""

    rank: int = 0  # number of this process
    size: int = 1  # number of processes; 1 where there is nobody to share with

    def share(self, n: int) -> tuple[int, int]:
        """First and last (excluded) of n samples that are this rank's: contiguous, sizes differ by at most one."""
        each, left = divmod(n, self.size)
        start = self.rank * each + min(self.rank, left)
        return start, start + each + (self.rank < left)

    def summed(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """The sums over ranks of float64 tensors, the same bits on every rank."""
        if self.size == 1 or not tensors:
            return list(tensors)
        flat = torch.cat([tensor.detach().double().reshape(-1).to(_device_of_exchange()) for tensor in tensors])
        with _exchange_between_ranks():
            dist.all_reduce(flat)
        parts = torch.split_with_sizes(flat, [tensor.numel() for tensor in tensors])
        return [part.reshape(tensor.shape).to(tensor.device) for part, tensor in zip(parts, tensors, strict=True)]

    def joined(self, rows: Tensor) -> Tensor:
        """Everybody's rows, one below the other in the order of the ranks, which is that of the data."""
        if self.size == 1:
            return rows
        lengths = self._everybodys(torch.tensor([len(rows)]))
        padded = rows.new_zeros((max(int(n) for n in lengths), *rows.shape[1:]))
        padded[: len(rows)] = rows
        shares = self._everybodys(padded)
        return torch.cat([part[: int(n)] for part, n in zip(shares, lengths, strict=True)]).to(rows.device)

    def anywhere(self, flag: bool) -> bool:
        """True if the condition holds on any rank."""
        return flag if self.size == 1 else any(bool(part) for part in self._everybodys(torch.tensor([flag]).long()))

    def agree(self, digest: bytes) -> bool:
        """True if every rank has the same bytes."""
        digests = self._everybodys(torch.frombuffer(bytearray(digest), dtype=torch.uint8)) if self.size > 1 else []
        return all(torch.equal(part, digests[0]) for part in digests)

    def _everybodys(self, tensor: Tensor) -> list[Tensor]:
        sent = tensor.contiguous().to(_device_of_exchange())
        received = [torch.empty_like(sent) for _ in range(self.size)]
        with _exchange_between_ranks():
            dist.all_gather(received, sent)
        return received


ALONE = Ranks()


@contextmanager
def _exchange_between_ranks() -> Iterator[None]:
    """Context of an exchange between all ranks; ends with an error where one is gone or waited for too long."""
    try:
        yield
    except RuntimeError as problem:
        lost = f"one that is gone or does not answer ({str(problem).splitlines()[0]})"
        where = f"rank {dist.get_rank()} of {dist.get_world_size()}"
        fix = "See what ended it (its own message, the memory of its machine), then start all of them again"
        raise FlatscopeError("every rank to stay until all are done", lost, where=where, fix=fix) from problem


def _device_of_exchange() -> torch.device:
    """Device on which tensors are sent: a GPU for NCCL, else the CPU."""
    return torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")


def present_ranks() -> Ranks:
    """The ranks of the process group that has been initialised; this process alone where there is none.

    Waits until all of them are here: one that never comes (only some ranks measure) is an error and not a wait forever.
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return ALONE
    if dist.get_backend() == "gloo":
        begun = time.monotonic()
        try:
            dist.monitored_barrier(timeout=PATIENCE)
        except RuntimeError as problem:
            said = str(problem).splitlines()[0]
            if time.monotonic() - begun < PATIENCE.total_seconds():
                got = f"a rank that ended before ({said})"
                fix = "See what it said: no data, another file, too little memory"
            else:
                got = f"a rank that did not come within {PATIENCE} ({said})"
                fix = "Pass shard=False where only some of the ranks measure"
            raise InputError("every rank to make the same problem", got, "torch.distributed", fix) from problem
    return Ranks(dist.get_rank(), dist.get_world_size())


def launched() -> bool:
    """True if torchrun started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1 and "RANK" in os.environ


@contextmanager
def process_group(device: str | None = None) -> Iterator[str | None]:
    """The process group of the ranks that torchrun started, for the block; yields the device of this rank.

    Without torchrun, or where a group is there already, nothing happens and the device is the given one.

    Args:
        device: as the user named it; a GPU without a number is the one with this process's number.
    """
    if not launched() or dist.is_initialized():
        yield device
        return
    group_device = device
    if device == "cuda":
        group_device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0')) % max(1, torch.cuda.device_count())}"
    on_gpu = group_device is not None and group_device.startswith("cuda")
    # NCCL refuses two ranks on one GPU.
    crowded = int(os.environ.get("LOCAL_WORLD_SIZE", "1")) > torch.cuda.device_count()
    if on_gpu:
        torch.cuda.set_device(group_device)
    dist.init_process_group("nccl" if on_gpu and not crowded and dist.is_nccl_available() else "gloo")
    try:
        with warnings.catch_warnings():
            if dist.get_rank():
                warnings.simplefilter("ignore")  # the first rank says it for all
            yield group_device
        with _exchange_between_ranks():
            dist.barrier()  # nobody hangs up while another still listens
    finally:
        dist.destroy_process_group()
