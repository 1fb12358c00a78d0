"""A check that autograd's second derivative is that of the function: differences of the gradient must agree with it.

A backward that is marked `once_differentiable`, that uses a detached value or that is solved in a hook gives the right
gradient; the derivative of that gradient then lacks terms, and autograd says nothing. One Hessian product is compared
with differences of the gradient, for every parameter by itself. Where a step crosses a kink (a ReLU that switches,
another largest entry) the differences count the jump: they are believed only where steps of two sizes in both
directions agree. What a network takes for a constant (detached values, straight-through estimators, statistics of
weights under no_grad, the word of padding in a table) stays as it was at the weights themselves, for the differences as
for the product.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.hessian_check import in_precision, picked, telling_samples
from flatscope.errors import NotApplicable, missing_derivative
from flatscope.formatting import some_of
from flatscope.guards import own_settings
from flatscope.network.operations import TO_PYTHON
from flatscope.network.products import LOOKUP_ORDER
from flatscope.network.watching import Operation, Rule, is_in_place, tensors_in, watched, with_tensors
from flatscope.params import Params
from flatscope.samples import Batch

T = TypeVar("T")
ATTEMPTS = 3  # sets of samples, until every parameter was compared once
SAMPLES = 4


@dataclass(frozen=True)
class Precision:
    """How well differences can tell, in one floating-point type."""

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
    """What the check has found.

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


def refuse_wrong_second_derivative(ctx: Context) -> None:
    """Refuse curvature where autograd's second derivative is not that of the function, or there is none."""
    found = _known(ctx, look_at_second_derivative)
    if found.missing:
        raise found.missing
    if found.wrong:
        worst = max(found.wrong.values())
        names = some_of(sorted(found.wrong, key=lambda name: -found.wrong[name]), 3)
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


def look_at_second_derivative(ctx: Context) -> SecondDerivative:
    """Compare a Hessian product with differences of the gradient, parameter by parameter, on a few samples."""
    found, left = SecondDerivative(), set(ctx.problem.trainable)
    try:
        for attempt in range(ATTEMPTS):
            batch = ctx.structural(telling_samples) if attempt == 0 else _other_samples(ctx, attempt)
            with _suspects_noted(ctx) as suspects:
                compared, wrong = _in_either_precision(ctx, partial(_compared, ctx, batch, attempt, suspects))
            found.suspects = found.suspects or tuple(suspects)
            found.wrong |= wrong
            found.checked |= bool(compared)
            left -= compared
            if not left or found.wrong:
                break
    except RuntimeError as problem:
        found.missing = missing_derivative(problem)
        if found.missing is None:
            raise
    return found


def _in_either_precision(ctx: Context, work: Callable[[Precision], T]) -> T:
    """The result in float64, or in float32 where the device or the network has no other."""
    if ctx.problem.device.type != "mps":
        try:
            return work(DOUBLE)
        except RuntimeError as problem:  # float32 named inside of the network
            if "type" not in str(problem):
                raise
    return work(SINGLE)


def _compared(
    ctx: Context, batch: Batch, attempt: int, suspects: dict[str, None], precision: Precision
) -> tuple[set[str], dict[str, float]]:
    """Parameters that could be compared, and those of them whose product is wrong, with how far off it is."""
    gradient = partial(_gradient, ctx, batch, precision.dtype, _Constants())
    direction = _direction(ctx, precision.dtype, attempt)
    leaves, here = gradient({name: torch.zeros_like(v) for name, v in direction.items()}, suspects)
    alive = {name: part for name, part in here.items() if part.requires_grad}
    products = dict.fromkeys(here, torch.zeros(()).to(next(iter(direction.values()))))
    if alive:
        along = [direction[name] for name in alive]
        made = torch.autograd.grad(list(alive.values()), list(leaves.values()), along, materialize_grads=True)
        products = dict(zip(leaves, made, strict=True))
    sides = _differences(gradient, here, direction, precision.steps[attempt])
    lengths = {name: float(part.norm()) for name, part in products.items()}
    least = ROUNDING * max(lengths.values(), default=0.0)
    compared, wrong = set(), {}
    for name, parts in sides.items():
        central = (parts[-1] + parts[-2]) / 2
        size, gap = float(central.norm()), float((products[name] - central).norm())
        spread = max(float((one - other).norm()) for one in parts for other in parts)
        if not spread <= max(precision.agreement * max(size, lengths[name]), least):
            continue
        compared.add(name)
        if gap > SPREADS * spread + precision.tolerance * max(size, lengths[name]) + least:
            wrong[name] = gap / max(size, least) if size else float("inf")
    return compared, wrong


def _differences(
    gradient: Callable[..., tuple[Params, Params]], here: Params, direction: Params, steps: tuple[float, float]
) -> dict[str, list[Tensor]]:
    """Differences of the gradient from here to both sides, by steps of two sizes, the smaller one last."""
    found: dict[str, list[Tensor]] = {name: [] for name in here}
    for step in steps:
        for signed in (step, -step):
            _, there = gradient({name: signed * v for name, v in direction.items()})
            for name, parts in found.items():
                parts.append((there[name] - here[name].detach()) / signed)
    return found


def _gradient(
    ctx: Context,
    batch: Batch,
    dtype: torch.dtype,
    constants: _Constants,
    move: Params,
    suspects: dict[str, None] | None = None,
) -> tuple[Params, Params]:
    """Leaves and gradients of the loss of some samples by them, at weights that are moved a little.

    Where suspects are noted, the gradients can be differentiated once more.
    """
    twice = suspects is not None
    inputs, params, buffers = in_precision(ctx, batch[0], dtype)
    targets = batch[1].to(dtype) if batch[1].is_floating_point() else batch[1]
    leaves = {name: (params[name].detach() + step).requires_grad_() for name, step in move.items()}
    with torch.enable_grad(), FastConvolutions():
        with watched(constants.begun()):
            loss = ctx.problem.loss(ctx.problem.forward(inputs, {**params, **leaves}, buffers), targets).mean()
        if not loss.requires_grad:
            return leaves, {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        if suspects is not None:
            _note_custom_functions(loss, suspects)
        found = torch.autograd.grad(loss, list(leaves.values()), create_graph=twice, materialize_grads=True)
    return leaves, dict(zip(leaves, found, strict=True))


class _Constants:
    """What passes take for constants: kept from the first of them, and given to the others in the same order."""

    def __init__(self) -> None:
        self._kept: list[Any] = []
        self._at, self._first, self._stopped = 0, True, False

    def begun(self) -> Rule:
        """The rule for the next pass."""
        self._first = not self._kept
        self._at, self._stopped = 0, False
        return self._follow

    def _follow(self, op: Operation) -> Any:
        if op.name == "embedding" and torch.is_grad_enabled():
            return self._looked_up(op)
        if op.name == "set_grad_enabled":  # by no_grad and enable_grad, not by the forward of an autograd function
            self._stopped = not op.args[0]
            return op.run()
        result = op.run()
        if not (self._stopped or (torch.is_grad_enabled() and _is_constant(op, result))):
            return result
        written = op.args[0] if op.name == "setitem" or is_in_place(op) else None
        found = result if written is None else written
        if self._first:
            self._kept.append(with_tensors(found, lambda value: value.detach().clone()))
            return result
        kept, self._at = self._kept[self._at], self._at + 1
        if written is None:
            return with_tensors(kept, torch.clone)
        with torch.no_grad():
            written.copy_(kept)
        return result

    def _looked_up(self, op: Operation) -> Any:
        """A lookup gives the word of padding no gradient: what it looks up there is a constant."""
        result, given = op.run(), op.named(*LOOKUP_ORDER)
        if given.get("padding_idx") is None:
            return result
        if self._first:
            self._kept.append(result.detach().clone())
            return result
        kept, self._at = self._kept[self._at], self._at + 1
        padding = given["input"] == given["padding_idx"] % len(given["weight"])
        return torch.where(padding.unsqueeze(-1), kept, result)


def _is_constant(op: Operation, result: Any) -> bool:
    """Whether the result of an operation has no derivative: what is detached, and numbers of Python."""
    read = op.name in TO_PYTHON and not any(True for _ in tensors_in(result))  # torch.complex gives a tensor
    return read or op.name in ("detach", "data")


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
    """How far ⟨Jv, u⟩ by two backward passes is from ⟨v, Jᵀu⟩ by one where it is wrong, else 0; and the suspects."""
    with _suspects_noted(ctx) as suspects:
        found = _in_either_precision(ctx, partial(_jacobian_gap, ctx, ctx.structural(telling_samples), suspects))
    return found, tuple(suspects)


def _jacobian_gap(ctx: Context, batch: Batch, suspects: dict[str, None], precision: Precision) -> float:
    inputs, params, buffers = in_precision(ctx, batch[0], precision.dtype)
    leaves = {name: params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    tensors, largest = list(leaves.values()), 0.0
    generator = ctx.generator("check of products with the Jacobian")
    with torch.enable_grad(), FastConvolutions():
        outputs = ctx.problem.forward(inputs, {**params, **leaves}, buffers)
        if not outputs.requires_grad:
            return 0.0
        _note_custom_functions(outputs, suspects)
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


def _known(ctx: Context, look: Callable[[Context], Any]) -> Any:
    """What a look at the problem's own weights has found, made once for all weights that the network may have."""
    with own_settings():
        return ctx.problem.facts.once(look, Context(ctx.problem))


@contextmanager
def _suspects_noted(ctx: Context) -> Iterator[dict[str, None]]:
    """Inside the block hooks on gradients are noted, by the module whose forward sets them."""
    suspects: dict[str, None] = {}

    def follow(op: Operation) -> Any:
        if op.name == "register_hook":
            suspects[f"a hook on a gradient{f' in {op.module}' if op.module else ''}"] = None
        return op.run()

    with watched(follow):
        yield suspects


def _note_custom_functions(tensor: Tensor, suspects: dict[str, None]) -> None:
    """Note the user's autograd functions in the graph of a tensor."""
    left: list[Any] = [tensor.grad_fn]
    seen: set[Any] = set(left)
    while left:
        node = left.pop()
        made_by: Any = getattr(type(node), "_forward_cls", None)  # the class with forward and backward
        if made_by is not None and not made_by.__module__.startswith("flatscope."):
            suspects[f"the autograd function {made_by.__name__}"] = None
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                left.append(following)


def _place(suspects: tuple[str, ...]) -> str:
    return f"model, {some_of(list(suspects), 3)}" if suspects else "model"
