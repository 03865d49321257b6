"""`HostFile`: tensors in a file of the host, written and read by a thread each.

The file is in `REMAT_OFFLOAD_DIR` (by default the directory for temporary files) and has no name
once it is open, so the system frees it when the process ends, however it ends.
"""

from __future__ import annotations

import ctypes
import os
import tempfile
import threading
from collections import defaultdict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

from remat.errors import RematError

DIRECTORY_VARIABLE = "REMAT_OFFLOAD_DIR"
_PAGE_BYTES = 4096


class HostFile:
    """Slots of a file, by number. A slot is free again after `free`; the file grows as needed.

    `write` and `read` return at once; their futures end when the bytes have been copied, and hold
    the error if that failed. The tensor must not change before.
    """

    def __init__(self, directory: str) -> None:
        try:
            descriptor, path = tempfile.mkstemp(prefix="remat-offload-", dir=directory)
        except OSError as error:
            raise RematError(
                f"cannot create a file for offloaded tensors in {directory}: {error.strerror}. "
                f"Set {DIRECTORY_VARIABLE} to a directory with enough space"
            ) from None
        os.unlink(path)
        self._descriptor = descriptor
        self._directory = directory
        self._writer = ThreadPoolExecutor(1, "remat-offload")
        self._reader = ThreadPoolExecutor(1, "remat-reload")
        self._lock = threading.Lock()
        self._offsets: dict[int, tuple[int, int]] = {}  # offset and size by slot
        self._free: dict[int, list[int]] = defaultdict(list)  # offsets by size
        self._end = self._next_slot = 0

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots that are not free."""
        with self._lock:
            return sum(size for _, size in self._offsets.values())

    def write(self, tensor: torch.Tensor) -> tuple[int, Future[None]]:
        """Start to write a tensor that fills its storage; return its slot, and a future."""
        size = -(-tensor.nbytes // _PAGE_BYTES) * _PAGE_BYTES
        with self._lock:
            slot, self._next_slot = self._next_slot, self._next_slot + 1
            if self._free[size]:
                offset = self._free[size].pop()
            else:
                offset, self._end = self._end, self._end + size
            self._offsets[slot] = offset, size
        return slot, self._writer.submit(self._copy, os.pwrite, tensor, offset)

    def read(self, slot: int, tensor: torch.Tensor) -> Future[None]:
        """Start to read a slot into a tensor that fills its storage."""
        with self._lock:
            offset, _ = self._offsets[slot]
        return self._reader.submit(self._copy, _read_into, tensor, offset)

    def free(self, slot: int) -> None:
        """Let another tensor have the slot's bytes."""
        with self._lock:
            offset, size = self._offsets.pop(slot)
            self._free[size].append(offset)

    def _copy(self, call: Any, tensor: torch.Tensor, offset: int) -> None:
        copied, data = 0, _bytes_of(tensor)
        while copied < len(data):
            try:
                count = call(self._descriptor, data[copied:], offset + copied)
            except OSError as error:
                raise RematError(
                    f"cannot move {tensor.nbytes:,} bytes between memory and the file in "
                    f"{self._directory}: {error.strerror}. Set {DIRECTORY_VARIABLE} to a "
                    "directory with enough space"
                ) from None
            if not count:
                raise RematError(f"the file in {self._directory} has lost its end")
            copied += count


def _read_into(descriptor: int, data: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [data], offset)


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a tensor on the CPU that fills its storage."""
    array = (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())
    return memoryview(array).cast("B")


@cache
def host_file() -> HostFile:
    """Return the file of this process, created at the first call."""
    return HostFile(os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())
