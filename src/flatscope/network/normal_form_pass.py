"""One pass in normal form: composite functions written out, and a parameter for every weight that acts.

Nothing is compiled: the module's own forward runs by a plan, to which each of its operations is handed before anybody
else sees it; those that need it are answered in other words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from flatscope.errors import NotApplicable
from flatscope.network.expansions import EXPANSIONS
from flatscope.network.interception import (
    Operation,
    OperationRule,
    address_of,
    is_question,
    tensors_in,
    watched,
    written_out,
)
from flatscope.network.operations import TABLE
from flatscope.network.products import PRODUCTS, Product, as_product, masked
from flatscope.network.program import Dead

Key = tuple[Any, ...]
ACTING = "acting:"  # how the names of parameters begin that a normal form adds; they have / in the place of dots
_PLAN, _OWN_FORWARD = "_flatscope_plan", "_flatscope_forward"
# Hooks of torch that compute a weight in front of a module's forward.
_MAKERS = (WeightNorm, SpectralNorm, BasePruningMethod)


@dataclass(frozen=True)
class Source:
    """Origin of a tensor that is made of parameters and constants alone."""

    params: frozenset[str]  # names of the parameters; none for a constant
    view: str | None = None  # the parameter of which it is a view, if it is one
    rows: bool = False  # whether a product of a weight with rows of constants is in it, as with those of a graph


@dataclass(frozen=True)
class WeightPlan:
    """Substitutions of a plain network: new parameters, masks, folded normalisations, hidden operations."""

    # name of the new parameter for each weight or bias that is a view or computed
    acting: dict[Key, str] = field(default_factory=dict)
    absorbed: frozenset[str] = frozenset()  # the parameters that only these are made of
    skipped: frozenset[str] = frozenset()  # running means of the BatchNorms that were folded away
    # running means of those that became layers, with the names of weight and bias
    affine: dict[str, tuple[str, str]] = field(default_factory=dict)
    biases: dict[str, str] = field(default_factory=dict)  # names of biases that folding gave to weights without one
    masks: dict[str, str] = field(default_factory=dict)  # names of buffers: masks of some of the new parameters
    constants: bool = False  # whether what multiplies rows of constants is a layer, as in a network on a fixed graph
    dead: Dead | None = None  # operations that do not reach the output: they are run, and no other rule sees them

    def rules(self, model: nn.Module) -> Sequence[OperationRule]:
        """The rule for one pass through the module."""
        return [Writer(model, self).step]


class Weights:
    """The tensors of one forward pass that are made of parameters and constants alone."""

    def __init__(self, model: nn.Module, constants: bool = False) -> None:
        self.named: dict[str, Tensor] = dict(model.named_parameters())
        self._constants = constants  # whether rows of constants are signals
        self._known: dict[Tensor, Source] = {}
        self.copies: set[int] = set()  # of these, those with a copy of parameters for every sample
        for name, value in self.named.items():
            self._known[value] = Source(frozenset({name}), name)
        for value in model.buffers():
            self._known.setdefault(value, Source(frozenset()))

    def source(self, value: Any) -> Source | None:
        """Origin of a tensor; None for a signal."""
        return self._known.get(value) if isinstance(value, Tensor) else None

    def is_weight(self, value: Any) -> bool:
        """True for a tensor made of parameters, with constants at most besides."""
        found = self.source(value)
        return found is not None and bool(found.params)

    def is_signal(self, value: Any) -> bool:
        """True for a tensor that depends on the input, or a parameter with a copy for every sample."""
        if not isinstance(value, Tensor):
            return False
        if self._constants and (source := self._known.get(value)) is not None and _are_rows(value, source):
            return True
        return value not in self._known or id(value) in self.copies

    def note(self, op: Operation, result: Any) -> None:
        """Remember the results of operations that no signal enters."""
        if op.name == "setitem" or op.in_place:
            self._forget_written(op)
        meaning = TABLE.get(op.name)
        created = meaning is not None and meaning.creates
        sources = [Source(frozenset())] if created else [self.source(tensor) for tensor in op.tensors]
        if None in sources:
            return
        params = frozenset().union(*(source.params for source in sources if source))
        rows = any(source.rows for source in sources if source)
        if op.name in PRODUCTS and params:
            pairs = zip(op.tensors, sources, strict=False)
            rows |= any(source is not None and _are_rows(tensor, source) for tensor, source in pairs)
        if op.name == "setitem" or op.in_place:
            self._note_written(op.tensors[0], params, rows)
        views = {source.view for source in sources if source}
        first = views.pop() if len(views) == 1 else None
        for tensor in tensors_in(result):
            if tensor not in self._known:
                view = first if first is not None and _shares_memory(tensor, self.named[first]) else None
                self._known[tensor] = Source(params, view, rows and bool(params))

    def _note_written(self, target: Tensor, params: frozenset[str], rows: bool) -> None:
        """A constant into which a weight is written is made of its parameters, and so are all views of it."""
        for tensor, source in list(self._known.items()):
            if source.view is None and (tensor is target or _shares_memory(tensor, target)):
                made_of = source.params | params
                self._known[tensor] = Source(made_of, None, (source.rows or rows) and bool(made_of))

    def _forget_written(self, op: Operation) -> None:
        """A constant into which a signal is written is a signal, and so are all views of it."""
        target = op.tensors[0]
        if all(tensor in self._known for tensor in op.tensors):
            return
        for tensor, source in list(self._known.items()):
            if not source.params and (tensor is target or _shares_memory(tensor, target)):
                del self._known[tensor]

    def name_of(self, value: Tensor) -> str | None:
        """Name of the parameter that a tensor is, whole and in its own order; None for anything else."""
        source = self.source(value)
        return source.view if source is not None and source.view and value is self.named[source.view] else None

    def key(self, value: Tensor, origin: Tensor) -> Key:
        """Key of a weight, the same in every forward pass.

        Args:
            value: the weight as a canonical call takes it.
            origin: as the network has it.
        """
        source = self.source(origin)
        assert source is not None
        copied = any(step == 0 and size > 1 for size, step in zip(value.shape, value.stride(), strict=True))
        if source.view is not None and _shares_memory(value, self.named[source.view]) and not copied:
            whole = self.named[source.view]
            if value.shape == whole.shape and value.stride() == whole.stride():
                return "whole", source.view
            offset = value.storage_offset() - whole.storage_offset()
            return "view", source.view, offset, tuple(value.shape), tuple(value.stride())
        return "made", tuple(sorted(source.params)), tuple(value.shape)


def part_name(key: Key, whole: Tensor) -> str:
    """A parameter and which block of it a view has: `w` for all of it, `w[5:8, :4]` or `w[1]` for a part."""
    _, name, offset, shape, strides = key
    if math.prod(shape) == whole.numel() or not whole.is_contiguous():
        return str(name)
    last = offset + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    corners = [torch.unravel_index(torch.tensor(place), whole.shape) for place in (offset, last)]
    ranges = [(int(start), int(end) + 1) for start, end in zip(*corners, strict=True)]
    if math.prod(end - start for start, end in ranges) != math.prod(shape):
        return f"{name}[a part]"
    words = [_range(*ends, size) for ends, size in zip(ranges, whole.shape, strict=True)]
    while words[-1] == ":":
        words.pop()
    return f"{name}[{', '.join(words)}]"


def _range(start: int, end: int, size: int) -> str:
    if end - start == 1 < size:
        return str(start)
    return f"{start or ''}:{'' if end == size else end}"


def _are_rows(value: Tensor, source: Source) -> bool:
    """True for a tensor of several vectors of constants that no signal has entered."""
    return not source.params and value.ndim > 1 and value.is_floating_point()


def _shares_memory(one: Tensor, other: Tensor) -> bool:
    address = address_of(one)
    return address is not None and address == address_of(other)


class Writer:
    """A rule that runs a network's operations in plain words, by a plan.

    Args:
        model: whose forward is about to run, with the weights that it will use.
        plan: what to answer in other words.
    """

    def __init__(self, model: nn.Module, plan: WeightPlan) -> None:
        self.weights, self.plan = Weights(model, plan.constants), plan
        self._number, self._as_known = 0, True  # operations so far, and whether they were those of `plan.dead`
        buffers = dict(model.named_buffers())
        self._masks = {name: buffers[mask] for name, mask in plan.masks.items()}
        self._skipped = {id(buffers[name]) for name in plan.skipped if name in buffers}
        self._affine = {id(buffers[name]): pair for name, pair in plan.affine.items() if name in buffers}

    def step(self, op: Operation) -> Any:
        """Run one operation of the network's own, unseen by anybody where it is dead."""
        if self.plan.dead is None or not self._is_hidden(op, self.plan.dead):
            return self.follow(op)
        with DisableTorchFunction():
            return op.run()

    def _is_hidden(self, op: Operation, dead: Dead) -> bool:
        if is_question(op):  # perhaps of what is dead
            return True
        number, self._number = self._number, self._number + 1
        self._as_known &= number < len(dead.order) and dead.order[number] == op.name
        return self._as_known and number in dead.numbers

    def follow(self, op: Operation) -> Any:
        """Run one operation."""
        if op.name in EXPANSIONS:
            with written_out(op.name), watched(self.follow):
                result = EXPANSIONS[op.name](*op.args, **op.kwargs)
            if result is not NotImplemented:
                return result
        if op.name == "batch_norm" and (self._skipped or self._affine):
            answered = self._batch_norm(op)
            if answered is not None:
                return answered
        if op.name in PRODUCTS:
            product = as_product(op, self.weights.is_weight, self.weights.is_signal)
            if product is not None:
                return self.product(op, product)
        result = op.run()
        self.weights.note(op, result)
        return result

    def product(self, op: Operation, product: Product) -> Tensor:
        """Multiply with the parameter that stands for the weight."""
        weight, bias = self.stand_in(product.weight, product.origin), product.bias
        if bias is not None:
            bias = self.stand_in(bias, bias)
        elif self.plan.biases:
            bias = self.weights.named.get(self.plan.biases.get(self.weights.name_of(weight) or "", ""))
        return product.run(weight, bias)

    def stand_in(self, value: Tensor, origin: Tensor) -> Tensor:
        """The parameter that a weight or bias is, or the new one that was made for it, or the tensor itself."""
        if not self.weights.is_weight(origin):
            return value
        key = self.weights.key(value, origin)
        name = key[1] if key[0] == "whole" else self.plan.acting.get(key)
        source = self.weights.source(origin)
        if name is None and source is not None and (lost := source.params & self.plan.absorbed):
            names = ", ".join(sorted(lost))
            raise NotApplicable(f"samples decide how a weight is made of {names}, differently in some batches")
        if name is None:
            return value
        found = self.weights.named[name]
        return masked(found, self._masks[name], name) if name in self._masks else found

    def _batch_norm(self, op: Operation) -> Tensor | None:
        given = op.named("input", "running_mean")
        x, place = given["input"], id(given.get("running_mean"))
        if place in self._skipped:
            assert isinstance(x, Tensor)
            return x
        if place not in self._affine:
            return None
        weight, bias = (self.weights.named[name] for name in self._affine[place])
        axes = max(x.ndim - 2, 1)
        convolve = (nn.functional.conv1d, nn.functional.conv2d, nn.functional.conv3d)[axes - 1]
        found: Tensor = convolve(x if x.ndim > 2 else x.unsqueeze(-1), weight, bias, groups=weight.shape[0])
        return found if x.ndim > 2 else found.squeeze(-1)


class ForwardPlan(Protocol):
    """A plan by which a module's forward is run."""

    def rules(self, model: nn.Module) -> Sequence[OperationRule]:
        """Rules for one pass through the module, made when its tensors are in their places; the first sees first."""


def plan_of(model: nn.Module) -> Any:
    """The plan of a module; None where it has none."""
    return getattr(model, _PLAN, None)


def set_plan(model: nn.Module, plan: ForwardPlan) -> None:
    """Let a module's forward run by a plan, in place of the one it has."""
    if plan_of(model) is None:
        own = model.__dict__.get("forward")
        object.__setattr__(model, _OWN_FORWARD, own)
        object.__setattr__(model, "forward", MethodType(_planned_forward, model))
    object.__setattr__(model, _PLAN, plan)


@contextmanager
def seen_inside(model: nn.Module, rule: Callable[[nn.Module], OperationRule]) -> Iterator[None]:
    """Inside the block the operations of a module's own forward, as its plan gives them, are handed to a rule as well.

    Args:
        model: the module.
        rule: makes the rule of one pass, when the tensors of that pass are in their places.
    """
    before = plan_of(model)
    set_plan(model, _PlanAndRule(before, rule))
    try:
        yield
    finally:
        if before is not None:
            set_plan(model, before)
        else:
            own = model.__dict__.pop(_OWN_FORWARD)
            del model.__dict__["forward"], model.__dict__[_PLAN]
            if own is not None:
                object.__setattr__(model, "forward", own)


@dataclass(frozen=True)
class _PlanAndRule:
    """A plan, if there is one, and a rule that sees what it gives."""

    plan: ForwardPlan | None
    rule: Callable[[nn.Module], OperationRule]

    def rules(self, model: nn.Module) -> Sequence[OperationRule]:
        """Rules for a watched pass: those that carry out the plan, then the one that was asked for."""
        return [*(() if self.plan is None else self.plan.rules(model)), self.rule(model)]


def _planned_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own, plan = getattr(self, _OWN_FORWARD), plan_of(self)
    with ExitStack() as stack:
        for rule in reversed(plan.rules(self)):
            stack.enter_context(watched(rule))
        for hook in self._forward_pre_hooks.values():  # has run already, unwatched, where the network is one layer
            if isinstance(hook, _MAKERS):
                hook(self, args)
        return type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
