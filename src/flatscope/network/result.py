"""From what was recorded in the forward pass to the Graph: classes numbered, walls named, exchangeable units found."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flatscope.network.labels import Labels, Ties
from flatscope.network.units import Graph, GraphLayer


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
        """Whether every channel is a group of its own, one in and one out."""
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
            same_form = kind == self.kind and (kind == "batchnorm" or groups == self.groups)
            if same_form and channels.shape == self.inputs.shape:
                self.inputs = book.tie(self.inputs, channels, f"second use of {self.weight}")
            else:
                book.wall(torch.cat([self.inputs, channels, self.outputs]), f"{self.weight} used in two ways")


def graph_of(
    book: Labels,
    records: list[LayerRecord],
    other_uses: dict[str, str],
    marks: list[tuple[int, Tensor]],
    joins: bool,
) -> Graph:
    """Number the free classes in forward order and describe every layer by them."""
    _tie_shared_parameters(book, records, other_uses)
    read = {int(root) for record in records for root in book.scale.roots(record.inputs)}
    for record in records:
        for label in record.outputs.tolist():
            if book.scale.find(int(label)) not in read:
                book.scale.fix(int(label), "read by no layer")
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
        unfollowed={name: what for name, what in other_uses.items() if name not in followed},
        chain=not joins and _is_chain(records),
    )


def _tie_shared_parameters(book: Labels, records: list[LayerRecord], other_uses: dict[str, str]) -> None:
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
    return torch.tensor([numbers.get(int(root), 0) for root in ties.roots(labels)], dtype=torch.int64)


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
