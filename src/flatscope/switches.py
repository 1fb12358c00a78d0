"""How finely torch multiplies float32 and where it makes tensors, in all its versions; and signals that can wait."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Entry = tuple[str, str]

# Where torch 2.9 and later keep what each library does, the more general first: an entry that says "none" follows the
# more general one. Not by their names below `torch.backends`: the one for all of oneDNN sets another entry.
_GENERAL: Entry = ("generic", "all")
_CUDA: Entry = ("cuda", "all")
_LIBRARIES: tuple[Entry, ...] = (_CUDA, ("mkldnn", "all"))
_CUDNN: tuple[Entry, ...] = (("cuda", "conv"), ("cuda", "rnn"))
_PRODUCTS: tuple[Entry, ...] = (("cuda", "matmul"), ("mkldnn", "matmul"), ("mkldnn", "conv"), ("mkldnn", "rnn"))
_NEWER_NAMES = hasattr(torch._C, "_get_fp32_precision_getter") and hasattr(torch._C, "_set_fp32_precision_setter")


@contextmanager
def float32_products(coarse: bool) -> Iterator[None]:
    """Multiply float32 in full, or coarsely on a GPU (TF32), whatever the caller has set; put back at the end.

    Both the older names (`allow_tf32`, `set_float32_matmul_precision`) and the newer (`fp32_precision`) are set and put
    back: torch raises where an older one is read while the newer says something else.
    """
    newer: dict[Entry, str] = {}
    older: dict[str, Any] = {}
    cudnn_is_set = True
    try:
        if _NEWER_NAMES:
            _read_newer_switches(newer)
            cudnn_is_set = all(entry in newer for entry in _CUDNN)
            _set_switches(_PRODUCTS, "ieee")  # with these the older name of products can be read, whatever it says
        older["products"] = torch.get_float32_matmul_precision()
        if cudnn_is_set:
            older["cudnn"] = _older_name_of_cudnn()
            torch._C._set_cudnn_allow_tf32(coarse)
        elif torch._C._has_cuda:
            _set_switch(_CUDA, "tf32" if coarse else "ieee")
        torch.set_float32_matmul_precision("highest")
        if coarse:
            torch._C._set_cublas_allow_tf32(True)
        elif _NEWER_NAMES:
            _set_switches((entry for entry in (*_PRODUCTS, *_CUDNN) if entry in newer), "ieee")
        yield
    finally:
        if "cudnn" in older:
            torch._C._set_cudnn_allow_tf32(older["cudnn"])
        if "products" in older:
            torch.set_float32_matmul_precision(older["products"])
        for entry, value in newer.items():
            _set_switch(entry, value)


def _read_newer_switches(switches: dict[Entry, str]) -> None:
    """Read each newer switch after the more general ones were cleared.

    Those of cuDNN are left out, and may not be set, while nobody has set them: they are "tf32" then, but follow the
    more general ones, which no value that can be set does.
    """
    for entry in (_GENERAL, *_LIBRARIES):
        switches[entry] = _read_switch(entry)
        _set_switch(entry, "none")
    for entry in _PRODUCTS:
        switches[entry] = _read_switch(entry)
    said = {entry: _read_switch(entry) for entry in _CUDNN}
    _set_switch(_CUDA, "ieee")
    switches |= {entry: value for entry, value in said.items() if value != "tf32" or _read_switch(entry) == "tf32"}
    _set_switch(_CUDA, "none")


def _older_name_of_cudnn() -> bool:
    """It can be read only while the newer ones say the same."""
    if not _NEWER_NAMES:
        return bool(torch._C._get_cudnn_allow_tf32())
    _set_switches(_CUDNN, "tf32")
    try:
        return bool(torch._C._get_cudnn_allow_tf32())
    except RuntimeError:  # the older one does not allow it
        return False


def _read_switch(entry: Entry) -> str:
    return str(torch._C._get_fp32_precision_getter(*entry))


def _set_switch(entry: Entry, value: str) -> None:
    torch._C._set_fp32_precision_setter(*entry, value)


def _set_switches(entries: Iterable[Entry], value: str) -> None:
    for entry in entries:
        _set_switch(entry, value)


def default_device() -> torch.device:
    """Device of new tensors: `torch.get_default_device` of torch 2.5 does not know of a `with device:`."""
    return torch.empty(0).device


@contextmanager
def signals_wait() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM wait until the block is over: between a switch that is set and a note to put it back."""
    kept: dict[int, Any] = {}
    came: list[tuple[int, Any]] = []

    def note(number: int, frame: Any) -> None:
        came.append((number, frame))

    if threading.current_thread() is threading.main_thread():  # no other gets signals
        kept = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
        kept = {number: handler for number, handler in kept.items() if callable(handler)}
    try:
        for number in kept:
            signal.signal(number, note)
        yield
    finally:
        for number, handler in kept.items():
            signal.signal(number, handler)
        for number, frame in came:
            kept[number](number, frame)
