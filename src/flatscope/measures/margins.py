"""Margins: how far the output of the right class is above the others, and norms relative to them."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

from flatscope.context import Context
from flatscope.derived_measures import add_options
from flatscope.errors import InputError, NotApplicable, refuse_unknown
from flatscope.network.layers import Layer
from flatscope.registry import FUNCTION_SYMMETRIES, Option, Value, measure


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
    return _finite_margins(ctx)


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
    values = _finite_margins(ctx)
    return float(values.kthvalue(order_statistic(epsilon, len(values))).values)


def order_statistic(epsilon: float, n: int) -> int:
    """⌈εn⌉ in exact arithmetic: ceil(0.07 * 100) is 8 in floating point and 7 in truth."""
    return max(1, math.ceil(Fraction(str(epsilon)) * n))


def _finite_margins(ctx: Context) -> Tensor:
    values = ctx.scores().margins
    if values is None:
        raise NotApplicable("needs class labels and at least two outputs")
    return values


def positive_margin(ctx: Context, epsilon: float = 0.05) -> float:
    """The margin of the training set; refused where it is not positive, since dividing by it means nothing then."""
    value = margin(ctx, epsilon=epsilon)
    if not value > 0:
        got = f"{value:.4g}"
        fix = "Norms are compared with the margin of a network that fits its data"
        raise NotApplicable(f"a positive margin of all but {epsilon:g} of the training samples", got, fix=fix)
    return float(value)


def value_from_logarithm(log_value: float, as_log: bool = False) -> Value:
    """A number from its logarithm; beyond the range of float64 the remark keeps the logarithm."""
    if as_log or log_value == -math.inf or _LOWEST < log_value < _HIGHEST:
        return Value(log_value if as_log else math.exp(log_value))
    remark = f"e^{log_value:.8g}, beyond the range of float64; log=True gives the logarithm"
    return Value(math.inf if log_value > 0 else 0.0, reason=remark)


_LOWEST, _HIGHEST = math.log(5e-324), math.log(1.7e308)


def declare_in_forms(
    capacity: str,
    *,
    with_4d: bool,
    widths: bool = False,
    chain: bool = False,
    more: Mapping[str, tuple[Callable[..., Value], str]] = MappingProxyType({}),
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a norm the option `form`: the norm itself, its squared ratio to the margin, the printed capacity.

    Args:
        capacity: LaTeX of the printed capacity: γ⁻² norm² times what depends on depth and width alone.
        with_4d: whether a factor 4 per layer is printed.
        widths: whether the widths of the layers are, to the power 2 − 2/p for a norm of order p, which is 2 where it is
            no option.
        chain: whether the norm itself exists only where layers form a chain.
        more: further forms: functions of a context and `log`, and what the docstring says of them.
    """

    def declare(norm: Callable[..., Any]) -> Callable[..., Any]:
        signature = inspect.signature(norm)

        def log_ratio(ctx: Context, form: str, epsilon: float, given: dict[str, Any]) -> float:
            if not ctx.problem.classification:
                raise NotApplicable(ctx.problem.no_classes)
            # The depth of a branching network is not one number.
            if (chain or form == "capacity") and not ctx.network.chain:
                raise NotApplicable("a product over layers has no meaning on a branching network")
            logarithm = norm(ctx, log=True, **given)  # first: it may have no value whatever the margin is
            value = logarithm[""] if isinstance(logarithm, dict) else logarithm
            if value.reason:
                raise NotApplicable(value.reason)
            return 2 * (float(value.value) - math.log(positive_margin(ctx, epsilon)))

        @functools.wraps(norm)
        def function(
            ctx: Context,
            *,
            form: str = "norm",
            epsilon: float = 0.05,
            log: bool = False,
            with_4d: bool = with_4d,
            width: str = "channels",
            **given: Any,
        ) -> dict[str, Value] | Value:
            if form == "norm":
                norms: dict[str, Value] | Value = norm(ctx, log=log, **given)
                return norms
            if form in more:
                return more[form][0](ctx, log=log)
            total = log_ratio(ctx, form, epsilon, given)
            if form == "capacity":
                total += math.log(4) * len(ctx.network.layers) if with_4d else 0.0
                order = given.get("p", signature.parameters["p"].default) if "p" in signature.parameters else 2.0
                total += (2 - 2 / order) * sum(log_widths(ctx, width)) if widths else 0.0
            return value_from_logarithm(total, log)

        texts = {word: text for word, (_, text) in more.items()}
        before, after = _form_options(capacity, with_4d, widths, texts)
        add_options(function, norm, before=before, after=after)
        return function

    return declare


def _form_options(
    capacity: str, with_4d: bool, widths: bool, more: Mapping[str, str]
) -> tuple[dict[str, Option], dict[str, Option]]:
    """`form`, and the options of the forms."""
    texts = {
        "norm": '"norm"',
        "over_margin": '"over_margin": its squared ratio to the margin of the training set, the quantity of Figure 1, '
        "refused where that `margin` is not positive; scaling the outputs does not change it",
        "capacity": '"capacity": that ratio times the factors of depth and width that are printed, the samples that '
        f"networks of this norm and margin need, up to constants (it bounds nothing): :math:`{capacity}`",
        **{word: f'"{word}": {text}' for word, text in more.items()},
    }
    form: dict[str, Option] = {"form": ("norm", Literal[tuple(texts)], f"{'; '.join(texts.values())}.")}
    form_options: dict[str, Option] = {
        "epsilon": (0.05, float, "fraction of the training samples that may lie at or below the margin."),
        "with_4d": (with_4d, bool, "whether the capacity counts a factor 4 per layer."),
    }
    if widths:
        meant = 'h_i of a convolution in the capacity: "channels", or "units" (channels times positions).'
        form_options["width"] = "channels", Literal["channels", "units"], meant
    return form, form_options


def log_widths(ctx: Context, width: str) -> list[float]:
    """Logarithm of the width h_i of each layer, the last included and the input left out."""
    refuse_unknown(width, ("channels", "units"), "width")
    return [
        math.log(math.prod(layer.output_shape) if width == "units" else number_of_output_units(ctx, layer))
        for layer in ctx.network
    ]


def number_of_output_units(ctx: Context, layer: Layer) -> int:
    """Output channels or features of a layer."""
    shape = ctx.params[layer.weight].shape
    return int(shape[1]) * layer.groups if layer.input_first else int(shape[0])
