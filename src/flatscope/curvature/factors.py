"""Factors of the output Hessian: for each sample, columns s_c with ∇²ℓ = Σ_c ± s_c s_cᵀ."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.curvature.operators import batched_gradient
from flatscope.loss import Loss


@dataclass(frozen=True)
class Columns:
    """Factor columns of a batch, shape (k, n, *output), and their signs (k, n) where some are negative."""

    values: Tensor
    signs: Tensor | None = None

    def block(self, start: int, stop: int) -> Columns:
        """Columns `start` to `stop`."""
        return Columns(self.values[start:stop], None if self.signs is None else self.signs[start:stop])


def n_columns(loss: Loss, n_outputs: int) -> int:
    """How many columns one sample needs at most."""
    return n_outputs - 1 if loss.kind == "softmax" else n_outputs


def output_columns(loss: Loss, outputs: Tensor, targets: Tensor) -> Columns:
    """Factor the Hessian of each sample's loss with respect to its outputs."""
    if loss.kind in ("softmax", "logistic"):
        return Columns(_position_columns(loss, outputs, targets))
    if loss.kind == "squared":
        flat = outputs.reshape(len(outputs), -1)  # (n, C)
        eye = torch.eye(flat.shape[1], dtype=flat.dtype, device=flat.device) * 2**0.5
        return Columns(eye[:, None, :].expand(-1, len(flat), -1).reshape(-1, *outputs.shape))
    return _eigen_columns(loss, outputs, targets)


def _position_columns(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Columns of every position of a sample (token, pixel, label), each of them zero at the other positions."""
    logits, weights = loss.positions(outputs, targets)
    n, count = weights.shape
    if loss.kind == "softmax":
        local = softmax_columns(logits.flatten(0, 1)).reshape(-1, n, count, logits.shape[2])  # (C-1, n, P, C)
        local = local * weights.sqrt()[:, :, None]
        apart = torch.eye(count, dtype=local.dtype, device=local.device)[:, None, None, :, None]
    else:
        local = (0.5 * (torch.nn.functional.logsigmoid(logits) + torch.nn.functional.logsigmoid(-logits))).exp()
        local = (local * weights.sqrt())[None]  # (1, n, P)
        apart = torch.eye(count, dtype=local.dtype, device=local.device)[:, None, None, :]
    spread = (local * apart).flatten(0, 1) if count > 1 else local  # (P (C-1), n, P, C) or (P, n, P)
    return loss.to_outputs(spread, outputs.shape)


def softmax_columns(outputs: Tensor) -> Tensor:
    """C−1 columns of diag(p) − ppᵀ = diag(√p) (I − √p√pᵀ) diag(√p), shape (C−1, n, C).

    The columns of a Householder reflection that sends √p to −e_m, without column m, are an orthonormal basis of
    the complement of √p. With m the largest class nothing cancels: 1 − p_m is never formed, so the digits
    survive in float32 when the network is sure of every sample. A fixed m would lose them all.
    """
    root = (0.5 * torch.log_softmax(outputs, 1)).exp()  # (n, C)
    n, classes = root.shape
    top = root.argmax(1, keepdim=True)  # (n, 1)
    root_top = root.gather(1, top)  # (n, 1)
    reflected = root / (1 + root_top)  # v_i / (1 + √p_m) for i ≠ m
    reflected.scatter_(1, top, 1.0)  # (√p_m + 1) / (1 + √p_m)
    basis = torch.diag_embed(torch.ones_like(root)) - reflected[:, :, None] * root[:, None, :]  # (n, i, j), j ≠ m
    columns = root[:, :, None] * basis  # (n, C, C)
    kept = torch.arange(classes - 1, device=root.device).expand(n, -1)
    kept = kept + (kept >= top)  # all columns but m, (n, C-1)
    return columns.gather(2, kept[:, None, :].expand(n, classes, -1)).permute(2, 0, 1).contiguous()


def _eigen_columns(loss: Loss, outputs: Tensor, targets: Tensor) -> Columns:
    """Any twice-differentiable loss: eigenvectors of the small Hessian, with signs if it is not semi-definite."""
    leaf = outputs.detach().requires_grad_()
    with torch.enable_grad():
        slope = torch.autograd.grad(loss(leaf, targets).sum(), leaf, create_graph=True)[0]
    flat = leaf.reshape(len(leaf), -1)
    width = flat.shape[1]
    if not slope.requires_grad:
        return Columns(outputs.new_zeros(1, *outputs.shape))
    unit = torch.eye(width, dtype=leaf.dtype, device=leaf.device)
    vectors = unit[:, None, :].expand(-1, len(leaf), -1).reshape(width, *leaf.shape)
    rows = batched_gradient([slope], [leaf], [vectors])[0].reshape(width, len(leaf), width)  # (C, n, C)
    hessians = rows.permute(1, 0, 2)
    eigenvalues, eigenvectors = torch.linalg.eigh((hessians + hessians.mT) / 2)  # (n, C), (n, C, C)
    columns = eigenvectors * eigenvalues.abs().sqrt()[:, None, :]
    # Rounding makes zero eigenvalues slightly negative; only real ones need a sign.
    floor = eigenvalues.abs().amax(1, keepdim=True) * torch.finfo(leaf.dtype).eps * width
    negative = bool((eigenvalues < -floor).any())
    signs = torch.where(eigenvalues < 0, -1.0, 1.0).to(leaf.dtype).T if negative else None
    return Columns(columns.permute(2, 0, 1).reshape(width, *outputs.shape).contiguous(), signs)
