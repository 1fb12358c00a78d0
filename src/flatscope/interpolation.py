"""`interpolate`: loss and accuracy between two or three trained networks (Zhang et al. 2017, equation 12).

Every point is the network with the weights λ₁w₁ + λ₂w₂ + λ₃w₃, λ on the simplex. BatchNorm's statistics do not
interpolate: those of a mixed network are not the mixture of statistics. They are measured anew at every point on the
data, or BatchNorm is folded into the weights before anything is mixed.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from flatscope.context import Context, sample_margins
from flatscope.curvature.operators import batch_size as samples_at_once
from flatscope.errors import InputError, refuse_unknown, refuse_unless_whole
from flatscope.input_checks import independent_copy
from flatscope.isolation import own_settings, untouched_randomness
from flatscope.loss import PerSample
from flatscope.params import Params, named_parameters, norm
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.simplex import Simplex
from flatscope.symmetries.folding import BatchNorm, fold_batchnorm, has_batchnorm

if TYPE_CHECKING:
    pass

WAYS = ("recompute", "fold")
COMPARED = 256  # samples on which networks are compared
SAME = 1e-4  # of the largest output; weights of the same function must differ by a hundred times that
MOST_TOGETHER, ROOM = 32, 2**28  # mixtures that share a pass over the data, and the bytes that their weights may take


@own_settings()
def interpolate(
    networks: Sequence[nn.Module],
    data: Any,
    resolution: int = 20,
    *,
    loss: str | PerSample = "cross_entropy",
    batchnorm: str = "recompute",
    device: str | torch.device | None = None,
    batch_size: int | None = None,
) -> Simplex:
    """Loss and accuracy of every mixture λ₁w₁ + λ₂w₂ (+ λ₃w₃) of two or three networks of one architecture.

    Args:
        networks: two or three modules with parameters of the same names and shapes; the corners of the picture.
        data: what `Problem` takes as training data: `(x, y)`, a `Dataset`, a `DataLoader`.
        resolution: steps along each side: λ are multiples of 1/resolution.
        loss: as in `Problem`.
        batchnorm: "recompute": mean and variance of every BatchNorm over all the data, measured anew at every
            mixture, also at the corners, where they need not be the running ones that training left behind;
            "fold": each network's BatchNorm becomes part of its weights first, and the corners are the networks.
        device: where to compute; the first network's device by default.
        batch_size: the most samples to evaluate at once; on a GPU as many as its memory allows, by default.

    Example:
        >>> import torch, flatscope as fs
        >>> x, y = torch.eye(3), torch.tensor([0, 1, 0])
        >>> nets = [torch.nn.Linear(3, 2) for _ in range(3)]
        >>> simplex = fs.interpolate(nets, (x, y), resolution=4)
        >>> len(simplex.loss), simplex.barrier < 1e-6  # the loss of a linear model is convex
        (15, True)
    """
    _check_interpolation_arguments(networks, resolution, batchnorm)
    begun = time.perf_counter()
    recompute = batchnorm == "recompute" and any(has_batchnorm(network) for network in networks)
    models = [independent_copy(network).eval() for network in networks]
    problem = Problem(models[0], train=data, loss=loss, device=device, batch_size=batch_size)
    if not recompute and any(has_batchnorm(model) for model in models):
        models = [fold_batchnorm(model.to(problem.device, problem.dtype), problem.example()) for model in models]
        problem = problem.with_model(models[0])
    if batch_size is None and problem.device.type != "cpu":  # calls on few samples take longer than their products
        problem.batch_size = samples_at_once(Context(problem))
    points = [_weights_that_fit(problem, model, number) for number, model in enumerate(models, start=1)]
    weights = _mixture_weights(len(points), resolution)
    measured: list[tuple[float, float]] = []
    bar = progress_bar("Interpolating", total=len(weights))
    with untouched_randomness(problem.generators), torch.no_grad(), bar as advance:
        for several in _mixtures_at_once(weights.tolist(), problem.params):
            measured += _loss_and_accuracy_of_weights(
                problem, [_mixed_weights(points, mixture) for mixture in several], recompute
            )
            advance(len(several))
    values = torch.tensor(measured, dtype=torch.float64)
    with torch.no_grad():
        remarks = _copies_among_networks(problem, points, models)
    meta = {
        "resolution": resolution,
        "batchnorm": "recompute" if recompute else "fold" if any(map(has_batchnorm, networks)) else "none",
        "samples": problem.n_train,
        **({"remarks": remarks} if remarks else {}),
        **problem.provenance(begun),
    }
    return Simplex(weights, values[:, 0].clone(), values[:, 1].clone() if problem.classification else None, meta)


def _copies_among_networks(problem: Problem, points: Sequence[Params], models: Sequence[nn.Module]) -> list[str]:
    """Which of the networks are one function written with other weights, so that a barrier is no fact about minima."""
    inputs, copies = problem.example(COMPARED), []
    outputs = [problem.forward(inputs, point, dict(m.named_buffers())) for point, m in zip(points, models, strict=True)]
    for first, second in itertools.combinations(range(len(points)), 2):
        one, other = outputs[first], outputs[second]
        apart = norm({name: value - points[second][name] for name, value in points[first].items()})
        rewritten = apart > 100 * SAME * norm(points[first])
        if rewritten and bool((one - other).abs().max() <= SAME * one.abs().max()):
            copies.append(
                f"networks {first + 1} and {second + 1} are one function written with other weights (units in another "
                "order or rescaled): what lies between them says nothing about two minima"
            )
    return copies


def _check_interpolation_arguments(networks: Sequence[nn.Module], resolution: int, batchnorm: str) -> None:
    if isinstance(networks, nn.Module) or not isinstance(networks, Iterable) or len(networks) not in (2, 3):
        shown = type(networks).__name__ if not isinstance(networks, list | tuple) else f"{len(networks)}"
        raise InputError("a list of two or three networks", shown, where="interpolate")
    for network in networks:
        if not isinstance(network, nn.Module):
            raise InputError("a torch.nn.Module", type(network).__name__, where="interpolate")
    refuse_unless_whole(resolution, "resolution")
    refuse_unknown(batchnorm, WAYS, "way to treat BatchNorm")


def _weights_that_fit(problem: Problem, model: nn.Module, number: int) -> Params:
    """The weights of one network, if they fit the first one's."""
    params = {name: value.to(problem.device, problem.dtype) for name, value in named_parameters(model).items()}
    for name in {**problem.params, **params}:
        shapes = [tuple(given[name].shape) if name in given else "none" for given in (problem.params, params)]
        if shapes[0] != shapes[1]:
            raise InputError(f"{name} of shape {shapes[0]}", str(shapes[1]), where=f"interpolate, network {number}")
    for name, value in model.named_buffers():
        module, _, entry = name.rpartition(".")
        # Those of BatchNorm are measured anew; what other normalisations keep (InstanceNorm) would be the first one's.
        measured_anew = isinstance(model.get_submodule(module), BatchNorm) and entry.startswith("running_")
        mine = problem.buffers.get(name)
        if entry == "num_batches_tracked" or measured_anew:
            continue
        if mine is None or not torch.equal(mine, value.to(mine)):
            raise InputError(f"the same constant {name}", "other values", where=f"interpolate, network {number}")
    return params


def _mixture_weights(corners: int, resolution: int) -> Tensor:
    """All λ whose entries are multiples of 1/resolution, made of whole numbers: the corners are exact."""
    others = itertools.product(range(resolution + 1), repeat=corners - 1)
    counts = [(resolution - sum(some), *some) for some in others if sum(some) <= resolution]
    return torch.tensor(counts, dtype=torch.float64) / resolution


def _mixed_weights(points: list[Params], mixture: list[float]) -> Params:
    """Σ λ_i w_i; summed in float64, so that a corner is the network itself, bit for bit."""
    return {
        name: sum(share * point[name].double() for share, point in zip(mixture, points, strict=True)).to(value.dtype)  # type: ignore[union-attr]
        for name, value in points[0].items()
    }


def _mixtures_at_once(mixtures: list[list[float]], params: Params) -> Iterator[list[list[float]]]:
    """The mixtures, so many at once as there is room for: the data are read once for all of them."""
    size = sum(value.numel() * value.element_size() for value in params.values())
    count = max(1, min(MOST_TOGETHER, ROOM // max(1, size)))
    for start in range(0, len(mixtures), count):
        yield mixtures[start : start + count]


def _loss_and_accuracy_of_weights(
    problem: Problem, several: Sequence[Params], recompute: bool
) -> list[tuple[float, float]]:
    """Mean loss and accuracy at each of these weights, in one pass over the data; nothing waits for the device."""
    buffers = _batchnorm_statistics(problem, several) if recompute else [dict(problem.buffers)] * len(several)
    losses, right = torch.zeros(2, len(several), dtype=torch.float64, device=problem.device)
    for inputs, targets in problem.batches():
        for place, (params, network_buffers) in enumerate(zip(several, buffers, strict=True)):
            outputs = problem.forward(inputs, params, network_buffers)
            losses[place] += problem.loss(outputs, targets).double().sum()
            if problem.classification:
                right[place] += (sample_margins(outputs, targets) > 0).double().sum()
    shares = right / problem.n_train if problem.classification else torch.full_like(right, math.nan)
    return list(zip((losses / problem.n_train).tolist(), shares.tolist(), strict=True))


class _Reached(BaseException):
    """Ends a forward pass where nothing behind is of use; nobody catches it by accident."""


class _Moments:
    """Mean and variance of what comes into a BatchNorm; ends each forward pass at the last of its uses."""

    def __init__(self, uses: int) -> None:
        self._uses, self._parts = uses, list[tuple[int, Tensor, Tensor]]()

    def __call__(self, _: nn.Module, inputs: tuple[Any, ...]) -> None:
        values = inputs[0].detach().double()  # channels are the second dimension
        dims = [dim for dim in range(values.ndim) if dim != 1]
        variance, mean = torch.var_mean(values, dims, correction=0)
        self._parts.append((values.numel() // values.shape[1], mean, variance))
        if len(self._parts) % self._uses == 0:
            raise _Reached

    def mean_and_variance(self) -> tuple[Tensor, Tensor]:
        """Over everything that was seen; the variance is biased, as BatchNorm normalises."""
        counts, means, variances = zip(*self._parts, strict=True)
        shares = torch.tensor(counts, dtype=torch.float64, device=means[0].device)[:, None] / sum(counts)
        mean = (shares * torch.stack(means)).sum(0)
        return mean, (shares * (torch.stack(variances) + (torch.stack(means) - mean).square())).sum(0)


def _batchnorm_statistics(problem: Problem, several: Sequence[Params]) -> list[Params]:
    """Buffers with the mean and variance of every BatchNorm's input over all samples, at each of these weights.

    BatchNorms are settled one after the other in the order in which they are used: what a later one sees depends on
    the statistics of those before it. One pass over the data each for all weights, as far as that BatchNorm, in
    float64; nothing depends on the batches.
    """
    buffers = [dict(problem.buffers) for _ in several]
    for name, uses in _batchnorm_uses(problem).items():
        module, moments = problem.model.get_submodule(name), [_Moments(uses) for _ in several]
        for inputs, _ in problem.batches():
            for params, network_buffers, seen in zip(several, buffers, moments, strict=True):
                with module.register_forward_pre_hook(seen), contextlib.suppress(_Reached):
                    problem.forward(inputs, params, network_buffers)
        for network_buffers, seen in zip(buffers, moments, strict=True):
            for kind, value in zip(("mean", "var"), seen.mean_and_variance(), strict=True):
                key = f"{name}.running_{kind}".removeprefix(".")
                network_buffers[key] = value.to(network_buffers[key])
    return buffers


def _batchnorm_uses(problem: Problem) -> Counter[str]:
    """Names of the BatchNorms in the order in which a forward pass uses them, and how often it does."""
    used: list[str] = []
    norms = [(name, module) for name, module in problem.model.named_modules() if isinstance(module, BatchNorm)]
    with ExitStack() as hooks:
        for name, module in norms:
            hooks.enter_context(module.register_forward_pre_hook(lambda _, __, name=name: used.append(name)))
        problem.forward(problem.example())
    untracked = [name for name, module in norms if module.running_mean is None]
    if untracked:
        raise InputError("BatchNorm with running statistics", "one without", where=f"module {untracked[0]}")
    return Counter(used)
