"""What a measurement will take: an estimate in passes for every measure, seconds from a timed pass, and a schedule."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flatscope.context import WEIGHTS, Context, Effort
from flatscope.formatting import time_in_words
from flatscope.limits import STANDARD
from flatscope.registry import Declaration, declarations

COLUMN = STANDARD.column_passes
# What others have paid for already: the sweep's columns, and the gradient.
SHARED = {"sweep", "gradient"}
# Measures that declare neither `passes` nor `typical` take what their kind of cost usually takes.
BY_COST = {"light": {"forward": 1.0}, "sweep": {"sweep": 1.0}, "long": {"forward": 500.0}}
TIMED_SAMPLES = 256
SLOW_SECONDS, SLOWER = 5.0, 5.0  # of the Hessian before another matrix is advised, and how many times as long
DESCENT_PASSES, DESCENT_SHARE = 16.0, 0.75  # of looking whether this is a minimum; of the time left that it may take
LEAST_SHARE = 0.1  # of its usual time without which an estimate or a search is not begun


def expected_passes(entry: Declaration) -> Mapping[str, float]:
    """Usual numbers of passes of a measure, by kind."""
    declared = entry.typical or entry.passes
    return BY_COST[entry.cost] if declared is None else declared


def estimated_forward_passes(
    entry: Declaration,
    columns: int,
    paid: set[str] | None = None,
    n: int = 1,
    sweep: float | None = None,
    outputs: int | None = None,
) -> float:
    """Estimated cost of a measure or bound, in forward passes over the training data.

    Args:
        entry: the declaration.
        columns: of the sweep: outputs of the network, less one under softmax.
        paid: shared work that is done already.
        n: number of training samples.
        sweep: passes of a sweep, where the route says it; else those of its columns.
        outputs: of the network, where columns are drawn of fewer.
    """
    swept = 1 + COLUMN * columns if sweep is None else sweep
    weights = WEIGHTS | {"sweep": swept, "column": COLUMN * columns, "gradient": 2.0, "sample": 1 / n}
    weights["output"] = COLUMN * (columns if outputs is None else outputs)
    return sum(weights[kind] * number for kind, number in expected_passes(entry).items() if kind not in (paid or ()))


def shared_work(entry: Declaration) -> set[str]:
    """Shared work that a measure leaves in the cache for later ones."""
    return set(expected_passes(entry)) & SHARED


# Quantities of the sweep that measures are made of; a measure that is not here may ask for all of them.
MADE_OF = {
    "hessian_trace": ("trace",),
    "layer_trace": ("trace",),
    "kappa_trace": ("trace",),
    "kappa_trace_sum": ("kappa_trace", "trace"),
    "relative_flatness": ("relative_flatness",),
}


def wants_only_whole_trace(chosen: Iterable[Declaration]) -> bool:
    """True if only the trace of the whole network takes a sweep, so that it may be found by products."""
    return all(entry.name == "hessian_trace" for entry in chosen if "sweep" in expected_passes(entry))


def quantities_of_sweep(chosen: Iterable[Declaration]) -> tuple[str, ...]:
    """Quantities of a sweep that some measures are made of, whose errors end its draws; empty where all may be."""
    wanted = [MADE_OF.get(entry.name, ()) for entry in chosen if "sweep" in expected_passes(entry)]
    return tuple(sorted({name for names in wanted for name in names})) if all(wanted) else ()


@dataclass(frozen=True)
class Schedule:
    """Measures in the order in which they are computed."""

    entries: tuple[Declaration, ...]
    columns: int  # that the sweep is expected to take
    samples: int  # of training
    sampled: bool = False  # whether these columns are drawn: then the sweep ends early too
    seconds: float | None = None  # of one forward pass over the training data; None where it was not timed
    left_out: tuple[str, ...] = ()  # names of those that nobody asked for
    sweep: float | None = None  # passes of a sweep by the route, where that was asked
    hessian: bool = True  # whether the curvature is that of the Hessian itself
    outputs: int | None = None  # of the network, where columns are drawn of fewer

    def cost(self, entry: Declaration, paid: set[str]) -> float:
        """Estimated forward passes over the training data for a measure, where so much is paid for already."""
        return estimated_forward_passes(entry, self.columns, paid, self.samples, self.sweep, self.outputs)

    @property
    def units(self) -> float:
        """Cost of all."""
        paid: set[str] = set()
        total = 0.0
        for entry in self.entries:
            total += self.cost(entry, paid)
            paid |= shared_work(entry)
        return total

    def cheaper_matrix(self, entry: Declaration) -> str:
        """Advice where the Hessian takes longer than the sweep that gives its Gauss-Newton part."""
        if not self.hessian or "sweep" not in expected_passes(entry):
            return ""
        cost = estimated_forward_passes(entry, self.columns, n=self.samples)
        about = f" would take about {time_in_words(cost * self.seconds)}" if self.seconds else " is cheaper"
        return f'curvature="gauss_newton"{about}'

    def stops(self, entry: Declaration) -> bool:
        """True if a measure ends early with what it has when its time is up."""
        return (
            not entry.exact or bool(entry.search) or (self.sampled and entry.typical is None and entry.cost == "sweep")
        )

    def __str__(self) -> str:
        """One line: how many measures, how long, and what is left out."""
        kind = self.entries[0].kind if self.entries else "measure"
        text = f"{len(self.entries)} {kind}{'' if len(self.entries) == 1 else 's'}"
        if self.seconds is not None:
            text += f", about {time_in_words(self.units * self.seconds)}"
        if self.left_out:
            text += f"; {len(self.left_out)} others are not in the core set (-m standard, -m all, or by name)"
        return text


def make_schedule(
    ctx: Context, chosen: Sequence[Declaration], left_out: Sequence[str] = (), *, timed: bool = False
) -> Schedule:
    """The measures as they will be computed: with a budget cheap ones first, else in their own order.

    Args:
        ctx: the network, and how much effort may be made.
        chosen: declarations.
        left_out: names to mention.
        timed: whether to time a pass, without a budget as well.
    """
    budget = ctx.effort.deadline is not None
    outputs = columns = max(1, ctx.problem.n_outputs - 1)
    n = ctx.problem.n_train
    if sampled := ctx.effort.precision > 0 and columns > ctx.effort.limits.usual_draws:
        columns = ctx.effort.limits.usual_draws
    ordered = (
        sorted(chosen, key=lambda entry: estimated_forward_passes(entry, columns, n=n, outputs=outputs))
        if budget
        else chosen
    )
    seconds = (ctx.cached if budget or timed else ctx.value_of)(seconds_of_a_pass)
    hessian = ctx.effort.curvature == "hessian"
    return Schedule(tuple(ordered), columns, n, sampled, seconds, tuple(left_out), hessian=hessian, outputs=outputs)


def seconds_of_a_pass(ctx: Context) -> float:
    """Time of a forward pass over the training data, from a batch of it: the faster of two runs."""
    inputs, targets = next(iter(ctx.batches(size=min(TIMED_SAMPLES, ctx.problem.batch_size))))
    device, best = ctx.problem.device, float("inf")
    for _ in range(2):
        begun = time.perf_counter()
        with torch.no_grad():
            ctx.forward(inputs)
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - begun)
    ctx.charge_passes("forward", 2 * len(targets))
    return best * ctx.problem.n_train / len(targets)


def has_time(ctx: Context, effort: Effort, seconds: float, stops: bool) -> bool:
    """True if a measure may begin: what cannot stop early must be expected to end in time, others to get somewhere."""
    if effort.deadline is None:
        return True
    if seconds == 0:  # of the weights alone: mostly nothing, but not of millions of them
        return not ctx.problem.ranks.anywhere(effort.last is not None and time.monotonic() > effort.last)
    left = effort.deadline - time.monotonic()
    enough = left > 0 and left >= seconds * (LEAST_SHARE if stops else 1.0)
    return not ctx.problem.ranks.anywhere(not enough)


def time_to_descend(ctx: Context, schedule: Schedule, after: Declaration) -> bool:
    """True if it is time to look for a minimum: in a budget, after what is cheap, before what may take all the time."""
    deadline, seconds = ctx.effort.deadline, schedule.seconds
    if deadline is None or seconds is None:
        return False
    coming = schedule.entries[schedule.entries.index(after) + 1 :][:1]
    if any("sweep" not in expected_passes(entry) and schedule.cost(entry, set()) <= DESCENT_PASSES for entry in coming):
        return False
    enough = DESCENT_PASSES * seconds <= DESCENT_SHARE * (deadline - time.monotonic())
    return not ctx.problem.ranks.anywhere(not enough)


def is_late(ctx: Context, schedule: Schedule) -> bool:
    """True if too little of a budget is left to look if this is a minimum."""
    deadline, seconds = ctx.effort.deadline, schedule.seconds or 0.0
    return deadline is not None and time.monotonic() + DESCENT_PASSES * seconds > deadline


def advise_matrix(ctx: Context, seconds: Mapping[str, float], kind: str) -> None:
    """Remark where the Hessian of the sweep's measures took far longer than its Gauss-Newton part would.

    Args:
        ctx: the network.
        seconds: that each measure took, by its name.
        kind: "measure" or "bound".
    """
    known = declarations(kind)
    took = sum(spent for name, spent in seconds.items() if "sweep" in expected_passes(known[name]))
    if ctx.effort.curvature != "hessian" or took < SLOW_SECONDS or ctx.problem.ranks.size > 1:
        return
    with ctx.charged_to_nobody():
        columns = max(1, ctx.problem.n_outputs - 1)
        drawn = STANDARD.usual_draws if ctx.effort.precision > 0 else columns
        cheaper = ctx.cached(seconds_of_a_pass) * (1 + COLUMN * min(columns, drawn))
    if took > SLOWER * cheaper:
        ctx.remark(
            f"the Hessian took {time_in_words(took)}; its Gauss-Newton part would take about {time_in_words(cheaper)} "
            '(curvature="gauss_newton", --curvature gauss_newton): the matrix that most papers on large models mean'
        )
