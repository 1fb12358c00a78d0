"""A check that autograd's second derivative is that of the function: differences of the gradient must agree with it.

A backward that is marked `once_differentiable`, that uses a detached value or that is solved in a hook gives the right
gradient; the derivative of that gradient then lacks terms, and autograd says nothing. Where a pass has anything in it
that could be such a thing (`trusted_operations`), one Hessian product is compared with differences of the gradient, for
every parameter by itself. Where a step crosses a kink (a ReLU that switches, another largest entry) the differences
count the jump: they are believed where they agree with the product, or where steps of two sizes in both directions
agree. What a network takes for a constant (detached values, straight-through estimators, statistics of weights under
no_grad, the word of padding in a table) stays as it was at the weights themselves, for the differences as for the
product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.checked_pass import (
    CheckedPass,
    SharedPass,
    checked_pass,
    in_precision,
    loss_of,
    picked,
    telling_samples,
)
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.trusted_operations import Doubts
from flatscope.errors import NotApplicable, missing_derivative
from flatscope.formatting import first_of_names
from flatscope.isolation import own_settings
from flatscope.params import Params
from flatscope.samples import Batch

T = TypeVar("T")
ATTEMPTS = 3  # sets of samples, until every parameter was compared once
SAMPLES = 4


@dataclass(frozen=True)
class Precision:
    """Steps and tolerances of the differences in one floating-point type."""

    dtype: torch.dtype
    steps: tuple[tuple[float, float], ...]  # pairs of steps relative to the weights, one pair for each attempt
    agreement: float  # the differences must agree to this share of their length to be believed
    tolerance: float  # and differ from the product by more than this share for the product to be wrong


# The smaller the steps the fewer kinks they cross; larger ones are for networks whose gradients are tiny.
DOUBLE = Precision(torch.float64, ((1e-6, 1e-7), (1e-7, 1e-8), (1e-5, 1e-6)), agreement=0.02, tolerance=1e-4)
SINGLE = Precision(torch.float32, ((1e-2, 1e-3), (1e-2, 1e-3), (1e-2, 1e-3)), agreement=0.02, tolerance=0.05)
# What is left of differences that disagree among themselves: the product may be this many times as far from them.
SPREADS = 5
# Of the largest product of a parameter: below it there is nothing but rounding.
ROUNDING = 1e-9


@dataclass
class SecondDerivative:
    """Findings of the check.

    Attributes:
        wrong: how far the Hessian product of a parameter is from differences of the gradient, relative to them.
        checked: whether any parameter could be compared.
        suspects: custom functions and hooks of the network, in words.
        missing: the refusal where autograd has no second derivative at all.
    """

    wrong: dict[str, float] = field(default_factory=dict)
    checked: bool = False
    suspects: tuple[str, ...] = ()
    missing: NotApplicable | None = None


def refuse_wrong_second_derivative(ctx: Context, shared: SharedPass | None = None) -> None:
    """Refuse curvature where autograd's second derivative is not that of the function, or there is none.

    Args:
        ctx: the network.
        shared: a pass at the problem's own weights, which this check may share with others.
    """
    found = _known(ctx, look_at_second_derivative, shared)
    if found.missing:
        raise found.missing
    if found.wrong:
        worst = max(found.wrong.values())
        names = first_of_names(sorted(found.wrong, key=lambda name: -found.wrong[name]), 3)
        raise NotApplicable(
            "a second derivative by autograd that agrees with differences of the gradient",
            f"one that is {worst:.0%} off (for {names})",
            where=_place(found.suspects),
            fix=f"{_CAUSE}. Write the operation in plain torch operations, or let its backward be differentiable",
        )
    if not found.checked:
        ctx.remark("autograd's second derivatives could not be checked against differences of the gradient")


_CAUSE = (
    "Its backward is marked once_differentiable, uses detached values, or stands in a hook; the gradient is right, "
    "and every curvature by autograd would be wrong"
)


def refuse_wrong_jacobian_products(ctx: Context) -> None:
    """Refuse products with the outputs' Jacobian where two backward passes do not give what one gives."""
    gap, suspects = _known(ctx, _look_at_jacobian_products)
    if gap:
        raise NotApplicable(
            "products with the outputs' Jacobian that agree with the gradient",
            f"some that are {gap:.0%} off by autograd",
            where=_place(suspects),
            fix=f"{_CAUSE}. Write the operation in plain torch operations, or let its backward be differentiable",
        )


def look_at_second_derivative(ctx: Context, shared: SharedPass | None = None) -> SecondDerivative:
    """Compare a Hessian product with differences of the gradient, parameter by parameter, on a few samples.

    Args:
        ctx: the network.
        shared: a pass at the same weights, which this check may share with others.
    """
    found, left = SecondDerivative(), set(ctx.problem.trainable)
    if not _has_doubts(ctx, shared):
        return SecondDerivative(checked=True)
    suspects: dict[str, None] = {}
    try:
        for attempt in range(ATTEMPTS):
            batch = telling_samples(ctx).batch if attempt == 0 else _other_samples(ctx, attempt)
            comparison = _Comparison(ctx, batch, attempt, suspects, shared if attempt == 0 else None)
            compared, wrong = _in_either_precision(ctx, comparison.judged)
            found.wrong |= wrong
            found.checked |= bool(compared)
            left -= compared
            if not left or found.wrong:
                break
    except RuntimeError as problem:
        found.missing = missing_derivative(problem)
        if found.missing is None:
            raise
    found.suspects = tuple(suspects)
    return found


def _has_doubts(ctx: Context, shared: SharedPass | None = None) -> bool:
    """True unless a pass shows that nothing but operations of torch with right second derivatives are in it.

    Where samples decide what is computed, a few do not show all of it; on other devices kernels are others.
    """
    if ctx.problem.samples_decide or ctx.problem.device.type not in ("cpu", "cuda"):
        return True
    try:
        return bool(_doubts_of_first_samples(ctx) if shared is None else shared.run.doubts)
    except RuntimeError:  # what it is, the comparison says
        return True


def _doubts_of_first_samples(ctx: Context) -> Doubts:
    """Doubts that a forward pass of two samples leaves, as it runs."""
    doubts, (inputs, targets) = Doubts(), next(iter(ctx.batches(size=2)))
    with torch.enable_grad():
        outputs = ctx.forward(inputs, {**ctx.params, **ctx.leaves()}, [doubts.follow])
        doubts.look_through(loss_of(ctx, outputs, targets, [doubts.follow]))
    return doubts


def _in_either_precision(ctx: Context, work: Callable[[Precision], T]) -> T:
    """The result in float64, or in float32 where the device or the network has no other."""
    if ctx.problem.device.type != "mps":
        try:
            return work(DOUBLE)
        except RuntimeError as problem:  # float32 named inside of the network
            if "type" not in str(problem):
                raise
    return work(SINGLE)


@dataclass(frozen=True)
class _Comparison:
    """A Hessian product and differences of the gradient on some samples.

    Attributes:
        ctx: the network.
        batch: the samples.
        attempt: the number of this comparison, with steps and a direction of its own.
        suspects: custom functions and hooks, which are noted here.
        shared: the pass to differentiate twice, where other checks use it too.
    """

    ctx: Context
    batch: Batch
    attempt: int
    suspects: dict[str, None]
    shared: SharedPass | None

    def judged(self, precision: Precision) -> tuple[set[str], dict[str, float]]:
        """Parameters that could be compared, and those of them whose product is wrong, with how far off it is.

        In float64 one step tells enough where it agrees with the product. What does not is looked at with steps to
        both sides: of two sizes, so that no kink is as far away on both; and what then looks wrong with both to both.
        """
        run = self._twice_differentiable(precision)
        self.suspects.update(run.doubts.suspects)
        direction = _direction(self.ctx, precision.dtype, self.attempt)
        products = self._products(run, direction)
        differences = _Differences(self.ctx, self.batch, run, direction)
        large, small = precision.steps[self.attempt]
        if precision is DOUBLE:
            if _all_agree(differences.at(large), products, precision.tolerance):
                return set(products), {}
            compared, wrong = self._verdict(differences.along((large, -small)), products, precision)
            if not wrong:
                return compared, wrong
        return self._verdict(differences.along((large, -large, small, -small)), products, precision)

    def _twice_differentiable(self, precision: Precision) -> CheckedPass:
        if self.shared is not None and precision is DOUBLE:
            return self.shared.run
        return checked_pass(self.ctx, self.batch, precision.dtype, None)

    def _products(self, run: CheckedPass, direction: Params) -> Params:
        alive = {name: part for name, part in run.gradients.items() if part.requires_grad}
        products = dict.fromkeys(run.leaves, torch.zeros(()).to(next(iter(direction.values()))))
        if alive:
            along, leaves = [direction[name] for name in alive], list(run.leaves.values())
            made = torch.autograd.grad(list(alive.values()), leaves, along, retain_graph=True, materialize_grads=True)
            products = dict(zip(run.leaves, made, strict=True))
        return products

    def _verdict(
        self, sides: dict[str, Sides], products: Params, precision: Precision
    ) -> tuple[set[str], dict[str, float]]:
        lengths = {name: float(part.norm()) for name, part in products.items()}
        least = ROUNDING * max(lengths.values(), default=0.0)
        compared, wrong = set(), {}
        for name, side in sides.items():
            size, gap = float(side.central.norm()), float((products[name] - side.central).norm())
            spread = max(float((one - other).norm()) for one in side.all for other in side.all)
            if not spread <= max(precision.agreement * max(size, lengths[name]), least):
                continue
            compared.add(name)
            if gap > SPREADS * spread + precision.tolerance * max(size, lengths[name]) + least:
                wrong[name] = gap / max(size, least) if size else float("inf")
        return compared, wrong


def _all_agree(differences: Params, products: Params, tolerance: float) -> bool:
    """True where no product is more than this share of its length off."""
    lengths = {name: float(part.norm()) for name, part in products.items()}
    least = ROUNDING * max(lengths.values(), default=0.0)
    gaps = {name: float((part - differences[name]).norm()) for name, part in products.items()}
    return all(gap <= tolerance * lengths[name] + least for name, gap in gaps.items())


class Sides(NamedTuple):
    """Differences of one parameter's gradient to both sides: all of them, and the mean of the last two."""

    all: list[Tensor]
    central: Tensor


class _Differences:
    """Differences of the gradient along a direction, each step looked at once.

    Args:
        ctx: the network.
        batch: some samples.
        run: the pass at the weights themselves.
        direction: in which they move.
    """

    def __init__(self, ctx: Context, batch: Batch, run: CheckedPass, direction: Params) -> None:
        self._ctx, self._batch, self._run, self._direction = ctx, batch, run, direction
        self._known: dict[float, Params] = {}

    def along(self, steps: Sequence[float]) -> dict[str, Sides]:
        """By parameter, for these steps; the mean of the last two is that of steps of the same length to both sides."""
        parts = [self.at(step) for step in steps]
        before, last = steps[-2], steps[-1]
        weight = abs(before) / (abs(before) + abs(last))
        return {
            name: Sides([part[name] for part in parts], weight * parts[-1][name] + (1 - weight) * parts[-2][name])
            for name in self._run.gradients
        }

    def at(self, step: float) -> Params:
        """By parameter, for one step."""
        if step not in self._known:
            there = self._gradient(step)
            here = self._run.gradients
            self._known[step] = {name: (there[name] - here[name].detach()) / step for name in here}
        return self._known[step]

    def _gradient(self, step: float) -> Params:
        """Gradient of the loss of the samples at weights that are moved a little."""
        (dtype,) = {leaf.dtype for leaf in self._run.leaves.values()}
        inputs, params, buffers = in_precision(self._ctx, self._batch[0], dtype)
        moved = {name: leaf.detach() + step * self._direction[name] for name, leaf in self._run.leaves.items()}
        leaves = {name: value.requires_grad_() for name, value in moved.items()}
        held = self._run.constants.held()
        rules = [held] if held else []
        with torch.enable_grad(), FastConvolutions():
            outputs = self._ctx.problem.forward(inputs, {**params, **leaves}, buffers, rules)
            loss = loss_of(self._ctx, outputs, self._run.targets, rules)
            if not loss.requires_grad:
                return {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
            found = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
        return dict(zip(leaves, found, strict=True))


def _direction(ctx: Context, dtype: torch.dtype, attempt: int) -> Params:
    """A random direction in which every weight moves in proportion to its size, whatever the scales of its unit.

    What is zero stays; where everything is zero, everything moves alike.
    """
    generator = ctx.generator(f"direction of the second derivative {attempt}")
    sizes = {name: ctx.params[name].detach().abs() for name in ctx.problem.trainable}
    if not any(bool(size.any()) for size in sizes.values()):
        sizes = {name: torch.ones_like(size) for name, size in sizes.items()}
    return {
        name: size.to(dtype) * torch.randn(size.shape, generator=generator, dtype=torch.float64).to(size.device, dtype)
        for name, size in sizes.items()
    }


def _other_samples(ctx: Context, attempt: int) -> Batch:
    n = ctx.problem.n_train
    chosen = torch.randperm(n, generator=ctx.generator(f"samples of the second derivative {attempt}"))
    return picked(ctx, chosen[: SAMPLES if attempt == 1 else 1].sort().values)


def _look_at_jacobian_products(ctx: Context) -> tuple[float, tuple[str, ...]]:
    """Gap between ⟨Jv, u⟩ by two backward passes and ⟨v, Jᵀu⟩ by one, 0 where it is rounding; and the suspects."""
    if not _has_doubts(ctx):
        return 0.0, ()
    doubts = Doubts()
    found = _in_either_precision(ctx, partial(_jacobian_gap, ctx, telling_samples(ctx).batch, doubts))
    return found, tuple(doubts.suspects)


def _jacobian_gap(ctx: Context, batch: Batch, doubts: Doubts, precision: Precision) -> float:
    inputs, params, buffers = in_precision(ctx, batch[0], precision.dtype)
    leaves = {name: params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    tensors, largest = list(leaves.values()), 0.0
    generator = ctx.generator("check of products with the Jacobian")
    with torch.enable_grad(), FastConvolutions():
        outputs = ctx.problem.forward(inputs, {**params, **leaves}, buffers, [doubts.follow])
        if not outputs.requires_grad:
            return 0.0
        doubts.look_through(outputs)
        zero = torch.zeros_like(outputs, requires_grad=True)
        pulled = torch.autograd.grad(outputs, tensors, zero, create_graph=True, materialize_grads=True)
        alive = [i for i, part in enumerate(pulled) if part.requires_grad]
        for draw in range(ATTEMPTS):
            u = torch.randn(outputs.shape, generator=generator, dtype=torch.float64).to(outputs)
            v = list(_direction(ctx, precision.dtype, draw).values())
            gradients = torch.autograd.grad(outputs, tensors, u, retain_graph=True, materialize_grads=True)
            parts = torch.stack([(g * move).sum() for g, move in zip(gradients, v, strict=True)])
            along = torch.zeros_like(outputs)
            if alive:
                moves = [v[i] for i in alive]
                along = torch.autograd.grad([pulled[i] for i in alive], zero, moves, retain_graph=True)[0]
            gap, size = float((along * u).sum() - parts.sum()), float(parts.norm())
            largest = max(largest, abs(gap) / size if size else abs(gap))
    return largest if largest > precision.tolerance / 100 else 0.0


def _known(ctx: Context, look: Callable[..., Any], *shared: Any) -> Any:
    """Findings of a look at the problem's own weights, made once for all weights that the network may have."""
    with own_settings():
        return ctx.problem.facts.once(look, Context(ctx.problem), *shared)


def _place(suspects: tuple[str, ...]) -> str:
    return f"model, {first_of_names(list(suspects), 3)}" if suspects else "model"
