"""Bounds that count: parameters, what training can have reached, tasks that share layers."""

from __future__ import annotations

import math

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable
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


def log_covering_number(radius: float, epsilon: float, dimension: int) -> float:
    """Logarithm of (3r/ε)^d, which bounds how many balls of radius ε cover one of radius r (Zhang et al. 2017, eq 16).

    Infinite radii give infinity; ε must lie in (0, r).
    """
    if dimension < 1 or not 0 < epsilon < radius:
        raise InputError("0 < epsilon < radius and a dimension", f"{epsilon}, {radius}, {dimension}", where="covering")
    return dimension * math.log(3 * radius / epsilon)


@bound(
    symbol=r"\sqrt{\tfrac{d}{n} \log\tfrac{3 G_T}{\epsilon}}",
    paper="zhang2017",
    equation="(15), (16)",
    assumptions=(
        "NOT CERTIFIED: the order of the gap; the memo leaves out constants and what a step of epsilon costs",
        "training stays in the ball of radius G_T around its start: the distance from the start, or the `radius` given",
        "epsilon below the radius (checked)",
    ),
)
def covering(ctx: Context, *, delta: float, radius: float = 0.0, epsilon: float = 0.01) -> Value:
    """Gap of the order of covering the ball that training explored.

    Args:
        ctx: the network.
        delta: not used: the statement hides it among the constants.
        radius: G_T, a bound on the norm of the sum of all steps γ_t ∇V; 0 for the distance from the weights before
            training. For plain SGD, neither projected nor with momentum or weight decay, the two are the same, since
            w_T - w_0 = -Σ γ_t ∇V; with those it is the norm of the sum of the updates, and w_T still lies in that ball.
        epsilon: radius of the balls of the cover, in weight space.
    """
    del delta
    initial = ctx.problem.initial
    if radius == 0:
        if initial is None:
            way = "pass initial= (on the command line --initial) or the option radius"
            raise NotApplicable(f"needs the weights before training, or a radius; {way}")
        squares = ((v.double() - initial[name].double()).square().sum() for name, v in ctx.trainable.items())
        radius = math.sqrt(math.fsum(float(value) for value in squares))
    if not 0 < epsilon < radius:
        raise NotApplicable("needs 0 < epsilon < radius of the explored ball", f"{epsilon:g} and {radius:.4g}")
    log_number = log_covering_number(radius, epsilon, count(ctx.trainable.values()))
    return Value(math.sqrt(log_number / ctx.problem.n_train), reason=f"G_T = {radius:.4g}, log N = {log_number:.4g}")


def multitask_gap(n: int, tasks: int, log_specific: float, log_shared: float, delta: float) -> float:
    """(1/√(2M)) √(ln|H| + (ln|G| + ln(1/δ)) / T), H the part of each task, G the shared one (Zhang et al. 2017, eq 61).

    The memo's text has H and G the other way round; its formula divides the shared part by the number of tasks.
    """
    if n < 1 or tasks < 1 or log_specific < 0 or log_shared < 0 or not 0 < delta < 1:
        raise InputError(
            "samples, tasks, sizes of at least 1 and 0 < delta < 1",
            f"{n}, {tasks}, {log_specific}, {log_shared}, {delta}",
            where="multitask",
        )
    return math.sqrt((log_specific + (log_shared + math.log(1 / delta)) / tasks) / (2 * n))


@bound(
    symbol=r"\tfrac{1}{\sqrt{2n}} \sqrt{\ln|H| + \tfrac1T (\ln|G| + \ln\tfrac1\delta)}",
    paper="zhang2017",
    equation="(61)",
    assumptions=(
        "loss in [0, 1] (0/1 error)",
        "`tasks` tasks with as many samples each share every layer but the last",
        "weights stored with `bits` bits each",
        "samples drawn independently",
    ),
)
def multitask(ctx: Context, *, delta: float, tasks: int = 10, bits: int = 32) -> Value:
    """Mean gap over tasks that share all layers but the last, by counting weights.

    Args:
        ctx: the network.
        delta: the bound holds with probability at least 1 - delta.
        tasks: number of tasks T.
        bits: precision of one weight.
    """
    if not ctx.network.layers:
        raise NotApplicable("the network has no dense or convolutional layer")
    if bits < 1:
        raise InputError("at least one bit", str(bits), where="bits")
    last = ctx.network.layers[-1]
    own = count(ctx.params[name] for name in (last.weight, last.bias) if name is not None)
    shared = count(ctx.params.values()) - own
    log_two = bits * math.log(2)
    return Value(multitask_gap(ctx.problem.n_train, tasks, own * log_two, shared * log_two, delta))
