"""Samples: counting, cutting, re-reading, and the probe that tells shuffling from augmenting."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset, TensorDataset, WeightedRandomSampler

from flatscope import InputError
from flatscope.sample_sources import as_samples
from flatscope.samples import (
    PROBED_SAMPLES,
    Samples,
    inputs_on_device,
    shape_text,
    slice_inputs,
    split_batch,
    tensors_of_inputs,
)

pytestmark = pytest.mark.fast

X = torch.arange(30.0).view(10, 3)
Y = torch.arange(10)
PAIRS = TensorDataset(X, Y)


def read(samples: Samples, size: int | None = None) -> tuple[list[int], Tensor, Tensor]:
    """Lengths of the batches, and all samples in the order of their labels."""
    batches = list(samples.batches(size))
    x, y = torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])
    return [len(targets) for _, targets in batches], x[y.argsort()], y.sort().values


@pytest.mark.parametrize(
    ("source", "size", "lengths"),
    [
        ((X, Y), None, [10]),
        ((X, Y), 4, [4, 4, 2]),
        (DataLoader(PAIRS, batch_size=7), None, [7, 3]),
        (DataLoader(PAIRS, batch_size=7), 3, [3, 3, 1, 3]),  # cut inside the loader's batches, never joined
        (DataLoader(PAIRS, batch_size=7, shuffle=True), 100, [7, 3]),
        ([(X[:2], Y[:2]), (X[2:], Y[2:])], 5, [2, 5, 3]),
    ],
)
def test_every_sample_comes_once_whatever_the_batches(source: object, size: int | None, lengths: list[int]) -> None:
    samples = as_samples(source, "train")
    assert samples.n == 10
    for _ in range(2):
        found, x, y = read(samples, size)
        assert found == lengths
        assert torch.equal(x, X)
        assert torch.equal(y, Y)


def test_counts_follow_what_the_loader_gives() -> None:
    assert as_samples(DataLoader(PAIRS, batch_size=4, drop_last=True), "train").n == 8
    assert as_samples(DataLoader(Subset(PAIRS, [1, 5, 7]), batch_size=2), "train").n == 3
    assert as_samples(DataLoader(PAIRS, sampler=[3, 3, 4]), "train").n == 3
    assert as_samples(as_samples((X, Y), "train"), "test").where == "train"


class Augmenting(Dataset[tuple[Tensor, Tensor]]):
    """Random by any of the three usual generators, for one sample only."""

    def __init__(self, source: str, index: int = 4) -> None:
        self.draw = {"torch": lambda: torch.rand(1), "numpy": np.random.rand, "python": random.random}[source]
        self.index = index

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return X[index] + (float(self.draw()) if index == self.index else 0.0), Y[index]


@pytest.mark.parametrize("source", ["torch", "numpy", "python"])
@pytest.mark.parametrize("shuffle", [True, False])
def test_one_sample_that_changes_is_found(source: str, shuffle: bool) -> None:
    with pytest.raises(InputError, match="differ between two passes"):
        as_samples(DataLoader(Augmenting(source), batch_size=4, shuffle=shuffle), "train")


def test_the_probe_leaves_every_generator_as_it_was() -> None:
    own = torch.Generator().manual_seed(0)
    loader = DataLoader(PAIRS, batch_size=4, shuffle=True, generator=own)
    weighted = DataLoader(PAIRS, sampler=WeightedRandomSampler([1.0] * 10, 10, replacement=False, generator=own))
    before = [own.get_state(), torch.get_rng_state()]
    python, array = random.getstate(), np.random.get_state()[1].copy()
    first = next(iter(loader))[1].tolist()
    own.set_state(before[0])
    for source in (loader, weighted):
        assert as_samples(source, "train").generators == (own,)
    for name in ("torch", "numpy", "python"):
        with pytest.raises(InputError):
            as_samples(Augmenting(name), "train")
    assert torch.equal(own.get_state(), before[0])
    assert torch.equal(torch.get_rng_state(), before[1])
    assert (random.getstate(), np.random.get_state()[1].tolist()) == (python, array.tolist())
    assert next(iter(loader))[1].tolist() == first


def test_the_probe_reads_a_bounded_number_of_samples() -> None:
    asked: list[int] = []

    class Counting(Dataset[tuple[Tensor, Tensor]]):
        def __len__(self) -> int:
            return 3 * PROBED_SAMPLES

        def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
            asked.append(index)
            return torch.tensor([float(index)]), torch.tensor(0)

    assert as_samples(DataLoader(Counting(), batch_size=100, shuffle=True), "train").n == 3 * PROBED_SAMPLES
    assert len(set(asked)) == PROBED_SAMPLES


def test_large_shuffled_lists_are_told_from_changing_ones() -> None:
    """Of more samples than are probed, shuffling shows others first: then all have to be compared."""
    many = torch.arange(PROBED_SAMPLES + 500)

    class Shuffled:
        noise = 0.0

        def __iter__(self):  # type: ignore[no-untyped-def]
            order = torch.randperm(len(many))
            return iter([(many[order, None] + self.noise * torch.rand(len(many), 1), many[order])])

    assert as_samples(Shuffled(), "train").n == len(many)
    changing = Shuffled()
    changing.noise = 0.1
    with pytest.raises(InputError, match="differ between two passes"):
        as_samples(changing, "train")


def test_batches_are_split_into_inputs_and_targets() -> None:
    assert split_batch((X, Y), "train") == (X, Y)
    assert split_batch([X, Y], "train") == (X, Y)
    assert split_batch((X, X, Y), "train")[0] == (X, X)
    assert split_batch(((X, X), Y), "train")[0] == (X, X)
    for label in ("labels", "label", "targets", "target", "y"):
        assert split_batch({"a": X, label: Y}, "train") == ({"a": X}, Y)
    assert split_batch(({"a": X}, Y), "train") == ({"a": X}, Y)
    for wrong in (X, (X,), {"a": X}, (X, 3), (X[0, 0], Y), (X, Y[0]), ((), Y), (X, Y[:3]), "xy"):
        with pytest.raises(InputError, match="train: expected"):
            split_batch(wrong, "train")


def test_single_samples_of_a_loader_that_does_not_batch_are_refused() -> None:
    with pytest.raises(InputError, match="as many inputs as targets"):
        as_samples(DataLoader(PAIRS, batch_size=None), "train")


def test_inputs_of_every_kind_are_cut_moved_and_described() -> None:
    tokens = torch.arange(20).view(10, 2)
    kinds = {"tensor": X, "tuple": (X, tokens), "mapping": {"x": X, "tokens": tokens}}
    described = {"tensor": "(2, 3)", "tuple": "(2, 3), (2, 2)", "mapping": "x (2, 3), tokens (2, 2)"}
    for name, inputs in kinds.items():
        part = inputs_on_device(slice_inputs(inputs, 4, 6), torch.device("cpu"), torch.float64)
        assert shape_text(part) == described[name]
        first, *rest = tensors_of_inputs(part)
        assert first.dtype == torch.float64
        assert torch.equal(first, X[4:6].double())
        assert all(torch.equal(other, tokens[4:6]) and other.dtype == torch.int64 for other in rest)
