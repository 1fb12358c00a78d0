"""Skeletons: for every scale class one way in from the ground and one way out to it.

The general form of the skeleton method of Yi et al. (2019), section 2.2. The nodes are the free scale classes of a
traced network; everything that cannot be rescaled (inputs, outputs, constants, what stands at a wall) is one ground
node with scale 1. Every weight entry is an edge from the class that it reads to the class that it writes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.errors import InputError, NotApplicable, refuse_unknown
from flatscope.network.units import Graph, GraphLayer
from flatscope.params import Params

RULES = ("max_product", "cyclic", "diagonal")
TIE = 256  # roundings by which products of weights may differ and count as equal


class ZeroSkeletonError(NotApplicable):
    """A way through a unit has a weight of zero: its path value cannot be divided by."""


@dataclass(frozen=True)
class Chains:
    """One chosen edge per class, and the product of the edges on the way between the class and the ground.

    All tensors have n_classes + 1 entries, on the CPU; entry 0 is the ground, whose product is 1.
    """

    layer: Tensor  # index of the layer that holds the edge; -1 for the ground
    entry: Tensor  # flat index of the edge in that layer's weight
    other: Tensor  # class at the other end of the edge, nearer to the ground
    log: Tensor  # log of the absolute product, float64: products over tens of layers leave the range of numbers
    sign: Tensor  # sign of the product
    order: tuple[int, ...]  # the classes, nearest to the ground first

    @property
    def product(self) -> Tensor:
        """The product itself, float64."""
        return self.sign * self.log.exp()


def skeleton_chains(graph: Graph, params: Params, rule: str, forward: bool) -> Chains:
    """The prefixes (`forward`: from the ground to each class) or the suffixes (from each class to the ground).

    A class that several layers write is entered by the first of them, and left by the last layer that reads it, so
    that what lies between, identity connections included, always leads from the one to the other. Every edge leads
    to a class that was settled by an earlier layer (a later one for suffixes): chains cannot run in circles.

    Args:
        graph: the traced network.
        params: its weights.
        rule: "max_product": the edge with the largest product, over all taps of a convolution; "cyclic": unit i is
            joined to unit i modulo the width, at the centre tap; "diagonal": to unit i.
        forward: prefixes if True, suffixes if False.
    """
    refuse_unknown(rule, RULES, "rule for basis paths")
    n = graph.n_classes + 1
    layer_of, entry_of, other_of = (torch.full((n,), -1, dtype=torch.int64) for _ in range(3))
    log, sign = torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)
    settled = torch.zeros(n, dtype=torch.bool)
    settled[0] = True
    order: list[int] = []
    numbered = list(enumerate(graph.layers))
    for index, layer in numbered if forward else reversed(numbered):
        own, other = (layer.outputs, layer.inputs) if forward else (layer.inputs, layer.outputs)
        new = [number for number in dict.fromkeys(own.tolist()) if not settled[number]]
        if not new:
            continue
        weight = params[layer.weight].detach().double().cpu()
        _refuse_non_finite(layer, weight)
        if rule == "max_product":
            rounding = TIE * torch.finfo(params[layer.weight].dtype).eps
            entries = _strongest_entries(layer, weight, own, other, log, settled, rounding)
        else:
            entries = _entries_by_unit_number(layer, weight.shape, new, settled, rule, forward)
        far = layer.flat_channels(weight.shape)[1 if forward else 0]
        for number in new:
            entry = entries.get(number)
            if entry is None:
                continue  # nothing leads on from here; another layer may
            value = weight.flatten()[entry]
            if value == 0:
                raise _zero_weight_error(layer, entry, weight.shape, forward)
            ahead = int(other[far[entry]])
            layer_of[number], entry_of[number], other_of[number] = index, entry, ahead
            log[number], sign[number] = log[ahead] + value.abs().log(), sign[ahead] * value.sign()
            order.append(number)
        settled[torch.tensor([number for number in new if layer_of[number] >= 0], dtype=torch.int64)] = True
    if not bool(settled.all()):
        raise _missing_chain_error(graph, params, int((~settled).nonzero()[0]), forward)
    return Chains(layer_of, entry_of, other_of, log, sign, tuple(order))


def _strongest_entries(
    layer: GraphLayer, weight: Tensor, own: Tensor, other: Tensor, log: Tensor, settled: Tensor, rounding: float
) -> dict[int, int]:
    """For every class the entry with the largest product, all of a class's candidates carrying the same scale.

    The first of those that are equal but for rounding: the same network with units rescaled, or read on another
    machine, must not get another skeleton.
    """
    outputs, inputs = layer.flat_channels(weight.shape)
    near, far = (own[outputs], other[inputs]) if own is layer.outputs else (own[inputs], other[outputs])
    scores = weight.flatten().abs().log() + log[far]
    scores[~settled[far]] = -torch.inf
    best = torch.full(log.shape, -torch.inf, dtype=torch.float64).scatter_reduce(0, near, scores, "amax")
    hits = ((scores >= best[near] - rounding) & scores.isfinite()).nonzero().flatten()
    first = torch.full(log.shape, weight.numel()).scatter_reduce(0, near[hits], hits, "amin")
    return {number: int(first[number]) for number in set(near[hits].tolist())}


def _entries_by_unit_number(
    layer: GraphLayer, shape: torch.Size, wanted: list[int], settled: Tensor, rule: str, forward: bool
) -> dict[int, int]:
    """The entries that join unit i of a layer's group to unit i (modulo the width) on its other side, at the centre."""
    own, other = (layer.outputs, layer.inputs) if forward else (layer.inputs, layer.outputs)
    entries: dict[int, int] = {}
    for group in range(layer.groups):
        own_units, other_units = (_units_of_group(classes, group, layer.groups) for classes in (own, other))
        for place, (number, channels) in enumerate(own_units):
            if number not in wanted or number in entries:
                continue
            if rule == "diagonal" and place >= len(other_units):
                got = f"no unit {place} among the {len(other_units)} {'inputs' if forward else 'outputs'}"
                fix = 'Use rule="cyclic", which is the same where widths are equal, or rule="max_product"'
                raise InputError("as many units in every layer, for the diagonal rule", got, f"layer {layer.name}", fix)
            steps = 1 if rule == "diagonal" else len(other_units)
            partners = (other_units[(place + step) % len(other_units)] for step in range(steps))
            partner = next((channels for unit, channels in partners if settled[unit]), None)
            if partner is not None:
                pair = (channels[len(channels) // 2], partner[len(partner) // 2])
                entries[number] = _centre_tap_index(layer, shape, *(pair if forward else pair[::-1]))
    return entries


def _units_of_group(classes: Tensor, group: int, groups: int) -> list[tuple[int, list[int]]]:
    """(class, its channels) in one group; a flattened channel is one unit, every fixed channel one of its own."""
    per_group = len(classes) // groups
    start, stop = group * per_group, (group + 1) * per_group
    units: dict[tuple[int, int], list[int]] = {}
    for channel, number in enumerate(classes[start:stop].tolist(), start=start):
        units.setdefault((number, channel if number == 0 else -1), []).append(channel)
    return [(number, channels) for (number, _), channels in units.items()]


def _centre_tap_index(layer: GraphLayer, shape: torch.Size, output: int, input_: int) -> int:
    """Flat index of the centre tap between two channels."""
    rows, column = (input_, output) if layer.input_first else (output, input_)
    index = [rows, column % shape[1], *(size // 2 for size in shape[2:])]
    flat = 0
    for place, size in zip(index, shape, strict=True):
        flat = flat * size + place
    return flat


def _refuse_non_finite(layer: GraphLayer, weight: Tensor) -> None:
    bad = (~weight.flatten().isfinite()).nonzero()
    if len(bad):
        unit = int(layer.flat_channels(weight.shape)[0][bad[0, 0]])
        raise NotApplicable("finite weights", "NaN or infinity", where=f"layer {layer.name}, unit {unit}")


def _zero_weight_error(layer: GraphLayer, entry: int, shape: torch.Size, forward: bool) -> NotApplicable:
    outputs, inputs = (int(channels[entry]) for channels in layer.flat_channels(shape))
    end = f"unit {outputs}, weight from input {inputs}" if forward else f"weight from input {inputs} to unit {outputs}"
    return ZeroSkeletonError(
        "skeleton weights that are not zero",
        "zero",
        where=f"layer {layer.name}, {end}",
        fix='A path value cannot be divided by zero; rule="max_product" takes the largest weights',
    )


def _missing_chain_error(graph: Graph, params: Params, number: int, forward: bool) -> NotApplicable:
    """The first class without a chain, named by a layer and unit, with the reason."""
    for layer in graph.layers if forward else reversed(graph.layers):
        own = layer.outputs if forward else layer.inputs
        if bool((own == number).any()):
            weight = params[layer.weight].detach().cpu().flatten()
            heads, tails = layer.edge_classes(params[layer.weight].shape)
            zero = not bool(weight[(heads if forward else tails) == number].any())
            break
    side = "incoming" if forward else "outgoing"
    return (ZeroSkeletonError if zero else NotApplicable)(
        f"a weight path from every unit to {'the input' if forward else 'the output'}",
        f"{side} weights that are all zero" if zero else f"no {side} weight that leads there",
        where=f"layer {layer.name}, {'unit' if forward else 'input'} {int((own == number).nonzero()[0])}",
        fix="Remove the dead unit: no path value through it can be moved",
    )
