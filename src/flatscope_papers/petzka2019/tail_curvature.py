"""Exact curvature of a network's last two dense layers from forward passes alone, for thousands of networks.

Petzka et al. (2019) look at one layer near the output of 144 networks. There the exact sweep has closed forms: with
features u and a in front of the two layers, D the ReLU mask between them, V the last weight, p the softmax and
S = diag(p) − ppᵀ, the Hessian of the cross-entropy is mean S ⊗ aaᵀ for the last layer and mean (DVᵀSVD) ⊗ uuᵀ for the
one before it. The sweep of all layers gives the same numbers (tested), at the price of a backward pass per class.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatscope.errors import NotApplicable
from flatscope.guards import precise_math

CHUNK = {"cuda": 25_000, "cpu": 2_500}
LANCZOS_STEPS = 60
CONVERGED = 1e-10  # relative change of the largest Ritz value over five steps


def tail_curvature(model: nn.Sequential, x: Tensor) -> dict[str, float]:
    """Norm, trace and largest eigenvalue for both layers, and Petzka's κ and κ_τ, of the mean cross-entropy on `x`.

    Args:
        model: ends with Linear, ReLU, Linear; eval mode. Labels play no role: the Hessian does not depend on them.
        x: inputs on the model's device.

    Returns:
        `norm/…`, `layer_trace/…`, `layer_max_eigenvalue/…`, `kappa_trace/…`, `kappa/…` by layer name.
    """
    names = list(model._modules)
    before, relu, last = (model._modules[name] for name in names[-3:])
    if not (isinstance(before, nn.Linear) and isinstance(relu, nn.ReLU) and isinstance(last, nn.Linear)):
        raise NotApplicable("a network that ends with Linear, ReLU, Linear", ", ".join(names[-3:]), where="model")
    head = model[:-3]
    n, hidden, classes = len(x), last.in_features, last.out_features
    traces = torch.zeros(2, dtype=torch.float64, device=x.device)
    # One block of the last layer's Hessian for every pair of classes c ≤ c'.
    rows, columns = torch.triu_indices(classes, classes, device=x.device)
    blocks = torch.zeros(len(rows), hidden, hidden, dtype=torch.float64, device=x.device)
    kept: list[tuple[Tensor, Tensor, Tensor]] = []
    chunk = CHUNK.get(x.device.type, CHUNK["cpu"])
    with torch.no_grad(), precise_math():
        weight = last.weight  # (classes, hidden)
        for start in range(0, n, chunk):
            u = head(x[start : start + chunk])  # (b, features)
            z = before(u)
            mask = (z > 0).to(z.dtype)
            a = z * mask  # (b, hidden)
            p = last(a).softmax(1)
            spread = 1 - p.square().sum(1)  # tr S
            traces[0] += (a.square().sum(1) * spread).double().sum()
            # tr(D Vᵀ S V D) = Σ_c p_c ‖D V_c‖² − ‖D Vᵀp‖²
            inner = (mask @ weight.square().T * p).sum(1) - (mask * (p @ weight)).square().sum(1)
            traces[1] += (u.square().sum(1) * inner).double().sum()
            s = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]  # (b, classes, classes)
            pairs = s[:, rows, columns].T  # (pairs, b)
            blocks += torch.matmul(pairs[:, None, :] * a.T, a).double()  # (pairs, hidden, hidden)
            kept.append((u, mask, p))
        top_last = _largest_of_blocks(blocks / n, rows, columns, classes)
        top_before = _largest_by_products(kept, weight, n)
    found: dict[str, float] = {}
    layers = ((names[-1], last, traces[0] / n, top_last), (names[-3], before, traces[1] / n, top_before))
    for name, layer, trace, top in layers:
        norm = float(layer.weight.detach().double().square().sum())
        found[f"norm/{name}"] = norm**0.5
        found[f"layer_trace/{name}"] = float(trace)
        found[f"layer_max_eigenvalue/{name}"] = top
        found[f"kappa_trace/{name}"] = norm * float(trace)
        found[f"kappa/{name}"] = norm * top
    return found


def _largest_of_blocks(blocks: Tensor, rows: Tensor, columns: Tensor, classes: int) -> float:
    """Largest eigenvalue of the symmetric matrix whose upper block triangle is given."""
    hidden = blocks.shape[-1]
    full = blocks.new_zeros(classes, classes, hidden, hidden)
    full[rows, columns] = blocks
    full[columns, rows] = blocks.transpose(1, 2)
    matrix = full.permute(0, 2, 1, 3).reshape(classes * hidden, classes * hidden)
    return _largest(lambda direction: matrix @ direction, len(matrix), matrix.device)


def _largest_by_products(kept: list[tuple[Tensor, Tensor, Tensor]], weight: Tensor, n: int) -> float:
    """Largest eigenvalue of mean (D Vᵀ S V D) ⊗ uuᵀ."""
    hidden, features = weight.shape[1], kept[0][0].shape[1]

    def product(direction: Tensor) -> Tensor:
        result = torch.zeros(hidden, features, dtype=torch.float64, device=weight.device)
        moved = direction.reshape(hidden, features).to(weight.dtype)
        for u, mask, p in kept:
            outputs = (u @ moved.T * mask) @ weight.T  # (b, classes)
            curved = p * (outputs - (p * outputs).sum(1, keepdim=True))  # S · outputs
            result += ((curved @ weight * mask).T @ u).double()
        return result.flatten() / n

    return _largest(product, hidden * features, weight.device)


def _largest(product: Callable[[Tensor], Tensor], size: int, device: torch.device) -> float:
    """Largest eigenvalue by Lanczos with full reorthogonalisation, which stays on the device but for a few looks."""
    generator = torch.Generator().manual_seed(0)
    start = torch.randn(size, dtype=torch.float64, generator=generator).to(device)
    basis = torch.zeros(LANCZOS_STEPS + 1, size, dtype=torch.float64, device=device)
    basis[0] = start / start.norm()
    middle: list[Tensor] = []
    beside: list[Tensor] = []
    found = 0.0
    for step in range(min(LANCZOS_STEPS, size)):
        image = product(basis[step])
        middle.append(basis[step] @ image)
        for _ in range(2):  # twice is enough
            image = image - basis[: step + 1].T @ (basis[: step + 1] @ image)
        beside.append(image.norm())
        if step % 5 == 4 or step + 1 == size:
            before, found = found, _top_of_tridiagonal(middle, beside)
            exhausted = float(beside[-1]) <= 1e-12 * abs(found)
            if math.isnan(found) or exhausted or abs(found - before) <= CONVERGED * abs(found):
                return found
        basis[step + 1] = image / beside[-1]
    return _top_of_tridiagonal(middle, beside)


def _top_of_tridiagonal(middle: list[Tensor], beside: list[Tensor]) -> float:
    diagonal, off = torch.stack(middle).cpu(), torch.stack(beside).cpu()[: len(middle) - 1]
    if not bool(diagonal.isfinite().all() and off.isfinite().all()):
        return math.nan  # a network that overflows has no curvature to speak of
    return float(torch.linalg.eigvalsh(torch.diag(diagonal) + torch.diag(off, 1) + torch.diag(off, -1))[-1])
