"""Route: the way by which the curvature of every parameter is found, what it is expected to cost, and why.

Columns sent back through the network give every layer at once; they reach a parameter where its gradients of single
samples are known and the outputs are piecewise linear in it. Where they are curved, columns at the curved operations
reach it too, with noise. Products reach every parameter; one for each of its weights makes the block exact. The
cheapest of these is taken, and the exact one wherever it is expected to cost no more than an estimate.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from flatscope.context import Context
from flatscope.curvature.coverage import not_covered_by_columns, not_covered_by_uses
from flatscope.curvature.curved_operations import NO_PLACES, Places, find_curved_places
from flatscope.curvature.estimators import Asked, HutchinsonDraws
from flatscope.curvature.layer_directions import LayerDirections
from flatscope.curvature.operators import activations, multiplications, sample_groups
from flatscope.curvature.random_signs import Signs
from flatscope.curvature.sweep import SweepShape, sweep_shape
from flatscope.curvature.sweep_result import Curvature
from flatscope.limits import Limits
from flatscope.network.not_covered import NotCovered
from flatscope.params import count_scalars
from flatscope.sampling import relative_error

Kind = Literal["exact columns", "sampled columns", "columns at curved operations", "products", "dense block"]
CURVED = "something that is not piecewise linear stands between it and the loss"
LESS_NOISE = "random columns have more noise there than products"
TRACE_ALONE = "nothing but the whole network's trace is asked for"


@dataclass(frozen=True)
class Way:
    """One way to the curvature of a parameter.

    Attributes:
        kind: "exact columns", all columns of the output Hessian's root; "sampled columns", random ones until they are
            precise, or all where that costs no more; "columns at curved operations", random ones at the outputs and at
            every operation that is not piecewise linear; "products" of the Hessian with random signs; "dense block",
            a product for every weight: exact.
        passes: expected cost, in forward passes over the training data. Columns, and random products, are shared by
            all parameters that go by them, so each has the cost of all.
        reason: why it is not by columns at the outputs, or why they are drawn; empty where all columns are taken.
    """

    kind: Kind
    passes: float
    reason: str = ""

    @property
    def exact(self) -> bool:
        """True where nothing is drawn."""
        return self.kind in ("exact columns", "dense block")

    def __str__(self) -> str:
        """Kind, cost, and the reason if there is one."""
        text = f"{self.kind}, about {self.passes:,.0f} passes"
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True)
class Route:
    """The way of every trainable parameter, decided before anything is computed.

    Two things are only known after a first look at random columns, and may change it: all columns are taken where as
    many draws would be needed, and a layer goes by products where columns at curved operations have more noise.

    Attributes:
        ways: by parameter.
        precision: relative standard error for which it was made; 0 for exact values.
        places: the curved operations at which columns have parts; none in most routes.

    Example:
        >>> import torch, flatscope as fs
        >>> from flatscope.curvature.route import route_of
        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2))
        >>> problem = fs.Problem(net, train=(torch.eye(3), torch.tensor([0, 1, 0])))
        >>> for name, way in route_of(fs.Context(problem)).ways.items():
        ...     print(name, "by", way.kind)
        0.weight by dense block
        0.bias by dense block
        2.weight by exact columns
        2.bias by exact columns
    """

    ways: Mapping[str, Way]
    precision: float
    places: Places = field(default=NO_PLACES, repr=False)

    @property
    def not_covered(self) -> NotCovered:
        """The parameters that columns do not give."""
        ways = self.ways.items()
        return NotCovered({name: way.reason for name, way in ways if way.kind in ("products", "dense block")})

    @property
    def passes(self) -> float:
        """Expected cost of all ways, in forward passes: what parameters share counts once."""
        return math.fsum({way.kind: way.passes for way in self.ways.values()}.values())

    def by_products(self, more: NotCovered) -> Route:
        """The route with some more parameters left to products."""
        ways = {name: Way("products", self.passes, why) for name, why in more.items()}
        return replace(self, ways={**self.ways, **ways})


def find_not_covered(ctx: Context, curvature: str | None = None, lookups: bool = False) -> NotCovered:
    """The parameters whose block of the matrix columns at the outputs do not give.

    Args:
        ctx: the network.
        curvature: "hessian" or "gauss_newton"; the context's by default.
        lookups: whether who asks can read tables in which rows are looked up, as the sweep does.
    """
    options = {"lookups": True} if lookups else {}
    if (curvature or ctx.effort.curvature) == "gauss_newton":
        return ctx.structural(not_covered_by_uses, **options)
    return ctx.structural(not_covered_by_columns, **options)


def route_of(ctx: Context, precision: float | None = None, curvature: str | None = None) -> Route:
    """The way of every trainable parameter, found once for all that ask for the same.

    Args:
        ctx: the network.
        precision: relative standard error to reach; the context's by default, 0 for exact values.
        curvature: "hessian" or "gauss_newton"; the context's by default.
    """
    precision = ctx.effort.precision if precision is None else precision
    matrix = curvature or ctx.effort.curvature
    return ctx.cached(_find_route, precision=precision, curvature=matrix)


def _find_route(ctx: Context, *, precision: float, curvature: str) -> Route:
    limits, shape = ctx.effort.limits, sweep_shape(ctx)
    not_covered, places = find_not_covered(ctx, curvature, lookups=True), NO_PLACES
    directions = count_scalars(ctx.params[name] for name in not_covered)
    may_curve = precision > 0 and curvature == "hessian"
    if (
        may_curve
        and directions > limits.few_unreached
        and not cheaper_than_columns(ctx, not_covered, directions, precision)
    ):
        places, not_covered = ctx.cached(reached_at_curved_operations)
        directions = count_scalars(ctx.params[name] for name in not_covered)
    inside = _way_of_columns(shape, precision, limits)
    if places:
        inside = Way("columns at curved operations", curved_passes(ctx, precision, directions), CURVED)
    dense = multiplied_out(ctx, not_covered, directions, precision)
    kind: Kind = "dense block" if dense else "products"
    passes = product_passes(ctx, directions) if dense else usual_draws(limits, precision) * limits.product_passes
    ways = {
        name: Way(kind, passes, not_covered[name]) if name in not_covered else inside for name in ctx.problem.trainable
    }
    return Route(ways, precision, places)


def trace_route(ctx: Context, precision: float | None = None) -> Route:
    """The ways for the trace of the whole network and nothing else.

    Those of the layers where these are exact, or columns at the outputs reach everything. Else products of the whole
    Hessian, where groups of samples with random vectors of their own make few of them enough.
    """
    layers, limits = route_of(ctx, precision), ctx.effort.limits
    kinds = {way.kind for way in layers.ways.values()}
    if not kinds & {"columns at curved operations", "products"}:
        return layers
    products = max(2.0, usual_draws(limits, layers.precision) / sample_groups(ctx))
    passes = limits.product_passes * products
    if passes >= layers.passes:
        return layers
    return Route({name: Way("products", passes, TRACE_ALONE) for name in layers.ways}, layers.precision)


def _way_of_columns(shape: SweepShape, precision: float, limits: Limits) -> Way:
    """All columns at the outputs, or random ones."""
    columns = shape.columns
    if precision <= 0 or columns <= limits.few_columns:
        return Way("exact columns", 1 + limits.column_passes * columns)
    drawn = min(columns, usual_draws(limits, precision) * shape.per_draw)
    reason = f"of {columns:,} columns for each sample not all are needed"
    return Way("sampled columns", 1 + limits.column_passes * drawn, reason)


def reached_at_curved_operations(ctx: Context) -> tuple[Places, NotCovered]:
    """Curved operations to send columns from, and the parameters that these do not cover either.

    No operations where they would reach no more than columns at the outputs.
    """
    not_covered = find_not_covered(ctx, "hessian", lookups=True)
    if places := ctx.structural(find_curved_places):
        try:
            still = ctx.structural(not_covered_by_columns, at_curved=True, lookups=True)
        except RuntimeError:  # an operation that cannot be run by itself, or differentiated twice
            return NO_PLACES, not_covered
        if len(still) < len(not_covered):
            return places, still
    return NO_PLACES, not_covered


def usual_draws(limits: Limits, precision: float) -> float:
    """Draws that an estimate is expected to take: as many as one at 2 %, times the square of how much more is asked."""
    expected = limits.usual_draws * (0.02 / precision) ** 2 if precision > 0 else math.inf
    return min(limits.most_draws, max(limits.first_look, expected))


def curved_passes(ctx: Context, precision: float, directions: int) -> float:
    """Expected cost of columns at curved operations, and of products for the layers where those have much noise.

    A draw has two columns, and random numbers and products of its own for every activation: in narrow networks that is
    most of its cost.
    """
    limits = ctx.effort.limits
    each = 2 * limits.column_passes + limits.activation_cost * activations(ctx) / max(1.0, multiplications(ctx))
    left = min(directions, limits.most_products) / 2  # about half of them were seen to be left to products
    return 1 + usual_draws(limits, precision) * each + limits.product_passes * left


def product_passes(ctx: Context, directions: int) -> float:
    """Cost of a product for each of some directions."""
    return ctx.effort.limits.product_passes * directions


def multiplied_out(ctx: Context, names: Collection[str], directions: int, precision: float) -> bool:
    """True where so many directions of some parameters are multiplied out before anything is drawn.

    Few always are where a product is cheap; where it is not, as many as products for all groups of samples would be.
    """
    limits = ctx.effort.limits
    if precision <= 0:
        return directions <= limits.most_directions
    cheap = ctx.problem.n_train * count_scalars(ctx.trainable.values()) <= limits.cheap_products
    groups = max(1, min(limits.most_groups, ctx.problem.n_train // limits.least_group))
    few = limits.few_directions if cheap else limits.few_directions // groups
    return directions <= few or cheaper_than_columns(ctx, names, directions, precision)


def cheaper_than_columns(ctx: Context, names: Collection[str], directions: int, precision: float) -> bool:
    """True where a product for each of many directions is expected to cost no more than columns at curved operations.

    Never without such operations, or where no layer is among the parameters: biases and scales count in the network's
    trace alone, of which a few random products tell enough.
    """
    if directions > ctx.effort.limits.dense_weights or not any(layer.weight in names for layer in ctx.network):
        return False
    if ctx.effort.curvature != "hessian" or not ctx.structural(find_curved_places):
        return False
    return product_passes(ctx, directions) <= curved_passes(ctx, precision, directions)


def noisier_by_columns(ctx: Context, found: Curvature, precision: float) -> NotCovered:
    """The parameters that random products give with less work than columns at curved operations.

    Columns at operations far behind a layer nearly cancel there, and leave noise; products have none of it. For the
    last layers of a network it is the other way round.

    Args:
        ctx: the network.
        found: a first look by random columns.
        precision: relative standard error that every layer's trace is to reach.
    """
    limits = ctx.effort.limits
    means = {layer: mean for layer in ctx.network if (mean := found.of(layer.weight, "trace")) is not None}
    errors = {layer: relative_error(mean.value, mean.stderr, limits=limits) for layer, mean in means.items()}
    slow = [layer for layer, error in errors.items() if found.draws * (error / precision) ** 2 > limits.soon_draws]
    if not slow:
        return NotCovered()
    directions = LayerDirections(ctx, "trace", [layer.weight for layer in slow])
    signs = Signs(ctx.seed, "noise of products")
    products = HutchinsonDraws(directions, signs, Asked(0.0, limits.most_products), limits)
    products.draw_until(products.first_look)
    noisier: list[str | None] = []
    for layer in slow:
        by_columns = float(means[layer].stderr) ** 2 * found.draws
        by_products = float(products.spread.stderrs[layer.weight, "trace"]) ** 2 * products.taken
        if by_products < limits.draw_cost * by_columns:
            noisier += [layer.weight, layer.bias]
    return NotCovered({name: LESS_NOISE for name in noisier if name in ctx.problem.trainable})
