"""Environment variables of a process that runs on the software GPU."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from scripts.software_gpu.build import DRIVER_LIBRARY

DEVICES = ("a100", "h100", "b200")
"""The devices whose properties the software GPU can have."""

ROOT = Path(__file__).parents[2]
SITE = Path(__file__).with_name("site")
"""The folder of the module that turns right numbers on in each Python process."""


def gpu_environment(
    library: Path,
    device: str = "h100",
    *,
    is_expandable: bool = False,
    has_numbers: bool = False,
    base: Mapping[str, str] = os.environ,
) -> dict[str, str]:
    """Return the variables of a process on the software GPU: those of `base`, with the library's
    folder `library` preloaded. `is_expandable` selects expandable segments, `has_numbers` right
    numbers (see `scripts.software_gpu.numbers`), with copies on other streams as late as the events
    allow, so that a missing wait gives wrong ones."""
    search_path = [
        str(SITE) if has_numbers else "",
        str(ROOT),
        str(ROOT / "solver"),
        str(ROOT / "server"),
        base.get("PYTHONPATH", ""),
    ]
    return {
        **base,
        "LD_PRELOAD": str(library / DRIVER_LIBRARY),
        "LD_LIBRARY_PATH": ":".join(filter(None, [str(library), base.get("LD_LIBRARY_PATH", "")])),
        "TRITON_LIBCUDA_PATH": str(library),
        "PYTHONPATH": ":".join(filter(None, search_path)),
        "PYTORCH_CUDA_ALLOC_CONF": f"expandable_segments:{is_expandable}",
        "TORCH_CUBLAS_WORKSPACE_CACHE": "1",  # the default up to torch 2.14
        "REMAT_SOFTWARE_GPU": "numbers" if has_numbers else "memory",
        **({"REMAT_SOFTWARE_GPU_LATE_COPIES": "1"} if has_numbers else {}),
        "REMAT_SOFTWARE_GPU_DEVICE": device,
    }
