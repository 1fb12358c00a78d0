"""A problem in which every weight may move, and where the weights of its plain form stand in the user's model."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import permutations

import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.input_checks import independent_copy
from flatscope.network.normal_form_pass import ACTING
from flatscope.params import Params
from flatscope.problem import Problem

_INDEX = r"\d*:?\d*"
_PART = re.compile(rf"(?P<name>[^\[#]+)(?:\[(?P<part>{_INDEX}(?:, {_INDEX})*)\]|\[a part\])?(?:#\d+)?")


def problem_with_all_weights_free(problem: Problem) -> Problem:
    """The same problem with every weight free to move: rounding and fine-tuning do not ask what was trained."""
    if len(problem.trainable) == sum(value.is_floating_point() for value in problem.params.values()):
        return problem
    model = independent_copy(problem.model)
    for value in model.parameters():
        value.requires_grad_(value.is_floating_point())
    return problem.with_model(model)


@dataclass(frozen=True)
class WeightPlace:
    """Place of a weight in a parameter: a part of it, perhaps in another shape, transposed, or with axes reordered."""

    parameter: str
    index: tuple[slice | int, ...]  # of the part; () for the whole
    shape: tuple[int, ...]  # of the weight
    transposed: bool
    order: tuple[int, ...] = ()  # of the parameter's axes, in front of the other shape; () as they stand

    def of(self, params: Mapping[str, Tensor]) -> Tensor:
        """The weight: a view of the parameter, unless its axes are reordered."""
        part = params[self.parameter][self.index]
        if self.order:
            return part.permute(self.order).reshape(self.shape)
        if self.transposed:
            return part.view(self.shape[::-1]).T
        return part.view(self.shape)

    def words(self, params: Mapping[str, Tensor]) -> str:
        """The parameter, followed by what makes it the weight: `w`, `w[0:4]`, `w[:].T`."""
        if self.order:
            axes, sizes = (", ".join(map(str, numbers)) for numbers in (self.order, self.shape))
            return f"{self.parameter}[:].permute({axes}).reshape({sizes})"
        if not self.index and not self.transposed:
            return self.parameter
        expression = f"{self.parameter}[{', '.join(_place_in_words(place) for place in self.index) or ':'}]"
        shape = self.shape[::-1] if self.transposed else self.shape
        if tuple(params[self.parameter][self.index].shape) != shape:
            expression += f".view({', '.join(map(str, shape))})"
        return expression + ".T" * self.transposed


def _place_in_words(place: slice | int) -> str:
    if isinstance(place, int):
        return str(place)
    return ":".join("" if end is None else str(end) for end in (place.start, place.stop))


def place_of_weight(weight: str, value: Tensor, params: Params) -> WeightPlace | None:
    """Place of a normal-form weight in the model's parameters; None where it is computed from several.

    Found by its name and confirmed by its values.

    Args:
        weight: its name in the plain network.
        value: of the weight.
        params: of the model.
    """
    for place in _candidate_places(weight, value, params):
        there = place.of(params)
        if there.shape == value.shape and torch.equal(there, value.to(there)):
            return place
    return None


def _candidate_places(weight: str, value: Tensor, params: Params) -> Iterator[WeightPlace]:
    shape = tuple(value.shape)
    if weight in params:
        yield WeightPlace(weight, (), shape, False)
        return
    match = _PART.fullmatch(weight.removeprefix(ACTING).replace("/", "."))
    name = match["name"] if match else ""
    if match is None or name not in params or value.ndim < 1:
        return
    whole = params[name]
    for index in (_index_told_by_name(match["part"]), *_blocks_of_shape(whole, shape)):
        try:
            part = whole[index]
        except IndexError:
            continue
        for transposed in (False, True):
            wanted = shape[::-1] if transposed else shape
            fits = part.shape == wanted or (part.numel() == value.numel() and part.is_contiguous())
            if fits and not (transposed and value.ndim != 2):
                yield WeightPlace(name, index, shape, transposed)
    if whole.ndim in (3, 4, 5) and whole.numel() == value.numel():
        for order in permutations(range(whole.ndim)):
            yield WeightPlace(name, (), shape, False, order)


def _index_told_by_name(part: str | None) -> tuple[slice | int, ...]:
    """The index that a name's ending tells; () for none."""
    index: list[slice | int] = []
    for word in part.split(", ") if part else ():
        numbers = [int(end) if end else None for end in word.split(":")]
        index.append(slice(*numbers) if len(numbers) > 1 else int(word))
    return tuple(index)


def _blocks_of_shape(whole: Tensor, shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Blocks of whole rows, or of whole columns, that have the shape or the transposed one."""
    if whole.ndim == len(shape):
        for start in range(len(whole) - shape[0] + 1):
            yield (slice(start, start + shape[0]),)
    if whole.ndim == 2 == len(shape):
        for start in range(whole.shape[1] - shape[0] + 1):
            yield slice(None), slice(start, start + shape[0])


def write_into(model_params: Mapping[str, Tensor], place: WeightPlace, value: Tensor) -> None:
    """Put a weight into its place of a model's parameters."""
    with torch.no_grad():
        if place.order:
            axes = model_params[place.parameter].permute(place.order)
            axes.copy_(value.reshape(axes.shape))
        else:
            place.of(model_params).copy_(value)


def refuse_other_model(params: Params, given: Mapping[str, Tensor], where: str) -> None:
    """Raise where a model's weights have other names or shapes than those that were looked at."""
    fix = "Pass the model that the problem was made of, or one of the same architecture"
    for name in {**params, **given}:
        wanted, shape = (str(tuple(held[name].shape)) if name in held else "none" for held in (params, given))
        if shape != wanted:
            raise InputError(f"{name} of shape {wanted}", shape, where=where, fix=fix)
