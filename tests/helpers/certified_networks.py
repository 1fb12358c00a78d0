"""Networks on which every certificate is attacked: gates, casts, routes, values that are read, samples of two lengths.

Each gate stands between two layers of two units on inputs of two numbers, so that random points find what it does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

Gate = Callable[[Tensor], Tensor]
TABLE = torch.tensor([[1.0, -0.5], [-2.0, 0.75]], dtype=torch.float64)
SIDE_BY_SIDE = torch.stack([TABLE, TABLE.T])
EDGES = torch.tensor([-0.5, 0.2, 0.6], dtype=torch.float64)
STEPS = torch.tensor([0.3, -1.0, 0.5, 2.0], dtype=torch.float64)


def _scripted(h: Tensor) -> Tensor:
    return SCRIPT(h)


def _script(h: Tensor) -> Tensor:
    return h * (h > 0.3).to(h.dtype)


SCRIPT = torch.jit.script(_script)


def _row_by_row(h: Tensor) -> Tensor:
    return torch.stack([row * 2 if row[0] > 0.3 else row for row in h])


def _read(h: Tensor) -> Tensor:
    return torch.stack([row * round(row.abs().max().item(), 1) for row in h])


def _written(h: Tensor) -> Tensor:
    h = h.clone()
    h[h < 0.3] = 0.0
    return h


def _marked(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made[h > 0.3] = 1.0
    return made


def _filled(h: Tensor) -> Tensor:
    return torch.zeros_like(h).masked_fill_(h > 0.3, 1.0)


def _scattered(h: Tensor) -> Tensor:
    return torch.zeros_like(h).scatter_(1, h.argmax(1, keepdim=True), 1.0)


def _into_a_view(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made[:, :1].add_(h[:, 1:], alpha=5)
    return made + h


def _chosen(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    rows = (h[:, 0] > 0.3).nonzero()[:, 0]
    return made.index_add(0, rows, h[rows])


def _by_mask(h: Tensor) -> Tensor:
    made = torch.zeros_like(h)
    made[h[:, 0] > 0.3] = h[h[:, 0] > 0.3]
    return made


def _routed(h: Tensor) -> Tensor:
    experts = torch.stack([h, -2 * h.flip(1), h + 1], 1)
    best = torch.stack([h[:, 0], h[:, 1], h.sum(1)], 1).argmax(1)
    return experts.gather(1, best[:, None, None].expand(-1, 1, 2))[:, 0]


def _mixed(h: Tensor) -> Tensor:
    weights, best = torch.cat([h, -h], 1).softmax(1).topk(2, dim=1)
    return (weights[:, :, None] * STEPS[best][:, :, None]).sum(1) * h


def _pooled(h: Tensor) -> Tensor:
    _, places = functional.max_pool1d(h[:, None], 2, return_indices=True)
    return TABLE[places[:, 0, 0]]


def _together(h: Tensor) -> Tensor:
    return torch.vmap(lambda row: row * (row > 0.3))(h)


JUMPS: dict[str, Gate] = {
    "jump relu": lambda h: h * (h > 0.3),
    "jump relu, other way round": lambda h: (h >= 0.3) * h,
    "masked fill": lambda h: h.masked_fill(h < 0.3, 0.0),
    "where": lambda h: torch.where(h > 0.3, h, 0.0),
    "where of tables": lambda h: torch.where(h > 0.3, TABLE[0], TABLE[1]),
    "quantised": lambda h: (4 * h).int().double() / 4,
    "cast to whole numbers": lambda h: (4 * h).to(torch.int64).double() / 4,
    "cast to truth values": lambda h: h.relu().bool().double(),
    "rounded": lambda h: (4 * h).round() / 4,
    "straight through": lambda h: h + ((4 * h).floor() / 4 - h).detach(),
    "floor": lambda h: h.floor(),
    "remainder": lambda h: h % 1.0,
    "division with floor": lambda h: torch.div(h, 0.25, rounding_mode="floor"),
    "step": lambda h: h + (h > 0).double() * 2,
    "sign": lambda h: h.sign(),
    "heaviside": lambda h: torch.heaviside(h, TABLE[0]),
    "copied sign": lambda h: torch.copysign(TABLE[0].expand_as(h), h),
    "truth as numbers": lambda h: functional.linear((h > 0).double(), TABLE),
    "how many": lambda h: h * (h > 0.3).sum(1, keepdim=True),
    "two compared": lambda h: h * (h > h.flip(1)),
    "negated comparison": lambda h: h * ~(h > 0.3),
    "table by argmax": lambda h: TABLE[h.argmax(1)],
    "embedding by argmax": lambda h: functional.embedding(h.argmax(1), TABLE),
    "index of maximum": lambda h: TABLE[h.max(1).indices],
    "index of a pool": _pooled,
    "one hot": lambda h: functional.one_hot(h.argmax(1), 2).double() @ TABLE,
    "order": lambda h: TABLE[h.argsort(1)[:, 0]],
    "sorted, by index": lambda h: STEPS[h.sort(1)[1]],
    "median by index": lambda h: TABLE[h.median(1)[1]],
    "searched": lambda h: STEPS[torch.searchsorted(EDGES, h)],
    "bucket": lambda h: STEPS[torch.bucketize(h, EDGES)],
    "routed": _routed,
    "mixture": _mixed,
    "item": _read,
    "branch": _row_by_row,
    "written where small": _written,
    "marked": _marked,
    "filled": _filled,
    "scattered": _scattered,
    "rows by nonzero": _chosen,
    "rows by mask": _by_mask,
    "scripted": _scripted,
    "vmap": _together,
    "complex": lambda h: h * torch.fft.fft(h).angle(),
    "half precision": lambda h: h.half().double(),
    "softplus that jumps": lambda h: functional.softplus(h, beta=3, threshold=1),
    "close": lambda h: torch.isclose(h, torch.zeros_like(h), atol=0.3).double(),
    "nearest of a table": lambda h: TABLE[torch.cdist(h, TABLE).argmin(1)],
    "layers side by side": lambda h: torch.vmap(lambda weight: functional.linear(h, weight))(SIDE_BY_SIDE).sum(0),
}
SERVED: dict[str, Gate] = {
    "relu": torch.relu,
    "relu by hand": lambda h: h * (h > 0),
    "relu by numbers": lambda h: (h >= 0).double() * h,
    "relu by filling": lambda h: h.masked_fill(h < 0, 0.0),
    "relu by where": lambda h: torch.where(h > 0, h, torch.zeros_like(h)),
    "negative part": lambda h: h * ~(h > 0),
    "tanh": torch.tanh,
    "steep below zero": lambda h: functional.rrelu(h, 2.0, 4.0),
    "factor of what is taken away": lambda h: torch.rsub(h, 2.0, alpha=3),
    "factor of what is added": lambda h: torch.add(TABLE[0], h, alpha=3),
    "written into a copy": lambda h: h.clone().mul_(2).relu_(),
    "asked whether finite": lambda h: h.relu() if bool(h.isfinite().all()) else h,
    "constant mask": lambda h: h.masked_fill(torch.tensor([True, False]), 0.5),
    "spread by a mask": lambda h: h[:, :1].masked_fill(torch.tensor([True, False]), 0.5),
    "largest": lambda h: torch.cat([h.max(1, keepdim=True).values, h[:, :1]], 1),
    "constant in its shape": lambda h: h + TABLE[1].expand_as(h),
    "mean and maximum": lambda h: torch.stack([h.mean(1), h.amax(1)], 1),
}
MAY_BE_REFUSED: dict[str, Gate] = {
    "into a view": _into_a_view,
    "fourier": lambda h: torch.fft.fft(h).real,
    "clamp by tensors": lambda h: h.clamp(-EDGES[1:].abs(), EDGES[1:].abs()),
}


class Gated(nn.Module):
    """Two layers with a gate between them."""

    def __init__(self, gate: Gate, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first, self.last, self.gate = nn.Linear(2, 2), nn.Linear(2, 2), gate
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(self.first(x)))


class OfLengths(nn.Module):
    """A convolution summed over positions, for samples of any length."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.conv, self.last = nn.Conv1d(1, 2, 3, padding=1), nn.Linear(2, 2)
        self.double().eval()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu(self.conv(x)).sum(2))


class Masked(nn.Module):
    """A layer whose inputs are weighed by whole numbers that come with each sample."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.first, self.last = nn.Linear(2, 2), nn.Linear(2, 2)
        self.double().eval()

    def forward(self, x: Tensor, times: Tensor) -> Tensor:
        return self.last(torch.relu(self.first(x * times[:, None])))


@dataclass(frozen=True)
class Case:
    """A network, its inputs in batches, and whether it must have (True) or must not have (False) certificates."""

    model: nn.Module
    batches: list[dict[str, Tensor] | Tensor]
    served: bool | None


def _lengths(*sizes: int) -> list[dict[str, Tensor] | Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [{"x": torch.randn(6, 1, size, generator=generator, dtype=torch.float64)} for size in sizes]


def _weighed() -> list[dict[str, Tensor] | Tensor]:
    x = torch.randn(12, 2, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    return [{"x": x, "times": torch.tensor([0] * 11 + [5])}]


def cases() -> dict[str, Case]:
    """All of them by name."""
    x = torch.randn(40, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    given = [(JUMPS, False), (SERVED, True), (MAY_BE_REFUSED, None)]
    gates = [(name, gate, served) for some, served in given for name, gate in some.items()]
    found = {name: Case(Gated(gate, 5 + place), [x], served) for place, (name, gate, served) in enumerate(gates)}
    found["two lengths"] = Case(OfLengths(), _lengths(3, 40), True)
    found["two lengths, the longer one first"] = Case(OfLengths(), _lengths(40, 3), True)
    found["whole numbers beside the input"] = Case(Masked(), _weighed(), True)
    return found
