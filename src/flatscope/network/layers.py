"""The weight matrices of a network, in forward order, read off the recorded program."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from flatscope.network.layer_uses import LayerUse
from flatscope.network.normal_form_pass import ACTING
from flatscope.network.not_covered import NotCovered
from flatscope.network.program import Program, Slot
from flatscope.network.structure import Structure
from flatscope.network.units import INPUT_FIRST

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
class Network:
    """The layers of a network in forward order."""

    layers: tuple[Layer, ...]  # every weight once
    chain: bool  # whether each layer reads the one before it and nothing else
    not_covered: NotCovered = field(default_factory=NotCovered)  # trainable matrices that take part in no layer
    # {weight: axis of its input with the samples}, where it is another than the first: (length, samples, width)
    axes: Mapping[str, int] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)

    @property
    def missing(self) -> str:
        """Why sums and products over the layers would not be of the whole network; empty where they are."""
        if not self.layers:
            return "the network has no layer: no product, convolution or lookup with a weight was found"
        if not self.not_covered:
            return ""
        named = self.not_covered.in_words(3)
        return f"trainable matrices that take part in no recognised layer would be left out: {named}"


def layer_name(weight: str, modules: Mapping[str, nn.Module]) -> str:
    """Name of a weight's layer in tables: the module that owns it, else the parameter's own name."""
    if weight.startswith(ACTING):
        weight = weight.removeprefix(ACTING).replace("/", ".")
    owner, _, attribute = weight.rpartition(".")
    owns = attribute == "weight" and isinstance(modules.get(owner), _OWNERS)
    return owner if owns and owner else weight


def is_chain(program: Program) -> bool:
    """True where every layer reads the one before it, the first the input, and nothing is joined."""
    sources = {slot.tensor: frozenset({""}) for slot in program.inputs}  # names of what reaches a tensor
    uses = {use.step: use for use in program.layer_uses()}
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
    not_covered: NotCovered,
) -> Network:
    """The layers that the first samples pass; where some weight was not met, also those that any sample passes.

    Args:
        structure: recorded passes of the first samples.
        more: passes of all samples.
        modules: of the network, by name.
        sought: weights that should belong to a layer.
        not_covered: trainable matrices that are known to take part in none.
    """
    recorded_uses, chain = structure.program.layer_uses(), is_chain(structure.program)
    transformed = structure.program.not_covered()
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
    return Network(layers_of(uses, axes, modules), chain, not_covered | transformed, axes)


def layers_of(
    uses: Iterable[LayerUse[Slot]], axes: Mapping[str, int], modules: Mapping[str, nn.Module]
) -> tuple[Layer, ...]:
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


def _layer(use: LayerUse[Slot], axis: int, modules: Mapping[str, nn.Module]) -> Layer:
    received, given = ((*shape[:axis], *shape[axis + 1 :]) for shape in (use.input.shape, use.output_shape))
    return Layer(layer_name(use.weight, modules), use.weight, use.bias, use.kind, 1, received, given, use.settings)
