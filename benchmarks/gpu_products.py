"""`python -m benchmarks.gpu_products [values] [speed] [traces] [--seconds 300] [--out FILE] [--tiny]`: faster products.

What a product of the Hessian of one batch costs, and how far it is off, as single calls of double backward, as a CUDA
graph of them, and compiled (`torch.func.jvp` of `grad`), each in float32 and in TF32: the figures that decide whether
searches and draws may use them. One line of JSON for each, as soon as it is known; what fails says why, and how many
bytes it left behind. `--tiny` does everything in small, on a CPU too, where there are no graphs.

values: ten networks side by side, errors against float64; the last decides by its values which way samples take.
speed: ResNet-18 (256 images of 32 px) and ResNet-50 (32 of 224 px); with the cost of a capture and of a compilation.
traces: the whole trace of GPT-2 and ViT-S to 2 % by flatscope, and by curvlinops at the error that it reached.

On a GPU, in this order, about 60, 240 and 300 s:
    python -m benchmarks.gpu_products values --seconds 150 --out values.jsonl
    python -m benchmarks.gpu_products speed --seconds 300 --out speed.jsonl
    python -m benchmarks.gpu_products traces --seconds 400 --out traces.jsonl
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import flatscope as fs
from benchmarks.decision_models import data
from benchmarks.differences import KINKED, SMOOTH
from benchmarks.gpu_models import Case, gpt2_case, resnet18_case, resnet50_case, vit_case
from benchmarks.gpu_peers import curvlinops_trace
from benchmarks.timing import machine

NETWORKS = ("mlp-relu-3", "mlp-gelu", "skips-tanh", "cnn-gelu", "cnn-relu-max", "cnn-norm", "resnet", "vit")
REPEATS = 12
WAYS = ("calls", "graph", "compiled")
Record = dict[str, Any]
Product = Callable[[list[Tensor]], list[Tensor]]


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


def loss_of(case: Case) -> Callable[[nn.Module, dict[str, Tensor], Tensor, Tensor], Tensor]:
    """Mean loss of a batch as a function of the network, its parameters and the data."""

    def mean_loss(model: nn.Module, params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        outputs = torch.func.functional_call(model, params, (x,))
        if case.loss == "next_token":
            outputs, y = outputs.flatten(0, 1), y.flatten()
        return nn.functional.cross_entropy(outputs, y)

    return mean_loss


def by_calls(case: Case) -> Product:
    """Double backward, from the forward pass on."""
    names, loss = list(dict(case.model.named_parameters())), loss_of(case)
    leaves = [value.detach().clone().requires_grad_() for value in dict(case.model.named_parameters()).values()]

    def product(vectors: list[Tensor]) -> list[Tensor]:
        value = loss(case.model, dict(zip(names, leaves, strict=True)), case.x, case.y)
        gradient = torch.autograd.grad(value, leaves, create_graph=True, materialize_grads=True)
        return list(torch.autograd.grad(gradient, leaves, vectors, materialize_grads=True))

    return product


def by_graph(case: Case) -> Product:
    """The same calls, captured once and replayed."""
    plain = by_calls(case)
    held = [torch.zeros_like(value) for value in case.model.parameters()]
    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        for _ in range(3):
            plain(held)
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = plain(held)

    def product(vectors: list[Tensor]) -> list[Tensor]:
        for place, vector in zip(held, vectors, strict=True):
            place.copy_(vector)
        graph.replay()
        return [part.clone() for part in result]

    return product


def by_compiler(case: Case) -> Product:
    """The forward derivative of the gradient, compiled; without a GPU without its code generator."""
    params = {name: value.detach() for name, value in case.model.named_parameters()}
    loss = loss_of(case)

    def product(vectors: dict[str, Tensor]) -> dict[str, Tensor]:
        gradient = torch.func.grad(lambda there: loss(case.model, there, case.x, case.y))
        found: dict[str, Tensor] = torch.func.jvp(gradient, (params,), (vectors,))[1]
        return found

    backend = "inductor" if case.x.is_cuda else "aot_eager"
    compiled = torch.compile(product, backend=backend, fullgraph=True)
    return lambda vectors: list(compiled(dict(zip(params, vectors, strict=True))).values())


MAKERS: dict[str, Callable[[Case], Product]] = {"calls": by_calls, "graph": by_graph, "compiled": by_compiler}


def vectors_for(case: Case) -> list[Tensor]:
    """One random direction, of length one."""
    generator = torch.Generator().manual_seed(0)
    drawn = [torch.randn(value.shape, generator=generator) for value in case.model.parameters()]
    length = sum(float(part.square().sum()) for part in drawn) ** 0.5
    return [(part / length).to(case.x.device) for part in drawn]


def true_product(case: Case, vectors: list[Tensor]) -> list[Tensor]:
    """The product in float64 at the same weights."""
    x = case.x.double() if case.x.is_floating_point() else case.x
    model = case.model.double()
    try:
        return by_calls(Case(model, x, case.y, case.loss))([part.double() for part in vectors])
    finally:
        case.model.float()


def switch_tf32(on: bool) -> None:
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = on


def compared(name: str, case: Case, repeats: int, ways: tuple[str, ...] = WAYS) -> Iterator[Record]:
    """A record of each way in float32 and in TF32: milliseconds, error, seconds until it could be used."""
    vectors = vectors_for(case)
    switch_tf32(False)
    truth = true_product(case, vectors)
    length = sum(float(part.square().sum()) for part in truth) ** 0.5
    for tf32 in (False, True) if case.x.is_cuda else (False,):
        switch_tf32(tf32)
        for way in ways:
            record: Record = {"network": name, "way": way, "digits": "TF32" if tf32 else "float32"}
            before = held_bytes(case)
            try:
                yield record | timed(MAKERS[way], case, vectors, truth, length, repeats)
            except Exception as problem:
                record["failed"] = f"{type(problem).__name__}: {problem}".split("\n")[0][:200]
                problem.__traceback__ = None
                del problem
                yield record | {"left_behind_bytes": held_bytes(case) - before}
            torch._dynamo.reset()
    switch_tf32(False)


def timed(
    make: Callable[[Case], Product],
    case: Case,
    vectors: list[Tensor],
    truth: list[Tensor],
    length: float,
    repeats: int,
) -> Record:
    begun = time.perf_counter()
    product = make(case)
    found = product(vectors)
    wait(case)
    ready, times = time.perf_counter() - begun, []
    for _ in range(repeats):
        begun = time.perf_counter()
        product(vectors)
        wait(case)
        times.append(time.perf_counter() - begun)
    gaps = (float((a.double() - b).square().sum()) for a, b in zip(found, truth, strict=True))
    twice = product([2 * part for part in vectors])  # a replay must not give what it was captured with
    linear = max(float((a - 2 * b).abs().max()) for a, b in zip(twice, found, strict=True))
    largest = max(float(part.abs().max()) for part in found)
    return {
        "ms": 1e3 * statistics.median(times),
        "ready_s": ready,
        "error": sum(gaps) ** 0.5 / length,
        "of_twice_the_vector": linear / max(largest, 1e-300),
    }


def wait(case: Case) -> None:
    if case.x.is_cuda:
        torch.cuda.synchronize()


def held_bytes(case: Case) -> int:
    """Bytes on the GPU that something holds."""
    gc.collect()
    return torch.cuda.memory_allocated() if case.x.is_cuda else 0


def values(device: str, tiny: bool) -> Iterator[Record]:
    for name, case in ten_networks(device):
        yield from compared(name, case, 2 if tiny else REPEATS)


def speed(device: str, tiny: bool) -> Iterator[Record]:
    for name, case in (
        ("resnet18", resnet18_case(256, device, tiny)),
        ("resnet50", resnet50_case(32, device, tiny)),
    ):
        yield {"network": name, "samples": len(case.x), "parameters": case.parameters}
        yield from compared(name, case, 2 if tiny else REPEATS)


def traces(device: str, tiny: bool) -> Iterator[Record]:
    for name, case, batch in (
        ("gpt2", gpt2_case(64, 256, device, tiny), 8),
        ("vit", vit_case(256, device, tiny, trained=not tiny), 64),
    ):
        problem = fs.Problem(case.model, train=(case.x, case.y), loss=case.loss)
        begun = time.perf_counter()
        table = fs.measure(problem, "hessian_trace", precision=0.02, memory="45GiB")
        wait(case)
        seconds, value = time.perf_counter() - begun, table["hessian_trace"]
        error = max(abs(table.stderr("hessian_trace") / value), 0.01)
        yield {"network": name, "tool": "flatscope", "seconds": seconds, "trace": value, "error": error}
        yield {"network": name, "tool": "curvlinops"} | curvlinops_trace(case, "hessian", error, error, batch, 60)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    sections = {"values": values, "speed": speed, "traces": traces}
    parser.add_argument("section", nargs="*", help=f"some of {', '.join(sections)}; all of them by default")
    parser.add_argument("--seconds", type=float, default=600, help="nothing is begun after so many")
    parser.add_argument("--out", type=Path, help="a file that the lines are added to")
    parser.add_argument("--tiny", action="store_true", help="everything in small, on a CPU too")
    given = parser.parse_args()
    device, end = "cuda" if torch.cuda.is_available() else "cpu", time.monotonic() + given.seconds
    if device == "cpu" and not given.tiny:
        parser.error("there is no GPU: --tiny runs everything in small on a CPU")
    warnings.simplefilter("ignore")

    def write(record: Record) -> None:
        line = json.dumps(record)
        print(line, flush=True)
        if given.out:
            with given.out.open("a") as file:
                file.write(line + "\n")

    write({"machine": machine(), "tiny": given.tiny})
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        for name in given.section or sections:
            try:
                for record in sections[name](device, given.tiny):
                    write({"section": name} | record)
                    if time.monotonic() > end:
                        write({"section": name, "stopped": "the time was up"})
                        return
            except Exception as problem:
                traceback.print_exc()
                write({"section": name, "failed": f"{type(problem).__name__}: {problem}"[:300]})


if __name__ == "__main__":
    main()
