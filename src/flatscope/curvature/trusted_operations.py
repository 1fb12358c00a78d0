"""Passes whose second derivative is right whatever the weights: all that is in them are listed operations of torch.

Autograd's second derivative of a pass is that of its gradient where every node of its graph is an operation whose
derivative torch differentiates rightly, and no hook changes what flows. Both can be seen: of the graph every node, of
hooks the calls that set them. What is not listed (a user's function, an operation that torch has wrong, such as
`weight_norm`, writes into a view, whose node hides another one) or held back (`detach`, `no_grad`) leaves a doubt, and
then numbers decide. `tests/curvature/test_trusted_operations.py` holds every entry to differences of its gradient.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._C import DisableTorchFunction

from flatscope.network.interception import Operation
from flatscope.network.operations import TO_PYTHON
from flatscope.network.passes import graph_nodes

# Names of autograd's nodes; the number tells which form of the operation it is.
LISTED = frozenset(
    f"{name}Backward{form}"
    for names in (
        # products
        "Addmm0 Addmv0 Addbmm0 Baddbmm0 Bmm0 Dot0 Mm0 Mv0 Convolution0 Embedding0",
        # sums, entry by entry and along axes
        "Add0 Add1 Sub0 Sub1 Rsub0 Rsub1 Neg0 Mul0 Mul1 Div0 Div1 Addcmul0 Addcdiv0 Lerp0 Reciprocal0",
        "Sum0 Sum1 Mean0 Mean1 Cumsum0 Logsumexp0 Softmax0 SafeSoftmax0 LogSoftmax0",
        # activations and functions of one number
        "Relu0 LeakyRelu0 PreluKernel0 Threshold0 Hardtanh0 Hardswish0 Hardshrink0 Softshrink0 Elu0 Celu0 Gelu0 Silu0",
        "Mish0 Softplus0 Sigmoid0 LogSigmoid0 Tanh0 Glu0 Abs0 Sign0 Clamp0 Clamp1 ClampMin0 ClampMax0",
        "Exp0 Expm10 Log0 Log1P0 Log20 Sqrt0 Rsqrt0 Pow0 Pow1 Pow2 Sin0 Cos0 Erf0",
        # choices
        "Maximum0 Minimum0 Max0 Max1 Min0 Min1 Amax0 Amin0 Where0 MaskedFill0",
        # normalisation and pooling
        "NativeBatchNorm0 NativeLayerNorm0 NativeGroupNorm0",
        "MaxPool2DWithIndices0 MaxPool3DWithIndices0 AvgPool2D0 AvgPool3D0 AdaptiveAvgPool2D0 AdaptiveAvgPool3D0",
        "AdaptiveMaxPool2D0 UpsampleNearest2D0 UpsampleBilinear2D0 UpsampleBicubic2D0",
        # what only changes places
        "View0 UnsafeView0 ReshapeAlias0 T0 Transpose0 Permute0 Squeeze0 Squeeze1 Squeeze2 Unsqueeze0 Expand0 Repeat0",
        "Cat0 Stack0 Split0 SplitWithSizes0 Unbind0 Select0 Slice0 Index0 IndexSelect0 Gather0 Scatter0 Scatter1",
        "ScatterAdd0 IndexAdd0 Flip0 Roll0 Tril0 Triu0 Diagonal0 DiagEmbed0 Unfold0 Im2Col0 Col2Im0 PixelShuffle0",
        "ConstantPadNd0 ReflectionPad1D0 ReflectionPad2D0 ReplicationPad1D0 ReplicationPad2D0 Clone0 ToCopy0 Alias0",
        # losses
        "NllLoss0 NllLoss2D0 MseLoss0 SmoothL1Loss0 HuberLoss0 BinaryCrossEntropy0 BinaryCrossEntropyWithLogits0",
    )
    for name, form in ((entry[:-1], entry[-1]) for entry in names.split())
)
_ENDS = ("torch::autograd::AccumulateGrad", "torch::autograd::GraphRoot")
# Settings of listed operations: of gradients that are scaled torch forgets that the second time.
_ODD_FORMS = ("_saved_scale_grad_by_freq", "_saved_sparse", "_saved_sparse_grad")
# Calls by which a pass may change what flows back, or hold it back: they matter where derivatives go through them.
_HOOKS = ("register_hook", "grad_fn", "backward_hooks")
_HELD_BACK = ("detach", "data", "set", *TO_PYTHON)


class Doubts:
    """Reasons, in words, why autograd's second derivative of a pass may be wrong.

    Attributes:
        suspects: the user's functions and hooks: what is named where a derivative is wrong.
        others: operations that are not listed, and values that are held back.
    """

    def __init__(self) -> None:
        self.suspects: dict[str, None] = {}
        self.others: dict[str, None] = {}

    def __bool__(self) -> bool:
        return bool(self.suspects or self.others)

    def follow(self, op: Operation) -> Any:
        """Run one operation, and note what it does to the way back."""
        if op.name in _HOOKS:
            self.suspects[f"a hook on a gradient{f' in {op.module}' if op.module else ''}"] = None
        with DisableTorchFunction():  # what is asked here is no operation of the network
            held_back = op.name in _HELD_BACK or not torch.is_grad_enabled()
            if any((held_back and value.requires_grad) or value.is_complex() for value in op.tensors):
                self.others[op.place] = None
        if _hooks_on_kept_values():
            self.others[f"hooks on what is kept for the backward pass, {op.place}"] = None
        return op.run()

    def look_through(self, tensor: Tensor) -> None:
        """Note every node of a tensor's graph that is not listed; functions of this package are."""
        for node in graph_nodes([tensor.grad_fn]):
            made_by: Any = getattr(type(node), "_forward_cls", None)  # the class with forward and backward
            name = node.name()
            if made_by is not None:
                if not made_by.__module__.startswith("flatscope."):
                    self.suspects[f"the autograd function {made_by.__name__}"] = None
            elif (name not in LISTED and name not in _ENDS) or any(getattr(node, form, False) for form in _ODD_FORMS):
                self.others[name] = None


def _hooks_on_kept_values() -> bool:
    """True where something is done to the tensors that autograd keeps, or where torch cannot tell."""
    engine = torch._C._autograd
    if not hasattr(engine, "_top_saved_tensors_default_hooks"):
        return True
    return engine._top_saved_tensors_default_hooks(False) is not None
