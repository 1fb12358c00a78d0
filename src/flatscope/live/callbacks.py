"""Callbacks for Lightning and for Hugging Face's Trainer; their classes are made when first asked for."""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

from torch import nn

from flatscope.errors import InputError
from flatscope.live.recorder import Recorder, scalars

Take = Callable[[nn.Module], nn.Module]


class LightningHooks:
    """Records every few epochs of a Lightning training, and before its first step.

    Args:
        *args: those of `Recorder`: the samples to measure on, names of measures, every how many epochs.
        network: takes the network to measure out of the LightningModule; the module itself by default.
        log: also send the values to the trainer's loggers, as `flatscope/<measure>`.
        **kwargs: those of `Recorder`.

    Attributes:
        recorder: holds the tables and their history.
    """

    def __init__(self, *args: Any, network: Take | None = None, log: bool = True, **kwargs: Any) -> None:
        super().__init__()
        self.recorder = Recorder(*args, **kwargs)
        self.network, self.log = network, log

    def on_train_start(self, trainer: Any, pl_module: nn.Module) -> None:
        """The network before its first step; a training that is taken up again goes on recording instead."""
        if trainer.current_epoch == 0:
            self._record(trainer, pl_module, 0)

    def on_train_epoch_end(self, trainer: Any, pl_module: nn.Module) -> None:
        """After the last step of an epoch."""
        epoch = trainer.current_epoch + 1
        if self.recorder.due(epoch):
            self._record(trainer, pl_module, epoch)

    def _record(self, trainer: Any, pl_module: nn.Module, epoch: int) -> None:
        if not trainer.is_global_zero:
            return
        model = pl_module if self.network is None else self.network(pl_module)
        table = self.recorder.record(model, epoch, trainer.global_step)
        if table is not None and self.log:
            values = {f"flatscope/{name}": value for name, value in scalars(table).items()}
            for logger in trainer.loggers:
                logger.log_metrics(values, step=trainer.global_step)


class TrainerHooks:
    """Records every few epochs of a Hugging Face `Trainer`, and before its first step.

    Args:
        *args: those of `Recorder`: the samples to measure on, names of measures, every how many epochs.
        network: takes the network to measure out of the trained model; the model itself by default.
        **kwargs: those of `Recorder`.

    Attributes:
        recorder: holds the tables and their history.
    """

    def __init__(self, *args: Any, network: Take | None = None, **kwargs: Any) -> None:
        super().__init__()
        self.recorder = Recorder(*args, **kwargs)
        self.network = network

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """The network before its first step; a training that is taken up again goes on recording instead."""
        if state.global_step == 0:
            self._record(state, kwargs["model"], 0)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """After the last step of an epoch."""
        epoch = round(state.epoch)
        if self.recorder.due(epoch):
            self._record(state, kwargs["model"], epoch)

    def _record(self, state: Any, model: nn.Module, epoch: int) -> None:
        if state.is_world_process_zero:
            self.recorder.record(model if self.network is None else self.network(model), epoch, state.global_step)


@functools.cache
def lightning_callback_class() -> Any:
    """`FlatscopeCallback`: a Callback of whichever package of Lightning is in use."""
    packages = ("lightning.pytorch", "pytorch_lightning")
    used = [name for name in packages if name in sys.modules]  # the base that the user's trainer knows
    bases = [_module(name).Callback for name in used] or [_first_of(packages, "lightning").Callback]
    return _made("FlatscopeCallback", LightningHooks, *bases)


@functools.cache
def trainer_callback_class() -> Any:
    """`FlatscopeTrainerCallback`: a TrainerCallback of transformers."""
    return _made("FlatscopeTrainerCallback", TrainerHooks, _first_of(("transformers",), "transformers").TrainerCallback)


def _made(name: str, *bases: type) -> type:
    # Found again by that name when a callback is pickled on its way to another process.
    return type(name, bases, {"__doc__": bases[0].__doc__, "__module__": "flatscope.live"})


def _module(name: str) -> Any:
    return importlib.import_module(name)


def _first_of(names: tuple[str, ...], package: str) -> Any:
    for name in names:
        if importlib.util.find_spec(name.partition(".")[0]) is not None:
            return _module(name)
    raise InputError(
        f"the package {package}", "none installed", where="flatscope.live", fix='Run pip install "flatscope[live]"'
    )
