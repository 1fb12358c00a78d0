"""A problem in which every weight may move, and where the weights of its plain form stand in the user's model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.input_checks import replica
from flatscope.network.layers import ACTING
from flatscope.params import Params
from flatscope.problem import Problem

_SLICE = re.compile(r"(?P<name>.*?)(?:\[\d+:\])?(?:#\d+)?$")


def unfrozen(problem: Problem) -> Problem:
    """The same problem with every weight free to move: rounding and fine-tuning do not ask what was trained."""
    if len(problem.trainable) == sum(value.is_floating_point() for value in problem.params.values()):
        return problem
    model = replica(problem.model)
    for value in model.parameters():
        value.requires_grad_(value.is_floating_point())
    return problem.with_model(model)


@dataclass(frozen=True)
class WeightPlace:
    """Place of a weight in a parameter: rows of it, perhaps transposed."""

    parameter: str
    start: int
    stop: int
    transposed: bool

    def of(self, params: Mapping[str, Tensor]) -> Tensor:
        """The weight as a view of the parameter."""
        value = params[self.parameter]
        if self.transposed:
            return value.transpose(0, 1)[self.start : self.stop]
        return value[self.start : self.stop] if value.ndim else value


def place_of(weight: str, value: Tensor, params: Params) -> WeightPlace | None:
    """Place of a normal-form weight in the model's parameters; None where it is computed from several.

    Found by its name and confirmed by its values.

    Args:
        weight: its name in the plain network.
        value: of the weight.
        params: of the model.
    """
    for place in _candidates(weight, value, params):
        there = place.of(params)
        if there.shape == value.shape and torch.equal(there, value.to(there)):
            return place
    return None


def _candidates(weight: str, value: Tensor, params: Params) -> Iterator[WeightPlace]:
    if weight in params:
        yield WeightPlace(weight, 0, len(params[weight]), False)
        return
    match = _SLICE.match(weight.removeprefix(ACTING).replace("/", "."))
    name = match["name"] if match else ""
    if name not in params or value.ndim < 1:
        return
    whole = params[name]
    for transposed in (False, True):
        if transposed and whole.ndim != 2:
            continue
        length = whole.shape[1] if transposed else len(whole)
        for start in range(0, length - len(value) + 1):
            yield WeightPlace(name, start, start + len(value), transposed)


def write_into(model_params: Mapping[str, Tensor], place: WeightPlace, value: Tensor) -> None:
    """Put a weight into its place of a model's parameters."""
    with torch.no_grad():
        place.of(model_params).copy_(value)


def refuse_other_model(params: Params, given: Mapping[str, Tensor], where: str) -> None:
    """Raise where a model's weights have other names or shapes than those that were looked at."""
    for name, value in params.items():
        shape = tuple(given[name].shape) if name in given else "none"
        if shape != tuple(value.shape):
            fix = "Pass the model that the problem was made of, or one of the same architecture"
            raise InputError(f"{name} of shape {tuple(value.shape)}", str(shape), where=where, fix=fix)
