"""The loss of one sample: softmax, logistic or squared error by name, or a function of the user's.

A named loss of one sample is a weighted sum over its *positions*: one for a classifier, the pixels of a segmentation,
the tokens of a text, the labels of a multi-label classifier. Each position has its own logits, so the Hessian with
respect to the outputs is block-diagonal, and each block is known in closed form.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.errors import InputError, UnknownNameError

PerSample = Callable[[Tensor, Tensor], Tensor]
Kind = Literal["softmax", "logistic", "squared", "own"]
IGNORED = -100  # the class number of pixels and tokens that do not count, as in torch and Hugging Face


@dataclass(frozen=True)
class Loss:
    """A loss with one value per sample; averages over samples are taken by the sweeps, never here.

    Attributes:
        name: as given, or the name of the user's function.
        function: of (outputs, targets), giving one value per sample.
        kind: what is known of its derivatives: "softmax" and "logistic" (weighted sums over `positions` of the
            cross-entropy of a softmax or a sigmoid), "squared" (squared error summed over outputs), "own" (nothing).
    """

    name: str
    function: PerSample
    kind: Kind = "own"

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

    def positions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and weight of each position: the loss of a sample is the weighted sum over its positions.

        The Hessian with respect to the logits z of a position of weight a is a (diag(p) − p pᵀ) with p = softmax(z)
        for softmax, and a σ(z) σ(−z) for logistic losses.

        Returns:
            Logits (n, P, C) for softmax or (n, P) for logistic, and weights (n, P), 0 where a position is ignored.
        """
        if self.kind == "logistic":
            return outputs.reshape(len(outputs), -1), _label_weights(outputs)
        if self.kind != "softmax":
            raise InputError("a softmax or logistic loss", self.name, where="positions of a loss")
        classes_last = self.name == "next_token"
        return _logits(outputs, classes_last), _place(outputs, targets, classes_last)[1]

    def to_outputs(self, values: Tensor, shape: torch.Size) -> Tensor:
        """Arrange values by position as outputs: (*, n, P, C) or (*, n, P) to (*, *shape), with n first in `shape`."""
        leading = values.shape[: values.ndim - (3 if self.kind == "softmax" else 2)]
        if self.kind == "softmax" and self.name != "next_token" and len(shape) > 2:
            values = values.mT
        return values.reshape(*leading, *shape)


def as_loss(loss: str | PerSample) -> Loss:
    """The loss of that name, or the user's function of (outputs, targets) giving one value per sample."""
    if isinstance(loss, Loss):
        return loss
    if callable(loss):
        name = getattr(loss, "__name__", type(loss).__name__)
        return Loss(f"own {name}" if name in LOSSES else name, loss)  # a user's function may not pass for one of ours
    if loss not in LOSSES:
        raise UnknownNameError.among(str(loss), LOSSES, "loss")
    return LOSSES[loss]


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the softmax over dimension 1, per sample, averaged over the positions that count.

    Outputs (n, C) or (n, C, …) with class numbers (n,) or (n, …), −100 ignored where there are positions; or with
    probabilities of the outputs' own shape.
    """
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        raise InputError(
            "at least two logits per sample, outputs (n, classes)",
            f"outputs {tuple(outputs.shape)}",
            where="loss cross_entropy",
            fix='For one logit per sample use loss="bce" (on the command line --loss bce)',
        )
    soft = targets.shape == outputs.shape and targets.is_floating_point()
    if not soft and targets.shape != (len(outputs), *outputs.shape[2:]):
        raise InputError(
            f"class numbers of shape {(len(outputs), *outputs.shape[2:])} for outputs (n, classes, …), or "
            "probabilities (floats) of the outputs' shape",
            f"outputs {tuple(outputs.shape)} and {_dtype_text(targets)} targets {tuple(targets.shape)}",
            where="loss cross_entropy",
            fix=_cross_entropy_fix(outputs, targets),
        )
    return _softmax_loss(outputs, targets, classes_last=False)


def next_token(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the tokens to come, per sequence, averaged over the tokens that count.

    Outputs (n, T, V); targets (n, T), where `targets[:, t]` is the token that the outputs at t predict (−100: none).
    `next_tokens` makes them from the tokens of the texts.
    """
    if outputs.ndim != 3 or targets.shape != outputs.shape[:2] or targets.is_floating_point():
        raise InputError(
            "outputs (n, T, vocabulary) and token numbers (n, T)",
            f"outputs {tuple(outputs.shape)} and {_dtype_text(targets)} targets {tuple(targets.shape)}",
            where="loss next_token",
            fix="Targets are the next token at every position, -100 where there is none",
        )
    return _softmax_loss(outputs, targets, classes_last=True)


def next_tokens(tokens: Tensor, mask: Tensor | None = None) -> Tensor:
    """Targets of "next_token" from the tokens (n, T) of texts: each position's successor, −100 where there is none.

    Args:
        tokens: token numbers; −100 marks tokens that are not to be predicted (prompts, padding).
        mask: 1 for tokens of the text, 0 for padding, as a tokenizer's `attention_mask`.

    Example:
        >>> import torch
        >>> next_tokens(torch.tensor([[5, 6, 7, 0]]), mask=torch.tensor([[1, 1, 1, 0]]))
        tensor([[   6,    7, -100, -100]])
    """
    kept = tokens if mask is None else tokens.where(mask.bool(), IGNORED)
    return torch.cat([kept[:, 1:], torch.full_like(kept[:, :1], IGNORED)], 1)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of sigmoids, per sample: one logit, or several labels (n, L), over which it is SUMMED.

    Outputs (n,), (n, 1), (n, L) or, averaged over the positions, (n, L, …); targets 0 or 1 (or probabilities), as many.
    """
    same = targets.shape == outputs.shape or (outputs.shape[1:] == (1,) and targets.shape == outputs.shape[:1])
    if not same:
        several = outputs.ndim == 2 and targets.ndim == 1 and not targets.is_floating_point()
        raise InputError(
            f"targets 0 or 1 of the outputs' shape {tuple(outputs.shape)}",
            f"{_dtype_text(targets)} targets {tuple(targets.shape)}",
            where="loss bce",
            fix='For class numbers of several classes use loss="cross_entropy"' if several else "One target per logit",
        )
    chance = targets.reshape(outputs.shape).to(outputs.dtype)
    # Both logarithms: (1 - t) z - log σ(z) would lose the digits of sure samples.
    values = -chance * functional.logsigmoid(outputs) - (1 - chance) * functional.logsigmoid(-outputs)
    return (values.reshape(len(outputs), -1) * _label_weights(outputs)).sum(1)


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


def _softmax_loss(outputs: Tensor, targets: Tensor, classes_last: bool) -> Tensor:
    if outputs.ndim == 2 and not targets.is_floating_point():
        return functional.cross_entropy(outputs, targets, reduction="none")
    logits = _logits(outputs, classes_last)
    placed, weights = _place(outputs, targets, classes_last)
    logs = torch.log_softmax(logits, 2)
    if placed.is_floating_point():
        return -(logs * placed).sum((1, 2)) / logits.shape[1]
    return -(logs.gather(2, placed[:, :, None]).squeeze(2) * weights).sum(1)


def _logits(outputs: Tensor, classes_last: bool) -> Tensor:
    """Outputs as (n, P, C)."""
    if outputs.ndim == 2:
        return outputs[:, None, :]
    return outputs.flatten(1, -2) if classes_last else outputs.flatten(2).mT


def _place(outputs: Tensor, targets: Tensor, classes_last: bool) -> tuple[Tensor, Tensor]:
    """Targets by position, (n, P) class numbers or (n, P, C) probabilities, and weights (n, P)."""
    if targets.is_floating_point():
        placed = _logits(targets.to(outputs.dtype), classes_last)
        return placed, placed.sum(2) / placed.shape[1]  # rows that sum to 1 but for rounding
    placed = targets.reshape(len(targets), -1)
    counted = placed != IGNORED
    weights = counted.to(outputs.dtype) / counted.sum(1, keepdim=True).clamp_min(1)
    return placed.where(counted, 0), weights


def _label_weights(outputs: Tensor) -> Tensor:
    """1 for each label, shared by the positions of (n, labels, positions …): (n, P)."""
    flat = outputs.reshape(len(outputs), -1)
    return torch.full_like(flat, 1 / outputs[0, 0].numel() if outputs.ndim > 2 else 1.0)


def _cross_entropy_fix(outputs: Tensor, targets: Tensor) -> str:
    if outputs.ndim == 3 and targets.shape == outputs.shape[:2]:
        return 'For outputs (n, T, classes), as of language models, use loss="next_token"'
    if targets.shape == outputs.shape:
        return 'Give probabilities as floats, y.float(); for labels that do not exclude each other use loss="bce"'
    return "For other shapes pass your own loss function giving one value per sample"


def _dtype_text(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


LOSSES = {
    "cross_entropy": Loss("cross_entropy", cross_entropy, "softmax"),
    "next_token": Loss("next_token", next_token, "softmax"),
    "bce": Loss("bce", binary_cross_entropy, "logistic"),
    "mse": Loss("mse", squared_error, "squared"),
}
