"""Changes of one layer's weight: rounding to some bits, pruning to some share of zeros.

Rounding is symmetric and to the nearest of 2ᵇ − 1 levels, −(2ᵇ⁻¹ − 1) to 2ᵇ⁻¹ − 1 times a scale; the scale is the
largest absolute value of an output row, of the whole weight, or of a group of inputs of a row, over 2ᵇ⁻¹ − 1. Zero
stays zero. Weights only: biases, normalisations and activations are not rounded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.network.layers import Layer

LEAST_BITS, MOST_BITS = 2, 16  # one bit has no positive level


@dataclass(frozen=True)
class Change:
    """Change of a weight: rounded to so many bits, or pruned."""

    what: str  # "4 bits", "50 % pruned", "50 % pruned by OBD"
    bits: int | None = None  # of every weight afterwards; None where it is pruned
    sparsity: float = 0.0  # share of the weights that is set to zero
    by_curvature: bool = False  # whether those of smallest ½ h w² are pruned, and not those of smallest |w|


@dataclass(frozen=True)
class Rounding:
    """Which weights share a scale: "channel" (an output row), "tensor" (all), "group:128" (128 inputs of a row)."""

    name: str
    group: int = 0  # weights of a row that share a scale; 0 for a whole row

    @classmethod
    def named(cls, name: object) -> Rounding:
        """The rounding of that name."""
        if isinstance(name, str):
            if name in ("channel", "tensor"):
                return cls(name)
            group = re.fullmatch(r"group:([1-9]\d{0,8})", name)
            if group:
                return cls(name, int(group[1]))
        raise InputError('"channel", "tensor" or "group:N" with a number N of weights', repr(name), where="rounding")

    def rounded(self, weight: Tensor, layer: Layer, bits: int) -> Tensor:
        """The weight on its grid of that many bits."""
        if self.name == "tensor":
            return _rounded_to_grid(weight.reshape(1, -1), bits).reshape(weight.shape)
        rows = output_rows(weight, layer)
        if not self.group:
            return from_output_rows(_rounded_to_grid(rows, bits), weight, layer)
        parts = [_rounded_to_grid(part, bits) for part in torch.split(rows, self.group, dim=1)]
        return from_output_rows(torch.cat(parts, dim=1), weight, layer)


def changes_asked_for(bits: Iterable[int], sparsity: Iterable[float]) -> tuple[Change, ...]:
    """The changes that are asked for: every number of bits, every sparsity by size and by OBD."""
    changes = [Change(f"{b} bits", bits=b) for b in checked_bits(bits)]
    for share in checked_shares(sparsity):
        words = f"{100 * share:.4g} % pruned"
        changes += [Change(words, sparsity=share), Change(f"{words} by OBD", sparsity=share, by_curvature=True)]
    if not changes:
        raise InputError("bits or sparsity", "neither", where="sensitivity", fix="bits=(8, 4), or sparsity=(0.5,)")
    return tuple(changes)


def checked_bits(bits: Any) -> tuple[int, ...]:
    """Numbers of bits, each once."""
    given = _one_or_several(bits, "bits")
    for b in given:
        if isinstance(b, bool) or not isinstance(b, int) or not LEAST_BITS <= b <= MOST_BITS:
            raise InputError(f"whole numbers of bits from {LEAST_BITS} to {MOST_BITS}", repr(b), where="bits")
    return tuple(dict.fromkeys(given))


def checked_shares(sparsity: Any) -> tuple[float, ...]:
    """Shares of zeros, each once."""
    given = _one_or_several(sparsity, "sparsity")
    for share in given:
        if isinstance(share, bool) or not isinstance(share, Real) or not 0 < float(share) <= 1:
            fix = "0.5 sets half of the weights to zero"
            raise InputError("shares of the weights above 0 and up to 1", repr(share), where="sparsity", fix=fix)
    return tuple(dict.fromkeys(float(share) for share in given))


def _one_or_several(given: Any, where: str) -> tuple[Any, ...]:
    if isinstance(given, Real):
        return (given,)
    if not isinstance(given, Iterable) or isinstance(given, str):
        raise InputError("numbers", repr(given), where, "() for none of them")
    return tuple(given)


def output_rows(weight: Tensor, layer: Layer) -> Tensor:
    """The weight as a matrix with one row per output channel; of a table, one per entry."""
    if layer.kind != "transposed":
        return weight.reshape(len(weight), -1)
    groups, taps = layer.groups, weight.shape[2:]
    blocks = weight.reshape(groups, len(weight) // groups, weight.shape[1], *taps).transpose(1, 2)
    return blocks.reshape(groups * weight.shape[1], -1)


def from_output_rows(rows: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    """The inverse of `output_rows`."""
    if layer.kind != "transposed":
        return rows.reshape(weight.shape)
    groups, taps = layer.groups, weight.shape[2:]
    blocks = rows.reshape(groups, weight.shape[1], len(weight) // groups, *taps).transpose(1, 2)
    return blocks.reshape(weight.shape)


def _rounded_to_grid(rows: Tensor, bits: int) -> Tensor:
    """Every row on the grid whose ends are its largest absolute value."""
    levels = 2 ** (bits - 1) - 1
    scale = rows.abs().amax(1, keepdim=True) / levels
    usable = scale > 0  # a row of zeros has no grid, nor one of numbers so small that its step is none
    steps = (rows / torch.where(usable, scale, 1.0)).round().clamp(-levels, levels)
    return torch.where(usable, steps * scale, rows)


def pruned_weight(weight: Tensor, share: float, saliency: Tensor) -> Tensor:
    """The weight with that share of its entries, those of least saliency, set to zero."""
    count = round(share * weight.numel())
    last = saliency.reshape(-1).argsort(stable=True)[:count]
    result = weight.detach().clone().reshape(-1)
    result[last] = 0
    return result.reshape(weight.shape)


def changed_weight(
    change: Change, weight: Tensor, layer: Layer, rounding: Rounding, diagonal: Callable[[], Tensor]
) -> Tensor:
    """The weight after the change; `diagonal` gives the Gauss-Newton diagonal where OBD needs it."""
    if change.bits is not None:
        return rounding.rounded(weight, layer, change.bits)
    saliency = 0.5 * diagonal().to(weight) * weight.square() if change.by_curvature else weight.abs()
    return pruned_weight(weight, change.sparsity, saliency)
