"""Copies between memory and a file: through the system's page cache, or past it."""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Callable
from typing import Protocol

from remat.errors import RematError

BLOCK_BYTES = 4096
"""Unit of offsets and sizes in the file. Direct I/O needs multiples of the disk's blocks."""

_BUFFER_BYTES = 8 << 20


class FileIo(Protocol):
    """Copies between `size_bytes` at an address and an offset of the file, a multiple of
    `BLOCK_BYTES`. Raises `OSError`, and `EOFError` if the file is too short."""

    def write(self, address: int, size_bytes: int, offset: int) -> None:
        """Write from memory to the file."""
        ...

    def read(self, address: int, size_bytes: int, offset: int) -> None:
        """Read from the file into memory."""
        ...


class CachedIo:
    """Copies through the page cache. The system writes to the disk when it needs the memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, address: int, size_bytes: int, offset: int) -> None:
        """Write from memory to the file."""
        _transfer(os.pwrite, self._descriptor, _bytes_at(address, size_bytes), offset)

    def read(self, address: int, size_bytes: int, offset: int) -> None:
        """Read from the file into memory."""
        _transfer(_read_into, self._descriptor, _bytes_at(address, size_bytes), offset)


class DirectIo:
    """Copies between memory and the disk without the page cache (O_DIRECT).

    The disk reads and writes whole blocks at aligned addresses, so the data goes through an aligned
    buffer, one for each direction. One thread may write while another one reads.
    """

    def __init__(self, descriptor: int) -> None:
        """Raise `OSError`, `ImportError` or `AttributeError` if there is no direct I/O here."""
        import fcntl  # Windows has no such module

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        self._descriptor = descriptor
        self._write_buffer, self._read_buffer = (mmap.mmap(-1, _BUFFER_BYTES) for _ in range(2))

    def write(self, address: int, size_bytes: int, offset: int) -> None:
        """Write from memory to the file, rounded up to whole blocks."""
        buffer = memoryview(self._write_buffer)
        buffer_address = _address(self._write_buffer)
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            ctypes.memmove(buffer_address, address + start, count)
            blocks = buffer[: rounded_to_blocks(count)]
            _transfer(os.pwrite, self._descriptor, blocks, offset + start)

    def read(self, address: int, size_bytes: int, offset: int) -> None:
        """Read from the file into memory."""
        buffer = memoryview(self._read_buffer)
        buffer_address = _address(self._read_buffer)
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            blocks = buffer[: rounded_to_blocks(count)]
            _transfer(_read_into, self._descriptor, blocks, offset + start)
            ctypes.memmove(address + start, buffer_address, count)


def rounded_to_blocks(size_bytes: int) -> int:
    """Return the bytes of the blocks that have room for `size_bytes`."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _transfer(
    call: Callable[[int, memoryview, int], int], descriptor: int, data: memoryview, offset: int
) -> None:
    """Repeat a system call until it has copied everything."""
    copied = 0
    while copied < len(data):
        count = call(descriptor, data[copied:], offset + copied)
        if not count:
            raise EOFError
        copied += count


def _read_into(descriptor: int, data: memoryview, offset: int) -> int:
    return os.preadv(descriptor, [data], offset)


def _bytes_at(address: int, size_bytes: int) -> memoryview:
    """Return the memory of a dense tensor on the CPU."""
    array = (ctypes.c_char * size_bytes).from_address(address)
    return memoryview(array).cast("B")


def _address(buffer: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def file_io(descriptor: int, *, is_direct: bool) -> FileIo:
    """Return the copies of a file. Raises `RematError` if direct I/O is not available."""
    if not is_direct:
        return CachedIo(descriptor)
    try:
        return DirectIo(descriptor)
    except (AttributeError, ImportError, OSError) as error:
        raise RematError(f"there is no direct I/O here ({error})") from None
