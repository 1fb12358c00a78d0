"""Watching a network run: every torch operation of a forward pass, by name and place, handed to a rule.

The network is run, not compiled: whatever Python its forward contains (shape arithmetic, loops, branches on data)
simply happens, and the operations that were reached are seen. So there is nothing that cannot be traced, the
user's modules keep their names, and the same mechanism serves to replay a network with other rules (absolute
weights for path norms, say).

Also the check behind every rewriting of a network: it must still be the same function.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._C import DisableTorchFunction
from torch.overrides import TorchFunctionMode

from flatscope.errors import FlatscopeError, InputError
from flatscope.isolation import own_settings, settings_of_running_model
from flatscope.network.passes import digits_of, writes_in_place
from flatscope.params import Params, call_with_tensors, tied_names
from flatscope.samples import (
    Inputs,
    copied_inputs,
    inputs_on_device,
    map_inputs,
    output_tensor,
    shape_text,
    slice_inputs,
    tensors_of_inputs,
)

T = TypeVar("T")
DENSE_ORDER = ("input", "weight", "bias")
CONV_ORDER = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
TRANSPOSED_ORDER = ("input", "weight", "bias", "stride", "padding", "output_padding", "groups", "dilation")
LOOKUP_ORDER = ("input", "weight", "padding_idx", "max_norm", "norm_type", "scale_grad_by_freq", "sparse")
NORM_ORDER = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")
# The calls of a layer: its kind, and its arguments in order.
LAYER_CALLS: dict[str, tuple[str, tuple[str, ...]]] = {
    "linear": ("dense", DENSE_ORDER),
    **{f"conv{n}d": ("conv", CONV_ORDER) for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": ("transposed", TRANSPOSED_ORDER) for n in (1, 2, 3)},
    "embedding": ("lookup", LOOKUP_ORDER),
}
# These, and the call that has a scale and a shift for every channel.
WEIGHT_CALLS = LAYER_CALLS | {"batch_norm": ("batchnorm", NORM_ORDER)}
_SPELLINGS = {
    "add": "radd iadd",
    "sub": "rsub isub subtract",
    "mul": "rmul imul multiply",
    "div": "idiv truediv itruediv divide true_divide",
    "rdiv": "rtruediv",
    "matmul": "rmatmul imatmul",
    "cat": "concat concatenate",
    "clamp": "clip",
    "neg": "negative",
    "abs": "absolute",
}
# Operations on a tensor that tell something of it for which no value is needed.
# fmt: off
ABOUT = frozenset((
    "shape", "size", "dim", "ndim", "ndimension", "dtype", "device", "numel", "nelement", "stride", "layout",
    "len", "is_floating_point", "is_complex", "is_cuda", "is_contiguous", "is_leaf", "is_sparse", "is_nested",
    "is_quantized", "is_mps", "is_xpu", "is_meta", "grad_fn", "names", "itemsize", "nbytes", "element_size",
    "storage_offset", "get_device", "result_type", "version", "output_nr", "is_inference", "is_signed",
    "data_ptr", "untyped_storage", "is_conj", "is_neg", "requires_grad",
))
# fmt: on
_PLAIN_NAMES = {spelling: name for name, spellings in _SPELLINGS.items() for spelling in spellings.split()}


@dataclass(frozen=True)
class Call:
    """One call of a torch function in a forward pass: with tensors while it runs, with slots in a record."""

    name: str  # its name without marks of spelling: `add` for `+`, `add_`, `__radd__`; the attribute for `x.T`
    args: tuple[Any, ...]  # its positional arguments
    kwargs: dict[str, Any] = field(hash=False)  # its keyword arguments
    module: str  # qualified name of the module whose forward makes the call
    within: str  # the composite function that was written out, where the call is a part of one

    @property
    def place(self) -> str:
        """The operation and where it stands, for people."""
        name = f"{self.name} in {self.within}" if self.within else self.name
        return f"{name} ({self.module})" if self.module else name

    def named(self, *names: str) -> dict[str, Any]:
        """Arguments by name, where `names` is the order of the positional ones."""
        return dict(zip(names, self.args, strict=False)) | self.kwargs

    def layer_arguments(self) -> dict[str, Any]:
        """Arguments by name of a linear map, a convolution, a lookup or a BatchNorm; none of any other call."""
        return self.named(*WEIGHT_CALLS[self.name][1]) if self.name in WEIGHT_CALLS else {}


@dataclass(frozen=True)
class Operation(Call):
    """A call that is about to run."""

    function: Callable[..., Any]  # what was called

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]

    @property
    def in_place(self) -> bool:
        """True if it writes to its first argument, not if it returns that as it is."""
        return writes_in_place(self.function)

    def run(self) -> Any:
        """Do what the network does."""
        return self.function(*self.args, **self.kwargs)


# What a rule knows of tensors it keeps in dictionaries by the tensor itself: torch hashes a tensor by its identity,
# which no other gets while it is kept.
OperationRule = Callable[[Operation], Any]


def replay(
    model: nn.Module, inputs: Inputs, rules: OperationRule | Sequence[OperationRule], params: Params | None = None
) -> Any:
    """Run `model` on `inputs` (at `params`, if given), with a rule in the place of every torch operation.

    A rule that returns `operation.run()` changes nothing. What a rule itself calls it does not see. Of several rules
    the first sees what the network calls, and each of the others what the one before it calls.
    """
    handles, stack = [], [""]

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    keywords = inputs if isinstance(inputs, dict) else {}
    positional = () if isinstance(inputs, dict) else tensors_of_inputs(inputs)
    weights = model.parameters() if params is None else params.values()
    first = next((value for value in weights if value.is_floating_point()), torch.empty(0))
    token = _MODULES.set(stack)
    try:
        with settings_of_running_model(first.dtype, first.device), ExitStack() as stack_of_rules:
            for rule in reversed(rules if isinstance(rules, Sequence) else [rules]):
                stack_of_rules.enter_context(watched(rule))
            if params is None:
                return model(*positional, **keywords)
            return call_with_tensors(model, params, tied_names(model), positional, keywords)
    finally:
        _MODULES.reset(token)
        for handle in handles:
            handle.remove()


def replay_for_structure(
    model: nn.Module, inputs: Inputs, rules: OperationRule | Sequence[OperationRule], params: Params | None = None
) -> Any:
    """A pass for what can be seen of a network: with gradients, and without warnings about them; see `replay`.

    Every reading of structure starts here; passes for values call `replay`, or hand rules to `Problem.forward`.
    """
    with torch.enable_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return replay(model, inputs, rules, params)


class watched(TorchFunctionMode):  # noqa: N801  used as a function
    """Inside the block every torch function is handed to the rule, which gives its result.

    Args:
        rule: what it calls itself is not watched.
    """

    def __init__(self, rule: OperationRule) -> None:
        super().__init__()
        self._rule = rule

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return self._rule(Operation(_plain_name(func), args, kwargs or {}, _MODULES.get()[-1], _WITHIN.get(), func))


# Names of the modules whose forward `replay` is running, innermost last.
_MODULES: ContextVar[list[str]] = ContextVar("modules that are running", default=[""])  # noqa: B039  never changed
_WITHIN: ContextVar[str] = ContextVar("composite function that is being written out", default="")


@contextmanager
def written_out(name: str) -> Iterator[None]:
    """Inside the block operations are known to be parts of a composite function."""
    token = _WITHIN.set(_WITHIN.get() or name)
    try:
        yield
    finally:
        _WITHIN.reset(token)


def _plain_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":  # an attribute such as x.T or x.shape
        name = function.__self__.__name__  # type: ignore[attr-defined]
    name = name.partition(".")[0].strip("_")  # torch.ops.aten.mul.Tensor is a mul
    return _PLAIN_NAMES.get(name, name)


def is_question(op: Operation) -> bool:
    """True for an operation that asks for a shape, a type or the like; `requires_grad_` answers with a tensor."""
    return op.name in ABOUT and op.function is not Tensor.requires_grad_


def instances_in(tree: Any, kind: type[T]) -> Iterator[T]:
    """The objects of a type in nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, kind):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from instances_in(part, kind)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from instances_in(part, kind)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    return instances_in(tree, Tensor)


def with_tensors(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same nested structure with every tensor replaced."""
    if isinstance(tree, Tensor):
        return change(tree)
    if isinstance(tree, tuple):
        return tuple(with_tensors(part, change) for part in tree)
    if isinstance(tree, list):
        return [with_tensors(part, change) for part in tree]
    if isinstance(tree, dict):
        return {key: with_tensors(part, change) for key, part in tree.items()}
    return tree


def address_of(tensor: Tensor) -> int | None:
    """Address of a tensor's memory, which views share: 0 of an empty tensor; None inside vmap, where there is none."""
    try:
        with DisableTorchFunction():  # no rule is to see this
            return tensor.untyped_storage().data_ptr()
    except (RuntimeError, NotImplementedError):
        return None


def replayed_outputs(model: nn.Module, inputs: Inputs, rule: OperationRule) -> list[Tensor]:
    """Output tensors of a reading; a failing forward is the user's to see."""
    try:
        raw = replay_for_structure(model, inputs, rule)
    except FlatscopeError:
        raise
    except Exception as problem:
        got = f"{type(problem).__name__}: {(str(problem).splitlines() or [''])[0]}"
        fix = "Pass inputs of the shape and type that the model is called with"
        raise InputError("a model that runs on the example", got, f"example {shape_text(inputs)}", fix) from problem
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


def returned_tensors(raw: Any) -> list[Tensor]:
    """All tensors that a network returns, also those beside the one that is its output."""
    found = list(tensors_in(raw))
    return found or list(tensors_in(vars(raw))) if hasattr(raw, "__dict__") else found


def fitting(model: nn.Module, example: Inputs) -> Inputs:
    """A copy of the example on the model's device and in its floating-point type: a forward may change it in place."""
    first = next((value for value in model.parameters() if value.is_floating_point()), None)
    if first is None:
        raise InputError("a model with parameters", "none", where="model", fix="There is nothing to rescale")
    if isinstance(example, list):
        example = tuple(example)
    if not tensors_of_inputs(example) or not all(isinstance(part, Tensor) for part in tensors_of_inputs(example)):
        raise InputError("a tensor, a tuple or a dictionary of tensors", type(example).__name__, where="example")
    return copied_inputs(inputs_on_device(example, first.device, first.dtype))


def two_samples(example: Inputs) -> Inputs:
    """Two samples, so that no operation can mistake the batch axis for one of size 1."""
    if all(part.ndim > 0 and len(part) == 1 for part in tensors_of_inputs(example)):
        return map_inputs(example, lambda value: torch.cat([value, value]))
    return slice_inputs(example, 0, 2)


_TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-4}
_LOW_PRECISION = 5e-2


class FunctionChangedError(FlatscopeError, RuntimeError):
    """A rewritten network gives other outputs: a tie or a wall that was not seen. Nothing is returned then."""


def relative_difference(model: nn.Module, other: nn.Module, example: Inputs) -> float:
    """Largest difference between the outputs of two networks, relative to the largest output."""
    with own_settings(), torch.no_grad():
        before, after = _outputs(model, example), _outputs(other, example)
    scale = max((float(value.abs().max()) for value in before), default=0.0)
    gaps = [float((a.double() - b.double()).abs().max()) for a, b in zip(before, after, strict=True)]
    return max(gaps, default=0.0) / (scale or 1.0)


def refuse_if_different(
    model: nn.Module, other: nn.Module, example: Inputs, what: str, tolerance: float | None = None
) -> None:
    """Compare two networks in eval mode on the example, to a relative tolerance or to the rounding of their type."""
    found = relative_difference(model, other, example)
    dtype = digits_of(model)
    allowed = tolerance or _TOLERANCES.get(dtype, _LOW_PRECISION)
    if not found <= allowed:  # also where the outputs are not finite
        raise FunctionChangedError(
            f"the same outputs to {allowed:g} relative ({dtype})",
            f"outputs that differ by {found:.3g}",
            where=what,
            fix="Please report the network: an operation in it was misread; or use float64 if this is rounding",
        )


def _outputs(model: nn.Module, example: Inputs) -> list[Tensor]:
    inputs = fitting(model, example)
    raw = model(**inputs) if isinstance(inputs, dict) else model(*tensors_of_inputs(inputs))
    return [value for value in output_tensors(raw) if value.is_floating_point() and value.numel()]
