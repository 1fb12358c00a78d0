"""BatchNorm folding: the same function written without BatchNorm.

In eval mode a BatchNorm is a scale a and a shift s per channel. It disappears into the layer in front of it, or
into the layers behind it where that is exact (a shift in front of zero padding is not). What no layer can absorb
becomes a layer of its own: a depthwise 1×1 convolution.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from flatscope.errors import InputError
from flatscope.input_checks import independent_copy
from flatscope.isolation import own_settings
from flatscope.network.interception import (
    LAYER_CALLS,
    NORM_ORDER,
    Operation,
    fitting,
    refuse_if_different,
    replayed_outputs,
    tensors_in,
    two_samples,
)
from flatscope.network.normal_form import acting_name, normal_form
from flatscope.network.normal_form_pass import WeightPlan, plan_of, set_plan
from flatscope.network.operations import TABLE
from flatscope.network.products import norm_as_affine
from flatscope.network.units import entry_channels
from flatscope.samples import Inputs

BatchNorm = nn.modules.batchnorm._BatchNorm
Convolution = nn.modules.conv._ConvNd


class ChannelAffine(nn.Conv1d):
    """A scale and a shift per feature of a batch of vectors (n, channels), as a depthwise convolution."""

    def forward(self, input: Tensor) -> Tensor:
        """Treat the vector as a signal of length 1."""
        return super().forward(input.unsqueeze(-1)).squeeze(-1)


@own_settings()
def fold_batchnorm(model: nn.Module, example: Inputs) -> nn.Module:
    """The same function without BatchNorm: a new module in eval mode, the given one untouched.

    Layers keep their names. A folded BatchNorm leaves an `nn.Identity` behind; one that no layer can absorb (in
    front of an activation, or with a shift in front of zero padding) leaves a depthwise 1×1 convolution.

    Args:
        model: any module whose BatchNorms have running statistics.
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
    original = independent_copy(model).eval()
    _refuse_batch_statistics(original)
    inputs = two_samples(fitting(original, example))
    folded = normal_form(original, [inputs])
    with torch.no_grad():
        uses = _uses_in_forward_pass(folded, inputs)
        while norms := _batchnorms_of_pass(folded, uses):
            folded = _fold_one_round(folded, norms, uses)
            uses = _uses_in_forward_pass(folded, inputs)
    folded = _without_unreached(folded)
    if has_batchnorm(original) or plan_of(folded) is not None:
        refuse_if_different(original, folded, example, "fold_batchnorm")
    return folded


def has_batchnorm(model: nn.Module) -> bool:
    """True if any module is a BatchNorm that was not folded."""
    return any(
        isinstance(module, BatchNorm) and not _batchnorm_is_folded(model, f"{name}.running_mean".lstrip("."))
        for name, module in model.named_modules()
    )


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
        meaning = TABLE.get(op.name)
        if meaning is not None and meaning.identity and "dropout" in op.name and len(op.tensors) == len(outcomes) == 1:
            self.same[id(outcomes[0])] = self.identity(op.tensors[0])
            return result
        if outcomes or op.name == "setitem":
            for tensor in op.tensors:
                self.read_by[self.identity(tensor)].append(op)
            for tensor in outcomes:
                self.made_by[id(tensor)] = op
        if op.name in LAYER_CALLS or op.name == "batch_norm":
            self.calls[op.module].append(op)
        return result

    def only_call(self, name: str) -> Operation | None:
        """The one call made by a layer module in a forward pass; None if there are more or none."""
        calls = self.calls.get(name, [])
        return calls[0] if len(calls) == 1 else None


@dataclass(frozen=True)
class _Norm:
    """One BatchNorm as it is called."""

    call: Operation  # the operation
    module: str  # name of the module that makes it
    mean: str  # name of the buffer with the running mean, by which a plan knows it
    scale: Tensor  # what it multiplies every channel with, float64
    shift: Tensor  # what it adds
    trainable: bool  # whether any of its own parameters is

    @property
    def input_of_normalisation(self) -> Tensor:
        """Input of the normalisation."""
        given: Tensor = self.call.named(*NORM_ORDER)["input"]
        return given


def _batchnorms_of_pass(model: nn.Module, uses: _Uses) -> list[_Norm]:
    """The BatchNorms that the forward pass calls, those of modules and those called as functions."""
    buffers = {id(value): name for name, value in model.named_buffers()}
    norms: list[_Norm] = []
    for module, calls in uses.calls.items():
        for call in (call for call in calls if call.name == "batch_norm"):
            given = call.named(*NORM_ORDER)
            mean = buffers.get(id(given.get("running_mean")))
            if mean is None or given.get("training"):
                expected = "BatchNorm with running statistics that are buffers of the model"
                got = "batch_norm called with others"
                fix = "Keep the statistics in buffers, as torch.nn.BatchNorm2d does"
                raise InputError(expected, got, f"module {module}" if module else "model", fix)
            if mean in {norm.mean for norm in norms}:
                continue  # called twice: it cannot be folded, and becomes a layer of its own
            norms.append(_batchnorm_as_affine_map(call, module, mean))
    return norms


def _batchnorm_as_affine_map(call: Operation, module: str, mean: str) -> _Norm:
    """The affine map that a BatchNorm is in eval mode, in double precision."""
    given = call.named(*NORM_ORDER)
    own = [value for value in (given.get("weight"), given.get("bias")) if value is not None]
    affine = norm_as_affine(call)
    assert affine is not None  # refused before
    return _Norm(call, module, mean, *affine, any(value.requires_grad for value in own))


def _uses_in_forward_pass(model: nn.Module, inputs: Inputs) -> _Uses:
    uses = _Uses()
    for output in replayed_outputs(model, inputs, uses.follow):
        uses.read_by[uses.identity(output)].append(None)
    return uses


def _fold_one_round(model: nn.Module, norms: list[_Norm], uses: _Uses) -> nn.Module:
    """One round: into the layers in front if any allows it, else into those behind, else as layers of their own."""
    for fold in (_fold_backward, _fold_forward):
        done = [norm for norm in norms if fold(model, norm, uses)]
        if done:
            for norm in done:
                model = _model_without_batchnorm(model, norm)
            return model
    for norm in norms:
        model = _model_with_batchnorm_as_layer(model, norm)
    return model


def _plain_module(model: nn.Module, norm: _Norm) -> nn.Module | None:
    """The module that is this BatchNorm and nothing else; None for one that does more, or a function.

    None also where a plan knows operations by their number: the module has to stay among them.
    """
    if (plan := plan_of(model)) is not None and plan.dead is not None:
        return None
    module = dict(model.named_modules()).get(norm.module)
    plain_forward = getattr(type(module), "forward", None) in (BatchNorm.forward, nn.SyncBatchNorm.forward)
    return module if plain_forward and f"{norm.module}.running_mean".lstrip(".") == norm.mean else None


def _model_without_batchnorm(model: nn.Module, norm: _Norm) -> nn.Module:
    """The model with a BatchNorm that is folded away: an identity in its place, or a plan that skips the call."""
    module = _plain_module(model, norm)
    if module is not None:
        return _replace_module(model, module, nn.Identity())
    plan = plan_of(model) or WeightPlan()
    set_plan(model, replace(plan, skipped=plan.skipped | {norm.mean}))
    return model


def _model_with_batchnorm_as_layer(model: nn.Module, norm: _Norm) -> nn.Module:
    """The model with a BatchNorm written as a depthwise 1×1 convolution."""
    layer = _affine_layer(norm)
    module = _plain_module(model, norm)
    if module is not None:
        return _replace_module(model, module, layer)
    owner = norm.mean.rpartition(".")[0] or "batch_norm"
    names = acting_name(f"{owner}.weight"), acting_name(f"{owner}.bias")
    model.register_parameter(names[0], layer.weight)  # type: ignore[arg-type]
    model.register_parameter(names[1], layer.bias)  # type: ignore[arg-type]
    plan = plan_of(model) or WeightPlan()
    set_plan(model, replace(plan, affine={**plan.affine, norm.mean: names}))
    return model


def _fold_backward(model: nn.Module, norm: _Norm, uses: _Uses) -> bool:
    """Scale and shift of W x + b go into the layer whose output this BatchNorm alone reads."""
    if uses.only_call(norm.module) is not norm.call:
        return False
    origin = uses.identity(norm.input_of_normalisation)
    maker = uses.made_by.get(origin)
    if maker is None or len(uses.read_by[origin]) != 1:
        return False
    layer = _own_layer(model, maker, uses, norm)
    if layer is None:
        return False
    weight, bias = layer.weight.double(), _bias_or_zero(layer)
    outputs, _ = _scale_and_shift_axes(layer)
    _assign_folded_weight(layer, weight * norm.scale[outputs.to(weight.device)], bias * norm.scale + norm.shift, norm)
    return True


def _fold_forward(model: nn.Module, norm: _Norm, uses: _Uses) -> bool:
    """W (a x + s) + b: into the layers behind, if nothing else reads this BatchNorm and no zeros are padded."""
    if uses.only_call(norm.module) is not norm.call:
        return False
    result = next((made for made, op in uses.made_by.items() if op is norm.call), None)
    readers = uses.read_by.get(result, []) if result is not None else []
    layers = [None if reader is None else _own_layer(model, reader, uses, norm) for reader in readers]
    scale, shift = norm.scale, norm.shift
    for layer, reader in zip(layers, readers, strict=True):
        if layer is None or reader is None or uses.identity(reader.named("input")["input"]) != result:
            return False
        if isinstance(layer, Convolution) and bool((shift != 0).any()) and not _layer_has_no_padding(layer):
            return False
    for layer in layers:
        assert layer is not None
        outputs, inputs = (index.to(layer.weight.device) for index in _scale_and_shift_axes(layer))
        weight = layer.weight.double()
        shifted = (weight * shift[inputs]).expand(weight.shape)
        index = outputs.expand(weight.shape).flatten()
        bias = _bias_or_zero(layer).index_add(0, index, shifted.flatten())
        _assign_folded_weight(layer, weight * scale[inputs], bias, norm, new_bias=bool((shift != 0).any()))
    return bool(layers)


def _layer_has_no_padding(layer: nn.Module) -> bool:
    padding: Any = getattr(layer, "padding", ())
    none = padding == "valid" or (not isinstance(padding, str) and not any(padding))
    return none and not getattr(layer, "transposed", False)


def _own_layer(model: nn.Module, op: Operation, uses: _Uses, norm: _Norm) -> nn.Linear | Convolution | None:
    """The layer module that makes this call with its own plain weight, which nothing else uses.

    Its channels must stand on the axis that the BatchNorm scales.
    """
    if op.name not in LAYER_CALLS or op.name == "batch_norm" or uses.only_call(op.module) is not op:
        return None
    layer = model.get_submodule(op.module)
    if not isinstance(layer, nn.Linear | Convolution):
        return None
    given = op.layer_arguments()
    for name in ("weight", "bias"):
        value = layer._parameters.get(name)
        if value is not given.get(name) or (value is not None and len(uses.read_by[id(value)]) != 1):
            return None
    return (
        layer
        if norm.input_of_normalisation.ndim == (2 if isinstance(layer, nn.Linear) else layer.weight.ndim)
        else None
    )


def _scale_and_shift_axes(layer: nn.Linear | Convolution) -> tuple[Tensor, Tensor]:
    if isinstance(layer, nn.Linear):
        return entry_channels("dense", 1, layer.weight.shape)
    return entry_channels("transposed" if layer.transposed else "conv", layer.groups, layer.weight.shape)


def _bias_or_zero(layer: nn.Linear | Convolution) -> Tensor:
    if layer.bias is not None:
        return layer.bias.double()
    n_out = layer.out_features if isinstance(layer, nn.Linear) else layer.out_channels
    return torch.zeros(n_out, dtype=torch.float64, device=layer.weight.device)


def _assign_folded_weight(
    layer: nn.Linear | Convolution, weight: Tensor, bias: Tensor, norm: _Norm, new_bias: bool = True
) -> None:
    """New values for a layer; trainable if the layer or the BatchNorm was."""
    trainable = norm.trainable or any(value.requires_grad for value in layer.parameters())
    dtype = layer.weight.dtype
    layer.weight = nn.Parameter(weight.to(dtype), requires_grad=trainable)
    if layer.bias is not None or new_bias:
        layer.bias = nn.Parameter(bias.to(dtype), requires_grad=trainable)


def _affine_layer(norm: _Norm) -> Convolution:
    """Depthwise 1×1 convolution with the scale and shift of a BatchNorm."""
    n, n_axes, like = len(norm.scale), norm.input_of_normalisation.ndim, norm.input_of_normalisation.dtype
    kinds: dict[int, type[Convolution]] = {2: ChannelAffine, 3: nn.Conv1d, 4: nn.Conv2d, 5: nn.Conv3d}
    layer = kinds[n_axes](n, n, 1, groups=n, device="meta")  # type: ignore[call-arg, arg-type]
    weight = norm.scale.reshape(n, 1, *[1] * max(n_axes - 2, 1)).to(like)
    layer.weight = nn.Parameter(weight, requires_grad=norm.trainable)
    layer.bias = nn.Parameter(norm.shift.to(like), requires_grad=norm.trainable)
    return layer.eval()


def _without_unreached(model: nn.Module) -> nn.Module:
    """BatchNorms that the example does not reach have nothing to be folded into: they become layers of their own."""
    for name, module in list(model.named_modules()):
        mean = f"{name}.running_mean".lstrip(".")
        if (
            isinstance(module, BatchNorm)
            and mean in dict(model.named_buffers())
            and not _batchnorm_is_folded(model, mean)
        ):
            n_axes = 2 + {"BatchNorm2d": 2, "BatchNorm3d": 3}.get(type(module).__name__, 0)
            given = (module.running_mean, module.running_var, module.weight, module.bias, False, 0.0, module.eps)
            like = torch.empty([0] * n_axes, dtype=module.running_mean.dtype)  # type: ignore[union-attr]
            call = Operation("batch_norm", (like, *given), {}, name, "", nn.functional.batch_norm)
            model = _model_with_batchnorm_as_layer(model, _batchnorm_as_affine_map(call, name, mean))
    return model


def _batchnorm_is_folded(model: nn.Module, mean: str) -> bool:
    plan = plan_of(model)
    return plan is not None and (mean in plan.skipped or mean in plan.affine)


def _replace_module(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
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
            got = "one without (track_running_stats=False)"
            fix = "Its output depends on the batch, so there is no one function to keep"
            raise InputError("BatchNorm with running statistics", got, f"module {name}", fix)
