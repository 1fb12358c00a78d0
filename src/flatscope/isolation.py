"""What flatscope may not leave behind: moved random states, switched kernels."""

from __future__ import annotations

import gc
import random
import traceback
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils import checkpoint

from flatscope.errors import InputError, missing_derivative
from flatscope.switches import default_device, float32_products, signals_wait

_outside: list[tuple[torch.dtype, torch.device]] = []  # the caller's default dtype and device, once per open guard
_running: list[tuple[torch.dtype, torch.device]] = []  # of the passes that run now without settings of ours
_coarse = ContextVar("coarse products", default=False)


@contextmanager
def untouched_randomness(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Put the global random states (Python, NumPy, torch, CUDA) and the given generators back at the end."""
    python_state, numpy_state = random.getstate(), np.random.get_state()
    torch_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []
    kept = [(generator, generator.get_state()) for generator in generators]
    try:
        yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
        torch.set_rng_state(torch_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)
        for generator, state in kept:
            generator.set_state(state)


@contextmanager
def private_randomness(seed: int, device: torch.device | None = None) -> Iterator[None]:
    """Run the block with the global generators seeded, then put them back as they were.

    For code that can only draw from the global state, such as dropout and the constructors of torch's
    modules.
    """
    if not -(2**63) <= seed < 2**64:  # torch would say: overflow when unpacking long long
        raise InputError("a whole number of at most 64 bits", str(seed), where="seed")
    on_gpu = device is not None and device.type == "cuda"
    with torch.random.fork_rng(devices=[device] if on_gpu else []):
        # torch.manual_seed would also seed accelerators that nobody forked; so each generator by itself.
        torch.default_generator.manual_seed(seed)
        if on_gpu:
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed)
        yield


def release_traceback_tensors(problem: BaseException) -> None:
    """Clear the variables of the frames that an exception came through: they hold the tensors that did not fit."""
    seen: set[int] = set()
    links: list[BaseException | None] = [problem]
    while links:
        link = links.pop()
        if link is not None and id(link) not in seen:
            seen.add(id(link))
            traceback.clear_frames(link.__traceback__)
            links += [link.__context__, link.__cause__]
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


@contextmanager
def own_settings(generators: Iterable[torch.Generator] = ()) -> Iterator[None]:
    """Torch as every number here needs it, whatever the caller has set; all of it is put back at the end.

    Kernels of full precision that can be differentiated twice (no TF32, no autocast, attention by the math kernel),
    derivatives on (also inside `inference_mode` and `no_grad`), activations kept instead of computed again, new tensors
    in float32 on the CPU unless told otherwise, no anomaly detection, and deterministic kernels only where there are
    some. What torch cannot differentiate is refused in words. Random states are put back too, by the outermost of
    several, and those of the given generators. Also a decorator: every public function that runs a model has it.
    """
    generators, depth, stack = tuple(generators), len(_outside), ExitStack()
    waiting = nullcontext if depth else signals_wait  # what an inner one leaves behind, the outermost puts back
    try:
        with waiting():
            if generators or not depth:  # most of its time, and products with a matrix come by the thousand
                stack.enter_context(untouched_randomness(generators))
            stack.enter_context(torch.autograd.set_detect_anomaly(False))
            stack.enter_context(derivatives_on())
            stack.enter_context(_without_autocast())
            stack.enter_context(_own_defaults())
            stack.enter_context(sdpa_kernel(SDPBackend.MATH))
            stack.enter_context(_own_switches())
            stack.enter_context(_without_saved_tensor_hooks())
            stack.enter_context(without_checkpointing())
        yield
    except RuntimeError as problem:
        if words := missing_derivative(problem):
            raise words from problem
        raise
    finally:
        try:
            with waiting():
                stack.close()
        finally:  # again, where a signal came before signals had to wait: what is done is not done twice
            stack.close()
            del _outside[depth:]


@contextmanager
def derivatives_on() -> Iterator[None]:
    """Derivatives on and no autocast, whatever the caller has set: what training needs. Put back at the end."""
    with ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for kind in ("cpu", "cuda", "mps", "xpu"):
            if torch.is_autocast_enabled(kind):
                stack.enter_context(torch.autocast(kind, enabled=False))
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    """A network that asks for autocast in its forward runs without: its rounding is no part of the function."""
    kept = torch.autocast.__enter__, torch.autocast.__exit__
    torch.autocast.__enter__ = lambda self: self  # type: ignore[method-assign]
    torch.autocast.__exit__ = lambda self, *raised: None  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.autocast.__enter__, torch.autocast.__exit__ = kept  # type: ignore[method-assign]


@contextmanager
def _own_defaults() -> Iterator[None]:
    """New tensors in float32 on the CPU; what the caller has set is kept for the caller's own code."""
    dtype, device = torch.get_default_dtype(), default_device()
    _outside.append(_outside[0] if _outside else (dtype, device))
    try:
        torch.set_default_dtype(torch.float32)
        with nullcontext() if device.type == "cpu" else torch.device("cpu"):
            yield
    finally:
        _outside.pop()
        torch.set_default_dtype(dtype)


def settings_of_running_model(dtype: torch.dtype, device: torch.device) -> AbstractContextManager[None]:
    """Context in which a user's model runs: without checkpointing, new tensors of its dtype and on its device."""
    if not _outside:
        # Within another pass it is done already, and asking for the device would be seen as an operation.
        return nullcontext() if (dtype, device) in _running[-1:] else _running_model(dtype, device)
    if _outside[0][1].type == "cpu" and torch.get_default_dtype() == dtype:
        return nullcontext()  # `own_settings` has done it all, and this is called thousands of times
    return callers_defaults(dtype, device)


@contextmanager
def _running_model(dtype: torch.dtype, device: torch.device) -> Iterator[None]:
    with without_checkpointing(), callers_defaults(dtype, device):
        _running.append((dtype, device))
        try:
            yield
        finally:
            _running.pop()


class callers_defaults(AbstractContextManager[None]):  # noqa: N801, as other context managers are called
    """New tensors as the caller has set them: data sets and models may count on it.

    Args:
        dtype: another default dtype, where the model is measured in another than the caller's.
        device: another default device, where the caller has set one.
    """

    def __init__(self, dtype: torch.dtype | None = None, device: torch.device | None = None) -> None:
        self.dtype, self.device = dtype, device

    def __enter__(self) -> None:
        dtype, place = _outside[0] if _outside else (torch.get_default_dtype(), default_device())
        self.before, dtype = torch.get_default_dtype(), self.dtype or dtype
        if dtype != self.before:
            torch.set_default_dtype(dtype)
        self.place = None if place.type == "cpu" else self.device or place
        if self.place is not None:
            self.place.__enter__()

    def __exit__(self, *raised: Any) -> None:
        if self.place is not None:
            self.place.__exit__(*raised)
        if torch.get_default_dtype() != self.before:
            torch.set_default_dtype(self.before)


@contextmanager
def without_checkpointing() -> Iterator[None]:
    """Activation checkpointing keeps what it would throw away and compute again.

    It saves memory in training, but cannot be differentiated twice, and its reentrant kind gives no derivatives at all
    to layers whose input needs none. Both kinds look these two names up when they are called, so that models which
    imported `checkpoint` itself are reached as well.
    """
    names = {"CheckpointFunction": _Unchecked, "_checkpoint_without_reentrant_generator": _unchecked_generator}
    kept = {name: getattr(checkpoint, name) for name in names}
    try:
        for name, value in names.items():
            setattr(checkpoint, name, value)
        yield
    finally:
        for name, value in kept.items():
            setattr(checkpoint, name, value)


class _Unchecked:
    """In the place of the autograd function of reentrant checkpointing."""

    @staticmethod
    def apply(function: Callable[..., Any], preserve_rng_state: bool, *args: Any) -> Any:
        return function(*args)


def _unchecked_generator(*_: Any, **__: Any) -> Iterator[None]:
    """In the place of what other checkpointing does before and after a function: nothing."""
    yield


@contextmanager
def coarse_products(coarse: bool = True) -> Iterator[None]:
    """Let a GPU multiply float32 with 10 binary digits (TF32), which is three times as fast; False: in full again.

    For searches, whose result is then computed in full precision. A number may come out of this block only where that
    was asked for and is said beside it.
    """
    before = _coarse.set(coarse)
    try:
        with _own_switches():
            yield
    finally:
        _coarse.reset(before)


def products_are_coarse() -> bool:
    """True inside of `coarse_products`."""
    return _coarse.get()


@contextmanager
def _own_switches() -> Iterator[None]:
    """The switches of torch that have no context manager of their own."""
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    deterministic = torch.get_deterministic_debug_mode()
    try:
        torch.backends.mha.set_fastpath_enabled(False)
        torch.set_deterministic_debug_mode(min(deterministic, 1))  # 2 is an error wherever a kernel has no such kind
        with float32_products(coarse=_coarse.get()):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_attention)
        torch.set_deterministic_debug_mode(deterministic)


@contextmanager
def _without_saved_tensor_hooks() -> Iterator[None]:
    """Leave out the caller's hooks for saved tensors, also where they are forbidden.

    Derivatives of many samples at once refuse to work beside hooks, such as those of `save_on_cpu`.
    """
    engine = torch._C._autograd
    if not hasattr(engine, "_top_saved_tensors_default_hooks"):
        yield
        return
    forbidden = engine._saved_tensors_hooks_get_disabled_error_message()
    resting: list[Any] = []
    try:
        if forbidden is not None:
            engine._saved_tensors_hooks_enable()
        while hooks := engine._top_saved_tensors_default_hooks(False):
            resting.append(hooks)
            engine._pop_saved_tensors_default_hooks()
        yield
    finally:
        for hooks in reversed(resting):
            engine._push_saved_tensors_default_hooks(*hooks)
        if forbidden is not None:
            engine._saved_tensors_hooks_disable(forbidden)
