"""How a network of ours is run: in the precision it is given, and leaving its modules as they were.

A forward pass may name float32: a constant kept as an attribute, `one_hot(…).float()`, a state made in float32. Run in
float64 such a network reads float64 wherever it says float32, so that it is the same function with more digits. It may
also keep what it computes on its modules; that is put back after every pass, so that none sees another's tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from flatscope.errors import FlatscopeError
from flatscope.isolation import settings_of_running_model

_PASSES = "_flatscope_passes"
_DOUBLE: dict[Any, Any] = {
    torch.float32: torch.float64,
    torch.complex64: torch.complex128,
    "torch.FloatTensor": torch.float64,
    torch.FloatTensor: torch.float64,
}
_SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}
_SPELLED: dict[Any, Callable[..., Any]] = {Tensor.float: Tensor.double}
_OF_TORCH = frozenset(nn.Module().__dict__) | {"forward"}
_IN_PLACE = ("__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__")


def writes_in_place(function: Callable[..., Any]) -> bool:
    """True for a torch function that writes to its first argument."""
    name = getattr(function, "__name__", "")
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))


class _InDouble(TorchFunctionMode):
    """Inside the block float32 reads float64; an operation that float64 does not have runs in float32.

    Args:
        passes: notes what was found.
    """

    def __init__(self, passes: Passes) -> None:
        super().__init__()
        self._passes = passes

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, words = getattr(func, "__name__", ""), kwargs or {}
        if name == "__get__":  # an attribute such as x.shape
            return func(*args, **words)
        writes = writes_in_place(func) or name in ("__setitem__", "__set__")
        untouched = 1 if writes else 0  # casting what is written to would write to a copy
        given = args[:untouched] + _retyped(args[untouched:], _DOUBLE)
        named = {word: value if word == "out" else _retyped(value, _DOUBLE) for word, value in words.items()}
        spelled = _SPELLED.get(func, func)
        changed = spelled is not func or any(a is not b for a, b in zip(given, args, strict=True))
        self._passes.names_float32 |= changed or any(named[word] is not value for word, value in words.items())
        try:
            return spelled(*given, **named)
        except (RuntimeError, NotImplementedError) as problem:
            if writes or isinstance(problem, FlatscopeError | torch.OutOfMemoryError):
                raise
            try:
                result = func(*_retyped(args, _SINGLE), **_retyped(words, _SINGLE))
            except Exception:
                raise problem from None
        self._passes.names_float32 = self._passes.falls_to_float32 = True
        return _retyped(result, _DOUBLE)


def _retyped(tree: Any, types: dict[Any, Any]) -> Any:
    """Tensors and types in nested tuples, lists and dictionaries in other types; the tree itself where none is."""
    if isinstance(tree, Tensor):
        wanted = types.get(tree.dtype)
        return tree if wanted is None else tree.to(wanted)
    if isinstance(tree, tuple | list):
        parts = [_retyped(part, types) for part in tree]
        if all(a is b for a, b in zip(parts, tree, strict=True)):
            return tree
        return type(tree)(*parts) if hasattr(tree, "_fields") else type(tree)(parts)
    if isinstance(tree, dict):
        found = {key: _retyped(part, types) for key, part in tree.items()}
        return found if any(found[key] is not part for key, part in tree.items()) else tree
    return types.get(tree, tree) if isinstance(tree, torch.dtype | str | type) else tree


@dataclass(frozen=True)
class _Held:
    """An attribute of a module at one moment."""

    value: Any
    content: list[Any] | dict[Any, Any] | None  # a copy of what a list or dictionary had in it

    def same(self, other: _Held | None) -> bool:
        """True for the same object with the same contents."""
        if other is None or other.value is not self.value or self.content is None or other.content is None:
            return other is not None and other.value is self.value
        mine, theirs = (_numbered(held.content) for held in (self, other))
        return mine.keys() == theirs.keys() and all(mine[key] is theirs[key] for key in mine)

    def restored(self) -> Any:
        """The object, with what it had in it."""
        if self.content is not None:
            self.value.clear()
            self.value.extend(self.content) if isinstance(self.content, list) else self.value.update(self.content)
        return self.value


def _numbered(content: list[Any] | dict[Any, Any] | None) -> dict[Any, Any]:
    return content if isinstance(content, dict) else dict(enumerate(content or ()))


def held_by(model: nn.Module) -> dict[tuple[str, str], _Held]:
    """Attributes of modules beside parameters, buffers and other modules, by module and name."""
    return {
        (path, name): _Held(value, value.copy() if isinstance(value, list | dict) else None)
        for path, module in model.named_modules()
        for name, value in module.__dict__.items()
        if name not in _OF_TORCH and not name.startswith("_flatscope")
    }


def put_back(model: nn.Module, names: Iterable[tuple[str, str]], before: dict[tuple[str, str], _Held]) -> None:
    """Give attributes of modules the values that they had."""
    modules = dict(model.named_modules())
    for path, name in names:
        held = modules[path].__dict__ if path in modules else {}
        if (path, name) in before:
            held[name] = before[path, name].restored()
        else:
            held.pop(name, None)


class Passes:
    """Facts about the passes of one copied network.

    Args:
        forward: the user's own on the module itself; None for that of its class.

    Attributes:
        names_float32: whether a pass in float64 met float32.
        falls_to_float32: whether some operation of it exists in float32 only, so that results have no more digits.
        looked: whether a pass in float64 came to its end.
        kept: module and name of the attributes that passes write to.
    """

    def __init__(self, forward: Callable[..., Any] | None) -> None:
        self.forward = forward
        self.names_float32 = self.falls_to_float32 = self.looked = False
        self.kept: tuple[tuple[str, str], ...] = ()


def own_passes(model: nn.Module) -> None:
    """Let a network of ours run as this file says."""
    if not hasattr(model, _PASSES):
        object.__setattr__(model, _PASSES, Passes(model.__dict__.get("forward")))
        object.__setattr__(model, "forward", MethodType(_run, model))


def _run(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    passes: Passes = getattr(self, _PASSES)
    with DisableTorchFunction():  # no rule is to see this
        first = next((value for value in self.parameters() if value.is_floating_point()), torch.empty(0))
    double = first.dtype is torch.float64
    with ExitStack() as stack:
        stack.enter_context(settings_of_running_model(first.dtype, first.device))
        if double and (passes.names_float32 or not passes.looked):
            stack.enter_context(_InDouble(passes))
        if passes.kept:
            stack.callback(put_back, self, passes.kept, held_by(self))
        result = (
            type(self).forward(self, *args, **kwargs) if passes.forward is None else passes.forward(*args, **kwargs)
        )
    passes.looked |= double
    return result


def graph_nodes(ends: Iterable[Any]) -> list[Any]:
    """All nodes of an autograd graph from which these are computed, themselves included and first."""
    waiting, found = [node for node in ends if node is not None], dict[Any, None]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found[node] = None
            waiting += [before for before, _ in node.next_functions if before is not None]
    return list(found)


def keep_out(model: nn.Module, names: Iterable[tuple[str, str]]) -> None:
    """Put these attributes of a network of ours back after each of its passes."""
    getattr(model, _PASSES).kept = tuple(names)


def digits_of(model: nn.Module) -> torch.dtype:
    """The type whose rounding a network's outputs have: float32 also where one of its operations has no float64."""
    dtype = next(value.dtype for value in model.parameters() if value.is_floating_point())
    return torch.float32 if getattr(getattr(model, _PASSES, None), "falls_to_float32", False) else dtype
