"""How far each torch operation can stretch: the rules by which ℓ2 Lipschitz constants travel through a network."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flatscope.errors import NotApplicable
from flatscope.network.interception import Operation, tensors_in, with_tensors
from flatscope.network.path_rules import window_sums
from flatscope.network.products import negative_slope, norm_as_affine, terms_of
from flatscope.network.singular_values import Check, matrix_norm, operator_norm


class Stretches(ABC):
    """Constants, as logarithms, on their way through a network: what the rules below work on.

    Args:
        inputs: of the network.
        check: called between the products of a search for a norm; raises where there is no time left.
    """

    def __init__(self, inputs: list[Tensor], check: Check | None = None) -> None:
        self._known = {part: 0.0 for part in inputs if part.is_floating_point()}
        self.check = check

    def knows(self, value: Any) -> bool:
        """True for a tensor that depends on the input."""
        return isinstance(value, Tensor) and value in self._known

    def log_constant(self, tensor: Tensor) -> float:
        """Logarithm of the constant of the map from the input to this tensor."""
        return self._known[tensor]

    def refuse(self, op: Operation) -> NoReturn:
        """Nothing is known about how far this operation can stretch its input."""
        raise NotApplicable("no Lipschitz constant is known for this operation", where=op.place)

    @abstractmethod
    def layer_norm(self, op: Operation, weight: Tensor) -> float:
        """Spectral norm of a layer."""


# A rule gives the logarithm of the constant of the result.
StretchRule = Callable[[Stretches, Operation, list[Tensor], Any], float]


def safe_log(value: float) -> float:
    """Logarithm of a norm, minus infinity where it is zero."""
    return math.log(value) if value > 0 else -math.inf


def _one(known: Stretches, op: Operation, signals: list[Tensor]) -> float:
    if len(signals) != 1:
        known.refuse(op)
    return known.log_constant(signals[0])


def _copied(signal: Tensor, result: Tensor) -> float:
    """Logarithm of the factor that broadcasting adds: m copies count with √m."""
    return max(0.0, safe_log(result.numel() / max(signal.numel(), 1))) / 2


def layer(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The spectral norm of the layer."""
    given = op.layer_arguments()
    if not known.knows(given["input"]):
        known.refuse(op)
    return _one(known, op, signals) + safe_log(known.layer_norm(op, given["weight"]))


def batch_norm(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The largest factor of a channel."""
    affine = norm_as_affine(op)
    if affine is None:
        known.refuse(op)
    return _one(known, op, signals) + safe_log(float(affine[0].abs().max()))


def entrywise(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """Every entry of the result comes from one of the input and moves at most as far; bounds may copy it."""
    return _one(known, op, signals) + _copied(signals[0], result)


def leaky(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The steeper of the two slopes."""
    return _one(known, op, signals) + safe_log(max(1.0, float(negative_slope(op).abs().max())))


def move(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """Entries change places; one that is copied m times counts with √m, tensors side by side as squares."""
    leaves = {tensor: torch.zeros_like(tensor).requires_grad_() for tensor in signals}

    def leaf(tensor: Tensor) -> Tensor:
        return leaves.get(tensor, tensor)

    with torch.enable_grad():
        moved = op.function(*with_tensors(op.args, leaf), **with_tensors(op.kwargs, leaf))
        total = torch.stack([tensor.sum() for tensor in tensors_in(moved) if tensor.is_floating_point()]).sum()
        if not total.requires_grad:  # a constant that takes no more than the shape of a signal
            return -math.inf
        copies = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    logs = [2 * known.log_constant(t) + safe_log(float(n.max())) for t, n in zip(leaves, copies, strict=True)]
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0)) / 2


def add(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The triangle inequality; what is broadcast is copied."""
    logs = [
        known.log_constant(term) + _copied(term, result) + safe_log(factor)
        for term, factor in terms_of(op)
        if known.knows(term)
    ]
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0))


def scale(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The largest factor."""
    given = op.named("input", "other")
    signal = given["input"] if known.knows(given["input"]) else given["other"]
    constant = given["other"] if signal is given["input"] else given["input"]
    factor = torch.as_tensor(constant, dtype=torch.float64).abs()
    if op.name == "div":
        if signal is not given["input"] or given.get("rounding_mode"):
            known.refuse(op)
        factor = 1 / factor
    return _one(known, op, signals) + _copied(signal, result) + safe_log(float(factor.max()))


def matrix_product(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The spectral norm of the constant factor."""
    constant = next((tensor for tensor in op.tensors[:2] if not known.knows(tensor)), None)
    if constant is None or constant.ndim != 2:
        known.refuse(op)
    return _one(known, op, signals) + safe_log(matrix_norm(constant, known.check))


def sum_entries(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """√n for a sum of n entries, 1/√n for their mean."""
    n = signals[0].numel() / max(result.numel(), 1)
    return _one(known, op, signals) + (-0.5 if op.name == "mean" else 0.5) * safe_log(n)


def maximum(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """Along axes a maximum moves no further than what it is taken of; of two tensors, no further than both."""
    shape = result.shape if isinstance(result, Tensor) else result[0].shape
    copied = [max(0.0, safe_log(shape.numel() / t.numel()) / 2) for t in signals]
    logs = [2 * (known.log_constant(t) + c) for t, c in zip(signals, copied, strict=True)]
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0)) / 2


def max_pool(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """An entry moves the maximum of every window it is in: √(windows that share an entry), and that is attained."""
    x = torch.ones_like(signals[0])
    pooled = result if isinstance(result, Tensor) else result[0]
    with torch.enable_grad():
        x.requires_grad_()
        shared = torch.autograd.grad(window_sums(x, pooled, op).sum(), x)[0]
    return _one(known, op, signals) + safe_log(float(shared.max())) / 2


def linear_pool(known: Stretches, op: Operation, signals: list[Tensor], result: Any) -> float:
    """A linear map, the same for every channel."""
    name, rest = ("self", "input") if "self" in op.kwargs else ("input", "")
    given = {key: value for key, value in op.kwargs.items() if key not in (name, rest)}
    axes = tuple(signals[0].shape[2:])
    norm = operator_norm(lambda v: op.function(v, *op.args[1:], **given), (1, *axes), signals[0].device, known.check)
    return _one(known, op, signals) + safe_log(norm)
