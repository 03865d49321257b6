"""Compile kernels of Inductor to the machine code of a GPU, without the GPU.

Inductor's own launcher of a kernel selects the configurations that it would try on the GPU, and
calls Triton, which calls ptxas. Triton loads the code into the driver only when it is launched.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch._inductor.config as inductor_config
import triton
from scripts.software_gpu.codegen.cuda_stubs import reported_gpu
from scripts.software_gpu.codegen.gpus import Gpu
from scripts.software_gpu.codegen.results import KernelBinary, KernelFailure, KernelSource
from torch._inductor.codecache import PyCodeCache

_CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

_RESOURCES = re.compile(r"REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)")

_MAX_MESSAGE = 2000
"""Characters of a message: the part at its end is the compiler's."""


def compile_kernels(
    sources: Sequence[KernelSource], gpu: Gpu
) -> tuple[tuple[KernelBinary, ...], tuple[KernelFailure, ...]]:
    """Compile kernels in all configurations that Inductor would try on a GPU."""
    outcomes: list[KernelBinary | KernelFailure] = []
    with reported_gpu(gpu), inductor_config.patch(use_static_triton_launcher=False):
        for source in sources:
            outcomes += _compile_kernel(source, gpu)
    binaries = tuple(outcome for outcome in outcomes if isinstance(outcome, KernelBinary))
    failures = tuple(outcome for outcome in outcomes if isinstance(outcome, KernelFailure))
    return binaries, failures


def _compile_kernel(source: KernelSource, gpu: Gpu) -> Iterator[KernelBinary | KernelFailure]:
    """Yield the outcome of each configuration of a kernel."""
    try:
        kernel = getattr(PyCodeCache.load(source.text), source.name)
    except Exception as error:  # whatever is wrong with a source is the result
        yield KernelFailure(source.name, "", _message(error))
        return
    if (generated_for := kernel.device_props.cc) != 10 * gpu.major + gpu.minor:
        message = f"generated for sm_{generated_for}, and {gpu.name} is {gpu.architecture}"
        yield KernelFailure(source.name, "", message)
        return
    for configuration in kernel.configs:
        label = str(configuration)
        try:
            compiled = kernel._precompile_config(configuration).kernel
        except Exception as error:
            yield KernelFailure(source.name, label, _message(error))
            continue
        binary = _binary(source.name, label, compiled)
        if binary.shared_bytes > gpu.shared_memory_per_block_optin:
            message = (
                f"needs {binary.shared_bytes:,} bytes of shared memory, and a block of {gpu.name} "
                f"has {gpu.shared_memory_per_block_optin:,}"
            )
            yield KernelFailure(source.name, label, message)
        else:
            yield binary


def _message(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"[-_MAX_MESSAGE:]


def _binary(kernel: str, configuration: str, compiled: Any) -> KernelBinary:
    cubin: bytes = compiled.asm["cubin"]
    registers, local_bytes = _resources(cubin)
    return KernelBinary(
        kernel=kernel,
        configuration=configuration,
        cubin_bytes=len(cubin),
        shared_bytes=compiled.metadata.shared,
        registers=registers,
        local_bytes=local_bytes,
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return the registers and the bytes of local memory of a thread, as the code declares them."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(_CUOBJDUMP), "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    resources = _RESOURCES.search(text)
    assert resources is not None, f"cuobjdump printed {text!r}"
    registers, stack, local = map(int, resources.groups())
    return registers, stack + local
