"""Random signs that belong to a sample: the same whatever the batches, the number of ranks and the device.

A counter-based generator: every 64 signs are the bits of a hash of (seed and stream, sample, draw, place), so any part
can be made alone, where it is needed, without running through the others.
"""

from __future__ import annotations

import hashlib

import torch
from torch import Tensor

# Multipliers of the finaliser of MurmurHash3 and the golden ratio, as signed 64-bit numbers (products wrap around).
_FIRST, _SECOND, _STEP = -0xAE502812AA7333, -0x3B314601E57A13AD, -0x61C8864680B583EB


class Signs:
    """Signs of one random stream.

    Args:
        seed: the context's.
        stream: name of the stream.
    """

    def __init__(self, seed: int, stream: str) -> None:
        digest = hashlib.blake2b(f"{seed}/{stream}".encode(), digest_size=8).digest()
        self._key = int.from_bytes(digest, "big", signed=True)

    def draw(self, samples: Tensor, draws: range, size: int, dtype: torch.dtype) -> Tensor:
        """Signs ±1 of shape (draws, samples, size) on the device of `samples`.

        Args:
            samples: numbers of the samples in the order of the data, (n,).
            draws: numbers of the draws.
            size: signs of one sample in one draw.
            dtype: of the result.
        """
        words = -(-size // 64)
        sample = _mixed(samples.long() * _STEP + self._key)  # (n,)
        draw = torch.arange(draws.start, draws.stop, device=samples.device)[:, None]
        state = _mixed(sample + _mixed(draw * _STEP + 1))  # (k, n)
        place = torch.arange(words, device=samples.device) * _STEP
        hashed = _mixed(state[:, :, None] + place)  # (k, n, words)
        octets = hashed.contiguous().view(torch.uint8)  # (k, n, 8 words)
        shifts = torch.arange(8, dtype=torch.uint8, device=samples.device)
        bits = (octets[..., None] >> shifts) & 1  # (k, n, 8 words, 8)
        return bits.flatten(2)[..., :size].to(dtype).mul_(2).sub_(1)


def _mixed(values: Tensor) -> Tensor:
    """A bijection of 64-bit numbers in which every bit of the result hangs on every bit of the argument."""
    for factor in (_FIRST, _SECOND):
        values = (values ^ _shifted(values, 33)) * factor
    return values ^ _shifted(values, 33)


def _shifted(values: Tensor, by: int) -> Tensor:
    """Right shift that fills with zeros; torch's own copies the sign."""
    return (values >> by) & ((1 << (64 - by)) - 1)
