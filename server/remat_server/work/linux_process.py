"""What Linux does for processes, and tells of them."""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """SIGKILL for this process when process `parent` ends: kill -9 of the service frees its cores
    too. On Linux only; elsewhere nothing."""
    if sys.platform != "linux":
        return
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit(1)  # it ended before we asked


def data_bytes(process: str) -> int:
    """What counts against a process's limit now, 0 where nobody tells; "self" is this process."""
    try:
        lines = Path(f"/proc/{process}/status").read_text().splitlines()
    except OSError:
        return 0
    found = next((line for line in lines if line.startswith("VmData")), "VmData 0 kB")
    return int(found.split()[1]) << 10
