"""Checks of the targets that a loss is given: which they are, and which it cannot take."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.loss import IGNORED, SUM_OF_ONE, Loss, next_tokens
from flatscope.samples import Inputs


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


def targets_are_unshifted_tokens(inputs: Inputs, targets: Tensor) -> bool:
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
    fix = "Move them by one in the data function: flatscope.inputs.next_tokens(labels)"
    got = "the tokens of the inputs themselves"
    raise InputError("the next token at every position as targets", got, "train, loss next_token", fix)


def reason_without_classes(loss: Loss, outputs: Tensor, looks: list[TargetLook], one_hot: bool) -> str:
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
    return "" if one_hot else _reason_outside_range(loss, outputs.shape[1], looks)


def _reason_outside_range(loss: Loss, n_outputs: int, looks: list[TargetLook]) -> str:
    """The reason why whole numbers are no classes of these outputs; empty where they are."""
    for look in looks if loss.kind == "squared" else ():
        _check_range(n_outputs, look)
    # What other integers mean (a word to ignore, a count) is known to the user's own loss alone.
    in_range = all(look.low >= 0 and look.high < n_outputs and not look.uncounted for look in looks)
    return "" if in_range else "needs class labels from 0 up, below the number of outputs"
