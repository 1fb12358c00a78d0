"""Quadratic forms of single samples' gradients of a table in which rows are looked up, alone or also multiplied with.

A position that looks row r up has the gradient e_r δᵀ, with δ the column there. A table that is also the matrix of the
outputs (tied embeddings) has the sum of both uses, G = Σ_t s_t h_tᵀ + Σ_q e_r(q) δ_qᵀ; what G is asked for are sums
over pairs of positions, so that G, as large as the table for every sample and column, is never formed.

Index letters: n samples, k columns, t positions that are multiplied, q that are looked up, of a table (rows, width).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flatscope.curvature.per_sample_gradients import Flow, Forms
from flatscope.network.layer_uses import LayerUse


class _Parts(NamedTuple):
    tokens: Tensor  # rows that are looked up, (n, q)
    moved: Tensor  # columns there, (n, k, q, width)
    inputs: Tensor  # what is multiplied, (n, t, width)
    columns: Tensor  # columns behind that, (n, k, t, rows)


def has_lookups(flow: Flow) -> bool:
    """True where rows of the weight are looked up."""
    return any(use.kind == "lookup" for use in flow.uses)


def looked_up(use: LayerUse[Tensor], table: Tensor) -> Tensor:
    """Rows of a table, (n, …, width): zeros for the word of padding, which has no gradient."""
    padding, found = use.settings.get("padding_idx"), table[use.input]
    kept: Tensor = found if padding is None else found * (use.input != padding % len(table))[..., None]
    return kept


def lookup_forms(flow: Flow, table: Tensor) -> Forms:
    """The forms of a table, whose units are those of its layer: rows of one that is only looked up, else columns."""
    tokens, moved, inputs, columns = _parts(flow, table)
    same = (tokens[:, :, None] == tokens[:, None, :]).to(moved)[:, None]  # (n, 1, q, q)
    trace = (moved @ moved.mT * same).sum((2, 3))
    rows = table[tokens]  # (n, q, width)
    if not inputs.shape[1]:
        relative = (moved @ (table.T @ table) @ moved.mT * same).sum((2, 3))
        return Forms(trace, relative, _by_token((moved * rows[:, None]).sum(3), tokens, len(table)))
    met = columns.gather(3, tokens[:, None, None, :].expand(*columns.shape[:3], -1))  # (n, k, t, q)
    trace += (columns @ columns.mT * (inputs @ inputs.mT)[:, None]).sum((2, 3))
    trace += 2 * (met * (inputs[:, None] @ moved.mT)).sum((2, 3))
    left = torch.cat([columns @ table, rows[:, None].expand_as(moved)], dim=2)  # W̄ᵀG = leftᵀ right
    right = torch.cat([inputs[:, None].expand(-1, moved.shape[1], -1, -1), moved], dim=2)
    if left.shape[2] < left.shape[3]:
        relative = (left @ left.mT * (right @ right.mT)).sum((2, 3))
    else:
        relative = (left.mT @ right).square().sum((2, 3))
    return Forms(trace, relative, (left * right).sum(2))


def along_lookup_rows(flow: Flow, table: Tensor) -> Tensor:
    """⟨G_c, w⟩ restricted to the weights of one output unit of the table's layer, (n, k, units)."""
    tokens, moved, inputs, columns = _parts(flow, table)
    products = moved * table[tokens][:, None]
    if not inputs.shape[1]:
        return products.sum(2)
    return (columns * (inputs @ table.T)[:, None]).sum(2) + _by_token(products.sum(3), tokens, len(table))


def lookup_gradient(flow: Flow, table: Tensor) -> Tensor:
    """G summed over samples and columns, as large as the table."""
    tokens, moved, inputs, columns = _parts(flow, table)
    found = torch.zeros_like(table).index_add_(0, tokens.flatten(), moved.sum(1).flatten(0, 1))
    return found + torch.einsum("nktr,ntw->rw", columns, inputs)


def _parts(flow: Flow, table: Tensor) -> _Parts:
    n, k = flow.cotangents[0].shape[:2]
    tokens, moved, inputs, columns = list[Tensor](), list[Tensor](), list[Tensor](), list[Tensor]()
    for use, s in zip(flow.uses, flow.cotangents, strict=True):
        if use.kind == "lookup":
            there = torch.ones_like(table[:, :1])
            tokens.append(use.input.reshape(n, -1))
            moved.append((s * looked_up(use, there)[:, None]).reshape(n, k, -1, table.shape[1]))
        else:
            inputs.append(use.input.detach().reshape(n, -1, table.shape[1]))
            columns.append(s.reshape(n, k, -1, len(table)))
    nothing = table.new_zeros(n, 0, table.shape[1]), table.new_zeros(n, k, 0, len(table))
    return _Parts(
        _joined(tokens, 1),
        _joined(moved, 2),
        _joined(inputs, 1) if inputs else nothing[0],
        _joined(columns, 2) if columns else nothing[1],
    )


def _joined(parts: list[Tensor], axis: int) -> Tensor:
    """All parts in one; without a copy where there is one."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=axis)


def _by_token(values: Tensor, tokens: Tensor, rows: int) -> Tensor:
    """Values (n, k, q) of positions added up by the row that is looked up there, (n, k, rows)."""
    found = values.new_zeros(*values.shape[:2], rows)
    return found.scatter_add_(2, tokens[:, None].expand_as(values), values)
