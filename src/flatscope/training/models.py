"""Small networks of the four papers, and the look-up by name that also covers the larger vision models.

All of them are plain modules that take images (they flatten inside) and return one raw score per
class. Layers are called `conv1`, `fc1`, ..., because these names are what tables show.
"""

from __future__ import annotations

import inspect
import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import nn

from flatscope.errors import InputError, refuse_unknown
from flatscope.isolation import private_randomness
from flatscope.training.vision_models import (
    image_shape,
    plainnet18,
    plainnet34,
    small_alexnet,
    small_inception,
    vgg,
    wide_resnet,
)

_ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "relu": nn.ReLU,
    "leaky_relu": nn.LeakyReLU,
    "tanh": nn.Tanh,
    "sigmoid": nn.Sigmoid,
    "gelu": nn.GELU,
    "identity": nn.Identity,
}


def mlp(widths: Sequence[int], bias: bool = True, activation: str = "relu") -> nn.Sequential:
    """Fully connected network `widths[0]`-...-`widths[-1]`, with no activation after the last layer.

    Args:
        widths: input size, hidden widths, number of outputs; images are flattened.
        bias: whether the layers have biases.
        activation: "relu", "leaky_relu", "tanh", "sigmoid", "gelu" or "identity" (a deep linear network).

    Example:
        >>> [name for name, _ in mlp((4, 3, 2)).named_children()]
        ['flatten', 'fc1', 'relu1', 'fc2']
    """
    if len(widths) < 2 or any(not isinstance(width, int) or width < 1 for width in widths):
        expected = "at least two positive whole numbers, the first for the input and the last for the output"
        raise InputError(expected, repr(widths), where="mlp, widths")
    refuse_unknown(activation, _ACTIVATIONS, "activation")
    parts: OrderedDict[str, nn.Module] = OrderedDict(flatten=nn.Flatten())
    for number, (n_in, n_out) in enumerate(pairwise(widths), start=1):
        parts[f"fc{number}"] = nn.Linear(n_in, n_out, bias=bias)
        if number < len(widths) - 1:
            parts[f"{activation}{number}"] = _ACTIVATIONS[activation]()
    return nn.Sequential(parts)


def mnist_mlp(input_shape: Sequence[int] = (1, 28, 28), classes: int = 10, bias: bool = True) -> nn.Sequential:
    """784-50-50-50-30-10, the MNIST network of Petzka et al. (2019), appendix C: 46,000 weights."""
    return mlp((math.prod(input_shape), 50, 50, 50, 30, classes), bias=bias)


def two_layer(
    hidden: int = 128, input_shape: Sequence[int] = (1, 28, 28), classes: int = 10, bias: bool = True
) -> nn.Sequential:
    """One hidden layer: the width study of Neyshabur et al. (2017), 795 H + 10 parameters on MNIST."""
    return mlp((math.prod(input_shape), hidden, classes), bias=bias)


def mlp_1x512(input_shape: Sequence[int] = (3, 28, 28), classes: int = 10, bias: bool = True) -> nn.Sequential:
    """One hidden layer of 512, Zhang et al. (2017), Table 2: 1,209,866 parameters on 28×28×3."""
    return two_layer(512, input_shape, classes, bias)


def mlp_10x1000(input_shape: Sequence[int] = (1, 28, 28), classes: int = 10, bias: bool = True) -> nn.Sequential:
    """Ten hidden layers of 1000, Neyshabur et al. (2017), Figure 5: 9,794,000 weights, 10,010 biases."""
    return mlp((math.prod(input_shape), *[1000] * 10, classes), bias=bias)


def lenet5(input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, bias: bool = True) -> nn.Sequential:
    """LeNet-5 with ReLU and max-pooling, the network of Petzka et al. (2019): five weight layers.

    Convolutions 6@5×5 and 16@5×5, each followed by 2×2 pooling, then 120-84-`classes`. Images of 28×28 are
    padded by 2 inside the first convolution, so that MNIST gives 61,706 parameters and CIFAR-10 62,006.
    """
    channels, height, width = image_shape(input_shape, "lenet5", smallest=16)
    padding = 2 if height == width == 28 else 0
    rows, columns = (((size + 2 * padding - 4) // 2 - 4) // 2 for size in (height, width))
    return nn.Sequential(
        OrderedDict(
            conv1=nn.Conv2d(channels, 6, 5, padding=padding, bias=bias),
            relu1=nn.ReLU(),
            pool1=nn.MaxPool2d(2),
            conv2=nn.Conv2d(6, 16, 5, bias=bias),
            relu2=nn.ReLU(),
            pool2=nn.MaxPool2d(2),
            flatten=nn.Flatten(),
            fc1=nn.Linear(16 * rows * columns, 120, bias=bias),
            relu3=nn.ReLU(),
            fc2=nn.Linear(120, 84, bias=bias),
            relu4=nn.ReLU(),
            fc3=nn.Linear(84, classes, bias=bias),
        )
    )


def all_conv(
    channels: int = 16, input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, bias: bool = True
) -> nn.Sequential:
    """Five-layer all-convolutional network of Zhang et al. (2017): 9,370 parameters, W(c) = 34c² + 41c + 10.

    Three 3×3 convolutions of stride 2, one convolution over the whole remaining map (4×4 on CIFAR-10) and a
    1×1 convolution to the classes. The paper gives the count only; this is the one layout with a 3×3 first
    kernel and a single last position that has it.
    """
    n_in, height, width = image_shape(input_shape, "all_conv", smallest=1)
    if channels < 1:
        raise InputError("at least one channel", repr(channels), where="all_conv, channels")
    whole_map = (math.ceil(height / 8), math.ceil(width / 8))
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number, width_in in enumerate((n_in, channels, channels), start=1):
        parts[f"conv{number}"] = nn.Conv2d(width_in, channels, 3, stride=2, padding=1, bias=bias)
        parts[f"relu{number}"] = nn.ReLU()
    parts["conv4"] = nn.Conv2d(channels, channels, whole_map, bias=bias)
    parts["relu4"] = nn.ReLU()
    parts["conv5"] = nn.Conv2d(channels, classes, 1, bias=bias)
    parts["flatten"] = nn.Flatten()
    return nn.Sequential(parts)


_SMALL = (mlp, mnist_mlp, two_layer, mlp_1x512, mlp_10x1000, lenet5, all_conv)
_LARGE = (plainnet18, plainnet34, vgg, small_alexnet, small_inception, wide_resnet)
_BUILDERS: dict[str, Callable[..., nn.Module]] = {builder.__name__: builder for builder in (*_SMALL, *_LARGE)}


def available() -> dict[str, str]:
    """Names that `build` knows, each with one line about the network."""
    return {name: (inspect.getdoc(builder) or "").splitlines()[0] for name, builder in _BUILDERS.items()}


def model_options(name: str) -> list[str]:
    """Options that `build` takes for this network; `input_shape` is among them for all but "mlp"."""
    return list(inspect.signature(_model_builder(name)).parameters)


def build(name: str, *, seed: int = 0, **options: object) -> nn.Module:
    """Build a network by name with torch's default weights, drawn from `seed` alone, on the CPU.

    The global random state is neither read nor moved. For other starting weights, see `initialize`.

    Args:
        name: one of `available()`.
        seed: for the weights; the same seed gives the same weights.
        options: of that network: `input_shape`, `classes`, `bias`, `channels`, ...

    Raises:
        UnknownNameError: there is no such network, or it has no such option; the nearest are named.

    Example:
        >>> sum(p.numel() for p in build("all_conv", channels=16).parameters())
        9370
    """
    builder = _model_builder(name)
    signature = inspect.signature(builder)
    for option in options:
        refuse_unknown(option, signature.parameters, f"option of model {name}")
    try:
        signature.bind(**options)
    except TypeError as error:
        fix = f"Its options: {signature}"
        raise InputError(f"the options that {name} needs", str(error), f"build({name!r})", fix) from None
    with private_randomness(seed), torch.device("cpu"):
        return builder(**options)


def _model_builder(name: str) -> Callable[..., nn.Module]:
    refuse_unknown(name, _BUILDERS, "model")
    return _BUILDERS[name]
