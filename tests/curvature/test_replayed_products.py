"""Products that are captured and replayed, by a capturer that records by calling: when, what is checked, what is left.

Captures themselves need a GPU: `benchmarks/gpu_products.py` looks at them.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import pytest
import torch
from networks import attention, mlp
from torch import Tensor

import flatscope as fs
from flatscope.curvature import operators, replayed_products
from flatscope.curvature.operators import CurvatureOperator, GaussNewton, Hessian
from flatscope.isolation import coarse_products
from flatscope.limits import STANDARD

pytestmark = pytest.mark.fast

AFTER = STANDARD.captured_after


class CalledAgain:
    """A capture that is the step itself."""

    def __init__(self) -> None:
        self.captures, self.replays, self.forgotten = 0, 0, 0
        self.inside = False
        self.error: Exception | None = None
        self.stale = False
        self.worth = True

    def aside(self, work: Callable[[], object]) -> object:
        self.inside, before = True, self.inside
        try:
            return work()
        finally:
            self.inside = before

    def launches_longer(self, work: Callable[[], object]) -> tuple[object, bool]:
        return self.aside(work), self.worth

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        self.captures += 1
        if self.error:
            raise self.error
        step()

        def replay() -> None:
            self.replays += 1
            if not self.stale:
                step()

        return replay

    def forget(self) -> None:
        self.forgotten += 1


@pytest.fixture
def capturer(monkeypatch: pytest.MonkeyPatch) -> CalledAgain:
    found = CalledAgain()
    monkeypatch.setattr(operators, "capturer_for", lambda device: found)
    return found


def operator_and_vectors(kind: type[CurvatureOperator] = Hessian) -> tuple[CurvatureOperator, Tensor]:
    operator = kind(fs.Context(mlp().problem()))
    generator = torch.Generator().manual_seed(0)
    return operator, torch.randn(3 * AFTER, operator.size, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("kind", [Hessian, GaussNewton])
def test_replays_give_the_products_of_calls(kind: type[CurvatureOperator], capturer: CalledAgain) -> None:
    operator, vectors = operator_and_vectors(kind)
    plain = kind(fs.Context(mlp().problem()))
    plain._capturer = None
    for vector in vectors:
        torch.testing.assert_close(operator @ vector, plain @ vector, rtol=1e-12, atol=1e-14)
    assert (capturer.captures, capturer.forgotten) == (1, 0)
    assert capturer.replays == len(vectors) - AFTER + 1, "one of them is the check"


def test_products_that_keep_the_gpu_busy_are_not_captured(capturer: CalledAgain) -> None:
    capturer.worth = False
    operator, vectors = operator_and_vectors()
    for vector in vectors:
        operator @ vector
    assert not capturer.captures


def test_few_products_are_not_captured(capturer: CalledAgain) -> None:
    operator, vectors = operator_and_vectors()
    for vector in vectors[: AFTER - 1]:
        operator @ vector
    assert not capturer.captures


def test_every_number_of_vectors_and_precision_has_its_own_graph(capturer: CalledAgain) -> None:
    operator, vectors = operator_and_vectors()
    expected = Hessian(fs.Context(mlp().problem())) @ vectors[:2].T
    for _ in range(AFTER + 2):
        operator @ vectors[0]
        torch.testing.assert_close(operator @ vectors[:2].T, expected, rtol=1e-12, atol=1e-14)
    assert capturer.captures == 2
    with coarse_products():
        for _ in range(AFTER - 1):
            operator @ vectors[0]
        assert capturer.captures == 2
        operator @ vectors[0]
    assert capturer.captures == 3


def test_what_cannot_be_captured_goes_on_by_calls(capturer: CalledAgain) -> None:
    capturer.error = RuntimeError("called a synchronizing CUDA operation")
    operator, vectors = operator_and_vectors()
    expected = Hessian(fs.Context(mlp().problem())) @ vectors[0]
    for _ in vectors:
        torch.testing.assert_close(operator @ vectors[0], expected, rtol=1e-12, atol=1e-14)
    assert (capturer.captures, capturer.replays, capturer.forgotten) == (1, 0, 1), "it is tried once"


def test_an_error_that_is_none_of_a_capture_is_not_hidden(capturer: CalledAgain) -> None:
    capturer.error = KeyError("a fault of the capturer")
    operator, vectors = operator_and_vectors()
    for vector in vectors[: AFTER - 1]:
        operator @ vector
    with pytest.raises(KeyError):
        operator @ vectors[0]


def test_a_replay_that_differs_is_dropped(capturer: CalledAgain) -> None:
    capturer.stale = True  # it gives what it was captured with: products with zeros
    operator, vectors = operator_and_vectors()
    plain = Hessian(fs.Context(mlp().problem())) @ vectors.T
    for vector, product in zip(vectors, plain.T, strict=True):
        torch.testing.assert_close(operator @ vector, product, rtol=1e-12, atol=1e-14)
    assert (capturer.captures, capturer.replays, capturer.forgotten) == (1, 1, 1)


def test_nothing_is_held_after_a_failure(capturer: CalledAgain, monkeypatch: pytest.MonkeyPatch) -> None:
    capturer.stale = True
    made: list[weakref.ref[object]] = []
    begin = replayed_products._CapturedProduct.__init__

    def noted(self: object, *args: object) -> None:
        made.append(weakref.ref(self))
        begin(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(replayed_products._CapturedProduct, "__init__", noted)
    gone: list[bool] = []
    monkeypatch.setattr(CalledAgain, "forget", lambda self: gone.append(made[0]() is None))
    operator, vectors = operator_and_vectors()
    for vector in vectors:
        operator @ vector
    assert gone == [True], "the graph is gone before its memory is given back"


def test_what_is_captured_was_begun_where_captures_are_made(
    capturer: CalledAgain, monkeypatch: pytest.MonkeyPatch
) -> None:
    places: list[bool] = []
    begin = Hessian._product_of
    monkeypatch.setattr(
        Hessian, "_product_of", lambda self, batch: places.append(capturer.inside) or begin(self, batch)
    )
    operator, vectors = operator_and_vectors()
    operator @ vectors[0]
    assert places == [True]


def test_release_forgets_graphs(capturer: CalledAgain) -> None:
    operator, vectors = operator_and_vectors()
    for vector in vectors:
        operator @ vector
    (kept,) = [weakref.ref(product) for _, product in operator._kept]
    assert kept().replayed  # type: ignore[union-attr]
    operator.release()
    gc.collect()
    assert kept() is None


def test_data_that_are_not_kept_are_not_captured(capturer: CalledAgain, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CurvatureOperator, "_may_keep", lambda self: False)
    operator = Hessian(fs.Context(attention().problem()))
    for _ in range(2 * AFTER):
        operator @ torch.ones(operator.size, dtype=torch.float64)
    assert not capturer.captures
