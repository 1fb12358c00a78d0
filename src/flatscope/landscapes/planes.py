"""From grid coordinates to weights: straight planes in weight space, and planes of path values in path space."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.params import Params
from flatscope.symmetries.path_coordinates import PathCoordinates


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
        return {name: _along(parts, points).to(self._dtype) for name, parts in self.straight.items()}

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
        found: Params = torch.vmap(self._weights)({name: _along(parts, points) for name, parts in self._scaled.items()})
        return found

    def poles(self, points: Tensor) -> Tensor:
        """Which coordinates lie on a pole or beyond one: (k,)."""
        return ~((1 + points @ self.slopes.T) > 0).all(1)

    def reach(self, span: float) -> float:
        """How much longer (or shorter) the directions could be before the grid [−span, span]ᵈ meets a pole."""
        worst = float(self.slopes.abs().sum(1).max()) * span
        return 1 / worst if worst else float("inf")

    def _weights(self, scaled: Params) -> Params:
        found = self._paths.from_scaled(scaled)
        return {name: found[name].to(self._dtype) for name in self.names}

    def _is_straight(self, name: str) -> bool:
        """Whether no ratio enters: the parameter reads the ground alone, and is not held by a skeleton edge."""
        block = next(block for block in self._paths.blocks if block.name == name)
        if bool(self._paths.held_by_input.any()) or len(block.frozen):
            return False
        return block.layer is None or block.is_bias or not bool((block.layer.inputs != 0).any())


def _along(parts: tuple[Tensor, ...], points: Tensor) -> Tensor:
    """Value of base + Σ t_i d_i for every row t of points: (k, *shape), float64."""
    base, *directions = parts
    rows = points.to(base.device)
    total = base.expand(len(points), *base.shape)
    for i, direction in enumerate(directions):
        total = total + rows[:, i].reshape(-1, *[1] * base.ndim) * direction
    return total
