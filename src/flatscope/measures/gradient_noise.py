"""Gradient noise: how much the gradients of single samples, and so of mini-batches, differ at fixed weights."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.func import grad

from flatscope.context import Context
from flatscope.curvature.memory import in_batches
from flatscope.curvature.per_sample_gradients import gradient_forms
from flatscope.curvature.route import find_not_covered
from flatscope.curvature.sweep import gradient_flows, sweep_plan
from flatscope.errors import InputError
from flatscope.params import Params, count_scalars, flatten, norm, vectorised_over_points
from flatscope.perturbation import loss_and_gradient, stacked_call_agrees
from flatscope.registry import Value, measure
from flatscope.samples import Batch, Inputs, map_inputs, slice_inputs

_of_samples = partial(
    measure,
    invariant_under={"permutation"},
    cost="sweep",
    typical={"forward": 6, "gradient": 1},
    passes={"forward": 2, "backward": 2},
)


@_of_samples(
    symbol=r"\operatorname{tr} S_b,\ S = \tfrac{1}{n} \sum_i (g_i - \bar g)(g_i - \bar g)^\top",
    paper="zhang2017",
    equation="Section 5.1, eq (7), Figure 5",
    falls_with_loss=True,
    conventions="all trainable parameters; covariance over the training samples (divided by n), of a mini-batch S/b "
    "with replacement and S(n-b)/(b(n-1)) without; data_stderr takes the samples as a draw",
)
def gradient_noise(ctx: Context, *, batch: int = 1, replacement: bool = True) -> Value:
    """Trace of the covariance of a mini-batch gradient at these weights: the power of SGD's noise.

    Args:
        batch: samples of a mini-batch; 1 gives the covariance S of single samples.
        replacement: whether the samples of a mini-batch are drawn with replacement.
    """
    n = ctx.problem.n_train
    factor = batch_factor(n, batch, replacement)
    squares = ctx.cached(noise_squares)
    spread = factor * float(squares.std()) / math.sqrt(n) if n > 1 else math.nan
    return Value(factor * float(squares.mean()), data_stderr=spread)


@_of_samples(
    symbol=r"\frac{\operatorname{tr} S}{\|\bar g\|^2}",
    paper="flatscope",
    equation="McCandlish et al. 2018, Section 2.2, simple noise scale",
    conventions="all trainable parameters; S and the mean gradient are those of the training samples, from which SGD "
    "draws; with `unbiased` those of the distribution that they are a draw from",
)
def gradient_noise_scale(ctx: Context, *, unbiased: bool = False) -> Value:
    r"""Gradient noise of single samples over the squared mean gradient: the batch size at which both are equal.

    .. math:: \operatorname{tr} S / \|\bar g\|^2, \quad S = \tfrac1n \sum_i (g_i - \bar g)(g_i - \bar g)^\top

    Args:
        unbiased: of a larger set from which the samples are a draw: S divided by n − 1, the share of the samples' own
            noise, tr S / n, taken off the squared gradient, and off the ratio what it is too large on average because
            its parts are only known so well (to first order in 1/n, by the jackknife). There is no value where the
            squared gradient is not at least twice its standard error.
    """
    noise, square = float(ctx.cached(noise_squares).mean()), norm(ctx.gradient()) ** 2
    if unbiased:
        return _unbiased_scale(ctx.cached(noise_parts), square)
    if not square > 0:
        return Value(math.nan, exact=False, reason="no finite value: the mean gradient is zero")
    return Value(noise / square)


def _unbiased_scale(parts: Tensor, square: float) -> Value:
    """Noise over squared gradient, of ‖g_i − ḡ‖² and ⟨g_i − ḡ, ḡ⟩ of the samples and of ‖ḡ‖²."""
    n, (squares, along) = len(parts), parts.unbind(1)
    nothing = Value(math.nan, exact=False, reason="no finite value: more than these samples can tell from their noise")
    if n < 3:
        return nothing
    noise = float(squares.sum()) / (n - 1)
    signal = square - noise / n
    # Both without each of the samples.
    noises = (squares.sum() - squares * n / (n - 1)) / (n - 2)
    signals = square - 2 * along / (n - 1) + squares / (n - 1) ** 2 - noises / (n - 1)
    variance, covariance = (float(value) for value in _jackknife_covariance(signals, torch.stack([signals, noises])))
    if not signal > 2 * math.sqrt(variance):
        return nothing
    return Value(noise / signal / (1 + variance / signal**2 - covariance / (noise * signal)))


def _jackknife_covariance(one: Tensor, others: Tensor) -> Tensor:
    """Covariance of an estimate with others, from their values without each of the samples: (k, n) to (k,)."""
    n = len(one)
    centred: Tensor = others - others.mean(1, keepdim=True)
    return (n - 1) / n * (centred @ (one - one.mean()))


def batch_factor(n: int, batch: int, replacement: bool) -> float:
    """Covariance of a mini-batch gradient over that of a single sample: 1/b, or (n − b) / (b (n − 1))."""
    if batch < 1 or (not replacement and batch > n):
        most = "" if replacement else f" and at most {n}"
        raise InputError(f"a batch of at least 1{most}", str(batch), where="batch")
    return 1 / batch if replacement else (n - batch) / (batch * max(1, n - 1))


def noise_squares(ctx: Context) -> Tensor:
    """‖g_i − ḡ‖² of every training sample: (n,), float64, in the order of the data."""
    squares: Tensor = ctx.cached(noise_parts)[:, 0]
    return squares


def noise_parts(ctx: Context) -> Tensor:
    """‖g_i − ḡ‖² and ⟨g_i − ḡ, ḡ⟩ of every training sample: (n, 2), float64, in the order of the data.

    From gradients of single samples; those of a large network are not formed: what passes its layers gives lengths
    and inner products with the mean, and only parameters that belong to no layer have some.
    """
    mean = {name: value.to(ctx.problem.device, ctx.problem.dtype) for name, value in ctx.gradient().items()}
    if _samples_at_once(ctx, ctx.trainable) >= ctx.effort.limits.transformed_samples:
        return ctx.problem.ranks.joined(_distances_from_mean_gradient(ctx, mean))
    not_covered = find_not_covered(ctx, "gauss_newton")
    covered = {name: value for name, value in mean.items() if name not in not_covered}

    def work(batch: Batch, numbers: Tensor, width: int) -> Tensor:
        del numbers, width
        total = torch.zeros(len(batch[1]), 2, dtype=torch.float64, device=ctx.problem.device)
        for flow in gradient_flows(ctx, batch, not_covered):
            for squares, along in gradient_forms(flow, ctx.params[flow.weight], covered):
                total[:, 0] += squares.double() - 2 * along.double()
                total[:, 1] += along.double()
        return total.cpu()

    ctx.charge_passes("forward", ctx.problem.n_train)
    ctx.charge_passes("backward", ctx.problem.n_train)
    length = norm(covered) ** 2
    total = torch.cat(list(in_batches(ctx, sweep_plan(ctx, 1), work))) + torch.tensor(
        [length, -length], dtype=torch.float64
    )
    if len(covered) < len(mean):
        total += _distances_from_mean_gradient(
            ctx, {name: value for name, value in mean.items() if name in not_covered}
        )
    total[:, 0].clamp_min_(0)
    return ctx.problem.ranks.joined(total)


def _distances_from_mean_gradient(ctx: Context, mean: Params) -> Tensor:
    """‖g_i − ḡ‖² and ⟨g_i − ḡ, ḡ⟩ of this rank's samples over some parameters."""
    flat, distances = flatten(mean), []
    for gradients in sample_gradients(ctx, tuple(mean)):
        apart = gradients.sub_(flat)
        lengths = torch.linalg.vector_norm(apart, dim=1, dtype=torch.float64)
        distances.append(torch.stack([lengths.square(), (apart @ flat).double()], 1).cpu())
    return torch.cat(distances)


def _samples_at_once(ctx: Context, moved: Params) -> int:
    """Samples whose gradients are held at once."""
    size = torch.finfo(ctx.problem.dtype).bits // 8
    return max(
        1,
        min(ctx.problem.batch_size, ctx.effort.limits.transformed_bytes // (2 * size * count_scalars(moved.values()))),
    )


def sample_gradients(ctx: Context, names: Sequence[str] | None = None) -> Iterator[Tensor]:
    """Gradients of the training loss of single samples, a chunk at a time: (chunk, p), in the order of the data.

    All at once by `torch.func` where the network allows it, one by one where it does not. Of several ranks each gets
    its own share.

    Args:
        ctx: the network.
        names: the parameters; all that are trainable by default.
    """
    moved = ctx.trainable if names is None else {name: ctx.trainable[name] for name in names}
    run = _sample_gradients_in_one_call if ctx.cached(can_vectorise_sample_gradients) else _sample_gradients_one_by_one
    for kind in ("forward", "backward"):
        ctx.charge_passes(kind, ctx.problem.n_train)
    for inputs, targets in ctx.share(size=_samples_at_once(ctx, moved)):
        yield run(ctx, moved, inputs, targets)


def can_vectorise_sample_gradients(ctx: Context) -> bool:
    """True if all per-sample gradients come from one call; tried on two samples and compared with one by one."""
    inputs, targets = next(iter(ctx.batches(size=2)))
    ways = (
        partial(run, ctx, ctx.trainable, inputs, targets)
        for run in (_sample_gradients_in_one_call, _sample_gradients_one_by_one)
    )
    together, one_by_one = ways
    return stacked_call_agrees(ctx, lambda: [together()], lambda: [one_by_one()])


def _sample_gradients_in_one_call(ctx: Context, moved: Params, inputs: Inputs, targets: Tensor) -> Tensor:
    point = {name: value.detach() for name, value in moved.items()}

    def loss(params: Params, inputs: Inputs, target: Tensor) -> Tensor:
        outputs = ctx.forward(map_inputs(inputs, lambda value: value[None]), {**ctx.params, **params})
        return ctx.problem.loss(outputs, target[None]).sum()

    stacked: Params = vectorised_over_points(grad(loss), point, inputs, targets, in_dims=(None, 0, 0))
    return torch.cat([stacked[name].detach().reshape(len(targets), -1) for name in point], dim=1)


def _sample_gradients_one_by_one(ctx: Context, moved: Params, inputs: Inputs, targets: Tensor) -> Tensor:
    samples = ((slice_inputs(inputs, i, i + 1), targets[i : i + 1]) for i in range(len(targets)))
    return torch.stack([flatten(loss_and_gradient(ctx, sample, moved)[1]) for sample in samples])
