"""The training of one group of a population: epochs, evaluations, stop rules, checkpoints, and a view of it."""

from __future__ import annotations

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pandas as pd
import torch
from torch import Tensor, nn

from flatscope.errors import InputError, Interrupted, WeightsError
from flatscope.progress import Advance
from flatscope.training.checkpoint import (
    EARLIER,
    OTHERS,
    CheckpointPace,
    TrainingState,
    read_state,
    refuse_other_settings,
    write_state,
)
from flatscope.training.evaluation import Pair
from flatscope.training.fused_stack import FusedNetwork, FusedStack
from flatscope.training.loop import TrainResult, is_evaluated, next_state, train
from flatscope.training.stack import Stack
from flatscope.training.stacked_measures import StackedLayers, checked_names, measure_alone, measure_stack
from flatscope.training.trials import StackSamples, TrialGroup, copy_state_into, detached_tensors

AfterEpoch = Callable[[int, "PopulationView"], None]

STATE_KEY = "flatscope_population_state"
_WEIGHTS, _INITIAL, _VELOCITY = "weights.", "initial.", "velocity."


class PopulationView:
    """Argument of `after_epoch`: the trials of the group that has just finished an epoch. Valid during the call.

    Attributes:
        epoch: finished epochs.
        trials: positions, in the population, of the group's trials.
        active: positions of those that took part in this epoch, including those that it ended.
    """

    def __init__(
        self,
        group: TrialGroup,
        active: Sequence[int],
        weights: Mapping[str, Tensor],
        batch_losses: Sequence[float] = (),
    ) -> None:
        self._group, self._weights, self._batch_losses = group, weights, batch_losses
        self._rows = {trial.index: row for row, trial in enumerate(group.trials)}
        self.epoch = group.epoch
        self.trials = [trial.index for trial in group.trials]
        self.active = [group.trials[row].index for row in active]

    def weights(self) -> dict[str, Tensor]:
        """Copies of parameters and buffers of the `active` trials, stacked in that order, on their device."""
        return {name: value.detach().clone() for name, value in self._weights.items()}

    def state(self, trial: int) -> dict[str, Tensor]:
        """Copies of weights and buffers of one trial of the group, on the CPU."""
        if trial not in self.active:
            return self._group.state(self._row_of_trial(trial))
        place = self.active.index(trial)
        return {name: value[place].detach().to("cpu", copy=True) for name, value in self._weights.items()}

    def model(self, trial: int) -> nn.Module:
        """One trial as an ordinary module in eval mode, on the CPU."""
        model = copy.deepcopy(self._group.template)
        copy_state_into(model, self.state(trial))
        return model.eval()

    def measure(
        self,
        names: Sequence[str],
        layers: Sequence[str] | None = None,
        *,
        trials: Sequence[int] | None = None,
        samples: int | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> pd.DataFrame:
        """Flatness of chosen layers, of all networks of the group at once; the values of `flatscope.measure`.

        The samples are each trial's own training samples. What it costs: a forward pass over them, and backward passes
        from the output to the first of the layers, one less than there are classes.

        Args:
            names: of `layer_trace`, `layer_max_eigenvalue`, `kappa_trace`, `kappa`, `rho` (the largest unit),
                `rho_layer_sum`, `relative_flatness`; those with eigenvalues for dense layers only.
            layers: names of layers; all by default.
            trials: positions of some of the `active` trials; all of them by default.
            samples: how many of the training samples, from the first on; all by default.
            weights: in place of those of the trials, stacked as `weights()` gives them: other networks of the same
                structure, reparameterized ones say.

        Returns:
            A row for each trial and layer: `trial` (position), `epoch`, `layer`, and a column for each name. NaN for a
            network that is not finite.

        Raises:
            InputError: a layer of a stack cannot be measured in this way: its Hessian is not given by the columns of
                the output's (the layer is not followed by piecewise-linear functions alone, say). A network that is
                trained by itself is measured by itself, whatever its layers are.

        Example:
            >>> import flatscope as fs
            >>> found, data = [], (torch.eye(4), torch.tensor([0, 1, 0, 1]))
            >>> def after_epoch(epoch, view):
            ...     if epoch % 5 == 0:
            ...         found.append(view.measure(["kappa_trace", "rho"], ["fc2"]))
            >>> trials = [{"lr": lr, "epochs": 10, "model_options": {"widths": (4, 8, 2)}} for lr in (0.1, 1.0)]
            >>> _ = fs.train_population("mlp", trials, data, after_epoch=after_epoch)
            >>> pd.concat(found)[["trial", "epoch", "layer"]].to_numpy().tolist()
            [[0, 5, 'fc2'], [1, 5, 'fc2'], [0, 10, 'fc2'], [1, 10, 'fc2']]
        """
        group, wanted = self._group, checked_names(names)
        chosen = self.active if trials is None else list(trials)
        rows = [self._row_of_trial(trial) for trial in chosen]
        if any(trial not in self.active for trial in chosen):
            raise InputError(f"trials that took part in this epoch ({self.active})", repr(chosen), where="view.measure")
        if weights is None:
            places = [self.active.index(trial) for trial in chosen]
            weights = {name: value.detach()[places] for name, value in self._weights.items()}
        config, data = group.trials[0].config, [group.data[row].head(samples) for row in rows]
        if group.network is None:
            model = copy.deepcopy(group.template)
            copy_state_into(model, {name: value[0] for name, value in weights.items()})
            values = measure_alone(model, data[0].pair(), config.loss, wanted, layers)
        else:
            if group.layers is None:
                group.layers = StackedLayers(self.model(chosen[0]), group.data[rows[0]].pair(), config.loss)
            at = group.layers.chosen(layers, wanted)
            values = measure_stack(group.network, weights, StackSamples.of(data), config.loss, wanted, at)
        frames = []
        for layer in dict.fromkeys(layer for _, layer in values):
            columns = {name: values[name, layer].numpy() for name in wanted}
            frames.append(pd.DataFrame({"trial": chosen, "epoch": self.epoch, "layer": layer, **columns}))
        return pd.concat(frames).sort_values("trial", kind="stable", ignore_index=True)

    def batch_loss(self, trial: int) -> float:
        """Mean of the losses of the epoch's mini-batches, each as its step found it; of trials trained as a stack.

        Raises:
            InputError: the trial trains by itself, or took no part in the epoch.
        """
        if trial not in self.active or not self._batch_losses:
            fix = "Give the population two networks of one structure, which train as a stack"
            raise InputError("a trial of a stack that took part in the epoch", f"trial {trial}", "batch_loss", fix)
        return self._batch_losses[self.active.index(trial)]

    def row(self, trial: int) -> dict[str, float]:
        """Last row of the history; empty before the first (and, for a trial trained by itself, until its end)."""
        rows = self._group.records[self._row_of_trial(trial)].rows
        return dict(rows[-1]) if rows else {}

    def rows(self, trial: int) -> list[dict[str, float]]:
        """The history so far, epoch after epoch; empty where `row` is."""
        return [dict(row) for row in self._group.records[self._row_of_trial(trial)].rows]

    def stopped_by(self, trial: int) -> str | None:
        """The rule that ended the trial; None while it goes on."""
        return self._group.records[self._row_of_trial(trial)].stopped_by

    def _row_of_trial(self, trial: int) -> int:
        if trial not in self._rows:
            raise InputError(f"a trial of this group ({self.trials})", repr(trial), where="after_epoch")
        return self._rows[trial]


def train_stacked(
    group: TrialGroup,
    test: Pair | None,
    folder: Path | None,
    pace: tuple[int, float],
    after_epoch: AfterEpoch | None,
    advance: Advance,
) -> None:
    """Train a group as one stack until every trial of it has stopped, from its checkpoint if there is one.

    Checkpoints are written at the given pace (epochs, seconds), each after `after_epoch` has seen its epoch: what that
    function keeps on disk is never behind a checkpoint.

    On Ctrl-C the group holds the last finished epoch, and the KeyboardInterrupt goes on.
    """
    velocity = None if folder is None else resume_group(folder, group)
    for trial, record in zip(group.trials, group.records, strict=True):
        advance(trial.config.epochs if record.stopped_by else record.epochs)
    active = group.active
    if not active:
        return
    stack = _stack_of(group, active, velocity)
    kept, writing = _copies_of_weights(stack), CheckpointPace(*pace)
    begun = time.perf_counter() - group.seconds
    try:
        while active:
            finite = stack.train_epoch(group.epoch, advance)
            batch_losses = _batch_losses(stack)
            records, taken = list(group.records), active
            for row, record in zip(active, _states_after_epoch(group, stack, active, finite, test, begun), strict=True):
                records[row] = record
            weights = stack.weights
            going_on = [place for place, row in enumerate(active) if not records[row].stopped_by]
            group.take(weights, {place: row for place, row in enumerate(active) if records[row].stopped_by})
            if 0 < len(going_on) < len(active):
                stack = stack.keep(going_on)
            # Together, so that Ctrl-C finds the group before or after this epoch and nowhere between.
            group.records, group.epoch, group.seconds, active, kept = (
                records,
                group.epoch + 1,
                time.perf_counter() - begun,
                [taken[place] for place in going_on],
                _copies_of_weights(stack),
            )
            for row in taken:
                if records[row].stopped_by is not None:
                    advance(group.trials[row].config.epochs - records[row].epochs)
            if after_epoch is not None:
                after_epoch(group.epoch, PopulationView(group, taken, weights, batch_losses))
            if folder is not None and writing.is_due(group.epoch, over=not active):
                write_group(folder, group, stack)
    except KeyboardInterrupt:
        group.take(kept, dict(enumerate(active)))
        raise


def _stack_of(group: TrialGroup, active: Sequence[int], velocity: Mapping[str, Tensor] | None) -> Stack:
    """The trials of a group that go on, as one stack."""
    assert group.network is not None
    samples = StackSamples.of(group.data)
    if len(active) < len(group.trials):
        samples = samples.rows(torch.tensor(active, device=samples.images.device))
    kind = FusedStack if isinstance(group.network, FusedNetwork) else Stack
    return kind(
        group.network,
        [group.trials[row] for row in active],
        samples,
        {name: value[active] for name, value in group.weights.items()},
        group.trained,
        {name: group.initial[name][active] for name in group.trained},
        velocity,
    )


def train_alone(
    group: TrialGroup,
    test: Pair | None,
    folder: Path | None,
    pace: tuple[int, float],
    after_epoch: AfterEpoch | None,
    advance: Advance,
) -> None:
    """Train the one trial of a group by the plain loop, with the same records as a stack gives."""
    [trial], [data], [record] = group.trials, group.data, group.records
    model = copy.deepcopy(group.template)
    copy_state_into(model, group.state(0))
    model.to(data.images.device)
    seen = 0

    def finished(epoch: int, network: nn.Module) -> None:
        nonlocal seen
        advance(epoch - seen, note=f"trial {trial.name}, epoch {epoch}")
        seen = group.epoch = record.epochs = epoch
        if after_epoch is not None:
            weights = {name: value[None] for name, value in detached_tensors(network).items()}
            after_epoch(epoch, PopulationView(group, [0], weights))

    def keep(result: TrainResult, stopped_by: str | None) -> None:
        group.weights = {name: value[None].to("cpu", copy=True) for name, value in detached_tensors(model).items()}
        rows = [{str(key): float(value) for key, value in row.items()} for row in result.history.to_dict("records")]
        group.epoch, group.seconds = result.epochs, rows[-1]["seconds"] if rows else 0.0
        group.records = [TrainingState(result.epochs, rows, group.seconds, stopped_by)]

    place = None if folder is None else folder / f"trial-{trial.index:04d}"
    try:
        result = train(
            model,
            data.pair(),
            trial.config,
            test=test,
            checkpoint=place,
            checkpoint_every=pace[0],
            checkpoint_seconds=pace[1],
            after_epoch=finished,
            show_progress=False,
        )
    except Interrupted as interrupt:
        keep(interrupt.result, None)
        raise
    keep(result, result.stopped_by)
    advance(trial.config.epochs - seen)


def _batch_losses(stack: Stack) -> list[float]:
    """Mean of the losses of the mini-batches of the last epoch, each as its step found it, of every trial."""
    n, sums = stack.samples.targets.shape[1], stack.loss_sums.tolist()
    return [total / -(-n // trial.config.batch_size) for total, trial in zip(sums, stack.trials, strict=True)]


def _states_after_epoch(
    group: TrialGroup, stack: Stack, active: Sequence[int], finite: Sequence[bool], test: Pair | None, begun: float
) -> list[TrainingState]:
    """New states of the trials of the stack: evaluated where it is time, ended where a rule holds."""
    configs = [trial.config for trial in stack.trials]
    due = [good and is_evaluated(config, group.epoch + 1) for good, config in zip(finite, configs, strict=True)]
    measured: dict[str, list[float]] = {}
    if any(due):
        measured["train_loss"], measured["train_error"] = stack.evaluate()
        if test is not None:
            measured["test_loss"], measured["test_error"] = stack.evaluate(test)
        measured["distance"] = stack.distances()
        wanted = [config.stop_gradient_norm is not None for config in configs]
        if any(want and now for want, now in zip(wanted, due, strict=True)):
            norms = stack.gradient_norms()
            measured["gradient_norm"] = [v if want else math.nan for v, want in zip(norms, wanted, strict=True)]
    states = []
    for place, (row, config) in enumerate(zip(active, configs, strict=True)):
        trial_values = {name: values[place] for name, values in measured.items()} if due[place] else None
        states.append(next_state(group.records[row], config, finite[place], trial_values, time.perf_counter() - begun))
    return states


def write_group(folder: Path, group: TrialGroup, stack: Stack) -> None:
    """Replace the group's checkpoint by where it stands now."""
    group.take(stack.weights, dict(enumerate(group.active)))
    parts = {_WEIGHTS: group.weights, _INITIAL: group.initial, _VELOCITY: stack.velocity}
    saved = {
        "trials": [trial.description() for trial in group.trials],
        "data": group.digest,
        "records": [dataclasses.asdict(record) for record in group.records],
        "epoch": group.epoch,
        "seconds": group.seconds,
        "live": group.active,
    }
    write_state(_checkpoint_path(folder, group), STATE_KEY, parts, saved)


def resume_group(folder: Path, group: TrialGroup) -> dict[str, Tensor] | None:
    """Bring the group to where its checkpoint stands; the velocity of those that go on, or None without checkpoint.

    Raises:
        WeightsError: the file is damaged or not a checkpoint of a population.
        InputError: trials or data differ from those of the checkpoint.
    """
    path = _checkpoint_path(folder, group)
    if not path.exists():
        return None
    parts, saved = read_state(path, STATE_KEY)
    here, where = [trial.description() for trial in group.trials], f"resume from {path}"
    if len(here) != len(saved["trials"]):
        raise InputError(
            "the trials of the checkpoint", f"{len(saved['trials'])} there, {len(here)} here", where, OTHERS
        )
    for mine, theirs in zip(here, saved["trials"], strict=True):
        refuse_other_settings(mine, EARLIER | theirs, f"{where}, trial {mine['name']}")
    if saved["data"] != group.digest:
        raise InputError("the training data of the checkpoint", "others", where, OTHERS)
    shapes = {name: value.shape for name, value in group.weights.items()}
    if any({name: t.shape for name, t in parts[key].items()} != shapes for key in (_WEIGHTS, _INITIAL)):
        raise WeightsError("weights of these networks", "weights of others", where=str(path))
    group.weights, group.initial, group.records = parts[_WEIGHTS], parts[_INITIAL], saved["states"]
    group.epoch, group.seconds = int(saved["epoch"]), float(saved["seconds"])
    places = [saved["live"].index(row) for row in group.active]  # earlier versions kept some that had stopped
    return {name: value[places] for name, value in parts[_VELOCITY].items()}


def _checkpoint_path(folder: Path, group: TrialGroup) -> Path:
    return folder / f"group-{group.number:03d}.safetensors"


def _copies_of_weights(stack: Stack) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in stack.weights.items()}
