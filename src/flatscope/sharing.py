"""Ranks that share one problem: the same samples in the same order, the same weights, enough work for all."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from typing import Literal

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.ranks import ALONE, Ranks, present_ranks
from flatscope.sample_digests import order_digest
from flatscope.samples import Samples


def agreeing_ranks(shard: Literal["auto", False], parts: Sequence[Samples], weights: Iterable[Tensor]) -> Ranks:
    """The ranks that take shares of each pass; refused where their data or weights differ.

    Args:
        shard: "auto" for all ranks of `torch.distributed`, False for this process alone.
        parts: the sets of samples.
        weights: parameters and buffers.
    """
    if shard not in ("auto", False):
        raise InputError('"auto" or False', repr(shard), where="shard")
    ranks = present_ranks() if shard == "auto" else ALONE
    if ranks.size == 1:
        return ranks
    for samples in parts:
        first, second = order_digest(samples), order_digest(samples)
        if ranks.anywhere(first != second):
            raise _unequal_ranks_error(samples.where, "order on each pass")
        if not ranks.agree(first):
            raise _unequal_ranks_error(samples.where, "set or order of samples")
        if samples.n < ranks.size:
            expected, fix = f"at least as many samples as ranks ({ranks.size})", "Start fewer, or pass shard=False"
            raise InputError(expected, f"{samples.n}", samples.where, fix)
    digest = hashlib.blake2b(digest_size=16)
    for value in weights:
        digest.update(value.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    if not ranks.agree(digest.digest()):
        raise _unequal_ranks_error("model", "set of weights")
    return ranks


def _unequal_ranks_error(where: str, what: str) -> InputError:
    fix = "Read the data without shuffling and load the same weights on every rank, or pass shard=False"
    return InputError("ranks that measure the same problem", f"another {what}", where=where, fix=fix)
