"""What an operation does with a parameter that enters beside a signal, and what it does when it writes in place.

Both are observed by running its uses (operation_examples.py), as in operations_observed.py.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any
from unittest import mock

import torch
from operation_examples import EXAMPLES, Use
from operations_observed import curvatures, drawn, grid, observed, tensors_and_directions
from torch import Tensor
from torch._C import DisableTorchFunction

from flatscope.errors import NotApplicable
from flatscope.measures.lipschitz import Constants
from flatscope.network import stretch_rules
from flatscope.network.discontinuities import Discontinuities
from flatscope.network.interception import LAYER_CALLS, Operation, tensors_in, watched
from flatscope.network.operations import TABLE


def given(use: Use) -> list[Tensor]:
    """Signals and weight."""
    return [*drawn(use, 0), *([] if use.weight is None else [use.weight])]


def depends_on(use: Use, place: int) -> Tensor:
    """(outputs, entries) whether an entry of the result depends on an entry of one of the tensors."""
    tensors, step = given(use), grid(use) / 8
    before, moved = use(*tensors).flatten(), []
    for entry in range(tensors[place].numel()):
        other = tensors[place].clone()
        other.view(-1)[entry] += step
        moved.append(use(*tensors[:place], other, *tensors[place + 1 :]).flatten() - before)
    return torch.stack(moved, 1) != 0


@functools.cache
@torch.no_grad()
def takes_vector(use: Use, place: int) -> bool:
    """True where the tensor enters entry by entry as a shift, a scale or a constant, or is what does so to the rest.

    What is neither is a layer, or nothing that is known: an entry of the result is then a mixture of both.
    """
    curved = curvatures(use)
    others = [other for other in range(len(given(use))) if other != place]
    single = int(depends_on(use, place).sum(1).max()) <= 1 and not curved[(place,)]
    beside = all(int(depends_on(use, other).sum(1).max()) <= 1 and not curved[(other,)] for other in others)
    return single or beside


@functools.cache
@torch.no_grad()
def multiplies_with(use: Use, place: int) -> bool:
    """True where how steeply the result depends on this tensor depends on another one: mixed second differences."""
    tensors = [tensor for tensor, _ in tensors_and_directions(use)]
    steps = [step for _, step in tensors_and_directions(use)]

    def at(here: bool, beside: bool) -> Tensor:
        chosen = (here if index == place else beside for index in range(len(tensors)))
        return use(*[t + step if moved else t for t, step, moved in zip(tensors, steps, chosen, strict=True)])

    mixed = at(True, True) - at(True, False) - at(False, True) + at(False, False)
    return float(mixed.abs().max()) > 1e-9 * float(at(True, True).abs().max() + 1)


class WritesInPlace:
    """A rule that lets one operation write into a copy of its first argument, of which there is a view.

    Args:
        name: of the operation.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self.views: list[Tensor] = []

    def follow(self, op: Operation) -> Any:
        """Run one operation; that of this name in place, where it has such a form."""
        with DisableTorchFunction():  # no other rule is to see what is tried
            form = in_place_form(op) if op.name == self._name else None
        if form is None:
            return op.run()
        target = op.args[0].clone()
        self.views.append(target.view(-1))
        return form(target)


def in_place_form(op: Operation) -> Callable[[Tensor], Any] | None:
    """The operation as one that writes to its first argument; None where that would be another operation."""
    if not op.args or not isinstance(op.args[0], Tensor) or not op.args[0].is_floating_point():
        return None
    method, rest = getattr(Tensor, f"{op.name}_", None), op.args[1:]
    forms = [lambda target: method(target, *rest, **op.kwargs)] if method is not None else []
    forms.append(lambda target: op.function(target, *rest, **{**op.kwargs, "inplace": True}))
    expected = op.function(op.args[0].clone(), *rest, **op.kwargs)
    for form in forms:
        try:
            found = form(op.args[0].clone())
        except (TypeError, RuntimeError):
            continue
        if isinstance(found, Tensor) and isinstance(expected, Tensor) and found.shape == expected.shape:
            return form if torch.equal(found, expected) else None
    return None


class Following(Constants):
    """The pass behind Lipschitz constants, on signals in the place of a network's input."""

    def __init__(self, signals: list[Tensor]) -> None:
        stretch_rules.Stretches.__init__(self, signals)
        self.jumps, self._layers = Discontinuities(self._known, "no Lipschitz constant"), {}


@functools.cache
def holds_in_place(name: str) -> bool | None:
    """True where constants hold that are followed through the operation in place; None where none are, or can be.

    They must hold for its result and for a view of what it has written to.
    """
    found = []
    with mock.patch.dict(TABLE, {name: replace(TABLE[name], writes_safely=True)}):
        for use in EXAMPLES[name]:
            signals, writing = drawn(use, 0), WritesInPlace(name)
            following = Following(signals)
            try:
                with torch.no_grad(), watched(following.follow), watched(writing.follow):
                    made = use.function(*signals, *([] if use.weight is None else [use.weight]))
            except NotApplicable:
                continue
            except RuntimeError:  # its rule runs the operation again, on leaves of a graph
                found.append(False)
                continue
            true = float(torch.linalg.matrix_norm(observed(use).slopes, 2).max())
            known = [part for part in (*tensors_in(made), *writing.views) if following.knows(part)]
            if writing.views:
                found += [true * (1 - 1e-6) <= math.exp(following.log_constant(part)) for part in known]
    return all(found) if found else None


# What the table says ------------------------------------------------------------------------------------------------


@functools.cache
def ways_of_entering(name: str) -> list[tuple[Use, int]]:
    """Uses with several tensors, and the place of each; none of a layer's: the table is not asked for these."""
    uses = [] if name in LAYER_CALLS else EXAMPLES[name]
    return [(use, place) for use in uses if len(given(use)) > 1 for place in range(len(given(use)))]


def takes_vectors(name: str, use: Use) -> Iterator[str]:
    """Whether a parameter that enters beside a signal is a shift, a scale or a constant."""
    ways = ways_of_entering(name)
    true = all(takes_vector(other, place) for other, place in ways)
    if ways and TABLE[name].takes_vectors != true:
        yield f"takes a parameter entry by entry: {true}"


def multiplies(name: str, use: Use) -> Iterator[str]:
    """Whether a parameter that enters entry by entry multiplies a signal."""
    ways = ways_of_entering(name) if TABLE[name].takes_vectors else []
    true = any(multiplies_with(other, place) for other, place in ways)
    if ways and TABLE[name].multiplies != true:
        yield f"multiplies entry by entry: {true}"


def writes_safely(name: str, use: Use) -> Iterator[str]:
    """Whether Lipschitz constants hold when it writes to its input."""
    true = holds_in_place(name)
    if true is not None and TABLE[name].writes_safely != true:
        yield f"constants hold in place: {true}"


def decided(name: str) -> Iterator[str]:
    """Those of the three words of which the uses of an operation show what they should be."""
    if ways_of_entering(name):
        yield from ("takes_vectors", "multiplies") if TABLE[name].takes_vectors else ("takes_vectors",)
    if holds_in_place(name) is not None:
        yield "writes_safely"
