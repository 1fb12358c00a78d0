"""What each torch operation does to sums over paths: the rules of the pass behind path norms.

Every tensor that comes from the input holds, for each of its entries, the sum over the paths that lead there of the
p-th powers of their weights, divided by one number per tensor whose logarithm is kept aside: products over many
layers then neither overflow nor vanish. At the end, pooling windows written out: which entries each output of a pool
reads.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.errors import NotApplicable
from flatscope.network.interception import Operation, with_tensors
from flatscope.network.products import negative_slope, norm_as_affine, per_axis, terms_of


class Paths:
    """Sums over paths on their way through a network: what the rules below work on.

    Args:
        p: weights count with their p-th power.
        pooling: "max" or "sum": what a maximum does with the paths that enter it.
        biases: whether biases, and other constants that are added, are edges from a unit that is always on.
        curves: whether activations of bounded slope are let through, as if that slope were the weight of an edge.
    """

    def __init__(self, p: float, pooling: str = "max", biases: bool = True, curves: bool = False) -> None:
        self.p, self.pooling, self.biases, self.curves = p, pooling, biases, curves
        self._known: dict[Tensor, float] = {}

    def start(self, tensor: Tensor, log_scale: float = 0.0) -> Tensor:
        """Count the entries of a tensor as sums over paths."""
        self._known[tensor] = log_scale
        return tensor

    def knows(self, value: Any) -> bool:
        """True for a tensor that paths lead to."""
        return isinstance(value, Tensor) and value in self._known

    def log_scale(self, tensor: Tensor) -> float:
        """Logarithm of the number by which the tensor is to be multiplied."""
        return self._known[tensor]

    def refuse(self, op: Operation, why: str = "") -> NoReturn:
        """There is no such thing as a path through this operation."""
        expected = "paths lead only through linear maps, maxima and activations that are positively homogeneous"
        raise NotApplicable(expected, where=f"{op.place}{', ' + why if why else ''}")

    def power(self, weight: Tensor | float) -> Tensor:
        """|w|^p, in float64."""
        return torch.as_tensor(weight, dtype=torch.float64).detach().abs().pow(self.p)

    def one_signal(self, op: Operation) -> Tensor:
        """The only tensor among the arguments that paths lead to."""
        known = [tensor for tensor in op.tensors if self.knows(tensor)]
        if len(known) != 1:
            self.refuse(op, "of two signals")
        return known[0]

    def aligned(self, *terms: Any) -> tuple[list[Tensor], float]:
        """Tensors and constants that are to be added, brought to one scale; constants count as biases."""
        scales = [self.log_scale(term) if self.knows(term) else self._constant_scale(term) for term in terms]
        common = max(scales)
        values = []
        for term, scale in zip(terms, scales, strict=True):
            value = term if self.knows(term) else self.power(term) * float(self.biases)
            factor = math.exp(scale - common) if scale > -math.inf else 1.0  # zeros have no scale
            values.append(value if factor == 1 else value * factor)
        return values, common

    def _constant_scale(self, term: Any) -> float:
        return 0.0 if self.biases and bool((torch.as_tensor(term) != 0).any()) else -math.inf


# A rule gives the result of the operation and the logarithm of its scale.
PathRule = Callable[[Paths, Operation], tuple[Any, float]]


def layer(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """A linear map with absolute weights; the result is normalised."""
    given = op.layer_arguments()
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    if not paths.knows(x) or paths.knows(weight) or paths.knows(bias):
        paths.refuse(op, "with a weight that depends on the input")
    terms, log_scale = paths.aligned(x, 0.0 if bias is None else bias)
    bias = None if bias is None or not paths.biases else terms[1]
    return _normalised(op.function(terms[0], paths.power(weight), bias, **given), log_scale)


def _normalised(value: Tensor, log_scale: float) -> tuple[Tensor, float]:
    top = float(value.detach().max()) if value.numel() else 0.0
    if not 0 < top < math.inf:
        return value, log_scale
    return value / top, log_scale + math.log(top)


def batch_norm(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """A BatchNorm that was not folded: an edge |a| from each channel to itself, and a bias."""
    x, affine = op.named("input")["input"], norm_as_affine(op)
    if affine is None:
        paths.refuse(op, "with the statistics of the batch")
    shape = (1, -1, *[1] * (x.ndim - 2))
    scale, shift = affine
    terms, log_scale = paths.aligned(x, shift.reshape(shape))
    return _normalised(terms[0] * paths.power(scale.reshape(shape)) + terms[1], log_scale)


def same(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """An edge of weight 1 from every entry to itself."""
    x = paths.one_signal(op)
    return x, paths.log_scale(x)


def copied(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Sums as `same` gives them, where the caller relies on a new tensor or on how it lies in memory."""
    x = paths.one_signal(op)
    return x.clone() if op.name == "clone" else x.contiguous(), paths.log_scale(x)


def cast(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Other number types and devices: paths are counted in float64 where they are."""
    if op.name in ("float", "type") and not isinstance(op.run(), Tensor):
        paths.refuse(op, "as a Python number")
    x = op.args[0] if op.args else op.kwargs["input"]
    if not paths.knows(x):
        paths.refuse(op)
    result = op.run()
    return (x if result.is_floating_point() else result), paths.log_scale(x)


def move(paths: Paths, op: Operation) -> tuple[Any, float]:
    """Entries change places, are repeated or dropped; what is put together is brought to one scale."""
    signals = [tensor for tensor in op.tensors if tensor.is_floating_point()]
    scales = {paths.log_scale(tensor) if paths.knows(tensor) else None for tensor in signals}
    if len(scales) == 1:
        return op.run(), scales.pop() or 0.0  # on the tensors themselves: the result may be a view of them
    values, common = paths.aligned(*signals)
    scaled = dict(zip(signals, values, strict=True))

    def at_scale(tensor: Tensor) -> Tensor:
        return scaled.get(tensor, tensor)

    return op.function(*with_tensors(op.args, at_scale), **with_tensors(op.kwargs, at_scale)), common


def pad_paths(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Zeros are no paths; any other filler is a bias."""
    given = op.named("input", "pad", "mode", "value")
    x, filler = given["input"], float(given.get("value") or 0.0)
    mode = given.get("mode", "constant")
    if mode != "constant" or filler == 0:
        return op.run(), paths.log_scale(x)
    terms, log_scale = paths.aligned(x, filler)
    return functional.pad(terms[0], list(given["pad"]), "constant", float(terms[1])), log_scale


def add(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Sums and differences: paths add up."""
    (one, first), (other, second) = terms_of(op)
    (left, right), log_scale = paths.aligned(one, other)
    return paths.power(first) * left + paths.power(second) * right, log_scale


def scale(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Times a constant, or divided by one."""
    given = op.named("input", "other")
    x = paths.one_signal(op)
    factor = given["other"] if x is given["input"] else given["input"]
    if op.name == "div":
        if x is not given["input"] or given.get("rounding_mode"):
            paths.refuse(op, "by a signal")
        return x / paths.power(factor), paths.log_scale(x)
    return x * paths.power(factor), paths.log_scale(x)


def matrix_product(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """With a constant matrix."""
    x = paths.one_signal(op)
    left, right = (tensor if tensor is x else paths.power(tensor) for tensor in op.tensors[:2])
    return _normalised(left @ right, paths.log_scale(x))


def sum_paths(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """A mean of n has edges of weight 1/n, whose p-th power is not 1/n."""
    given = op.named("input", "dim", "keepdim")
    x, dim = given["input"], given.get("dim", given.get("axis"))
    total = x.sum() if dim is None else x.sum(dim, keepdim=bool(given.get("keepdim")))
    n = x.numel() / max(total.numel(), 1)
    return total / (n**paths.p if op.name == "mean" else 1.0), paths.log_scale(x)


def maximum(paths: Paths, op: Operation) -> tuple[Any, float]:
    """Sums over paths behind a maximum or minimum, of two tensors or along axes: the largest of them, or their sum."""
    given = op.named("input", "dim", "keepdim")
    other = given.get("other", given.get("dim"))
    if isinstance(other, Tensor):
        (left, right), log_scale = paths.aligned(given["input"], other)
        return torch.maximum(left, right) if paths.pooling == "max" else left + right, log_scale
    x, dim, keep = given["input"], given.get("dim", given.get("axis")), bool(given.get("keepdim"))
    axes = tuple(range(x.ndim)) if dim is None else dim
    value = x.amax(axes, keepdim=keep) if paths.pooling == "max" else x.sum(axes, keepdim=keep)
    if dim is not None and op.name in ("max", "min"):
        return torch.return_types.max((value, x.max(dim, keepdim=keep).indices)), paths.log_scale(x)
    return value, paths.log_scale(x)


def max_pool(paths: Paths, op: Operation) -> tuple[Any, float]:
    """The largest sum of a window, or the sum of them all."""
    x = paths.one_signal(op)
    result = op.run()
    if paths.pooling == "max":
        return result, paths.log_scale(x)
    pooled = result if isinstance(result, Tensor) else result[0]
    summed = window_sums(x, pooled, op)
    return summed if isinstance(result, Tensor) else (summed, *result[1:]), paths.log_scale(x)


def average_pool(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Edges of weight 1/n count with (1/n)^p: running the pool itself is right for p = 1 only."""
    x = paths.one_signal(op)
    if op.name.startswith("adaptive"):
        matrices = [matrix.pow(paths.p) for matrix in adaptive_matrices(x, op.run(), spatial_axes(op))]
        return along_axes(x, matrices), paths.log_scale(x)
    pooled = op.run()
    if paths.p == 1:
        return pooled, paths.log_scale(x)
    ones = torch.ones_like(x)
    averages = op.function(**{**op.named(*_ORDERS["avg"]), "input": ones})
    divisors = window_sums(ones, pooled, op) / averages
    return pooled * divisors.pow(1 - paths.p), paths.log_scale(x)


def interpolate(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Nearest neighbours are copies; other modes mix with weights whose p-th power this does not know."""
    mode = op.named("input", "size", "scale_factor", "mode").get("mode", "nearest")
    if not mode.startswith("nearest") and (paths.p != 1 or mode == "bicubic"):
        paths.refuse(op, f"mode {mode}")
    x = paths.one_signal(op)
    return op.run(), paths.log_scale(x)


def leaky(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """The steeper of the two slopes."""
    x = paths.one_signal(op)
    slope = negative_slope(op).to(x.device)
    slope = slope.reshape(-1, *[1] * (x.ndim - 2)) if slope.numel() > 1 and x.ndim > 1 else slope
    return x * paths.power(slope).clamp_min(1), paths.log_scale(x)


def one_sided(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """A ReLU written as a bound at zero; any other bound is not homogeneous."""
    named = op.named("input", "min", "max") if op.name != "threshold" else op.named("input", "threshold", "value")
    bounds = [value for name, value in named.items() if name not in ("input", "inplace") and value is not None]
    if any(isinstance(bound, Tensor) or bound != 0 for bound in bounds):
        paths.refuse(op, "at a bound other than zero")
    return same(paths, op)


def masked_fill(paths: Paths, op: Operation) -> tuple[Tensor, float]:
    """Zeros are filled with a value that counts as a bias."""
    given = op.named("input", "mask", "value")
    paths.one_signal(op)
    value = float(given["value"])
    if not math.isfinite(value):
        paths.refuse(op, "with an infinity")
    terms, log_scale = paths.aligned(given["input"], value)
    return terms[0].masked_fill(given["mask"], float(terms[1])), log_scale


_ORDERS = {
    "max": ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode", "return_indices"),
    "avg": ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override"),
}


def spatial_axes(op: Operation) -> int:
    """Number of axes that a pool or convolution slides over, read from its name."""
    return next(int(mark) for mark in op.name if mark in "123")


def window_sums(x: Tensor, pooled: Tensor, op: Operation) -> Tensor:
    """Sum over each window of a pool with this result; what was padded counts as zero."""
    n = spatial_axes(op)
    if op.name.startswith("adaptive"):
        return along_axes(x, [(matrix > 0).to(x) for matrix in adaptive_matrices(x, pooled, n)])
    given = op.named(*_ORDERS["avg" if "avg" in op.name else "max"])
    kernel, stride = per_axis(given["kernel_size"], n), given.get("stride")
    stride = kernel if stride is None or stride == [] or stride == () else per_axis(stride, n)
    padding, dilation = per_axis(given.get("padding", 0), n), per_axis(given.get("dilation", 1), n)
    flat = x.reshape(-1, 1, *x.shape[-n:])  # (channels of all samples, 1, *axes)
    padded: list[int] = []
    for axis in reversed(range(n)):  # `pad` starts with the last axis
        reached = (pooled.shape[axis - n] - 1) * stride[axis] + dilation[axis] * (kernel[axis] - 1) + 1
        padded += [padding[axis], reached - padding[axis] - x.shape[axis - n]]  # the last may cut: floor or ceil mode
    convolve = (functional.conv1d, functional.conv2d, functional.conv3d)[n - 1]
    ones = torch.ones(1, 1, *kernel, dtype=x.dtype, device=x.device)
    return convolve(functional.pad(flat, padded), ones, stride=stride, dilation=dilation).reshape(pooled.shape)


def adaptive_matrices(x: Tensor, pooled: Tensor, n: int) -> list[Tensor]:
    """For each of the last n axes, the averaging matrix (outputs, inputs) of an adaptive pool's windows."""
    matrices = []
    for n_in, n_out in zip(x.shape[-n:], pooled.shape[-n:], strict=True):
        matrix = torch.zeros(n_out, n_in, dtype=x.dtype, device=x.device)
        for i in range(n_out):
            start, stop = i * n_in // n_out, -(-(i + 1) * n_in // n_out)
            matrix[i, start:stop] = 1 / (stop - start)
        matrices.append(matrix)
    return matrices


def along_axes(x: Tensor, matrices: list[Tensor]) -> Tensor:
    """Apply one matrix to each of the last axes of a tensor."""
    for place, matrix in enumerate(matrices):
        axis = x.ndim - len(matrices) + place
        x = torch.tensordot(x, matrix, dims=([axis], [1])).movedim(-1, axis)
    return x
