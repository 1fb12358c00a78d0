"""`python -m benchmarks.gpu`: the exact sweep on a GPU, and its agreement with float64 on the CPU."""

from __future__ import annotations

import time

import torch

import flatscope as fs
from benchmarks.timing import machine, trained_lenet
from flatscope.training.data import load

TABLE = ["layer_trace", "rho_unit", "kappa_trace", "relative_flatness", "hessian_trace", "layer_max_eigenvalue"]


def main() -> None:
    torch.backends.cuda.matmul.allow_tf32 = True  # a user may have it on; flatscope must not use it
    torch.backends.cudnn.allow_tf32 = True
    print(machine())
    model, x, y = trained_lenet(device="cuda")
    reference = fs.measure(
        fs.Problem(model, train=(x.cpu(), y.cpu()), device="cpu", dtype=torch.float64), TABLE
    ).to_frame()
    for dtype in (torch.float32, torch.float64):
        found = fs.measure(fs.Problem(model, train=(x, y), dtype=dtype), TABLE).to_frame()
        for name, rows in found.groupby("measure", sort=False):
            expected = reference[reference["measure"] == name]["value"].to_numpy()
            error = abs(rows["value"].to_numpy() - expected).max() / abs(expected).max()
            print(f"{name}: GPU {dtype} against CPU float64, largest relative difference {error:.1e}")
    data = load("cifar10", test_size=0, seed=0)
    images, labels = (value.cuda() for value in data.train)
    for n in (5_000, 10_000, 20_000, 50_000, 50_000):
        problem = fs.Problem(model, train=(images[:n], labels[:n]))
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        torch.cuda.synchronize()
        begun = time.perf_counter()
        table = fs.measure(problem, TABLE[:-1])
        torch.cuda.synchronize()
        peak = (torch.cuda.max_memory_allocated() - before) / 2**20
        seconds = time.perf_counter() - begun
        print(f"{n} images: {seconds:.2f} s, {peak:.0f} MiB above the data, trace {table['hessian_trace']:.4f}")
    begun = time.perf_counter()
    fs.measure(problem, "layer_max_eigenvalue")
    print(f"50,000 images: top eigenvalue of every layer {time.perf_counter() - begun:.2f} s")
    print("tf32 flags after measuring:", torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32)


if __name__ == "__main__":
    main()
