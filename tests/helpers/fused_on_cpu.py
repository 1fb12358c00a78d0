"""The fused kernel compiled as C++: threads of the CPU in the place of a block's."""

from __future__ import annotations

import ctypes
import hashlib
import shutil
import subprocess
from pathlib import Path

from flatscope.training.fused_device import Job
from flatscope.training.fused_source import KernelPlan

COMPILER = shutil.which("g++") or shutil.which("clang++")


class CppKernel:
    """The `fused` of a shared library."""

    def __init__(self, library: Path) -> None:
        self._fused = ctypes.CDLL(str(library)).fused

    def start(self, job: Job, blocks: int) -> None:
        """Run it to its end."""
        self._fused(ctypes.byref(job))


class CppMachine:
    """A `Machine` without a GPU."""

    blocks = 2

    def __init__(self, folder: Path, threads: int = 4, lanes: int = 2, shared: int = 58_000) -> None:
        self._folder, self.threads, self.lanes, self.shared = folder, threads, lanes, shared

    def kernel(self, plan: KernelPlan) -> CppKernel:
        """Compiled once for each source text."""
        assert COMPILER is not None
        stem = self._folder / hashlib.blake2b(plan.source.encode(), digest_size=8).hexdigest()
        library = stem.with_suffix(".so")
        if not library.exists():
            stem.with_suffix(".cpp").write_text(plan.source)
            command = [COMPILER, "-O0", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w"]
            subprocess.run([*command, "-o", library, stem.with_suffix(".cpp")], check=True)
        return CppKernel(library)
