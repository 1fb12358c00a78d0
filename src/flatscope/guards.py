"""What flatscope may not leave behind: moved random states, switched kernels, half-written files."""

from __future__ import annotations

import os
import random
import tempfile
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
    """Yield a temporary path beside `path`; it takes the name `path` only if the block ends well."""
    target = Path(path)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    except OSError as problem:
        raise InputError(
            "a folder that can be written to",
            str(problem),
            where=str(target.parent),
            fix="Choose another path",
        ) from problem
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes the file private; results are ordinary files
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
