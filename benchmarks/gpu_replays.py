"""What `benchmarks.gpu_products` asks of flatscope's own products: by calls and replayed, in float32 and in TF32."""

from __future__ import annotations

import copy
import gc
import statistics
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

import flatscope as fs
from benchmarks.decision_models import data
from benchmarks.differences import KINKED, SMOOTH
from benchmarks.gpu_models import Case, _train, gpt2_case, resnet18_case
from flatscope.context import make_effort
from flatscope.curvature.operators import CurvatureOperator, GaussNewton, Hessian
from flatscope.curvature.spectrum import Wanted, extreme_eigenpairs, in_full
from flatscope.isolation import coarse_products, own_settings

NETWORKS = ("mlp-relu-3", "mlp-gelu", "skips-tanh", "cnn-gelu", "cnn-relu-max", "cnn-norm", "resnet", "vit")
REPEATS = 12
Record = dict[str, Any]


class TwoWays(nn.Module):
    """A network that looks at its values to choose what to compute: no graph of calls is right for all samples."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(64, 24), nn.Linear(64, 24), nn.Linear(24, 10)

    def forward(self, x: Tensor) -> Tensor:
        layer = self.first if float(x.mean()) > 0 else self.second
        out: Tensor = self.last(torch.tanh(layer(x)))
        return out


def ten_networks(device: str) -> Iterator[tuple[str, Case]]:
    """Small networks of ten kinds at random weights, with digits or random tokens."""
    (x, y), _, _ = data("digits")
    torch.manual_seed(0)
    for name in NETWORKS:
        yield name, Case({**SMOOTH, **KINKED}[name]().eval().to(device), x[:256].to(device), y[:256].to(device))
    yield "gpt", gpt2_case(4, 16, device, tiny=True)
    yield "two ways", Case(TwoWays().to(device), x[:256].flatten(1).to(device), y[:256].to(device))


def wait(case: Case) -> None:
    if case.x.is_cuda:
        torch.cuda.synchronize()


def held_bytes(case: Case) -> int:
    """Bytes on the GPU that something holds."""
    gc.collect()
    return torch.cuda.memory_allocated() if case.x.is_cuda else 0


class Looks(torch.autograd.Function):
    """A square whose second derivative looks at its values: it waits for the GPU, and cannot be captured."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.square()

    @staticmethod
    def backward(ctx: Any, direction: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return LooksAgain.apply(x, direction)


class LooksAgain(torch.autograd.Function):
    """2 x g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, direction: Tensor) -> Tensor:
        ctx.save_for_backward(x, direction)
        return 2 * x * direction

    @staticmethod
    def backward(ctx: Any, along: Tensor) -> tuple[Tensor, Tensor]:
        x, direction = ctx.saved_tensors
        factor = 2.0 if float(along.abs().sum()) >= 0 else 1.0
        return factor * along * direction, factor * along * x


class Square(nn.Module):
    """The activation x²."""

    def forward(self, x: Tensor) -> Tensor:
        return Looks.apply(x)


def looking_case(device: str) -> Case:
    (x, y), _, _ = data("digits")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 24), Square(), nn.Linear(24, 10))
    return Case(model.to(device), x[:256].to(device), y[:256].to(device))


def operator_of(case: Case, kind: type[CurvatureOperator], precise: bool = False) -> CurvatureOperator:
    model, x = case.model, case.x
    if precise:
        model, x = copy.deepcopy(model).double(), x.double() if x.is_floating_point() else x
    problem = fs.Problem(model, train=(x, case.y), loss=case.loss)
    return kind(fs.Context(problem, effort=make_effort(memory="100GiB" if case.x.is_cuda else None)))


def graphs(device: str, tiny: bool) -> Iterator[Record]:
    for name, case in (*ten_networks(device), ("looks at its second derivative", looking_case(device))):
        for kind in (Hessian, GaussNewton):
            yield {"network": name, "matrix": kind.__name__} | products_both_ways(case, kind, 3 if tiny else REPEATS)


def products_both_ways(case: Case, kind: type[CurvatureOperator], repeats: int) -> Record:
    """Milliseconds and errors of products by calls and replayed, in float32 and in TF32."""
    found: Record = {}
    with own_settings():
        precise = operator_of(case, kind, precise=True)
        vector = torch.randn(precise.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        vector = (vector / vector.norm()).to(case.x.device)
        truth = precise @ vector
        del precise
        before, randomness = held_bytes(case), random_state(case)
        operator = operator_of(case, kind)
        after = operator.ctx.effort.limits.captured_after
        for coarse in (False, True) if case.x.is_cuda else (False,):
            with coarse_products(coarse):
                calls = [milliseconds(case, operator, vector) for _ in range(after - 1)]
                begun = time.perf_counter()
                by_calls, _ = operator @ vector, wait(case)
                captured = time.perf_counter() - begun  # with the capture, if there is one
                replays = [milliseconds(case, operator, vector) for _ in range(repeats)]
                last, twice = operator @ vector, operator @ (2 * vector)
            found |= {
                f"{'TF32' if coarse else 'float32'}": {
                    "ms_by_calls": statistics.median(calls[1:]),
                    "ms_replayed": statistics.median(replays),
                    "ms_with_capture": 1e3 * captured,
                    "replayed": [getattr(product, "replayed", None) for _, product in operator._kept],
                    "error": float((last - truth).norm() / truth.norm()),
                    "replayed_against_first": float((last - by_calls).norm() / truth.norm()),
                    "of_twice_the_vector": float((twice - 2 * last).abs().max() / last.abs().max()),
                }
            }
        operator.release()
        del operator, by_calls, last, twice, replays
        found["left_behind_bytes"] = held_bytes(case) - before
        found["randomness_untouched"] = bool((random_state(case) == randomness).all())
        torch.rand(3, device=case.x.device)  # an error where a broken capture keeps the generator
    return found


def random_state(case: Case) -> Tensor:
    return torch.cuda.get_rng_state() if case.x.is_cuda else torch.get_rng_state()


def milliseconds(case: Case, operator: CurvatureOperator, vector: Tensor) -> float:
    wait(case)
    begun = time.perf_counter()
    operator @ vector
    wait(case)
    return 1e3 * (time.perf_counter() - begun)


def searches(device: str, tiny: bool) -> Iterator[Record]:
    case = resnet18_case(256, device, tiny)
    _train(case, loss=0.5, epochs=5 if tiny else 60)
    with own_settings():
        yield {"network": "resnet18, trained"} | off_in_tf32(case, Hessian)
        yield {"network": "resnet18, trained"} | off_in_tf32(case, GaussNewton)
        yield {"network": "gpt, 3 M"} | off_in_tf32(gpt2_case(32, 64, device, tiny, small=True), Hessian)
    problem = fs.Problem(case.model, train=(case.x, case.y))
    for top, tolerance in ((1, 1e-2), (1, 1e-3), (10, 1e-3)):
        begun = time.perf_counter()
        pairs = fs.eigenpairs(problem, top=top, tolerance=tolerance)
        record = {"top": top, "tolerance": tolerance, "seconds": time.perf_counter() - begun}
        record |= {"products": pairs.products, "value": float(pairs.values[0]), "residuals": pairs.residuals.tolist()}
        yield record | {"meta": {key: value for key, value in pairs.meta.items() if "tf32" in key}}
    begun = time.perf_counter()
    density = fs.spectral_density(problem, draws=4, steps=32)
    yield {"density": density.range, "seconds": time.perf_counter() - begun, "trace": density.trace}
    begun = time.perf_counter()
    trace = fs.hessian(problem).trace()
    yield {"trace": trace, "seconds": time.perf_counter() - begun}


def off_in_tf32(case: Case, kind: type[CurvatureOperator], draws: int = 16) -> Record:
    """What TF32 moves: a product with the top eigenvector, the middle of the cloud, and zᵀAz of random signs z."""
    operator = operator_of(case, kind)
    generator = torch.Generator().manual_seed(0)
    (pair,) = extreme_eigenpairs(operator, generator, Wanted(1))
    vector = pair.vector.double()
    signs = torch.randint(0, 2, (operator.size, draws), generator=generator).double().to(case.x.device) * 2 - 1
    full, whole = operator @ vector, operator @ signs
    with coarse_products():
        coarse, parts = operator @ vector, operator @ signs
        (searched,) = extreme_eigenpairs(operator, torch.Generator().manual_seed(0), Wanted(1))
    found = in_full(searched, operator @ searched.vector)
    traces = torch.stack([(signs * whole).sum(0), (signs * (parts - whole)).sum(0)])
    mean, spread = traces.mean(1), traces.std(1)
    return {
        "matrix": kind.__name__,
        "top": pair.value,
        "products": [pair.products, searched.products],
        "coarse_top": found.value,
        "residual_of_coarse_vector": found.residual / abs(pair.value),
        "off_along_top": float((coarse - full).norm()) / abs(pair.value),
        "off_along_signs": float((parts - whole).norm() / whole.norm()),
        "off_along_signs_of_top": float((parts - whole).norm(dim=0).mean()) / operator.size**0.5 / abs(pair.value),
        "trace": float(mean[0]),
        "trace_stderr": float(spread[0]) / draws**0.5 / abs(float(mean[0])),
        "trace_bias": float(mean[1] / mean[0]),
        "trace_bias_stderr": float(spread[1]) / draws**0.5 / abs(float(mean[0])),
    }
