"""How far the outputs can move when an input moves: bounds from the weights, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.measures.margins import FUNCTION_SYMMETRIES, from_log, positive_margin
from flatscope.measures.operator_norms import layer_norms, matrix_norm, operator_norm
from flatscope.measures.path_norms import log_gradient_bounds
from flatscope.measures.path_pass import AVERAGE_POOLS, MAX_POOLS, SLOPES, is_in_place
from flatscope.measures.windows import adaptive_matrices, along_axes, pool_arguments, spatial_axes, window_sums
from flatscope.network.operation import Operation, replay, tensors_in, with_tensors
from flatscope.network.rules import RULES, create, keep, move
from flatscope.network.tracing import LAYER_CALLS
from flatscope.problem import output_tensor
from flatscope.registry import Value, measure
from flatscope.samples import parts_of


@measure(
    symbol=r"\prod_i \|W_i\|_2 \ge \sup_x \|J_f(x)\|_2",
    paper="neyshabur2017",
    equation="Section 2.3",
    direction="lower",
    invariant_under={"layer_scaling", "permutation"},
    cost="sweep",
    passes={},
    on_folded=True,
    conventions="layers as linear maps on inputs of their true size, pooling and sums with their own constants",
)
def lipschitz_l2(ctx: Context, *, log: bool = False) -> Value:
    """Upper bound on how far the outputs move per distance that the input moves, both in ℓ2.

    Norms multiply along a chain, add up where branches are added, and add up as squares where they are put side by
    side. Operations of which no constant is known are refused by name.

    Args:
        ctx: the network.
        log: give the natural logarithm instead.
    """
    return from_log(ctx.sweep(_log_constant), log)


@measure(
    symbol=r"\max_o \phi_1(o) \ge \sup_x \|J_f(x)\|_\infty",
    paper="neyshabur2017",
    equation="Section 2.3",
    direction="lower",
    invariant_under=FUNCTION_SYMMETRIES,
    passes={},
    on_folded=True,
    conventions="the ℓ1 path norm without biases, largest over outputs; never more than `l1_inf_norm`",
)
def lipschitz_linf(ctx: Context, *, log: bool = False) -> Value:
    """Upper bound on how far an output moves when no entry of the input moves by more than 1.

    Args:
        ctx: the network.
        log: give the natural logarithm instead.
    """
    return from_log(float(log_gradient_bounds(ctx).max()), log)


@measure(
    symbol=r"\gamma_{\mathrm{margin}} / (\sqrt 2 \prod_i \|W_i\|_2)",
    paper="neyshabur2017",
    equation="Section 2.3",
    direction="higher",
    invariant_under={"layer_scaling", "permutation", "output_scaling"},
    needs={"classes"},
    cost="sweep",
    passes={"forward": 1},
    on_folded=True,
    conventions="ℓ2 distance of inputs as the network receives them; `margin` over √2 times `lipschitz_l2`",
)
def certified_radius(ctx: Context, *, epsilon: float = 0.05) -> Value:
    """Distance that all but a fraction of the training inputs can move without changing class.

    Args:
        ctx: the network.
        epsilon: fraction of the training samples that may lie at or below the margin.
    """
    constant = ctx.sweep(_log_constant)
    return from_log(math.log(positive_margin(ctx, epsilon)) - math.log(2) / 2 - constant)


def _log_constant(ctx: Context) -> float:
    following = Constants(ctx)
    with torch.no_grad():
        outputs = output_tensor(replay(ctx.problem.model, following.inputs, following.follow, ctx.params))
    if not following.knows(outputs):
        raise NotApplicable("outputs that are reached from a real-valued input", "none", where="lipschitz_l2")
    return following.log_constant(outputs)


class Constants:
    """A rule for `replay` that follows ℓ2 Lipschitz constants, as logarithms, through a network."""

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self.inputs = ctx.problem.example(1)
        self._layers = {id(ctx.params[layer.weight]): layer.name for layer in ctx.network if layer.uses == 1}
        # The tensor is kept, so that its id is not reused.
        self._known = {id(part): (part, 0.0) for part in parts_of(self.inputs) if part.is_floating_point()}

    def knows(self, value: Any) -> bool:
        """Whether this is a tensor that depends on the input."""
        return isinstance(value, Tensor) and id(value) in self._known

    def log_constant(self, tensor: Tensor) -> float:
        """Logarithm of the constant of the map from the input to this tensor."""
        return self._known[id(tensor)][1]

    def follow(self, op: Operation) -> Any:
        """Run one operation and bound what it does."""
        signals = [tensor for tensor in op.tensors if self.knows(tensor)]
        result = op.run()
        outcomes = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        written = op.name == "setitem" or is_in_place(op) or op.kwargs.get("inplace") is True
        if not signals or (not outcomes and not written) or RULES.get(op.name) is create:
            return result
        rule = _RULES.get(op.name) or _GENERAL.get(RULES.get(op.name))
        if rule is None or (written and op.name not in _SAFE_IN_PLACE):
            self.refuse(op)
        constant = rule(self, op, signals, result)
        if written:  # views of what was written to are written to as well
            memory = {tensor.untyped_storage().data_ptr() for tensor in outcomes}
            for key, (tensor, before) in self._known.items():
                if tensor.untyped_storage().data_ptr() in memory:
                    self._known[key] = (tensor, max(before, constant))
        for tensor in outcomes:
            self._known[id(tensor)] = (tensor, constant)
        return result

    def refuse(self, op: Operation) -> NoReturn:
        """Nothing is known about how far this operation can stretch its input."""
        raise NotApplicable("no Lipschitz constant is known for this operation", where=op.place)

    def layer_norm(self, op: Operation, weight: Tensor) -> float:
        """Spectral norm of a layer, known already unless its weight is used in several places or computed."""
        name = self._layers.get(id(weight))
        if name is not None:
            return self.ctx.sweep(layer_norms)[name]
        if op.name == "linear":
            return matrix_norm(weight)
        given = {**op.named(*LAYER_CALLS[op.name][1]), "bias": None}
        x, _ = given.pop("input"), given.pop("weight")
        return operator_norm(lambda v: op.function(v, weight=weight.to(v.dtype), **given), tuple(x.shape[1:]), x.device)


# A rule gives the logarithm of the constant of the result.
Rule = Callable[[Constants, Operation, list[Tensor], Any], float]


def _log(value: float) -> float:
    return math.log(value) if value > 0 else -math.inf


def _one(known: Constants, op: Operation, signals: list[Tensor]) -> float:
    if len(signals) != 1:
        known.refuse(op)
    return known.log_constant(signals[0])


def _layer(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    given = op.named(*LAYER_CALLS[op.name][1])
    if not known.knows(given["input"]):
        known.refuse(op)
    return _one(known, op, signals) + _log(known.layer_norm(op, given["weight"]))


def _batch_norm(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    given = op.named(*LAYER_CALLS[op.name][1])
    if given.get("training") or given.get("running_var") is None:
        known.refuse(op)
    scale = (given["running_var"] + given.get("eps", 1e-5)).rsqrt()
    scale = scale if given.get("weight") is None else scale * given["weight"]
    return _one(known, op, signals) + _log(float(scale.abs().max()))


def _entrywise(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    """Every entry of the result comes from one of the input and moves at most as far."""
    return _one(known, op, signals)


def _curve(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    return _one(known, op, signals) + _log(SLOPES[op.name])


def _leaky(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    given = op.named("input", "weight" if op.name == "prelu" else "negative_slope")
    slope = torch.as_tensor(given.get("weight", given.get("negative_slope", 0.01)))
    return _one(known, op, signals) + _log(max(1.0, float(slope.abs().max())))


def _move(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    """Entries change places; one that is copied m times counts with √m, tensors side by side as squares."""
    leaves = {id(tensor): torch.zeros_like(tensor).requires_grad_() for tensor in signals}

    def leaf(tensor: Tensor) -> Tensor:
        return leaves.get(id(tensor), tensor)

    with torch.enable_grad():
        moved = op.function(*with_tensors(op.args, leaf), **with_tensors(op.kwargs, leaf))
        total = torch.stack([tensor.sum() for tensor in tensors_in(moved) if tensor.is_floating_point()]).sum()
        copies = torch.autograd.grad(total, list(leaves.values()), allow_unused=True, materialize_grads=True)
    distinct = {id(tensor): tensor for tensor in signals}.values()
    logs = [2 * known.log_constant(t) + _log(float(n.max())) for t, n in zip(distinct, copies, strict=True)]
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0)) / 2


def _add(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    """The triangle inequality; what is broadcast is copied."""
    factor = abs(float(op.kwargs.get("alpha", 1)))
    logs = [
        known.log_constant(t) + _log(result.numel() / t.numel()) / 2 + (_log(factor) if place else 0.0)
        for place, t in enumerate(signals)
    ]
    if len(signals) == 1 and factor != 1:
        logs[0] += max(_log(factor), 0.0)
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0))


def _scale(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    given = op.named("input", "other")
    signal = given["input"] if known.knows(given["input"]) else given["other"]
    factor = torch.as_tensor(given["other"] if signal is given["input"] else given["input"]).double().abs()
    if op.name == "div":
        if signal is not given["input"] or given.get("rounding_mode"):
            known.refuse(op)
        factor = 1 / factor
    copied = _log(result.numel() / signal.numel()) / 2
    return _one(known, op, signals) + copied + _log(float(factor.max()))


def _matrix_product(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    constant = next((tensor for tensor in op.tensors[:2] if not known.knows(tensor)), None)
    if constant is None or constant.ndim != 2:
        known.refuse(op)
    return _one(known, op, signals) + _log(matrix_norm(constant))


def _sum(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    n = signals[0].numel() / max(result.numel(), 1)
    return _one(known, op, signals) + (-0.5 if op.name == "mean" else 0.5) * _log(n)


def _maximum(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    """Along axes a maximum moves no further than what it is taken of; of two tensors, no further than both."""
    shape = result.shape if isinstance(result, Tensor) else result[0].shape
    copied = [max(0.0, _log(shape.numel() / t.numel()) / 2) for t in signals]
    logs = [2 * (known.log_constant(t) + c) for t, c in zip(signals, copied, strict=True)]
    return float(torch.logsumexp(torch.tensor(logs, dtype=torch.float64), 0)) / 2


def _max_pool(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    """An entry moves the maximum of every window it is in: √(windows that share an entry), and that is attained."""
    x = torch.ones_like(signals[0])
    pooled = result if isinstance(result, Tensor) else result[0]
    with torch.enable_grad():
        x.requires_grad_()
        if op.name.startswith("adaptive"):
            matrices = adaptive_matrices(x, pooled, spatial_axes(op))
            windows = along_axes(x, [(matrix > 0).to(x) for matrix in matrices])
        else:
            windows = window_sums(x, pooled.shape, **pool_arguments(op))
        shared = torch.autograd.grad(windows.sum(), x)[0]
    return _one(known, op, signals) + _log(float(shared.max())) / 2


def _linear_pool(known: Constants, op: Operation, signals: list[Tensor], result: Any) -> float:
    """A linear map, the same for every channel."""
    name, rest = ("self", "input") if "self" in op.kwargs else ("input", "")
    given = {key: value for key, value in op.kwargs.items() if key not in (name, rest)}
    axes = tuple(signals[0].shape[2:])
    norm = operator_norm(lambda v: op.function(v, *op.args[1:], **given), (1, *axes), signals[0].device)
    return _one(known, op, signals) + _log(norm)


_SAFE_IN_PLACE = ("relu", "leaky_relu", "dropout", "add", "sub", "mul", "div", "clamp", "clamp_min", "neg", "abs")
_RULES: dict[str, Rule] = {
    **dict.fromkeys(LAYER_CALLS, _layer),
    "batch_norm": _batch_norm,
    **dict.fromkeys(("leaky_relu", "prelu"), _leaky),
    **dict.fromkeys(SLOPES, _curve),
    **dict.fromkeys(("clamp", "clamp_min", "clamp_max", "masked_fill"), _entrywise),
    **dict.fromkeys(("add", "sub"), _add),
    **dict.fromkeys(("mul", "div"), _scale),
    **dict.fromkeys(("matmul", "mm"), _matrix_product),
    **dict.fromkeys(("sum", "mean"), _sum),
    **dict.fromkeys(("max", "min", "amax", "amin", "maximum", "minimum", "fmax", "fmin"), _maximum),
    **dict.fromkeys(MAX_POOLS, _max_pool),
    **dict.fromkeys(AVERAGE_POOLS, _linear_pool),
    **dict.fromkeys(("interpolate", "upsample"), _linear_pool),
    "pad": _move,
}
_GENERAL: dict[Any, Rule] = {move: _move, keep: _entrywise}
