"""The table of operations against the operations themselves: every entry is held to what torch computes.

What an operation does is observed numerically on its uses (tests/operation_examples.py). Then the interpreters run on
the same uses with the table as it is, and must say the same; and with every word of every entry changed, one at a time,
and must say something else. Numbers are multiples of small powers of two, so that differences, rescalings by powers of
two and casts to short types are exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from operation_examples import EXAMPLES, NAMES, SAMPLES, Use
from torch import Tensor, nn

from flatscope.errors import NotApplicable
from flatscope.measures.lipschitz import Constants
from flatscope.network import path_rules, scales, stretch_rules, trace
from flatscope.network.expansions import EXPANSIONS
from flatscope.network.labels import CONSTANT, Labels
from flatscope.network.linearity import _CUTS, Linearity
from flatscope.network.operations import CURVED, PIECES, PRODUCT, RATIO, TABLE, Meaning
from flatscope.network.path_pass import PathPass
from flatscope.network.products import LAYER_CALLS
from flatscope.network.program import Operation, tensors_in, watched
from flatscope.symmetries.scaling import permuted_params, random_permutation, rescaled_params

READ_AS_LAYERS = {*LAYER_CALLS, "batch_norm"}  # the reading of scales does not ask the table about them


# What an operation does, observed ------------------------------------------------------------------------------------


def grid(use: Use) -> float:
    """Distance of the numbers that are drawn: all entries differ by it at least, and from every kink by half of it."""
    entries = SAMPLES * sum(math.prod(shape) for shape in use.shapes)
    return 4.0 / max(32, 2 ** math.ceil(math.log2(entries + 2)))


def drawn(use: Use, seed: int) -> list[Tensor]:
    """Signals with distinct entries of both signs, below 4."""
    step, generator = grid(use), torch.Generator().manual_seed(seed)
    sizes = [SAMPLES * math.prod(shape) for shape in use.shapes]
    numbers = (torch.randperm(int(4 / step) - 1, generator=generator)[: sum(sizes)].double() + 0.5) * step
    numbers *= 2.0 * torch.randint(0, 2, numbers.shape, generator=generator) - 1
    return [part.reshape(SAMPLES, *shape) for part, shape in zip(numbers.split(sizes), use.shapes, strict=True)]


def with_extremes(use: Use) -> Iterator[list[Tensor]]:
    """Draws in which every entry is the largest once, once the smallest, and once near zero."""
    n, step = sum(SAMPLES * math.prod(shape) for shape in use.shapes), grid(use)
    for place in range(n):
        for value in (4 - step / 2, step / 2 - 4, 2.25 * step):
            flat = flattened(drawn(use, place))
            flat[place] = value
            yield shaped(use, flat)


def flattened(signals: list[Tensor]) -> Tensor:
    return torch.cat([signal.flatten() for signal in signals])


def shaped(use: Use, flat: Tensor) -> list[Tensor]:
    sizes = [SAMPLES * math.prod(shape) for shape in use.shapes]
    return [part.reshape(SAMPLES, *shape) for part, shape in zip(flat.split(sizes), use.shapes, strict=True)]


@dataclass(frozen=True)
class Observed:
    """What one use of an operation does.

    Attributes:
        slopes: (draws, outputs, inputs) differences over steps.
        constant: (outputs,) what it gives for zeros.
        curved: by the tensors that change together: whether it is curved in them.
        linear_paths: whether f(x) − f(0) is piecewise linear and positively homogeneous.
            by_truth: whether it gives truth values.
        is_first: whether the result is the first signal.
        is_fixed: whether the result is the same whatever the signals.
        moves: whether it commutes with every function of single entries.
        mirrors: whether it does the same to every channel.
    """

    slopes: Tensor
    constant: Tensor
    curved: dict[tuple[int, ...], bool]
    linear_paths: bool
    by_truth: bool
    is_first: bool
    is_fixed: bool
    moves: bool
    mirrors: bool


@functools.cache
def observed(use: Use) -> Observed:
    """Everything that can be seen of a use by running it."""
    draws = [*(drawn(use, seed) for seed in range(5)), *with_extremes(use)]
    results, zero = [use(*x) for x in draws], use(*[torch.zeros_like(part) for part in draws[0]])
    larger = [use(*[4 * part for part in x]) for x in draws]
    slopes = torch.stack([differences(use, x) for x in draws[:5] + draws[5::3] + draws[6::3]])
    made = use.function(*draws[0], *([] if use.weight is None else [use.weight]))
    one_tensor = isinstance(made, Tensor) and made.shape == draws[0][0].shape and len(use.shapes) == 1
    bent = [use(*map(bend, x)) for x in draws]
    swapped = [use(*[part.flip(1) for part in x]).reshape(made.shape).flip(1) for x in draws] if one_tensor else []
    alone = one_tensor and bool((slopes - slopes.diagonal(dim1=1, dim2=2).diag_embed() == 0).all())
    curved = curvatures(use)
    homogeneous = all(torch.allclose(4 * (y - zero), z - zero, atol=1e-9) for y, z in zip(results, larger, strict=True))
    return Observed(
        slopes,
        zero.flatten(),
        curved,
        homogeneous and not curved[tuple(range(len(use.shapes)))],
        any(tensor.dtype == torch.bool for tensor in tensors_in(made)),
        one_tensor and all(torch.equal(y, x[0].flatten(1)) for x, y in zip(draws, results, strict=True)),
        all(torch.equal(y, zero) for y in results),
        all(torch.equal(bend(y), z) for y, z in zip(results, bent, strict=True)),
        alone and all(torch.equal(y, z.flatten(1)) for y, z in zip(results, swapped, strict=True)),
    )


def bend(x: Tensor) -> Tensor:
    """A function of single entries that is 0 at 0, neither monotone nor odd, and exact in short types."""
    return torch.where(x > 1, -x, torch.where(x < -1, x / 2, 2 * x))


def differences(use: Use, x: list[Tensor]) -> Tensor:
    """(outputs, inputs) change of the results over a step of each entry that crosses no kink."""
    step, flat = grid(use) / 8, flattened(x)
    before = use(*x).flatten()
    moved = [
        use(*shaped(use, flat + step * unit)).flatten() - before for unit in torch.eye(len(flat), dtype=flat.dtype)
    ]
    return torch.stack(moved, 1) / step


def tensors_and_directions(use: Use) -> list[tuple[Tensor, Tensor]]:
    """Signals and weight, each with a direction in which no kink is near."""
    given = [*drawn(use, 0), *([] if use.weight is None else [use.weight])]
    generator = torch.Generator().manual_seed(1)
    steps = [torch.randint(1, 7, tensor.shape, generator=generator) for tensor in given]
    steps = [torch.where(step > 3, 3 - step, step).double() for step in steps]  # 1, 2, 3 of either sign
    return [(tensor, grid(use) / 8 * step) for tensor, step in zip(given, steps, strict=True)]


def subsets(use: Use) -> list[tuple[int, ...]]:
    """Each tensor alone, all signals together, and everything together."""
    n, total = len(use.shapes), len(use.shapes) + (use.weight is not None)
    return list(dict.fromkeys([*((place,) for place in range(total)), tuple(range(n)), tuple(range(total))]))


def curvatures(use: Use) -> dict[tuple[int, ...], bool]:
    """For sets of tensors that move on a line together: whether second differences of the results are not zero."""
    found = {}
    for chosen in subsets(use):
        at = [
            use(*[t + (h * d if place in chosen else 0) for place, (t, d) in enumerate(tensors_and_directions(use))])
            for h in (-1, 0, 1)
        ]
        size = float((at[2] - at[0]).abs().max()) + 1e-9
        found[chosen] = float((at[2] - 2 * at[1] + at[0]).abs().max()) > 1e-9 * size
    return found


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
        following = Linearity({"t": t})
        with watched(following.follow):
            use(*[x + t * d if place in chosen else x for place, (x, d) in enumerate(tensors_and_directions(use))])
        said = "t" in following.curved
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
def between(use: Use) -> tuple[Between, list[tuple[Tensor, ...]]]:
    """The network and some inputs."""
    generator = torch.Generator().manual_seed(4)
    sizes = [math.prod(shape[1:]) for shape in use.shapes]
    draw = functools.partial(torch.randn, generator=generator, dtype=torch.float64)
    return Between(use), [tuple(3 * draw(SAMPLES, 2, size) for size in sizes) for _ in range(4)]


def scale(name: str, use: Use) -> Iterator[str]:
    """The reading finds units that can be rescaled or change places: those it finds can, and those that can it finds."""
    model, inputs = between(use)
    graph = trace(model, inputs[0])
    params = {key: value.detach() for key, value in model.named_parameters()}

    def changes_with(other: dict[str, Tensor]) -> bool:
        pairs = [(torch.func.functional_call(model, other, x), model(*x)) for x in inputs]
        return not all(torch.allclose(new, old, rtol=1e-9, atol=1e-9) for new, old in pairs)

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


@functools.cache
def free_components(use: Use) -> int:
    """How many sets of units can be rescaled: units are in one set if an entry of the result depends on both."""
    seen = observed(use)
    slopes = seen.slopes
    if not slopes.any() and not seen.is_fixed and not seen.by_truth:
        return 0  # a number that does not depend on scales is taken for a constant
    units = [(place, unit) for place, shape in enumerate(use.shapes) for unit in range(shape[0])]
    depends = (slopes != 0).any(0).reshape(SAMPLES, -1, slopes.shape[-1]).any(0)  # (columns, inputs)
    reads = {unit: depends[:, flattened(scaled(use, {unit}, like=0.0)) != 0].any(1) for unit in units}  # (columns,)
    sets = {unit: {unit} for unit in units}
    for one in units:
        for other in units:
            if bool((reads[one] & reads[other]).any()):
                joined = sets[one] | sets[other]
                sets |= dict.fromkeys(joined, joined)
    return sum(can_be_scaled(use, set(chosen), reads) for chosen in {frozenset(found) for found in sets.values()})


Unit = tuple[int, int]


def scaled(use: Use, units: set[Unit], like: float = 1.0) -> list[Tensor]:
    """Factors for the signals: 4 for these units (place of the signal, channel), `like` for the others."""
    factors = [torch.full((SAMPLES, *shape), like, dtype=torch.float64) for shape in use.shapes]
    for place, unit in units:
        factors[place][:, unit] = 4.0
    return factors


def can_be_scaled(use: Use, units: set[Unit], reads: dict[Unit, Tensor]) -> bool:
    """Whether exactly those entries of the result that read the units follow when all of them are scaled."""
    factors = scaled(use, units)
    columns = 1.0 + 3.0 * torch.stack([reads[unit] for unit in units]).any(0)
    for x in with_extremes(use):
        if not torch.allclose(use(*[f * part for f, part in zip(factors, x, strict=True)]), columns * use(*x)):
            return False
    return True


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


class Following(Constants):
    """The pass behind Lipschitz constants, on signals in the place of a network's input."""

    def __init__(self, signals: list[Tensor]) -> None:
        stretch_rules.Stretches.__init__(self, signals)
        self._layers = {}


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
}


def complaints(name: str, check: Check) -> Iterator[str]:
    """What the table says of an operation and torch does not do."""
    return (complaint for use in EXAMPLES[name] for complaint in check(name, use))


@pytest.mark.parametrize("name", NAMES)
def test_every_entry_says_what_the_operation_does(name: str) -> None:
    assert [(field, found) for field, check in CHECKS.items() for found in complaints(name, check)] == []


def test_every_operation_has_uses_that_run_it() -> None:
    assert set(EXAMPLES) == set(NAMES)
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
    """The ties of a network, of which one kind is not made; `forgotten` is whether there was one to make."""

    def __init__(self, book: Labels, kind: str) -> None:
        self.scale, self.unit, self.kind, self.forgotten = book.scale, book.unit, kind, False

    def tie(self, left: Tensor, right: Tensor, why: str, scale: bool = True, unit: bool = True) -> Tensor:
        """Made, or forgotten where two labels differ."""
        if self.kind != "tie":
            return super().tie(left, right, why, scale, unit)
        differ = (left != right) & (left > CONSTANT) & (right > CONSTANT)
        self.forgotten |= scale and bool(differ.any())
        return super().tie(left, right, why, scale=False, unit=False)

    def fix_scale(self, labels: Tensor, why: str) -> None:
        """Made, or forgotten where a scale is free."""
        if self.kind != "wall":
            super().fix_scale(labels, why)
        self.forgotten |= self.kind == "wall" and bool(self.scale.is_free(labels).any())

    def pin_units(self, labels: Tensor, why: str) -> None:
        """Made, or forgotten where a unit can change places."""
        if self.kind != "pin":
            super().pin_units(labels, why)
        self.forgotten |= self.kind == "pin" and bool(self.unit.is_free(labels).any())


@dataclass
class Changed:
    """A rule that does something else; `matters` is whether it was ever asked where that makes a difference."""

    rule: Callable[..., Any]
    matters: bool = False

    def __call__(self, *given: Any) -> Any:
        result, matters = self.rule(*given)
        self.matters |= matters
        return result


def forgetting(rule: scales.Rule, kind: str) -> Changed:
    """The rule without its ties, walls or pins."""

    def run(step: scales.Step) -> tuple[Any, bool]:
        book = Forgetful(step.book, kind)
        return rule(replace(step, book=book)), book.forgotten

    return Changed(run)


def unscaled(rule: scales.Rule) -> Changed:
    """The rule with its result taken for a constant."""

    def run(step: scales.Step) -> tuple[Any, bool]:
        labels = list(tensors_in(rule(step)))
        return [torch.full_like(found, CONSTANT) for found in labels], any((found > CONSTANT).any() for found in labels)

    return Changed(run)


def longer(rule: stretch_rules.Rule, factor: float) -> Changed:
    """The rule with its constant times a factor."""
    return Changed(lambda *given: (rule(*given) + math.log(factor), True))


def heavier(rule: path_rules.Rule, factor: float) -> Changed:
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
        for kind in ("tie", "wall", "pin"):
            yield "scale", f"{kind} forgotten", replace(meaning, scale=forgetting(meaning.scale, kind))
    for factor in (0.5, 2.0):
        if meaning.slope is not None:
            yield "slope", f"times {factor}", replace(meaning, slope=meaning.slope * factor)
        if meaning.stretch is not None:
            yield "stretch", f"times {factor}", replace(meaning, stretch=longer(meaning.stretch, factor))
        if meaning.paths is not None:
            yield "paths", f"times {factor}", replace(meaning, paths=heavier(meaning.paths, factor))
    for field in ("creates", "identity", "moves"):
        if not (field == "moves" and meaning.identity):  # of what changes nothing both are true
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
