"""The functions of torch and Triton that report a GPU, replaced for a GPU that is not there.

Replaced are questions: whether there is a device, its properties, its number, its generator's
state. What would allocate memory or launch a kernel stays as it is, and fails. The functions are
replaced while Inductor generates code, not while a model is traced (`fake_cuda`).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.utils._triton
import triton
from scripts.software_gpu.codegen.fake_cuda import CUDA
from scripts.software_gpu.codegen.gpus import Gpu
from torch._dynamo.device_interface import CudaInterface
from triton.backends import Backend, backends
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase

_GUARDS = "_ZN3c104impl26device_guard_impl_registryE"
"""The array of device guards of libc10, by device type: `c10::impl::device_guard_impl_registry`."""

_CUDA_TYPE, _META_TYPE, _NUM_TYPES = 1, 14, 22
"""Device types of c10/core/DeviceType.h."""


def install_triton_driver(gpu: Gpu) -> None:
    """Make a driver without a device the one of Triton's NVIDIA backend, in this process."""

    class Driver(DriverBase):
        """Reports the architecture of a GPU; launches nothing."""

        @classmethod
        def is_active(cls) -> bool:  # type: ignore[override]
            return True

        def get_current_target(self) -> Any:
            return GPUTarget("cuda", 10 * gpu.major + gpu.minor, gpu.warp_size)

        def get_active_torch_device(self) -> Any:
            return CUDA

        def map_python_to_cpp_type(self, ty: str) -> str:
            raise NotImplementedError("launchers are not generated")

        def get_benchmarker(self) -> Any:
            raise NotImplementedError("there is no GPU to measure on")

    # Inductor creates the driver of a backend and makes it the active one.
    backends["nvidia"] = Backend(backends["nvidia"].compiler, Driver)
    triton.runtime.driver.set_active(Driver())


def install_device_guard() -> None:
    """Let fake CUDA tensors be indexed in a CPU build of torch, in this process.

    Indexing selects the tensor's device first, by the guard that is registered for its type. A CPU
    build has none for CUDA. torch replaces the guard of a build with CUDA that sees no GPU by one
    without effect; the same is done here, with the guard of meta tensors in its place before.
    """
    libraries = Path(torch.__file__).parent / "lib"
    registry = (ctypes.c_void_p * _NUM_TYPES).in_dll(
        ctypes.CDLL(str(libraries / "libc10.so")), _GUARDS
    )
    if not registry[_CUDA_TYPE]:
        registry[_CUDA_TYPE] = registry[_META_TYPE]
    torch._C._ensureCUDADeviceGuardSet()


@contextmanager
def reported_gpu(gpu: Gpu) -> Iterator[None]:
    """Let torch report a GPU as its only CUDA device, within the context."""
    functions: dict[str, Callable[..., Any]] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "device": lambda device: nullcontext(),
        "get_device_properties": lambda device=None: gpu,
        "get_device_capability": lambda device=None: gpu.capability,
        # Saved before a graph is compiled, and restored afterwards.
        "get_rng_state": lambda device="cuda": torch.zeros(16, dtype=torch.uint8),
        "set_rng_state": lambda state, device="cuda": None,
    }
    with ExitStack() as stack:
        for name, function in functions.items():
            stack.enter_context(mock.patch.object(torch.cuda, name, function))
        for name in ("current_device", "device_count", "get_device_properties"):
            replacement = staticmethod(functions[name])
            stack.enter_context(mock.patch.object(CudaInterface, name, replacement))
        if not hasattr(torch._C, "_cuda_getCurrentRawStream"):  # imported by generated modules
            no_stream = mock.patch.object(
                torch._C, "_cuda_getCurrentRawStream", _no_stream, create=True
            )
            stack.enter_context(no_stream)
        stack.callback(torch.utils._triton.has_triton.cache_clear)
        torch.utils._triton.has_triton.cache_clear()
        yield


def _no_stream(device: int) -> int:
    raise RuntimeError("there is no GPU to launch a kernel on")
