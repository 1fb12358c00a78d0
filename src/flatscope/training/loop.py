"""Plain SGD on data that fit in memory: stop rules, history, checkpoints, the same bits after a resume."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.errors import InputError
from flatscope.progress import Advance, progress
from flatscope.training.checkpoint import (
    TrainConfig,
    TrainingState,
    epoch_order,
    fingerprint,
    learning_rate,
    prepare_folder,
    resume,
    stream_seed,
    write_checkpoint,
)
from flatscope.training.initialization import private_randomness

__all__ = ["TrainConfig", "TrainResult", "TrainingInterrupted", "epoch_order", "evaluate", "learning_rate", "train"]

EVALUATION_BATCH = 500
BAR_SECONDS = 0.25  # between two updates of the progress bar within an epoch
CROP_PADDING = 4
COLUMNS = (
    "epoch",
    "lr",
    "train_loss",
    "train_error",
    "test_loss",
    "test_error",
    "gradient_norm",
    "distance",
    "seconds",
)

Pair = tuple[Tensor, Tensor]
AfterEpoch = Callable[[int, nn.Module], None]


@dataclass(frozen=True)
class TrainResult:
    """A finished, stopped or diverged run.

    Attributes:
        model: the very module that was passed in, trained in place and left in eval mode.
        history: one row per evaluated epoch: `epoch` (finished so far), `lr` (used in it), `train_loss`,
            `train_error`, `test_loss`, `test_error` (eval mode, whole sets; NaN where there is no test set or
            no classes), `gradient_norm` (only with `stop_gradient_norm`), `distance` ‖w − w₀‖ over all
            trained parameters, which is the accumulated update of Zhang et al. (2017), eq. 15, and `seconds`
            in all.
        stopped_by: "loss", "zero_error", "gradient_norm", "epochs", "diverged" or "interrupted".
        config: the settings used.
        epochs: how many epochs were finished.
        resumed_from: the epoch at which a checkpoint was taken up; 0 for a fresh start.
    """

    model: nn.Module
    history: pd.DataFrame
    stopped_by: str
    config: TrainConfig
    epochs: int
    resumed_from: int = 0

    @property
    def diverged(self) -> bool:
        """Whether a loss or weight stopped being finite; the model then holds those weights."""
        return self.stopped_by == "diverged"


class TrainingInterrupted(KeyboardInterrupt):
    """Ctrl-C during `train`: still a KeyboardInterrupt, so that scripts stop, with what was reached in `result`."""

    def __init__(self, message: str, result: TrainResult) -> None:
        super().__init__(message)
        self.result = result


def train(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    test: Pair | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    after_epoch: AfterEpoch | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train `model` in place with plain SGD until a stop rule of `config` holds.

    Epoch e visits the samples in `epoch_order(n, seed, e)`; dropout and augmentation draw from (seed, e) as
    well, and the global random state is left as it was. A run that was killed and resumed from its checkpoint
    therefore ends with the same bits as one that was not (on the CPU; GPU kernels may add in another order).

    Args:
        model: any module; the data are moved to its device.
        data: (x, y), ((x, y), (x_test, y_test)), or an object with such pairs as `.train` and `.test`.
        config: settings; the defaults if None.
        test: test pair, in place of the one in `data`.
        checkpoint: folder to save to after every `checkpoint_every`-th epoch and at the end. If it holds a
            checkpoint of the same settings and data, the run goes on from there, or returns at once if it had
            ended.
        checkpoint_every: epochs between checkpoints.
        after_epoch: called as after_epoch(finished epochs, model in eval mode) once the epoch is saved.
        show_progress: a bar on terminals, for runs of more than two seconds.

    Raises:
        InputError: model, data, settings and checkpoint do not fit together; nothing has been trained then.
        TrainingInterrupted: Ctrl-C. The model and the checkpoint hold the last finished epoch.

    Example:
        >>> x = torch.tensor([[-1.0], [1.0], [2.0]])
        >>> result = train(nn.Linear(1, 2), (x, torch.tensor([0, 1, 1])), TrainConfig(lr=1.0, epochs=100))
        >>> result.stopped_by, float(result.history["train_error"].iloc[-1])
        ('epochs', 0.0)
    """
    config = config or TrainConfig()
    pair, held_out = unpack_pairs(data, test)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not trained:
        raise InputError("a model with trainable parameters", "none", where="train, model")
    device = next(iter(trained.values())).device
    x, y = checked_pair(model, pair, config, device, "training data")
    tested = checked_pair(model, held_out, config, device, "test data") if held_out is not None else None
    check_settings(model, y, config)

    optimizer = torch.optim.SGD(
        trained.values(), lr=config.lr, momentum=config.momentum, weight_decay=config.weight_decay
    )
    state, initial = TrainingState(), {name: p.detach().clone() for name, p in trained.items()}
    folder = None if checkpoint is None else Path(checkpoint)
    digest = ""
    if folder is not None:
        prepare_folder(folder)
        digest = fingerprint(x, y)
        state, initial = resume(folder, model, optimizer, config.to_dict(), digest) or (state, initial)
    resumed_from = state.epoch

    def result(stopped_by: str) -> TrainResult:
        history = pd.DataFrame(state.rows, columns=list(COLUMNS)).astype({"epoch": int})
        return TrainResult(model, history, stopped_by, config, state.epoch, resumed_from)

    kept = _snapshot(model)
    begun = time.perf_counter() - state.seconds
    bar: AbstractContextManager[Advance] = (
        progress("training", total=config.epochs) if show_progress else nullcontext(lambda *_, **__: None)
    )
    try:
        with bar as advance:
            advance(state.epoch)
            while state.stopped_by is None:
                finite = _train_epoch(model, x, y, optimizer, config, state.epoch, advance)
                model.eval()
                done = state.epoch + 1
                rows, stopped_by = state.rows, None if finite else "diverged"
                if not finite or done % config.evaluate_every == 0 or done == config.epochs:
                    row = dict.fromkeys(COLUMNS, math.nan)
                    row |= {"epoch": float(done), "lr": learning_rate(config, state.epoch)}
                    if finite:
                        row |= _evaluation(model, (x, y), tested, config) | {"distance": _distance(trained, initial)}
                        stopped_by = stop_rule(config, row)
                    row["seconds"] = time.perf_counter() - begun
                    rows = [*rows, row]
                if done == config.epochs:
                    stopped_by = stopped_by or "epochs"
                after = TrainingState(done, rows, time.perf_counter() - begun, stopped_by)
                if folder is not None and (stopped_by or done % checkpoint_every == 0):
                    write_checkpoint(folder, model, optimizer, initial, after, config.to_dict(), digest)
                kept, state = _snapshot(model), after
                if after_epoch is not None:
                    after_epoch(done, model)
    except KeyboardInterrupt:
        model.load_state_dict(kept)
        raise TrainingInterrupted(_advice(state.epoch, config, folder), result("interrupted")) from None
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)
    return result(state.stopped_by)


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


def crop_and_flip(images: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Each image shifted by its offset minus 4 (rows, columns) with zeros coming in, and mirrored where `flips`.

    Args:
        images: (n, channels, height, width).
        offsets: (n, 2) whole numbers from 0 to 8.
        flips: (n,) booleans.
    """
    n, _, height, width = images.shape
    padded = functional.pad(images, [CROP_PADDING] * 4)
    columns = torch.arange(width, device=images.device).expand(n, width)
    columns = torch.where(flips[:, None], columns.flip(1), columns) + offsets[:, 1:]  # (n, w)
    rows = torch.arange(height, device=images.device) + offsets[:, :1]  # (n, h)
    sample = torch.arange(n, device=images.device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


def _train_epoch(
    model: nn.Module,
    x: Tensor,
    y: Tensor,
    optimizer: torch.optim.SGD,
    config: TrainConfig,
    epoch: int,
    advance: Advance,
) -> bool:
    """One pass over the data; whether losses and weights stayed finite."""
    for group in optimizer.param_groups:
        group["lr"] = learning_rate(config, epoch)
    order = epoch_order(len(x), config.seed, epoch).to(x.device)
    generator = torch.Generator().manual_seed(stream_seed(config.seed, epoch, "augmentation"))
    offsets = torch.randint(0, 2 * CROP_PADDING + 1, (len(x), 2), generator=generator).to(x.device)
    flips = (torch.rand(len(x), generator=generator) < 0.5).to(x.device)
    total = torch.zeros((), dtype=torch.float64, device=x.device)
    model.train()
    shown, shown_at = 0, time.monotonic()
    with private_randomness(stream_seed(config.seed, epoch, "dropout"), x.device):
        for start in range(0, len(x), config.batch_size):
            batch = slice(start, start + config.batch_size)
            inputs, targets = x[order[batch]], y[order[batch]]
            if config.augmentation == "crop-flip":
                inputs = crop_and_flip(inputs, offsets[batch], flips[batch])
            optimizer.zero_grad(set_to_none=True)
            loss = batch_loss(model(inputs), targets, config.loss)
            torch.autograd.backward(loss)
            optimizer.step()
            total += loss.detach()  # looked at once per epoch: reading it here would wait for the GPU at every step
            if time.monotonic() - shown_at > BAR_SECONDS:
                seen = min(start + config.batch_size, len(x))
                advance((seen - shown) / len(x), note=f"epoch {epoch + 1}")
                shown, shown_at = seen, time.monotonic()
    advance((len(x) - shown) / len(x), note=f"epoch {epoch + 1}")
    weights = [p for group in optimizer.param_groups for p in group["params"]]
    return bool(total.isfinite()) and all(bool(p.isfinite().all()) for p in weights)


def _evaluation(model: nn.Module, trained_on: Pair, tested: Pair | None, config: TrainConfig) -> dict[str, float]:
    """The measured part of a history row."""
    row = dict(zip(("train_loss", "train_error"), evaluate(model, *trained_on, config.loss), strict=True))
    if tested is not None:
        row |= zip(("test_loss", "test_error"), evaluate(model, *tested, config.loss), strict=True)
    if config.stop_gradient_norm is not None:
        row["gradient_norm"] = _gradient_norm(model, *trained_on, config.loss)
    return row


def _gradient_norm(model: nn.Module, x: Tensor, y: Tensor, loss: str) -> float:
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


def stop_rule(config: TrainConfig, row: Mapping[str, float]) -> str | None:
    """The first rule that this row satisfies; a loss that overflowed ends the run as diverged."""
    if not math.isfinite(row["train_loss"]):
        return "diverged"
    if config.stop_loss is not None and row["train_loss"] < config.stop_loss:
        return "loss"
    if config.stop_zero_error and row["train_error"] == 0:
        return "zero_error"
    if config.stop_gradient_norm is not None and row["gradient_norm"] < config.stop_gradient_norm:
        return "gradient_norm"
    return None


def _distance(now: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> float:
    return float(torch.stack([(now[name].detach() - then[name]).double().norm() for name in now]).norm())


def _snapshot(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _advice(epoch: int, config: TrainConfig, folder: Path | None) -> str:
    """What to do after Ctrl-C."""
    text = f"training stopped after epoch {epoch} of {config.epochs}"
    if folder is None:
        return f"{text}; nothing was saved, since no checkpoint folder was given"
    return f"{text}; the same call with checkpoint={str(folder)!r} goes on from the last checkpoint"


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
            raise InputError(
                "(x, y), ((x, y), (x_test, y_test)) or an object with such pairs as .train and .test",
                type(data).__name__ if pair is train_pair else f"a test set of type {type(pair).__name__}",
                where="train, data",
            )
    return train_pair, test_pair


def check_settings(model: nn.Module, y: Tensor, config: TrainConfig) -> None:
    """Refuse a stop rule or a batch size that these targets or this network cannot have."""
    if config.stop_zero_error and y.is_floating_point():
        raise InputError("classes as targets", "real numbers", where="train, stop_zero_error")
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
