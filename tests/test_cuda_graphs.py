"""The helper that captures CUDA graphs, with a `torch.cuda` that only notes what is asked of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from flatscope import cuda_graphs

pytestmark = pytest.mark.fast


class Stream:
    def wait_stream(self, other: Stream) -> None:
        pass


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    log: list[object] = []
    main = Stream()
    stub = SimpleNamespace(
        get_rng_state=lambda device: "state",
        set_rng_state=lambda state, device: log.append(("random", state)),
        device=lambda device: nullcontext(),
        current_stream=lambda: main,
        set_stream=lambda stream: log.append(("stream back", stream is main)),
        Stream=Stream,
        stream=lambda stream: nullcontext(),
        get_sync_debug_mode=lambda: 0,
        set_sync_debug_mode=lambda mode: log.append(("waiting", mode)),
        CUDAGraph=lambda: SimpleNamespace(replay="replay"),
        graph=lambda graph, stream: nullcontext(),
    )
    monkeypatch.setattr(torch, "cuda", stub)
    return log


def test_the_last_trial_refuses_to_wait_and_all_is_put_back(noted: list[object]) -> None:
    touched = torch.zeros(1)

    def step() -> None:
        noted.append("step")
        touched.add_(1)

    assert cuda_graphs.captured_cuda_graph(step, [touched], torch.device("cpu")) == "replay"
    trials = ["step", ("waiting", 0), "step", ("waiting", 0), ("waiting", "error"), "step", ("waiting", 0)]
    assert noted == [*trials, "step", ("stream back", True), ("random", "state")]
    assert float(touched) == 1, "trials leave no trace; the stand-in of the capture runs the step"


@pytest.mark.parametrize("trials", [1, 3])
def test_a_step_that_fails_leaves_switches_stream_and_random_state(trials: int, noted: list[object]) -> None:
    step: Callable[[], None] = lambda: {}["waits for the GPU"]  # noqa: E731
    with pytest.raises(KeyError):
        cuda_graphs.captured_cuda_graph(step, [], torch.device("cpu"), trials=trials)
    assert noted[-3:] == [("waiting", 0), ("stream back", True), ("random", "state")]
