"""The PAC-Bayes pair as a curve: divergence against expected sharpness as the noise on the weights grows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flatscope import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.extend import Draws, draw_until_precise, has_batchnorm
from flatscope.measures.pac_bayes import ALPHAS, checked_alphas, pac_bayes_kl, paired_rises

STEP = 10**0.5  # of the grid where it has to be extended
EXTENSIONS = 12


@dataclass(frozen=True)
class NoiseLevel:
    """One point of the bi-criteria curve."""

    alpha: float
    kl: float
    sharpness: float
    stderr: float = 0.0


def bi_criteria(
    ctx: Context, alpha: Any = ALPHAS, *, draws: int = 1000, batch: int = 64, appendix: bool = False
) -> list[NoiseLevel]:
    """Divergence against expected sharpness as the noise grows: the curves of Neyshabur et al. 2017, Figure 2.

    Arguments as those of the two measures, which fold BatchNorm; a network that still has one is refused here. All
    draws are taken, so that points of one curve are alike.
    """
    if has_batchnorm(ctx.problem.model):
        raise InputError("a network without BatchNorm", "one with it", "bi_criteria", "Use fold_batchnorm first")
    alphas = tuple(sorted(checked_alphas(alpha)))
    kls = pac_bayes_kl(ctx, alpha=alphas, appendix=appendix)
    rises = ctx.cached(_loss_rises_by_noise, alphas=alphas, draws=draws, batch=batch)
    return [
        NoiseLevel(a, float(kl.value), rise, stderr)
        for a, kl, rise, stderr in zip(alphas, kls, rises.means, rises.stderrs, strict=True)
    ]


def _loss_rises_by_noise(ctx: Context, alphas: tuple[float, ...], draws: int, batch: int) -> Draws:
    return draw_until_precise(ctx, paired_rises(ctx, alphas=alphas, draws=draws, batch=batch), draws // 2, 0.0)


def kl_at_sharpness(
    ctx: Context,
    level: float = 0.05,
    *,
    alpha: Any = ALPHAS,
    draws: int = 1000,
    batch: int = 64,
    appendix: bool = False,
    refinements: int = 2,
) -> NoiseLevel:
    """The divergence at which the expected sharpness is `level`; the grid of alphas grows until it contains that.

    Args:
        ctx: the network, without BatchNorm.
        level: expected sharpness at which to read off.
        alpha: the grid to begin with.
        draws: as in `expected_sharpness`.
        batch: as in `expected_sharpness`.
        appendix: twice the divergence, as the paper's figures have it.
        refinements: further noise levels to evaluate, each where the last interpolation put the level.
    """
    if not 0 < level < math.inf:
        raise InputError("a positive level", str(level), where="kl_at_sharpness")

    def points(alphas: Any) -> list[NoiseLevel]:
        return bi_criteria(ctx, alphas, draws=draws, batch=batch, appendix=appendix)

    curve = points(alpha)
    for _ in range(EXTENSIONS):
        if curve[0].sharpness >= level:
            curve = points(curve[0].alpha / STEP) + curve
        elif not any(point.sharpness >= level for point in curve):
            curve += points(curve[-1].alpha * STEP)
        else:
            break
    point_at_level = noise_level_at_sharpness(curve, level)
    for _ in range(refinements):
        if any(point.alpha == point_at_level.alpha for point in curve):
            break
        curve = sorted([*curve, *points(point_at_level.alpha)], key=lambda point: point.alpha)
        point_at_level = noise_level_at_sharpness(curve, level)
    return point_at_level


def noise_level_at_sharpness(curve: Sequence[NoiseLevel], level: float) -> NoiseLevel:
    """Interpolate a curve, ordered by alpha, at an expected sharpness.

    Between the first point that reaches the level and the one before it: the logarithms of alpha and of the
    divergence as linear functions of the logarithm of the sharpness (both exact for a quadratic loss), or of the
    sharpness itself where the lower one is not positive.
    """
    above = next((i for i, point in enumerate(curve) if point.sharpness >= level), None)
    if above is None or (above == 0 and curve[0].sharpness > level):
        low, high = min(p.sharpness for p in curve), max(p.sharpness for p in curve)
        raise NotApplicable(f"noise levels whose expected sharpness brackets {level:g}", f"{low:.4g} to {high:.4g}")
    if curve[above].sharpness == level:
        return curve[above]
    one, other = curve[above - 1], curve[above]
    part = (level - one.sharpness) / (other.sharpness - one.sharpness)
    if one.sharpness > 0:
        part = math.log(level / one.sharpness) / math.log(other.sharpness / one.sharpness)
    alpha, kl = (
        math.exp((1 - part) * math.log(a) + part * math.log(b))
        for a, b in ((one.alpha, other.alpha), (one.kl, other.kl))
    )
    return NoiseLevel(alpha, kl, level, max(one.stderr, other.stderr))
