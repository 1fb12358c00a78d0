"""One pass of a few samples in float64 that the checks by numbers share, with the loss's gradient by all weights.

It runs as the sweep runs a network, each layer on a view of its own of its input. Every gradient stays on its graph, so
that products with the Hessian and what the sweep reads are found without running the network again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.curved_operations import NO_PLACES, CurvedCall, CurvedRecorder, Places
from flatscope.curvature.detached_values import DetachedValues
from flatscope.curvature.output_hessian import output_root
from flatscope.curvature.trusted_operations import Doubts
from flatscope.network.interception import OperationRule, watched
from flatscope.network.layer_uses import LayerRecorder, LayerUse
from flatscope.network.pass_recording import in_parts
from flatscope.params import Params
from flatscope.samples import (
    Batch,
    Inputs,
    as_rows,
    inputs_on_device,
    joined_inputs,
    rows_of_inputs,
    tensors_of_inputs,
)

PROBED_SAMPLES = 4
CANDIDATES = 64
SAME = {torch.float64: 1e-9, torch.float32: 1e-3}  # outputs in the problem's precision and in float64, relative


@dataclass(frozen=True)
class CheckedPass:
    """A pass at a context's weights.

    Attributes:
        leaves: all trainable parameters.
        uses: of their layers.
        curved_calls: of curved operations.
        outputs: of the samples.
        targets: of the same.
        loss: of all samples together.
        gradients: of that by the leaves, on the graph.
        constants: what the pass took for constants.
        doubts: what in it may have another second derivative than autograd gives.
    """

    leaves: Params
    uses: list[LayerUse[Tensor]]
    curved_calls: list[CurvedCall]
    outputs: Tensor
    targets: Tensor
    loss: Tensor
    gradients: Params
    constants: DetachedValues
    doubts: Doubts


class SharedPass:
    """The pass of telling samples that several checks share, made for the first of them.

    Args:
        ctx: the network.
        places: curved operations that have views of their own of what enters them.
    """

    def __init__(self, ctx: Context, places: Places = NO_PLACES) -> None:
        self.ctx, self._places = ctx, places

    @cached_property
    def run(self) -> CheckedPass:
        """The pass, in float64."""
        return checked_pass(self.ctx, telling_samples(self.ctx).batch, torch.float64, self._places)

    def as_it_runs(self, run: CheckedPass) -> CheckedPass:
        """The pass itself where its outputs are those of the network unwatched; else one that is watched less."""
        batch, expected = telling_samples(self.ctx)
        allowed = SAME.get(self.ctx.problem.dtype, SAME[torch.float32]) * float(expected.abs().max())
        if float((run.outputs.detach() - expected).abs().max()) <= allowed:
            return run
        return checked_pass(self.ctx, batch, torch.float64, None)


def checked_pass(ctx: Context, batch: Batch, dtype: torch.dtype, places: Places | None) -> CheckedPass:
    """Run a network on some samples and differentiate their loss, so that the gradient can be differentiated once more.

    Args:
        ctx: the network.
        batch: the samples.
        dtype: in which it runs.
        places: curved operations that have views of their own of their inputs; None for a network as it is, whose
            layers have none either.
    """
    inputs, params, buffers = in_precision(ctx, batch[0], dtype)
    targets = batch[1].to(dtype) if batch[1].is_floating_point() else batch[1]
    leaves = {name: params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    params |= leaves
    recorder, curved = LayerRecorder(params, isolate=True, axes=ctx.network.axes), CurvedRecorder(places or NO_PLACES)
    doubts, constants = Doubts(), DetachedValues()
    seen: list[OperationRule] = [doubts.follow, constants.recorded()]
    recorder_rules = [in_parts(curved.follow)] if places else []
    recorder_rules += [recorder.follow] if places is not None else []
    with torch.enable_grad(), FastConvolutions():
        outputs = ctx.problem.forward(inputs, params, buffers, [*seen, *recorder_rules])
        loss = loss_of(ctx, outputs, targets, seen)
        doubts.look_through(loss)
        gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
            gradients = dict(zip(leaves, slopes, strict=True))
    return CheckedPass(leaves, recorder.uses, curved.calls, outputs, targets, loss, gradients, constants, doubts)


def loss_of(ctx: Context, outputs: Tensor, targets: Tensor, rules: Sequence[OperationRule] = ()) -> Tensor:
    """The sum of the samples' losses, each of whose operations is handed to the rules."""
    with ExitStack() as stack:
        for rule in reversed(rules):
            stack.enter_context(watched(rule))
        return ctx.problem.loss(outputs, targets).sum()


def in_precision(ctx: Context, inputs: Inputs, dtype: torch.dtype) -> tuple[Inputs, Params, Params]:
    """Inputs, parameters and buffers in a floating-point type: float64, where float32 products keep no digit."""
    params, buffers = (
        {name: value.to(dtype) if value.is_floating_point() else value for name, value in values.items()}
        for values in (ctx.params, ctx.problem.buffers)
    )
    return inputs_on_device(inputs, ctx.problem.device, dtype), params, buffers


class TellingSamples(NamedTuple):
    """A few samples on which a misreading would show, and the outputs of the network on them."""

    batch: Batch
    outputs: Tensor


def telling_samples(ctx: Context) -> TellingSamples:
    """Samples drawn at random, and of those the ones with most curvature; chosen once for all weights.

    Samples of which the network is sure, or which are blank, have no second derivative to compare: how much of it
    there is shows in the factors of the loss along a random direction of the outputs, and in how uneven the inputs are.
    """
    return ctx.structural(_choose_samples)


def _choose_samples(ctx: Context) -> TellingSamples:
    n, generator = ctx.problem.n_train, ctx.generator("samples of the probe")
    chosen = torch.randperm(n, generator=generator)[:CANDIDATES].sort().values
    inputs, targets = picked(ctx, chosen)
    with torch.no_grad():
        outputs = ctx.forward(inputs)
    if len(targets) <= PROBED_SAMPLES:
        return TellingSamples((inputs, targets), outputs)
    direction = torch.randn(outputs.shape[1:], generator=generator, dtype=torch.float64).to(outputs)
    forms = output_root(ctx.problem.loss, outputs, targets).forms(direction.expand_as(outputs)).abs().nan_to_num()
    size = forms.cpu() * _unevenness(inputs)
    drawn = torch.randperm(len(targets), generator=generator)[: PROBED_SAMPLES // 2].tolist()
    top = [i for i in size.argsort(descending=True).tolist() if i not in drawn][: PROBED_SAMPLES - len(drawn)]
    kept = torch.tensor(sorted(drawn + top), device=targets.device)
    return TellingSamples((rows_of_inputs(inputs, kept), targets[kept]), outputs[kept])


def _unevenness(inputs: Inputs) -> Tensor:
    """Spread of the entries of each sample, 0 of a blank one; the entry itself where it is the only one."""
    real = [as_rows(part).double().cpu() for part in tensors_of_inputs(inputs) if part.is_floating_point()]
    if not real:
        return torch.ones(())
    rows = torch.cat([part - part.mean(1, keepdim=True) if part.shape[1] > 1 else part for part in real], 1)
    return rows.square().sum(1).nan_to_num()


def picked(ctx: Context, chosen: Tensor) -> Batch:
    """The samples of these numbers, in one batch; of texts padded to other lengths those of the commonest length."""
    parts: list[Batch] = []
    start = 0
    for inputs, targets in ctx.batches():
        here = chosen[(chosen >= start) & (chosen < start + len(targets))] - start
        if len(here):
            parts.append((rows_of_inputs(inputs, here.to(targets.device)), targets[here.to(targets.device)]))
        start += len(targets)
        if start > int(chosen[-1]):
            break
    shapes = [tuple(part.shape[1:] for part in (*tensors_of_inputs(inputs), targets)) for inputs, targets in parts]
    counts: Counter[object] = Counter()
    for shape, (_, targets) in zip(shapes, parts, strict=True):
        counts[shape] += len(targets)
    (common, _), *_ = counts.most_common(1)
    alike = [part for shape, part in zip(shapes, parts, strict=True) if shape == common]
    return joined_inputs([inputs for inputs, _ in alike]), torch.cat([targets for _, targets in alike])


def random_direction(like: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction of one parameter, float64: entries between −1 and 1, which take less time than Gaussian."""
    return torch.empty(like.shape, dtype=torch.float64).uniform_(-1, 1, generator=generator).to(like.device)
