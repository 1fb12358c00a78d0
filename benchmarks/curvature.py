"""Traces, unit curvatures and eigenvalues of a trained LeNet-5 on real images, against the peers' own code."""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Iterator

import torch
from torch import nn

import flatscope as fs
from benchmarks.timing import PeakMemory, Row, in_turn, trained_lenet
from flatscope.inputs import load
from flatscope.training import build

TRACES = ["layer_trace"]
TABLE = ["layer_trace", "rho_unit", "kappa_trace", "relative_flatness", "hessian_trace"]


def rows() -> Iterator[Row]:
    yield growth()  # first: memory that the peers leave behind would hide ours
    yield width_growth()
    model, x, y = trained_lenet()
    problem = fs.Problem(model, train=(x, y))
    yield from traces(problem, model, x, y)
    yield default_table(problem)
    yield hutchinson(problem, model, x, y)
    yield eigenvalues(problem, model, x, y)


def backpack_traces(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, batch: int = 200) -> dict[str, float]:
    """Trace of each weight by BackPACK's exact Gauss-Newton diagonal."""
    from backpack import backpack, extend
    from backpack.extensions import DiagGGNExact

    network, loss = extend(build("lenet5")), extend(nn.CrossEntropyLoss())
    network.load_state_dict(model.state_dict())
    network.eval()
    totals: dict[str, float] = {}
    for start in range(0, len(x), batch):
        part = slice(start, start + batch)
        value = loss(network(x[part]), y[part])
        with backpack(DiagGGNExact()):
            value.backward()
        for name, parameter in network.named_parameters():
            share = parameter.diag_ggn_exact.sum().item() * (len(y[part]) / len(y))
            totals[name] = totals.get(name, 0.0) + share
            parameter.grad = None
    return totals


def traces(problem: fs.Problem, model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Iterator[Row]:
    found = fs.measure(problem, TRACES, precision=0).layer("layer_trace")
    expected = backpack_traces(model, x, y)
    for layer, value in found.items():
        assert abs(value / expected[f"{layer}.weight"] - 1) < 1e-3, (layer, value, expected[f"{layer}.weight"])
    ours, table, peer = in_turn(
        lambda: fs.measure(problem, TRACES, precision=0),
        lambda: fs.measure(problem, TABLE, precision=0),
        lambda: backpack_traces(model, x, y),
    )
    what = "exact trace of every layer, LeNet-5, 2,000 CIFAR-10 images"
    passes = problem.n_outputs - 1
    limit = backward_passes(model, x, y, passes)
    note = f"{passes} backward passes alone take {limit:.2f} s: {ours / limit:.1f} times the physical limit"
    yield Row(what, ours, peer, "BackPACK DiagGGNExact", "≥ 3×", peer / ours >= 3, note)
    what = "the same plus ρ of every unit, κ_τ, relative flatness, whole trace"
    yield Row(what, table, peer, "BackPACK, traces only", "not slower", peer / table >= 1.0)


def backward_passes(model: nn.Sequential, x: torch.Tensor, y: torch.Tensor, count: int, batch: int = 200) -> float:
    """Seconds of one forward pass and so many plain backward passes over the data."""
    network = build_like(model)
    params = list(network.parameters())

    def run() -> None:
        for start in range(0, len(x), batch):
            loss = nn.functional.cross_entropy(network(x[start : start + batch]), y[start : start + batch])
            for _ in range(count):
                torch.autograd.grad(loss, params, retain_graph=True)

    return in_turn(run)[0]


def default_table(problem: fs.Problem) -> Row:
    """All that `fs.measure(problem)` gives, in CPU seconds of this process; version 0.1 took 359."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        begun = time.process_time()
        table = fs.measure(problem)
        seconds = time.process_time() - begun
    each = table.to_frame().groupby("measure")["seconds"].max().sort_values(ascending=False)
    slowest = ", ".join(f"{name} {value:.1f}" for name, value in each.head(5).items())
    note = f"CPU seconds; {len(each)} measures; slowest by the clock: {slowest}"
    what = "default table, LeNet-5, 2,000 CIFAR-10 images"
    return Row(what, seconds, 359.0, "version 0.1", "≤ 40 CPU s", seconds <= 40, note)


def hutchinson(problem: fs.Problem, model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Row:
    """PyHessian's trace to 1 %: products needed from the spread of its samples, times its time per product."""
    from pyhessian import hessian
    from pyhessian.utils import group_product, hessian_vector_product

    peer = hessian(build_like(model), nn.CrossEntropyLoss(), data=(x, y), cuda=False)
    samples, begun = [], time.perf_counter()
    for _ in range(40):
        v = [torch.randint(0, 2, p.shape).float() * 2 - 1 for p in peer.params]
        samples.append(group_product(hessian_vector_product(peer.gradsH, peer.params, v), v).item())
    per_product = (time.perf_counter() - begun) / len(samples)
    spread = statistics.stdev(samples) / statistics.mean(samples)
    needed = max(1, round((spread / 0.01) ** 2))
    [ours] = in_turn(lambda: fs.measure(problem, "hessian_trace"))
    note = f"exact against {needed} products of {per_product:.2f} s"
    peer_time = needed * per_product
    return Row(
        "trace to 1 % relative error", ours, peer_time, "PyHessian Hutchinson", "≥ 100×", peer_time / ours >= 100, note
    )


def build_like(model: nn.Sequential) -> nn.Sequential:
    """A copy for peers that change the model they are given."""
    copy = build("lenet5")
    copy.load_state_dict(model.state_dict())
    return copy.eval()  # type: ignore[return-value]


def eigenvalues(problem: fs.Problem, model: nn.Sequential, x: torch.Tensor, y: torch.Tensor) -> Row:
    """Top eigenvalue of each layer's Hessian to 1e-3, against curvlinops products in SciPy's ARPACK."""
    from curvlinops import HessianLinearOperator
    from scipy.sparse.linalg import eigsh

    network = build_like(model)
    batches = [(x[i : i + 500], y[i : i + 500]) for i in range(0, len(x), 500)]

    def peer() -> dict[str, float]:
        found = {}
        for name, parameter in network.named_parameters():
            if parameter.ndim > 1:
                operator = HessianLinearOperator(
                    network, nn.CrossEntropyLoss(), [parameter], batches, check_deterministic=False
                )
                found[name] = float(eigsh(operator.to_scipy(), k=1, which="LA", tol=1e-3, return_eigenvectors=False)[0])
        return found

    def ours() -> dict[str, float]:
        return fs.measure(problem, "layer_max_eigenvalue", options={"layer_max_eigenvalue": {"tolerance": 1e-3}}).layer(
            "layer_max_eigenvalue"
        )

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected, found = peer(), ours()
        for layer, value in found.items():
            assert abs(value / expected[f"{layer}.weight"] - 1) < 5e-3, (layer, value, expected)
        own_time, peer_time = in_turn(ours, peer, repeats=1)
    return Row(
        "top eigenvalue of every layer to 1e-3",
        own_time,
        peer_time,
        "curvlinops + ARPACK",
        "≥ 3×",
        peer_time / own_time >= 3,
    )


def growth() -> Row:
    """All exact measures on up to 50,000 images: time per image and memory above the data."""
    data = load("cifar10", test_size=0, seed=0)
    model = build("lenet5").eval()  # the cost does not depend on the weights
    times, sizes = {}, (5_000, 10_000, 20_000, 50_000)
    with PeakMemory() as memory:
        for n in (2_000, *sizes):  # the first is a warm-up
            problem = fs.Problem(model, train=(data.train[0][:n], data.train[1][:n]))
            begun = time.perf_counter()
            fs.measure(problem, TABLE)
            times[n] = time.perf_counter() - begun
    del times[2_000]
    extra = memory.above_start_mib
    per_image = {n: 1e3 * seconds / n for n, seconds in times.items()}
    note = ", ".join(f"{n}: {seconds:.1f} s" for n, seconds in times.items()) + f"; {extra:.0f} MiB above the data"
    linear = per_image[50_000] / per_image[5_000]
    what = "cost growth and memory of the exact sweep, 50,000 CIFAR-10 images"
    met = linear <= 1.2 and extra < 2048
    return Row(
        what, times[50_000], 10 * times[5_000], "ten times 5,000 images", "linear within 20 %, < 2 GiB", met, note
    )


def width_growth() -> Row:
    """All exact measures on a network of 1.0 and one of 2.1 million weights: time per weight."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2_000, 784, generator=generator), torch.arange(2_000) % 10
    narrow, wide = (build("mlp", widths=(784, width, width, 10)).eval() for width in (688, 1_120))
    problems = [fs.Problem(model, train=(x, y)) for model in (narrow, wide)]
    sizes = [sum(p.numel() for p in model.parameters()) for model in (narrow, wide)]
    small, large = in_turn(*(lambda problem=problem: fs.measure(problem, TABLE) for problem in problems))
    linear = (large / sizes[1]) / (small / sizes[0])
    note = f"{sizes[0]:,} weights: {small:.2f} s, {sizes[1]:,} weights: {large:.2f} s; {linear:.2f} times linear"
    what = "cost growth of the exact sweep with the number of weights"
    peer = small * sizes[1] / sizes[0]
    return Row(what, large, peer, "the smaller network, scaled", "linear within 20 %", linear <= 1.2, note)
