"""Geometric margins: how far an input is from the nearest one of another class (Zhang et al. 2017, Section 5).

Their Definition 1 asks for the largest change that keeps the class, which is unbounded away from the boundary; what is
meant is the largest radius within which all changes keep it. That is the shortest change of class. Finding it is hard
in general: a search bounds it from above, a Lipschitz constant from below.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.random_signs import Signs
from flatscope.errors import NotApplicable, lack_of_memory, refuse_unless_whole
from flatscope.limits import STANDARD
from flatscope.measures.attacks import refuse_broken_constant
from flatscope.measures.lipschitz import Constants
from flatscope.measures.margin_exact import as_shallow, exact_margins
from flatscope.measures.margin_search import estimated_distances, linear_distances, nearest_changes, other_classes
from flatscope.network.interception import Operation
from flatscope.progress import progress_bar
from flatscope.registry import FUNCTION_SYMMETRIES, Value, measure
from flatscope.samples import Split, as_rows
from flatscope.sampling import refuse_out_of_time, time_is_over

# Random signs tell the length of a gradient this factor too short for one class in a million (64 draws, χ²).
SURE = 1.7
ROUNDING = 1e-6  # by which norms found by iteration may be too small

_distance = partial(
    measure,
    paper="zhang2017",
    per="sample",
    direction="higher",
    invariant_under={*FUNCTION_SYMMETRIES, "output_scaling"},
    needs={"classes"},
)


@_distance(
    symbol=r"\min \{ \|\delta\|_2 : \mathrm{argmax} f(x_i + \delta) \ne y_i \}",
    equation="Definition 1, eq (11); Section 5.3",
    cost="long",
    typical={"forward": 1000, "backward": 1000},
    exact=False,
    conventions="ℓ2 distance of inputs as the network receives them, not held to the range of pixels; 0 where "
    "misclassified; the lower end comes from Lipschitz constants, which a rescaling does change",
    search="upper",
)
def geometric_margin(ctx: Context, *, samples: int = 1000, restarts: int = 10, part: Split = "train") -> Value:
    """Length of the shortest change of an input that changes its class, as a certified interval for each sample.

    The value, which is also the upper end, is the length of a change that was found and does change the class. The
    lower end is min_j (f_y − f_j)/L_j, where L_j is a Lipschitz constant of f_y − f_j. It is missing where none is
    known, as of networks that compare, round or choose by value, and where a pair of inputs is found that breaks it.
    Affine networks, and those with one hidden layer of up to ten ReLUs, are solved exactly: then the interval is a
    point.

    Args:
        samples: how many, from the first one on.
        restarts: of the search, each towards one other class; from random points when all had their turn.
        part: "train" or "test" samples.
    """
    refuse_unless_whole(restarts, "restarts")
    shallow = ctx.cached(as_shallow)
    constants = None if shallow is not None else ctx.cached(_pair_constants)
    values, floors, last_gain = [], [], 0.0
    for x, y, outputs in _sample_batches(ctx, samples, part, "Margins"):
        distances, gain = _margins_by_search(ctx, x, y, outputs, restarts)
        last_gain = max(last_gain, gain)
        if shallow is not None:
            inputs, labels = as_rows(x).double().cpu().numpy(), y.cpu().numpy()
            distances = torch.from_numpy(exact_margins(shallow, inputs, labels, distances.numpy()))
            floors.append(distances)
        elif isinstance(constants, Tensor):
            floors.append(_certified_margins(outputs, y, constants))
        values.append(distances)
    value = torch.cat(values)
    low = torch.cat(floors) if floors else None
    if low is not None and shallow is None and bool((low > value).any()):
        low, constants = None, "no certified lower end: a class changes within it"
    remarks = [constants if isinstance(constants, str) else "", _time_limit_in_words(ctx, len(value), samples, part)]
    if shallow is None:
        moved = f"their last round shortened none by more than {last_gain:.1g}"
        ended = "; searches ended early, the time was up" if time_is_over(ctx) else ""
        remarks.insert(0, f"upper bound: best of {restarts} searches; {moved}{ended}")
    if bool(value.isinf().any()):
        remarks.append(f"no other class found for {int(value.isinf().sum())} samples")
    reason = "; ".join(remark for remark in remarks if remark)
    return Value(value, low=low, high=value, exact=shallow is not None, reason=reason)


@_distance(
    symbol=r"\min_{j \ne y_i} (f_y - f_j)(x_i) / \|\nabla_x (f_y - f_j)(x_i)\|_2",
    equation="Section 5.3, eq (31)",
    cost="sweep",
    typical={"output": 0.5},
    conventions="each pair of classes with its own gradient; 0 where misclassified; infinite where the outputs "
    f"do not depend on the input near by; neither an upper nor a lower bound of `geometric_margin`; of more than "
    f"{STANDARD.few_outputs} classes the {STANDARD.nearest_classes} are tried that seem nearest along random "
    "directions, all with `precision=0`",
)
def local_linear_margin(ctx: Context, *, samples: int = 1000, part: Split = "train") -> Value:
    """Distance to the nearest other class if the network went on as it does at the sample: f(x)/‖W_x‖.

    With two outputs this is the functional margin divided by the length of its gradient; exact for affine networks.

    Args:
        samples: how many, from the first one on.
        part: "train" or "test" samples.
    """
    values, lows, limits = list[Tensor](), list[Tensor](), ctx.effort.limits
    sampled = ctx.effort.precision > 0 and ctx.problem.n_outputs > limits.few_outputs
    for x, y, outputs in _sample_batches(ctx, samples, part, "Linear margins"):
        classes, beyond = other_classes(outputs, y), torch.full((len(x),), torch.inf).to(outputs)
        try:
            if sampled:
                classes, beyond = _likely_nearest(ctx, x, y, classes, sum(map(len, values)))
            nearest = linear_distances(partial(_outputs_within_time_limit, ctx, x), as_rows(x), y, classes).amin(1)
        except NotApplicable:
            if not values or not time_is_over(ctx):
                raise
            break
        values.append(nearest.clamp_min(0).double().cpu())
        lows.append(torch.minimum(nearest, beyond / SURE).clamp_min(0).double().cpu())
    value = torch.cat(values)
    reason = _time_limit_in_words(ctx, len(value), samples, part)
    if not sampled:
        return Value(value, reason=reason)
    how = f"nearest of {limits.nearest_classes} classes, chosen along {limits.output_draws} random directions"
    reason = f"{how}; {reason}" if reason else how
    return Value(value, low=torch.cat(lows), high=value, exact=False, reason=reason)


def _likely_nearest(ctx: Context, x: Tensor, y: Tensor, classes: Tensor, seen: int) -> tuple[Tensor, Tensor]:
    """The classes that seem nearest, and how far the nearest of the others seems to be; all where nothing tells.

    Args:
        ctx: the network.
        x: samples.
        y: their labels.
        classes: the other classes of each.
        seen: samples before these.
    """
    limits, flat = ctx.effort.limits, as_rows(x)
    numbers = torch.arange(seen, seen + len(x), device=x.device)
    signs = Signs(ctx.seed, "directions of local_linear_margin")
    drawn = signs.draw(numbers, range(limits.output_draws), flat.shape[1], flat.dtype)
    try:
        estimated = estimated_distances(partial(_outputs_within_time_limit, ctx, x), flat, y, classes, drawn)
    except RuntimeError as problem:  # an operation that cannot be differentiated twice
        if lack_of_memory(problem):
            raise
        return classes, torch.full((len(x),), torch.inf).to(flat)
    ctx.charge_passes("backward", len(x) * len(drawn))
    distances, order = estimated.sort(dim=1, stable=True)
    return classes.gather(1, order[:, : limits.nearest_classes]), distances[:, limits.nearest_classes]


def _time_limit_in_words(ctx: Context, done: int, samples: int, part: str) -> str:
    asked = min(samples, ctx.problem.part(part).n)
    return f"the first {done} of {asked} samples: the time was up" if done < asked else ""


def _sample_batches(ctx: Context, samples: int, part: str, what: str) -> Any:
    """(inputs, labels, outputs) of batches, `samples` in all."""
    if part == "test" and ctx.problem.test is None:
        raise NotApplicable("needs test data; pass test=(x, y)")
    refuse_unless_whole(samples, "samples")
    if ctx.problem.n_outputs < 2:
        raise NotApplicable("needs an output for each class; here one logit stands for two")
    left = min(samples, ctx.problem.part(part).n)
    with progress_bar(what, total=left) as advance:
        for inputs, targets in ctx.batches(part):
            if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
                raise NotApplicable("distances need inputs that are one tensor of real numbers")
            x, y = inputs[:left], targets[:left]
            with torch.no_grad():
                outputs = ctx.forward(x)
            ctx.charge_passes("forward", len(x))
            yield x, y, outputs
            left -= len(x)
            advance(len(x))
            if left <= 0 or time_is_over(ctx):
                return


def _outputs_of(ctx: Context, like: Tensor, flat: Tensor) -> Tensor:
    """Outputs of inputs given as vectors (n, d), with what that takes charged."""
    ctx.charge_passes("forward", len(flat))
    if flat.requires_grad:
        ctx.charge_passes("backward", len(flat))
    return ctx.forward(flat.reshape(len(flat), *like.shape[1:]))


def _outputs_within_time_limit(ctx: Context, like: Tensor, flat: Tensor) -> Tensor:
    """The same, given up where the time of the whole call is over: classes are many, and each takes a pass."""
    refuse_out_of_time(ctx)
    return _outputs_of(ctx, like, flat)


def _margins_by_search(ctx: Context, x: Tensor, y: Tensor, outputs: Tensor, restarts: int) -> tuple[Tensor, float]:
    """Distances of what the search finds, float64, on the CPU, 0 where misclassified; and the last round's gain."""
    right = outputs.gather(1, y[:, None])[:, 0] > outputs.scatter(1, y[:, None], -torch.inf).amax(1)
    distances, gain = torch.zeros(len(x), dtype=torch.float64), 0.0
    if bool(right.any()):
        generator = ctx.generator("geometric_margin")
        network, start = partial(_outputs_of, ctx, x), as_rows(x[right])
        nearest = nearest_changes(network, start, y[right], restarts, generator, partial(time_is_over, ctx))
        distances[right.cpu()], gain = nearest.distances.double().cpu(), nearest.last_gain
    return distances, gain


def _certified_margins(outputs: Tensor, y: Tensor, constants: Tensor) -> Tensor:
    """min_j (f_y − f_j)/L_yj, 0 where misclassified."""
    outputs, y = outputs.double().cpu(), y.cpu()
    gaps = outputs.gather(1, y[:, None]) - outputs
    radii = (gaps / constants[y]).scatter(1, y[:, None], math.inf)
    return radii.amin(1).clamp_min(0) * (1 - ROUNDING)


def _pair_constants(ctx: Context) -> Tensor | str:
    """Lipschitz constants of f_y − f_j, (C, C), or why there are none.

    If the outputs come straight from a dense layer, the constant of its input times ‖w_y − w_j‖; else √2 times that of
    all outputs.
    """
    following = Constants(ctx, ctx.problem.example(1))
    last: list[tuple[float, Tensor, Any]] = []

    def watch(op: Operation) -> Any:
        result = following.follow(op)
        if op.name == "linear":
            given = op.named("input", "weight", "bias")
            if following.knows(given["input"]) and not following.knows(given["weight"]):
                last[:] = [(following.log_constant(given["input"]), given["weight"].double(), result)]
        return result

    try:
        outputs = following.run(watch)
        refuse_broken_constant(ctx, following.log_constant(outputs), 2, "geometric_margin")
    except NotApplicable as problem:
        return f"no certified lower end: {problem}"
    if last and last[0][2] is outputs and outputs.ndim == 2:
        log_constant, weight, _ = last[0]
        lengths = (weight[:, None] - weight).norm(dim=2).cpu()
        return _lengths_times_constant(lengths, log_constant)
    n = ctx.problem.n_outputs
    return _lengths_times_constant(
        math.sqrt(2) * (1 - torch.eye(n, dtype=torch.float64)), following.log_constant(outputs)
    )


def _lengths_times_constant(lengths: Tensor, log_constant: float) -> Tensor:
    """Products over many layers may leave the range of float64: infinite constants certify the radius 0."""
    return torch.exp(lengths.log() + log_constant)
