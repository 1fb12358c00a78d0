"""What flatscope may not leave behind: moved random states, switched kernels, half-written files."""

from __future__ import annotations

import os
import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from flatscope.errors import InputError


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
def precise_math() -> Iterator[None]:
    """Full-precision kernels that can be differentiated twice: no TF32, attention by the math kernel."""
    matmul_tf32 = torch.backends.cuda.matmul.allow_tf32
    cudnn_tf32 = torch.backends.cudnn.allow_tf32
    fast_attention = torch.backends.mha.get_fastpath_enabled()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with sdpa_kernel(SDPBackend.MATH):
            yield
    finally:
        torch.backends.cuda.matmul.allow_tf32 = matmul_tf32
        torch.backends.cudnn.allow_tf32 = cudnn_tf32
        torch.backends.mha.set_fastpath_enabled(fast_attention)


@contextmanager
def whole_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a temporary path beside `path`; it takes the name `path` only if the block ends well.

    Flushed to the disk before and after the rename, so that a kill or a power cut at any moment leaves the old
    file or the new one, never half of one. Missing parent folders are made.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.part")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        if target.is_dir():
            raise IsADirectoryError(f"{target} is a folder")
        _remove_leftovers(target)
        temporary.touch()
        try:
            yield temporary
            with temporary.open("rb+") as file:
                os.fsync(file.fileno())
            temporary.replace(target)
            flush_folder(target.parent)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as problem:
        found = problem.strerror or str(problem)
        raise InputError(
            "a place that can be written to", found, where=str(target), fix="Choose another path"
        ) from problem


def write_whole(path: str | os.PathLike[str], payload: bytes) -> None:
    """Write a file whole or not at all."""
    with whole_file(path) as temporary:
        temporary.write_bytes(payload)


def _remove_leftovers(target: Path) -> None:
    """Half-written files of processes that were killed; those of living ones are left alone."""
    for path in target.parent.glob(f".{target.name}.*.part"):
        owner = path.name.split(".")[-2]
        if owner.isdigit() and not _is_alive(int(owner)):
            path.unlink(missing_ok=True)


def _is_alive(process: int) -> bool:
    if os.name != "posix":  # elsewhere the question itself would end the process
        return True
    try:
        os.kill(process, 0)  # signal 0 only asks
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True


def flush_folder(folder: Path) -> None:
    """Bring a rename to the disk: it lies in the folder, which needs a flush of its own."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
