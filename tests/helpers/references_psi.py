"""Naive twins of the measures in path space: dense Hessians through the inverse, a general solver, explicit edges.

The inverse itself has its own tests, by rank and by hand, in test_basis_paths.py.
"""

from __future__ import annotations

from typing import Any

import networks
import numpy as np
import torch
from references import TOGETHER, Dense, twin
from references_norms import Convolution, edges_of, output_sizes
from references_sharpness import STARTS, STRONG_OPTIONS, _folded, _highest, _normals
from torch import Tensor, nn
from torch.func import vmap

from flatscope.symmetries.basis_paths import BasisPaths
from flatscope_papers.theory.path_matrix import basis_paths, path_values

STRONG_OPTIONS["psi_expected", "output_scaling"] = {"epsilon": 0.9, "draws": 400}
STRONG_OPTIONS["psi_expected", "attention_scaling"] = {"epsilon": 0.9, "draws": 200}
STRONG_OPTIONS["psi_expected", "norm_scaling"] = {"epsilon": 0.9, "draws": 200}


class InPathSpace:
    """A tiny network as a function of its path values, BatchNorm folded."""

    def __init__(self, dense: Dense, rule: str = "max_product") -> None:
        self.dense = _folded(dense)
        self.paths = BasisPaths(self.dense.tiny.model, self.dense.tiny.x, rule)
        self.v = self.paths.values()
        units = [
            abs(float(self.paths.prefix.product[u] * self.paths.suffix.product[u]))
            for u in range(1, self.paths.n_classes + 1)
        ]
        self.pole = min(units) if units else 1.0

    def loss(self, v: Tensor) -> Tensor:
        return self.dense.loss({**self.dense.params, **self.paths.params_of(v)})


@twin
def psi_trace(dense: Dense, rule: str = "max_product", **options: Any) -> float:
    space = InPathSpace(dense, rule)
    return float(torch.autograd.functional.hessian(space.loss, space.v, vectorize=True).trace())


@twin
def psi_epsilon(
    dense: Dense, rule: str = "max_product", epsilon: float = 0.1, relative: bool = True, **options: Any
) -> float:
    space = InPathSpace(dense, rule)
    radius = epsilon * space.pole if relative else epsilon
    loss = float(space.loss(space.v))
    gradient = torch.autograd.functional.jacobian(space.loss, space.v)
    starts = [gradient, *_normals(STARTS, len(space.v))]
    highest = _highest(lambda z: space.loss(space.v + radius * z / z.norm()), [s / s.norm() for s in starts])
    return (highest - loss) / (1 + loss)


@twin
def psi_expected(
    dense: Dense, rule: str = "max_product", epsilon: float = 0.1, draws: int = 1000, **options: Any
) -> float:
    space = InPathSpace(dense, rule)
    d, loss = len(space.v), float(space.loss(space.v))
    lengths = torch.rand(draws // 2, generator=torch.Generator().manual_seed(12), dtype=torch.float64) ** (1 / d)
    ways = torch.stack(_normals(draws // 2, d))
    steps = epsilon * space.pole * lengths[:, None] * ways / ways.norm(dim=1, keepdim=True)
    with torch.no_grad():
        found = vmap(space.loss, chunk_size=TOGETHER)(torch.cat([space.v + steps, space.v - steps]))
    return abs(float(found.mean()) - loss)


@twin
def psi_balance(dense: Dense, rule: str = "max_product") -> float:
    found = InPathSpace(dense, rule).paths
    values = path_values(basis_paths(found), found.params).abs().tolist()
    return max(values) / min(values)


class Walk:
    """Signals and bounds of all samples through a tiny network, edge by edge; see the certificate's formula."""

    def __init__(self, paths: BasisPaths, epsilon: float) -> None:
        self.found, self.epsilon = paths, epsilon
        self.modules = dict(paths.model.named_modules())
        self.suffix = self.found.suffix.product.abs().numpy()
        self.prefix = np.append(np.inf, self.found.unit_values.numpy())
        self.safe, self.states = True, 0

    def layer(self, name: str, h: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        module, layer = self.modules[name], self.found.graph.layer(name)
        shape = h.shape[1:]
        numbers = torch.arange(module.weight.numel()).reshape(module.weight.shape)
        is_conv = isinstance(module, Convolution)
        out_shape = (len(layer.outputs), *output_sizes(module, shape)) if is_conv else (*shape[:-1], len(layer.outputs))
        frozen = set(self.found.suffix.entry[self.found.suffix.layer == list(self.found.graph).index(layer)].tolist())
        weights = module.weight.detach().flatten().numpy()
        z, own, rest = (np.zeros((len(h), *out_shape)) for _ in range(3))
        for out, into, number in edges_of(module, numbers, shape):
            entry = int(number)
            head = int(layer.outputs[out[0] if is_conv else out[-1]])
            tail = int(layer.inputs[into[0] if is_conv else into[-1]])
            w = weights[entry] * self.suffix[head] / self.suffix[tail]
            signal, moves = h[(slice(None), *into)], bound[(slice(None), *into)]
            here = (slice(None), *out)
            z[here] += w * signal
            rest[here] += abs(w) * moves
            if entry not in frozen:
                reach = abs(signal) + moves
                if tail == 0:
                    own[here] += reach**2
                else:
                    own[here] += (reach / (self.prefix[tail] - self.epsilon)) ** 2
                    rest[here] += abs(w) * reach * self.epsilon / (self.prefix[tail] - self.epsilon)
        if module.bias is not None:
            bias = module.bias.detach().numpy() * self.suffix[layer.outputs.numpy()]
            z += bias.reshape(-1, *[1] * (z.ndim - 2)) if is_conv else bias
            own += 1
        return z, self.epsilon * np.sqrt(own) + rest

    def relu(self, z: np.ndarray, bound: np.ndarray, slope: float = 0.0) -> tuple[np.ndarray, np.ndarray]:
        self.states += 1
        self.safe &= bool(np.all((abs(z) > bound) | (bound == 0)))
        return np.where(z > 0, z, slope * z), np.where(z > 0, bound, slope * bound)

    def sequence(self, names: list[str], h: np.ndarray, bound: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        for name in names:
            module = self.modules[name]
            if isinstance(module, nn.Linear | Convolution):
                h, bound = self.layer(name, h, bound)
            elif isinstance(module, nn.ReLU | nn.LeakyReLU):
                h, bound = self.relu(h, bound, getattr(module, "negative_slope", 0.0))
            elif not isinstance(module, nn.Identity):  # pooling, flatten: the same for both
                h, bound = (module(torch.from_numpy(part)).numpy() for part in (h, bound))
        return h, bound

    def run(self, model: nn.Module, x: np.ndarray) -> None:
        zero = np.zeros_like(x)
        if isinstance(model, networks.Residual):
            h, b = self.relu(*self.layer("stem", x, zero))
            inner = self.relu(*self.layer("inner", h, b))
            z, moves = self.layer("outer", *inner)
            self.layer("head", *self.relu(h + z, b + moves))
        elif isinstance(model, networks.OnSequences):
            h, b = self.relu(*self.layer("token", x, zero))
            h, b = self.relu(*self.layer("mix", h, b))
            self.layer("head", h.sum(1), b.sum(1))
        else:
            self.sequence([name for name, _ in model.named_children()], x, zero)


@twin
def psi_activation_radius(dense: Dense, rule: str = "max_product") -> dict[str, float]:
    space = InPathSpace(dense, rule)
    if not dense.tiny.piecewise_linear or not any(
        isinstance(m, nn.ReLU | networks.Residual | networks.OnSequences) for m in dense.tiny.model.modules()
    ):
        return {}
    low, high = 0.0, space.pole
    while high - low > 1e-11 * high:
        middle = (low + high) / 2
        walk = Walk(space.paths, middle)
        walk.run(space.dense.tiny.model, dense.tiny.x.numpy())
        low, high = (middle, high) if walk.safe else (low, middle)
    return {"": low}
