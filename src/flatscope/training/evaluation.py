"""Samples with their targets as training wants them, and loss and error of a network on them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError
from flatscope.training.checkpoint import TrainConfig

Pair = tuple[Tensor, Tensor]
Forward = Callable[[Tensor], Tensor]


def unpack_pairs(data: Any, test: Pair | None) -> tuple[Pair, Pair | None]:
    """Training and test pair, whichever of the accepted forms they came in."""
    if hasattr(data, "train") and not isinstance(data, nn.Module):
        train_pair, test_pair = data.train, getattr(data, "test", None)
    elif isinstance(data, tuple | list) and len(data) == 2 and isinstance(data[0], Tensor):
        train_pair, test_pair = data, None
    elif isinstance(data, tuple | list) and len(data) == 2:
        train_pair, test_pair = data
    else:
        train_pair, test_pair = None, None
    test_pair = test if test is not None else test_pair
    for pair in (train_pair, test_pair) if test_pair is not None else (train_pair,):
        if not (isinstance(pair, tuple | list) and len(pair) == 2 and all(isinstance(t, Tensor) for t in pair)):
            expected = "(x, y), ((x, y), (x_test, y_test)) or an object with such pairs as .train and .test"
            got = type(data).__name__ if pair is train_pair else f"a test set of type {type(pair).__name__}"
            raise InputError(expected, got, where="train, data")
    # of what was made in inference mode no derivative can be taken
    pairs = [pair and tuple(t.clone() if t.is_inference() else t for t in pair) for pair in (train_pair, test_pair)]
    return pairs[0], pairs[1]  # type: ignore[return-value]


def check_training_settings(model: nn.Module, y: Tensor, config: TrainConfig) -> None:
    """Refuse a stop rule or a batch size that these targets or this network cannot have."""
    if config.stop_zero_error and y.is_floating_point():
        raise InputError("classes as targets", "real numbers", where="train, stop_zero_error")
    dtype = next(model.parameters()).dtype
    if config.precision != "float32" and dtype != torch.float32:
        raise InputError(f"float32 weights for {config.precision}", str(dtype), where="train, precision")
    if len(y) % config.batch_size == 1 and any(isinstance(part, nn.BatchNorm1d) for part in model.modules()):
        got = f"one sample in the last batch ({len(y)} samples, batch size {config.batch_size})"
        raise InputError("at least two samples per batch for BatchNorm", got, where="train, batch_size")


def checked_pair(model: nn.Module, pair: Pair, config: TrainConfig, device: torch.device, where: str) -> Pair:
    """The pair on the model's device, once a forward pass on two samples has shown that all parts fit."""
    x, y = (tensor.to(device) for tensor in pair)
    if len(x) == 0 or y.dim() == 0 or len(x) != len(y):
        raise InputError("as many targets as inputs, at least one", f"{len(x)} and {tuple(y.shape)}", where=where)
    if x.is_floating_point() and not bool(x.isfinite().all()):
        raise InputError("finite inputs", "NaN or infinite values", where=where)
    if config.augmentation == "crop-flip" and x.dim() != 4:
        raise InputError("images (n, channels, height, width) for crop-flip", str(tuple(x.shape)), where=where)
    was_training = model.training
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(x[:2])
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        got = f"{tuple(x.shape)} of {x.dtype} ({str(error).splitlines()[0]})"
        raise InputError("inputs that the model takes", got, where=where, fix="Check shape and dtype") from None
    finally:
        model.train(was_training)
    return x, checked_targets(outputs, y, config.loss, where)


def checked_targets(outputs: Tensor, y: Tensor, loss: str, where: str) -> Tensor:
    """Targets that fit the outputs: classes as int64, or as many real numbers per sample as there are outputs."""
    if loss == "cross_entropy" or not y.is_floating_point():
        if y.dim() != 1 or y.is_floating_point() or outputs.dim() != 2:
            got = f"targets {tuple(y.shape)} of {y.dtype} and outputs {tuple(outputs.shape)}"
            raise InputError("one class number per sample and one output per class", got, where=where)
        low, high = int(y.min()), int(y.max())
        if low < 0 or high >= outputs.shape[1]:
            raise InputError(f"classes 0 to {outputs.shape[1] - 1}", f"{low} to {high}", where=where)
        return y.long()
    if y[0].numel() != outputs[0].numel():
        got = f"targets {tuple(y.shape)} for outputs {tuple(outputs.shape)}"
        raise InputError("as many target values per sample as outputs", got, where=where)
    return y.to(outputs.dtype)


EVALUATION_BATCH = 500
EVALUATED_NUMBERS = 2**23  # on a GPU, more samples if they are small: a batch must last longer than its launches


def evaluate(
    model: nn.Module, x: Tensor, y: Tensor, loss: str = "cross_entropy", forward: Forward | None = None
) -> tuple[float, float]:
    """Mean loss and share of misclassified samples in eval mode; the share is NaN if the targets are no classes.

    The model's mode is put back afterwards. `forward` is the model in another form, for full batches.
    """
    device = next(model.parameters()).device
    total, wrong = torch.zeros(2, dtype=torch.float64, device=device)
    was_training = model.training
    model.eval()
    size = EVALUATION_BATCH
    if device.type == "cuda":
        size = max(size, EVALUATED_NUMBERS // x[0].numel())
        size = next((even for even in range(size, size // 2, -1) if len(x) % even == 0), size)  # no batch is left over
    with torch.no_grad():
        for start in range(0, len(x), size):
            targets = y[start : start + size].to(device)
            inputs = x[start : start + size].to(device)
            outputs = (forward if forward is not None and len(inputs) == size else model)(inputs)
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


def history_row(
    model: nn.Module, trained_on: Pair, tested: Pair | None, config: TrainConfig, forward: Forward | None = None
) -> dict[str, float]:
    """The measured part of a row of the history; `forward` as in `evaluate`."""
    row = dict(zip(("train_loss", "train_error"), evaluate(model, *trained_on, config.loss, forward), strict=True))
    if tested is not None:
        row |= zip(("test_loss", "test_error"), evaluate(model, *tested, config.loss, forward), strict=True)
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
