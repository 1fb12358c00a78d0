"""Torch has the second derivative of every listed operation right."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from flatscope.curvature.trusted_operations import LISTED
from flatscope.isolation import own_settings
from flatscope.network.passes import graph_nodes

torch.set_num_threads(1)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)), dtype=torch.float64)


X = drawn(3, 4)
LARGE = X.abs() + 0.5
OTHER = drawn(3, 4).roll(1, 0) * 1.3 + 0.1
IMAGES = drawn(2, 4, 5, 5)
VOLUMES = drawn(1, 2, 4, 4, 4)
CLASSES = torch.tensor([0, 1, 3])
PLACES = torch.tensor([[0], [1], [3]])
CHANCES = torch.softmax(OTHER, 1)
Case = tuple[Callable[..., Tensor], tuple[Tensor, ...]]


def case(function: Callable[..., Tensor], *given: Tensor) -> Case:
    return function, given


def normalised(x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
    return functional.batch_norm(x, torch.zeros(4).double(), torch.full((4,), 2.0).double(), weight, bias)


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True)


VECTOR = drawn(4)
ATTENTION = (drawn(1, 2, 3, 4), drawn(1, 2, 3, 4).flip(2), drawn(1, 2, 3, 4).flip(3))
CASES: dict[str, Case] = {
    "Addmm0": case(functional.linear, X, drawn(5, 4), drawn(5)),
    "Addmv0": case(torch.addmv, drawn(3), X, VECTOR),
    "Addbmm0": case(torch.addbmm, drawn(3, 5), drawn(2, 3, 4), drawn(2, 4, 5)),
    "Baddbmm0": case(torch.baddbmm, drawn(2, 3, 5), drawn(2, 3, 4), drawn(2, 4, 5)),
    "Bmm0": case(torch.matmul, drawn(2, 3, 4), drawn(2, 4, 5)),
    "Dot0": case(torch.dot, VECTOR, VECTOR),
    "Mm0": case(torch.mm, X, drawn(4, 2)),
    "Mv0": case(torch.mv, X, VECTOR),
    "Convolution0": case(lambda x, w, b: functional.conv2d(x, w, b, 2, 1, 2, 2), IMAGES, drawn(6, 2, 3, 3), drawn(6)),
    "Embedding0": case(lambda w: functional.embedding(CLASSES, w, padding_idx=1), drawn(4, 3)),
    "Add0": case(torch.add, X, VECTOR),
    "Add1": case(lambda x: torch.ops.aten.add.Scalar(x, 2.0), X),
    "Sub0": case(torch.sub, X, VECTOR),
    "Sub1": case(lambda x: torch.ops.aten.sub.Scalar(x, 2.0), X),
    "Rsub0": case(torch.rsub, X, VECTOR),
    "Rsub1": case(lambda x: 1 - x, X),
    "Neg0": case(torch.neg, X),
    "Mul0": case(torch.mul, X, VECTOR),
    "Mul1": case(lambda q, k, v: attended(q, k, v), *ATTENTION),
    "Div0": case(torch.div, X, VECTOR.abs() + 1),
    "Div1": case(lambda x: functional.cross_entropy(x, CHANCES), X),
    "Addcmul0": case(torch.addcmul, X, X, OTHER),
    "Addcdiv0": case(torch.addcdiv, X, X, LARGE),
    "Lerp0": case(lambda x, y: torch.lerp(x, y, 0.3), X, OTHER),
    "Reciprocal0": case(torch.reciprocal, LARGE),
    "Sum0": case(torch.sum, X),
    "Sum1": case(lambda x: x.sum(1), X),
    "Mean0": case(torch.mean, X),
    "Mean1": case(lambda x: x.mean(1), X),
    "Cumsum0": case(lambda x: x.cumsum(1), X),
    "Logsumexp0": case(lambda x: x.logsumexp(1), X),
    "Softmax0": case(lambda x: x.softmax(1), X),
    "SafeSoftmax0": case(attended, *ATTENTION),
    "LogSoftmax0": case(lambda x: x.log_softmax(1), X),
    "Relu0": case(torch.relu, X),
    "LeakyRelu0": case(functional.leaky_relu, X),
    "PreluKernel0": case(functional.prelu, X, VECTOR.abs()),
    "Threshold0": case(lambda x: functional.threshold(x, 0.1, 0.0), X),
    "Hardtanh0": case(functional.hardtanh, X),
    "Hardswish0": case(functional.hardswish, X),
    "Hardshrink0": case(functional.hardshrink, X),
    "Softshrink0": case(functional.softshrink, X),
    "Elu0": case(functional.selu, X),
    "Celu0": case(functional.celu, X),
    "Gelu0": case(lambda x: functional.gelu(x) + functional.gelu(x, approximate="tanh"), X),
    "Silu0": case(functional.silu, X),
    "Mish0": case(functional.mish, X),
    "Softplus0": case(functional.softplus, X),
    "Sigmoid0": case(torch.sigmoid, X),
    "LogSigmoid0": case(functional.logsigmoid, X),
    "Tanh0": case(torch.tanh, X),
    "Glu0": case(functional.glu, X),
    "Abs0": case(torch.abs, X),
    "Sign0": case(torch.sign, X),
    "Clamp0": case(lambda x, y: x.clamp(min=y), X, VECTOR),
    "Clamp1": case(lambda x: x.clamp(-0.5, 0.5), X),
    "ClampMin0": case(lambda x: x.clamp_min(0.0), X),
    "ClampMax0": case(lambda x: x.clamp_max(0.0), X),
    "Exp0": case(torch.exp, X),
    "Expm10": case(torch.expm1, X),
    "Log0": case(torch.log, LARGE),
    "Log1P0": case(torch.log1p, LARGE),
    "Log20": case(torch.log2, LARGE),
    "Sqrt0": case(torch.sqrt, LARGE),
    "Rsqrt0": case(torch.rsqrt, LARGE),
    "Pow0": case(lambda x: x**3, X),
    "Pow1": case(torch.pow, LARGE, X),
    "Pow2": case(lambda x: 2.0**x, X),
    "Sin0": case(torch.sin, X),
    "Cos0": case(torch.cos, X),
    "Erf0": case(torch.erf, X),
    "Maximum0": case(torch.maximum, X, OTHER),
    "Minimum0": case(torch.minimum, X, OTHER),
    "Max0": case(lambda x: x.max(1).values, X),
    "Max1": case(torch.max, X),
    "Min0": case(lambda x: x.min(1).values, X),
    "Min1": case(torch.min, X),
    "Amax0": case(lambda x: x.amax(1), X),
    "Amin0": case(lambda x: x.amin(1), X),
    "Where0": case(lambda x, y: torch.where(X > 0, x, y), X, OTHER),
    "MaskedFill0": case(lambda x: x.masked_fill(X > 0, 0.0), X),
    "NativeBatchNorm0": case(normalised, drawn(3, 4, 2), VECTOR, VECTOR.flip(0)),
    "NativeLayerNorm0": case(lambda x, w, b: functional.layer_norm(x, (4,), w, b), X, VECTOR, VECTOR.flip(0)),
    "NativeGroupNorm0": case(lambda x, w, b: functional.group_norm(x, 2, w, b), drawn(2, 4, 3), VECTOR, VECTOR.flip(0)),
    "MaxPool2DWithIndices0": case(lambda x: functional.max_pool2d(x, 2), IMAGES),
    "MaxPool3DWithIndices0": case(lambda x: functional.max_pool3d(x, 2), VOLUMES),
    "AvgPool2D0": case(lambda x: functional.avg_pool2d(x, 2), IMAGES),
    "AvgPool3D0": case(lambda x: functional.avg_pool3d(x, 2), VOLUMES),
    "AdaptiveAvgPool2D0": case(lambda x: functional.adaptive_avg_pool2d(x, 2), IMAGES),
    "AdaptiveAvgPool3D0": case(lambda x: functional.adaptive_avg_pool3d(x, 3), VOLUMES),
    "AdaptiveMaxPool2D0": case(lambda x: functional.adaptive_max_pool2d(x, 2), IMAGES),
    "UpsampleNearest2D0": case(lambda x: functional.interpolate(x, scale_factor=2), IMAGES[:, :1]),
    "UpsampleBilinear2D0": case(lambda x: functional.interpolate(x, scale_factor=2, mode="bilinear"), IMAGES[:, :1]),
    "UpsampleBicubic2D0": case(lambda x: functional.interpolate(x, scale_factor=2, mode="bicubic"), IMAGES[:1, :1]),
    "View0": case(lambda x: x.view(4, 3), X),
    "UnsafeView0": case(lambda x: x.t().reshape(-1), X),
    "ReshapeAlias0": case(attended, *ATTENTION),
    "T0": case(lambda x: x.t(), X),
    "Transpose0": case(lambda x: x.transpose(0, 1), X),
    "Permute0": case(lambda x: x.permute(1, 0), X),
    "Squeeze0": case(lambda x: x.squeeze(), drawn(3, 1)),
    "Squeeze1": case(lambda x: x.squeeze(1), drawn(3, 1)),
    "Squeeze2": case(lambda x: x.squeeze((1,)), drawn(3, 1)),
    "Unsqueeze0": case(lambda x: x.unsqueeze(1), X),
    "Expand0": case(lambda x: x.expand(3, 4), VECTOR),
    "Repeat0": case(lambda x: x.repeat(2, 1), X),
    "Cat0": case(lambda x, y: torch.cat([x, y]), X, OTHER),
    "Stack0": case(lambda x, y: torch.stack([x, y]), X, OTHER),
    "Split0": case(lambda x: x.chunk(2, 1)[0], X),
    "SplitWithSizes0": case(lambda x: x.split([1, 3], 1)[1], X),
    "Unbind0": case(lambda x: x.unbind()[1], X),
    "Select0": case(lambda x: x[0], X),
    "Slice0": case(lambda x: x[:, 1:3], X),
    "Index0": case(lambda x: x[torch.tensor([0, 2, 2])], X),
    "IndexSelect0": case(lambda x: x.index_select(0, torch.tensor([0, 2, 2])), X),
    "Gather0": case(lambda x: x.gather(1, PLACES), X),
    "Scatter0": case(lambda x, y: x.scatter(1, PLACES, y), X, drawn(3, 1)),
    "Scatter1": case(lambda x: x.scatter(1, PLACES, -1.0), X),
    "ScatterAdd0": case(lambda x, y: x.scatter_add(0, torch.tensor([[0, 1, 2, 0]]), y), X, drawn(1, 4)),
    "IndexAdd0": case(lambda x, y: x.index_add(0, torch.tensor([0, 2]), y), X, drawn(2, 4)),
    "Flip0": case(lambda x: x.flip(1), X),
    "Roll0": case(lambda x: x.roll(1, 1), X),
    "Tril0": case(lambda x: x.tril(), X),
    "Triu0": case(lambda x: x.triu(), X),
    "Diagonal0": case(lambda x: x.diagonal(), X),
    "DiagEmbed0": case(lambda x: x.diag_embed(), X),
    "Unfold0": case(lambda x: x.unfold(1, 2, 1), X),
    "Im2Col0": case(lambda x: functional.unfold(x, 2), IMAGES[:1]),
    "Col2Im0": case(lambda x: functional.fold(x, (3, 3), 2), drawn(1, 4, 4)),
    "PixelShuffle0": case(lambda x: functional.pixel_shuffle(x, 2), IMAGES[:1]),
    "ConstantPadNd0": case(lambda x: functional.pad(x, (1, 1)), X),
    "ReflectionPad1D0": case(lambda x: functional.pad(x, (1, 1), "reflect"), drawn(1, 2, 3)),
    "ReflectionPad2D0": case(lambda x: functional.pad(x, (1, 1, 1, 1), "reflect"), drawn(1, 1, 3, 3)),
    "ReplicationPad1D0": case(lambda x: functional.pad(x, (1, 1), "replicate"), drawn(1, 2, 3)),
    "ReplicationPad2D0": case(lambda x: functional.pad(x, (1, 1, 1, 1), "replicate"), drawn(1, 1, 3, 3)),
    "Clone0": case(lambda x: x.clone(), X),
    "ToCopy0": case(lambda x: x.to(torch.float64, copy=True), X),
    "Alias0": case(lambda x: torch.ops.aten.alias(x), X),
    "NllLoss0": case(lambda x: functional.nll_loss(x, CLASSES), X),
    "NllLoss2D0": case(lambda x: functional.nll_loss(x, torch.zeros(1, 2, 2, dtype=torch.long)), drawn(1, 3, 2, 2)),
    "MseLoss0": case(functional.mse_loss, X, OTHER),
    "SmoothL1Loss0": case(functional.smooth_l1_loss, X, OTHER),
    "HuberLoss0": case(functional.huber_loss, X, OTHER),
    "BinaryCrossEntropy0": case(lambda x: functional.binary_cross_entropy(x.sigmoid(), CHANCES), X),
    "BinaryCrossEntropyWithLogits0": case(
        lambda x: functional.binary_cross_entropy_with_logits(x, CHANCES, pos_weight=VECTOR.abs()), X
    ),
}
MORE: dict[str, Case] = {
    "transposed": case(
        lambda x, w: functional.conv_transpose2d(x, w, None, 2, 1, 1, 2, 1), IMAGES[:1, :, :3, :3], drawn(4, 3, 3, 3)
    ),
    "of volumes": case(functional.conv3d, VOLUMES, drawn(2, 2, 2, 2, 2)),
    "depthwise": case(lambda x, w: functional.conv1d(x, w, groups=4), IMAGES[:, :, 0], drawn(4, 1, 3)),
    "scale without shift": case(normalised, drawn(3, 4, 2), VECTOR),
    "of all entries": case(lambda x: functional.layer_norm(x, (3, 4)), X),
    "vocabulary": case(lambda w: functional.embedding(torch.tensor([[0, 1], [1, 1]]), w).tanh(), drawn(4, 3)),
}


def copies(given: tuple[Tensor, ...]) -> list[Tensor]:
    return [value.detach().clone().requires_grad_() for value in given]


def test_every_listed_operation_has_a_case() -> None:
    assert {f"{name[:-1]}Backward{name[-1]}" for name in CASES} == LISTED


@pytest.mark.parametrize("name", CASES)
def test_a_listed_operation_is_differentiated_twice_as_differences_say(name: str) -> None:
    function, given = CASES[name]
    with own_settings():
        result = function(*copies(given))
        assert f"{name[:-1]}Backward{name[-1]}" in {node.name() for node in graph_nodes([result.grad_fn])}
        assert torch.autograd.gradgradcheck(function, copies(given), atol=1e-6)


@pytest.mark.parametrize("name", MORE)
def test_other_forms_of_listed_operations_too(name: str) -> None:
    function, given = MORE[name]
    names = {node.name() for node in graph_nodes([function(*copies(given)).grad_fn])}
    assert names - {"torch::autograd::AccumulateGrad"} <= LISTED
    assert torch.autograd.gradgradcheck(function, copies(given), atol=1e-6)
