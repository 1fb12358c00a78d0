"""Columns until precise: the curvature of every layer from all columns of the output Hessian's root, or random ones.

Which parameters go by columns, and from where the columns are sent back, is the route's; when the draws end is
`sample_until`'s. Here is what a draw is, and what ways there are to better ones.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

from flatscope.context import Context
from flatscope.curvature.route import Route, noisier_by_columns, route_of
from flatscope.curvature.sweep import sweep_pass, sweep_shape
from flatscope.curvature.sweep_result import Curvature
from flatscope.errors import NotApplicable
from flatscope.sampling import TIME_IS_UP, Sampler, sample_until, time_is_over

# Units may have any sign where operations are curved: those near zero would ask for any number of draws.
WITHOUT_UNITS = ("trace", "kappa_trace", "relative_flatness")


def column_sweep(
    ctx: Context,
    precision: float | None = None,
    rows: bool = False,
    quantities: tuple[str, ...] = (),
) -> Curvature:
    """Curvature of all layers: all columns, or random ones until the values are as precise as asked for.

    Args:
        ctx: the network; cached there, so ask through `ctx.cached(column_sweep)`.
        precision: largest relative standard error of a value of the network or a layer; the context's by default, 0
            for all columns.
        rows: also ρ of the rows.
        quantities: those whose errors end the draws; all of them by default.
    """
    route = route_of(ctx, precision)
    if len(route.not_covered) == len(route.ways):
        return Curvature({}, route.not_covered)
    if any(way.kind == "exact columns" for way in route.ways.values()):
        return sweep_pass(ctx, None, route.not_covered, rows)
    return sample_until(ColumnDraws(ctx, route, rows, quantities), route.precision)


def swept(ctx: Context, precision: float | None = None, rows: bool = False) -> Curvature:
    """The sweep of a context, made once for all that ask for the same."""
    options: dict[str, Any] = {"rows": True} if rows else {}
    if precision is not None and precision != ctx.effort.precision:
        options["precision"] = precision
    if ctx.effort.quantities and not rows and not ctx.has_cached(column_sweep, **options):
        options["quantities"] = ctx.effort.quantities
    return ctx.cached(column_sweep, **options)


class ColumnDraws(Sampler[Curvature]):
    """Random columns at the outputs, and where the route says so at the inputs of curved operations.

    Args:
        ctx: the network.
        route: which parameters they cover.
        rows: also ρ of the rows.
        quantities: those whose errors end the draws.
    """

    def __init__(self, ctx: Context, route: Route, rows: bool, quantities: tuple[str, ...] = ()) -> None:
        self._ctx, self._route, self._limits = ctx, route, ctx.effort.limits
        self._rows, self._quantities = rows, quantities
        self._curved = bool(route.places)
        self._compared = not self._curved or ctx.effort.deadline is not None
        self._found: Curvature | None = None
        self.first_look = self._limits.first_columns

    @property
    def most(self) -> float:
        """Without end where all columns are exact: these are taken then."""
        return self._limits.most_draws if self._curved else math.inf

    def _pass(self, draws: range | None) -> Curvature:
        route = self._route
        return sweep_pass(self._ctx, draws, route.not_covered, self._rows, route.places)

    def draw_until(self, number: int) -> str:
        """Pass over the data once, with the next draws."""
        try:
            found = self._pass(range(self.taken, number))
        except NotApplicable as late:
            if self._found is None:
                raise
            return str(late)
        self._found = found if self._found is None else self._found.joined(found)
        self.taken = number
        return TIME_IS_UP if time_is_over(self._ctx) else ""

    def relative_errors(self, precision: float) -> list[float]:
        """Relative standard errors of the network's values and the layers'."""
        wanted = self._quantities or (WITHOUT_UNITS if self._curved else None)
        return self.result("").relative_errors(precision, wanted)

    def exact(self, needed: float) -> Curvature | None:
        """All columns, where they are no more than those of the draws that are needed."""
        shape = sweep_shape(self._ctx)
        settled = self.taken >= self._limits.settled_draws
        return self._pass(None) if settled and not self._curved and needed * shape.per_draw >= shape.columns else None

    def hopeless(self, imprecise: int, reachable: int) -> bool:
        """True where, after many draws, most of the imprecise values are out of reach."""
        return self._curved and self.taken >= self._limits.surrender_draws and 2 * reachable < imprecise

    def improve(self, needed: float) -> bool:
        """Leave to products, once, what they give with less noise."""
        del needed
        if self._compared or self.taken < self._limits.settled_draws:
            return False
        self._compared = True
        noisier = noisier_by_columns(self._ctx, self.result(""), self._route.precision)
        if noisier:
            self._route, self._found, self.taken = self._route.by_products(noisier), None, 0
            self.draw_until(self.first_look)
        return bool(noisier)

    def next_look(self, needed: float) -> int:
        """Somewhat more than seem to be needed, as `Limits` says; all that there is time for under a deadline."""
        limits = self._limits
        if self._ctx.effort.deadline is not None:
            return 2 * self.taken
        most, least = limits.most_growth * self.taken, limits.least_growth * self.taken
        following = math.ceil(min(max(limits.look_margin * needed, least), most))
        if not self._curved:
            return following
        return min(following, limits.most_draws if self.taken >= limits.surrender_draws else limits.surrender_draws)

    def result(self, ended: str) -> Curvature:
        """All draws so far."""
        assert self._found is not None
        return replace(self._found, missed=ended)
