"""The first two passes of a network, from which everything about its structure is read.

Each is seen three times over as it runs: as the network calls its operations (which of them reach the outputs, which
values decide), as they are in plain words (the recorded program), and where parameters meet signals.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import chain

from torch import Tensor, nn

from flatscope.network.linearity import choice_in
from flatscope.network.liveness import Dead, Origins, dead_in_pass, dead_steps
from flatscope.network.plain import leave_out_dead, not_covered_if_plain, run_in_plain_words
from flatscope.network.planned import planned
from flatscope.network.program import (
    Program,
    ProgramRecorder,
    Received,
    Recording,
    Structure,
    in_parts,
    structure_of,
    two_orders,
)
from flatscope.network.surveys import Survey, Surveyed, Surveys, survey, surveyed
from flatscope.network.watching import Rule, read
from flatscope.params import Params
from flatscope.samples import Batch, Inputs, copies, output_tensor, parts_of


@dataclass(frozen=True)
class FirstReading:
    """Facts about a network that two passes show, whatever its weights.

    Attributes:
        outputs: of the first pass, on the graph of the parameters that it was given.
        reversed_outputs: of the other, of the same samples in reverse and one more.
        choice: the first operation whose values decide what is computed; empty if none does.
        structure: the recorded passes; None where operations are left out since, so that they have to be read again.
        not_covered: trainable matrices that take part in no layer, with what reads them; None where weights
            may be views of parameters or computed from them.
    """

    outputs: Tensor
    reversed_outputs: Tensor
    choice: str
    structure: Structure | None
    not_covered: dict[str, str] | None


def read_first_passes(
    model: nn.Module, inputs: Inputs, params: Params, others: Callable[[], Iterable[Batch]], uneven: bool
) -> FirstReading:
    """Read a network that runs as it is, which from then on runs in plain words.

    Args:
        model: in eval mode, without a plan; it is changed in place.
        inputs: some samples.
        params: all parameters, those to differentiate by as leaves that require gradients.
        others: all samples, read where some of them may take another way.
        uneven: whether samples have several shapes.
    """
    first, other = (_first_pass(model, copies(samples), params) for samples in two_orders(inputs))
    choice = choice_in(first.own)
    decided = uneven or bool(choice)
    dead = chain((first.dead, other.dead), (_dead(model, more) for more, _ in others()) if decided else ())
    if leave_out_dead(model, dead, inputs, lambda raw: [output_tensor(raw)]):
        if decided or survey(model, inputs).changed:
            run_in_plain_words(model)
        return FirstReading(first.outputs, other.outputs, choice, None, None)
    if decided or first.survey.changed:
        run_in_plain_words(model)
    trainable = {name for name, value in params.items() if value.requires_grad}
    not_covered = None if decided else not_covered_if_plain(model, Surveys([first.survey, other.survey]), trainable)
    structure = structure_of(first.recording, other.recording)
    return FirstReading(first.outputs, other.outputs, choice, structure, not_covered)


def _dead(model: nn.Module, inputs: Inputs) -> Dead:
    return dead_in_pass(model, inputs, lambda raw: [output_tensor(raw)])


@dataclass(frozen=True)
class _FirstPass:
    outputs: Tensor
    own: Program  # as the network calls its operations
    recording: Recording  # in plain words
    survey: Surveyed
    dead: Dead


def _first_pass(model: nn.Module, inputs: Inputs, params: Params) -> _FirstPass:
    received, origins, rules = Received(), Origins(), list[tuple[Survey, ProgramRecorder]]()

    def rule(module: nn.Module) -> Rule:
        meetings = Survey(module, [], len(parts_of(inputs)[0]), constants=False)
        own = ProgramRecorder(params, inputs, origins.keep, meetings.follow)
        rules.append((meetings, own))
        return own.follow

    plainly = ProgramRecorder(params, inputs, received.keep)
    with planned(model, rule):
        outputs = output_tensor(read(model, inputs, in_parts(plainly.follow), params))
    ((meetings, own),) = rules
    program = own.program(outputs)
    free = {name: value for name, value in params.items() if value.requires_grad}
    return _FirstPass(
        outputs,
        program,
        Recording(plainly.program(outputs), received),
        surveyed(meetings, [outputs], free),
        dead_steps(program, own.slots([outputs]), origins, [outputs.grad_fn]),
    )
