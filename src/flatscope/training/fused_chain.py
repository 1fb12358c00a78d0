"""Which networks the fused kernel can train: chains of convolution, pooling, dense layers and ReLU.

A chain is read off the recorded program of a forward pass. What is not such a chain is refused with the reason, and is
trained by the stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from flatscope.network.interception import Operation, replay

LARGEST_KERNEL = 49  # taps of one channel: they are written out in full
LARGEST_WINDOW = {"max": 16, "average": 8}  # pooled entries: an average keeps a bit for each
IDENTITIES = ("contiguous", "clone", "detach", "positive")
RESHAPES = ("flatten", "view", "reshape")
LOOKS = ("shape", "size", "dim", "ndim", "numel", "len", "requires_grad", "is_floating_point", "dtype", "device")


class NotFused(Exception):  # noqa: N818  a reason to train in the other way, not a fault
    """The fused kernel cannot train this; the message says why."""


@dataclass(frozen=True)
class Convolution:
    """A convolution with the ReLU and the pooling behind it."""

    weight: str  # name of the parameter
    bias: str | None
    inputs: tuple[int, int, int]  # (channels, height, width) before it
    outputs: tuple[int, int, int]  # the same after the pooling
    kernel: tuple[int, int]  # (rows, columns), as in the following
    stride: tuple[int, int]
    padding: tuple[int, int]
    pool: str = ""  # "", "max" or "average"
    window: tuple[int, int] = (1, 1)  # what is pooled, without overlap
    relu_first: bool = False  # between convolution and average pooling; before a maximum it is the same as after it
    relu: bool = False  # at the end

    def run(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The layer by torch's own functions."""
        bias = None if self.bias is None else params[self.bias]
        x = functional.conv2d(x, params[self.weight], bias, self.stride, self.padding)
        x = functional.relu(x) if self.relu_first else x
        if self.pool == "max":
            x = functional.max_pool2d(x, self.window)
        elif self.pool == "average":
            x = functional.avg_pool2d(x, self.window)
        return functional.relu(x) if self.relu else x


@dataclass(frozen=True)
class Dense:
    """A dense layer with the ReLU behind it; `inputs` and `outputs` are numbers of units."""

    weight: str
    bias: str | None
    inputs: int
    outputs: int
    relu: bool = False

    def run(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """The layer by torch's own functions."""
        bias = None if self.bias is None else params[self.bias]
        x = functional.linear(x.flatten(1), params[self.weight], bias)
        return functional.relu(x) if self.relu else x


Layer = Convolution | Dense


@dataclass(frozen=True)
class Chain:
    """The layers of a network, in order; `shape` is that of one input."""

    shape: tuple[int, ...]
    layers: tuple[Layer, ...]

    @property
    def classes(self) -> int:
        """Number of outputs."""
        outputs = self.layers[-1].outputs
        return outputs if isinstance(outputs, int) else outputs[0]

    def run(self, params: Mapping[str, Tensor], x: Tensor) -> Tensor:
        """Outputs by torch's own functions: what the kernel computes."""
        for layer in self.layers:
            x = layer.run(params, x)
        return x.flatten(1)


def read_chain(model: nn.Module, images: Tensor) -> Chain:
    """The chain that a network on the CPU is, given a few inputs.

    Raises:
        NotFused: it is something else.
    """
    example = images[:2].to("cpu", torch.float32)
    reader = _ChainReader(model, example)
    with torch.no_grad():
        output = replay(model, example, reader)
    if output is not reader.value:
        raise NotFused("its output is not that of its last layer")
    if not reader.layers or not {name for name, _ in model.named_parameters()} <= reader.used:
        raise NotFused("not all of its parameters belong to the chain")
    chain = Chain(tuple(example.shape[1:]), tuple(reader.layers))
    params = {name: value.detach().double() for name, value in model.named_parameters()}
    with torch.no_grad():
        expected, outputs = output.double(), chain.run(params, example.double())
    if expected.shape != outputs.shape or not torch.allclose(expected, outputs, rtol=1e-4, atol=1e-4):
        raise NotFused("read as a chain of layers it gives other outputs")
    return chain


class _ChainReader:
    """A rule for `replay` that follows one value through the operations."""

    def __init__(self, model: nn.Module, example: Tensor) -> None:
        self._names = {id(value): name for name, value in model.named_parameters()}
        self.value, self.layers, self.used = example, list[Layer](), set[str]()

    def __call__(self, op: Operation) -> Any:
        result = op.run()
        if not isinstance(result, Tensor) or op.name in LOOKS:
            return result
        if not op.tensors or op.tensors[0] is not self.value:
            raise NotFused(f"{op.place} does not go on from the operation before it")
        known = {"conv2d": self._read_convolution, "linear": self._read_dense_layer, "relu": self._read_relu}
        known |= {"max_pool2d": self._read_pooling, "avg_pool2d": self._read_pooling}
        if op.name in known:
            known[op.name](op, result)
        elif op.name in RESHAPES:
            if result.shape != self.value.flatten(1).shape:
                raise NotFused(f"{op.place} is not a flattening")
        elif op.name == "dropout":
            if op.named("input", "p", "training").get("p", 0.5) > 0:
                raise NotFused("it has dropout")
        elif op.name not in IDENTITIES:
            raise NotFused(f"{op.place} is not part of a chain that the fused kernel knows")
        self.value = result
        return result

    def _parameters(self, op: Operation, given: Mapping[str, Any]) -> tuple[str, str | None]:
        weight, bias = (given.get(part) for part in ("weight", "bias"))
        names = [self._names.get(id(value)) for value in (weight, bias) if value is not None]
        if None in names or any(name in self.used for name in names):
            raise NotFused(f"the weights of {op.place} are not parameters of its own")
        self.used.update(name for name in names if name is not None)
        assert names[0] is not None
        return names[0], names[1] if bias is not None else None

    def _read_convolution(self, op: Operation, result: Tensor) -> None:
        given = op.named("input", "weight", "bias", "stride", "padding", "dilation", "groups")
        stride, padding, dilation = (
            _pair_of_whole_numbers(given.get(part, plain))
            for part, plain in (("stride", 1), ("padding", 0), ("dilation", 1))
        )
        rows, columns = given["weight"].shape[2:]
        if given.get("groups", 1) != 1 or dilation != (1, 1) or result.ndim != 4:
            raise NotFused(f"{op.place} has groups or dilation")
        if rows * columns > LARGEST_KERNEL:
            raise NotFused(f"the kernel of {op.place} has more than {LARGEST_KERNEL} taps")
        if padding[0] >= rows or padding[1] >= columns:
            raise NotFused(f"{op.place} pads by more than its kernel reaches")
        if any(isinstance(layer, Dense) for layer in self.layers) or self.value.ndim != 4:
            raise NotFused(f"{op.place} comes behind a dense layer")
        weight, bias = self._parameters(op, given)
        shapes = [(value.shape[1], value.shape[2], value.shape[3]) for value in (self.value, result)]
        self.layers.append(Convolution(weight, bias, shapes[0], shapes[1], (rows, columns), stride, padding))

    def _read_dense_layer(self, op: Operation, result: Tensor) -> None:
        if self.value.ndim != 2:
            raise NotFused(f"{op.place} is used at several places of one sample")
        weight, bias = self._parameters(op, op.named("input", "weight", "bias"))
        self.layers.append(Dense(weight, bias, self.value.shape[1], result.shape[1]))

    def _read_relu(self, op: Operation, _: Tensor) -> None:
        if not self.layers:
            raise NotFused(f"{op.place} stands before the first layer")
        self.layers[-1] = replace(self.layers[-1], relu=True)

    def _read_pooling(self, op: Operation, result: Tensor) -> None:
        given = op.named("input", "kernel_size", "stride", "padding")
        window = _pair_of_whole_numbers(given["kernel_size"])
        last = self.layers[-1] if self.layers else None
        if not isinstance(last, Convolution) or last.pool or self.value.ndim != 4:
            raise NotFused(f"{op.place} does not follow a convolution")
        whole = tuple(size // part for size, part in zip(self.value.shape[2:], window, strict=True))
        plain = _pair_of_whole_numbers(given.get("stride") or window) == window and _pair_of_whole_numbers(
            given.get("padding", 0)
        ) == (0, 0)
        usual = given.get("dilation", 1) in (1, (1, 1)) and given.get("divisor_override") is None
        if not plain or not usual or tuple(result.shape[2:]) != whole:
            raise NotFused(f"{op.place} has windows that overlap, are padded or cut off")
        pool = "max" if op.name == "max_pool2d" else "average"
        if window[0] * window[1] > LARGEST_WINDOW[pool]:
            raise NotFused(f"{op.place} pools more than {LARGEST_WINDOW[pool]} entries")
        outputs = (result.shape[1], result.shape[2], result.shape[3])
        first = last.relu and pool == "average"
        self.layers[-1] = replace(last, pool=pool, window=window, outputs=outputs, relu_first=first)


def _pair_of_whole_numbers(value: Any) -> tuple[int, int]:
    if isinstance(value, str):
        raise NotFused(f"a convolution with padding={value!r}")
    rows, columns = (value, value) if isinstance(value, int) else (tuple(value) * 2)[:2]
    return int(rows), int(columns)
