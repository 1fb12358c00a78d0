"""The largest singular value of large matrices: against their decomposition, and within a budget."""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import pytest
import torch
from torch import Tensor

from flatscope.errors import NotApplicable
from flatscope.limits import STANDARD
from flatscope.network.singular_values import matrix_norm, operator_norm

SIDE = STANDARD.decomposed_matrix + 60


def with_values(values: Tensor) -> Tensor:
    """A square matrix with these singular values."""
    left, right = (torch.linalg.qr(torch.randn(len(values), len(values), dtype=torch.float64))[0] for _ in range(2))
    return left @ torch.diag(values.double()) @ right


LARGE: dict[str, Callable[[], Tensor]] = {
    "random": lambda: torch.randn(SIDE, SIDE + 40),
    "tall": lambda: torch.randn(SIDE + 200, SIDE),
    "stack": lambda: torch.randn(2, SIDE, SIDE),
    "zero": lambda: torch.zeros(SIDE, SIDE),
    "one entry": lambda: torch.zeros(SIDE, SIDE).index_put((torch.tensor(3), torch.tensor(5)), torch.tensor(-2.0)),
    "rank one": lambda: torch.outer(torch.randn(SIDE), torch.randn(SIDE)),
    "orthogonal": lambda: with_values(torch.ones(SIDE)),
    "identity": lambda: torch.eye(SIDE),
    "two largest": lambda: with_values(torch.rand(SIDE).index_fill(0, torch.tensor([4, 7]), 2.0)),
    "two that hardly differ": lambda: with_values(torch.cat([torch.tensor([2.0, 2 - 1e-6]), torch.rand(SIDE - 2)])),
    "all that hardly differ": lambda: with_values(1 + 1e-3 * torch.rand(SIDE)),
    "tiny": lambda: 1e-200 * torch.randn(SIDE, SIDE, dtype=torch.float64),
    "huge": lambda: 1e200 * torch.randn(SIDE, SIDE, dtype=torch.float64),
}


@pytest.mark.parametrize("name", LARGE)
def test_the_norm_of_a_large_matrix_is_that_of_its_decomposition(name: str) -> None:
    torch.manual_seed(0)
    matrix = LARGE[name]()
    expected = float(torch.linalg.matrix_norm(matrix.double(), 2).max())
    assert matrix_norm(matrix) == pytest.approx(expected, rel=1e-12, abs=0)
    assert matrix_norm(matrix) == matrix_norm(matrix)


def stops_at(number: int) -> Callable[[], None]:
    """A check that raises when it is called for this time."""
    left = [number]

    def check() -> None:
        left[0] -= 1
        if not left[0]:
            raise NotApplicable("the time was up")

    return check


def calls_of(search: Callable[[Callable[[], None]], float]) -> int:
    """How often a search asks whether there is time."""
    calls = [0]

    def count() -> None:
        calls[0] += 1

    search(count)
    return calls[0]


def test_a_large_matrix_is_not_decomposed_and_its_search_ends_at_any_product(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*words: object, **named: object) -> NoReturn:
        raise AssertionError("a decomposition cannot be broken off")

    torch.manual_seed(0)
    matrix = torch.randn(SIDE, SIDE)
    monkeypatch.setattr(torch.linalg, "matrix_norm", refuse)
    products = calls_of(lambda check: matrix_norm(matrix, check))
    assert 10 < products < SIDE
    for number in (1, 7, products):
        with pytest.raises(NotApplicable, match="time was up"):
            matrix_norm(matrix, stops_at(number))


def test_no_decomposition_is_begun_where_the_time_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    matrix, decompose, begun = LARGE["all that hardly differ"](), torch.linalg.matrix_norm, []

    def watched(*words: Tensor, **named: int) -> Tensor:
        begun.append(words)
        return decompose(*words, **named)

    monkeypatch.setattr(torch.linalg, "matrix_norm", watched)
    calls = calls_of(lambda check: matrix_norm(matrix, check))
    assert len(begun) == 1  # the search does not end: it is decomposed after all
    with pytest.raises(NotApplicable, match="time was up"):
        matrix_norm(matrix, stops_at(calls))
    assert len(begun) == 1


def test_the_search_for_the_norm_of_a_map_ends_at_any_product() -> None:
    weight = torch.linspace(-1, 1, 9).reshape(1, 1, 3, 3)

    def search(check: Callable[[], None]) -> float:
        return operator_norm(
            lambda x: torch.nn.functional.conv2d(x, weight.to(x.dtype)), (1, 30, 30), torch.device("cpu"), check
        )

    for number in (1, calls_of(search)):
        with pytest.raises(NotApplicable, match="time was up"):
            search(stops_at(number))


@pytest.mark.parametrize("scale", [1e-200, 1e-45, 1e-25, 1e-8, 1e25, 1e200])
def test_the_norm_of_a_map_is_found_whatever_its_scale(scale: float) -> None:
    torch.manual_seed(0)
    weight = torch.randn(4, 3, 3, 3, dtype=torch.float64)

    def norm(weight: Tensor) -> float:
        def apply(x: Tensor) -> Tensor:
            return torch.nn.functional.conv2d(x, weight.to(x.dtype), padding=1)

        return operator_norm(apply, (3, 16, 16), torch.device("cpu"))

    columns = torch.nn.functional.conv2d(torch.eye(768, dtype=torch.float64).reshape(-1, 3, 16, 16), weight, padding=1)
    expected = float(torch.linalg.matrix_norm(columns.flatten(1), 2))
    assert norm(weight) == pytest.approx(expected, rel=1e-9)
    assert norm(scale * weight) == pytest.approx(scale * expected, rel=1e-9, abs=0)
