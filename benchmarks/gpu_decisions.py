"""4-bit sensitivity of every layer of a large network, beside the same numbers layer by layer from products.

What the products give is the predicted rise gᵀΔ + ½ΔᵀHΔ (one product a layer) and HAWQ-V2's trace (as many as bring
the median layer to the error that flatscope reached). Measured rises, which flatscope's time includes, they do not
give. Six layers are timed, from the first to the last; the others' times lie on lines between them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.func import functional_call

import flatscope as fs
from benchmarks.gpu_models import Case

TIMED_LAYERS = 6
SPREAD_PRODUCTS = 8  # of one layer, for the number that its trace would take
Stage = dict[str, Any]
Timed = Callable[[Callable[[], Any]], tuple[Any, Stage]]


def sensitivity_stages(case: Case, timed: Timed, batch: int, seconds: float) -> Iterator[Stage]:
    """Measured and predicted, with and without the trapezoid; then products of some layers.

    Args:
        case: network and data.
        timed: gives a result, its seconds and its memory.
        batch: samples of a batch for the products.
        seconds: that the products of the peers may take.
    """
    few = fs.Problem(case.model, train=(case.x[:8], case.y[:8]), loss=case.loss)
    _, first = timed(lambda: fs.sensitivity(few, bits=(4,), sparsity=(), precision=0.3))
    yield {"stage": "eight samples, once: kernels are chosen", **first}
    problem = fs.Problem(case.model, train=(case.x, case.y), loss=case.loss)
    ours: dict[bool, float] = {}
    for trapezoid in (False, True):
        found, stage = timed(lambda t=trapezoid: fs.sensitivity(problem, bits=(4,), sparsity=(), trapezoid=t))
        ours[trapezoid] = stage["seconds"]
        yield {"stage": "flatscope", "trapezoid": trapezoid, "target": "≤ 60 s", **stage, **_facts(found)}
    yield {"stage": "layer by layer", **_layer_by_layer(case, found, batch, seconds, ours[False])}


def _facts(found: fs.Sensitivity) -> Stage:
    frame = found.to_frame()
    known = frame[frame["measured"] > 2 * frame["measured_stderr"]]
    return {
        "layers": len(frame),
        "parameters": int(frame["parameters"].sum()),
        "missing": int(frame[["predicted", "by_trace", "measured"]].isna().sum().sum()),
        "ways": sorted(frame["way"].unique()),
        "passes": found.meta["passes"],
        "tau_predicted": float(frame["predicted"].corr(frame["measured"], "kendall")),
        "tau_by_trace": float(frame["by_trace"].corr(frame["measured"], "kendall")),
        "resolved_layers": len(known),
        "measured": {row["layer"]: [row["measured"], row["measured_stderr"]] for row in frame.to_dict("records")},
        "predicted": dict(zip(frame["layer"], frame["predicted"], strict=True)),
    }


def _layer_by_layer(case: Case, found: fs.Sensitivity, batch: int, seconds: float, ours: float) -> Stage:
    """Seconds of plain double backward for every layer, from those of some."""
    frame, params = found.to_frame(), dict(case.model.named_parameters())
    weights = [name for name in frame["weight"] if name in params]
    places = sorted({round(place) for place in np.linspace(0, len(weights) - 1, TIMED_LAYERS)})
    begun, times, differences = time.perf_counter(), {}, {}
    for place in places:
        if times and time.perf_counter() - begun > seconds:
            break
        name = weights[place]
        step = _rounding(params[name].detach())
        start = time.perf_counter()
        rise = _rise_by_product(case, name, step, batch)
        times[place] = time.perf_counter() - start
        own = float(frame.loc[frame["weight"] == name, "predicted"].iloc[0])
        differences[name] = [own, rise]
    each = np.interp(range(len(weights)), list(times), list(times.values()))
    middle = weights[places[len(places) // 2]]
    draws = [_trace_by_product(case, middle, seed, batch) for seed in range(SPREAD_PRODUCTS)]
    spread = statistics.stdev(draws) / abs(statistics.fmean(draws))
    products = max(1, round((spread / 0.05) ** 2))
    return {
        "timed_seconds": {weights[place]: value for place, value in times.items()},
        "seconds_predicted_all_layers": float(each.sum()),
        "ratio_predicted": float(each.sum()) / ours,
        "trace_products_of_a_layer_to_5_percent": products,
        "spread_of_one_product": spread,
        "seconds_traces_all_layers": float(each.sum()) * products,
        "ratio_predicted_and_traces": float(each.sum()) * (1 + products) / ours,
        "predicted_ours_and_by_product": differences,
        "extrapolated": "seconds of the layers that were not timed: linear between those that were",
    }


def _rounding(weight: Tensor) -> Tensor:
    """Δ of four bits, one scale an output row."""
    rows = weight.reshape(len(weight), -1)
    scale = rows.abs().amax(1, keepdim=True) / 7
    return ((rows / scale).round().clamp(-7, 7) * scale - rows).reshape(weight.shape)


def _products(case: Case, name: str, vector: Tensor, batch: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Slope and curvature of the summed loss along a vector of one weight, batch by batch."""
    value = dict(case.model.named_parameters())[name].detach().requires_grad_()
    for x, y in zip(case.x.split(batch), case.y.split(batch), strict=True):
        loss = torch.nn.functional.cross_entropy(functional_call(case.model, {name: value}, (x,)), y, reduction="sum")
        (gradient,) = torch.autograd.grad(loss, value, create_graph=True)
        (product,) = torch.autograd.grad(gradient, value, vector)
        yield (gradient.detach() * vector).double().sum(), (product * vector).double().sum()


def _rise_by_product(case: Case, name: str, step: Tensor, batch: int) -> float:
    return float(sum(slope + 0.5 * curved for slope, curved in _products(case, name, step, batch))) / len(case.x)


def _trace_by_product(case: Case, name: str, seed: int, batch: int) -> float:
    """One Hutchinson draw of a layer's trace, on few samples, whose spread stands for that of all."""
    weight = dict(case.model.named_parameters())[name]
    signs = torch.randint(0, 2, weight.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
    few = case._replace(x=case.x[: 2 * batch], y=case.y[: 2 * batch])
    return float(sum(curved for _, curved in _products(few, name, signs.to(weight), batch))) / len(few.x)
