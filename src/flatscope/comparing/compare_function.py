"""`compare`: measure several networks on the same data and see what may be said about them."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from torch import nn

from flatscope.comparing.comparison import Comparison
from flatscope.comparing.copies import TOLERANCE, find_copies, find_near_copies
from flatscope.comparing.held_out import HeldOut, paired_test_errors
from flatscope.context import Context, Effort, make_effort
from flatscope.errors import FlatscopeError, InputError, Interrupted, NotApplicable
from flatscope.formatting import printable_text
from flatscope.input_checks import NOTHING_HELD_OUT, advice_on_model
from flatscope.isolation import own_settings, untouched_randomness
from flatscope.loss import PerSample
from flatscope.measuring import INTERRUPTED, Options, measure, rows_not_done
from flatscope.network_summary import NetworkSummary
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.registry import select
from flatscope.sample_digests import order_digest
from flatscope.summarising import summary_of
from flatscope.symmetries.folding import fold_batchnorm, has_batchnorm
from flatscope.table import Table
from flatscope.version import __version__

NO_TIME = "not begun: the time was up"
# What a gradient takes, and the looks for copies of one network with another, in passes over the samples.
GRADIENT_PASSES, COPY_PASSES = 4, 2
Networks = Mapping[str, "Problem | nn.Module"] | Sequence["Problem | nn.Module"]


@own_settings()
def compare(
    networks: Networks,
    data: Any = None,
    names: str | Iterable[str] | None = None,
    seed: int = 0,
    options: Options | None = None,
    *,
    test: Any = None,
    loss: str | PerSample = "cross_entropy",
    tolerance: float = TOLERANCE,
    confidence: float = 0.95,
    precision: float = 0.02,
    budget: float | str | None = None,
    memory: int | str | None = None,
    curvature: str = "hessian",
) -> Comparison:
    """Measure several networks, rank them, and say which of the rankings mean anything.

    Every network is measured as `measure` does it, in float64, so that rounding does not pass for a difference.
    Networks that give the same outputs are recognised as copies of each other; a measure that differs between them is
    not used.

    Args:
        networks: problems, or models in eval mode together with `data`; a dictionary gives them names.
        data: training data for models: what `Problem` takes as `train`.
        names: names or globs of measures; None: the core set; "standard": all that are not "long"; "all": every one.
        seed: of all random streams, the same for every network.
        options: {measure: {option: value}}.
        test: held-out data for models.
        loss: for models: as in `Problem`.
        tolerance: difference of outputs, relative to the largest, up to which two networks are the same function.
        confidence: level of the intervals of ranks.
        precision: as in `measure`, like the next three.
        budget: time for all networks together; each has an equal share of what is left.
        memory: what sweeps may use.
        curvature: "hessian" or "gauss_newton".

    Example:
        >>> import torch, flatscope as fs
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.ReLU(), torch.nn.Linear(5, 3))
        >>> twin = fs.rescale(net, torch.eye(4))
        >>> data = (torch.eye(4), torch.tensor([0, 1, 2, 0]))
        >>> found = fs.compare({"net": net, "twin": twin}, data, ["hessian_trace", "l1_path_norm"])
        >>> [(pair.first, pair.second, pair.how) for pair in found.same_function]
        [('net', 'twin', 'units rescaled')]
        >>> found.verdict("hessian_trace").word, found.verdict("l1_path_norm").word
        ('not comparable', 'equal')
    """
    chosen, begun = select(names), time.perf_counter()
    whole = make_effort(precision, budget, memory, curvature)
    problems = _problems_by_name(networks, data, test, loss)
    _refuse_other_data(problems)
    problems = {name: problem.in_double() for name, problem in problems.items()}
    folded = {name: _without_batchnorm(problem) for name, problem in problems.items()}
    contexts = {name: Context(problem, seed=seed, effort=whole) for name, problem in problems.items()}
    summaries, late = _summaries(contexts, folded, whole)
    with _in_time(whole, problems):
        alone = all(problem.ranks.size == 1 for problem in problems.values())  # others would wait for one that gives up
        copies = find_copies(folded, tolerance, problems, partial(_refuse_short_budget, whole) if alone else None)
    tables: dict[str, Table] = {}
    stopped = ""
    distinct = [name for name in problems if name not in {pair.second for pair in copies}]
    near = find_near_copies({name: problems[name] for name in distinct})
    tests = paired_test_errors(contexts, summaries, distinct)
    with progress_bar("Comparing", total=len(problems), lines=True) as advance:
        for number, (name, problem) in enumerate(problems.items(), 1):
            advance(0, note=f"{name} ({number} of {len(problems)})", coming=1)
            effort = _share_of_effort(whole, len(contexts))
            context = contexts.pop(name)
            context.effort = effort
            try:
                if reason := INTERRUPTED if stopped else NO_TIME if problem.ranks.anywhere(_time_is_up(whole)) else "":
                    tables[name] = Table([row for entry in chosen for row in rows_not_done(context, entry, reason, {})])
                else:
                    tables[name] = measure(problem, [entry.name for entry in chosen], options=options, context=context)
            except Interrupted as stop:
                stopped = f"{name}: {stop}; the same call begins anew"
                tables[name] = stop.result
            finally:
                context.forget()
            tables[name].meta["name"] = name
            advance(1)
    meta = {
        **_comparison_meta(next(iter(problems.values())), tests),
        "seed": seed,
        "tolerance": tolerance,
        "confidence": confidence,
        "seconds": round(time.perf_counter() - begun, 3),
        "not_looked": late,
        "near_copies": near,
    }
    comparison = Comparison(tables, summaries, copies, meta)
    if stopped:
        raise Interrupted(stopped, comparison)
    return comparison


def _comparison_meta(problem: Problem, tests: HeldOut | None) -> dict[str, Any]:
    """Version, loss, numbers of samples and test errors; but for the last the same for all networks."""
    return {
        "version": __version__,
        "loss": problem.loss.name,
        "n_train": problem.n_train,
        "n_test": 0 if problem.test is None else problem.test.n,
        "tests": None if tests is None else tests.to_dict(),
        "nothing_held_out": (nothing := NOTHING_HELD_OUT in problem.remarks),
        "overlap": None if problem.overlap is None or nothing else asdict(problem.overlap),
    }


def _summaries(
    contexts: Mapping[str, Context], folded: Mapping[str, Problem], effort: Effort
) -> tuple[dict[str, NetworkSummary], list[str]]:
    """Summaries of all networks: without losses nothing can be compared, so these come first.

    A gradient is only taken where the time is expected to suffice for it and for the copies that are looked for next;
    and the names of those of which there was no time to see whether they are at a minimum.
    """
    problems, summaries, late = {name: context.problem for name, context in contexts.items()}, {}, []
    with _in_time(effort, problems):
        begun = time.monotonic()
        for context in contexts.values():
            with own_settings(context.problem.generators):
                for part in ("train",) if context.problem.test is None else ("train", "test"):
                    context.scores(part)
        passing = (time.monotonic() - begun) / len(contexts)
        needed = passing * (GRADIENT_PASSES + COPY_PASSES * len(contexts))
        for name, context in contexts.items():
            enough = effort.end is None or time.monotonic() + needed < effort.end
            enough = enough or context.problem.ranks.size > 1
            summaries[name] = summary_of(context, folded[name], differentiates=enough)
            if math.isnan(summaries[name].fall) and not (
                enough and (effort.end is None or time.monotonic() < effort.end)
            ):
                late.append(name)
    return summaries, late


@contextmanager
def _in_time(effort: Effort, problems: Mapping[str, Problem]) -> Iterator[None]:
    """Say that the budget is too short, where that is why something could not be done that every comparison needs."""
    try:
        yield
    except NotApplicable as problem:
        if not _time_is_up(effort):
            raise
        n = next(iter(problems.values())).n_train
        expected = f"time for the losses of all networks on {n:,} samples, and to see which are one function"
        got, fix = "a budget that ended before", "Give it more time, or fewer samples"
        raise InputError(expected, got, "compare", fix) from problem


def _time_is_up(effort: Effort) -> bool:
    """True if the time of the whole comparison is up, with what may be taken over it."""
    return effort.last is not None and time.monotonic() > effort.last


def _refuse_short_budget(effort: Effort) -> None:
    if _time_is_up(effort):
        raise NotApplicable("the time was up before it was done")


def _share_of_effort(whole: Effort, networks: int) -> Effort:
    """The effort for the next of so many networks: an equal share of the time that is left, none past the whole."""
    if whole.end is None or whole.last is None:
        return whole
    share = max(whole.end - time.monotonic(), 1e-3) / networks
    effort = make_effort(whole.precision, share, whole.memory, whole.curvature)
    return replace(effort, last=min(effort.last or whole.last, whole.last))


def _problems_by_name(networks: Networks, data: Any, test: Any, loss: str | PerSample) -> dict[str, Problem]:
    """Everything as problems, by name."""
    if isinstance(networks, Mapping):
        named = {printable_text(str(name)): given for name, given in networks.items()}
    elif isinstance(networks, Sequence):
        named = {f"network {number}": given for number, given in enumerate(networks, 1)}
    else:
        fix = 'Name them: fs.compare({"first": model, "second": other}, train, test=test)'
        raise InputError("a list or dictionary of networks", type(networks).__name__, "compare", fix)
    if len(named) < 2:
        raise InputError("at least two networks", str(len(named)), where="compare", fix="Measure one with fs.measure")
    by_name: dict[str, Problem] = {}
    for name, given in named.items():
        if isinstance(given, Problem):
            if data is not None or test is not None:
                fix = "Problems have their data already; pass models with data=, or problems without"
                raise InputError("models where data are given", "a Problem", where=f"compare, {name}", fix=fix)
            by_name[name] = given
        elif isinstance(given, nn.Module):
            if data is None:
                raise InputError("data for models", "none", where="compare", fix="Pass data=(x, y), or problems")
            first = next(iter(by_name.values()), None)  # read once, shared by all
            train = data if first is None else first.train
            held_out = test if first is None or test is None else first.test
            try:
                by_name[name] = Problem(given, train=train, test=held_out, loss=loss)
            except FlatscopeError as problem:
                problem.where = f"{name}, {problem.where}" if problem.where else name
                raise
        else:
            fix = advice_on_model(given)
            raise InputError("a Problem or a torch.nn.Module", type(given).__name__, f"compare, {name}", fix)
    return by_name


def _refuse_other_data(problems: Mapping[str, Problem]) -> None:
    """Values on different samples or losses, or of different outputs, do not compare."""
    (first_name, first), *others = problems.items()
    for name, problem in others:
        where = f"compare, {name}"
        if problem.loss.name != first.loss.name:
            got = f"{problem.loss.name}, and {first.loss.name} for {first_name}"
            raise InputError("one loss for all networks", got, where=where)
        if problem.n_outputs != first.n_outputs:
            shape, of_first = (tuple(each.first_output.shape[1:]) for each in (problem, first))
            fix = "Give all of them the same classes, or measure each on its own with fs.measure"
            got = f"{shape}, and {of_first} for {first_name}: they answer different questions"
            raise InputError("outputs of one shape for all networks", got, where, fix)
        if (problem.test is None) != (first.test is None):
            raise InputError("test data for all networks or for none", "for some", where=where)
        if problem.train is first.train:
            continue
        with untouched_randomness((*first.generators, *problem.generators)):
            digest, again, theirs = order_digest(first.train), order_digest(first.train), order_digest(problem.train)
        shuffled = digest != again  # then only their number can be compared
        if problem.n_train != first.n_train or (not shuffled and digest != theirs):
            got = f"others than those of {first_name}"
            raise InputError("the same training samples in the same order for all networks", got, where=where)


def _without_batchnorm(problem: Problem) -> Problem:
    """The same function without BatchNorm, in which copies are looked for; as given where it cannot be folded."""
    if not has_batchnorm(problem.model):
        return problem
    try:
        return problem.with_model(fold_batchnorm(problem.model, problem.example()))
    except InputError:
        return problem
