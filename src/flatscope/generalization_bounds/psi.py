"""Bounds in the values of basis paths: Theorem 5.1 of Yi et al. (2019), as printed and as it can be proved, and (8).

Theorem 5.1 bounds how far the training loss can rise within a ball of path values; it is no generalization gap.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.route import find_not_covered
from flatscope.errors import InputError, NotApplicable
from flatscope.generalization_bounds.pac_bayes import loss_constant
from flatscope.measures.psi_flatness import certified_radius, path_coordinates
from flatscope.network.interception import Operation
from flatscope.registry import PATH_SYMMETRIES, Value, bound
from flatscope.samples import as_rows
from flatscope.sampling import draw_until_precise
from flatscope.symmetries.basis_paths import PathCoordinates
from flatscope.symmetries.path_skeleton import ZeroSkeletonError
from flatscope.symmetries.scaling import rescaled_params

BALANCED = 2 - math.sqrt(3)  # |v + δ| ≥ √((v² + δ²)/2), used in (37), holds only for δ/v ≥ -(2 - √3)


_of_ball = partial(bound, paper="yi2019", invariant_under=PATH_SYMMETRIES, cost="sweep", on_folded=True)


@dataclass(frozen=True)
class PathSpread:
    """Logarithms of the largest and the smallest absolute path value, which stand in Theorem 5.1."""

    log_sup: float
    log_inf: float

    @property
    def inf(self) -> float:
        """The smallest absolute value."""
        return math.exp(self.log_inf)


def psi_of_path_values(spread: PathSpread, epsilon: float, depth: int) -> float:
    """ψ(v) = sup over s = 1 … L of ε^(s-1) sup|v|^(2L+1-s) / inf|v|^(2L); infinite if a value is zero."""
    if spread.log_inf == -math.inf:
        return math.inf
    terms = (
        (s - 1) * math.log(epsilon) + (2 * depth + 1 - s) * spread.log_sup - 2 * depth * spread.log_inf
        for s in range(1, depth + 1)
    )
    log = max(terms)
    return math.exp(log) if log <= math.log(sys.float_info.max) else math.inf


def theorem_5_1_bound(
    spread: PathSpread, epsilon: float, depth: int, widths: tuple[int, int, int], input_norm: float, lipschitz: float
) -> float:
    """The right-hand side of (11), letter by letter; `widths` are d_0, d_1 and d_L."""
    d0, d1, dl = widths
    inner = 1 + 2 ** ((3 * depth + 4) / 2) * (depth - 1) * d1 * dl * psi_of_path_values(spread, epsilon, depth)
    return 2 * input_norm * lipschitz * d0 * float(d1) ** (depth - 1) * dl * inner * epsilon


@dataclass(frozen=True)
class AllPaths:
    """All paths of a chain of dense layers, biases included, without writing them out."""

    count: float  # number of paths
    groups: float  # choices of hidden units, or of a bias and the hidden units behind it, per output
    norm: float  # square root of the sum of squares of the path values
    largest: float  # largest absolute path value


def all_paths_of_chain(paths: PathCoordinates) -> AllPaths:
    """Counts and norms by one pass each through the layers."""
    device = next(iter(paths.params.values())).device
    first = len(paths.graph.layers[0].inputs)
    squares, largest, number = (torch.ones(first, dtype=torch.float64, device=device) for _ in range(3))
    groups = 1.0
    for index, layer in enumerate(paths.graph.layers):
        weight = paths.params[layer.weight].double().abs()
        squares, number = weight.square() @ squares, number.sum().expand(len(weight)).clone()
        largest = (weight * largest).amax(1)
        for name in layer.biases:
            bias = paths.params[name].double().abs()
            squares, number, largest = squares + bias.square(), number + 1, torch.maximum(largest, bias)
        if index < len(paths.graph.layers) - 1:
            groups = (groups + len(layer.biases)) * len(weight)
        else:
            groups += len(layer.biases)
    return AllPaths(float(number.sum()), groups, math.sqrt(float(squares.sum())), float(largest.max()))


def corrected_theorem_5_1_bound(
    spread: PathSpread, everything: AllPaths, n_basis: int, epsilon: float, depth: int, factor: float
) -> float:
    """C_L C √N min(q ‖v_all‖, ε + √(non-basis paths) q max|v_p|), q = (1+r)^L / (1-r)^(L-1) - 1, r = ε / inf|v|.

    By Lemma 5.1 a path's value is a product of L basis values over L - 1, each of which changes by a factor in
    [1 - r, 1 + r]. The Cauchy-Schwarz inequality over the N choices of hidden units gives the rest. `depth` counts
    weight layers, `factor` is C_L C.
    """
    log_r = math.log(epsilon) - spread.log_inf
    if log_r >= 0:
        return math.inf
    r = math.exp(log_r)
    q = math.expm1(depth * math.log1p(r) - (depth - 1) * math.log1p(-r))
    outside = math.sqrt(max(0.0, everything.count - n_basis))
    reach = min(q * everything.norm, epsilon + outside * q * everything.largest)
    return factor * math.sqrt(everything.groups) * reach


@_of_ball(
    symbol=r"2 C C_L d_0 d_1^{L-1} d_L (1 + 2^{(3L+4)/2} (L-1) d_1 d_L \psi(v)) \epsilon",
    equation="Theorem 5.1, eq (11), as printed",
    assumptions=(
        "bounds the rise of the training loss within the ball, not a generalization gap",
        "NOT PROVED as printed: the number of non-basis paths and a square root in its proof are wrong",
        "fully connected ReLU network; inputs of every layer bounded by C with suffixes ±1",
        "no ReLU changes state; epsilon at most 0.2679 inf|v|",
    ),
)
def psi_theorem_5_1(
    ctx: Context,
    *,
    delta: float,
    rule: str = "max_product",
    epsilon: float = 0.1,
    relative: bool = True,
    depth_convention: Literal["weight_layers", "hidden_layers"] = "weight_layers",
    lipschitz: float = 0.0,
) -> Value:
    """Rise of the training loss in a ball of path values by Theorem 5.1 as printed; not proved.

    Args:
        delta: not used: the statement is not a probabilistic one.
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
        epsilon: radius of the ball.
        relative: whether the radius is epsilon times the smallest absolute path value.
        depth_convention: what L counts: "weight_layers", as in its n_p, or "hidden_layers", as in its wording.
        lipschitz: C_L of the loss in the outputs; 0 takes √2 for cross-entropy and refuses others.
    """
    del delta

    def rise(paths: PathCoordinates, spread: PathSpread, radius: float) -> float:
        layers = paths.graph.layers
        depth = len(layers) - (depth_convention == "hidden_layers")
        widths = (len(layers[0].inputs), max(len(layer.outputs) for layer in layers[:-1]), len(layers[-1].outputs))
        norms = _input_norms(ctx, paths)
        return theorem_5_1_bound(spread, radius, depth, widths, max(norms), loss_constant(ctx, lipschitz))

    return _bound_on_rise_in_ball(ctx, rule, epsilon, relative, rise)


@_of_ball(
    symbol=r"C_L C \sqrt{N} \min(q \|v_{\mathrm{all}}\|_2,\ \epsilon + \sqrt{n_p - m + H}\, q \max_p |v_p|)",
    equation="Theorem 5.1, corrected",
    assumptions=(
        "bounds the rise of the training loss within the ball, not a generalization gap",
        "fully connected ReLU network; epsilon below the smallest path value",
        "no ReLU changes state: certified where the remark says so",
    ),
)
def psi_theorem_5_1_corrected(
    ctx: Context,
    *,
    delta: float,
    rule: str = "max_product",
    epsilon: float = 0.1,
    relative: bool = True,
    lipschitz: float = 0.0,
) -> Value:
    """Rise of the training loss in a ball of path values, by a proof that holds while no ReLU changes state.

    Args:
        delta: not used: the statement is not a probabilistic one.
        rule: how the skeleton is chosen: "max_product", "cyclic" or "diagonal".
        epsilon: radius of the ball.
        relative: whether the radius is epsilon times the smallest absolute path value.
        lipschitz: C_L of the loss in the outputs; 0 takes √2 for cross-entropy and refuses others.
    """
    del delta

    def rise(paths: PathCoordinates, spread: PathSpread, radius: float) -> float:
        layers, norm = paths.graph.layers, _input_norms(ctx, paths)[0]
        factor = loss_constant(ctx, lipschitz) * (max(norm, 1.0) if any(layer.biases for layer in layers) else norm)
        return corrected_theorem_5_1_bound(spread, all_paths_of_chain(paths), paths.count, radius, len(layers), factor)

    return _bound_on_rise_in_ball(ctx, rule, epsilon, relative, rise)


def pac_bayes_gap(expected_change: float, divergence: float, n: int, delta: float) -> float:
    """The right-hand side of (8): |E l(v+u) - l(v)| + 4 √((KL + log(2n/δ)) / n)."""
    if n < 1 or not 0 < delta < 1:
        raise InputError("at least one sample and 0 < delta < 1", f"{n}, {delta}", where="pac_bayes_gap")
    return expected_change + 4 * math.sqrt((divergence + math.log(2 * n / delta)) / n)


@bound(
    symbol=r"|\mathbb{E}_u \hat l(v+u) - \hat l(v)| + 4\sqrt{\tfrac1n(\mathrm{KL} + \log\tfrac{2n}{\delta})}",
    paper="yi2019",
    equation="(8)",
    invariant_under=PATH_SYMMETRIES - {"permutation"},  # a rule by number is of the units in their order
    assumptions=(
        "loss in [0, 1]: the 0/1 error, or the loss clipped at 1",
        "prior, sigma and skeleton chosen before seeing the data: rule cyclic or diagonal",
        "samples drawn independently",
    ),
    cost="long",
    typical={"forward": 33},
    exact=False,
    on_folded=True,
)
def pac_bayes_psi(
    ctx: Context,
    *,
    delta: float,
    rule: str = "cyclic",
    sigma: float = 0.05,
    prior_mean: Literal["zero", "initial"] = "zero",
    sign_penalty: bool = True,
    loss: Literal["error", "clipped"] = "error",
    draws: int = 100,
) -> Value:
    r"""Gap between the expected and the training loss of the network with perturbed path values.

    For u ~ N(0, σ²I) and the prior N(v₀, σ²I) the divergence is ‖v − v₀‖² / 2σ². A function is determined by its path
    values and the signs of the frozen weights; where those are read off the trained network, a union bound over all
    patterns adds H log 2. A skeleton that is chosen by the trained weights (`max_product`) is not allowed by the
    theorem: hence `cyclic`.

    The expectation is a mean over draws on the full training set, in float64: as many as make the bound precise. Its
    standard error is given; `high` adds what makes up for the draws with a further chance of error of delta / 100.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        rule: how the skeleton is chosen: "cyclic", "diagonal"; with "max_product" a remark says that it is not valid.
        sigma: standard deviation of every perturbed value.
        prior_mean: v₀: "zero", or "initial" for the values at the weights before training.
        sign_penalty: whether to add H log 2 for the signs.
        loss: "error" (0/1), or "clipped": the loss, at most 1.
        draws: the most perturbed networks.
    """
    if not sigma > 0 or draws < 2:
        raise InputError("a positive sigma and at least 2 draws", f"{sigma}, {draws}", where="pac_bayes_psi")
    initial, ctx = ctx.problem.initial, ctx.in_double()
    if frozen := [name for name in ctx.params if name not in ctx.problem.trainable]:
        raise NotApplicable("trainable weights only, since a prior must not know frozen ones", frozen[0])
    paths = ctx.cached(path_coordinates, rule=rule)
    log, sign = paths.log_values()
    distance = sign * log.exp()
    if prior_mean == "initial":
        if initial is None or set(initial) != set(ctx.params):
            way = "pass initial= (on the command line --initial)"
            raise NotApplicable(f"needs the weights before training, and no BatchNorm; {way}")
        distance = distance - paths.values_of({name: value.double() for name, value in initial.items()})
    divergence = float(distance.square().sum()) / (2 * sigma**2) + sign_penalty * paths.n_classes * math.log(2)
    at_rest = pac_bayes_gap(0.0, divergence, ctx.problem.n_train, delta)
    if math.isinf(at_rest):
        return Value(math.inf, exact=True, reason="path values are more than a float holds: vacuous")
    here = _bounded_loss(ctx, loss)

    def changed() -> Iterator[Tensor]:
        generator = ctx.generator("pac_bayes_psi")
        for _ in range(draws):
            u = sigma * torch.randn(paths.count, generator=generator, dtype=torch.float64).to(log.device)
            point = ctx.at({name: ctx.params[name] + change for name, change in paths.shift(u).items()})
            point.passes = ctx.passes
            yield torch.tensor([at_rest + _bounded_loss(point, loss) - here], dtype=torch.float64)

    drawn = draw_until_precise(ctx, changed(), draws)  # precise is what the whole bound is, not the change alone
    value = at_rest + abs(drawn.means[0] - at_rest)
    # Hoeffding on both sides, at every number of draws after which it might have stopped.
    by_draws = math.sqrt(math.log(200 * draws / delta) / (2 * len(drawn.samples)))
    reason = f"KL {divergence:.4g}, of which signs {sign_penalty * paths.n_classes * math.log(2):.4g}; {drawn.remark()}"
    if rule == "max_product":
        reason += "; NOT VALID: the skeleton was chosen by the trained weights"
    if not sign_penalty:
        reason += "; valid only if the signs of the frozen weights were fixed before training"
    return Value(value, stderr=drawn.stderrs[0], high=value + by_draws, exact=False, reason=reason)


def _bounded_loss(ctx: Context, loss: str) -> float:
    """Training loss in [0, 1]; a network with infinite or undefined outputs is wrong everywhere."""
    scores = ctx.scores()
    if loss == "clipped":
        return float(scores.losses.nan_to_num(nan=1.0).clamp(0, 1).mean())
    if scores.margins is None:
        raise NotApplicable('needs class labels for the 0/1 error; pass loss="clipped"')
    return float((~(scores.margins > 0)).double().mean())


def _bound_on_rise_in_ball(
    ctx: Context,
    rule: str,
    epsilon: float,
    relative: bool,
    rise: Callable[[PathCoordinates, PathSpread, float], float],
) -> Value:
    """A form of Theorem 5.1 on a network as it asks for; infinite where a path value is zero."""
    layers = ctx.network
    if not layers.chain or any(layer.kind != "dense" or len(layer.input_shape) != 1 for layer in layers):
        raise NotApplicable("needs a fully connected network, layer behind layer")
    if len(tuple(layers)) < 2 or find_not_covered(ctx, "hessian"):
        raise NotApplicable("needs at least one hidden layer, and ReLUs only")
    vacuous = Value(math.inf, exact=True, reason="a path value is zero: vacuous")
    try:
        paths = ctx.cached(path_coordinates, rule=rule)
    except ZeroSkeletonError:
        return vacuous
    if paths.n_classes != paths.graph.n_units:
        raise NotApplicable("hidden units that can all be rescaled", "; ".join(paths.graph.walls))
    log, _ = paths.log_values()
    spread = PathSpread(float(log.max()), float(log.min()))
    if spread.log_inf == -math.inf:
        return vacuous
    radius, certified = epsilon * spread.inf if relative else epsilon, ctx.cached(certified_radius, rule=rule)
    value = rise(paths, spread, radius)
    states = "certified" if radius <= certified else f"not certified (only to {certified:.3g})"
    balanced = "holds" if radius <= BALANCED * spread.inf else "does not hold"
    reason = f"epsilon {radius:.3g}; states unchanged: {states}; epsilon ≤ 0.2679 inf|v| {balanced}"
    return Value(value, exact=True, reason=reason)


def _input_norms(ctx: Context, paths: PathCoordinates) -> list[float]:
    """Largest norm of the input of each layer over the training samples, suffixes scaled to ±1.

    Refused where something between two layers enlarges a signal, or behind the last changes it: path values do not have
    such factors, and outputs change by more than they do. A slope of at most 1 changes nothing.
    """
    double = {name: value.double() for name, value in paths.params.items()}
    params = rescaled_params(paths.graph, double, paths.suffix.log[1:].exp())
    at = {id(params[layer.weight]): index for index, layer in enumerate(paths.graph.layers)}
    norms, below = [0.0] * len(at), [torch.zeros(0)]

    def note(op: Operation) -> Any:
        if op.name != "linear":
            return op.run()
        given = op.named("input", "weight", "bias")
        index = at[id(given["weight"])]
        norms[index] = max(norms[index], float(given["input"].norm(dim=1).max()))
        if index > 0:
            _refuse_larger_networks(given["input"].abs(), below[0].abs(), "a signal between two layers")
        below[0] = op.run()
        return below[0]

    double_ctx = ctx.in_double()
    with torch.no_grad():
        for inputs, targets in double_ctx.batches():
            outputs = as_rows(double_ctx.problem.forward(inputs, params, rules=[note]))
            _refuse_larger_networks((outputs - below[0]).abs(), torch.zeros_like(outputs), "what the last layer gives")
            ctx.charge_passes("forward", len(targets))
    return norms


def _refuse_larger_networks(sizes: Tensor, allowed: Tensor, what: str) -> None:
    rounding = 1e-9 * max(1.0, float(sizes.max()))
    if sizes.shape != allowed.shape or not bool((sizes <= allowed + rounding).all()):
        raise NotApplicable(f"needs layers with nothing but ReLUs between them; another operation changes {what}")
