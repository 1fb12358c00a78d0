"""The papers' larger convolutional networks: PlainNets, VGG, small AlexNet, small Inception, Wide ResNet.

Convolutions in front of a BatchNorm have no bias (its shift does that work), so that folding the BatchNorm
gives each layer exactly one bias vector and the parameter counts that the papers' figures refer to.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flatscope.errors import InputError, refuse_unknown


def plainnet18(
    input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, batchnorm: bool = True, bias: bool = True
) -> nn.Sequential:
    """PlainNet-18 of Yi et al. (2019), 10,992,320 weights and 3,904 hidden channels.

    A stem of 64 channels, four stages of 3×3 convolutions of widths 64, 128, 256 and 512 (stride 2 at the
    start of stages 2 to 4), average pooling over the last map, one linear layer; no shortcuts.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        batchnorm: BatchNorm after each convolution. Without it the convolutions get biases (if `bias`), which
            is the shape of the network with its BatchNorm folded.
        bias: False leaves out all biases (with `batchnorm`: that of the linear layer).
    """
    return _plainnet((4, 4, 4, 4), input_shape, classes, batchnorm, bias)


def plainnet34(
    input_shape: Sequence[int] = (3, 32, 32), classes: int = 10, batchnorm: bool = True, bias: bool = True
) -> nn.Sequential:
    """PlainNet-34, the same family with stages of 6, 8, 12 and 6 convolutions; options as in `plainnet18`."""
    return _plainnet((6, 8, 12, 6), input_shape, classes, batchnorm, bias)


def vgg(
    input_shape: Sequence[int] = (3, 32, 32),
    classes: int = 10,
    batchnorm: bool = True,
    dropout: float = 0.5,
    preset: str = "paper",
) -> nn.Sequential:
    """VGG of Neyshabur et al. (2017), appendix A: 4,950,720 weights, 4,953,162 parameters once folded.

    Four stacks of two 3×3 convolutions (64, 128, 256, 512 channels), BatchNorm before each ReLU, dropout
    after each stack, max-pooling after the first three (after all four, the 4×4 average pooling that follows
    could not fit), then a hidden layer of 512.

    Args:
        input_shape: (channels, height, width), at least 8×8.
        classes: number of outputs.
        batchnorm: False gives every layer a bias instead: the shape of the folded network.
        dropout: rate of dropout after each stack; the paper does not state one.
        preset: "paper", or "companion" for the authors' published variant, with max-pooling at the end and
            BatchNorm behind the hidden layer only.
    """
    refuse_unknown(preset, ("paper", "companion"), "preset of vgg")
    n_in, height, width = image_shape(input_shape, "vgg", smallest=8)
    norm_convs = batchnorm and preset == "paper"
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number, n_out in enumerate((64, 128, 256, 512), start=1):
        stack = _conv_stack(n_in, n_out, depth=2, stride=1, batchnorm=norm_convs, bias=not norm_convs)
        if number < 4:
            stack["pool"] = nn.MaxPool2d(2)
        stack["dropout"] = nn.Dropout(dropout)
        parts[f"stack{number}"] = nn.Sequential(stack)
        n_in = n_out
    last_map = (height // 8, width // 8)
    parts["pool"] = nn.AvgPool2d(last_map) if preset == "paper" else nn.MaxPool2d(last_map)
    parts["flatten"] = nn.Flatten()
    parts["fc1"] = nn.Linear(512, 512, bias=not batchnorm)
    if batchnorm:
        parts["bn1"] = nn.BatchNorm1d(512)
    parts["relu1"] = nn.ReLU()
    parts["fc2"] = nn.Linear(512, classes)
    return nn.Sequential(parts)


def small_alexnet(input_shape: Sequence[int] = (3, 28, 28), classes: int = 10, lrn: bool = True) -> nn.Sequential:
    """Small AlexNet of Zhang et al. (2017), Table 2: 1,387,786 parameters on CIFAR-10 cropped to 28×28.

    Two times 64@5×5, 3×3 max-pooling of stride 2 and local response normalisation, then 384-192-`classes`.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        lrn: False leaves the local response normalisation out; the network is then piecewise linear.
    """
    n_in, height, width = image_shape(input_shape, "small_alexnet", smallest=4)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number in (1, 2):
        parts[f"conv{number}"] = nn.Conv2d(n_in, 64, 5, padding=2)
        parts[f"relu{number}"] = nn.ReLU()
        parts[f"pool{number}"] = nn.MaxPool2d(3, stride=2, padding=1)
        if lrn:
            parts[f"lrn{number}"] = nn.LocalResponseNorm(9, alpha=0.009, beta=0.75)  # torch divides alpha by size
        n_in, height, width = 64, _size_after_stride_two(height), _size_after_stride_two(width)
    parts["flatten"] = nn.Flatten()
    parts["fc1"] = nn.Linear(64 * height * width, 384)
    parts["relu3"] = nn.ReLU()
    parts["fc2"] = nn.Linear(384, 192)
    parts["relu4"] = nn.ReLU()
    parts["fc3"] = nn.Linear(192, classes)
    return nn.Sequential(parts)


def small_inception(
    input_shape: Sequence[int] = (3, 28, 28), classes: int = 10, batchnorm: bool = True
) -> nn.Sequential:
    """Small Inception of Zhang et al. (2017), Table 2: 1,649,402 parameters.

    That count leaves each convolution exactly one vector per channel: with `batchnorm` the shift of a
    BatchNorm whose scale is fixed at one, without it the bias.
    """
    n_in, height, width = image_shape(input_shape, "small_inception", smallest=4)
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    parts["stem"] = nn.Sequential(_conv_unit(n_in, 96, 3, 1, batchnorm))
    n_in = 96
    # Channels of the 1×1 and of the 3×3 branches; 0 marks a downsampling, with max-pooling for the 1×1 branch.
    narrow_widths = (32, 32, 0, 112, 96, 80, 48, 0, 176, 176)
    wide_widths = (32, 48, 80, 48, 64, 80, 96, 96, 160, 160)
    for number, (narrow, wide) in enumerate(zip(narrow_widths, wide_widths, strict=True), start=1):
        parts[f"block{number}"] = _InceptionBlock(n_in, narrow, wide, batchnorm)
        n_in = (narrow or n_in) + wide
    last_map = (
        _size_after_stride_two(_size_after_stride_two(height)),
        _size_after_stride_two(_size_after_stride_two(width)),
    )
    parts["pool"] = nn.AvgPool2d(last_map)
    parts["flatten"] = nn.Flatten()
    parts["fc"] = nn.Linear(n_in, classes)
    return nn.Sequential(parts)


def wide_resnet(
    input_shape: Sequence[int] = (3, 28, 28), classes: int = 10, depth: int = 40, widen: int = 4
) -> nn.Sequential:
    """Wide ResNet of Zhang et al. (2017), Table 2, WRN-40-4: 8,949,210 parameters.

    Pre-activation blocks (BatchNorm, ReLU, 3×3 convolution, twice) with 1×1 shortcuts where the width
    changes.

    Args:
        input_shape: (channels, height, width).
        classes: number of outputs.
        depth: 6k + 4 for k blocks in each of the three groups.
        widen: factor on the group widths 16, 32 and 64.
    """
    if depth < 10 or (depth - 4) % 6 or widen < 1:
        raise InputError("depth 6k + 4 with k ≥ 1 and widen ≥ 1", f"depth {depth}, widen {widen}", where="wide_resnet")
    n_in, height, width = image_shape(input_shape, "wide_resnet", smallest=4)
    parts: OrderedDict[str, nn.Module] = OrderedDict(stem=nn.Conv2d(n_in, 16, 3, padding=1, bias=False))
    n_in = 16
    for group, n_out in enumerate((16 * widen, 32 * widen, 64 * widen), start=1):
        blocks: OrderedDict[str, nn.Module] = OrderedDict()
        for number in range(1, (depth - 4) // 6 + 1):
            blocks[f"block{number}"] = _PreActivationBlock(n_in, n_out, stride=2 if group > 1 and number == 1 else 1)
            n_in = n_out
        parts[f"group{group}"] = nn.Sequential(blocks)
    parts["bn"] = nn.BatchNorm2d(n_in)
    parts["relu"] = nn.ReLU()
    parts["pool"] = nn.AvgPool2d(
        (_size_after_stride_two(_size_after_stride_two(height)), _size_after_stride_two(_size_after_stride_two(width)))
    )
    parts["flatten"] = nn.Flatten()
    parts["fc"] = nn.Linear(n_in, classes)
    return nn.Sequential(parts)


def image_shape(input_shape: Sequence[int], model: str, smallest: int) -> tuple[int, int, int]:
    """Channels, height and width, or an error that says what shape this model needs."""
    if len(input_shape) != 3 or min(input_shape) < 1 or min(input_shape[1:]) < smallest:
        needed = f"(channels, height, width) with images of at least {smallest}×{smallest}"
        raise InputError(needed, repr(tuple(input_shape)), where=f"{model}, input_shape")
    channels, height, width = input_shape
    return channels, height, width


class _InceptionBlock(nn.Module):
    """A 1×1 and a 3×3 branch side by side; `narrow` = 0: max-pooling and a 3×3 branch of stride 2."""

    def __init__(self, n_in: int, narrow: int, wide: int, batchnorm: bool) -> None:
        super().__init__()
        self.left: nn.Module
        if narrow:
            self.left = nn.Sequential(_conv_unit(n_in, narrow, 1, 1, batchnorm))
        else:
            self.left = nn.MaxPool2d(3, stride=2, padding=1)
        self.right = nn.Sequential(_conv_unit(n_in, wide, 3, 1 if narrow else 2, batchnorm))

    def forward(self, x: Tensor) -> Tensor:
        """Channels of both branches, one after the other."""
        return torch.cat([self.left(x), self.right(x)], dim=1)


class _PreActivationBlock(nn.Module):
    """Residual block of a Wide ResNet; where the width changes, the shortcut reads the activated input."""

    def __init__(self, n_in: int, n_out: int, stride: int) -> None:
        super().__init__()
        self.bn1, self.relu1 = nn.BatchNorm2d(n_in), nn.ReLU()
        self.conv1 = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=False)
        self.bn2, self.relu2 = nn.BatchNorm2d(n_out), nn.ReLU()
        self.conv2 = nn.Conv2d(n_out, n_out, 3, padding=1, bias=False)
        self.shortcut = nn.Conv2d(n_in, n_out, 1, stride=stride, bias=False) if n_in != n_out else None

    def forward(self, x: Tensor) -> Tensor:
        """Input plus what the two convolutions make of it."""
        active = self.relu1(self.bn1(x))
        kept = x if self.shortcut is None else self.shortcut(active)
        changed: Tensor = kept + self.conv2(self.relu2(self.bn2(self.conv1(active))))
        return changed


def _plainnet(
    depths: Sequence[int], input_shape: Sequence[int], classes: int, batchnorm: bool, bias: bool
) -> nn.Sequential:
    n_in, height, width = image_shape(input_shape, "plainnet", smallest=1)
    conv_bias = bias and not batchnorm
    parts: OrderedDict[str, nn.Module] = _conv_stack(n_in, 64, 1, 1, batchnorm, conv_bias)
    n_in = 64
    for number, (depth, n_out) in enumerate(zip(depths, (64, 128, 256, 512), strict=True), start=1):
        stride = 1 if number == 1 else 2
        parts[f"stage{number}"] = nn.Sequential(_conv_stack(n_in, n_out, depth, stride, batchnorm, conv_bias))
        n_in = n_out
        if stride == 2:
            height, width = _size_after_stride_two(height), _size_after_stride_two(width)
    parts["pool"] = nn.AvgPool2d((height, width))
    parts["flatten"] = nn.Flatten()
    parts["fc"] = nn.Linear(512, classes, bias=bias)
    return nn.Sequential(parts)


def _conv_stack(
    n_in: int, n_out: int, depth: int, stride: int, batchnorm: bool, bias: bool
) -> OrderedDict[str, nn.Module]:
    """`depth` times 3×3 convolution, BatchNorm if asked for, ReLU; the stride is that of the first."""
    parts: OrderedDict[str, nn.Module] = OrderedDict()
    for number in range(1, depth + 1):
        parts[f"conv{number}"] = nn.Conv2d(n_in, n_out, 3, stride=stride, padding=1, bias=bias)
        if batchnorm:
            parts[f"bn{number}"] = nn.BatchNorm2d(n_out)
        parts[f"relu{number}"] = nn.ReLU()
        n_in, stride = n_out, 1
    return parts


def _conv_unit(n_in: int, n_out: int, kernel: int, stride: int, batchnorm: bool) -> OrderedDict[str, nn.Module]:
    """Convolution with one vector per channel (bias, or shift of a BatchNorm without scale), then ReLU."""
    conv = nn.Conv2d(n_in, n_out, kernel, stride=stride, padding=kernel // 2, bias=not batchnorm)
    parts: OrderedDict[str, nn.Module] = OrderedDict(conv=conv)
    if batchnorm:
        parts["bn"] = norm = nn.BatchNorm2d(n_out)
        # The scale stays one for good: a buffer, so that it is neither trained nor counted.
        del norm.weight
        norm.register_buffer("weight", torch.ones(n_out))
    parts["relu"] = nn.ReLU()
    return parts


def _size_after_stride_two(size: int) -> int:
    """Side of a map after a padded 3×3 window of stride 2."""
    return (size + 1) // 2
