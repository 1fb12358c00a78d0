"""Tracing: one forward pass over two samples, in which labels follow every entry from layer to layer."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.isolation import own_settings
from flatscope.network.interception import WEIGHT_CALLS, Operation, fitting, replayed_outputs, tensors_in, two_samples
from flatscope.network.layer_uses import Roles
from flatscope.network.layers import layer_name
from flatscope.network.linearity import CHOOSING
from flatscope.network.normal_form_pass import Weights
from flatscope.network.not_covered import NotCovered
from flatscope.network.operations import LEAVES_TORCH, TABLE
from flatscope.network.products import AFFINE_NORMS
from flatscope.network.scales import ScaleStep, constant_labels
from flatscope.network.tied_labels import CONSTANT, Labels
from flatscope.network.units import Graph, LayerRecord, graph_of
from flatscope.params import independent_module_copy
from flatscope.samples import Inputs, copied_inputs, tensors_of_inputs


def trace(
    model: nn.Module,
    example: Inputs,
    inner: bool = False,
    frozen: Collection[str] = (),
    idle: Collection[str] = frozenset(),
) -> Graph:
    """Find the layers of a network and what may be rescaled or permuted without changing its function.

    The network is taken in eval mode and run once on two samples of the example; the model is not touched. Where these
    decide what is computed and miss some parameters, it is run on all samples of the example.
    BatchNorm fixes the scale of what enters it: fold it first (`fold_batchnorm`).

    Args:
        model: any module.
        example: a batch of inputs, as tensor, tuple or dictionary.
        inner: whether to follow symmetries that no path through the network has: queries against keys, and those of
            the scales of normalisations. Classes may then be negative: the inverse of that scale.
        frozen: names of parameters that nothing may rescale, and with them the units that they write and read.
        idle: names of parameters that no sample needs.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.ReLU(), torch.nn.Linear(3, 2))
        >>> graph = trace(net, torch.ones(2, 4))
        >>> graph.n_classes, graph.layer("0").outputs.tolist(), graph.layer("2").inputs.tolist()
        (3, [1, 2, 3], [1, 2, 3])
    """
    network = independent_module_copy(model).eval()
    for value in network.parameters():
        value.requires_grad_(value.is_floating_point())
    whole = fitting(network, example)
    tracer = _traced_pass(network, two_samples(whole), inner)
    if tracer.unmet().difference(idle):
        tracer = _traced_pass(network, whole, inner)
        if unmet := sorted(tracer.unmet().difference(idle)):
            tracer.book.wall_everything(f"samples take different ways, those that were traced none past {unmet[0]}")
    return graph_of(tracer.book, list(tracer.layers.values()), tracer.other_uses, tracer.marks, tracer.joins, frozen)


def _traced_pass(network: nn.Module, inputs: Inputs, inner: bool) -> _Tracer:
    tracer = _Tracer(network, copied_inputs(inputs), Labels(inner))
    with own_settings():
        outputs = replayed_outputs(network, tracer.inputs, tracer.follow)
    tracer.finish(outputs)
    return tracer


@dataclass
class _Tracked:
    """The labels of a tensor inside the network, and where it comes from."""

    labels: Tensor
    sources: frozenset[str]


@dataclass
class _Tracer:
    """Follows labels through one forward pass."""

    network: nn.Module
    inputs: Inputs
    book: Labels
    layers: dict[str, LayerRecord] = field(default_factory=dict)
    other_uses: NotCovered = field(default_factory=NotCovered)
    marks: list[tuple[int, Tensor]] = field(default_factory=list)
    joins: bool = False
    ways_differ: bool = False  # whether values of the samples decide what is computed

    def __post_init__(self) -> None:
        self._tracked: dict[Tensor, _Tracked] = {}
        self._weights = Weights(self.network)
        self._roles = Roles(dict(self.network.named_parameters()))
        self._modules = dict(self.network.named_modules())
        self._place = ""
        for part in tensors_of_inputs(self.inputs):
            self._track(part, _fixed(part), frozenset({""}))

    def follow(self, op: Operation) -> Any:
        """Run one operation and label its result."""
        result = op.run()
        outcomes = list(tensors_in(result))
        if any(torch._C._functorch.is_functorch_wrapped_tensor(tensor) for tensor in (*op.tensors, *outcomes)):
            for tensor in op.tensors:  # inside vmap or grad; what comes out of them will be found to have no labels
                for name in getattr(self._weights.source(tensor), "params", ()):
                    self.other_uses.note(name, f"{op.place} inside torch.func")
            return result
        with torch.no_grad():
            self._weights.note(op, result)
            if self._is_about_weights(op):
                return result
            if outcomes or op.name in LEAVES_TORCH or op.name == "setitem":
                self._place = op.place
                self._label(op, result, outcomes)
        return result

    def _is_about_weights(self, op: Operation) -> bool:
        """True where no signal enters: a computed weight counts only where it meets one."""
        return any(self._weights.is_weight(tensor) for tensor in op.tensors) and all(
            self._weights.source(tensor) is not None for tensor in op.tensors
        )

    def _is_from_data(self, tensor: Tensor) -> bool:
        """True for an input, and for what is made of some."""
        return tensor in self._tracked and bool(self._tracked[tensor].sources)

    def unmet(self) -> set[str]:
        """Parameters that no operation has read, where samples decide what is computed: others may need them."""
        if not self.ways_differ:
            return set()
        used = {name for record in self.layers.values() for name in (record.weight, *record.biases)}
        return {name for name, _ in self.network.named_parameters()} - used - self.other_uses.keys()

    def finish(self, outputs: list[Tensor]) -> None:
        """The outputs are what must not change."""
        for tensor in outputs:
            self.book.wall(self._labels_of(tensor), "network output")

    def _label(self, op: Operation, result: Any, outcomes: list[Tensor]) -> None:
        step = ScaleStep(op, result, self.book, self._labels_of, self._is_from_data)
        self.ways_differ |= op.name in CHOOSING and step.data_decides(op.tensors)
        origins = [self._tracked[tensor].sources for tensor in op.tensors if tensor in self._tracked]
        sources = frozenset().union(*origins)
        if op.name in WEIGHT_CALLS:
            labels, sources = self._layer_call(step, sources)
        else:
            self.joins |= sum(bool(origin) for origin in origins) > 1
            labels = self._added_bias(step) if op.name == "add" else None
            labels = self._norm(step) if labels is None and self.book.inner else labels
            labels = self._rule_labels(step, outcomes) if labels is None else labels
        for tensor, new in zip(outcomes, list(tensors_in(labels)), strict=True):
            self._track(tensor, new, sources)

    def _rule_labels(self, step: ScaleStep, outcomes: list[Tensor]) -> Any:
        """Labels by the operation's rule; a wall where there is none, or none that fits."""
        if not step.op.tensors:
            zeros_stay = step.op.name in ("zeros", "empty", "eye")  # other values may have come from the data
            return [constant_labels(tensor) if zeros_stay else _fixed(tensor) for tensor in outcomes]
        meaning = TABLE.get(step.op.name)
        if meaning is None or not (meaning.identity or meaning.moves):  # which may take no more than a shape from it
            for tensor in filter(self._weights.is_weight, step.op.tensors):
                self._labels_of(tensor)  # a use of the parameters, also where no rule asks what it does
        if step.signals and meaning is not None and meaning.scale is not None:
            labels = meaning.scale(step)
            found = list(tensors_in(labels))
            if [entry.shape for entry in found] == [tensor.shape for tensor in outcomes]:
                return labels
        for signal in step.signals:
            self.book.wall(self._labels_of(signal), step.op.place)
        return [_fixed(tensor) for tensor in outcomes]

    def _layer_call(self, step: ScaleStep, sources: frozenset[str]) -> tuple[Any, frozenset[str]]:
        """A linear map: its input channels are read with one scale each, its output channels start new ones."""
        kind, order = WEIGHT_CALLS[step.op.name]
        given = step.op.named(*order)
        weight: Any = given.get("weight")
        bias: Any = given.get("bias")
        if kind == "lookup":
            return self._lookup(step, weight, sources)
        labels = self._labels_of(given["input"])
        axis = labels.ndim - 1 if kind == "dense" else 1
        if kind in ("conv", "transposed") and labels.ndim == step.result.ndim == weight.ndim - 1:
            axis = 0  # one sample without a batch axis
        others = tuple(dim for dim in range(labels.ndim) if dim != axis)
        if kind == "batchnorm":
            self.book.wall(labels, f"{step.op.place}, not folded")
        channels = self.book.tie_over(labels, others, step.op.place).flatten()
        name, bias_name = self._roles.name_of(weight), self._roles.name_of(bias)
        if name is None or (bias is not None and bias_name is None):
            return self._constant_map(step, kind, given, channels, axis), sources
        groups = weight.shape[0] if kind == "batchnorm" else int(given.get("groups", 1))
        n_out = weight.shape[1] * groups if kind == "transposed" else weight.shape[0]
        record = self._record(name, kind, groups, channels, n_out)
        record.use(self.book, channels, sources, bias_name, groups, kind)
        if record.kind != kind:  # used in two ways: everything about it is fixed
            return _fixed(step.result), frozenset({record.name})
        if record.depthwise:  # no scale is shared across it, but its channels change places only together
            self.book.tie(channels, record.outputs, step.op.place, scale=False)
        return _along(step, record.outputs, axis), frozenset({record.name})

    def _record(self, name: str, kind: str, groups: int, inputs: Tensor, n_out: int) -> LayerRecord:
        """The layer of a weight; a new one where it was not met before."""
        if name not in self.layers:
            made = LayerRecord(layer_name(name, self._modules), name, kind, groups, inputs, self.book.fresh(n_out))
            self.layers[name] = made
        return self.layers[name]

    def _added_bias(self, step: ScaleStep) -> Tensor | None:
        """A parameter added to what a layer gives, one number per unit, is a bias in other words."""
        found = self._by_unit(step)
        if found is None or step.op.kwargs.get("alpha", 1) != 1:
            return None
        name, place, labels = found
        for record in self.layers.values():
            if len(record.outputs) == int(place.max()) + 1 and torch.equal(record.outputs[place], labels):
                if name not in record.biases:
                    record.biases.append(name)
                return labels
        return None

    def _by_unit(self, step: ScaleStep) -> tuple[str, Tensor, Tensor] | None:
        """A whole vector of parameters that meets a signal: its name, and its entry and the label at every place."""
        vectors = [tensor for tensor in step.op.tensors if self._weights.is_weight(tensor)]
        signals = [tensor for tensor in step.op.tensors if tensor in self._tracked]
        if len(vectors) != 1 or len(signals) != 1:
            return None
        source = self._weights.source(vectors[0])
        whole = None if source is None or source.view is None else self._weights.named[source.view]
        if source is None or whole is None or whole.ndim != 1 or whole.numel() != vectors[0].numel():
            return None
        place = torch.arange(whole.numel()).reshape(vectors[0].shape).expand(step.result.shape)
        return str(source.view), place, step.spread(self._labels_of(signals[0]))

    def _norm(self, step: ScaleStep) -> Tensor | None:
        """Labels after the scale of a normalisation: inputs are fixed, channels start new classes."""
        if step.op.name in AFFINE_NORMS:
            given = step.op.named(*AFFINE_NORMS[step.op.name])
            scale, shift = (self._roles.name_of(given.get(name)) for name in ("weight", "bias"))
            if scale is None or (shift is None) != (given.get("bias") is None):
                return None
            labels = self._labels_of(given["input"])
            place = torch.arange(given["weight"].numel()).reshape(given["weight"].shape).expand(step.result.shape)
        elif step.op.name == "mul" and (found := self._by_unit(step)) is not None:
            (scale, place, labels), shift = found, None
            if self.book.scale.is_free(labels).any():
                return None
        else:
            return None
        self.book.wall(labels, step.op.place)
        n = self._weights.named[scale].numel()
        record = self._record(scale, "norm", n, _fixed_labels(n), n)
        record.use(self.book, record.inputs, (), shift, record.groups, "norm")
        return record.outputs[place].clone() if record.kind == "norm" else _fixed(step.result)

    def _lookup(self, step: ScaleStep, weight: Tensor, sources: frozenset[str]) -> tuple[Any, frozenset[str]]:
        """Rows of a table: what is looked up is fixed, its columns start scales of their own."""
        name = self._roles.name_of(weight)
        if name is None or step.op.named("input", "weight", "padding_idx", "max_norm").get("max_norm"):
            return _fixed(step.result), sources
        rows = _fixed_labels(weight.shape[0])
        record = self._record(name, "lookup", 1, rows, weight.shape[1])
        record.use(self.book, rows, sources, None, 1, "lookup")
        if record.kind != "lookup":
            return _fixed(step.result), frozenset({record.name})
        return step.spread(record.outputs), frozenset({record.name})

    def _constant_map(self, step: ScaleStep, kind: str, given: dict[str, Any], channels: Tensor, axis: int) -> Any:
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
        return _along(step, outputs, axis)

    def _labels_of(self, tensor: Tensor) -> Tensor:
        """Labels of a tensor as an operation receives it."""
        if tensor in self._tracked:
            return self._tracked[tensor].labels
        source = self._weights.source(tensor)
        if source is not None and source.params:
            for name in source.params:
                self.other_uses.note(name, self._place)
            return _fixed(tensor)
        if tensor.grad_fn is not None:
            self.book.wall_everything("an operation that cannot be followed (custom autograd function or script)")
            labels = _fixed(tensor)
        else:
            labels = constant_labels(tensor)
        self._track(tensor, labels, frozenset())
        return labels

    def _track(self, tensor: Tensor, labels: Tensor, sources: frozenset[str]) -> None:
        known = self._tracked.get(tensor)
        if known is not None and known.labels.shape == labels.shape:
            if not torch.equal(known.labels, labels):
                known.labels.copy_(labels)  # changed in place: views of these labels change with them, as the tensor's
            known.sources |= sources
        else:
            self._tracked[tensor] = _Tracked(labels, sources)
        if labels.numel():
            self.marks.append((len(self.marks), torch.bincount(labels.flatten().long())))


def _fixed(tensor: Tensor) -> Tensor:
    """Labels of a tensor that nothing may rescale."""
    return _fixed_labels(*tensor.shape)


def _fixed_labels(*shape: int) -> Tensor:
    return torch.full(shape, float(CONSTANT), dtype=torch.float64)


def _along(step: ScaleStep, labels: Tensor, axis: int) -> Tensor:
    """Labels of units, spread over the other axes of the result."""
    shape = [1] * step.result.ndim
    shape[axis] = -1
    return step.spread(labels.reshape(shape))
