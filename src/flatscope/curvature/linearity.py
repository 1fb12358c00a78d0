"""For which parameters is the Hessian block exactly the Gauss-Newton block?

Where everything between a parameter and the outputs is piecewise linear, and the parameter is used once, the
second derivative of the outputs with respect to it vanishes almost everywhere. The recorded autograd graph says
so operation by operation; a numerical probe (see `sweep`) checks that the graph was read correctly.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from flatscope.network.layers import Call
from flatscope.params import Params

# Names of autograd nodes, without "Backward" and version digits.
_PIECEWISE_LINEAR = frozenset(
    """
    Add Sub Rsub Neg Relu LeakyRelu Hardtanh Clamp ClampMin ClampMax Threshold Abs Maximum Minimum Max Min Amax Amin
    View ViewAs Alias UnsafeView ReshapeAlias Reshape Flatten Unflatten Expand Squeeze Unsqueeze Transpose T Permute
    Select Slice Split SplitWithSizes Chunk Unbind Unfold AsStrided Cat Stack Repeat RepeatInterleave Roll Flip
    Narrow Index IndexSelect Gather Where MaskedFill MaskedSelect Clone Copys ToCopy Contiguous Movedim Diagonal
    MaxPool1D MaxPool2D MaxPool2DWithIndices MaxPool3DWithIndices AvgPool1D AvgPool2D AvgPool3D AdaptiveAvgPool1D
    AdaptiveAvgPool2D AdaptiveAvgPool3D AdaptiveMaxPool1D AdaptiveMaxPool2D AdaptiveMaxPool3D MkldnnMaxPool2D
    Mean Sum ConstantPadNd ReflectionPad1D ReflectionPad2D ReflectionPad3D ReplicationPad1D ReplicationPad2D
    ReplicationPad3D UpsampleNearest1D UpsampleNearest2D UpsampleNearest3D UpsampleBilinear2D UpsampleLinear1D
    UpsampleTrilinear3D UpsampleBicubic2D PixelShuffle PixelUnshuffle NativeChannelShuffle Median Sort Topk Col2Im
    Im2Col Tril Triu Fmax Fmin Identity Detach
    """.split()  # noqa: SIM905  a list literal of a hundred strings would hide the words
)
# Linear in each argument: piecewise linear in a parameter that enters through one of them only.
_MULTILINEAR = frozenset(
    """
    Addmm Mm Bmm Baddbmm Addbmm Mv Addmv Dot Mul Linear MkldnnLinear Convolution MkldnnConvolution CudnnConvolution
    ConvolutionOverrideable SlowConv2D SlowConv3D ThnnConv2D SlowConvTranspose2D NativeBatchNorm CudnnBatchNorm
    MiopenBatchNorm BatchNorm PreluKernel Prelu EmbeddingBackward Embedding Einsum Addcmul
    """.split()  # noqa: SIM905  a list literal of a hundred strings would hide the words
)


def operation(node: Any) -> str:
    """The name of an autograd node without "Backward" and version digits."""
    return re.sub(r"Backward\d*$", "", str(node.name()))


def curved_parameters(outputs: Tensor, leaves: Params, calls: list[Call]) -> dict[str, str]:
    """{parameter: reason} for those whose Hessian block is not known to be Gauss-Newton."""
    bit = {id(value): 1 << i for i, value in enumerate(leaves.values())}
    below = _parameters_below(outputs, bit)
    curved: dict[int, str] = {}

    def taint(mask: int, reason: str) -> None:
        while mask:
            lowest = mask & -mask
            curved.setdefault(lowest, reason)
            mask ^= lowest

    for node, mask in below.items():
        name = operation(node)
        if hasattr(node, "variable") or name in _PIECEWISE_LINEAR:
            continue
        if name in _MULTILINEAR:
            seen = 0
            for child, _ in node.next_functions:
                own = below.get(child, 0)
                taint(seen & own, f"{name} multiplies it with itself")
                seen |= own
        elif name == "Div":
            taint(below.get(node.next_functions[1][0], 0), "it stands in a denominator")
        else:
            taint(mask, f"{name} is not piecewise linear")
    reasons = {name: curved[bit[id(value)]] for name, value in leaves.items() if bit[id(value)] in curved}
    weights = [call.weight for call in calls]
    for call in calls:
        if weights.count(call.weight) > 1:
            reasons.setdefault(call.weight, f"{call.weight} is used {weights.count(call.weight)} times")
            if call.bias:
                reasons.setdefault(call.bias, f"{call.bias} is used {weights.count(call.weight)} times")
        if call.opaque:
            reasons.setdefault(call.weight, "inside attention")
    return reasons


def reached_parameters(outputs: Tensor, leaves: Params) -> set[str]:
    """Names of the parameters that the outputs depend on at all."""
    bit = {id(value): 1 << i for i, value in enumerate(leaves.values())}
    mask = _parameters_below(outputs, bit).get(outputs.grad_fn, 0)
    return {name for name, value in leaves.items() if mask & bit[id(value)]}


def _parameters_below(outputs: Tensor, bit: dict[int, int]) -> dict[Any, int]:
    """Bit mask of the parameters that each node of the graph depends on, children before parents."""
    masks: dict[Any, int] = {}
    stack: list[tuple[Any, bool]] = [(outputs.grad_fn, False)]
    visited: set[Any] = set()
    while stack:
        node, finished = stack.pop()
        if node is None:
            continue
        if finished:
            mask = bit.get(id(node.variable), 0) if hasattr(node, "variable") else 0
            for child, _ in node.next_functions:
                mask |= masks.get(child, 0)
            masks[node] = mask
        elif node not in visited:
            visited.add(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in node.next_functions)
    return masks
