"""Losses of torch, taken as they are: modules such as `nn.CrossEntropyLoss(weight=…)` and their functions.

torch reduces over everything at once; flatscope needs one value for each sample, of which the mean over all training
samples is what torch gives for all of them in one batch. Where torch divides by a sum of weights (of classes, of what
is not ignored), the values are divided by its mean over the training samples.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError
from flatscope.loss import LOSSES, Loss, are_log_probabilities, as_loss, logits_by_position, negative_log_probability
from flatscope.samples import Batch

# Functions of torch and the modules that hold their options.
MODULES: dict[Callable[..., Any], type[nn.Module]] = {
    functional.cross_entropy: nn.CrossEntropyLoss,
    functional.nll_loss: nn.NLLLoss,
    functional.binary_cross_entropy_with_logits: nn.BCEWithLogitsLoss,
    functional.binary_cross_entropy: nn.BCELoss,
    functional.mse_loss: nn.MSELoss,
    functional.l1_loss: nn.L1Loss,
    functional.smooth_l1_loss: nn.SmoothL1Loss,
    functional.huber_loss: nn.HuberLoss,
    functional.poisson_nll_loss: nn.PoissonNLLLoss,
    functional.kl_div: nn.KLDivLoss,
    functional.soft_margin_loss: nn.SoftMarginLoss,
    functional.multi_margin_loss: nn.MultiMarginLoss,
    functional.multilabel_soft_margin_loss: nn.MultiLabelSoftMarginLoss,
}
# Losses of as many targets as outputs, entry by entry.
BY_ENTRY = (nn.BCELoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.PoissonNLLLoss, nn.SoftMarginLoss)
AVERAGED_LABELS = "bce averaged over labels"
ONE_ENTRY = {"MSELoss": "mse", AVERAGED_LABELS: "bce"}
UNNORMALISED = 1e-5  # log-probabilities in float32 add up to one within this
REDUCTIONS = ("mean", "sum", "none", "batchmean")


def read_loss(given: Any) -> Loss:
    """The loss by name, of torch, or the user's function of (outputs, targets) giving one value per sample."""
    if isinstance(given, type) and issubclass(given, nn.Module):
        given = given()
    call, options = (given.func, given.keywords) if isinstance(given, partial) else (given, {})
    if not isinstance(call, nn.Module) and _is_known_loss(call) and not getattr(given, "args", ()):
        given = _loss_module(call, options)
    if not isinstance(given, nn.Module) or not hasattr(given, "reduction"):
        return as_loss(given)
    if given.reduction not in REDUCTIONS:
        raise InputError(f"a reduction of {', '.join(REDUCTIONS)}", repr(given.reduction), "loss")
    if any(True for _ in given.parameters()):
        fix = "Make them parameters of the model, or buffers of the loss"
        raise InputError("a loss without parameters of its own", type(given).__name__, "loss", fix)
    module = copy.deepcopy(given).eval()
    if type(module) is nn.CrossEntropyLoss:
        return _cross_entropy_loss(module)
    if type(module) is nn.BCEWithLogitsLoss:
        return _logistic_loss(module)
    return _loss_of_module(module)


def _is_known_loss(call: Any) -> bool:
    try:
        return call in MODULES
    except TypeError:  # not hashable
        return False


def _loss_module(call: Callable[..., Any], options: dict[str, Any]) -> nn.Module:
    kind = MODULES[call]
    accepted = inspect.signature(kind).parameters
    if unknown := [name for name in options if name not in accepted]:
        raise InputError(f"options of {kind.__name__}: {', '.join(accepted)}", ", ".join(unknown), "loss")
    return kind(**options)


def loss_with_normaliser(loss: Loss, batches: Iterable[Batch], entries: int = 0) -> Loss:
    """The loss with what it divides by, once the targets of all training samples are known.

    Args:
        loss: any loss; one that divides by the number of samples is given back as it is.
        batches: one pass over the training samples.
        entries: outputs of a sample: of a single one, a mean over outputs is their sum, which has a name.
    """
    if entries == 1 and loss.name in ONE_ENTRY:
        return LOSSES[ONE_ENTRY[loss.name]]
    if loss.counted is None:
        return loss
    try:
        counts = torch.cat([loss.counted(targets).double().cpu() for _, targets in batches])
    except IndexError as problem:
        raise InputError("a weight for each class", "fewer than there are classes", f"loss {loss.name}") from problem
    if not counts.sum() > 0:
        got = f"{float(counts.sum()):g}"
        raise InputError("targets that count, with weights of a positive sum", got, f"train, loss {loss.name}")
    if loss.name == "cross_entropy" and bool((counts == counts[0]).all()):
        return LOSSES["cross_entropy"]  # every sample counts alike: the mean over samples of the means over positions
    return replace(loss, divisor=float(counts.mean()))


def loss_for_outputs(loss: Loss, outputs: Tensor) -> Loss:
    """The loss, as cross-entropy where it is torch's `NLLLoss` of log-probabilities.

    Both have the same values. `NLLLoss` is linear in the outputs, so that its own Gauss-Newton matrix is zero.

    Args:
        loss: any loss.
        outputs: of some samples.
    """
    same = loss.of_log_probabilities
    if same is None or outputs.ndim < 2 or not are_log_probabilities(outputs.movedim(1, -1), UNNORMALISED):
        return loss
    return same


def _cross_entropy_loss(module: nn.CrossEntropyLoss) -> Loss:
    """Of a softmax: weights of classes, smoothing, ignored targets."""
    weight, smoothing, ignored = module.weight, float(module.label_smoothing), int(module.ignore_index)

    def refuse_weight(outputs: Tensor) -> None:
        if weight is not None and len(weight) != outputs.shape[1]:
            got = f"{len(weight)} of them"
            raise InputError(f"a weight for each of the {outputs.shape[1]} classes", got, "loss CrossEntropyLoss")

    def goals(outputs: Tensor, targets: Tensor) -> Tensor:
        """The distribution that each position should have, times the weights of the classes: (n, P, C)."""
        classes = outputs.shape[1]
        soft = targets.is_floating_point()
        goal = logits_by_position(targets, False) if soft else _one_hot(targets, classes, ignored)
        counts = 1.0 if soft else (targets.reshape(len(targets), -1) != ignored)[..., None]
        goal = ((1 - smoothing) * goal.to(outputs) + smoothing / classes) * counts
        return goal if weight is None else goal * weight.to(outputs)

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        _check_shapes(outputs, targets)
        refuse_weight(outputs)
        logits = logits_by_position(outputs, False)
        if smoothing or targets.is_floating_point():
            logits = logits if logits.device.type == "mps" else logits.double()
            return -(torch.log_softmax(logits, 2) * goals(outputs, targets)).sum((1, 2))
        placed = targets.reshape(len(targets), -1)
        kept = placed != ignored
        placed = placed.where(kept, 0)
        each = negative_log_probability(logits, placed) * kept
        return (each if weight is None else each * weight.to(outputs)[placed]).sum(1)

    name = "cross_entropy"
    if options := [
        *([f"{len(weight)} class weights"] if weight is not None else []),
        *([f"label smoothing {smoothing:g}"] if smoothing else []),
        *([f"class {ignored} ignored"] if ignored != LOSSES[name].ignored else []),
    ]:
        name += f" with {', '.join(options)}"
    loss = Loss(name, values, "softmax", masses=lambda o, t: goals(o, t).sum(2), ignored=ignored)
    if module.reduction == "sum":
        return replace(loss, name=f"{name}, summed for each sample", remark=_summed_loss_name("CrossEntropyLoss"))
    divided = "divided by the mean weight of the training samples, as torch does of all in one batch"
    remark = f"CrossEntropyLoss with class weights: {divided}" if weight is not None else ""
    return replace(loss, counted=partial(_weights_of_targets, weight=weight, ignored=ignored), remark=remark)


def _one_hot(targets: Tensor, classes: int, ignored: int) -> Tensor:
    placed = targets.reshape(len(targets), -1)
    numbers = torch.arange(classes, device=targets.device)
    return placed.where(placed != ignored, 0)[..., None] == numbers


def _weights_of_targets(targets: Tensor, weight: Tensor | None, ignored: int) -> Tensor:
    """Sums of the weights of each sample's targets, as torch counts them: class probabilities count whole, (n,)."""
    if targets.is_floating_point():
        positions = targets[0, 0].numel() if targets.ndim > 2 else 1
        return torch.full((len(targets),), float(positions), dtype=torch.float64)
    placed = targets.reshape(len(targets), -1)
    counted = placed != ignored
    each = (
        counted.double() if weight is None else weight.to(targets.device).double()[placed.where(counted, 0)] * counted
    )
    return each.sum(1)


def _check_shapes(outputs: Tensor, targets: Tensor) -> None:
    soft = targets.shape == outputs.shape and targets.is_floating_point()
    if outputs.ndim < 2 or (not soft and targets.shape != (len(outputs), *outputs.shape[2:])):
        LOSSES["cross_entropy"].function(outputs, targets)  # which says what is wrong


def _logistic_loss(module: nn.BCEWithLogitsLoss) -> Loss:
    """Of sigmoids: weights of entries and of positive labels."""
    weight, positive = module.weight, module.pos_weight

    def masses(outputs: Tensor, targets: Tensor) -> Tensor:
        chance = _targets_as_outputs(targets, outputs)
        masses = torch.ones_like(outputs) if positive is None else chance * positive.to(outputs) + (1 - chance)
        if weight is not None:
            masses = masses * weight.to(outputs)
        return (masses * share(outputs)).reshape(len(outputs), -1)

    def share(outputs: Tensor) -> float:
        return 1.0 if module.reduction == "sum" else 1.0 / max(outputs[0].numel(), 1)

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        chance, sure = _targets_as_outputs(targets, outputs), 1.0 if positive is None else positive.to(outputs)
        losses = -chance * sure * functional.logsigmoid(outputs) - (1 - chance) * functional.logsigmoid(-outputs)
        if weight is not None:
            losses = losses * weight.to(outputs)
        return (losses * share(outputs)).reshape(len(outputs), -1).sum(1)

    options = [f"{what} weights" for what, given in (("positive", positive), ("entry", weight)) if given is not None]
    name = f"bce with {' and '.join(options)}" if options else AVERAGED_LABELS
    many = 'BCEWithLogitsLoss is the mean over the labels of a sample; "bce" is their sum'
    loss = Loss(name, values, "logistic", masses=masses, entries_remark=many)
    return replace(loss, remark=_summed_loss_name("BCEWithLogitsLoss")) if module.reduction == "sum" else loss


def _loss_of_module(module: nn.Module) -> Loss:
    """Of any other loss with a reduction: its values entry by entry, averaged or summed for each sample."""
    kind, reduction = type(module).__name__, str(module.reduction)
    vars(module)["reduction"] = "none"
    weight = module.weight if isinstance(module, nn.NLLLoss) else None

    def values(outputs: Tensor, targets: Tensor) -> Tensor:
        given = _targets_as_outputs(targets, outputs) if isinstance(module, BY_ENTRY) else targets
        losses: Tensor = module.to(outputs.device)(outputs, given)
        if losses.ndim == 0 or len(losses) != len(outputs):
            return losses  # the loss itself says what is wrong with it
        flat = losses.reshape(len(outputs), -1)
        return flat.mean(1) if reduction == "mean" and not isinstance(module, nn.NLLLoss) else flat.sum(1)

    many = ""
    if kind == "MSELoss":
        many = 'MSELoss is the mean over the outputs of a sample; "mse" is their sum'
        if reduction == "sum":
            return replace(LOSSES["mse"], remark=_summed_loss_name(kind))
    loss = Loss(kind, values, entries_remark=many)
    if isinstance(module, nn.NLLLoss):
        ignored = int(module.ignore_index)
        same = _cross_entropy_loss(nn.CrossEntropyLoss(weight, ignore_index=ignored, reduction=reduction))
        loss = replace(loss, of_log_probabilities=same)
        if reduction != "sum":
            return replace(loss, counted=partial(_weights_of_targets, weight=weight, ignored=ignored))
    return replace(loss, remark=_summed_loss_name(kind)) if reduction == "sum" else loss


def _targets_as_outputs(targets: Tensor, outputs: Tensor) -> Tensor:
    """Targets in the shape of the outputs: (n,) against (n, 1) must not broadcast to (n, n)."""
    if targets.numel() != outputs.numel():
        raise InputError(f"targets of the outputs' shape {tuple(outputs.shape)}", f"{tuple(targets.shape)}", "loss")
    return targets.reshape(outputs.shape).to(outputs.dtype)


def _summed_loss_name(kind: str) -> str:
    read = "is read as a sum for each sample, averaged over samples"
    return f"{kind} with reduction='sum' {read}: without the factor n"


def reading_remarks(loss: Loss, outputs: Tensor) -> tuple[str, ...]:
    """Remarks on how a loss of torch was read, given outputs of some samples."""
    entries = outputs[0].numel()
    many = f"{loss.entries_remark}, {entries} times as much" if loss.entries_remark and entries > 1 else ""
    return tuple(filter(None, (loss.remark, many)))
