"""What is allowed and hardly meant: remarks on data, labels and weights that a person would want to hear."""

from __future__ import annotations

import torch

from flatscope.context import Context, sample_margins
from flatscope.errors import FlatscopeError
from flatscope.formatting import first_of_names
from flatscope.network.program import Program
from flatscope.samples import Batch

MOST = 0.5  # share of misclassified training samples from which on something may be wrong
STEPS = (1e-5, 1e-6)  # relative to the weights; where differences by both agree no kink was crossed
AGREEMENT, TOLERANCE, ATTEMPTS, SAMPLES = 0.02, 0.01, 3, 8
TRAINING_ERROR = "the training error is"  # how the remark on it begins


def training_error_doubt(error: float, most: float = MOST, was: str = "", try_out: str = "") -> str:
    """Warning where more than so many training samples are misclassified; empty elsewhere.

    Args:
        error: share of misclassified samples; NaN where there are no classes.
        most: share up to which nothing is said.
        was: what is known of it from elsewhere.
        try_out: what may have been forgotten.
    """
    if not error > most:
        return ""
    asked = "are these the inputs that the network was trained on?"
    return f"{TRAINING_ERROR} {100 * error:.2f} %{was}: {asked} ({try_out or 'scaling, order of axes, labels from 0'})"


def remark_on_fit(ctx: Context) -> None:
    """Remark where most training samples are misclassified, and where the labels seem to be off by one."""
    problem = ctx.problem
    if not problem.classification:
        return
    try:
        error = ctx.scores().error
        if doubt := training_error_doubt(error):
            ctx.remark(doubt)
            _remark_on_shifted_labels(ctx, error)
    except FlatscopeError:  # outputs that are no numbers, or no time: the rows say so
        return


def _remark_on_shifted_labels(ctx: Context, error: float) -> None:
    """Remark where the labels seem to be off by one."""
    for step in (1, -1) if ctx.problem.n_outputs > 2 else ():
        if (share := _accuracy_with_shifted_classes(ctx, step)) > MOST:
            to = f"label {'−' if step < 0 else '+'} 1"
            ctx.remark(
                f"labels off by one? The largest output is that of class {to} for {100 * share:.0f} % of the "
                f"training samples, and that of the label for {100 * (1 - error):.0f} %"
            )


def _accuracy_with_shifted_classes(ctx: Context, step: int) -> float:
    """Share of the training samples whose largest output is that of the class so many after their label."""
    right, classes = 0, ctx.problem.n_outputs
    with torch.no_grad():
        for inputs, labels in ctx.batches():
            there = (labels + step >= 0) & (labels + step < classes)
            shifted = sample_margins(ctx.forward(inputs), (labels + step).clamp(0, classes - 1)) > 0
            right += int((shifted & there).sum())
    return right / ctx.problem.n_train


def remark_on_detached_values(ctx: Context) -> None:
    """Remark where values are held back from the gradient, so that it is not that of the function."""
    try:
        held = _operations_without_gradient(ctx.structure.program)
        if held and _gradient_differs(ctx.in_double()):
            ctx.remark(
                f"the gradient is not that of the function: values are held back from it "
                f"({first_of_names(list(held), 3)}); "
                "measures of the gradient are of the one that training sees"
            )
    except (FlatscopeError, RuntimeError):  # no float64, or a network that fails in it: nothing can be compared
        return


def _operations_without_gradient(program: Program) -> tuple[str, ...]:
    """Operations of a forward pass that hold values back: `detach`, those under `no_grad`, hooks, own functions."""
    names: dict[str, None] = {}
    for step in program.steps:
        if not any(slot.requires_grad for slot in step.reads):
            continue
        if step.name in ("detach", "data", "register_hook"):
            names[step.place] = None
        elif step.without_gradients and any(slot.dtype.is_floating_point for slot in step.results):
            names[f"{step.place} without gradients"] = None
    return tuple(names)


def _gradient_differs(ctx: Context) -> bool:
    """True if finite differences of the loss along random directions contradict its gradient."""
    batch, generator = next(iter(ctx.batches(size=SAMPLES))), ctx.generator("directions of the gradient")
    leaves = ctx.leaves()
    with torch.enable_grad():
        loss = _mean_loss(ctx, batch, leaves)
        slopes = torch.autograd.grad(loss, list(leaves.values()), materialize_grads=True)
    rounding = 1e3 * torch.finfo(torch.float64).eps * abs(float(loss.detach())) / STEPS[-1]
    for _ in range(ATTEMPTS):
        direction = {
            name: torch.randn(v.shape, generator=generator, dtype=torch.float64).to(v)
            * v.detach().square().mean().sqrt()
            for name, v in leaves.items()
        }
        along = sum(float((slope * v).sum()) for slope, v in zip(slopes, direction.values(), strict=True))
        with torch.no_grad():
            coarse, fine = (_loss_difference(ctx, batch, direction, step) for step in STEPS)
        size = max(abs(along), abs(fine))
        if abs(coarse - fine) <= AGREEMENT * size + rounding:
            return abs(along - fine) > TOLERANCE * size + rounding
    return False


def _loss_difference(ctx: Context, batch: Batch, direction: dict[str, torch.Tensor], step: float) -> float:
    ends = (
        float(_mean_loss(ctx, batch, {name: ctx.params[name] + sign * step * v for name, v in direction.items()}))
        for sign in (1, -1)
    )
    return (next(ends) - next(ends)) / (2 * step)


def _mean_loss(ctx: Context, batch: Batch, params: dict[str, torch.Tensor]) -> torch.Tensor:
    return ctx.problem.loss(ctx.forward(batch[0], {**ctx.params, **params}), batch[1]).mean()
