"""Settings of a training run and its state on disk: what a resume must find equal, and all it needs to go on.

A checkpoint folder holds `weights.safetensors` (network, what the optimizer remembers and starting weights, with epoch,
settings and history in its header), which a kill at any moment leaves whole, and `state.json`, a readable copy of that
header. Only the first is read again, so the two cannot disagree.

Whoever trains in another way (many networks stacked, another machine) and asks `learning_rate` and `epoch_order`
takes the very same steps as `train`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from flatscope.disk import write_whole
from flatscope.errors import InputError, WeightsError, refuse_unknown, refuse_unless_whole
from flatscope.files import digest, json_bytes, without_nan
from flatscope.inputs.weight_files import (
    MODEL_PREFIX,
    STATE_FILE,
    STATE_KEY,
    WEIGHTS_FILE,
    fit_weights,
    plain_tensors,
)
from flatscope.tensor_files import read_tensors, tensor_bytes

LOSSES = ("cross_entropy", "mse")
AUGMENTATIONS = ("none", "crop-flip")
PRECISIONS = ("float32", "tf32", "bf16")
OPTIMIZERS = ("sgd", "adam")
CROP_PADDING = 4
_STREAMS = ("order", "dropout", "augmentation", "noise")
# Settings that checkpoints of earlier versions do not name.
EARLIER = {"shuffle": True, "precision": "float32", "optimizer": "sgd"}
_MOMENTUM, _INITIAL = "momentum.", "initial."
OTHERS = "Take the same settings and data, or another folder"


@dataclass(frozen=True)
class TrainConfig:
    """Settings of one training run by the steps of `torch.optim.SGD` (no Nesterov) or of `torch.optim.Adam`.

    Attributes:
        lr: learning rate of the first epoch.
        momentum: of SGD, as in torch: v ← momentum·v + gradient, w ← w − lr·v.
        weight_decay: added to the gradient of every parameter, biases included; not part of any reported
            loss.
        batch_size: samples per step; the last batch of an epoch may be smaller.
        epochs: passes over the training data at most.
        lr_steps: pairs (epoch, factor): from that epoch on (counted from 0) the rate is multiplied by the
            factor.
        lr_decay: factor on the rate after every epoch.
        loss: "cross_entropy", or "mse": squared error summed over outputs, against one-hot vectors if the
            targets are classes. Both are averaged over samples.
        seed: decides sample order, dropout and augmentation; epoch e depends on (seed, e) only.
        stop_loss: stop once the loss is below this.
        stop_zero_error: stop once no training sample is misclassified.
        stop_gradient_norm: stop once the gradient of the loss is shorter than this.
        evaluate_every: epochs between evaluations; stop rules are looked at then, on the whole training set
            in eval mode without augmentation. The last epoch is always evaluated.
        augmentation: "none", or "crop-flip": shift by up to 4 pixels (zeros come in) and mirror half of the
            images.
        shuffle: a new order of the samples in every epoch; False: the order of the data, in all of them.
        precision: "float32": that of the network's weights; "tf32": products of numbers of 10 binary digits, on GPUs
            that have them; "bf16": activations of 7 binary digits. Weights, gradients and momentum are kept in float32
            with all three. The losses and errors of the history are those of the network as it is trained, in the same
            precision; no measure ever is.
        optimizer: "sgd", or "adam" with torch's defaults for all but `lr` and `weight_decay`, which here too is added
            to the gradient.
    """

    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    batch_size: int = 64
    epochs: int = 10
    lr_steps: tuple[tuple[int, float], ...] = ()
    lr_decay: float = 1.0
    loss: str = "cross_entropy"
    seed: int = 0
    stop_loss: float | None = None
    stop_zero_error: bool = False
    stop_gradient_norm: float | None = None
    evaluate_every: int = 1
    augmentation: str = "none"
    shuffle: bool = True
    precision: str = "float32"
    optimizer: str = "sgd"

    def __post_init__(self) -> None:
        """Refuse what cannot be meant, before any time is spent on training."""
        for name in ("lr", "lr_decay"):
            _check_number(name, getattr(self, name), above=0)
        for name in ("momentum", "weight_decay"):
            _check_number(name, getattr(self, name), least=0)
        for name in ("batch_size", "epochs", "evaluate_every"):
            _check_number(name, getattr(self, name), least=1, whole=True)
        _check_number("seed", self.seed, least=0, whole=True)
        for name in ("stop_loss", "stop_gradient_norm"):
            if getattr(self, name) is not None:
                _check_number(name, getattr(self, name), above=0)
        for name in ("stop_zero_error", "shuffle"):
            if not isinstance(getattr(self, name), bool):
                raise InputError("true or false", repr(getattr(self, name)), where=f"TrainConfig, {name}")
        refuse_unknown(self.loss, LOSSES, "loss to train on")
        refuse_unknown(self.augmentation, AUGMENTATIONS, "augmentation")
        refuse_unknown(self.precision, PRECISIONS, "precision of training")
        refuse_unknown(self.optimizer, OPTIMIZERS, "optimizer")
        if self.optimizer == "adam" and self.momentum:
            fix = "Leave it out: Adam has averages of its own"
            raise InputError("no momentum beside adam", repr(self.momentum), "TrainConfig, momentum", fix)
        object.__setattr__(self, "lr_steps", _rate_steps_as_tuples(self.lr_steps))

    def to_dict(self) -> dict[str, Any]:
        """Plain values that JSON can hold."""
        values = dataclasses.asdict(self)
        values["lr_steps"] = [list(step) for step in self.lr_steps]
        return values

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> TrainConfig:
        """The config that `to_dict` described; missing keys take their defaults, unknown ones are refused.

        Example:
            >>> TrainConfig.from_dict({"lr": 0.1, "lr_steps": [[80, 0.1]]}).lr_steps
            ((80, 0.1),)
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            refuse_unknown(name, known, "training setting")
        return cls(**values)


class CheckpointPace:
    """When to write: after every so many epochs and at the end, but not within `seconds` of the time before."""

    def __init__(self, every: int, seconds: float = 0.0) -> None:
        refuse_unless_whole(every, "checkpoint_every")
        if not seconds >= 0:
            raise InputError("a number of at least 0", repr(seconds), where="checkpoint_seconds")
        self._every, self._seconds, self._last = every, seconds, time.monotonic()

    def is_due(self, epoch: int, *, over: bool) -> bool:
        """True if a checkpoint is due after `epoch` epochs; the caller then does."""
        if not (over or epoch % self._every == 0) or time.monotonic() - self._last < self._seconds:
            return False
        self._last = time.monotonic()
        return True


def learning_rate(config: TrainConfig, epoch: int) -> float:
    """Rate used during `epoch`, counted from 0.

    Example:
        >>> config = TrainConfig(lr=1.0, lr_steps=((2, 0.5),))
        >>> [learning_rate(config, epoch) for epoch in range(4)]
        [1.0, 1.0, 0.5, 0.5]
    """
    steps = math.prod(factor for start, factor in config.lr_steps if epoch >= start)
    return config.lr * config.lr_decay**epoch * steps


def epoch_order(n: int, seed: int, epoch: int, *, shuffle: bool = True) -> Tensor:
    """Order in which the `n` samples are visited in `epoch` (from 0): a permutation that only (n, seed, epoch) decide.

    Batches are consecutive slices of it; the last one may be short. Without `shuffle` it is that of the data.
    """
    if not shuffle:
        return torch.arange(n, device="cpu")
    generator = torch.Generator().manual_seed(stream_seed(seed, epoch, "order"))
    return torch.randperm(n, generator=generator, device="cpu")


def augmentation_draws(n: int, seed: int, epoch: int) -> tuple[Tensor, Tensor]:
    """Offsets (n, 2) and flips (n,) of "crop-flip" in an epoch, which only (n, seed, epoch) decide."""
    generator = torch.Generator().manual_seed(stream_seed(seed, epoch, "augmentation"))
    offsets = torch.randint(0, 2 * CROP_PADDING + 1, (n, 2), generator=generator, device="cpu")
    return offsets, torch.rand(n, generator=generator, device="cpu") < 0.5


def stream_seed(seed: int, epoch: int, stream: str) -> int:
    """Seed of one epoch's "order", "dropout", "augmentation" or "noise" draws: streams that do not meet."""
    mixed = np.random.SeedSequence((seed, epoch, _STREAMS.index(stream))).generate_state(1, np.uint64)
    return int(mixed[0]) >> 1  # 63 bits: generators of every backend take them


@dataclass
class TrainingState:
    """State of a run after a finished epoch."""

    epochs: int = 0  # how many are finished
    rows: list[dict[str, float]] = field(default_factory=list)  # the history so far
    seconds: float = 0.0  # spent so far, earlier sessions included
    stopped_by: str | None = None  # the rule that ended the run; None while it may go on

    @classmethod
    def read(cls, saved: Mapping[str, Any]) -> TrainingState:
        """From a header, where numbers that are not finite are words; earlier versions said `epoch`."""
        rows = [{key: float(value) for key, value in row.items()} for row in saved["rows"]]
        epochs = saved["epochs"] if "epochs" in saved else saved["epoch"]
        return cls(int(epochs), rows, float(saved["seconds"]), saved["stopped_by"])


def prepare_folder(folder: Path) -> None:
    """Make the folder and try it out, so that a run does not fail on its first checkpoint."""
    write_whole(folder / ".writable", b"")
    (folder / ".writable").unlink()


def write_checkpoint(
    folder: Path,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    initial: Mapping[str, Tensor],
    state: TrainingState,
    config: Mapping[str, Any],
    data: str,
) -> None:
    """Replace the folder's checkpoint by this one; settings and fingerprint of the data are compared on resume."""
    parts = {MODEL_PREFIX: model.state_dict(), _MOMENTUM: _optimizer_tensors(model, optimizer), _INITIAL: initial}
    saved = {"state": dataclasses.asdict(state), "config": dict(config), "data": data}
    write_whole(folder / STATE_FILE, json_bytes(write_state(folder / WEIGHTS_FILE, STATE_KEY, parts, saved)))


def resume_from_checkpoint(
    folder: Path, model: nn.Module, optimizer: torch.optim.Optimizer, config: Mapping[str, Any], data: str
) -> tuple[TrainingState, dict[str, Tensor]] | None:
    """Bring model and optimizer back to the folder's checkpoint; None if the folder has none.

    Returns:
        The state of the run, and the weights it started from.

    Raises:
        WeightsError: the file is damaged, not a checkpoint, or of another network.
        InputError: the settings (named) or the training data differ. Only `epochs` may be raised: no earlier
            epoch depends on it.
    """
    path = folder / WEIGHTS_FILE
    if not path.exists():
        return None
    parts, saved = read_state(path, STATE_KEY)
    [state], before = saved["states"], EARLIER | saved["config"]
    if config["epochs"] > before["epochs"]:
        state.stopped_by = None if state.stopped_by == "epochs" else state.stopped_by
        before["epochs"] = config["epochs"]
    refuse_other_settings(config, before, f"resume from {folder}")
    if saved["data"] != data:
        raise InputError("the training data of the checkpoint", "others", f"resume from {folder}", OTHERS)

    fit_weights(model, parts[MODEL_PREFIX], where=str(path))
    parameters = dict(model.named_parameters())
    for name, value in parts[_MOMENTUM].items():
        owner, key = (name, "momentum_buffer") if name in parameters else name.rpartition(".")[::2]
        optimizer.state[parameters[owner]][key] = value.to(parameters[owner].device)
    return state, {name: tensor.to(parameters[name].device) for name, tensor in parts[_INITIAL].items()}


def write_state(path: Path, key: str, parts: Mapping[str, Mapping[str, Any]], saved: Mapping[str, Any]) -> str:
    """Replace a checkpoint file by tensors, named with the prefix of their part, and a header; returns its text."""
    where = f"checkpoint folder {path.parent}"
    tensors = {
        prefix + name: tensor for prefix, part in parts.items() for name, tensor in plain_tensors(part, where).items()
    }
    text = json.dumps(without_nan(saved), indent=1, allow_nan=False)
    write_whole(path, tensor_bytes(tensors, {key: text}))
    return text


def read_state(path: Path, key: str) -> tuple[dict[str, dict[str, Tensor]], dict[str, Any]]:
    """Tensors by prefix and name, and the header, that `write_state` wrote."""
    try:
        tensors, head = read_tensors(path)
        saved: dict[str, Any] = json.loads(head[key])
        states = saved["records"] if "records" in saved else [saved["state"]]
        saved["states"] = [TrainingState.read(state) for state in states]
    except (KeyError, TypeError, ValueError) as error:
        reason = "no such state in it" if isinstance(error, KeyError) else str(error)
        fix = "Choose another checkpoint folder, or remove the file to start over"
        got = f"a file that is not one ({reason})"
        raise WeightsError("a whole checkpoint of a training", got, str(path), fix) from None
    parts: defaultdict[str, dict[str, Tensor]] = defaultdict(dict)
    for name, tensor in tensors.items():
        prefix, dot, rest = name.partition(".")
        parts[prefix + dot][rest] = tensor.clone()  # no view of the file, which the next checkpoint replaces
    return parts, saved


def refuse_other_settings(here: Mapping[str, Any], there: Mapping[str, Any], where: str) -> None:
    """Refuse settings that differ from those of a checkpoint, and name them."""
    differing = [key for key in sorted({*here, *there}) if here.get(key) != there.get(key)]
    if differing:
        pairs = [f"{key} {there.get(key)!r} there, {here.get(key)!r} here" for key in differing]
        raise InputError("the settings of the checkpoint", "; ".join(pairs), where, OTHERS)


def data_fingerprint(x: Tensor, y: Tensor) -> str:
    """Short digest of the training data: shapes, all targets, and about 256 of the inputs."""
    parts: list[bytes] = []
    for tensor in (x[:: max(1, len(x) // 256)], y):
        flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        parts += [f"{tuple(tensor.shape)} {tensor.dtype} ".encode(), flat.numpy().tobytes()]
    return f"{len(x)}-{digest(parts)}"


def _optimizer_tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    """State of the optimizer for each parameter: momentum under its name, of Adam "name.exp_avg" and so on.

    Nothing before the first step, or without momentum.
    """
    return {
        name if key == "momentum_buffer" else f"{name}.{key}": value
        for name, parameter in model.named_parameters()
        for key, value in optimizer.state.get(parameter, {}).items()
        if value is not None
    }


def _check_number(
    name: str, value: object, *, least: float | None = None, above: float | None = None, whole: bool = False
) -> None:
    """Refuse anything but a finite number in range; True and False are not numbers here."""
    kind = "a whole number" if whole else "a finite number"
    limit = f" of at least {least}" if least is not None else f" above {above}"
    good = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if good and isinstance(value, int | float):
        good = math.isfinite(value) and (least is None or value >= least) and (above is None or value > above)
    if not good:
        raise InputError(kind + limit, repr(value), where=f"TrainConfig, {name}")


def _rate_steps_as_tuples(value: Any) -> tuple[tuple[int, float], ...]:
    """`lr_steps` as tuples, whatever sequences JSON or the user gave."""
    try:
        steps = tuple((epoch, factor) for epoch, factor in value)
    except (TypeError, ValueError):
        raise InputError("pairs (epoch, factor)", repr(value), where="TrainConfig, lr_steps") from None
    for epoch, factor in steps:
        _check_number("epoch in lr_steps", epoch, least=0, whole=True)
        _check_number("factor in lr_steps", factor, above=0)
    return steps
