"""Trials that are trained by the fused kernel: the interface of a stack, with an epoch as one launch.

Batch sizes may differ, since every network has a thread block to itself; a neighbour that diverges is not felt.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.progress import Advance
from flatscope.training.checkpoint import TrainConfig, learning_rate
from flatscope.training.fused_chain import NotFused, read_chain
from flatscope.training.fused_device import POINTERS, Job, Machine, NotCompiled, machine_of
from flatscope.training.fused_source import plan_kernel
from flatscope.training.stack import Stack
from flatscope.training.stack_samples import sample_orders
from flatscope.training.stacked_layers import StackedNetwork
from flatscope.training.trials import StackSamples, Trial, TrialData

# An epoch is cut into so many parts where there are more networks than blocks, so that all blocks stay busy.
SLICES = 16
PROBED_SAMPLES, PROBED_ERROR = 20, 0.02  # error as a share of the largest change; one ReLU may turn the other way
EVALUATED_PARTS = 8  # pieces of work for each block in an evaluation


class FusedNetwork(StackedNetwork):
    """A network, on the CPU, whose training the fused kernel knows, in batches of at most so many samples.

    Raises:
        NotFused: it must be trained in another way.
        NotStackable: not even as a stack.
    """

    def __init__(self, model: nn.Module, example: Tensor, machine: Machine, batch: int) -> None:
        super().__init__(model, example)
        if {value.dtype for value in model.parameters()} != {torch.float32}:
            raise NotFused("its parameters are not float32")
        if not all(value.requires_grad for value in model.parameters()):
            raise NotFused("some of its parameters are not trained")
        self.machine = machine
        chain = read_chain(model, example)
        self.classes = chain.classes
        self.plan = plan_kernel(chain, batch, threads=machine.threads, lanes=machine.lanes, shared=machine.shared)
        self.kernel = machine.kernel(self.plan)


class Fusing:
    """Finds out which networks the fused kernel trains there, in batches of at most that size, and why not the others.

    `wanted` is False where the stack was asked for.
    """

    def __init__(self, device: torch.device, batch: int, wanted: bool = True) -> None:
        self._device, self._batch, self._known = device, batch, dict[object, FusedNetwork | NotFused]()
        self._machine: Machine | NotFused = NotFused("the stack was asked for")
        if wanted:
            try:
                self._machine = machine_of(device)
            except NotFused as problem:
                self._machine = problem

    def __call__(self, key: object, model: nn.Module, trial: Trial, part: TrialData) -> FusedNetwork:
        """The network for the fused kernel; `key` tells architectures apart.

        Raises:
            NotFused: the trial must be trained by the stack.
        """
        if isinstance(self._machine, NotFused):
            raise self._machine
        _check_trial_can_be_fused(trial, part)
        if key not in self._known:
            try:
                self._known[key] = network = FusedNetwork(model, part.images, self._machine, self._batch)
                _compare_kernel_with_stack(
                    network, model, trial, part.images[:PROBED_SAMPLES].to(self._device, torch.float32)
                )
            except NotFused as problem:
                self._known[key] = problem
                if isinstance(problem, NotCompiled):
                    warnings.warn(
                        f"networks are trained as stacks, which is slower: {problem}", UserWarning, stacklevel=4
                    )
        compiled = self._known[key]
        if isinstance(compiled, NotFused):
            raise compiled
        return compiled


def _compare_kernel_with_stack(network: FusedNetwork, model: nn.Module, trial: Trial, images: Tensor) -> None:
    """Take a few steps with the kernel and with the stack; where they differ, the kernel is not to be trusted here."""
    config = TrainConfig(lr=0.01, momentum=0.9, weight_decay=0.01, batch_size=network.plan.group + 1, epochs=1)
    before = {name: value.detach()[None] for name, value in model.named_parameters()}
    labels = torch.arange(len(images), device=images.device) % network.classes
    samples = StackSamples.of([TrialData(images, None, labels)])
    ends = []
    for kind in (FusedStack, Stack):
        stack = kind(network, [replace(trial, config=config)], samples, before, list(before), before)
        stack.train_epoch(0, lambda *_, **__: None)
        ends.append(stack.weights)
    for name, start in before.items():
        mine, theirs = (end[name].cpu() - start for end in ends)
        if not torch.allclose(mine, theirs, rtol=0.0, atol=PROBED_ERROR * float(theirs.abs().max()), equal_nan=True):
            raise NotCompiled(f"the kernel's first steps are not those of the stack ({name})")


def _check_trial_can_be_fused(trial: Trial, part: TrialData) -> None:
    """Refuse settings that only the stack has."""
    if trial.config.loss != "cross_entropy" or part.targets.is_floating_point() or part.targets.ndim != 1:
        raise NotFused("the loss is not the cross-entropy of classes")
    if trial.config.augmentation != "none":
        raise NotFused("the images are augmented")
    if trial.config.optimizer != "sgd":
        raise NotFused("the optimizer is not SGD")
    if trial.noise_temperature:
        raise NotFused("there is noise in the steps")
    if trial.config.precision != "float32":
        raise NotFused("the precision is not float32")
    if not part.images.is_floating_point():
        raise NotFused("the inputs are not floating-point numbers")


class FusedStack(Stack):
    """The trials that are being trained together; `network` is a `FusedNetwork`. See `Stack` for the arguments."""

    def __init__(self, network: StackedNetwork, *rest: Any) -> None:
        super().__init__(network, *rest)
        assert isinstance(network, FusedNetwork)
        self._fused, plan, count = network, network.plan, len(self.trials)
        self._places = plan.places.to(self.device)
        real = plan.places < self._number_of_weights()
        back = torch.empty(self._number_of_weights(), dtype=torch.int64)
        back[plan.places[real]] = torch.arange(len(plan.places))[real]
        self._back = back.to(self.device)
        batches = [trial.config.batch_size for trial in self.trials]
        self._batches_of_trials = self._whole_numbers_on_device(batches)
        self._turn = self._whole_numbers_on_device(
            sorted(range(count), key=batches.__getitem__)
        )  # small batches take longest
        self._blocks = min(count, network.machine.blocks)
        self._images = self.samples.images.contiguous()
        self._next: tuple[int, Tensor] | None = None

    def keep(self, rows: Sequence[int]) -> FusedStack:
        """A smaller stack with some of the trials, at the same place of their training."""
        smaller = super().keep(rows)
        assert isinstance(smaller, FusedStack)
        if self._next is not None:
            smaller._next = (self._next[0], self._next[1][list(rows)])
        return smaller

    def train_epoch(self, epoch: int, advance: Advance) -> list[bool]:
        """One pass of every trial over its samples; for each, whether losses and weights stayed finite."""
        orders = self._sample_orders(epoch).to(self.device)
        images = orders if self.samples.index is None else self.samples.index.gather(1, orders)
        weights = self._packed_weights(self.trained)
        velocity = self._packed_weights(self.velocity) if self.velocity else None
        configs, count, floats = [trial.config for trial in self.trials], len(self.trials), torch.float32
        bad = torch.zeros(count, dtype=torch.int32, device=self.device)
        slices = SLICES if count > self._blocks else 1
        losses = torch.empty(count, slices, self._fused.plan.warps, dtype=torch.float64, device=self.device)
        self._launch_kernel(
            self._blocks,
            images=self._images,
            order=images.to(torch.int32),
            labels=self.samples.targets.gather(1, orders).to(torch.int32),
            weights=weights,
            velocity=velocity,
            gradients=torch.empty(self._blocks, weights.shape[1], device=self.device),
            rate=torch.tensor([learning_rate(config, epoch) for config in configs], dtype=floats, device=self.device),
            momentum=torch.tensor([config.momentum for config in configs], dtype=floats, device=self.device),
            decay=torch.tensor([config.weight_decay for config in configs], dtype=floats, device=self.device),
            bad=bad,
            losses=losses,
            slices=slices,
        )
        self.loss_sums = losses.sum((1, 2))
        self._next = None
        self._next = (epoch + 1, self._sample_orders(epoch + 1))  # while the GPU is at work
        self._unpack_weights(weights, self.trained)
        if velocity is not None:
            self._unpack_weights(velocity, self.velocity)
        finite: list[bool] = (weights.isfinite().all(1) & (bad == 0)).tolist()
        advance(count, note=f"epoch {epoch + 1}")
        return finite

    def evaluate(self, held_out: tuple[Tensor, Tensor] | None = None) -> tuple[list[float], list[float]]:
        """Mean loss and share of misclassified samples of every trial, on its own training samples by default."""
        count, machine = len(self.trials), self._fused.machine
        images, targets = (self._images, self.samples.targets) if held_out is None else held_out
        n = targets.shape[-1]
        order = None if held_out is not None else self.samples.index
        slices = max(1, min(math.ceil(EVALUATED_PARTS * machine.blocks / count), n // 64))
        shape = (count, slices, self._fused.plan.warps)
        losses = torch.empty(shape, dtype=torch.float64, device=self.device)
        wrong = torch.empty(shape, dtype=torch.int32, device=self.device)
        nothing = torch.zeros(count, device=self.device)
        self._launch_kernel(
            min(count * slices, machine.blocks),
            images=images.to(torch.float32).contiguous(),
            order=(torch.arange(n, device=self.device) if order is None else order).to(torch.int32).contiguous(),
            labels=targets.to(torch.int32).contiguous(),
            weights=self._packed_weights(self.trained),
            rate=nothing,
            momentum=nothing,
            decay=nothing,
            losses=losses,
            wrong=wrong,
            slices=slices,
            evaluates=1,
        )
        return (losses.sum((1, 2)) / n).tolist(), (wrong.sum((1, 2)).double() / n).tolist()

    def _launch_kernel(self, blocks: int, *, slices: int, evaluates: int = 0, **tensors: Tensor | None) -> None:
        count = len(self.trials)
        tensors |= {"batch": self._batches_of_trials, "turn": self._turn}
        tensors |= {"finished": self._whole_numbers_on_device([0] * count), "queue": self._whole_numbers_on_device([0])}
        given: dict[str, Any] = {}
        for name in POINTERS:
            value = tensors.get(name)
            assert value is None or value.is_contiguous()
            given[name] = None if value is None else value.data_ptr()
        order, labels = tensors["order"], tensors["labels"]
        assert isinstance(order, Tensor)
        assert isinstance(labels, Tensor)
        n = labels.shape[-1]
        steps = {"order_step": n if order.ndim == 2 else 0, "label_step": n if labels.ndim == 2 else 0}
        job = Job(**given, networks=count, samples=n, slices=slices, evaluates=evaluates, **steps)
        self._fused.kernel.start(job, blocks)

    def _sample_orders(self, epoch: int) -> Tensor:
        if self._next is not None and self._next[0] == epoch:
            return self._next[1]
        return sample_orders(self.trials, self.samples.targets.shape[1], epoch)

    def _number_of_weights(self) -> int:
        return sum(value[0].numel() for value in self.trained.values())

    def _packed_weights(self, parts: Mapping[str, Tensor]) -> Tensor:
        """Weights as the kernel has them: (trials, packed)."""
        flat = [parts[name].detach().flatten(1) for name in self._fused.plan.names]
        filling = flat[0].new_zeros(len(self.trials), 1)
        return torch.cat([*flat, filling], 1).index_select(1, self._places)

    def _unpack_weights(self, packed: Tensor, parts: Mapping[str, Tensor]) -> None:
        flat, start = packed.index_select(1, self._back), 0
        for name in self._fused.plan.names:
            value = parts[name].detach()
            size = value[0].numel()
            value.copy_(flat[:, start : start + size].reshape(value.shape))
            start += size

    def _whole_numbers_on_device(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)
