"""Rounded: a copy of a model with layers rounded as an allocation says, and what that costs when all are together."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pandas as pd
import torch
from torch import Tensor, nn

from flatscope.charts import Bars
from flatscope.context import Context
from flatscope.decisions.all_weights import (
    WeightPlace,
    place_of_weight,
    problem_with_all_weights_free,
    refuse_other_model,
    write_into,
)
from flatscope.decisions.changes import Rounding
from flatscope.decisions.rises import measured_rises
from flatscope.decisions.sample_means import NOTHING, Uncertain
from flatscope.errors import InputError, refuse_unknown
from flatscope.formatting import readable_number
from flatscope.input_checks import independent_copy
from flatscope.isolation import own_settings
from flatscope.network.layers import Layer
from flatscope.params import Params, named_parameters, refuse_untied_weights, tied_names
from flatscope.problem import Problem
from flatscope.result import DRAWN, Result
from flatscope.tensor_files import tensor_bytes

ALL = ""  # the step of all layers together


@dataclass(frozen=True, eq=False, repr=False)
class Rounded(Result):
    """A rounded copy of a model, with what the rounding of all layers together costs.

    Attributes:
        model: the copy, in the dtype of the model; called as the model is: `rounded(x)`.
        allocation: {layer: bits}; of layers that stay as they are, none.
        loss: mean loss of the copy.
        rise: by which that is above the loss of the model, with its standard error over samples.
        error_change: of the share of wrong answers, likewise.
        sum_of_rises: of the layers one by one, on the same samples.
        test_rise: rise on the test samples; NaN without any.

    Example:
        >>> import torch, flatscope as fs
        >>> model, x, y = torch.nn.Linear(3, 2), torch.eye(3), torch.tensor([0, 1, 0])
        >>> s = fs.sensitivity(fs.Problem(model, train=(x, y)), bits=(8, 2), sparsity=())
        >>> rounded = s.apply(model, s.allocate(mean_bits=2))
        >>> rounded.allocation, [len(row.unique()) <= 3 for row in rounded.state_dict()["weight"]]
        ({'weight': 2}, [True, True])
    """

    WORD = "rounded copy"
    ENDINGS = (".safetensors", ".csv", ".md", ".html", *DRAWN)
    READABLE = ()  # the weights are a state dict for a model, and no result

    model: nn.Module
    allocation: dict[str, int]
    loss: float
    rise: Uncertain
    error_change: Uncertain
    sum_of_rises: float
    test_rise: Uncertain = NOTHING
    test_error_change: Uncertain = NOTHING
    meta: dict[str, Any] = field(default_factory=dict)

    def __call__(self, *args: Any, **keywords: Any) -> Any:
        """Outputs of the rounded copy."""
        return self.model(*args, **keywords)

    def state_dict(self) -> dict[str, Tensor]:
        """Of the rounded copy."""
        return dict(self.model.state_dict())

    def headline_lines(self) -> list[str]:
        """Rise of the loss by the rounding, on the samples of the problem and on test samples."""
        lines = [
            f"Rounded together the layers raise the loss by {self.rise.words}, "
            f"to {readable_number(self.loss)}; "
            f"one by one their rises add up to {readable_number(self.sum_of_rises, 3)}."
        ]
        joint, apart = self.rise.value, self.sum_of_rises
        if not math.isnan(apart):
            share = (
                "" if not joint else f" ({readable_number(100 * (joint - apart) / abs(joint), 2)} % of the joint rise)"
            )
            lines.append(f"Difference between the joint rise and the sum: {readable_number(joint - apart, 2)}{share}.")
        if not math.isnan(self.error_change.value):
            lines.append(f"Change of the error: {self.error_change.words}.")
        if not math.isnan(self.test_rise.value):
            errors = "" if math.isnan(self.test_error_change.value) else f", error {self.test_error_change.words}"
            lines.append(f"On the test samples: loss {self.test_rise.words}{errors}.")
        return lines

    def __repr__(self) -> str:
        return self.headline

    def to_frame(self) -> pd.DataFrame:
        """One row per layer that was rounded: its bits."""
        return pd.DataFrame({"layer": list(self.allocation), "bits": list(self.allocation.values())})

    def cells(self) -> tuple[list[str], list[list[str]]]:
        """Layer and bits."""
        return ["layer", "bits"], [[layer, str(bits)] for layer, bits in self.allocation.items()]

    def chart(self) -> Bars:
        """Bits of every layer that was rounded."""
        return Bars(list(self.allocation), {"bits": [float(bits) for bits in self.allocation.values()]}, axis="bits")

    def _head(self) -> dict[str, Any]:
        rises = {"loss": self.loss, "rise": list(self.rise), "error_change": list(self.error_change)}
        return {**self.meta, **rises, "sum_of_rises": self.sum_of_rises}

    def _content(self, ending: str) -> bytes:
        """Of a .safetensors file: the rounded weights, with the allocation in the header."""
        if ending != ".safetensors":
            return super()._content(ending)
        head = {"flatscope_rounded": json.dumps({"allocation": self.allocation, "rise": list(self.rise)}, default=str)}
        # Names of one tensor each get a copy: the format has no ties.
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in self.state_dict().items()}
        return tensor_bytes(tensors, head)


def apply_allocation(
    frame: pd.DataFrame, rounding: str, model: nn.Module, allocation: Mapping[str, int], problem: Problem
) -> Rounded:
    """Round the layers of a copy, and measure its loss against the model's on the samples of the problem.

    Args:
        frame: of a `Sensitivity`: single rises and the bits that were tried.
        rounding: its name.
        model: the model that is to be rounded.
        allocation: {layer: bits}.
        problem: model of the same architecture, and data.
    """
    if not isinstance(model, nn.Module):
        raise InputError("a torch.nn.Module", type(model).__name__, where="apply")
    if not isinstance(allocation, Mapping):
        raise InputError("{layer: bits}", type(allocation).__name__, where="apply, allocation", fix="s.allocate(4)")
    known = list(dict.fromkeys(frame["layer"]))
    for layer in allocation:
        refuse_unknown(layer, known, "layer")
    unchanged = set(getattr(allocation, "unchanged", ()))
    tried = {(str(row["layer"]), int(row["bits"])): row for row in frame[frame["bits"].notna()].to_dict("records")}
    moving = {
        layer: int(bits) for layer, bits in allocation.items() if layer not in unchanged and (layer, int(bits)) in tried
    }
    _refuse_untried(allocation, unchanged, moving, tried)
    with own_settings(problem.generators):
        return _rounded_copy(model, moving, rounding, problem)


def _rounded_copy(model: nn.Module, moving: dict[str, int], rounding: str, problem: Problem) -> Rounded:
    copy = independent_copy(model).eval()
    refuse_untied_weights(tied_names(problem.model), copy.state_dict(), "apply")
    refuse_other_model(problem.params, named_parameters(copy), "apply")
    base = _problem_with_weights_of(problem, copy)
    twin = Context(problem_with_all_weights_free(base).plain)
    layers = {layer.name: layer for layer in twin.network}
    parameters, rule = dict(copy.named_parameters()), Rounding.named(rounding)
    steps: dict[str, Params] = {}
    for name, bits in moving.items():
        layer = layers[name]
        weight = twin.params[layer.weight]
        place, rounded = _place_of_layer_weight(base.params, weight, layer), rule.rounded(weight, layer, bits)
        write_into(parameters, place, rounded)  # as it is: the sum w + Δ would leave the grid by rounding
        after = {place.parameter: base.params[place.parameter].clone()}
        write_into(after, place, rounded)
        steps[name] = {place.parameter: after[place.parameter] - base.params[place.parameter]}
    joint = _joint_rises(base, steps, copy)
    return Rounded(
        model=copy,
        allocation=moving,
        loss=Context(base).scores().loss + joint["train"][0].value,
        rise=joint["train"][0],
        error_change=joint["train"][1],
        sum_of_rises=joint["train"][2],
        test_rise=joint["test"][0],
        test_error_change=joint["test"][1],
        meta={"rounding": rounding, "samples": problem.n_train},
    )


def _joint_rises(
    base: Problem, steps: Mapping[str, Params], copy: nn.Module
) -> dict[str, tuple[Uncertain, Uncertain, float]]:
    """Joint rise, change of the error and sum of the rises one by one: of the training and the test samples.

    The sum is that of the training samples alone.
    """
    rounded = _problem_with_weights_of(base, copy)
    step = {
        name: rounded.params[name] - value
        for name, value in base.params.items()
        if not torch.equal(base.params[name], rounded.params[name])
    }
    joint = {"test": (NOTHING, NOTHING, math.nan)}
    for part in ("train",) if base.test is None else ("train", "test"):
        alone = {layer: one for layer, one in steps.items() if part == "train"}
        rises = measured_rises(Context(base), {ALL: step, **alone}, part, trapezoid=False)
        total = sum(rises[layer, "rise"].value for layer in alone) if part == "train" else math.nan
        joint[part] = rises[ALL, "rise"], rises.get((ALL, "error"), NOTHING), total
    return joint


def _problem_with_weights_of(problem: Problem, model: nn.Module) -> Problem:
    """The problem with the parameters and buffers of another module of the same architecture."""
    twin = independent_copy(problem.model)
    with torch.no_grad():
        for kind in ("named_parameters", "named_buffers"):
            given = dict(getattr(model, kind)())
            for name, value in getattr(twin, kind)():
                if name in given and given[name].shape == value.shape:
                    value.copy_(given[name])
    return problem.with_model(twin)


def _place_of_layer_weight(params: Params, weight: Tensor, layer: Layer) -> WeightPlace:
    """Place of a layer's weight in the model's parameters."""
    place = place_of_weight(layer.weight, weight, params)
    if place is None:
        fix = "Merge or remove what computes it first (merge the adapter, remove_parametrizations)"
        raise InputError("a weight that is a parameter", "one that is computed from several", layer.name, fix)
    return place


def _refuse_untried(
    allocation: Mapping[str, int], unchanged: set[str], moving: Mapping[str, int], tried: Mapping[Any, Any]
) -> None:
    """Raise for bits between those that were tried: more than all of them mean that a layer stays as it is."""
    most = max((bits for _, bits in tried), default=0)
    for layer, bits in allocation.items():
        if layer not in unchanged and layer not in moving and int(bits) <= most:
            got, fix = f"{bits} bits", "Measure them: sensitivity(problem, bits=…)"
            raise InputError("bits that were measured", got, where=f"apply, {layer}", fix=fix)
