"""BasisPaths: a network described by the values of its basis paths instead of its weights.

`PathCoordinates` are these values as coordinates of a traced network: the map from weights, its inverse, both
differentiable. `BasisPaths` are those of any module, under our settings of torch.

With P(u) the product over the prefix of class u and S(u) over its suffix, the value of edge e from t to h is
v_e = P(t) w_e S(h). The edges out(u) that suffixes are made of are frozen, one per class; all others have a value.
The path through in(u) alone has the value P(u) S(u), so that the inverse needs no pass from layer to layer:

    w_e(v) = w_e · (v_e / v_e⁰) / (v_π(t) / v_π(t)⁰),

where v⁰ are the values at the weights w and π(t) is the last edge on the prefix of t that is not frozen. For the
diagonal skeleton these are equations (20) and (21) of Yi et al. (2019), with no special case for the first layer.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, NumericalWarning
from flatscope.isolation import own_settings
from flatscope.network.tracing import trace
from flatscope.network.units import Graph, GraphLayer
from flatscope.params import Params, independent_module_copy, named_parameters
from flatscope.samples import Inputs
from flatscope.symmetries.folding import fold_batchnorm
from flatscope.symmetries.path_skeleton import Chains, skeleton_chains


@dataclass(frozen=True)
class Block:
    """Places of one parameter tensor's values: `start` to `stop`, its frozen entries left out."""

    name: str  # of the parameter
    layer: GraphLayer | None  # the layer that it belongs to; None for a parameter that is no edge and has no scale
    is_bias: bool  # an edge from a constant unit to each output
    frozen: Tensor  # flat indices of the entries that are held fixed
    start: int
    stop: int


class PathCoordinates:
    """The basis paths of one network at one point.

    Args:
        graph: the traced network, without BatchNorm.
        params: its weights, all of them.
        rule: "max_product", "cyclic" or "diagonal"; see `skeleton_chains`.
        cut: name of a layer: classes first written by layers in front of it are held by their incoming skeleton
            edge, the others by the outgoing one. Which it is changes the weights that `params_of` gives, never
            their function. Empty for outgoing edges everywhere.
        held: names of parameters that stay as they are and have no values; no unit beside them may have a scale.
    """

    def __init__(
        self, graph: Graph, params: Params, rule: str = "max_product", cut: str = "", held: Collection[str] = ()
    ) -> None:
        self.graph, self.params, self.rule = graph, params, rule
        self.prefix: Chains = skeleton_chains(graph, params, rule, forward=True)
        self.suffix: Chains = skeleton_chains(graph, params, rule, forward=False)
        self.blocks = _parameter_blocks(graph, params, self.suffix, held)
        self._by_name = {block.name: block for block in self.blocks}
        self.count = self.blocks[-1].stop if self.blocks else 0
        self.first = _first_free_edges(self.prefix, self.suffix)
        position = [layer.name for layer in graph.layers].index(graph.layer(cut).name) if cut else 0
        self.held_by_input = self.prefix.layer < position
        self.held_by_input[0] = False

    @property
    def n_classes(self) -> int:
        """Units that can be rescaled, those tied to one scale counted once."""
        return self.graph.n_classes

    @property
    def unit_values(self) -> Tensor:
        """|P(u) S(u)| of every class, (n_classes,), float64: the distance to where the inverse has its poles."""
        return (self.prefix.log + self.suffix.log)[1:].exp()

    @property
    def nearest_pole(self) -> float:
        """The smallest of them; 1, the value of the ground, where nothing can be rescaled."""
        return float(self.unit_values.min()) if self.n_classes else 1.0

    def gain(self, name: str) -> Tensor:
        """1 / (S(h) P(t)) for the entries of a parameter, to be broadcast over it: weight per value, float64."""
        logs, signs = (
            self.log_gains(name),
            self._class_numbers_by_entry(self._by_name[name], self.suffix.sign, self.prefix.sign),
        )
        return (signs[0] * signs[1] * (logs[0] + logs[1]).exp()).to(self.params[name].device)

    def log_gains(self, name: str) -> tuple[Tensor, Tensor]:
        """-log|S(h)| and -log|P(t)| for the entries of a parameter, each to be broadcast over it."""
        after, before = self._class_numbers_by_entry(self._by_name[name], self.suffix.log, self.prefix.log)
        return -after, -before

    def _class_numbers_by_entry(self, block: Block, outputs: Tensor, inputs: Tensor) -> tuple[Tensor, Tensor]:
        """Numbers by class at the output and the input of a parameter's entries, to be broadcast over it.

        Where there is no such side (the input of a bias, a parameter that is no edge) that of the ground.
        """
        if block.layer is None:
            return outputs[0], inputs[0]
        written, read = outputs[block.layer.outputs.to(outputs.device)], inputs[block.layer.inputs.to(inputs.device)]
        if block.is_bias:
            return written, inputs[0]
        into, out_of = block.layer.entry_channels(self.params[block.name].shape)
        return written[into.to(outputs.device)], read[out_of.to(inputs.device)]

    def is_frozen(self, name: str) -> Tensor:
        """Which entries of a parameter are held fixed, in its shape."""
        value = self.params[name]
        if name not in self._by_name:
            return torch.ones_like(value, dtype=torch.bool)
        mask = torch.zeros(value.numel(), dtype=torch.bool)
        mask[self._by_name[name].frozen] = True
        return mask.reshape(value.shape).to(value.device)

    @own_settings()
    def log_values(self) -> tuple[Tensor, Tensor]:
        """log|v| and sign of v, (count,) each, float64: right however deep the network is."""
        logs, signs = [], []
        for block in self.blocks:
            value, gain = self.params[block.name].double(), self.gain(block.name)
            logs.append(self._free_entries(block, value.abs().log() - gain.abs().log()))
            signs.append(self._free_entries(block, value.sign() * gain.sign()))
        return torch.cat(logs), torch.cat(signs)

    def join(self, layout: Params) -> Tensor:
        """One vector (count,) of the entries that are not frozen, from one tensor per parameter."""
        return torch.cat([self._free_entries(block, layout[block.name]) for block in self.blocks])

    def split(self, vector: Tensor) -> Params:
        """The inverse of `join`: one tensor per parameter, zero where an entry is frozen."""
        if vector.shape != (self.count,):
            raise InputError(f"{self.count} values", f"shape {tuple(vector.shape)}", where="basis paths")
        layout = {}
        for block in self.blocks:
            shape = self.params[block.name].shape
            part = vector[block.start : block.stop]
            if len(block.frozen):
                frozen = self.is_frozen(block.name).flatten()
                place = (torch.cumsum(~frozen, 0) - 1).clamp_min(0)
                spread = part[place] if len(part) else part.new_zeros(frozen.shape)
                part = torch.where(frozen, torch.zeros_like(spread), spread)
            layout[block.name] = part.reshape(shape)
        return layout

    @own_settings()
    def values_of(self, params: Params) -> Tensor:
        """Values (count,) at other weights of the same network and skeleton, float64; differentiable."""
        p, s = self._chain_products(params, self.prefix), self._chain_products(params, self.suffix)
        values = {}
        for block in self.blocks:
            after, before = self._class_numbers_by_entry(block, s, p)
            values[block.name] = after * params[block.name].double() * before
        return self.join(values)

    @own_settings()
    def params_of(self, values: Tensor) -> Params:
        """Weights with these values; frozen entries as they are. Differentiable, twice over and under vmap."""
        layout = self.split(values.double())
        return self.from_scaled({name: value * self.gain(name) for name, value in layout.items()})

    def from_scaled(self, scaled: Params) -> Params:
        """Weights from values in units of weights, x = gain · v, which at the weights themselves is w.

        Frozen entries of x are ignored. Parameters that are no part of the paths are the given ones.
        """
        ratio = self.ratios(scaled)  # (n_classes + 1,)
        held = torch.where(self.held_by_input.to(ratio.device), 1 / ratio, torch.ones_like(ratio))  # a factor c(u)
        result = dict(self.params)
        for block in self.blocks:
            reference = self.params[block.name]
            value = scaled[block.name] / self._class_numbers_by_entry(block, ratio, ratio)[1]
            if len(block.frozen):
                value = torch.where(self.is_frozen(block.name), reference, value)
            if bool(self.held_by_input.any()):
                written, read = self._class_numbers_by_entry(block, held, held)
                value = value * written / read
            result[block.name] = value.to(reference.dtype)
        return result

    def shift(self, change: Tensor) -> Params:
        """The change of the weights that a change (count,) of the values makes, by block."""
        layout = self.split(change)
        scaled = {name: value + self.gain(name) * layout[name] for name, value in self.scaled_reference().items()}
        moved = self.from_scaled(scaled)
        return {name: moved[name] - self.params[name] for name in scaled}

    def by_size(self) -> Tensor:
        """Indices of the values in ascending order, in which a path has its place whatever its units' numbers."""
        log, sign = self.log_values()
        return (sign * log.exp()).argsort()

    def ratios(self, scaled: Params) -> Tensor:
        """v_π(u) / v_π(u)⁰ for every class, 1 for the ground: what P(u) was multiplied by; (n_classes + 1,)."""
        parts, classes = [], [torch.zeros(1, dtype=torch.int64)]
        for index, layer in enumerate(self.graph.layers):
            here = (self.first[0] == index).nonzero().flatten()
            if len(here):
                entries = self.first[1][here].to(self.params[layer.weight].device)
                reference = self.params[layer.weight].flatten()[entries].double()
                parts.append(scaled[layer.weight].reshape(-1)[entries] / reference)
                classes.append(here)
        device = next(iter(self.params.values())).device
        one = torch.ones(1, dtype=torch.float64, device=device)
        return torch.cat([one, *parts])[torch.cat(classes).argsort().to(device)]

    def scaled_reference(self) -> Params:
        """The weights themselves, float64, by block: where `from_scaled` gives them back."""
        return {block.name: self.params[block.name].double() for block in self.blocks}

    def _free_entries(self, block: Block, value: Tensor) -> Tensor:
        flat = value.reshape(-1)
        if not len(block.frozen):
            return flat
        return flat[(~self.is_frozen(block.name)).flatten().nonzero().flatten()]

    def _chain_products(self, params: Params, way: Chains) -> Tensor:
        """P or S of every class at other weights, float64."""
        device = next(iter(params.values())).device
        products: list[Tensor] = [torch.ones((), dtype=torch.float64, device=device)] * (self.n_classes + 1)
        for number in way.order:
            weight = params[self.graph.layers[int(way.layer[number])].weight]
            products[number] = products[int(way.other[number])] * weight.reshape(-1)[int(way.entry[number])].double()
        return torch.stack(products)


class BasisPaths(PathCoordinates):
    r"""Values of the basis paths of a network (Yi et al. 2019, section 2.2), for any architecture that can be traced.

    The m − H values determine the function, and no rescaling of units changes them. m counts weights and biases, H
    the units that can be rescaled; units tied to one scale (residual connections) count once, those tied to the
    network's input or output not at all. Paths run from ground to ground: from an input, a constant, a bias or a
    unit that cannot be rescaled, to an output or again such a unit. In a ReLU network without walls these are the
    paths of the paper. A wall (GELU, LayerNorm, softmax) ends and begins paths: the values still are a full set of
    coordinates of the function that no rescaling moves, but the network is then no longer a sum over paths. What
    cannot be rescaled at all, and parameters that are no edges (a PReLU slope), are their own values.

    Values depend on the skeleton, hence on `rule`: always report it with a number.

    Args:
        model: any module; BatchNorm is folded into it first. It is copied, not touched.
        example: a batch of inputs.
        rule: "max_product": the strongest way through every unit, which neither rescaling nor permuting units
            changes; "cyclic": unit i is joined to unit i modulo the width, at a convolution's centre tap, whatever
            the weights are; "diagonal": to unit i, for equal widths.
        cut: name of a layer: units in front of it are held by their incoming skeleton weight, the others by the
            outgoing one. This changes the weights that `to_model` gives, never the function.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2)).double()
        >>> paths = BasisPaths(net, torch.ones(2, 4))
        >>> paths.count == 4 * 3 + 3 + 3 * 2 + 2 - 3
        True
        >>> torch.allclose(paths.to_model(paths.values())[0].weight, net[0].weight)
        True
    """

    @own_settings()
    def __init__(self, model: nn.Module, example: Inputs, rule: str = "max_product", cut: str = "") -> None:
        if not isinstance(model, nn.Module):
            raise InputError("a torch.nn.Module", type(model).__name__, where="BasisPaths")
        self.model = fold_batchnorm(model, example)
        graph = trace(self.model, example)
        if not graph.layers:
            raise InputError("a network with layers", "none", where="BasisPaths", fix=graph.summary())
        super().__init__(graph, named_parameters(self.model), rule, cut)
        self._dtype = self.params[graph.layers[0].weight].dtype

    @property
    def frozen(self) -> dict[str, Tensor]:
        """Flat indices of the weights that are held fixed (value and sign), by parameter name; H in all."""
        return {block.name: block.frozen for block in self.blocks if len(block.frozen)}

    @own_settings()
    def values(self) -> Tensor:
        """The values (count,), in the model's type: layer by layer, each weight in memory order before its bias.

        Products over tens of layers may be too small for float32: see `log_values`.
        """
        log, sign = self.log_values()
        values = (sign * log.exp()).to(self._dtype)
        smallest = math.log(torch.finfo(self._dtype).tiny)
        lost = int((log.isfinite() & (log < smallest)).sum())
        if lost:
            warnings.warn(
                f"{lost} of {self.count} path values are below {self._dtype}'s normal range, so that `to_model` cannot "
                "give their weights back; use a float64 model, or log_values()",
                NumericalWarning,
                stacklevel=2,
            )
        return values

    @own_settings()
    def to_model(self, values: Tensor) -> nn.Module:
        """A new module, in eval mode and without BatchNorm, whose basis paths have these values."""
        if not isinstance(values, Tensor) or values.shape != (self.count,) or not bool(values.isfinite().all()):
            shown = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise InputError(f"{self.count} finite values", shown, where="BasisPaths.to_model")
        with torch.no_grad():
            params = self.params_of(values.to(next(iter(self.params.values())).device))
            twin = independent_module_copy(self.model)
            for name, value in twin.named_parameters():
                value.copy_(params[name])
        return twin


def _parameter_blocks(graph: Graph, params: Params, suffix: Chains, held: Collection[str]) -> tuple[Block, ...]:
    """Parameters in forward order, weight before bias, then what is no edge; without those that are held."""
    blocks: list[Block] = []
    none = torch.zeros(0, dtype=torch.int64)

    def add(name: str, layer: GraphLayer | None, is_bias: bool, frozen: Tensor) -> None:
        if name not in held and name not in {block.name for block in blocks}:
            start = blocks[-1].stop if blocks else 0
            size = math.prod(params[name].shape) - len(frozen)
            blocks.append(Block(name, layer, is_bias, frozen, start, start + size))

    for index, layer in enumerate(graph.layers):
        add(layer.weight, layer, False, suffix.entry[suffix.layer == index].sort().values)
        for bias in layer.biases:
            add(bias, layer, True, none)
    for name in graph.not_covered:
        if params[name].is_floating_point():
            add(name, None, False, none)
    return tuple(blocks)


def _first_free_edges(prefix: Chains, suffix: Chains) -> tuple[Tensor, Tensor]:
    """Layer and entry of π(u): the edge in(u), or, where that is frozen, the one of the class in front of it."""
    layer, entry = prefix.layer.clone(), prefix.entry.clone()
    for number in prefix.order:
        before = int(prefix.other[number])
        is_frozen = before > 0 and suffix.layer[before] == layer[number] and suffix.entry[before] == entry[number]
        if is_frozen:
            layer[number], entry[number] = layer[before], entry[before]
    return layer, entry
