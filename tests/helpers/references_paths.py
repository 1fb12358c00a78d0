"""Paths of a chain of dense layers, walked one by one, and its basis paths by the formula of the skeleton method."""

from __future__ import annotations

import itertools
import math
from typing import Any

import torch
from torch import Tensor

Layers = list[tuple[Tensor, Tensor]]


class ChainPaths:
    """Path values of (weight, bias) layers with ReLU between them.

    Args:
        chain: W_l, b_l.
        biased: which layers have a bias; the others' are zeros that are no path.
        rule: "max_product": the largest product of weights leads into and out of a unit; "cyclic": unit i is joined to
            unit i modulo the width; "diagonal": to unit i.
    """

    def __init__(self, chain: Layers, biased: list[bool], rule: str) -> None:
        self.chain, self.biased, self.rule = chain, biased, rule
        self.widths = [chain[0][0].shape[1], *(len(weight) for weight, _ in chain)]
        depth = len(chain)
        # Into each unit, and out of it: products of the chosen weights, P and S.
        self.into: list[list[int]] = [[]]
        self.prefix: list[list[float]] = [[1.0] * self.widths[0]]
        for weight, _ in chain[:-1]:
            below = self.prefix[-1]
            ways = [[float(w) * p for w, p in zip(row, below, strict=True)] for row in weight]
            self.into.append([self._chosen(unit, way) for unit, way in enumerate(ways)])
            self.prefix.append([way[i] for way, i in zip(ways, self.into[-1], strict=True)])
        self.out: list[list[int]] = [[] for _ in range(depth + 1)]
        self.suffix: list[list[float]] = [[] for _ in range(depth)] + [[1.0] * self.widths[-1]]
        for level in range(depth - 1, 0, -1):
            weight, above = chain[level][0], self.suffix[level + 1]
            ways = [[float(w) * s for w, s in zip(weight[:, u], above, strict=True)] for u in range(weight.shape[1])]
            self.out[level] = [self._chosen(unit, way) for unit, way in enumerate(ways)]
            self.suffix[level] = [way[o] for way, o in zip(ways, self.out[level], strict=True)]

    def _chosen(self, unit: int, way: list[float]) -> int:
        if self.rule == "max_product":
            sizes = [abs(value) for value in way]
            return sizes.index(max(sizes))
        return unit % len(way) if self.rule == "cyclic" else unit

    def _free(self) -> list[tuple[Any, ...]]:
        """(layer, output, input) of every weight that is not frozen, and (layer, output, None) of biases."""
        found: list[tuple[Any, ...]] = []
        for layer, (weight, bias) in enumerate(self.chain, start=1):
            for o, i in itertools.product(*map(range, weight.shape)):
                if layer == 1 or self.out[layer - 1][i] != o:
                    found.append((layer, o, i))
            if self.biased[layer - 1]:
                found += [(layer, o, None) for o in range(len(bias))]
        return found

    @property
    def basis(self) -> list[float]:
        """S(head) w P(tail) of each weight that is not frozen, S b of each bias."""
        values = []
        for layer, o, i in self._free():
            weight, bias = self.chain[layer - 1]
            own = float(bias[o]) if i is None else float(weight[o, i]) * self.prefix[layer - 1][i]
            values.append(self.suffix[layer][o] * own)
        return values

    def run(self, values: Tensor, x: Tensor) -> Tensor:
        """Outputs of the network with these basis path values, layer by layer from the front."""
        places = {place: number for number, place in enumerate(self._free())}
        below: list[Any] = [torch.ones((), dtype=torch.float64)] * self.widths[0]
        h = x
        for layer, (weight, bias) in enumerate(self.chain, start=1):
            rows = []
            for o in range(len(weight)):
                row = [
                    values[places[layer, o, i]] / (self.suffix[layer][o] * below[i])
                    if (layer, o, i) in places
                    else weight[o, i]
                    for i in range(weight.shape[1])
                ]
                rows.append(torch.stack(row))
            shift = [
                values[places[layer, o, None]] / self.suffix[layer][o] if (layer, o, None) in places else bias[o]
                for o in range(len(bias))
            ]
            h = h @ torch.stack(rows).T + torch.stack(shift)
            if layer < len(self.chain):
                h = h.clamp(min=0)
                below = [rows[u][i] * below[i] for u, i in enumerate(self.into[layer])]
        return h

    @property
    def walked(self) -> list[tuple[tuple[str, tuple[Any, ...], int], float]]:
        """((where it starts, hidden units on the way, output), value) of every path, from an input or a bias."""
        found: list[tuple[tuple[str, tuple[Any, ...], int], float]] = []
        depth = len(self.chain)
        for first in range(depth):
            for units in itertools.product(*map(range, self.widths[first + 1 :])):
                behind = math.prod(
                    float(self.chain[level][0][units[level - first], units[level - first - 1]])
                    for level in range(first + 1, depth)
                )
                weight, bias = self.chain[first]
                hidden = tuple((first + 1 + k, u) for k, u in enumerate(units[:-1]))
                if first == 0:
                    found += [(("input", hidden, units[-1]), float(w) * behind) for w in weight[units[0]]]
                if self.biased[first]:
                    found.append((("bias", hidden, units[-1]), float(bias[units[0]]) * behind))
        return found

    def input_norms(self, x: Tensor) -> list[float]:
        """Largest length of each layer's input over the samples, units times the size of their suffix."""
        h, norms = x, []
        for layer, (weight, bias) in enumerate(self.chain, start=1):
            scale = torch.ones(h.shape[1], dtype=torch.float64)
            if layer > 1:
                scale = torch.tensor(self.suffix[layer - 1], dtype=torch.float64).abs()
            norms.append(max(math.sqrt(sum(v * v for v in row)) for row in (h * scale).tolist()))
            h = (h @ weight.T + bias).clamp(min=0)
        return norms
