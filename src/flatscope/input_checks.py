"""What is looked at before anything is measured: the model's state, the samples, device and dtype."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from flatscope.errors import InputError, first_line
from flatscope.formatting import first_of_names
from flatscope.leaks import MOST_HASHED, Overlap, overlap_of
from flatscope.loss import IGNORED, Loss
from flatscope.network.passes import own_passes
from flatscope.params import Params, independent_module_copy, plain_names, refuse_untied_weights
from flatscope.sample_digests import input_digests
from flatscope.samples import (
    PROBED_SAMPLES,
    Batch,
    Inputs,
    Samples,
    copied_inputs,
    shape_text,
    slice_inputs,
    tensors_of_inputs,
)
from flatscope.target_checks import TargetLook

# Other weights at which outputs must still look like probabilities. Outputs of a linear layer of random weights are as
# often negative as positive, so the chance that they pass by accident is 1 in 2^16 for two classes, less for more.
DRAWS = 8
# Wrappers by the name of their class (some are costly to import), and where they keep the module inside.
WRAPPERS = {"OptimizedModule": "_orig_mod", "DataParallel": "module", "DistributedDataParallel": "module"}
QUANTISED = re.compile(r"torch\.(ao\.)?nn\.(intrinsic\.)?quantized|bitsandbytes|torchao\.quantization")
_COPIED = (torch.strided, torch.sparse_coo)
OTHER_SHAPES = 16  # that are tried out, beside the first
SUM_OF_ONE = 1e-4  # how far the sum of a row may be from 1; some models apply softmax in half precision
NOTHING_HELD_OUT = "the test samples are the training samples: nothing is held out"
NOT_LOGITS = (
    "the model's outputs are {kind}, but {loss} takes logits: it applies a {twice} once more, and the loss, "
    "curvature, sharpness and margins that come out are not those of the network as it is used. Let the model return "
    "what goes into its last function (the logits), or pass the loss that it was trained with as a function"
)


def independent_copy(model: nn.Module) -> nn.Module:
    """A copy that shares nothing with the model, without the wrappers around it or around parts of it."""
    refuse_closed_modules(model)
    for name, value in model.named_buffers():
        if value.layout not in _COPIED:
            fix = "Use .to_sparse_coo() for it"
            raise InputError("dense buffers, or sparse ones by coordinates", str(value.layout), f"model, {name}", fix)
    try:
        twins: dict[int, nn.Module] = {}
        for module in reversed(list(model.modules())):  # inner ones first
            if (inner := _module_inside_wrapper(module)) is not None:
                twins[id(module)] = independent_module_copy(inner, twins)
        twin = independent_module_copy(model, twins)
    except Exception as problem:
        fix = "Remove old-style weight_norm or cached tensors first"
        raise InputError("a model that can be copied (copy.deepcopy)", first_line(problem), "model", fix) from problem
    for module in twin.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            module.scale_grad_by_freq = False  # gradients of the loss, not those that an optimizer is given
    own_passes(twin)
    return twin


def model_on_device(model: nn.Module, device: torch.device, dtype: torch.dtype) -> nn.Module:
    """The model itself on that device and in that precision; what is complex stays so, which `Module.to` makes real."""

    def moved(value: Tensor) -> Tensor:
        if value.is_complex():
            return value.to(device, dtype.to_complex())
        return value.to(device, dtype if value.is_floating_point() else None)

    model._apply(moved)  # type: ignore[no-untyped-call]
    return model


def _module_inside_wrapper(module: nn.Module) -> nn.Module | None:
    """The module inside a wrapper that changes how it runs and not what it computes; None if this is no wrapper."""
    held = getattr(module, WRAPPERS.get(type(module).__name__, ""), None)
    return held if isinstance(held, nn.Module) else None


def remarks_on_wrappers(model: nn.Module) -> tuple[str, ...]:
    """Which wrappers `independent_copy` leaves out, in words."""
    remarks = dict.fromkeys(
        type(module).__name__ for module in model.modules() if _module_inside_wrapper(module) is not None
    )
    words = {"OptimizedModule": "torch.compile"}
    names = " and ".join(words.get(name, name) for name in remarks)
    return (f"measured without the wrapping by {names}: the same function, run as it is written",) if remarks else ()


def remarks_on_frozen_weights(model: nn.Module) -> tuple[str, ...]:
    """Remarks on weights that are held fixed because they do not require gradients."""
    frozen = [name for name, value in model.named_parameters() if value.is_floating_point() and not value.requires_grad]
    if not frozen:
        return ()
    if not any(value.requires_grad for value in model.parameters()):
        return ("no weight requires a gradient: all are measured as if they did",)
    sizes = {name: value.numel() for name, value in model.named_parameters() if value.is_floating_point()}
    held, whole = sum(sizes[name] for name in frozen), sum(sizes.values())
    return (
        f"{held:,} of {whole:,} parameters are held fixed, since they require no gradient: "
        f"{first_of_names(frozen, 4)}; "
        f"curvature and perturbations are of the other {whole - held:,}",
    )


def refuse_closed_modules(model: nn.Module) -> None:
    """Modules without a readable program, or with a part of their weights only."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        where = f"model, {name}" if name else "model"
        if isinstance(module, torch.jit.ScriptModule):
            expected = "a module written in Python, whose operations can be followed and differentiated twice"
            fix = "Pass the Python module that it was made of: load_state_dict(scripted.state_dict())"
            raise InputError(expected, "a ScriptModule (torch.jit.script or trace)", where, fix)
        if kind == "FullyShardedDataParallel":
            fix = "Gather the full state dict and load it into the module without FSDP"
            raise InputError("a module with all of its weights", f"{kind}, which keeps a share of them", where, fix)
    for name, value in model.named_parameters():
        if type(value.data).__name__ == "DTensor":
            fix = "Gather the full state dict and load it into a module on one device"
            raise InputError("weights that are whole", "a DTensor, spread over processes", name, fix)


@dataclass(frozen=True)
class Look:
    """Findings of one pass over a set of samples."""

    shapes: list[tuple[int, ...]]  # of one sample, per input tensor
    targets: TargetLook
    sums: tuple[float, float, float]  # how many numbers, their sum, and that of their squares
    # shapes of other batches in words, and a few samples of each
    others: tuple[tuple[str, Inputs], ...] = ()
    samples: tuple[bytes, ...] = ()  # hashes of the inputs, of the first samples where not of all


def look_through_samples(
    samples: Samples, size: int, like: Look | None = None, ignored: int = IGNORED, hashed: int = PROBED_SAMPLES
) -> Look:
    """Read all samples once: finite, as many as were counted, and of which shapes beside that of the first.

    Args:
        samples: what is read.
        size: the most samples of a batch.
        like: what was found of the training samples.
        ignored: class number of samples that do not count.
        hashed: number of samples of which hashes are kept.
    """
    targets_look = TargetLook(samples.where, like.targets.ignored if like else ignored)
    shapes, n = like.shapes if like else None, 0
    entries = total = squares = 0.0
    hashes: list[bytes] = []
    others: dict[tuple[tuple[int, ...], ...], tuple[str, Inputs]] = {}
    for inputs, targets in samples.batches(size):
        shape = [tuple(part.shape[1:]) for part in tensors_of_inputs(inputs)]
        shapes = shapes or shape
        if shape != shapes and len(others) < OTHER_SHAPES:
            others.setdefault(tuple(shape), (shape_text(inputs), copied_inputs(slice_inputs(inputs, 0, 2))))
        for what, value in [*(("inputs", part) for part in tensors_of_inputs(inputs)), ("targets", targets)]:
            if value.is_floating_point() and not value.isfinite().all():
                raise InputError("finite data", f"NaN or infinity in the {what}", samples.where, "Clean the data first")
            numbers = (torch.view_as_real(value) if value.is_complex() else value).double()
            entries, total = entries + value.numel(), total + float(numbers.sum())
            squares += float(numbers.square().sum())
        targets_look.add(targets)
        if len(hashes) < hashed:
            hashes += input_digests(slice_inputs(inputs, 0, hashed - len(hashes)))
        n += len(targets)
    if n != samples.n or shapes is None:
        fix = "Pass data that give the same samples whenever they are read"
        raise InputError(f"as many samples on every pass ({samples.n})", f"{n} on another pass", samples.where, fix)
    return Look(shapes, targets_look, (entries, total, squares), tuple(others.values()), tuple(hashes))


def look_at_both(train: Samples, test: Samples | None, size: int, ignored: int) -> tuple[list[Look], Overlap | None]:
    """Findings in the training samples, and in the test samples if there are any; how many of these are the former.

    Without test samples the hashes of the first training samples suffice: they tell whether all are the same.
    """
    if test is None:
        return [look_through_samples(train, size, ignored=ignored)], None
    first = look_through_samples(train, size, ignored=ignored, hashed=MOST_HASHED)
    second = look_through_samples(test, size, like=first, hashed=MOST_HASHED)
    return [first, second], overlap_of(first.samples, second.samples, test.n)


def remarks_on_data(
    loss: Loss, numbered: bool, looks: list[Look], n: int, overlap: Overlap | None = None
) -> tuple[str, ...]:
    """Remarks on data that are allowed and probably not meant.

    Args:
        loss: that is measured.
        numbered: whether the targets are class numbers.
        looks: at the training samples, and at the held-out ones if there are any.
        n: number of training samples.
        overlap: how many test samples are training samples; None without any.
    """
    remarks: list[str] = []
    if len(looks) > 1 and _same_numbers(*looks):
        remarks.append(NOTHING_HELD_OUT)
    elif overlap is not None and overlap.doubt:
        remarks.append(overlap.doubt)
    for look, what in zip(looks, ("training", "test"), strict=False):
        if numbered and look.targets.low == look.targets.high and (n > 1 or what == "test"):
            remarks.append(f"all {what} samples are of one class, {look.targets.low:g}")
    if n > 1 and len(set(looks[0].samples)) == 1:
        remarks.append("all training inputs are the same: nothing but the share of each class can be learnt of them")
    if numbered and loss.kind == "squared":
        remarks.append("labels are classes: mse compares the outputs with vectors of zeros and a 1 for the class")
    return tuple(remarks)


def _same_numbers(one: Look, other: Look) -> bool:
    """True if two sets have as many numbers, with the same sum and the same sum of squares but for rounding."""
    entries, _, squares = one.sums
    rounding = 1e-11 * (entries * squares) ** 0.5, 1e-11 * squares
    gaps = [abs(mine - theirs) for mine, theirs in zip(one.sums[1:], other.sums[1:], strict=True)]
    return entries == other.sums[0] and all(gap <= least for gap, least in zip(gaps, rounding, strict=True))


def refuse_shapes_that_fail(look: Look, run: Callable[[Inputs], Tensor]) -> None:
    """Samples may differ in shape from batch to batch, as texts do that are padded in theirs, if the network takes it.

    Args:
        look: what the samples are like.
        run: a forward pass on such inputs.
    """
    for text, inputs in look.others:
        try:
            run(inputs)
        except Exception as problem:
            wanted = ", ".join(str(shape) for shape in look.shapes)
            got = f"a batch {text}, on which the model fails ({first_line(problem)})"
            raise InputError(f"samples of shape {wanted}", got, look.targets.where) from problem


def advice_on_model(given: object) -> str:
    """Advice where something else than a module was given."""
    if isinstance(given, type):
        return f"Make one, and load its weights: model = {given.__name__}(…)"
    if isinstance(given, Mapping):
        return "Pass the module with its weights loaded: model.load_state_dict(…), then model"
    if isinstance(given, str | Path):
        return "Build the module and load the file into it; flatscope measure does that on the command line"
    return "Pass the module with its weights loaded, no function made of it (as torch.compile twice gives)"


def usable_device(device: str | torch.device) -> torch.device:
    """The device of that name, after trying it out."""
    try:
        place = torch.device(device)
        torch.empty(1, device=place).item()
    except (RuntimeError, AssertionError, TypeError) as problem:
        got = f"{str(device)!r} ({first_line(problem)})"
        fix = "Use cpu, or cuda where there is a GPU"
        raise InputError("a device of this machine", got, "device", fix) from problem
    return place


def usable_dtype(dtype: torch.dtype | None, model_dtype: torch.dtype) -> torch.dtype:
    """Half precision is refused when asked for, and left when it is the model's: curvature needs the digits."""
    if dtype is None:
        return torch.float64 if model_dtype == torch.float64 else torch.float32
    if dtype not in (torch.float32, torch.float64):
        fix = "torch.float64, not its name" if isinstance(dtype, str) else "Half precision has too few digits"
        raise InputError("torch.float32 or torch.float64", repr(dtype), "dtype", fix)
    return dtype


def first_weights(model: nn.Module) -> nn.Parameter:
    """The first real parameter, whose device and type are those of the problem by default."""
    first = next((p for p in model.parameters() if p.is_floating_point()), None)
    if first is None:
        raise InputError("a model with parameters", "none", where="model", fix="There is nothing to measure")
    return first


def refuse_missing_values(model: nn.Module) -> None:
    """Modules made lazily or on the meta device have shapes at most."""
    for name, value in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(value) or value.is_meta:
            fix = "Run one batch through the model, or load its weights, before measuring it"
            raise InputError("weights with values", "a lazy or meta tensor without any", name, fix)
    for name, value in model.named_parameters():
        if value.is_complex():
            fix = "Keep its real and imaginary part as one real parameter and use torch.view_as_complex in forward"
            raise InputError("real parameters", str(value.dtype), name, fix)


def refuse_active_layers(model: nn.Module) -> None:
    """Quantised weights; dropout, batch statistics, tables that a pass writes to: chance or order would decide."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if QUANTISED.search(type(module).__module__):
            fix = "Pass the float model that it was made of"
            raise InputError("weights in floating point", f"{kind}: the weights are quantised", name, fix)
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.max_norm is not None:
            fix = "Scale its rows once (torch.embedding_renorm_) and set its max_norm to None"
            raise InputError("weights that the forward pass leaves alone", f"{kind} with max_norm", name, fix)
        if isinstance(module, nn.modules.dropout._DropoutNd) and module.training and module.p > 0:
            raise InputError("dropout switched off", f"{kind} in training mode", where=name, fix="Call model.eval()")
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            if module.training:
                fix = "Call model.eval()"
                raise InputError("normalisation with running statistics", f"{kind} in training mode", name, fix)
            if module.running_mean is None:
                got = f"{kind} without any (track_running_stats=False)"
                fix = "Its output depends on the batch, so no measure of one function exists"
                raise InputError("normalisation with running statistics", got, name, fix)


def kind_of_probabilities(outputs: Tensor, least: int = 2) -> str:
    """In words which probabilities these rows of at least so many outputs look like; empty where like none."""
    if outputs.ndim != 2 or outputs.shape[1] < least or not ((outputs >= 0) & (outputs <= 1)).all():
        return ""
    if ((outputs.sum(1) - 1).abs() <= SUM_OF_ONE).all():
        return "probabilities, as after a softmax (none is negative, each row sums to 1)"
    return "between 0 and 1, as after a sigmoid" if (outputs > 0).any(0).all() else ""


def always_probabilities(outputs: Tensor, forward: Callable[[Params], Tensor], params: Params, least: int = 2) -> str:
    """As `kind_of_probabilities`, where it is so at random weights too: by the last layer's kind and not by accident.

    Log-probabilities are not meant: cross-entropy of them, its derivatives and the margins are those of the logits.

    Args:
        outputs: at the network's own weights.
        forward: outputs on the same samples at given weights.
        params: the network's own weights; those that are drawn have the same root mean square.
        least: number of outputs in a row from which on they may be probabilities.
    """
    kind = kind_of_probabilities(outputs, least)
    generator = torch.Generator().manual_seed(0)
    for _ in range(DRAWS if kind else 0):
        drawn = {
            name: torch.randn(value.shape, generator=generator, dtype=value.dtype).to(value.device)
            * value.square().mean().sqrt()
            for name, value in params.items()
        }
        if not kind_of_probabilities(forward(drawn), least):
            return ""
    return kind


def doubts_of_outputs(
    loss: Loss, probe: Batch, outputs: Tensor, forward: Callable[[Inputs, Params], Tensor], params: Params
) -> tuple[str, ...]:
    """Warnings of outputs that are allowed and probably not meant."""
    if loss.kind not in ("softmax", "logistic"):
        return ()
    inputs, targets = probe
    least, twice = (2, "softmax") if loss.kind == "softmax" else (1, "sigmoid")

    def rows(values: Tensor) -> Tensor:
        logits, _ = loss.positions(values, targets)
        return logits.flatten(0, -2) if least == 2 else logits

    kind = always_probabilities(rows(outputs), lambda w: rows(forward(inputs, w)), params, least)
    return (NOT_LOGITS.format(kind=kind, loss=loss.name, twice=twice),) if kind else ()


def initial_weights(
    initial: nn.Module | Mapping[str, Tensor], params: Params, tied: Mapping[str, str] | None = None
) -> Params:
    """The weights before training, in the type and on the device of those after it, one for each of them."""
    if not isinstance(initial, nn.Module | Mapping):
        raise InputError("a module or a state dict", type(initial).__name__, where="initial")
    given = plain_names(initial.state_dict() if isinstance(initial, nn.Module) else initial)
    refuse_untied_weights(tied or {}, given, "initial")
    for name, value in params.items():
        weight = given.get(name)
        if not isinstance(weight, Tensor) or weight.shape != value.shape:
            shown = tuple(weight.shape) if isinstance(weight, Tensor) else "no tensor of that name"
            raise InputError(f"a tensor of shape {tuple(value.shape)}", f"{shown}", where=f"initial, {name}")
        if not weight.isfinite().all():
            raise InputError("finite weights", "NaN or infinity", where=f"initial, {name}")
    return {name: given[name].detach().to(value.device, value.dtype, copy=True) for name, value in params.items()}
