"""Labels that must move together: which scales and which units of a network are tied, fixed, or each other's inverse.

Label 0 is an exact zero, which agrees with every scale; label 1 is the network's input and constants, which nothing may
rescale; every output unit of a layer starts a label of its own. The rules by which labels travel are in `scales`.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor

ZERO, CONSTANT = 0, 1


class Ties:
    """Sets of labels that must move together (union-find); a set may be fixed, with the reason why.

    Every label of a set has the scale of the one that stands for it, or (power -1) the inverse of that scale.
    """

    def __init__(self) -> None:
        self._parent = [ZERO, CONSTANT]
        self._power = [1, 1]  # relative to the parent
        self.reasons = {CONSTANT: "network input or constant"}
        self.joined: Counter[str] = Counter()
        self._table: Tensor | None = None

    def add(self, n: int) -> None:
        """Make room for `n` more labels, each alone in its set."""
        self._parent.extend(range(len(self._parent), len(self._parent) + n))
        self._power.extend([1] * n)
        self._table = None

    def find(self, label: int) -> int:
        """The label that stands for the set of `label`."""
        below = []
        while self._parent[label] != label:
            below.append(label)
            label = self._parent[label]
        power = 1
        for other in reversed(below):  # each of them now hangs on the root itself
            power *= self._power[other]
            self._parent[other], self._power[other] = label, power
        return label

    def power(self, label: int) -> int:
        """1 if the label has the scale of the one that stands for its set, -1 if it has the inverse of it."""
        return self._power[label] if self.find(label) != label else 1

    def fix(self, label: int, why: str) -> None:
        """The set of `label` may not move; the first reason stays."""
        self.reasons.setdefault(self.find(label), why)

    def fix_all(self, labels: Tensor, why: str) -> None:
        """The sets of all these labels may not move, those of zeros and constants aside."""
        for label in torch.unique(labels[labels > CONSTANT]).tolist():
            self.fix(int(label), why)

    def join(self, left: int, right: int, why: str, power: int = 1) -> None:
        """Make one set of two, with one scale or (power -1) inverse ones; joined to the constants a set is fixed."""
        power *= self.power(left) * self.power(right)
        left, right = sorted((self.find(left), self.find(right)))
        if left == right:
            if power < 0:
                self.fix(left, f"{why} with itself")
            return
        if left == CONSTANT:
            self.fix(right, f"{why} with the network's input or a constant")
            return
        late = self.reasons.pop(right, None)
        if late is not None or left in self.reasons:
            self.reasons.setdefault(left, late or "")
        else:
            self.joined[why] += 1
        self._parent[right], self._power[right] = left, power
        self._table = None

    def reason(self, label: int) -> str | None:
        """Why the set of `label` is fixed; None if it is free."""
        return self.reasons.get(self.find(label))

    def roots(self, labels: Tensor) -> Tensor:
        """The set of every entry, by the label that stands for it."""
        if self._table is None:
            self._table = torch.tensor([self.find(label) for label in range(len(self._parent))])
        return self._table[labels.long()]

    def is_free(self, labels: Tensor) -> Tensor:
        """Which entries are neither zeros nor in a fixed set."""
        roots = self.roots(labels)
        fixed = torch.tensor([ZERO, *self.reasons])
        return ~torch.isin(roots, fixed)

    def __len__(self) -> int:
        return len(self._parent)


class Labels:
    """The ties of a network: of scales, and of units as far as they may change places.

    The two differ where an operation is the same for every entry but not homogeneous: units in front of a GELU
    have no free scale, yet they may be permuted.

    Args:
        inner: whether two signals that are multiplied may take up each other's scales, as queries and keys do, and a
            normalisation's own scale begins new ones. Else both are walls.
    """

    def __init__(self, inner: bool = False) -> None:
        self.scale, self.unit, self.inner = Ties(), Ties(), inner
        self.multiplied: list[str] = []  # where two signals with scales were

    def fresh(self, n: int) -> Tensor:
        """Labels (n,) for the units of a new layer."""
        start = len(self.scale)
        self.scale.add(n)
        self.unit.add(n)
        return torch.arange(start, start + n).double()

    def tie(self, left: Tensor, right: Tensor, why: str, scale: bool = True) -> Tensor:
        """Tie two label tensors entry by entry (broadcast); returns the labels of the result."""
        for one, other in _pairs(left, right):
            if one != other:
                self.unit.join(one, other, why)
                if scale:
                    self.scale.join(one, other, why)
        return torch.where((left == ZERO) | ((left == CONSTANT) & (right != ZERO)), right, left)

    def oppose(self, left: Tensor, right: Tensor, why: str) -> None:
        """Two factors whose product may not change: the scale of one is the inverse of the other's, entry by entry."""
        for one, other in _pairs(left, right):
            self.scale.join(one, other, why, power=-1)

    def tie_over(self, labels: Tensor, dims: tuple[int, ...], why: str) -> Tensor:
        """Tie what lies along `dims`; returns the common labels with those dims kept at size 1."""
        if not dims or labels.numel() == 0:
            return labels
        common = labels.amax(dim=dims, keepdim=True)
        self.tie(labels, common, why)
        return common

    def fix_scale(self, labels: Tensor, why: str) -> None:
        """Fix the scale of the classes that these entries belong to."""
        self.scale.fix_all(labels, why)

    def pin_units(self, labels: Tensor, why: str) -> None:
        """Fix the places of the units that these entries belong to."""
        self.unit.fix_all(labels, why)

    def wall(self, labels: Tensor, why: str) -> None:
        """Neither rescaled nor permuted."""
        self.fix_scale(labels, why)
        self.pin_units(labels, why)

    def wall_everything(self, why: str) -> None:
        """An operation that could not be followed may have used any of the labels so far."""
        self.wall(torch.arange(len(self.scale)), why)


def _pairs(left: Tensor, right: Tensor) -> list[tuple[int, int]]:
    """The distinct pairs of labels at the same entries (broadcast), zeros left out."""
    left, right = torch.broadcast_tensors(left, right)  # type: ignore[no-untyped-call]
    chosen = (left != ZERO) & (right != ZERO)
    if not chosen.any():
        return []
    base = int(max(left.max(), right.max())) + 1
    codes = torch.unique(left[chosen].long() * base + right[chosen].long()).tolist()
    return [divmod(code, base) for code in codes]
