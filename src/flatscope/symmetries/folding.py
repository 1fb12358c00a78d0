"""BatchNorm folding: the same function written without BatchNorm.

In eval mode a BatchNorm is a scale a and a shift s per channel. It disappears into the layer in front of it, or
into the layers behind it where that is exact (a shift in front of zero padding is not). What no layer can absorb
becomes a layer of its own: a depthwise 1×1 convolution.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.errors import InputError
from flatscope.guards import precise_math, untouched_randomness
from flatscope.inspection import replica
from flatscope.network.operation import Operation, tensors_in
from flatscope.network.sameness import refuse_if_different
from flatscope.network.tracing import LAYER_CALLS, fitting, run, two_samples
from flatscope.network.units import entry_channels
from flatscope.samples import Inputs

BatchNorm = nn.modules.batchnorm._BatchNorm
Convolution = nn.modules.conv._ConvNd
_PASSED_THROUGH = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout")


class ChannelAffine(nn.Conv1d):
    """A scale and a shift per feature of a batch of vectors (n, channels), as a depthwise convolution."""

    def forward(self, input: Tensor) -> Tensor:
        """Treat the vector as a signal of length 1."""
        return super().forward(input.unsqueeze(-1)).squeeze(-1)


@precise_math()
def fold_batchnorm(model: nn.Module, example: Inputs) -> nn.Module:
    """The same function without BatchNorm: a new module in eval mode, the given one untouched.

    Layers keep their names. A folded BatchNorm leaves an `nn.Identity` behind; one that no layer can absorb (in
    front of an activation, or with a shift in front of zero padding) leaves a depthwise 1×1 convolution.

    Args:
        model: any module whose BatchNorms are modules with running statistics.
        example: a batch of inputs, to see what feeds what.

    Example:
        >>> import torch
        >>> net = torch.nn.Sequential(torch.nn.Conv2d(3, 4, 3, bias=False), torch.nn.BatchNorm2d(4)).eval()
        >>> fold_batchnorm(net, torch.ones(2, 3, 8, 8))
        Sequential(
          (0): Conv2d(3, 4, kernel_size=(3, 3), stride=(1, 1))
          (1): Identity()
        )
    """
    folded = replica(model).eval()
    _refuse_batch_statistics(folded)
    if not has_batchnorm(folded):
        return folded
    inputs = two_samples(fitting(folded, example))
    with untouched_randomness(), torch.no_grad():
        while has_batchnorm(folded):
            folded = _fold_some(folded, _watch(folded, inputs))
    refuse_if_different(replica(model).eval(), folded, example, "fold_batchnorm")
    return folded


def has_batchnorm(model: nn.Module) -> bool:
    """Whether any module is a BatchNorm."""
    return any(isinstance(module, BatchNorm) for module in model.modules())


@dataclass
class _Uses:
    """Who made and who reads each tensor of one forward pass, by the tensors' identity."""

    made_by: dict[int, Operation] = field(default_factory=dict)
    read_by: dict[int, list[Operation | None]] = field(default_factory=lambda: defaultdict(list))
    calls: dict[str, list[Operation]] = field(default_factory=lambda: defaultdict(list))
    kept: list[Any] = field(default_factory=list)  # so that identities are not reused
    same: dict[int, int] = field(default_factory=dict)

    def identity(self, tensor: Tensor) -> int:
        """One number for a tensor and what switched-off dropout makes of it."""
        return self.same.get(id(tensor), id(tensor))

    def follow(self, op: Operation) -> Any:
        """Run one operation and note what it read and made."""
        result = op.run()
        outcomes = list(tensors_in(result))
        self.kept.extend((op.tensors, outcomes))
        if op.name in _PASSED_THROUGH and len(op.tensors) == len(outcomes) == 1:
            self.same[id(outcomes[0])] = self.identity(op.tensors[0])
            return result
        if outcomes or op.name == "setitem":
            for tensor in op.tensors:
                self.read_by[self.identity(tensor)].append(op)
            for tensor in outcomes:
                self.made_by[id(tensor)] = op
        if op.name in LAYER_CALLS:
            self.calls[op.module].append(op)
        return result

    def only_call(self, name: str) -> Operation | None:
        """The one call made by a layer module in a forward pass; None if there are more or none."""
        calls = self.calls.get(name, [])
        return calls[0] if len(calls) == 1 else None


def _watch(model: nn.Module, inputs: Inputs) -> _Uses:
    uses = _Uses()
    for output in run(model, inputs, uses.follow):
        uses.read_by[uses.identity(output)].append(None)
    modules = dict(model.named_modules())
    for name, calls in uses.calls.items():
        plain = getattr(type(modules.get(name)), "forward", None) in (BatchNorm.forward, nn.SyncBatchNorm.forward)
        if not plain and any(call.name == "batch_norm" for call in calls):
            raise InputError(
                "BatchNorm as a module of its own (torch.nn.BatchNorm1d, 2d or 3d)",
                f"batch_norm called inside {type(modules.get(name)).__name__}",
                where=f"module {name}" if name else "model",
                fix="Take BatchNorm and what follows it apart",
            )
    return uses


def _fold_some(model: nn.Module, uses: _Uses) -> nn.Module:
    """One round: into the layers in front if any allows it, else into those behind, else as layers of their own."""
    norms = [(name, module) for name, module in model.named_modules() if isinstance(module, BatchNorm)]
    for fold in (_fold_backward, _fold_forward):
        done = [norm for name, norm in norms if fold(model, name, norm, uses)]
        if done:
            for norm in done:
                model = _replaced(model, norm, nn.Identity())
            return model
    for name, norm in norms:
        calls = uses.calls.get(name, [])
        n_axes = calls[0].args[0].ndim if calls else 2 + _spatial_axes(norm)
        model = _replaced(model, norm, _affine_layer(norm, n_axes))
    return model


def _fold_backward(model: nn.Module, name: str, norm: BatchNorm, uses: _Uses) -> bool:
    """Scale and shift of W x + b go into the layer whose output this BatchNorm alone reads."""
    call = uses.only_call(name)
    if call is None:
        return False
    entering = call.args[0]
    origin = uses.identity(entering)
    maker = uses.made_by.get(origin)
    if maker is None or len(uses.read_by[origin]) != 1:
        return False
    layer = _own_layer(model, maker, uses)
    if layer is None or entering.ndim != (2 if isinstance(layer, nn.Linear) else layer.weight.ndim):
        return False
    scale, shift = _scale_and_shift(norm)
    weight, bias = layer.weight.double(), _bias(layer)
    outputs, _ = _channels(layer)
    _assign(layer, weight * scale[outputs.to(weight.device)], bias * scale + shift, norm)
    return True


def _fold_forward(model: nn.Module, name: str, norm: BatchNorm, uses: _Uses) -> bool:
    """W (a x + s) + b: into the layers behind, if nothing else reads this BatchNorm and no zeros are padded."""
    call = uses.only_call(name)
    if call is None:
        return False
    result = next((made for made, op in uses.made_by.items() if op is call), None)
    readers = uses.read_by.get(result, []) if result is not None else []
    layers = [None if reader is None else _own_layer(model, reader, uses) for reader in readers]
    scale, shift = _scale_and_shift(norm)
    for layer, reader in zip(layers, readers, strict=True):
        if layer is None or reader is None or uses.identity(reader.args[0]) != result:
            return False
        if call.args[0].ndim != (2 if isinstance(layer, nn.Linear) else layer.weight.ndim):
            return False
        if isinstance(layer, Convolution) and bool((shift != 0).any()) and not _sees_no_padding(layer):
            return False
    for layer in layers:
        assert layer is not None
        outputs, inputs = (index.to(layer.weight.device) for index in _channels(layer))
        weight = layer.weight.double()
        shifted = (weight * shift[inputs]).expand(weight.shape)
        index = outputs.expand(weight.shape).flatten()
        bias = _bias(layer).index_add(0, index, shifted.flatten())
        _assign(layer, weight * scale[inputs], bias, norm, new_bias=bool((shift != 0).any()))
    return bool(layers)


def _sees_no_padding(layer: nn.Module) -> bool:
    padding: Any = getattr(layer, "padding", ())
    none = padding == "valid" or (not isinstance(padding, str) and not any(padding))
    return none and not getattr(layer, "transposed", False)


def _own_layer(model: nn.Module, op: Operation, uses: _Uses) -> nn.Linear | Convolution | None:
    """The layer module that makes this call with its own plain weight, which nothing else uses."""
    if op.name not in LAYER_CALLS or op.name == "batch_norm" or uses.only_call(op.module) is not op:
        return None
    layer = model.get_submodule(op.module)
    if not isinstance(layer, nn.Linear | Convolution):
        return None
    given = op.named(*LAYER_CALLS[op.name][1])
    for name in ("weight", "bias"):
        value = layer._parameters.get(name)
        if value is not given.get(name) or (value is not None and len(uses.read_by[id(value)]) != 1):
            return None
    return layer


def _scale_and_shift(norm: BatchNorm) -> tuple[Tensor, Tensor]:
    """The affine map that a BatchNorm is in eval mode, in double precision."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    mean, variance = norm.running_mean.double(), norm.running_var.double()
    scale = (variance + norm.eps).rsqrt()
    if norm.weight is not None:
        scale = scale * norm.weight.double()
    shift = -mean * scale
    return scale, shift if norm.bias is None else shift + norm.bias.double()


def _channels(layer: nn.Linear | Convolution) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Linear):
        return entry_channels("dense", 1, layer.weight.shape)
    return entry_channels("transposed" if layer.transposed else "conv", layer.groups, layer.weight.shape)


def _bias(layer: nn.Linear | Convolution) -> Tensor:
    if layer.bias is not None:
        return layer.bias.double()
    n_out = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return torch.zeros(n_out, dtype=torch.float64, device=layer.weight.device)


def _assign(
    layer: nn.Linear | Convolution, weight: Tensor, bias: Tensor, norm: BatchNorm, new_bias: bool = True
) -> None:
    """New values for a layer; trainable if the layer or the BatchNorm was."""
    trainable = any(value.requires_grad for value in (*layer.parameters(), *norm.parameters()))
    dtype = layer.weight.dtype
    layer.weight = nn.Parameter(weight.to(dtype), requires_grad=trainable)
    if layer.bias is not None or new_bias:
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=trainable)


def _affine_layer(norm: BatchNorm, n_axes: int) -> nn.Module:
    """Depthwise 1×1 convolution with the scale and shift of a BatchNorm whose input has `n_axes` axes."""
    scale, shift = _scale_and_shift(norm)
    kinds: dict[int, type[Convolution]] = {2: ChannelAffine, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    reference = norm.weight if norm.weight is not None else norm.running_mean
    assert reference is not None
    n = norm.num_features
    layer = kinds[n_axes](n, n, 1, groups=n, device="meta")  # type: ignore[call-arg, arg-type]
    trainable = all(value.requires_grad for value in norm.parameters())
    weight = scale.reshape(n, 1, *[1] * max(n_axes - 2, 1)).to(reference.dtype)
    layer.weight = nn.Parameter(weight, requires_grad=trainable)
    layer.bias = nn.Parameter(shift.to(reference.dtype), requires_grad=trainable)
    return layer.eval()


def _spatial_axes(norm: BatchNorm) -> int:
    """Axes behind the channels for a BatchNorm that the example does not reach."""
    return {"BatchNorm2d": 2, "BatchNorm3d": 3}.get(type(norm).__name__, 0)


def _replaced(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` wherever `old` is registered."""
    if model is old:
        return new
    for parent in model.modules():
        for key, child in parent._modules.items():
            if child is old:
                parent._modules[key] = new
    return model


def _refuse_batch_statistics(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if isinstance(module, BatchNorm) and module.running_mean is None:
            raise InputError(
                "BatchNorm with running statistics",
                "one without (track_running_stats=False)",
                where=f"module {name}",
                fix="Its output depends on the batch, so there is no one function to keep",
            )
