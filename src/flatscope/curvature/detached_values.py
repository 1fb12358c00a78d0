"""What a network takes for a constant, held as it was at the weights themselves while the weights are moved."""

from __future__ import annotations

from typing import Any

import torch

from flatscope.network.interception import Operation, OperationRule, tensors_in, with_tensors
from flatscope.network.operations import TO_PYTHON


class DetachedValues:
    """Results that passes take for constants: kept from the first pass, and given to the others in the same order."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._at, self._first, self._stopped = 0, True, False

    def recorded(self) -> OperationRule:
        """The rule for the first pass."""
        self._first, self._stopped = True, False
        return self.follow

    def held(self) -> OperationRule | None:
        """The rule for another pass; None where the first took nothing for a constant."""
        self._first, self._at, self._stopped = False, 0, False
        return self.follow if self._kept else None

    def follow(self, op: Operation) -> Any:
        """Run one operation, or give what it was in the first pass."""
        if op.name == "embedding" and torch.is_grad_enabled():
            return self._looked_up(op)
        if op.name == "set_grad_enabled":  # by no_grad and enable_grad, not by the forward of an autograd function
            self._stopped = not op.args[0]
            return op.run()
        result = op.run()
        if not (self._stopped or (torch.is_grad_enabled() and _is_constant(op, result))):
            return result
        written = op.args[0] if op.name == "setitem" or op.in_place else None
        found = result if written is None else written
        if self._first:
            self._kept.append(with_tensors(found, lambda value: value.detach().clone()))
            return result
        kept, self._at = self._kept[self._at], self._at + 1
        if written is None:
            return with_tensors(kept, torch.clone)
        with torch.no_grad():
            written.copy_(kept)
        return result

    def _looked_up(self, op: Operation) -> Any:
        """A lookup gives the word of padding no gradient: what it looks up there is a constant."""
        result, given = op.run(), op.layer_arguments()
        if given.get("padding_idx") is None:
            return result
        if self._first:
            self._kept.append(result.detach().clone())
            return result
        kept, self._at = self._kept[self._at], self._at + 1
        padding = given["input"] == given["padding_idx"] % len(given["weight"])
        return torch.where(padding.unsqueeze(-1), kept, result)


def _is_constant(op: Operation, result: Any) -> bool:
    """True for an operation whose result has no derivative: what is detached, and numbers of Python."""
    read = op.name in TO_PYTHON and not any(True for _ in tensors_in(result))  # torch.complex gives a tensor
    return read or op.name in ("detach", "data")
