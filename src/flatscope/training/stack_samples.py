"""Samples of one epoch of a stack: each trial's order, targets and augmentation, drawn as by plain training."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flatscope.training.checkpoint import augmentation_draws, epoch_order
from flatscope.training.loop import crop_and_flip
from flatscope.training.trials import StackSamples, Trial


def sample_orders(trials: Sequence[Trial], n: int, epoch: int) -> Tensor:
    """The order in which each trial takes its samples, as plain training has it, (trials, n)."""
    settings = [trial.config for trial in trials]
    return torch.stack([epoch_order(n, config.seed, epoch, shuffle=config.shuffle) for config in settings])


class EpochSamples:
    """Buffers that are filled anew for every epoch: a captured step reads them at the same place.

    Args:
        trials: their settings; the augmentation is the same for all.
        samples: their training data.
        trials_first: whether the network reads inputs (trials, samples, ...) rather than (samples, trials, ...).
        layout: memory format of the inputs.
    """

    def __init__(
        self, trials: Sequence[Trial], samples: StackSamples, *, trials_first: bool, layout: torch.memory_format
    ) -> None:
        self._trials, self._samples = trials, samples
        self._trials_first, self._layout = trials_first, layout
        self._augmented = trials[0].config.augmentation == "crop-flip"
        k, n, device = len(trials), samples.targets.shape[1], samples.images.device
        n_augmented = n if self._augmented else 0
        self.n = n
        self._order = torch.empty(k, n, dtype=torch.int64, device=device)
        self._targets = torch.empty_like(samples.targets)
        self._offsets = torch.zeros(k, n_augmented, 2, dtype=torch.int64, device=device)
        self._flips = torch.zeros(k, n_augmented, dtype=torch.bool, device=device)

    def prepare(self, epoch: int) -> None:
        """Draw the order and the augmentation of an epoch."""
        samples, device = self._samples, self._order.device
        orders = sample_orders(self._trials, self.n, epoch).to(device)
        rows = torch.arange(len(self._trials), device=device)[:, None]
        self._order.copy_(orders if samples.index is None else samples.index.gather(1, orders))
        self._targets.copy_(samples.targets[rows, orders])
        if self._augmented:
            for row, trial in enumerate(self._trials):
                self._offsets[row], self._flips[row] = augmentation_draws(self.n, trial.config.seed, epoch)

    def batch(self, rows: slice, columns: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets (t, b, ...) of some trials at these places of their order."""
        images = self._order[rows].index_select(1, columns)
        inputs = self._samples.images[self._with_axes_in_network_order(images)]
        shape = inputs.shape
        if self._augmented:
            offsets, flips = (
                self._with_axes_in_network_order(values[rows].index_select(1, columns)).flatten(0, 1)
                for values in (self._offsets, self._flips)
            )
            inputs = crop_and_flip(inputs.flatten(0, 1), offsets, flips)
        inputs = inputs.reshape(-1, *shape[2:]).to(memory_format=self._layout).reshape(shape)
        return inputs, self._targets[rows].index_select(1, columns)

    def _with_axes_in_network_order(self, values: Tensor) -> Tensor:
        """The axes of trials and samples in the order that the network reads."""
        return values if self._trials_first else values.transpose(0, 1)
