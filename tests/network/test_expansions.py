"""Every expansion gives the values and the derivatives of the function that it stands for, or leaves it alone."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatscope.network.expansions import EXPANSIONS
from flatscope.network.interception import Operation, tensors_in, watched

Case = tuple[str, Callable[..., Any], tuple[Tensor, ...]]


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Random numbers in float64."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def calls_of(function: Callable[..., Any]) -> list[str]:
    """Run it; the names of expansions among what it calls."""
    seen: list[str] = []

    def note(op: Operation) -> Any:
        seen.append(op.name)
        return op.run()

    with watched(note):
        function()
    return [name for name in seen if name in EXPANSIONS]


def expanded(function: Callable[..., Any], *tensors: Tensor, refused: list[str] | None = None) -> Any:
    """The function with its expansions in the place of what they stand for."""

    def rule(op: Operation) -> Any:
        if op.name in EXPANSIONS:
            found = EXPANSIONS[op.name](*op.args, **op.kwargs)
            if found is not NotImplemented:
                return found
            if refused is not None:
                refused.append(op.name)
        return op.run()

    with watched(rule):
        return function(*tensors)


def results(made: Any) -> list[Tensor]:
    return [tensor for tensor in tensors_in(made) if tensor.is_floating_point()]


def module_call(module: nn.Module, *inputs: Any, **options: Any) -> tuple[Callable[..., Any], tuple[Tensor, ...]]:
    """A module as a function of its parameters and its inputs."""
    module.double().eval()
    names = [name for name, _ in module.named_parameters()]
    torch.manual_seed(0)
    params = [draw(*value.shape, seed=place) / 2 for place, value in enumerate(module.parameters())]

    def call(*tensors: Tensor) -> Any:
        given = dict(zip(names, tensors[: len(names)], strict=True))
        return torch.func.functional_call(module, given, (*tensors[len(names) :], *inputs[n_tensors:]), options)

    n_tensors = sum(isinstance(value, Tensor) and value.is_floating_point() for value in inputs)
    return call, (*params, *inputs[:n_tensors])


def recurrent() -> list[Case]:
    found: list[Case] = []
    kinds: list[tuple[str, type[nn.Module], dict[str, Any]]] = [
        ("lstm", nn.LSTM, {}),
        ("lstm", nn.LSTM, {"proj_size": 2}),
        ("gru", nn.GRU, {}),
        ("rnn_tanh", nn.RNN, {}),
        ("rnn_relu", nn.RNN, {"nonlinearity": "relu"}),
    ]
    for (name, kind, options), layers, both, first, bias in itertools.product(
        kinds, (1, 2), (False, True), (False, True), (True, False)
    ):
        if layers == 2 and both != first:
            continue  # enough
        built = kind(3, 4, num_layers=layers, bidirectional=both, batch_first=first, bias=bias, **options)
        found.append((name, *module_call(built, draw(2, 3, 3, seed=9))))
    for name, cell in (("lstm_cell", nn.LSTMCell), ("gru_cell", nn.GRUCell), ("rnn_tanh_cell", nn.RNNCell)):
        found += [(name, *module_call(cell(3, 4, bias=bias), draw(2, 3))) for bias in (True, False)]
    return [*found, ("rnn_relu_cell", *module_call(nn.RNNCell(3, 4, nonlinearity="relu"), draw(2, 3)))]


def attention() -> list[Case]:
    x, y, wide = draw(2, 3, 4), draw(2, 5, 4, seed=1), draw(2, 5, 6, seed=2)
    padding = torch.tensor([[False] * 5, [False, False, True, False, True]])
    nothing_seen = torch.tensor([[True], [False]])
    same = torch.tensor([[False, True, False], [False, False, False]])
    of_pairs = torch.zeros(3, 5, dtype=torch.bool).index_fill(1, torch.tensor([1]), True)
    causal = torch.triu(torch.ones(3, 3, dtype=torch.bool), 1)
    per_head = draw(4, 3, 5, seed=5)

    def of(module: nn.MultiheadAttention, *inputs: Tensor, **options: Any) -> Case:
        return ("multi_head_attention_forward", *module_call(module, *inputs, **options))

    def itself(module: nn.MultiheadAttention, **options: Any) -> Case:
        name, call, tensors = of(module, x, x, x, **options)
        return name, lambda *given: call(*given[:-1], given[-1], given[-1], given[-1]), (*tensors[:-3], x)

    def packed(**options: Any) -> nn.MultiheadAttention:
        return nn.MultiheadAttention(4, 2, batch_first=True, **options)

    def separate() -> nn.MultiheadAttention:
        return nn.MultiheadAttention(4, 2, kdim=6, vdim=6, batch_first=True)

    return [
        itself(packed()),
        itself(packed(bias=False), need_weights=False),
        itself(packed(), key_padding_mask=same),
        itself(packed(), attn_mask=causal, is_causal=True, need_weights=False),
        itself(packed(), attn_mask=causal.double() * -2),
        of(packed(), x, y, y, average_attn_weights=False),
        of(packed(), x, y, y, key_padding_mask=padding, attn_mask=of_pairs),
        of(packed(), x, y, y, attn_mask=per_head),
        of(packed(), x, y, y, key_padding_mask=padding.double() * -1.5),
        of(separate(), x, wide, wide),
        of(separate(), x, wide, wide, key_padding_mask=padding, need_weights=False),
        of(nn.MultiheadAttention(4, 2), x, y[:, :3], y[:, :3]),
        of(packed(), x, y, y * 2),
        of(packed(), x, y, y, key_padding_mask=padding | nothing_seen, need_weights=False),
        of(packed(add_bias_kv=True), x, y, y, key_padding_mask=padding, attn_mask=of_pairs),
        of(packed(add_bias_kv=True, add_zero_attn=True), x, y, y, attn_mask=per_head, need_weights=False),
        itself(packed(add_zero_attn=True)),
    ]


def products() -> list[Case]:
    a, b, c, v = draw(3, 4), draw(4, 5, seed=1), draw(3, 5, seed=2), draw(4, seed=3)
    many, others = draw(2, 3, 4), draw(2, 4, 5, seed=1)
    forms = {
        "ij,jk->ik": (a, b),
        "ij,jk->ki": (a, b),
        "ij, kj -> ik": (a, draw(5, 4)),
        "bij,bjk->bik": (many, others),
        "bij,jk->bik": (many, b),
        "ij,ij->i": (a, a + 1),
        "ij,ij->": (a, a + 1),
        "ij,k->ikj": (a, v),
        "ij,kl->ik": (a, b),
        "bhid,bhjd->bhij": (draw(2, 2, 3, 4), draw(2, 2, 5, 4, seed=1)),
        "nj,cj->nc": (a, draw(5, 4)),
        "i,j->ij": (v, v + 1),
    }
    return [
        *[("einsum", lambda x, y, form=form: torch.einsum(form, x, y), given) for form, given in forms.items()],
        ("einsum", lambda x, y: torch.einsum("ij,jk->ik", [x, y]), (a, b)),
        ("mm", torch.mm, (a, b)),
        ("mm", lambda x, y: torch.mm(x, mat2=y), (a, b)),
        ("bmm", torch.bmm, (many, others)),
        ("mv", torch.mv, (a, v)),
        ("addmm", torch.addmm, (c, a, b)),
        ("addmm", lambda x, y, z: torch.addmm(x, y, z, beta=0.5, alpha=2), (c, a, b)),
        ("baddbmm", torch.baddbmm, (draw(2, 3, 5), many, others)),
        ("addmv", torch.addmv, (draw(3), a, v)),
        ("inner", torch.inner, (a, draw(5, 4))),
        ("inner", torch.inner, (a, v)),
        ("tensordot", lambda x, y: torch.tensordot(x, y, 1), (a, b)),
        ("tensordot", lambda x, y: torch.tensordot(x, y, ([0, 2], [0, 1])), (many, draw(2, 4, 3, seed=1))),
        ("tensordot", lambda x, y: torch.tensordot(x, y, ([-1], [0])), (many, b)),
        ("bilinear", functional.bilinear, (a, c, draw(2, 4, 5, seed=4), draw(2, seed=5))),
        ("bilinear", functional.bilinear, (many, draw(2, 3, 5), draw(2, 4, 5, seed=4))),
    ]


def others() -> list[Case]:
    table, index = draw(6, 3), torch.tensor([[0, 2, 2], [5, 1, 0]])
    image, scale, shift = draw(2, 4, 3, 2), draw(4, seed=1), draw(4, seed=2)

    def bag(mode: str) -> Callable[[Tensor], Tensor]:
        return lambda weight: functional.embedding_bag(index, weight, mode=mode)

    return [
        ("view_as_complex", lambda pairs: torch.view_as_real(torch.view_as_complex(pairs) * 1j), (draw(3, 4, 2),)),
        ("embedding_bag", bag("sum"), (table,)),
        ("embedding_bag", bag("mean"), (table,)),
        (
            "embedding_bag",
            lambda weight, share: functional.embedding_bag(index, weight, mode="sum", per_sample_weights=share),
            (table, draw(2, 3, seed=1)),
        ),
        ("group_norm", lambda x, w, b: functional.group_norm(x, 2, w, b, 1e-3), (image, scale, shift)),
        ("group_norm", lambda x: functional.group_norm(x, 4), (image,)),
        ("group_norm", lambda x: functional.group_norm(x, 1), (draw(2, 4),)),
        ("instance_norm", lambda x, w, b: functional.instance_norm(x, None, None, w, b), (image, scale, shift)),
        ("instance_norm", lambda x: functional.instance_norm(x, eps=1e-2), (draw(2, 4, 3),)),
        (
            "instance_norm",
            lambda x, w, b: functional.instance_norm(x, shift / 2, scale.abs() + 0.1, w, b, use_input_stats=False),
            (image, scale, shift),
        ),
        *(
            (
                "weight_norm",
                lambda v, g, dim=dim: torch._weight_norm(v, g, dim),
                (v, torch.norm_except_dim(v, 2, dim) + 1),
            )
            for v in (draw(3, 4), draw(3, 4, 2), draw(5))
            for dim in (0, v.ndim - 1, -1)
        ),
        *(
            ("cdist", lambda x, y, p=p: torch.cdist(x, y, p), given)
            for p in (0.5, 1.0, 1.5, 2.0, 3.0, math.inf)
            for given in (
                (draw(3, 4), draw(5, 4, seed=1)),
                (draw(2, 3, 4), draw(2, 5, 4, seed=1)),
                (draw(2, 3, 4), draw(5, 4)),
            )
        ),
        ("hardsigmoid", functional.hardsigmoid, (3 * draw(20),)),
        ("hardswish", functional.hardswish, (3 * draw(20),)),
    ]


CASES = [*recurrent(), *attention(), *products(), *others()]
# Of which torch has no second derivative, or a wrong one.
ONCE = {"hardsigmoid", "hardswish", "embedding_bag", "cdist", "weight_norm"}


def slopes(function: Callable[..., Any], tensors: tuple[Tensor, ...], orders: int) -> list[Tensor]:
    """First derivatives of a random sum of the results, and at will their derivatives along a random direction."""
    leaves = [tensor.clone().requires_grad_() for tensor in tensors]
    made = results(function(*leaves))
    total = torch.stack([(draw(*y.shape, seed=40) * y).sum() + (y**2).sum() for y in made]).sum()
    first = torch.autograd.grad(total, leaves, create_graph=orders == 2, materialize_grads=True)
    if orders == 1:
        return list(first)
    along = torch.stack([(draw(*g.shape, seed=50) * g).sum() for g in first]).sum()
    return [*first, *torch.autograd.grad(along, leaves, materialize_grads=True)]


@pytest.mark.parametrize("case", CASES, ids=[f"{case[0]}-{place}" for place, case in enumerate(CASES)])
def test_an_expansion_is_the_function_that_it_stands_for(case: Case) -> None:
    name, function, tensors = case
    assert name in calls_of(lambda: function(*tensors))
    refused: list[str] = []
    ours, theirs = results(expanded(function, *tensors, refused=refused)), results(function(*tensors))
    assert refused == []
    assert [y.shape for y in ours] == [y.shape for y in theirs]
    for y, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(y, expected, rtol=1e-12, atol=1e-12)
    orders = 1 if name in ONCE else 2
    with sdpa_kernel(SDPBackend.MATH):  # the only form of attention that torch differentiates twice
        expected = slopes(function, tensors, orders)
    found = slopes(lambda *given: expanded(function, *given), tensors, orders)
    rounding = 1e-7 if name == "hardsigmoid" else 1e-10  # torch takes 1/6 in float32 there
    torch.testing.assert_close(found, expected, rtol=rounding, atol=rounding)


def test_every_expansion_is_tried() -> None:
    assert {name for name, _, _ in CASES} == set(EXPANSIONS)


def unknown() -> list[tuple[str, Callable[[], Any]]]:
    x, table, index = draw(2, 3, 4), draw(6, 3), torch.tensor([[0, 2], [5, 1]])
    attend = nn.MultiheadAttention(4, 2, dropout=0.5, batch_first=True).double()
    packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([3, 2]), batch_first=True)
    plain = nn.LSTM(4, 3, batch_first=True).double()
    dropped = nn.LSTM(4, 3, num_layers=2, dropout=0.5, batch_first=True).double().train()
    return [
        ("einsum", lambda: torch.einsum("ii->i", draw(3, 3))),
        ("einsum", lambda: torch.einsum("ij,jk", draw(3, 4), draw(4, 2))),
        ("einsum", lambda: torch.einsum("...ij,jk->...ik", x, draw(4, 2))),
        ("einsum", lambda: torch.einsum("ij,jk,kl->il", draw(3, 4), draw(4, 2), draw(2, 2))),
        ("einsum", lambda: torch.einsum("ij,jk->ik", draw(3, 4), draw(1, 2))),
        ("inner", lambda: torch.inner(draw(2, 4), x)),
        ("embedding_bag", lambda: functional.embedding_bag(index, table, mode="max")),
        ("embedding_bag", lambda: functional.embedding_bag(index.flatten(), table, torch.tensor([0, 3]))),
        ("embedding_bag", lambda: functional.embedding_bag(index, table, padding_idx=1)),
        ("multi_head_attention_forward", lambda: attend(x, x, x)),
        ("multi_head_attention_forward", lambda: attend.eval()(x[0], x[0], x[0])),
        ("lstm", lambda: plain(packed)[0].data),
        ("lstm", lambda: dropped(x)),
    ]


@pytest.mark.parametrize(("name", "function"), unknown())
def test_what_an_expansion_does_not_know_is_left_as_it_is(name: str, function: Callable[[], Any]) -> None:
    refused: list[str] = []
    torch.manual_seed(0)
    theirs = results(function())
    torch.manual_seed(0)
    ours = results(expanded(function, refused=refused))
    assert name in refused
    for one, other in zip(ours, theirs, strict=True):
        assert torch.equal(one, other)
