"""Directions in weight space, and the planes that they span in weight space or in the space of path values.

Directions are Gaussian, filter-normalised, along the Hessian's sharpest axes, or lead to other networks. All are
float64, over the trainable parameters of a network without BatchNorm.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flatscope.context import Context
from flatscope.curvature.operators import Hessian
from flatscope.curvature.spectrum import Wanted, extreme_eigenpairs
from flatscope.errors import InputError
from flatscope.input_checks import independent_copy
from flatscope.params import Params, dot, flatten, named_parameters, norm, refuse_untied_weights, tied_names, unflatten
from flatscope.symmetries.basis_paths import PathCoordinates
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm

NAMES = ("gaussian", "filter", "hessian")


def orthogonal_normals(generator: torch.Generator, size: int, number: int) -> list[Tensor]:
    """Gaussian vectors made exactly orthogonal, each of length √size; float64, drawn on the CPU."""
    if size < number:
        raise InputError(f"at least {number} parameters for {number} directions", str(size), where="landscape")
    vectors: list[Tensor] = []
    for _ in range(number):
        vector = orthogonal_component(torch.randn(size, generator=generator, dtype=torch.float64), vectors)
        vectors.append(vector * (size**0.5 / vector.norm()))
    return vectors


def orthogonal_component(vector: Tensor, others: Sequence[Tensor]) -> Tensor:
    """Component of a vector that is orthogonal to others, which are orthogonal to each other."""
    for _ in range(2):  # twice is enough to be orthogonal to rounding
        for other in others:
            vector = vector - (vector @ other) / (other @ other).clamp_min(1e-300) * other
    return vector


def gaussian_directions(ctx: Context, number: int, length: float) -> list[Params]:
    """Isotropic directions over all weights and biases, orthogonal, of exactly this length."""
    like = ctx.trainable
    size = sum(value.numel() for value in like.values())
    drawn = orthogonal_normals(ctx.generator("landscape"), size, number)
    return [_direction_on_device(ctx, unflatten(vector * (length / size**0.5), like)) for vector in drawn]


def filter_normalised_directions(ctx: Context, number: int) -> list[Params]:
    """Gaussian directions whose part in every filter is as long as the filter (Li et al. 2018).

    A filter is what feeds one output channel or unit: its row of the weight, and its bias with it, so that scaling
    the unit scales both. What is no layer's weight or bias is one filter for each row of a matrix, or as a whole
    where it is a vector. The directions are made orthogonal inside every filter (of at least two entries), and so
    are orthogonal altogether.
    """
    generator = ctx.generator("landscape")
    like = ctx.trainable
    directions: list[Params] = [
        {name: torch.zeros(v.shape, dtype=torch.float64) for name, v in like.items()} for _ in range(number)
    ]
    for weight, bias, axis in _filter_groups(ctx):
        rows = _rows_by_filter(like[weight].detach().double().cpu(), axis)
        if bias is not None:
            rows = torch.cat([rows, like[bias].detach().double().cpu()[:, None]], dim=1)  # (filters, entries)
        for drawn, direction in zip(_orthogonal_normals_by_filter(rows, generator, number), directions, strict=True):
            if bias is not None:
                drawn, direction[bias] = drawn[:, :-1], drawn[:, -1]
            direction[weight] = _tensor_from_filter_rows(drawn, like[weight], axis)
    return [_direction_on_device(ctx, direction) for direction in directions]


def hessian_eigenvector_directions(ctx: Context, number: int, length: float) -> list[Params]:
    """Eigenvectors of the largest eigenvalues of the training loss's Hessian, of this length, sharpest first."""
    generator, like = ctx.generator("landscape"), ctx.trainable
    operator = Hessian(ctx, list(like))
    pairs = extreme_eigenpairs(operator, generator, Wanted(number, tolerance=1e-6))
    vectors: list[Tensor] = []
    for pair in pairs:  # orthogonal to the solver's accuracy only
        vector = orthogonal_component(pair.vector.double().cpu(), vectors)
        vectors.append(vector / vector.norm())
    return [_direction_on_device(ctx, unflatten(vector * length, like)) for vector in vectors]


def rayleigh_quotient(ctx: Context, direction: Params) -> float:
    """Curvature of the training loss along a direction, dᵀHd / dᵀd: the eigenvalue, if it is an eigenvector."""
    vector = flatten(direction)
    vector = vector / vector.norm()
    return float(vector.cpu() @ (Hessian(ctx, list(direction)) @ vector).cpu())


def directions_to_networks(ctx: Context, template: nn.Module, others: tuple[Any, ...]) -> list[Params]:
    """The way w' − w to every other network w', BatchNorm folded in both.

    Args:
        ctx: the network w, without BatchNorm.
        template: the same network as it was given, whose state dict others may have.
        others: modules of the same architecture, or state dicts.
    """
    directions = []
    for other in others:
        params = _folded_params(ctx, template, other)
        directions.append({name: params[name].double() - ctx.params[name].double() for name in ctx.problem.trainable})
    return directions


def principal_plane_of_path(ways: Sequence[Params], number: int) -> tuple[list[Params], list[list[float]], list[float]]:
    """The plane in which a path of networks moves most: its principal directions (Li et al. 2018, section 7).

    They are the right singular vectors of the matrix of all ways, which are not centred, so that the plane holds the
    network that the ways lead from. Each is as long as the path reaches along it.

    Args:
        ways: from the network to each one of the path.
        number: of directions.

    Returns:
        The directions; the coordinates of every network of the path; the share of the squared ways in each direction.
    """
    matrix = torch.stack([flatten(way) for way in ways]).double()  # (networks, parameters)
    left, values, right = torch.linalg.svd(matrix, full_matrices=False)
    if len(values) < number or not float(values[number - 1]) > 1e-12 * float(values[0]):
        raise InputError(f"a path in at least {number} directions", "one in fewer", where="directions")
    reached = (left * values)[:, :number]  # (networks, directions)
    lengths = reached.abs().amax(dim=0)
    axes = [unflatten(right[i] * lengths[i], ways[0]) for i in range(number)]
    shares = values[:number].square() / values.square().sum()
    return axes, (reached / lengths).tolist(), shares.tolist()


def cosine_of_directions(first: Params, second: Params) -> float:
    """Cosine of the angle between two directions; 0 where one of them is zero."""
    scale = norm(first) * norm(second)
    return dot(first, second) / scale if scale else 0.0


def _filter_groups(ctx: Context) -> list[tuple[str, str | None, int]]:
    """(weight, bias, axis of the output channels) of every filter bank among the trainable parameters."""
    free = set(ctx.problem.trainable)
    groups: list[tuple[str, str | None, int]] = []
    for layer in ctx.network:
        if layer.weight not in free:
            continue
        # A grouped transposed convolution shares its output axis between groups: one filter per input channel then.
        axis = 1 if layer.input_first and layer.groups == 1 else 0
        rows = ctx.params[layer.weight].shape[axis]
        bias = layer.bias if layer.bias in free and ctx.params[str(layer.bias)].shape == (rows,) else None
        groups.append((layer.weight, bias, axis))
        free -= {layer.weight, str(bias)}
    rest = [name for name in ctx.problem.trainable if name in free]
    return groups + [(name, None, 0 if ctx.params[name].ndim > 1 else -1) for name in rest]


def _rows_by_filter(value: Tensor, axis: int) -> Tensor:
    """(filters, entries); a vector on its own (axis −1) is one filter."""
    return value.reshape(1, -1) if axis < 0 else value.movedim(axis, 0).reshape(value.shape[axis], -1)


def _tensor_from_filter_rows(rows: Tensor, like: Tensor, axis: int) -> Tensor:
    if axis < 0:
        return rows.reshape(like.shape)
    moved = like.movedim(axis, 0).shape
    return rows.reshape(moved).movedim(0, axis)


def _orthogonal_normals_by_filter(rows: Tensor, generator: torch.Generator, number: int) -> list[Tensor]:
    """Normal numbers (filters, entries), orthogonal and as long as `rows` in every filter."""
    vectors: list[Tensor] = []
    for _ in range(number):
        drawn = torch.randn(rows.shape, generator=generator, dtype=torch.float64)
        for _ in range(2 if rows.shape[1] > 1 else 0):
            for other in vectors:
                along = (drawn * other).sum(1, keepdim=True) / other.square().sum(1, keepdim=True).clamp_min(1e-300)
                drawn = drawn - along * other
        vectors.append(drawn / drawn.norm(dim=1, keepdim=True))
    return [drawn * rows.norm(dim=1, keepdim=True) for drawn in vectors]


def _folded_params(ctx: Context, template: nn.Module, other: Any) -> Params:
    """Weights of another network in the form of this one."""
    if not isinstance(other, nn.Module | Mapping):
        raise InputError(f"one of {', '.join(NAMES)}, a module or a state dict", repr(other), where="directions")
    where = "directions, the other network"
    given = other.state_dict() if isinstance(other, nn.Module) else other
    refuse_untied_weights(tied_names(template), given, where)
    if isinstance(other, nn.Module):
        module = independent_copy(other)
    else:
        module = independent_copy(template)
        try:
            module.load_state_dict(dict(other))
        except (RuntimeError, TypeError) as problem:
            message = " ".join(str(problem).split())
            raise InputError("a state dict of this network", message, where=where) from problem
    module = module.to(ctx.problem.device, ctx.problem.dtype).eval()
    if has_batchnorm(module):
        module = fold_batchnorm(module, ctx.problem.example())
    params, buffers = named_parameters(module), dict(module.named_buffers())
    for name, value in {**ctx.params, **ctx.problem.buffers}.items():
        found_value = params.get(name, buffers.get(name))
        if found_value is None or found_value.shape != value.shape:
            shown = "none" if found_value is None else str(tuple(found_value.shape))
            raise InputError(f"{name} of shape {tuple(value.shape)}", shown, where=where)
        moves = name in ctx.problem.trainable
        if not moves and not torch.equal(found_value, value):
            raise InputError(f"the same constant {name}", "other values", where=where, fix="Only weights are moved")
    return params


def _direction_on_device(ctx: Context, direction: Params) -> Params:
    return {name: value.to(ctx.problem.device) for name, value in direction.items()}


class Plane(Protocol):
    """Networks by their coordinates t on a line or a plane; the one at t = 0 is the network itself."""

    straight: dict[str, tuple[Tensor, ...]]
    """Parameters that are base + t₁ d₁ + t₂ d₂, as (base, d₁, d₂), float64."""

    names: tuple[str, ...]
    """All parameters that move."""

    def weights(self, points: Tensor) -> Params:
        """Moved parameters at coordinates (k, d), stacked (k, *shape), in the network's dtype."""
        ...

    def poles(self, points: Tensor) -> Tensor:
        """Which of the coordinates (k, d) have no network, or none on this side of a pole: (k,)."""
        ...


class WeightPlane:
    """w + t₁ d₁ + t₂ d₂.

    Args:
        ctx: the network.
        directions: float64, over parameters that move.
    """

    def __init__(self, ctx: Context, directions: Sequence[Params]) -> None:
        self.names = tuple(directions[0])
        self._dtype = ctx.problem.dtype
        self.straight = {
            name: (ctx.params[name].double(), *(direction[name] for direction in directions)) for name in self.names
        }

    def weights(self, points: Tensor) -> Params:
        """Moved parameters at coordinates (k, d), stacked (k, *shape), in the network's dtype."""
        return {name: _values_along_directions(parts, points).to(self._dtype) for name, parts in self.straight.items()}

    def poles(self, points: Tensor) -> Tensor:
        """Weight space has none."""
        return torch.zeros(len(points), dtype=torch.bool)


class PathPlane:
    """The networks whose basis-path values are v + t₁ ξ + t₂ η (Yi et al. 2019, equation 18).

    The inverse has a pole wherever the value P(u) S(u) of a unit's own path is zero. These values are affine in t, so
    the points that a straight way from the centre reaches without crossing a pole are a convex region, known exactly.

    Args:
        ctx: the network, without BatchNorm.
        paths: its basis paths.
        directions: ξ and η, (count,) each, float64.
        relative: whether the directions are in units of the values themselves: v ⊙ ξ.
    """

    def __init__(
        self, ctx: Context, paths: PathCoordinates, directions: Sequence[Tensor], relative: bool = False
    ) -> None:
        self._paths, self._dtype = paths, ctx.problem.dtype
        self.names = tuple(block.name for block in paths.blocks)
        reference = paths.scaled_reference()
        # In units of weights, x = gain · v: path values of deep networks are too small to be moved as they are.
        moves = [
            {
                name: (reference[name] if relative else paths.gain(name)) * part
                for name, part in paths.split(direction.to(ctx.problem.device)).items()
            }
            for direction in directions
        ]
        self._scaled = {name: (reference[name], *(move[name] for move in moves)) for name in self.names}
        self.straight = {name: parts for name, parts in self._scaled.items() if self._is_straight(name)}
        ends = [paths.ratios({name: reference[name] + move[name] for name in self.names}) for move in moves]
        self.slopes = torch.stack([end - 1 for end in ends], dim=1).cpu()  # of v_π(u) / v_π(u)⁰: (classes + 1, d)

    def weights(self, points: Tensor) -> Params:
        """Moved parameters at coordinates (k, d), stacked (k, *shape), in the network's dtype."""
        weights: Params = torch.vmap(self._weights)(
            {name: _values_along_directions(parts, points) for name, parts in self._scaled.items()}
        )
        return weights

    def poles(self, points: Tensor) -> Tensor:
        """Which coordinates lie on a pole or beyond one: (k,)."""
        return ~((1 + points @ self.slopes.T) > 0).all(1)

    def reach(self, span: float) -> float:
        """Factor by which the directions could be longer before the grid [−span, span]ᵈ meets a pole."""
        worst = float(self.slopes.abs().sum(1).max()) * span
        return 1 / worst if worst else float("inf")

    def _weights(self, scaled: Params) -> Params:
        weights = self._paths.from_scaled(scaled)
        return {name: weights[name].to(self._dtype) for name in self.names}

    def _is_straight(self, name: str) -> bool:
        """True if no ratio enters: the parameter reads the ground alone, and is not held by a skeleton edge."""
        block = next(block for block in self._paths.blocks if block.name == name)
        if bool(self._paths.held_by_input.any()) or len(block.frozen):
            return False
        return block.layer is None or block.is_bias or not bool((block.layer.inputs != 0).any())


def _values_along_directions(parts: tuple[Tensor, ...], points: Tensor) -> Tensor:
    """Value of base + Σ t_i d_i for every row t of points: (k, *shape), float64."""
    base, *directions = parts
    rows = points.to(base.device)
    total = base.expand(len(points), *base.shape)
    for i, direction in enumerate(directions):
        total = total + rows[:, i].reshape(-1, *[1] * base.ndim) * direction
    return total
