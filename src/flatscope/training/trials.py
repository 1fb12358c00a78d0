"""The networks of a population: settings, starting weights and training samples of each, and which train together."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, UnknownNameError, refuse_unknown
from flatscope.inputs.data_set import Data
from flatscope.inputs.loading import sample_order
from flatscope.isolation import private_randomness
from flatscope.training import models
from flatscope.training.checkpoint import TrainConfig, TrainingState, data_fingerprint
from flatscope.training.initialization import initialize
from flatscope.training.label_noise import corrupt_labels
from flatscope.training.stacked_layers import StackedNetwork

Build = str | Callable[[Mapping[str, Any]], nn.Module]
Pairs = Callable[[Mapping[str, Any]], tuple[Tensor, Tensor]]

CONFIG_KEYS = tuple(field.name for field in dataclasses.fields(TrainConfig))
OWN_KEYS = (
    *("name", "model_seed", "model_options", "init", "init_options", "init_scale"),
    *("labels", "train_size", "noise_temperature"),
)
LABEL_KEYS = ("random", "seed", "exclude_true")


@dataclass(frozen=True)
class Trial:
    """Settings of one network of a population; see `train_population` for the meaning of each part.

    `given` is the trial as the user wrote it, with name, seed and model_seed filled in.
    """

    index: int
    name: str
    config: TrainConfig
    model_seed: int
    given: Mapping[str, Any]
    model_options: Mapping[str, Any] = field(default_factory=dict)
    init: str | None = None
    init_options: Mapping[str, Any] = field(default_factory=dict)
    labels: Mapping[str, Any] | None = None
    train_size: int | None = None
    noise_temperature: float = 0.0

    def description(self) -> dict[str, Any]:
        """Plain values by which a checkpoint knows the trial again."""
        text = json.dumps(dict(self.given), default=lambda value: type(value).__name__)
        described: dict[str, Any] = json.loads(text) | json.loads(json.dumps(self.config.to_dict()))
        return described


@dataclass(frozen=True)
class TrialData:
    """Training samples of one trial: `images[index]`, or all of `images` where `index` is None, and targets for them.

    Trials hold the very same `images` where they can, so that these lie on the device once.
    """

    images: Tensor
    index: Tensor | None
    targets: Tensor

    def pair(self) -> tuple[Tensor, Tensor]:
        """Inputs and targets as plain training takes them."""
        return (self.images if self.index is None else self.images[self.index]), self.targets

    def head(self, n: int | None) -> TrialData:
        """The first n samples."""
        return self if n is None else TrialData(self.images, self.every()[:n], self.targets[:n])

    def every(self) -> Tensor:
        """The numbers of its images."""
        return torch.arange(len(self.images), device=self.targets.device) if self.index is None else self.index


@dataclass(frozen=True)
class StackSamples:
    """Training samples of all trials: image `index[t, i]` (image i if `index` is None) has target `targets[t, i]`."""

    images: Tensor
    index: Tensor | None  # (trials, n)
    targets: Tensor  # (trials, n, ...)

    @classmethod
    def of(cls, data: Sequence[TrialData]) -> StackSamples:
        """Images that several trials share are kept once."""
        banks = list({id(part.images): part.images for part in data}.values())
        starts, start = {}, 0
        for bank in banks:
            starts[id(bank)], start = start, start + len(bank)
        targets = torch.stack([part.targets for part in data])
        if len(banks) == 1 and all(part.index is None for part in data):
            return cls(banks[0], None, targets)
        every = [part.every() for part in data]
        index = torch.stack([starts[id(p.images)] + chosen for p, chosen in zip(data, every, strict=True)])
        return cls(banks[0] if len(banks) == 1 else torch.cat(banks), index, targets)

    def rows(self, kept: Tensor | slice) -> StackSamples:
        """The samples of some of the trials."""
        return StackSamples(self.images, None if self.index is None else self.index[kept], self.targets[kept])

    def batch(self, part: slice, trials_first: bool) -> tuple[Tensor, Tensor]:
        """Inputs in the order that the network reads, (t, b, ...) or (b, t, ...), and targets (t, b)."""
        targets = self.targets[:, part]
        if self.index is not None:
            chosen = self.index[:, part]
            return self.images[chosen if trials_first else chosen.T], targets
        images = self.images[part]
        if trials_first:
            return images.expand(len(targets), *images.shape), targets
        return images[:, None].expand(-1, len(targets), *images.shape[1:]), targets


@dataclass
class TrialGroup:
    """Trials of one architecture."""

    number: int  # position among the groups
    trials: list[Trial]
    data: list[TrialData]  # their samples
    template: nn.Module  # of their structure; its values do not matter
    network: StackedNetwork | None  # for stacked training; None for a trial that is trained by itself
    # Parameters and buffers of all trials, stacked in their order, on the CPU: of the trials that have stopped, and of
    # the others as of the last time they were asked for.
    weights: dict[str, Tensor]
    initial: dict[str, Tensor]  # the same before training
    trained: list[str]  # names of the parameters that are trained
    records: list[TrainingState]  # where each trial stands
    epoch: int = 0  # finished epochs of the group
    seconds: float = 0.0  # the time they took
    layers: Any = None  # what can be measured along the way, once that was asked for
    trained_by: str = ""  # "fused kernel"; "stack" or "one by one" with the reason

    @functools.cached_property
    def digest(self) -> str:
        """One fingerprint of the data of all trials, which stay the same once training has begun."""
        digest = hashlib.blake2b(digest_size=16)
        known: dict[int, str] = {}
        for part in self.data:
            if id(part.images) not in known:
                known[id(part.images)] = data_fingerprint(part.images, part.images.new_zeros(0))
            chosen = part.targets if part.index is None else torch.stack([part.index.double(), part.targets.double()])
            digest.update((known[id(part.images)] + data_fingerprint(chosen, part.targets)).encode())
        return digest.hexdigest()

    def state(self, row: int, *, initial: bool = False) -> dict[str, Tensor]:
        """Copies of the weights and buffers of one trial, on the CPU."""
        return {name: value[row].clone() for name, value in (self.initial if initial else self.weights).items()}

    def model(self, row: int) -> nn.Module:
        """An ordinary module in eval mode, on the CPU."""
        model = copy.deepcopy(self.template)
        copy_state_into(model, self.state(row))
        return model.eval()

    @property
    def active(self) -> list[int]:
        """Rows of the trials that have not stopped."""
        return [row for row, record in enumerate(self.records) if record.stopped_by is None]

    def take(self, weights: Mapping[str, Tensor], rows: Mapping[int, int]) -> None:
        """Copy weights of a stack: `rows` says for places in it which rows of the group they are."""
        for name, value in weights.items():
            self.weights[name][list(rows.values())] = value[list(rows)].cpu()


def read_trials(trials: Sequence[Mapping[str, Any]], build: Build) -> list[Trial]:
    """Check what the user wrote; keys that nobody knows are for a callable `build`, and a mistake otherwise."""
    if isinstance(trials, Mapping | str) or not isinstance(trials, Sequence) or len(trials) == 0:
        got = type(trials).__name__ if not isinstance(trials, Sequence) or isinstance(trials, str) else "none"
        raise InputError("a list of dictionaries, one per network", got, where="train_population, trials")
    if isinstance(build, str) and build not in models.available():
        raise UnknownNameError.among(build, models.available(), "model")
    if not isinstance(build, str) and not callable(build):
        expected = "the name of a model or a function of the trial"
        raise InputError(expected, type(build).__name__, where="train_population, build")
    read = [_read_trial(number, trial, strict=isinstance(build, str)) for number, trial in enumerate(trials)]
    names = [trial.name for trial in read]
    for name in names:
        if names.count(name) > 1:
            raise InputError("a different name for every trial", f"{name!r} twice", where="train_population, trials")
    return read


def build_model(build: Build, trial: Trial, example: Tensor, n_classes: int) -> nn.Module:
    """The untrained network of a trial; global randomness is neither read nor moved."""
    where = f"trial {trial.name}"
    if isinstance(build, str):
        fitting: dict[str, Any] = {}
        if "input_shape" in models.model_options(build):
            fitting = {"input_shape": tuple(example.shape[1:]), "classes": n_classes}
        model = models.build(build, seed=trial.model_seed, **fitting | dict(trial.model_options))
    else:
        with private_randomness(trial.model_seed):
            model = build(trial.given)
        if not isinstance(model, nn.Module):
            raise InputError("a build function that returns a torch.nn.Module", type(model).__name__, where=where)
    if trial.init is not None:
        try:
            initialize(model, trial.init, trial.model_seed, **trial.init_options)
        except TypeError as problem:
            raise InputError("options of initialize", str(problem), where=f"{where}, init_options") from None
    return model


def trial_data(trial: Trial, x: Tensor, y: Tensor, n_classes: int) -> TrialData:
    """The samples of a trial: its subset, then its labels drawn again."""
    where, index, targets = f"trial {trial.name}", None, y
    classes = not y.is_floating_point()
    if trial.train_size is not None:
        if not 1 <= trial.train_size <= len(y):
            raise InputError(f"1 to {len(y)} samples", repr(trial.train_size), where=f"{where}, train_size")
        order = sample_order(y.cpu().numpy(), trial.config.seed, balanced=classes)[: trial.train_size]
        index = torch.from_numpy(order).to(y.device)
        targets = y[index]
    if trial.labels is not None:
        if not classes:
            raise InputError("classes as targets", "real numbers", where=f"{where}, labels")
        share, seed = trial.labels.get("random", 0.0), trial.labels.get("seed", trial.config.seed)
        other = bool(trial.labels.get("exclude_true", False))
        targets, _ = corrupt_labels(targets, share, n_classes, seed, exclude_true=other)
    return TrialData(x, index, targets)


def copy_state_into(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers into a module, which takes their dtype and device."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data = state[name].clone()


def detached_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name, detached."""
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def count_classes(data: Any, y: Tensor) -> int:
    """Classes of the data; 0 for regression."""
    if isinstance(data, Data):
        return data.n_classes
    return 0 if y.is_floating_point() else int(y.max()) + 1


def _read_trial(number: int, trial: Mapping[str, Any], strict: bool) -> Trial:
    where = f"trial {number}"
    if not isinstance(trial, Mapping):
        raise InputError("a dictionary of settings", type(trial).__name__, where=where)
    if strict:
        _refuse_unknown_settings(trial, where)
    config = TrainConfig.from_dict({key: trial[key] for key in CONFIG_KEYS if key in trial})
    model_seed = trial.get("model_seed", config.seed)
    if isinstance(model_seed, bool) or not isinstance(model_seed, int) or model_seed < 0:
        raise InputError("a whole number of at least 0", repr(model_seed), where=f"{where}, model_seed")
    temperature = trial.get("noise_temperature", 0.0)
    if isinstance(temperature, bool) or not isinstance(temperature, int | float) or not 0 <= temperature < math.inf:
        raise InputError("a finite number of at least 0", repr(temperature), where=f"{where}, noise_temperature")
    if temperature and config.optimizer != "sgd":
        raise InputError("sgd where there is noise", repr(config.optimizer), where=f"{where}, optimizer")
    if temperature and config.momentum >= 1:
        raise InputError("momentum below 1 where there is noise", repr(config.momentum), where=where)
    size = trial.get("train_size")
    if size is not None and (isinstance(size, bool) or not isinstance(size, int)):
        raise InputError("a whole number", repr(size), where=f"{where}, train_size")
    init_options = _mapping_of_trial(trial, "init_options", where)
    if trial.get("init_scale") is not None:
        init_options["scale"] = trial["init_scale"]
    name = str(trial.get("name", number))
    return Trial(
        index=number,
        name=name,
        config=config,
        model_seed=model_seed,
        given={**trial, "name": name, "seed": config.seed, "model_seed": model_seed},
        model_options=_mapping_of_trial(trial, "model_options", where),
        init=trial.get("init", "torch" if init_options else None),
        init_options=init_options,
        labels=_label_settings(trial, where),
        train_size=size,
        noise_temperature=float(temperature),
    )


def _refuse_unknown_settings(trial: Mapping[str, Any], where: str) -> None:
    known = (*CONFIG_KEYS, *OWN_KEYS)
    for key in trial:
        if key not in known:
            unknown = UnknownNameError.among(str(key), known, f"setting of {where}")
            unknown.fix += " Keys of your own need a build function, which receives them"
            raise unknown


def _mapping_of_trial(trial: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    value = trial.get(key) or {}
    if not isinstance(value, Mapping):
        raise InputError("a dictionary", type(value).__name__, where=f"{where}, {key}")
    return dict(value)


def _label_settings(trial: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    labels = _mapping_of_trial(trial, "labels", where)
    for key in labels:
        refuse_unknown(key, LABEL_KEYS, f"key of labels, {where}")
    share = labels.get("random", 0.0)
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
        raise InputError("a share from 0 to 1", repr(share), where=f"{where}, labels, random")
    return labels or None
