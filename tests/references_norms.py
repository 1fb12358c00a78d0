"""Naive twins of the norms: every edge of a network written out, every path walked one by one.

Path counts grow fast: only for the tiny networks. A twin gives {} where the measure has no value.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import networks
import numpy as np
from references import Dense, folded_weight, margin, twin
from torch import Tensor, nn

Edge = tuple[tuple[int, ...], tuple[int, ...], float]
Paths = np.ndarray  # of lists: the weight of every path that leads to an entry
Convolution = nn.modules.conv._ConvNd
BatchNorm = nn.modules.batchnorm._BatchNorm


def edges_of(module: nn.Module, weight: Tensor, shape: tuple[int, ...]) -> Iterator[Edge]:
    """(output entry, input entry, weight) for every connection of a layer on an input of that shape."""
    if not isinstance(module, Convolution):
        for place in itertools.product(*map(range, shape[:-1])):
            for o, i in itertools.product(range(weight.shape[0]), range(weight.shape[1])):
                yield (*place, o), (*place, i), float(weight[o, i])
        return
    n_out, per_group, *kernel = weight.shape
    sizes = output_sizes(module, shape)
    for o, position in itertools.product(range(n_out), itertools.product(*map(range, sizes))):
        first = o // (n_out // module.groups) * per_group
        for i, tap in itertools.product(range(per_group), itertools.product(*map(range, kernel))):
            read = tuple(
                p * s - pad + t * d
                for p, s, pad, t, d in zip(position, module.stride, module.padding, tap, module.dilation, strict=True)
            )
            if all(0 <= r < size for r, size in zip(read, shape[1:], strict=True)):
                yield (o, *position), (first + i, *read), float(weight[(o, i, *tap)])


def output_sizes(module: nn.Module, shape: tuple[int, ...]) -> list[int]:
    return [
        (size + 2 * pad - d * (k - 1) - 1) // s + 1
        for size, pad, d, k, s in zip(
            shape[1:], module.padding, module.dilation, module.kernel_size, module.stride, strict=True
        )
    ]


def empty(shape: tuple[int, ...]) -> Paths:
    paths = np.empty(shape, dtype=object)
    for index in np.ndindex(*shape):
        paths[index] = []
    return paths


def inputs_of(shape: tuple[int, ...]) -> Paths:
    paths = empty(shape)
    for index in np.ndindex(*shape):
        paths[index].append(1.0)
    return paths


def through_layer(module: nn.Module, weight: Tensor, bias: Tensor | None, paths: Paths) -> Paths:
    if isinstance(module, Convolution):
        result = empty((weight.shape[0], *output_sizes(module, paths.shape)))
    else:
        result = empty((*paths.shape[:-1], weight.shape[0]))
    for out, into, value in edges_of(module, weight, paths.shape):
        result[out] = result[out] + [value * path for path in paths[into]]
    if bias is not None:
        for index in np.ndindex(*result.shape):
            channel = index[0] if isinstance(module, Convolution) else index[-1]
            result[index] = [*result[index], float(bias[channel])]
    return result


def through_pool(module: nn.Module, paths: Paths, p: float, pooling: str) -> Paths:
    """Windows without padding. An average has edges 1/n; a maximum passes the window entry with the most, or all."""
    k, s = module.kernel_size, module.stride
    sizes = [(size - k) // s + 1 for size in paths.shape[1:]]
    result = empty((paths.shape[0], *sizes))
    for index in np.ndindex(*result.shape):
        window = [
            paths[(index[0], *(i * s + t for i, t in zip(index[1:], taps, strict=True)))]
            for taps in itertools.product(range(k), repeat=len(sizes))
        ]
        if isinstance(module, nn.AvgPool1d | nn.AvgPool2d):
            result[index] = [path / len(window) for entry in window for path in entry]
        elif pooling == "sum":
            result[index] = [path for entry in window for path in entry]
        else:
            result[index] = max(window, key=lambda entry: power_sum(entry, p))
    return result


def power_sum(paths: list[float], p: float) -> float:
    return math.fsum(abs(path) ** p for path in paths)


def walk(modules: list[nn.Module], paths: Paths, p: float, pooling: str = "max", biases: bool = True) -> Paths:
    """All paths through a sequence of modules; a BatchNorm behind a layer is part of it, elsewhere a diagonal layer."""
    modules = list(modules)
    while modules:
        module = modules.pop(0)
        if isinstance(module, nn.Linear | Convolution):
            weight, bias = module.weight.detach(), None if module.bias is None else module.bias.detach()
            if modules and isinstance(modules[0], BatchNorm):
                scale, shift = affine(modules.pop(0))
                weight = weight * scale.reshape(-1, *[1] * (weight.ndim - 1))
                bias = shift if bias is None else bias * scale + shift
            paths = through_layer(module, weight, bias if biases else None, paths)
        elif isinstance(module, BatchNorm):
            scale, shift = affine(module)
            result = empty(paths.shape)
            for index in np.ndindex(*paths.shape):
                result[index] = [path * float(scale[index[0]]) for path in paths[index]]
                result[index] += [float(shift[index[0]])] if biases else []
            paths = result
        elif isinstance(module, nn.Flatten):
            paths = paths.reshape(-1)
        elif isinstance(module, nn.AvgPool1d | nn.AvgPool2d | nn.MaxPool1d | nn.MaxPool2d):
            paths = through_pool(module, paths, p, pooling)
        else:
            assert isinstance(module, nn.ReLU | nn.LeakyReLU | nn.Dropout), module
    return paths


def affine(norm: Any) -> tuple[Tensor, Tensor]:
    scale = norm.weight.detach() / (norm.running_var + norm.eps).sqrt()
    return scale, norm.bias.detach() - norm.running_mean * scale


def joined(left: Paths, right: Paths) -> Paths:
    result = empty(left.shape)
    for index in np.ndindex(*left.shape):
        result[index] = left[index] + right[index]
    return result


def paths_of(model: nn.Module, shape: tuple[int, ...], p: float, **options: Any) -> Paths | None:
    """All paths of a tiny network to each of its outputs; None where it has none to speak of."""
    start = inputs_of(shape)
    if isinstance(model, networks.Residual):
        x = walk([model.stem], start, p, **options)
        return walk([model.head], joined(x, walk([model.inner, model.outer], x, p, **options)), p, **options)
    if isinstance(model, networks.OnSequences):
        x = walk([model.token, model.mix], start, p, **options)
        summed = empty((x.shape[-1],))
        for position, channel in np.ndindex(*x.shape):
            summed[channel] = summed[channel] + x[position, channel]
        return walk([model.head], summed, p, **options)
    known = nn.Linear | Convolution | BatchNorm | nn.ReLU | nn.LeakyReLU | nn.Flatten | nn.MaxPool2d | nn.AvgPool2d
    if isinstance(model, nn.Sequential) and all(isinstance(module, known) for module in model):
        return walk(list(model), start, p, **options)
    return None


def naive_path_norm(model: nn.Module, shape: tuple[int, ...], p: float, **options: Any) -> float | None:
    paths = paths_of(model, shape, p, **options)
    return None if paths is None else sum(power_sum(entry, p) for entry in paths) ** (1 / p)


def _path_norm(dense: Dense, p: float, **options: Any) -> dict[str, float]:
    found = naive_path_norm(dense.tiny.model, tuple(dense.tiny.x.shape[1:]), p, **options)
    return {} if found is None else {"": found}


@twin
def l1_path_norm(dense: Dense, **options: Any) -> dict[str, float]:
    return _path_norm(dense, 1, **options)


@twin
def l2_path_norm(dense: Dense, **options: Any) -> dict[str, float]:
    return _path_norm(dense, 2, **options)


@twin
def path_norm(dense: Dense, p: float = 2, **options: Any) -> dict[str, float]:
    return _path_norm(dense, p, **options)


def over_margin(dense: Dense, norm: dict[str, float], factor: float = 1.0) -> dict[str, float]:
    """(norm / γ)² times a factor; nothing where one of them is missing or γ is not positive."""
    if "" not in norm or dense.tiny.loss == "mse":
        return {}
    gamma = margin(dense)
    return {"": factor * norm[""] ** 2 / gamma**2} if gamma > 0 else {}


def capacity(dense: Dense, norm: dict[str, float], per_layer: float, width_power: float = 0.0) -> dict[str, float]:
    """The ratio times a factor per layer and a power of the number of its output channels."""
    factor = 1.0
    for layer in dense.tiny.layers:
        factor *= per_layer * len(folded_weight(dense, layer)) ** width_power
    return over_margin(dense, norm, factor) if dense.tiny.chain else {}


@twin
def l1_path_norm_over_margin(dense: Dense) -> dict[str, float]:
    return over_margin(dense, l1_path_norm(dense))


@twin
def l1_path_norm_capacity(dense: Dense) -> dict[str, float]:
    return capacity(dense, l1_path_norm(dense), 4)


@twin
def l2_path_norm_over_margin(dense: Dense) -> dict[str, float]:
    return over_margin(dense, l2_path_norm(dense))


@twin
def l2_path_norm_capacity(dense: Dense) -> dict[str, float]:
    return capacity(dense, l2_path_norm(dense), 4, width_power=1)


@twin
def path_norm_over_margin(dense: Dense) -> dict[str, float]:
    return over_margin(dense, path_norm(dense))


@twin
def path_norm_capacity(dense: Dense) -> dict[str, float]:
    return capacity(dense, path_norm(dense), 4, width_power=1)
