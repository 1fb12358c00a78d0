"""Structure: two recorded passes of a network, and what they show whatever its weights.

The second pass has the samples of the first in reverse, and one more: of the two can be seen which axis of a tensor has
the samples, whose rows are whose, and whether outputs depend on a sample alone.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from flatscope.network.layer_uses import LayerUse
from flatscope.network.linearity import choice_in
from flatscope.network.normal_form import leave_out_dead, not_covered_as_it_is, run_in_normal_form
from flatscope.network.not_covered import NotCovered
from flatscope.network.parameter_uses import UsesOfPasses
from flatscope.network.pass_recording import Recording, record
from flatscope.network.program import Program, Slot
from flatscope.params import Params
from flatscope.samples import Batch, Inputs, axis_of_samples, output_tensor, rows_of_inputs, tensors_of_inputs

T = TypeVar("T")


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


def two_orders(inputs: Inputs) -> tuple[Inputs, Inputs]:
    """Some samples, and the same in reverse and one more: of these two passes a structure is read."""
    backwards = torch.arange(len(tensors_of_inputs(inputs)[0]) - 1, -1, -1)
    return inputs, rows_of_inputs(inputs, torch.cat([backwards, backwards[:1]]))


def record_structure(model: nn.Module, inputs: Inputs, params: Params) -> Structure:
    """Run a network on some samples, and on the same in reverse and one more, and record both passes."""
    return structure_of(*_two_passes(model, inputs, params))


def _two_passes(model: nn.Module, inputs: Inputs, params: Params) -> tuple[Recording, Recording]:
    """Recordings of some samples, and of the same in reverse and one more."""
    some, reverse = two_orders(inputs)
    return record(model, some, params), record(model, reverse, params)


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


@dataclass(frozen=True)
class FirstReading:
    """Facts about a network that its first two passes show, whatever its weights.

    Attributes:
        outputs: of the first pass, on the graph of the parameters that it was given.
        reversed_outputs: of the other, of the same samples in reverse and one more.
        choice: the first operation whose values decide what is computed; empty if none does.
        structure: the recorded passes; None where operations are left out since, so that they have to be read again.
        not_covered: trainable matrices that take part in no layer; None where weights
            may be views of parameters or computed from them.
    """

    outputs: Tensor
    reversed_outputs: Tensor
    choice: str
    structure: Structure | None
    not_covered: NotCovered | None


def first_reading(
    model: nn.Module, inputs: Inputs, params: Params, others: Callable[[], Iterable[Batch]], uneven: bool
) -> FirstReading:
    """Read a network that runs as it is, which from then on runs in normal form.

    Args:
        model: in eval mode; it is changed in place.
        inputs: some samples.
        params: all parameters, those to differentiate by as leaves that require gradients.
        others: all samples, read where some of them may take another way.
        uneven: whether samples have several shapes.
    """
    first, other = _two_passes(model, inputs, params)
    choice = choice_in(first.calls())
    decided = uneven or bool(choice)
    dead = (
        each.dead(lambda raw: [output_tensor(raw)])
        for each in chain((first, other), (record(model, more, params) for more, _ in others()) if decided else ())
    )
    if leave_out_dead(model, dead, inputs, lambda raw: [output_tensor(raw)]):
        if decided or record(model, inputs, params).uses().changed:
            run_in_normal_form(model)
        return FirstReading(first.outputs, other.outputs, choice, None, None)
    uses = UsesOfPasses([first.uses(), other.uses()])
    if decided or uses.batches[0].changed:
        run_in_normal_form(model)
    trainable = {name for name, value in params.items() if value.requires_grad}
    not_covered = None if decided else not_covered_as_it_is(model, uses, trainable)
    return FirstReading(first.outputs, other.outputs, choice, structure_of(first, other), not_covered)


class StructuralFacts:
    """Facts about the structure of one network, found once and shared by its copies with other weights.

    Attributes:
        normal_form: facts about its normal form, where every weight that acts is a parameter; itself where the network
            is in it as it is; None until somebody has asked.
        not_covered: trainable matrices of the normal form that take part in no layer.
        structure: recorded passes; None until somebody has asked.
        programs: recorded passes of samples of other shapes, by these.
    """

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self.normal_form: StructuralFacts | None = None
        self.not_covered = NotCovered()
        self.structure: Structure | None = None
        self.programs: dict[Hashable, Program] = {}

    def once(self, find: Callable[..., T], *subject: Any, **options: Any) -> T:
        """`find(*subject, **options)`, computed once whatever the subject: a problem, or a context of it."""
        key = (f"{find.__module__}.{find.__qualname__}", tuple(sorted(options.items())))
        if key not in self._known:
            self._known[key] = find(*subject, **options)
        found: T = self._known[key]
        return found
