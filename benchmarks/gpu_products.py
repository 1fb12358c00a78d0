"""`python -m benchmarks.gpu_products [graphs] [searches] [speed] [traces] [values] …`: faster products on a GPU.

What a product of the Hessian of one batch costs, and how far it is off, as single calls of double backward and as a
CUDA graph, each in float32 and in TF32: the figures that decide whether searches and draws may use them. One line of
JSON for each, as soon as it is known; what fails says why, and how many bytes it left behind. `--tiny` does everything
in small, on a CPU too, where there are no graphs.

graphs: flatscope's own products of ten networks, by calls and replayed, errors against float64; the networks that
    cannot be captured, and what they leave behind.
searches: what TF32 does to the eigenvalues, a density and the trace of ResNet-18 that has learned its images.
speed: ResNet-18 (256 images of 32 px) and ResNet-50 (32 of 224 px), flatscope's products beside plain calls.
traces: the whole trace of GPT-2 and ViT-S to 2 % by flatscope, and by curvlinops at the error that it reached.
values: plain calls, graphs of them and compiled ones of ten networks; `--compiled` adds these to `speed` too.

On a GPU about 40, 60, 60, 200 and 100 s:
    python -m benchmarks.gpu_products graphs searches speed --seconds 220 --out products.jsonl
"""

from __future__ import annotations

import argparse
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
from benchmarks.gpu_models import Case, gpt2_case, resnet18_case, resnet50_case, vit_case
from benchmarks.gpu_peers import curvlinops_trace
from benchmarks.gpu_replays import REPEATS, graphs, held_bytes, products_both_ways, searches, ten_networks, wait
from benchmarks.timing import machine
from flatscope.curvature.operators import Hessian

WAYS = ("calls", "graph", "compiled")
COMPILED = False
Record = dict[str, Any]
Product = Callable[[list[Tensor]], list[Tensor]]


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

    product.weights = plain  # type: ignore[attr-defined]  what the graph reads must stay where it is
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


def values(device: str, tiny: bool) -> Iterator[Record]:
    for name, case in ten_networks(device):
        yield from compared(name, case, 2 if tiny else REPEATS)


def speed(device: str, tiny: bool) -> Iterator[Record]:
    for name, case in (
        ("resnet18", resnet18_case(256, device, tiny)),
        ("resnet50", resnet50_case(32, device, tiny)),
    ):
        yield {"network": name, "samples": len(case.x), "parameters": case.parameters}
        yield from compared(name, case, 2 if tiny else REPEATS, WAYS if COMPILED else WAYS[:2])
        yield {"network": name, "way": "flatscope"} | products_both_ways(case, Hessian, 2 if tiny else REPEATS)


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
    sections = {"graphs": graphs, "searches": searches, "speed": speed, "traces": traces, "values": values}
    parser.add_argument("section", nargs="*", help=f"some of {', '.join(sections)}; all of them by default")
    parser.add_argument("--seconds", type=float, default=600, help="nothing is begun after so many")
    parser.add_argument("--out", type=Path, help="a file that the lines are added to")
    parser.add_argument("--compiled", action="store_true", help="compiled products in `speed` too")
    parser.add_argument("--tiny", action="store_true", help="everything in small, on a CPU too")
    given = parser.parse_args()
    global COMPILED
    COMPILED = given.compiled
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
