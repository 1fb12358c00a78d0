"""Margins: how far the output of the right class is above the others, and norms relative to them."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable, refuse_unknown
from flatscope.network.layers import Layer
from flatscope.registry import FUNCTION_SYMMETRIES, Value, declared, derived, measure


@measure(
    symbol=r"\gamma(x_i) = f(x_i)_{y_i} - \max_{j \ne y_i} f(x_i)_j",
    paper="zhang2017",
    equation="Section 5.3; multi-class form: Neyshabur et al. 2017 eq (2)",
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
    symbol=r"\gamma_{\mathrm{margin}} = \gamma_{(\lceil \epsilon n \rceil)}",
    paper="neyshabur2017",
    equation="Section 2.2",
    direction="higher",
    invariant_under=FUNCTION_SYMMETRIES,
    needs={"classes"},
    passes={"forward": 1},
    caption="lead of the right class",
    function_only=True,
    conventions="the ⌈εn⌉-th smallest margin, an order statistic without interpolation",
)
def margin(ctx: Context, *, epsilon: float = 0.05) -> float:
    """Margin of the training set: the lowest value that a fraction epsilon of the samples reach at most.

    The paper asks for the lowest γ such that ⌈εn⌉ points have margin lower than γ; that set is open, and its
    infimum is the ⌈εn⌉-th smallest margin.

    Args:
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


def positive_margin(ctx: Context, epsilon: float = 0.05) -> float:
    """The margin of the training set; refused where it is not positive, since dividing by it means nothing then."""
    found = margin(ctx, epsilon=epsilon)
    if not found > 0:
        got = f"{found:.4g}"
        fix = "Norms are compared with the margin of a network that fits its data"
        raise NotApplicable(f"a positive margin of all but {epsilon:g} of the training samples", got, fix=fix)
    return float(found)


def from_log(log_value: float, as_log: bool = False) -> Value:
    """A number from its logarithm; beyond the range of float64 the remark keeps the logarithm."""
    if as_log or log_value == -math.inf or _LOWEST < log_value < _HIGHEST:
        return Value(log_value if as_log else math.exp(log_value))
    remark = f"e^{log_value:.8g}, beyond the range of float64; log=True gives the logarithm"
    return Value(math.inf if log_value > 0 else 0.0, reason=remark)


_LOWEST, _HIGHEST = math.log(5e-324), math.log(1.7e308)


def declare_with_margin(
    base: Callable[..., Any],
    capacity: str,
    *,
    with_4d: bool,
    widths: bool = False,
    chain: bool = False,
    caption: str = "",
) -> None:
    """Declare `…_over_margin` and `…_capacity` of a norm that is itself declared already.

    Args:
        base: the measure of the norm; its options are those of the two as well.
        capacity: LaTeX of the printed capacity: γ⁻² norm² times what depends on depth and width alone.
        with_4d: whether a factor 4 per layer is printed.
        widths: whether the widths of the layers are, to the power 2 − 2/p for a norm of order p, which is 2 where it is
            no option.
        chain: whether the norm itself exists only where layers form a chain.
        caption: of `…_over_margin`, if it is one of the measures to look at first.
    """
    name, known = base.__name__, declared(base)

    def log_ratio(ctx: Context, epsilon: float, given: dict[str, Any]) -> float:
        found = base(ctx, log=True, **given)  # first: it may have no value whatever the margin is
        value = found[""] if isinstance(found, dict) else found
        if value.reason:
            raise NotApplicable(value.reason)
        return 2 * (float(value.value) - math.log(positive_margin(ctx, epsilon)))

    def over_margin(ctx: Context, *, epsilon: float = 0.05, log: bool = False, **given: Any) -> Value:
        return from_log(log_ratio(ctx, epsilon, given), log)

    def printed(
        ctx: Context,
        *,
        epsilon: float = 0.05,
        log: bool = False,
        with_4d: bool = with_4d,
        width: str = "channels",
        **given: Any,
    ) -> Value:
        total = log_ratio(ctx, epsilon, given)
        total += math.log(4) * len(ctx.network.layers) if with_4d else 0.0
        if widths:
            total += (2 - 2 / {**known.options, **given}.get("p", 2.0)) * sum(log_widths(ctx, width))
        return from_log(total, log)

    over_margin.__doc__ = f"""Squared ratio of `{name}` to the margin of the training set.

The quantity of Figure 1: factors that depend on depth and width alone are left out."""
    printed.__doc__ = f"""Capacity of networks of this `{name}` and margin: samples that they need, up to constants.

As printed: the squared ratio times the factors that depend on depth and width."""
    own: dict[str, tuple[Any, str]] = {
        "epsilon": (0.05, "fraction of the training samples that may lie at or below the margin.")
    }
    sizes: dict[str, tuple[Any, str]] = {"with_4d": (with_4d, "whether to count a factor 4 per layer.")}
    if widths:
        sizes["width"] = ("channels", 'h_i of a convolution: "channels", or "units" (channels times positions).')
    ratio = rf"\left({known.symbol.partition(' = ')[0]} / \gamma_{{\mathrm{{margin}}}}\right)^2"
    for function, suffix, more, facts in (
        (over_margin, "over_margin", own, {"symbol": ratio, "equation": "Figure 1", "caption": caption}),
        (printed, "capacity", own | sizes, {"symbol": capacity}),
    ):
        function.__name__ = function.__qualname__ = f"{name}_{suffix}"
        function.__module__ = base.__module__
        needs_chain = chain or function is printed  # the depth of a branching network is not one number
        derived(
            base,
            more,
            invariant_under={*known.invariant_under, "output_scaling"},  # which multiplies norm and margin alike
            needs={"classes", "chain"} if needs_chain else {"classes"},
            passes={"forward": 1},
            conventions="the norm's own; margin of the training set as `margin` gives it, refused where not positive",
            **facts,
        )(function)


def log_widths(ctx: Context, width: str) -> list[float]:
    """Logarithm of the width h_i of each layer, the last included and the input left out."""
    refuse_unknown(width, ("channels", "units"), "width")
    return [math.log(math.prod(layer.output_shape) if width == "units" else n_out(ctx, layer)) for layer in ctx.network]


def n_out(ctx: Context, layer: Layer) -> int:
    """Output channels or features of a layer."""
    shape = ctx.params[layer.weight].shape
    return int(shape[1]) * layer.groups if layer.input_first else int(shape[0])
