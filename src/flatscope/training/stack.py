"""Many networks of one architecture trained as one: their weights lie stacked and take every step together.

A step is that of `torch.optim.SGD` or, for all trials of a stack, of `torch.optim.Adam`, with a learning rate, momentum
and weight decay of each trial's own. All trained weights are one vector (parameter after parameter, trial after trial
within it), so that an update is a few operations however many trials and layers there are. On a GPU the whole step is
one CUDA graph.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional

from flatscope.cuda_graphs import captured_cuda_graph
from flatscope.progress import Advance
from flatscope.training.checkpoint import learning_rate, stream_seed
from flatscope.training.evaluation import EVALUATION_BATCH
from flatscope.training.gpu_steps import (
    activation_precision,
    product_precision,
    wants_channels_last,
)
from flatscope.training.loop import BAR_SECONDS
from flatscope.training.stack_samples import EpochSamples
from flatscope.training.stacked_layers import StackedNetwork
from flatscope.training.trials import StackSamples, Trial

# Samples evaluated at once, of one trial where it has that many: enough to keep the device busy, few enough for memory
# and caches, also by the multiplications that they take.
EVALUATED_AT_ONCE = {"cpu": 4_096, "cuda": 65_536}
EVALUATED_PRODUCTS = {"cpu": 0.0, "cuda": 4e10}
# Multiplications of a forward pass over a batch from which on networks with convolutions run one behind the other.
# On a CPU nine tenths of a step of LeNet-5 with a batch of 64 are convolutions, grouped ones of 3 and 6 channels take
# twice as long as the same one by one, and what several networks have between two layers does not fit into a cache.
BUSY = {"cpu": 1e7, "cuda": 2e9}
# Where grouped convolutions may read a neighbour's channels times zero: NaN and infinity then go over to it.
MIXING_DEVICES = {"cuda"}
# Of Adam: the shares that its averages of gradients and of their squares keep in a step, and what is added to the root.
KEPT, KEPT_SQUARES, EPSILON = 0.9, 0.999, 1e-8
SQUARES = ".squares"  # behind a parameter's name


class Stack:
    """The trials that are being trained together, on their device.

    Args:
        network: what they have in common.
        trials: their settings; batch size, loss, number of samples, augmentation and optimizer are the same for all.
        samples: their training data.
        weights: parameters and buffers, stacked in the order of `trials`; copied.
        trained: names of the parameters to train.
        initial: the trained parameters before training, stacked.
        velocity: momentum buffers of a run that goes on; of Adam, its averages of gradients and `SQUARES`.
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
            name: view.detach().requires_grad_()
            for name, view in self._views_of_flat_weights(self._flat, weights, trained).items()
        }
        config = self.trials[0].config
        self._batch_size, self._loss, self._precision = config.batch_size, config.loss, config.precision
        work = network.products * config.batch_size if network.has_convolutions else 0
        busy = work > BUSY.get(self.device.type, BUSY["cuda"]) and not any(t.noise_temperature for t in self.trials)
        self._together = 1 if busy else len(self.trials)
        # The parts of a step. On a CPU each takes its whole epoch in turn, while its weights are in the cache.
        parts = list(self._slices_of_trials(self._together))
        self._turns = [[part] for part in parts] if self.device.type == "cpu" else [parts]
        sizes = [leaf.numel() for leaf in self.trained.values()]
        self._starts = list(itertools.accumulate(sizes, initial=0))[:-1]  # of each parameter in the vector
        channels_last = self._together == 1 and wants_channels_last(config.precision, samples.images)
        layout = torch.channels_last if channels_last else torch.preserve_format
        self._epoch = EpochSamples(self.trials, samples, trials_first=network.trials_first, layout=layout)
        k, device = len(self.trials), self.device
        self.loss_sums = torch.zeros(k, dtype=torch.float64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self._steps = torch.arange(config.batch_size, device=device)
        self._steps_before = torch.zeros((), dtype=torch.int64, device=device)  # this epoch
        self._replay: Callable[[], None] | None = None
        self._streams: list[torch.cuda.Stream] = []
        self._may_mix = network.has_convolutions and device.type in MIXING_DEVICES and self._together > 1
        self._halted = torch.zeros(k, dtype=torch.bool, device=device)
        self._trial_of_weight = self._value_per_weight(range(k)).int() if self._may_mix else None
        self._set_optimizer(weights, velocity or {})

    def _set_optimizer(self, weights: Mapping[str, Tensor], velocity: Mapping[str, Tensor]) -> None:
        """Buffers and settings of the optimizer; `velocity` as for the class, empty at the start of a run."""
        configs, names = [trial.config for trial in self.trials], list(self.trained)
        self._velocity: Tensor | None = None
        self.velocity: dict[str, Tensor] = {}
        self._squares = torch.zeros_like(self._flat) if configs[0].optimizer == "adam" else None
        if self._squares is not None or any(config.momentum for config in configs):
            self._velocity = torch.zeros_like(self._flat)
            self.velocity = self._views_of_flat_weights(self._velocity, weights, names)
            if self._squares is not None:
                squares = self._views_of_flat_weights(self._squares, weights, names)
                self.velocity |= {name + SQUARES: value for name, value in squares.items()}
            for name, value in velocity.items():
                self.velocity[name].copy_(value)
        self._momentum = self._one_value_or_per_weight([config.momentum for config in configs])
        self._decay = self._one_value_or_per_weight([config.weight_decay for config in configs])
        schedules = {(config.lr, config.lr_steps, config.lr_decay) for config in configs}
        # Minus the learning rate: of all weights, or of each.
        self._rate = self._flat.new_empty(()) if len(schedules) == 1 else torch.empty_like(self._flat)
        self._noisy = [row for row, trial in enumerate(self.trials) if trial.noise_temperature]
        self._noise = self._flat.new_zeros(len(configs), self._flat.numel() // len(configs) if self._noisy else 0)
        self._noise_power = torch.empty_like(self._flat) if self._noisy else None

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
        return type(self)(self.network, trials, self.samples.rows(kept), weights, list(self.trained), initial, velocity)

    def train_epoch(self, epoch: int, advance: Advance) -> list[bool]:
        """One pass of every trial over its samples; for each, whether losses and weights stayed finite."""
        before = self.keep(range(len(self.trials))) if self._may_mix else None
        with product_precision(self._precision):
            finite = self._train_pass(epoch, advance)
        lost = [row for row, good in enumerate(finite) if not good]
        if before is None or not lost:
            return finite
        # Some diverged, others may only have been their neighbours: once more without the rest, at last each by itself.
        for rows in [lost] if len(lost) < len(finite) else [[row] for row in lost]:
            again = before.keep(rows)
            for row, good in zip(rows, again.train_epoch(epoch, lambda *_, **__: None), strict=True):
                finite[row] = good
            self.loss_sums[rows] = again.loss_sums
            for name, value in again.weights.items():
                self.weights[name][rows] = value
            for name, value in self.velocity.items():
                value[rows] = again.velocity[name] if again.velocity else 0.0
        return finite

    def _train_pass(self, epoch: int, advance: Advance) -> list[bool]:
        """All steps of an epoch, and which trials came out finite."""
        generators = self._prepare_epoch(epoch)
        n, shown_at, unseen = self._epoch.n, time.monotonic(), 0.0
        for turn in self._turns:
            self._position.zero_()
            for start in range(0, n, self._batch_size):
                size = min(self._batch_size, n - start)
                for row, generator in generators.items():
                    self._noise[row].normal_(generator=generator)
                if size == self._batch_size and self.device.type == "cuda":
                    self._replay = self._replay or self._captured()
                    self._replay()
                else:
                    self._step(turn, size)
                unseen += len(self.trials) / len(self._turns) * size / n
                if time.monotonic() - shown_at > BAR_SECONDS:
                    advance(unseen, note=f"epoch {epoch + 1}")
                    unseen, shown_at = 0.0, time.monotonic()
        advance(unseen, note=f"epoch {epoch + 1}")
        for name, value in self.constants.items():
            if name.rpartition(".")[2] == "num_batches_tracked":
                value += -(-n // self._batch_size)
        finite = [value.detach().flatten(1).isfinite().all(1) for value in self.trained.values()]
        good: list[bool] = torch.stack([self.loss_sums.isfinite(), *finite]).all(0).tolist()
        return good

    def evaluate(self, held_out: tuple[Tensor, Tensor] | None = None) -> tuple[list[float], list[float]]:
        """Mean loss and share of misclassified samples of every trial, in eval mode; the share is NaN without classes.

        On its own training samples, or on samples that are the same for all.
        """
        total, wrong = torch.zeros(2, len(self.trials), dtype=torch.float64, device=self.device)
        with torch.no_grad(), self._in_precision():
            for rows, inputs, targets in self._batches(held_out):
                outputs = self.network({name: value[rows] for name, value in self.weights.items()}, inputs)
                total[rows] += losses_of_stack(outputs, targets, self._loss).double().sum(1)
                if targets.is_floating_point():
                    wrong.fill_(torch.nan)
                else:
                    wrong[rows] += (outputs.argmax(2) != targets).sum(1)
        n = self.samples.targets.shape[1] if held_out is None else len(held_out[1])
        means, shares = (total / n).tolist(), (wrong / n).tolist()
        for row in self._rows_to_check_for_overflow(means):
            [means[row]], [shares[row]] = self.keep([row]).evaluate(held_out)
        return means, shares

    def gradient_norms(self) -> list[float]:
        """Length of the gradient of each trial's mean training loss, in eval mode."""
        sums = [torch.zeros_like(leaf, requires_grad=False) for leaf in self.trained.values()]
        with self._in_precision():
            for rows, inputs, targets in self._batches(None):
                weights, leaves = self._weights_and_leaves(rows)
                value = losses_of_stack(self.network(weights, inputs), targets, self._loss).sum()
                for total, part in zip(sums, torch.autograd.grad(value, leaves), strict=True):
                    total[rows] += part
        norms: list[float] = (_norm_of_each_trial(sums) / self.samples.targets.shape[1]).tolist()
        for row in self._rows_to_check_for_overflow(norms):
            [norms[row]] = self.keep([row]).gradient_norms()
        return norms

    def distances(self) -> list[float]:
        """‖w − w₀‖ of each trial over all trained parameters."""
        moved: list[float] = _norm_of_each_trial(
            [value.detach() - self.initial[name] for name, value in self.trained.items()]
        ).tolist()
        return moved

    def _rows_to_check_for_overflow(self, values: Sequence[float]) -> list[int]:
        """Rows without a finite value that may have it from a neighbour, and must be looked at by themselves."""
        lost = [row for row, value in enumerate(values) if not math.isfinite(value)]
        return lost if self._may_mix else []

    def _prepare_epoch(self, epoch: int) -> dict[int, torch.Generator]:
        """Rates, sample orders and augmentation of an epoch; the noise generators of the trials that have noise."""
        rates = [learning_rate(trial.config, epoch) for trial in self.trials]
        if self._rate.ndim:
            self._rate.copy_(self._value_per_weight([-rate for rate in rates]))
        else:
            self._rate.fill_(-rates[0])
        if self._noise_power is not None:
            # The noise √(2γ(1−β)T) enters the velocity, which here is divided by the rate γ.
            powers = [
                (2 * (1 - trial.config.momentum) * trial.noise_temperature / rate) ** 0.5
                for trial, rate in zip(self.trials, rates, strict=True)
            ]
            self._noise_power.copy_(self._value_per_weight(powers))
        self._steps_before.fill_(epoch * -(-self._epoch.n // self._batch_size))
        self._epoch.prepare(epoch)
        self.loss_sums.zero_()
        self._position.zero_()
        self._halted.zero_()
        seeds = {row: stream_seed(self.trials[row].config.seed, epoch, "noise") for row in self._noisy}
        return {row: torch.Generator(self.device).manual_seed(seed) for row, seed in seeds.items()}

    def _step(self, turn: Sequence[slice], size: int) -> None:
        """The next batch of some trials: gather, forward, backward, update. Nothing in it waits for the device."""
        columns = self._position + self._steps[:size]
        pieces = self._side_by_side(turn, columns)
        gradients = zip(*(parts for _, parts in pieces), strict=True)  # of each parameter
        if len(self._turns) == 1:
            self._update_weights(slice(None), torch.cat([part.reshape(-1) for parts in gradients for part in parts]))
        else:
            for start, [gradient] in zip(self._starts, gradients, strict=True):
                first = start + turn[0].start * gradient[0].numel()
                self._update_weights(slice(first, first + gradient.numel()), gradient.reshape(-1))
        for rows, (batch_losses, _) in zip(turn, pieces, strict=True):
            self.loss_sums[rows] += batch_losses
        if self._trial_of_weight is not None:
            # What is no longer finite is taken out of the epoch at once, before it spreads from trial to trial.
            self._halted |= ~self.loss_sums.isfinite()
            self._flat.masked_fill_(self._halted.index_select(0, self._trial_of_weight), 0)
        self._position += size

    def _side_by_side(self, turn: Sequence[slice], columns: Tensor) -> list[tuple[Tensor, tuple[Tensor, ...]]]:
        """Losses and gradients of some trials; on a GPU of each on a stream of its own, since none fills it."""
        if self.device.type != "cuda" or len(turn) == 1:
            return [self._gradients(rows, columns) for rows in turn]
        main, pieces = torch.cuda.current_stream(self.device), []
        self._streams = self._streams or [torch.cuda.Stream(self.device) for _ in turn]  # type: ignore[no-untyped-call]
        for rows, stream in zip(turn, self._streams, strict=True):
            stream.wait_stream(main)
            with torch.cuda.stream(stream):
                pieces.append(self._gradients(rows, columns))
        for stream in self._streams:
            main.wait_stream(stream)
        return pieces

    @torch.no_grad()
    def _update_weights(self, part: slice, step: Tensor) -> None:
        """The step of the optimizer with these gradients, for some of the weights."""
        weights = self._flat[part]
        if isinstance(self._decay, Tensor):
            step.addcmul_(weights, self._decay[part])
        elif self._decay:
            step.add_(weights, alpha=self._decay)
        if self._noise_power is not None:
            sizes = [leaf[0].numel() for leaf in self.trained.values()]
            noise = torch.cat([piece.reshape(-1) for piece in torch.split(self._noise, sizes, dim=1)])
            step.addcmul_(noise[part], self._noise_power[part])
        if self._squares is not None:
            step = self._adam_step(part, step)
        elif self._velocity is not None:
            momentum = self._momentum[part] if isinstance(self._momentum, Tensor) else self._momentum
            step = self._velocity[part].mul_(momentum).add_(step)
        weights.addcmul_(step, self._rate[part] if self._rate.ndim else self._rate)

    def _adam_step(self, part: slice, gradient: Tensor) -> Tensor:
        """Averages of gradients over roots of those of their squares, both without the zeros that they started from."""
        assert self._velocity is not None
        assert self._squares is not None
        number = (self._steps_before + self._position[0] // self._batch_size + 1).double()  # of this step, from 1
        average = self._velocity[part].lerp_(gradient, 1 - KEPT)
        squares = self._squares[part].mul_(KEPT_SQUARES).addcmul_(gradient, gradient, value=1 - KEPT_SQUARES)
        root = (squares / (1 - KEPT_SQUARES**number)).sqrt_()
        return average / (1 - KEPT**number) / root.add_(EPSILON)

    def _gradients(self, rows: slice, columns: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
        """Losses (t,) of some trials on these places of their order, and their gradients."""
        inputs, targets = self._epoch.batch(rows, columns)
        weights, leaves = self._weights_and_leaves(rows)
        with activation_precision(self._precision, self.device):
            batch_losses = losses_of_stack(self.network(weights, inputs, training=True), targets, self._loss).mean(1)
        return batch_losses.detach(), torch.autograd.grad(batch_losses.sum(), leaves)

    def _slices_of_trials(self, together: int) -> Iterator[slice]:
        """Slices of so many trials at once."""
        for start in range(0, len(self.trials), together):
            yield slice(start, start + together)

    def _weights_and_leaves(self, rows: slice) -> tuple[dict[str, Tensor], list[Tensor]]:
        """Weights and buffers of some trials, and those to differentiate by; views."""
        leaves = {name: value.detach()[rows].requires_grad_() for name, value in self.trained.items()}
        return {**{name: value[rows] for name, value in self.constants.items()}, **leaves}, list(leaves.values())

    def _captured(self) -> Callable[[], None]:
        """The step on a full batch as a CUDA graph."""
        touched = [self._flat, self.loss_sums, self._position, self._halted, *self.constants.values()]
        touched += [part for part in (self._velocity, self._squares) if part is not None]
        return captured_cuda_graph(lambda: self._step(self._turns[0], self._batch_size), touched, self.device)

    def _batches(self, held_out: tuple[Tensor, Tensor] | None) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Some trials, their inputs in the order that the network reads, targets (t, b); own or common samples."""
        samples = self.samples
        if held_out is not None:
            images, targets = held_out
            samples = StackSamples(images, None, targets.expand(len(self.trials), *targets.shape))
        kind, n = self.device.type if self.device.type in EVALUATED_AT_ONCE else "cuda", samples.targets.shape[1]
        together = max(1, min(self._together, EVALUATED_AT_ONCE[kind] // n))
        most = max(EVALUATION_BATCH, int(EVALUATED_PRODUCTS[kind] // max(1, self.network.products)))
        size = max(1, min(most, EVALUATED_AT_ONCE[kind] // together))
        for rows in self._slices_of_trials(together):
            some_samples = samples.rows(rows)
            for start in range(0, n, size):
                yield rows, *some_samples.batch(slice(start, start + size), self.network.trials_first)

    @contextmanager
    def _in_precision(self) -> Iterator[None]:
        with product_precision(self._precision), activation_precision(self._precision, self.device):
            yield

    def _one_value_or_per_weight(self, values: Sequence[float]) -> Tensor | float:
        """One number where all trials agree, else one per weight."""
        return values[0] if len(set(values)) == 1 else self._value_per_weight(values)

    def _value_per_weight(self, values: Sequence[float]) -> Tensor:
        """A value of each trial, once for each of its weights."""
        column = torch.tensor(values, dtype=self._flat.dtype, device=self.device)
        return torch.cat([column.repeat_interleave(leaf[0].numel()) for leaf in self.trained.values()])

    def _views_of_flat_weights(
        self, flat: Tensor, like: Mapping[str, Tensor], names: Sequence[str]
    ) -> dict[str, Tensor]:
        parts = torch.split(flat, [like[name].numel() for name in names])
        return {name: part.view(like[name].shape) for name, part in zip(names, parts, strict=True)}


def losses_of_stack(outputs: Tensor, targets: Tensor, loss: str) -> Tensor:
    """Loss of every sample of every trial, (trials, samples); `loss` as in `TrainConfig`."""
    if loss == "cross_entropy":
        flat = functional.cross_entropy(outputs.flatten(0, 1), targets.flatten(0, 1), reduction="none")
        return flat.view(outputs.shape[:2])
    if not targets.is_floating_point():
        targets = functional.one_hot(targets, outputs.shape[2]).to(outputs.dtype)
    return (outputs.flatten(2) - targets.reshape(*outputs.shape[:2], -1)).square().sum(2)


def _norm_of_each_trial(parts: Sequence[Tensor]) -> Tensor:
    """Length of each trial's parts taken together, in float64."""
    lengths: Tensor = torch.stack([part.double().flatten(1).norm(dim=1) for part in parts]).norm(dim=0)
    return lengths
