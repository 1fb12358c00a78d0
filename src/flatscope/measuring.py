"""`measure` and `bounds`: run declared functions on a problem and lay their results out as a table."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from flatscope.context import Context, Effort, make_effort
from flatscope.errors import (
    FlatscopeError,
    InputError,
    Interrupted,
    NotApplicable,
    first_line,
    lack_of_memory,
    missing_derivative,
)
from flatscope.formatting import time_in_words
from flatscope.forms import context_in_declared_form, refuse_missing_needs
from flatscope.isolation import own_settings, release_traceback_tensors
from flatscope.looking import LaterLook, minimum_facts, remark_on_network
from flatscope.network_summary import STANDING
from flatscope.planning import (
    Schedule,
    advise_matrix,
    has_time,
    is_late,
    make_schedule,
    quantities_of_sweep,
    shared_work,
    time_to_descend,
    wants_only_whole_trace,
)
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.registry import Declaration, Result, Value, declarations, select, unknown_name
from flatscope.result_rows import Row, rows_of_result
from flatscope.summarising import unknown_minimum
from flatscope.table import Table

Names = str | Iterable[str] | None
Options = Mapping[str, Mapping[str, Any]]
Watch = Callable[[Declaration, list[Row]], None]
FAILED = "failed: "  # how the reason of a measure begins that raised an error
INTERRUPTED = "not done: the call was interrupted"


def measure(
    problem: Problem,
    names: str | Iterable[str] | None = None,
    seed: int = 0,
    options: Options | None = None,
    *,
    precision: float = 0.02,
    budget: float | str | None = None,
    memory: int | str | None = None,
    curvature: str = "hessian",
    context: Context | None = None,
    watch: Watch | None = None,
) -> Table:
    """Measure a trained network.

    Args:
        problem: model, data, loss.
        names: names or globs of measures; None: the core set; "standard": all that are not "long"; "all": every one.
        seed: of all random streams.
        options: {measure: {option: value}}; defaults are the papers' values.
        precision: relative standard error at which estimates stop (no later than at their own number of draws);
            0 for exact values and all draws.
        budget: time after which the call ends: seconds, or "90s", "10m", "2h". Cheap measures come first, then whether
            this is a minimum; estimates stop with the error they have reached; what there is no time for is a row that
            says so.
        memory: what sweeps may use: bytes, or "8GiB"; None for a share of what is free.
        curvature: "hessian", or "gauss_newton" where the cheaper matrix is wanted.
        context: share the sweeps of an earlier call (its seed and its effort are used).
        watch: called with the declaration and the rows of each one as it is done.

    Returns:
        A table with a row per number. A measure that has no value here gives one row with NaN and the reason. Whether
        this is a minimum is looked at when somebody asks (headline, metadata, printing, saving), until when the table
        holds its problem; at once where the network is large or on a GPU, data are not tensors, or time is limited.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> fs.measure(problem, "parameter_count")["parameter_count"]
        8.0
    """
    with _context_for_call(problem, "measure", seed, (precision, budget, memory, curvature), context) as ctx:
        return _run_schedule(ctx, "measure", names, options or {}, {}, watch, may_wait=context is None)


def bounds(
    problem: Problem,
    names: str | Iterable[str] | None = None,
    seed: int = 0,
    options: Options | None = None,
    *,
    delta: float = 0.05,
    precision: float = 0.02,
    budget: float | str | None = None,
    memory: int | str | None = None,
    curvature: str = "hessian",
    context: Context | None = None,
    watch: Watch | None = None,
) -> Table:
    """Evaluate generalization bounds; each row says whether it is vacuous and what it assumes.

    Args:
        problem: model, data, loss.
        names: names or globs of bounds; "all" for every one, None for those that do not take long.
        seed: of all random streams.
        options: {bound: {option: value}}.
        delta: the bound holds with probability at least 1 - delta.
        precision: as in `measure`, like the next three.
        budget: time after which the call ends.
        memory: what sweeps may use.
        curvature: "hessian" or "gauss_newton".
        context: share the sweeps of an earlier call (its seed and its effort are used).
        watch: called with the declaration and the rows of each one as it is done.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> table = fs.bounds(problem, "parameter_counting")
        >>> table.to_frame()["vacuous"].tolist()
        [True]
    """
    if not 0 < delta < 1:
        raise InputError("0 < delta < 1", str(delta), where="delta")
    with _context_for_call(problem, "bound", seed, (precision, budget, memory, curvature), context) as ctx:
        return _run_schedule(ctx, "bound", names, options or {}, {"delta": delta}, watch, may_wait=False)


def plan_of_measures(context: Context, names: str | Iterable[str] | None = None) -> Schedule:
    """Schedule of `measure`, with expected times: a pass over a batch is timed.

    Args:
        context: the network, and how much effort may be made.
        names: as in `measure`.
    """
    chosen = select(names)
    left_out = [name for name, entry in declarations().items() if names is None and entry not in chosen]
    with own_settings(context.problem.generators):
        return make_schedule(context, chosen, left_out, timed=True)


@contextmanager
def _context_for_call(
    problem: Problem, kind: str, seed: int, effort: tuple[Any, Any, Any, Any], context: Context | None
) -> Iterator[Context]:
    """The context that was given, or one for this call alone."""
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, where=kind, fix="Make one: Problem(model, train=(x, y))")
    asked = make_effort(*effort)
    if context is None:
        own = Context(problem, seed=seed, effort=asked)
        try:
            yield own
        finally:
            own.forget()
        return
    if context.problem is not problem:
        raise InputError("a context of this problem", "one of another", where=kind, fix="Context(problem)")
    if asked != Effort():  # what the context has computed already was computed with its own effort
        fix = "Leave them out, or measure without the context"
        raise InputError("no precision, budget, memory or curvature beside a context", str(asked), where=kind, fix=fix)
    yield context


def _run_schedule(
    ctx: Context, kind: str, names: Names, options: Options, common: Row, watch: Watch | None, *, may_wait: bool
) -> Table:
    problem = ctx.problem
    chosen = select(names, kind)
    if not chosen:
        raise InputError(f"at least one name of a {kind}", "none", "names", 'Leave it out, or take "standard"')
    checked = _checked_options(ctx, kind, chosen, options, common)
    rows_by_name: dict[str, list[Row]] = {}
    minimum = _LookDuringCall(ctx, is_read=any(entry.falls_with_loss for entry in chosen))
    look: LaterLook | None = None

    def table() -> Table:
        rows = [
            row
            for entry in chosen
            for row in rows_by_name.get(entry.name) or rows_not_done(ctx, entry, INTERRUPTED, common)
        ]
        facts = ctx.provenance(begun) | minimum.facts
        remarks = [*problem.remarks, *ctx.remarks]
        return Table(rows, facts | ({"remarks": remarks} if remarks else {}), look)

    effort = ctx.effort
    with own_settings(problem.generators):
        begun = time.perf_counter()
        ctx.effort = replace(
            effort,
            crashes={},
            quantities=quantities_of_sweep(chosen),
            trace_alone=wants_only_whole_trace(chosen),
        )
        try:
            schedule = make_schedule(ctx, chosen)
            waits = may_wait and effort.end is None and LaterLook.is_possible(ctx)
            for entry, rows in _rows_by_measure(ctx, schedule, checked, common):
                rows_by_name[entry.name] = rows
                if watch is not None:
                    watch(entry, rows)
                minimum.look_after(entry, schedule)
            if not waits:
                minimum.look_at_the_end(schedule)
        except KeyboardInterrupt as stop:
            left = ", ".join(entry.name for entry in chosen if entry.name not in rows_by_name)
            done = f"{len(rows_by_name)} of {len(chosen)} {kind}s are done"
            text = f"{str(stop) or 'Interrupted'}: {done}; go on with {left}"
            raise Interrupted(text, table()) from None
        finally:
            ctx.effort = effort
        advise_matrix(ctx, {name: rows[0]["seconds"] for name, rows in rows_by_name.items()}, kind)
        if waits:
            look = LaterLook(ctx, minimum.is_read, [*problem.remarks, *ctx.remarks])
        elif kind == "measure" and any(ctx.passes.values()):
            remark_on_network(ctx, backwards=any(ctx.passes[name] for name in ctx.passes if name != "forward"))
    return table()


class _LookDuringCall:
    """Facts on whether the weights are a minimum: as soon as it is time to look, or at the end of a call.

    Args:
        ctx: the network.
        is_read: whether a measure is among those asked for that says something of a minimum alone.
    """

    def __init__(self, ctx: Context, *, is_read: bool) -> None:
        self.ctx, self.is_read = ctx, is_read
        self.facts: Row = {}

    def look_after(self, entry: Declaration, schedule: Schedule) -> None:
        """Look, where it is time to after this measure."""
        if self.is_read and not self.facts and time_to_descend(self.ctx, schedule, after=entry):
            self.facts |= minimum_facts(self.ctx)

    def look_at_the_end(self, schedule: Schedule) -> None:
        """Look where nobody has and there is time, and say so where it stays unknown."""
        if not self.is_read:
            return
        end = self.ctx.effort.end
        if not self.facts and (end is None or time.monotonic() < end):
            self.facts |= minimum_facts(self.ctx)
        if said := unknown_minimum(self.facts.get(STANDING, {}), is_late(self.ctx, schedule)):
            self.ctx.remark(said)


def _checked_options(
    ctx: Context, kind: str, chosen: Sequence[Declaration], options: Options, common: Row
) -> dict[str, Row]:
    """Options by name, also of what was not chosen: a misspelt name must not pass for one of these."""
    known, checked = declarations(kind), dict[str, Row]()
    for name, given in options.items():
        if name not in known:
            raise unknown_name(name, known, f"{kind} in options")
        checked[name] = known[name].checked_options(given)
        if known[name] not in chosen:
            ctx.remark(f"options of {name} have no effect: it was not asked for")
        if twice := ", ".join(checked[name].keys() & common.keys()):
            fix = f"Pass {twice} to fs.{kind}s itself: it is the same for all of them"
            raise InputError("options of its own", repr(checked[name]), where=f"options of {name}", fix=fix)
    return checked


def _rows_by_measure(
    ctx: Context, schedule: Schedule, options: Options, common: Row
) -> Iterator[tuple[Declaration, list[Row]]]:
    """The rows of one measure after the other; within a budget, if there is one."""
    whole, left, slowness = ctx.effort, schedule.units, 1.0
    spent = expected = 0.0
    paid: set[str] = set()
    with progress_bar("Measuring", total=max(left, 1e-9), lines=True, counted=False) as advance:
        for number, entry in enumerate(schedule.entries, start=1):
            note = f"{entry.name} ({number} of {len(schedule.entries)})"
            cost, stops = schedule.cost(entry, paid), schedule.stops(entry)
            advance(0, note=note, coming=cost, slow=schedule.cheaper_matrix(entry))
            seconds = slowness * cost * (schedule.seconds or 0.0)
            begun = time.monotonic()
            if begins := has_time(ctx, whole, seconds, stops):
                if whole.deadline is not None and stops:  # its share of what is left, by cost
                    share = (whole.deadline - begun) * min(1.0, cost / max(left, 1e-9))
                    ctx.effort = replace(whole, deadline=begun + share)
                rows = list(_rows_of_declaration(ctx, entry, dict(options.get(entry.name, {})), common))
                ctx.effort = whole
                paid |= shared_work(entry)
            else:
                rows = rows_not_done(ctx, entry, f"not begun: would take about {time_in_words(seconds)}", common)
            left -= cost
            # Passes of other kinds may cost more here than they usually do.
            if begins and cost >= 1 and schedule.seconds:
                spent, expected = spent + time.monotonic() - begun, expected + cost * schedule.seconds
                slowness = max(1.0, spent / expected)
            advance(cost)
            yield entry, rows


def rows_not_done(ctx: Context, entry: Declaration, reason: str, common: Row) -> list[Row]:
    """The row of a measure for which there was no time."""
    return list(rows_of_result(ctx, entry, _value_with_reason(reason), {}, common, 0.0, 0.0))


def _value_with_reason(reason: str) -> Value:
    return Value(math.nan, exact=False, reason=reason)


def _rows_of_declaration(ctx: Context, entry: Declaration, given: Row, common: Row) -> Iterator[Row]:
    begun = time.perf_counter()
    with ctx.charged() as spent:
        try:
            point = context_in_declared_form(ctx, entry)
            point.effort = ctx.effort  # a way of writing the network that was made earlier had another deadline
            refuse_missing_needs(point, entry)
            result: Result = entry.function(point, **common, **given)
        except FlatscopeError as problem:
            # A fault, not a refusal: an option to put right, or other ranks may be waiting for this one.
            if not isinstance(problem, NotApplicable) and (given or ctx.problem.ranks.size > 1):
                problem.where = f"{entry.name}, {problem.where}" if problem.where else entry.name
                raise
            result = _value_with_reason(str(problem))
        except Warning:  # raised only where the user turned warnings into errors
            raise
        except Exception as problem:
            if ctx.problem.ranks.size > 1:
                raise  # the other ranks may be waiting for this one in the middle of a sweep
            # An hour of other measures must not be lost to one that fails: its row says so, loudly.
            refused = missing_derivative(problem)
            said = lack_of_memory(problem) or f"{type(problem).__name__}: {first_line(problem)}"
            reason = f"{FAILED}{said}"
            release_traceback_tensors(problem)
            if refused is None:
                warnings.warn(f"{entry.name} {reason}", RuntimeWarning, stacklevel=2)
            result = _value_with_reason(reason if refused is None else str(refused))
        except BaseException as problem:  # interrupted: nothing may be held by a traceback that somebody keeps
            release_traceback_tensors(problem)
            raise
    shown = {name: value for name, value in given.items() if value != entry.options[name]}
    yield from rows_of_result(
        ctx, entry, result, shown, common, float(sum(spent.values())), time.perf_counter() - begun
    )
