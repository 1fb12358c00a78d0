"""`forecast`: what going to other weights does to this loss, predicted and measured, layer by layer."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
import torch
from torch import Tensor, nn

from flatscope.charts import resized_figure
from flatscope.context import Context, Effort, make_effort
from flatscope.curvature.second_derivative import refuse_wrong_second_derivative
from flatscope.decisions.all_weights import problem_with_all_weights_free
from flatscope.decisions.block_quadratics import group_size, sum_gradients
from flatscope.decisions.rises import measured_rises_in_time, parameters_moved_by
from flatscope.decisions.sample_means import NOTHING, SampleMeans, Uncertain
from flatscope.errors import InputError, NotApplicable, differentiated_twice
from flatscope.formatting import first_of_names, readable_number
from flatscope.isolation import own_settings
from flatscope.params import Params, norm, plain_names, refuse_untied_weights, tied_names
from flatscope.problem import Problem
from flatscope.progress import progress_bar
from flatscope.result import DrawnResult, checked_columns, columns_of, plain
from flatscope.samples import slice_inputs

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ALL = ""  # the row of all layers together
BUFFERS = "(buffers)"  # that of statistics which are no weights
NUMBERS = tuple(
    f"{name}{ending}" for name in ("predicted", "trapezoid", "measured", "error_change") for ending in ("", "_stderr")
)
COLUMNS = {
    "layer": "object",
    "parameters": "int64",
    "moved": "float64",
    "slope": "float64",
    **dict.fromkeys(NUMBERS, "float64"),
    "reason": "object",
}
FAILS = 0.5  # relative gap between prediction and measurement from which on the headline says that it fails
MOST_NAMED = 3
WIDE = 30  # largest over smallest rise from which on a picture has a logarithmic scale


class Forecast(DrawnResult):
    """Change of the loss when the weights are replaced: the sum, and each layer's share of it.

    Columns of `to_frame()`: layer (empty: all together), parameters that move, moved (‖Δ‖/‖w‖), slope (g·Δ);
    predicted (the layer's share g_l·Δ_l + ½ Δ_l·(HΔ)_l; shares sum to the prediction), trapezoid (its share
    ½ (g(w) + g(w+Δ))_l·Δ_l, likewise), measured (with only this layer moved; in the first row with all), error_change,
    each with its standard error over the samples.

    Example:
        >>> import torch, flatscope as fs
        >>> model = torch.nn.Linear(2, 1, bias=False).double()
        >>> problem = fs.Problem(model, train=(torch.eye(2), torch.zeros(2)), loss="mse")
        >>> found = fs.forecast(problem, {"weight": model.weight.detach() + 1.0})
        >>> abs(found.predicted.value - found.measured.value) < 1e-12  # a quadratic loss
        True
    """

    WORD = "forecast"
    COLUMNS = COLUMNS
    ENDINGS = (".json", ".parquet", ".npz", ".csv", ".png", ".svg", ".pdf")
    READABLE = (".json", ".parquet", ".npz")

    def __init__(self, frame: pd.DataFrame, meta: Mapping[str, Any]) -> None:
        self._frame = checked_columns(frame, COLUMNS, "forecast")
        self.meta: dict[str, Any] = plain(meta)

    def to_frame(self) -> pd.DataFrame:
        """The row of all layers together, then one for each layer that moves."""
        return self._frame.copy()

    def _row_of_all_layers(self, name: str) -> Uncertain:
        row = self._frame[self._frame["layer"] == ALL].iloc[0]
        return Uncertain(float(row[name]), float(row[f"{name}_stderr"]))

    @property
    def predicted(self) -> Uncertain:
        """Rise by gᵀΔ + ½ΔᵀHΔ, with its standard error over the samples."""
        return self._row_of_all_layers("predicted")

    @property
    def trapezoid(self) -> Uncertain:
        """Rise by ½ (g(w) + g(w+Δ))·Δ."""
        return self._row_of_all_layers("trapezoid")

    @property
    def measured(self) -> Uncertain:
        """Rise L(w+Δ) − L(w)."""
        return self._row_of_all_layers("measured")

    @property
    def error_change(self) -> Uncertain:
        """Change of the share of wrong answers; NaN without classes."""
        return self._row_of_all_layers("error_change")

    def headline_lines(self) -> list[str]:
        """Change of the loss, the layers that cause it, and whether the prediction was right."""
        measured, predicted = self.measured, self.predicted
        prediction = "not predicted" if math.isnan(predicted.value) else f"predicted {predicted.words}"
        lines = [f"The new weights change this loss by {measured.words}; {prediction}."]
        if not math.isnan(self.error_change.value):
            lines.append(f"Change of the error: {self.error_change.words}.")
        shares = self._frame[self._frame["layer"] != ALL].sort_values("predicted", ascending=False)
        if len(shares) > 1 and shares["predicted"].notna().all():
            parts = [
                f"{row['layer']} {readable_number(row['predicted'], 2)}"
                for row in shares.to_dict("records")[:MOST_NAMED]
            ]
            lines.append(f"Largest shares of the prediction: {', '.join(parts)}.")
        gap = abs(predicted.value - measured.value)
        noise = 2 * math.hypot(*(0.0 if math.isnan(e) else e for e in (predicted.stderr, measured.stderr)))
        if gap > max(FAILS * abs(measured.value), noise):
            lines.append("The step is too long for a second-order prediction: believe what was measured.")
        return [*lines, *self.meta.get("notes", [])]

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Layer, size of the move, predicted share, trapezoid, measured alone."""
        header = ["layer", "parameters", "moved", "predicted", "trapezoid", "measured", "± s.e.", "error"]
        names = ("moved", "predicted", "trapezoid", "measured", "measured_stderr", "error_change")
        rows = [
            [
                row["layer"] or "all together",
                f"{row['parameters']:,}",
                *(readable_number(row[name], 3) for name in names),
            ]
            for row in self._frame.to_dict("records")
        ]
        return header, rows

    def figure(self, *, width: float | None = None, font_size: float | None = None) -> Figure:
        """Each layer's predicted share beside what was measured; width in inches, size of labels in points."""
        from matplotlib.figure import Figure

        count = len(self._frame)
        figure = Figure(figsize=(4.6, max(2.7, 0.9 + 0.25 * count)), layout="constrained")
        self.plot(figure.subplots())
        return resized_figure(figure, width, font_size)

    def plot(self, ax: Axes | None = None) -> Any:
        """Draw the bars of the layers, the first layer on top; a figure of its own without axes."""
        if ax is None:
            return self.figure()
        shown = self._frame[::-1]
        places = np.arange(len(shown))
        ax.barh(places + 0.2, shown["predicted"], 0.38, color="#0072B2", label="predicted share")
        drawn = ax.barh(places - 0.2, shown["measured"], 0.38, color="#D55E00", label="measured, moved alone")
        ax.set_yticks(places, [name or "all together" for name in shown["layer"]])
        sizes = shown[["predicted", "measured"]].abs().to_numpy().ravel()
        sizes = sizes[np.isfinite(sizes) & (sizes > 0)]
        if len(sizes) and sizes.max() > WIDE * sizes.min():  # all layers together often cost far more than each alone
            ax.set_xscale("symlog", linthresh=max(float(np.quantile(sizes, 0.1)), 1e-4 * float(sizes.max())))
        ax.set_xlabel("rise of the loss")
        ax.axvline(0, color="#bbbbbb", linewidth=0.8)
        ax.legend(frameon=False, loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=2)
        return drawn

    def _arrays(self) -> dict[str, Any]:
        kinds = {"object": str}
        return {str(n): c.to_numpy(dtype=kinds.get(COLUMNS[str(n)], COLUMNS[str(n)])) for n, c in self._frame.items()}


def forecast(
    problem: Problem,
    new_weights: nn.Module | Mapping[str, Tensor],
    *,
    budget: float | str | None = None,
    memory: int | str | None = None,
) -> Forecast:
    """Change of this problem's loss by other weights, layer by layer: predicted, and measured.

    For fine-tuning (what will the old task lose?), LoRA, quantization, pruning, merging. All parameters that differ
    move, frozen ones too.

    Args:
        problem: model with the old weights, data of the loss that is asked about.
        new_weights: a module of the same architecture, or its state dict.
        budget: time to end in; layers that are not reached are not moved alone, and their rows say so.
        memory: what a pass may use: bytes, or "8GiB".

    Example:
        >>> import torch, flatscope as fs
        >>> old, new = torch.nn.Linear(3, 2), torch.nn.Linear(3, 2)
        >>> found = fs.forecast(fs.Problem(old, train=(torch.eye(3), torch.tensor([0, 1, 0]))), new)
        >>> found.to_frame()["layer"].tolist()  # all together, then each parameter or module that moves
        ['', 'weight', 'bias']
    """
    if not isinstance(problem, Problem):
        raise InputError("a Problem", type(problem).__name__, "forecast", "Make one: Problem(model, train=(x, y))")
    with own_settings(problem.generators):
        return _compute_forecast(problem, new_weights, make_effort(budget=budget, memory=memory))


def _compute_forecast(problem: Problem, new_weights: nn.Module | Mapping[str, Tensor], effort: Effort) -> Forecast:
    begun = time.perf_counter()
    replacements = _new_weights_by_name(problem, new_weights)
    ctx = Context(problem_with_all_weights_free(problem), effort=effort)
    step = _step_of_parameters(ctx, replacements)
    layers = _moving_parameters_by_layer(ctx, step)
    statistics = _changed_buffers(problem, replacements)
    joint = _joint_rise(ctx, step, statistics)
    try:
        with differentiated_twice():
            shares, reason = _shares_by_layer(ctx, step, layers), ""
    except NotApplicable as problem_found:
        shares, reason = {}, str(problem_found)
    rows = [_forecast_row(ctx, ALL, step, shares, joint, reason)]
    with progress_bar("Moving layers", total=len(layers), lines=True) as advance:
        for layer, names in layers.items():
            change = {name: step[name] for name in names}
            alone = measured_rises_in_time(ctx, {layer: change}, trapezoid=False)
            why_not = reason if alone else "not moved alone: the time was up"
            rows.append(_forecast_row(ctx, layer, change, shares, alone, why_not))
            advance(note=layer)
    if statistics:
        alone = measured_rises_in_time(ctx, {BUFFERS: {}}, trapezoid=False, buffers={BUFFERS: statistics})
        rows.append(_forecast_row(ctx, BUFFERS, {}, {}, alone, "no weights: not predicted"))
    meta = {**ctx.provenance(begun), "notes": _forecast_notes(step, statistics), "remarks": list(problem.remarks)}
    return Forecast(columns_of(rows, COLUMNS, "forecast"), meta)


def _joint_rise(ctx: Context, step: Params, statistics: Params) -> Mapping[Any, Uncertain]:
    """Rise with all that moves; without the trapezoid where the slope along the step cannot be told."""
    try:
        with differentiated_twice():
            return measured_rises_in_time(ctx, {ALL: step}, buffers={ALL: statistics})
    except NotApplicable:
        return measured_rises_in_time(ctx, {ALL: step}, trapezoid=False, buffers={ALL: statistics})


def _new_weights_by_name(problem: Problem, new_weights: nn.Module | Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The new weights by the names of the problem's parameters and buffers."""
    if isinstance(new_weights, nn.Module):
        by_name = {**dict(new_weights.named_parameters()), **dict(new_weights.named_buffers())}
        by_name |= {name: by_name[first] for name, first in tied_names(new_weights).items() if first in by_name}
    elif isinstance(new_weights, Mapping) and all(isinstance(value, Tensor) for value in new_weights.values()):
        by_name = dict(new_weights)
    else:
        raise InputError("a module or a state dict of tensors", type(new_weights).__name__, where="new_weights")
    by_name = plain_names(by_name)
    refuse_untied_weights(tied_names(problem.model), by_name, "new_weights")
    missing = [name for name in problem.params if name not in by_name]
    extra = [name for name in by_name if name not in problem.params and name not in problem.buffers]
    extra = [name for name in extra if name not in tied_names(problem.model)]
    if missing or extra:
        got = f"none for {first_of_names(missing, 4)}" if missing else f"others, {first_of_names(extra, 4)}"
        fix = (
            "Merge adapters into the weights first (peft: merge_and_unload()), or make the problem of the adapted model"
        )
        raise InputError("weights for every parameter of the problem's model", got, "new_weights", fix)
    for name, value in problem.params.items():
        if by_name[name].shape != value.shape:
            shapes = f"shape {tuple(value.shape)}", f"{tuple(by_name[name].shape)}"
            raise InputError(shapes[0], shapes[1], where=f"new_weights, {name}")
        if by_name[name].is_floating_point() and not bool(by_name[name].detach().isfinite().all()):
            raise InputError("finite weights", "NaN or infinity", f"new_weights, {name}", "Did fine-tuning diverge?")
    return by_name


def _step_of_parameters(ctx: Context, given: Mapping[str, Tensor]) -> Params:
    """Δ of every parameter that differs."""
    step: Params = {}
    for name, value in ctx.params.items():
        delta = given[name].detach().to(value.device, value.dtype) - value
        if value.is_floating_point() and bool(delta.any()):
            step[name] = delta
    return step


def _changed_buffers(problem: Problem, given: Mapping[str, Tensor]) -> Params:
    """Buffers that differ, as BatchNorm's running statistics do after training."""
    return {
        name: given[name].to(value)
        for name, value in problem.buffers.items()
        if name in given and value.is_floating_point() and not torch.equal(given[name].to(value), value)
    }


def _forecast_notes(step: Params, statistics: Params) -> list[str]:
    """Remarks that a reader needs beside the numbers."""
    notes = [] if step or statistics else ["The new weights are those of the problem: nothing moves."]
    if statistics:
        notes.append(
            f"Buffers also differ ({first_of_names(list(statistics), MOST_NAMED)}): measured with them, but "
            "predicted from the weights alone."
        )
    return notes


def _moving_parameters_by_layer(ctx: Context, step: Params) -> dict[str, list[str]]:
    """Names of the moving parameters by the module that owns them."""
    names_by_layer: dict[str, list[str]] = {}
    for name in step:
        names_by_layer.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return names_by_layer


def _shares_by_layer(ctx: Context, step: Params, layers: Mapping[str, list[str]]) -> dict[tuple[str, str], Uncertain]:
    """Shares of the prediction and of the trapezoid, by layer and for all."""
    if not step:
        return {(ALL, what): Uncertain(0.0, 0.0) for what in ("slope", "predicted", "trapezoid")}
    refuse_wrong_second_derivative(ctx)
    sums, size = SampleMeans(), group_size(ctx)
    there = ctx.at(parameters_moved_by(ctx.params, step))
    for inputs, targets in ctx.share(size=size):
        for start in range(0, len(targets), size):
            batch = slice_inputs(inputs, start, start + size), targets[start : start + size]
            n = len(batch[1])
            gradients, leaves = sum_gradients(ctx, batch, list(step))
            slope = torch.stack([(g * step[name].to(g)).sum() for name, g in gradients.items()]).sum()
            products = _hessian_times_step(slope, leaves)
            ends, _ = sum_gradients(there, batch, list(step))
            first, curved, end = (_inner_products_with_step(vectors, step) for vectors in (gradients, products, ends))
            for layer, names in (*layers.items(), (ALL, list(step))):
                g, h, e = (torch.stack([part[name] for name in names]).sum() for part in (first, curved, end))
                for what, value in (("slope", g), ("predicted", g + 0.5 * h), ("trapezoid", 0.5 * (g + e))):
                    sums.add((layer, what), value.reshape(1), n)
    ctx.charge_passes("forward", 2 * ctx.problem.n_train)
    ctx.charge_passes("curvature", ctx.problem.n_train)
    return sums.estimates(ctx.problem.ranks)


def _hessian_times_step(slope: Tensor, leaves: Params) -> Params:
    """HΔ of a batch, from its slope along Δ."""
    if not slope.requires_grad:
        return {name: torch.zeros_like(value) for name, value in leaves.items()}
    products = torch.autograd.grad(slope, list(leaves.values()), materialize_grads=True)
    return dict(zip(leaves, products, strict=True))


def _inner_products_with_step(vectors: Params, step: Params) -> dict[str, Tensor]:
    """Inner products with the step by parameter, float64."""
    return {name: (value.detach().double() * step[name].double()).sum() for name, value in vectors.items()}


def _forecast_row(
    ctx: Context,
    layer: str,
    step: Params,
    shares: Mapping[tuple[str, str], Uncertain],
    rises: Mapping[Any, Uncertain],
    reason: str,
) -> dict[str, Any]:
    size = norm({name: ctx.params[name] for name in step})
    numbers = {
        "predicted": shares.get((layer, "predicted"), NOTHING),
        "trapezoid": shares.get((layer, "trapezoid"), NOTHING),
        "measured": rises.get((layer, "rise"), NOTHING),
        "error_change": rises.get((layer, "error"), NOTHING),
    }
    if layer == ALL and not shares:
        numbers["trapezoid"] = rises.get((layer, "trapezoid"), NOTHING)
    return {
        "layer": layer,
        "parameters": sum(value.numel() for value in step.values()),
        "moved": norm(step) / size if size else math.inf if step else 0.0,
        "slope": shares.get((layer, "slope"), NOTHING).value,
        **{name: number.value for name, number in numbers.items()},
        **{f"{name}_stderr": number.stderr for name, number in numbers.items()},
        "reason": reason,
    }
