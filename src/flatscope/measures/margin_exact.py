"""Exact distances to another class, for networks that are affine or have one hidden layer of few ReLUs.

Within one pattern of active ReLUs the network is affine, and the inputs that have this pattern and another class form
a polyhedron. Its point nearest to an input is a least-distance problem, min ‖d‖ subject to Gd ≥ h, that non-negative
least squares solve in finitely many steps (Lawson and Hanson 1974). The nearest over all patterns is the margin.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from scipy.optimize import nnls
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import NotApplicable
from flatscope.network.discontinuities import Discontinuities
from flatscope.network.interception import LAYER_CALLS, Operation, tensors_in
from flatscope.network.operations import TABLE
from flatscope.samples import as_rows

Floats = npt.NDArray[np.float64]
MOST_UNITS = 10
LARGEST_INPUT = 10_000  # entries: beyond this the matrix of the first layer is too large to be written out
ROUNDING = 1e-14  # slopes below this, relative to the weights, are zeros


@dataclass(frozen=True)
class Shallow:
    """f(x) = C max(Ax + a, 0) + c, or an affine network as C(Ax + a) + c with the identity C and c = 0."""

    first: Floats  # A, (units, inputs)
    first_bias: Floats  # a
    second: Floats  # C, (outputs, units)
    second_bias: Floats  # c
    affine: bool = False

    def __call__(self, x: Floats) -> Floats:
        """Outputs (n, outputs) of inputs (n, d)."""
        z = x @ self.first.T + self.first_bias
        return np.asarray((z if self.affine else np.maximum(z, 0)) @ self.second.T + self.second_bias)


def as_shallow(ctx: Context) -> Shallow | None:
    """The network as matrices, float64, or None if it is none of these."""
    inputs = ctx.problem.example(1)
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.numel() > LARGEST_INPUT:
        return None
    try:
        probe = _Reader()
        _run_through_reader(ctx, inputs.double(), probe)
    except NotApplicable:
        return None
    if probe.hidden is not None and probe.hidden.numel() > MOST_UNITS:
        return None
    shape = tuple(inputs.shape[1:])
    basis = _origin_and_unit_vectors(math.prod(shape), shape, inputs.device)
    if probe.hidden is None:
        matrix, offset = _matrix_and_offset(_run_through_reader(ctx, basis, _Reader()))
        network = Shallow(matrix, offset, np.eye(len(offset)), np.zeros(len(offset)), affine=True)
        return network if _matrices_agree_with_network(ctx, network) else None
    reader = _Reader()
    _run_through_reader(ctx, basis, reader)
    assert reader.hidden is not None
    units, unit_shape = probe.hidden.numel(), tuple(probe.hidden.shape[1:])
    answers = _origin_and_unit_vectors(units, unit_shape, inputs.device)
    outputs = _run_through_reader(ctx, basis[:1].expand(units + 1, *shape).clone(), _Reader(answers))
    network = Shallow(*_matrix_and_offset(reader.hidden), *_matrix_and_offset(outputs))
    return network if _matrices_agree_with_network(ctx, network) else None  # a signal may have gone around the ReLUs


def _matrices_agree_with_network(ctx: Context, network: Shallow) -> bool:
    """True if the matrices give what the network itself gives on some inputs."""
    inputs = ctx.problem.example(8)
    assert isinstance(inputs, Tensor)
    with torch.no_grad():
        outputs = as_rows(ctx.forward(inputs).double()).cpu().numpy()
    by_matrices = network(as_rows(inputs.double()).cpu().numpy())
    rounding = 1e3 * torch.finfo(ctx.problem.dtype).eps
    return bool(np.abs(by_matrices - outputs).max() <= rounding * (np.abs(outputs).max() + 1))


def _origin_and_unit_vectors(n: int, shape: tuple[int, ...], device: torch.device) -> Tensor:
    """0 and the unit vectors, (n + 1, *shape)."""
    rows = torch.cat([torch.zeros(1, n, dtype=torch.float64), torch.eye(n, dtype=torch.float64)])
    return rows.reshape(n + 1, *shape).to(device)


def _matrix_and_offset(values: Tensor) -> tuple[Floats, Floats]:
    """Matrix and offset of an affine map from its values at 0 and at the unit vectors."""
    flat = as_rows(values.detach()).cpu().numpy()
    return np.ascontiguousarray((flat[1:] - flat[0]).T), flat[0]


def _run_through_reader(ctx: Context, inputs: Tensor, reader: _Reader) -> Tensor:
    params, buffers = (
        {name: value.double() if value.is_floating_point() else value for name, value in values.items()}
        for values in (ctx.params, ctx.problem.buffers)
    )
    reader.follow_tensor(inputs)
    with torch.no_grad():
        outputs = ctx.problem.forward(inputs, params, buffers, [reader.follow])
    reader.jumps.refuse_outputs(outputs)
    return outputs


class _Reader:
    """A rule for `Problem.forward` that accepts affine operations and one layer of ReLUs, and refuses all else.

    Args:
        answers: what the layer of ReLUs is to give, whatever it receives.
    """

    def __init__(self, answers: Tensor | None = None) -> None:
        self.answers = answers
        self.hidden: Tensor | None = None
        self._known: set[Tensor] = set()
        self.jumps = Discontinuities(self._known, "no exact margin")

    def follow_tensor(self, tensor: Tensor) -> None:
        self._known.add(tensor)

    def follow(self, op: Operation) -> Any:
        if self.jumps.answers(op):
            return self.jumps.follow(op)
        signals = [tensor for tensor in op.tensors if tensor in self._known]
        if op.name == "relu":
            if self.hidden is not None:
                raise NotApplicable("one layer of ReLUs", "a second one", where=op.place)
            self.hidden = signals[0].clone()
            result = self.hidden.clamp_min(0) if self.answers is None else self.answers
            if op.kwargs.get("inplace") is True or getattr(op.function, "__name__", "").endswith("_"):
                result = signals[0].copy_(result)
        else:
            result = op.run()
            self.jumps.note(op, result)
            tensors = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
            meaning = TABLE.get(op.name)
            if op.name != "setitem" and (not tensors or (meaning is not None and meaning.creates)):
                return result
            unchanged = meaning is not None and (meaning.moves or meaning.identity)
            affine = op.name in LAYER_CALLS or op.name == "batch_norm" or unchanged
            if not affine or len(set(signals)) != 1:
                raise NotApplicable("affine maps and ReLUs", op.name, where=op.place)
        for tensor in tensors_in(result):
            self.follow_tensor(tensor)
        return result


def exact_margins(network: Shallow, x: Floats, y: npt.NDArray[np.int64], known: Floats | None = None) -> Floats:
    """Distance of each input to the nearest one of another class; 0 where it is misclassified already.

    Args:
        network: as matrices.
        x: inputs (n, d).
        y: labels (n,).
        known: (n,) distances at which another class is known to be: they save work and change nothing.
    """
    known, units = np.full(len(x), np.inf) if known is None else known, len(network.first)
    patterns = np.ones((1, units), dtype=bool)
    if not network.affine:
        patterns = ((np.arange(2**units)[:, None] >> np.arange(units)) & 1).astype(bool)
    return np.array([_margin_of_sample(network, patterns, *one) for one in zip(x, y, known, strict=True)])


def _margin_of_sample(network: Shallow, patterns: npt.NDArray[np.bool_], x: Floats, y: int, known: float) -> float:
    A, C = network.first, network.second
    z = A @ x + network.first_bias
    others = np.delete(np.arange(len(C)), y)
    gaps, offsets = C[y] - C[others], network.second_bias[y] - network.second_bias[others]
    if ((gaps @ (z if network.affine else np.maximum(z, 0)) + offsets) <= 0).any():
        return 0.0
    lengths = np.linalg.norm(A, axis=1)
    with np.errstate(divide="ignore", invalid="ignore"):
        crossing = np.where(z == 0, 0.0, np.abs(z) / lengths)  # the way to where a unit switches
    # A pattern is at least as far as the farthest of the units that differ in it.
    floors = np.where((patterns != (z > 0)) & (not network.affine), crossing, 0.0).max(1)
    best = known * (1 + 1e-9)
    smallest = ROUNDING * np.linalg.norm(C) * np.linalg.norm(A)
    for index in np.argsort(floors, kind="stable"):
        if floors[index] > best:
            break
        on = patterns[index]
        signs = np.where(on, 1.0, -1.0)
        slopes = (gaps * on) @ A  # (others, d): f_y − f_j within the pattern
        values = (gaps * on) @ z + offsets
        for slope, value in zip(slopes, values, strict=True):
            length = np.linalg.norm(slope)
            if length <= smallest:
                slope, length = np.zeros_like(slope), np.float64(0)
            if value > 0 and (length == 0 or value > best * length):  # the half-space alone is farther
                continue
            if network.affine:
                G, h = -slope[None], np.array([value])
            else:
                G, h = np.vstack([signs[:, None] * A, -slope]), np.append(-signs * z, value)
            best = min(best, _least_distance(G, h))
    return float(best)


def _least_distance(G: Floats, h: Floats) -> float:
    """The least ‖d‖ subject to Gd ≥ h; infinite where no d satisfies it."""
    lengths = np.linalg.norm(G, axis=1)
    if (h[lengths == 0] > 0).any():
        return math.inf
    G, h = G[lengths > 0] / lengths[lengths > 0, None], h[lengths > 0] / lengths[lengths > 0]
    if (h <= 0).all():
        return 0.0
    size = np.abs(h).max()
    E = np.vstack([G.T, h / size])
    target = np.zeros(len(E))
    target[-1] = 1.0
    u, rest = nnls(E, target)
    if rest <= 1e-10:
        return math.inf
    r = E @ u - target
    return float(np.linalg.norm(r[:-1]) / abs(r[-1]) * size)
