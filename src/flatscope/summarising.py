"""Measure the summary of a network: losses, errors, and whether it is at a minimum."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from flatscope.context import Context
from flatscope.descent import fall_by_gradient_step
from flatscope.errors import FlatscopeError
from flatscope.isolation import own_settings
from flatscope.network_summary import NetworkSummary
from flatscope.params import norm
from flatscope.problem import Problem
from flatscope.reading import graph_of_problem


def summary_of(
    context: Context, folded: Problem | None = None, *, descends: bool = True, differentiates: bool = True
) -> NetworkSummary:
    """Summary of the network of a context: its size, its losses and errors, whether it can be rescaled.

    Args:
        context: the network as given.
        folded: the same network without BatchNorm, where it has any.
        descends: whether to look how far the loss falls down the gradient: some ten forward passes.
        differentiates: whether there is time for a gradient; without one nothing is said about a minimum.
    """
    problem, plainer = context.problem, folded or context.problem
    with own_settings(problem.generators):
        train = context.scores()
        test = None if problem.test is None else context.scores("test")
        try:
            rescalable = plainer.facts.once(has_scales, plainer)
        except FlatscopeError:
            rescalable = True  # a network that cannot be read may well be one that can be rescaled
    classes = problem.classification
    return NetworkSummary(
        architecture=str(plainer.model),
        parameters=sum(problem.params[name].numel() for name in problem.trainable),
        loss=train.loss,
        error=train.error if classes else math.nan,
        test_loss=math.nan if test is None else test.loss,
        test_error=math.nan if test is None or not classes else test.error,
        rescalable=rescalable,
        gradient_norm=gradient_norm(context) if differentiates and not _time_is_up(context) else math.nan,
        n_test=0 if problem.test is None else problem.test.n,
        **(_fall_by_descent(context) if descends and differentiates else {}),
    )


def unknown_minimum(standing: Mapping[str, Any], is_late: bool) -> str:
    """Why nothing says whether this is a minimum, and what would; empty where something does.

    Args:
        standing: the summary of the network as plain values; empty where there was no time for it.
        is_late: whether too little of a budget was left.
    """
    if standing.get("fall") is not None:
        return ""
    if (loss := standing.get("loss")) is not None and loss < 0:
        return (
            f"the mean training loss is below zero, {loss:.3g}: of a likelihood take minus the logarithm (that of a "
            "density may be below zero; whether this is a minimum then has no scale)"
        )
    return (
        "no time was left to see whether this is a minimum: give a larger budget, or fewer samples" if is_late else ""
    )


def has_scales(problem: Problem) -> bool:
    """True for a network some of whose units can be rescaled."""
    return graph_of_problem(problem).n_classes > 0


def _fall_by_descent(context: Context) -> dict[str, float]:
    """The fall of the loss, and what it is measured against; nothing where the network cannot be differentiated."""
    try:
        fall = fall_by_gradient_step(context)
    except Warning:  # raised only where the user turned warnings into errors
        raise
    except Exception:  # what cannot be differentiated, and for what there is no time, loses nobody a table
        return {}
    return {"fall": fall.fall, "constant": fall.constant, "decay": fall.decay}


def _time_is_up(context: Context) -> bool:
    """True if the time of the whole call is up; not where ranks would have to agree on it."""
    end = context.effort.end
    return end is not None and context.problem.ranks.size == 1 and time.monotonic() > end


def gradient_norm(context: Context) -> float:
    """Length of the gradient of the mean training loss; NaN where the network cannot be differentiated."""
    try:
        return norm(context.gradient())
    except Warning:  # raised only where the user turned warnings into errors
        raise
    except Exception:  # what cannot be differentiated loses nobody a table
        return math.nan
