"""What the targets of a problem are: class numbers, probabilities, labels that are 0 or 1, other numbers.

Found in one pass over the data, and held against what the loss can take.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.loss import IGNORED, Loss, next_tokens
from flatscope.samples import Inputs

SUM_OF_ONE = 1e-3  # how far the probabilities of a sample may be from a sum of 1


@dataclass
class TargetLook:
    """What the targets of one set of samples have in common.

    Attributes:
        where: how messages call the set.
        dtype: of the targets.
        shape: of one sample's targets, in the last batch.
        low: the least of those that count.
        high: the largest of those that count.
        binary: whether all are 0 or 1.
        one_hot: whether every sample is a vector of zeros with a single 1.
        probabilities: whether every sample is a vector (or, along its first dimension, many) of probabilities.
        uncounted: whether some sample has nothing but −100, so that its loss is the mean of nothing.
    """

    where: str
    dtype: torch.dtype = torch.int64
    shape: tuple[int, ...] = ()
    low: float = math.inf
    high: float = -math.inf
    binary: bool = True
    one_hot: bool = True
    probabilities: bool = True
    uncounted: bool = False

    @property
    def whole_numbers(self) -> bool:
        """Whether they may be class numbers by their dtype."""
        return not self.dtype.is_floating_point and self.dtype != torch.bool

    def add(self, targets: Tensor) -> None:
        """Look at one batch."""
        self.dtype, self.shape = targets.dtype, tuple(targets.shape[1:])
        counted = targets[targets != IGNORED] if self.whole_numbers else targets
        if counted.numel():
            self.low, self.high = min(self.low, float(counted.min())), max(self.high, float(counted.max()))
        if self.whole_numbers and counted.numel() < targets.numel():
            self.uncounted |= bool((targets == IGNORED).reshape(len(targets), -1).all(1).any())
        self.binary = self.binary and bool(((counted == 0) | (counted == 1)).all())
        vectors = targets.ndim > 1 and targets.shape[1] > 1
        sums = targets.double().sum(1) if vectors else targets
        self.one_hot = self.one_hot and vectors and targets.ndim == 2 and self.binary and bool((sums == 1).all())
        self.probabilities = self.probabilities and vectors and self.dtype.is_floating_point and self.low >= 0
        self.probabilities = self.probabilities and bool(((sums - 1).abs() <= SUM_OF_ONE).all())


def are_one_hot(loss: Loss, output_shape: torch.Size, looks: list[TargetLook]) -> bool:
    """Whether all targets are one-hot vectors, as many entries as there are outputs: class numbers in other words."""
    shaped = all(look.shape == output_shape[1:] and look.one_hot for look in looks)
    return loss.name in ("cross_entropy", "mse") and len(output_shape) == 2 and shaped


def check_targets(loss: Loss, output_shape: torch.Size, look: TargetLook) -> None:
    """Refuse what a loss of ours cannot take; what a user's own loss takes is known to the user alone."""
    if loss.kind == "softmax":
        _check_softmax(loss, output_shape, look)
    elif loss.kind == "logistic" and not (look.low >= 0 and look.high <= 1):
        raise InputError(
            "targets 0 or 1 (or probabilities)",
            f"targets from {look.low:g} to {look.high:g}",
            where=look.where,
            fix='Labels -1 and 1 become (y + 1) / 2; for class numbers use loss="cross_entropy"',
        )


def _check_softmax(loss: Loss, output_shape: torch.Size, look: TargetLook) -> None:
    if len(output_shape) < 2 or (loss.name == "cross_entropy" and output_shape[1] < 2):
        return  # the loss itself says what is wrong with such outputs
    soft = look.dtype.is_floating_point and look.shape == tuple(output_shape[1:]) and loss.name == "cross_entropy"
    if soft:
        if not look.probabilities:
            raise InputError(
                "probabilities of the classes (none negative, a sum of 1) as float targets of the outputs' shape",
                f"targets from {look.low:g} to {look.high:g} with other sums",
                where=look.where,
                fix='Labels that do not exclude each other take loss="bce", regression takes loss="mse"',
            )
        return
    if not look.whole_numbers:
        raise InputError(
            "class numbers (integers)",
            f"{str(look.dtype).removeprefix('torch.')} targets",
            where=look.where,
            fix='Convert them with y.long(), or take loss="mse" (on the command line --loss mse) for regression',
        )
    if look.uncounted:
        raise InputError(
            "at least one target that counts in every sample",
            f"a sample with nothing but {IGNORED}",
            where=look.where,
            fix="Leave such samples out: their loss would be the mean of nothing",
        )
    classes_last = loss.name == "next_token"
    as_of_tokens = not classes_last and look.shape == output_shape[1:-1] != output_shape[2:]
    if len(look.shape) != len(output_shape) - 2 or as_of_tokens:
        return  # again the loss says more
    _check_range(output_shape[-1 if classes_last else 1], look)


def _check_range(classes: int, look: TargetLook) -> None:
    if look.low < 0 or look.high >= classes:
        raise InputError(
            f"labels from 0 to {classes - 1} (the model has {classes} outputs)",
            f"labels from {look.low:g} to {look.high:g}",
            where=look.where,
            fix="Number the classes from 0, or give the model as many outputs as there are classes",
        )


def check_next_tokens(inputs: Inputs, targets: Tensor) -> None:
    """Refuse targets of "next_token" that are the tokens of the text themselves, not yet moved by one."""
    tokens = inputs.get("input_ids") if isinstance(inputs, dict) else inputs
    if not isinstance(tokens, Tensor) or tokens.shape != targets.shape or tokens.is_floating_point():
        return
    counted = targets != IGNORED
    moved = next_tokens(tokens)
    both = counted & (moved != IGNORED)  # where one token follows itself again and again, nothing can be told
    if bool((tokens == targets)[counted].all()) and not bool((moved == targets)[both].all()):
        raise InputError(
            "the next token at every position as targets",
            "the tokens of the inputs themselves",
            where="train, loss next_token",
            fix="Move them by one in the data function: flatscope.loss.next_tokens(labels)",
        )


def missing_classes(loss: Loss, outputs: Tensor, looks: list[TargetLook], one_hot: bool) -> str:
    """Why error and margins have no meaning here; empty where every sample has one class."""
    if loss.kind == "logistic":
        if outputs[0].numel() > 1:
            return "needs one class per sample; with bce on several logits, every sample has several labels"
        return "" if all(look.binary for look in looks) else "needs targets 0 or 1; these are probabilities"
    if loss.kind == "softmax" and outputs.ndim > 2:
        return "needs one class per sample; here every sample has many targets (pixels or tokens)"
    if loss.kind == "softmax" and not one_hot and looks[0].dtype.is_floating_point:
        return "needs one class per sample; the targets are probabilities"
    numbered = one_hot or all(look.whole_numbers and look.shape == () for look in looks)
    if outputs.ndim != 2 or outputs.shape[1] < 2 or not numbered:
        return "needs class labels and at least two outputs"
    if one_hot:
        return ""
    if loss.kind == "squared":
        for look in looks:
            _check_range(outputs.shape[1], look)
    # What other integers mean (a word to ignore, a count) is known to the user's own loss alone.
    in_range = all(look.low >= 0 and look.high < outputs.shape[1] and not look.uncounted for look in looks)
    return "" if in_range else "needs class labels from 0 up, below the number of outputs"
