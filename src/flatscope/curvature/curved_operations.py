"""What the Hessian has beyond its Gauss-Newton part, from the second derivatives of single operations.

By the chain rule the Hessian with respect to one weight that is used once is

    Jᵀ (∇² loss) J + Σ_m J_mᵀ R_m J_m,

over the operations m that are not piecewise linear (GELU, softmax, a normalisation, a product of two activations): J_m
is the Jacobian of the operation's inputs, R_m the Hessian of ⟨δ_m, operation⟩ with δ_m the gradient of the loss at its
output. Each R_m is known by cheap products of one operation. So random columns at the inputs of all of them, beside the
one at the outputs, give every layer's block without bias in the same backward passes; noise between layers, which is
most of that of a product with random signs over all weights, never arises.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatscope.context import Context
from flatscope.curvature.random_signs import Signs
from flatscope.network.interception import Operation, tensors_in, with_tensors
from flatscope.network.linearity import Linearity
from flatscope.network.operations import TABLE
from flatscope.network.pass_recording import in_parts
from flatscope.network.program import Program, Slot
from flatscope.samples import axis_of_samples

STREAM = "columns at curved operations"
Input = tuple[str, int, int]  # of an operation: its name, which call of that name, which tensor of the call


@dataclass(frozen=True)
class CurvedCall:
    """One call of an operation that is not piecewise linear."""

    # the operation of its inputs (the tensors that depend on parameters) alone
    function: Callable[[Sequence[Tensor]], list[Tensor]]
    inputs: list[Tensor]  # these, each the operation's own view
    outputs: list[GradientEdge]  # where in the graph its results stand
    entrywise: bool  # whether every entry of the one input is mapped by itself
    places: list[Input]
    axes: list[int]  # the axis of each input that has the samples


@dataclass(frozen=True)
class Places:
    """Curved operations of a forward pass."""

    curved: frozenset[tuple[str, int]] = frozenset()  # by name, and which call of that name it is
    calls: frozenset[tuple[str, int]] = frozenset()  # all that make numbers of tensors, and how often each is called
    # The axis of an input that has the samples, by the place of the input, where it is not the first.
    axes: Mapping[Input, int] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.curved)


NO_PLACES = Places()


def curved_places(program: Program, names: Iterable[str]) -> tuple[Places, dict[Input, tuple[int, ...]]]:
    """Steps that are not piecewise linear in some of these parameters, and the shapes of what enters them by place."""
    curved_steps = Linearity(program, names).curved_steps
    count, calls = Counter[str](), Counter[str]()
    curved, shapes = set[tuple[str, int]](), dict[Input, tuple[int, ...]]()
    for step in program.steps:
        place = step.name, count[step.name]
        count[step.name] += 1
        calls[step.name] += bool(step.reads) and any(slot.dtype.is_floating_point for slot in step.results)
        if step.index in curved_steps:
            curved.add(place)
            if any(slot.requires_grad for slot in step.results):
                shapes |= {(*place, number): slot.shape for number, slot in enumerate(step.reads) if _moved(slot)}
    return Places(frozenset(curved), frozenset((+calls).items())), shapes


def _moved(slot: Slot) -> bool:
    """True for a tensor that depends on parameters, and is none itself."""
    is_parameter = slot.role is not None and slot.role.form == "whole"
    return slot.dtype.is_floating_point and slot.requires_grad and not is_parameter


class CurvedRecorder:
    """A rule for `watched` that gives every curved operation its own views of its inputs.

    Args:
        places: which they are.
    """

    def __init__(self, places: Places) -> None:
        self._places = places
        self._count: Counter[str] = Counter()
        self._making_numbers: Counter[str] = Counter()
        self.calls: list[CurvedCall] = []

    @property
    def complete(self) -> bool:
        """True where the same operations were met as where the curved ones were found."""
        return not self._places or self._places.calls == frozenset((+self._making_numbers).items())

    def follow(self, op: Operation) -> Any:
        """Run one operation."""
        result = self._run(op)
        self._making_numbers[op.name] += bool(op.tensors) and _makes_numbers(result)
        return result

    def _run(self, op: Operation) -> Any:
        place = op.name, self._count[op.name]
        self._count[op.name] += 1
        if place not in self._places.curved:
            return op.run()
        own, numbers, seen = list[Tensor](), list[Input](), itertools.count()

        def view(value: Tensor) -> Tensor:
            number = next(seen)
            if not _moves(value):
                return value
            own.append(value.view_as(value))
            numbers.append((*place, number))
            return own[-1]

        given = with_tensors((op.args, op.kwargs), view)
        if not own:  # curved in parameters of its own alone
            return op.run()
        places = {id(value): place for place, value in enumerate(own)}
        writes = op.in_place or any(value is True for value in (*op.args, *op.kwargs.values()))  # inplace=True

        def run(inputs: Sequence[Tensor]) -> Any:
            """The operation of other inputs, of copies of them where it may write to them."""
            swap = {key: inputs[place].clone() if writes else inputs[place] for key, place in places.items()}
            args, kwargs = with_tensors(given, lambda value: swap.get(id(value), value))
            return op.function(*args, **kwargs)

        def function(inputs: Sequence[Tensor]) -> list[Tensor]:
            return [value for value in tensors_in(run(inputs)) if value.requires_grad]

        result = run(own)
        edges = [get_gradient_edge(value) for value in tensors_in(result) if value.requires_grad]
        if not edges:  # inside no_grad, or in the forward of an autograd function: a constant
            return result
        meaning = TABLE.get(op.name)
        entrywise = len(own) == 1 and meaning is not None and meaning.slope is not None
        axes = [self._places.axes.get(number, 0) for number in numbers]
        self.calls.append(CurvedCall(function, own, edges, entrywise, numbers, axes))
        return result


def _makes_numbers(result: Any) -> bool:
    return any(value.is_floating_point() for value in tensors_in(result))


def _moves(value: Tensor) -> bool:
    """True for a tensor that depends on parameters, and is none itself."""
    return value.is_floating_point() and value.requires_grad and not value.is_leaf


def find_curved_places(ctx: Context) -> Places | None:
    """The curved operations; None where there are none, or they cannot be followed sample by sample."""
    program, wider = ctx.structure.program, ctx.structure.wider
    (found, shapes), (others, more) = (curved_places(each, ctx.problem.trainable) for each in (program, wider))
    if found != others or not shapes or shapes.keys() != more.keys():
        return None
    if any(wider.n_samples * math.prod(shapes[key]) != program.n_samples * math.prod(more[key]) for key in shapes):
        return None
    # An operation that writes to its input writes to a copy here: where somebody else reads that, outputs differ.
    written = {step.name for step in program.steps if step.written is not None}
    if written & {name for name, _ in found.curved} and not _same_with_views(ctx, found):
        return None
    axes = {place: axis_of_samples(shape, more[place]) for place, shape in shapes.items()}
    return replace(found, axes={place: axis for place, axis in axes.items() if axis})


def _same_with_views(ctx: Context, places: Places) -> bool:
    """True where outputs are the same but for rounding when curved operations have views of their own."""
    inputs, params = ctx.problem.example(), ctx.problem.leaves()
    with torch.enable_grad():
        found, expected = (
            ctx.problem.forward(inputs, params, rules=[in_parts(rule)]).detach()
            for rule in (CurvedRecorder(places).follow, Operation.run)
        )
    rounding = 1e3 * torch.finfo(expected.dtype).eps
    return bool((found - expected).abs().max() <= rounding * (1 + expected.abs().max()))


class CurvedColumns:
    """Random columns at the inputs of a batch's curved operations.

    Args:
        calls: the operations, recorded in a forward pass.
        loss: of all samples of the batch, a function of the outputs of that pass.
        numbers: of the samples.
        seed: the context's.
    """

    def __init__(self, calls: Sequence[CurvedCall], loss: Tensor, numbers: Tensor, seed: int) -> None:
        self._calls, self._numbers, self._seed = calls, numbers, seed
        edges = [edge for call in calls for edge in call.outputs]
        slopes = iter(torch.autograd.grad(loss, edges, retain_graph=True, allow_unused=True))
        self._locals = [_Local(call, [next(slopes) for _ in call.outputs]) for call in calls]
        self.inputs = [value for call in calls for value in call.inputs]
        self._scales: list[list[Tensor]] = []
        for number, (call, local) in enumerate(zip(calls, self._locals, strict=True)):
            probe = [part[0] for part in self._signs(number, range(1), "scale of ")]
            axes = call.axes
            fronts = [part.movedim(axis, 0) for part, axis in zip(local.product(probe), axes, strict=True)]
            scales = [_scale(part, call.entrywise) for part in fronts]
            if local.is_product:
                inputs = [value.movedim(axis, 0) for value, axis in zip(call.inputs, axes, strict=True)]
                scales = [scales[0] * _balance(len(numbers), *inputs)]
            self._scales.append([part.movedim(0, axis) for part, axis in zip(scales, axes, strict=False)])
        self._inverse = [[torch.where(s > 0, 1 / s, 0.0) for s in scales] for scales in self._scales]

    def drawn(self, draws: range) -> list[Tensor]:
        """Two columns for each draw at every input, (2 draws, *shape): of the positive part, and of the negative.

        With D any scales, ζ of signs: E[(Dζ)(RD⁻¹ζ)ᵀ] = R, and q(a, b) = q((a + b)/2) − q((a − b)/2). Of a product of
        two inputs R has no blocks but the two between them: then `a` lies at the first input alone and `b`, twice as
        large, at the second. So a layer that moves one of the two, for which R is zero, gets no noise of it.
        """
        found = []
        for number, local in enumerate(self._locals):
            scales, inverse = self._scales[number], self._inverse[number]
            signs = self._signs(number, draws, inputs=len(scales))
            pairs: list[list[Tensor]] = [[] for _ in self._calls[number].inputs]
            for k in range(len(draws)):
                firsts = [scale * z[k] for scale, z in zip(scales, signs, strict=True)]
                seconds = local.product([scale * z[k] for scale, z in zip(inverse, signs, strict=True)])
                if local.is_product:
                    half, whole = firsts[0] / 2, seconds[1]
                    pairs[0] += [half, half]
                    pairs[1] += [whole, -whole]
                    continue
                for into, a, b in zip(pairs, firsts, seconds, strict=True):
                    into += [(a + b) / 2, (a - b) / 2]
            found += [torch.stack(parts) for parts in pairs]
        return found

    def forms(self, moves: Sequence[Tensor]) -> Tensor:
        """Σ_m aᵀ R_m a for changes `a` of all inputs."""
        rest = iter(moves)
        total = torch.zeros((), dtype=torch.float64)
        for local, call in zip(self._locals, self._calls, strict=True):
            some = [next(rest) for _ in call.inputs]
            total = total + sum(float((a * b).sum()) for a, b in zip(some, local.product(some), strict=True))
        return total

    def _signs(self, number: int, draws: range, of: str = "", inputs: int | None = None) -> list[Tensor]:
        """Signs (draws, *shape) for the first so many inputs of an operation: those of a sample are its own."""
        n, axes = len(self._numbers), self._calls[number].axes
        return [
            Signs(self._seed, f"{STREAM}, {of}{number}.{place}")
            .draw(self._numbers, draws, value.numel() // n, value.dtype)
            .reshape(-1, *value.movedim(axes[place], 0).shape)
            .movedim(1, 1 + axes[place])
            for place, value in enumerate(self._calls[number].inputs[:inputs])
        ]


class _Local:
    """The Hessian of ⟨slopes, operation⟩ with respect to the operation's inputs, by products."""

    def __init__(self, call: CurvedCall, slopes: Sequence[Tensor | None]) -> None:
        self._inputs = [value.detach().requires_grad_() for value in call.inputs]
        with torch.enable_grad():
            outputs = call.function(self._inputs)
            reached = [(value, slope) for value, slope in zip(outputs, slopes, strict=True) if slope is not None]
            gradients: Sequence[Tensor] = ()
            if reached:
                gradients = torch.autograd.grad(
                    [value for value, _ in reached],
                    self._inputs,
                    [slope for _, slope in reached],
                    create_graph=True,
                    materialize_grads=True,
                )
        self._gradients = {place: value for place, value in enumerate(gradients) if value.requires_grad}
        # whether it is linear in each of its two inputs
        self.is_product = len(self._inputs) == 2 and not any(
            _depends(value, self._inputs[place]) for place, value in self._gradients.items()
        )

    def product(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """With one vector of each input's shape, or of the first ones: there are zeros at the others then."""
        given = {place: value for place, value in self._gradients.items() if place < len(vectors)}
        if not given:
            return [torch.zeros_like(value) for value in self._inputs]
        along = [vectors[place] for place in given]
        columns = torch.autograd.grad(
            list(given.values()), self._inputs, along, retain_graph=True, materialize_grads=True
        )
        return list(columns)


def _balance(n: int, first: Tensor, second: Tensor) -> Tensor | float:
    """Factor of `a`, at the first of two factors, with which `b` at the second changes the product as much.

    One number for each of the n samples, whose rows stand together in the first axis; 1 where another axis has them.
    """
    if len(first) % n or len(second) % n:
        return 1.0
    sizes = [part.detach().reshape(n, -1).square().mean(1).sqrt() for part in (first, second)]
    ratio = torch.where(sizes[0] * sizes[1] > 0, sizes[1] / sizes[0], 1.0).sqrt()
    return ratio.repeat_interleave(len(first) // n).reshape(-1, *[1] * (first.ndim - 1))


def _depends(value: Tensor, leaf: Tensor) -> bool:
    """True where a graph leads from a leaf to a value."""
    found = torch.autograd.grad(value, leaf, torch.zeros_like(value), retain_graph=True, allow_unused=True)
    return found[0] is not None


def _scale(curved: Tensor, entrywise: bool) -> Tensor:
    """D for which Dζ and D⁻¹Rζ are about as large: √|Rζ|, smoothed where an entry's own may be small by chance."""
    size = curved.abs()
    if not entrywise and size.ndim > 1:
        size = size.maximum(size.square().mean(-1, keepdim=True).sqrt())
        size = size.maximum(1e-3 * size.mean(tuple(range(1, size.ndim)), keepdim=True))  # of the sample's own
    return size.sqrt()
