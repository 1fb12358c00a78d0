"""Path norms: one forward pass in which every weight w is |w|^p and the input is all ones.

The value that arrives at an output is the sum over all paths to it of the p-th powers of their weights. A bias is an
edge from a unit that is always on. The network itself is run with other rules for its operations, so whatever it is
made of (convolutions, skips, concatenations) is counted as it is used.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.measures.margins import declare_in_forms, value_from_logarithm
from flatscope.measures.sample_kinds import kinds_of_samples
from flatscope.network.discontinuities import Discontinuities
from flatscope.network.interception import Operation, tensors_in
from flatscope.network.operations import TABLE
from flatscope.network.path_rules import Paths, same
from flatscope.registry import PATH_SYMMETRIES, Value, measure
from flatscope.samples import map_inputs

Over = Literal["sum", "max"]
_norm_of_paths = partial(
    measure,
    paper="neyshabur2017",
    equation="Section 2.2",
    direction="lower",
    invariant_under=PATH_SYMMETRIES,
    passes={},
    on_folded=True,
    conventions="biases are edges from a unit that is always on; max-pooling as `max`; over all outputs; in float64",
)


@_norm_of_paths(symbol=r"\phi_1(w) = \sum_{\mathrm{paths}} \prod_i |W_i[j_i, j_{i-1}]|")
@declare_in_forms(r"\gamma^{-2} \Big(\sum_{\mathrm{paths}} \prod_i |2 W_i|\Big)^2", with_4d=True)
def l1_path_norm(ctx: Context, *, pooling: Over = "max", biases: bool = True, log: bool = False) -> Value:
    """Sum over all paths from input to output of the product of their absolute weights.

    Args:
        pooling: "max": a max-pool passes on the largest of its paths, which bounds every choice it can make; "sum":
            every path through it counts.
        biases: whether biases count as edges from a unit that is always on.
        log: give the natural logarithm instead.
    """
    return value_from_logarithm(log_path_norm(ctx, p=1.0, pooling=pooling, biases=biases), log)


@_norm_of_paths(
    symbol=r"\phi_2(w) = \Big(\sum_{\mathrm{paths}} \prod_i W_i[j_i, j_{i-1}]^2\Big)^{1/2}",
    caption="size over all paths",
)
# From φ_1 ≤ (number of paths)^(1 - 1/p) φ_p: the printed forms are those of p = 1 and p = 2.
@declare_in_forms(r"\gamma^{-2} \phi_p(w)^2 \prod_i 4 h_i^{2 - 2/p}", with_4d=True, widths=True)
def l2_path_norm(
    ctx: Context,
    *,
    p: float = 2.0,
    pooling: Over = "max",
    outputs: Over = "sum",
    biases: bool = True,
    log: bool = False,
) -> Value:
    """Square root of the sum over all paths of the product of their squared weights.

    With another p it is the paper's φ_p, the norm of order p of the vector of all paths. The paper calls that the
    smallest product of ℓ_{p,∞} norms of the layers over all rescalings of the units. That is so for a network with one
    output; with several it is the largest of their norms (`outputs="max"`), while the paper's formulas sum over them.

    Args:
        p: order, at least 1.
        pooling: "max": a max-pool passes on the largest of its paths; "sum": every path through it counts.
        outputs: "sum" over the paths to all outputs, or the "max" over outputs.
        biases: whether biases count as edges from a unit that is always on.
        log: give the natural logarithm instead.
    """
    return value_from_logarithm(log_path_norm(ctx, p=p, pooling=pooling, outputs=outputs, biases=biases), log)


def log_path_norm(
    ctx: Context, *, p: float, pooling: Over = "max", outputs: Over = "sum", biases: bool = True
) -> float:
    """Logarithm of the path norm over all outputs, the largest over the kinds of samples."""
    logs = log_output_path_norms(ctx, p=p, pooling=pooling, biases=biases)
    return max(float((of.amax(1) if outputs == "max" else torch.logsumexp(p * of, 1) / p).max()) for of in logs)


def log_output_path_norms(ctx: Context, *, p: float, pooling: Over = "max", biases: bool = True) -> list[Tensor]:
    """Logarithms of the path norms of the outputs, (samples, outputs) for each kind of samples, computed once."""
    if not (1 <= p < math.inf):
        raise InputError("an order p of at least 1", str(p), where="path norm")
    return ctx.cached(_passes_over_paths, p=float(p), pooling=pooling, biases=biases, curves=False)


def log_gradient_bound(ctx: Context) -> float:
    """Logarithm of a bound on the ℓ1 norm of the gradient of every output, at every input.

    The ℓ1 path norm without biases; activations that are not homogeneous but have a bounded slope are let through.
    """
    logs = ctx.cached(_passes_over_paths, p=1.0, pooling="max", biases=False, curves=True)
    return max(float(of.max()) for of in logs)


def _passes_over_paths(ctx: Context, p: float, pooling: str, biases: bool, curves: bool) -> list[Tensor]:
    double = ctx.in_double()
    params = {name: value.detach() for name, value in double.params.items()}
    sums = []
    for kind in kinds_of_samples(ctx):
        passing = PathPass(p, pooling, biases, curves)

        def ones(part: Tensor, passing: PathPass = passing) -> Tensor:  # paths start at the real-valued parts
            if not part.is_floating_point():
                return part
            return passing.start(torch.ones_like(part, dtype=torch.float64).requires_grad_().clone())

        with torch.enable_grad():  # what has a gradient and is not known comes from what was not seen
            outputs = double.problem.forward(map_inputs(kind, ones), params, rules=[passing.follow])
        passing.jumps.refuse_outputs(outputs)
        if not passing.knows(outputs):
            raise NotApplicable(
                "paths begin at inputs of real numbers; this network reads whole numbers, such as words"
            )
        logs = (outputs.detach().log() + passing.log_scale(outputs)).reshape(len(outputs), -1) / p
        sums.append(logs.cpu())
    return sums


class PathPass(Paths):
    """A rule for `Problem.forward` that lets sums over paths travel through a network; arguments as of `Paths`."""

    def __init__(self, p: float, pooling: str = "max", biases: bool = True, curves: bool = False) -> None:
        super().__init__(p, pooling, biases, curves)
        self.jumps = Discontinuities(self._known, "no sum over paths")

    def follow(self, op: Operation) -> Any:
        """Stand in for one torch operation."""
        if self.jumps.answers(op):
            return self.jumps.follow(op)  # about constants or the weights themselves
        if op.name == "setitem":
            return self._set_item(op)
        meaning = TABLE.get(op.name)
        if meaning is not None and meaning.creates and not op.in_place:
            return op.run()  # a constant of the same shape
        rule = None if meaning is None else meaning.paths
        rule = same if self.jumps.rectifies(op) else rule
        if meaning is not None and rule is None and self.curves and meaning.slope is not None:
            x = self.one_signal(op)
            return self.start(x * meaning.slope**self.p, self.log_scale(x))
        if rule is None:
            if op.name == "grad":  # sums of paths have no derivative by the input
                self.refuse(op)
            result = op.run()  # a question about its shape, perhaps
            self.jumps.note(op, result)
            if any(tensor.is_floating_point() for tensor in tensors_in(result)):
                self.refuse(op)
            return result
        if "out" in op.kwargs:
            self.refuse(op)
        result, log_scale = rule(self, op)
        self.jumps.note(op, result)
        if op.in_place:
            return self._written(op, op.args[0], result, log_scale)
        for tensor in tensors_in(result):
            if tensor.is_floating_point():
                self.start(tensor, log_scale)
        return result

    def _set_item(self, op: Operation) -> None:
        """Entries overwritten in place, in a tensor of paths or of zeros."""
        target, index, value = op.args
        if not self.knows(target):
            if bool((target != 0).any()):
                self.refuse(op, "in a constant")
            self.start(target, self.log_scale(value) if self.knows(value) else 0.0)
        shift = (self.log_scale(value) if self.knows(value) else 0.0) - self.log_scale(target)
        paths = value if self.knows(value) else self.power(value) * float(self.biases)
        target[index] = paths * math.exp(shift)
        self.jumps.wrote(op, target)

    def _written(self, op: Operation, target: Tensor, result: Tensor, log_scale: float) -> Tensor:
        """An operation in place: the target keeps its scale, since views of it may be in use."""
        if not self.knows(target):
            self.start(target, log_scale)
        target.copy_(result * math.exp(log_scale - self.log_scale(target)))
        self.jumps.wrote(op, target)
        return target
