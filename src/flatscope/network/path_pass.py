"""The pass behind path norms: a network run on sums over paths instead of values."""

from __future__ import annotations

import math
from typing import Any

from torch import Tensor

from flatscope.network.operations import LEAVES_TORCH, TABLE
from flatscope.network.path_rules import Paths
from flatscope.network.program import Operation, is_in_place, tensors_in


class PathPass(Paths):
    """A rule for `replay` that lets sums over paths travel through a network."""

    def follow(self, op: Operation) -> Any:
        """Stand in for one torch operation."""
        if not any(self.knows(tensor) for tensor in op.tensors):
            return op.run()  # about constants or the weights themselves
        if op.name == "setitem":
            return self._set_item(op)
        meaning = TABLE.get(op.name)
        if meaning is not None and meaning.creates and not is_in_place(op):
            return op.run()  # a constant of the same shape
        rule = None if meaning is None else meaning.paths
        if meaning is not None and rule is None and self.curves and meaning.slope is not None:
            x = self.one_signal(op)
            return self.start(x * meaning.slope**self.p, self.log_scale(x))
        if rule is None:
            result = op.run()  # a question about its shape, perhaps
            if any(True for _ in tensors_in(result)) or op.name in LEAVES_TORCH:
                self.refuse(op)
            return result
        if "out" in op.kwargs:
            self.refuse(op)
        result, log_scale = rule(self, op)
        if is_in_place(op):
            return self._written(op.args[0], result, log_scale)
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.start(tensor, log_scale)
        return result

    def _set_item(self, op: Operation) -> None:
        """Entries overwritten in place, in a tensor of paths or of zeros."""
        target, index, value = op.args
        if not self.knows(target):
            if bool((target != 0).any()):
                self.refuse(op, "in a constant")
            self.start(target, self.log_scale(value) if self.knows(value) else 0.0)
        shift = (self.log_scale(value) if self.knows(value) else 0.0) - self.log_scale(target)
        paths = value if self.knows(value) else self.power(value) * float(self.biases)
        target[index] = paths * math.exp(shift)

    def _written(self, target: Tensor, result: Tensor, log_scale: float) -> Tensor:
        """An operation in place: the target keeps its scale, since views of it may be in use."""
        if not self.knows(target):
            self.start(target, log_scale)
        target.copy_(result * math.exp(log_scale - self.log_scale(target)))
        return target
