"""Modules whose forward is run by a plan: each of their operations is handed to a rule before anybody else sees it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, Protocol

from torch import nn
from torch.nn.utils.prune import BasePruningMethod
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.nn.utils.weight_norm import WeightNorm

from flatscope.network.watching import Rule, watched

_PLAN, _OWN_FORWARD = "_flatscope_plan", "_flatscope_forward"
# Hooks of torch that compute a weight in front of a module's forward.
_MAKERS = (WeightNorm, SpectralNorm, BasePruningMethod)


class ForwardPlan(Protocol):
    """A plan by which a module's forward is run."""

    def rule(self, model: nn.Module) -> Rule:
        """A rule for one pass through the module."""


def plan_of(model: nn.Module) -> Any:
    """The plan of a module; None where it has none."""
    return getattr(model, _PLAN, None)


def set_plan(model: nn.Module, plan: ForwardPlan) -> None:
    """Let a module's forward run by a plan, in place of the one it has."""
    if plan_of(model) is None:
        own = model.__dict__.get("forward")
        object.__setattr__(model, _OWN_FORWARD, own)
        object.__setattr__(model, "forward", MethodType(_planned_forward, model))
    object.__setattr__(model, _PLAN, plan)


@contextmanager
def planned(model: nn.Module, rule: Callable[[nn.Module], Rule]) -> Iterator[None]:
    """Inside the block the operations of a module without a plan are handed to a rule before anybody else sees them.

    Args:
        model: the module.
        rule: makes the rule of one pass, when the tensors of that pass are in their places.
    """
    set_plan(model, _OneRule(rule))
    try:
        yield
    finally:
        own = model.__dict__.pop(_OWN_FORWARD)
        del model.__dict__["forward"], model.__dict__[_PLAN]
        if own is not None:
            object.__setattr__(model, "forward", own)


@dataclass(frozen=True)
class _OneRule:
    rule: Callable[[nn.Module], Rule]


def _planned_forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
    own, plan = getattr(self, _OWN_FORWARD), plan_of(self)
    with watched(plan.rule(self)):
        for hook in self._forward_pre_hooks.values():  # has run already, unwatched, where the network is one layer
            if isinstance(hook, _MAKERS):
                hook(self, args)
        return type(self).forward(self, *args, **kwargs) if own is None else own(*args, **kwargs)
