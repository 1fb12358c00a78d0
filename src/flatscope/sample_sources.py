"""What users give as data, as samples: tensors, arrays, lists, data sets, loaders, batches."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from flatscope.errors import InputError
from flatscope.isolation import untouched_randomness
from flatscope.sample_digests import sample_fingerprints
from flatscope.samples import PROBED_SAMPLES, READ_SIZE, Samples, split_batch, tensors_of_inputs


def as_samples(source: Any, where: str) -> Samples:
    """Samples from (x, y) tensors, arrays or lists, a `Dataset`, a `DataLoader`, batches or a list of samples."""
    if isinstance(source, Samples):
        return source
    source = _lists_as_arrays(source, where)
    if isinstance(source, tuple | list) and len(source) == 2 and _is_one_batch(source[0], source[1]):
        x, y = source
        batch = split_batch((x, torch.tensor(y) if _are_numbers(y) else y), where)
        return Samples(lambda: [batch], where=where, held=(*tensors_of_inputs(batch[0]), batch[1]))
    if isinstance(source, Mapping):
        return Samples(lambda: [source], where=where)
    if isinstance(source, Dataset) or _is_map_style(source):
        source = DataLoader(source, batch_size=READ_SIZE)
    if isinstance(source, DataLoader):
        return _samples_from_loader(source, where)
    if isinstance(source, Iterator):
        raise _used_up_error(type(source).__name__, where)
    if isinstance(source, Iterable) and not isinstance(source, str | Tensor | np.ndarray):
        samples = Samples(lambda: source, where=where)
        _refuse_if_changing(samples)
        return samples
    fix = "Pass the inputs and their targets together: (x, y)"
    if isinstance(source, str | Path):
        fix = "Read the file first, as numpy.load does; on the command line name it with --data"
    raise InputError("(x, y), a Dataset, a DataLoader or an iterable of batches", type(source).__name__, where, fix)


def _lists_as_arrays(source: Any, where: str) -> Any:
    """Lists of numbers as an array, a list of samples as a loader; anything else as it is."""
    if (
        isinstance(source, tuple | list)
        and len(source) == 2
        and _is_list_of_numbers(source[0])
        and _are_numbers(source[1])
    ):
        return _list_as_array(source[0], where), source[1]
    if isinstance(source, list) and len(source) > 0 and all(map(_is_one_sample, source)):
        return DataLoader(source, batch_size=READ_SIZE)  # type: ignore[arg-type]  # a list is a data set by number
    return source


def _is_one_batch(inputs: Any, targets: Any) -> bool:
    """True if a pair is (inputs, targets) and not two batches."""
    arrays = any(isinstance(value, Tensor | np.ndarray) for value in (inputs, targets))
    return arrays or (isinstance(inputs, Mapping) and _are_numbers(targets))


def _is_list_of_numbers(value: Any) -> bool:
    """True for a list of samples, each a list of numbers or of lists of them."""
    while isinstance(value, list | tuple) and len(value) and isinstance(value[0], list | tuple):
        value = value[0]
        if _are_numbers(value) and len(value):
            return True
    return False


def _list_as_array(value: Any, where: str) -> np.ndarray[Any, Any]:
    """Nested lists as an array, floats in float32 as torch makes them."""
    try:
        array = np.asarray(value)
    except ValueError as problem:
        got, fix = "lists of different lengths", "Pad them to one length, or wrap the samples in a Dataset"
        raise InputError("samples of one shape", got, where, fix) from problem
    return array.astype(np.float32) if array.dtype == np.float64 else array


def _is_one_sample(given: Any) -> bool:
    """True for a pair of the inputs and the label of one sample, not a batch: the label is a single number."""
    if not isinstance(given, tuple | list) or len(given) != 2 or isinstance(given[0], int | float):
        return False
    label = given[1]
    return isinstance(label, int | float | np.number) or (isinstance(label, Tensor | np.ndarray) and label.ndim == 0)


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list | tuple) and all(isinstance(label, int | float) for label in value)


def _is_map_style(source: Any) -> bool:
    """Samples by number, as of a data set that is not derived from torch's class."""
    known = isinstance(source, list | tuple | str | Mapping | Tensor | np.ndarray | DataLoader | Iterator)
    return not known and hasattr(source, "__getitem__") and hasattr(source, "__len__")


def _used_up_error(kind: str, where: str) -> InputError:
    fix = "Pass tensors, a Dataset, a DataLoader or a list of batches"
    return InputError("data that can be read more than once", f"{kind} that is used up by one pass", where, fix)


def _samples_from_loader(loader: DataLoader[Any], where: str) -> Samples:
    """A loader may shuffle; its samples may not change from pass to pass."""
    owners = (loader, loader.sampler, loader.batch_sampler, getattr(loader.batch_sampler, "sampler", None))
    held = [getattr(owner, "generator", None) for owner in owners]
    generators = tuple({id(g): g for g in held if isinstance(g, torch.Generator)}.values())
    with untouched_randomness(generators):
        if isinstance(loader.dataset, IterableDataset):
            samples = Samples(lambda: loader, generators, where)
            _refuse_if_changing(samples)
            return samples
        # None when batching is off; an empty one is false as well, but is the one that counts.
        index_sampler: Any = loader.sampler if loader.batch_sampler is None else loader.batch_sampler
        indices = _sorted_indices(index_sampler)
        if indices != _sorted_indices(index_sampler):
            got = "a sampler that picks other samples each time (drop_last with shuffle, or sampling with replacement)"
            fix = "Use drop_last=False and a sampler without replacement"
            raise InputError("a loader that gives the same samples on every pass", got, where, fix)
        if indices:
            _refuse_if_changing(Samples(lambda: _samples_by_index(loader, indices[:PROBED_SAMPLES]), where=where))
        # Only torch's own collating surely gives one sample per index: others may drop some or make several of one.
        counted = loader.batch_sampler is not None and loader.collate_fn is default_collate
        return Samples(lambda: loader, generators, where, n=len(indices) if counted else None)


def _samples_by_index(loader: DataLoader[Any], indices: list[Any]) -> list[Any]:
    """These samples, asked for by index: the same twice over unless the data set transforms them at random."""
    if loader.batch_sampler is None:
        return [loader.collate_fn(loader.dataset[i]) for i in indices]
    groups = (indices[start : start + READ_SIZE] for start in range(0, len(indices), READ_SIZE))
    return [loader.collate_fn([loader.dataset[i] for i in group]) for group in groups]


def _sorted_indices(sampler: Iterable[Any]) -> list[Any]:
    flat: list[Any] = []
    for entry in sampler:
        flat.extend(entry if isinstance(entry, list | tuple) else [entry])
    return sorted(flat, key=str)


def _refuse_if_changing(samples: Samples) -> None:
    """Compare an order-free checksum of two passes; at most 2,000 samples unless shuffling forces all of them."""
    first, second = (sample_fingerprints(samples, PROBED_SAMPLES) for _ in range(2))
    if not first or not second:  # counted once, and then there was nothing left
        raise _used_up_error("an iterable", samples.where)
    if first != second and samples.n > PROBED_SAMPLES:
        first, second = (sample_fingerprints(samples, samples.n) for _ in range(2))
    if first != second:
        got = "samples that differ between two passes (augmentation?)"
        fix = "Measure on the data without random transforms; shuffling is fine"
        raise InputError("samples that are the same on every pass", got, samples.where, fix)
