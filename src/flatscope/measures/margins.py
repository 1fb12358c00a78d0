"""Margins: how far the output of the right class is above the others."""

from __future__ import annotations

import math
from fractions import Fraction

from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
from flatscope.registry import measure

FUNCTION_SYMMETRIES = {"layer_scaling", "unit_scaling", "permutation", "batchnorm_scaling"}


@measure(
    symbol=r"\gamma(x_i)",
    paper="zhang2017",
    equation="Section 5.2; multi-class form: Neyshabur et al. 2017 eq (2)",
    per="sample",
    direction="higher",
    invariant_under=FUNCTION_SYMMETRIES,
    needs={"classes"},
    passes={"forward": 1},
    conventions="training samples, in the order of the data; negative where misclassified",
)
def functional_margin(ctx: Context) -> Tensor:
    """Output of the label minus the largest other output, for each training sample.

    f(x)[y] − max_{y' ≠ y} f(x)[y']; with two outputs of opposite sign this is twice y·f(x).
    """
    return _margins(ctx)


@measure(
    symbol=r"\gamma_{\mathrm{margin}}",
    paper="neyshabur2017",
    equation="Section 2.2",
    direction="higher",
    invariant_under=FUNCTION_SYMMETRIES,
    needs={"classes"},
    passes={"forward": 1},
    conventions="the ⌈εn⌉-th smallest margin, an order statistic without interpolation",
)
def margin(ctx: Context, *, epsilon: float = 0.05) -> float:
    """Margin of the training set: the lowest value that a fraction epsilon of the samples reach at most.

    The paper asks for the lowest γ such that ⌈εn⌉ points have margin lower than γ; that set is open, and its
    infimum is the ⌈εn⌉-th smallest margin.

    Args:
        ctx: the network.
        epsilon: fraction of samples that may lie at or below the margin.
    """
    if not 0 < epsilon <= 1:
        raise InputError("an epsilon in (0, 1]", str(epsilon), where="margin")
    values = _margins(ctx)
    return float(values.kthvalue(order_statistic(epsilon, len(values))).values)


def order_statistic(epsilon: float, n: int) -> int:
    """⌈εn⌉ in exact arithmetic: ceil(0.07 * 100) is 8 in floating point and 7 in truth."""
    return max(1, math.ceil(Fraction(str(epsilon)) * n))


def _margins(ctx: Context) -> Tensor:
    values = ctx.scores().margins
    if values is None:
        raise NotApplicable("needs class labels and at least two outputs")
    return values
