"""The loss of one sample: softmax, logistic or squared error by name, or a function of the user's; targets it takes.

A named loss of one sample is a weighted sum over its *positions*: one for a classifier, the pixels of a segmentation,
the tokens of a text, the labels of a multi-label classifier. Each position has its own logits, so the Hessian with
respect to the outputs is block-diagonal, and each block is known in closed form.

What the targets of a problem are (class numbers, probabilities, labels 0 or 1, other numbers) is found in one pass over
the data and held against what the loss can take.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.errors import InputError, refuse_unknown

LARGE = 80.0  # log(1 + exp(x)) is x to the last digit from here on, where float32 still holds exp(x)
PerSample = Callable[[Tensor, Tensor], Tensor]
Kind = Literal["softmax", "logistic", "squared", "own"]
IGNORED = -100  # the class number of pixels and tokens that do not count, as in torch and Hugging Face


@dataclass(frozen=True)
class Loss:
    """A loss with one value per sample; averages over samples are taken by the sweeps, never here."""

    name: str  # as given, or the name of the user's function
    function: PerSample  # of (outputs, targets), giving one value per sample
    # what is known of its derivatives: "softmax" and "logistic" (weighted sums over `positions` of the cross-entropy of
    # a softmax or a sigmoid), "squared" (squared error summed over outputs), "own" (nothing)
    kind: Kind = "own"
    in_double: bool = False  # whether the function is given float64: differences from one lose their digits in float32
    # of "softmax" and "logistic": the weight of each position (n, P), of (outputs, targets); None: as the kind has it
    masses: PerSample | None = None
    # of targets: what torch divides the sum over samples by, for each of them (n,); None: by their number
    counted: Callable[[Tensor], Tensor] | None = None
    divisor: float = 1.0  # the mean of `counted` over the training samples, once they are known
    ignored: int = IGNORED  # the class number of targets that do not count
    # the cross-entropy that has the same values and derivatives by weights where outputs are log-probabilities
    of_log_probabilities: Loss | None = None
    remark: str = ""  # what to say of how it was read
    entries_remark: str = ""  # what to say where a sample has several entries

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of shape (n,)."""
        if self.in_double and outputs.dtype == torch.float32:
            outputs, targets = outputs.double(), targets.double() if targets.is_floating_point() else targets
        values = self.function(outputs, targets)
        if not isinstance(values, Tensor) or values.shape != (len(outputs),):
            got = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            fix = f"Use reduction='none' and sum over everything but the samples, or name one of {', '.join(LOSSES)}"
            if isinstance(values, Tensor) and values.ndim == 0:
                each = "leave out the mean over samples, loss.flatten(1).mean(1) in place of loss.mean()"
                fix = f"Use reduction='none', or {each}, or name one of {', '.join(LOSSES)}"
            raise InputError(f"one loss per sample, shape ({len(outputs)},)", got, f"loss {self.name}", fix)
        return values if self.divisor == 1 else values / self.divisor

    def positions(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Logits and weight of each position: the loss of a sample is the weighted sum over its positions.

        The Hessian with respect to the logits z of a position of weight a is a (diag(p) − p pᵀ) with p = softmax(z)
        for softmax, and a σ(z) σ(−z) for logistic losses.

        Returns:
            Logits (n, P, C) for softmax or (n, P) for logistic, and weights (n, P), 0 where a position is ignored.
        """
        if self.masses is not None and self.kind in ("softmax", "logistic"):
            flat = outputs.reshape(len(outputs), -1) if self.kind == "logistic" else logits_by_position(outputs, False)
            return flat, self.masses(outputs, targets) / self.divisor
        if self.kind == "logistic":
            return outputs.reshape(len(outputs), -1), _weight_of_each_label(outputs)
        if self.kind != "softmax":
            raise InputError("a softmax or logistic loss", self.name, where="positions of a loss")
        classes_last = self.name == "next_token"
        return logits_by_position(outputs, classes_last), _targets_by_position(outputs, targets, classes_last)[1]

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
    refuse_unknown(loss, LOSSES, "loss", ALSO_CALLED)
    return LOSSES[loss]


def in_double_where_possible(loss: Loss, outputs: Tensor, targets: Tensor) -> Loss:
    """A user's loss that is given float64 where it takes float64 and has the same values there; itself otherwise.

    Args:
        loss: any loss.
        outputs: of some samples.
        targets: of the same samples.
    """
    if loss.kind != "own" or outputs.dtype != torch.float32 or outputs.device.type == "mps":
        return loss
    double = replace(loss, in_double=True)
    try:
        single, values = loss(outputs, targets), double(outputs, targets)
    except (RuntimeError, TypeError, ValueError):
        return loss
    return double if torch.allclose(single.double(), values.double(), rtol=1e-3, atol=1e-5) else loss


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy of the softmax over dimension 1, per sample, averaged over the positions that count.

    Outputs (n, C) or (n, C, …) with class numbers (n,) or (n, …), −100 ignored where there are positions; or with
    probabilities of the outputs' own shape.
    """
    if outputs.ndim < 2 or outputs.shape[1] < 2:
        got = f"outputs {tuple(outputs.shape)}"
        fix = 'For one logit per sample use loss="bce" (on the command line --loss bce)'
        raise InputError("at least two logits per sample, outputs (n, classes)", got, "loss cross_entropy", fix)
    soft = targets.shape == outputs.shape and targets.is_floating_point()
    if not soft and targets.shape != (len(outputs), *outputs.shape[2:]):
        raise InputError(
            f"class numbers of shape {(len(outputs), *outputs.shape[2:])} for outputs (n, classes, …), or "
            "probabilities (floats) of the outputs' shape",
            f"outputs {tuple(outputs.shape)} and {_dtype_in_words(targets)} targets {tuple(targets.shape)}",
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
        got = f"outputs {tuple(outputs.shape)} and {_dtype_in_words(targets)} targets {tuple(targets.shape)}"
        fix = "Targets are the next token at every position, -100 where there is none"
        raise InputError("outputs (n, T, vocabulary) and token numbers (n, T)", got, "loss next_token", fix)
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
        got = f"{_dtype_in_words(targets)} targets {tuple(targets.shape)}"
        fix = 'For class numbers of several classes use loss="cross_entropy"' if several else "One target per logit"
        raise InputError(f"targets 0 or 1 of the outputs' shape {tuple(outputs.shape)}", got, "loss bce", fix)
    chance = targets.reshape(outputs.shape).to(outputs.dtype)
    # Both logarithms: (1 - t) z - log σ(z) would lose the digits of sure samples.
    values = -chance * functional.logsigmoid(outputs) - (1 - chance) * functional.logsigmoid(-outputs)
    return (values.reshape(len(outputs), -1) * _weight_of_each_label(outputs)).sum(1)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error summed over outputs, per sample; class numbers are compared as one-hot vectors."""
    if not targets.is_floating_point() and outputs.ndim == 2 and targets.ndim == 1 and outputs.shape[1] > 1:
        targets = targets[:, None] == torch.arange(outputs.shape[1], device=targets.device)  # one_hot does not stack
    if targets.numel() != outputs.numel():
        raise InputError(
            f"targets of the outputs' shape {tuple(outputs.shape)}", f"{tuple(targets.shape)}", where="loss mse"
        )
    # (n,) targets against (n, 1) outputs must not broadcast to (n, n).
    difference = outputs - targets.reshape(outputs.shape).to(outputs.dtype)
    return difference.square().reshape(len(outputs), -1).sum(1)


def _softmax_loss(outputs: Tensor, targets: Tensor, classes_last: bool) -> Tensor:
    if outputs.ndim == 2 and not targets.is_floating_point():
        return negative_log_probability(outputs, targets)
    logits = logits_by_position(outputs, classes_last)
    placed, weights = _targets_by_position(outputs, targets, classes_last)
    if placed.is_floating_point():
        if logits.device.type != "mps":  # the derivative is a difference of two probabilities
            logits = logits.double()
        return -(torch.log_softmax(logits, 2) * placed).sum((1, 2)) / logits.shape[1]
    return (negative_log_probability(logits, placed) * weights).sum(1)


def negative_log_probability(logits: Tensor, classes: Tensor) -> Tensor:
    """−log p of a class under the softmax of its logits (…, C), as log(1 + exp(log Σ exp of the others − own)).

    The derivative of log p by its own logit is 1 − p, which has no digit left in float32 where a network is sure of its
    class; written like this nothing is subtracted from one.
    """
    labels = classes[..., None]
    others = logits.scatter(-1, labels, -torch.inf).logsumexp(-1)
    return functional.softplus(others - logits.gather(-1, labels).squeeze(-1), threshold=LARGE)


def are_log_probabilities(outputs: Tensor, tolerance: float = 1e-3) -> bool:
    """True if the outputs of every sample are logarithms of probabilities that add up to one."""
    totals = outputs.detach().double().logsumexp(-1)
    return bool(totals.abs().max() <= tolerance)


def logits_by_position(outputs: Tensor, classes_last: bool) -> Tensor:
    """Outputs as (n, P, C)."""
    if outputs.ndim == 2:
        return outputs[:, None, :]
    return outputs.flatten(1, -2) if classes_last else outputs.flatten(2).mT


def _targets_by_position(outputs: Tensor, targets: Tensor, classes_last: bool) -> tuple[Tensor, Tensor]:
    """Targets by position, (n, P) class numbers or (n, P, C) probabilities, and weights (n, P)."""
    if targets.is_floating_point():
        placed = logits_by_position(targets.to(outputs.dtype), classes_last)
        return placed, placed.sum(2) / placed.shape[1]  # rows that sum to 1 but for rounding
    placed = targets.reshape(len(targets), -1)
    counted = placed != IGNORED
    weights = counted.to(outputs.dtype) / counted.sum(1, keepdim=True).clamp_min(1)
    return placed.where(counted, 0), weights


def _weight_of_each_label(outputs: Tensor) -> Tensor:
    """1 for each label, shared by the positions of (n, labels, positions …): (n, P)."""
    flat = outputs.reshape(len(outputs), -1)
    return torch.full_like(flat, 1 / outputs[0, 0].numel() if outputs.ndim > 2 else 1.0)


def _cross_entropy_fix(outputs: Tensor, targets: Tensor) -> str:
    if outputs.ndim == 3 and targets.shape == outputs.shape[:2]:
        return 'For outputs (n, T, classes), as of language models, use loss="next_token"'
    if targets.shape == outputs.shape:
        return 'Give probabilities as floats, y.float(); for labels that do not exclude each other use loss="bce"'
    if targets.shape == (len(outputs), 1):
        return "Take the column out: y[:, 0].long()"
    return "For other shapes pass your own loss function giving one value per sample"


def _dtype_in_words(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


ALSO_CALLED = {"ce": "cross_entropy", "nll": "cross_entropy", "lm": "next_token", "binary": "bce", "l2": "mse"}
LOSSES = {
    "cross_entropy": Loss("cross_entropy", cross_entropy, "softmax"),
    "next_token": Loss("next_token", next_token, "softmax"),
    "bce": Loss("bce", binary_cross_entropy, "logistic"),
    "mse": Loss("mse", squared_error, "squared"),
}

SUM_OF_ONE = 1e-3  # how far the probabilities of a sample may be from a sum of 1
