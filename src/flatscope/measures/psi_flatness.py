"""Positively scale-invariant flatness: the loss as a function of basis-path values, which no rescaling changes.

Every number depends on the basis, that is on the rule by which the skeleton is chosen. The default, `max_product`,
follows the strongest path through every unit and is therefore also unmoved by a permutation of units.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice

import torch
from torch import Tensor

from flatscope.ascents import within_ball
from flatscope.context import Context
from flatscope.curvature.estimators import TRACE, Asked, DiagonalQuantities, DiagonalSums, diagonal_sums
from flatscope.curvature.operators import BeyondGaussNewton, sample_groups
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import sweep_shape
from flatscope.curvature.symmetric_operator import SymmetricOperator
from flatscope.errors import InputError, NotApplicable, NumericalWarning, refuse_unknown
from flatscope.measures.path_curvature import (
    PathHessian,
    ScalingEdges,
    covered_diagonals,
    diagonals_by_path_value,
    is_scaling_value,
    path_sweep,
)
from flatscope.params import Params
from flatscope.perturbation import (
    joined_stacks,
    measure_of_moves,
    mirrored_rises,
    perturbed_gradients,
    refuse_unless_pairs,
)
from flatscope.reading import graph_of_problem
from flatscope.registry import PATH_SYMMETRIES, Value, measure
from flatscope.sampling import draw_until_precise, refuse_out_of_time, time_limit
from flatscope.searching import bracketed_rise, highest_loss_by_ascents, number_of_further_starts
from flatscope.symmetries.basis_paths import PathCoordinates
from flatscope.symmetries.path_certificate import ActivationCertificate

LAWS = ("ball", "sphere", "gaussian")
DRAWS = 2  # random columns of a pass
POLE = "guaranteed finite only below the smallest |P(u)S(u)|, where a weight becomes infinite"

_of_paths = partial(measure, paper="yi2019", direction="lower", invariant_under=PATH_SYMMETRIES, on_folded=True)


@_of_paths(
    symbol=r"\operatorname{tr} \nabla^2_v \hat L(v)",
    equation="Definition 4.1",
    cost="sweep",
    typical={"forward": 1, "column": 1, "gradient": 1, "curvature": 8},
    caption="curvature in path space",
    falls_with_loss=True,
    conventions="all m - H basis-path values, biases included; depends on the rule; the gradient term of the second "
    "derivative is included, without which it is right at an exact minimum only",
)
def psi_trace(
    ctx: Context, *, rule: str = "max_product", precision: float | None = None, most_products: int = 256
) -> Value:
    r"""Trace of the Hessian of the training loss with respect to the basis-path values.

    A value whose own edge is no unit's incoming skeleton edge moves that weight alone: its second derivative is
    :math:`H_{ee} / (S P)^2`, from the exact sweep. The others, one per unit at most, also rescale all outgoing weights
    of a unit: their Gauss-Newton part comes from the same sweep, what remains from Hessian products. On a chain of
    layers nearly all units of a layer share one; on other networks up to 64 units take one each, and more are
    estimated. So are networks that are not piecewise linear, beyond `most_products` values.

    Args:
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
        precision: relative standard error to reach where it is estimated; that of the call by default, 0 for exact.
        most_products: the most Hessian products to take.
    """
    trace = _path_trace(ctx, rule, ctx.effort.precision if precision is None else precision, most_products)
    matrix = "" if ctx.effort.curvature == "hessian" else "of the Hessian: no Gauss-Newton form"
    return replace(trace, reason="; ".join(filter(None, (matrix, trace.reason))))


def _path_trace(ctx: Context, rule: str, wanted: float, most_products: int) -> Value:
    paths = ctx.cached(path_coordinates, rule=rule)
    edges = ScalingEdges(paths)
    if find_not_covered(ctx, "hessian") or not edges.simple:
        return _trace_by_products(ctx, paths, wanted, most_products)
    known, error, draws = _gauss_newton_path_trace(ctx, edges, wanted)
    n_edges, parts = len(edges), [f"Gauss-Newton part sampled, {draws} draws"] if draws else []
    if not n_edges:
        return Value(known, error, exact=not draws, reason=_path_space_remark(paths, "hessian_trace", *parts))
    known += float((edges.bending(ctx.gradient()) * edges.gains.square()).sum())
    groups = edges.groups() if paths.graph.chain else list(torch.arange(n_edges)[:, None])
    one_by_one = wanted == 0 or len(groups) <= (most_products if paths.graph.chain else ctx.effort.limits.few_units)
    beyond = BeyondGaussNewton(ctx, edges.names, 1 if one_by_one else sample_groups(ctx))
    matrix = edges.matrix(beyond)
    if one_by_one:
        width = 1 if ctx.problem.device.type == "cpu" else ctx.effort.limits.gpu_products
        rest = math.fsum(
            _sum_of_quadratic_forms(matrix, groups[start : start + width]) for start in range(0, len(groups), width)
        )
        exact = not draws
    else:
        trace, rest, spread = _sampled_trace(ctx, matrix, wanted, most_products, (known, error), few=0)
        error, exact = math.hypot(error, spread), trace.exact and not draws
        parts.append(f"a part of {n_edges} of {paths.count} values by {_end_of_draws_in_words(trace, wanted)}")
    return Value(known + rest, error, exact=exact, reason=_path_space_remark(paths, "hessian_trace", *parts))


def _gauss_newton_path_trace(ctx: Context, edges: ScalingEdges, wanted: float) -> tuple[float, float, int]:
    """Gauss-Newton part of the trace, its standard error, and the number of draws; 0 where all columns were taken."""

    def part(draws: range | None) -> float:
        known, along = path_sweep(ctx, edges, draws)
        return known + float((along * edges.gains.square()).sum())

    shape = sweep_shape(ctx)
    most = shape.columns // (2 * DRAWS * shape.per_draw)  # passes; that many take half of the time of all columns
    if wanted > 0 and most >= ctx.effort.limits.first_look:
        blocks = (torch.tensor([part(range(DRAWS * i, DRAWS * (i + 1)))]) for i in range(most))
        drawn = draw_until_precise(ctx, blocks, most, wanted)
        if drawn.late or drawn.precise(wanted):
            return drawn.means[0], drawn.stderrs[0], DRAWS * len(drawn.samples)
    return part(None), 0.0, 0


def _sum_of_quadratic_forms(matrix: SymmetricOperator, groups: Sequence[Tensor]) -> float:
    """Σ zᵀAz over groups, z one at the entries of the group."""
    z = torch.zeros(matrix.size, len(groups), dtype=torch.float64, device=matrix.device)
    for column, group in zip(z.T, groups, strict=True):
        column[group.to(z.device)] = 1
    return float((z * (matrix @ z)).sum())


def _sampled_trace(
    ctx: Context,
    matrix: SymmetricOperator,
    precision: float,
    most_products: int,
    known: tuple[float, float],
    few: int | None = None,
) -> tuple[DiagonalSums, float, float]:
    """Estimate a trace that is added to a sum with an error of its own: the estimate, its value, its error."""
    asked = Asked(precision, most_products, {TRACE: known}, time_limit(ctx), few)
    sums = diagonal_sums(DiagonalQuantities(matrix), Signs(ctx.seed, "psi_trace"), asked, ctx.effort.limits)
    value, error = (float(part.get(TRACE, 0.0)) for part in (sums.values, sums.stderrs))
    return sums, value, error


def _end_of_draws_in_words(sums: DiagonalSums, wanted: float, why: str = "") -> str:
    """Words on how the draws ended."""
    ways = "products, one for each" if sums.exact else f"{sums.products} products"
    return ways + why + (f"; asked for {wanted:.2g} relative ({sums.missed})" if sums.missed else "")


def _trace_by_products(ctx: Context, paths: PathCoordinates, precision: float, most_products: int) -> Value:
    """The trace where some blocks of the Hessian are not Gauss-Newton."""
    not_covered = find_not_covered(ctx, "hessian")
    together = is_scaling_value(paths, not_covered)
    known = float(paths.join(diagonals_by_path_value(paths, covered_diagonals(ctx, not_covered)))[~together].sum())
    chosen = together.nonzero().flatten()
    matrix = PathHessian(ctx, paths, chosen)
    most = len(chosen) if precision == 0 else most_products
    trace, rest, error = _sampled_trace(ctx, matrix, precision, most, (known, 0.0))
    curved = "".join(f": {why}" for why in list(not_covered.values())[:1])
    reason = f"{len(chosen)} of {paths.count} values by {_end_of_draws_in_words(trace, precision, curved)}"
    return Value(known + rest, error, exact=trace.exact, reason=_path_space_remark(paths, "hessian_trace", reason))


@measure_of_moves(
    symbol=r"\max_{\|\delta\|_2 \le \epsilon} \frac{\hat L(v+\delta) - \hat L(v)}{1 + \hat L(v)}",
    paper="yi2019",
    equation="Definition 4.1, eq (7)",
    invariant_under=PATH_SYMMETRIES,
    typical={"forward": 200, "backward": 200},
    conventions="all basis-path values, biases included; full training set, in float64; a lower bound of the maximum; "
    "the radius is relative to the smallest |P(u)S(u)|, where the inverse has its nearest pole",
    search="lower",
    bracketed=True,
)
def psi_epsilon(
    ctx: Context,
    *,
    rule: str = "max_product",
    epsilon: float = 0.1,
    relative: bool = True,
    restarts: int = 3,
    steps: int = 30,
) -> Value:
    """Largest relative rise of the training loss in a ball around the path values: a lower bound by ascent.

    Projected ascent along the normalised gradient with respect to the values, with shrinking steps. One ascent
    starts in the direction of the gradient, the others at random.

    Args:
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
        epsilon: radius of the ball; below 1 if relative.
        relative: whether the radius is epsilon times the smallest |P(u)S(u)| (times 1 where no unit has a scale).
        restarts: number of ascents that are taken to the end, the best of three times as many and one that are begun;
            high is above the value by as much as their ends are apart, and 5 % at the least. 1: along the gradient.
        steps: steps of each ascent.
    """
    ctx = ctx.in_double()  # balls are so small that in float32 a rise of the loss drowns in its rounding
    paths = ctx.cached(path_coordinates, rule=rule)
    radius = _ball_radius(paths, epsilon, relative)
    if restarts < 1 or steps < 1:
        raise InputError("at least one restart and one step", f"{restarts}, {steps}", where="psi_epsilon")
    ball, evaluate = within_ball(radius), partial(_losses_and_gradients, ctx, paths)
    here = {name: torch.zeros_like(value)[None] for name, value in paths.scaled_reference().items()}
    starts = [evaluate(here)[1]]
    for u in islice(_normal_draws_by_value_size(ctx, paths, "psi_epsilon"), number_of_further_starts(restarts)):
        starts.append({name: value[None] for name, value in paths.split(u).items()})
    best = highest_loss_by_ascents(ctx, evaluate, ball.climb(joined_stacks(starts)), ball, restarts, steps)
    how = f"best of {restarts} ascents, {steps} steps each; radius {radius:.3g}"
    rise = bracketed_rise(ctx, best, how, normalised=True)
    pole = f"; {POLE}" if radius >= paths.nearest_pole and paths.n_classes else ""
    return replace(rise, reason=_path_space_remark(paths, "epsilon_flatness at this radius", rise.reason + pole))


@measure_of_moves(
    symbol=r"|\mathbb{E}_u \hat L(v+u) - \hat L(v)|",
    paper="yi2019",
    equation="Definition 4.1",
    invariant_under=PATH_SYMMETRIES,
    typical={"forward": 160},
    conventions="all basis-path values, biases included; u uniform in a ball, since with a Gaussian u and a loss that "
    "is not bounded the expectation is infinite; mirrored draws; full training set, in float64",
)
def psi_expected(
    ctx: Context,
    *,
    rule: str = "max_product",
    epsilon: float = 0.1,
    relative: bool = True,
    draws: int = 100,
    law: str = "ball",
) -> Value:
    """Mean change of the training loss when the path values are perturbed at random.

    The loss grows like 1/distance near the poles of the inverse, where P(u) S(u) = 0, and a Gaussian has mass there:
    its expectation is infinite as soon as one sample is misclassified in the direction of growth, and a Monte-Carlo
    mean merely looks finite. So u is bounded by default. Draws are tied to the order of the values by size, and come
    with their mirror images: neither rescaling nor permuting units changes the number for a given seed.

    Args:
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
        epsilon: radius of the ball; below 1 if relative.
        relative: whether the radius is epsilon times the smallest |P(u)S(u)| (times 1 where no unit has a scale).
        draws: the most perturbed networks, mirror images included; even.
        law: "ball": uniform in the ball; "sphere": uniform on its surface; "gaussian": independent normals whose
            root mean square length is the radius (with a warning).
    """
    ctx = ctx.in_double()
    paths = ctx.cached(path_coordinates, rule=rule)
    radius = _ball_radius(paths, epsilon, relative)
    refuse_unknown(law, LAWS, "law of psi_expected")
    refuse_unless_pairs(draws)
    reason = f"radius {radius:.3g}"
    if law == "gaussian":
        reason += "; with a Gaussian the true expectation is infinite unless the loss is bounded"
        warnings.warn(f"psi_expected: {reason}", NumericalWarning, stacklevel=2)
    drawn = _perturbations_by_law(ctx, paths, radius, draws // 2, law)
    shifts = (paths.shift(mirrored) for u in drawn for mirrored in (u, -u))
    rises = mirrored_rises(ctx, shifts, draws)
    reason = _path_space_remark(paths, "expected_flatness at this radius and law", f"{rises.remark(each=2)}; {reason}")
    return Value(abs(rises.means[0]), stderr=rises.stderrs[0], reason=reason)


@_of_paths(
    symbol=r"\frac{\sup_i |v_i|}{\inf_i |v_i|}",
    equation="Theorem 5.1",
    passes={},
    typical={"gradient": 1},  # which shows whether the paths are all that leads to the outputs
    conventions="all basis-path values, biases included; infinite if one of them is zero; where every unit has a free "
    "scale, scaling all outputs leaves it alone: in front of a wall values stay as they are",
)
def psi_balance(ctx: Context, *, rule: str = "max_product") -> Value:
    """Ratio of the largest to the smallest absolute basis-path value.

    Args:
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
    """
    paths = ctx.cached(path_coordinates, rule=rule)
    refuse_out_of_time(ctx)  # of millions of weights each part takes a second
    log, _ = paths.log_values()
    spread = float(log.max() - log.min())
    ratio = math.inf if spread > math.log(torch.finfo(torch.float64).max) else math.exp(spread)
    return Value(ratio, reason=_path_space_remark(paths, "the same ratio of the weights"))


@_of_paths(
    symbol=r"\epsilon^* : \|\delta\|_2 \le \epsilon^* \Rightarrow \text{no ReLU changes state}",
    equation="(26)-(32), replaced",
    direction="higher",
    cost="sweep",
    typical={"forward": 25},
    conventions="certified, not tight; a lower bound of the true radius, computed in float64; states of ReLUs on the "
    "training samples, the choices of max-pooling may change; equation (32) as printed is not safe",
)
def psi_activation_radius(ctx: Context, *, rule: str = "max_product") -> Value:
    """Perturbations of the path values up to this length change the state of no ReLU on any training sample.

    Args:
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
    """
    return Value(ctx.cached(certified_radius, rule=rule), reason="certified, not tight")


def certified_radius(ctx: Context, rule: str) -> float:
    """The largest radius that the certificate allows: the smallest over batches."""
    paths = ctx.cached(path_coordinates, rule=rule)
    certificate = ActivationCertificate(ctx.problem, paths)
    radius = certificate.limit * (1 - 1e-12)
    for inputs, targets in ctx.batches():
        radius, runs = certificate.radius(inputs, radius)
        ctx.charge_passes("forward", 4 * runs * len(targets))  # each run applies every layer four times
        if not radius:
            return radius
    certificate.refuse_if_broken(paths, ctx.problem.example(32), radius, ctx.generator("attack"))
    return radius


def path_coordinates(ctx: Context, rule: str) -> PathCoordinates:
    """The basis paths of the trainable weights at this point; units beside a frozen weight cannot be rescaled."""
    frozen = [name for name in ctx.params if name not in ctx.problem.trainable]
    graph = graph_of_problem(ctx.problem, frozen=frozen)
    if not graph.layers:
        fixed = "; here they read constants, such as the features of a fixed graph" if ctx.network.layers else ""
        raise NotApplicable(f"needs layers that read the samples{fixed}")
    refuse_out_of_time(ctx)
    paths = PathCoordinates(graph, ctx.params, rule, held=frozen)
    refuse_out_of_time(ctx)
    followed = [block.name for block in paths.blocks]
    with ctx.charged_to_nobody():
        lost = [name for name, slope in ctx.gradient().items() if name not in followed and bool(slope.any())]
    if lost:
        raise NotApplicable("parameters whose way to the outputs can be followed", lost[0])
    return paths


def _path_space_remark(paths: PathCoordinates, counterpart: str, *reasons: str) -> str:
    """The reasons, and where units have no free scale how many; where none has, path space is weight space."""
    return "; ".join(filter(None, (*reasons, paths.graph.stopped, "" if paths.n_classes else f"equals {counterpart}")))


def _ball_radius(paths: PathCoordinates, epsilon: float, relative: bool) -> float:
    if not epsilon > 0 or (relative and epsilon >= 1):
        raise InputError("a positive radius, below 1 if relative", str(epsilon), where="epsilon", fix=POLE)
    return epsilon * paths.nearest_pole if relative else epsilon


def _losses_and_gradients(ctx: Context, paths: PathCoordinates, stacked: Params) -> tuple[Tensor, Params]:
    """Loss (k,) and its gradient with respect to the values, at perturbations of the values stacked by parameter."""
    reference, gains = paths.scaled_reference(), {name: paths.gain(name) for name in stacked}
    scaled = {name: (reference[name] + gains[name] * value).requires_grad_() for name, value in stacked.items()}

    def weights(one: Params) -> Params:
        params = paths.from_scaled(one)
        return {name: params[name] for name in one}

    with torch.enable_grad():
        points = torch.vmap(weights)(scaled)
    losses, gradients = perturbed_gradients(ctx, {n: (v - paths.params[n]).detach() for n, v in points.items()})
    cotangents = [gradients[name].to(value) for name, value in points.items()]
    pulled = torch.autograd.grad(list(points.values()), list(scaled.values()), cotangents)
    return losses, {name: gains[name] * part for name, part in zip(scaled, pulled, strict=True)}


def _normal_draws_by_value_size(ctx: Context, paths: PathCoordinates, stream: str) -> Iterator[Tensor]:
    """Normal vectors (count,) whose entries go to the values in order of size, so that unit numbers do not matter."""
    order, generator = paths.by_size(), ctx.generator(stream)
    while True:
        drawn = torch.randn(paths.count, generator=generator, dtype=torch.float64).to(order.device)
        yield torch.empty_like(drawn).index_copy_(0, order, drawn)


def _perturbations_by_law(
    ctx: Context, paths: PathCoordinates, radius: float, number: int, law: str
) -> Iterator[Tensor]:
    """Perturbations (count,) of the values."""
    lengths = ctx.generator("lengths of psi_expected")
    for u in islice(_normal_draws_by_value_size(ctx, paths, "psi_expected"), number):
        if law == "gaussian":
            yield u * radius / math.sqrt(paths.count)
        else:
            share = float(torch.rand((), generator=lengths, dtype=torch.float64)) ** (1 / paths.count)
            yield u / u.norm() * radius * (share if law == "ball" else 1.0)
