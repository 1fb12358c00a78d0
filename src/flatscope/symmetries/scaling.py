"""Other weights, same function: rescaling by unit, by layer, inside attention and normalisations, and permutations.

The positively scaling transformation of Yi et al. (2019), equation (3): incoming weights and bias of a hidden unit
times c, outgoing weights divided by c, for any c > 0. Units that share one scale (see `graph`) share one c. Queries and
keys meet only in products: what multiplies the one divides the other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor, nn

from flatscope.errors import InputError, NotApplicable
from flatscope.input_checks import independent_copy
from flatscope.isolation import own_settings
from flatscope.network.interception import refuse_if_different
from flatscope.network.normal_form import mask_name, masks_of
from flatscope.network.tracing import trace
from flatscope.network.units import DIAGONAL, Graph, GraphLayer
from flatscope.params import Params, independent_module_copy, named_parameters
from flatscope.samples import Inputs
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm

Factors = Mapping[str, float | Sequence[float] | Tensor]
WAYS = {  # what may be drawn, and the symmetry that it is
    "layer": "layer_scaling",
    "unit": "unit_scaling",
    "permutation": "permutation",
    "batchnorm": "batchnorm_scaling",
    "attention": "attention_scaling",
    "norm": "norm_scaling",
}
INNER = ("attention", "norm")  # those that only a trace with `inner` follows


@own_settings()
def rescale(
    model: nn.Module,
    example: Inputs,
    by: str = "unit",
    low: float = 0.2,
    high: float = 5.0,
    seed: int = 0,
    factors: Factors | None = None,
) -> nn.Module:
    """The same function with other weights: a new module in eval mode, the given one untouched.

    BatchNorm is folded first (except for `by="batchnorm"`). The outputs on the example are compared afterwards,
    to 1e-10 relative in float64 and 1e-4 in float32.

    Args:
        model: any module; what its operations allow is found by tracing it.
        example: a batch of inputs.
        by: "unit": a factor c per scale class; "layer": one c per layer, so that every weight matrix is
            multiplied by one number (layers that share a scale share c); "permutation": hidden units change
            places; "batchnorm": c per channel on the scale and shift of each BatchNorm, which stays; "attention": for
            each dimension of a head queries times c, keys divided by c; "norm": c per channel on the scale and shift of
            each LayerNorm, RMSNorm or GroupNorm, the layers that read it divided by c.
        low: smallest c; c is log-uniform.
        high: largest c.
        seed: of the draw.
        factors: instead of a draw, c by layer name: one number, or one per output unit of the layer.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).double()
        >>> twin = rescale(net, torch.ones(2, 4), factors={"0": 10.0})
        >>> torch.allclose(twin[0].weight, 10 * net[0].weight), torch.allclose(twin[2].weight, net[2].weight / 10)
        (True, True)
    """
    if by not in WAYS:
        raise InputError(f"one of {', '.join(WAYS)}", repr(by), where="rescale, by")
    base = independent_copy(model).eval() if by == "batchnorm" else fold_batchnorm(model, example)
    graph = trace(base, example, inner=by in INNER)
    if factors is None:
        return equivalent_network(base, graph, example, by, low, high, seed)
    if by == "permutation":
        raise InputError("no factors with by='permutation'", "factors", where="rescale")
    changed = rescaled_params(graph, named_parameters(base), scales_from_factors(graph, factors))
    return network_with_weights(base, changed, example, f"rescale by {by}")


def equivalent_network(
    base: nn.Module, graph: Graph, example: Inputs, by: str, low: float, high: float, seed: int
) -> nn.Module:
    """A network with other weights and the same function, drawn in one of the ways; compared on the example."""
    params = named_parameters(base)
    if by == "permutation":
        changed = permuted_params(graph, params | masks_of(base), random_permutation(graph, seed))
    else:
        changed = rescaled_params(graph, params, random_scales(graph, by, low, high, seed))
    return network_with_weights(base, changed, example, f"rescale by {by}")


def applicable_ways_of_rewriting(model: nn.Module, example: Inputs) -> list[str]:
    """The ways that there is anything to try of in a network, whether or not it allows them."""
    graph = trace(fold_batchnorm(model, example), example, inner=True)
    absent = {
        "batchnorm": not has_batchnorm(model),
        "attention": not graph.multiplied,
        "norm": all(layer.kind != "norm" for layer in graph.layers),
    }
    return [way for way in WAYS if not absent.get(way)]


def rescaled_params(graph: Graph, params: Params, scales: Tensor) -> Params:
    """Parameters after scaling class k by `scales[k - 1]`; those of no layer are the given tensors themselves.

    `rescaled_params(graph, rescaled_params(graph, params, scales), 1 / scales)` is `params`, to rounding.
    """
    if scales.shape != (graph.n_classes,):
        raise InputError(f"{graph.n_classes} scales, one per class", f"shape {tuple(scales.shape)}", where="scales")
    _refuse_signs(scales, "scales")
    factors = torch.cat([torch.ones(1, dtype=torch.float64), scales.detach().double().cpu()])
    result = dict(params)
    for layer in graph.layers:
        weight = params[layer.weight]
        outputs, inputs = layer.entry_channels(weight.shape)
        written, read = _factor_of_each_channel(factors, layer.outputs), _factor_of_each_channel(factors, layer.inputs)
        result[layer.weight] = weight * (written[outputs] / read[inputs]).to(weight.device, weight.dtype)
        for bias in layer.biases:
            shift = params[bias]
            result[bias] = shift * written.reshape(shift.shape).to(shift.device, shift.dtype)
    return result


def _factor_of_each_channel(factors: Tensor, classes: Tensor) -> Tensor:
    """The factor of each channel's class; its inverse where the class is negative."""
    chosen = factors[classes.abs()]
    return torch.where(classes < 0, 1 / chosen, chosen)


def random_scales(graph: Graph, by: str = "unit", low: float = 0.2, high: float = 5.0, seed: int = 0) -> Tensor:
    """Log-uniform factors (n_classes,) in [low, high]: per class, per layer, or on BatchNorm channels only."""
    if not (0 < low <= high < math.inf):
        raise InputError("0 < low ≤ high", f"low={low}, high={high}", where="rescale", fix=_NO_SIGNS)
    generator = torch.Generator().manual_seed(seed)
    uniform = torch.rand(graph.n_classes, generator=generator, dtype=torch.float64)
    drawn = torch.exp(math.log(low) + (math.log(high) - math.log(low)) * uniform)
    scales = torch.ones_like(drawn)
    for group in _classes_sharing_factor(graph, by):
        index = torch.tensor(group) - 1
        scales[index] = drawn[index[0]]
    return scales


def scales_from_factors(graph: Graph, factors: Factors) -> Tensor:
    """Scales of the classes from factors by layer name; refused where units are tied or fixed otherwise."""
    scales = torch.full((graph.n_classes + 1,), math.nan, dtype=torch.float64)
    scales[0] = 1.0
    for name, wanted in factors.items():
        layer = graph.layer(name)
        values = torch.as_tensor(wanted, dtype=torch.float64).detach().cpu()
        if values.ndim > 1 or (values.ndim == 1 and len(values) != len(layer.outputs)):
            expected = f"one factor, or one for each of the {len(layer.outputs)} units"
            raise InputError(expected, f"shape {tuple(values.shape)}", where=f"factors, layer {name}")
        _refuse_signs(values, f"factors, layer {name}")
        for unit, (number, given) in enumerate(zip(layer.outputs, values.expand(len(layer.outputs)), strict=True)):
            known, value = scales[number.abs()], 1 / given if number < 0 else given
            if not known.isnan() and not torch.isclose(known, value, rtol=1e-12, atol=0.0):
                raise InputError(
                    f"factor {float(1 / known if number < 0 else known):g}, "
                    + (f"since the unit is fixed by {' or '.join(layer.walls)}" if number == 0 else _TIED),
                    f"{float(given):g}",
                    where=f"factors, layer {name}, unit {unit}",
                    fix="See trace(model, example).summary() for what can be rescaled",
                )
            scales[number.abs()] = value
    return scales[1:].nan_to_num(1.0)


def random_permutation(graph: Graph, seed: int = 0) -> dict[int, int]:
    """For every unit that can move, the unit whose place it takes over."""
    if not graph.exchangeable:
        raise NotApplicable("units that can change places", "none", where="permutation", fix=graph.summary())
    generator = torch.Generator().manual_seed(seed)
    permutation: dict[int, int] = {}
    for group in graph.exchangeable:
        order = torch.randperm(len(group), generator=generator).tolist()
        permutation.update(zip(group, (group[place] for place in order), strict=True))
    return permutation


def permuted_params(graph: Graph, params: Params, permutation: Mapping[int, int]) -> Params:
    """Parameters with unit u (as numbered in `output_units`) replaced by unit `permutation[u]`, everywhere.

    Fixed masks of weights go with them, where they are among the parameters.
    """
    result = dict(params)
    for layer in graph.layers:
        outputs = _former_channel_places(layer.output_units, permutation)
        inputs = _former_channel_places(layer.input_units, permutation)
        for name in {layer.weight, mask_name(layer.weight)} & params.keys():
            result[name] = _permuted_weight(layer, params[name], outputs, inputs)
        for bias in layer.biases:
            result[bias] = params[bias][outputs.to(params[bias].device)]
    return result


def _former_channel_places(units: Tensor, permutation: Mapping[int, int]) -> Tensor:
    """Former place of each channel; the channels of a unit keep their order."""
    channels: dict[int, list[int]] = {}
    for place, unit in enumerate(units.tolist()):
        channels.setdefault(unit, []).append(place)
    origin = torch.arange(len(units))
    for unit, places in channels.items():
        origin[places] = torch.tensor(channels[permutation.get(unit, unit)])
    return origin


def _permuted_weight(layer: GraphLayer, weight: Tensor, outputs: Tensor, inputs: Tensor) -> Tensor:
    """The weight with its channels taken from elsewhere; in a grouped layer channels stay within their group."""
    rows, columns = (inputs, outputs) if layer.input_first else (outputs, inputs)
    rows = rows.to(weight.device)
    if layer.kind in DIAGONAL:
        return weight[rows]
    local = columns.reshape(layer.groups, -1) % weight.shape[1]  # (groups, columns of a group)
    per_row = local.repeat_interleave(weight.shape[0] // layer.groups, dim=0).to(weight.device)
    moved_rows = weight[rows]
    return moved_rows[torch.arange(len(rows), device=weight.device)[:, None], per_row]


def _classes_sharing_factor(graph: Graph, by: str) -> list[list[int]]:
    """The classes that get one factor together, in forward order; refused if there are none."""
    if by == "unit":
        groups = [[number] for number in range(1, graph.n_classes + 1)]
    elif by in ("batchnorm", *INNER):
        inverse = {-int(number) for layer in graph.layers for number in layer.outputs if number < 0}
        norms = {int(n) for layer in graph.layers if layer.kind == by for n in layer.outputs.abs() if n > 0}
        others = {int(n) for layer in graph.layers if layer.kind != by for n in layer.outputs.abs()}
        groups = [[number] for number in sorted(inverse if by == "attention" else norms - others - inverse)]
    else:
        groups = _classes_scaled_by_layer(graph)
    if not groups:
        got = "nothing: " + ("; ".join(graph.walls) or "no scale is free" if graph.layers else "no layer in it")
        raise NotApplicable(f"something that can be rescaled by {by}", got, where="rescale")
    return groups


def _classes_scaled_by_layer(graph: Graph) -> list[list[int]]:
    """Classes joined until every weight matrix is multiplied by one number; groups with a fixed unit drop out."""
    sides = [classes for layer in graph.layers for classes in (layer.outputs, layer.inputs)]
    if not sides:
        return []
    pairs = torch.cat([torch.stack([classes[:-1], classes[1:]]) for classes in sides], dim=1).numpy()
    joined = coo_array((np.ones(pairs.shape[1]), pairs), shape=(graph.n_classes + 1,) * 2)
    labels = connected_components(joined, directed=False)[1].tolist()
    members: dict[int, list[int]] = {}
    for number, label in enumerate(labels):
        members.setdefault(label, []).append(number)
    return [group for label, group in members.items() if label != labels[0]]


def network_with_weights(base: nn.Module, params: Params, example: Inputs, what: str) -> nn.Module:
    """A copy of `base` with these parameters, and masks if there are any, compared with it on the example."""
    twin = independent_module_copy(base)
    with torch.no_grad():
        for name, value in [*twin.named_parameters(), *twin.named_buffers()]:
            if name in params:
                value.copy_(params[name])
    refuse_if_different(base, twin, example, what)
    return twin


_NO_SIGNS = "A negative factor keeps every path value but not the function, since relu(-x) is not -relu(x)"
_TIED = "since the unit shares the scale of another one (a residual connection, a shared weight, a query and its key)"


def _refuse_signs(values: Tensor, where: str) -> None:
    if not bool((torch.isfinite(values) & (values > 0)).all()):
        raise InputError("positive finite factors", f"{values.flatten().tolist()[:6]}", where=where, fix=_NO_SIGNS)
