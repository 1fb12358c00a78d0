"""Products of one batch, replayed on a GPU as a CUDA graph from the moment on that this pays.

A product of small batches takes most of its time to launch its kernels one by one. What stays the same, the second
backward pass through a graph of autograd that is kept, is captured once for each number of vectors and each precision;
the forward pass, which may look at values, is never part of it. What cannot be captured, or gives something else when
it is replayed, goes on as single calls.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Protocol, TypeVar

import torch
from torch import Tensor

from flatscope.cuda_graphs import captured_cuda_graph
from flatscope.curvature.hessian_products import Product
from flatscope.isolation import products_are_coarse
from flatscope.limits import Limits

T = TypeVar("T")
Kind = tuple[int, bool]  # number of vectors, whether products are coarse
# What a replayed product may differ from the same calls, in roundings of one number: kernels may add up in another
# order. In TF32 the two are a tenth apart then, as far as TF32 itself is off on a network at random weights.
ROUNDINGS = 100
COARSE_ROUNDING = 2.0**-10  # of TF32
# Share of a product's time from which on its launches are what it waits for: 256 images of 32 px in ResNet-18 are
# replayed in 97 % of the time of calls, and small networks in 70 %.
LAUNCHING = 0.7


class Capturer(Protocol):
    """Interface of a device on which work can be captured and replayed: a GPU, or a stand-in for tests."""

    def aside(self, work: Callable[[], T]) -> T:
        """Result of work that is done where captures are made."""

    def launches_longer(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Result of such work, and whether to ask for its kernels takes most of its time."""

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step, to be called again and again; a RuntimeError where it cannot be captured."""

    def forget(self) -> None:
        """Give back the memory of what was captured and is no longer there."""


class CudaCapturer:
    """Captures on a stream of its own, on which all that is captured must have been begun."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def aside(self, work: Callable[[], T]) -> T:
        """Result of work on that stream; each of the two streams waits for the other, so that memory can be shared."""
        main = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(main)
        try:
            with torch.cuda.stream(self._stream):
                return work()
        finally:
            main.wait_stream(self._stream)

    def launches_longer(self, work: Callable[[], T]) -> tuple[T, bool]:
        """Result of work on that stream, and whether the GPU was done soon after the last kernel was asked for."""
        torch.cuda.synchronize(self._device)
        begun = time.perf_counter()
        found = self.aside(work)
        asked = time.perf_counter()
        torch.cuda.synchronize(self._device)
        return found, asked - begun > LAUNCHING * (time.perf_counter() - begun)

    def captured(self, step: Callable[[], None]) -> Callable[[], None]:
        """The step as a CUDA graph."""
        return captured_cuda_graph(step, [], self._device, self._stream, trials=1)

    def forget(self) -> None:
        """Empty torch's store of unused memory."""
        torch.cuda.empty_cache()


@cache
def capturer_for(device: torch.device) -> Capturer | None:
    """The one capturer of a device, whose libraries keep memory for its stream; None where nothing can be captured."""
    return CudaCapturer(device) if device.type == "cuda" else None


class ReplayedProduct:
    """The product of one batch, captured where launches are most of its time, once it was asked for so often.

    Args:
        make: the product, by calls.
        capturer: where it is made and captured.
        limits: after how many products of a kind it is captured.
    """

    def __init__(self, make: Callable[[], Product], capturer: Capturer, limits: Limits) -> None:
        self._capturer, self._after = capturer, limits.captured_after
        self._by_calls = capturer.aside(make)
        self._count: Counter[Kind] = Counter()
        self._graphs: dict[Kind, _CapturedProduct | None] = {}

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        """Products with a stack of vectors; to be read before the next call."""
        kind = len(vectors[0]), products_are_coarse()
        self._count[kind] += 1
        replay = self._graphs.get(kind)
        if replay is not None:
            return replay(vectors)
        if self._count[kind] != self._after or kind in self._graphs:
            return self._capturer.aside(lambda: self._by_calls(vectors))
        expected, worth = self._capturer.launches_longer(lambda: self._by_calls(vectors))
        self._graphs[kind] = self._captured(vectors, expected, kind) if worth else None
        return expected

    @property
    def replayed(self) -> bool:
        """True if products of any kind are replayed from a captured graph."""
        return any(replay is not None for replay in self._graphs.values())

    def _captured(self, vectors: Sequence[Tensor], expected: Sequence[Tensor], kind: Kind) -> _CapturedProduct | None:
        """The graph of such products; None where there is none, or where it gives something else than the calls."""
        try:
            replay = self._compared(vectors, expected, kind)
        except (RuntimeError, ValueError):  # it waits for the GPU, or there is no memory for it
            replay = None
        if replay is None:
            self._capturer.forget()
        return replay

    def _compared(self, vectors: Sequence[Tensor], expected: Sequence[Tensor], kind: Kind) -> _CapturedProduct | None:
        replay = _CapturedProduct(self._by_calls, vectors, self._capturer)
        return replay if _agree(replay(vectors), expected, kind) else None


class _CapturedProduct:
    """A captured product with the places where its vectors and its results stand."""

    def __init__(self, product: Product, like: Sequence[Tensor], capturer: Capturer) -> None:
        places, results = [torch.zeros_like(vector) for vector in like], list[Tensor]()

        def step() -> None:
            results[:] = product(places)

        self._vectors, self._results, self._run = places, results, capturer.captured(step)

    def __call__(self, vectors: Sequence[Tensor]) -> list[Tensor]:
        for place, vector in zip(self._vectors, vectors, strict=True):
            place.copy_(vector)
        self._run()
        return self._results


def _agree(found: Sequence[Tensor], expected: Sequence[Tensor], kind: Kind) -> bool:
    """True where two products are the same but for rounding."""
    gap = torch.stack([(a - b).norm() for a, b in zip(found, expected, strict=True)]).norm()
    length = torch.stack([part.norm() for part in expected]).norm()
    eps = torch.finfo(expected[0].dtype).eps
    return bool(gap <= ROUNDINGS * (max(eps, COARSE_ROUNDING) if kind[1] else eps) * length)
