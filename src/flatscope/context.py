"""Context: one point in weight space, and the passes over the data that measures share.

Every sweep is computed at most once per context: the first measure that asks pays, the others read.
What a measurement may cost, as people write it: "10m" of time, "8GiB" of memory, 2 % of error.
"""

from __future__ import annotations

import hashlib
import math
import re
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatscope.errors import FlatscopeError, InputError, NotApplicable, refuse_unknown
from flatscope.limits import STANDARD, Limits
from flatscope.network.interception import OperationRule
from flatscope.network.layers import Network
from flatscope.network.structure import Structure
from flatscope.params import Params
from flatscope.problem import Problem
from flatscope.progress import spend
from flatscope.reading import layers_of_problem
from flatscope.samples import Batch, Inputs

T = TypeVar("T")


@dataclass(frozen=True)
class Scores:
    """Per-sample results of one forward pass, float64, on the CPU, in the order of the data."""

    losses: Tensor
    margins: Tensor | None

    @property
    def loss(self) -> float:
        """Mean loss."""
        return float(self.losses.mean())

    @property
    def error(self) -> float:
        """Fraction of samples whose label does not have the strictly largest output."""
        if self.margins is None:
            raise NotApplicable("class labels", "a regression problem", where="error")
        return float((~(self.margins > 0)).double().mean())  # NaN is no margin


@dataclass(frozen=True)
class Effort:
    """Limits of a measurement: precision, time, memory, and the matrix of curvature."""

    precision: float = 0.02  # relative standard error at which estimates stop; 0 asks for exact values
    curvature: str = "hessian"  # "hessian", or "gauss_newton" where the cheaper matrix is wanted
    memory: int | None = None  # bytes that sweeps may use; None for a share of what is free
    limits: Limits = STANDARD  # what decides between ways to a value, and when draws end
    quantities: tuple[
        str, ...
    ] = ()  # those of a sweep that are asked for, whose errors end its draws; none: all of them
    trace_alone: bool = False  # whether nothing asks for layers, so that a trace may go by products of the whole
    # `time.monotonic()` at which estimates end with the error they have reached; None for no limit
    deadline: float | None = None
    end: float | None = None  # that at which the call is over: what has no estimate by then has none at all
    # Somewhat later: what goes over the samples is given up between two batches
    last: float | None = None
    # Sweeps that crashed in this call, with what they raised: none is tried twice. None outside of calls
    crashes: dict[Hashable, Exception] | None = field(default=None, compare=False, repr=False)


class Context:
    """A problem at given weights, with its sweeps.

    Args:
        problem: model, data, loss.
        params: the point; the problem's own weights by default.
        seed: every random stream of a measure derives from it and from the stream's name alone.
        effort: how much work a measurement may do.

    Example:
        >>> import torch, flatscope as fs
        >>> problem = fs.Problem(torch.nn.Linear(3, 2), train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> context = fs.Context(problem)
        >>> table = fs.measure(problem, "margin", context=context)
        >>> table = fs.measure(problem, "functional_margin", context=context)  # reads what is there
        >>> context.passes["forward"]
        1.0
    """

    def __init__(
        self, problem: Problem, params: Params | None = None, *, seed: int = 0, effort: Effort | None = None
    ) -> None:
        if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < 2**63:
            raise InputError("a whole number from 0 up", repr(seed), where="seed")
        self.problem, self.seed, self.effort = problem, seed, effort or Effort()
        self.params: Params = problem.params if params is None else params
        self.passes: Counter[str] = Counter()
        self.remarks: list[str] = []  # of what was found while measuring; kept with every table
        self._cache: dict[tuple[str, Hashable], Any] = {}

    @property
    def trainable(self) -> Params:
        """The parameters that derivatives and perturbations move."""
        return {name: self.params[name] for name in self.problem.trainable}

    def leaves(self, names: Iterable[str] | None = None) -> Params:
        """Tensors to differentiate by, of the trainable parameters or of others."""
        chosen = self.problem.trainable if names is None else names
        return {name: self.params[name].detach().requires_grad_() for name in chosen}

    @property
    def network(self) -> Network:
        """The layers of the network, in forward order."""
        return layers_of_problem(self.problem)

    @property
    def structure(self) -> Structure:
        """Recorded passes of the network."""
        return self.problem.structure

    def at(self, params: Params) -> Context:
        """Another point on the same data: same problem, same seed, nothing computed yet."""
        unknown = set(params) - set(self.params)
        if unknown:
            raise InputError("parameters of this network", ", ".join(sorted(unknown)), where="Context.at")
        return Context(self.problem, {**self.params, **params}, seed=self.seed, effort=self.effort)

    def on(self, problem: Problem, params: Params | None = None) -> Context:
        """The same network written in another way: same seed and effort, and one account of passes for both."""
        other = Context(problem, params, seed=self.seed, effort=self.effort)
        other.passes, other.remarks = self.passes, self.remarks
        return other

    def in_double(self) -> Context:
        """The same point in float64, made once, with the present effort."""
        twin = self.cached(_context_in_float64)
        twin.effort = self.effort
        return twin

    def cached(self, function: Callable[..., T], **options: Any) -> T:
        """`function(self, **options)`, computed once per context and options; where it crashes, tried once per call."""
        key = (f"{function.__module__}.{function.__qualname__}", tuple(sorted(options.items())))
        crashes = self.effort.crashes
        if crashes and (self, key) in crashes:
            raise crashes[self, key]
        if key not in self._cache:
            try:
                self._cache[key] = function(self, **options)
            except (FlatscopeError, Warning):  # refused, not crashed: there may be more time for it later
                raise
            except Exception as problem:
                if crashes is not None:
                    crashes[self, key] = problem
                raise
        result: T = self._cache[key]
        return result

    def knows(self, function: Callable[..., Any]) -> bool:
        """True if `cached` has a result of a function, whatever its options."""
        return any(name == f"{function.__module__}.{function.__qualname__}" for name, _ in self._cache)

    def has_cached(self, function: Callable[..., Any], **options: Any) -> bool:
        """True if `cached` has the result of a function with these options."""
        return (f"{function.__module__}.{function.__qualname__}", tuple(sorted(options.items()))) in self._cache

    def value_of(self, function: Callable[..., T]) -> T | None:
        """Result of `cached` for this function without options; None where it has not been asked for."""
        return self._cache.get((f"{function.__module__}.{function.__qualname__}", ()))

    def structural(self, function: Callable[..., T], **options: Any) -> T:
        """`function(context, **options)`, computed once for all weights that this network may have.

        The context is at the problem's own weights: at others, such as zeros, two ways to a number may agree by chance.
        """
        unmoved = all(self.params[name] is value for name, value in self.problem.params.items())
        return self.problem.facts.once(function, self if unmoved else self.on(self.problem), **options)

    def forget(self) -> None:
        """Let go of all that was computed: much of it knows its context, and would wait for the garbage collector."""
        kept, self._cache = self._cache, {}
        for value in kept.values():
            if isinstance(value, Context):  # the same network written in another way; perhaps itself
                value.forget()

    def generator(self, stream: str) -> torch.Generator:
        """A CPU generator for one random stream: the same numbers whatever else is measured, on any device."""
        digest = hashlib.blake2b(f"{self.seed}/{stream}".encode(), digest_size=8).digest()
        return torch.Generator().manual_seed(int.from_bytes(digest, "big") >> 1)

    @property
    def _deadline_of_passes(self) -> float | None:
        """When passes are given up; not by one of several ranks alone, for which the others would wait."""
        return self.effort.last if self.problem.ranks.size == 1 else None

    def batches(self, part: str = "train", size: int | None = None) -> Iterator[Batch]:
        """One pass over the samples on the device: all of them, on every rank."""
        return batches_in_time(self.problem.batches(part, size), self._deadline_of_passes)

    def share(self, part: str = "train", size: int | None = None) -> Iterator[Batch]:
        """This rank's share of one pass, for sweeps that then add up over `problem.ranks`; all of it when alone."""
        return batches_in_time(self.problem.batches(part, size, shared=True), self._deadline_of_passes)

    def forward(self, inputs: Inputs, params: Params | None = None, rules: Sequence[OperationRule] = ()) -> Tensor:
        """Outputs at this point, or at other weights; each operation of the network is handed to the rules."""
        return self.problem.forward(inputs, self.params if params is None else params, rules=rules)

    def charge_passes(self, kind: str, samples: int) -> None:
        """Charge `samples` evaluations of a kind (forward, backward, curvature), in units of passes over train."""
        passes = samples / self.problem.n_train
        self.passes[kind] += passes  # type: ignore[assignment]
        spend(WEIGHTS.get(kind, 1.0) * passes)

    def remark(self, text: str) -> None:
        """Say something once beside every table of this network."""
        if text not in self.remarks:
            self.remarks.append(text)

    @contextmanager
    def charged(self) -> Iterator[Counter[str]]:
        """Collect the passes that are made inside the block."""
        before, spent = Counter(self.passes), Counter[str]()
        try:
            yield spent
        finally:
            spent.update({kind: self.passes[kind] - before[kind] for kind in self.passes})

    @contextmanager
    def charged_to_nobody(self) -> Iterator[None]:
        """Leave the account of passes as it is, for what no measure has asked for."""
        before = Counter(self.passes)
        try:
            yield
        finally:
            self.passes.clear()
            self.passes.update(before)

    def scores(self, part: str = "train") -> Scores:
        """Loss and margin of every sample."""
        return self.cached(_compute_scores, part=part)

    def gradient(self) -> Params:
        """Gradient of the mean training loss with respect to the trainable parameters, float64."""
        return self.cached(_mean_gradient)

    def provenance(self, begun: float) -> dict[str, Any]:
        """Provenance of a result: versions, machine, seed, data, passes and time.

        Args:
            begun: `time.perf_counter()` of its start.
        """
        return {
            **self.problem.provenance(begun),
            "seed": self.seed,
            "n_train": self.problem.n_train,
            "passes": {kind: round(value, 6) for kind, value in self.passes.items()},
        }


def batches_in_time(batches: Iterator[Batch], last: float | None) -> Iterator[Batch]:
    """The batches, until the time of the call is over by so much that even a pass that was begun is given up."""
    for number, batch in enumerate(batches):
        if number and last is not None and time.monotonic() > last:
            raise NotApplicable("the time was up before it was done")
        yield batch


def _context_in_float64(ctx: Context) -> Context:
    problem = ctx.problem.in_double()
    if problem.dtype != torch.float64:
        raise NotApplicable("a device with float64", f"{problem.device.type}, which has none")
    if problem is ctx.problem:
        return ctx
    return ctx.on(
        problem, {name: value.double() if value.is_floating_point() else value for name, value in ctx.params.items()}
    )


def _compute_scores(ctx: Context, part: str) -> Scores:
    losses, margins = [], []
    with torch.no_grad():
        for inputs, targets in ctx.share(part):
            outputs = ctx.forward(inputs)
            losses.append(ctx.problem.loss(outputs, targets).double().cpu())
            if outputs.isnan().any():
                raise NotApplicable("outputs that are numbers", "NaN for some samples", f"model, {part}")
            if ctx.problem.classification:
                margins.append(sample_margins(outputs, targets).double().cpu())
    ctx.charge_passes("forward", ctx.problem.part(part).n)
    joined = ctx.problem.ranks.joined
    return Scores(joined(torch.cat(losses)), joined(torch.cat(margins)) if margins else None)


def sample_margins(outputs: Tensor, targets: Tensor) -> Tensor:
    """Output of the label minus the largest other output, per sample: (n, C), (n,) -> (n,).

    One logit stands for two outputs, 0 and itself: its margin is the logit for class 1 and minus the logit for class 0.
    """
    if outputs.ndim == 1 or outputs.shape[1] == 1:
        return (2 * targets - 1).to(outputs.dtype) * outputs.reshape(len(targets))
    of_label = outputs.gather(1, targets[:, None]).squeeze(1)  # (n,)
    others = outputs.scatter(1, targets[:, None], -torch.inf).amax(1)  # (n,)
    return of_label - others


def _mean_gradient(ctx: Context) -> Params:
    """Gradient of the mean training loss by every trainable parameter, in float64."""
    names = ctx.problem.trainable
    total = {name: torch.zeros_like(ctx.params[name], dtype=torch.float64) for name in names}
    for inputs, targets in ctx.share():
        leaves = ctx.leaves()
        loss = ctx.problem.loss(ctx.forward(inputs, {**ctx.params, **leaves}), targets).sum()
        gradients = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        for name, gradient in zip(names, gradients, strict=True):
            total[name] += gradient
    n = ctx.problem.n_train
    ctx.charge_passes("forward", n)
    ctx.charge_passes("backward", n)
    summed = ctx.problem.ranks.summed(list(total.values()))
    return {name: value / n for name, value in zip(total, summed, strict=True)}


WEIGHTS = {"forward": 1.0, "backward": 1.0, "curvature": STANDARD.product_passes}  # of passes, in forward passes
OVERTIME, OVERTIME_SECONDS = 0.2, 0.25  # of the budget, and besides, for a pass that is begun in time
CURVATURES = ("hessian", "gauss_newton")
SECONDS = {"": 1, "s": 1, "m": 60, "min": 60, "h": 3600, "d": 86400}
BYTES = {"": 1, "b": 1} | {
    f"{letter}{ending}": base**power
    for power, letter in enumerate("kmgt", start=1)
    for ending, base in (("b", 1000), ("ib", 1024), ("", 1024))
}


def make_effort(
    precision: float = 0.02,
    budget: float | str | None = None,
    memory: int | str | None = None,
    curvature: str = "hessian",
) -> Effort:
    """The effort that a person asked for; the time of the budget runs from now on.

    Args:
        precision: relative standard error at which estimates stop; 0 for exact values and all draws.
        budget: seconds, or text such as "90s", "10m", "2h"; None for no limit.
        memory: bytes, or text such as "8GiB", "500MB"; None for a share of what is free.
        curvature: "hessian" or "gauss_newton".
    """
    if isinstance(precision, bool) or not isinstance(precision, Real) or not 0 <= precision < 1:
        fix = "0 for exact values, 0.02 for a standard error of 2 %"
        raise InputError("a relative standard error from 0 up to 1", repr(precision), where="precision", fix=fix)
    refuse_unknown(curvature, CURVATURES, "curvature")
    seconds = None if budget is None else seconds_from_budget(budget)
    end = None if seconds is None else time.monotonic() + seconds
    return Effort(
        precision=float(precision),
        curvature=curvature,
        memory=None if memory is None else bytes_from_memory(memory),
        deadline=end,
        end=end,
        last=None if seconds is None or end is None else end + OVERTIME * seconds + OVERTIME_SECONDS,
    )


def seconds_from_budget(budget: float | str) -> float:
    """A time in seconds, from a number or from text such as "90s", "10m", "2h"."""
    return _amount_with_unit(budget, SECONDS, "budget", '"90s", "10m", "2h" or a number of seconds')


def bytes_from_memory(memory: int | str) -> int:
    """An amount of memory in bytes, from a number or from text such as "8GiB", "500MB"."""
    return int(_amount_with_unit(memory, BYTES, "memory", '"8GiB", "500MB" or a number of bytes'))


def _amount_with_unit(given: float | str, units: dict[str, int], where: str, examples: str) -> float:
    wrong = InputError(examples, repr(given), where=where)
    if isinstance(given, str):
        parts = re.fullmatch(r"(\d+\.?\d*|\.\d+)\s*([a-z]*)", given.strip().lower())
        if parts is None or parts[2] not in units:
            raise wrong
        given = float(parts[1]) * units[parts[2]]
    if isinstance(given, bool) or not isinstance(given, Real) or not 0 < given < math.inf:
        raise wrong
    return float(given)
