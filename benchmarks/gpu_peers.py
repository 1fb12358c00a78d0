"""The same numbers by curvlinops and PyHessian: their time to the error that flatscope reached."""

from __future__ import annotations

import time
import warnings
from typing import Any

import torch
from torch import nn

from benchmarks.gpu_models import Case, FlatTokens

PRODUCTS = 12  # from which the spread of a random trace is known well enough to say how many would be needed
LEAST_PRODUCTS = 4


def curvlinops_operator(case: Case, curvature: str, batch: int) -> Any:
    from curvlinops import GGNLinearOperator, HessianLinearOperator

    tokens = case.loss == "next_token"
    model = FlatTokens(case.model) if tokens else case.model
    batches = [
        (case.x[i : i + batch], case.y[i : i + batch].flatten() if tokens else case.y[i : i + batch])
        for i in range(0, len(case.x), batch)
    ]
    kind = HessianLinearOperator if curvature == "hessian" else GGNLinearOperator
    return kind(
        model,
        nn.CrossEntropyLoss(),
        list(model.parameters()),
        batches,
        check_deterministic=False,
        num_data=len(case.x),
        batch_size_fn=lambda x: len(x),
    )


def curvlinops_trace(
    case: Case, curvature: str, error: float, layer_error: float, batch: int, seconds: float
) -> dict[str, Any]:
    """Time of Hutchinson's estimate of the whole trace to a relative standard error, and of the median layer to one.

    All layers share the random vectors, which the library itself does not offer: its time is the least possible. A
    layer whose trace is near zero would need any number of products, hence the median.
    """
    operator = curvlinops_operator(case, curvature, batch)
    params = [value for value in case.model.parameters() if value.requires_grad]
    sizes = [value.numel() for value in params]
    matrices = [i for i, value in enumerate(params) if value.ndim > 1]
    generator = torch.Generator().manual_seed(0)
    totals, layers, times = [], [], []
    begun = time.perf_counter()
    while len(times) < PRODUCTS and (time.perf_counter() - begun < seconds or len(times) < LEAST_PRODUCTS):
        signs = (torch.randint(0, 2, (sum(sizes),), generator=generator).float() * 2 - 1).to(case.x.device)
        start = time.perf_counter()
        product = operator @ signs
        if case.x.is_cuda:
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        parts = (signs * product).double().split(sizes)
        totals.append(float(sum(part.sum() for part in parts)))
        layers.append([float(parts[i].sum()) for i in matrices])
    per_product = min(times)
    whole, each = _needed(torch.tensor(totals)[:, None], error), _needed(torch.tensor(layers), layer_error)
    return {
        "seconds": whole * per_product,
        "seconds_layers": each * per_product,
        "products_needed": whole,
        "products_needed_layers": each,
        "seconds_per_product": per_product,
        "products_timed": len(times),
        "trace": sum(totals) / len(totals),
        "extrapolated": True,
    }


def _needed(samples: torch.Tensor, error: float) -> int:
    """Products until the median column's mean has this relative standard error, from the spread of some."""
    relative = samples.double().std(0) / samples.double().mean(0).abs()
    return max(1, round(float((relative.median() / error) ** 2)))


def pyhessian_trace(case: Case, error: float, batch: int) -> dict[str, Any]:
    """PyHessian's Hutchinson products for the whole trace; it keeps the graph of one batch, so few samples fit."""
    from pyhessian import hessian
    from pyhessian.utils import group_product, hessian_vector_product

    few = min(len(case.x), batch)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = hessian(case.model, nn.CrossEntropyLoss(), data=(case.x[:few], case.y[:few]), cuda=case.x.is_cuda)
        samples, times = [], []
        for _ in range(8):
            signs = [torch.randint(0, 2, p.shape, device=p.device).float() * 2 - 1 for p in peer.params]
            start = time.perf_counter()
            samples.append(float(group_product(hessian_vector_product(peer.gradsH, peer.params, signs), signs)))
            times.append(time.perf_counter() - start)
    _forget_gradients(case.model)
    per_product = min(times) * len(case.x) / few
    needed = _needed(torch.tensor(samples)[:, None], error)
    return {
        "seconds": needed * per_product,
        "products_needed": needed,
        "seconds_per_product": per_product,
        "samples_timed": few,
        "extrapolated": True,
    }


def curvlinops_top(case: Case, tolerance: float, batch: int) -> dict[str, Any]:
    """The largest eigenvalue by ARPACK over curvlinops' products."""
    from scipy.sparse.linalg import eigsh

    linear = curvlinops_operator(case, "hessian", batch).to_scipy()
    value = eigsh(linear, k=1, which="LA", tol=tolerance, return_eigenvectors=False)
    return {"value": float(value[0])}


def pyhessian_top(case: Case, tolerance: float) -> dict[str, Any]:
    """The eigenvalue that is largest in size, by PyHessian's power iteration on one batch of everything."""
    from pyhessian import hessian

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peer = hessian(case.model, nn.CrossEntropyLoss(), data=(case.x, case.y), cuda=case.x.is_cuda)
        values, _ = peer.eigenvalues(maxIter=200, tol=tolerance, top_n=1)
    _forget_gradients(case.model)
    return {"value": float(values[0])}


def _forget_gradients(model: nn.Module) -> None:
    """PyHessian leaves a graph of the whole batch on the parameters."""
    for value in model.parameters():
        value.grad = None
