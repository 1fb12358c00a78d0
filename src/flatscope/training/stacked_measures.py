"""Flatness of chosen layers for all networks of a stack at once, cheap enough to be followed along training.

The numbers are those of `flatscope.measure`, by the same columns and the same forms (see `curvature.sweep`): one
forward pass of the stack, and backward passes that end at the first of the chosen layers. Near the output these cost
little.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatscope.context import Context
from flatscope.curvature.coverage import rows_per_sample
from flatscope.curvature.output_hessian import output_root
from flatscope.curvature.per_sample_gradients import Flow, matrices, weight_forms
from flatscope.curvature.route import find_not_covered
from flatscope.errors import InputError, refuse_unknown
from flatscope.isolation import own_settings
from flatscope.loss import as_loss
from flatscope.measuring import measure
from flatscope.network.layer_uses import LayerUse
from flatscope.network.layers import Layer
from flatscope.problem import Problem
from flatscope.training.stacked_layers import StackedNetwork, Weights
from flatscope.training.trials import StackSamples

PROBED_SAMPLES = 8
# Samples at once, of one trial where it has that many; bytes of their columns and inputs; and of what is kept of all
# samples for eigenvalues.
AT_ONCE = {"cpu": 4_096, "cuda": 65_536}
BATCH_BYTES = {"cpu": 2**27, "cuda": 2**32}
KEPT_BYTES = {"cpu": 2**30, "cuda": 2**34}
EIGENVALUE_TOLERANCE = 1e-7
MOST_PRODUCTS = 300
LOOKED_AT_EVERY = 8
BREAKDOWN = 1e-13  # what is left of a product below this share of it is nothing but rounding


Piece = tuple[slice, Tensor, Tensor]  # some trials, inputs (t, n, in) and columns (t, n, k, out) of some samples


@dataclass(frozen=True)
class LayerMeans:
    """Of one layer, a row for each trial: ‖w‖², what `Curvature` has, and the top eigenvalue (empty if not wanted)."""

    squared_norm: Tensor
    trace: Tensor
    relative: Tensor
    units: Tensor
    top: Tensor


MEASURES: dict[str, Callable[[LayerMeans], Tensor]] = {
    "layer_trace": lambda means: means.trace,
    "layer_max_eigenvalue": lambda means: means.top,
    "kappa_trace": lambda means: means.squared_norm * means.trace,
    "kappa": lambda means: means.squared_norm * means.top,
    "rho": lambda means: means.units.amax(1),
    "rho_layer_sum": lambda means: means.units.sum(1),
    "relative_flatness": lambda means: means.relative,
}
BY_EIGENVALUES = {"layer_max_eigenvalue", "kappa"}


def checked_names(names: Sequence[str]) -> list[str]:
    """The names, once all are known to be measures that stacks have."""
    for name in names:
        refuse_unknown(name, MEASURES, "measure of a whole stack")
    return list(names)


class StackedLayers:
    """The layers of a network that a stack can be measured at, found with some of its samples."""

    def __init__(self, model: nn.Module, pair: tuple[Tensor, Tensor], loss: str) -> None:
        x, y = (part[:PROBED_SAMPLES].cpu() for part in pair)
        context = Context(Problem(model, train=(x, y), loss=loss))
        with own_settings():
            not_covered, rows = find_not_covered(context), rows_per_sample(context)
        self._known = {layer.name: layer for layer in context.network}
        self._refused = {
            layer.name: not_covered[layer.weight] for layer in context.network if layer.weight in not_covered
        }
        self._refused |= {
            layer.name: "its rows are positions"
            for layer in context.network
            if rows.get(layer.weight, 1) > 1 and layer.name not in self._refused
        }

    def chosen(self, layers: Sequence[str] | None, names: Sequence[str]) -> list[Layer]:
        """The layers of these names, all by default; refused where a stack does not have a measure, or not exactly."""
        stackable = []
        for name in self._known if layers is None else layers:
            refuse_unknown(name, self._known, "layer")
            reason, layer = self._refused.get(name, ""), self._known[name]
            if BY_EIGENVALUES & set(names) and not (layer.kind == "dense" and len(layer.input_shape) == 1):
                reason = reason or "eigenvalues are found for dense layers on vectors only"
            if reason:
                fix = "Leave it out, or measure the networks by themselves with flatscope.measure"
                raise InputError("a layer that stacks can be measured at", reason, where=f"layer {name}", fix=fix)
            stackable.append(layer)
        return stackable


@own_settings()
def measure_stack(
    network: StackedNetwork,
    weights: Weights,
    samples: StackSamples,
    loss: str,
    names: Sequence[str],
    layers: Sequence[Layer],
) -> dict[tuple[str, str], Tensor]:
    """{(measure, layer): value of each trial}, in float64 on the CPU; NaN for a trial that is not finite."""
    trials, n = samples.targets.shape[:2]
    place = samples.images.device
    kind = place.type if place.type in AT_ONCE else "cuda"
    first, targets = samples.batch(slice(0, 2), network.trials_first)
    with torch.no_grad():
        outputs = network(weights, first)
    columns = output_root(as_loss(loss), outputs.flatten(0, 1), targets.flatten(0, 1)).count
    floats = sum(columns * math.prod(layer.output_shape) + math.prod(layer.input_shape) for layer in layers)
    of_one = floats * outputs.element_size()
    at_once = max(1, min(AT_ONCE[kind], BATCH_BYTES[kind] // of_one))
    together = max(1, KEPT_BYTES[kind] // (n * of_one)) if BY_EIGENVALUES & set(names) else trials
    values_by_key: dict[tuple[str, str], list[Tensor]] = {}
    for rows in torch.split(torch.arange(trials, device=place), together):
        part = {name: value[rows].detach() for name, value in weights.items()}
        for key, values in _measured_stack(network, part, samples.rows(rows), loss, names, layers, at_once).items():
            values_by_key.setdefault(key, []).append(values)
    result = {key: torch.cat(parts) for key, parts in values_by_key.items()}
    for row in range(trials if trials > 1 else 0):
        if all(values[row].isfinite() for values in result.values()):
            continue
        one = torch.tensor([row], device=place)  # by itself: it may have that from a neighbour, see `Stack`
        weights_of_one = {name: value[one] for name, value in weights.items()}
        for key, values in measure_stack(network, weights_of_one, samples.rows(one), loss, names, layers).items():
            result[key][row] = values[0]
    return result


def measure_alone(
    model: nn.Module, pair: tuple[Tensor, Tensor], loss: str, names: Sequence[str], layers: Sequence[str] | None
) -> dict[tuple[str, str], Tensor]:
    """The same for a network that is no part of a stack; exact where that can be had."""
    try:
        table = measure(Problem(model.eval(), train=pair, loss=loss, device=pair[0].device), names, precision=0)
    except InputError:  # its outputs are not finite
        if layers is None or all(bool(value.isfinite().all()) for value in model.parameters()):
            raise
        return {(name, layer): torch.tensor([math.nan]) for name in names for layer in layers}
    values_by_measure = {name: table.layer(name) for name in names}
    for layer in layers or ():
        refuse_unknown(layer, values_by_measure[names[0]], "layer")
    return {
        (name, layer): torch.tensor([value], dtype=torch.float64)
        for name, values in values_by_measure.items()
        for layer, value in values.items()
        if layers is None or layer in layers
    }


def _measured_stack(
    network: StackedNetwork,
    weights: Weights,
    samples: StackSamples,
    loss: str,
    names: Sequence[str],
    layers: Sequence[Layer],
    at_once: int,
) -> dict[tuple[str, str], Tensor]:
    trials, n = samples.targets.shape[:2]
    eigenvalues, chosen = bool(BY_EIGENVALUES & set(names)), {layer.weight: layer for layer in layers}
    sums: dict[str, list[Tensor]] = {}
    pieces: dict[str, list[Piece]] = {name: [] for name in chosen}
    step = max(1, at_once // n)
    for first, start in itertools.product(range(0, trials, step), range(0, n, at_once)):
        rows = slice(first, first + step)
        part = {name: value[rows] for name, value in weights.items()}
        batch = samples.rows(rows).batch(slice(start, start + at_once), network.trials_first)
        for name, (x, s) in _inputs_and_columns_of_layers(network, part, batch, loss, chosen).items():
            forms = torch.vmap(_forms_of_layer(chosen[name]))(x, s, part[name])
            totals = sums.setdefault(name, [value.new_zeros(trials, *value.shape[1:]) for value in forms])
            for total, value in zip(totals, forms, strict=True):
                total[rows] += value
            if eigenvalues:
                pieces[name].append((rows, x, s))
    result = {}
    for layer in layers:
        squared_norm = weights[layer.weight].double().flatten(1).square().sum(1)
        top = _largest_eigenvalues(pieces.pop(layer.weight), trials) if eigenvalues else torch.empty(0)
        means = LayerMeans(squared_norm, *[total / n for total in (*sums[layer.weight], top)])
        for name in names:
            value = MEASURES[name](means)
            result[name, layer.name] = torch.where(value.isfinite(), value, math.nan).cpu()
    return result


def _inputs_and_columns_of_layers(
    network: StackedNetwork, weights: Weights, batch: tuple[Tensor, Tensor], loss: str, layers: Mapping[str, Layer]
) -> dict[str, tuple[Tensor, Tensor]]:
    """Inputs (t, n, …) of every layer and the columns (t, n, k, …) at its output."""
    inputs, targets = batch
    received: dict[str, Tensor] = {}
    ends: dict[str, Tensor] = {}

    def seen(name: str, given: Tensor, result: Tensor) -> Tensor:
        if name not in layers:
            return result
        received[name] = given.detach().clone()  # what follows may write to it
        ends[name] = result if result.requires_grad else result.detach().requires_grad_()
        return ends[name].clone()

    outputs = network(weights, inputs, seen=seen).flatten(0, 1)
    root = output_root(as_loss(loss), outputs, targets.flatten(0, 1))
    columns = root.exact(0, root.count).values  # (k, t · n, *output)
    by_column = [torch.autograd.grad(outputs, list(ends.values()), column, retain_graph=True) for column in columns]
    trials = len(targets)
    return {
        name: (
            network.split(received[name], trials),
            torch.stack([network.split(gradient, trials) for gradient in gradients], dim=2),
        )
        for name, gradients in zip(ends, zip(*by_column, strict=True), strict=True)
    }


def _forms_of_layer(layer: Layer) -> Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """Sums over the samples of one trial: trace, relative flatness, ρ of each unit."""

    def summed(x: Tensor, s: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        shape = (len(x), *s.shape[2:])
        flow = Flow([LayerUse(layer.weight, None, layer.kind, x, shape, layer.settings)], [s], None, None)
        forms = weight_forms(flow, *matrices(flow, weight), weight)
        return forms.trace.double().sum(), forms.relative.double().sum(), forms.along.square().double().sum((0, 1))

    return summed


def _largest_eigenvalues(pieces: Sequence[Piece], trials: int) -> Tensor:
    """Of Σ_c (s_c s_cᵀ) ⊗ (u uᵀ) over the samples, for every trial, by the Lanczos process in all of them at once."""
    _, x, s = pieces[0]
    shape = (trials, s.shape[3], x.shape[2])
    size = shape[1] * shape[2]

    def product(vectors: Tensor) -> Tensor:
        matrix = vectors.to(x).reshape(shape)  # (t, out, in)
        total = torch.zeros(shape, dtype=torch.float64, device=x.device)
        for rows, u, columns in pieces:
            along = torch.einsum("tnko,tno->tnk", columns, u @ matrix[rows].mT)
            total[rows] += torch.einsum("tnko,tnk->tno", columns, along).mT @ u
        return total.reshape(trials, size)

    start = torch.randn(size, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(x.device)
    newest = (start / start.norm()).expand(trials, size)
    basis = newest[:, None]  # (t, j, p)
    most = min(size, MOST_PRODUCTS)
    projected = torch.zeros(trials, most, most, dtype=torch.float64, device=x.device)
    for j in range(most):
        moved = product(newest)
        for _ in range(2):  # twice is enough
            part = torch.einsum("tjp,tp->tj", basis, moved)
            moved = moved - torch.einsum("tjp,tj->tp", basis, part)
            projected[:, : j + 1, j] += part
        projected[:, j, : j + 1] = projected[:, : j + 1, j].clone()
        length = moved.norm(dim=1)
        length = torch.where(length > BREAKDOWN * projected[:, :, j].norm(dim=1), length, 0.0)
        if j % LOOKED_AT_EVERY == LOOKED_AT_EVERY - 1 or j == most - 1:
            top, settled = _converged_ritz_values(projected[:, : j + 1, : j + 1].cpu(), length.cpu())
            if bool(settled.all()):
                return top.to(x.device)
        newest = torch.where(length[:, None] > 0, moved / length[:, None], 0.0)  # closed spaces grow no more
        basis = torch.cat([basis, newest[:, None]], dim=1)
    return torch.where(settled | (most == size), top, math.nan).to(x.device)


def _converged_ritz_values(projected: Tensor, length: Tensor) -> tuple[Tensor, Tensor]:
    """The largest Ritz value of each trial, and whether its error is below the tolerance.

    The error is at most the residual, and at most its square over the distance to the next value.
    """
    good = projected.flatten(1).isfinite().all(1)
    values, vectors = torch.linalg.eigh(torch.where(good[:, None, None], projected, 0.0))
    top = values[:, -1]
    residual = length * vectors[:, -1, -1].abs()
    gap = (top - values[:, -2] if values.shape[1] > 1 else top).clamp_min(torch.finfo(top.dtype).tiny)
    error = torch.minimum(residual, residual.square() / gap)
    return torch.where(good, top, math.nan), (error <= EIGENVALUE_TOLERANCE * top.abs()) | ~good | (length == 0)
