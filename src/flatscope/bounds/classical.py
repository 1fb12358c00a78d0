"""Bounds that look at the architecture alone: counting parameters."""

from __future__ import annotations

import math

from flatscope.context import Context
from flatscope.errors import InputError
from flatscope.params import count
from flatscope.registry import Value, bound


def sample_complexity(gap: float, delta: float, bits: int, n_parameters: int) -> float:
    """Samples that suffice for a gap of at most `gap` (Zhang et al. 2017, eq 14).

    (2/ε²)(kW log 2 + log(2/δ)) for W weights of k bits each: a finite class has 2^(kW) members.
    """
    if gap <= 0 or not 0 < delta < 1 or bits < 1 or n_parameters < 1:
        raise InputError(
            "gap > 0, 0 < delta < 1, bits and parameters of at least 1",
            f"{gap}, {delta}, {bits}, {n_parameters}",
            where="sample_complexity",
        )
    return 2 / gap**2 * (bits * n_parameters * math.log(2) + math.log(2 / delta))


@bound(
    symbol=r"\sqrt{\tfrac{2}{n}\,(kW\log 2 + \log\tfrac{2}{\delta})}",
    paper="zhang2017",
    equation="(14), solved for the gap",
    assumptions=(
        "loss in [0, 1] (0/1 error)",
        "weights stored with `bits` bits each",
        "samples drawn independently",
    ),
)
def parameter_counting(ctx: Context, *, delta: float, bits: int = 32) -> Value:
    """Gap between training and expected error that counting parameters allows.

    Args:
        ctx: the network.
        delta: the bound holds with probability at least 1 - delta.
        bits: precision of one weight.
    """
    needed_for_unit_gap = sample_complexity(1.0, delta, bits, count(ctx.trainable.values()))
    return Value(math.sqrt(needed_for_unit_gap / ctx.problem.n_train))
