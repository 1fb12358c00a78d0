"""Loss and error at many grid points: one pass over the data serves a row of the grid, on a GPU as one CUDA graph."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from flatscope.context import Context, sample_margins
from flatscope.cuda_graphs import captured_cuda_graph
from flatscope.landscapes.directions import Plane
from flatscope.measures.losses_along_lines import (
    forward_with_known_responses,
    layer_responses_along_directions,
    layers_linear_in_radius,
)
from flatscope.params import Params, count_scalars, vectorised_over_points
from flatscope.perturbation import can_stack_weights
from flatscope.problem import DEFAULT_BATCH
from flatscope.samples import Inputs, tensors_of_inputs

Responses = dict[str, tuple[Tensor, ...]]  # of a layer, by its weight: at w, and along each direction


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
        with torch.no_grad():
            self._replay = captured_cuda_graph(self._pass_over_data, [], device)

    def __call__(self, weights: Params, points: Tensor) -> tuple[Tensor, Tensor]:
        """Summed losses (k,) and errors (k,), float64, at stacked weights of points that share all but the last."""
        sums = torch.zeros(len(points), 2, device=self._totals.device, dtype=torch.float64)
        lasts = points[:, -1].to(self._last)
        targets = list(self._weights.values())
        with torch.no_grad():
            for begun, (_, _, known) in zip(self._begun, self._batches, strict=True):
                for name, parts in known.items():
                    begun[name].copy_(_response_of_grid_row(parts, points[0]))
            for i in range(len(points)):
                torch._foreach_copy_(targets, [weights[name][i] for name in self._weights])
                self._last.copy_(lasts[i])
                self._replay()
                sums[i].copy_(self._totals)
        return sums[:, 0], sums[:, 1]

    def _pass_over_data(self) -> None:
        self._totals.zero_()
        problem = self._ctx.problem
        params = {**self._ctx.params, **self._weights}
        for begun, (inputs, targets, known) in zip(self._begun, self._batches, strict=True):
            answers = {name: torch.addcmul(begun[name], parts[-1], self._last) for name, parts in known.items()}
            outputs = forward_with_known_responses(self._ctx, inputs, params, answers)
            self._totals[0] += problem.loss(outputs, targets).double().sum()
            if problem.classification:
                self._totals[1] += (~(sample_margins(outputs, targets) > 0)).double().sum()  # NaN is wrong


Known = tuple[Inputs, Tensor, Responses]


class GridLosses:
    """Mean loss and 0/1 error at grid points that share all coordinates but the last.

    Args:
        ctx: the network, without BatchNorm; its pass counter is charged.
        plane: from coordinates to weights.
        part: "train" or "test" samples.
    """

    def __init__(self, ctx: Context, plane: Plane, part: str) -> None:
        self._ctx, self._plane, self._part = ctx, plane, part
        self._n = ctx.problem.part(part).n
        self._on_cpu = ctx.problem.device.type == "cpu"
        # On a straight plane the response of a layer that reads nothing which moves is affine in the coordinates.
        ahead = ctx.cached(layers_linear_in_radius, moved=plane.names).layers
        self._layers = tuple(pair for pair in ahead if all(name is None or name in plane.straight for name in pair))
        moving = {name for pair in self._layers for name in pair if name}
        self._directions = {name: torch.stack(plane.straight[name][1:]).to(ctx.problem.dtype) for name in moving}
        if self._layers and not self._known_responses_agree():
            self._layers = ()
        self._kept: list[Known] | None = None
        self._may_keep = self._bytes_of_all() <= ctx.effort.limits.kept_data
        self._captured: ReplayedPoints | None = None
        self._may_capture = ctx.problem.device.type == "cuda"

    @property
    def width(self) -> int:
        """Grid points whose weights are held at once."""
        each = 8 * count_scalars(self._ctx.params[name] for name in self._plane.names)
        return max(1, self._ctx.effort.limits.stacked_bytes // each)

    def __call__(self, points: Tensor) -> tuple[Tensor, Tensor | None, Tensor]:
        """Loss (k,), error (k,) or None, and poles (k,), at coordinates (k, d); NaN at poles.

        All coordinates but the last must be the same: they are a row of the grid.
        """
        loss = torch.full((len(points),), torch.nan, dtype=torch.float64)
        error = loss.clone() if self._ctx.problem.classification else None
        poles = self._plane.poles(points).clone()
        for places in torch.split((~poles).nonzero().flatten(), self.width):
            if not len(places):
                continue
            weights = self._plane.weights(points[places])
            finite = torch.stack([w.reshape(len(w), -1).isfinite().all(1) for w in weights.values()]).all(0)
            evaluated = self._evaluated_points(weights, points[places])
            broken = ~finite.cpu()  # asked for after the evaluation: a GPU need not wait for the answer
            poles[places[broken]] = True
            loss[places] = evaluated[0].masked_fill(broken, torch.nan)
            if error is not None and evaluated[1] is not None:
                error[places] = evaluated[1].masked_fill(broken, torch.nan)
        return loss, error, poles

    def _evaluated_points(self, weights: Params, points: Tensor) -> tuple[Tensor, Tensor | None]:
        k = len(points)
        problem = self._ctx.problem
        replay = self._cuda_graph_of_pass() if k > 1 else None
        if replay is not None:
            sums, errors = replay(weights, points)
            self._ctx.charge_passes("forward", k * self._n)
            return sums.cpu() / self._n, errors.cpu() / self._n if problem.classification else None
        losses = torch.zeros(k, dtype=torch.float64, device=problem.device)
        wrong = torch.zeros(k, dtype=torch.float64, device=problem.device)
        with torch.no_grad():
            for inputs, targets, known in self._batches():
                run = (
                    self._losses_on_stacked_points
                    if self._can_stack_points(k, len(targets))
                    else self._losses_point_by_point
                )
                outputs = run(weights, points, inputs, known)  # (k, n, ...)
                flat, repeated = outputs.flatten(0, 1), targets.repeat(k, *[1] * (targets.ndim - 1))
                losses += problem.loss(flat, repeated).reshape(k, -1).double().sum(1)
                if problem.classification:
                    wrong += (~(sample_margins(flat, repeated) > 0)).reshape(k, -1).double().sum(1)  # NaN is wrong
                self._ctx.charge_passes("forward", k * len(targets))
        return losses.cpu() / self._n, wrong.cpu() / self._n if problem.classification else None

    def _losses_point_by_point(self, weights: Params, points: Tensor, inputs: Inputs, known: Responses) -> Tensor:
        begun = {name: _response_of_grid_row(parts, points[0]) for name, parts in known.items()}
        outputs = []
        for i, point in enumerate(points):
            last = float(point[-1])
            answers = {name: torch.add(begun[name], parts[-1], alpha=last) for name, parts in known.items()}
            params = {**self._ctx.params, **{name: value[i] for name, value in weights.items()}}
            outputs.append(forward_with_known_responses(self._ctx, inputs, params, answers))
        return torch.stack(outputs)

    def _losses_on_stacked_points(self, weights: Params, points: Tensor, inputs: Inputs, known: Responses) -> Tensor:
        last = points[:, -1].to(self._ctx.problem.device, self._ctx.problem.dtype)
        answers = {}
        for name, parts in known.items():
            begun = _response_of_grid_row(parts, points[0])
            answers[name] = begun + last.reshape(-1, *[1] * begun.ndim) * parts[-1]

        def outputs(point: Params, answered: Params) -> Tensor:
            return forward_with_known_responses(self._ctx, inputs, {**self._ctx.params, **point}, answered)

        result: Tensor = vectorised_over_points(outputs, weights, answers)
        return result

    def _batches(self) -> Iterator[Known]:
        """Batches with the responses of the affine layers: kept from the first pass on, if they fit."""
        if self._kept is not None:
            yield from self._kept
            return
        kept: list[Known] = []
        size = self._ctx.problem.batch_size
        if self._may_capture and self._may_keep and size == DEFAULT_BATCH:  # nobody asked for it
            size = self._ctx.effort.limits.landscape_batch
        for inputs, targets in self._ctx.batches(self._part, size):
            known = inputs, targets, self._affine_responses(inputs)
            if self._may_keep:
                kept.append(known)
            yield known
        if self._may_keep:
            self._kept = kept

    def _affine_responses(self, inputs: Inputs) -> Responses:
        """Outputs of each affine layer on a batch at w and along each direction."""
        if not self._layers:
            return {}
        at_zero, along = layer_responses_along_directions(self._ctx, self._layers, self._directions, inputs)
        return {name: (zero, *along[name]) for name, zero in at_zero.items()}

    def _can_stack_points(self, k: int, n: int) -> bool:
        """True if k networks run on n samples as one: where calls cost more than arithmetic, and memory allows it."""
        limits = self._ctx.effort.limits
        worth = self._n <= limits.stacked_samples if self._on_cpu else k * n <= limits.landscape_rows
        return k > 1 and worth and self._ctx.cached(can_stack_weights)

    def _cuda_graph_of_pass(self) -> ReplayedPoints | None:
        """The pass over the data as a CUDA graph; None on a CPU, or where the network or the data do not allow it."""
        if self._captured is None and self._may_capture and self._kept is not None:
            try:
                self._captured = ReplayedPoints(self._ctx, self._kept, self._plane.names)
            except (RuntimeError, ValueError, NotImplementedError):  # it looks at values, or copies to the CPU
                self._may_capture = False
        return self._captured

    def _bytes_of_all(self) -> int:
        inputs = self._ctx.problem.example()
        known = self._affine_responses(inputs)
        tensors = [*tensors_of_inputs(inputs), *(part for parts in known.values() for part in parts)]
        per_sample = sum(t.numel() * t.element_size() / len(t) for t in tensors)
        return int(per_sample * self._n)

    def _known_responses_agree(self) -> bool:
        """True if answered layers give what running them gives, at a point away from the centre."""
        inputs = self._ctx.problem.example()
        dimensions = len(next(iter(self._plane.straight.values()))) - 1
        point = torch.full((1, dimensions), 0.01, dtype=torch.float64)
        weights = self._plane.weights(point)
        with torch.no_grad():
            known = self._affine_responses(inputs)
            ours = self._losses_point_by_point(weights, point, inputs, known)
            plain = self._losses_point_by_point(weights, point, inputs, {})
        rounding = 1e4 * torch.finfo(self._ctx.problem.dtype).eps
        return bool(((ours - plain).abs() <= rounding * (1 + plain.abs().max())).all())


def _response_of_grid_row(parts: tuple[Tensor, ...], point: Tensor) -> Tensor:
    """The response at a row of the grid, without its last coordinate."""
    total = parts[0]
    for coordinate, part in zip(point[:-1].tolist(), parts[1:-1], strict=True):
        total = torch.add(total, part, alpha=coordinate)
    return total
