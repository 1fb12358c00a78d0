"""For which parameters is the Hessian block exactly the Gauss-Newton block?

Where everything between a parameter and the outputs is piecewise linear, and the parameter is used once, the second
derivative of the outputs with respect to it vanishes almost everywhere. The table of operations says so operation by
operation; a numerical probe checks that the network was read correctly.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flatscope.network.operations import PIECES, PRODUCT, RATIO, TABLE
from flatscope.network.products import NORM_ORDER
from flatscope.network.program import Operation, is_in_place, tensors_in
from flatscope.params import Params

_CUTS = ("detach", "data", "sign", "gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "isnan", "isfinite")


class Linearity:
    """A rule for `watched` that follows which parameters each tensor depends on, and where that is curved.

    Args:
        leaves: the parameters in question, by name.
    """

    def __init__(self, leaves: Params) -> None:
        self._bits = {name: 1 << i for i, name in enumerate(leaves)}
        # By memory, so that a view written in place changes what it is a view of; tensors are kept, so that no address
        # is used twice.
        self._masks: dict[int, int] = {}
        self._kept: list[Tensor] = []
        self.curved: dict[str, str] = {}
        for name, value in leaves.items():
            self._add(value, self._bits[name])

    def follow(self, op: Operation) -> Any:
        """Run one operation, and note what its result depends on."""
        result = op.run()
        outcomes = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        if op.name == "setitem" or is_in_place(op):
            outcomes.append(op.tensors[0])
        masks = [self.mask(tensor) for tensor in op.tensors]
        total = 0
        for mask in masks:
            total |= mask
        if not outcomes or not total or self._is_constant(op):
            for tensor in outcomes:
                self._kept.append(tensor)
            return result
        self._judge(op, masks, total)
        for tensor in outcomes:
            self._add(tensor, total)
        return result

    def mask(self, tensor: Tensor) -> int:
        """Bits of the parameters that a tensor depends on."""
        return self._masks.get(tensor.untyped_storage().data_ptr(), 0)

    def reached(self, outputs: Tensor) -> set[str]:
        """Names of the parameters that the outputs depend on at all."""
        mask = self.mask(outputs)
        return {name for name, bit in self._bits.items() if mask & bit}

    def _add(self, tensor: Tensor, mask: int) -> None:
        self._kept.append(tensor)
        place = tensor.untyped_storage().data_ptr()
        self._masks[place] = self._masks.get(place, 0) | mask

    def _is_constant(self, op: Operation) -> bool:
        meaning = TABLE.get(op.name)
        return op.name in _CUTS or (meaning is not None and meaning.creates)

    def _judge(self, op: Operation, masks: list[int], total: int) -> None:
        """Mark the parameters in which this operation is not piecewise linear."""
        meaning = TABLE.get(op.name)
        linear = "" if meaning is None else meaning.linear
        if op.name == "batch_norm" and op.named(*NORM_ORDER).get("training"):
            linear = ""
        if linear == PIECES:
            return
        if linear == PRODUCT:
            seen = 0
            for mask in masks:
                self._taint(seen & mask, f"{op.place} multiplies it with itself")
                seen |= mask
        elif linear == RATIO:
            first = op.args[0] if op.args else op.kwargs.get("input")
            divisor = total if not isinstance(first, Tensor) else masks[1] if len(masks) > 1 else 0
            self._taint(divisor, f"it stands in a denominator ({op.place})")
        else:
            self._taint(total, f"{op.place} is not piecewise linear")

    def _taint(self, mask: int, reason: str) -> None:
        for name, bit in self._bits.items():
            if mask & bit:
                self.curved.setdefault(name, reason)


_CHOOSING = (
    "item",
    "tolist",
    "bool",
    "int",
    "float",
    "index",
    "numpy",
    "nonzero",
    "argwhere",
    "masked_select",
    "unique",
)
_INDEXED = ("getitem", "setitem", "index_select", "index_add", "index_put", "index_copy", "take", "masked_scatter")


class Choices:
    """A rule for `watched` that finds whether values decide what is computed: branches, masks, routed samples."""

    def __init__(self) -> None:
        self.found = ""

    def follow(self, op: Operation) -> Any:
        """Run one operation."""
        by_value = op.name in _CHOOSING and bool(op.tensors)
        by_index = op.name in _INDEXED and any(not t.is_floating_point() for t in op.tensors)
        if by_value or by_index:
            self.found = self.found or op.place
        return op.run()
