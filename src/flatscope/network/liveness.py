"""Which operations of a forward pass do not reach the output, such as those of a head that is run and dropped.

They are found by going backwards through the operations of a pass, and believed only where outputs stay the same with
NaN in the place of their results. Every reading of a network then leaves them out: they are run, and nobody sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.network.planned import drop_plan, set_plan
from flatscope.network.watching import Operation, Rule, replay, tensors_in, with_tensors
from flatscope.params import copied
from flatscope.samples import Inputs, copies

# Operations on a tensor that tell something of it for which no value is needed.
# fmt: off
ABOUT = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "dtype", "device", "numel", "nelement", "stride", "layout",
    "len", "is_floating_point", "is_complex", "is_cuda", "is_contiguous", "is_leaf", "is_sparse", "is_nested",
    "is_quantized", "is_mps", "is_xpu", "is_meta", "grad_fn", "names", "itemsize", "nbytes", "element_size",
    "storage_offset", "get_device", "result_type", "version", "output_nr", "is_inference", "is_signed",
    "data_ptr", "untyped_storage", "is_conj", "is_neg",
))
# fmt: on


@dataclass(frozen=True)
class Dead:
    """Operations that do not reach the output, by their number in a forward pass; those in `ABOUT` have none."""

    order: tuple[str, ...]  # names of all operations of a pass
    numbers: frozenset[int]
    idle: frozenset[str]  # parameters that only these read


@dataclass
class _Done:
    """One operation of a pass, with what is needed to go back through it."""

    name: str
    read: list[Tensor]
    made: list[Tensor]
    written: list[Tensor]  # what it has changed in place
    origins: list[Any]  # nodes of the autograd graph that its results have
    told: bool  # whether Python has learned a value


class _Recorder:
    """A rule that keeps the operations of one forward pass, and puts other values in the place of some results.

    Args:
        spoilt: numbers of the operations whose results become NaN, where they have memory of their own.
    """

    def __init__(self, spoilt: frozenset[int] = frozenset()) -> None:
        self.done: list[_Done] = []
        self._spoilt = spoilt

    def rule(self, _model: nn.Module) -> Rule:
        """The rule that runs a module's forward."""
        return self.follow

    def follow(self, op: Operation) -> Any:
        """Run one operation."""
        if op.name in ABOUT:
            return op.run()
        given = op.tensors
        versions = [tensor._version for tensor in given]
        result = op.run()
        made = list(tensors_in(result))
        written = [tensor for tensor, before in zip(given, versions, strict=True) if tensor._version != before]
        told = not made and not written
        if len(self.done) in self._spoilt and not written:
            places = {_place(tensor) for tensor in given}
            result = with_tensors(result, lambda value: value if _place(value) in places else _spoilt(value))
        self.done.append(_Done(op.name, given, made, written, [tensor.grad_fn for tensor in made + written], told))
        return result


def _place(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _spoilt(value: Tensor) -> Tensor:
    return value * torch.nan if value.is_floating_point() or value.is_complex() else value


def dead_operations(
    model: nn.Module, examples: Iterable[Inputs], outputs: Callable[[Any], list[Tensor]]
) -> Dead | None:
    """Operations that the outputs need on none of these examples; None if there are none, or passes differ.

    Args:
        model: in eval mode, without a plan.
        examples: batches to run it on; no more than the first where that needs everything.
        outputs: the tensors that count of what the model returns.
    """
    found: Dead | None = None
    first: Inputs | None = None
    for example in examples:
        try:
            here = _looked_at(model, example, outputs)
        except (RuntimeError, NotImplementedError):  # tensors without memory of their own, as inside vmap
            return None
        if found is None:
            found, first = here, example
        elif found.order != here.order:
            return None
        else:
            found = replace(found, numbers=found.numbers & here.numbers, idle=found.idle & here.idle)
        if not found.numbers:
            return None
    if found is None or first is None or not _is_the_same_without(found, model, first, outputs):
        return None
    return found


def _looked_at(model: nn.Module, example: Inputs, outputs: Callable[[Any], list[Tensor]]) -> Dead:
    """Going backwards: an operation lives where what it made or changed is read by one that lives, or is an output."""
    recorder = _Recorder()
    ends = outputs(_run(model, example, recorder))
    reached = _ancestors([end.grad_fn for end in ends])
    live, places = {id(end) for end in ends}, {_place(end) for end in ends}
    dead, seen_by_live, seen_by_dead = set[int](), set[int](), set[int]()
    for number in range(len(recorder.done) - 1, -1, -1):
        done = recorder.done[number]
        lives = done.told or any(id(tensor) in live for tensor in done.made)
        lives |= any(_place(tensor) in places for tensor in done.written)
        lives |= any(origin in reached for origin in done.origins)
        read = {_place(tensor) for tensor in done.read}
        if lives:
            live |= {id(tensor) for tensor in done.read}
            places |= read
            seen_by_live |= read
        else:
            dead.add(number)
            seen_by_dead |= read
    if not any(tensor.is_floating_point() for number in dead for tensor in recorder.done[number].read):
        dead.clear()  # what is made of shapes and whole numbers matters to no reading
    named = {_place(value): name for name, value in model.named_parameters()}
    idle = {named[place] for place in (seen_by_dead - seen_by_live) & named.keys()}
    return Dead(tuple(done.name for done in recorder.done), frozenset(dead), frozenset(idle))


def _ancestors(nodes: list[Any]) -> set[Any]:
    """All nodes of an autograd graph from which these are computed, themselves included."""
    found, waiting = set[Any](), [node for node in nodes if node is not None]
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += [before for before, _ in node.next_functions if before is not None]
    return found


def _is_the_same_without(
    found: Dead, model: nn.Module, example: Inputs, outputs: Callable[[Any], list[Tensor]]
) -> bool:
    """True where the outputs stay the same with NaN in the place of dead results."""
    try:
        before, after = (
            outputs(_run(copied(model), example, _Recorder(spoilt))) for spoilt in (frozenset(), found.numbers)
        )
    except Exception:  # the network looks at its own values
        return False
    return all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def _run(model: nn.Module, example: Inputs, recorder: _Recorder) -> Any:
    """Run the model with all of its parameters on the graph, watched by the recorder."""
    leaves = {
        name: value.detach().requires_grad_(value.is_floating_point()) for name, value in model.named_parameters()
    }
    set_plan(model, recorder)
    try:
        with torch.enable_grad():
            return replay(model, copies(example), Operation.run, leaves)
    finally:
        drop_plan(model)
