"""Weights that untie what a network ties are those of another network: every function that takes them refuses them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import flatscope as fs
from flatscope.errors import InputError

X, Y = torch.randn(20, 4, generator=torch.Generator().manual_seed(0)).double(), torch.arange(20) % 4


class Tied(nn.Module):
    def __init__(self, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.one, self.other = (nn.Linear(4, 4, bias=False).double() for _ in range(2))
        if tied:
            self.other.weight = self.one.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.other(self.one(x).relu())


def problem(**given: Any) -> fs.Problem:
    return fs.Problem(Tied(tied=True).eval(), train=(X, Y), **given)


def apply_to_another() -> None:
    found = fs.sensitivity(problem(), bits=(4,), sparsity=())
    found.apply(Tied(tied=False), dict.fromkeys(found.layers, 4))


CALLS: dict[str, Callable[[], Any]] = {
    "forecast, a module": lambda: fs.forecast(problem(), Tied(tied=False)),
    "forecast, a state dict": lambda: fs.forecast(problem(), Tied(tied=False).state_dict()),
    "weights before training": lambda: problem(initial=Tied(tied=False)),
    "a landscape towards it": lambda: fs.landscape(problem(), directions=[Tied(tied=False)] * 2, grid=3),
    "a landscape towards its weights": lambda: fs.landscape(
        problem(), directions=[Tied(tied=False).state_dict()] * 2, grid=3
    ),
    "apply": apply_to_another,
}


@pytest.mark.parametrize("call", CALLS)
def test_weights_that_are_not_tied_are_refused(call: str) -> None:
    with pytest.raises(InputError, match=r"equal values for one\.weight and other\.weight"):
        CALLS[call]()


def test_tied_weights_are_taken() -> None:
    found = fs.forecast(problem(initial=Tied(tied=True)), Tied(tied=True).state_dict())
    assert found.measured.value == 0


def test_a_model_with_further_parameters_is_not_rounded() -> None:
    found = fs.sensitivity(fs.Problem(nn.Sequential(nn.Linear(4, 4)).double(), train=(X, Y)), bits=(4,), sparsity=())
    larger = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()
    with pytest.raises(InputError, match=r"1\.weight of shape none"):
        found.apply(larger, dict.fromkeys(found.layers, 4))
