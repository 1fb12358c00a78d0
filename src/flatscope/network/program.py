"""The recorded program of a network: the operations of one forward pass, each with the tensors it reads and writes.

A pass is recorded once for each form of a network and kept by its problem. Questions of structure (which layers there
are, what each parameter is used for, where the outputs are not piecewise linear, which axis has the samples) are loops
over the steps. The record holds no tensors: numbers that depend on values need the network to run again, watched.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch

from flatscope.network.interception import (
    LAYER_CALLS,
    Call,
    instances_in,
)
from flatscope.network.layer_uses import LayerUse, Role, layer_use
from flatscope.network.not_covered import NotCovered

NO_MEMORY = -1  # of tensors inside torch.func.vmap


@dataclass(frozen=True)
class Slot:
    """One tensor at one moment: a write in place makes a new slot of the same memory."""

    index: int
    tensor: int  # number of the tensor that it is a moment of
    shape: tuple[int, ...]
    dtype: torch.dtype
    memory: int  # number of the memory it lies in: views of one another share it
    role: Role | None  # the parameter that it stands for
    requires_grad: bool  # whether autograd follows it

    @property
    def is_real(self) -> bool:
        """True for floating-point and complex entries, which derivatives go through."""
        return self.dtype.is_floating_point or self.dtype.is_complex


@dataclass(frozen=True)
class Step(Call):
    """One call of a forward pass, with slots where its arguments had tensors."""

    index: int
    results: tuple[Slot, ...]
    written: Slot | None  # the argument that it changes in place, afterwards
    transformed: bool  # whether it runs inside torch.func, where the rows of single samples cannot be seen
    without_gradients: bool  # whether it runs under no_grad

    @property
    def reads(self) -> tuple[Slot, ...]:
        """The slots among its arguments, in order."""
        return (*slots_in(self.args), *slots_in(self.kwargs))


@dataclass(frozen=True)
class Program:
    """The operations of one forward pass in order, those in attention one by one.

    Example:
        >>> import torch
        >>> from flatscope.network.structure import record_structure
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> program = record_structure(net, torch.ones(2, 4), dict(net.named_parameters())).program
        >>> [(step.name, step.module) for step in program.steps]
        [('linear', '0'), ('relu', '1'), ('linear', '2')]
        >>> [(use.weight, use.bias, use.kind) for use in program.layer_uses()]
        [('0.weight', '0.bias', 'dense'), ('2.weight', '2.bias', 'dense')]
    """

    steps: tuple[Step, ...]
    inputs: tuple[Slot, ...]
    output: Slot
    parameters: dict[str, int]  # the memory of each parameter
    n_samples: int

    def layer_uses(self) -> list[LayerUse[Slot]]:
        """Uses of weights by layers and of BatchNorm's scales, in forward order."""
        found = []
        for step in self.steps:
            use = None if step.transformed or not step.results else layer_use(step, _role_of)
            if use is not None:
                (output, *_) = step.results
                found.append(replace(use, output_shape=output.shape, follows=output.requires_grad, step=step.index))
        return found

    def not_covered(self) -> NotCovered:
        """Weights that a layer's operation reads inside torch.func."""
        found = NotCovered()
        for step in self.steps:
            if step.transformed and step.name in LAYER_CALLS:
                role = _role_of(step.layer_arguments()["weight"])
                if role is not None:
                    found[role.parameter] = f"read by {step.place} inside torch.func"
        return found

    def behind(self, names: Collection[str]) -> frozenset[int]:
        """Numbers of the steps that read what these parameters have a part in, beside the parameters themselves."""
        own = set(self.parameters.values())
        made = own | {slot.memory for slot in self.inputs}
        moved, reached, found = {self.parameters[name] for name in names}, set[int](), set[int]()
        for step in self.steps:
            reads = {slot.memory for slot in step.reads}
            if reads & reached or any(slot.requires_grad and slot.memory not in made for slot in step.reads):
                found.add(step.index)
            outcomes = {slot.memory for slot in (*step.results, *([step.written] if step.written else []))}
            made |= outcomes
            if step.index in found or reads & moved:
                reached |= outcomes - own  # a view of a parameter is that parameter
        return frozenset(found)

    def has_hidden_parts(self) -> bool:
        """True where a step reads, or the output is, what depends on parameters and no step has made."""
        made = {*self.parameters.values(), *(slot.memory for slot in self.inputs)}
        for step in self.steps:
            if any(slot.requires_grad and slot.memory not in made for slot in step.reads):
                return True
            made |= {slot.memory for slot in step.results}
        return self.output.memory not in made

    def held_bytes(self) -> int:
        """Bytes of all numbers that the pass computes."""
        sizes: dict[int, int] = {}
        skipped = {*self.parameters.values(), *(slot.memory for slot in self.inputs)}
        for step in self.steps:
            for slot in step.results:
                if slot.is_real and slot.memory not in skipped:
                    size = slot.dtype.itemsize * torch.Size(slot.shape).numel()
                    sizes[slot.memory] = max(sizes.get(slot.memory, 0), size)
        return sum(sizes.values())


def _role_of(value: Any) -> Role | None:
    return value.role if isinstance(value, Slot) else None


def slots_in(tree: Any) -> Iterator[Slot]:
    """The slots in nested tuples, lists and dictionaries, in order."""
    return instances_in(tree, Slot)


@dataclass(frozen=True)
class Dead:
    """Operations that do not reach the output, by their number in a forward pass; those in `ABOUT` have none."""

    order: tuple[str, ...]  # names of all operations of a pass
    numbers: frozenset[int]
    idle: frozenset[str]  # parameters that only these read
