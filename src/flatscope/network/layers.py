"""The weight matrices of a network, in forward order, found by watching one forward pass.

Every `linear` and `conv*` call that uses a parameter of the model as its weight is seen, whichever module makes
it, so functional code and attention's packed projections count as well as `nn.Linear`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from flatscope.params import Params
from flatscope.problem import Problem
from flatscope.samples import Inputs

DENSE: tuple[Callable[..., Any], ...] = (functional.linear,)
CONVOLUTIONS: tuple[Callable[..., Any], ...] = (torch.conv1d, torch.conv2d, torch.conv3d)
TRANSPOSED: tuple[Callable[..., Any], ...] = (
    torch.conv_transpose1d,
    torch.conv_transpose2d,
    torch.conv_transpose3d,
)
_ATTENTION_PROJECTIONS = (
    ("in_proj_weight", "in_proj_bias"),
    ("q_proj_weight", ""),
    ("k_proj_weight", ""),
    ("v_proj_weight", ""),
    ("out_proj_weight", "out_proj_bias"),
)


@dataclass(frozen=True)
class Layer:
    """One weight matrix: a dense or (transposed) convolutional layer.

    Attributes:
        name: the module's qualified name, or the parameter's where no such module owns it.
        weight: name of the weight parameter.
        bias: name of the bias parameter, if any.
        kind: "dense", "conv" or "transposed".
        uses: how often one forward pass uses it.
        input_shape: shape of its input for one sample.
        output_shape: shape of its output for one sample.
        settings: stride, padding, dilation, groups of a convolution.
    """

    name: str
    weight: str
    bias: str | None
    kind: str
    uses: int
    input_shape: tuple[int, ...]
    output_shape: tuple[int, ...]
    settings: dict[str, Any] = field(default_factory=dict, hash=False)

    @property
    def groups(self) -> int:
        """Groups of a convolution; 1 for a dense layer."""
        return int(self.settings.get("groups", 1))


@dataclass(frozen=True)
class Call:
    """One use of a weight: what the layer received, and where in the autograd graph its output stands.

    The output is kept as a graph edge and not as a tensor: an in-place activation would overwrite the tensor.
    `kind` may also be "batchnorm" (weight and bias are its scale and shift). An opaque call (attention) is known
    by name only: what flows inside it was not seen.
    """

    layer: str
    weight: str
    bias: str | None
    kind: str
    settings: dict[str, Any]
    input: Tensor
    output_shape: tuple[int, ...]
    edge: GradientEdge | None
    opaque: bool = False


@dataclass(frozen=True)
class Network:
    """The layers of a network in forward order, and whether they form a chain."""

    layers: tuple[Layer, ...]
    chain: bool

    def __iter__(self) -> Iterator[Layer]:
        return iter(self.layers)


class LayerRecorder(TorchFunctionMode):
    """Collects every use of a named weight inside a `with` block.

    Args:
        names: parameter name by `id` of the tensor that the network is called with.
        model: to name layers by the module that owns the weight.
        isolate: give every layer its own view of its input, so that gradients with respect to that view are
            what flows through this layer alone and not through a neighbouring residual branch.
    """

    def __init__(self, names: dict[int, str], model: nn.Module, isolate: bool = False) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._names, self._isolate = names, isolate
        self._modules = dict(model.named_modules())

    @property
    def layer_calls(self) -> list[Call]:
        """The calls of weight matrices, without BatchNorm's."""
        return [call for call in self.calls if call.kind != "batchnorm"]

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Pass every call on, keeping those of named weights."""
        kwargs = kwargs or {}
        if func is functional.multi_head_attention_forward:
            return self._attention(func, args, kwargs)
        if func is functional.batch_norm:
            return self._batchnorm(func, args, kwargs)
        kind = "dense" if func in DENSE else "conv" if func in CONVOLUTIONS else "transposed"
        if func not in DENSE + CONVOLUTIONS + TRANSPOSED:
            return func(*args, **kwargs)
        given = _arguments(kind, args, kwargs)
        weight = self._names.get(id(given["weight"]))
        if weight is None:
            return func(*args, **kwargs)
        if self._isolate:
            given["input"] = given["input"].view_as(given["input"])
        output = func(**given)
        settings = {key: value for key, value in given.items() if key not in ("input", "weight", "bias")}
        self._record(weight, given.get("bias"), kind, settings, given["input"], output)
        return output

    def _record(
        self,
        weight: str,
        bias: Tensor | None,
        kind: str,
        settings: dict[str, Any],
        given: Tensor,
        output: Tensor,
        opaque: bool = False,
    ) -> None:
        edge = get_gradient_edge(output) if output.requires_grad else None
        bias_name = self._names.get(id(bias))
        layer, shape = self._layer_name(weight), tuple(output.shape)
        self.calls.append(Call(layer, weight, bias_name, kind, settings, given, shape, edge, opaque))

    def _batchnorm(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A BatchNorm is not a layer, but its scale and shift are parameters with curvature of their own."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        output = func(*args, **kwargs)
        scale = self._names.get(id(given.get("weight")))
        if scale is not None:
            settings = {name: given.get(name) for name in ("running_mean", "running_var", "eps")}
            self._record(scale, given.get("bias"), "batchnorm", settings, given["input"], output)
        return output

    def _attention(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Attention is one opaque call: its projections are known by name, what flows inside is not."""
        given = inspect.signature(func).bind(*args, **kwargs).arguments
        results = func(*args, **kwargs)
        for weight, bias in _ATTENTION_PROJECTIONS:
            if id(given.get(weight)) in self._names:
                name = self._names[id(given[weight])]
                self._record(name, given.get(bias), "dense", {}, given["query"], results[0], opaque=True)
        return results

    def _layer_name(self, weight: str) -> str:
        owner, _, attribute = weight.rpartition(".")
        module = self._modules.get(owner)
        owns = attribute == "weight" and isinstance(module, nn.Linear | nn.modules.conv._ConvNd)
        return owner if owns and owner else weight


def _arguments(kind: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Positional and keyword arguments of linear/conv as one dictionary by name."""
    order = {
        "dense": ("input", "weight", "bias"),
        "conv": ("input", "weight", "bias", "stride", "padding", "dilation", "groups"),
        "transposed": (
            "input",
            "weight",
            "bias",
            "stride",
            "padding",
            "output_padding",
            "groups",
            "dilation",
        ),
    }[kind]
    return dict(zip(order, args, strict=False)) | kwargs


@contextmanager
def recorded(problem: Problem, params: Params, isolate: bool = False) -> Iterator[LayerRecorder]:
    """Record the layer calls of forward passes that use the tensors in `params`."""
    recorder = LayerRecorder({id(value): name for name, value in params.items()}, problem.model, isolate)
    with recorder:
        yield recorder


def find_layers(problem: Problem) -> Network:
    """The network's layers in forward order; every weight once, with the number of its uses."""
    params = {name: value.detach().requires_grad_(value.is_floating_point()) for name, value in problem.params.items()}
    inputs = problem.example()
    if isinstance(inputs, Tensor) and inputs.is_floating_point():
        inputs = inputs.detach().requires_grad_()
    with torch.enable_grad(), recorded(problem, params) as recorder:
        outputs = problem.forward(inputs, params)
    layers: dict[str, Layer] = {}
    for call in recorder.layer_calls:
        uses = layers[call.weight].uses + 1 if call.weight in layers else 1
        layers.setdefault(call.weight, _layer(call))
        if uses > 1:
            layers[call.weight] = Layer(**{**vars(layers[call.weight]), "uses": uses})
    return Network(tuple(layers.values()), _is_chain(outputs, inputs, recorder.layer_calls))


def _layer(call: Call) -> Layer:
    return Layer(
        call.layer,
        call.weight,
        call.bias,
        call.kind,
        1,
        tuple(call.input.shape[1:]),
        call.output_shape[1:],
        call.settings,
    )


def _is_chain(outputs: Tensor, inputs: Inputs, calls: list[Call]) -> bool:
    """Whether no operation joins two tensors that come from layers or the input: no skips, branches, attention."""
    if any(call.opaque for call in calls):
        return False
    layer_nodes = {call.edge.node for call in calls if call.edge is not None}
    after_layer: dict[Any, bool] = {None: False}
    order: list[Any] = []
    stack = [(outputs.grad_fn, False)]
    while stack:  # depth first without recursion: deep networks have thousands of nodes
        node, finished = stack.pop()
        if finished:
            order.append(node)
        elif node is not None and node not in after_layer:
            after_layer[node] = False
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions)
    for node in order:
        sources = [child for child, _ in node.next_functions if after_layer[child]]
        if len(sources) > 1:
            return False
        is_input = getattr(node, "variable", None) is inputs
        after_layer[node] = bool(sources) or node in layer_nodes or is_input
    return len({call.weight for call in calls}) == len(calls)
