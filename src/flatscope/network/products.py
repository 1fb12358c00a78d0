"""Every way to multiply with a weight, as one of four calls: `linear`, a convolution, its transpose, or a lookup."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.errors import NotApplicable
from flatscope.network.interception import LAYER_CALLS, NORM_ORDER, Operation

# Normalisations with a scale of their own, and their arguments in order.
AFFINE_NORMS = {
    "layer_norm": ("input", "normalized_shape", "weight", "bias", "eps"),
    "rms_norm": ("input", "normalized_shape", "weight", "eps"),
}
LOOKUPS = ("embedding", "getitem", "index_select")
PRODUCTS = frozenset((*LAYER_CALLS, "matmul", *LOOKUPS))


def per_axis(value: Any, axes: int) -> list[int]:
    """A setting of a convolution or pool for each axis, given once for all or one by one."""
    values = list(value) if isinstance(value, tuple | list) else [value]
    return [int(size) for size in values] * (axes if len(values) == 1 else 1)


def norm_as_affine(op: Operation) -> tuple[Tensor, Tensor] | None:
    """Scale and shift per channel, float64, of a BatchNorm in eval mode; None where it has no running statistics."""
    given = op.named(*NORM_ORDER)
    mean, variance, weight, bias = (given.get(name) for name in NORM_ORDER[1:5])
    if given.get("training") or mean is None or variance is None:
        return None
    scale = (variance.double() + given.get("eps", 1e-5)).rsqrt()
    scale = scale if weight is None else scale * weight.double()
    shift = -mean.double() * scale
    return scale, shift if bias is None else shift + bias.double()


def terms_of(op: Operation) -> list[tuple[Any, float]]:
    """The two terms of a sum or difference, each with the absolute value of its factor."""
    given = op.named("input", "other", "too much")
    factor = abs(float(given.get("alpha", 1)))
    backwards = getattr(op.function, "__name__", "") == "rsub"  # other - alpha * input
    if "too much" in given:  # an old form, with the factor in the middle
        raise NotApplicable("a factor by name, as in torch.add(x, y, alpha=2)", where=op.place)
    return [(given["input"], factor if backwards else 1.0), (given["other"], 1.0 if backwards else factor)]


def negative_slope(op: Operation) -> Tensor:
    """Slope below zero of a leaky ReLU, float64: one number, or one for each channel."""
    if op.name == "prelu":
        given: Any = op.named("input", "weight")["weight"]
    elif op.name == "rrelu":
        bounds = {"lower": 1 / 8, "upper": 1 / 3} | op.named("input", "lower", "upper")
        given = (bounds["lower"] + bounds["upper"]) / 2  # in eval mode
    else:
        given = op.named("input", "negative_slope").get("negative_slope", 0.01)
    return torch.as_tensor(given, dtype=torch.float64)


_MASKED = "_flatscope_masked"


def masked(weight: Tensor, mask: Tensor, name: str) -> Tensor:
    """The weight that acts where a parameter of that name has a fixed mask of zeros and ones."""
    found = weight * mask
    setattr(found, _MASKED, name)
    return found


def masked_name(weight: Any) -> str | None:
    """Name of the parameter that is behind a weight with a mask; None for any other weight."""
    return getattr(weight, _MASKED, None)


@dataclass(frozen=True)
class Product:
    """A product of a signal with a weight."""

    signal: Tensor  # what is multiplied
    origin: Tensor  # the weight as the network has it
    weight: Tensor  # as the canonical call takes it: (out, in), (out, in / groups, taps) or (in, out / groups, taps)
    bias: Tensor | None  # what the call adds, if anything
    run: Callable[[Tensor, Tensor | None], Tensor]  # the product with another weight and bias of these shapes


Question = Callable[[Any], bool]


def as_product(op: Operation, is_weight: Question, is_signal: Question) -> Product | None:
    """The operation as a product of a signal with a weight; None where it is none.

    Args:
        op: any operation.
        is_weight: whether a tensor is made of parameters, and of constants at most besides.
        is_signal: whether a tensor depends on the input.
    """
    if any(tensor.is_complex() for tensor in op.tensors):
        return None  # layers, and what is measured of them, are real
    if op.name == "matmul":
        left, right = (op.named("input", "other").get(name) for name in ("input", "other"))
        if not isinstance(left, Tensor) or not isinstance(right, Tensor) or "out" in op.kwargs:
            return None
        if is_weight(right) and is_signal(left):
            return replace(_from_the_right(left, right), origin=right)
        if is_weight(left) and is_signal(right):
            return replace(_from_the_left(left, right), origin=left)
        return None
    if op.name in ("getitem", "index_select"):
        return _lookup(op, is_weight, is_signal)
    if op.name not in LAYER_CALLS:
        return None
    given = op.layer_arguments()
    signal, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    if not is_weight(weight) or not (is_signal(signal) or op.name == "embedding"):
        return None
    if op.name == "embedding":
        return Product(signal, weight, weight, None, lambda w, b: functional.embedding(signal, w, **given))
    return Product(signal, weight, weight, bias, lambda w, b: op.function(signal, w, b, **given))


def _lookup(op: Operation, is_weight: Question, is_signal: Question) -> Product | None:
    """`table[index]` with a tensor of whole numbers that is a signal."""
    table, index = op.args[0], op.args[-1]
    rows = op.name == "getitem" or (len(op.args) == 3 and op.args[1] == 0)
    whole = isinstance(index, Tensor) and index.dtype in (torch.int64, torch.int32) and is_signal(index)
    if not rows or not whole or not is_weight(table) or table.ndim != 2:
        return None
    return Product(index, table, table, None, lambda w, b: functional.embedding(index, w))


def _from_the_right(signal: Tensor, weight: Tensor) -> Product:
    """`signal @ weight`."""
    while weight.ndim > 2 and (weight.shape[0] == 1 or weight.stride(0) == 0) and signal.ndim >= weight.ndim:
        weight = weight[0]
    if weight.ndim > 2:
        return _grouped(signal, weight)
    if weight.ndim == 1:
        return Product(signal, weight, weight[None], None, lambda w, b: functional.linear(signal, w).squeeze(-1))
    return Product(signal, weight, weight.transpose(0, 1), None, lambda w, b: functional.linear(signal, w))


def _from_the_left(weight: Tensor, signal: Tensor) -> Product:
    """`weight @ signal`: the transpose of the product from the right."""
    if signal.ndim == 1 and weight.ndim == 2:
        return Product(signal, weight, weight, None, lambda w, b: functional.linear(signal, w))
    flipped = signal if signal.ndim == 1 else signal.transpose(-2, -1)
    if weight.ndim == 1:
        return _from_the_right(flipped, weight)
    turned = _from_the_right(flipped, weight.transpose(-2, -1))
    if signal.ndim == 1:
        return turned
    return Product(turned.signal, weight, turned.weight, None, lambda w, b: turned.run(w, b).transpose(-2, -1))


def _grouped(signal: Tensor, weight: Tensor) -> Product:
    """A stack of matrices, one for each group of features: a grouped convolution of width 1.

    signal (*batch, *groups, rows, in), weight (*groups, in, out).
    """
    groups, (n_in, n_out) = weight.shape[:-2], weight.shape[-2:]
    n_groups, vector = math.prod(groups), signal.ndim == 1
    signal = signal[None] if vector else signal
    lead = len(groups)
    while signal.ndim < lead + 2:
        signal = signal[None]
    batch, rows = signal.shape[: signal.ndim - lead - 2], signal.shape[-2]
    spread = signal.expand(*batch, *groups, rows, n_in)
    packed = weight.transpose(-2, -1).reshape(n_groups * n_out, n_in, 1)

    def run(w: Tensor, b: Tensor | None) -> Tensor:
        columns = spread.transpose(-2, -1).reshape(math.prod(batch), n_groups * n_in, rows)
        found = functional.conv1d(columns, w, groups=n_groups).reshape(*batch, *groups, n_out, rows)
        found = found.transpose(-2, -1)
        return found.squeeze(-2) if vector else found

    return Product(spread, weight, packed, None, run)
