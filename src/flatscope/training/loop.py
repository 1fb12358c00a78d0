"""Plain SGD and Adam on data that fit in memory: stop rules, history, checkpoints, the same bits after a resume."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.cuda_graphs import captured_cuda_graph
from flatscope.errors import InputError, Interrupted
from flatscope.isolation import derivatives_on, private_randomness
from flatscope.progress import Advance, progress_bar
from flatscope.training.checkpoint import (
    CROP_PADDING,
    CheckpointPace,
    TrainConfig,
    TrainingState,
    augmentation_draws,
    data_fingerprint,
    epoch_order,
    learning_rate,
    prepare_folder,
    resume_from_checkpoint,
    stream_seed,
    write_checkpoint,
)
from flatscope.training.evaluation import (
    Pair,
    batch_loss,
    check_training_settings,
    checked_pair,
    history_row,
    unpack_pairs,
)
from flatscope.training.gpu_steps import (
    activation_precision,
    is_worth_compiling,
    product_precision,
    step_is_the_same_every_time,
    wants_channels_last,
)

BAR_SECONDS = 0.25  # between two updates of the progress bar within an epoch
ERRORS = ("train_loss", "train_error", "test_loss", "test_error")
COLUMNS = ("epoch", "lr", *ERRORS, "gradient_norm", "distance", "seconds")

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
        """True if a loss or weight stopped being finite; the model then holds those weights."""
        return self.stopped_by == "diverged"


@derivatives_on()
def train(
    model: nn.Module,
    data: Any,
    config: TrainConfig | None = None,
    *,
    test: Pair | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    checkpoint_seconds: float = 0.0,
    after_epoch: AfterEpoch | None = None,
    show_progress: bool = True,
) -> TrainResult:
    """Train `model` in place with SGD or Adam until a stop rule of `config` holds.

    Epoch e visits the samples in `epoch_order(n, seed, e, shuffle=…)`; dropout and augmentation draw from (seed, e) as
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
        checkpoint_seconds: a checkpoint within that time of the one before, or of the start, is left out.
        after_epoch: called as after_epoch(finished epochs, model in eval mode) once the epoch is saved.
        show_progress: a bar on terminals, for runs of more than two seconds.

    Raises:
        InputError: model, data, settings and checkpoint do not fit together; nothing has been trained then.
        Interrupted: Ctrl-C. The model and the checkpoint hold the last finished epoch.

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
    check_training_settings(model, y, config)

    optimizer = _optimizer(list(trained.values()), config)
    state, initial = TrainingState(), {name: p.detach().clone() for name, p in trained.items()}
    folder = None if checkpoint is None else Path(checkpoint)
    digest, writing = "", CheckpointPace(checkpoint_every, checkpoint_seconds)
    if folder is not None:
        prepare_folder(folder)
        digest = data_fingerprint(x, y)
        state, initial = resume_from_checkpoint(folder, model, optimizer, config.to_dict(), digest) or (state, initial)
    resumed_from = state.epochs

    def result(stopped_by: str) -> TrainResult:
        history = pd.DataFrame(state.rows, columns=list(COLUMNS)).astype({"epoch": int})
        return TrainResult(model, history, stopped_by, config, state.epochs, resumed_from)

    if wants_channels_last(config.precision, x):
        x, tested = _channels_last(x), tested and (_channels_last(tested[0]), tested[1])
    steps = _Steps(model, x, y, optimizer, config)
    kept = _model_snapshot(model)
    begun = time.perf_counter() - state.seconds
    bar = progress_bar("training", total=config.epochs, shown=show_progress)
    try:
        with bar as advance, product_precision(config.precision):
            advance(state.epochs)
            while state.stopped_by is None:
                finite = steps.train_epoch(state.epochs, advance)
                model.eval()
                measured = None
                if finite and is_evaluated(config, state.epochs + 1):
                    measured = steps.evaluate_losses(tested)
                    measured["distance"] = _distance_of_weights(trained, initial)
                after = next_state(state, config, finite, measured, time.perf_counter() - begun)
                if folder is not None and writing.is_due(after.epochs, over=after.stopped_by is not None):
                    write_checkpoint(folder, model, optimizer, initial, after, config.to_dict(), digest)
                kept, state = _model_snapshot(model), after
                if after_epoch is not None:
                    after_epoch(after.epochs, model)
    except KeyboardInterrupt:
        model.load_state_dict(kept)
        raise Interrupted(_advice_after_interrupt(state.epochs, config, folder), result("interrupted")) from None
    finally:
        model.eval()
        model.zero_grad(set_to_none=True)
        if steps.channels_last:
            model.to(memory_format=torch.contiguous_format)  # type: ignore[call-overload]
    return result(state.stopped_by)


def _channels_last(images: Tensor) -> Tensor:
    return images.contiguous(memory_format=torch.channels_last)


def _optimizer(weights: Sequence[Tensor], config: TrainConfig) -> torch.optim.Optimizer:
    """SGD or Adam with the settings; on a GPU one kernel for all weights where they are float32."""
    fused = all(p.is_cuda and p.dtype == torch.float32 and p.is_contiguous() for p in weights)
    settings: dict[str, Any] = {"weight_decay": config.weight_decay, "fused": fused}
    if config.optimizer == "adam":
        return torch.optim.Adam(weights, config.lr, **settings)
    # As a tensor, the rate may change without a new graph.
    rate = torch.tensor(float(config.lr), device=weights[0].device) if fused else config.lr
    return torch.optim.SGD(weights, rate, momentum=config.momentum, **settings)


def crop_and_flip(images: Tensor, offsets: Tensor, flips: Tensor) -> Tensor:
    """Each image (n, c, h, w) shifted by its offset (rows, columns) minus 4, zeros coming in, mirrored if `flips`."""
    n, _, height, width = images.shape
    padded = functional.pad(images, [CROP_PADDING] * 4)
    columns = torch.arange(width, device=images.device).expand(n, width)
    columns = torch.where(flips[:, None], columns.flip(1), columns) + offsets[:, 1:]  # (n, w)
    rows = torch.arange(height, device=images.device) + offsets[:, :1]  # (n, h)
    sample = torch.arange(n, device=images.device)[:, None, None]
    return padded[sample, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class _Steps:
    """The steps of a training; on a GPU, those of SGD on full batches are one graph where the network allows it.

    Those of Adam are not: torch counts them outside of a graph.
    """

    def __init__(
        self, model: nn.Module, x: Tensor, y: Tensor, optimizer: torch.optim.Optimizer, config: TrainConfig
    ) -> None:
        self._model, self._x, self._y, self._optimizer, self._config = model, x, y, optimizer, config
        self._weights = [p for group in optimizer.param_groups for p in group["params"]]
        self._order = torch.empty(len(x), dtype=torch.int64, device=x.device)
        self._offsets = torch.empty(len(x), 2, dtype=torch.int64, device=x.device)
        self._flips = torch.empty(len(x), dtype=torch.bool, device=x.device)
        self._places = torch.arange(config.batch_size, device=x.device)
        self._position = torch.zeros(1, dtype=torch.int64, device=x.device)
        self._total = torch.zeros((), dtype=torch.float64, device=x.device)
        self.channels_last = wants_channels_last(config.precision, x)
        if self.channels_last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self._graphs = (
            x.is_cuda and config.optimizer == "sgd" and step_is_the_same_every_time(model, x[: config.batch_size])
        )
        self._replay: Callable[[], None] | None = None
        self.forward: Callable[[Tensor], Tensor] = model  # the model, or the same compiled, on full batches
        self._may_compile = self._graphs
        for weight in self._weights if x.is_cuda else ():
            state = optimizer.state[weight]
            if config.momentum:  # there from the first step on, as in a graph
                state.setdefault("momentum_buffer", torch.zeros_like(weight, requires_grad=False))
            for name in state.keys() - {"step"}:  # laid out as the weight
                state[name] = torch.zeros_like(weight, requires_grad=False).copy_(state[name])

    def train_epoch(self, epoch: int, advance: Advance) -> bool:
        """One pass over the data; whether losses and weights stayed finite."""
        config, n = self._config, len(self._x)
        rate = learning_rate(config, epoch)
        if self._may_compile and is_worth_compiling(self._model, config.precision, n, epoch, config.epochs):
            self._may_compile = False
            self.forward, self._replay = torch.compile(self._model, dynamic=False), None
        [group] = self._optimizer.param_groups
        if isinstance(group["lr"], Tensor):
            group["lr"].fill_(rate)
        elif group["lr"] != rate:
            group["lr"], self._replay = rate, None
        self._order.copy_(epoch_order(n, config.seed, epoch, shuffle=config.shuffle))
        for kept, drawn in zip((self._offsets, self._flips), augmentation_draws(n, config.seed, epoch), strict=True):
            kept.copy_(drawn)
        self._total.zero_()
        self._position.zero_()
        self._model.train()
        shown, shown_at = 0, time.monotonic()
        with private_randomness(stream_seed(config.seed, epoch, "dropout"), self._x.device):
            for start in range(0, n, config.batch_size):
                size = min(config.batch_size, n - start)
                if self._graphs and size == config.batch_size:
                    self._step_as_cuda_graph()()
                else:
                    self._step_on_batch(size)
                if time.monotonic() - shown_at > BAR_SECONDS:
                    advance((start + size - shown) / n, note=f"epoch {epoch + 1}")
                    shown, shown_at = start + size, time.monotonic()
        advance((n - shown) / n, note=f"epoch {epoch + 1}")
        return bool(self._total.isfinite()) and all(bool(p.isfinite().all()) for p in self._weights)

    def evaluate_losses(self, tested: Pair | None) -> dict[str, float]:
        """Losses and errors of the model on the training samples, and on others."""
        with activation_precision(self._config.precision, self._x.device):
            return history_row(self._model, (self._x, self._y), tested, self._config, self.forward)

    def _step_on_batch(self, size: int) -> None:
        """The next batch; nothing in it waits for the GPU."""
        places = self._position + self._places[:size]
        chosen, config = self._order[places], self._config
        inputs, targets = self._x[chosen], self._y[chosen]
        if config.augmentation == "crop-flip":
            inputs = crop_and_flip(inputs, self._offsets[places], self._flips[places])
        if self.channels_last:
            inputs = inputs.contiguous(memory_format=torch.channels_last)
        self._optimizer.zero_grad(set_to_none=True)
        with activation_precision(config.precision, inputs.device):
            forward = self.forward if size == config.batch_size else self._model
            loss = batch_loss(forward(inputs), targets, config.loss)
        torch.autograd.backward(loss)
        for weight in self._weights if self._optimizer.defaults["fused"] else ():
            if weight.grad is not None and weight.grad.stride() != weight.stride():  # along axes of length 1
                weight.grad = weight.grad.as_strided(weight.shape, weight.stride())
        self._optimizer.step()
        self._total += loss.detach()  # looked at once per epoch
        self._position += size

    def _step_as_cuda_graph(self) -> Callable[[], None]:
        """The step on a full batch, recorded once for each rate that is no tensor."""
        if self._replay is None:
            touched = [*self._model.parameters(), *self._model.buffers(), self._total, self._position]
            touched += [state["momentum_buffer"] for state in self._optimizer.state.values() if state]
            try:
                self._replay = captured_cuda_graph(
                    lambda: self._step_on_batch(self._config.batch_size), touched, self._x.device
                )
            except torch._dynamo.exc.TorchDynamoException:  # no compiler here, or a network that it cannot read
                if self.forward is self._model:
                    raise
                self.forward = self._model
                return self._step_as_cuda_graph()
        return self._replay


def is_evaluated(config: TrainConfig, epochs: int) -> bool:
    """True if there is an evaluation after so many epochs."""
    return epochs % config.evaluate_every == 0 or epochs == config.epochs


def next_state(
    state: TrainingState, config: TrainConfig, finite: bool, measured: Mapping[str, float] | None, seconds: float
) -> TrainingState:
    """State of a run after one more epoch: with a row if it was evaluated or diverged, ended if a rule holds."""
    done, rows, stopped_by = state.epochs + 1, state.rows, None if finite else "diverged"
    if not finite or measured is not None:
        row = dict.fromkeys(COLUMNS, math.nan)
        row |= {"epoch": float(done), "lr": learning_rate(config, state.epochs), "seconds": seconds}
        if finite and measured is not None:
            row |= measured
            stopped_by = stop_rule(config, row)
        rows = [*rows, row]
    return TrainingState(done, rows, seconds, stopped_by or ("epochs" if done == config.epochs else None))


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


def _distance_of_weights(now: Mapping[str, Tensor], then: Mapping[str, Tensor]) -> float:
    return float(torch.stack([(now[name].detach() - then[name]).double().norm() for name in now]).norm())


def _model_snapshot(model: nn.Module) -> dict[str, Any]:
    state = model.state_dict()
    return {name: value.clone() if isinstance(value, Tensor) else value for name, value in state.items()}


def _advice_after_interrupt(epoch: int, config: TrainConfig, folder: Path | None) -> str:
    """Advice after Ctrl-C."""
    text = f"training stopped after epoch {epoch} of {config.epochs}"
    if folder is None:
        return f"{text}; nothing was saved, since no checkpoint folder was given"
    return f"{text}; the same call with checkpoint={str(folder)!r} goes on from the last checkpoint"
