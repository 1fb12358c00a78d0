"""What is tried out on the first samples: outputs, loss, and whether every pass computes the same function."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, first_line
from flatscope.loss import Loss, are_log_probabilities
from flatscope.network.passes import graph_nodes, held_by, keep_out, put_back
from flatscope.samples import Batch, Inputs, copied_inputs, slice_inputs, tensors_of_inputs

CHANNELS = (1, 3, 4)  # of images
WHOLE = (torch.bool, torch.int16, torch.int32, torch.int64)


def checked_outputs(model: nn.Module, probe: Batch, try_out: Callable[[Inputs], Tensor]) -> Tensor:
    """Outputs of a few samples: one row for each, of finite numbers.

    Args:
        model: the network, which takes a hook where it needs one.
        probe: the samples.
        try_out: a forward pass that says what a failing one may lack.
    """
    inputs, targets = probe
    outputs = network_safe_for_inputs(model, inputs, try_out)
    if outputs.ndim < 1 or len(outputs) != len(targets):
        raise InputError(f"one output row per sample ({len(targets)})", f"outputs {tuple(outputs.shape)}", "model")
    if not outputs.is_floating_point():
        fix = "Let it return what goes into argmax or a threshold: the logits"
        raise InputError("outputs in floating point", str(outputs.dtype), "model", fix)
    if not torch.isfinite(outputs).all():
        fix = "Pass a network whose training did not diverge, or dtype=torch.float64 if its outputs overflow"
        raise InputError("finite outputs", "NaN or infinity", "model, first batch of train", fix)
    return outputs


class SteadyOutputs:
    """Outputs of some samples, with which those of other passes are compared.

    Args:
        probe: the samples.
        outputs: of the network on them.
    """

    def __init__(self, probe: Batch, outputs: Tensor) -> None:
        self._probe, self._outputs = probe, outputs
        dtype = outputs.dtype
        self._rounding = 1e3 * torch.finfo(dtype).eps * outputs.abs().max().clamp_min(torch.finfo(dtype).tiny)

    def agree_with(self, first: Tensor, backwards: Tensor) -> bool:
        """True where two passes show that outputs are the same each time, whatever the rest of the batch.

        Args:
            first: outputs of the first few of the samples.
            backwards: of the same in reverse, and one more.
        """
        n = len(first)
        if n >= len(self._outputs):
            return False  # the rest of the batch was the same
        return self._are(first.detach(), n) and self._are(backwards[:n].flip(0).detach(), n)

    def refuse_others(self, run: Callable[[Inputs], Tensor]) -> None:
        """Run the network on the samples once more, and on half of them: refuse it where outputs are others.

        Args:
            run: a forward pass.
        """
        inputs, targets = self._probe
        half = (len(targets) + 1) // 2
        if not self._are(run(inputs), len(targets)):
            fix = "Switch off dropout and other randomness in the forward pass"
            raise InputError("the same outputs from two forward passes", "outputs that differ", "model", fix)
        if not self._are(run(slice_inputs(inputs, 0, half)), half):
            got = "outputs that change with the other samples of the batch"
            fix = (
                "Call model.eval(); normalise with running statistics, not with those of the batch; begin every pass "
                "with the same state, where a module keeps one (a membrane, a cache)"
            )
            raise InputError("outputs that depend on their own sample only", got, "model", fix)

    def _are(self, outputs: Tensor, n: int) -> bool:
        """True where these are the outputs of the first n samples, but for rounding."""
        expected = self._outputs[:n]
        return outputs.shape == expected.shape and bool((outputs - expected).abs().max() <= self._rounding)


def refuse_hidden_uses(model: nn.Module, outputs: Tensor) -> None:
    """Parameters that a forward pass finds elsewhere than in its modules, such as in a list, would count as constants.

    Args:
        model: the network.
        outputs: of a pass with other tensors in the places of its parameters.
    """
    parameters = {name: value for name, value in model.named_parameters() if value.requires_grad}
    with torch.enable_grad():
        total = outputs.sum()
    if not total.requires_grad:
        return
    _refuse_parameters_of_others(model, total)
    if not parameters:
        return
    gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True, retain_graph=True)
    for name, gradient in zip(parameters, gradients, strict=True):
        if gradient is not None:
            fix = "Read it as an attribute of its module in forward, or keep it in an nn.ParameterList"
            raise InputError("parameters that are read from their modules", "another way to this one", name, fix)


def _refuse_parameters_of_others(model: nn.Module, total: Tensor) -> None:
    """Raise where outputs depend on parameters that this model does not own, as where a closure holds another model."""
    owned = set(map(id, model.parameters()))
    for node in graph_nodes([total.grad_fn]):
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, nn.Parameter) and id(leaf) not in owned:
            got = f"one of shape {tuple(leaf.shape)} that no module of it has"
            fix = (
                "Register its module on the model; make forward a method of the class that reads `self`: a function "
                "that holds the model (`model.forward = lambda x: model…`) runs the original in every copy"
            )
            raise InputError("parameters of the model alone in its forward pass", got, "model", fix)


def failing_module(model: nn.Module, inputs: Inputs) -> str:
    """Name of the innermost module whose forward raises on these inputs."""
    entered: list[str] = []
    handles = []
    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: entered.append(name)))
        handles.append(module.register_forward_hook(lambda _m, _a, _o: entered.pop() and None))
    try:
        model(**inputs) if isinstance(inputs, dict) else model(*tensors_of_inputs(inputs))
    except Exception:
        return f"layer {entered[-1]}" if entered and entered[-1] else "model"
    finally:
        for handle in handles:
            handle.remove()
    return "model"


def advice_on_inputs(inputs: Inputs, said: str = "") -> str:
    """Advice for inputs on which a network fails: bytes, whole numbers and channels that come last are recognised.

    Args:
        inputs: a batch.
        said: how the network failed.
    """
    steps = []
    if isinstance(inputs, dict) and "unexpected keyword" in said:
        return "Entries of a mapping go to the model by name: pass (x, y) where it takes one input"
    if "same dtype" in said and any(part.is_complex() for part in tensors_of_inputs(inputs)):
        return "Pass real and imaginary parts as channels: torch.view_as_real(x)"
    if "same dtype" in said and any(part.dtype in WHOLE for part in tensors_of_inputs(inputs)):
        steps.append("these are whole numbers, so pass x.float()")
    for part in tensors_of_inputs(inputs):
        if part.ndim == 4 and part.shape[3] in CHANNELS and part.shape[1] not in CHANNELS:
            steps.append("its channels come last, so pass x.permute(0, 3, 1, 2)")
        if part.dtype == torch.uint8:
            steps.append("these are bytes, so pass x.float() / 255, scaled as in training")
    return f"Check the inputs: {'; '.join(dict.fromkeys(steps))}" if steps else "Check the input shape and dtype"


def refuse_failing_loss(loss: Loss, outputs: Tensor, targets: Tensor, part: str) -> None:
    """A loss that fails, or has another value than a finite one for some sample."""
    try:
        losses = loss(outputs, targets)
    except InputError:
        raise
    except Exception as problem:
        expected = "a loss that takes these outputs and targets"
        got = f"outputs {tuple(outputs.shape)} and {targets.dtype} targets {tuple(targets.shape)}, on which it fails"
        fix = "It is called as loss(outputs, targets), in this order, on a batch"
        raise InputError(expected, f"{got} ({first_line(problem)})", f"{part}, loss {loss.name}", fix) from problem
    where = f"{part}, loss {loss.name}"
    if loss.kind == "own":
        if not torch.equal(loss(outputs, targets).nan_to_num(), losses.nan_to_num()):
            fix = "Take out what it draws at random"
            raise InputError("a loss with the same values for the same outputs", "others", where, fix)
        with torch.enable_grad():
            follows = loss(outputs.detach().clone().requires_grad_(), targets).requires_grad
        if not follows:
            fix = "Leave out .detach(), .item(), numpy and no_grad inside of it"
            raise InputError("a loss that follows the outputs", "one that is cut off from them", where, fix)
        _refuse_coupled(loss, outputs, targets, losses, where)
        if loss.name == "NLLLoss" and bool((losses < 0).any()):
            fix = "Take nn.CrossEntropyLoss() for logits, or end the model in log_softmax"
            raise InputError("log-probabilities", "outputs above 0", where, fix)
    if not losses.isfinite().all():
        fix = "Pass a network whose training did not diverge, or dtype=torch.float64 if the loss overflows"
        raise InputError("finite losses", "NaN or infinity", where, fix)


def _refuse_coupled(loss: Loss, outputs: Tensor, targets: Tensor, losses: Tensor, where: str) -> None:
    """A loss of one sample that changes with the others, as where (n, 1) minus (n,) is broadcast to (n, n)."""
    half = (len(outputs) + 1) // 2
    apart = (loss(outputs[:half], targets[:half]) - losses[:half]).nan_to_num().abs().max()
    if apart <= 1e3 * torch.finfo(losses.dtype).eps * losses.nan_to_num().abs().max():
        return
    fix = "Leave out what is over the batch: its mean, pairs, ranks"
    if targets.shape != outputs.shape and targets.numel() == outputs.numel():
        fix = "Bring both to one shape: targets.reshape(outputs.shape); of others torch subtracts each from every one"
    got = (
        f"values that change with the other samples, of outputs {tuple(outputs.shape)}, targets {tuple(targets.shape)}"
    )
    raise InputError("a loss of each sample by itself", got, where, fix)


def network_safe_for_inputs(model: nn.Module, inputs: Inputs, run: Callable[[Inputs], Tensor]) -> Tensor:
    """Let every pass of a network of ours leave its inputs, which are the user's, and its modules as they are; outputs.

    What modules keep is put back only where a pass does not depend on what the one before it left: a network with a
    memory computes no one function.

    Args:
        model: the network, which takes a hook where it needs one.
        inputs: some samples.
        run: a forward pass on such inputs.
    """
    before, given = held_by(model), copied_inputs(inputs)
    outputs = run(given)
    now = held_by(model)
    if any(part._version for part in tensors_of_inputs(given)):
        model.register_forward_pre_hook(
            lambda _, args, words: (copied_inputs(args), {name: part.clone() for name, part in words.items()}),
            with_kwargs=True,
        )
    kept = [name for name in before.keys() | now.keys() if name not in before or not before[name].same(now.get(name))]
    if not kept:
        return outputs
    if torch.equal(run(copied_inputs(inputs)), outputs):
        put_back(model, kept, before)
        keep_out(model, kept)
    return run(copied_inputs(inputs))  # as every pass from now on


STRAIGHT = (
    "the loss has no curvature in the outputs on the first samples (piecewise linear there, as an absolute error is): "
    "traces, kappa and rho see only the curvature of the network itself, which a ReLU network has none of, however "
    "sharp it is; a smooth loss, such as Huber's, has a meaning here"
)


def remarks_on_linear_loss(loss: Loss, outputs: Tensor, targets: Tensor) -> list[str]:
    """A remark for a loss of a user's own whose second derivatives in the outputs are all zero on these samples.

    None for a likelihood of log probabilities: its curvature lies in the log-softmax that the network ends with.
    """
    if loss.kind != "own" or (outputs.ndim > 1 and outputs.shape[-1] > 1 and are_log_probabilities(outputs)):
        return []
    with torch.enable_grad():
        at = outputs.detach().clone().requires_grad_()
        try:
            (slope,) = torch.autograd.grad(loss(at, targets).sum(), at, create_graph=True)
            along = torch.linspace(1.0, 2.0, slope.numel(), dtype=slope.dtype, device=slope.device).reshape(slope.shape)
            bend = torch.autograd.grad((slope * along).sum(), at, allow_unused=True)[0] if slope.requires_grad else None
        except RuntimeError:  # what cannot be differentiated is refused elsewhere
            return []
    return [STRAIGHT] if slope.any() and (bend is None or not bend.any()) else []
