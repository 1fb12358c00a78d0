"""`train_population`: hundreds of networks trained at once, each as plain training would have trained it."""

from __future__ import annotations

import copy
import os
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, Interrupted, first_line
from flatscope.formatting import first_of_names
from flatscope.input_checks import usable_device, usable_dtype
from flatscope.isolation import derivatives_on
from flatscope.progress import progress_bar
from flatscope.training.checkpoint import CheckpointPace, TrainingState, prepare_folder
from flatscope.training.evaluation import Pair, check_training_settings, checked_pair, checked_targets, unpack_pairs
from flatscope.training.fused_chain import NotFused
from flatscope.training.fused_stack import Fusing
from flatscope.training.group_training import AfterEpoch, train_alone, train_stacked
from flatscope.training.population_result import Population
from flatscope.training.stacked_layers import NotStackable, StackedNetwork
from flatscope.training.trials import (
    Build,
    Pairs,
    Trial,
    TrialData,
    TrialGroup,
    build_model,
    copy_state_into,
    count_classes,
    detached_tensors,
    read_trials,
    trial_data,
)

PROBED_SAMPLES = 4
# Multiplications of a forward pass over a batch from which on dense layers alone are trained faster as a stack: on an
# H200 five networks 784-w-10 take as long in both ways at w = 32 with batches of 64, and at w = 700 with batches of 4.
LARGE_PRODUCTS = 2e6


@derivatives_on()
def train_population(
    build: Build,
    trials: Sequence[Mapping[str, Any]],
    data: Any,
    *,
    test: Pair | None = None,
    pairs: Pairs | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype | None = None,
    checkpoint: str | os.PathLike[str] | None = None,
    checkpoint_every: int = 1,
    checkpoint_seconds: float = 0.0,
    after_epoch: AfterEpoch | None = None,
    stacked: bool | str = "auto",
    show_progress: bool = True,
) -> Population:
    """Train many networks, those of one architecture as a single stack; each takes the steps that `train` takes.

    Trials with the same layers, batch size, loss, number of samples, augmentation and optimizer form a group and run
    together: grouped convolutions and batched matrix products, on a GPU in one CUDA graph per step. Groups run one
    after the other. A trial that has stopped or diverged no longer changes and does not touch the others.

    Small chains of convolution, pooling, dense layers and ReLU that are trained on a GPU by SGD with cross-entropy run
    in a fused kernel instead: each network has a multiprocessor to itself for a whole epoch, and trials of all batch
    sizes are one group. Large dense layers alone stay a stack, whose matrix products fill the GPU, unless
    `stacked="fused"`. `population.meta["trained_by"]` says of every group what trained it, and why not the kernel.

    A trial is a dictionary with any of

    * the settings of `TrainConfig`: `optimizer`, `lr`, `momentum`, `batch_size`, `epochs`, `seed`, `stop_loss`, …;
    * `name`; `model_seed` of the starting weights (`seed` by default); `model_options` of a built-in model;
    * `init`, a scheme of `initialize`, with `init_options` and `init_scale`;
    * `labels`: {"random": share of the labels that are drawn again, "seed": …, "exclude_true": …};
    * `train_size`: a class-balanced draw of that many samples, by `seed`;
    * `noise_temperature`: Langevin noise of that temperature in every step, as `SGLD` has it.

    Args:
        build: name of a built-in model, or a function of the trial (with keys of your own) that returns a module.
        trials: one dictionary per network.
        data: (x, y), ((x, y), (x_test, y_test)), or an object with such pairs as `.train` and `.test`.
        test: test pair, in place of the one in `data`.
        pairs: function of the trial that gives its own training pair (x, y), in place of that of `data`. Return the
            same x where trials share it, so that it is kept once.
        device: where to train; the device of the data by default.
        dtype: torch.float32 or torch.float64; that of the networks by default.
        checkpoint: folder for the state of each group after every `checkpoint_every`-th epoch and at its end. The same
            call with a folder that holds such states goes on from there.
        checkpoint_every: epochs between checkpoints.
        checkpoint_seconds: a checkpoint within that time of the one before, or of the start, is left out.
        after_epoch: called as after_epoch(finished epochs, view of the group) after every epoch of every group; the
            view gives weights, models and history rows. Of stacks it is called before the epoch's checkpoint: a run
            that goes on calls it again for every epoch that its checkpoint lacks.
        stacked: "auto": by the fused kernel where it can, else as stacks; networks that cannot be stacked are trained
            one by one, with a warning that says why; True: these are refused; "fused", "stack": only in this way, what
            cannot be is refused; False: all are trained one by one. A checkpoint goes on in the way it was begun.
        show_progress: a bar on terminals, for runs of more than two seconds.

    Raises:
        InputError: trials, data and checkpoint do not fit together; nothing has been trained then.
        Interrupted: Ctrl-C; its `result` holds every trial as of its last finished epoch.

    Example:
        >>> x, y = torch.eye(4), torch.tensor([0, 1, 0, 1])
        >>> trials = [{"lr": lr, "epochs": 50, "model_options": {"widths": (4, 8, 2)}} for lr in (0.1, 1.0)]
        >>> population = train_population("mlp", trials, (x, y))
        >>> population
        Population(2 networks in 1 group; stopped: 2 by epochs)
        >>> population.frame()["train_loss"].is_monotonic_decreasing
        True
    """
    if stacked not in ("auto", "fused", "stack", True, False):
        expected = '"auto", "fused", "stack", True or False'
        raise InputError(expected, repr(stacked), where="train_population, stacked")
    CheckpointPace(checkpoint_every, checkpoint_seconds)  # refuses what cannot be meant
    read = read_trials(trials, build)
    pair, held_out = unpack_pairs(data, test)
    place = pair[0].device if device is None else usable_device(device)
    n_classes = count_classes(data, pair[1])
    home = _Home(place)
    parts = [_samples_of_trial(trial, pair, pairs, n_classes) for trial in read]
    models = [build_model(build, trial, part.images, n_classes) for trial, part in zip(read, parts, strict=True)]
    groups, reasons = _groups_of_trials(build, read, parts, models, stacked, dtype, home)
    tested = [_check_group_data(group, held_out, place) for group in groups]
    folder = None if checkpoint is None else Path(checkpoint)
    if folder is not None:
        prepare_folder(folder)
    for reason, names in reasons.items():
        warnings.warn(f"trials {first_of_names(names, 5)} are trained one by one: {reason}", UserWarning, stacklevel=2)
    population = Population(read, groups, held_out)
    bar = progress_bar("training", total=sum(trial.config.epochs for trial in read), shown=show_progress)
    try:
        with bar as advance:
            for group, own_test in zip(groups, tested, strict=True):
                run = train_alone if group.network is None else train_stacked
                run(group, own_test, folder, (checkpoint_every, checkpoint_seconds), after_epoch, advance)
    except KeyboardInterrupt:
        raise Interrupted(_advice_after_interrupt(population, folder), population) from None
    return population


class _Home:
    """Tensors brought to the device and dtype once, however many trials share them."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._known: dict[tuple[int, torch.dtype | None], tuple[Tensor, Tensor]] = {}

    def __call__(self, tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        key = (id(tensor), dtype)
        if key not in self._known:  # the original is kept as well: an id means nothing once its object is gone
            moved = tensor.to(self.device, dtype) if tensor.is_floating_point() else tensor.to(self.device)
            self._known[key] = (tensor, moved)
        return self._known[key][1]


def _samples_of_trial(trial: Trial, pair: Pair, pairs: Pairs | None, n_classes: int) -> TrialData:
    if pairs is None:
        return trial_data(trial, *pair, n_classes)
    samples = pairs(trial.given)
    if not (
        isinstance(samples, tuple | list) and len(samples) == 2 and all(isinstance(part, Tensor) for part in samples)
    ):
        raise InputError("a pair of tensors (x, y)", type(samples).__name__, where=f"pairs, trial {trial.name}")
    return trial_data(trial, samples[0], samples[1], n_classes)


def _groups_of_trials(
    build: Build,
    trials: Sequence[Trial],
    parts: Sequence[TrialData],
    models: Sequence[nn.Module],
    stacked: bool | str,
    dtype: torch.dtype | None,
    home: _Home,
) -> tuple[list[TrialGroup], dict[str, list[str]]]:
    """Trials by what must be the same in a stack; and for those that cannot be stacked, the reasons.

    The fused kernel takes all batch sizes together.
    """
    gathered: dict[tuple[object, ...], list[int]] = {}
    networks: dict[tuple[object, ...], StackedNetwork | None] = {}
    reasons: dict[str, list[str]] = {}
    known: dict[str, StackedNetwork] = {}
    kind = None if dtype is None else usable_dtype(dtype, dtype)
    fusing = Fusing(home.device, max(trial.config.batch_size for trial in trials), wanted=stacked != "stack")
    ways: dict[tuple[object, ...], str] = {}
    for i, (trial, part, model) in enumerate(zip(trials, parts, models, strict=True)):
        model.to(torch.device("cpu"), kind)
        key: tuple[object, ...] = (i,)  # of a trial that is trained alone
        network = None
        if stacked is False:
            _refuse_alone(trial, "stacked=False", False)
        else:
            try:
                network = _stacked_network(build, model, part.images, known)
                network, key, way = _fused_or_stacked(fusing, network, model, trial, part, stacked)
                if key not in networks:
                    _compare_stack_with_single_networks(network, model, part.images)
                    ways[key] = way
            except NotStackable as problem:
                network, key = None, (i,)
                _refuse_alone(trial, str(problem), stacked != "auto")
                reasons.setdefault(str(problem), []).append(trial.name)
        gathered.setdefault(key, []).append(i)
        networks.setdefault(key, network)
    groups = []
    for number, (key, members) in enumerate(gathered.items()):
        states = [detached_tensors(models[i]) for i in members]
        weights = {name: torch.stack([state[name] for state in states]) for name in states[0]}
        first, network = models[members[0]], networks[key]
        trained = [name for name, p in first.named_parameters() if p.requires_grad]
        groups.append(
            TrialGroup(
                number=number,
                trials=[trials[i] for i in members],
                data=[_samples_on_device(parts[i], home, next(first.parameters()).dtype) for i in members],
                template=first,
                network=network,
                weights=weights,
                initial={name: value.clone() for name, value in weights.items()},
                trained=[name for name in trained if network is None or name in network.used],
                records=[TrainingState() for _ in members],
                trained_by=ways.get(key, "one by one"),
            )
        )
    return groups, reasons


def _fused_or_stacked(
    fusing: Fusing, network: StackedNetwork, model: nn.Module, trial: Trial, part: TrialData, stacked: bool | str
) -> tuple[StackedNetwork, tuple[object, ...], str]:
    """The network, the key of trials that share it, and how they are trained: by the fused kernel where it may be."""
    key = _group_key(network, model, trial, part)
    try:
        if stacked == "auto" and (
            not network.has_convolutions and network.products * trial.config.batch_size > LARGE_PRODUCTS
        ):
            raise NotFused("it has large dense layers alone, whose products a stack takes together")
        return fusing(key, model, trial, part), key, "fused kernel"
    except NotFused as problem:
        if stacked == "fused":
            raise NotStackable(str(problem)) from None
        return network, (*key, trial.config.batch_size), f"stack: {problem}"


def _stacked_network(
    build: Build, model: nn.Module, images: Tensor, known: dict[str, StackedNetwork]
) -> StackedNetwork:
    """The structure of a network; a built-in model, which its text describes in full, is looked at once."""
    if not isinstance(build, str):
        return StackedNetwork(model, images)
    if repr(model) not in known:
        known[repr(model)] = StackedNetwork(model, images)
    return known[repr(model)]


def _samples_on_device(part: TrialData, home: _Home, dtype: torch.dtype) -> TrialData:
    index = None if part.index is None else home(part.index)
    return TrialData(home(part.images, dtype), index, home(part.targets, dtype))


def _group_key(network: StackedNetwork, model: nn.Module, trial: Trial, part: TrialData) -> tuple[object, ...]:
    config = trial.config
    tensors = [(name, value.shape, value.dtype, value.requires_grad) for name, value in model.named_parameters()]
    tensors += [(name, value.shape, value.dtype, False) for name, value in model.named_buffers()]
    shapes = (part.images.shape[1:], part.images.dtype, part.targets.shape, part.targets.dtype)
    return (network.signature, *tensors, config.loss, config.augmentation, config.precision, config.optimizer, *shapes)


def _compare_stack_with_single_networks(network: StackedNetwork, model: nn.Module, images: Tensor) -> None:
    """Run a stack of two different networks on different samples, in float64, against each by itself."""
    chosen = torch.arange(2 * PROBED_SAMPLES, device=images.device) % len(images)
    samples = images[chosen].cpu().reshape(2, PROBED_SAMPLES, *images.shape[1:])
    samples = samples.double() if samples.is_floating_point() else samples
    state = {name: v.double() if v.is_floating_point() else v for name, v in detached_tensors(model).items()}
    states = [state, {name: v * 1.1 if v.is_floating_point() else v for name, v in state.items()}]
    inputs = samples if network.trials_first else samples.transpose(0, 1)
    for training in (False, True):
        alone = []
        for own, batch in zip(states, samples, strict=True):
            single = copy.deepcopy(model).train(training)
            copy_state_into(single, own)
            with torch.no_grad():
                try:
                    alone.append(single(batch))
                except Exception:  # the checks of the data say what is wrong, in better words
                    return
        weights = {name: torch.stack([own[name] for own in states]) for name in state}
        try:
            with torch.no_grad():
                together = network(weights, inputs, training=training)
        except Exception as problem:
            raise NotStackable(f"its layers fail on a stack ({first_line(problem)})") from None
        expected = torch.stack(alone)
        if together.shape != expected.shape or not torch.allclose(together, expected, rtol=1e-8, atol=1e-10):
            raise NotStackable("a stack of it gives other outputs than each network by itself")


def _refuse_alone(trial: Trial, reason: str, refused: bool) -> None:
    """Refuse a trial that the plain loop cannot train, or for which the user has ruled it out."""
    if refused:
        fix = 'Take stacked="auto" to train it in another'
        raise InputError("a network that can be trained in the wanted way", reason, f"trial {trial.name}", fix)
    if trial.noise_temperature:
        expected = "a network that can be stacked, since only stacks have noise"
        fix = "Leave the noise out, or train it with flatscope.SGLD"
        raise InputError(expected, reason, f"trial {trial.name}, noise_temperature", fix)


def _check_group_data(group: TrialGroup, held_out: Pair | None, device: torch.device) -> Pair | None:
    """Refuse data that do not fit the networks; the test pair on the device."""
    model = copy.deepcopy(group.template).to(device).eval()
    if not group.trained:
        raise InputError("networks with trainable parameters", "none", where=f"trial {group.trials[0].name}")
    dtype = next(model.parameters()).dtype
    seen: dict[int, Tensor] = {}
    for row, (trial, part) in enumerate(zip(group.trials, group.data, strict=True)):
        where = f"training data of trial {trial.name}"
        if id(part.images) not in seen:
            checked_pair(model, part.pair(), trial.config, device, where)
            with torch.no_grad():
                seen[id(part.images)] = model(part.images[:2])
        targets = checked_targets(seen[id(part.images)], part.targets, trial.config.loss, where)
        check_training_settings(model, targets, trial.config)
        group.data[row] = TrialData(part.images, part.index, targets)
    if held_out is None:
        return None
    x, y = held_out
    pair = (x.to(device, dtype) if x.is_floating_point() else x, y)
    return checked_pair(model, pair, group.trials[0].config, device, "test data")


def _advice_after_interrupt(population: Population, folder: Path | None) -> str:
    """Advice after Ctrl-C."""
    frame = population.frame()
    done = int((frame["stopped_by"] != "interrupted").sum())
    text = f"training stopped with {done} of {len(population)} networks finished"
    if folder is None:
        return f"{text}; nothing was saved, since no checkpoint folder was given"
    return f"{text}; the same call with checkpoint={str(folder)!r} goes on from the last checkpoint"
