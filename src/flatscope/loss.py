"""The loss of one sample: softmax, logistic or squared error by name, or a function of the user's; targets it takes.

A named loss of one sample is a weighted sum over its *positions*: one for a classifier, the pixels of a segmentation,
the tokens of a text, the labels of a multi-label classifier. Each position has its own logits, so the Hessian with
respect to the outputs is block-diagonal, and each block is known in closed form.

What the targets of a problem are (class numbers, probabilities, labels 0 or 1, other numbers) is found in one pass over
the data and held against what the loss can take.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.errors import InputError, refuse_unknown
from flatscope.samples import Inputs

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
    remark: str = ""  # what to say of how it was read
    entries_remark: str = ""  # what to say where a sample has several entries

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Losses of shape (n,)."""
        if self.in_double and outputs.dtype == torch.float32:
            outputs, targets = outputs.double(), targets.double() if targets.is_floating_point() else targets
        values = self.function(outputs, targets)
        if not isinstance(values, Tensor) or values.shape != (len(outputs),):
            found = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else type(values).__name__
            fix = f"Use reduction='none' and sum over everything but the samples, or name one of {', '.join(LOSSES)}"
            if isinstance(values, Tensor) and values.ndim == 0:
                each = "leave out the mean over samples, loss.flatten(1).mean(1) in place of loss.mean()"
                fix = f"Use reduction='none', or {each}, or name one of {', '.join(LOSSES)}"
            raise InputError(f"one loss per sample, shape ({len(outputs)},)", found, f"loss {self.name}", fix)
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
            return outputs.reshape(len(outputs), -1), _label_weights(outputs)
        if self.kind != "softmax":
            raise InputError("a softmax or logistic loss", self.name, where="positions of a loss")
        classes_last = self.name == "next_token"
        return logits_by_position(outputs, classes_last), _place(outputs, targets, classes_last)[1]

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
        got = f"outputs {tuple(outputs.shape)} and {_dtype_text(targets)} targets {tuple(targets.shape)}"
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
        got = f"{_dtype_text(targets)} targets {tuple(targets.shape)}"
        fix = 'For class numbers of several classes use loss="cross_entropy"' if several else "One target per logit"
        raise InputError(f"targets 0 or 1 of the outputs' shape {tuple(outputs.shape)}", got, "loss bce", fix)
    chance = targets.reshape(outputs.shape).to(outputs.dtype)
    # Both logarithms: (1 - t) z - log σ(z) would lose the digits of sure samples.
    values = -chance * functional.logsigmoid(outputs) - (1 - chance) * functional.logsigmoid(-outputs)
    return (values.reshape(len(outputs), -1) * _label_weights(outputs)).sum(1)


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
        return surprise(outputs, targets)
    logits = logits_by_position(outputs, classes_last)
    placed, weights = _place(outputs, targets, classes_last)
    if placed.is_floating_point():
        if logits.device.type != "mps":  # the derivative is a difference of two probabilities
            logits = logits.double()
        return -(torch.log_softmax(logits, 2) * placed).sum((1, 2)) / logits.shape[1]
    return (surprise(logits, placed) * weights).sum(1)


def surprise(logits: Tensor, classes: Tensor) -> Tensor:
    """−log p of a class under the softmax of its logits (…, C), as log(1 + exp(log Σ exp of the others − own)).

    The derivative of log p by its own logit is 1 − p, which has no digit left in float32 where a network is sure of its
    class; written like this nothing is subtracted from one.
    """
    own = classes[..., None]
    others = logits.scatter(-1, own, -torch.inf).logsumexp(-1)
    return functional.softplus(others - logits.gather(-1, own).squeeze(-1), threshold=LARGE)


def logits_by_position(outputs: Tensor, classes_last: bool) -> Tensor:
    """Outputs as (n, P, C)."""
    if outputs.ndim == 2:
        return outputs[:, None, :]
    return outputs.flatten(1, -2) if classes_last else outputs.flatten(2).mT


def _place(outputs: Tensor, targets: Tensor, classes_last: bool) -> tuple[Tensor, Tensor]:
    """Targets by position, (n, P) class numbers or (n, P, C) probabilities, and weights (n, P)."""
    if targets.is_floating_point():
        placed = logits_by_position(targets.to(outputs.dtype), classes_last)
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
    if targets.shape == (len(outputs), 1):
        return "Take the column out: y[:, 0].long()"
    return "For other shapes pass your own loss function giving one value per sample"


def _dtype_text(value: Tensor) -> str:
    return str(value.dtype).removeprefix("torch.")


ALSO_CALLED = {"ce": "cross_entropy", "nll": "cross_entropy", "lm": "next_token", "binary": "bce", "l2": "mse"}
LOSSES = {
    "cross_entropy": Loss("cross_entropy", cross_entropy, "softmax"),
    "next_token": Loss("next_token", next_token, "softmax"),
    "bce": Loss("bce", binary_cross_entropy, "logistic"),
    "mse": Loss("mse", squared_error, "squared"),
}

SUM_OF_ONE = 1e-3  # how far the probabilities of a sample may be from a sum of 1


@dataclass
class TargetLook:
    """Properties that all targets of one set of samples have in common."""

    where: str  # how messages call the set
    ignored: int = IGNORED  # the class number of those that do not count
    dtype: torch.dtype = torch.int64  # of the targets
    shape: tuple[int, ...] = ()  # of one sample's targets, in the last batch
    low: float = math.inf  # the least of those that count
    high: float = -math.inf  # the largest of those that count
    binary: bool = True  # whether all are 0 or 1
    one_hot: bool = True  # whether every sample is a vector of zeros with a single 1
    probabilities: bool = True  # whether every sample is a vector of probabilities, or along its first dimension many
    uncounted: bool = False  # whether some sample has nothing but ignored ones, so that its loss is the mean of nothing

    @property
    def whole_numbers(self) -> bool:
        """True if they may be class numbers by their dtype."""
        return not self.dtype.is_floating_point and self.dtype != torch.bool

    def add(self, targets: Tensor) -> None:
        """Look at one batch."""
        self.dtype, self.shape = targets.dtype, tuple(targets.shape[1:])
        counted = targets[targets != self.ignored] if self.whole_numbers else targets
        if counted.numel():
            self.low, self.high = min(self.low, float(counted.min())), max(self.high, float(counted.max()))
        if self.whole_numbers and counted.numel() < targets.numel():
            self.uncounted |= bool((targets == self.ignored).reshape(len(targets), -1).all(1).any())
        self.binary = self.binary and bool(((counted == 0) | (counted == 1)).all())
        vectors = targets.ndim > 1 and targets.shape[1] > 1
        sums = targets.double().sum(1) if vectors else targets
        self.one_hot = self.one_hot and vectors and targets.ndim == 2 and self.binary and bool((sums == 1).all())
        self.probabilities = self.probabilities and vectors and self.dtype.is_floating_point and self.low >= 0
        self.probabilities = self.probabilities and bool(((sums - 1).abs() <= SUM_OF_ONE).all())


def are_one_hot(loss: Loss, output_shape: torch.Size, looks: list[TargetLook]) -> bool:
    """True if all targets are one-hot vectors, as many entries as there are outputs: class numbers in other words."""
    shaped = all(look.shape == output_shape[1:] and look.one_hot for look in looks)
    return loss.name in ("cross_entropy", "mse") and len(output_shape) == 2 and shaped


def check_targets(loss: Loss, output_shape: torch.Size, look: TargetLook) -> None:
    """Refuse what a loss of ours cannot take; what a user's own loss takes is known to the user alone."""
    if loss.kind == "softmax":
        _check_softmax(loss, output_shape, look)
    elif loss.kind == "logistic" and not (look.low >= 0 and look.high <= 1):
        got = f"targets from {look.low:g} to {look.high:g}"
        fix = 'Labels -1 and 1 become (y + 1) / 2; for class numbers use loss="cross_entropy"'
        raise InputError("targets 0 or 1 (or probabilities)", got, look.where, fix)


def _check_softmax(loss: Loss, output_shape: torch.Size, look: TargetLook) -> None:
    if len(output_shape) < 2 or (loss.name == "cross_entropy" and output_shape[1] < 2):
        return  # the loss itself says what is wrong with such outputs
    soft = look.dtype.is_floating_point and look.shape == tuple(output_shape[1:]) and loss.name != "next_token"
    if soft:
        if not look.probabilities:
            expected = "probabilities of the classes (none negative, a sum of 1) as float targets of the outputs' shape"
            fix = 'Labels that do not exclude each other take loss="bce", regression takes loss="mse"'
            raise InputError(expected, f"targets from {look.low:g} to {look.high:g} with other sums", look.where, fix)
        return
    if not look.whole_numbers:
        got = f"{str(look.dtype).removeprefix('torch.')} targets"
        fix = 'Convert them with y.long(), or take loss="mse" (on the command line --loss mse) for regression'
        raise InputError("class numbers (integers)", got, look.where, fix)
    if look.uncounted and loss.counted is None:
        got = f"a sample with nothing but {IGNORED}"
        fix = "Leave such samples out: their loss would be the mean of nothing"
        raise InputError("at least one target that counts in every sample", got, look.where, fix)
    classes_last = loss.name == "next_token"
    as_of_tokens = not classes_last and look.shape == output_shape[1:-1] != output_shape[2:]
    if len(look.shape) != len(output_shape) - 2 or as_of_tokens:
        return  # again the loss says more
    _check_range(output_shape[-1 if classes_last else 1], look)


def _check_range(classes: int, look: TargetLook) -> None:
    if look.low < 0 or look.high >= classes:
        got = f"labels from {look.low:g} to {look.high:g}"
        fix = "Number the classes from 0, or give the model as many outputs as there are classes"
        raise InputError(f"labels from 0 to {classes - 1} (the model has {classes} outputs)", got, look.where, fix)


def are_unmoved(inputs: Inputs, targets: Tensor) -> bool:
    """True if targets of "next_token" are the tokens of the text themselves, as Hugging Face has its labels.

    With labels by name among named inputs they are moved by one, as its models do; others are refused.
    """
    # What the outputs stand behind: the encoder of a text may well read what is to be said.
    tokens = inputs.get("decoder_input_ids", inputs.get("input_ids")) if isinstance(inputs, dict) else inputs
    if not isinstance(tokens, Tensor) or tokens.shape != targets.shape or tokens.is_floating_point():
        return False
    counted, moved = targets != IGNORED, next_tokens(tokens)
    both = counted & (moved != IGNORED)  # where one token follows itself again and again, nothing can be told
    if not bool((tokens == targets)[counted].all()) or bool((moved == targets)[both].all()):
        return False
    if isinstance(inputs, dict) and "decoder_input_ids" not in inputs:
        return True
    fix = "Move them by one in the data function: flatscope.loss.next_tokens(labels)"
    got = "the tokens of the inputs themselves"
    raise InputError("the next token at every position as targets", got, "train, loss next_token", fix)


def missing_classes(loss: Loss, outputs: Tensor, looks: list[TargetLook], one_hot: bool) -> str:
    """Why error and margins have no meaning here; empty where every sample has one class."""
    if loss.kind == "logistic":
        if outputs[0].numel() > 1:
            return "needs one class per sample; with bce on several logits, every sample has several labels"
        return "" if all(look.binary for look in looks) else "needs targets 0 or 1; these are probabilities"
    if loss.kind == "softmax":
        if outputs.ndim > 2:
            return "needs one class per sample; here every sample has many targets (pixels or tokens)"
        if not one_hot and looks[0].dtype.is_floating_point:
            return "needs one class per sample; the targets are probabilities"
    numbered = one_hot or all(look.whole_numbers and look.shape == () for look in looks)
    if outputs.ndim != 2 or outputs.shape[1] < 2 or not numbered:
        return "needs class labels and at least two outputs"
    return "" if one_hot else _outside_range(loss, outputs.shape[1], looks)


def _outside_range(loss: Loss, n_outputs: int, looks: list[TargetLook]) -> str:
    """The reason why whole numbers are no classes of these outputs; empty where they are."""
    for look in looks if loss.kind == "squared" else ():
        _check_range(n_outputs, look)
    # What other integers mean (a word to ignore, a count) is known to the user's own loss alone.
    in_range = all(look.low >= 0 and look.high < n_outputs and not look.uncounted for look in looks)
    return "" if in_range else "needs class labels from 0 up, below the number of outputs"
