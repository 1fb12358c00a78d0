"""How far path values may move without any ReLU changing state: a bound carried through the network as it runs.

Units are first rescaled so that suffixes are ±1. A perturbation of the values by δ with ‖δ‖₂ ≤ ε then changes a
weight from unit t by |Δw_e| ≤ (|δ_e| + |w_e| ε) / (|P(t)| − ε), or by |δ_e| where t is an input or a constant, and a
frozen weight not at all. With D a bound on how far each input h of a layer moves, its outputs move by at most

    ε ‖(|h| + D) / (|P| − ε)‖₂ + Σ |w_e| (|h| + D) ε / (|P| − ε) + Σ |w_e| D,

and a ReLU keeps its state where its input is farther than that from zero. This replaces equation (32) of Yi et al.
(2019), whose δ₀(η) is not constructive and which is not safe without it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from flatscope.errors import NotApplicable
from flatscope.limits import STANDARD
from flatscope.network.discontinuities import Discontinuities
from flatscope.network.interception import LAYER_CALLS, Operation, address_of, tensors_in, with_tensors
from flatscope.network.layer_uses import Roles
from flatscope.network.operations import TABLE
from flatscope.params import Params, count_scalars, vectorised_over_points
from flatscope.problem import Problem
from flatscope.samples import Inputs, copied_inputs, inputs_on_device
from flatscope.symmetries.basis_paths import PathCoordinates
from flatscope.symmetries.scaling import rescaled_params

_POOLS = ("max_pool", "avg_pool", "adaptive_max_pool", "adaptive_avg_pool")
_STATES = ("relu", "leaky_relu")
ATTACKS = 4  # random perturbations and their mirror images


class ActivationCertificate:
    """For one network: whether perturbations of a given size can change the state of any ReLU on given inputs.

    Args:
        problem: the network, without BatchNorm; it runs in float64.
        coordinates: its basis paths, at the weights in question.
    """

    def __init__(self, problem: Problem, coordinates: PathCoordinates) -> None:
        if coordinates.graph.not_covered:
            name, what = next(iter(coordinates.graph.not_covered.items()))
            raise NotApplicable(f"needs a network of layers and ReLUs; {name} is used by {what}")
        self.problem = problem.in_double()
        double = {name: value.double() for name, value in coordinates.params.items()}
        suffixes = coordinates.suffix.log[1:].exp()
        self.params = rescaled_params(coordinates.graph, double, suffixes)
        self.layers = {layer.weight: layer for layer in coordinates.graph.layers}
        self.free = {name: (~coordinates.is_frozen(name)).double() for name in self.layers}
        # |P(u)| with suffixes ±1; infinite for the ground, whose outgoing weights are not divided by a value.
        ground = torch.tensor([torch.inf], dtype=torch.float64)
        self.prefixes = torch.cat([ground, coordinates.unit_values])
        self.limit = coordinates.nearest_pole

    def radius(self, inputs: Inputs, high: float) -> tuple[float, int]:
        """The largest ε ≤ high that is certified, to 1e-12, and how many bounds it took to find.

        A chord lies above a convex curve, and a ray from the origin through a point of it below, behind that point:
        where they reach 1 brackets the answer from both sides. The network runs once for all of them.
        """
        device = next(iter(self.params.values())).device
        try:
            moves = _Movements(self, inputs_on_device(inputs, device, torch.float64), high)
        except _AtZeroError:
            return 0.0, 1
        at_high, bounds = moves.worst, 1
        while math.isinf(at_high) and high > 0:  # bounds beyond the range of numbers
            high /= 1e3
            at_high, bounds = moves.at(high), bounds + 1
        if at_high < 1:
            return high, bounds
        low, at_low = 0.0, 0.0
        while high - low > 1e-12 * high:
            middle = low + (high - low) * (1 - at_low) / (at_high - at_low) * (1 - 1e-13)
            if middle <= low:
                break
            low, at_low, bounds = middle, moves.at(middle), bounds + 1
            if at_low * high > low:  # the ray through the new point is the better upper end
                high = low / at_low
                at_high, bounds = moves.at(high), bounds + 1
        return low, bounds

    def refuse_if_broken(self, coordinates: PathCoordinates, inputs: Inputs, radius: float, draws: Generator) -> None:
        """Refuse a radius at which some random perturbation of the path values changes the state of a ReLU.

        Args:
            coordinates: as the certificate was made of.
            inputs: some samples.
            radius: to be certified.
            draws: of the perturbations.
        """
        params = {name: value.double() for name, value in coordinates.params.items()}
        device, points = next(iter(params.values())).device, [params]
        for _ in range(ATTACKS):
            u = torch.randn(coordinates.count, generator=draws, dtype=torch.float64).to(device)
            for change in (u, -u):
                moves = coordinates.shift(change * (radius / u.norm()))
                points.append({name: value + moves.get(name, 0.0) for name, value in params.items()})
        before, *after = self._states(points, inputs_on_device(inputs, device, torch.float64))
        if not all(torch.equal(one, other) for states in after for one, other in zip(before, states, strict=True)):
            got = "a perturbation of that length that changes one"
            fix = "Please report the network: an operation in it is not followed as it is"
            raise NotApplicable(f"ReLUs that keep their state within {radius:.4g}", got, fix=fix)

    def _states(self, points: list[Params], inputs: Inputs) -> list[tuple[Tensor, ...]]:
        """The states of all ReLUs at each of several weights, in as few passes as memory and network allow."""
        width = max(1, STANDARD.block_memory.least // (8 * count_scalars(points[0].values())))
        states_at_points: list[tuple[Tensor, ...]] = []
        for start in range(0, len(points), width):
            some = points[start : start + width]
            stacked = {name: torch.stack([point[name] for point in some]) for name in some[0]}
            try:
                states: tuple[Tensor, ...] = vectorised_over_points(partial(self._states_at, inputs), stacked)
                states_at_points += zip(*(state.unbind() for state in states), strict=True)
            except RuntimeError:  # an operation that does not run on stacked weights
                states_at_points += [self._states_at(inputs, point) for point in some]
        return states_at_points

    def _states_at(self, inputs: Inputs, params: Params) -> tuple[Tensor, ...]:
        states: list[Tensor] = []

        def look(op: Operation) -> Any:
            if op.name in _STATES:
                states.append(op.tensors[0] > 0)
            return op.run()

        with torch.no_grad():
            self.problem.forward(copied_inputs(inputs), params, rules=[look])
        return tuple(states)


class _AtZeroError(Exception):
    """The input of a ReLU is exactly zero and can move, which it then can at every radius: none is certified."""


Step = tuple[Callable[..., None], tuple[Any, ...]]  # a method, not bound: what holds itself stays until it is collected


class _Movements:
    """Bounds on how far every tensor of one forward pass moves; tensors without one do not move.

    The pass is run once. Bounds of single operations are kept with it, and give those at any other radius.

    Attributes:
        worst: largest movement of a ReLU's input relative to its distance from zero; below 1 no ReLU changes state. A
            convex function of ε < `limit` that vanishes at 0.
    """

    def __init__(self, of: ActivationCertificate, inputs: Inputs, epsilon: float) -> None:
        self._of, self._epsilon, self.worst = of, epsilon, 0.0
        params = {name: value.detach().requires_grad_() for name, value in of.params.items()}
        self._roles = Roles(params)
        still = torch.zeros((), dtype=torch.float64)
        self._weights = {value: still.to(value.device).expand(value.shape) for value in params.values()}
        self._bounds = dict(self._weights)
        self._jumps = Discontinuities(self._bounds, "no radius")
        self._steps: list[Step] = []
        self._states = 0
        with torch.enable_grad():  # what has a gradient and is not known comes from what was not seen
            of.problem.forward(inputs, params, rules=[self._follow])
        if not self._states:
            raise NotApplicable("needs a network with ReLUs; this one has none")

    def at(self, epsilon: float) -> float:
        """The largest relative movement at another radius."""
        self._epsilon, self.worst = epsilon, 0.0
        self._bounds.clear()
        self._bounds |= self._weights
        for bound, arguments in self._steps:
            bound(self, *arguments)
        return self.worst

    def _follow(self, op: Operation) -> Any:
        """Run one operation and bound how far its result moves."""
        if self._jumps.answers(op) and op.name not in LAYER_CALLS:
            return self._jumps.follow(op)
        for place in filter(None, map(self._jumps.place, op.tensors)):
            self._jumps.refuse(place)
        is_layer, is_state = op.name in LAYER_CALLS, op.name in _STATES
        # What it receives may be overwritten in place, by itself or later.
        received = op.tensors[0].detach().clone() if is_state else None
        size = op.layer_arguments()["input"].detach().abs() if is_layer else None
        result = op.run()
        self._jumps.note(op, result)
        outcomes = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
        bound: Callable[..., None]
        arguments: tuple[Any, ...]
        if size is not None:
            bound, arguments = _Movements._bound_layer, (outcomes[0], op, size)
        elif received is not None:
            self._states += 1
            bound, arguments = _Movements._bound_state, (outcomes[0], op, received)
        elif op.name == "setitem":
            self._jumps.wrote(op, op.tensors[0])
            bound, arguments = _Movements._bound_written_entries, (op,)
        else:
            bound, arguments = _Movements._bound_others, (outcomes, op)
        self._steps.append((bound, arguments))
        bound(self, *arguments)
        return result

    def _bound(self, tensor: Tensor) -> Tensor:
        return self._bounds[tensor] if tensor in self._bounds else torch.zeros_like(tensor)

    @torch.no_grad()
    def _bound_layer(self, outcome: Tensor, op: Operation, size: Tensor) -> None:
        kind, order = LAYER_CALLS[op.name]
        if kind == "lookup":
            raise NotApplicable(f"needs inputs of real numbers; {op.place} looks words up in a table")
        given = op.named(*order)
        weight, signal, bias = given["weight"], given["input"], given.get("bias")
        layer = self._of.layers.get(self._roles.name_of(weight) or "")
        if layer is None:
            raise NotApplicable(f"needs a network of layers and ReLUs; the weight of {op.place} is computed")
        shape = [1] * signal.ndim
        shape[signal.ndim - 1 if kind == "dense" else signal.ndim - (weight.ndim - 1)] = -1
        prefix = self._of.prefixes.to(weight.device)[layer.inputs.to(weight.device)].reshape(shape)
        per_value = torch.where(prefix.isinf(), 1.0, 1 / (prefix - self._epsilon))
        relative = self._epsilon / (prefix - self._epsilon)  # 0 for the ground
        bound, free = self._bound(signal), self._of.free[layer.weight]
        reach = size + bound

        def apply(matrix: Tensor, vector: Tensor) -> Tensor:
            result: Tensor = op.function(**{**given, "weight": matrix, "input": vector, "bias": None})
            return result

        own = apply(free, (reach * per_value).square()) + (0.0 if bias is None else 1.0)
        self._bounds[outcome] = (
            self._epsilon * own.sqrt()
            + apply(weight.abs() * free, reach * relative)
            + (apply(weight.abs(), bound) if bool(bound.any()) else 0.0)
        )

    @torch.no_grad()
    def _bound_state(self, outcome: Tensor, op: Operation, before: Tensor) -> None:
        """A state is safe if the input stays on its side of zero, or cannot move at all."""
        bound = self._bound(op.tensors[0])
        if bool(((before == 0) & (bound > 0)).any()):
            raise _AtZeroError
        share = torch.where(bound == 0, 0.0, bound / before.abs()).nan_to_num(torch.inf, torch.inf)
        self.worst = max(self.worst, float(share.max()) if share.numel() else 0.0)
        slope = 0.0
        if op.name == "leaky_relu":
            slope = abs(float(op.named("input", "negative_slope").get("negative_slope", 0.01)))
        self._bounds[outcome] = torch.where(before > 0, bound, slope * bound)

    @torch.no_grad()
    def _bound_written_entries(self, op: Operation) -> None:
        """Entries of a tensor are overwritten: none of it moves farther than it did, or than what is written."""
        target, _, value = op.args
        if isinstance(value, Tensor) and value.is_floating_point() and bool(self._bound(value).any()):
            self._bounds[target] = self._bound(target).clamp_min(float(self._bound(value).max()))
            self._let_views_move(target)

    @torch.no_grad()
    def _bound_others(self, outcomes: list[Tensor], op: Operation) -> None:
        old = [self._bound(tensor) for tensor in op.tensors]
        if outcomes and any(bool(bound.any()) for bound in old):
            self._bounds.update(zip(outcomes, tensors_in(self._plain_bound(op, old)), strict=False))
            if op.in_place:
                self._let_views_move(op.tensors[0])

    def _let_views_move(self, written: Tensor) -> None:
        """Views of what was written to are written to as well."""
        address, most = address_of(written), float(self._bounds[written].max())
        for tensor, bound in self._bounds.items():
            if tensor is not written and address_of(tensor) == address:
                self._bounds[tensor] = bound.clamp_min(most)

    def _moved_entry(self, tensor: Tensor) -> Tensor:
        return self._bound(tensor) if tensor.is_floating_point() else tensor  # places keep their meaning

    @torch.no_grad()
    def _plain_bound(self, op: Operation, old: list[Tensor]) -> Any:
        """Operations that move entries or add them up with weights that do not depend on the signal."""
        meaning = TABLE.get(op.name)
        pools = any(op.name.startswith(name) for name in _POOLS)
        if (meaning is not None and meaning.moves) or pools or op.name in ("sum", "mean", "amax"):
            args, kwargs = with_tensors((op.args, op.kwargs), self._moved_entry)
            return op.function(*args, **kwargs)
        if op.name == "pad":
            given = op.named("input", "pad", "mode", "value")
            return nn.functional.pad(old[0], list(given["pad"]), given.get("mode", "constant"))
        if meaning is not None and meaning.identity:
            return old[0]
        if op.name in ("add", "sub") and "alpha" not in op.kwargs:
            return sum(old[1:], start=old[0])
        if op.name in ("mul", "div") and len(old) == 1 and not op.kwargs.get("rounding_mode"):
            number = next(value for value in (*op.args, *op.kwargs.values()) if not isinstance(value, Tensor))
            return op.function(old[0], abs(number))
        raise NotApplicable(f"needs a network of layers and ReLUs; {op.place} is something else")
