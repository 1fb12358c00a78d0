"""The recorded program of a network: the operations of one forward pass, each with the tensors it reads and writes.

A pass is recorded once for each form of a network and kept by its problem. Questions of structure (which layers there
are, what each parameter is used for, where the outputs are not piecewise linear, which axis has the samples) are loops
over the steps. The record holds no tensors: numbers that depend on values need the network to run again, watched.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from flatscope.network.expansions import attention_in_parts
from flatscope.network.layer_calls import LAYER_CALLS, WEIGHT_CALLS
from flatscope.network.layer_uses import LayerUse, Role, Roles, layer_use
from flatscope.network.watching import (
    Call,
    Operation,
    Rule,
    address_of,
    instances_in,
    is_question,
    read,
    watched,
    written_out,
)
from flatscope.params import Params
from flatscope.samples import Inputs, axis_of_samples, output_tensor, parts_of, rows_of_inputs

NO_MEMORY = -1  # of tensors inside torch.func.vmap
_PLAIN = (int, float, bool, str, complex, type(None), type(Ellipsis), slice, torch.dtype, torch.device, torch.Size)


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
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> program = record(net, torch.ones(2, 4), dict(net.named_parameters()))
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

    def transformed(self) -> dict[str, str]:
        """{weight: place} of those that a layer's operation reads inside torch.func."""
        found = {}
        for step in self.steps:
            if step.transformed and step.name in LAYER_CALLS:
                role = _role_of(step.layer_arguments()["weight"])
                if role is not None:
                    found[role.parameter] = f"{step.place} inside torch.func"
        return found

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


def record(model: nn.Module, inputs: Inputs, params: Params, keep: Keep | None = None) -> Program:
    """Run a network once and record its operations.

    Args:
        model: in eval mode; a network that runs by a plan is recorded in the plan's words.
        inputs: some samples.
        params: all parameters, those to differentiate by as leaves that require gradients.
        keep: what to do with tensors while they are there.
    """
    recorder = ProgramRecorder(params, inputs, keep)
    return recorder.program(output_tensor(read(model, inputs, in_parts(recorder.follow), params)))


def in_parts(rule: Rule) -> Rule:
    """The rule for every operation; of attention for the products and the softmax in it.

    In one piece it would have a block between any two of queries, keys and values, and noise of them in every layer.
    """

    def follow(op: Operation) -> Any:
        if op.name == "scaled_dot_product_attention":
            with watched(rule), written_out(op.name):
                found = attention_in_parts(*op.args, **op.kwargs)
            if found is not NotImplemented:
                return found
        return rule(op)

    return follow


Keep = Callable[[Step, Operation, Any], None]


class ProgramRecorder:
    """A rule for `watched` that records a pass.

    Args:
        params: all parameters that the network is called with.
        inputs: the samples.
        keep: what to do with tensors while they are there: arguments of the operation, and its result.
        rule: runs each operation.
    """

    def __init__(self, params: Params, inputs: Inputs, keep: Keep | None = None, rule: Rule = Operation.run) -> None:
        self._rule = rule
        self._alive: list[Tensor] = []  # so that no address is used twice
        self._memories: dict[int, int] = {}
        self._numbers: dict[int, int] = {}  # of tensors, by identity
        self._slots: dict[tuple[int, int, bool, Role | None], Slot] = {}
        self._roles = Roles(params)
        self._steps: list[Step] = []
        self._keep = keep
        self._level = torch._C._functorch.maybe_current_level()
        self._parameters = {name: self._slot(value).memory for name, value in params.items()}
        self._inputs = tuple(self._slot(part) for part in parts_of(inputs))
        self._n_samples = len(parts_of(inputs)[0])

    def program(self, output: Tensor) -> Program:
        """The program of all steps so far."""
        return Program(tuple(self._steps), self._inputs, self._slot(output), self._parameters, self._n_samples)

    def slots(self, values: Iterable[Tensor]) -> list[Slot]:
        """The slots of tensors at this moment."""
        return [self._slot(value) for value in values]

    def follow(self, op: Operation) -> Any:
        """Run one operation and record it; questions about shape or type are no steps."""
        if is_question(op):
            return self._rule(op)
        with DisableTorchFunction():  # what is looked up here is no operation of the network
            args, kwargs = self._tree(op.args), self._tree(op.kwargs)  # as they are before one of them is written to
            versions = [(value, self._version(value)) for value in op.tensors]
        result = self._rule(op)
        with DisableTorchFunction():
            changed = [value for value, version in versions if self._version(value) != version]
            if op.name == "setitem" or op.in_place:
                changed = changed or op.tensors
            self._record(op, args, kwargs, result, self._slot(changed[0]) if changed else None)
        return result

    def _record(self, op: Operation, args: Any, kwargs: Any, result: Any, written: Slot | None) -> None:
        results = tuple(slots_in(self._tree(result)))
        inside = torch._C._functorch.maybe_current_level() != self._level
        stopped = not torch.is_grad_enabled()
        number = len(self._steps)
        step = Step(op.name, args, kwargs, op.module, op.within, number, results, written, inside, stopped)
        self._steps.append(step)
        if self._keep is not None:
            self._keep(step, op, result)

    def _tree(self, value: Any) -> Any:
        """The same nested structure with slots for tensors, and words for what is neither a number nor a setting."""
        if isinstance(value, Tensor):
            return self._slot(value)
        if isinstance(value, tuple) and not isinstance(value, torch.Size):
            return tuple(self._tree(part) for part in value)
        if isinstance(value, list):
            return [self._tree(part) for part in value]
        if isinstance(value, dict):
            return {key: self._tree(part) for key, part in value.items()}
        return value if isinstance(value, _PLAIN) else type(value).__name__

    def _slot(self, value: Tensor) -> Slot:
        memory, role = self._memory(value), self._roles.of(value)
        key = id(value), self._version(value), value.requires_grad, role
        if key not in self._slots:
            self._alive.append(value)
            number, shape = self._numbers.setdefault(id(value), len(self._numbers)), tuple(value.shape)
            self._slots[key] = Slot(len(self._slots), number, shape, value.dtype, memory, role, value.requires_grad)
        return self._slots[key]

    def _version(self, value: Tensor) -> int:
        """Number of writes to a tensor, where torch counts them."""
        return 0 if self._memory(value) == NO_MEMORY or value.is_inference() else value._version

    def _memory(self, value: Tensor) -> int:
        """Number of a tensor's memory. Empty tensors have one each, since they all have the same address."""
        if (address := address_of(value)) is None:
            return NO_MEMORY
        address = address or -id(value)
        if address not in self._memories:
            self._alive.append(value)
        return self._memories.setdefault(address, len(self._memories))


@dataclass(frozen=True)
class Structure:
    """Two recorded passes of a network and what they show whatever its weights."""

    program: Program  # of the first samples
    wider: Program  # of the same samples in reverse and one more, which shows where the samples are
    # weights whose inputs do not have the samples in their order as first axis, nor rows of each one behind the other
    mixing: frozenset[str]

    @property
    def axes(self) -> dict[str, int]:
        """{weight: axis of its input with the samples} of dense layers for which that is not the first axis."""
        found: dict[str, set[int]] = {}
        for use, wider in paired(self.program, self.wider) or ():
            may_move = use.kind == "dense" and not use.opaque
            axis = axis_of_samples(use.input.shape, wider.input.shape) if may_move else 0
            found.setdefault(use.weight, set()).add(axis)
        return {weight: axes.pop() for weight, axes in found.items() if len(axes) == 1 and axes != {0}}

    def uses_by_samples(self) -> list[LayerUse[Slot]]:
        """The uses of the first pass, as they are with the samples in front."""
        axes = self.axes
        return [_by_samples(use, axes.get(use.weight, 0)) for use in self.program.layer_uses()]


def _by_samples(use: LayerUse[Slot], axis: int) -> LayerUse[Slot]:
    shapes = [(shape[axis], *shape[:axis], *shape[axis + 1 :]) for shape in (use.input.shape, use.output_shape) if axis]
    return replace(use, input=replace(use.input, shape=shapes[0]), output_shape=shapes[1]) if axis else use


def paired(program: Program, wider: Program) -> list[tuple[LayerUse[Slot], LayerUse[Slot]]] | None:
    """The uses of weights of two passes side by side; None where the passes use other weights."""
    uses, others = program.layer_uses(), wider.layer_uses()
    if [use.weight for use in uses] != [use.weight for use in others]:
        return None
    return list(zip(uses, others, strict=True))


@dataclass(frozen=True)
class Recording:
    """A recorded pass, with what its layers received."""

    program: Program
    received: dict[int, Tensor]  # by step


class Received(dict[int, Tensor]):
    """Inputs of layers by step: copies, since an activation in place would overwrite them."""

    def keep(self, step: Step, op: Operation, _result: Any) -> None:
        """Note that of one step."""
        if step.name in WEIGHT_CALLS:
            value = op.named("input").get("input")
            if isinstance(value, Tensor) and not step.transformed:
                self[step.index] = value.detach().clone()


def two_orders(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Some samples, and the same in reverse and one more: of these two passes a structure is read."""
    backwards = torch.arange(len(parts_of(inputs)[0]) - 1, -1, -1)
    return inputs, rows_of_inputs(inputs, torch.cat([backwards, backwards[:1]]))


def record_structure(model: nn.Module, inputs: Inputs, params: Params) -> Structure:
    """Run a network on some samples, and on the same in reverse and one more, and record both passes."""
    recordings = []
    for samples in two_orders(inputs):
        received = Received()
        recordings.append(Recording(record(model, samples, params, received.keep), received))
    return structure_of(*recordings)


def structure_of(first: Recording, other: Recording) -> Structure:
    """The structure of a network, of which `other` is a pass of the same samples in reverse and one more."""
    program, wider = first.program, other.program
    pairs = paired(program, wider)
    if pairs is None:
        return Structure(program, wider, frozenset(use.weight for use in program.layer_uses()))
    structure = Structure(program, wider, frozenset())
    mixing = set()
    for use, moved in pairs:
        axis = structure.axes.get(use.weight, 0)
        here, there = first.received.get(use.step), other.received.get(moved.step)
        if here is None or there is None or not _same_rows(use, here, there, axis, program.n_samples):
            mixing.add(use.weight)
    return replace(structure, mixing=frozenset(mixing))


def _same_rows(use: LayerUse[Slot], here: Tensor, there: Tensor, axis: int, n: int) -> bool:
    """True where each row is of one sample: the samples in reverse then have the same rows in reverse."""
    if axis and here.ndim > axis + 1:
        here, there = here.movedim(axis, 0), there.movedim(axis, 0)
    if use.kind == "dense" and len(here) != n and n and len(here) % n == 0 and len(there) % (n + 1) == 0:
        here = here.reshape(n, len(here) // n, *here.shape[1:])
        there = there.reshape(n + 1, len(there) // (n + 1), *there.shape[1:])
    if len(here) != n or len(there) != n + 1 or here.shape[1:] != there.shape[1:]:
        return False
    if not here.is_floating_point():
        return True
    scale = float(here.abs().max()) if here.numel() else 0.0
    rounding = 1e3 * torch.finfo(here.dtype).eps * (scale or 1.0)
    return not here.numel() or float((there[:n].flip(0) - here).abs().max()) <= rounding
