"""The loss of one sample: cross-entropy, squared error, or a function of the user's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.errors import InputError, UnknownNameError

PerSample = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Loss:
    """A loss with one value per sample; averages over samples are taken by the sweeps, never here."""

    name: str
    function: PerSample

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of shape (n,)."""
        values = self.function(outputs, targets)
        if not isinstance(values, Tensor) or values.shape != (len(outputs),):
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            raise InputError(
                f"one loss per sample, shape ({len(outputs)},)",
                found,
                where=f"loss {self.name}",
                fix="Use reduction='none' and sum over everything but the samples",
            )
        return values


def as_loss(loss: str | PerSample) -> Loss:
    """The loss of that name, or the user's function of (outputs, targets) giving one value per sample."""
    if isinstance(loss, Loss):
        return loss
    known = {"cross_entropy": cross_entropy, "mse": squared_error}
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        # Curvature in closed form goes by the name: a user's function may not pass for one of ours.
        return Loss(f"own {name}" if name in known else name, loss)
    if loss not in known:
        raise UnknownNameError.among(str(loss), known, "loss")
    return Loss(loss, known[loss])


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """-log softmax(outputs)[target] per sample; outputs (n, C), targets (n,) of class numbers."""
    if outputs.ndim != 2 or targets.shape != outputs.shape[:1]:
        raise InputError(
            "outputs (n, classes) and targets (n,)",
            f"outputs {tuple(outputs.shape)} and targets {tuple(targets.shape)}",
            where="loss cross_entropy",
            fix="For other shapes pass your own loss function giving one value per sample",
        )
    return functional.cross_entropy(outputs, targets, reduction="none")


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error summed over outputs, per sample; class numbers are compared as one-hot vectors."""
    if not targets.is_floating_point() and outputs.ndim == 2 and targets.ndim == 1 and outputs.shape[1] > 1:
        targets = functional.one_hot(targets, outputs.shape[1])
    if targets.numel() != outputs.numel():
        raise InputError(
            f"targets of the outputs' shape {tuple(outputs.shape)}",
            f"{tuple(targets.shape)}",
            where="loss mse",
        )
    # (n,) targets against (n, 1) outputs must not broadcast to (n, n).
    difference = outputs - targets.reshape(outputs.shape).to(outputs.dtype)
    return difference.square().reshape(len(outputs), -1).sum(1)


def is_classification(outputs: Tensor, targets: Tensor) -> bool:
    """Whether targets are class numbers of outputs with at least two classes."""
    whole_numbers = not targets.is_floating_point() and targets.dtype != torch.bool
    return outputs.ndim == 2 and outputs.shape[1] > 1 and targets.ndim == 1 and whole_numbers
