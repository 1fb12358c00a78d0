"""Uses of operations with the options that are seldom given: factors, slopes, ceilings, divisors, axes by name."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from operation_examples import MASK, VECTOR, WEIGHT, Use, one
from torch.nn import functional

PAIR = ((4,), (4,))
HIGH = torch.tensor([0.5, 1.0, 1.5, 0.25], dtype=torch.float64)  # on the grid of the numbers that are drawn
LOW = -HIGH
MATRIX = torch.tensor([[0.6, -1.1], [0.3, 0.8]], dtype=torch.float64)
KERNEL = torch.linspace(-1, 1.3, 12, dtype=torch.float64).reshape(2, 2, 3)
NARROW = torch.linspace(-1, 1.3, 6, dtype=torch.float64).reshape(2, 1, 3)


def _sums() -> dict[str, list[Use]]:
    found = dict[str, list[Use]]()
    for name in ("add", "sub", "rsub"):
        function = getattr(torch, name)
        found[name] = [
            *one(partial(function, other=2.0, alpha=3) if name == "rsub" else lambda x, f=function: f(x, 2.0, alpha=3)),
            Use(lambda x, y, f=function: f(x, y, alpha=3), PAIR),
            Use(lambda x, y, f=function: f(x, y, alpha=-0.5), PAIR),
            Use(lambda x, w, f=function: f(x, w, alpha=3), weight=VECTOR),
            Use(lambda x, w, f=function: f(w, x, alpha=3), weight=VECTOR),
            Use(lambda x, y, f=function: f(input=x, other=y, alpha=3), PAIR),
        ]
    found["add"] += [
        Use(lambda x, y: torch.add(x, 3, y), PAIR),
        Use(lambda x, w: x.clone().add_(w, alpha=3), weight=VECTOR),
        Use(lambda x, y: x.clone().add_(y, alpha=3), PAIR),
        *one(lambda x: x.sum(1, keepdim=True) + VECTOR),
        Use(lambda x, y: x + y, ((4, 1), (4, 2))),
    ]
    found["sub"] += [*one(lambda x: 2.0 - x)]
    return found


def _products() -> dict[str, list[Use]]:
    return {
        "mul": [
            *one(lambda x: 2 * x),
            *one(lambda x: x.sum(1, keepdim=True) * VECTOR),
            Use(lambda x, w: x.clone().mul_(w), weight=VECTOR),
            *one(lambda x: torch.mul(input=x, other=-3.0)),
            *one(lambda x: x * MASK),
        ],
        "div": [
            *one(lambda x: x / 0.25),
            *one(lambda x: torch.div(x, 0.25, rounding_mode="floor")),
            *one(lambda x: torch.div(x, 0.25, rounding_mode="trunc")),
            *one(lambda x: torch.div(input=x, other=-0.5, rounding_mode=None)),
            Use(lambda x, w: w / x, weight=VECTOR),
            Use(lambda x, y: x / y, PAIR),
            *one(lambda x: x.clone().div_(-0.5)),
        ],
        "matmul": [
            *one(lambda x: torch.matmul(VECTOR, x), 4, 2),
            *one(lambda x: torch.matmul(x, VECTOR), 2, 4),
            *one(lambda x: torch.matmul(MATRIX, x), 3, 2, 4),
            *one(lambda x: torch.matmul(x, MATRIX.expand(3, 2, 2)), 3, 2, 2),
        ],
        "linear": [
            Use(lambda x, w: functional.linear(x, w), ((2, 4),), WEIGHT),
            *one(lambda x: functional.linear(bias=VECTOR[:3], weight=WEIGHT, input=x)),
            *one(lambda x: functional.linear(WEIGHT.expand(len(x), 3, 4), x[0])),
        ],
    }


def _convolutions() -> dict[str, list[Use]]:
    def conv(**options: Any) -> list[Use]:
        return one(lambda x: functional.conv1d(x, KERNEL, VECTOR[:2], **options), 2, 6)

    def back(**options: Any) -> list[Use]:
        return one(lambda x: functional.conv_transpose1d(x, KERNEL, VECTOR[:2], **options), 2, 3)

    grouped = partial(functional.conv1d, weight=NARROW, groups=2)
    return {
        "conv1d": [
            *conv(stride=2),
            *conv(padding=2),
            *conv(padding="same"),
            *conv(padding="valid"),
            *conv(dilation=2),
            *conv(stride=2, padding=1, dilation=2),
            *one(lambda x: grouped(x, padding=1), 2, 4),
            *one(lambda x: torch.stack([functional.conv1d(one, KERNEL, padding=1) for one in x]), 2, 4),
        ],
        "conv_transpose1d": [
            *back(stride=2),
            *back(padding=1),
            *back(output_padding=1, stride=2),
            *back(dilation=2),
            *one(lambda x: functional.conv_transpose1d(x, NARROW, groups=2), 2, 3),
        ],
    }


def _pools() -> dict[str, list[Use]]:
    def most(shape: tuple[int, ...], *args: Any, **options: Any) -> list[Use]:
        return one(lambda x: functional.max_pool1d(x, *args, **options), *shape)

    def mean(shape: tuple[int, ...], *args: Any, **options: Any) -> list[Use]:
        return one(lambda x: functional.avg_pool1d(x, *args, **options), *shape)

    flat, line = (1, 2, 3), (2, 5)
    return {
        "max_pool1d": [
            *most(line, 3),
            *most(line, 3, 1),
            *most(line, 3, 2, 1),
            *most(line, 2, 1, 0, 2),
            *most(line, 2, ceil_mode=True),
            *most(line, 3, 2, 1, 2, True),
            *most(line, kernel_size=3, stride=2, padding=1),
        ],
        "max_pool1d_with_indices": one(lambda x: functional.max_pool1d(x, 3, 2, 1, 1, True, True)[0], *line),
        "max_pool2d": [
            *one(lambda x: functional.max_pool2d(x, (2, 1), (1, 2)), *flat),
            *one(lambda x: functional.max_pool2d(x, 2, 1, padding=1, ceil_mode=True), *flat),
            *one(lambda x: functional.max_pool2d(x, [2, 3], stride=[1, 1]), *flat),
        ],
        "adaptive_max_pool1d": [
            *one(lambda x: functional.adaptive_max_pool1d(x, 3), *line),
            *one(lambda x: functional.adaptive_max_pool1d(x, 2), *line),
        ],
        "adaptive_max_pool2d": one(lambda x: functional.adaptive_max_pool2d(x, (None, 2)), *flat),
        "avg_pool1d": [
            *mean(line, 3),
            *mean(line, 3, 1),
            *mean(line, 3, 2, 1),
            *mean(line, 3, 2, 1, False, False),
            *mean(line, 2, ceil_mode=True),
            *mean(line, 3, 2, 1, True, False),
            *mean(line, 3, 2, 1, True, True),
            *mean(line, 3, count_include_pad=False, padding=1),
        ],
        "avg_pool2d": [
            *one(lambda x: functional.avg_pool2d(x, 2, 1, divisor_override=3), *flat),
            *one(lambda x: functional.avg_pool2d(x, 2, 1, 1, True, False), *flat),
            *one(lambda x: functional.avg_pool2d(x, 2, 2, 1, ceil_mode=True, divisor_override=1), *flat),
            *one(lambda x: functional.avg_pool2d(x, (1, 2), stride=(1, 1), padding=(0, 1)), *flat),
        ],
        "adaptive_avg_pool1d": one(lambda x: functional.adaptive_avg_pool1d(x, 3), *line),
        "adaptive_avg_pool2d": one(lambda x: functional.adaptive_avg_pool2d(x, (None, 2)), *flat),
        "interpolate": [
            *one(lambda x: functional.interpolate(x, size=3), *line),
            *one(lambda x: functional.interpolate(x, 7, mode="linear", align_corners=True), *line),
            *one(lambda x: functional.interpolate(x, size=3, mode="linear"), *line),
            *one(lambda x: functional.interpolate(x, size=3, mode="area"), *line),
            *one(lambda x: functional.interpolate(x, size=7, mode="nearest-exact"), *line),
            *one(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), *flat),
            *one(lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"), *flat),
            *one(lambda x: functional.interpolate(x, scale_factor=0.5, mode="bilinear", antialias=True), 1, 4, 4),
            *one(
                lambda x: functional.interpolate(x, scale_factor=1.7, recompute_scale_factor=True, mode="linear"), *line
            ),
        ],
    }


def _entries() -> dict[str, list[Use]]:
    return {
        "leaky_relu": [
            *one(lambda x: functional.leaky_relu(x, negative_slope=2.5)),
            *one(functional.leaky_relu),
            *one(lambda x: functional.leaky_relu(x.clone(), 2.5, True)),
        ],
        "rrelu": [
            *one(lambda x: functional.rrelu(x, 2.0, 4.0)),
            *one(functional.rrelu),
            *one(lambda x: functional.rrelu(x, lower=-3.0, upper=1.0)),
            *one(lambda x: functional.rrelu(x.clone(), 2.0, 4.0, inplace=True)),
        ],
        "prelu": [Use(functional.prelu, ((4, 2),), 2 * VECTOR), Use(functional.prelu, ((4, 2),), VECTOR[1:2])],
        "relu": one(lambda x: functional.relu(x.clone(), inplace=True)),
        "hardtanh": [
            *one(lambda x: functional.hardtanh(x, -2.0, 0.5)),
            *one(lambda x: functional.hardtanh(x, 0.0, 2.0)),
        ],
        "relu6": one(lambda x: functional.relu6(x.clone(), True)),
        "threshold": [
            *one(lambda x: functional.threshold(x, 1.0, 1.0)),
            *one(lambda x: functional.threshold(x, 0.0, -1.0)),
            *one(lambda x: functional.threshold(x, 1.0, 0.0)),
        ],
        "softplus": [
            *one(lambda x: functional.softplus(x, 4.0)),
            *one(lambda x: functional.softplus(x, beta=0.25)),
            *one(lambda x: functional.softplus(x, beta=-2.0)),
        ],
        "gelu": one(lambda x: functional.gelu(x, approximate="tanh")),
        "elu": one(lambda x: functional.elu(x, alpha=3.0)),
        "celu": one(lambda x: functional.celu(x, alpha=3.0)),
        "clamp": [
            *one(lambda x: x.clamp(LOW, HIGH)),
            *one(lambda x: torch.clamp(x, max=HIGH)),
            *one(lambda x: torch.clamp(x, min=0)),
            *one(lambda x: x.clip(-1, None)),
            Use(lambda x, y: torch.clamp(x, min=y), PAIR),
            *one(lambda x: torch.clamp(LOW.expand_as(x), min=x)),
        ],
        "clamp_min": [*one(lambda x: x.clamp_min(LOW)), Use(lambda x, y: torch.clamp_min(x, y), PAIR)],
        "softshrink": one(lambda x: functional.softshrink(x, 1.0)),
        "hardshrink": one(lambda x: functional.hardshrink(x, 1.0)),
        "masked_fill": [
            Use(lambda x, y: x.masked_fill(y > 0, 0.0), PAIR),
            *one(lambda x: x.masked_fill(x > 1, 0.0)),
            *one(lambda x: x.masked_fill(MASK, torch.tensor(1.5, dtype=torch.float64))),
            *one(lambda x: x.masked_fill(MASK, x.sum())),
            *one(lambda x: x[:, :1].masked_fill(MASK, 0.0)),
        ],
        "pad": [
            *one(lambda x: functional.pad(x, (2, 1), mode="reflect"), 2, 4),
            *one(lambda x: functional.pad(x, (2, 1), "circular"), 2, 4),
            *one(lambda x: functional.pad(x, (2, 1), mode="replicate"), 2, 4),
            *one(lambda x: functional.pad(x, (-1, 1), value=0.5), 2, 4),
        ],
        "dropout": one(lambda x: functional.dropout(x, 0.5, training=False)),
        "to": [
            *one(lambda x: x.to(torch.int64).double()),
            *one(lambda x: x.to(torch.bool)),
            *one(lambda x: x.to(VECTOR)),
        ],
        "type": one(lambda x: x.type(torch.int64).double()),
        "type_as": one(lambda x: x.type_as(MASK).double()),
        "float": one(lambda x: (4 * x).float().double()),
    }


def _along_axes() -> dict[str, list[Use]]:
    found = {
        "sum": [
            *one(lambda x: x.sum((1, 2)), 2, 3),
            *one(lambda x: x.sum(-1, keepdim=True), 2, 3),
            *one(lambda x: torch.sum(x, dim=[1], keepdim=True), 2, 3),
            *one(lambda x: torch.sum(x, axis=1), 2, 3),
            *one(lambda x: x.flatten(1).sum(dim=1, dtype=torch.float64), 2, 3),
        ],
        "mean": [
            *one(lambda x: x.mean((1, 2)), 2, 3),
            *one(lambda x: x.mean(-1, True), 2, 3),
            *one(lambda x: torch.mean(x, axis=1), 2, 3),
            *one(lambda x: torch.mean(x, dim=(1, 2), keepdim=True), 2, 3),
        ],
        "amax": [*one(lambda x: x.amax((1, 2)), 2, 3), *one(lambda x: x.amax(1, keepdim=True), 2, 3)],
        "amin": one(lambda x: x.amin(dim=(1, 2), keepdim=True), 2, 3),
        "max": [
            *one(lambda x: x.max(1, keepdim=True).values, 2, 3),
            *one(lambda x: torch.max(x, dim=2)[0], 2, 3),
            Use(torch.max, PAIR),
            *one(lambda x: torch.max(x, torch.zeros(4).double())),
            *one(lambda x: x.gather(1, x.max(1, keepdim=True).indices), 4),
        ],
        "min": [
            *one(lambda x: torch.min(x, torch.zeros(4).double())),
            *one(lambda x: torch.min(x, dim=1, keepdim=True)[0], 2, 3),
        ],
        "maximum": [
            *one(lambda x: torch.maximum(x, x.flip(1))),
            Use(torch.maximum, ((4, 1), (4, 2))),
            *one(lambda x: torch.maximum(x.sum(1, keepdim=True), torch.zeros(4).double())),
        ],
    }
    found["minimum"] = [*one(lambda x: torch.minimum(x, torch.zeros_like(x)))]
    return found


def _moved() -> dict[str, list[Use]]:
    fold = torch.tensor([0, 0, 0, 1])
    return {
        "cat": [
            *one(lambda x: torch.cat([x, x, x], 1)),
            Use(lambda x, w: torch.cat([x, w.expand_as(x)], 1), weight=VECTOR),
            *one(lambda x: torch.cat((x, x.flip(1)), dim=-1)),
        ],
        "stack": one(lambda x: torch.stack([x, -x, x], dim=1)),
        "index_select": one(lambda x: torch.index_select(x, 1, fold)),
        "getitem": [
            *one(lambda x: x[:, fold]),
            *one(lambda x: x[:, None, ::2]),
            *one(lambda x: x[:, MASK]),
            *one(lambda x: x[..., -1]),
        ],
        "gather": one(lambda x: x.gather(1, fold.expand(len(x), -1))),
        "repeat": one(lambda x: x.repeat(1, 3)),
        "unfold": one(lambda x: x.unfold(1, 3, 1)),
        "expand": one(lambda x: x[:, :, None].expand(-1, -1, 5)),
        "tril": one(lambda x: x.tril(-1), 3, 3),
        "diagonal": one(lambda x: x.diagonal(1, dim1=1, dim2=2), 3, 3),
        "roll": one(lambda x: torch.roll(x, shifts=(1, -1), dims=(1, 2)), 2, 3),
    }


def _written_out() -> dict[str, list[Use]]:
    """Operations that are no entries of the table, and compositions that people write by hand."""
    return {
        "addmm": [Use(lambda x, y: torch.addmm(x, y, WEIGHT[:2, :2].contiguous(), beta=3, alpha=-2), ((2,), (2,)))],
        "baddbmm": one(lambda x: torch.baddbmm(x, x, MATRIX.expand(len(x), 2, 2), beta=0.5, alpha=3), 2, 2),
        "addcmul": [Use(lambda x, y: torch.addcmul(x, y, VECTOR, value=3), PAIR)],
        "addcdiv": [Use(lambda x, y: torch.addcdiv(x, y, VECTOR, value=3), PAIR)],
        "lerp": [
            Use(lambda x, y: torch.lerp(x, y, 3.0), PAIR),
            *one(lambda x: torch.lerp(x, VECTOR.expand_as(x), 0.25)),
        ],
        "cumsum": one(lambda x: x.cumsum(1)),
        "bilinear": one(lambda x: functional.bilinear(x, x, torch.ones(2, 4, 4, dtype=torch.float64))),
        "glu": one(functional.glu),
        "sort": one(lambda x: x.sort(1).values),
        "topk": one(lambda x: x.topk(2, 1)[0]),
        "round": one(torch.round),
        "floor": one(torch.floor),
        "fold": one(lambda x: functional.fold(x, (3, 3), 2), 4, 4),
        "upsample": one(lambda x: functional.upsample(x, scale_factor=2), 2, 3),
        "normalize": one(functional.normalize),
        "var": one(lambda x: x.var(1)),
        "logsumexp": one(lambda x: x.logsumexp(1)),
        "searchsorted": one(lambda x: VECTOR[torch.searchsorted(HIGH.sort().values, x).clamp(max=3)]),
        "bucketize": one(lambda x: VECTOR[torch.bucketize(x, HIGH.sort().values).clamp(max=3)]),
        "heaviside": one(lambda x: torch.heaviside(x, VECTOR)),
        "frac": one(torch.frac),
        "remainder": one(lambda x: x % 1.0),
        "floor_divide": one(lambda x: x // 0.5),
        "int": one(lambda x: (4 * x).int() / 4),
        "hardsigmoid": one(functional.hardsigmoid),
        "hardswish": one(functional.hardswish),
    }


OPTIONS: dict[str, list[Use]] = {}
for family in (_sums, _products, _convolutions, _pools, _entries, _along_axes, _moved, _written_out):
    for name, uses in family().items():
        OPTIONS[name] = OPTIONS.get(name, []) + uses
