"""Sums of squared paths, gated by the network's own ReLUs and differentiable, through any network that has paths.

The network is run as it is. Beside every tensor that comes from the input travels one of the same shape: for each
entry the sum of the squares of the paths that lead to it, those that are open for this sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import functional

from flatscope import InputError
from flatscope.extend import TABLE, Operation, tensors_in, with_tensors

_SAME = ("neg", "abs", "clone", "contiguous", "identity", "positive", "requires_grad", "to", "float", "double")
_DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_dropout")
_POOL_ORDER = ("input", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_AVERAGE_ORDER = ("input", "kernel_size", "stride", "padding", "ceil_mode", "count_include_pad", "divisor_override")


class SquaredPaths:
    """A rule for `replay` that lets sums of squared paths travel beside the signal.

    Args:
        gated: whether a path counts only where its ReLUs are active and its maxima pass it on; else all paths count,
            and a maximum passes on the largest sum.
    """

    def __init__(self, gated: bool) -> None:
        self.gated = gated
        self._known: dict[Tensor, Tensor] = {}

    def start(self, signal: Tensor, squares: Tensor) -> None:
        """Let these sums travel with that signal."""
        self._known[signal] = squares

    def knows(self, value: Any) -> bool:
        """True if paths lead to this tensor."""
        return isinstance(value, Tensor) and value in self._known

    def squares(self, value: Any) -> Tensor:
        """Sums of squared paths of a signal; a constant that is added counts as a bias."""
        return self._known[value] if self.knows(value) else torch.as_tensor(value).square()

    def follow(self, op: Operation) -> Any:
        """Do what the network does, and the same with squares."""
        if not any(self.knows(tensor) for tensor in op.tensors):
            return op.run()
        if op.name in _DROPOUTS:
            return op.args[0] if op.args else op.kwargs["input"]  # nothing to the trained function
        meaning = TABLE.get(op.name)
        by_name = _RULES.get(op.name, _squares_through_layer if op.layer_arguments() else None)
        rule = _squares_moved_along if meaning is not None and meaning.moves else by_name
        if rule is None:
            result = op.run()
            if not (meaning is not None and meaning.creates) and any(t.is_floating_point() for t in tensors_in(result)):
                self.refuse(op)
            return result
        squares = rule(self, op)  # first: an operation in place would change the signal that gates
        result = op.run()
        for tensor, values in zip(tensors_in(result), tensors_in(squares), strict=False):
            self.start(tensor, values)
        return result

    def refuse(self, op: Operation, why: str = "") -> NoReturn:
        """No paths lead through this operation."""
        raise InputError(
            "linear maps, ReLUs, max and average pools, sums",
            f"{op.name}{', ' + why if why else ''}",
            where=f"path_penalty, {op.place}",
        )

    def one(self, op: Operation) -> Tensor:
        """The only signal among the arguments."""
        known = {tensor for tensor in op.tensors if self.knows(tensor)}
        if len(known) != 1:
            self.refuse(op, "of two signals")
        return known.pop()


Rule = Callable[[SquaredPaths, Operation], Any]


def _squares_through_layer(paths: SquaredPaths, op: Operation) -> Tensor:
    given = op.layer_arguments()
    x, weight, bias = given.pop("input"), given.pop("weight"), given.pop("bias", None)
    if not paths.knows(x) or paths.knows(weight):
        paths.refuse(op, "with a weight that depends on the input")
    result: Tensor = op.function(paths.squares(x), weight.square(), None if bias is None else bias.square(), **given)
    return result


def _squares_through_batch_norm(paths: SquaredPaths, op: Operation) -> Tensor:
    given = op.layer_arguments()
    x, mean, variance = given["input"], given.get("running_mean"), given.get("running_var")
    if given.get("training") or mean is None or variance is None:
        paths.refuse(op, "with the statistics of the batch; fold it or call eval()")
    scale = (variance + given.get("eps", 1e-5)).rsqrt()
    scale = scale if given.get("weight") is None else scale * given["weight"]
    shift = -mean * scale if given.get("bias") is None else given["bias"] - mean * scale
    shape = (1, -1, *[1] * (x.ndim - 2))
    result: Tensor = paths.squares(x) * scale.square().reshape(shape) + shift.square().reshape(shape)
    return result


def _squares_through_relu(paths: SquaredPaths, op: Operation) -> Tensor:
    x = paths.one(op)
    return paths.squares(x) * (x > 0) if paths.gated else paths.squares(x)


def _squares_through_leaky_relu(paths: SquaredPaths, op: Operation) -> Tensor:
    x = paths.one(op)
    slope = torch.as_tensor(op.named("input", "negative_slope").get("negative_slope", 0.01)).to(x)
    if not paths.gated:
        return paths.squares(x) * slope.square().clamp_min(1)
    return paths.squares(x) * torch.where(x > 0, torch.ones_like(x), slope.square())


def _squares_unchanged(paths: SquaredPaths, op: Operation) -> Tensor:
    return paths.squares(paths.one(op))


def _squares_moved_along(paths: SquaredPaths, op: Operation) -> Any:
    """Entries change places: their sums do the same."""

    def beside(tensor: Tensor) -> Tensor:
        return paths.squares(tensor) if tensor.is_floating_point() else tensor

    return op.function(*with_tensors(op.args, beside), **with_tensors(op.kwargs, beside))


def _squares_added(paths: SquaredPaths, op: Operation) -> Tensor:
    given = op.named("input", "other")
    result: Tensor = paths.squares(given["input"]) + given.get("alpha", 1) ** 2 * paths.squares(given["other"])
    return result


def _squares_scaled(paths: SquaredPaths, op: Operation) -> Tensor:
    given = op.named("input", "other")
    x = paths.one(op)
    if paths.knows(given["input"]) and paths.knows(given["other"]):
        paths.refuse(op, "of a signal with itself")
    factor = torch.as_tensor(given["other"] if x is given["input"] else given["input"])
    if op.name == "div":
        if x is not given["input"] or given.get("rounding_mode"):
            paths.refuse(op, "by a signal")
        return paths.squares(x) / factor.square()
    return paths.squares(x) * factor.square()


def _squares_through_matrix_product(paths: SquaredPaths, op: Operation) -> Tensor:
    paths.one(op)
    left, right = op.tensors[:2]
    if left is right:
        paths.refuse(op, "of a signal with itself")
    return paths.squares(left) @ paths.squares(right)


def _squares_summed(paths: SquaredPaths, op: Operation) -> Tensor:
    given = op.named("input", "dim", "keepdim")
    x, dim = given["input"], given.get("dim", given.get("axis"))
    squares = paths.squares(x)
    total = squares.sum() if dim is None else squares.sum(dim, keepdim=bool(given.get("keepdim")))
    n = x.numel() / total.numel()
    return total / n**2 if op.name == "mean" else total  # a mean of n has edges 1/n


def _squares_through_max_pool(paths: SquaredPaths, op: Operation) -> Tensor:
    x = paths.one(op)
    axes = int(op.name.partition("pool")[2][0])
    order = ("input", "output_size") if op.name.startswith("adaptive") else _POOL_ORDER
    given = {name: value for name, value in op.named(*order).items() if name not in ("input", "return_indices")}
    stem = "adaptive_max_pool" if op.name.startswith("adaptive") else "max_pool"
    pool = getattr(functional, f"{stem}{axes}d_with_indices")
    squares = paths.squares(x)
    if not paths.gated:
        pooled: Tensor = pool(squares, **given)[0]
        return pooled
    where = pool(x, **given)[1]
    return squares.flatten(-axes).gather(-1, where.flatten(-axes)).view_as(where)


def _squares_through_average_pool(paths: SquaredPaths, op: Operation) -> Tensor:
    """Edges 1/k, squared: the pool of squares over k once more; k must be the same for every window."""
    x = paths.one(op)
    squares = paths.squares(x)
    axes = int(op.name.partition("pool")[2][0])
    if op.name.startswith("adaptive"):
        pooled: Tensor = op.function(squares, op.named("input", "output_size")["output_size"])
        if any(a % b for a, b in zip(x.shape[-axes:], pooled.shape[-axes:], strict=True)):
            paths.refuse(op, "windows of different sizes")
        return pooled / (math.prod(x.shape[-axes:]) / math.prod(pooled.shape[-axes:]))
    given = op.named(*_AVERAGE_ORDER)
    padding, size = given.get("padding", 0), given["kernel_size"]
    padded = any(padding) if isinstance(padding, tuple | list) else bool(padding)
    if given.get("ceil_mode") or given.get("divisor_override") or (padded and not given.get("count_include_pad", True)):
        paths.refuse(op, "windows of different sizes")
    windows = math.prod(size) if isinstance(size, tuple | list) else size**axes
    result: Tensor = op.function(squares, **{name: value for name, value in given.items() if name != "input"})
    return result / windows


_RULES: dict[str, Rule] = {
    "batch_norm": _squares_through_batch_norm,
    "relu": _squares_through_relu,
    "leaky_relu": _squares_through_leaky_relu,
    **dict.fromkeys(_SAME, _squares_unchanged),
    **dict.fromkeys(("add", "sub"), _squares_added),
    **dict.fromkeys(("mul", "div"), _squares_scaled),
    **dict.fromkeys(("matmul", "mm"), _squares_through_matrix_product),
    **dict.fromkeys(("sum", "mean"), _squares_summed),
    **dict.fromkeys(
        [f"{kind}max_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)], _squares_through_max_pool
    ),
    **dict.fromkeys(
        [f"{kind}avg_pool{n}d" for kind in ("", "adaptive_") for n in (1, 2, 3)], _squares_through_average_pool
    ),
}
