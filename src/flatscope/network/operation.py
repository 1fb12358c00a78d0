"""Watching a network run: every torch operation of a forward pass, by name and place, handed to a rule.

The network is run, not compiled: whatever Python its forward contains (shape arithmetic, loops, branches on data)
simply happens, and the operations that were reached are seen. So there is nothing that cannot be traced, the
user's modules keep their names, and the same mechanism serves to replay a network with other rules (absolute
weights for path norms, say).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode

from flatscope.params import Params
from flatscope.samples import Inputs, parts_of

_REVERSED_OR_INPLACE = {
    "radd": "add",
    "iadd": "add",
    "rsub": "sub",
    "isub": "sub",
    "rmul": "mul",
    "imul": "mul",
    "idiv": "div",
    "truediv": "div",
    "itruediv": "div",
    "rtruediv": "rdiv",
    "multiply": "mul",
    "divide": "div",
    "true_divide": "div",
    "subtract": "sub",
    "concat": "cat",
    "concatenate": "cat",
    "clip": "clamp",
    "negative": "neg",
    "absolute": "abs",
}


@dataclass(frozen=True)
class Operation:
    """One call of a torch function inside a forward pass.

    Attributes:
        name: its name without marks of spelling: `add` for `+`, `add_`, `__radd__`; the attribute for `x.T`.
        function: what was called.
        args: its positional arguments.
        kwargs: its keyword arguments.
        module: qualified name of the module whose forward makes the call.
    """

    name: str
    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: str

    @property
    def place(self) -> str:
        """The operation and where it stands, for people."""
        return f"{self.name} ({self.module})" if self.module else self.name

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors among the arguments, in order."""
        return [*tensors_in(self.args), *tensors_in(self.kwargs)]

    def run(self) -> Any:
        """Do what the network does."""
        return self.function(*self.args, **self.kwargs)

    def named(self, *names: str) -> dict[str, Any]:
        """Arguments by name, where `names` is the order of the positional ones."""
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def replay(model: nn.Module, inputs: Inputs, rule: Callable[[Operation], Any], params: Params | None = None) -> Any:
    """Run `model` on `inputs` (at `params`, if given), with `rule` in the place of every torch operation.

    A rule that returns `operation.run()` changes nothing. What a rule itself calls is not watched.
    """
    stack = [""]
    handles = []

    def leave(_module: nn.Module, _args: Any, _result: Any) -> None:
        stack.pop()

    for name, module in model.named_modules():
        handles.append(module.register_forward_pre_hook(lambda _m, _a, name=name: stack.append(name)))
        handles.append(module.register_forward_hook(leave, always_call=True))
    keywords = inputs if isinstance(inputs, dict) else {}
    positional = () if isinstance(inputs, dict) else parts_of(inputs)
    try:
        with _Watch(rule, stack):
            if params is None:
                return model(*positional, **keywords)
            return functional_call(model, params, positional, keywords)
    finally:
        for handle in handles:
            handle.remove()


class _Watch(TorchFunctionMode):
    """Hands every torch function to the rule."""

    def __init__(self, rule: Callable[[Operation], Any], stack: list[str]) -> None:
        super().__init__()
        self._rule, self._stack = rule, stack

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        return self._rule(Operation(_plain_name(func), func, args, kwargs or {}, self._stack[-1]))


def _plain_name(function: Callable[..., Any]) -> str:
    name = getattr(function, "__name__", type(function).__name__)
    if name == "__get__":  # an attribute such as x.T or x.shape
        name = function.__self__.__name__  # type: ignore[attr-defined]
    name = name.partition(".")[0].strip("_")  # torch.ops.aten.mul.Tensor is a mul
    return _REVERSED_OR_INPLACE.get(name, name)


def tensors_in(tree: Any) -> Iterator[Tensor]:
    """The tensors in nested tuples, lists and dictionaries, in order."""
    if isinstance(tree, Tensor):
        yield tree
    elif isinstance(tree, tuple | list):
        for part in tree:
            yield from tensors_in(part)
    elif isinstance(tree, dict):
        for part in tree.values():
            yield from tensors_in(part)


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
