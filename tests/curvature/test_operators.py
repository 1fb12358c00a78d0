"""Hessian and Gauss-Newton products against dense matrices; symmetric, linear, blocks, SciPy."""

from __future__ import annotations

from contextlib import nullcontext

import numpy as np
import pytest
import torch
from networks import BUILDERS, attention, mlp, regression, smooth
from references import Dense, dense
from torch import Tensor, nn
from torch.func import functional_call

import flatscope as fs
from flatscope.curvature.convolutions import FastConvolutions
from flatscope.curvature.hessian_products import vector_jacobian
from flatscope.curvature.operators import GaussNewton, Hessian
from flatscope.errors import InputError, UnknownNameError

pytestmark = pytest.mark.fast


@pytest.mark.parametrize("build", BUILDERS, ids=lambda build: build.__name__)
def test_hessian_products(build) -> None:  # type: ignore[no-untyped-def]
    written_out = dense(build.__name__, build)
    operator = Hessian(fs.Context(written_out.tiny.problem(batch_size=4)))
    products = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    torch.testing.assert_close(products, written_out.hessian, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(products, products.T, rtol=1e-9, atol=1e-12)


def _dense_gauss_newton(reference: Dense) -> Tensor:
    """Mean over samples of Jᵀ(∇²ℓ)J, sample by sample."""
    tiny, names = reference.tiny, list(reference.params)
    total = 0.0
    for x in tiny.x:

        def outputs(vector: Tensor, x: Tensor = x) -> Tensor:
            params, start = {}, 0
            for name in names:
                size = reference.params[name].numel()
                params[name] = vector[start : start + size].reshape(reference.params[name].shape)
                start += size
            return functional_call(tiny.model, params, (x[None],))[0]

        vector = reference.vector(names)
        jacobian = torch.autograd.functional.jacobian(outputs, vector)
        if tiny.loss == "mse":
            curvature = 2 * torch.eye(len(jacobian), dtype=torch.float64)
        else:
            p = outputs(vector).softmax(0)
            curvature = torch.diag(p) - p[:, None] * p[None, :]
        total = total + jacobian.T @ curvature @ jacobian
    return total / len(tiny.x)


@pytest.mark.parametrize("build", [mlp, regression, smooth], ids=lambda build: build.__name__)
def test_gauss_newton_products(build) -> None:  # type: ignore[no-untyped-def]
    written_out = dense(build.__name__, build)
    operator = GaussNewton(fs.Context(written_out.tiny.problem(batch_size=3)))
    products = operator @ torch.eye(operator.shape[0], dtype=torch.float64)
    torch.testing.assert_close(products, _dense_gauss_newton(written_out), rtol=1e-9, atol=1e-12)
    assert torch.linalg.eigvalsh(products)[0] > -1e-12


def test_one_layer_is_a_block_of_the_whole() -> None:
    ctx = fs.Context(mlp().problem())
    whole = Hessian(ctx) @ torch.eye(Hessian(ctx).shape[0], dtype=torch.float64)
    names = list(ctx.params)
    start = sum(ctx.params[name].numel() for name in names[: names.index("2.weight")])
    size = ctx.params["2.weight"].numel()
    block = Hessian(ctx, ["2.weight"]) @ torch.eye(size, dtype=torch.float64)
    torch.testing.assert_close(block, whole[start : start + size, start : start + size], rtol=1e-10, atol=1e-14)


def test_products_are_linear_and_take_vectors() -> None:
    operator = Hessian(fs.Context(attention().problem()))
    generator = torch.Generator().manual_seed(0)
    a, b = torch.randn(2, operator.shape[0], generator=generator, dtype=torch.float64)
    torch.testing.assert_close(
        operator @ (2 * a - 3 * b), 2 * (operator @ a) - 3 * (operator @ b), rtol=1e-9, atol=1e-12
    )


def test_scipy_form_and_charged_passes() -> None:
    ctx = fs.Context(mlp().problem())
    operator = Hessian(ctx)
    linear = operator.to_scipy()
    vectors = np.random.default_rng(0).normal(size=(operator.shape[0], 2))
    np.testing.assert_allclose(linear @ vectors, (operator @ torch.from_numpy(vectors)).numpy(), rtol=1e-12)
    assert ctx.passes["curvature"] == pytest.approx(4)


def test_wrong_length_and_unknown_parameter() -> None:
    ctx = fs.Context(mlp().problem())
    with pytest.raises(InputError, match="vectors of length"):
        Hessian(ctx) @ torch.ones(3)
    with pytest.raises(UnknownNameError, match=r"0\.weight"):
        Hessian(ctx, ["0.weigth"])


def test_dict_batches_through_attention() -> None:
    """Batches as mappings, outputs with .logits, token ids: what a language model is fed with."""

    class Output:
        def __init__(self, logits: Tensor) -> None:
            self.logits = logits

    class Small(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)
            self.attend = nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True)
            self.head = nn.Linear(4, 3)

        def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Output:
            hidden = self.attend(self.embed(input_ids), src_key_padding_mask=~attention_mask)
            return Output(self.head(hidden.mean(1)))

    generator = torch.Generator().manual_seed(0)
    batches = [
        {
            "input_ids": torch.randint(0, 7, (n, 5), generator=generator),
            "attention_mask": torch.ones(n, 5, dtype=torch.bool),
            "labels": torch.randint(0, 3, (n,), generator=generator),
        }
        for n in (4, 3)
    ]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)  # the trace of a network with attention may be negative at other weights
        model = Small().double().eval()
    table = fs.measure(fs.Problem(model, train=batches), ["hessian_trace", "gradient_norm", "layer_trace"])
    assert table["hessian_trace"] > 0
    assert list(table.layer("layer_trace"))[-1] == "head"


def test_a_batch_of_vectors_without_a_batching_rule() -> None:
    class Square(torch.autograd.Function):
        """No vmap rule on purpose."""

        @staticmethod
        def forward(ctx, x):  # type: ignore[no-untyped-def]
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, g):  # type: ignore[no-untyped-def]
            return 2 * ctx.saved_tensors[0] * g

    x = torch.arange(3.0, dtype=torch.float64).requires_grad_()
    vectors = torch.eye(3, dtype=torch.float64)
    found = vector_jacobian([Square.apply(x)], [x], [vectors])[0]
    torch.testing.assert_close(found, torch.diag(2 * x.detach()))


CONVOLUTIONS = {
    "plain": lambda: nn.Conv2d(4, 6, 3),
    "strided, dilated, padded": lambda: nn.Conv2d(4, 6, 3, stride=2, padding=(2, 1), dilation=2),
    "grouped, without bias": lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False),
    "depthwise": lambda: nn.Conv2d(4, 4, 3, padding=1, groups=4),
    "padding by word": lambda: nn.Conv2d(4, 6, 3, padding="same"),
    "reflected": lambda: nn.Conv2d(4, 6, 3, padding=1, padding_mode="reflect"),
    "transposed": lambda: nn.ConvTranspose2d(4, 6, 3, stride=2, padding=1, groups=2),
    "one dimension": lambda: nn.Sequential(nn.Flatten(2), nn.Conv1d(4, 6, 5, stride=3), nn.Unflatten(2, (-1, 1))),
    "three dimensions": lambda: nn.Sequential(
        nn.Unflatten(1, (2, 2)), nn.Conv3d(2, 3, (2, 3, 3), padding=1, stride=(1, 2, 1)), nn.Flatten(1, 2)
    ),
}


@pytest.mark.parametrize("kind", CONVOLUTIONS)
def test_convolutions_have_the_same_first_and_second_derivatives(kind: str) -> None:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        body = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Tanh(), CONVOLUTIONS[kind](), nn.Tanh(), nn.Flatten()).double()
        x = torch.randn(3, 2, 9, 8, dtype=torch.float64)
    params = list(body.parameters())

    def products(fast: bool) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
        with FastConvolutions() if fast else nullcontext():
            loss = body(x).square().sum(1).pow(1.5).sum()
        gradients = torch.autograd.grad(loss, params, create_graph=True)
        generator = torch.Generator().manual_seed(1)
        vectors = [torch.randn(2, *p.shape, generator=generator, dtype=torch.float64) for p in params]
        one = torch.autograd.grad(gradients, params, [v[0] for v in vectors], retain_graph=True, create_graph=True)
        third = torch.autograd.grad(
            [(a * v[1]).sum() for a, v in zip(one, vectors, strict=True)], params, retain_graph=True
        )
        return list(gradients), vector_jacobian(gradients, params, vectors), list(third)

    for found, expected in zip(products(fast=True), products(fast=False), strict=True):
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_output_padding_of_which_pytorch_has_no_second_derivative() -> None:
    """By finite differences: PyTorch's own double backward refuses it."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=generator).double().requires_grad_() for shape in [(2, 2, 3), (2, 1, 3)])

    def convolved(x: Tensor, weight: Tensor) -> Tensor:
        with FastConvolutions():
            return nn.functional.conv_transpose1d(x, weight, stride=2, padding=1, output_padding=1).tanh()

    assert torch.autograd.gradcheck(convolved, (x, weight))
    assert torch.autograd.gradgradcheck(convolved, (x, weight))


def test_the_fast_convolutions_are_those_that_run() -> None:
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)).double()
    problem = fs.Problem(model, train=(torch.randn(2, 1, 4, 4).double(), torch.tensor([0, 1])))
    operator = fs.hessian(problem)
    operator @ torch.ones(operator.size)
    graph, names = [operator._kept[0][1].args[0][0].grad_fn], set()
    while graph:
        node = graph.pop()
        names.add(type(node).__name__)
        graph += [following for following, _ in node.next_functions if following is not None]
    assert "_DerivativeBackward" in names
    assert "ConvolutionBackward0" not in names
