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
import torch
from references import Dense, folded_weight, l2_norm, margin, twin
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
def l2_path_norm(dense: Dense, p: float = 2, **options: Any) -> dict[str, float]:
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


def module_of(dense: Dense, layer: str) -> Any:
    return dict(dense.tiny.model.named_modules()).get(layer)


def input_shapes(dense: Dense) -> dict[str, tuple[int, ...]]:
    """Shape of one sample as each layer module receives it."""
    shapes: dict[str, tuple[int, ...]] = {}
    handles = [
        module_of(dense, layer).register_forward_hook(
            lambda m, args, out, layer=layer: shapes.__setitem__(layer, tuple(args[0].shape[1:]))
        )
        for layer in dense.tiny.layers
        if isinstance(module_of(dense, layer), Convolution)
    ]
    dense.outputs()
    for handle in handles:
        handle.remove()
    return shapes


def written_out(module: nn.Module, weight: Tensor, shape: tuple[int, ...]) -> Tensor:
    """A convolution as the matrix (outputs, inputs) that it is on an input of that shape."""
    sizes = (weight.shape[0], *output_sizes(module, shape))
    matrix = torch.zeros(math.prod(sizes), math.prod(shape), dtype=torch.float64)
    for out, into, value in edges_of(module, weight, shape):
        matrix[np.ravel_multi_index(out, sizes), np.ravel_multi_index(into, shape)] += value
    return matrix


def top_singular_value(matrix: Tensor) -> float:
    return math.sqrt(float(torch.linalg.eigvalsh(matrix.T @ matrix)[-1]))


def with_product(dense: Dense, norms: dict[str, float]) -> dict[str, float]:
    return ({"": math.prod(norms.values())} if dense.tiny.chain else {}) | norms


@twin
def spectral_norm(dense: Dense) -> dict[str, float]:
    shapes, norms = input_shapes(dense), {}
    for layer in dense.tiny.layers:
        weight = folded_weight(dense, layer)
        conv = layer in shapes
        norms[layer] = top_singular_value(
            written_out(module_of(dense, layer), weight, shapes[layer]) if conv else weight
        )
    return with_product(dense, norms)


@twin
def group_norm(dense: Dense, p: float = 3, q: float = 1.5) -> dict[str, float]:
    norms = {}
    for layer in dense.tiny.layers:
        total = 0.0
        for row in folded_weight(dense, layer):
            total += sum(abs(w) ** p for w in row.flatten().tolist()) ** (q / p)
        norms[layer] = total ** (1 / q)
    return with_product(dense, norms)


@twin
def fan_in_l1(dense: Dense) -> dict[str, Tensor]:
    return {layer: torch.stack([row.abs().sum() for row in folded_weight(dense, layer)]) for layer in dense.tiny.layers}


@twin
def l1_inf_norm(dense: Dense) -> dict[str, float]:
    return with_product(dense, {layer: float(values.max()) for layer, values in fan_in_l1(dense).items()})


for _norm, _per_layer, _power in ((l2_norm, 4, 0), (spectral_norm, 1, 1), (l1_inf_norm, 1, 0), (group_norm, 1, 0)):

    def _over(dense: Dense, norm: Any = _norm) -> dict[str, float]:
        return over_margin(dense, norm(dense))

    def _capacity(dense: Dense, norm: Any = _norm, each: float = _per_layer, power: float = _power) -> dict[str, float]:
        return capacity(dense, norm(dense), each, power)

    _over.__name__, _capacity.__name__ = f"{_norm.__name__}_over_margin", f"{_norm.__name__}_capacity"
    twin(_over)
    twin(_capacity)


@twin
def vc_dimension(dense: Dense) -> float:
    return float(len(dense.tiny.layers) * sum(value.numel() for value in dense.params.values()))


@twin
def distance_from_initialization(dense: Dense) -> dict[str, float]:
    moved = {name: value - dense.tiny.initial[name] for name, value in dense.params.items()}
    squares = {name: math.fsum(d * d for d in value.flatten().tolist()) for name, value in moved.items()}
    layers = {layer: math.sqrt(squares[dense.weight_name(layer)]) for layer in dense.tiny.layers}
    return {"": math.sqrt(math.fsum(squares.values()))} | layers


@twin
def lipschitz_l2(dense: Dense) -> dict[str, float]:
    """By hand: what stands between the layers of each tiny network."""
    norms = {layer: value for layer, value in spectral_norm(dense).items() if layer}
    if dense.tiny.name == "attention":
        return {}
    if dense.tiny.name == "residual":
        return {"": norms["stem"] * (1 + norms["inner"] * norms["outer"]) * norms["head"]}
    between = {"sequences": math.sqrt(3), "lenet-like": 1 / 2}  # a sum of three positions; a 2×2 average
    return {"": math.prod(norms.values()) * between.get(dense.tiny.name, 1.0)}


@twin
def lipschitz_linf(dense: Dense) -> dict[str, float]:
    if dense.tiny.name == "smooth":  # tanh has slope 1 at most
        product = dense.params["2.weight"].abs() @ dense.params["0.weight"].abs()
        return {"": float(product.sum(1).max())}
    paths = paths_of(dense.tiny.model, tuple(dense.tiny.x.shape[1:]), 1, biases=False)
    return {} if paths is None else {"": max(power_sum(entry, 1) for entry in paths)}


@twin
def certified_radius(dense: Dense) -> dict[str, float]:
    constant = lipschitz_l2(dense)
    if not constant or dense.tiny.loss == "mse" or margin(dense) <= 0:
        return {}
    return {"": margin(dense) / (math.sqrt(2) * constant[""])}
