"""Readings of a network that a problem keeps, whatever its weights: its layers, and which units can be rescaled."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from flatscope.isolation import own_settings
from flatscope.network.layers import Network, read_layers
from flatscope.network.normal_form import not_covered
from flatscope.network.not_covered import NotCovered
from flatscope.network.parameter_uses import idle_parameters
from flatscope.network.program import Program
from flatscope.network.structure import Structure, record_structure
from flatscope.network.tracing import trace
from flatscope.network.units import Graph
from flatscope.problem import Problem
from flatscope.samples import Inputs

MOST_TRACED = 64  # samples, where they decide what is computed


def layers_of_problem(problem: Problem) -> Network:
    """The layers of a problem's network, in forward order."""
    marked, idle = not_covered(problem.model), idle_parameters(problem.model)
    return problem.facts.once(_read_layers, problem, marked=tuple(marked.items()), idle=idle)


def graph_of_problem(problem: Problem, inner: bool = False, frozen: Iterable[str] = ()) -> Graph:
    """The units of a problem's network that can be rescaled or permuted.

    Args:
        problem: with the network.
        inner: whether to follow symmetries that no path through the network has.
        frozen: names of parameters that nothing may rescale.
    """
    return problem.facts.once(_traced, problem, inner=inner, frozen=tuple(frozen))


def _traced(problem: Problem, inner: bool, frozen: tuple[str, ...]) -> Graph:
    example = problem.example(MOST_TRACED) if problem.samples_decide else problem.example()
    return trace(problem.model, example, inner, frozen, idle_parameters(problem.model))


def recorded_structure(problem: Problem, inputs: Inputs) -> Structure:
    """Recorded passes of these samples."""
    with own_settings():
        return record_structure(problem.model, inputs, problem.leaves())


def _read_layers(problem: Problem, marked: tuple[tuple[str, str], ...], idle: frozenset[str]) -> Network:
    """The layers that the first samples pass; where some weight was not met, also those that any sample passes.

    Args:
        problem: with the network.
        marked: trainable matrices that are known to take part in no layer, with reasons.
        idle: parameters that do not reach the outputs.
    """

    def passes() -> Iterator[Program]:
        for inputs, _ in problem.batches():
            yield problem.recorded(inputs)

    known = NotCovered(marked)
    sought = {name for name in problem.trainable if problem.params[name].ndim > 1} - known.keys() - idle
    return read_layers(problem.structure, passes, dict(problem.model.named_modules()), sought, known)
