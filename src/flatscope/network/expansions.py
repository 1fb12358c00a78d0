"""Composite functions of torch written out in simpler ones.

A matrix product hidden in `einsum`, in attention or in the gates of an LSTM becomes a `linear` or `matmul` that the
reading of a network knows. Some functions are written out because torch differentiates them wrongly or not at all:
batched gradients of `group_norm` and second derivatives of `weight_norm` are wrong in torch itself, and `hardsigmoid`
and `cdist` have no second derivative.

Every expansion gives the values of the function that it stands for; arguments that it does not know return
`NotImplemented`, and the function is then left as it is.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from inspect import signature
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

Expansion = Callable[..., Any]
EXPANSIONS: dict[str, Expansion] = {}


def expansion(*names: str) -> Callable[[Expansion], Expansion]:
    """Enter a function under the names of what it expands."""

    def enter(function: Expansion) -> Expansion:
        EXPANSIONS.update(dict.fromkeys(names, function))
        return function

    return enter


def _given(function: Expansion, args: Any, kwargs: Any) -> SimpleNamespace:
    """All arguments of a call of torch's function, by name."""
    bound = signature(function).bind(*args, **kwargs)
    bound.apply_defaults()
    return SimpleNamespace(**bound.arguments)


# Products of matrices, in whatever words ----------------------------------------------------------------------------


@expansion("mm", "bmm", "mv")
def _product(input: Tensor, other: Tensor | None = None, **more: Any) -> Any:
    other = next(iter(more.values())) if other is None and len(more) == 1 else other  # mat2, vec
    return NotImplemented if other is None else torch.matmul(input, other)


@expansion("addmm", "baddbmm", "addmv")
def _add_product(input: Tensor, left: Tensor, right: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.matmul(left, right)
    product = product if alpha == 1 else product * alpha
    return product + (input if beta == 1 else input * beta)


@expansion("view_as_complex")
def _complex(input: Tensor) -> Any:
    """Torch's own needs memory laid out in pairs, which parts of a vector of parameters may not be."""
    return NotImplemented if input.dtype == torch.float16 else torch.complex(*input.unbind(-1))


@expansion("inner")
def _inner(input: Tensor, other: Tensor) -> Any:
    if min(input.ndim, other.ndim) == 0 or other.ndim > 2:
        return NotImplemented
    return torch.matmul(input, other if other.ndim == 1 else other.transpose(0, 1))


@expansion("tensordot")
def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Tensor | None = None) -> Any:
    if isinstance(dims, Tensor) or out is not None:
        return NotImplemented
    if isinstance(dims, int):
        dims = (list(range(a.ndim - dims, a.ndim)), list(range(dims)))
    left, right = ([int(d) % t.ndim for d in side] for side, t in zip(dims, (a, b), strict=True))
    letters = [chr(97 + i) for i in range(a.ndim)], [chr(65 + i) for i in range(b.ndim)]
    for one, other in zip(left, right, strict=True):
        letters[1][other] = letters[0][one]
    kept = [letters[0][i] for i in range(a.ndim) if i not in left]
    kept += [letters[1][i] for i in range(b.ndim) if i not in right]
    return _einsum("".join(letters[0]) + "," + "".join(letters[1]) + "->" + "".join(kept), a, b)


@expansion("einsum")
def _einsum(equation: str, *operands: Any) -> Any:
    """Two operands without repeated or omitted indices: one permuted, reshaped matrix product."""
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    equation = equation.replace(" ", "") if isinstance(equation, str) else ""
    if len(operands) != 2 or "->" not in equation or "." in equation:
        return NotImplemented
    sides, out = equation.split("->")
    left, right = sides.split(",")
    if any(len(set(side)) != len(side) for side in (left, right, out)):
        return NotImplemented
    a, b = operands
    for letter in [x for x in left if x not in right + out]:  # summed in one operand alone
        a, left = a.sum(left.index(letter)), left.replace(letter, "")
    for letter in [x for x in right if x not in left + out]:
        b, right = b.sum(right.index(letter)), right.replace(letter, "")
    shared = [x for x in left if x in right and x in out]
    summed = [x for x in left if x in right and x not in out]
    own, other = [x for x in left if x not in right], [x for x in right if x not in left]
    sizes = dict(zip(left, a.shape, strict=True)) | dict(zip(right, b.shape, strict=True))
    if any(a.shape[left.index(x)] != b.shape[right.index(x)] for x in shared + summed):
        return NotImplemented  # an axis of size 1 that is spread
    a = a.permute([left.index(x) for x in shared + own + summed])
    b = b.permute([right.index(x) for x in shared + summed + other])
    lead = [sizes[x] for x in shared]
    n_own, n_sum, n_other = (math.prod(sizes[x] for x in group) for group in (own, summed, other))
    a = a.reshape(*lead, n_own, n_sum) if len(own) != 1 or len(summed) != 1 else a
    b = b.reshape(*lead, n_sum, n_other) if len(other) != 1 or len(summed) != 1 else b
    product = torch.matmul(a, b)
    product = product.reshape([sizes[x] for x in shared + own + other])
    order = shared + own + other
    return product.permute([order.index(x) for x in out])


@expansion("bilinear")
def _bilinear(input1: Tensor, input2: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A dense layer on the products of the entries of the two inputs."""
    products = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)  # (..., in1 · in2)
    return functional.linear(products, weight.reshape(weight.shape[0], -1), bias)


@expansion("embedding_bag")
def _embedding_bag(*args: Any, **kwargs: Any) -> Any:
    given = _given(functional.embedding_bag, args, kwargs)
    others = (given.offsets, given.max_norm, given.padding_idx)
    if given.input.ndim != 2 or any(other is not None for other in others) or given.mode == "max":
        return NotImplemented
    found = functional.embedding(given.input, given.weight)  # (n, length, width)
    if given.per_sample_weights is not None:
        found = found * given.per_sample_weights.unsqueeze(-1)
    return found.sum(1) if given.mode == "sum" else found.mean(1)


# Networks in time ---------------------------------------------------------------------------------------------------


def _lstm_step(gates: Tensor, state: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    i, f, g, o = gates.chunk(4, dim=-1)
    c = torch.sigmoid(f) * state[1] + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c), c


def _gru_step(x_gates: Tensor, h_gates: Tensor, h: Tensor) -> Tensor:
    (xr, xz, xn), (hr, hz, hn) = x_gates.chunk(3, dim=-1), h_gates.chunk(3, dim=-1)
    z, n = torch.sigmoid(xz + hz), torch.tanh(xn + torch.sigmoid(xr + hr) * hn)
    return n + z * (h - n)


_BENDS = {"rnn_tanh": torch.tanh, "rnn_relu": torch.relu}


def _step(
    kind: str, x_gates: Tensor, state: tuple[Tensor, ...], recurrent: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """The next state; `recurrent` holds the weight, bias and projection that read the last one."""
    weight, bias, projection = recurrent
    h_gates = functional.linear(state[0], weight, bias)  # type: ignore[arg-type]
    if kind == "lstm":
        h, c = _lstm_step(x_gates + h_gates, state)
        return (h if projection is None else functional.linear(h, projection)), c
    if kind == "gru":
        return (_gru_step(x_gates, h_gates, state[0]),)
    return (_BENDS[kind](x_gates + h_gates),)


def _run_in_time(kind: str, *args: Any) -> Any:
    """`lstm`, `gru`, `rnn_tanh`, `rnn_relu` on one tensor: all layers, both directions."""
    if len(args) != 9 or not isinstance(args[3], bool):
        return NotImplemented  # packed sequences
    x, start, flat, biases, n_layers, dropout, training, both, batch_first = args
    if training and dropout:
        return NotImplemented
    states = start if kind == "lstm" else (start,)
    x = x.transpose(0, 1) if batch_first else x  # (time, n, features)
    ways = 2 if both else 1
    per_cell, rest = divmod(len(flat), n_layers * ways)
    projected = kind == "lstm" and per_cell == (5 if biases else 3)
    if rest or per_cell != (4 if biases else 2) + projected:
        return NotImplemented
    last: list[tuple[Tensor, ...]] = []
    for layer in range(n_layers):
        found = []
        for way in range(ways):
            cell = layer * ways + way
            own = list(flat[cell * per_cell : (cell + 1) * per_cell])
            w_in, w_rec, *more = own
            b_in, b_rec = (more[0], more[1]) if biases else (None, None)
            projection = own[-1] if projected else None
            gates = functional.linear(x, w_in, b_in)  # (time, n, gates)
            state: tuple[Tensor, ...] = tuple(s[cell] for s in states)
            outputs = []
            for moment in gates.flip(0).unbind(0) if way else gates.unbind(0):
                state = _step(kind, moment, state, (w_rec, b_rec, projection))
                outputs.append(state[0])
            found.append(torch.stack(outputs[::-1] if way else outputs))
            last.append(state)
        x = found[0] if ways == 1 else torch.cat(found, dim=-1)
    ends = tuple(torch.stack(parts) for parts in zip(*last, strict=True))
    return (x.transpose(0, 1) if batch_first else x, *ends)


def _recurrent_cell(
    kind: str, x: Tensor, state: Any, w_in: Tensor, w_rec: Tensor, b_in: Any = None, b_rec: Any = None
) -> Any:
    states = tuple(state) if kind == "lstm" else (state,)
    found = _step(kind, functional.linear(x, w_in, b_in), states, (w_rec, b_rec, None))
    return found if kind == "lstm" else found[0]


for _kind in ("lstm", "gru", *_BENDS):
    EXPANSIONS |= {_kind: partial(_run_in_time, _kind), f"{_kind}_cell": partial(_recurrent_cell, _kind)}


# Attention ----------------------------------------------------------------------------------------------------------


@expansion("multi_head_attention_forward")
def _attention(*args: Any, **kwargs: Any) -> Any:
    """Given as (length, n, width), as `nn.MultiheadAttention` hands it over; computed with the samples in front."""
    given = _given(functional.multi_head_attention_forward, args, kwargs)
    unusual = given.static_k is not None or given.static_v is not None or (given.training and given.dropout_p > 0)
    if unusual or given.query.ndim != 3 or (given.is_causal and given.attn_mask is None):
        return NotImplemented
    n, num_heads = given.query.shape[1], given.num_heads
    q, k, v = _projected(given)
    mask = _attention_mask(given.attn_mask, given.key_padding_mask, n, num_heads, q)
    zeros = k.new_zeros(1, 1, k.shape[-1]) if given.add_zero_attn else None
    for key, value in ((given.bias_k, given.bias_v), (zeros, zeros)):  # one more position, which every query sees
        if key is not None and value is not None:
            k, v = (torch.cat([x, more.expand(n, -1, -1)], dim=1) for x, more in ((k, key), (v, value)))
            mask = None if mask is None else functional.pad(mask, (0, 1))
    heads = [x.reshape(*x.shape[:2], num_heads, -1).transpose(1, 2) for x in (q, k, v)]  # (n, heads, length, d)
    scores = torch.matmul(heads[0] / math.sqrt(heads[0].shape[-1]), heads[1].transpose(-2, -1))
    shares = _shares(scores, mask, zeros=not given.need_weights)
    joined = torch.matmul(shares, heads[2]).transpose(1, 2).flatten(2)
    output = functional.linear(joined, given.out_proj_weight, given.out_proj_bias).transpose(0, 1)
    if not given.need_weights:
        return output, None
    return output, shares.mean(1) if given.average_attn_weights else shares


def _projected(given: SimpleNamespace) -> Sequence[Tensor]:
    """Queries, keys and values, (n, length, width) each."""
    several = given.query, given.key, given.value
    weight, shift = given.in_proj_weight, given.in_proj_bias
    if given.use_separate_proj_weight:
        weights = given.q_proj_weight, given.k_proj_weight, given.v_proj_weight
        shifts = (None,) * 3 if shift is None else shift.chunk(3)
        triples = zip(several, weights, shifts, strict=True)
        return [functional.linear(x.transpose(0, 1), w, b) for x, w, b in triples]
    # One product with what is read, behind one another; each takes its third of it, the rest is dropped.
    read = {id(x): x for x in several}
    whole = [x.transpose(0, 1) for x in read.values()]
    found = functional.linear(whole[0] if len(whole) == 1 else torch.cat(whole, dim=1), weight, shift)
    parts = dict(zip(read, found.split_with_sizes([x.shape[1] for x in whole], dim=1), strict=True))
    return [parts[id(x)].chunk(3, dim=-1)[place] for place, x in enumerate(several)]


def _shares(scores: Tensor, mask: Tensor | None, zeros: bool) -> Tensor:
    """The softmax of masked scores; zeros, if so asked, for a query that sees nothing, which has NaN otherwise."""
    if mask is None:
        return torch.softmax(scores, dim=-1)
    if not zeros:
        return torch.softmax(scores + mask, dim=-1)
    blind = (mask == -math.inf).all(-1, keepdim=True)
    return torch.softmax(scores + mask.masked_fill(blind, 0.0), dim=-1).masked_fill(blind, 0.0)


def _attention_mask(mask: Tensor | None, padding: Tensor | None, n: int, heads: int, like: Tensor) -> Tensor | None:
    """The mask as a term added to the scores, broadcast over (n, heads, length, length)."""

    def added(given: Tensor) -> Tensor:
        if given.dtype != torch.bool:
            return given.to(like.dtype)
        return torch.zeros(given.shape, dtype=like.dtype, device=given.device).masked_fill(given, -math.inf)

    found = None
    if mask is not None:
        found = added(mask)
        found = found.reshape(n, heads, *found.shape[1:]) if found.ndim == 3 else found
    if padding is not None:
        keys = added(padding)[:, None, None, :]
        found = keys if found is None else found + keys
    return found


def attention_in_parts(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """`scaled_dot_product_attention` as two products and a softmax, for those who look at each of them.

    It is not among the expansions, since the reading of a network knows the function as it is.
    """
    seen = attn_mask
    if is_causal:
        seen = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
    if seen is not None and seen.dtype == torch.bool:
        seen = torch.zeros(seen.shape, dtype=query.dtype, device=query.device).masked_fill(~seen, -math.inf)
    if dropout_p > 0 or (seen is not None and seen.requires_grad):
        return NotImplemented
    if enable_gqa:
        shared = query.shape[-3] // key.shape[-3]
        key, value = (part.repeat_interleave(shared, dim=-3) for part in (key, value))
    scores = torch.matmul(query * (query.shape[-1] ** -0.5 if scale is None else scale), key.transpose(-2, -1))
    return torch.matmul(_shares(scores, seen, zeros=True), value)


# Functions whose derivatives torch gets wrong or lacks --------------------------------------------------------------


def _normalised(x: Tensor, dims: tuple[int, ...], eps: float) -> Tensor:
    centred = x - x.mean(dims, keepdim=True)
    return centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps)


def _scaled_and_shifted(x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    shape = (-1, *[1] * (x.ndim - 2))
    x = x if weight is None else x * weight.reshape(shape)
    return x if bias is None else x + bias.reshape(shape)


@expansion("group_norm")
def _group_norm(
    input: Tensor, num_groups: int, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *_: Any
) -> Tensor:
    n = input.shape[0]
    normal = _normalised(input.reshape(n, num_groups, -1), (2,), eps).reshape(input.shape)
    return _scaled_and_shifted(normal, weight, bias)


@expansion("instance_norm")
def _instance_norm(
    input: Tensor,
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    use_input_stats: bool = True,
    momentum: float = 0.1,
    eps: float = 1e-5,
    *_: Any,
) -> Any:
    if not use_input_stats:
        return functional.batch_norm(input, running_mean, running_var, weight, bias, False, momentum, eps)
    return _scaled_and_shifted(_normalised(input, tuple(range(2, input.ndim)), eps), weight, bias)


@expansion("hardsigmoid")
def _hardsigmoid(input: Tensor, inplace: bool = False) -> Tensor:
    return torch.clamp(input / 6 + 0.5, 0, 1)


@expansion("hardswish")
def _hardswish(input: Tensor, inplace: bool = False) -> Tensor:
    return input * torch.clamp(input / 6 + 0.5, 0, 1)


@expansion("weight_norm")
def _weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """The direction v at the length g, in the old and new API of torch: norms over all axes but `dim`, if not -1."""
    others = [axis for axis in range(v.ndim) if axis != dim]
    if dim == -1:
        return v * (g / v.square().sum().sqrt())
    return v * (g / (v.square().sum(others, keepdim=True).sqrt() if others else v.abs()))


@expansion("cdist")
def _cdist(x1: Tensor, x2: Tensor, p: float = 2.0, compute_mode: Any = None) -> Tensor:
    """Distances between all rows of one and of the other, (..., n, m); their slope is 0 where they are 0."""
    gaps = (x1.unsqueeze(-2) - x2.unsqueeze(-3)).abs()
    if p == 0:
        return (gaps != 0).to(gaps.dtype).sum(-1)
    if p == 1:
        return gaps.sum(-1)
    if p == math.inf:
        return gaps.amax(-1)
    moved = gaps > 0
    total = torch.where(moved, torch.where(moved, gaps, 1.0) ** p, 0.0).sum(-1)
    apart = total > 0
    return torch.where(apart, torch.where(apart, total, 1.0) ** (1 / p), 0.0)
