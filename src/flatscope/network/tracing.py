"""Tracing: one forward pass over two samples, in which labels follow every entry from layer to layer."""

from __future__ import annotations

import copy
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.errors import FlatscopeError, InputError
from flatscope.guards import precise_math, untouched_randomness
from flatscope.network.labels import CONSTANT, Labels
from flatscope.network.operation import Operation, replay, tensors_in
from flatscope.network.result import LayerRecord, graph_of
from flatscope.network.rules import RULES, Step, constant_labels
from flatscope.network.units import Graph
from flatscope.problem import output_tensor
from flatscope.samples import Inputs, cut, moved, parts_of, shape_text

_LEAVES_TORCH = ("item", "tolist", "numpy", "bool", "float", "int", "index", "array", "equal", "allclose")
_DENSE_ORDER = ("input", "weight", "bias")
_CONV_ORDER = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_TRANSPOSED_ORDER = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
_NORM_ORDER = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
LAYER_CALLS = {
    "linear": ("dense", _DENSE_ORDER),
    **{f"conv{n}d": ("conv", _CONV_ORDER) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ("transposed", _TRANSPOSED_ORDER) for n in (1, 2, 3)},
    "batch_norm": ("batchnorm", _NORM_ORDER),
}


def trace(model: nn.Module, example: Inputs) -> Graph:
    """Find the layers of a network and what may be rescaled or permuted without changing its function.

    The network is taken in eval mode and run once on two samples of the example; the model is not touched.
    BatchNorm fixes the scale of what enters it: fold it first (`fold_batchnorm`).

    Args:
        model: any module.
        example: a batch of inputs, as tensor, tuple or dictionary.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> graph = trace(net, torch.ones(2, 4))
        >>> graph.n_classes, graph.layer("0").outputs.tolist(), graph.layer("2").inputs.tolist()
        (3, [1, 2, 3], [1, 2, 3])
    """
    network = copy.deepcopy(model).eval()
    for value in network.parameters():
        value.requires_grad_(value.is_floating_point())
    inputs = two_samples(fitting(network, example))
    tracer = _Tracer(network, inputs)
    with untouched_randomness(), precise_math(), torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about gradients, which only this pass asks for
        outputs = run(network, inputs, tracer.follow)
    tracer.finish(outputs)
    return graph_of(tracer.book, list(tracer.layers.values()), tracer.other_uses, tracer.marks, tracer.joins)


def run(model: nn.Module, inputs: Inputs, rule: Any) -> list[Tensor]:
    """Output tensors of a watched forward pass; a failing forward is the user's to see."""
    try:
        raw = replay(model, inputs, rule)
    except FlatscopeError:
        raise
    except Exception as problem:
        raise InputError(
            "a model that runs on the example",
            f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}",
            where=f"example {shape_text(inputs)}",
            fix="Pass inputs of the shape and type that the model is called with",
        ) from problem
    return output_tensors(raw)


def output_tensors(raw: Any) -> list[Tensor]:
    """The tensor that is the network's output, or all of them where there is no single one."""
    try:
        return [output_tensor(raw)]
    except InputError:
        found = list(tensors_in(raw))
        if not found:
            raise
        return found


def fitting(model: nn.Module, example: Inputs) -> Inputs:
    """The example on the model's device and in its floating-point type."""
    first = next((value for value in model.parameters() if value.is_floating_point()), None)
    if first is None:
        raise InputError("a model with parameters", "none", where="model", fix="There is nothing to rescale")
    if isinstance(example, list):
        example = tuple(example)
    if not parts_of(example) or not all(isinstance(part, Tensor) for part in parts_of(example)):
        raise InputError("a tensor, a tuple or a dictionary of tensors", type(example).__name__, where="example")
    return moved(example, first.device, first.dtype)


def two_samples(example: Inputs) -> Inputs:
    """Two samples, so that no operation can mistake the batch axis for one of size 1."""
    if all(part.ndim > 0 and len(part) == 1 for part in parts_of(example)):
        if isinstance(example, dict):
            return {name: torch.cat([value, value]) for name, value in example.items()}
        doubled = tuple(torch.cat([value, value]) for value in parts_of(example))
        return doubled if isinstance(example, tuple) else doubled[0]
    return cut(example, 0, 2)


@dataclass
class _Tracked:
    """A tensor inside the network (kept, so that its identity is not reused), its labels, and where it comes from."""

    tensor: Tensor
    labels: Tensor
    sources: frozenset[str]


@dataclass
class _Tracer:
    """Follows labels through one forward pass."""

    network: nn.Module
    inputs: Inputs
    book: Labels = field(default_factory=Labels)
    layers: dict[str, LayerRecord] = field(default_factory=dict)
    other_uses: dict[str, str] = field(default_factory=dict)
    marks: list[tuple[int, Tensor]] = field(default_factory=list)
    joins: bool = False

    def __post_init__(self) -> None:
        self._tracked: dict[int, _Tracked] = {}
        self._names = {id(value): name for name, value in self.network.named_parameters()}
        self._modules = dict(self.network.named_modules())
        self._place = ""
        for part in parts_of(self.inputs):
            self._track(part, _fixed(part), frozenset({""}))

    def follow(self, op: Operation) -> Any:
        """Run one operation and label its result."""
        result = op.run()
        outcomes = list(tensors_in(result))
        if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in (*op.tensors, *outcomes)):
            return result  # inside vmap or grad; what comes out of them will be found to have no labels
        with torch.no_grad():
            if outcomes or op.name in _LEAVES_TORCH or op.name == "setitem":
                self._place = op.place
                self._label(op, result, outcomes)
        return result

    def finish(self, outputs: list[Tensor]) -> None:
        """The outputs are what must not change."""
        for tensor in outputs:
            self.book.wall(self._labels_of(tensor), "network output")

    def _label(self, op: Operation, result: Any, outcomes: list[Tensor]) -> None:
        step = Step(op, result, self.book, self._labels_of)
        origins = [self._tracked[id(tensor)].sources for tensor in op.tensors if id(tensor) in self._tracked]
        sources = frozenset().union(*origins)
        if op.name in LAYER_CALLS:
            labels, sources = self._layer_call(step, sources)
        else:
            self.joins |= sum(bool(origin) for origin in origins) > 1
            labels = self._rule_labels(step, outcomes)
        for tensor, new in zip(outcomes, list(tensors_in(labels)), strict=True):
            self._track(tensor, new, sources)

    def _rule_labels(self, step: Step, outcomes: list[Tensor]) -> Any:
        """Labels by the operation's rule; a wall where there is none, or none that fits."""
        if not step.op.tensors:
            zeros_stay = step.op.name in ("zeros", "empty", "eye")  # other values may have come from the data
            return [constant_labels(tensor) if zeros_stay else _fixed(tensor) for tensor in outcomes]
        if step.signals and step.op.name in RULES:
            labels = RULES[step.op.name](step)
            found = list(tensors_in(labels))
            if [entry.shape for entry in found] == [tensor.shape for tensor in outcomes]:
                return labels
        for signal in step.signals:
            self.book.wall(self._labels_of(signal), step.op.place)
        return [_fixed(tensor) for tensor in outcomes]

    def _layer_call(self, step: Step, sources: frozenset[str]) -> tuple[Any, frozenset[str]]:
        """A linear map: its input channels are read with one scale each, its output channels start new ones."""
        kind, order = LAYER_CALLS[step.op.name]
        given = step.op.named(*order)
        weight: Any = given.get("weight")
        bias: Any = given.get("bias")
        labels = self._labels_of(given["input"])
        axis = labels.ndim - 1 if kind == "dense" else 1
        if kind in ("conv", "transposed") and labels.ndim == step.result.ndim == weight.ndim - 1:
            axis = 0  # one sample without a batch axis
        others = tuple(dim for dim in range(labels.ndim) if dim != axis)
        if kind == "batchnorm":
            self.book.wall(labels, f"{step.op.place}, not folded")
        channels = self.book.tie_over(labels, others, step.op.place).flatten()
        name = self._names.get(id(weight))
        if name is None or (bias is not None and id(bias) not in self._names):
            return self._constant_map(step, kind, given, channels, axis), sources
        record = self.layers.get(name)
        if record is None:
            n_out = weight.shape[1] * given.get("groups", 1) if kind == "transposed" else weight.shape[0]
            groups = weight.shape[0] if kind == "batchnorm" else int(given.get("groups", 1))
            record = LayerRecord(self._layer_name(name), name, kind, groups, channels, self.book.fresh(n_out))
            self.layers[name] = record
        record.use(self.book, channels, sources, self._names.get(id(bias)), int(given.get("groups", 1)), kind)
        if record.depthwise:  # no scale is shared across it, but its channels change places only together
            self.book.tie(channels, record.outputs, step.op.place, scale=False)
        shape = [1] * step.result.ndim
        shape[axis] = -1
        return step.spread(record.outputs.reshape(shape)), frozenset({record.name})

    def _constant_map(self, step: Step, kind: str, given: dict[str, Any], channels: Tensor, axis: int) -> Any:
        """A linear map whose weight is computed, not learned as it stands: what it mixes shares one scale."""
        weight: Any = given.get("weight")
        bias: Any = given.get("bias")
        if kind == "batchnorm" or (self.book.scale.is_free(self._labels_of(weight)).any()):
            for tensor in step.signals:
                self.book.wall(self._labels_of(tensor), step.op.place)
            return _fixed(step.result)
        groups = int(given.get("groups", 1))
        common = self.book.tie_over(channels.reshape(groups, -1), (1,), step.op.place)  # (groups, 1)
        self.book.pin_units(common, step.op.place)
        outputs = common.repeat_interleave(step.result.shape[axis] // groups, dim=0).flatten()
        if bias is not None:
            outputs = self.book.tie(outputs, self._labels_of(bias), f"bias of {step.op.place}")
        shape = [1] * step.result.ndim
        shape[axis] = -1
        return step.spread(outputs.reshape(shape))

    def _labels_of(self, tensor: Tensor) -> Tensor:
        """Labels of a tensor as an operation receives it."""
        if id(tensor) in self._tracked:
            return self._tracked[id(tensor)].labels
        if id(tensor) in self._names:
            self.other_uses.setdefault(self._names[id(tensor)], self._place)
            return _fixed(tensor)
        if tensor.grad_fn is not None:
            self.book.wall_everything("an operation that cannot be followed (custom autograd function or script)")
            labels = _fixed(tensor)
        else:
            labels = constant_labels(tensor)
        self._track(tensor, labels, frozenset())
        return labels

    def _track(self, tensor: Tensor, labels: Tensor, sources: frozenset[str]) -> None:
        known = self._tracked.get(id(tensor))
        if known is not None and known.labels.shape == labels.shape:
            known.labels.copy_(labels)  # changed in place: views of these labels change with them, as the tensor's do
            known.sources |= sources
        else:
            self._tracked[id(tensor)] = _Tracked(tensor, labels, sources)
        if labels.numel():
            self.marks.append((len(self.marks), torch.bincount(labels.flatten().long())))

    def _layer_name(self, weight: str) -> str:
        """As in the tables: the owning layer module's name, or the parameter's own."""
        owner, _, attribute = weight.rpartition(".")
        layer_types = nn.Linear | nn.modules.conv._ConvNd | nn.modules.batchnorm._BatchNorm
        owns = attribute == "weight" and isinstance(self._modules.get(owner), layer_types)
        return owner if owns and owner else weight


def _fixed(tensor: Tensor) -> Tensor:
    """Labels of a tensor that nothing may rescale."""
    return torch.full(tensor.shape, float(CONSTANT), dtype=torch.float64)
