"""Weights as a dictionary of named tensors, and the little algebra that sweeps need on them."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from flatscope.errors import InputError

Params = dict[str, Tensor]
T = TypeVar("T")
K = TypeVar("K")


def independent_module_copy(model: nn.Module, known: Mapping[int, Any] | None = None) -> nn.Module:
    """A copy that shares nothing with the model, also where modules keep tensors that they computed.

    Old-style weight_norm and recurrent networks with a state do so, and `copy.deepcopy` refuses it.

    Args:
        model: any module.
        known: what stands for some of its parts, by their `id`.
    """
    with _ComputedTensors():
        return copy.deepcopy(model, dict(known or {}))


class _ComputedTensors(TorchFunctionMode):
    """Inside the block `copy.deepcopy` copies the values of computed tensors, without what they were computed from."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is not Tensor.__deepcopy__ or args[0].is_leaf:
            return func(*args, **(kwargs or {}))
        value, memo = args
        return memo.setdefault(id(value), value.detach().clone())


def tied_names(model: nn.Module) -> dict[str, str]:
    """Names beside the first one of tensors that several modules hold, each with that first one."""
    first: dict[int, str] = {}
    first_names: dict[str, str] = {}
    for prefix, module in model.named_modules():  # one that is registered in several places comes once
        for key, value in (*module._parameters.items(), *module._buffers.items()):
            name = f"{prefix}.{key}" if prefix else key
            if value is not None and first.setdefault(id(value), name) != name:
                first_names[name] = first[id(value)]
    return first_names


def refuse_untied_weights(tied: Mapping[str, str], given: Mapping[str, Any], where: str) -> None:
    """Raise where weights of one tensor of a network, given by all of its names, have different values.

    Args:
        tied: as `tied_names` gives it.
        given: tensors by name.
        where: the argument that holds them.
    """
    for name, first in tied.items():
        one, other = given.get(first), given.get(name)
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape != other.shape or not torch.equal(one, other.to(one)):
            fix = "Untie them in the model too, before the problem is made of it"
            raise InputError(f"equal values for {first} and {name}, one tensor here", "different ones", where, fix)


def call_with_tensors(
    model: nn.Module, state: Params, tied: Mapping[str, str], args: Any, keywords: dict[str, Any]
) -> Any:
    """Result of a module with other tensors in the place of its own, which it has back afterwards.

    torch's own way of tying leaves other tensors behind in a module that is registered in several places.

    Args:
        model: the module.
        state: parameters and buffers by name.
        tied: as `tied_names` gives it.
        args: positional arguments.
        keywords: the others.
    """
    everywhere = state | {name: state[first] for name, first in tied.items() if first in state}
    return functional_call(model, everywhere, args, keywords, tie_weights=False)


def named_parameters(model: nn.Module) -> Params:
    """Detached copies of all parameters by name; a tensor shared by two modules appears once."""
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def trainable_names(model: nn.Module) -> tuple[str, ...]:
    """Names of the parameters that may move; all of them if the whole network is frozen."""
    names = [name for name, value in model.named_parameters() if value.is_floating_point() and value.numel()]
    free = [name for name, value in model.named_parameters() if value.requires_grad and name in names]
    return tuple(free or names)


def plain_names(state: Mapping[str, T]) -> dict[str, T]:
    """Entries of a state dict without what `torch.compile` and data parallel wrappers put into their names."""
    names = {name: ".".join(part for part in name.split(".") if part != "_orig_mod") for name in state}
    while names and all(name.startswith("module.") for name in names.values()):
        names = {name: plain.removeprefix("module.") for name, plain in names.items()}
    return {names[name]: value for name, value in state.items()}


def non_finite_name(params: Params, buffers: Params | None = None) -> str:
    """Name of the first tensor with a NaN or an infinity, or an empty string.

    Buffers may hold infinities, as attention masks do, unless they are statistics of a normalisation.
    """
    for name, value in {**params, **(buffers or {})}.items():
        may_be_infinite = name not in params and "running_" not in name
        if value.is_floating_point() and (value.isnan() if may_be_infinite else ~value.isfinite()).any():
            return name
    return ""


def add_to(totals: dict[K, Tensor], key: K, value: Tensor) -> None:
    """Add a tensor to a sum by key, which begins with it where there is none yet."""
    totals[key] = totals[key] + value if key in totals else value


def count_scalars(tensors: Iterable[Tensor]) -> int:
    """Number of scalars."""
    return sum(value.numel() for value in tensors)


def norm(params: Params) -> float:
    """Euclidean norm of all entries, summed in float64."""
    return float(sum(float(value.detach().double().square().sum()) for value in params.values()) ** 0.5)


def dot(left: Params, right: Params) -> float:
    """Inner product of two points, summed in float64."""
    return float(sum(float((left[name].detach().double() * right[name].detach().double()).sum()) for name in left))


def flatten(params: Params) -> Tensor:
    """One vector (p,) of all entries, in the dictionary's order."""
    return torch.cat([value.reshape(-1) for value in params.values()])


def unflatten(vector: Tensor, like: Params) -> Params:
    """The inverse of `flatten`, with the names and shapes of `like`."""
    result, start = {}, 0
    for name, value in like.items():
        result[name] = vector[start : start + value.numel()].reshape(value.shape)
        start += value.numel()
    return result


def vectorised_over_points(function: Callable[..., Any], *stacked: Any, in_dims: Any = 0) -> Any:
    """The function of all stacked points in one call (`torch.vmap`), also where an operation has to be looped over."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*performance drop.*")
        return torch.vmap(function, in_dims)(*stacked)
