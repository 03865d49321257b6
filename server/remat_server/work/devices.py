"""Device types on which this machine can measure, determined without importing torch."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess


def measurable_devices() -> tuple[str, ...]:
    """Return the device types, of "cpu" and "cuda", on which torch can measure here."""
    if importlib.util.find_spec("torch") is None:
        return ()
    return ("cpu", "cuda") if _has_cuda() else ("cpu",)


def _has_cuda() -> bool:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return False
    try:
        return b"GPU" in subprocess.run([tool, "-L"], capture_output=True, timeout=30).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
