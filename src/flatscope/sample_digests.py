"""Checksums of samples: whether they change from pass to pass, and which of two sets are the same."""

from __future__ import annotations

import hashlib

import numpy as np
import torch
from torch import Tensor

from flatscope.samples import PROBED_SAMPLES, Inputs, Samples, tensors_of_inputs


def order_digest(samples: Samples) -> bytes:
    """A hash of the first samples in the order of one pass: another one where a loader shuffles."""
    checksum, n = hashlib.blake2b(str(samples.n).encode(), digest_size=16), 0
    for inputs, targets in samples.batches():
        for part in (*tensors_of_inputs(inputs), targets):
            checksum.update(b"".join(_rows_of_bytes(part[: PROBED_SAMPLES - n])))
        n += len(targets)
        if n >= PROBED_SAMPLES:
            break
    return checksum.digest()


def contents(samples: Samples) -> tuple[int, ...]:
    """The sum of the bits of every tensor that is held: other numbers where one was written to."""
    return tuple(_sum_of_bits(part.detach()) for part in samples.held)


def _sum_of_bits(part: Tensor) -> int:
    parts = torch.view_as_real(part) if part.is_complex() else part
    bits = parts.contiguous().reshape(-1).view(torch.uint8)
    words = bits.view(torch.int64) if len(bits) % 8 == 0 else bits
    return int(words.sum()) if words.device.type != "cpu" else int(np.sum(words.numpy(), dtype=np.int64))


def input_digests(inputs: Inputs) -> list[bytes]:
    """A hash of the inputs of every sample."""
    columns = [_rows_of_bytes(part) for part in tensors_of_inputs(inputs)]
    return [hashlib.blake2b(b"".join(row), digest_size=16).digest() for row in zip(*columns, strict=True)]


def sample_fingerprints(samples: Samples, most: int) -> list[bytes]:
    """Sorted hashes of the first `most` samples of one pass."""
    fingerprints: list[bytes] = []
    for inputs, targets in samples.batches():
        columns = [_rows_of_bytes(part) for part in (*tensors_of_inputs(inputs), targets)]
        fingerprints.extend(
            hashlib.blake2b(b"".join(row), digest_size=16).digest() for row in zip(*columns, strict=True)
        )
        if len(fingerprints) >= most:
            break
    return sorted(fingerprints[:most])


def _rows_of_bytes(part: Tensor) -> list[bytes]:
    flat = part.detach().cpu().contiguous().reshape(len(part), -1)
    return [row.numpy().tobytes() for row in flat.view(torch.uint8)] if flat.shape[1] else [b""] * len(part)
