"""What the data decide of the weights: effective dimension, and the trace of Takeuchi's information criterion.

Small networks are written out. On larger ones random vectors start Lanczos processes, whose quadrature rules enclose
vᵀ(G + αI)⁻¹v from both sides (Golub and Meurant, 2010): Gauss's from below, and Radau's with a node below the spectrum
from above.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.memory import allowed
from flatscope.curvature.operators import CurvatureOperator, GaussNewton, Hessian
from flatscope.curvature.spectrum import krylov_space
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.measures.gradient_noise import noise_squares, sample_gradients
from flatscope.measures.layer_values import trace_of_everything
from flatscope.params import count_scalars, flatten, norm
from flatscope.perturbation import loss_and_gradient
from flatscope.registry import FUNCTION_SYMMETRIES, Value, measure
from flatscope.sampling import Draws, draw_until_precise

BELOW = 1e-3  # the node of Radau's rule, in units of −α: what rounding makes of zero eigenvalues lies above it
OUTSIDE = 1e-8  # share of the gradients' squares that may lie where the matrix is zero

Matrix = Literal["gauss_newton", "hessian"]
Way = Literal["trace", "ratio"]

_decided = partial(measure, paper="flatscope", direction="lower", cost="long", exact=False, falls_with_loss=True)


@_decided(
    symbol=r"N_{\mathrm{eff}}(\alpha) = \sum_i \frac{\lambda_i}{\lambda_i + \alpha}",
    equation="MacKay 1992; Maddox et al. 2020",
    invariant_under={"permutation"},
    typical={"curvature": 400},
    conventions="λ: eigenvalues of the Gauss-Newton matrix of the mean training loss, which are never negative; all "
    "trainable parameters; α is the prior's precision divided by the number of samples, which is what weight decay "
    "adds to the curvature of the mean loss",
)
def effective_dimension(ctx: Context, *, alpha: float = 1e-3, steps: int = 100, draws: int = 32) -> Value:
    """Number of directions in weight space that the data decide rather than the prior.

    Exact up to 1,024 parameters. Beyond, the mean over random vectors; half of what the quadrature leaves open is added
    to its standard error.

    Args:
        alpha: curvature of the prior per sample; directions that the loss curves more than this count.
        steps: products of each random vector; more narrow what the quadrature leaves open.
        draws: the most random vectors; fewer where the mean is precise enough before.
    """
    _check_information_options(alpha, steps, draws)
    if not alpha > 0:
        raise InputError("alpha above 0", repr(alpha))
    operator = GaussNewton(ctx)
    if operator.size <= ctx.effort.limits.inverted_matrix:
        values = ctx.cached(eigensystem, matrix="gauss_newton")[0]
        if float(values[0]) < -max(_rounding_of_zero_eigenvalue(values), BELOW * alpha):
            raise NotApplicable("a loss that is convex in the outputs", f"an eigenvalue of {float(values[0]):.3g}")
        return Value(float((values.clamp_min(0) / (values.clamp_min(0) + alpha)).sum()), exact=True)
    generator = ctx.generator("effective_dimension")

    def counts() -> Iterator[Tensor]:
        for _ in range(draws):
            start = torch.randn(operator.size, generator=generator, dtype=torch.float64)
            yield operator.size * (
                1 - alpha * _quadrature_bounds(operator, start / start.norm(), alpha, steps, generator)
            )

    return _value_from_bounds(draw_until_precise(ctx, counts(), draws))


@_decided(
    symbol=r"\operatorname{Tr}(H^{-1} C),\ C = \tfrac1n \sum_i g_i g_i^\top",
    equation="Takeuchi 1976; Thomas et al. 2020",
    invariant_under=FUNCTION_SYMMETRIES,
    typical={"curvature": 400, "gradient": 1},
    conventions="divided by n it is the criterion's estimate of the generalization gap; H: the Gauss-Newton matrix "
    "(the Fisher information, for cross-entropy), inverted on its range, in which all gradients lie; C: their second "
    "moment, not centred; all trainable parameters; symmetries are those without damping",
)
def takeuchi_trace(
    ctx: Context,
    *,
    way: Way = "trace",
    matrix: Matrix = "gauss_newton",
    centred: bool = False,
    damping: float = 0.0,
    steps: int = 100,
    draws: int = 32,
) -> Value:
    r"""Noise of the gradients measured by the curvature: Takeuchi's number of parameters, whatever the weights' scale.

    Exact up to 1,024 parameters; beyond, damping is needed, and the value is a mean over random sums of gradients. A
    network that can move its outputs on all samples independently has :math:`\sum_i (1/p_{y_i} - 1)` under
    cross-entropy, p the probability of the label: the value then says nothing about the weights.

    Args:
        way: "trace", or "ratio": Tr C / Tr H, the cheap stand-in of Thomas et al., which every rescaling moves.
        matrix: "gauss_newton", or "hessian": refused where it is not positive in the directions of the gradients.
        centred: whether the mean gradient is taken out of C; it is zero at a minimum.
        damping: α in Tr((H + αI)⁻¹ C).
        steps: products of each random sum where it is estimated.
        draws: the most random sums; fewer where the mean is precise enough before.
    """
    _check_information_options(damping, steps, draws)
    if way == "ratio":
        return _trace_of_noise_over_trace_of_curvature(ctx, matrix, centred)
    p = count_scalars(ctx.trainable.values())
    if p <= ctx.effort.limits.inverted_matrix:
        values, noise = ctx.cached(eigensystem, matrix=matrix), ctx.cached(noise_along, matrix=matrix, centred=centred)
        return Value(_trace_of_noise_over_curvature(values[0], noise, damping), exact=True)
    if not damping or matrix == "hessian":
        fix = 'Give damping above 0 (a hundredth of the largest eigenvalue, say), or way="ratio"'
        expected = f"at most {ctx.effort.limits.inverted_matrix:,} parameters without damping, or with the Hessian"
        raise NotApplicable(expected, f"{p:,}", fix=fix)
    operator, generator = GaussNewton(ctx), ctx.generator("takeuchi_trace")

    def squares() -> Iterator[Tensor]:
        for _ in range(draws):
            start = _random_sum_of_gradients(ctx, generator, centred)
            square = float(start.square().sum())  # zero where all signs are equal and the mean is taken out
            yield (
                square * _quadrature_bounds(operator, start, damping, steps, generator) if square else torch.zeros(1, 2)
            )

    return _value_from_bounds(draw_until_precise(ctx, squares(), draws))


def eigensystem(ctx: Context, *, matrix: str) -> tuple[Tensor, Tensor]:
    """Eigenvalues (p,) and eigenvectors in columns of a small network's matrix, computed in double precision."""
    precise = ctx.in_double()  # an inverse of a nearly singular matrix has no digits to lose
    operator = GaussNewton(precise) if matrix == "gauss_newton" else Hessian(precise)
    written_out = operator @ torch.eye(operator.size, dtype=torch.float64, device=operator.device)
    values, vectors = torch.linalg.eigh((written_out + written_out.T).cpu() / 2)
    return values, vectors


def noise_along(ctx: Context, *, matrix: str, centred: bool) -> Tensor:
    """vᵀCv for each eigenvector v of the matrix, (p,)."""
    precise, vectors = ctx.in_double(), ctx.cached(eigensystem, matrix=matrix)[1]
    total = torch.zeros(len(vectors), dtype=torch.float64)
    for gradients in sample_gradients(precise):
        total += (gradients.double().cpu() @ vectors).square().sum(0)
    (total,) = precise.problem.ranks.summed([total])
    mean = flatten(precise.gradient()).cpu() @ vectors if centred else torch.zeros_like(total)
    return (total / ctx.problem.n_train - mean.square()).clamp_min(0)


def _trace_of_noise_over_curvature(values: Tensor, noise: Tensor, damping: float) -> float:
    if not damping:
        positive = values > _rounding_of_zero_eigenvalue(values)
        outside = float(noise[~positive].sum() / noise.sum()) if noise.sum() > 0 else 0.0
        if outside > OUTSIDE:
            got = f"{outside:.1%} of the gradients' squares where it is zero or negative"
            raise NotApplicable("a matrix that is positive where gradients are", got, fix="Give damping above 0")
        return float((noise[positive] / values[positive]).sum())
    if float(values[0]) + damping <= BELOW * damping:
        raise NotApplicable(
            "damping above the size of the negative eigenvalues", f"{damping:g}, {float(values[0]):.3g}"
        )
    return float((noise / (values + damping)).sum())


def _rounding_of_zero_eigenvalue(values: Tensor) -> float:
    """Largest value that rounding may give an eigenvalue that is zero."""
    return 10 * len(values) * torch.finfo(torch.float64).eps * float(values.abs().max())


def _trace_of_noise_over_trace_of_curvature(ctx: Context, matrix: str, centred: bool) -> Value:
    noise = float(ctx.cached(noise_squares).mean()) + (0.0 if centred else norm(ctx.gradient()) ** 2)
    point = ctx
    if ctx.effort.curvature != matrix:
        point = Context(ctx.problem, ctx.params, seed=ctx.seed, effort=replace(ctx.effort, curvature=matrix))
        point.passes = ctx.passes
    trace = trace_of_everything(point, None, 1024)
    if not float(trace.value) > 0:
        raise NotApplicable("a matrix with a positive trace", f"{float(trace.value):.3g}")
    value = noise / float(trace.value)
    return Value(value, stderr=value * float(trace.stderr) / float(trace.value), exact=trace.exact, reason=trace.reason)


def _random_sum_of_gradients(ctx: Context, generator: torch.Generator, centred: bool) -> Tensor:
    """n^(−1/2) Σ ξ_i g_i with random signs ξ, (p,): its second moment is C."""
    n, device = ctx.problem.n_train, ctx.problem.device
    signs = torch.randint(0, 2, (n,), generator=generator).double() * 2 - 1
    signs = (signs - signs.mean() if centred else signs) / math.sqrt(n)
    total, start = torch.zeros(count_scalars(ctx.trainable.values()), dtype=torch.float64, device=device), 0
    for inputs, targets in ctx.batches():
        batch_signs = signs[start : start + len(targets)]
        total += flatten(loss_and_gradient(ctx, (inputs, targets), ctx.trainable, batch_signs)[1]).double()
        start += len(targets)
    for kind in ("forward", "backward"):
        ctx.charge_passes(kind, n)
    return total


def _quadrature_bounds(
    operator: CurvatureOperator, start: Tensor, alpha: float, steps: int, generator: torch.Generator
) -> Tensor:
    """Upper and lower bound of vᵀ(G + αI)⁻¹v for v in the direction of `start`, of length one: (1, 2)."""
    room = allowed(operator.ctx.effort.limits.krylov_memory, operator.device)
    most = max(2, min(steps, room // (8 * operator.size)))
    space = krylov_space(operator, generator, most, start.to(operator.device, torch.float64))
    inside = space.projected
    lowest = float(torch.linalg.eigvalsh(inside)[0])
    if lowest < -BELOW * alpha:
        raise NotApplicable("a loss that is convex in the outputs", f"a curvature of {lowest:.3g}")
    low = _first_entry_of_inverse(inside, alpha)
    if space.closed:
        return torch.tensor([[low, low]], dtype=torch.float64)
    k, node = len(inside), -BELOW * alpha
    last = torch.zeros(k, dtype=torch.float64)
    last[-1] = space.coupling**2
    extended = torch.zeros(k + 1, k + 1, dtype=torch.float64)
    extended[:k, :k] = inside
    extended[k, k - 1] = extended[k - 1, k] = space.coupling
    shifted = inside - 2 * node * torch.eye(k, dtype=torch.float64)  # clear of what rounding makes of its lowest
    extended[k, k] = 2 * node + torch.linalg.solve(shifted, last)[-1]
    return torch.tensor([[_first_entry_of_inverse(extended, alpha), low]], dtype=torch.float64)


def _first_entry_of_inverse(matrix: Tensor, alpha: float) -> float:
    """First entry of (T + αI)⁻¹."""
    return float(torch.linalg.inv(matrix + alpha * torch.eye(len(matrix), dtype=torch.float64))[0, 0])


def _value_from_bounds(drawn: Draws) -> Value:
    """The middle of two bounds' means; what they leave open counts as error."""
    low, high = sorted(drawn.means)
    stderr = math.hypot(max(drawn.stderrs), (high - low) / 2)
    return Value((low + high) / 2, stderr=stderr, reason=f"{drawn.remark()}; quadrature from {low:.4g} to {high:.4g}")


def _check_information_options(alpha: float, steps: int, draws: int) -> None:
    refuse_unless_whole(steps, "steps", least=2)
    refuse_unless_whole(draws, "draws", least=2)
    if not 0 <= alpha < math.inf:
        raise InputError("a number from 0 up", repr(alpha))
