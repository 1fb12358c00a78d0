"""One pass of a few samples in float64 that the checks by numbers share, with the loss's gradient by all weights.

It runs as the sweep runs a network, each layer on a view of its own of its input. Every gradient stays on its graph, so
that products with the Hessian and what the sweep reads are found without running the network again.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from flatscope.context import Context
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.curved_operations import NO_PLACES, CurvedCall, CurvedRecorder, Places
from flatscope.curvature.output_hessian import output_root
from flatscope.network.interception import OperationRule, watched
from flatscope.network.layer_uses import LayerRecorder, LayerUse
from flatscope.network.pass_recording import in_parts
from flatscope.params import Params
from flatscope.samples import Batch, Inputs, inputs_on_device, joined_inputs, rows_of_inputs, tensors_of_inputs

PROBED_SAMPLES = 4
CANDIDATES = 64
STEP = 1e-3
SAME = {torch.float64: 1e-9, torch.float32: 1e-3}  # outputs in the problem's precision and in float64, relative


@dataclass(frozen=True)
class CheckedPass:
    """A pass at a context's weights."""

    leaves: Params  # all trainable parameters
    uses: list[LayerUse[Tensor]]
    curved_calls: list[CurvedCall]
    outputs: Tensor
    targets: Tensor
    loss: Tensor  # of all samples together
    gradients: Params  # of that, on the graph


class SharedPass:
    """The pass that several checks share, made for the first of them.

    Args:
        ctx: the network.
    """

    def __init__(self, ctx: Context) -> None:
        self.ctx = ctx
        self._passes: dict[frozenset[tuple[str, int]], CheckedPass] = {}

    def of(
        self, places: Places = NO_PLACES, rules: Sequence[OperationRule] = (), in_loss: OperationRule | None = None
    ) -> CheckedPass:
        """The pass of telling samples, at which curved operations have views of their own of what enters them.

        Args:
            places: curved operations.
            rules: for the operations of the network, where the pass is not made yet.
            in_loss: the rule for those of the loss.
        """
        if places.curved not in self._passes:
            batch = telling_samples(self.ctx).batch
            self._passes[places.curved] = checked_pass(self.ctx, batch, torch.float64, places, rules, in_loss)
        return self._passes[places.curved]

    def as_it_runs(self, run: CheckedPass) -> CheckedPass:
        """The pass itself where its outputs are those of the network unwatched; else one that is watched less."""
        batch, expected = telling_samples(self.ctx)
        allowed = SAME.get(self.ctx.problem.dtype, SAME[torch.float32]) * float(expected.abs().max())
        if float((run.outputs.detach() - expected).abs().max()) <= allowed:
            return run
        return checked_pass(self.ctx, batch, torch.float64, None)


def checked_pass(
    ctx: Context,
    batch: Batch,
    dtype: torch.dtype,
    places: Places | None,
    rules: Sequence[OperationRule] = (),
    in_loss: OperationRule | None = None,
) -> CheckedPass:
    """Run a network on some samples and differentiate their loss, so that the gradient can be differentiated once more.

    Args:
        ctx: the network.
        batch: the samples.
        dtype: in which it runs.
        places: curved operations that have views of their own of their inputs; None for a network as it is, whose
            layers have none either.
        rules: others that see the operations of the network before.
        in_loss: that of the operations of the loss.
    """
    inputs, params, buffers = in_precision(ctx, batch[0], dtype)
    targets = batch[1].to(dtype) if batch[1].is_floating_point() else batch[1]
    leaves = {name: params[name].detach().requires_grad_() for name in ctx.problem.trainable}
    params |= leaves
    recorder, curved = LayerRecorder(params, isolate=True, axes=ctx.network.axes), CurvedRecorder(places or NO_PLACES)
    recorder_rules = [in_parts(curved.follow)] if places else []
    recorder_rules += [recorder.follow] if places is not None else []
    with torch.enable_grad(), FastConvolutions():
        outputs = ctx.problem.forward(inputs, params, buffers, [*rules, *recorder_rules])
        loss = loss_of(ctx, outputs, targets, in_loss)
        gradients = {name: torch.zeros_like(leaf) for name, leaf in leaves.items()}
        if loss.requires_grad:
            slopes = torch.autograd.grad(loss, list(leaves.values()), create_graph=True, materialize_grads=True)
            gradients = dict(zip(leaves, slopes, strict=True))
    return CheckedPass(leaves, recorder.uses, curved.calls, outputs, targets, loss, gradients)


def loss_of(ctx: Context, outputs: Tensor, targets: Tensor, rule: OperationRule | None) -> Tensor:
    """The sum of the samples' losses, each of whose operations is handed to the rule if there is one."""
    with nullcontext() if rule is None else watched(rule):
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
    there is shows in how far the outputs move along a random direction, seen through the factors of the loss.
    """
    return ctx.structural(_choose_samples)


def _choose_samples(ctx: Context) -> TellingSamples:
    n, generator = ctx.problem.n_train, ctx.generator("samples of the probe")
    chosen = torch.randperm(n, generator=generator)[:CANDIDATES].sort().values
    inputs, targets = picked(ctx, chosen)
    step = {name: STEP * gaussian(ctx.params[name], generator).to(ctx.params[name]) for name in ctx.problem.trainable}
    with torch.no_grad():
        outputs = ctx.forward(inputs)
        if len(targets) <= PROBED_SAMPLES:
            return TellingSamples((inputs, targets), outputs)
        moved_outputs = ctx.forward(inputs, {**ctx.params, **{name: ctx.params[name] + v for name, v in step.items()}})
    size = output_root(ctx.problem.loss, outputs, targets).forms(moved_outputs - outputs).abs().nan_to_num().cpu()
    drawn = torch.randperm(len(targets), generator=generator)[: PROBED_SAMPLES // 2].tolist()
    top = [i for i in size.argsort(descending=True).tolist() if i not in drawn][: PROBED_SAMPLES - len(drawn)]
    kept = torch.tensor(sorted(drawn + top), device=targets.device)
    return TellingSamples((rows_of_inputs(inputs, kept), targets[kept]), outputs[kept])


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


def gaussian(like: Tensor, generator: torch.Generator) -> Tensor:
    """A random direction of one parameter, float64."""
    return torch.randn(like.shape, generator=generator, dtype=torch.float64).to(like.device)
