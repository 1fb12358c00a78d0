"""Norms of networks of full size: path norms, and norms of convolutions as the maps that they are."""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch
from scipy.sparse.linalg import LinearOperator, svds
from torch import nn
from torch.nn import functional

import flatscope as fs
from benchmarks.timing import Row, in_turn
from flatscope.training import build

SIDES = {"vgg": 32, "plainnet18": 32, "wide_resnet": 28}


def rows() -> Iterator[Row]:
    yield from map(path_norms, SIDES)
    yield spectral()


def problem_of(name: str) -> fs.Problem:
    x = torch.randn(2, 3, SIDES[name], SIDES[name], generator=torch.Generator().manual_seed(0))
    return fs.Problem(build(name).eval(), train=(x, torch.tensor([0, 1])))


def path_norms(name: str) -> Row:
    """The time of the measure, folding and all, beside that of what it cannot do without: one pass in float64."""
    problem, twin = problem_of(name), build(name).double().eval()
    ones = torch.ones(1, 3, SIDES[name], SIDES[name], dtype=torch.float64)

    def forward() -> None:
        with torch.no_grad():
            twin(ones)

    one, both, peer = in_turn(
        lambda: fs.measure(problem, "l1_path_norm"),
        lambda: fs.measure(problem, ["l1_path_norm", "l2_path_norm"]),
        forward,
    )
    note = f"with the ℓ2 path norm {both:.2f} s"
    return Row(f"ℓ1 path norm of {name}", one, peer, "one float64 pass", "≤ 1 s", one <= 1.0, note)


def spectral() -> Row:
    """Every layer of VGG, against SciPy's sparse singular values with the same tolerance on the residual."""
    problem = problem_of("vgg")
    folded = fs.fold_batchnorm(problem.model, problem.example(1))
    found = fs.measure(problem, "spectral_norm").layer("spectral_norm")
    shapes = {layer.name: layer.input_shape for layer in fs.Context(problem).network}

    def peer() -> dict[str, float]:
        values = {}
        for name, module in folded.named_modules():
            if isinstance(module, nn.Linear):
                values[name] = float(torch.linalg.matrix_norm(module.weight.detach().double(), 2))
            elif isinstance(module, nn.Conv2d):
                values[name] = top_singular_value(module, shapes[name])
        return values

    for name, value in peer().items():
        assert abs(found[name] / value - 1) < 1e-7, (name, found[name], value)
    ours, theirs = in_turn(lambda: fs.measure(problem, "spectral_norm"), peer, repeats=1)
    met = theirs / ours >= 1.3
    return Row("spectral norm of every layer of VGG", ours, theirs, "scipy svds, float64", "≥ 1.3×", met)


def top_singular_value(conv: nn.Conv2d, shape: tuple[int, ...]) -> float:
    weight, n_in = conv.weight.detach().double(), math.prod(shape)
    stride, padding = conv.stride, conv.padding

    def forward(vector: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        x = torch.from_numpy(np.ascontiguousarray(vector)).reshape(1, *shape)
        return functional.conv2d(x, weight, None, stride, padding).flatten().numpy()  # type: ignore[arg-type]

    image = functional.conv2d(torch.zeros(1, *shape).double(), weight, None, stride, padding)  # type: ignore[arg-type]

    def back(vector: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        y = torch.from_numpy(np.ascontiguousarray(vector)).reshape(image.shape)
        return functional.conv_transpose2d(y, weight, None, stride, padding).flatten().numpy()  # type: ignore[arg-type]

    operator = LinearOperator((image.numel(), n_in), matvec=forward, rmatvec=back, dtype=np.float64)
    start = np.random.default_rng(0).normal(size=min(image.numel(), n_in))
    return float(svds(operator, k=1, tol=1e-6, v0=start, return_singular_vectors=False)[0])
