"""Trials that are trained together: where each stands, and their weights."""

from __future__ import annotations

import copy
import functools
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pandas as pd
import torch
from torch import Tensor, nn

from flatscope.errors import InputError
from flatscope.training.checkpoint import TrainingState, fingerprint
from flatscope.training.stacked_layers import StackedNetwork
from flatscope.training.stacked_measures import StackedLayers, checked_names, measure_alone, measure_stack
from flatscope.training.trials import StackSamples, Trial, TrialData


@dataclass
class Group:
    """Trials of one architecture.

    Attributes:
        number: position among the groups.
        trials: the trials, `data` their samples.
        template: a module of their structure; its values do not matter.
        network: the structure for stacked training; None for a trial that is trained by itself.
        weights: parameters and buffers of all trials, stacked in their order, on the CPU: of the trials that have
            stopped, and of the others as of the last time they were asked for.
        initial: the same before training.
        trained: names of the parameters that are trained.
        records: where each trial stands.
        epoch, seconds: finished epochs of the group, and the time they took.
        layers: what can be measured along the way, once that was asked for.
        trained_by: "fused kernel"; "stack" or "one by one" with the reason.
    """

    number: int
    trials: list[Trial]
    data: list[TrialData]
    template: nn.Module
    network: StackedNetwork | None
    weights: dict[str, Tensor]
    initial: dict[str, Tensor]
    trained: list[str]
    records: list[TrainingState] = field(default_factory=list)
    epoch: int = 0
    seconds: float = 0.0
    layers: StackedLayers | None = None
    trained_by: str = ""

    @functools.cached_property
    def digest(self) -> str:
        """One fingerprint of the data of all trials, which stay the same once training has begun."""
        digest = hashlib.blake2b(digest_size=16)
        known: dict[int, str] = {}
        for part in self.data:
            if id(part.images) not in known:
                known[id(part.images)] = fingerprint(part.images, part.images.new_zeros(0))
            chosen = part.targets if part.index is None else torch.stack([part.index.double(), part.targets.double()])
            digest.update((known[id(part.images)] + fingerprint(chosen, part.targets)).encode())
        return digest.hexdigest()

    def state(self, row: int, *, initial: bool = False) -> dict[str, Tensor]:
        """Copies of the weights and buffers of one trial, on the CPU."""
        return {name: value[row].clone() for name, value in (self.initial if initial else self.weights).items()}

    def model(self, row: int) -> nn.Module:
        """An ordinary module in eval mode, on the CPU."""
        model = copy.deepcopy(self.template)
        fill(model, self.state(row))
        return model.eval()

    @property
    def active(self) -> list[int]:
        """Rows of the trials that have not stopped."""
        return [row for row, record in enumerate(self.records) if record.stopped_by is None]

    def take(self, weights: Mapping[str, Tensor], rows: Mapping[int, int]) -> None:
        """Copy weights of a stack: `rows` says for places in it which rows of the group they are."""
        for name, value in weights.items():
            self.weights[name][list(rows.values())] = value[list(rows)].cpu()


class PopulationView:
    """What `after_epoch` sees: the trials of the group that has just finished an epoch. Valid during the call.

    Attributes:
        epoch: finished epochs.
        trials: positions, in the population, of the group's trials.
        active: positions of those that took part in this epoch, including those that it ended.
    """

    def __init__(self, group: Group, active: Sequence[int], weights: Mapping[str, Tensor]) -> None:
        self._group, self._weights = group, weights
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
            return self._group.state(self._row(trial))
        place = self.active.index(trial)
        return {name: value[place].detach().to("cpu", copy=True) for name, value in self._weights.items()}

    def model(self, trial: int) -> nn.Module:
        """One trial as an ordinary module in eval mode, on the CPU."""
        model = copy.deepcopy(self._group.template)
        fill(model, self.state(trial))
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
        rows = [self._row(trial) for trial in chosen]
        if any(trial not in self.active for trial in chosen):
            raise InputError(f"trials that took part in this epoch ({self.active})", repr(chosen), where="view.measure")
        if weights is None:
            places = [self.active.index(trial) for trial in chosen]
            weights = {name: value.detach()[places] for name, value in self._weights.items()}
        config, data = group.trials[0].config, [group.data[row].head(samples) for row in rows]
        if group.network is None:
            model = copy.deepcopy(group.template)
            fill(model, {name: value[0] for name, value in weights.items()})
            found = measure_alone(model, data[0].pair(), config.loss, wanted, layers)
        else:
            if group.layers is None:
                group.layers = StackedLayers(self.model(chosen[0]), group.data[rows[0]].pair(), config.loss)
            at = group.layers.chosen(layers, wanted)
            found = measure_stack(group.network, weights, StackSamples.of(data), config.loss, wanted, at)
        frames = []
        for layer in dict.fromkeys(layer for _, layer in found):
            columns = {name: found[name, layer].numpy() for name in wanted}
            frames.append(pd.DataFrame({"trial": chosen, "epoch": self.epoch, "layer": layer, **columns}))
        return pd.concat(frames).sort_values("trial", kind="stable", ignore_index=True)

    def row(self, trial: int) -> dict[str, float]:
        """Last row of the history; empty before the first (and, for a trial trained by itself, until its end)."""
        rows = self._group.records[self._row(trial)].rows
        return dict(rows[-1]) if rows else {}

    def rows(self, trial: int) -> list[dict[str, float]]:
        """The history so far, epoch after epoch; empty where `row` is."""
        return [dict(row) for row in self._group.records[self._row(trial)].rows]

    def stopped_by(self, trial: int) -> str | None:
        """The rule that ended the trial; None while it goes on."""
        return self._group.records[self._row(trial)].stopped_by

    def _row(self, trial: int) -> int:
        if trial not in self._rows:
            raise InputError(f"a trial of this group ({self.trials})", repr(trial), where="after_epoch")
        return self._rows[trial]


def fill(model: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Copy parameters and buffers into a module, which takes their dtype and device."""
    with torch.no_grad():
        for name, value in [*model.named_parameters(), *model.named_buffers()]:
            value.data = state[name].clone()


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers of a module by name, detached."""
    return {name: value.detach() for name, value in [*model.named_parameters(), *model.named_buffers()]}
