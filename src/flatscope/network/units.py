"""Graph: the layers of a network, which of their units can be rescaled, which not, and why.

`graph_of` makes it from what a forward pass met: scale classes numbered, walls named, exchangeable units found.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatscope.errors import UnknownNameError
from flatscope.network.not_covered import NotCovered
from flatscope.network.tied_labels import Labels, Ties

SCALES_STOP = "scales stop at"  # in the remark of a value on a network whose units cannot all be rescaled
INPUT_FIRST = ("transposed", "lookup")  # kinds whose weight has its inputs in front
DIAGONAL = ("batchnorm", "norm")  # kinds with one number for every channel


@dataclass(frozen=True)
class GraphLayer:
    """One weight matrix and where its units stand."""

    name: str  # the module's qualified name, or the parameter's where no layer module owns it
    weight: str  # name of the weight parameter
    biases: tuple[str, ...]  # names of the bias parameters (more than one only if a shared weight has several)
    # "dense", "conv", "transposed", "lookup"; "batchnorm" in a network that was not folded, "norm" for the scale of
    # another normalisation where inner symmetries are asked for
    kind: str
    groups: int  # groups of a convolution; 1 for a dense layer
    uses: int  # how often one forward pass uses it
    sources: tuple[str, ...]  # names of the layers whose outputs reach it directly; "" is the network's input
    outputs: Tensor  # (n_out,) scale class of each output unit, 0 where it is fixed, negative where it is the inverse
    inputs: Tensor  # (n_in,) scale class of each input channel or feature, 0 where it is fixed
    output_units: Tensor  # (n_out,) which units change places together; 0 where they cannot
    input_units: Tensor  # (n_in,) the same for the input channels or features
    walls: tuple[str, ...]  # why its fixed outputs are fixed
    hidden: bool  # whether another layer reads it

    @property
    def input_first(self) -> bool:
        """True where the weight's first axis has its inputs."""
        return self.kind in INPUT_FIRST

    @property
    def n_free(self) -> int:
        """Output units that can be rescaled."""
        return int((self.outputs != 0).sum())

    def entry_channels(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Output and input channel of every weight entry, shaped to be broadcast over the weight."""
        return entry_channels(self.kind, self.groups, shape)

    def flat_channels(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Output and input channel of every weight entry, flat."""
        outputs, inputs = self.entry_channels(shape)
        return outputs.expand(shape).flatten(), inputs.expand(shape).flatten()

    def edge_classes(self, shape: torch.Size) -> tuple[Tensor, Tensor]:
        """Scale class that every weight entry writes, and the one that it reads, flat."""
        outputs, inputs = self.flat_channels(shape)
        return self.outputs[outputs], self.inputs[inputs]


@dataclass(frozen=True)
class Graph:
    """Layers of a network and the classes in which their units can be rescaled or permuted."""

    layers: tuple[GraphLayer, ...]  # in forward order
    # scale classes that are free, numbered 1 to n_classes; class 0 is fixed at scale 1. This is the H_eff of a residual
    # network: units that share one scale are one class
    n_classes: int
    # groups of units (numbers as in `output_units`) that may change places with one another
    exchangeable: tuple[tuple[int, ...], ...]
    ties: dict[str, int]  # what made one class of several, with how many times
    not_covered: NotCovered  # weights used by an operation whose inside is not followed: that operation is the reason
    chain: bool  # whether every layer reads the one before it and nothing else
    multiplied: tuple[str, ...] = ()  # where two signals with scales are multiplied, as queries and keys are

    def __iter__(self) -> Iterator[GraphLayer]:
        return iter(self.layers)

    def layer(self, name: str) -> GraphLayer:
        """The layer of that name."""
        for layer in self.layers:
            if layer.name == name:
                return layer
        raise UnknownNameError.among(name, [layer.name for layer in self.layers], "layer")

    @property
    def n_units(self) -> int:
        """Hidden units H: output units of the layers that another layer reads."""
        return sum(len(layer.outputs) for layer in self.layers if layer.hidden)

    @property
    def walls(self) -> dict[str, int]:
        """Why units are fixed, with the number of layers concerned."""
        return dict(Counter(wall for layer in self.layers for wall in layer.walls))

    @property
    def stopped(self) -> str:
        """Number of hidden units that can be rescaled, and what stops the others; empty where nothing does."""
        hidden = [layer for layer in self.layers if layer.hidden]
        free = sum(layer.n_free for layer in hidden)
        by = ", ".join(dict.fromkeys([wall for layer in hidden for wall in layer.walls] + [*self.not_covered.values()]))
        if free and not by:
            return ""
        if free:
            return f"{free} of {self.n_units} hidden units can be rescaled; {SCALES_STOP} {by}"
        return "no unit can be rescaled" + (f"; {SCALES_STOP} {by}" if by else "")

    def summary(self) -> str:
        """Units that can be rescaled and those that cannot, with the reason."""
        form = "a chain" if self.chain else "with branches"
        lines = [
            f"{len(self.layers)} layers, {form}; {self.n_units} hidden units in {self.n_classes} free scale classes."
        ]
        width = max((len(layer.name) for layer in self.layers), default=0)
        for layer in self.layers:
            units = len(layer.outputs)
            text = f"{layer.n_free} of {units} units can be rescaled"
            if layer.walls:
                text += "; fixed by " + ", ".join(layer.walls)
            lines.append(f"  {layer.name:<{width}}  {layer.kind:<10}  {text}")
        for what, times in self.ties.items():
            lines.append(f"  {what} ties units to one scale ({times} times)")
        for weight, what in self.not_covered.items():
            lines.append(f"  {weight} is used by {what}, whose inside is not followed")
        movable = sum(len(group) for group in self.exchangeable)
        lines.append(f"  {movable} units (tied ones counted once) can change places.")
        return "\n".join(lines)


def entry_channels(kind: str, groups: int, shape: torch.Size) -> tuple[Tensor, Tensor]:
    """Output and input channel of every entry of a layer's weight, shaped to be broadcast over the weight.

    A convolution's weight is (out, in / groups, taps), a transposed one's (in, out / groups, taps), that of a lookup
    (entries, out), a BatchNorm's (channels,).
    """
    rows = torch.arange(shape[0])
    if kind in DIAGONAL:
        rows = torch.arange(shape.numel()).reshape(shape)
        return rows, rows
    columns = torch.arange(shape[1])
    group = rows // (shape[0] // groups)
    own = rows.reshape(-1, *[1] * (len(shape) - 1))
    other = (group[:, None] * shape[1] + columns[None, :]).reshape(*shape[:2], *[1] * (len(shape) - 2))
    return (other, own) if kind in INPUT_FIRST else (own, other)


@dataclass
class LayerRecord:
    """A layer as the forward pass meets it: its labels, and every use of its weight."""

    name: str
    weight: str
    kind: str
    groups: int
    inputs: Tensor
    outputs: Tensor
    uses: int = 0
    sources: set[str] = field(default_factory=set)
    biases: list[str] = field(default_factory=list)

    @property
    def depthwise(self) -> bool:
        """True where every channel is a group of its own, one in and one out."""
        return self.groups == len(self.inputs) == len(self.outputs)

    def use(
        self, book: Labels, channels: Tensor, sources: Iterable[str], bias: str | None, groups: int, kind: str
    ) -> None:
        """One more use: a weight that is used twice reads and writes the same scales both times."""
        self.uses += 1
        self.sources |= set(sources)
        if bias is not None and bias not in self.biases:
            self.biases.append(bias)
        if self.uses > 1:
            same_form = kind == self.kind and (kind in DIAGONAL or groups == self.groups)
            if same_form and channels.shape == self.inputs.shape:
                self.inputs = book.tie(self.inputs, channels, f"second use of {self.weight}")
            else:
                book.wall(torch.cat([self.inputs, channels, self.outputs]), f"{self.weight} used in two ways")


def graph_of(
    book: Labels,
    records: list[LayerRecord],
    other_uses: NotCovered,
    marks: list[tuple[int, Tensor]],
    joins: bool,
    frozen: Collection[str] = (),
) -> Graph:
    """Number the free classes in forward order and describe every layer by them."""
    _tie_shared_parameters(book, records, other_uses)
    _wall_frozen(book, records, frozen)
    read = {int(root) for record in records for root in book.scale.roots(record.inputs)}
    written = [int(label) for record in records for label in record.outputs.tolist()]
    read |= {book.scale.find(label) for label in written if book.scale.power(label) < 0}  # another signal takes it up
    for label in written:
        if book.scale.find(label) not in read:
            book.scale.fix(label, "read by no layer")
    classes = _numbers(book.scale, records)
    units = _numbers(book.unit, records)
    feeding = {source for record in records for source in record.sources}
    layers = tuple(
        GraphLayer(
            name=record.name,
            weight=record.weight,
            biases=tuple(record.biases),
            kind=record.kind,
            groups=record.groups,
            uses=record.uses,
            sources=tuple(sorted(record.sources)),
            outputs=_numbered(book.scale, classes, record.outputs),
            inputs=_numbered(book.scale, classes, record.inputs),
            output_units=_numbered(book.unit, units, record.outputs),
            input_units=_numbered(book.unit, units, record.inputs),
            walls=_walls(book.scale, record.outputs),
            hidden=record.name in feeding,
        )
        for record in records
    )
    followed = {record.weight for record in records} | {bias for record in records for bias in record.biases}
    return Graph(
        layers=layers,
        n_classes=len(classes),
        exchangeable=_exchangeable(book.unit, units, records, marks),
        ties=dict(book.scale.joined),
        not_covered=other_uses.among(other_uses.keys() - followed),
        chain=not joins and _is_chain(records),
        multiplied=tuple(dict.fromkeys(book.multiplied)),
    )


def _tie_shared_parameters(book: Labels, records: list[LayerRecord], other_uses: NotCovered) -> None:
    """A bias of two layers scales both alike; a weight that some other operation reads cannot change."""
    by_bias: dict[str, LayerRecord] = {}
    for record in records:
        if record.weight in other_uses:
            why = f"{record.weight} also used by {other_uses[record.weight]}"
            book.wall(torch.cat([record.inputs, record.outputs]), why)
        for bias in record.biases:
            if bias in other_uses:
                book.wall(record.outputs, f"{bias} also used by {other_uses[bias]}")
            first = by_bias.setdefault(bias, record)
            if first is not record:
                book.tie(first.outputs, record.outputs, f"shared {bias}")


def _wall_frozen(book: Labels, records: list[LayerRecord], frozen: Collection[str]) -> None:
    """Fix the units on both sides of a frozen weight, and those that a frozen bias is added to."""
    for record in records:
        if record.weight in frozen:
            book.wall(torch.cat([record.inputs, record.outputs]), f"{record.weight}, which is frozen")
        for bias in record.biases:
            if bias in frozen:
                book.wall(record.outputs, f"{bias}, which is frozen")


def _numbers(ties: Ties, records: list[LayerRecord]) -> dict[int, int]:
    """Numbers 1, 2, ... of the free sets, in the order in which layers write them."""
    numbers: dict[int, int] = {}
    for record in records:
        for label in record.outputs.tolist():
            root = ties.find(int(label))
            if root not in ties.reasons:
                numbers.setdefault(root, len(numbers) + 1)
    return numbers


def _numbered(ties: Ties, numbers: dict[int, int], labels: Tensor) -> Tensor:
    given = [int(label) for label in labels.tolist()]
    return torch.tensor([numbers.get(ties.find(n), 0) * ties.power(n) for n in given], dtype=torch.int64)


def _walls(ties: Ties, labels: Tensor) -> tuple[str, ...]:
    """The distinct reasons for which these labels are fixed."""
    reasons = (ties.reason(int(label)) for label in labels.tolist())
    return tuple(dict.fromkeys(reason for reason in reasons if reason is not None))


def _is_chain(records: list[LayerRecord]) -> bool:
    expected = ""
    for record in records:
        if record.sources != {expected} or record.uses != 1:
            return False
        expected = record.name
    return True


def _exchangeable(
    ties: Ties, numbers: dict[int, int], records: list[LayerRecord], marks: list[tuple[int, Tensor]]
) -> tuple[tuple[int, ...], ...]:
    """Groups of units that meet the same operations and the same layers, equally often.

    Within a grouped convolution only channels of one group are alike.
    """
    signatures: dict[int, list[tuple[int, ...]]] = defaultdict(list)
    for step, counts in marks:
        present = counts.nonzero().flatten()
        for label, times in zip(present.tolist(), counts[present].tolist(), strict=True):
            root = ties.find(label)
            if root in numbers:
                signatures[root].append((step, times))
    for position, record in enumerate(records):
        for role, labels in ((0, record.outputs), (1, record.inputs)):
            per_group = len(labels) if record.depthwise else len(labels) // record.groups
            for place, label in enumerate(labels.tolist()):
                root = ties.find(int(label))
                if root in numbers:
                    signatures[root].append((-1, position, role, place // per_group))
    alike: dict[tuple[tuple[int, ...], ...], list[int]] = defaultdict(list)
    for root, number in numbers.items():
        alike[tuple(sorted(signatures[root]))].append(number)
    return tuple(tuple(group) for group in alike.values() if len(group) > 1)
