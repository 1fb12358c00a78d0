"""The training loss or error along straight lines w + rδ through the weights, several lines at a time.

A layer whose input no moved weight precedes answers to w + rδ with z₀ + r z₁, where z₀ is its output at w and z₁ its
output with the weights δ. Both are computed once per line, and a radius then costs no product with that layer: for a
perceptron on images nearly all of the work, for a line in the last layer all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.curvature.memory import allowed
from flatscope.curvature.operators import activations, batch_size
from flatscope.errors import InputError, NotApplicable, UnknownNameError, refuse_unknown
from flatscope.network.interception import LAYER_CALLS, Operation
from flatscope.network.layer_uses import LayerUse
from flatscope.network.program import Slot
from flatscope.params import Params, count_scalars, vectorised_over_points
from flatscope.perturbation import agree_to_rounding, stacked_call_agrees
from flatscope.samples import Inputs, slice_inputs, tensors_of_inputs

Layers = tuple[tuple[str, str | None], ...]  # weight, and bias if it moves
OBJECTIVES = ("loss", "error")
FEW = 8  # samples on which two ways of computing are compared


@dataclass(frozen=True)
class LinearLayers:
    """The layers whose input no moved weight precedes."""

    layers: Layers  # (weight, bias or None) by name
    bytes_per_line: int  # of their answers over the whole training set
    is_output: bool  # whether the only one of them gives the network's output: then nothing is left to be run


@dataclass(frozen=True)
class _BatchResponses:
    """One batch, and what the linear layers answer on it: z₀, and z₁ of each line (k, ...)."""

    inputs: Inputs
    targets: Tensor
    at_zero: Params
    along: Params


class LossesAlongLines:
    """The objective at w + rδ, for stacked directions δ and a radius of its own for each.

    Args:
        ctx: the point w; its pass counter is charged.
        directions: stacked (k, *shape), the moved parameters alone.
        objective: "loss": mean training loss; "error": fraction of training samples not classified right.
        keep_responses: whether to keep the answers of the linear layers where they fit into memory.
    """

    def __init__(
        self, ctx: Context, directions: Params, objective: str = "loss", *, keep_responses: bool = True
    ) -> None:
        self.ctx, self.objective = ctx, checked_objective(ctx, objective)
        self.directions = {name: value.to(ctx.params[name]) for name, value in directions.items()}
        self._linear = (
            ctx.cached(layers_linear_in_radius, moved=tuple(directions))
            if keep_responses
            else LinearLayers((), 0, False)
        )
        self._stacked, self._batches = False, list[_BatchResponses]()
        if self._linear.layers and _fits_into_memory(ctx, self._linear):
            self._batches = list(self._known_batches())
            ctx.charge_passes("forward", ctx.problem.n_train)
            if not self._known_responses_agree():
                self._batches = []  # a weight is used in a way that was not seen
        if not self._batches:
            self._linear = LinearLayers((), 0, False)
        self._stacked = (
            ctx.problem.device.type != "cpu" or ctx.problem.n_train <= ctx.effort.limits.stacked_samples
        ) and self._can_stack_lines()

    @property
    def keeps_responses(self) -> bool:
        """True if the responses of any layer are kept in memory."""
        return bool(self._batches)

    def values(self, radii: Tensor, which: Tensor | None = None) -> Tensor:
        """The objective of the lines `which` (all by default) at their radii: (k,), float64, on the CPU."""
        k, n = len(radii), self.ctx.problem.n_train
        chosen, totals = torch.arange(k) if which is None else which, torch.zeros(k, dtype=torch.float64)
        with torch.no_grad():
            for known in self._batches or self._plain_batches(k):
                step = self._samples_at_once(k) if self._stacked else len(known.targets)
                for start in range(0, len(known.targets), step):
                    part = slice(start, start + step)
                    totals += self._summed_objectives(known, part, chosen, radii, stacked=self._stacked and k > 1)
        self.ctx.charge_passes("forward", k * n)
        return self.ctx.problem.ranks.summed([totals])[0] / n

    def _samples_at_once(self, k: int) -> int:
        """Samples of one call on k stacked networks, bounded by the memory of their activations."""
        each = torch.finfo(self.ctx.problem.dtype).bits // 8 * max(1, activations(self.ctx))
        return max(1, _memory_budget(self.ctx) // (2 * each * k))

    def _plain_batches(self, k: int) -> Iterator[_BatchResponses]:
        size = min(self.ctx.problem.batch_size, self._samples_at_once(k)) if self._stacked else None
        return (_BatchResponses(inputs, targets, {}, {}) for inputs, targets in self.ctx.share(size=size))

    def _known_batches(self) -> Iterator[_BatchResponses]:
        """One pass that keeps the data, since a loader may shuffle, and the answers of the linear layers."""
        step = batch_size(self.ctx)
        size = step if self.ctx.problem.device.type == "cpu" else self.ctx.problem.n_train  # one call for all samples
        with torch.no_grad():
            for inputs, targets in self.ctx.share(size=size):
                pieces = [
                    layer_responses_along_directions(
                        self.ctx, self._linear.layers, self.directions, slice_inputs(inputs, start, start + step)
                    )
                    for start in range(0, len(targets), step)
                ]
                at_zero, along = zip(*pieces, strict=True)
                yield _BatchResponses(inputs, targets, _joined_stacks(at_zero, dim=0), _joined_stacks(along, dim=1))

    def _known_responses_agree(self) -> bool:
        """True if memory and network say the same: on the first samples, a step along the first line."""
        first, (along, rest) = self._batches[0], self._responses_of_lines(self._batches[0], 0)
        with torch.no_grad():
            remembered = self._outputs_of_moved_network(first, slice(0, FEW), 1.0, along, rest)
            point = {name: self.ctx.params[name] + value[0] for name, value in self.directions.items()}
            run = self.ctx.forward(slice_inputs(first.inputs, 0, FEW), {**self.ctx.params, **point})
        return agree_to_rounding(self.ctx, remembered, run)

    def _can_stack_lines(self) -> bool:
        """True if stacked networks give what they give one by one: on the first samples, along the first two lines."""
        first = self._batches[0] if self._batches else next(self._plain_batches(1))
        lines = torch.arange(min(2, len(next(iter(self.directions.values())))))
        sums = partial(
            self._summed_objectives, first, slice(0, FEW), lines, torch.ones(len(lines), dtype=torch.float64)
        )
        with torch.no_grad():
            return stacked_call_agrees(self.ctx, lambda: [sums(stacked=True)], lambda: [sums(stacked=False)])

    def _summed_objectives(
        self, known: _BatchResponses, part: slice, lines: Tensor, radii: Tensor, *, stacked: bool
    ) -> Tensor:
        """Objective of some lines at their radii, summed over a part of a batch: (k,), float64, on the CPU."""

        def one(radius: float | Tensor, along: Params, rest: Params) -> Tensor:
            outputs, targets = self._outputs_of_moved_network(known, part, radius, along, rest), known.targets[part]
            if self.objective == "loss":
                return self.ctx.problem.loss(outputs, targets).double().sum()
            return (~(sample_margins(outputs, targets) > 0)).double().sum()  # outputs that are no numbers are wrong

        if not stacked:
            pairs = zip(lines.tolist(), radii.tolist(), strict=True)
            return torch.stack([one(radius, *self._responses_of_lines(known, line)).cpu() for line, radius in pairs])
        everything = len(lines) == len(next(iter(self.directions.values())))
        picked = slice(None) if everything else lines.to(self.ctx.problem.device)
        sums: Tensor = vectorised_over_points(
            one, radii.to(self.ctx.problem.device, self.ctx.problem.dtype), *self._responses_of_lines(known, picked)
        )
        return sums.cpu()

    def _responses_of_lines(self, known: _BatchResponses, line: Any) -> tuple[Params, Params]:
        """Of one line, or of several stacked: the answers of the linear layers, and the directions of all else."""
        answered = {name for pair in self._linear.layers for name in pair if name}
        rest = {name: value[line] for name, value in self.directions.items() if name not in answered}
        return {name: value[line] for name, value in known.along.items()}, rest

    def _outputs_of_moved_network(
        self, known: _BatchResponses, part: slice, radius: float | Tensor, along: Params, rest: Params
    ) -> Tensor:
        """Outputs of one moved network on a part of a batch."""
        answers = {
            name: _weights_moved_along_direction(zero[part], along[name][part], radius)
            for name, zero in known.at_zero.items()
        }
        if self._linear.is_output:
            return next(iter(answers.values()))
        point = {
            name: _weights_moved_along_direction(self.ctx.params[name], value, radius) for name, value in rest.items()
        }
        inputs = slice_inputs(known.inputs, part.start, part.stop)
        return forward_with_known_responses(self.ctx, inputs, {**self.ctx.params, **point}, answers)


def _weights_moved_along_direction(start: Tensor, direction: Tensor, radius: float | Tensor) -> Tensor:
    if isinstance(radius, Tensor):
        return torch.addcmul(start, radius, direction)
    return torch.add(start, direction, alpha=radius)


def _joined_stacks(pieces: Sequence[Params], dim: int) -> Params:
    return {name: torch.cat([piece[name] for piece in pieces], dim=dim) for name in pieces[0]}


def forward_with_known_responses(ctx: Context, inputs: Inputs, params: Params, answers: Params) -> Tensor:
    """Outputs at `params`, with the outputs of some layers, by the names of their weights, known beforehand."""
    if not answers:
        return ctx.forward(inputs, params)
    known = {id(params[name]): answer for name, answer in answers.items()}

    def follow(op: Operation) -> Any:
        weight = op.layer_arguments()["weight"] if op.name in LAYER_CALLS else None
        return known[id(weight)] if id(weight) in known else op.run()

    return ctx.forward(inputs, params, [follow])


def layer_responses_along_directions(
    ctx: Context, layers: Layers, directions: Params, inputs: Inputs
) -> tuple[Params, Params]:
    """Outputs of layers on a batch at w, and with each stacked direction as weights (k, n, ...), by weight."""
    asked = {id(ctx.params[weight]): (weight, bias) for weight, bias in layers}
    at_zero: Params = {}
    along: Params = {}

    def direction(name: str | None, line: int) -> Tensor | None:
        """Change of a parameter per unit of radius; None where it does not move."""
        if name is None:
            return None
        return directions[name][line] if name in directions else torch.zeros_like(ctx.params[name])

    def follow(op: Operation) -> Any:
        output = op.run()
        if op.name not in LAYER_CALLS:
            return output
        given = op.layer_arguments()
        weight, bias = asked.get(id(given["weight"]), ("", None))
        if not weight:
            return output
        at_zero[weight] = output.clone()  # an activation in place would overwrite it
        if op.name == "linear" and given["input"].ndim == 2 and weight in directions:  # one product for all lines
            products = torch.matmul(given["input"], directions[weight].transpose(1, 2))
            along[weight] = products if bias is None else products.add_(directions[bias][:, None])
            return output
        lines = range(len(next(iter(directions.values()))))
        moves = ({"weight": direction(weight, i), "bias": direction(bias, i)} for i in lines)
        along[weight] = torch.stack([op.function(**{**given, **move}) for move in moves])
        return output

    ctx.forward(inputs, rules=[follow])
    return at_zero, along


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
    linear = ctx.cached(layers_linear_in_radius, moved=moved)
    size = torch.finfo(ctx.problem.dtype).bits // 8
    each = size * count_scalars(ctx.params[name] for name in moved)
    return max(1, _memory_budget(ctx) // (each + (linear.bytes_per_line if _fits_into_memory(ctx, linear) else 0)))


def layers_linear_in_radius(ctx: Context, *, moved: tuple[str, ...]) -> LinearLayers:
    """The layers whose answer to w + rδ is known for all r from two evaluations; read off the record."""
    program = ctx.structure.program
    of_layers = [use for use in program.layer_uses() if use.kind != "batchnorm"]
    counts, behind = (
        Counter(name for use in of_layers for name in (use.weight, use.bias) if name),
        program.behind(moved),
    )
    uses = [use for use in of_layers if use.step not in behind and _may_be_linear_in_radius(use, moved, counts)]
    size = torch.finfo(ctx.problem.dtype).bits // 8
    per_sample = sum(torch.Size(use.output_shape[1:]).numel() for use in uses)
    last = len(uses) == 1 and program.output in program.steps[uses[0].step].results
    layers = tuple((use.weight, use.bias if use.bias in moved else None) for use in uses)
    return LinearLayers(layers, size * per_sample * ctx.problem.n_train, last)


def _may_be_linear_in_radius(use: LayerUse[Slot], moved: tuple[str, ...], counts: Counter[str]) -> bool:
    moves = use.weight in moved or use.bias in moved
    once = counts[use.weight] == 1 and (use.bias is None or counts[use.bias] == 1)
    return moves and once and not (use.opaque or use.masked or use.kind == "lookup")


def _fits_into_memory(ctx: Context, linear: LinearLayers) -> bool:
    """True if answers and data stay in memory: the data, the answers at w, and those of at least one line."""
    inputs = ctx.problem.example(1)
    data = ctx.problem.n_train * sum(part.numel() * part.element_size() for part in tensors_of_inputs(inputs))
    return data + linear.bytes_per_line <= max(
        ctx.effort.limits.kept_data, _memory_budget(ctx)
    ) and linear.bytes_per_line <= _memory_budget(ctx)


def _memory_budget(ctx: Context) -> int:
    if ctx.problem.device.type != "cuda" or ctx.problem.ranks.size > 1:  # ranks must take the same blocks
        return ctx.effort.limits.stacked_bytes
    return allowed(ctx.effort.limits.lines_memory, ctx.problem.device)
