"""The rules by which labels travel: to which scale and unit every entry of every tensor belongs.

A label tensor has the shape of the tensor it describes (see `ties`). Zero padding, slicing, shuffling and the like act
on label tensors as on any tensor, so only operations that compute need a rule, and those add ties.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flatscope.network.interception import Operation, tensors_in, with_tensors
from flatscope.network.tied_labels import CONSTANT, ZERO, Labels


@dataclass(frozen=True)
class ScaleStep:
    """One operation of the forward pass with its result, and the labels of what it received."""

    op: Operation
    result: Any
    book: Labels
    label_of: Callable[[Tensor], Tensor]
    from_data: Callable[[Tensor], bool]  # whether a tensor is an input, or made of some: another in other samples

    def data_decides(self, index: Any) -> bool:
        """True if an index or a mask is another one in other samples."""
        return any(self.from_data(tensor) for tensor in tensors_in(index))

    @property
    def signals(self) -> list[Tensor]:
        """The floating-point arguments; indices and masks carry no scale."""
        return [tensor for tensor in self.op.tensors if tensor.is_floating_point()]

    @property
    def first(self) -> Tensor:
        """Labels of the first floating-point argument."""
        return self.label_of(self.signals[0])

    def spread(self, labels: Tensor) -> Tensor:
        """Labels of the result's shape."""
        return labels.expand(self.result.shape).clone()


# Gives the labels of the result (nested as the result is), or None: then the operation is a wall.
ScaleRule = Callable[[ScaleStep], Any]


def move(step: ScaleStep) -> Any:
    """Entries change places, are repeated, dropped or padded: labels do the same."""

    def labelled(tensor: Tensor) -> Tensor:
        return step.label_of(tensor) if tensor.is_floating_point() else tensor.cpu()

    # Labels may lie in memory otherwise than the tensor: what is a view there need not be one here.
    function = Tensor.reshape if step.op.name == "view" else step.op.function
    found = function(*with_tensors(step.op.args, labelled), **with_tensors(step.op.kwargs, labelled))
    moved = zip(tensors_in(step.result), tensors_in(found), strict=True)
    # An index or a mask that takes the shape of a signal carries no scale, as `index.expand_as(signal)` does.
    labels = [new if tensor.is_floating_point() else constant_labels(tensor) for tensor, new in moved]
    return labels[0] if isinstance(step.result, Tensor) else labels


def choose(step: ScaleStep) -> Any:
    """Which entries are taken may differ from unit to unit; where the data decide, any of them may be taken."""
    step.book.pin_units(step.first, step.op.place)
    given = step.op.named("input", *(("dim", "index") if step.op.name == "gather" else ("indices", "dim")))
    if step.data_decides((given.get("index"), given.get("indices"))):
        if given.get("dim") is None:
            return None
        step.book.tie_over(step.first, (int(given["dim"]) % step.first.ndim,), step.op.place)
    return move(step)


def pick(step: ScaleStep) -> Any:
    """Entries by an index; where the data decide which, all along these axes share one scale."""
    if step.op.name == "index_select":
        given = step.op.named("input", "dim", "index")
        index = (*[slice(None)] * (int(given["dim"]) % step.first.ndim), given["index"])
    else:
        index = step.op.args[1] if isinstance(step.op.args[1], tuple) else (step.op.args[1],)
    if step.data_decides(index):
        axes = _axes_decided_by_data(step, index)
        if axes is None:
            return None
        step.book.tie_over(step.first, axes, step.op.place)
        if axes != (0,):
            step.book.pin_units(step.first, step.op.place)
    return move(step)


def _axes_decided_by_data(step: ScaleStep, index: tuple[Any, ...]) -> tuple[int, ...] | None:
    """Axes along which the data decide what is taken; None where that cannot be told."""
    spans = [
        0 if part is None else part.ndim if isinstance(part, Tensor) and part.dtype in (torch.bool, torch.uint8) else 1
        for part in index
    ]
    axes: list[int] = []
    place = 0
    for part, span in zip(index, spans, strict=True):
        if part is Ellipsis:
            place += step.first.ndim - (sum(spans) - 1)
            continue
        if isinstance(part, Tensor):
            axes += range(place, place + span) if step.from_data(part) else ()
        elif step.data_decides(part):
            return None
        place += span
    return tuple(axes)


def pad(step: ScaleStep) -> Any:
    """Padding with zeros ties nothing; any other constant is a constant."""
    given = step.op.named("input", "pad", "mode", "value")
    value = float(given.get("value") or 0.0)
    filler = ZERO if value == 0 else CONSTANT
    mode = given.get("mode", "constant")
    return torch.nn.functional.pad(step.first, list(given["pad"]), mode, filler if mode == "constant" else None)


def masked_fill(step: ScaleStep) -> Any:
    """Filled entries are zeros or constants; where others are filled in other units, these are not alike."""
    given = step.op.named("input", "mask", "value")
    if isinstance(given["value"], Tensor) and step.book.scale.is_free(step.label_of(given["value"])).any():
        return None
    labels = step.first.expand(step.result.shape)
    if step.data_decides(given["mask"]):  # entries that are filled here are not in other samples
        return _filled_where_data_decide(step, labels, given["mask"], float(given["value"]))
    mask = given["mask"].cpu().expand(step.result.shape)
    if any(_varies(labels, axis) and _varies(mask, axis) for axis in range(labels.ndim)):
        step.book.pin_units(step.first, step.op.place)
    return step.first.masked_fill(given["mask"].cpu(), ZERO if float(given["value"]) == 0 else CONSTANT)


def _filled_where_data_decide(step: ScaleStep, labels: Tensor, mask: Tensor, value: float) -> Tensor:
    """Zeros agree with every scale, constants fix it; what has a mask of its own is no longer alike."""
    if value != 0:
        step.book.fix_scale(labels, step.op.place)
    own = mask.reshape(*[1] * (labels.ndim - mask.ndim), *mask.shape)
    if any(own.shape[axis] > 1 and _varies(labels, axis) for axis in range(labels.ndim)):
        step.book.pin_units(labels, step.op.place)
    return labels.clone()


def _varies(values: Tensor, axis: int) -> bool:
    """True where entries along an axis differ from the first one."""
    return bool((values != values.narrow(axis, 0, min(1, values.shape[axis]))).any())


def set_item(step: ScaleStep) -> None:
    """Entries are overwritten in place, in the labels as in the tensor."""
    target, index, value = step.op.args
    if step.data_decides(index):
        _write_where_data_decide(step, target, index, value)
        return
    if isinstance(value, Tensor):
        new: Any = step.label_of(value)
    else:
        new = float(ZERO if value == 0 else CONSTANT)
    step.label_of(target)[with_tensors(index, torch.Tensor.cpu)] = new


def _write_where_data_decide(step: ScaleStep, target: Tensor, index: Any, value: Any) -> None:
    """In other samples other entries are written: where these are samples, both share scales unit by unit."""
    labels, whole_samples = step.label_of(target), isinstance(index, Tensor) and index.ndim == 1
    if not isinstance(value, Tensor):
        if value != 0:
            step.book.fix_scale(labels, step.op.place)
        if not whole_samples:
            step.book.pin_units(labels, step.op.place)
        return
    written = step.label_of(value)
    if not whole_samples:
        step.book.wall(labels, step.op.place)
        step.book.wall(written, step.op.place)
        return
    rows = step.book.tie_over(labels, (0,), step.op.place)
    if written.ndim == labels.ndim:
        written = step.book.tie_over(written, (0,), step.op.place)
    labels.copy_(step.book.tie(rows, written, step.op.place).expand(labels.shape))


def keep(step: ScaleStep) -> Tensor:
    """f(c x) = c f(x) for every c > 0, entry by entry."""
    return step.first.clone()


def cast(step: ScaleStep) -> Tensor | None:
    """Another type of number; whole numbers, and numbers of Python, are a wall."""
    return keep(step) if isinstance(step.result, Tensor) and step.result.is_floating_point() else None


def prelu(step: ScaleStep) -> Tensor:
    """Homogeneous; with a slope per channel the channels are no longer alike."""
    slopes = step.signals[1]
    step.label_of(slopes)
    if slopes.numel() > 1:
        step.book.pin_units(step.first, step.op.place)
    return keep(step)


def one_sided(step: ScaleStep) -> Tensor | None:
    """`clamp` at zero from one side is homogeneous, any other bound is a wall."""
    given = step.op.named("input", "min", "max")
    bounds = [given.get(name) for name in ("min", "max")]
    if any(isinstance(bound, Tensor) for bound in bounds):
        return None
    return keep(step) if all(bound is None or bound == 0 for bound in bounds) else bend(step)


def threshold(step: ScaleStep) -> Tensor | None:
    """`threshold` at zero is a ReLU."""
    given = step.op.named("input", "threshold", "value")
    return keep(step) if given["threshold"] == 0 and given["value"] == 0 else bend(step)


def bend(step: ScaleStep) -> Tensor | None:
    """The same curve for every entry, not homogeneous: scales are fixed, units may still change places."""
    if len(step.signals) != 1 or step.first.shape != step.result.shape:
        return None
    step.book.fix_scale(step.first, step.op.place)
    return step.first.clone()


def add(step: ScaleStep) -> Tensor | None:
    """Terms of a sum share one scale."""
    terms = _operands(step)
    if len(terms) != 2 or (len(step.op.args) > 2 and step.op.name != "where"):  # an old form: torch.add(x, 2, y)
        return None
    signals = [term for term in terms if isinstance(term, Tensor)]
    if len(signals) == 2:
        return step.spread(_sum_of(step, signals[0], signals[1]))
    labels = step.label_of(signals[0])
    if any(float(term) != 0 for term in terms if not isinstance(term, Tensor)):
        step.book.fix_scale(labels, f"{step.op.place} with a constant")
    return step.spread(labels)


def where(step: ScaleStep) -> Tensor | None:
    """Entries of two signals, chosen by a condition: as in a sum, and what is chosen may differ from unit to unit."""
    labels = add(step)
    if labels is not None:
        step.book.pin_units(labels, step.op.place)
    return labels


def _operands(step: ScaleStep) -> list[Any]:
    """The operands of a binary operation: tensors or numbers, without options and conditions."""
    given = [*step.op.args, *(step.op.kwargs[name] for name in ("input", "other") if name in step.op.kwargs)]
    if step.op.name == "where":
        given = [arg for arg in given if not (isinstance(arg, Tensor) and arg.dtype == torch.bool)]
    return given[:2]


def _sum_of(step: ScaleStep, left: Tensor, right: Tensor) -> Tensor:
    labels = [step.label_of(left), step.label_of(right)]
    for one, other, value in ((labels[0], labels[1], right), (labels[1], labels[0], left)):
        if value.numel() == 1 and bool((other == CONSTANT).all()):  # one number for all: units stay alike
            step.book.fix_scale(one, f"{step.op.place} with a constant")
            return one
    return step.book.tie(labels[0], labels[1], step.op.place)


def multiply(step: ScaleStep) -> Tensor | None:
    """A factor without a scale keeps the other's; the product of two scaled signals fixes both."""
    signals = [factor for factor in _operands(step) if isinstance(factor, Tensor)]
    if len(signals) == 1:
        return step.spread(step.label_of(signals[0]))
    left, right = (step.spread(step.label_of(signal)) for signal in signals)
    both = step.book.scale.is_free(left) & step.book.scale.is_free(right)
    for labels in (left, right):
        step.book.fix_scale(labels[both], f"{step.op.place} of two signals")
    if min(signal.numel() for signal in signals) > 1:
        step.book.tie(left, right, step.op.place, scale=False)
    chosen = torch.where(step.book.scale.is_free(right) | (left == CONSTANT), right, left)
    return torch.where((left == ZERO) | (right == ZERO), torch.zeros_like(left), chosen)


def divide(step: ScaleStep) -> Tensor | None:
    """Dividing by what has a scale of its own fixes that scale."""
    given = _operands(step)
    if len(given) != 2 or step.op.kwargs.get("rounding_mode"):
        return None
    if isinstance(given[1], Tensor):
        step.book.fix_scale(step.label_of(given[1]), f"{step.op.place} by a signal")
    return multiply(step)


def compare(step: ScaleStep) -> Tensor | None:
    """Comparing with zero does not depend on a positive scale; which unit it is about can no longer be told."""
    other = step.op.args[1] if len(step.op.args) > 1 else step.op.kwargs.get("other")
    if isinstance(other, Tensor) or other != 0:
        return None
    step.book.pin_units(step.first, step.op.place)
    return torch.ones(step.result.shape, dtype=torch.float64)


def reduce(step: ScaleStep) -> Any:
    """Sum, mean or maximum along axes: what is reduced together shares one scale."""
    given = step.op.named("input", "dim", "keepdim")
    dim = given.get("dim", given.get("axis"))
    if isinstance(dim, Tensor) or isinstance(given.get("other"), Tensor):  # max(a, b): entry by entry
        return add(step)
    labels = step.first
    if dim is None or dim == ():
        dims = tuple(range(labels.ndim))
    else:
        dims = tuple(int(axis) % labels.ndim for axis in (dim if isinstance(dim, tuple | list) else (dim,)))
    common = step.book.tie_over(labels, dims, step.op.place)
    if isinstance(step.result, Tensor):
        return common.reshape(step.result.shape)
    values = common.reshape(step.result[0].shape)
    return values, torch.ones_like(values)


def pool(step: ScaleStep) -> Any:
    """Windows mix positions, not channels: the positions of a channel share one scale."""
    n_spatial = next((int(mark) for mark in step.op.name if mark in "123"), step.first.ndim - 2)
    dims = tuple(range(step.first.ndim - n_spatial, step.first.ndim))
    common = step.book.tie_over(step.first, dims, step.op.place)
    if isinstance(step.result, Tensor):
        return step.spread(common)
    shape = step.result[0].shape
    return common.expand(shape).clone(), torch.ones(shape, dtype=torch.float64)


def matrix_product(step: ScaleStep) -> Tensor | None:
    """With one factor free of scales the product mixes rows or columns of the other; else each takes the other's up."""
    left, right = (step.label_of(signal) for signal in step.signals[:2])
    if min(left.ndim, right.ndim) < 2:
        return None
    for labels in (left, right):
        step.book.pin_units(labels, step.op.place)
    if not step.book.scale.is_free(left).any():
        return step.spread(step.book.tie_over(right, (right.ndim - 2,), step.op.place))
    if not step.book.scale.is_free(right).any():
        return step.spread(step.book.tie_over(left, (left.ndim - 1,), step.op.place))
    if not step.book.inner:
        return None
    _take_up(step, left, right.transpose(-2, -1))
    return torch.ones(step.result.shape, dtype=torch.float64)


def _take_up(step: ScaleStep, queries: Tensor, keys: Tensor) -> None:
    """Every query (..., n, d) meets every key (..., m, d): the d scales of one are inverse to those of the other."""
    step.book.multiplied.append(step.op.place)
    queries, keys = (step.book.tie_over(labels, (labels.ndim - 2,), step.op.place) for labels in (queries, keys))
    step.book.oppose(queries, keys, step.op.place)


def attention(step: ScaleStep) -> Tensor | None:
    """Queries and keys pass a softmax, the result is linear in the values."""
    given = step.op.named("query", "key", "value", "attn_mask")
    queries, keys, values = (step.label_of(given[name]) for name in ("query", "key", "value"))
    shared = given.get("enable_gqa") and queries.shape[-3] // values.shape[-3]  # heads with the same keys and values
    if shared:
        keys, values = (labels.repeat_interleave(shared, dim=-3) for labels in (keys, values))
    if values.ndim != step.result.ndim or values.shape[:-2] != step.result.shape[:-2]:
        return None
    if isinstance(given.get("attn_mask"), Tensor):
        step.book.wall(step.label_of(given["attn_mask"]), f"softmax in {step.op.place}")
    if step.book.inner and all(step.book.scale.is_free(labels).any() for labels in (queries, keys)):
        _take_up(step, queries, keys)
    else:
        step.book.fix_scale(torch.cat([queries.flatten(), keys.flatten()]), f"softmax in {step.op.place}")
    for labels in (queries, keys, values):
        step.book.pin_units(labels, step.op.place)
    return step.spread(step.book.tie_over(values, (values.ndim - 2,), step.op.place))


def create(step: ScaleStep) -> Tensor:
    """A new tensor takes only shape and type from its arguments."""
    return constant_labels(step.result)


def constant_labels(value: Tensor) -> Tensor:
    """Exact zeros of a constant agree with every scale; its other entries are fixed."""
    if not value.is_floating_point():
        return torch.ones(value.shape, dtype=torch.float64)
    return (value.detach() != 0).double().cpu()
