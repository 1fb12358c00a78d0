"""Labels made wrong on purpose: random, partly corrupted, or a confusion set; seeded, inputs never changed.

Draws of one seed are nested: more corruption, or a larger confusion set, keeps everything the smaller one had.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.inputs.data_set import Data
from flatscope.inputs.loading import random_stream, sample_order


def random_labels(y: Tensor, n_classes: int, seed: int) -> Tensor:
    """Labels drawn uniformly and independently of everything, in place of `y` (zhang2017 6.1, Figure 2).

    One in `n_classes` equals the true label by chance: a network that has learned these is at chance on test data.

    Args:
        y: labels (n,); only their number and device matter, and that they are labels.
        n_classes: the draw is from 0 to `n_classes` - 1.
        seed: of the draw.
    """
    _check_labels(y, n_classes)
    drawn = random_stream(seed, "random labels").randint(n_classes, size=len(y), dtype=np.int64)
    return torch.from_numpy(drawn).to(y.device)


def corrupt_labels(
    y: Tensor, fraction: float, n_classes: int, seed: int, *, exclude_true: bool = False
) -> tuple[Tensor, Tensor]:
    """A fraction of the labels drawn again.

    Args:
        y: true labels (n,).
        fraction: round(fraction * n) labels are drawn again, exactly.
        n_classes: new labels are uniform over ALL classes, so one in `n_classes` of them stays true by chance.
        seed: of the choice and of the draw.
        exclude_true: draw uniformly from the other classes instead; then every label drawn again is wrong.

    Returns:
        The labels (n,), and the mask (n,) of those that were drawn again.
    """
    _check_labels(y, n_classes)
    if not 0.0 <= fraction <= 1.0:
        raise InputError("a fraction from 0 to 1", repr(fraction), where="fraction")
    if exclude_true and n_classes < 2:
        raise InputError("at least 2 classes to exclude one", str(n_classes), where="n_classes")
    stream = random_stream(seed, "corrupt labels")
    order = np.argsort(stream.random_sample(len(y)), kind="stable")
    mask = np.zeros(len(y), bool)
    mask[order[: round(fraction * len(y))]] = True
    # One draw for every sample, used or not: so a larger fraction keeps the labels of the smaller.
    drawn = stream.randint(n_classes - 1 if exclude_true else n_classes, size=len(y), dtype=np.int64)
    true = y.cpu().numpy()
    fresh = (true + 1 + drawn) % n_classes if exclude_true else drawn
    labels = torch.from_numpy(np.where(mask, fresh, true).astype(np.int64))
    return labels.to(y.device), torch.from_numpy(mask).to(y.device)


@dataclass(frozen=True, eq=False)
class ConfusionSet:
    """A training set S ∪ S_c: samples with their true labels, then others with random ones.

    Every network with zero error on it is a global minimum for S as well: the size of S_c steers to which.
    """

    x: Tensor
    y: Tensor
    is_confused: Tensor  # (n,) bool: True for S_c
    y_true: Tensor

    @property
    def train(self) -> tuple[Tensor, Tensor]:
        """All of it, S first."""
        return self.x, self.y

    @property
    def true(self) -> tuple[Tensor, Tensor]:
        """S: the part whose labels are true."""
        return self.x[~self.is_confused], self.y[~self.is_confused]

    @property
    def confused(self) -> tuple[Tensor, Tensor]:
        """S_c: the part with random labels."""
        return self.x[self.is_confused], self.y[self.is_confused]


def confusion_set(
    data: Data | tuple[Tensor, Tensor],
    size: int,
    seed: int,
    *,
    true_size: int = 10_000,
    n_classes: int | None = None,
    balanced: bool = True,
) -> ConfusionSet:
    """True labels on one part, random labels on `size` further samples (neyshabur2017 section 3, Figure 3).

    Of one seed, S is the same for every `size`, and a larger S_c begins with the smaller, labels included.

    Args:
        data: a `Data`, of which the training part is used, or (x, y).
        size: how many samples S_c has (the paper's axis; 0 is allowed).
        seed: of the choice of both parts and of the random labels.
        true_size: how many samples S has (the paper: 10,000).
        n_classes: random labels are uniform over these; of a `Data` its classes, else the largest label + 1.
        balanced: choose S ∪ S_c with the classes as equal as they can be.
    """
    x, y = data.train if isinstance(data, Data) else data
    if n_classes is None:
        n_classes = data.n_classes if isinstance(data, Data) else int(y.max()) + 1
    _check_labels(y, n_classes)
    if size < 0 or true_size < 1 or true_size + size > len(y):
        wanted = f"true_size at least 1 and size at least 0, together at most {len(y)} samples"
        raise InputError(wanted, f"{true_size} + {size}", where="confusion_set", fix="Load more or ask for less")
    order = torch.from_numpy(sample_order(y.cpu().numpy(), seed, balanced=balanced)[: true_size + size])
    order = order.to(y.device)
    is_confused = torch.arange(true_size + size, device=y.device) >= true_size
    y_true = y[order]
    drawn = random_stream(seed, "confusion set").randint(n_classes, size=size, dtype=np.int64)
    labels = torch.cat((y_true[:true_size], torch.from_numpy(drawn).to(y.device)))
    return ConfusionSet(x[order.to(x.device)], labels, is_confused, y_true)


def _check_labels(y: Tensor, n_classes: int) -> None:
    if y.ndim != 1 or y.dtype.is_floating_point or y.dtype.is_complex or y.dtype == torch.bool:
        raise InputError("integer labels (n,)", f"{y.dtype} of shape {tuple(y.shape)}", where="labels")
    if n_classes < 1 or (len(y) and not 0 <= int(y.min()) <= int(y.max()) < n_classes):
        got = f"{int(y.min())} to {int(y.max())}" if len(y) else "none"
        raise InputError(f"labels from 0 to n_classes - 1 = {n_classes - 1}", got, where="labels")
