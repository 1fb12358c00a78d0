"""Many networks of one architecture trained as one: their weights lie stacked and take every step together.

A step is that of `torch.optim.SGD`, with a learning rate, momentum and weight decay of each trial's own. All trained
weights are one vector (parameter after parameter, trial after trial within it), so that an update is a few operations
however many trials and layers there are. On a GPU the whole step is one CUDA graph.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.progress import Advance
from flatscope.training.checkpoint import epoch_order, learning_rate, stream_seed
from flatscope.training.evaluation import EVALUATION_BATCH
from flatscope.training.loop import BAR_SECONDS, CROP_PADDING, crop_and_flip
from flatscope.training.stacked_layers import StackedNetwork
from flatscope.training.trials import Trial, TrialData

# Samples of all trials evaluated at once: enough to keep the device busy, few enough for memory and caches.
EVALUATED_AT_ONCE = {"cpu": 4_096, "cuda": 65_536}
WARM_UP_STEPS = 3
# Where grouped convolutions may read a neighbour's channels times zero: NaN and infinity then go over to it.
MIXING_DEVICES = {"cuda"}


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
        every = [torch.arange(len(p.images), device=p.targets.device) if p.index is None else p.index for p in data]
        index = torch.stack([starts[id(p.images)] + chosen for p, chosen in zip(data, every, strict=True)])
        return cls(banks[0] if len(banks) == 1 else torch.cat(banks), index, targets)

    def rows(self, kept: Tensor) -> StackSamples:
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


class Stack:
    """The trials that are being trained together, on their device.

    Args:
        network: what they have in common.
        trials: their settings; batch size, loss, number of samples and augmentation are the same for all.
        samples: their training data.
        weights: parameters and buffers, stacked in the order of `trials`; copied.
        trained: names of the parameters to train.
        initial: the trained parameters before training, stacked.
        velocity: momentum buffers of a run that goes on.
    """

    def __init__(
        self,
        network: StackedNetwork,
        trials: Sequence[Trial],
        samples: StackSamples,
        weights: Mapping[str, Tensor],
        trained: Sequence[str],
        initial: Mapping[str, Tensor],
        velocity: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.network, self.trials, self.samples = network, list(trials), samples
        self.device = samples.images.device
        self.initial = {name: initial[name].to(self.device) for name in trained}
        self.constants = {
            name: value.to(self.device, copy=True) for name, value in weights.items() if name not in trained
        }
        self._flat = torch.cat([weights[name].to(self.device).reshape(-1) for name in trained])
        self.trained = {
            name: view.detach().requires_grad_() for name, view in self._views(self._flat, weights, trained).items()
        }
        config = self.trials[0].config
        self._batch_size, self._loss = config.batch_size, config.loss
        self._augmented = config.augmentation == "crop-flip"
        self._velocity: Tensor | None = None
        self.velocity: dict[str, Tensor] = {}
        if any(trial.config.momentum for trial in self.trials):
            self._velocity = torch.zeros_like(self._flat)
            self.velocity = self._views(self._velocity, weights, trained)
            for name, value in (velocity or {}).items():
                self.velocity[name].copy_(value)
        self._momentum = self._each([trial.config.momentum for trial in self.trials])
        self._decay = self._each([trial.config.weight_decay for trial in self.trials])
        schedules = {(t.config.lr, t.config.lr_steps, t.config.lr_decay) for t in self.trials}
        # Minus the learning rate: of all weights, or of each.
        self._rate = self._flat.new_empty(()) if len(schedules) == 1 else torch.empty_like(self._flat)
        self._noisy = [row for row, trial in enumerate(self.trials) if trial.noise_temperature]
        self._noise = self._flat.new_zeros(
            len(self.trials), self._flat.numel() // len(self.trials) if self._noisy else 0
        )
        self._noise_power = torch.empty_like(self._flat) if self._noisy else None
        n, device = samples.targets.shape[1], self.device
        self._total = torch.zeros(len(self.trials), dtype=torch.float64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = torch.arange(config.batch_size, device=device)
        self._order = torch.empty(len(self.trials), n, dtype=torch.int64, device=device)
        self._targets = torch.empty_like(samples.targets)
        self._offsets = torch.zeros(len(self.trials), n if self._augmented else 0, 2, dtype=torch.int64, device=device)
        self._flips = torch.zeros(len(self.trials), n if self._augmented else 0, dtype=torch.bool, device=device)
        self._replay: Callable[[], None] | None = None
        self._may_mix = network.has_convolutions and self.device.type in MIXING_DEVICES and len(self.trials) > 1
        self._halted = torch.zeros(len(self.trials), dtype=torch.bool, device=device)
        self._trial_of_weight = self._spread(range(len(self.trials))).int() if self._may_mix else None

    @property
    def weights(self) -> dict[str, Tensor]:
        """Parameters and buffers as they are now, stacked; not copies."""
        return {**self.constants, **{name: value.detach() for name, value in self.trained.items()}}

    def keep(self, rows: Sequence[int]) -> Stack:
        """A smaller stack with some of the trials, at the same place of their training."""
        kept = torch.tensor(rows, device=self.device)
        weights, initial, velocity = (
            {name: value[kept] for name, value in group.items()}
            for group in (self.weights, self.initial, self.velocity)
        )
        trials = [self.trials[row] for row in rows]
        if not any(trial.config.momentum for trial in trials):
            velocity = {}
        return type(self)(self.network, trials, self.samples.rows(kept), weights, list(self.trained), initial, velocity)

    def train_epoch(self, epoch: int, advance: Advance) -> list[bool]:
        """One pass of every trial over its samples; for each, whether losses and weights stayed finite."""
        before = self._copy() if self._may_mix else None
        finite = self._pass(epoch, advance)
        lost = [row for row, good in enumerate(finite) if not good]
        if before is None or not lost:
            return finite
        # Some diverged, others may only have been their neighbours: once more without the rest, at last each by itself.
        for rows in [lost] if len(lost) < len(finite) else [[row] for row in lost]:
            again = before.keep(rows)
            for row, good in zip(rows, again.train_epoch(epoch, lambda *_, **__: None), strict=True):
                finite[row] = good
            for name, value in again.weights.items():
                self.weights[name][rows] = value
            for name, value in self.velocity.items():
                value[rows] = again.velocity[name] if again.velocity else 0.0
        return finite

    def _pass(self, epoch: int, advance: Advance) -> list[bool]:
        """All steps of an epoch, and which trials came out finite."""
        generators = self._prepare(epoch)
        n, shown, shown_at = self._order.shape[1], 0, time.monotonic()
        for start in range(0, n, self._batch_size):
            size = min(self._batch_size, n - start)
            for row, generator in generators.items():
                self._noise[row].normal_(generator=generator)
            if size == self._batch_size and self.device.type == "cuda":
                self._replay = self._replay or self._captured()
                self._replay()
            else:
                self._step(size)
            if time.monotonic() - shown_at > BAR_SECONDS:
                advance(len(self.trials) * (start + size - shown) / n, note=f"epoch {epoch + 1}")
                shown, shown_at = start + size, time.monotonic()
        advance(len(self.trials) * (n - shown) / n, note=f"epoch {epoch + 1}")
        for name, value in self.constants.items():
            if name.rpartition(".")[2] == "num_batches_tracked":
                value += -(-n // self._batch_size)
        finite = [value.detach().flatten(1).isfinite().all(1) for value in self.trained.values()]
        good: list[bool] = torch.stack([self._total.isfinite(), *finite]).all(0).tolist()
        return good

    def evaluate(self, held_out: tuple[Tensor, Tensor] | None = None) -> tuple[list[float], list[float]]:
        """Mean loss and share of misclassified samples of every trial, in eval mode; the share is NaN without classes.

        Args:
            held_out: samples that are the same for all trials; each trial's own training samples by default.
        """
        total, wrong = torch.zeros(2, len(self.trials), dtype=torch.float64, device=self.device)
        n = 0
        with torch.no_grad():
            for inputs, targets in self._batches(held_out):
                outputs = self.network(self.weights, inputs)
                total += losses(outputs, targets, self._loss).double().sum(1)
                if not targets.is_floating_point():
                    wrong += (outputs.argmax(2) != targets).sum(1)
                n += targets.shape[1]
        if targets.is_floating_point():
            wrong.fill_(torch.nan)
        means, shares = (total / n).tolist(), (wrong / n).tolist()
        for row in self._suspects(means):
            [means[row]], [shares[row]] = self.keep([row]).evaluate(held_out)
        return means, shares

    def gradient_norms(self) -> list[float]:
        """Length of the gradient of each trial's mean training loss, in eval mode."""
        leaves = list(self.trained.values())
        sums = [torch.zeros_like(leaf, requires_grad=False) for leaf in leaves]
        n = self.samples.targets.shape[1]
        for inputs, targets in self._batches(None):
            value = losses(self.network({**self.constants, **self.trained}, inputs), targets, self._loss).sum()
            for total, part in zip(sums, torch.autograd.grad(value, leaves), strict=True):
                total += part
        norms: list[float] = (_lengths(sums) / n).tolist()
        for row in self._suspects(norms):
            [norms[row]] = self.keep([row]).gradient_norms()
        return norms

    def distances(self) -> list[float]:
        """‖w − w₀‖ of each trial over all trained parameters."""
        moved: list[float] = _lengths(
            [value.detach() - self.initial[name] for name, value in self.trained.items()]
        ).tolist()
        return moved

    def _copy(self) -> Stack:
        return self.keep(range(len(self.trials)))

    def _suspects(self, values: Sequence[float]) -> list[int]:
        """Rows without a finite value that may have it from a neighbour, and must be looked at by themselves."""
        lost = [row for row, value in enumerate(values) if not math.isfinite(value)]
        return lost if self._may_mix else []

    def _prepare(self, epoch: int) -> dict[int, torch.Generator]:
        """Rates, sample orders and augmentation of an epoch; the noise generators of the trials that have noise."""
        rates = [learning_rate(trial.config, epoch) for trial in self.trials]
        if self._rate.ndim:
            self._rate.copy_(self._spread([-rate for rate in rates]))
        else:
            self._rate.fill_(-rates[0])
        if self._noise_power is not None:
            # The noise √(2γ(1−β)T) enters the velocity, which here is divided by the rate γ.
            powers = [
                (2 * (1 - trial.config.momentum) * trial.noise_temperature / rate) ** 0.5
                for trial, rate in zip(self.trials, rates, strict=True)
            ]
            self._noise_power.copy_(self._spread(powers))
        n, orders = self._order.shape[1], self._orders(epoch).to(self.device)
        rows = torch.arange(len(self.trials), device=self.device)[:, None]
        self._order.copy_(orders if self.samples.index is None else self.samples.index.gather(1, orders))
        self._targets.copy_(self.samples.targets[rows, orders])
        if self._augmented:
            for row, trial in enumerate(self.trials):  # drawn as the plain loop draws them
                generator = torch.Generator().manual_seed(stream_seed(trial.config.seed, epoch, "augmentation"))
                self._offsets[row] = torch.randint(0, 2 * CROP_PADDING + 1, (n, 2), generator=generator)
                self._flips[row] = torch.rand(n, generator=generator) < 0.5
        self._total.zero_()
        self._position.zero_()
        self._halted.zero_()
        seeds = {row: stream_seed(self.trials[row].config.seed, epoch, "noise") for row in self._noisy}
        return {row: torch.Generator(self.device).manual_seed(seed) for row, seed in seeds.items()}

    def _orders(self, epoch: int) -> Tensor:
        """The order in which each trial takes its samples, as plain training has it."""
        n, settings = self.samples.targets.shape[1], [trial.config for trial in self.trials]
        return torch.stack([epoch_order(n, own.seed, epoch, shuffle=own.shuffle) for own in settings])

    def _step(self, size: int) -> None:
        """The next batch of every trial: gather, forward, backward, update. Nothing in it waits for the device."""
        columns = self._position + self._steps[:size]
        images = self._order.index_select(1, columns)  # (t, b)
        targets = self._targets.index_select(1, columns)
        inputs = self._look_up(images)
        if self._augmented:
            offsets, flips = self._offsets.index_select(1, columns), self._flips.index_select(1, columns)
            if not self.network.trials_first:
                offsets, flips = offsets.transpose(0, 1), flips.transpose(0, 1)
            shifted = crop_and_flip(inputs.flatten(0, 1), offsets.flatten(0, 1), flips.flatten(0, 1))
            inputs = shifted.reshape(inputs.shape)
        outputs = self.network({**self.constants, **self.trained}, inputs, training=True)
        batch_losses = losses(outputs, targets, self._loss).mean(1)  # (t,)
        gradients = torch.autograd.grad(batch_losses.sum(), list(self.trained.values()))
        with torch.no_grad():
            step = torch.cat([gradient.reshape(-1) for gradient in gradients])
            if isinstance(self._decay, Tensor):
                step.addcmul_(self._flat, self._decay)
            elif self._decay:
                step.add_(self._flat, alpha=self._decay)
            if self._noise_power is not None:
                sizes = [leaf[0].numel() for leaf in self.trained.values()]
                noise = torch.cat([part.reshape(-1) for part in torch.split(self._noise, sizes, dim=1)])
                step.addcmul_(noise, self._noise_power)
            if self._velocity is not None:
                step = self._velocity.mul_(self._momentum).add_(step)
            self._flat.addcmul_(step, self._rate)
            if self._trial_of_weight is not None:
                # What is no longer finite is taken out of the epoch at once, before it spreads from trial to trial.
                self._halted |= ~batch_losses.isfinite()
                self._flat.masked_fill_(self._halted.index_select(0, self._trial_of_weight), 0)
            self._total += batch_losses
            self._position += size

    def _captured(self) -> Callable[[], None]:
        """The step on a full batch as a CUDA graph; trying it out first leaves no trace."""
        touched = [self._flat, self._total, self._position, self._halted, *self.constants.values()]
        touched += [] if self._velocity is None else [self._velocity]
        kept = [tensor.clone() for tensor in touched]
        with torch.cuda.device(self.device):
            side, main = torch.cuda.Stream(), torch.cuda.current_stream()  # type: ignore[no-untyped-call]
            side.wait_stream(main)
            with torch.cuda.stream(side):
                for _ in range(WARM_UP_STEPS):
                    self._step(self._batch_size)
                    for tensor, value in zip(touched, kept, strict=True):
                        tensor.copy_(value)
            main.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                self._step(self._batch_size)
        return graph.replay

    def _look_up(self, images: Tensor) -> Tensor:
        """Images (t, b) of the bank, in the order that the network reads."""
        return self.samples.images[images if self.network.trials_first else images.T]

    def _batches(self, held_out: tuple[Tensor, Tensor] | None) -> Iterator[tuple[Tensor, Tensor]]:
        """Inputs in the order that the network reads and targets (t, b), of the training or of common samples."""
        samples = self.samples
        if held_out is not None:
            images, targets = held_out
            samples = StackSamples(images, None, targets.expand(len(self.trials), *targets.shape))
        most = max(1, EVALUATED_AT_ONCE.get(self.device.type, 4_096) // len(self.trials))
        size = min(EVALUATION_BATCH, most)
        for start in range(0, samples.targets.shape[1], size):
            yield samples.batch(slice(start, start + size), self.network.trials_first)

    def _each(self, values: Sequence[float]) -> Tensor | float:
        """One number where all trials agree, else one per weight."""
        return values[0] if len(set(values)) == 1 else self._spread(values)

    def _spread(self, values: Sequence[float]) -> Tensor:
        """A value of each trial, once for each of its weights."""
        column = torch.tensor(values, dtype=self._flat.dtype, device=self.device)
        return torch.cat([column.repeat_interleave(leaf[0].numel()) for leaf in self.trained.values()])

    def _views(self, flat: Tensor, like: Mapping[str, Tensor], names: Sequence[str]) -> dict[str, Tensor]:
        parts = torch.split(flat, [like[name].numel() for name in names])
        return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def losses(outputs: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Loss of every sample of every trial, (trials, samples); `loss` as in `TrainConfig`."""
    if loss == "cross_entropy":
        flat = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
        return flat.view(outputs.shape[:2])
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, outputs.shape[2]).to(outputs.dtype)
    return (outputs.flatten(2) - targets.reshape(*outputs.shape[:2], -1)).square().sum(2)


def _lengths(parts: Sequence[Tensor]) -> Tensor:
    """Length of each trial's parts taken together, in float64."""
    lengths: Tensor = torch.stack([part.double().flatten(1).norm(dim=1) for part in parts]).norm(dim=0)
    return lengths
