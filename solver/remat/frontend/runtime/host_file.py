"""`HostFile`: tensors in a file, which stands in for a GPU's host memory where steps run on a CPU.

The file is in `REMAT_OFFLOAD_DIR` (by default the directory for temporary files, which on some
systems is in memory itself). It has no name once it is open, so the system frees it when the
process ends, however it ends. A thread writes and another one reads, through the page cache unless
`REMAT_OFFLOAD_DIRECT` is 1.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import tempfile
import threading
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch

from remat.errors import RematError

DIRECTORY_VARIABLE = "REMAT_OFFLOAD_DIR"
DIRECT_VARIABLE = "REMAT_OFFLOAD_DIRECT"


@dataclass
class _Slot:
    """A part of the file, and the tensor that is in it. `references` counts its handles, `pending`
    its copies that have not ended."""

    offset: int
    size_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    references: int = 1
    pending: int = 0
    written: FileCopy | None = None


class FileCopy:
    """A copy between a tensor and the file, on a thread. The thread has no reference to the tensor:
    it could free it later than the caller of `wait` expects."""

    def __init__(
        self,
        tensor: torch.Tensor,
        executor: ThreadPoolExecutor,
        copy: Callable[[int, int], None],
    ) -> None:
        """Start `copy`, which takes the address of the tensor's memory and its bytes."""
        self._tensor: torch.Tensor | None = tensor
        self._future = executor.submit(copy, tensor.data_ptr(), tensor.nbytes)
        self._future.add_done_callback(self._forget)

    def wait(self) -> None:
        """Wait until the copy has ended. Raises its error."""
        error = self._future.exception()
        self._forget()
        if error is not None:
            # A new error: the slot refers to this one, which would refer to the frames of the step,
            # and with them to the handle that keeps the slot.
            raise RematError(str(error))

    def _forget(self, _: object = None) -> None:
        self._tensor = None


class HostFile:
    """A file of slots. A slot can be reused when nothing refers to it and its copies have ended.

    `write` and `read` return at once. The tensor that is written must not change until `wait`
    returns. The tensor that `read` returns is complete when its copy's `wait` returns.
    """

    def __init__(self, directory: str, *, is_direct: bool = False) -> None:
        """Create the file. With `is_direct`, copies bypass the page cache of the system."""
        try:
            descriptor, path = tempfile.mkstemp(prefix="remat-offload-", dir=directory)
        except OSError as error:
            raise RematError(
                f"cannot create a file for offloaded tensors in {directory}: {error.strerror}. "
                f"Set {DIRECTORY_VARIABLE} to a directory with enough space"
            ) from None
        os.unlink(path)
        try:
            self._io = open_file_io(descriptor, is_direct=is_direct)
        except RematError as error:
            os.close(descriptor)
            raise RematError(
                f"offloaded tensors cannot be copied to a file in {directory}: {error}. Unset "
                f"{DIRECT_VARIABLE}, or set {DIRECTORY_VARIABLE} to a directory on a local disk"
            ) from None
        self._direct_remedy = f", or unset {DIRECT_VARIABLE}" if is_direct else ""
        self._descriptor = descriptor
        self._directory = directory
        self._writer = ThreadPoolExecutor(1, "remat-offload")
        self._reader = ThreadPoolExecutor(1, "remat-reload")
        self._lock = threading.RLock()
        self._slots: dict[int, _Slot] = {}
        self._free: dict[int, list[int]] = defaultdict(list)  # offsets by size
        self._end_bytes = self._next_number = 0

    def close(self) -> None:
        """End the threads and free the file's space. For files without slots in use."""
        self._writer.shutdown()
        self._reader.shutdown()
        os.close(self._descriptor)

    @property
    def used_bytes(self) -> int:
        """The bytes of all slots that cannot be reused."""
        with self._lock:
            return sum(slot.size_bytes for slot in self._slots.values())

    def write(self, tensor: torch.Tensor) -> int:
        """Start to write a dense tensor, and return the number of its slot, with one reference."""
        size_bytes = _rounded_bytes(tensor.nbytes)
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            if self._free[size_bytes]:
                offset = self._free[size_bytes].pop()
            else:
                offset, self._end_bytes = self._end_bytes, self._end_bytes + size_bytes
            slot = _Slot(offset, size_bytes, tuple(tensor.shape), tensor.stride(), tensor.dtype)
            self._slots[number] = slot
        slot.written = self._start(self._writer, self._io.write, number, tensor)
        return number

    def wait(self, number: int) -> None:
        """Wait until a slot is written. Raises the error of writing it."""
        written = self._slot(number).written
        assert written is not None
        written.wait()

    def read(self, number: int) -> tuple[torch.Tensor, FileCopy]:
        """Start to read a slot into a new tensor of the same strides."""
        slot = self._slot(number)
        tensor = torch.empty_strided(slot.shape, slot.stride, dtype=slot.dtype, device="cpu")
        return tensor, self._start(self._reader, self._io.read, number, tensor)

    def add_reference(self, number: int) -> None:
        """Count one more handle of a slot."""
        with self._lock:
            self._slot(number).references += 1

    def drop_reference(self, number: int) -> None:
        """Count one handle less. Without any, the slot is free once its copies have ended."""
        with self._lock:
            self._slots[number].references -= 1
            self._free_if_unused(number)

    def _slot(self, number: int) -> _Slot:
        if number not in self._slots:
            raise RematError(
                "an offloaded tensor is no longer in the file: its handle was copied, by "
                "saved_tensors_hooks or in another process, and the original was freed; run the "
                'step outside of these hooks, or plan it with offload="off"'
            )
        return self._slots[number]

    def _start(
        self,
        executor: ThreadPoolExecutor,
        copy: Callable[[int, int, int], None],
        number: int,
        tensor: torch.Tensor,
    ) -> FileCopy:
        """Start a copy between a tensor and its slot."""
        slot = self._slots[number]
        with self._lock:
            slot.pending += 1

        def run(address: int, size_bytes: int) -> None:
            try:
                self._copy(copy, address, size_bytes, slot.offset)
            finally:
                with self._lock:
                    slot.pending -= 1
                    self._free_if_unused(number)

        return FileCopy(tensor, executor, run)

    def _free_if_unused(self, number: int) -> None:
        slot = self._slots.get(number)
        if slot is not None and not slot.references and not slot.pending:
            del self._slots[number]
            self._free[slot.size_bytes].append(slot.offset)

    def _copy(
        self,
        copy: Callable[[int, int, int], None],
        address: int,
        size_bytes: int,
        offset: int,
    ) -> None:
        try:
            copy(address, size_bytes, offset)
        except OSError as error:
            raise RematError(
                f"cannot move {size_bytes:,} bytes between memory and the file in "
                f"{self._directory}: {error.strerror}. Set {DIRECTORY_VARIABLE} to a "
                f"directory with enough space{self._direct_remedy}"
            ) from None
        except EOFError:
            raise RematError(f"the file in {self._directory} has lost its end") from None


def _rounded_bytes(size_bytes: int) -> int:
    """Return the size of a slot: one of eight for each power of two, so that slots can be reused
    for tensors of similar sizes."""
    unit = max(BLOCK_BYTES, 1 << max(0, size_bytes.bit_length() - 4))
    return -(-size_bytes // unit) * unit


def offload_directory() -> str:
    """Return the directory of the file: `REMAT_OFFLOAD_DIR`, or the one for temporary files."""
    return os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir()


def is_io_direct() -> bool:
    """Return True if `REMAT_OFFLOAD_DIRECT` is 1: copies bypass the page cache."""
    value = os.environ.get(DIRECT_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise RematError(f"{DIRECT_VARIABLE} is {value!r}: set it to 1 or 0")
    return value == "1"


def new_host_file() -> HostFile:
    """Return a new file as the environment variables say. Raises `RematError` if it cannot be
    created."""
    return HostFile(offload_directory(), is_direct=is_io_direct())


def host_file() -> HostFile:
    """Return the file of this process, created at the first call. A forked process has its own."""
    return _host_file(os.getpid())


@cache
def _host_file(process: int) -> HostFile:
    return new_host_file()


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


def open_file_io(descriptor: int, *, is_direct: bool) -> FileIo:
    """Return the copies of a file. Raises `RematError` if direct I/O is not available."""
    if not is_direct:
        return CachedIo(descriptor)
    try:
        return DirectIo(descriptor)
    except (AttributeError, ImportError, OSError) as error:
        raise RematError(f"there is no direct I/O here ({error})") from None
