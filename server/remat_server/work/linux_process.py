"""Functions of Linux for processes: exit with the parent, and the size of a process's data."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when process `parent` ends, so that `kill -9` of the
    service frees its cores too. Does nothing on other systems than Linux."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # the parent ended before the call


def data_bytes(process: str) -> int:
    """Return the bytes that count against a process's data limit (`RLIMIT_DATA`); 0 if unknown.

    `process` is a process id, or "self" for this process.
    """
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    data_line = next((line for line in lines if line.startswith("VmData")), "VmData 0 kB")
    return int(data_line.split()[1]) << 10
