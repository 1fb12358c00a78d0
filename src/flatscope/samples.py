"""What a user may give as data, made into one thing: a finite set of samples that can be read again and again."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from flatscope.errors import InputError
from flatscope.isolation import callers_defaults

Inputs = Tensor | tuple[Tensor, ...] | dict[str, Tensor]
Batch = tuple[Inputs, Tensor]
Split = Literal["train", "test"]

PROBED_SAMPLES = 2_000
READ_SIZE = 256
END = object()  # of a pass
NUMBERED = "Number the classes from 0: numpy.unique(y, return_inverse=True)[1]"
LABEL_KEYS = ("labels", "label", "targets", "target", "y")


class Samples:
    """A finite, re-readable set of (inputs, target) samples.

    Args:
        read: called for each pass; gives the batches, in any order but always of the same samples.
        generators: random generators that a pass moves on (shuffling loaders); put back after measuring.
        where: how error messages call this set.
        n: number of samples; counted by one pass when not known.
        held: all tensors of a pass, where they are the same each time.
    """

    def __init__(
        self,
        read: Callable[[], Iterable[Any]],
        generators: tuple[torch.Generator, ...] = (),
        where: str = "train",
        n: int | None = None,
        held: tuple[Tensor, ...] = (),
    ) -> None:
        self._read, self.generators, self.where, self.held = read, generators, where, held
        self.n = sum(len(targets) for _, targets in self.batches()) if n is None else n
        if self.n == 0:
            raise InputError("at least one sample", "none", where=where, fix="Pass data that is not empty")

    def batches(self, size: int | None = None, share: tuple[int, int] | None = None) -> Iterator[Batch]:
        """One pass over all samples in batches of at most `size` (the source's own batches when None).

        Args:
            size: the most samples of a batch.
            share: first and last (excluded) number of the samples to give; the others are read and passed over.
        """
        seen = 0
        for raw in self._raw_batches():
            inputs, targets = split_batch(raw, self.where)
            if share is not None:
                first, last = max(share[0] - seen, 0), share[1] - seen
                seen += len(targets)
                if last <= 0:
                    return
                inputs, targets = slice_inputs(inputs, first, last), targets[first:last]
            for start in range(0, len(targets), size or max(len(targets), 1)):
                stop = start + (size or len(targets))
                yield slice_inputs(inputs, start, stop), targets[start:stop]

    def _raw_batches(self) -> Iterator[Any]:
        """One pass over the source, each step under the caller's own defaults for new tensors."""
        with callers_defaults():
            source = iter(self._read())
        while True:
            with callers_defaults():
                raw = next(source, END)
            if raw is END:
                return
            yield raw


def tensors_of_inputs(inputs: Inputs) -> tuple[Tensor, ...]:
    """The tensors that make up a batch of inputs."""
    if isinstance(inputs, dict):
        return tuple(inputs.values())
    return inputs if isinstance(inputs, tuple) else (inputs,)


def as_rows(value: Tensor) -> Tensor:
    """One row of numbers for each entry of the first axis, also where there is no other axis."""
    return value.reshape(len(value), math.prod(value.shape[1:]))


def map_inputs(inputs: Inputs, change: Callable[[Tensor], Tensor]) -> Inputs:
    """The batch of inputs with every tensor of it changed."""
    if isinstance(inputs, dict):
        return {name: change(value) for name, value in inputs.items()}
    return tuple(change(value) for value in inputs) if isinstance(inputs, tuple) else change(inputs)


def copied_inputs(inputs: Inputs) -> Inputs:
    """The same batch in memory of its own."""
    return map_inputs(inputs, torch.clone)


def slice_inputs(inputs: Inputs, start: int, stop: int) -> Inputs:
    """Samples `start` to `stop` of a batch of inputs."""
    return map_inputs(inputs, lambda value: value[start:stop])


def rows_of_inputs(inputs: Inputs, rows: Tensor) -> Inputs:
    """The samples of these numbers in a batch of inputs."""
    return map_inputs(inputs, lambda value: value[rows.to(value.device)])


def inputs_with_first_repeated(inputs: Inputs) -> Inputs:
    """A batch of inputs with its first sample once more at the end."""
    return map_inputs(inputs, lambda value: torch.cat([value, value[:1]]))


def axis_of_samples(shape: Sequence[int], other: Sequence[int]) -> int:
    """The axis of a tensor that has the samples, by its shapes for two numbers of them; the first if none stands out.

    Example:
        >>> axis_of_samples((7, 2, 5), (7, 3, 5))
        1
    """
    changed = [axis for axis, (size, more) in enumerate(zip(shape, other, strict=False)) if size != more]
    return changed[0] if len(changed) == 1 else 0


def joined_inputs(batches: list[Inputs]) -> Inputs:
    """Several batches of inputs as one; of texts padded to other lengths the first alone."""
    first = batches[0]
    if isinstance(first, dict):
        return {name: torch.cat([batch[name] for batch in batches]) for name in first}  # type: ignore[index, call-overload]
    if isinstance(first, tuple):
        return tuple(torch.cat(parts) for parts in zip(*batches, strict=True))
    return torch.cat(batches)  # type: ignore[arg-type]


def inputs_on_device(inputs: Inputs, device: torch.device, dtype: torch.dtype) -> Inputs:
    """Inputs on the device; floating-point ones in `dtype`, token ids and masks as they are."""
    return map_inputs(inputs, lambda value: value.to(device, dtype) if value.is_floating_point() else value.to(device))


def shape_text(inputs: Inputs) -> str:
    """Shapes of a batch of inputs, for messages."""
    if isinstance(inputs, dict):
        return ", ".join(f"{name} {tuple(value.shape)}" for name, value in inputs.items())
    return ", ".join(str(tuple(value.shape)) for value in tensors_of_inputs(inputs))


def split_batch(raw: Any, where: str) -> Batch:
    """(inputs, targets) of a batch: a pair, a longer tuple (last = targets), or anything with labels by name."""
    if isinstance(raw, Mapping):
        label = next((key for key in LABEL_KEYS if key in raw), None)
        if label is None:
            raise InputError(f"a batch with one of {', '.join(LABEL_KEYS)}", f"keys {', '.join(raw)}", where=where)
        inputs = {name: value for name, value in raw.items() if name != label}
        return _inputs_and_targets_of_equal_length(inputs, raw[label], where)
    if isinstance(raw, tuple | list) and len(raw) >= 2:
        *parts, last = _tuple_with_labels_last(raw)
        given = parts[0] if len(parts) == 1 else tuple(parts)  # one input, a mapping or tuple of them, or several
        return _inputs_and_targets_of_equal_length(given, last, where)
    fix = "Several inputs go into a tuple: ((x1, x2), y)"
    if hasattr(raw, "to_numpy"):
        fix = "Pass the numbers of a table: (x.to_numpy(), y.to_numpy())"
    if hasattr(raw, "edge_index"):
        fix = (
            "In a batch of graphs a sample has no row of its own. Pad them to one size (as PyTorch Geometric's "
            "to_dense_batch and to_dense_adj do), give ((features, adjacency, mask), y) to a model that reads them so"
        )
    raise InputError("batches of (inputs, targets) or a mapping with labels", type(raw).__name__, where, fix)


def _tuple_with_labels_last(raw: Any) -> Any:
    """A named tuple's labels are told by their name, whatever their place."""
    label = next((key for key in LABEL_KEYS if key in getattr(raw, "_fields", ())), None)
    if label is None:
        return raw
    return [*(value for name, value in zip(raw._fields, raw, strict=True) if name != label), getattr(raw, label)]


def _inputs_and_targets_of_equal_length(given: Any, last: Any, where: str) -> Batch:
    """Inputs and targets as tensors, after counting that there are as many of one as of the other."""
    inputs: Inputs
    if isinstance(given, Mapping):
        inputs = {name: _as_tensor(value, f"{where}, {name}") for name, value in given.items() if value is not None}
    elif isinstance(given, tuple | list):
        inputs = tuple(_as_tensor(value, where) for value in given)
    else:
        inputs = _as_tensor(given, where)
    targets = _as_tensor(last, where)
    shapes = [tuple(part.shape) for part in tensors_of_inputs(inputs)]
    if not shapes or targets.ndim == 0 or any(shape[:1] != (len(targets),) for shape in shapes):
        got = f"inputs {shape_text(inputs) or 'none'} and targets {tuple(targets.shape)}"
        raise InputError("as many inputs as targets, along the first dimension", got, where=where)
    return inputs, targets


def _as_tensor(value: Any, where: str) -> Tensor:
    if isinstance(value, Tensor) and value.is_meta:
        raise InputError("data with values", "a meta tensor without any", where, "Load the data on a device")
    if isinstance(value, Tensor):  # of what was made in inference mode no derivative can be taken
        tensor: Tensor = value.detach() if value.requires_grad else value
        return tensor.clone() if tensor.is_inference() else tensor
    try:
        if isinstance(value, np.ndarray):  # copied where torch would warn that it cannot be written to
            return torch.from_numpy(np.require(value, requirements=("C", "W")))
    except TypeError as problem:
        fix = NUMBERED if value.dtype.kind in "OSU" else ""
        raise InputError("an array of numbers", f"an array of {value.dtype}", where, fix) from problem
    fix = "Make a tensor of it: torch.tensor(…), or torch.stack of a list of tensors" if isinstance(value, list) else ""
    if isinstance(value, list) and value and isinstance(value[0], str):
        raise InputError("numbers", "a list of texts", where, NUMBERED)
    if hasattr(value, "to_numpy"):
        fix = "Pass its numbers: .to_numpy()"
    raise InputError("tensors or arrays", type(value).__name__, where, fix)


def output_tensor(raw: Any) -> Tensor:
    """The output tensor of a model: itself, its `.logits`, or its "logits" entry."""
    by_name = raw.get("logits") if isinstance(raw, Mapping) else None
    for candidate in (raw, by_name, getattr(raw, "logits", None)):
        if isinstance(candidate, Tensor):
            return candidate
    fix = "Wrap the model in a module that returns the tensor to be measured"
    raise InputError("a model whose output is a tensor or has .logits", type(raw).__name__, "model", fix)
