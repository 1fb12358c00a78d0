"""The table of operations against the operations themselves: every entry is held to what torch computes.

What an operation does is observed numerically (operations_observed.py) on its uses (operation_examples.py). Then the
interpreters run on the same uses with the table as it is, and must say the same; and with every word of every entry
changed, one at a time, and must say something else.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from operation_examples import EXAMPLES, NAMES, SAMPLES, Use
from operations_observed import drawn, free_components, observed, steepest_chord, tensors_and_directions
from operations_with_parameters import Following, decided, multiplies, takes_vectors, writes_safely
from torch import Tensor, nn

from flatscope.errors import NotApplicable
from flatscope.measures.path_norms import PathPass
from flatscope.network import path_rules, scales, stretch_rules
from flatscope.network.expansions import EXPANSIONS
from flatscope.network.interception import LAYER_CALLS, Operation, tensors_in, watched
from flatscope.network.linearity import _CUTS, Linearity
from flatscope.network.operations import CURVED, PIECES, PRODUCT, RATIO, TABLE, Meaning
from flatscope.network.pass_recording import ProgramRecorder
from flatscope.network.tied_labels import CONSTANT, Labels
from flatscope.network.tracing import trace
from flatscope.symmetries.scaling import permuted_params, random_permutation, rescaled_params

READ_AS_LAYERS = {*LAYER_CALLS, "batch_norm"}  # the reading of scales does not ask the table about them


# What the interpreters say -------------------------------------------------------------------------------------------


WORDS: dict[str, Callable[[tuple[int, ...]], bool]] = {  # in what each word calls an operation linear
    PIECES: lambda chosen: True,
    PRODUCT: lambda chosen: len(chosen) == 1,
    RATIO: lambda chosen: chosen == (0,),
    CURVED: lambda chosen: False,
}


def best_word(name: str) -> str:
    """The first word that is true of all uses."""

    def fits(word: str) -> bool:
        seen = [observed(use).curved.items() for use in EXAMPLES[name]]
        return not any(curved and WORDS[word](chosen) for of_use in seen for chosen, curved in of_use)

    return next(word for word in WORDS if fits(word))


def linear(name: str, use: Use) -> Iterator[str]:
    """`Linearity` says of what the result is a curved function: never less, and not more than the best word would."""
    for chosen, curved in observed(use).curved.items():
        t = torch.ones((), dtype=torch.float64)
        recorder = ProgramRecorder({"t": t}, torch.zeros(1))
        with watched(recorder.follow):
            use(*[x + t * d if place in chosen else x for place, (x, d) in enumerate(tensors_and_directions(use))])
        said = "t" in Linearity(recorder.program(t), ["t"]).curved
        if name not in _CUTS and ((curved and not said) or (said and WORDS[best_word(name)](chosen))):
            yield f"curved in {chosen}: {curved}, said: {said}"


class Between(nn.Module):
    """The use between layers: one for each signal, one that reads the result, one for each signal that goes on."""

    def __init__(self, use: Use) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.use = use
        self.first = nn.ModuleList(nn.Conv1d(2, shape[0], 1) for shape in use.shapes)
        self.last = nn.Linear(observed(use).constant.numel() // SAMPLES, 2)
        self.beside = nn.ModuleList(nn.Linear(math.prod(shape), 2) for shape in use.shapes)
        self.double()

    def forward(self, *inputs: Tensor) -> Tensor:
        """Inputs (samples, 2, positions), one for each signal."""
        signals = [
            first(x).reshape(SAMPLES, *shape)
            for first, x, shape in zip(self.first, inputs, self.use.shapes, strict=True)
        ]
        beside = [layer(signal.flatten(1)) for layer, signal in zip(self.beside, signals, strict=True)]
        made: Tensor = self.last(self.use(*signals))
        return made + torch.stack(beside).sum(0)


@functools.cache
def between(use: Use) -> tuple[Between, list[tuple[Tensor, ...]], list[Tensor]]:
    """The network, some inputs, and its outputs."""
    generator = torch.Generator().manual_seed(4)
    sizes = [math.prod(shape[1:]) for shape in use.shapes]
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    model, inputs = Between(use), [tuple(6 * draw(SAMPLES, 2, size) for size in sizes) for _ in range(4)]
    return model, inputs, [model(*x).detach() for x in inputs]


def scale(name: str, use: Use) -> Iterator[str]:
    """Units that the reading lets be rescaled or change places can do so, and those that can are found."""
    model, inputs, outputs = between(use)
    graph = trace(model, inputs[0])
    params = {key: value.detach() for key, value in model.named_parameters()}

    def changes_with(other: dict[str, Tensor]) -> bool:
        again = (torch.func.functional_call(model, other, x) for x in inputs)
        return not all(torch.allclose(y, new, rtol=1e-9, atol=1e-9) for y, new in zip(outputs, again, strict=True))

    with torch.no_grad():
        for seed in range(3):
            generator = torch.Generator().manual_seed(seed)
            powers = 2.0 ** torch.randint(-3, 4, (graph.n_classes,), generator=generator).double()
            if changes_with(rescaled_params(graph, params, powers)):
                yield "a rescaling that the reading allows changes the function"
            if graph.exchangeable and changes_with(permuted_params(graph, params, random_permutation(graph, seed))):
                yield "a permutation that the reading allows changes the function"
    units = torch.cat([graph.layer(f"first.{place}").outputs for place in range(len(use.shapes))])
    free = len(set(units.tolist()) - {0})
    if free < free_components(use):
        yield f"{free_components(use)} sets of units can be rescaled, {free} are found"
    movable = {unit for group in graph.exchangeable for unit in group}
    seen = observed(use)
    if seen.mirrors and not seen.by_truth and not movable >= set(graph.layer("first.0").output_units.tolist()):
        yield "units that can change places are not found"


def paths(name: str, use: Use) -> Iterator[str]:
    """Sums over paths: an edge of weight |slope| from every entry to those that depend on it."""
    seen = observed(use)
    edges = seen.slopes.abs().amax(0)  # (outputs, inputs)
    choosing = ((seen.slopes != 0).sum(2) <= 1).all(0) & ((edges != 0).sum(1) > 1)  # one entry at a time
    for p, pooling in ((1.0, "max"), (2.0, "sum")):
        signals = [signal.abs() for signal in drawn(use, 0)]
        logs = [0.3 * place + 0.2 for place in range(len(signals))]
        following = PathPass(p, pooling)
        for signal, log in zip(signals, logs, strict=True):
            following.start(signal, log)
        entering = torch.cat([signal.flatten() * math.exp(log) for signal, log in zip(signals, logs, strict=True)])
        made = []
        try:
            with torch.no_grad(), watched(following.follow):
                made = [part for part in tensors_in(use.function(*signals, *_weights(use))) if part.is_floating_point()]
        except NotApplicable:
            continue
        if not made or any(following.jumps.place(part) for part in made):
            continue
        if not seen.linear_paths:
            yield "sums over paths, where there are none"
            continue
        each = edges.pow(p) * entering
        expected = torch.where(choosing & (pooling == "max"), each.amax(1), each.sum(1)) + seen.constant.abs().pow(p)
        values = [
            part * math.exp(following.log_scale(part)) if following.knows(part) else part.abs().pow(p) for part in made
        ]
        found = torch.cat([value.double().reshape(SAMPLES, -1) for value in values], 1).flatten()
        if not torch.allclose(found, expected, rtol=1e-9):
            yield f"sums over paths for p = {p}"


def _weights(use: Use) -> list[Tensor]:
    return [] if use.weight is None else [use.weight]


def stretch(name: str, use: Use) -> Iterator[str]:
    """The constant is an upper bound of how far the operation stretches, and not far from it."""
    signals = drawn(use, 0)
    following = Following(signals)
    try:
        with torch.no_grad(), watched(following.follow):
            made = [part for part in tensors_in(use.function(*signals, *_weights(use))) if following.knows(part)]
    except NotApplicable:
        return
    if not made:
        return
    said = math.exp(max(following.log_constant(part) for part in made))
    true = float(torch.linalg.matrix_norm(observed(use).slopes, 2).max())
    if not true * (1 - 1e-6) <= said or 0 < 1.5 * true < said:
        yield f"stretches by {true}, said to be at most {said}"
    if steepest_chord(use) > said * 1.01:
        yield f"values jump: apart by {steepest_chord(use)} times the distance, said to be at most {said}"


def creates(name: str, use: Use) -> Iterator[str]:
    """Whether the result is the same whatever the signals."""
    true = all(observed(other).is_fixed for other in EXAMPLES[name])
    if TABLE[name].creates != true:
        yield f"takes no more than shape and type: {true}"


def identity(name: str, use: Use) -> Iterator[str]:
    """Whether the result is the signal."""
    true = all(observed(other).is_first for other in EXAMPLES[name])
    if TABLE[name].identity != true:
        yield f"changes nothing: {true}"


def moves(name: str, use: Use) -> Iterator[str]:
    """Whether entries only change places; of what changes nothing both words are true."""
    true = all(observed(other).moves and not observed(other).is_fixed for other in EXAMPLES[name])
    if (TABLE[name].moves or TABLE[name].identity) != true:
        yield f"only moves entries: {true}"


def kinks(name: str, use: Use) -> Iterator[str]:
    """Whether slopes differ from place to place where the operation is piecewise linear."""
    slopes = [observed(other).slopes for other in EXAMPLES[name]]
    true = any(float((some - some[:1]).abs().max()) > 1e-6 for some in slopes)
    if _shows_kinks(name, slopes) and TABLE[name].kinks != true:
        yield f"its slope jumps: {true}"


def _shows_kinks(name: str, slopes: list[Tensor]) -> bool:
    """True where kinks are all that slopes can differ by: nothing is curved, and no mask or truth value decides."""
    decided = name in ("where", "masked_fill") or name.startswith("max_unpool")
    by_truth = any(observed(other).by_truth for other in EXAMPLES[name])
    return TABLE[name].linear == PIECES and not decided and not by_truth and any(some.any() for some in slopes)


Check = Callable[[str, Use], Iterator[str]]
CHECKS: dict[str, Check] = {
    "linear": linear,
    "scale": scale,
    "paths": paths,
    "stretch": stretch,
    "slope": stretch,
    "creates": creates,
    "identity": identity,
    "moves": moves,
    "kinks": kinks,
    "takes_vectors": takes_vectors,
    "multiplies": multiplies,
    "writes_safely": writes_safely,
}


def complaints(name: str, check: Check) -> Iterator[str]:
    """What the table says of an operation and torch does not do."""
    assert name in EXAMPLES, f"{name} has no use to be judged by: add one to tests/helpers/operation_examples.py"
    return (complaint for use in EXAMPLES[name] for complaint in check(name, use))


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_says_what_the_operation_does(name: str) -> None:
    assert [(field, found) for field, check in CHECKS.items() for found in complaints(name, check)] == []


def test_what_jumps_has_no_largest_slope() -> None:
    with mock.patch.dict(TABLE, {"hardshrink": replace(TABLE["hardshrink"], slope=1.0)}):
        assert any("values jump" in complaint for complaint in complaints("hardshrink", stretch))


def test_every_operation_has_uses_that_run_it() -> None:
    assert set(EXAMPLES) == set(NAMES), "one use of every operation of the table: tests/helpers/operation_examples.py"
    assert EXPANSIONS.keys() & TABLE.keys() == {"group_norm", "instance_norm"}
    for name, uses in EXAMPLES.items():
        for use in uses:
            seen: list[str] = []

            def note(op: Operation, seen: list[str] = seen) -> Any:
                seen.append(op.name)
                return op.run()

            with watched(note):
                use(*drawn(use, 0))
            assert name in seen


# Every word of every entry, changed --------------------------------------------------------------------------------


class Forgetful(Labels):
    """The ties of a network, without those of the kinds that are forgotten; `missing` says which there were to make."""

    def __init__(self, book: Labels, *kinds: str) -> None:
        self.scale, self.unit, self.kinds, self.missing = book.scale, book.unit, kinds, set[str]()
        self.inner = book.inner

    def tie(self, left: Tensor, right: Tensor, why: str, scale: bool = True) -> Tensor:
        """Forgotten, it gives the labels of the result all the same."""
        if scale and bool(((left != right) & (left > CONSTANT) & (right > CONSTANT)).any()):
            self.missing.add("tie")
        book = copy.deepcopy(self) if "tie" in self.kinds else self  # what is forgotten is written elsewhere
        return Labels.tie(book, left, right, why, scale=scale)

    def fix_scale(self, labels: Tensor, why: str) -> None:
        """A wall."""
        self.missing |= {"wall"} if bool(self.scale.is_free(labels).any()) else set()
        if "wall" not in self.kinds:
            super().fix_scale(labels, why)

    def pin_units(self, labels: Tensor, why: str) -> None:
        """Units that no longer change places."""
        self.missing |= {"pin"} if bool(self.unit.is_free(labels).any()) else set()
        if "pin" not in self.kinds:
            super().pin_units(labels, why)


@functools.cache
def kinds_of_ties(name: str) -> set[str]:
    """What the entry's rule does to scales and units on its uses: "tie", "wall", "pin"."""
    rule, found = TABLE[name].scale, set[str]()
    assert rule is not None

    def watching(step: scales.ScaleStep) -> Any:
        book = Forgetful(step.book)
        labels = rule(replace(step, book=book))
        found.update(book.missing)
        return labels

    with mock.patch.dict(TABLE, {name: replace(TABLE[name], scale=watching)}):
        for use in EXAMPLES[name]:
            model, inputs, _ = between(use)
            trace(model, inputs[0])
    return found


def forgetting(rule: scales.ScaleRule, kind: str) -> scales.ScaleRule:
    """The rule without its ties, walls or pins."""
    return lambda step: rule(replace(step, book=Forgetful(step.book, kind)))


@dataclass
class Changed:
    """A rule that does something else; `matters` is whether it was ever asked where that makes a difference."""

    rule: Callable[..., Any]
    matters: bool = False

    def __call__(self, *given: Any) -> Any:
        result, matters = self.rule(*given)
        self.matters |= matters
        return result


def unscaled(rule: scales.ScaleRule) -> Changed:
    """The rule with its result taken for a constant."""

    def run(step: scales.ScaleStep) -> tuple[Any, bool]:
        labels = list(tensors_in(rule(step)))
        return [torch.full_like(found, CONSTANT) for found in labels], any((found > CONSTANT).any() for found in labels)

    return Changed(run)


def longer(rule: stretch_rules.StretchRule, factor: float) -> Changed:
    """The rule with its constant times a factor."""
    return Changed(lambda *given: (rule(*given) + math.log(factor), True))


def heavier(rule: path_rules.PathRule, factor: float) -> Changed:
    """The rule with its sums over paths times a factor."""

    def run(paths: path_rules.Paths, op: Operation) -> tuple[Any, bool]:
        result, log_scale = rule(paths, op)
        return (result, log_scale + math.log(factor)), True

    return Changed(run)


@functools.cache
def n_tensors(name: str) -> int:
    """How many floating-point tensors enter the operation."""
    found = []

    def count(op: Operation) -> Any:
        if op.name == name:
            found.append(sum(tensor.is_floating_point() for tensor in op.tensors))
        return op.run()

    for use in EXAMPLES[name]:
        with watched(count):
            use(*drawn(use, 0))
    return max(found, default=0)


def changes(name: str, meaning: Meaning) -> Iterator[tuple[str, str, Meaning]]:
    """(field, what is wrong with it, the entry with that one thing wrong); no change that means the same."""
    if name not in _CUTS and not meaning.creates:  # of which derivatives are known to be zero
        words = WORDS if n_tensors(name) > 1 else (CURVED,) if meaning.linear != CURVED else (PIECES,)
        for word in words:
            if word != meaning.linear:
                yield "linear", word, replace(meaning, linear=word)
    if meaning.scale is None and name not in READ_AS_LAYERS:
        yield "scale", "wall forgotten", replace(meaning, scale=scales.keep)
    if meaning.scale is not None:
        yield "scale", "a wall", replace(meaning, scale=None)
        yield "scale", "homogeneity forgotten", replace(meaning, scale=unscaled(meaning.scale))
        for kind in kinds_of_ties(name):
            yield "scale", f"{kind} forgotten", replace(meaning, scale=forgetting(meaning.scale, kind))
    for factor in (0.5, 2.0):
        if meaning.slope is not None:
            yield "slope", f"times {factor}", replace(meaning, slope=meaning.slope * factor)
        if meaning.stretch is not None:
            yield "stretch", f"times {factor}", replace(meaning, stretch=longer(meaning.stretch, factor))
        if meaning.paths is not None:
            yield "paths", f"times {factor}", replace(meaning, paths=heavier(meaning.paths, factor))
    if _shows_kinks(name, [observed(use).slopes for use in EXAMPLES[name]]):
        yield "kinks", "the contrary", replace(meaning, kinks=not meaning.kinks)
    told = ("creates", "identity", *(() if meaning.identity else ("moves",)))  # of what changes nothing both are true
    for field in (*told, *decided(name)):
        yield field, "the contrary", replace(meaning, **{field: not getattr(meaning, field)})


def survivors(name: str) -> list[str]:
    """Changes of an entry to which nothing objects."""
    alive = []
    for field, what, changed in changes(name, TABLE[name]):
        with mock.patch.dict(TABLE, {name: changed}):
            noticed = any(True for _ in complaints(name, CHECKS[field]))
        rule = getattr(changed, field)
        if not noticed and (not isinstance(rule, Changed) or rule.matters):
            alive.append(f"{field}: {what}")
    return alive


@pytest.mark.parametrize("name", NAMES)
def test_a_change_in_any_entry_is_noticed(name: str) -> None:
    assert survivors(name) == []
