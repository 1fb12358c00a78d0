"""Landscapes as the figures need them: grids on one height scale, holes where there is no network."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from flatscope.landscapes import Surface
from flatscope.reports.figure_data import Scale

Grid = np.ndarray[Any, np.dtype[np.float64]]
SPACE_WORDS = {"weights": "weight space", "psi": "path space (PSI)"}
DEEPEST = 1e-6  # of the highest point; lower ones are drawn at that height on a logarithmic scale
MOST_BANDS = 14


class PlaneData(NamedTuple):
    """A plane: heights by (row of t₂, column of t₁), NaN where there is a hole."""

    network: str
    space: str
    directions: str
    across: list[float]
    up: list[float]
    heights: Grid
    centre: float

    @property
    def title(self) -> str:
        """The space in words."""
        words = SPACE_WORDS.get(self.space, self.space)
        return words[:1].upper() + words[1:]

    @property
    def holes(self) -> float:
        """Share of the grid points without a height."""
        return float(np.isnan(self.heights).mean())

    @property
    def rise(self) -> tuple[float, float]:
        """Lowest and highest finite loss on the plane; NaN where there is none."""
        finite = self.heights[np.isfinite(self.heights)]
        return (float(finite.min()), float(finite.max())) if len(finite) else (math.nan, math.nan)


class LineData(NamedTuple):
    """A line through a network; holes are left out and break the line into pieces."""

    network: str
    space: str
    pieces: list[tuple[list[float], list[float]]]
    holes: int


def network_of(name: str, surface: Surface) -> str:
    """The network's name within the name under which the report keeps a surface."""
    return name.removesuffix(f", {SPACE_WORDS.get(surface.space, surface.space)}")


def planes(surfaces: Mapping[str, Surface]) -> dict[str, list[PlaneData]]:
    """The 2-D surfaces by network, weight space first."""
    found: dict[str, list[PlaneData]] = {}
    for name, surface in surfaces.items():
        if surface.dimensions == 2:
            first, second = (axis.tolist() for axis in surface.axes)
            plane = PlaneData(
                network_of(name, surface),
                surface.space,
                surface.directions,
                first,
                second,
                _finite(surface).T,
                float(surface.centre),
            )
            found.setdefault(plane.network, []).append(plane)
    for group in found.values():
        group.sort(key=lambda plane: plane.space != "weights")
    return found


def lines_of(surfaces: Mapping[str, Surface]) -> list[LineData]:
    """The 1-D surfaces."""
    return [
        LineData(network_of(name, surface), surface.space, *_pieces(surface))
        for name, surface in surfaces.items()
        if surface.dimensions == 1
    ]


def _finite(surface: Surface) -> Grid:
    """The loss with NaN at the poles and wherever it is not a number that can be drawn."""
    loss = np.array(surface.loss.detach().cpu().numpy(), dtype=np.float64)
    loss[~np.isfinite(loss) | surface.poles.cpu().numpy().astype(bool)] = math.nan
    return loss


def _pieces(surface: Surface) -> tuple[list[tuple[list[float], list[float]]], int]:
    pieces: list[tuple[list[float], list[float]]] = [([], [])]
    heights = _finite(surface)
    for place, height in zip(surface.axes[0].tolist(), heights.tolist(), strict=True):
        if math.isnan(height):
            pieces.append(([], []))
        else:
            pieces[-1][0].append(place)
            pieces[-1][1].append(height)
    return [piece for piece in pieces if piece[0]], int(np.isnan(heights).sum())


def height_scale(data: Sequence[PlaneData]) -> Scale:
    """One scale for all planes: logarithmic where losses are positive and span much."""
    ends = np.array([plane.rise for plane in data])
    if not np.isfinite(ends).any():
        return Scale(0.0, 1.0)
    low, high = float(np.nanmin(ends)), float(np.nanmax(ends))
    low = max(low, DEEPEST * high) if low > 0 else low
    if not high > low:  # flat to rounding: a scale of some height shows it as flat
        return Scale(low, low + max(abs(low), 1.0))
    return Scale(low, high, low > 0 and high > 20 * low)


def bands(scale: Scale) -> list[float]:
    """Heights at which contour lines run, the ends of the scale included: round ones, as many as can be told apart."""
    if scale.log:
        powers = range(math.floor(math.log10(scale.low)), math.ceil(math.log10(scale.high)) + 1)
        inner = [step * 10.0**power for power in powers for step in (1, 2, 5)]
        if len(inner) > 3 * MOST_BANDS:
            inner = [10.0**power for power in powers]
    else:
        inner = scale.ticks(MOST_BANDS)
    air = 0.01  # a line that close to an end would only draw a sliver
    return [scale.low, *(level for level in inner if air < scale(level) < 1 - air), scale.high]


def placed(heights: Grid, scale: Scale) -> Grid:
    """Heights as places on the scale, 0 to 1, holes as NaN."""
    places = np.array([math.nan if math.isnan(h) else min(max(scale(h), 0.0), 1.0) for h in heights.flat])
    return places.reshape(heights.shape)
