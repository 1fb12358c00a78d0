"""What a forward pass takes from its input by jumps: truth values, whole numbers, places of maxima.

They stand still where the input moves a little, and so look like constants of the network. They are constants of one
sample only: another one is compared, rounded or routed otherwise. Rules that speak of all inputs must not use them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any, NoReturn

import torch
from torch import Tensor

from flatscope.errors import NotApplicable
from flatscope.network.interception import Operation, address_of, tensors_in
from flatscope.network.operations import LEAVES_TORCH, TABLE

# Results have as many entries as values decide, so that even their shapes say something of the sample.
_COUNTED = ("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive")
_OF_ALL_NUMBERS = ("isnan", "isinf", "isfinite", "isposinf", "isneginf")  # the same for all inputs that are numbers
_COMPARISONS = ("gt", "ge", "lt", "le")
_KEEP_SIGNS = ("to", "float", "double", "half", "bfloat16", "type", "clone", "detach", "invert", "logical_not")
_CASTS = ("float", "int", "bool")
_SMOOTH = 15  # threshold from which on a softplus jumps by less than 3e-7
_UNSEEN = "an operation that cannot be followed (a scripted function, or torch.func.vmap)"


class Discontinuities:
    """The tensors of one forward pass that depend on the input through operations that no rule follows.

    The network must run with inputs that take part in differentiation, and weights that do not: what has a gradient
    then, and is not known, comes from an operation that was not seen.

    Args:
        known: the tensors that depend on the input in a way that rules follow; others are added to it.
        what: is missing where the outputs are made of such tensors, for the message.
    """

    def __init__(self, known: Container[Any], what: str) -> None:
        self._known, self._what = known, what
        self._places: dict[Tensor, str] = {}
        self._written: dict[int | None, tuple[Tensor, str]] = {}  # by address; kept, so that no address is used twice
        self._signs: dict[Tensor, tuple[Tensor, int]] = {}  # comparisons of a signal, of that version, with zero

    def place(self, tensor: Tensor) -> str:
        """The operation that took it from a signal; empty for signals and for constants."""
        if tensor in self._known:
            return ""
        if tensor in self._places:
            return self._places[tensor]
        if tensor.requires_grad or torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            return _UNSEEN
        return self._written[address_of(tensor)][1] if self._written and address_of(tensor) in self._written else ""

    def refuse(self, place: str) -> NoReturn:
        """Outputs are made of what this operation gives."""
        raise NotApplicable(f"{self._what} is known where values decide what is computed", where=place)

    def refuse_outputs(self, outputs: Tensor) -> None:
        """Refuse outputs that depend on the input by jumps."""
        if place := self.place(outputs):
            self.refuse(place)

    def answers(self, op: Operation) -> bool:
        """True for an operation on jumps or constants alone, which `follow` runs.

        Where a value is read, or where jumps meet a signal, the operation is refused.
        """
        signal = any(tensor in self._known for tensor in op.tensors)
        places = [place for tensor in op.tensors if (place := self.place(tensor))]
        if (signal or places) and (_reads(op) or op.name in _COUNTED or _switches(op)):
            self.refuse(op.place)
        if signal and places and not self.rectifies(op) and not self._asks(op):
            self.refuse(places[0])
        return not signal

    def follow(self, op: Operation) -> Any:
        """Run an operation without signals, and remember what comes of jumps."""
        places = [place for tensor in op.tensors if (place := self.place(tensor))]
        result = op.run()
        if places and not self._asks(op):
            self._take(op, list(tensors_in(result)), places[0])
            signs = [self._signs[tensor] for tensor in op.tensors if tensor in self._signs]
            if op.name in _KEEP_SIGNS and len(signs) == 1 and isinstance(result, Tensor):
                self._signs[result] = signs[0]
        return result

    def note(self, op: Operation, result: Any) -> None:
        """Remember what an operation on signals gives besides real numbers."""
        meaning = TABLE.get(op.name)
        if op.name in _OF_ALL_NUMBERS or (meaning is not None and meaning.creates):
            return
        if _rounds(op, result):
            self.refuse(op.place)
        whole = [tensor for tensor in tensors_in(result) if not tensor.is_floating_point()]
        self._take(op, whole, op.place)
        if op.name in _COMPARISONS and len(whole) == 1:
            given = op.named("input", "other")
            if given["input"] in self._known and _is_zero(given.get("other")):
                self._signs[whole[0]] = given["input"], given["input"]._version

    def wrote(self, op: Operation, target: Tensor) -> None:
        """Views of a constant that a signal was written into are no constants any longer."""
        self._written[address_of(target)] = target, op.place

    def rectifies(self, op: Operation) -> bool:
        """True for the ReLU of a signal in other words: `h * (h > 0)`, or zeros where it is negative."""
        masks = [tensor for tensor in op.tensors if tensor in self._signs]
        if len(masks) != 1 or masks[0] not in self._places:
            return False
        signal, version = self._signs[masks[0]]
        others = [value for value in (*op.args, *op.kwargs.values()) if value is not masks[0]]
        rest = [value for value in others if value is not signal]
        if signal._version != version or len(rest) != len(others) - 1:
            return False
        if op.name == "mul":
            return not rest
        return (
            op.name in ("where", "masked_fill") and len(rest) == 1 and not self.place_of(rest[0]) and _is_zero(rest[0])
        )

    def place_of(self, value: Any) -> str:
        """The operation that took a value from a signal, or "a signal"; empty for constants."""
        return "" if not isinstance(value, Tensor) else "a signal" if value in self._known else self.place(value)

    def _asks(self, op: Operation) -> bool:
        """True where only the shape and type of a jumping tensor are read."""
        meaning = TABLE.get(op.name)
        if meaning is not None and meaning.creates and not op.in_place:
            return not any(self.place(tensor) for tensor in op.tensors[1:])
        return op.name in ("type_as", "expand_as", "view_as", "reshape_as") and not self.place(op.tensors[0])

    def _take(self, op: Operation, made: list[Tensor], place: str) -> None:
        for tensor in made:
            self._places[tensor] = place
        if op.name == "setitem" or op.in_place:
            self._places[op.tensors[0]] = place
            self._written[address_of(op.tensors[0])] = op.tensors[0], place


def _reads(op: Operation) -> bool:
    """True for an operation that makes a Python value of a tensor's entries: `float(x)`, but not `x.float()`."""
    return op.name in LEAVES_TORCH and (op.name not in _CASTS or getattr(op.function, "__name__", "").startswith("__"))


def _switches(op: Operation) -> bool:
    """True for a softplus whose `threshold`, where it becomes a straight line, is so low that it jumps there."""
    threshold = op.named("input", "beta", "threshold").get("threshold", 20) if op.name == "softplus" else 20
    return not threshold >= _SMOOTH


def _rounds(op: Operation, result: Any) -> bool:
    """True where real numbers come out with fewer digits than they had."""
    given, made = ([t.dtype for t in tensors if t.is_floating_point()] for tensors in (op.tensors, tensors_in(result)))
    return bool(given and made) and torch.finfo(made[0]).eps > max(torch.finfo(dtype).eps for dtype in given)


def _is_zero(value: Any) -> bool:
    return not bool((value != 0).any()) if isinstance(value, Tensor) else isinstance(value, int | float) and value == 0
