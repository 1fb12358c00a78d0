"""Feature robustness (Petzka et al. 2019): the rise of the loss when a layer's input features φ become φ + δAφ.

For a layer that computes wφ this is a change of its weight, E_emp(w + δwA) − E_emp(w), with w as rows. A convolution
sees a square A on its input channels, applied at every position: then φ + δAφ and w + δwA agree for any stride,
padding and dilation. With groups, A mixes channels within a group only: one block of A per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor

from flatscope.ascents import Region, ascend
from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.measures.layer_values import measured_layers
from flatscope.measures.weight_flatness import top_eigenpairs
from flatscope.network.layers import Layer
from flatscope.params import Params
from flatscope.perturbation import mirrored_rises, perturbed_gradients, perturbed_losses, refuse_unless_pairs
from flatscope.registry import Value, measure
from flatscope.searching import highest_loss_by_ascents, number_of_further_starts, uphill_directions

Kind = Literal["worst", "random"]
TOLERANCE = 1e-6
LONGEST, SETTLING, SETTLED = 1e6, 20, 1e-9
NO_GRADIENT = 1e-10  # singular values below this fraction of the largest are rounding, and their directions chance


@measure(
    symbol=r"\max_{\|A\|_2 \le 1} \hat L(w_l + \delta w_l A) - \hat L(w_l)",
    paper="petzka2019",
    equation="Appendix C.1, D",
    per="layer",
    direction="lower",
    invariant_under={"layer_scaling", "permutation", "attention_scaling"},
    needs={"layers"},
    cost="long",
    typical={"forward": 800, "backward": 800},
    exact=False,
    conventions="the layer's weight without its bias, as rows; A acts on input features (channels of a convolution)",
    search="lower",
)
def feature_robustness(
    ctx: Context, *, delta: float = 0.1, kind: Kind = "worst", restarts: int = 3, steps: int = 30, draws: int = 20
) -> dict[str, Value]:
    r"""Rise of the training loss when a layer's input features φ become φ + δAφ with a matrix A of norm one.

    The upper end of the interval is the paper's bound with the term that vanishes at a critical point,

    .. math:: \delta \|w_l^\top \nabla_{w_l} \hat L\|_* + \tfrac{\delta^2}{2} \kappa^l + O(\delta^3)

    Args:
        delta: size of the change relative to the features.
        kind: "worst": the largest rise over matrices of spectral norm at most 1, a lower bound by ascent; "random":
            the mean over random orthogonal matrices, which is also the mean over noise on each sample's features,
            uniform in direction and as long as δ times the features.
        restarts: ascents of "worst" that are taken to the end, the best of three times as many and two that are begun:
            from the gradient, from the top eigenvector of the layer's Hessian, and from gradients with random weights
            of the samples. 1: from the gradient.
        steps: steps of each ascent.
        draws: the most matrices of "random", each with its negative; even.
    """
    for name, value in (("delta", delta), ("restarts", restarts), ("steps", steps)):
        if not value > 0:
            raise InputError("a positive number", str(value), where=name)
    refuse_unless_pairs(draws)
    if kind == "random":
        return {layer.name: random_robustness(ctx, layer, delta, draws) for layer in measured_layers(ctx)}
    return {layer.name: _worst_feature_robustness(ctx, layer, delta, restarts, steps) for layer in measured_layers(ctx)}


def random_robustness(ctx: Context, layer: Layer, delta: float, draws: int) -> Value:
    """Mean of F over random orthogonal A and −A, whose first-order terms cancel."""
    rises = mirrored_rises(ctx, _random_moves(ctx, layer, delta, draws // 2), draws)
    return Value(rises.means[0], rises.stderrs[0], exact=False, reason=rises.remark(each=2))


def _random_moves(ctx: Context, layer: Layer, delta: float, pairs: int) -> Iterator[Params]:
    generator, acting = ctx.generator(f"feature_robustness {layer.name}"), Acting(ctx, layer)
    for _ in range(pairs):
        normal = torch.randn(acting.right.shape, generator=generator, dtype=torch.float64)
        basis, triangle = torch.linalg.qr(normal)  # Haar once the signs of R are made positive (Mezzadri 2007)
        basis = basis * triangle.diagonal(dim1=-2, dim2=-1).sign()[:, None, :]
        move = acting.moves(basis.mT[None].to(ctx.problem.device))[0]
        for size in (delta, -delta):
            yield {layer.weight: size * move}


class Acting:
    """All wA with ‖A‖₂ ≤ 1 of one layer, as wA = LC with w = LQᵀ, orthonormal columns of Q, and ‖C‖₂ ≤ 1, C = QᵀA.

    C has as many rows as w has rank: no matrix larger than the weight is ever made.
    """

    def __init__(self, ctx: Context, layer: Layer) -> None:
        self.layer = layer
        self.weight = ctx.params[layer.weight].double()
        Q, R = torch.linalg.qr(weights_by_input_feature(self.weight[None], layer)[0].mT)
        signs = R.diagonal(dim1=-2, dim2=-1).sign()  # made positive, the factors are the same on every device
        signs = torch.where(signs == 0, torch.ones_like(signs), signs)
        self.left: Tensor = (R * signs[..., None]).mT  # L: (groups, rows, rank)
        self.right: Tensor = Q * signs[:, None, :]  # Q: (groups, features, rank)

    def moves(self, points: Tensor) -> Tensor:
        """wA, shaped as the weight (k, *shape), for each C of (k, groups, rank, features)."""
        return weights_from_feature_rows(self.left @ points, self.weight, self.layer)

    def pulled(self, gradients: Tensor) -> Tensor:
        """Gradients with respect to the weight (k, *shape) as gradients with respect to C."""
        return self.left.mT @ weights_by_input_feature(gradients, self.layer)


def _worst_feature_robustness(ctx: Context, layer: Layer, delta: float, restarts: int, steps: int) -> Value:
    acting, name = Acting(ctx, layer), layer.weight

    def evaluate(points: Params) -> tuple[Tensor, Params]:
        losses, gradients = perturbed_gradients(ctx, {name: delta * acting.moves(points[name])})
        return losses, {name: delta * acting.pulled(gradients[name])}

    def climb(gradients: Params) -> Params:
        return {name: nearest_isometry(gradients[name])}

    def project(points: Params) -> Params:
        U, S, Vh = torch.linalg.svd(points[name], full_matrices=False)
        return {name: (U * S.clamp_max(1)[..., None, :]) @ Vh}

    uphill = uphill_directions(ctx, f"feature_robustness {layer.name}", number_of_further_starts(restarts))[name]
    gradient = uphill[0]
    pair = ctx.cached(top_eigenpairs, tolerance=TOLERANCE)[layer.name]
    directions = [uphill]
    if restarts > 1:
        top = pair.vector.to(gradient).reshape(gradient.shape)
        both = torch.stack([top, -top])
        moved = delta * acting.moves(nearest_isometry(acting.pulled(both)))
        losses = perturbed_losses(ctx, [{name: move} for move in moved])
        directions.append(both[1:] if losses[1] > losses[0] else both[:1])
    starts = climb({name: acting.pulled(torch.cat(directions))})
    region = Region(climb, project)
    worst = highest_loss_by_ascents(ctx, evaluate, starts, region, restarts, steps).where
    # From the best points on, steps so long that they end where the linear approximation is largest: on a convex
    # stretch of the loss each goes up, and they settle to more digits than short steps do.
    best, loss = ascend(ctx, evaluate, worst, region, (LONGEST,) * SETTLING, SETTLED), ctx.scores().loss
    value = max(0.0, best.highest - loss)  # A = 0 is allowed
    slope = delta * float(torch.linalg.svdvals(acting.pulled(gradient[None])).sum())
    curvature = max(0.0, pair.value + pair.residual) * float(acting.weight.square().sum())  # κ
    high = slope + delta**2 / 2 * curvature
    reason = f"lower bound: best of {restarts} ascents, {steps} steps each; "
    reason += f"{best.remark(loss)}; " if value else ""
    if value > high:
        return Value(value, low=value, exact=False, reason=reason + "no upper end: delta too large for second order")
    reason += f"upper end to second order, {slope:.2g} of it from the gradient, which is zero at a critical point"
    return Value(value, low=value, high=high, exact=False, reason=reason)


def nearest_isometry(matrices: Tensor) -> Tensor:
    """The matrix of spectral norm 1 with the largest inner product: UVᵀ of M = USVᵀ, without directions of S = 0."""
    U, S, Vh = torch.linalg.svd(matrices, full_matrices=False)
    kept = S / S.amax(-1, keepdim=True).clamp_min(torch.finfo(S.dtype).tiny) > NO_GRADIENT
    isometry: Tensor = (U * kept[..., None, :]) @ Vh
    return isometry


def weights_by_input_feature(weights: Tensor, layer: Layer) -> Tensor:
    """Weights (k, *shape) as rows that act on input features: (k, groups, out · taps, features of a group)."""
    shaped = weights.reshape(len(weights), layer.groups, weights.shape[1] // layer.groups, weights.shape[2], -1)
    if layer.input_first:  # (in, out of a group, *taps), not (out, in of a group, *taps)
        shaped = shaped.transpose(2, 3)
    return shaped.transpose(3, 4).flatten(2, 3)


def weights_from_feature_rows(rows: Tensor, weight: Tensor, layer: Layer) -> Tensor:
    """The inverse of `weights_by_input_feature`, shaped as the weight: (k, *shape)."""
    k, groups, _, features = rows.shape
    out = weight.shape[1] if layer.input_first else weight.shape[0] // groups
    shaped = rows.reshape(k, groups, out, -1, features).transpose(3, 4)  # (k, groups, out, in, taps)
    return (shaped.transpose(2, 3) if layer.input_first else shaped).reshape(k, *weight.shape)
