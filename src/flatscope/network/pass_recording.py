"""Recording: one pass through a network, from which everything about its structure is read.

It is seen three times over as it runs: as the network calls its operations (which of them reach the outputs, which
values decide), in normal form (the recorded program), and where parameters meet signals. This is the only place where
such a pass begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction

from flatscope.network.expansions import attention_in_parts
from flatscope.network.interception import (
    WEIGHT_CALLS,
    Operation,
    OperationRule,
    address_of,
    is_question,
    output_tensors,
    replay_for_structure,
    tensors_in,
    watched,
    written_out,
)
from flatscope.network.layer_uses import Role, Roles
from flatscope.network.liveness import dead_steps
from flatscope.network.normal_form_pass import seen_inside
from flatscope.network.parameter_uses import ParameterUses, UseRecorder, uses_in_pass
from flatscope.network.program import NO_MEMORY, Dead, Program, Slot, Step, slots_in
from flatscope.params import Params
from flatscope.samples import Inputs, copied_inputs, output_tensor, tensors_of_inputs

_SETTINGS = (int, float, bool, str, complex, type(None), type(Ellipsis), slice, torch.dtype, torch.device, torch.Size)


@dataclass(frozen=True)
class Recording:
    """What one pass has shown.

    Attributes:
        raw: what the network returned, on the graph of the parameters that it was given.
        program: its operations in normal form.
        received: what its layers received, by step.
    """

    raw: Any
    program: Program
    received: dict[int, Tensor]
    _calls: ProgramRecorder  # of its operations as the network calls them
    _makers: AutogradNodes
    _meetings: UseRecorder
    _params: Params

    @property
    def outputs(self) -> Tensor:
        """The tensor that is the network's output."""
        return output_tensor(self.raw)

    def calls(self) -> Program:
        """The operations as the network calls them."""
        return self._calls.program(output_tensors(self.raw)[0])

    def uses(self) -> ParameterUses:
        """Where parameters met signals, and which of them reach the outputs."""
        moving = {name: value for name, value in self._params.items() if value.requires_grad}
        return uses_in_pass(self._meetings, output_tensors(self.raw), moving)

    def dead(self, outputs: Callable[[Any], list[Tensor]]) -> Dead:
        """Operations that do not reach those tensors that count of what the network returned."""
        ends = outputs(self.raw)
        nodes = [end.grad_fn for end in ends]
        return dead_steps(self.calls(), self._calls.slots(ends), self._makers, nodes)


def record(model: nn.Module, inputs: Inputs, params: Params, constants: bool = False) -> Recording:
    """Run a network once and record it.

    Args:
        model: in eval mode; its operations are seen as they are in its normal form, where it runs in one.
        inputs: some samples; the pass has copies of them.
        params: all parameters, those to differentiate by as leaves that require gradients.
        constants: whether what multiplies rows of constants is a layer.
    """
    inputs, received, makers = copied_inputs(inputs), Received(), AutogradNodes()
    views = list[tuple[UseRecorder, ProgramRecorder]]()

    def rule(module: nn.Module) -> OperationRule:
        meetings = UseRecorder(module, len(tensors_of_inputs(inputs)[0]), constants)
        views.append((meetings, ProgramRecorder(params, inputs, makers.keep, meetings.follow)))
        return views[-1][1].follow

    in_normal_form = ProgramRecorder(params, inputs, received.keep)
    with seen_inside(model, rule):
        raw = replay_for_structure(model, inputs, in_parts(in_normal_form.follow), params)
    ((meetings, calls),) = views
    program = in_normal_form.program(output_tensors(raw)[0])
    return Recording(raw, program, received, calls, makers, meetings, params)


def in_parts(rule: OperationRule) -> OperationRule:
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

    def __init__(
        self, params: Params, inputs: Inputs, keep: Keep | None = None, rule: OperationRule = Operation.run
    ) -> None:
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
        self._inputs = tuple(self._slot(part) for part in tensors_of_inputs(inputs))
        self._n_samples = len(tensors_of_inputs(inputs)[0])

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
        return value if isinstance(value, _SETTINGS) else type(value).__name__

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


class Received(dict[int, Tensor]):
    """Inputs of layers by step: copies, since an activation in place would overwrite them."""

    def keep(self, step: Step, op: Operation, _result: Any) -> None:
        """Note that of one step."""
        if step.name in WEIGHT_CALLS:
            value = op.named("input").get("input")
            if isinstance(value, Tensor) and not step.transformed:
                self[step.index] = value.detach().clone()


class AutogradNodes(dict[int, list[Any]]):
    """The nodes of the autograd graph that the results of each step have, and what it has written to."""

    def keep(self, step: Any, op: Operation, result: Any) -> None:
        """Note those of one step."""
        written = op.tensors[:1] if step.written is not None else []
        self[step.index] = [tensor.grad_fn for tensor in (*tensors_in(result), *written)]
