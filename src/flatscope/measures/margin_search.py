"""The nearest inputs of another class that a search finds, for many samples at once.

Each restart heads for one other class j: the first for those that seem nearest from x itself, the others from random
points. At a point p the gap f_y − f_j is replaced by its linearisation, and the next point lies between the projections
of p and of x onto the plane where that vanishes (Croce and Hein 2020). A point that has changed class is kept and drawn
back towards x. What a restart found slides along its tangent plane while that brings it nearer, and turns corners where
planes meet; the best is bisected onto the boundary. Values and gradients of the function are all that is used, so that
whatever leaves the function alone leaves the search alone.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flatscope.context import sample_margins

Network = Callable[[Tensor], Tensor]
STEPS = 15
ROUNDS = 2
SPREAD = 2.0
FAR = 10.0
DIRECTIONS = 6
SLIDES = 6
CORNER = 6  # planes of one corner
SWEEPS = 10
LOOKS = 32  # directions
HALVINGS = 25
OVERSHOOT = 1.05
TOWARDS_SAMPLE = 0.1  # the most that the projection of x counts against that of the present point
DRAW_BACK = 0.9
MOST_CLASSES = 20  # beyond this many only the classes of the largest outputs are headed for


class Nearest:
    """The nearest point of another class found so far, for each sample; samples and points are (n, d)."""

    def __init__(self, x: Tensor) -> None:
        self.x, self.points = x, x.clone()
        self.distances = x.new_full((len(x),), torch.inf)
        self.last_gain = 0.0  # the largest share by which the last round of refinement shortened a distance

    def offer(self, points: Tensor, changed: Tensor) -> Tensor:
        """Keep those that have changed class and are nearer; says which."""
        distances = (points - self.x).norm(dim=1)
        better: Tensor = changed & (distances < self.distances)
        self.distances = torch.where(better, distances, self.distances)
        self.points = torch.where(better[:, None], points, self.points)
        return better


def nearest_changes(
    network: Network, x: Tensor, y: Tensor, restarts: int, generator: torch.Generator, late: Callable[[], bool] = bool
) -> Nearest:
    """Search from samples that are classified correctly.

    Args:
        network: outputs (n, C) of inputs (n, d), each sample by itself.
        x: samples (n, d).
        y: labels (n,).
        restarts: the first third heads for the nearest other classes by linearisation, the rest starts at random.
        generator: of the random points; all samples share them, so that none depends on its neighbours.
        late: says when no further restart may be begun; never by default.
    """
    nearest = Nearest(x)
    order = classes_by_distance(network, x, y)
    targets = min(order.shape[1], max(1, restarts // 3))
    for restart in range(restarts):
        if restart and late():
            break
        start, j = x, order[:, restart % targets]
        if restart >= targets:
            start, j = _random_starting_points(network, nearest, y, SPREAD ** (restart % 3 - 1), generator)
        own = Nearest(x)
        _step_towards_class(network, own, start, y, j)
        _slide_along_decision_boundary(network, own, y)
        _turn_corner(network, own, y)
        nearest.offer(own.points, own.distances.isfinite())
    _search_at_random(network, nearest, y, generator)
    _refine_nearest_points(network, nearest, y)
    return nearest


def _random_starting_points(
    network: Network, nearest: Nearest, y: Tensor, spread: float, generator: torch.Generator
) -> tuple[Tensor, Tensor]:
    """At the distance known so far, or some more or less, in the most promising of a few directions; and the class."""
    x = nearest.x
    radius = torch.where(nearest.distances.isfinite(), nearest.distances, FAR * (x.norm(dim=1) + 1))
    directions = torch.randn(DIRECTIONS, x.shape[1], generator=generator, dtype=torch.float64).to(x)
    start, j, smallest = x, y, torch.full_like(radius, torch.inf)
    for direction in directions / directions.norm(dim=1, keepdim=True):
        point = x + spread * radius[:, None] * direction
        with torch.no_grad():
            outputs = network(point)
        gap = sample_margins(outputs, y)
        better = gap < smallest
        smallest = torch.where(better, gap, smallest)
        start = torch.where(better[:, None], point, start)
        j = torch.where(better, other_classes(outputs, y, 1)[:, 0], j)
    return start, j


def linear_distances(network: Network, x: Tensor, y: Tensor, classes: Tensor) -> Tensor:
    """(f_y − f_j)/‖∇(f_y − f_j)‖ for the classes j in the columns of (n, k); infinite where the gradient vanishes."""
    columns = []
    for place in range(classes.shape[1]):
        gap, slope, _ = gap_and_slope(network, x, y, classes[:, place])
        length = slope.norm(dim=1)
        columns.append(torch.where(length > 0, gap / length, gap.sign() * torch.inf))
    return torch.stack(columns, dim=1)


def estimated_distances(network: Network, x: Tensor, y: Tensor, classes: Tensor, directions: Tensor) -> Tensor:
    """The same for all classes at once, lengths from derivatives along random signs (draws, n, d): of mean ‖∇‖²."""
    with torch.enable_grad():
        free = x.detach().requires_grad_()
        outputs = network(free)
        if not outputs.requires_grad:
            return torch.full(classes.shape, torch.inf).to(outputs)
        u = torch.zeros_like(outputs, requires_grad=True)
        (pulled,) = torch.autograd.grad(outputs, free, u, create_graph=True, materialize_grads=True)
    squares = torch.zeros(classes.shape).to(outputs)
    for direction in directions if pulled.requires_grad else ():
        (along,) = torch.autograd.grad(pulled, u, direction, retain_graph=True, materialize_grads=True)
        squares += (along.gather(1, y[:, None]) - along.gather(1, classes)).square()
    length = (squares / len(directions)).sqrt()
    gap = (outputs.gather(1, y[:, None]) - outputs.gather(1, classes)).detach()
    return torch.where(length > 0, gap / length, gap.sign() * torch.inf)


def other_classes(outputs: Tensor, y: Tensor, most: int | None = None) -> Tensor:
    """Classes other than the label, (n, k), those of large outputs first."""
    ranked = outputs.scatter(1, y[:, None], -torch.inf).argsort(dim=1, descending=True, stable=True)[:, :-1]
    return ranked[:, :most]


def classes_by_distance(network: Network, x: Tensor, y: Tensor) -> Tensor:
    """Other classes in the order of their linearised distance, (n, k)."""
    with torch.no_grad():
        classes = other_classes(network(x), y, MOST_CLASSES)
    distances = linear_distances(network, x, y, classes)
    return classes.gather(1, distances.argsort(dim=1, stable=True))


def gap_and_slope(
    network: Network, points: Tensor, y: Tensor, j: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """f_y − f_j, its gradient, and whether the class has changed, that is y no longer has the largest output alone.

    Without j it is the class of the largest other output.
    """
    with torch.enable_grad():
        free = points.detach().requires_grad_()
        outputs = network(free)
        margins = sample_margins(outputs, y)
        gap = margins
        if j is not None:
            gap = outputs.gather(1, y[:, None])[:, 0] - outputs.gather(1, j[:, None])[:, 0]
        slope = torch.zeros_like(free)  # of outputs that come by jumps alone
        if gap.requires_grad:
            (slope,) = torch.autograd.grad(gap.sum(), free, materialize_grads=True)
    return gap.detach(), slope, margins.detach() <= 0


def _step_towards_class(network: Network, nearest: Nearest, start: Tensor, y: Tensor, j: Tensor) -> None:
    x, point = nearest.x, start
    for _ in range(STEPS):
        gap, slope, changed = gap_and_slope(network, point, y, j)
        nearest.offer(point, changed)
        step, anchored = (_step_to_linearised_boundary(gap, slope, point, origin) for origin in (point, x))
        near, far = step.norm(dim=1), anchored.norm(dim=1)
        share = torch.where(near + far > 0, near / (near + far), torch.zeros_like(near)).clamp_max(TOWARDS_SAMPLE)
        share = share[:, None]
        ahead = (1 - share) * (point + OVERSHOOT * step) + share * (x + OVERSHOOT * anchored)
        point = torch.where(changed[:, None], x + DRAW_BACK * (point - x), ahead)


def _search_at_random(network: Network, nearest: Nearest, y: Tensor, generator: torch.Generator) -> None:
    """Samples that no restart led anywhere: any point of another class, far or near."""
    directions = torch.randn(LOOKS, nearest.x.shape[1], generator=generator, dtype=torch.float64).to(nearest.x)
    lost = nearest.distances.isinf().nonzero()[:, 0]
    if not len(lost):
        return
    of_lost = Nearest(nearest.x[lost])
    scale = of_lost.x.norm(dim=1, keepdim=True) + 1
    for direction in directions / directions.norm(dim=1, keepdim=True):
        for power in range(-2, 7):
            points = of_lost.x + 2.0**power * scale * direction
            of_lost.offer(points, _has_changed(network, points, y[lost]))
    nearest.points[lost], nearest.distances[lost] = of_lost.points, of_lost.distances


def _refine_nearest_points(network: Network, nearest: Nearest, y: Tensor) -> None:
    for _ in range(ROUNDS):
        before = nearest.distances
        _bisect_to_boundary(network, nearest, y)
        _slide_along_decision_boundary(network, nearest, y)
        _turn_corner(network, nearest, y)
    _bisect_to_boundary(network, nearest, y)
    finite = nearest.distances.isfinite()
    nearest.last_gain = float((1 - nearest.distances / before)[finite].max()) if bool(finite.any()) else 0.0


def _step_beyond_boundary(x: Tensor) -> float:
    """A little farther than a boundary, so that rounding does not leave a point on the wrong side."""
    return float(1 + 100 * torch.finfo(x.dtype).eps ** 0.75)


def _slide_along_decision_boundary(network: Network, nearest: Nearest, y: Tensor) -> None:
    """Along the tangent plane towards the foot of x on it, as far as the class stays changed."""
    x, stride = nearest.x, nearest.x.new_ones(len(nearest.x))
    for _ in range(SLIDES):
        gap, slope, _ = gap_and_slope(network, nearest.points, y)
        foot = x + _step_to_linearised_boundary(gap, slope, nearest.points, x)
        ahead = nearest.points + stride[:, None] * (foot - nearest.points)
        ahead = x + _step_beyond_boundary(x) * (ahead - x)
        better = nearest.offer(ahead, _has_changed(network, ahead, y))
        stride = torch.where(better, (2 * stride).clamp_max(1), stride / 2)


def _turn_corner(network: Network, nearest: Nearest, y: Tensor) -> None:
    """Foot of x where faces of the boundary meet: on all planes seen lately, each new point adding its own.

    Where the inputs of the other class are convex near by, all of them lie behind every such plane, and the first foot
    that has changed class is the nearest of all.
    """
    x, point = nearest.x, nearest.points
    with torch.no_grad():
        j = other_classes(network(point), y, 1)[:, 0]
    planes, values = x.new_zeros(len(x), CORNER, x.shape[1]), x.new_zeros(len(x), CORNER)
    for number in range(CORNER):
        gap, slope, changed = gap_and_slope(network, point, y, j)
        nearest.offer(point, changed)
        length = slope.norm(dim=1)
        scale = torch.where(length > 0, 1 / length, torch.zeros_like(length))
        planes[:, number] = slope * scale[:, None]
        values[:, number] = (gap + (slope * (x - point)).sum(1)) * scale
        point = x + _step_beyond_boundary(x) * _nearest_point_of_half_spaces(
            planes[:, : number + 1], values[:, : number + 1]
        )
    nearest.offer(point, _has_changed(network, point, y))


def _nearest_point_of_half_spaces(planes: Tensor, values: Tensor) -> Tensor:
    """The shortest d with ⟨g_k, d⟩ + v_k ≤ 0 for all unit vectors g_k: (n, k, d), (n, k) to (n, d).

    Its dual min λᵀQλ/2 − vᵀλ over λ ≥ 0 by Hildreth's sweeps, then exactly on the planes that these found to hold it.
    """
    products = planes @ planes.mT
    weights = torch.zeros_like(values)
    for _ in range(SWEEPS):
        for k in range(values.shape[1]):
            rest = values[:, k] - (products[:, k] * weights).sum(1)
            weights[:, k] = (weights[:, k] + rest).clamp_min(0)
    holding = weights > 0
    both = holding[:, :, None] & holding[:, None, :]
    identity = torch.eye(values.shape[1], dtype=values.dtype, device=values.device)
    matrix = torch.where(both, products, identity) + 10 * torch.finfo(values.dtype).eps * identity
    solved = torch.linalg.solve(matrix, torch.where(holding, values, torch.zeros_like(values)))
    good = (solved >= 0).all(1, keepdim=True)
    return -(torch.where(good, solved, weights)[:, None] @ planes)[:, 0]


def _bisect_to_boundary(network: Network, nearest: Nearest, y: Tensor) -> None:
    """Shrink what was found onto the boundary between it and x."""
    way = nearest.points - nearest.x
    low, high = way.new_zeros(len(way)), way.new_ones(len(way))
    for _ in range(HALVINGS):
        middle = (low + high) / 2
        changed = _has_changed(network, nearest.x + middle[:, None] * way, y)
        low, high = torch.where(changed, low, middle), torch.where(changed, middle, high)
    nearest.offer(nearest.x + high[:, None] * way, nearest.distances.isfinite() & (high < 1))


def _has_changed(network: Network, points: Tensor, y: Tensor) -> Tensor:
    with torch.no_grad():
        return sample_margins(network(points), y) <= 0


def _step_to_linearised_boundary(gap: Tensor, slope: Tensor, at: Tensor, origin: Tensor) -> Tensor:
    """The way from `origin` to the nearest point where the linearisation at `at` vanishes; none if it is constant."""
    square = slope.square().sum(1)
    value = gap + (slope * (origin - at)).sum(1)
    return -torch.where(square > 0, value / square, torch.zeros_like(square))[:, None] * slope
