"""Uses of parameters in forward passes: how they meet signals, in which form, and which of them reach the outputs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.network.expansions import EXPANSIONS
from flatscope.network.interception import LAYER_CALLS, Operation
from flatscope.network.normal_form_pass import Key, WeightPlan, Writer, plan_of
from flatscope.network.operations import TABLE
from flatscope.network.products import LOOKUPS, Product


@dataclass(frozen=True)
class Use:
    """One meeting of a tensor made of parameters with a signal."""

    params: frozenset[str]  # what the tensor is made of
    key: Key | None  # of the weight or bias, where it is one; None for any other meeting
    value: Tensor  # the weight or bias as the canonical call takes it
    place: str  # the operation and the module
    harmless: bool = True  # whether it is a shift, a scale or a constant, entry by entry


class UseRecorder(Writer):
    """A rule that writes operations out, and notes how parameters meet signals.

    A parameter with a copy for every sample (learned queries, say) is a signal as well: what multiplies it is a layer.

    Args:
        model: whose forward is about to run.
        n: number of samples.
        constants: whether what multiplies rows of constants is a layer.
    """

    def __init__(self, model: nn.Module, n: int, constants: bool) -> None:
        super().__init__(model, WeightPlan(constants=constants))
        self.uses, self.changed, self._n = list[Use](), False, n
        self.rows = False  # whether a product with rows of constants meets a signal in another way than as a weight

    def follow(self, op: Operation) -> Any:
        """Run one operation, and note what it does with parameters."""
        weights = [tensor for tensor in op.tensors if self.weights.is_weight(tensor)]
        n_uses = len(self.uses)
        result = super().follow(op)
        self._note_copies(weights, result)
        written_out = op.name in EXPANSIONS and len(self.uses) > n_uses
        self.changed |= op.name in EXPANSIONS
        mixed = weights and any(self.weights.source(tensor) is None for tensor in op.tensors)
        if mixed and not written_out and len(self.uses) == n_uses:
            self._note_meeting(op, weights, result)
        return result

    def product(self, op: Operation, product: Product) -> Tensor:
        """Run it, and note weight and bias."""
        result = super().product(op, product)
        self.changed |= op.name not in LAYER_CALLS
        for value, origin in ((product.weight, product.origin), (product.bias, product.bias)):
            if value is None or origin is None or not self.weights.is_weight(origin):
                continue
            source = self.weights.source(origin)
            assert source is not None
            self.rows |= source.rows and op.name in LOOKUPS
            lost = value.requires_grad and not result.requires_grad
            if (copied := self.weights.source(product.signal)) is not None and copied.params:
                wide = [name for name in copied.params if is_matrix(self.weights.named[name])]
                self.uses.append(Use(copied.params, None, product.signal, op.place, len(wide) <= 1))
            self.uses.append(Use(source.params, self.weights.key(value, origin), value, op.place, not lost))
        return result

    def _note_copies(self, weights: list[Tensor], result: Any) -> None:
        """Note whether a tensor of parameters has a copy for every sample."""
        if not weights or not self.weights.is_weight(result):
            return
        largest = max(tensor.numel() for tensor in weights)
        new = result.shape[:1] == (self._n,) and result.numel() == self._n * largest
        new &= all(tensor.ndim < result.ndim or tensor.shape[:1] != (self._n,) for tensor in weights)
        if new or any(self.weights.is_signal(tensor) for tensor in weights):
            self.weights.copies.add(id(result))

    def _note_meeting(self, op: Operation, weights: list[Tensor], result: Any) -> None:
        meaning = TABLE.get(op.name)
        sizes = [tensor.numel() for tensor in op.tensors if self.weights.source(tensor) is None]
        spread = isinstance(result, Tensor) and result.numel() > max(sizes)
        for weight in weights:
            source = self.weights.source(weight)
            assert source is not None
            self.rows |= source.rows
            wide = is_matrix(weight)
            harmless = meaning is not None and meaning.takes_vectors and not (meaning.multiplies and spread and wide)
            harmless &= op.within != "cdist"  # a distance to every row of a matrix is no shift
            self.uses.append(Use(source.params, None, weight, op.place, harmless))


def is_matrix(value: Tensor) -> bool:
    """True for a tensor with more than one axis of several entries."""
    return sum(size > 1 for size in value.shape) > 1


@dataclass(frozen=True)
class ParameterUses:
    """Uses of parameters in one forward pass."""

    uses: list[Use]
    changed: bool  # whether anything is written in other words
    alive: set[str]  # parameters that gradients of the outputs reach
    rows: bool  # whether what multiplies rows of constants has to be a layer for parameters to be followed


def uses_in_pass(recorder: UseRecorder, outputs: list[Tensor], free: Mapping[str, Tensor]) -> ParameterUses:
    """Uses of parameters that a recorder has seen.

    Args:
        recorder: the rule of that pass.
        outputs: the tensors that count of what the network returns.
        free: parameters that require gradients.
    """
    alive = _reached(outputs, free)
    # A product inside `no_grad` is a constant; one inside an operation that cannot be followed is not.
    uses = [use if use.harmless or use.params & alive else replace(use, harmless=True) for use in recorder.uses]
    return ParameterUses(uses, recorder.changed, alive, recorder.rows)


def _reached(outputs: list[Tensor], free: Mapping[str, Tensor]) -> set[str]:
    """Names of the parameters that gradients of the outputs reach; all of them where torch cannot tell."""
    with torch.enable_grad():
        sums = [output.sum() for output in outputs if output.requires_grad]
    if not sums or not free:
        return set()
    try:
        slopes = torch.autograd.grad(sums, list(free.values()), allow_unused=True, retain_graph=True)
    except Exception:  # written in place over what the gradient needs, or a backward pass of the user's that fails
        return set(free)
    return {name for name, slope in zip(free, slopes, strict=True) if slope is not None}


@dataclass
class UsesOfPasses:
    """Uses of parameters in several forward passes."""

    batches: list[ParameterUses] = field(default_factory=list)
    constants: bool = False  # whether what multiplies rows of constants is a layer

    @property
    def changed(self) -> bool:
        """True where anything is written in other words."""
        return any(batch.changed for batch in self.batches)

    @property
    def alive(self) -> set[str]:
        """Parameters that gradients of the outputs reach."""
        return set().union(*(batch.alive for batch in self.batches))

    @property
    def met(self) -> set[str]:
        """Parameters that some pass has used."""
        return {name for batch in self.batches for use in batch.uses for name in use.params}


def idle_parameters(model: nn.Module) -> frozenset[str]:
    """Names of the parameters that are read, but do not reach the outputs."""
    plan = plan_of(model)
    return plan.dead.idle if plan is not None and plan.dead is not None else frozenset()
