"""Which operations of a forward pass do not reach the output, such as those of a head that is run and dropped.

They are found by going backwards through the steps of a recorded pass, and believed only where outputs stay the same
with NaN in the place of their results. Every reading of a network then leaves them out: they are run, and nobody sees
them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.network.interception import Operation, address_of, is_question, replay_for_structure, with_tensors
from flatscope.network.normal_form_pass import seen_inside
from flatscope.network.passes import graph_nodes
from flatscope.network.program import NO_MEMORY, Dead, Program, Slot
from flatscope.params import independent_module_copy
from flatscope.samples import Inputs, copied_inputs


def dead_steps(program: Program, ends: Iterable[Slot], origins: dict[int, list[Any]], nodes: Iterable[Any]) -> Dead:
    """Steps without which the ends would be the same.

    Going backwards: a step lives where what it made or changed is read by one that lives, or is an end, or where
    autograd knows a way from it to an end that nobody saw (through a scripted function, say).

    Args:
        program: the operations as the network has them, in no other words.
        ends: the tensors that count of what it returns.
        origins: the nodes of the autograd graph that the results of each step have.
        nodes: those of the ends.
    """
    reached, steps = set(graph_nodes(nodes)), program.steps
    live, places = {slot.tensor for slot in ends}, {slot.memory for slot in ends}
    dead, seen_by_live, seen_by_dead = set[int](), set[int](), set[int]()
    for step in reversed(steps):
        told = not step.results and step.written is None  # Python has learned a value
        lives = told or any(slot.tensor in live for slot in step.results)
        lives |= step.written is not None and step.written.memory in places
        lives |= any(origin in reached for origin in origins.get(step.index, ()))
        read = {slot.memory for slot in step.reads}
        if lives:
            live |= {slot.tensor for slot in step.reads}
            places |= read
            seen_by_live |= read
        else:
            dead.add(step.index)
            seen_by_dead |= read
    slots = [slot for number in dead for slot in steps[number].reads]
    hidden = any(slot.memory == NO_MEMORY for step in steps for slot in (*step.reads, *step.results))
    if hidden or not any(slot.dtype.is_floating_point for slot in slots):
        dead.clear()  # inside vmap nobody sees who reads what; shapes and whole numbers matter to no reading
    idle = {name for name, memory in program.parameters.items() if memory in seen_by_dead - seen_by_live}
    return Dead(tuple(step.name for step in steps), frozenset(dead), frozenset(idle if dead else ()))


def dead_operations(
    passes: Iterable[Dead], model: nn.Module, example: Inputs, outputs: Callable[[Any], list[Tensor]]
) -> Dead | None:
    """Operations that the outputs need in none of these passes; None if there are none, or passes differ.

    Args:
        passes: no more than the first are read where that needs everything.
        model: in eval mode, without a plan.
        example: some samples.
        outputs: the tensors that count of what the model returns.
    """
    found: Dead | None = None
    for here in passes:
        if found is None:
            found = here
        elif found.order != here.order:
            return None
        else:
            found = replace(found, numbers=found.numbers & here.numbers, idle=found.idle & here.idle)
        if not found.numbers:
            return None
    if found is None or not _is_the_same_without(found, model, example, outputs):
        return None
    return found


def _is_the_same_without(
    found: Dead, model: nn.Module, example: Inputs, outputs: Callable[[Any], list[Tensor]]
) -> bool:
    """True where the outputs stay the same with NaN in the place of dead results."""
    ends = []
    try:
        for spoilt in (frozenset[int](), found.numbers):
            twin = independent_module_copy(model)
            rule = _Spoiling(spoilt).follow
            with seen_inside(twin, lambda _, rule=rule: rule):  # type: ignore[misc]
                ends.append(outputs(replay_for_structure(twin, copied_inputs(example), [])))
    except Exception:  # the network looks at its own values
        return False
    return all(torch.equal(one, other) for one, other in zip(*ends, strict=True))


class _Spoiling:
    """A rule that puts NaN in the place of some results, where they have memory of their own.

    Args:
        numbers: of the operations.
    """

    def __init__(self, numbers: frozenset[int]) -> None:
        self._numbers, self._at = numbers, -1

    def follow(self, op: Operation) -> Any:
        """Run one operation."""
        if is_question(op):
            return op.run()
        self._at += 1
        given = op.tensors
        versions = [tensor._version for tensor in given]
        result = op.run()
        if self._at not in self._numbers or versions != [tensor._version for tensor in given]:
            return result
        places = {address_of(tensor) for tensor in given}
        return with_tensors(result, lambda value: value if address_of(value) in places else _spoilt(value))


def _spoilt(value: Tensor) -> Tensor:
    return value * torch.nan if value.is_floating_point() or value.is_complex() else value
