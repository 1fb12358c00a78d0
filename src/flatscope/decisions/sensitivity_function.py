"""`sensitivity`: from a problem to what rounding and pruning each of its layers costs."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pandas as pd
from torch import Tensor, nn

from flatscope.context import Context, Effort, make_effort
from flatscope.curvature.memory import allowed
from flatscope.decisions.all_weights import place_of_weight, problem_with_all_weights_free
from flatscope.decisions.allocation import named_layers
from flatscope.decisions.block_quadratics import Predicted, predicted_rises
from flatscope.decisions.changes import Change, Rounding, changed_weight, changes_asked_for
from flatscope.decisions.curvature_diagonals import output_diagonals
from flatscope.decisions.rises import Rises, measured_rises_in_time
from flatscope.decisions.sample_means import NOTHING, Uncertain
from flatscope.decisions.sensitivity import COLUMNS, Sensitivity
from flatscope.decisions.slopes import Steps
from flatscope.errors import InputError, NotApplicable, differentiated_twice
from flatscope.formatting import first_of_names
from flatscope.isolation import own_settings
from flatscope.network.layers import Layer
from flatscope.network.normal_form_pass import ACTING
from flatscope.params import norm
from flatscope.problem import Problem
from flatscope.progress import Advance, progress_bar
from flatscope.result import columns_of
from flatscope.sampling import time_is_over

LATE = "not measured: the time was up"
WITH_A_MATRIX = (nn.Linear, nn.modules.conv._ConvNd, nn.Embedding, nn.EmbeddingBag, nn.Bilinear)


@dataclass(frozen=True)
class Task:
    """One change of one layer, with its step once it is known."""

    layer: Layer
    change: Change

    @property
    def key(self) -> tuple[str, str]:
        """Name of the step."""
        return self.layer.weight, self.change.what


def sensitivity(
    problem: Problem,
    bits: Iterable[int] = (8, 4, 3, 2),
    sparsity: Iterable[float] = (0.5, 0.9),
    rounding: str = "channel",
    layers: Sequence[str] | None = None,
    *,
    trapezoid: bool = True,
    precision: float = 0.05,
    budget: float | str | None = None,
    memory: int | str | None = None,
    seed: int = 0,
) -> Sensitivity:
    """Rise of the loss when each layer alone is rounded or pruned: predicted by three formulas, and measured.

    Every weight matrix of the network is looked at, trained or frozen; biases, normalisations and activations are not
    rounded. The network is taken as it is, BatchNorm unfolded.

    Args:
        problem: model, data, loss.
        bits: to round to, 2 to 16.
        sparsity: shares of each layer's weights to set to zero, the smallest ones, and those of least ½ h w² (OBD).
        rounding: which weights share a scale: "channel" (an output row), "tensor" (the whole weight), "group:128" (128
            inputs of an output row).
        layers: names of some layers; all by default.
        trapezoid: whether to predict by the trapezoid too, which costs two derivatives along each change.
        precision: relative standard error of ΔᵀHΔ where it is drawn, which ends before where that adds little to the
            error over samples; 0 for exact predictions and traces.
        budget: time to end in: "90s", "10m". Layers that are not reached have rows that say so.
        memory: what a pass may use: bytes, or "8GiB".
        seed: of random columns and probes.

    Example:
        >>> import torch, flatscope as fs
        >>> x, y = torch.eye(3), torch.tensor([0, 1, 0])
        >>> s = fs.sensitivity(fs.Problem(torch.nn.Linear(3, 2), train=(x, y)), bits=(8, 2), sparsity=())
        >>> s.to_frame()[["layer", "what"]].values.tolist()
        [['weight', '8 bits'], ['weight', '2 bits']]
    """
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, "sensitivity", "Make one: Problem(model, train=(x, y))")
    rule, changes = Rounding.named(rounding), changes_asked_for(bits, sparsity)
    with own_settings(problem.generators):
        return _compute_sensitivity(
            problem, changes, rule, layers, trapezoid, make_effort(precision, budget, memory), seed
        )


def _compute_sensitivity(
    problem: Problem,
    changes: Sequence[Change],
    rule: Rounding,
    layers: Sequence[str] | None,
    trapezoid: bool,
    effort: Effort,
    seed: int,
) -> Sensitivity:
    begun = time.perf_counter()
    whole = Context(problem_with_all_weights_free(problem), seed=seed, effort=effort)
    ctx = whole if whole.problem.plain is whole.problem else whole.on(whole.problem.plain)
    chosen = _layers_of_names(ctx, layers)
    tasks = [Task(layer, change) for layer in chosen for change in changes]
    scores, slope = ctx.scores(), norm(ctx.gradient())  # before the time of a budget goes to what may be left out
    rows: list[dict[str, Any]] = []
    with progress_bar("Measuring layers", total=len(tasks), lines=True) as advance:
        for group in _groups_of_tasks(ctx, tasks):
            steps = {} if time_is_over(ctx) else _steps_of_tasks(ctx, group, rule)
            rises = _measured_rises(ctx, group if steps else [], steps, trapezoid, advance)
            steps = {key: step for key, step in steps.items() if (key, "rise") in rises}
            predicted, no_prediction = None, ""
            if steps:
                predicted, no_prediction = _result_or_reason(partial(predicted_rises, ctx, steps, effort.precision))
            for task in group:
                if task.key not in steps:
                    rows.append(_sensitivity_row(ctx, task, reason=LATE))
                    continue
                rows.append(
                    _sensitivity_row(ctx, task, rises, predicted, steps[task.key][task.layer.weight], no_prediction)
                )
    left_out = _weights_in_no_layer(whole, ctx)
    if left_out and not ctx.network.not_covered:
        ctx.remark(f"weights that no sample reaches are not looked at: {first_of_names(list(left_out), 4)}")
    places = {layer.weight: _place_in_words(whole, ctx.params[layer.weight], layer) for layer in chosen}
    rows = [{**row, "weight": places[row["weight"]]} for row in rows]
    meta = {
        **whole.provenance(begun),
        "rounding": rule.name,
        "dtype_bits": problem.bits_of_weights,
        "loss_at_weights": scores.loss,
        "error_at_weights": scores.error if problem.classification else None,
        "gradient_norm": slope,
        "left_out": left_out,
        "left_out_share": _share_left_out(left_out, ctx),
        "remarks": [*dict.fromkeys([*problem.remarks, *ctx.remarks, *whole.remarks])],
    }
    return Sensitivity(columns_of(rows, COLUMNS, "sensitivity"), meta, problem)


def _measured_rises(
    ctx: Context, group: Sequence[Task], steps: Steps, trapezoid: bool, advance: Advance
) -> dict[Any, Uncertain]:
    """Measured rises of the loss by task, as many at once as memory and the time allow."""
    rises: dict[Any, Uncertain] = {}
    at_once = ctx.effort.limits.measured_together
    for start in range(0, len(group), at_once):
        tasks = group[start : start + at_once]
        rises |= measured_rises_in_time(ctx, {task.key: steps[task.key] for task in tasks}, trapezoid=trapezoid)
        advance(len(tasks), note=tasks[-1].layer.name)
    return rises


def _layers_of_names(ctx: Context, names: Sequence[str] | None) -> list[Layer]:
    layers = {layer.name: layer for layer in ctx.network}
    if not layers:
        raise InputError("a network with layers", ctx.network.missing, where="sensitivity")
    if ctx.network.not_covered:
        ctx.remark(ctx.network.missing.replace("would be left out", "are not looked at"))
    wanted = named_layers(names, list(layers))
    return [layer for name, layer in layers.items() if name in wanted]


def _weights_in_no_layer(whole: Context, ctx: Context) -> dict[str, int]:
    """Weight matrices that are in no layer, with their sizes: read in a way that is none, or reached by no sample."""
    layers = {name for layer in ctx.network for name in layer.weight.removeprefix(ACTING).replace("/", ".").split("+")}
    places = (place_of_weight(layer.weight, ctx.params[layer.weight], whole.params) for layer in ctx.network)
    found = layers | {place.parameter for place in places if place}
    modules = whole.problem.model.named_modules()
    matrices = {f"{name}.weight".lstrip(".") for name, module in modules if isinstance(module, WITH_A_MATRIX)}
    named = (matrices & whole.params.keys()) | (ctx.network.not_covered.keys() & whole.params.keys())
    return {name: value.numel() for name, value in whole.params.items() if name in named - found}


def _share_left_out(left_out: Mapping[str, int], ctx: Context) -> float:
    """Share of the weights that are in no layer, among those of all matrices."""
    without = sum(left_out.values())
    return without / (without + sum(ctx.params[layer.weight].numel() for layer in ctx.network)) if without else 0.0


def _groups_of_tasks(ctx: Context, tasks: Sequence[Task]) -> list[list[Task]]:
    """Tasks whose changes are held together and predicted by one sweep, the changes of a layer together."""
    groups: list[list[Task]] = [[]]
    most = allowed(ctx.effort.limits.kept_memory, ctx.problem.device, ctx.effort.memory)
    held = 0
    for task in tasks:
        value = ctx.params[task.layer.weight]
        size = value.numel() * value.element_size()
        if groups[-1] and (held + size > most or len(groups[-1]) >= ctx.effort.limits.predicted_together):
            groups.append([])
            held = 0
        groups[-1].append(task)
        held += size
    return groups


def _steps_of_tasks(ctx: Context, tasks: Sequence[Task], rule: Rounding) -> dict[Any, dict[str, Tensor]]:
    """Δ of some changes, by their keys; none where the time is up before the curvature that chooses zeros is known."""
    try:
        return {task.key: {task.layer.weight: _step_of_task(ctx, task, rule)} for task in tasks}
    except NotApplicable:
        if not time_is_over(ctx):
            raise
        return {}


def _step_of_task(ctx: Context, task: Task, rule: Rounding) -> Tensor:
    """Δ of a change."""
    weight, name = ctx.params[task.layer.weight], task.layer.weight

    def diagonal() -> Tensor:
        return ctx.cached(_saliency_diagonals)[name]

    return changed_weight(task.change, weight, task.layer, rule, diagonal) - weight


def _saliency_diagonals(ctx: Context) -> dict[str, Tensor]:
    """Gauss-Newton diagonals of the layers' weights."""
    names = [layer.weight for layer in ctx.network]
    precision = ctx.effort.precision and max(ctx.effort.precision, ctx.effort.limits.ranking_precision)
    return output_diagonals(ctx, names, "gauss_newton", precision).values


def _result_or_reason(work: Any) -> tuple[Any, str]:
    """Result and no reason, or None and the reason of a failure, so that earlier measurements are not lost."""
    try:
        with differentiated_twice():
            return work(), ""
    except NotApplicable as problem:
        return None, str(problem)


def _rise_by_trace(trace: Uncertain, step: Tensor) -> Uncertain:
    """½ (Tr H / n) ‖Δ‖² (HAWQ-V2), with the errors of estimator and samples together."""
    factor = 0.5 * float(step.double().square().sum()) / step.numel()
    return Uncertain(factor * trace.value, factor * trace.stderr)


def _place_in_words(whole: Context, value: Tensor, layer: Layer) -> str:
    """Place of the weight in the user's model; empty where it is computed from several parameters."""
    place = place_of_weight(layer.weight, value, whole.params)
    return place.words(whole.params) if place else ""


def _sensitivity_row(
    ctx: Context,
    task: Task,
    rises: Rises | None = None,
    predicted: Predicted | None = None,
    step: Tensor | None = None,
    reason: str = "",
) -> dict[str, Any]:
    key, rises = task.key, rises or {}
    trace = predicted.traces.get(task.layer.weight) if predicted else None
    numbers = {
        "predicted": predicted.rises[key] if predicted else NOTHING,
        "by_trace": NOTHING if step is None or trace is None else _rise_by_trace(trace, step),
        "by_trapezoid": rises.get((key, "trapezoid"), NOTHING),
        "measured": rises.get((key, "rise"), NOTHING),
        "error_change": rises.get((key, "error"), NOTHING),
    }
    if rises and math.isnan(numbers["measured"].value):
        reason = "the loss of the changed network is no number"
    return {
        "layer": task.layer.name,
        "weight": task.layer.weight,
        "parameters": ctx.params[task.layer.weight].numel(),
        "what": task.change.what,
        "bits": task.change.bits if task.change.bits is not None else pd.NA,
        "sparsity": task.change.sparsity,
        **{name: number.value for name, number in numbers.items()},
        **{f"{name}_stderr": number.stderr for name, number in numbers.items()},
        "way": predicted.ways[key] if predicted else "",
        "reason": reason,
    }
