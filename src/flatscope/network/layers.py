"""The weight matrices of a network, in forward order, found by watching a forward pass.

In a plain network (see `plain`) every product with a weight is a `linear`, a convolution, its transpose or a lookup,
whatever words the module uses, so these calls are all that has to be seen.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from flatscope.formatting import some_of
from flatscope.network.products import LAYER_CALLS, NORM_ORDER, masked_name
from flatscope.network.program import LayerUse, Program, Structure
from flatscope.network.units import INPUT_FIRST
from flatscope.network.watching import Operation, watched
from flatscope.params import Params

ACTING = "acting:"  # how the names of parameters begin that a plain network adds; they have / in the place of dots
_OWNERS = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm)


@dataclass(frozen=True)
class Layer:
    """One weight matrix."""

    name: str  # the module's qualified name, or the parameter's where no such module owns it
    weight: str  # name of the weight parameter
    bias: str | None  # name of the bias parameter, if any
    kind: str  # "dense", "conv", "transposed" or "lookup"
    uses: int  # how often one forward pass uses it
    input_shape: tuple[int, ...]  # shape of its input for one sample
    output_shape: tuple[int, ...]  # shape of its output for one sample
    # stride, padding, dilation, groups of a convolution
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def groups(self) -> int:
        """Groups of a convolution; 1 for a dense layer."""
        return int(self.settings.get("groups", 1))

    @property
    def input_first(self) -> bool:
        """True where the weight's first axis has its inputs."""
        return self.kind in INPUT_FIRST


@dataclass(frozen=True)
class Call:
    """One use of a weight: what the layer received, and where in the autograd graph its output stands.

    The output is kept as a graph edge and not as a tensor: an in-place activation would overwrite the tensor.
    `kind` may also be "batchnorm" (weight and bias are its scale and shift). An opaque call uses a weight through a
    view of it (a tied transpose, say): known by name only.
    """

    layer: str
    weight: str
    bias: str | None
    kind: str
    settings: dict[str, Any]
    input: Tensor
    output_shape: tuple[int, ...]
    edge: GradientEdge | None
    opaque: bool = False
    masked: bool = False  # whether a fixed mask holds some entries of the weight at zero


@dataclass(frozen=True)
class Network:
    """The layers of a network in forward order."""

    layers: tuple[Layer, ...]  # every weight once
    chain: bool  # whether each layer reads the one before it and nothing else
    # trainable matrices that take part in no layer, with the operation that reads them
    uncovered: Mapping[str, str] = field(default_factory=dict)
    # {weight: axis of its input with the samples}, where it is another than the first: (length, samples, width)
    axes: Mapping[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def missing(self) -> str:
        """Why sums and products over the layers would not be of the whole network; empty where they are."""
        if not self.layers:
            return "the network has no layer: no product, convolution or lookup with a weight was found"
        if not self.uncovered:
            return ""
        named = some_of([f"{name} (read by {place})" for name, place in self.uncovered.items()], 3)
        return f"trainable matrices that take part in no recognised layer would be left out: {named}"


class LayerRecorder:
    """A rule for `watched` that collects every use of a named weight.

    Args:
        params: the tensors that the network is called with, by name.
        model: to name layers by the module that owns the weight.
        isolate: give every layer its own view of its input, so that gradients with respect to that view are
            what flows through this layer alone and not through a neighbouring residual branch.
        axes: the axis of its input that has the samples, for weights for which it is not the first: these layers are
            run, and recorded, with the samples in front.
    """

    def __init__(
        self, params: Params, model: nn.Module, isolate: bool = False, axes: Mapping[str, int] | None = None
    ) -> None:
        self.calls: list[Call] = []
        self._level = torch._C._functorch.maybe_current_level()
        self._axes = axes or {}
        self._names = {id(value): name for name, value in params.items()}
        self._memory = {_memory(value): name for name, value in params.items()}
        self._isolate = isolate
        self._modules = dict(model.named_modules())

    @property
    def layer_calls(self) -> list[Call]:
        """The calls of weight matrices, without BatchNorm's."""
        return [call for call in self.calls if call.kind != "batchnorm"]

    def follow(self, op: Operation) -> Any:
        """Run one operation, keeping it if it is a layer's."""
        if op.name == "batch_norm":
            return self._batch_norm(op)
        if op.name not in LAYER_CALLS:
            return op.run()
        kind, order = LAYER_CALLS[op.name]
        given = op.named(*order)
        weight = given["weight"]
        name = self._names.get(id(weight)) or masked_name(weight)
        viewed = None if name is not None else self._memory.get(_memory(weight))
        if name is None and viewed is None:
            return op.run()
        if torch._C._functorch.maybe_current_level() != self._level:
            return op.run()  # inside torch.func, where the rows of single samples cannot be seen
        axis = self._axes.get(name or "", 0)
        axis = axis if given["input"].ndim > axis + 1 else 0
        if axis:
            given["input"] = given["input"].movedim(axis, 0)
        elif self._isolate and given["input"].is_floating_point():
            given["input"] = given["input"].view_as(given["input"])
        output = op.function(**given)
        settings = given.keys() - {"input", "weight", "bias"} if kind in ("conv", "transposed") else ()
        self._record(name or str(viewed), given, kind, settings, output, opaque=name is None)
        return output.movedim(0, axis).contiguous() if axis else output  # laid out as it would have been

    def _record(
        self,
        weight: str,
        given: dict[str, Any],
        kind: str,
        settings: Iterable[str],
        output: Tensor,
        opaque: bool = False,
    ) -> None:
        """Keep a call with these arguments; of its settings those of that name."""
        edge = get_gradient_edge(output) if output.requires_grad else None
        chosen = {name: given.get(name) for name in settings}
        bias, shape = self._names.get(id(given.get("bias"))), tuple(output.shape)
        name = layer_name(weight, self._modules)
        masked = masked_name(given["weight"]) is not None
        self.calls.append(Call(name, weight, bias, kind, chosen, given["input"], shape, edge, opaque, masked))

    def _batch_norm(self, op: Operation) -> Any:
        """A BatchNorm is not a layer, but its scale and shift are parameters with curvature of their own."""
        given = op.named(*NORM_ORDER)
        output = op.run()
        scale = self._names.get(id(given.get("weight")))
        if scale is not None:
            self._record(scale, given, "batchnorm", ("running_mean", "running_var", "eps"), output)
        return output


def by_samples(call: Call, n: int) -> Call:
    """A call of a dense layer with the samples as first axis, where positions were flattened into it.

    The rows of a sample lie one behind the other, as `x.reshape(-1, features)` leaves them.
    """
    if call.kind != "dense" or len(call.input) in (0, n) or len(call.input) % n:
        return call
    rows = len(call.input) // n
    given = call.input.detach().reshape(n, rows, *call.input.shape[1:])
    return replace(call, input=given, output_shape=(n, rows, *call.output_shape[1:]))


def _memory(value: Any) -> int:
    """Address of what a tensor is a view of; 0 where it has none."""
    try:
        return int(value.untyped_storage().data_ptr()) if isinstance(value, Tensor) else 0
    except (RuntimeError, NotImplementedError):  # inside vmap
        return 0


def layer_name(weight: str, modules: Mapping[str, nn.Module]) -> str:
    """Name of a weight's layer in tables: the module that owns it, else the parameter's own name."""
    if weight.startswith(ACTING):
        weight = weight.removeprefix(ACTING).replace("/", ".")
    owner, _, attribute = weight.rpartition(".")
    owns = attribute == "weight" and isinstance(modules.get(owner), _OWNERS)
    return owner if owns and owner else weight


@contextmanager
def recorded(
    model: nn.Module, params: Params, isolate: bool = False, axes: Mapping[str, int] | None = None
) -> Iterator[LayerRecorder]:
    """Record the layer calls of forward passes that use the tensors in `params`."""
    recorder = LayerRecorder(params, model, isolate, axes)
    with watched(recorder.follow):
        yield recorder


def is_chain(program: Program) -> bool:
    """True where every layer reads the one before it, the first the input, and nothing is joined."""
    sources = {slot.tensor: frozenset({""}) for slot in program.inputs}  # names of what reaches a tensor
    uses = {use.step.index: use for use in program.layer_uses()}
    expected, passed = frozenset({""}), set[str]()
    for step in program.steps:
        reads = [slot for slot in step.reads if slot.tensor in sources]
        reached = frozenset[str]().union(*(sources[slot.tensor] for slot in reads))
        use = uses.get(step.index)
        if use is not None and use.kind != "batchnorm":
            if reached != expected or use.weight in passed or use.opaque:
                return False
            passed.add(use.weight)
            expected = reached = frozenset({use.weight})
        elif use is None and sum(slot.dtype.is_floating_point for slot in reads) > 1:
            return False
        if reached:
            sources |= {slot.tensor: reached for slot in step.results}
    return True


def read_layers(
    structure: Structure,
    more: Callable[[], Iterable[Program]],
    modules: Mapping[str, nn.Module],
    sought: Iterable[str],
    uncovered: Mapping[str, str],
) -> Network:
    """The layers that the first samples pass; where some weight was not met, also those that any sample passes.

    Args:
        structure: recorded passes of the first samples.
        more: passes of all samples.
        modules: of the network, by name.
        sought: weights that should belong to a layer.
        uncovered: trainable matrices that are known to take part in none, with the operation that reads them.
    """
    recorded_uses, chain = structure.program.layer_uses(), is_chain(structure.program)
    transformed = structure.program.transformed()
    met = {name for use in recorded_uses for name in (use.weight, use.bias)}
    uses = [use for use in recorded_uses if use.kind != "batchnorm"]
    unmet = set(sought) - met - transformed.keys()
    for program in more() if unmet else ():
        new = [use for use in program.layer_uses() if use.weight in unmet and use.kind != "batchnorm"]
        uses += new
        chain &= not new
        unmet -= {use.weight for use in new}
        if not unmet:
            break
    axes = structure.axes
    return Network(layers_of(uses, axes, modules), chain, {**uncovered, **transformed}, axes)


def layers_of(uses: Iterable[LayerUse], axes: Mapping[str, int], modules: Mapping[str, nn.Module]) -> tuple[Layer, ...]:
    """Every weight once, in the order in which it is first used, with the number of its uses in a forward pass.

    Args:
        uses: of a forward pass.
        axes: of the samples, by weight, where that is not the first.
        modules: of the network, by name.
    """
    found: dict[str, Layer] = {}
    for use in uses:
        known, layer = found.get(use.weight), _layer(use, axes.get(use.weight, 0), modules)
        if known is None:
            found[use.weight] = layer
        else:
            # A table that is also multiplied with (tied input and output embeddings) is read as the matrix that it is.
            form = layer if known.kind == "lookup" and use.kind != "lookup" else known
            found[use.weight] = replace(form, uses=known.uses + 1)
    return tuple(found.values())


def _layer(use: LayerUse, axis: int, modules: Mapping[str, nn.Module]) -> Layer:
    received, given = ((*shape[:axis], *shape[axis + 1 :]) for shape in (use.input.shape, use.output.shape))
    return Layer(layer_name(use.weight, modules), use.weight, use.bias, use.kind, 1, received, given, use.settings)
