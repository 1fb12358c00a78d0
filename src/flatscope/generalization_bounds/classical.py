"""Bounds that count: parameters, what training can have reached, tasks that share layers, cells of a partition."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.errors import InputError, NotApplicable, refuse_unless_whole
from flatscope.params import count_scalars, norm
from flatscope.registry import FUNCTION_SYMMETRIES, SYMMETRIES, Value, bound
from flatscope.samples import Inputs, as_rows, tensors_of_inputs


def sample_complexity(gap: float, delta: float, bits: int, n_parameters: int) -> float:
    """Samples that suffice for a gap of at most `gap` (Zhang et al. 2017, eq 14).

    (2/ε²)(kW log 2 + log(2/δ)) for W weights of k bits each: a finite class has 2^(kW) members.
    """
    if gap <= 0 or not 0 < delta < 1 or bits < 1 or n_parameters < 1:
        got = f"{gap}, {delta}, {bits}, {n_parameters}"
        raise InputError("gap > 0, 0 < delta < 1, bits and parameters of at least 1", got, "sample_complexity")
    return 2 / gap**2 * (bits * n_parameters * math.log(2) + math.log(2 / delta))


@bound(
    symbol=r"\sqrt{\tfrac{2}{n}\,(kW\log 2 + \log\tfrac{2}{\delta})}",
    paper="zhang2017",
    equation="(14), solved for the gap",
    invariant_under=frozenset(SYMMETRIES),
    assumptions=("loss in [0, 1] (0/1 error)", "weights stored with `bits` bits each", "samples drawn independently"),
)
def parameter_counting(ctx: Context, *, delta: float, bits: int = 32) -> Value:
    """Gap between training and expected error that counting parameters allows.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        bits: precision of one weight.
    """
    needed_for_unit_gap = sample_complexity(1.0, delta, bits, count_scalars(ctx.trainable.values()))
    return Value(math.sqrt(needed_for_unit_gap / ctx.problem.n_train))


def log_covering_number(radius: float, epsilon: float, dimension: int) -> float:
    """Logarithm of (3r/ε)^d, which bounds how many balls of radius ε cover one of radius r (Zhang et al. 2017, eq 16).

    Infinite radii give infinity; ε must lie in (0, r).
    """
    if dimension < 1 or not 0 < epsilon < radius:
        raise InputError("0 < epsilon < radius and a dimension", f"{epsilon}, {radius}, {dimension}", where="covering")
    return dimension * math.log(3 * radius / epsilon)


@bound(
    symbol=r"\sqrt{\tfrac{d}{n} \log\tfrac{3 G_T}{\epsilon}}",
    paper="zhang2017",
    equation="(15), (16)",
    assumptions=(
        "NOT CERTIFIED: the order of the gap; the memo leaves out constants and what a step of epsilon costs",
        "training stays in the ball of radius G_T around its start: the distance from the start, or the `radius` given",
        "epsilon below the radius (checked)",
    ),
)
def covering(ctx: Context, *, delta: float, radius: float = 0.0, epsilon: float = 0.01) -> Value:
    """Gap of the order of covering the ball that training explored.

    Args:
        delta: not used: the statement hides it among the constants.
        radius: G_T, a bound on the norm of the sum of all steps γ_t ∇V; 0 for the distance from the weights before
            training. For plain SGD, neither projected nor with momentum or weight decay, the two are the same, since
            w_T - w_0 = -Σ γ_t ∇V; with those it is the norm of the sum of the updates, and w_T still lies in that ball.
        epsilon: radius of the balls of the cover, in weight space.
    """
    del delta
    initial = ctx.problem.initial
    if radius == 0:
        if initial is None:
            way = "pass initial= (on the command line --initial) or the option radius"
            raise NotApplicable(f"needs the weights before training, or a radius; {way}")
        radius = norm({name: v.double() - initial[name].double() for name, v in ctx.trainable.items()})
    if not 0 < epsilon < radius:
        raise NotApplicable("0 < epsilon < radius of the explored ball", f"{epsilon:g} and {radius:.4g}")
    log_number = log_covering_number(radius, epsilon, count_scalars(ctx.trainable.values()))
    return Value(math.sqrt(log_number / ctx.problem.n_train), reason=f"G_T = {radius:.4g}, log N = {log_number:.4g}")


def multitask_gap(n: int, tasks: int, log_specific: float, log_shared: float, delta: float) -> float:
    """(1/√(2M)) √(ln|H| + (ln|G| + ln(1/δ)) / T), H the part of each task, G the shared one (Zhang et al. 2017, eq 61).

    The memo's text has H and G the other way round; its formula divides the shared part by the number of tasks.
    """
    if n < 1 or tasks < 1 or log_specific < 0 or log_shared < 0 or not 0 < delta < 1:
        got = f"{n}, {tasks}, {log_specific}, {log_shared}, {delta}"
        raise InputError("samples, tasks, sizes of at least 1 and 0 < delta < 1", got, "multitask")
    return math.sqrt((log_specific + (log_shared + math.log(1 / delta)) / tasks) / (2 * n))


@bound(
    symbol=r"\tfrac{1}{\sqrt{2n}} \sqrt{\ln|H| + \tfrac1T (\ln|G| + \ln\tfrac1\delta)}",
    paper="zhang2017",
    equation="(61)",
    invariant_under=frozenset(SYMMETRIES),
    assumptions=(
        "loss in [0, 1] (0/1 error)",
        "`tasks` tasks with as many samples each share every layer but the last",
        "weights stored with `bits` bits each",
        "samples drawn independently",
    ),
)
def multitask(ctx: Context, *, delta: float, tasks: int = 10, bits: int = 32) -> Value:
    """Mean gap over tasks that share all layers but the last, by counting weights.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        tasks: number of tasks T.
        bits: precision of one weight.
    """
    if not ctx.network.layers:
        raise NotApplicable("the network has no dense or convolutional layer")
    refuse_unless_whole(bits, "bits")
    last = ctx.network.layers[-1]
    of_last_layer = count_scalars(ctx.trainable[name] for name in (last.weight, last.bias) if name in ctx.trainable)
    shared = count_scalars(ctx.trainable.values()) - of_last_layer
    log_two = bits * math.log(2)
    return Value(multitask_gap(ctx.problem.n_train, tasks, of_last_layer * log_two, shared * log_two, delta))


def robust_gap(spread: float, cells: float, largest: float, n: int, delta: float, log_weight: float = 0.0) -> float:
    """ε(S) + M √((2K log 2 + 2 log(1/πδ)) / n): Zhang et al. 2017, eq (18), and a term of (19).

    Args:
        spread: ε(S), the largest difference of losses within a cell.
        cells: K.
        largest: M, the largest loss.
        n: number of samples.
        delta: the bound holds with probability at least 1 - delta.
        log_weight: log(1/π) of the partition among those that were tried; 0 for a single one.
    """
    if spread < 0 or cells < 1 or largest < 0 or n < 1 or not 0 < delta < 1 or log_weight < 0:
        got = f"{spread}, {cells}, {largest}, {n}, {delta}, {log_weight}"
        raise InputError("ε ≥ 0, K ≥ 1, M ≥ 0, samples, 0 < delta < 1, a weight of at most 1", got, "robust_gap")
    return spread + largest * math.sqrt((2 * cells * math.log(2) + 2 * (math.log(1 / delta) + log_weight)) / n)


def log_weight(index: int) -> float:
    """log(1/π) of the k-th of countably many partitions, π = 6 / (π² k²): 2 log k + log(π²/6)."""
    if index < 1:
        raise InputError("partitions numbered from 1", str(index), where="log_weight")
    return 2 * math.log(index) + math.log(math.pi**2 / 6)


@dataclass(frozen=True)
class TriedPartition:
    """One of the partitions tried: its number, cells K and spread ε(S)."""

    index: int
    cells: float
    spread: float


def best_gap(
    partitions: Iterable[TriedPartition], largest: float, n: int, delta: float
) -> tuple[float, TriedPartition]:
    """The smallest value of (19) over partitions, and where it is."""
    gaps = [(robust_gap(p.spread, p.cells, largest, n, delta, log_weight(p.index)), p) for p in partitions]
    if not gaps:
        raise InputError("at least one partition", "none", where="robustness")
    return min(gaps, key=lambda pair: pair[0])


@bound(
    symbol=r"\min_C\ \epsilon_C(S) + \sqrt{\tfrac{2 K_C \log 2 + 2\log(1/(\pi(C)\delta))}{n}}",
    paper="zhang2017",
    equation="Theorems 1 and 2, eq (18), (19)",
    invariant_under=FUNCTION_SYMMETRIES,
    assumptions=(
        "loss in [0, 1]: clipped at 1 (so by construction)",
        "partitions independent of the training sample: cells around test inputs, times the labels",
        "NOT CERTIFIED: ε(S) is the largest difference seen among training and test samples, not over whole cells",
        "samples drawn independently (cannot be checked)",
    ),
    needs={"test", "classes"},
    cost="sweep",
)
def robustness(ctx: Context, *, delta: float, levels: int = 7) -> Value:
    """Gap by how much the clipped loss differs between samples of one cell; the best of several partitions.

    The k-th partition has a cell around each of the first 2^(k-1) test inputs, in an order drawn at random, for each
    label. Coarse ones have few cells and large differences.

    Args:
        delta: the bound holds with probability at least 1 - delta.
        levels: number of partitions.
    """
    refuse_unless_whole(levels, "levels")
    centres = _random_centres(ctx, 2 ** (levels - 1))
    classes, n = ctx.problem.n_classes, ctx.problem.n_train
    sizes = [2**k for k in range(levels) if 2**k <= len(centres)]
    cells, losses = (torch.cat(parts) for parts in zip(*_cells_and_losses(ctx, centres, sizes), strict=True))
    partitions = [
        TriedPartition(index, size * classes, float(spread_by_sample(cells[:, index - 1], losses, n).max()))
        for index, size in enumerate(sizes, start=1)
    ]
    value, best = best_gap(partitions, 1.0, n, delta)
    remark = f"K = {best.cells:g}, ε(S) = {best.spread:.4g}, partition {best.index} of {len(sizes)}"
    return Value(value, exact=False, reason=remark)


def _random_centres(ctx: Context, most: int) -> Tensor:
    """At most that many test inputs as vectors, at random and in random order: (k, d)."""
    n = ctx.problem.part("test").n
    order = torch.randperm(n, generator=ctx.generator("robustness"))[:most]
    centres: dict[int, Tensor] = {}
    start, wanted = 0, set(order.tolist())
    for inputs, targets in ctx.batches("test"):
        vectors = input_vectors(inputs)
        centres |= {start + i: vectors[i] for i in range(len(targets)) if start + i in wanted}
        start += len(targets)
    if len({len(vector) for vector in centres.values()}) > 1:
        raise NotApplicable("inputs of one shape")
    return torch.stack([centres[int(i)] for i in order])


def _cells_and_losses(ctx: Context, centres: Tensor, sizes: list[int]) -> Iterator[tuple[Tensor, Tensor]]:
    """Cells (n, partitions) and clipped losses (n,) of a batch at a time, training samples first."""
    with torch.no_grad():
        for part in ("train", "test"):
            for inputs, targets in ctx.batches(part):
                vectors = input_vectors(inputs)
                if vectors.shape[1] != centres.shape[1]:
                    raise NotApplicable("inputs of one shape")
                distances = torch.cdist(vectors, centres)  # (n, k)
                nearest = torch.stack([distances[:, :size].argmin(1) for size in sizes], dim=1)
                cells = nearest * ctx.problem.n_classes + targets[:, None].to(nearest.device)
                losses = ctx.problem.loss(ctx.forward(inputs), targets).double().clamp(0, 1)
                ctx.charge_passes("forward", len(targets))
                yield cells.cpu(), losses.cpu()


def spread_by_sample(cell: Tensor, losses: Tensor, n_train: int) -> Tensor:
    """Largest difference between each training sample's loss and those of the samples in its cell: (n_train,).

    Args:
        cell: number of the cell of every sample, the training samples first.
        losses: of every sample.
        n_train: how many of them are training samples.
    """
    k = int(cell.max()) + 1
    highest = torch.full((k,), -math.inf, dtype=losses.dtype).scatter_reduce(0, cell, losses, "amax")
    lowest = torch.full((k,), math.inf, dtype=losses.dtype).scatter_reduce(0, cell, losses, "amin")
    training_losses, at = losses[:n_train], cell[:n_train]
    return torch.maximum(highest[at] - training_losses, training_losses - lowest[at])


def input_vectors(inputs: Inputs) -> Tensor:
    """The one input of each sample as a vector: (n, d), float64."""
    parts = tensors_of_inputs(inputs)
    if len(parts) != 1 or not parts[0].is_floating_point():
        raise NotApplicable("needs one input of real numbers")
    return as_rows(parts[0]).double()
