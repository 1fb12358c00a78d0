"""The training loss or error along straight lines w + rδ through the weights, several lines at a time.

A layer whose input no moved weight precedes answers to w + rδ with z₀ + r z₁, where z₀ is its output at w and z₁ its
output with the weights δ. Both are computed once per line, and a radius then costs no product with that layer: for a
perceptron on images nearly all of the work, for a line in the last layer all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import get_gradient_edge

from flatscope.context import Context, sample_margins
from flatscope.curvature.operators import activations, batch_size
from flatscope.errors import InputError, NotApplicable, UnknownNameError, refuse_unknown
from flatscope.network.layers import Call, recorded
from flatscope.network.products import LAYER_CALLS
from flatscope.network.program import Operation, watched
from flatscope.params import Params, count, on_stacked
from flatscope.perturbation import FEW_SAMPLES, KEPT_BYTES, STACK_BYTES
from flatscope.samples import Inputs, cut, parts_of

Layers = tuple[tuple[str, str | None], ...]  # weight, and bias if it moves
OBJECTIVES = ("loss", "error")
FEW = 8  # samples on which two ways of computing are compared
SHARE_OF_GPU = 6  # of the free memory a sixth is for what is known of the lines; activations need as much again


@dataclass(frozen=True)
class Ahead:
    """The layers whose input no moved weight precedes."""

    layers: Layers  # (weight, bias or None) by name
    bytes_per_line: int  # of their answers over the whole training set
    is_output: bool  # whether the only one of them gives the network's output: then nothing is left to be run


@dataclass(frozen=True)
class _Known:
    """One batch, and what the layers ahead answer on it: z₀, and z₁ of each line (k, ...)."""

    inputs: Inputs
    targets: Tensor
    at_zero: dict[str, Tensor]
    along: dict[str, Tensor]


class Lines:
    """The objective at w + rδ, for stacked directions δ and a radius of its own for each.

    Args:
        ctx: the point w; its pass counter is charged.
        directions: stacked (k, *shape), the moved parameters alone.
        objective: "loss": mean training loss; "error": fraction of training samples not classified right.
        cached: whether to keep the answers of the layers ahead where they fit into memory.
    """

    def __init__(self, ctx: Context, directions: Params, objective: str = "loss", *, cached: bool = True) -> None:
        self.ctx, self.objective = ctx, checked_objective(ctx, objective)
        self.directions = {name: value.to(ctx.params[name]) for name, value in directions.items()}
        self._ahead = ctx.sweep(layers_ahead, moved=tuple(directions)) if cached else Ahead((), 0, False)
        self._stacked, self._batches = False, list[_Known]()
        if self._ahead.layers and _fits(ctx, self._ahead):
            self._batches = list(self._known_batches())
            ctx.count("forward", ctx.problem.n_train)
            if not self._agrees():
                self._batches = []  # a weight is used in a way that was not seen
        if not self._batches:
            self._ahead = Ahead((), 0, False)
        self._stacked = _stacking_pays(ctx) and self._stacks()

    @property
    def cached(self) -> bool:
        """Whether any layer is answered from memory."""
        return bool(self._batches)

    def values(self, radii: Tensor, which: Tensor | None = None) -> Tensor:
        """The objective of the lines `which` (all by default) at their radii: (k,), float64, on the CPU."""
        chosen = torch.arange(len(radii)) if which is None else which
        totals = torch.zeros(len(radii), dtype=torch.float64)
        with torch.no_grad():
            moved = _Moved(self, chosen, radii)
            for known in self._batches or self._plain_batches(len(radii)):
                step = self._samples_at_once(len(radii)) if self._stacked else len(known.targets)
                for start in range(0, len(known.targets), step):
                    totals += moved.sums(known, slice(start, start + step), self._stacked and len(radii) > 1)
        n = self.ctx.problem.n_train
        self.ctx.count("forward", len(radii) * n)
        return self.ctx.problem.ranks.summed([totals])[0] / n

    def _samples_at_once(self, k: int) -> int:
        """Samples of one call on k stacked networks, bounded by the memory of their activations."""
        each = torch.finfo(self.ctx.problem.dtype).bits // 8 * max(1, activations(self.ctx))
        return max(1, _budget(self.ctx) // (2 * each * k))

    def _plain_batches(self, k: int) -> Iterator[_Known]:
        size = min(self.ctx.problem.batch_size, self._samples_at_once(k)) if self._stacked else None
        for inputs, targets in self.ctx.share(size=size):
            yield _Known(inputs, targets, {}, {})

    def _known_batches(self) -> Iterator[_Known]:
        """One pass that keeps the data, since a loader may shuffle, and the answers of the layers ahead."""
        whole = self.ctx.problem.device.type != "cpu"  # one call for all samples
        step = batch_size(self.ctx)
        size = self.ctx.problem.n_train if whole else step
        with torch.no_grad():
            for inputs, targets in self.ctx.share(size=size):
                pieces = [
                    answers_of(self.ctx, self._ahead.layers, self.directions, cut(inputs, start, start + step))
                    for start in range(0, len(targets), step)
                ]
                names = list(pieces[0][0])
                at_zero = {name: torch.cat([piece[0][name] for piece in pieces]) for name in names}
                along = {name: torch.cat([piece[1][name] for piece in pieces], dim=1) for name in names}
                yield _Known(inputs, targets, at_zero, along)

    def _agrees(self) -> bool:
        """Whether memory and network say the same: on the first samples, a step along the first line."""
        first, few = self._batches[0], slice(0, FEW)
        with torch.no_grad():
            moved = _Moved(self, torch.zeros(1, dtype=torch.int64), torch.ones(1, dtype=torch.float64))
            remembered = moved.outputs(first, few, 0)
            point = {name: self.ctx.params[name] + value[0] for name, value in self.directions.items()}
            run = self.ctx.forward(cut(first.inputs, 0, FEW), {**self.ctx.params, **point})
        return self._close(remembered, run)

    def _stacks(self) -> bool:
        """Whether stacked networks give what they give one by one: on the first samples, along the first two lines."""
        first = self._batches[0] if self._batches else next(self._plain_batches(1))
        k = min(2, len(next(iter(self.directions.values()))))
        with torch.no_grad():
            moved = _Moved(self, torch.arange(k), torch.ones(k, dtype=torch.float64))
            try:
                together = moved.sums(first, slice(0, FEW), stacked=True)
            except (RuntimeError, TypeError, ValueError, NotImplementedError):
                return False  # an operation without a batching rule, or one that looks at values
            return self._close(together, moved.sums(first, slice(0, FEW), stacked=False))

    def _close(self, one: Tensor, other: Tensor) -> bool:
        rounding = 1e4 * torch.finfo(self.ctx.problem.dtype).eps
        return bool((one - other).abs().max() <= rounding * (1 + other.abs().max()))


class _Moved:
    """Some of the lines at given radii, and how to run them."""

    def __init__(self, lines: Lines, chosen: Tensor, radii: Tensor) -> None:
        self.lines, self.ctx = lines, lines.ctx
        device = self.ctx.problem.device
        self.chosen, self.radii = chosen, radii.to(device, self.ctx.problem.dtype)
        self.everything = len(chosen) == len(next(iter(lines.directions.values())))
        self.numbers: list[int] = chosen.tolist()
        self.sizes: list[float] = radii.tolist()
        answered = {name for pair in lines._ahead.layers for name in pair if name}
        self.rest = [name for name in lines.directions if name not in answered]

    def sums(self, known: _Known, part: slice, stacked: bool) -> Tensor:
        """Objective summed over the samples of a part of a batch: (k,), float64, on the CPU."""
        targets = known.targets[part]
        if stacked:
            return self._together(known, part)
        return torch.stack(
            [
                self._objective(self.outputs(known, part, i), targets).double().sum().cpu()
                for i in range(len(self.sizes))
            ]
        )

    def outputs(self, known: _Known, part: slice, i: int) -> Tensor:
        """Outputs of one moved network."""
        line, radius = self.numbers[i], self.sizes[i]
        answers = {
            name: torch.add(zero[part], known.along[name][line][part], alpha=radius)
            for name, zero in known.at_zero.items()
        }
        point = {
            name: torch.add(self.ctx.params[name], self.lines.directions[name][line], alpha=radius)
            for name in self.rest
        }
        return self._run(known, part, point, answers)

    def _together(self, known: _Known, part: slice) -> Tensor:
        targets = known.targets[part]
        along = {name: self._picked(value)[:, part] for name, value in known.along.items()}
        rest = {name: self._picked(self.lines.directions[name]) for name in self.rest}

        def one(radius: Tensor, along: Params, rest: Params) -> Tensor:
            answers = {name: torch.addcmul(zero[part], radius, along[name]) for name, zero in known.at_zero.items()}
            point = {name: self.ctx.params[name] + radius * value for name, value in rest.items()}
            return self._objective(self._run(known, part, point, answers), targets).double().sum()

        sums: Tensor = on_stacked(one, self.radii, along, rest)
        return sums.cpu()

    def _picked(self, value: Tensor) -> Tensor:
        return value if self.everything else value[self.chosen.to(value.device)]

    def _run(self, known: _Known, part: slice, point: Params, answers: dict[str, Tensor]) -> Tensor:
        if self.lines._ahead.is_output:
            return next(iter(answers.values()))
        inputs = cut(known.inputs, part.start, part.stop)
        return answered_forward(self.ctx, inputs, {**self.ctx.params, **point}, answers)

    def _objective(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.lines.objective == "loss":
            return self.ctx.problem.loss(outputs, targets)
        return ~(sample_margins(outputs, targets) > 0)  # outputs that are no numbers are wrong


def answered_forward(ctx: Context, inputs: Inputs, params: Params, answers: Params) -> Tensor:
    """Outputs at `params`, with the outputs of some layers, by the names of their weights, known beforehand."""
    if not answers:
        return ctx.forward(inputs, params)
    known = {id(params[name]): answer for name, answer in answers.items()}

    def follow(op: Operation) -> Any:
        weight = op.named(*LAYER_CALLS[op.name][1])["weight"] if op.name in LAYER_CALLS else None
        return known[id(weight)] if id(weight) in known else op.run()

    with watched(follow):
        return ctx.forward(inputs, params)


def answers_of(ctx: Context, layers: Layers, directions: Params, inputs: Inputs) -> tuple[Params, Params]:
    """What layers answer on a batch at w, and with each of the stacked directions as weights (k, n, ...), by weight."""
    listener = _Listener(ctx.params, layers, directions)
    with watched(listener.follow):
        ctx.forward(inputs)
    return listener.at_zero, listener.along


class _Listener:
    """A rule that keeps what layers answer at w, and what they would answer with each direction as weights."""

    def __init__(self, params: Params, layers: Layers, directions: Params) -> None:
        self._layers = {id(params[weight]): (weight, bias) for weight, bias in layers}
        self._params, self._directions = params, directions
        self.at_zero: Params = {}
        self.along: Params = {}

    def follow(self, op: Operation) -> Any:
        """Run one operation; of a layer in question, keep its answers."""
        output = op.run()
        if op.name not in LAYER_CALLS:
            return output
        given = op.named(*LAYER_CALLS[op.name][1])
        names = self._layers.get(id(given["weight"]))
        if names is not None:
            weight, bias = names
            self.along[weight] = self._responses(op, given, weight, bias)
            self.at_zero[weight] = output.clone()  # an activation in place would overwrite it
        return output

    def _responses(self, op: Operation, given: dict[str, Any], weight: str, bias: str | None) -> Tensor:
        """Output of a layer with each direction as its weights: (k, n, ...)."""
        x = given["input"]
        if op.name == "linear" and x.ndim == 2 and weight in self._directions:  # one product for all lines
            products = torch.matmul(x, self._directions[weight].transpose(1, 2))
            return products if bias is None else products.add_(self._directions[bias][:, None])
        lines = range(len(next(iter(self._directions.values()))))
        parts = ({"weight": self._direction(weight, i), "bias": self._direction(bias, i)} for i in lines)
        return torch.stack([op.function(**{**given, **part}) for part in parts])

    def _direction(self, name: str | None, line: int) -> Tensor | None:
        """What is added to a parameter per unit of radius; nothing where it stands still."""
        if name is None:
            return None
        return self._directions[name][line] if name in self._directions else torch.zeros_like(self._params[name])


def checked_objective(ctx: Context, objective: str) -> str:
    """The objective's name, after refusing the error where there are no classes."""
    refuse_unknown(objective, OBJECTIVES, "objective")
    if objective == "error" and not ctx.problem.classification:
        raise NotApplicable("the error needs class labels and at least two outputs")
    return objective


def moved_parameters(ctx: Context, layers: Any) -> tuple[str, ...]:
    """Trainable parameters of the chosen layers, biases included: all (None), "top" (the last), or names of layers."""
    if layers is None:
        return tuple(ctx.trainable)
    known = {layer.name: layer for layer in ctx.network}
    if layers == "top":
        chosen = [list(known)[-1]] if known else []
    else:
        chosen = [layers] if isinstance(layers, str) else list(layers) if isinstance(layers, tuple | list) else []
    for name in chosen:
        if name not in known:
            raise UnknownNameError.among(str(name), [*known, "top"], "layer")
    wanted = {name for layer in chosen for name in (known[layer].weight, known[layer].bias) if name}
    moved = tuple(name for name in ctx.trainable if name in wanted)
    if not moved:
        raise InputError("layers with trainable weights", repr(layers), where="layers")
    return moved


def lines_at_once(ctx: Context, moved: tuple[str, ...]) -> int:
    """Lines that may be held together, bounded by the memory of their directions and of what is known of them."""
    ahead = ctx.sweep(layers_ahead, moved=moved)
    size = torch.finfo(ctx.problem.dtype).bits // 8
    each = size * count(ctx.params[name] for name in moved)
    return max(1, _budget(ctx) // (each + (ahead.bytes_per_line if _fits(ctx, ahead) else 0)))


def layers_ahead(ctx: Context, *, moved: tuple[str, ...]) -> Ahead:
    """The layers whose answer to w + rδ is known for all r from two evaluations; found on one forward pass."""
    params = {n: v.detach().requires_grad_() if n in moved else v.detach() for n, v in ctx.params.items()}
    with torch.enable_grad(), recorded(ctx.problem.model, params) as recorder:
        outputs = ctx.problem.forward(ctx.problem.example(), params)
    uses = Counter(name for call in recorder.layer_calls for name in (call.weight, call.bias) if name)
    calls = [call for call in recorder.layer_calls if _is_ahead(call, moved, uses)]
    size = torch.finfo(ctx.problem.dtype).bits // 8
    per_sample = sum(torch.Size(call.output_shape[1:]).numel() for call in calls)
    end = get_gradient_edge(outputs).node if outputs.requires_grad else None
    last = len(calls) == 1 and calls[0].edge is not None and calls[0].edge.node is end
    layers = tuple((call.weight, call.bias if call.bias in moved else None) for call in calls)
    return Ahead(layers, size * per_sample * ctx.problem.n_train, last)


def _is_ahead(call: Call, moved: tuple[str, ...], uses: Counter[str]) -> bool:
    moves = call.weight in moved or call.bias in moved
    once = uses[call.weight] == 1 and (call.bias is None or uses[call.bias] == 1)
    return moves and once and not (call.opaque or call.kind == "lookup" or call.input.requires_grad)


def _fits(ctx: Context, ahead: Ahead) -> bool:
    """Whether answers and data stay in memory: the data, the answers at w, and those of at least one line."""
    inputs = ctx.problem.example(1)
    data = ctx.problem.n_train * sum(part.numel() * part.element_size() for part in parts_of(inputs))
    return data + ahead.bytes_per_line <= max(KEPT_BYTES, _budget(ctx)) and ahead.bytes_per_line <= _budget(ctx)


def _budget(ctx: Context) -> int:
    if ctx.problem.device.type != "cuda" or ctx.problem.ranks.size > 1:  # ranks must take the same blocks
        return STACK_BYTES
    return max(STACK_BYTES, torch.cuda.mem_get_info(ctx.problem.device)[0] // SHARE_OF_GPU)


def _stacking_pays(ctx: Context) -> bool:
    return ctx.problem.device.type != "cpu" or ctx.problem.n_train <= FEW_SAMPLES
