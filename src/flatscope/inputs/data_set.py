"""Samples once they are read: `Data` as tensors, `DataSource` as a user's loaders give them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from flatscope.errors import DataFileError, InputError
from flatscope.inputs.factories import find_factory
from flatscope.inputs.formats import read_npz
from flatscope.sample_sources import as_samples

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]


@dataclass(frozen=True, eq=False, repr=False)
class Data:
    """Training and test samples, ready for a model, and where they come from.

    Images are float32 (n, channels, height, width); labels int64 (n,). `test` is None where there is none.
    `mean` and `std` are per channel, of the training samples (those in `train`, or all of the set), on the [0, 1]
    scale; None where nothing was standardised.
    """

    name: str
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor] | None
    classes: tuple[str, ...]  # empty for regression targets
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    seed: int = 0
    notes: str = ""
    scale: float = 1.0  # by which the source's numbers were divided

    @property
    def n_classes(self) -> int:
        """Number of classes; 0 for regression."""
        return len(self.classes)

    @property
    def input_shape(self) -> tuple[int, ...]:
        """Shape of one sample."""
        return tuple(self.train[0].shape[1:])

    @property
    def how(self) -> str:
        """Preparation of the inputs, in words."""
        divided = "as they are" if self.scale == 1 else f"divided by {self.scale:g}"
        return divided if self.mean is None else "standardised"

    def __repr__(self) -> str:
        n_test = len(self.test[1]) if self.test else 0
        shape = "x".join(str(extent) for extent in self.input_shape)
        return f"Data({self.name!r}, {len(self.train[1])} train, {n_test} test, {shape}, {self.n_classes} classes)"


@dataclass(frozen=True)
class Raw:
    """Samples as their source gives them; dividing by `scale` brings bytes to [0, 1]."""

    name: str
    train: Pair
    test: Pair | None
    classes: tuple[str, ...]
    scale: float
    notes: str
    own: bool = False  # a user's own samples, standardised only if asked
    ready: Data | None = None  # the user's own `Data`: not to be scaled again


@dataclass(frozen=True)
class DataSource:
    """A user's own samples, read as they come: whatever `Problem` takes as data, for training and test."""

    name: str
    train: Any
    test: Any = None
    notes: str = ""
    how = "as they are"


WANTED = "a Data, (x, y), a Dataset, a DataLoader or batches, or a pair (training, test) of them"


def samples_from_npz(path: Path) -> Raw:
    """Samples of an npz file, checked."""
    arrays = read_npz(path)
    train = (arrays["x_train"], arrays["y_train"])
    test = (arrays["x_test"], arrays["y_test"]) if "x_test" in arrays else None
    names = tuple(str(name) for name in arrays["classes"]) if "classes" in arrays else None
    try:
        return checked_raw_samples(path.stem, train, test, names, str(path))
    except InputError as error:
        raise DataFileError(error.expected, error.got, error.where, error.fix) from error


def samples_from_function(spec: str) -> Raw | DataSource:
    """Return value of a user's function without arguments: samples as arrays, or a source of samples."""
    name, made = spec.rpartition(":")[2], find_factory(spec)()
    if isinstance(made, Raw):  # a set of ours under construction, handled like those with a name
        return made
    if isinstance(made, Data):
        train, test = _pair_as_arrays(made.train), _pair_as_arrays(made.test) if made.test else None
        return Raw(made.name, train, test, made.classes, 1.0, made.notes or spec, own=True, ready=made)
    train_part, test_part = _training_and_test_of(made)
    if test_part is None and not _is_source(train_part):
        empty = isinstance(made, tuple | list) and not made
        raise InputError(WANTED, f"an empty {type(made).__name__}" if empty else type(made).__name__, where=spec)
    if not all(_is_source(part) for part in (train_part, test_part) if part is not None):
        raise InputError(WANTED, "parts that are none of these", where=spec)
    pairs = [part for part in (train_part, test_part) if part is not None]
    if not all(isinstance(part, tuple | list) and len(part) == 2 and all(map(_is_array_like, part)) for part in pairs):
        return DataSource(name, train_part, test_part, spec)
    test = None if test_part is None else _pair_as_arrays(test_part)
    return checked_raw_samples(name, _pair_as_arrays(train_part), test, None, spec)


def collect_source_as_arrays(source: DataSource, with_test: bool) -> Raw:
    """All samples of a source as arrays, for what can be done to arrays alone."""
    parts = [source.train, source.test] if with_test and source.test is not None else [source.train]
    pairs: list[Pair] = []
    for part, what in zip(parts, ("training", "test"), strict=False):
        batches = list(as_samples(part, f"{source.notes}, {what} part").batches())
        shapes = {inputs.shape[1:] if isinstance(inputs, Tensor) else None for inputs, _ in batches}
        if None in shapes or len(shapes) > 1:
            expected = "samples that are one tensor each, all of one shape: training, sizes, standardising need arrays"
            fix = "Draw and change the samples in the function itself"
            raise InputError(expected, "several tensors a sample, or other shapes", f"{source.notes}, {what} part", fix)
        x = torch.cat([inputs for inputs, _ in batches if isinstance(inputs, Tensor)])
        pairs.append(_pair_as_arrays((x, torch.cat([targets for _, targets in batches]))))
    return checked_raw_samples(source.name, pairs[0], pairs[1] if len(pairs) > 1 else None, None, source.notes)


def _training_and_test_of(made: Any) -> tuple[Any, Any]:
    """(training, test) of what a function returned; test is None where there is none."""
    if isinstance(made, Mapping) and "train" in made and set(made) <= {"train", "test"}:
        return made["train"], made.get("test")
    if isinstance(made, list) and all(isinstance(part, Mapping) for part in made):
        return made, None  # batches, also where there are two of them
    two = isinstance(made, tuple | list) and len(made) == 2 and not _is_array_like(made[1])
    return (made[0], made[1]) if two else (made, None)


def _is_source(part: Any) -> bool:
    """True if `Problem` may take it as data; it looks closer."""
    if isinstance(part, tuple | list):
        return len(part) == 2 if isinstance(part, tuple) else len(part) > 0
    readable = hasattr(part, "__iter__") or hasattr(part, "__getitem__")
    return readable and not isinstance(part, str | bytes | Tensor | np.ndarray | nn.Module)


def _is_array_like(value: Any) -> bool:
    """An array, or numbers in a list, or lists of them."""
    if isinstance(value, Tensor | np.ndarray):
        return True
    while isinstance(value, list | tuple) and len(value) and isinstance(value[0], list | tuple):
        value = value[0]
    return isinstance(value, list | tuple) and len(value) > 0 and isinstance(value[0], int | float)


def _pair_as_arrays(pair: Any) -> Pair:
    x, y = (part.detach().cpu().numpy() if isinstance(part, Tensor) else np.asarray(part) for part in pair)
    return x, y


def checked_raw_samples(name: str, train: Pair, test: Pair | None, classes: tuple[str, ...] | None, where: str) -> Raw:
    """A user's arrays, once everything that can be wrong with them has been looked at."""
    train = _checked_inputs_and_labels(*train, f"{where}, training part")
    test = _checked_inputs_and_labels(*test, f"{where}, test part") if test else None
    if test and _type_of_samples_in_words(test) != _type_of_samples_in_words(train):
        raise InputError(
            f"test samples like the training samples, {_type_of_samples_in_words(train)}",
            _type_of_samples_in_words(test),
            where,
        )
    if train[1].dtype.kind == "f" or train[1].ndim > 1:
        classes = ()
    else:
        top = max(int(part[1].max()) for part in (train, test) if part)
        classes = classes or tuple(str(label) for label in range(top + 1))
        if top >= len(classes):
            raise InputError(f"labels below {len(classes)}, the number of class names", str(top), where)
    return Raw(name, train, test, classes, 255.0 if train[0].dtype == np.uint8 else 1.0, where, own=True)


def _type_of_samples_in_words(samples: Pair) -> str:
    x, y = samples
    several = f" of shape {y.shape[1:]}" if y.ndim > 1 else ""
    return f"{x.dtype} of shape {x.shape[1:]} with {y.dtype} targets{several}"


def _checked_inputs_and_labels(x: Array, y: Array, where: str) -> Pair:
    if x.dtype.kind not in "biuf" or x.ndim < 2 or len(x) == 0:
        raise InputError("samples as numbers (n, ...), n at least 1", f"{x.dtype} of shape {x.shape}", where)
    if y.dtype.kind not in "biuf" or y.ndim == 0 or len(y) != len(x):
        raise InputError(f"{len(x)} targets as numbers", f"{y.dtype} of shape {y.shape}", where)
    for values, what in ((x, "samples"), (y, "targets")):
        if not np.isfinite(values).all():
            raise InputError(f"finite {what}", f"{np.size(values) - np.isfinite(values).sum()} that are not", where)
    if x.dtype == np.uint8 and x.ndim == 4 and x.shape[1] > 4 and x.shape[3] <= 4:
        fix = "Put the channels first: np.moveaxis(x, -1, 1)"
        raise InputError("images (n, channels, height, width)", str(x.shape), where, fix)
    if x.dtype == np.uint8 and x.ndim == 3:
        x = x[:, None]  # grey images (n, 1, h, w)
    if y.dtype.kind == "f":
        return x, y
    if y.size > len(y):  # classes of pixels or tokens, or several labels of a sample
        return x, y.astype(np.int64)
    if y.min() < 0:
        raise InputError("labels (n,) from 0 up", f"{y.dtype} {y.shape} with minimum {y.min()}", where)
    return x, y.reshape(-1).astype(np.int64)
