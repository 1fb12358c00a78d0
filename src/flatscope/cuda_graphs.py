"""A step of work on a GPU as one CUDA graph: captured once, replayed without a launch for each of its kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack

import torch
from torch import Tensor

WARM_UP_STEPS = 3  # libraries choose their kernels and make their workspaces in the first ones


def captured_cuda_graph(
    step: Callable[[], None],
    touched: Sequence[Tensor],
    device: torch.device,
    stream: torch.cuda.Stream | None = None,
    trials: int = WARM_UP_STEPS,
) -> Callable[[], None]:
    """A step that waits for nothing as one CUDA graph; trying it out first leaves no trace in what it touches.

    A step that waits for the GPU (it looks at a value, or copies to the CPU) fails while it is tried out: a capture
    that is broken off would leave random numbers and memory in disorder.

    Args:
        step: the work.
        touched: tensors that it changes, put back after each trial.
        device: the GPU.
        stream: where it is captured: what autograd is to follow backwards must have been computed on it.
        trials: how often it is tried out before; once will do where it has been run on that stream.
    """
    kept, randomness = [tensor.detach().clone() for tensor in touched], torch.cuda.get_rng_state(device)
    with torch.cuda.device(device), ExitStack() as ended:
        main = torch.cuda.current_stream()
        ended.callback(torch.cuda.set_rng_state, randomness, device)
        ended.callback(torch.cuda.set_stream, main)  # torch stays on the stream of a capture that fails
        side = torch.cuda.Stream() if stream is None else stream  # type: ignore[no-untyped-call]
        side.wait_stream(main)
        with torch.cuda.stream(side):
            for left in reversed(range(trials)):
                _tried(step, refuse_waiting=not left)
                with torch.no_grad():
                    for tensor, value in zip(touched, kept, strict=True):
                        tensor.copy_(value)
        main.wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=side):
            step()
    return graph.replay


def _tried(step: Callable[[], None], refuse_waiting: bool) -> None:
    """Run a step; an error where it waits for the GPU, if that is to be refused."""
    before = torch.cuda.get_sync_debug_mode()
    try:
        if refuse_waiting:
            _set_sync_debug_mode("error")
        step()
    finally:
        _set_sync_debug_mode(before)


def _set_sync_debug_mode(mode: int | str) -> None:
    """Say what to do where the CPU waits for the GPU; torch warns that it may not see all such places."""
    with warnings.catch_warnings(action="ignore"):
        torch.cuda.set_sync_debug_mode(mode)
