"""Loss, error and gradient of a network over a whole set of samples, in eval mode."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.training.checkpoint import TrainConfig
from flatscope.training.pairs import Pair

EVALUATION_BATCH = 500


def evaluate(model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy") -> tuple[float, float]:
    """Mean loss and share of misclassified samples in eval mode; the share is NaN if the targets are no classes.

    The model's mode is put back afterwards.
    """
    device = next(model.parameters()).device
    total, wrong = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    with torch.no_grad():
        for start in range(0, len(x), EVALUATION_BATCH):
            targets = y[start : start + EVALUATION_BATCH].to(device)
            outputs = model(x[start : start + EVALUATION_BATCH].to(device))
            total += batch_loss(outputs, targets, loss, reduction="sum")
            if not targets.is_floating_point():
                wrong += (outputs.argmax(1) != targets).sum()
    model.train(was_training)
    return float(total) / len(x), math.nan if y.is_floating_point() else float(wrong) / len(x)


def batch_loss(outputs: Tensor, targets: Tensor, loss: str, reduction: str = "mean") -> Tensor:
    """Loss of a batch, the mean or the sum of its samples' losses; `loss` as in `TrainConfig`."""
    if loss == "cross_entropy":
        return functional.cross_entropy(outputs, targets, reduction=reduction)
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, outputs.shape[1]).to(outputs.dtype)
    per_sample = (outputs.flatten(1) - targets.reshape(len(outputs), -1)).square().sum(1)  # (n,)
    return per_sample.mean() if reduction == "mean" else per_sample.sum()


def evaluation(model: nn.Module, trained_on: Pair, tested: Pair | None, config: TrainConfig) -> dict[str, float]:
    """The measured part of a row of the history."""
    row = dict(zip(("train_loss", "train_error"), evaluate(model, *trained_on, config.loss), strict=True))
    if tested is not None:
        row |= zip(("test_loss", "test_error"), evaluate(model, *tested, config.loss), strict=True)
    if config.stop_gradient_norm is not None:
        row["gradient_norm"] = gradient_norm(model, *trained_on, config.loss)
    return row


def gradient_norm(model: nn.Module, x: Tensor, y: Tensor, loss: str) -> float:
    """Length of the gradient of the mean loss over the whole set, in eval mode."""
    weights = [p for p in model.parameters() if p.requires_grad]
    sums = [torch.zeros_like(p) for p in weights]
    for start in range(0, len(x), EVALUATION_BATCH):
        batch = slice(start, start + EVALUATION_BATCH)
        value = batch_loss(model(x[batch]), y[batch], loss, reduction="sum")
        for total, part in zip(sums, torch.autograd.grad(value, weights, allow_unused=True), strict=True):
            if part is not None:
                total += part
    return float(torch.stack([total.double().norm() for total in sums]).norm()) / len(x)
