"""A pass whose operations are remembered, so that others with a few changed weights begin where these come in.

Rounding one layer of fifty leaves all before it as it was: half of the work on average. Which operations a change does
not reach is seen, not traced: an operation is run again where one of its tensors is not that of the remembered pass.
Where the network takes another way than then, everything is run from there on. Where a remembered tensor would be read
after a write in place that came later, or has been written to, the whole pass is run again plainly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from flatscope.network.interception import tensors_in
from flatscope.params import Params

# What an operation may take or return beside tensors: values that can be compared, and that hide no tensor.
PLAIN: tuple[type, ...] = (int, float, complex, str, type(None), type(...), type)
PLAIN += (torch.Size, torch.dtype, torch.device, torch.layout, torch.memory_format)


class Remembered(NamedTuple):
    """One operation of the remembered pass."""

    function: Any
    reads: tuple[int, ...]  # identities of its tensors
    versions: tuple[int, ...]  # how often each had been written to
    result: Any


class Known(NamedTuple):
    """A tensor of the remembered pass, and how often it had been written to when it was first seen."""

    value: Tensor
    version: int


class _Stale(BaseException):
    """A remembered tensor is not what the operation would have seen; no model's `except Exception` takes this."""


class IncrementalPass:
    """Outputs of a network on a batch, and again with other weights.

    Args:
        run: outputs at weights.
        params: the weights to begin with.
        given: inputs and buffers, tensors that no operation makes.

    Attributes:
        outputs: at these weights.
        shared: False where nothing can be taken over and every pass is run plainly.
    """

    def __init__(self, run: Callable[[Params], Tensor], params: Params, given: Iterable[Tensor] = ()) -> None:
        self._run = run
        recorder = _Remembering([*params.values(), *given])
        with torch.no_grad(), recorder:
            self.outputs = run(params)
        recorder.see([self.outputs])
        self.shared = recorder.sound and not (recorder.unseen and recorder.written)
        self._operations = recorder.operations if self.shared else []
        self._known = recorder.known if self.shared else {}
        self._versions = {key: value._version for key, (value, _) in self._known.items()}

    @property
    def bytes(self) -> int:
        """Bytes that are held, those of the weights included."""
        storages = [value.untyped_storage() for value, _ in self._known.values() if value.layout == torch.strided]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    def again(self, params: Params) -> Tensor:
        """Outputs at other weights; those that did not change have to be the same tensors as before."""
        if not self.shared:
            return self._run(params)
        outputs = None
        try:
            with _Replay(self._operations, self._known):
                outputs = self._run(params)
        except _Stale:
            pass
        self.shared = all(value._version == self._versions[key] for key, (value, _) in self._known.items())
        return outputs if outputs is not None and self.shared else self._run(params)


class _Remembering(TorchFunctionMode):
    """Remembers every operation of a pass.

    Attributes:
        sound: whether every operation can be taken over.
        unseen: whether a tensor was read that no operation had made.
        written: whether a tensor was written to in place.
    """

    def __init__(self, given: Iterable[Tensor]) -> None:
        super().__init__()
        self.operations: list[Remembered] = []
        self.known: dict[int, Known] = {}  # by identity; held, so that no other tensor takes it
        self.sound, self.unseen, self.written = True, False, False
        self._made = set(map(id, given))

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        words = kwargs or {}
        read = [*tensors_in(args), *tensors_in(words)]
        self.sound = self.sound and _plain((args, words)) and all(map(_ordinary, read))
        if not self.sound:
            return func(*args, **words)
        versions = _versions(read)
        self.see(read)
        result = func(*args, **words)
        made = list(tensors_in(result))
        self.sound = _plain(result) and all(map(_ordinary, made))
        self.written |= _versions(read) != versions
        self.operations.append(Remembered(func, tuple(map(id, read)), versions, result))
        for value in (*read, *made) if self.sound else ():
            self.known.setdefault(id(value), Known(value, value._version))
        self._made |= set(map(id, made))
        return result

    def see(self, read: Iterable[Tensor]) -> None:
        """Note whether all these tensors are made by operations."""
        self.unseen |= any(id(value) not in self._made for value in read)


class _Replay(TorchFunctionMode):
    """Takes results over for as long as nothing that an operation reads has changed."""

    def __init__(self, operations: list[Remembered], known: Mapping[int, Known]) -> None:
        super().__init__()
        self._operations, self._known = operations, known
        self._at = 0
        self._same_way = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        words = kwargs or {}
        read = [*tensors_in(args), *tensors_in(words)]
        then = self._operation(func, len(read))
        if then is not None and then.reads == tuple(map(id, read)):
            return then.result
        self._refuse_stale(read, then)
        result = func(*args, **words)
        self._same_way = self._same_way and then is not None and _alike(result, then.result)
        return result

    def _operation(self, func: Callable[..., Any], reads: int) -> Remembered | None:
        """The operation of the remembered pass that stands here; None from where the ways part."""
        if not self._same_way or self._at >= len(self._operations):
            return None
        operation = self._operations[self._at]
        self._at += 1
        self._same_way = operation.function == func and len(operation.reads) == reads
        return operation if self._same_way else None

    def _refuse_stale(self, read: list[Tensor], then: Remembered | None) -> None:
        """Raise where a remembered tensor has been written to since this operation saw it, or at all."""
        for place, value in enumerate(read):
            known = self._known.get(id(value))
            if known is None:
                continue
            seen_then = then is not None and then.reads[place] == id(value)
            if value._version != (then.versions[place] if then is not None and seen_then else known.version):
                raise _Stale


def _versions(values: list[Tensor]) -> tuple[int, ...]:
    return tuple(value._version for value in values)


def _ordinary(value: Tensor) -> bool:
    """True for a tensor that outlives the operation and counts what is written to it."""
    return not (value.is_inference() or torch._C._functorch.is_functorch_wrapped_tensor(value))


def _plain(tree: Any) -> bool:
    """True where nothing but tensors and plain values is in nested tuples, lists and dictionaries."""
    if isinstance(tree, tuple | list):
        return all(map(_plain, tree))
    if isinstance(tree, dict):
        return all(map(_plain, tree.values()))
    if isinstance(tree, slice):
        return _plain((tree.start, tree.stop, tree.step))
    return isinstance(tree, (Tensor, *PLAIN))


def _alike(one: Any, other: Any) -> bool:
    """True where two results differ in nothing but the values of their tensors."""
    if isinstance(one, Tensor):
        return isinstance(other, Tensor) and one.shape == other.shape and one.dtype == other.dtype
    if isinstance(one, tuple | list):
        return type(one) is type(other) and len(one) == len(other) and all(map(_alike, one, other))
    if isinstance(one, dict):
        return (
            isinstance(other, dict) and one.keys() == other.keys() and all(_alike(one[key], other[key]) for key in one)
        )
    return type(one) is type(other) and one == other
