"""Data by name: digits (embedded), MNIST, Fashion-MNIST, CIFAR-10, a user's npz file, or a user's function.

`load` is the one way in. It draws subsets by seed, crops, scales images to [0, 1] and standardises them. Random
numbers come from numpy's `RandomState`, whose stream is frozen: the same seed gives the same samples on every
machine and version.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from flatscope.errors import InputError, UnknownNameError, refuse_unknown
from flatscope.inputs.data_set import (
    Array,
    Data,
    DataSource,
    Pair,
    Raw,
    collect_source_as_arrays,
    samples_from_function,
    samples_from_npz,
)
from flatscope.inputs.hub_columns import Tokenizer, samples_from_hub
from flatscope.inputs.hub_tables import is_hub_data
from flatscope.inputs.known_files import SETS
from flatscope.inputs.public_sets import (
    EMBEDDED,
    data_root,
    fetch,
    locate_set_files,
    read_part,
)

DIGITS_TEST_SIZE = 360
STANDARDS = ("drawn", "all")
CHANGES = ("train_size", "test_size", "standardize", "flatten", "crop")  # what `load` may be asked to do to samples
MOMENT_CHUNK = 1024  # samples at a time: the float64 copies stay at 25 MB for CIFAR-10


def load(
    name: str | Path | Raw | DataSource,
    root: str | Path | None = None,
    *,
    train_size: int | None = None,
    test_size: int | None = None,
    seed: int = 0,
    balanced: bool = True,
    standardize: bool | None = None,
    standardize_by: str = "drawn",
    flatten: bool = False,
    crop: int | None = None,
    download: bool = False,
    columns: Mapping[str, str] | None = None,
) -> Data:
    """Samples of a data set as tensors, the same for the same arguments everywhere.

    Args:
        name: `digits`, `mnist`, `fashion-mnist`, `cifar10`; a path to an npz with `x_train, y_train` and optionally
            `x_test, y_test, classes`; or `module:function` / `file.py:function`, a function without arguments that
            returns a `Data`, `(x, y)`, a `Dataset`, a `DataLoader`, or a pair of them (training, test); or what such a
            function gave.
        root: folder of the public sets; else `$FLATSCOPE_DATA`, else the user's cache folder.
        train_size: how many training samples to draw; None takes all, in their original order. Of one seed, a
            larger draw begins with the smaller.
        test_size: the same for the test samples; 0 leaves them out (and unread).
        seed: of the draws, and of the split of `digits`.
        balanced: draw equally from the classes, as far as they last; else at random.
        standardize: per channel, to mean 0 and variance 1; None: the sets by name, and not a user's own data. A user's
            `Data` is always left as it is, and so are integers other than bytes (token numbers).
        standardize_by: mean and variance of the training samples that are "drawn", or of "all" there are: what a
            network that was trained on all of them must be given, whatever the draw.
        flatten: one vector per sample.
        crop: side of the centre square to keep (zhang2017 uses 28 of CIFAR-10's 32).
        download: fetch a public set that is not there.
        columns: of `hf:` data, which column is "input" (several with commas) and which "label"; else they are found.
    """
    refuse_unknown(standardize_by, STANDARDS, "standardize_by")
    with_test = test_size != 0
    source = (
        name
        if isinstance(name, Raw | DataSource)
        else _raw_samples(str(name), root, seed, download, with_test, columns)
    )
    raw = collect_source_as_arrays(source, with_test) if isinstance(source, DataSource) else source

    def select(samples: Pair, size: int | None, part: str) -> Pair:
        x, y = _draw_samples(samples, size, seed, balanced, f"{part}_size of {raw.name}")
        return _crop_centre(x, crop, raw.name), y

    train, test = select(raw.train, train_size, "train"), None
    if raw.test is not None and test_size != 0:
        test = select(raw.test, test_size, "test")
    elif test_size:
        raise InputError(f"{test_size} test samples", "a data set without any", f"test_size of {raw.name}")

    if raw.ready is not None:
        moments, mean, std = None, raw.ready.mean, raw.ready.std
    else:
        x = train[0] if standardize_by == "drawn" else _crop_centre(raw.train[0], crop, raw.name)
        wanted = not raw.own if standardize is None else standardize
        moments = channel_moments(x) if wanted and _holds_measurements(x) else None
        mean, std = (tuple((moment / raw.scale).tolist()) for moment in moments) if moments else (None, None)
    tensors = [_to_tensors(part, raw, moments, flatten) for part in (train, test) if part]
    return Data(raw.name, tensors[0], tensors[1] if test else None, raw.classes, mean, std, seed, raw.notes, raw.scale)


def load_or_read(
    name: str | Path,
    root: str | Path | None = None,
    tokenizer: Callable[[], Tokenizer] | None = None,
    **options: Any,
) -> Data | DataSource:
    """As `load`; but loaders, batches and tokens are read as they come where nothing more is asked.

    Args:
        name: as in `load`.
        root: folder of the public sets.
        tokenizer: makes that of the model, for texts of `hf:` data.
        options: other arguments of `load`.
    """
    source: str | Path | Raw | DataSource = name
    if is_hub_data(str(name)):
        source = samples_from_hub(str(name), options.get("columns") or {}, tokenizer, options.get("test_size") != 0)
        if isinstance(source, DataSource):
            source = _drawn_rows(source, options)
            options = {**options, "train_size": None, "test_size": None}
    elif _names_a_function(str(name)):
        source = samples_from_function(str(name))
    if isinstance(source, DataSource) and not any(options.get(asked) for asked in CHANGES):
        return replace(source, test=None) if options.get("test_size") == 0 else source
    return load(source, root, **options)


def _drawn_rows(source: DataSource, options: Mapping[str, Any]) -> DataSource:
    """As many of the tokens as are asked for, drawn as other samples are."""
    parts = {"train": source.train, "test": source.test}
    for part, batch in parts.items():
        size = options.get(f"{part}_size")
        if batch is not None and size is not None:
            balanced, where = options.get("balanced", True), f"{part}_size of {source.name}"
            rows, _ = _draw_samples(
                (np.arange(len(batch["labels"])), batch["labels"]), size, options.get("seed", 0), balanced, where
            )
            parts[part] = {name: values[rows] for name, values in batch.items()}
    return replace(source, **parts)


def random_stream(seed: int, purpose: str) -> np.random.RandomState:
    """Random numbers for one purpose: two purposes of one seed have nothing to do with each other."""
    if isinstance(seed, bool) or not 0 <= seed < 2**32:
        raise InputError("an integer from 0 to 4294967295", repr(seed), where="seed")
    return np.random.RandomState([seed, *purpose.encode()])


def sample_order(y: Array, seed: int, *, balanced: bool = True) -> npt.NDArray[np.int64]:
    """A random order of all samples; its first k are the draw of k, so that draws of one seed are nested.

    Balanced: round after round, one sample of every class that still has some, in random order.
    """
    keys = random_stream(seed, "draw").random_sample(len(y))
    if not balanced:
        return np.argsort(keys, kind="stable")
    return np.lexsort((keys, _rank_in_class(y, keys)))


def channel_moments(x: Array) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """Mean and standard deviation of each channel (dimension 1), in float64; a constant channel gets 1."""
    axes = (0, *range(2, x.ndim))
    count = x.size // x.shape[1]
    shape = (1, -1, *(1 for _ in axes[1:]))
    chunks = [x[start : start + MOMENT_CHUNK] for start in range(0, len(x), MOMENT_CHUNK)]
    mean = np.sum([chunk.sum(axes, dtype=np.float64) for chunk in chunks], axis=0) / count
    centred = (chunk - mean.reshape(shape) for chunk in chunks)
    std = np.sqrt(np.sum([np.square(chunk).sum(axes) for chunk in centred], axis=0) / count)
    # Below the resolution of float32 a channel is constant: what is left is rounding, not to be blown up to 1.
    return mean, np.where(std <= 1e-7 * np.abs(mean), 1.0, std)


def _rank_in_class(y: Array, keys: Array) -> npt.NDArray[np.int64]:
    """Position of each sample among those of its class, in the order of the keys."""
    order = np.lexsort((keys, y))
    _, starts, counts = np.unique(y[order], return_index=True, return_counts=True)
    ranks = np.empty(len(y), np.int64)
    ranks[order] = np.arange(len(y)) - np.repeat(starts, counts)
    return ranks


def _draw_samples(samples: Pair, size: int | None, seed: int, balanced: bool, where: str) -> Pair:
    x, y = samples
    if size is None:
        return samples
    if isinstance(size, bool) or not 1 <= size <= len(y):
        fix = "Leave it out to take all of them"
        raise InputError(f"a number of samples from 1 to {len(y)}", repr(size), where, fix)
    chosen = sample_order(y, seed, balanced=balanced and y.ndim == 1 and y.dtype.kind in "iu")[:size]
    return x[chosen], y[chosen]


def _crop_centre(x: Array, side: int | None, name: str) -> Array:
    if side is None:
        return x
    if x.ndim != 4 or not 1 <= side <= min(x.shape[2:]):
        shape = " x ".join(str(extent) for extent in x.shape[1:])
        raise InputError("a side that fits into the images (channels, h, w)", f"{side} for {shape}", f"crop of {name}")
    top, left = ((extent - side) // 2 for extent in x.shape[2:])
    return x[:, :, top : top + side, left : left + side]


def _holds_measurements(x: Array) -> bool:
    """Bytes and floats are measurements; other integers are names of things, such as tokens."""
    return bool(x.dtype == np.uint8 or x.dtype.kind in "bf")


def _to_tensors(samples: Pair, raw: Raw, moments: tuple[Array, Array] | None, flatten: bool) -> tuple[Tensor, Tensor]:
    """New tensors; standardised in place, since all of CIFAR-10 takes 614 MB as float32."""
    x, y = samples
    if raw.ready is None:
        y = y.astype(np.int64 if y.dtype.kind in "iu" else np.float32)
    if raw.ready is not None or not _holds_measurements(x):
        values = np.array(x, dtype=None if raw.ready else np.int64, order="C")
    else:
        values = x.astype(np.float32)
        values /= np.float32(raw.scale)
    if moments:
        mean, std = ((moment / raw.scale).astype(np.float32) for moment in moments)
        shape = (1, -1, *(1 for _ in x.shape[2:]))
        values -= mean.reshape(shape)
        values /= std.reshape(shape)
    values = values.reshape(len(values), -1) if flatten else values
    return torch.from_numpy(values), torch.from_numpy(np.array(y))


def _names_a_function(name: str) -> bool:
    return ":" in name and not name.endswith(".npz")


def _raw_samples(
    name: str,
    root: str | Path | None,
    seed: int,
    download: bool,
    with_test: bool,
    columns: Mapping[str, str] | None,
) -> Raw | DataSource:
    if columns and not is_hub_data(name):
        fix = "Leave it out; a function of your own picks its columns itself"
        raise InputError("columns for data of a hub (hf:…)", f"{', '.join(columns)} for {name}", "--column", fix)
    if is_hub_data(name):
        return samples_from_hub(name, columns or {}, None, with_test)
    if name == EMBEDDED:
        return _embedded_digits(seed)
    if name in SETS:
        return _public_set_samples(name, root, download, with_test)
    if name.endswith(".npz"):
        return samples_from_npz(Path(name).expanduser())
    if _names_a_function(name):
        return samples_from_function(name)
    if Path(name).exists():
        fix = "Save arrays with numpy.savez('data.npz', x_train=…, y_train=…), or name a function that returns (x, y)"
        raise InputError("an npz file or file.py:function", "neither", name, fix)
    unknown = UnknownNameError.among(name, [EMBEDDED, *SETS], "data set")
    unknown.fix += " Data of your own: file.npz, file.py:function, or hf:FOLDER"
    raise unknown


def _embedded_digits(seed: int) -> Raw:
    from sklearn.datasets import load_digits  # scikit-learn takes a second to import

    images, labels = load_digits(return_X_y=True)
    x = images.astype(np.uint8).reshape(-1, 1, 8, 8)
    y = labels.astype(np.int64)
    # Ranks as fractions of the class: the first 360 hold every class in proportion, to within one sample.
    keys = random_stream(seed, "split").random_sample(len(y))
    fraction = (_rank_in_class(y, keys) + 0.5) / np.bincount(y)[y]
    order = np.lexsort((keys, fraction))
    test, train = np.sort(order[:DIGITS_TEST_SIZE]), np.sort(order[DIGITS_TEST_SIZE:])
    notes = f"scikit-learn's load_digits, stratified split of seed {seed}"
    return Raw(EMBEDDED, (x[train], y[train]), (x[test], y[test]), tuple("0123456789"), 16.0, notes)


def _public_set_samples(name: str, root: str | Path | None, download: bool, with_test: bool) -> Raw:
    public = SETS[name]
    if download and len(locate_set_files(public, data_root(root))) < len(public.files):
        fetch(name, root)
    train = read_part(name, "train", root)
    test = read_part(name, "test", root) if with_test else None
    return Raw(name, train, test, public.classes, 255.0, f"{public.title}, published files, checksums verified")
