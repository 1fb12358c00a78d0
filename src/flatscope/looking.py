"""The look at a table's network: is it at a minimum, does it fit its data? At once, or when somebody asks for it.

The look takes some ten forward passes and a gradient, as long as a sweep, and who asks for one number may read no
headline. So it waits until something of the table's metadata is read, printed or saved, wherever it can be made then as
well as now. Until then the table holds its problem.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from flatscope.context import Context
from flatscope.doubts import remark_on_detached_values, remark_on_fit
from flatscope.errors import FlatscopeError
from flatscope.isolation import own_settings
from flatscope.network_summary import STANDING
from flatscope.problem import Problem
from flatscope.sample_digests import contents
from flatscope.summarising import summary_of, unknown_minimum

Row = dict[str, Any]
CHANGED = "whether this is a minimum is not known: the data were changed in place before anything asked for it"


def minimum_facts(ctx: Context) -> Row:
    """Losses, errors, the gradient norm and the fall down the gradient, without which no flatness can be read."""
    with ctx.charged_to_nobody():
        try:
            summary = summary_of(ctx)
        except FlatscopeError:  # outputs that are no numbers, or no time: the rows say so
            return {}
    if summary.on_a_slope:
        ctx.remark(f"still on a slope ({summary.step}): curvature here describes where training stopped, not a minimum")
    length = summary.gradient_norm
    return {STANDING: summary.to_dict()} | ({} if math.isnan(length) else {"gradient_norm": length})


def remark_on_network(ctx: Context, *, backwards: bool) -> None:
    """Remark on a bad fit, and on a wrong gradient where there were backward passes: one more is little then."""
    with ctx.charged_to_nobody():
        remark_on_fit(ctx)
        if backwards:
            remark_on_detached_values(ctx)


class LaterLook:
    """A look that waits: called, it gives what is to be added to the metadata.

    Args:
        ctx: the context that was measured in, whose passes say what was done.
        reads_minimum: whether a measure of the table cannot be read without knowing whether this is a minimum.
        remarks: what is said already.
    """

    def __init__(self, ctx: Context, reads_minimum: bool, remarks: Sequence[str]) -> None:
        self._problem, self._seed, self._remarks = ctx.problem, ctx.seed, list(remarks)
        self._reads_minimum, self._reads_fit = reads_minimum, any(ctx.passes.values())
        self._backwards = any(count for kind, count in ctx.passes.items() if kind != "forward")
        self._contents = _contents_of(ctx.problem)

    @staticmethod
    def is_possible(ctx: Context) -> bool:
        """True where the data lie in memory, so that they can be seen to be the same, and the network is small there.

        Not where other ranks would have to join, nor on a GPU, whose memory is wanted back.
        """
        problem = ctx.problem
        parts = [problem.train] if problem.test is None else [problem.train, problem.test]
        size = sum(value.nbytes for value in (*problem.params.values(), *problem.buffers.values()))
        alone = problem.ranks.size == 1 and problem.device.type == "cpu"
        return alone and all(part.held for part in parts) and size <= ctx.effort.limits.waiting_network

    def __call__(self) -> Row:
        """Look now."""
        if _contents_of(self._problem) != self._contents:
            return {"remarks": [*self._remarks, CHANGED]} if self._reads_minimum else {}
        ctx = Context(self._problem, seed=self._seed)
        with own_settings(self._problem.generators):
            facts = minimum_facts(ctx) if self._reads_minimum else {}
            if self._reads_minimum and (said := unknown_minimum(facts.get(STANDING, {}), is_late=False)):
                ctx.remark(said)
            if self._reads_fit:
                remark_on_network(ctx, backwards=self._backwards)
        remarks = list(dict.fromkeys([*self._remarks, *ctx.remarks]))
        ctx.forget()
        return facts | ({"remarks": remarks} if remarks else {})


def _contents_of(problem: Problem) -> tuple[int, ...]:
    test = () if problem.test is None else contents(problem.test)
    return (*contents(problem.train), *test)
