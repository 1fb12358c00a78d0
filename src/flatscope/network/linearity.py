"""For which parameters the Hessian block is exactly the Gauss-Newton block, read off the recorded program.

Where everything between a parameter and the outputs is piecewise linear, and the parameter is used once, the second
derivative of the outputs with respect to it vanishes almost everywhere. A numerical check of the sweep confirms it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from flatscope.network.interception import NORM_ORDER
from flatscope.network.not_covered import NotCovered
from flatscope.network.operations import PIECES, PRODUCT, RATIO, TABLE, TO_PYTHON
from flatscope.network.program import NO_MEMORY, Program, Slot, Step

# Operations whose results have no derivative.
_CUTS = ("detach", "data", "sign", "gt", "lt", "ge", "le", "eq", "ne", "argmax", "argmin", "isnan", "isfinite")
_UNSEEN = "a part of the network, such as a scripted function, cannot be seen"
_HIDDEN = "torch.func.vmap hides what is computed"


class Linearity:
    """The parameters that each tensor of a program depends on, and where that is curved.

    Args:
        program: of the network.
        names: the parameters in question.

    Attributes:
        curved: parameters in which the outputs are not piecewise linear, with the first reason.
        curved_steps: numbers of the steps that are curved in some parameter.
        reads: how many steps read each parameter itself; taking a view of it is no read.
        reached: parameters that the outputs depend on at all.
    """

    def __init__(self, program: Program, names: Iterable[str]) -> None:
        self._bits = {name: 1 << i for i, name in enumerate(names)}
        self._all = sum(self._bits.values())
        # By memory, so that a view written in place changes what it is a view of.
        self._masks: dict[int, int] = {}
        for name, bit in self._bits.items():
            self._add(program.parameters[name], bit)
        self._owners = {program.parameters[name]: name for name in self._bits}
        self.curved = NotCovered()
        self.curved_steps: set[int] = set()
        self.reads: Counter[str] = Counter()
        for step in program.steps:
            self._follow(step)
        self._notice(None, program.output)
        mask = self._mask(program.output)
        self.reached = {name for name, bit in self._bits.items() if mask & bit}

    def _follow(self, step: Step) -> None:
        reads = step.reads
        for slot in reads:
            self._notice(step, slot)
        outcomes = [slot for slot in step.results if slot.is_real]
        if step.written is not None:
            outcomes.append(step.written)
        if any(slot.memory == NO_MEMORY for slot in (*reads, *outcomes)):
            self._taint(step, self._all, _HIDDEN)
        masks = [self._mask(slot) for slot in reads]
        total = 0
        for mask in masks:
            total |= mask
        meaning = TABLE.get(step.name)
        if not outcomes or not total or step.name in _CUTS or (meaning is not None and meaning.creates):
            return
        self._judge(step, masks, total)
        made = {slot.memory for slot in outcomes}
        read = {slot.memory for slot in reads} - made
        self.reads.update(self._owners[memory] for memory in read & self._owners.keys())
        for slot in outcomes:
            self._add(slot.memory, total)

    def _mask(self, slot: Slot) -> int:
        """Bits of the parameters that a tensor depends on."""
        return self._masks.get(slot.memory, 0)

    def _add(self, memory: int, mask: int) -> None:
        self._masks[memory] = self._masks.get(memory, 0) | mask

    def _notice(self, step: Step | None, slot: Slot) -> None:
        """A tensor with a gradient that nothing recorded has given (`torch.jit.script`) may be any function of all."""
        if slot.requires_grad and not self._mask(slot):
            self._taint(step, self._all, _UNSEEN)
            self._add(slot.memory, self._all)

    def _judge(self, step: Step, masks: list[int], total: int) -> None:
        """Mark the parameters in which this step is not piecewise linear."""
        meaning = TABLE.get(step.name)
        linear = "" if meaning is None else meaning.linear
        if step.name == "batch_norm" and step.named(*NORM_ORDER).get("training"):
            linear = ""
        if linear == PIECES:
            return
        if linear == PRODUCT:
            seen = 0
            for mask in masks:
                self._taint(step, seen & mask, f"{step.place} multiplies it with itself")
                seen |= mask
        elif linear == RATIO:
            first = step.args[0] if step.args else step.kwargs.get("input")
            divisor = total if not isinstance(first, Slot) else masks[1] if len(masks) > 1 else 0
            self._taint(step, divisor, f"it stands in a denominator ({step.place})")
        elif meaning is None:
            self._taint(step, total, f"nothing is known of {step.place}, which may be curved")
        else:
            self._taint(step, total, f"{step.place} is not piecewise linear")

    def _taint(self, step: Step | None, mask: int, reason: str) -> None:
        if mask and step is not None:
            self.curved_steps.add(step.index)
        for name, bit in self._bits.items():
            if mask & bit:
                self.curved.note(name, reason)


CHOOSING = (*TO_PYTHON, "nonzero", "argwhere", "masked_select", "unique")
_INDEXED = ("getitem", "setitem", "index_select", "index_add", "index_put", "index_copy", "take", "masked_scatter")


def choice_in(program: Program) -> str:
    """The first step whose values decide what is computed: a branch, a mask, routed samples. Empty if none does."""
    for step in program.steps:
        by_value = step.name in CHOOSING and bool(step.reads)
        by_index = step.name in _INDEXED and any(not slot.dtype.is_floating_point for slot in step.reads)
        if by_value or by_index:
            return step.place
    return ""
