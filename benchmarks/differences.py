"""Hessian products by finite differences against exact ones: error and spread by step, on twenty networks.

    python -m benchmarks.differences

Ten smooth networks and ten with kinks (ReLU and its like, maxima), trained for three epochs on 1,000 of scikit-learn's
digits; products of 200 of them with one random vector, in float32 and with weights rounded to bfloat16, against exact
products in float64 at the same weights. About a minute on one core.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import nn

import flatscope as fs
from benchmarks.decision_models import VisionTransformer, cnn, data, fitted, mlp, resnet, skips
from flatscope.curvature.finite_differences import STEPS, FiniteDifferences

LENGTHS = (3e-2, 1e-2, 3e-3, 1e-3, 3e-4, 1e-4, 1e-5)
ASKED = 0.05


def smooth_cnn(activation: type[nn.Module]) -> nn.Module:
    """Convolutions with means in place of maxima."""
    parts: list[nn.Module] = [nn.Conv2d(1, 8, 3, padding=1), activation(), nn.AvgPool2d(2)]
    parts += [nn.Conv2d(8, 12, 3, padding=1), activation(), nn.AvgPool2d(2)]
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(48, 10))


SMOOTH: dict[str, Callable[[], nn.Module]] = {
    "mlp-tanh": lambda: mlp(64, 32, 10, activation=nn.Tanh),
    "mlp-gelu": lambda: mlp(64, 32, 32, 10, activation=nn.GELU),
    "mlp-silu": lambda: mlp(64, 32, 32, 10, activation=nn.SiLU),
    "mlp-softplus": lambda: mlp(64, 32, 10, activation=nn.Softplus),
    "mlp-sigmoid": lambda: mlp(64, 32, 10, activation=nn.Sigmoid),
    "skips-gelu": lambda: skips(64, 24, 5, nn.GELU),
    "skips-tanh": lambda: skips(64, 24, 5, nn.Tanh),
    "cnn-gelu": lambda: smooth_cnn(nn.GELU),
    "cnn-tanh": lambda: smooth_cnn(nn.Tanh),
    "vit": lambda: VisionTransformer(1, 8, 2, 24, 2),
}
KINKED: dict[str, Callable[[], nn.Module]] = {
    "mlp-relu-2": lambda: mlp(64, 32, 10),
    "mlp-relu-3": lambda: mlp(64, 32, 32, 10),
    "mlp-relu-5": lambda: mlp(64, 32, 32, 32, 32, 10),
    "mlp-leaky": lambda: mlp(64, 32, 32, 10, activation=nn.LeakyReLU),
    "mlp-hardtanh": lambda: mlp(64, 32, 10, activation=nn.Hardtanh),
    "skips-relu": lambda: skips(64, 24, 5),
    "cnn-relu-mean": lambda: smooth_cnn(nn.ReLU),
    "cnn-relu-max": lambda: cnn(1, (8, 12), (0, 1), 48),
    "cnn-norm": lambda: cnn(1, (8, 12), (0, 1), 48, norm=True),
    "resnet": lambda: resnet(1, (8, 12)),
}


def rows(name: str, build: Callable[[], nn.Module]) -> dict[tuple[str, float], tuple[float, float]]:
    """Error and spread, by precision and step."""
    torch.manual_seed(0)
    (x, y), _, _ = data("digits")
    trained = fitted(build(), x, y, 3, 3e-3)
    found = {}
    for digits in ("float32", "bfloat16"):
        model = trained if digits == "float32" else trained.bfloat16()
        exact = fs.hessian(fs.Problem(model, train=(x[:200], y[:200]), dtype=torch.float64))
        problem = fs.Problem(model, train=(x[:200].to(next(model.parameters()).dtype), y[:200]))
        v = torch.randn(exact.size, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        expected = exact @ v
        for step in LENGTHS:
            first, second = FiniteDifferences(fs.Context(problem), step=step).by_both_steps(v)
            error, spread = (first - expected).norm() / expected.norm(), (first - second).norm() / first.norm()
            found[digits, step] = float(error), float(spread)
    print(f"{name:14s}", *(f"{step:.0e}: {found['float32', step][0]:.1e}" for step in LENGTHS), flush=True)
    return found


def main() -> None:
    """The table of the page, as Markdown."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for kind, networks in (("smooth", SMOOTH), ("kinks", KINKED)):
        tables = [rows(name, build) for name, build in networks.items()]
        for digits in ("float32", "bfloat16"):
            for step in LENGTHS:
                errors, spreads = (np.array([table[digits, step][place] for table in tables]) for place in (0, 1))
                middle, worst = (f"{value:.1e}" for value in (np.median(errors), errors.max()))
                chosen = " (chosen)" if step == STEPS[torch.float32] else ""
                served = errors[spreads <= ASKED]
                off = f"{served.max():.1e}" if len(served) else "none"
                cells = f"{middle} | {worst} | {np.median(spreads):.1e} | {int((spreads > ASKED).sum())} | {off}"
                print(f"| {kind} | {digits} | {step:.0e}{chosen} | {cells} |", flush=True)


if __name__ == "__main__":
    main()
