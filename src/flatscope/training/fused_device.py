"""Compiling and starting the fused kernel: NVRTC, which comes with torch on a GPU machine, and the CUDA driver.

Called by their C interfaces, so that nothing depends on private parts of torch, and no compiler need be installed.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from pathlib import Path
from typing import Any, Protocol

import torch

from flatscope.training.fused_chain import NotFused
from flatscope.training.fused_source import KernelPlan

MAX_DYNAMIC_SHARED = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
POINTERS = (
    *("images", "order", "labels", "weights", "velocity", "gradients", "rate", "momentum", "decay", "batch", "turn"),
    *("finished", "queue", "bad", "losses", "wrong"),
)
NUMBERS = ("networks", "samples", "slices", "evaluates", "order_step", "label_step")


class NotCompiled(NotFused):
    """The kernel cannot be compiled or started on this machine, or does not do what it should."""


class Job(ctypes.Structure):
    """Arguments of a launch; `struct Job` of fused.cu explains each."""

    _fields_ = [*((name, ctypes.c_void_p) for name in POINTERS), *((name, ctypes.c_int) for name in NUMBERS)]


class Kernel(Protocol):
    """A kernel that can be started."""

    def start(self, job: Job, blocks: int) -> None:
        """Start it with so many blocks; it may still be running when this returns."""


class Machine(Protocol):
    """Device on which kernels run."""

    threads: int  # of a block
    lanes: int  # threads that run in step
    shared: int  # floats of shared memory that a block may have
    blocks: int  # that run at a time

    def kernel(self, plan: KernelPlan) -> Kernel:
        """The kernel of a plan.

        Raises:
            NotCompiled: it cannot be compiled or loaded here.
        """


def machine_of(device: torch.device) -> Machine:
    """The machine that a device is.

    Raises:
        NotFused: it is none that runs kernels.
    """
    return Gpu(device)


class Gpu:
    """A GPU as a `Machine`: a block of 512 threads has a multiprocessor for itself."""

    threads, lanes = 512, 32

    def __init__(self, device: torch.device) -> None:
        if device.type != "cuda" or torch.version.cuda is None:
            raise NotFused("there is no CUDA device")
        properties: Any = torch.cuda.get_device_properties(device)
        self._device = device
        self.blocks = int(properties.multi_processor_count)
        self.shared = int(getattr(properties, "shared_memory_per_block_optin", 48 << 10)) // 4

    def kernel(self, plan: KernelPlan) -> GpuKernel:
        """The kernel of a plan, compiled once in a process."""
        return _compiled_kernel(plan.source, plan.threads, plan.shared, self._device)


class GpuKernel:
    """A kernel compiled for and loaded on one GPU."""

    def __init__(self, source: str, threads: int, shared: int, device: torch.device) -> None:
        self._threads, self._bytes, self._device = threads, 4 * shared, device
        major, minor = torch.cuda.get_device_capability(device)
        image, self.log = compile_source(source, f"sm_{major}{minor}")
        self._image = image  # must live as long as the module
        self._driver = _cuda_driver_library()
        module, function = ctypes.c_void_p(), ctypes.c_void_p()
        with torch.cuda.device(device):
            torch.cuda.current_stream(device).synchronize()  # so that torch's context is there
            _check_driver_code(self._driver, self._driver.cuModuleLoadData(ctypes.byref(module), image))
            _check_driver_code(self._driver, self._driver.cuModuleGetFunction(ctypes.byref(function), module, b"fused"))
            _check_driver_code(self._driver, self._driver.cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, self._bytes))
        self.module, self._function = module, function

    def start(self, job: Job, blocks: int) -> None:
        """Start it on torch's current stream; it runs on by itself."""
        arguments = (ctypes.c_void_p * 1)(ctypes.cast(ctypes.pointer(job), ctypes.c_void_p))
        with torch.cuda.device(self._device):
            stream = ctypes.c_void_p(torch.cuda.current_stream(self._device).cuda_stream)
            code = self._driver.cuLaunchKernel(
                self._function, blocks, 1, 1, self._threads, 1, 1, self._bytes, stream, arguments, None
            )
        _check_driver_code(self._driver, code)


@functools.lru_cache(maxsize=32)
def _compiled_kernel(source: str, threads: int, shared: int, device: torch.device) -> GpuKernel:
    return GpuKernel(source, threads, shared, device)


def compile_source(source: str, architecture: str) -> tuple[bytes, str]:
    """Machine code for an architecture such as "sm_90", and what the compiler said.

    Raises:
        NotCompiled: there is no NVRTC, or it refuses.
    """
    nvrtc = _nvrtc_library()
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [f"--gpu-architecture={architecture}".encode(), b"--std=c++17", b"--ptxas-options=-v"]
    if nvrtc.nvrtcCreateProgram(ctypes.byref(program), source.encode(), b"fused.cu", 0, None, None):
        raise NotCompiled("NVRTC does not take the source")
    failed = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    said = log.value.decode(errors="replace")
    try:
        if failed:
            raise NotCompiled(f"NVRTC cannot compile it ({(said.strip().splitlines() or ['no reason given'])[0]})")
        nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
        image = ctypes.create_string_buffer(size.value)
        nvrtc.nvrtcGetCUBIN(program, image)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))
    return image.raw, said


@functools.cache
def _nvrtc_library() -> Any:
    """The library, as torch itself finds it: by name, or in the packages that were installed with it."""
    major = (torch.version.cuda or "0").partition(".")[0]
    names = [f"libnvrtc.so.{major}", "libnvrtc.so"] if sys.platform != "win32" else [f"nvrtc64_{major}0_0.dll"]
    packages = Path(torch.__file__).parents[1] / "nvidia"
    libraries = [str(path) for name in names for path in sorted(packages.glob(f"*/lib/{name}"))]
    for name in (*libraries, *names):
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise NotCompiled("NVRTC, which compiles it, is not installed")


@functools.cache
def _cuda_driver_library() -> Any:
    try:
        return ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        raise NotCompiled("the CUDA driver cannot be loaded") from None


def _check_driver_code(driver: Any, code: int) -> None:
    if code:
        text = ctypes.c_char_p()
        driver.cuGetErrorString(code, ctypes.byref(text))
        raise NotCompiled(f"the CUDA driver refuses the kernel ({(text.value or b'unknown').decode()})")
