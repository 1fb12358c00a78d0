"""One grid point's pass over the data as a CUDA graph, replayed for every point.

A small network keeps a GPU busy for less time than it takes to ask for its dozens of kernels one by one. A captured
pass is asked for once per point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.landscapes.affine_layers import Responses, answered_forward
from flatscope.params import Params
from flatscope.samples import Inputs

if TYPE_CHECKING:
    from torch.cuda import CUDAGraph

WARM_UP = 3  # passes before the capture: libraries choose their kernels in the first ones


class ReplayedPoints:
    """Summed loss and number of errors at grid points of a row.

    Args:
        ctx: the network.
        batches: all samples, with the responses of the layers that are affine in the coordinates.
        names: the parameters that move.
    """

    def __init__(self, ctx: Context, batches: Sequence[tuple[Inputs, Tensor, Responses]], names: Sequence[str]) -> None:
        device, dtype = ctx.problem.device, ctx.problem.dtype
        self._ctx, self._batches = ctx, batches
        self._weights: Params = {name: ctx.params[name].clone() for name in names}
        self._last = torch.zeros((), device=device, dtype=dtype)
        self._begun: list[Params] = [{name: parts[0].clone() for name, parts in known.items()} for *_, known in batches]
        self._totals = torch.zeros(2, device=device, dtype=torch.float64)
        self._graph: CUDAGraph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.device(device):
            aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for _ in range(WARM_UP):
                    self._pass()
            torch.cuda.current_stream().wait_stream(aside)
            with torch.cuda.graph(self._graph):
                self._pass()

    def __call__(self, weights: Params, points: Tensor) -> tuple[Tensor, Tensor]:
        """Summed losses (k,) and errors (k,), float64, at stacked weights of points that share all but the last."""
        found = torch.zeros(len(points), 2, device=self._totals.device, dtype=torch.float64)
        lasts = points[:, -1].to(self._last)
        targets = list(self._weights.values())
        with torch.no_grad():
            for begun, (_, _, known) in zip(self._begun, self._batches, strict=True):
                for name, parts in known.items():
                    begun[name].copy_(parts[0])
                    for coordinate, part in zip(points[0, :-1].tolist(), parts[1:-1], strict=True):
                        begun[name].add_(part, alpha=coordinate)
            for i in range(len(points)):
                torch._foreach_copy_(targets, [weights[name][i] for name in self._weights])
                self._last.copy_(lasts[i])
                self._graph.replay()
                found[i].copy_(self._totals)
        return found[:, 0], found[:, 1]

    def _pass(self) -> None:
        self._totals.zero_()
        problem = self._ctx.problem
        params = {**self._ctx.params, **self._weights}
        for begun, (inputs, targets, known) in zip(self._begun, self._batches, strict=True):
            answers = {name: torch.addcmul(begun[name], parts[-1], self._last) for name, parts in known.items()}
            outputs = answered_forward(self._ctx, inputs, params, answers)
            self._totals[0] += problem.loss(outputs, targets).double().sum()
            if problem.classification:
                self._totals[1] += (~(sample_margins(outputs, targets) > 0)).double().sum()  # NaN is wrong
