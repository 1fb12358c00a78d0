"""A network run with the weights of many: one forward pass for a whole stack of trials.

The module is traced once. Every value has two leading dimensions, trials and samples, in one of two orders: samples
first, so that a grouped convolution reads (samples, trials · channels, ...) without a copy, or trials first, so that a
batched matrix product reads (trials, samples, features). Whatever has no weights and treats every sample by itself runs
as it is, with trials as further samples.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn import functional

Weights = Mapping[str, Tensor]  # every tensor with the trials as leading dimension

CONVOLUTIONS: dict[type[nn.Module], Callable[..., Tensor]] = {
    nn.Conv1d: functional.conv1d,
    nn.Conv2d: functional.conv2d,
    nn.Conv3d: functional.conv3d,
}
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Without weights, and each sample by itself.
PLAIN_MODULES = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Tanh),
    *(nn.Sigmoid, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid, nn.Softsign, nn.Identity, nn.Flatten),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LocalResponseNorm),
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d, nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d),
    *(nn.Upsample, nn.ZeroPad2d, nn.PixelShuffle, nn.Unflatten, nn.Softmax, nn.LogSoftmax),
)
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout)
PLAIN_FUNCTIONS: tuple[Any, ...] = (
    *(operator.add, operator.sub, operator.mul, operator.truediv, operator.neg, operator.iadd, operator.imul),
    *(operator.getitem, operator.floordiv, getattr, torch.add, torch.sub, torch.mul, torch.div, torch.neg),
    *(torch.relu, torch.tanh, torch.sigmoid, torch.flatten, torch.cat, torch.mean, torch.sum, torch.square, torch.abs),
    *(functional.relu, functional.leaky_relu, functional.elu, functional.gelu, functional.silu, functional.softplus),
    *(functional.relu6, functional.selu, functional.hardtanh, functional.tanh, functional.sigmoid, functional.pad),
    *(functional.max_pool1d, functional.max_pool2d, functional.avg_pool1d, functional.avg_pool2d),
    *(functional.adaptive_avg_pool1d, functional.adaptive_avg_pool2d, functional.adaptive_max_pool2d),
    *(functional.softmax, functional.log_softmax, functional.interpolate, torch.softmax, torch.log_softmax),
)
PLAIN_METHODS = (
    *("view", "reshape", "flatten", "size", "contiguous", "mean", "sum", "relu", "tanh", "sigmoid", "square", "abs"),
    *("add", "sub", "mul", "div", "squeeze", "unsqueeze", "permute", "transpose", "relu_", "add_", "mul_", "softmax"),
)


class NotStackable(Exception):  # noqa: N818  a reason to train one by one, not a fault
    """This network cannot be run as one of a stack; the message says why."""


@dataclass
class _Value:
    """A tensor with the samples of all trials in its first dimension, trials or samples varying fastest."""

    folded: Tensor  # (trials · samples, ...)
    trials_first: bool


class StackedNetwork:
    """The network of a module without its weights, which are given stacked at each call.

    Args:
        model: any module, of which only the structure matters; it must not be changed later.

    Raises:
        NotStackable: a layer or a function is not among those that are known to work on stacks.
    """

    def __init__(self, model: nn.Module) -> None:
        was_training = model.training
        whole = nn.Sequential(model)  # a single layer of torch would be looked into, not called
        try:
            traced = [fx.symbolic_trace(whole.train(mode)).graph for mode in (False, True)]
        except Exception as problem:  # tracing runs the user's code on stand-ins, which can fail in any way
            reason = (str(problem).splitlines() or [""])[0]
            raise NotStackable(f"it cannot be traced ({type(problem).__name__}: {reason})") from None
        finally:
            model.train(was_training)
        texts = [str(graph) for graph in traced]
        if texts[0] != texts[1]:
            raise NotStackable("its forward pass does other things in training than in eval mode")
        self._modules = dict(whole.named_modules())
        self._names = {id(t): name for name, t in [*model.named_buffers(), *model.named_parameters()]}
        self._nodes = list(traced[1].nodes)
        used = [self._modules[node.target] for node in self._nodes if node.op == "call_module"]
        for node in self._nodes:
            self._check(node)
        self.used = {self._names[id(p)] for module in used for p in module.parameters(recurse=False)}
        self.has_convolutions = any(type(module) in CONVOLUTIONS for module in used)
        placeholder = next(node for node in self._nodes if node.op == "placeholder")
        self.trials_first = not any(self._wants_samples_first(user) for user in placeholder.users)
        settings = [f"{node.target} {self._modules[node.target]!r}" for node in self._nodes if node.op == "call_module"]
        self.signature = "\n".join([texts[0], *settings])
        self._last_use: dict[fx.Node, list[fx.Node]] = {}
        seen: set[fx.Node] = set()
        for node in reversed(self._nodes):
            self._last_use[node] = [source for source in node.all_input_nodes if source not in seen]
            seen.update(node.all_input_nodes)

    def __call__(self, weights: Weights, inputs: Tensor, *, training: bool = False) -> Tensor:
        """Outputs (trials, samples, ...) of every trial on its own samples.

        Args:
            weights: parameters and buffers by name, stacked; running statistics are updated in place in training.
            inputs: (trials, samples, ...) if `self.trials_first`, else (samples, trials, ...).
            training: BatchNorm with the statistics of the batch.
        """
        trials = inputs.shape[0 if self.trials_first else 1]
        values: dict[fx.Node, Any] = {}
        for node in self._nodes:
            if node.op == "placeholder":
                values[node] = _Value(inputs.flatten(0, 1), self.trials_first)
            elif node.op == "output":
                return _split(_ordered(values[node.args[0]], True, trials), True, trials)
            elif node.op == "call_module":
                values[node] = self._module(node, values[node.args[0]], weights, trials, training)
            else:
                values[node] = _plain_call(node, values, trials)
            for done in self._last_use.get(node, ()):
                del values[done]
        raise NotStackable("it has no output")

    def _module(self, node: fx.Node, value: _Value, weights: Weights, trials: int, training: bool) -> _Value:
        module: Any = self._modules[str(node.target)]

        def own(name: str) -> Tensor | None:
            tensor = getattr(module, name)
            return None if tensor is None else weights[self._names[id(tensor)]]

        if isinstance(module, nn.Linear):
            return _linear(value, own("weight"), own("bias"), trials)
        if type(module) in CONVOLUTIONS:
            joined = _joined(value, trials)  # (b, t·c, ...)
            settings = (module.stride, module.padding, module.dilation, trials * module.groups)
            result = CONVOLUTIONS[type(module)](joined, _merged(own("weight")), _merged(own("bias")), *settings)
            return _Value(result.reshape(len(result) * trials, -1, *result.shape[2:]), False)
        if isinstance(module, BATCH_NORMS):
            mean, variance = own("running_mean"), own("running_var")
            result = functional.batch_norm(
                _joined(value, trials),
                _merged(mean),
                _merged(variance),
                _merged(own("weight")),
                _merged(own("bias")),
                training or mean is None,
                module.momentum or 0.0,
                module.eps,
            )
            return _Value(result.reshape(len(result) * trials, -1, *result.shape[2:]), False)
        if isinstance(module, nn.LayerNorm):
            normal = functional.layer_norm(value.folded, module.normalized_shape, None, None, module.eps)
            return _affine(_Value(normal, value.trials_first), own("weight"), own("bias"), trials, -1)
        if isinstance(module, nn.GroupNorm):
            normal = functional.group_norm(value.folded, module.num_groups, None, None, module.eps)
            return _affine(_Value(normal, value.trials_first), own("weight"), own("bias"), trials, 2)
        return _Value(module(value.folded), value.trials_first)

    def _wants_samples_first(self, node: fx.Node) -> bool:
        if node.op != "call_module":
            return False
        module = self._modules[node.target]
        return type(module) in CONVOLUTIONS or isinstance(module, BATCH_NORMS)

    def _check(self, node: fx.Node) -> None:
        """Refuse what is not known to keep trials and samples apart."""
        if node.op == "placeholder" and len([n for n in self._nodes if n.op == "placeholder"]) > 1:
            raise NotStackable("it takes several inputs")
        if node.op == "get_attr":
            raise NotStackable(f"it uses the tensor {node.target} outside of a layer")
        if node.op == "output" and not isinstance(node.args[0], fx.Node):
            raise NotStackable("its output is not one tensor")
        if node.op == "call_function" and node.target not in PLAIN_FUNCTIONS:
            raise NotStackable(f"the function {getattr(node.target, '__name__', node.target)} is not known to stack")
        if node.op == "call_method" and node.target not in PLAIN_METHODS:
            raise NotStackable(f"the method {node.target} is not known to stack")
        if node.op == "call_module":
            if len(node.args) != 1 or node.kwargs:
                raise NotStackable(f"the layer {node.target} takes more than one input")
            self._check_module(str(node.target), self._modules[str(node.target)])

    def _check_module(self, name: str, module: Any) -> None:
        kind = type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks:
            raise NotStackable(f"the layer {name} has hooks")
        if type(module) in DROPOUTS:
            if module.p > 0:
                raise NotStackable(f"{name} ({kind}) draws masks, which a stack cannot draw as single networks do")
        elif type(module) in CONVOLUTIONS:
            if module.padding_mode != "zeros":
                raise NotStackable(f"{name} pads by {module.padding_mode}")
        elif type(module) in BATCH_NORMS:
            if module.momentum is None:
                raise NotStackable(f"{name} averages its statistics over all batches (momentum=None)")
        elif type(module) in (nn.Linear, nn.LayerNorm, nn.GroupNorm):
            pass
        elif type(module) not in PLAIN_MODULES or getattr(module, "return_indices", False):
            raise NotStackable(f"{name} ({kind}) is not known to stack")


def _split(folded: Tensor, trials_first: bool, trials: int) -> Tensor:
    """(trials, samples, ...) or (samples, trials, ...)."""
    return folded.reshape(*((trials, -1) if trials_first else (-1, trials)), *folded.shape[1:])


def _ordered(value: _Value, trials_first: bool, trials: int) -> Tensor:
    """Folded with the trials in the wanted order."""
    if value.trials_first == trials_first:
        return value.folded
    return _split(value.folded, value.trials_first, trials).transpose(0, 1).flatten(0, 1)


def _joined(value: _Value, trials: int) -> Tensor:
    """(samples, trials · channels, ...), as grouped layers read it."""
    return _split(_ordered(value, False, trials), False, trials).flatten(1, 2)


def _merged(tensor: Tensor | None) -> Tensor | None:
    """Trials and first dimension as one; a view, so that running statistics can be updated through it."""
    return None if tensor is None else tensor.view(-1, *tensor.shape[2:])


def _linear(value: _Value, weight: Tensor | None, bias: Tensor | None, trials: int) -> _Value:
    assert weight is not None  # every Linear has one
    rows = _ordered(value, True, trials)
    flat = rows.reshape(trials, -1, rows.shape[-1])  # (t, samples and positions, in)
    across = weight.transpose(1, 2)
    result = torch.bmm(flat, across) if bias is None else torch.baddbmm(bias[:, None], flat, across)
    return _Value(result.reshape(*rows.shape[:-1], -1), True)


def _affine(value: _Value, scale: Tensor | None, shift: Tensor | None, trials: int, channel: int) -> _Value:
    """Times a weight and plus a bias of every trial: over the last dimensions (-1) or over channels (2)."""
    values = _split(value.folded, value.trials_first, trials)

    def placed(tensor: Tensor) -> Tensor:
        filled = values.ndim - tensor.ndim - 1
        shape = (1,) * filled + tensor.shape[1:] if channel == -1 else tensor.shape[1:] + (1,) * filled
        return tensor.reshape(*((trials, 1) if value.trials_first else (1, trials)), *shape)

    values = values if scale is None else values * placed(scale)
    values = values if shift is None else values + placed(shift)
    return _Value(values.flatten(0, 1), value.trials_first)


def _plain_call(node: fx.Node, values: Mapping[fx.Node, Any], trials: int) -> Any:
    """A function or method without weights; operands are brought to one order of trials and samples."""
    operands = [values[source] for source in node.all_input_nodes]
    trials_first = next((value.trials_first for value in operands if isinstance(value, _Value)), True)

    def given(source: fx.Node) -> Any:
        value = values[source]
        return _ordered(value, trials_first, trials) if isinstance(value, _Value) else value

    args, kwargs = fx.map_arg(node.args, given), fx.map_arg(node.kwargs, given)
    if node.op == "call_method":
        result = getattr(args[0], str(node.target))(*args[1:], **kwargs)
    else:
        assert callable(node.target)
        result = node.target(*args, **kwargs)
    return _Value(result, trials_first) if isinstance(result, Tensor) else result
