"""What is allowed and hardly meant: remarks on data, labels and weights that a person would want to hear."""

from __future__ import annotations

import torch

from flatscope.context import Context, sample_margins
from flatscope.errors import FlatscopeError

MOST = 0.5  # share of misclassified training samples from which on something may be wrong
TRAINING_ERROR = "the training error is"  # how the remark on it begins


def training_error_doubt(error: float, most: float = MOST, was: str = "", try_out: str = "") -> str:
    """What to say where more than so many training samples are misclassified; empty elsewhere.

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


def look_at_fit(ctx: Context) -> None:
    """Remark where most training samples are misclassified, and where the labels seem to be off by one."""
    problem = ctx.problem
    if not problem.classification:
        return
    try:
        error = ctx.scores().error
    except FlatscopeError:  # outputs that are no numbers: the rows say so
        return
    if doubt := training_error_doubt(error):
        ctx.remark(doubt)
        for step in (1, -1) if problem.n_outputs > 2 else ():
            if (share := _right_with(ctx, step)) > MOST:
                to = f"label {'−' if step < 0 else '+'} 1"
                ctx.remark(
                    f"labels off by one? The largest output is that of class {to} for {100 * share:.0f} % of the "
                    f"training samples, and that of the label for {100 * (1 - error):.0f} %"
                )


def _right_with(ctx: Context, step: int) -> float:
    """Share of the training samples whose largest output is that of the class so many after their label."""
    right, classes = 0, ctx.problem.n_outputs
    with torch.no_grad():
        for inputs, labels in ctx.batches():
            there = (labels + step >= 0) & (labels + step < classes)
            found = sample_margins(ctx.forward(inputs), (labels + step).clamp(0, classes - 1)) > 0
            right += int((found & there).sum())
    return right / ctx.problem.n_train
