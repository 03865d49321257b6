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
class _FileTensor:
    """A tensor in the file, at an offset. `references` counts its handles, `pending` its copies
    that have not ended."""

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
        self._future.add_done_callback(self._drop_tensor)

    def wait(self) -> None:
        """Wait until the copy has ended. Raises its error."""
        error = self._future.exception()
        self._drop_tensor()
        if error is not None:
            # A new error: `_FileTensor` refers to this one, which would refer to the frames of the
            # step, and with them to the handle that keeps the tensor in the file.
            raise RematError(str(error))

    def _drop_tensor(self, _: object = None) -> None:
        """Drop the reference to the tensor: the copy has ended."""
        self._tensor = None


class HostFile:
    """A file of tensors, each with a number. The space of a tensor can be reused when it has no
    handle and its copies have ended.

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
        self._tensors: dict[int, _FileTensor] = {}
        self._free: dict[int, list[int]] = defaultdict(list)  # offsets by size
        self._end_bytes = self._next_number = 0

    def close(self) -> None:
        """End the threads and free the file's space. No tensor of the file must be in use."""
        self._writer.shutdown()
        self._reader.shutdown()
        os.close(self._descriptor)

    @property
    def used_bytes(self) -> int:
        """The bytes of the file that cannot be reused."""
        with self._lock:
            return sum(placed.size_bytes for placed in self._tensors.values())

    def write(self, tensor: torch.Tensor) -> int:
        """Start to write a dense tensor to the file, and return its number, with one reference."""
        size_bytes = _rounded_file_bytes(tensor.nbytes)
        with self._lock:
            number, self._next_number = self._next_number, self._next_number + 1
            if self._free[size_bytes]:
                offset = self._free[size_bytes].pop()
            else:
                offset, self._end_bytes = self._end_bytes, self._end_bytes + size_bytes
            placed = _FileTensor(
                offset, size_bytes, tuple(tensor.shape), tensor.stride(), tensor.dtype
            )
            self._tensors[number] = placed
        placed.written = self._start_file_copy(self._writer, self._io.write, number, tensor)
        return number

    def wait(self, number: int) -> None:
        """Wait until the tensor with this number is written. Raises the error of writing it."""
        written = self._tensor_of(number).written
        assert written is not None
        written.wait()

    def read(self, number: int) -> tuple[torch.Tensor, FileCopy]:
        """Start to read a tensor of the file into a new tensor of the same strides. Return the new
        tensor and the copy."""
        placed = self._tensor_of(number)
        tensor = torch.empty_strided(placed.shape, placed.stride, dtype=placed.dtype, device="cpu")
        return tensor, self._start_file_copy(self._reader, self._io.read, number, tensor)

    def add_reference(self, number: int) -> None:
        """Count one more handle of a tensor."""
        with self._lock:
            self._tensor_of(number).references += 1

    def drop_reference(self, number: int) -> None:
        """Count one handle less of a tensor. Without any, its space is free once its copies have
        ended."""
        with self._lock:
            self._tensors[number].references -= 1
            self._free_if_unused(number)

    def _tensor_of(self, number: int) -> _FileTensor:
        """Return the file's tensor with this number. Raises `RematError` if its space was freed."""
        if number not in self._tensors:
            raise RematError(
                "an offloaded tensor is no longer in the file: its handle was copied, by "
                "saved_tensors_hooks or in another process, and the original was freed; run the "
                'step outside of these hooks, or plan it with offload="off"'
            )
        return self._tensors[number]

    def _start_file_copy(
        self,
        executor: ThreadPoolExecutor,
        copy: Callable[[int, int, int], None],
        number: int,
        tensor: torch.Tensor,
    ) -> FileCopy:
        """Start `copy` between a tensor in memory and the file's tensor with this number, on a
        thread of the executor."""
        placed = self._tensors[number]
        with self._lock:
            placed.pending += 1

        def run(address: int, size_bytes: int) -> None:
            try:
                self._copy(copy, address, size_bytes, placed.offset)
            finally:
                with self._lock:
                    placed.pending -= 1
                    self._free_if_unused(number)

        return FileCopy(tensor, executor, run)

    def _free_if_unused(self, number: int) -> None:
        """Free the space of a tensor without handles and pending copies. Does nothing for
        others."""
        placed = self._tensors.get(number)
        if placed is not None and not placed.references and not placed.pending:
            del self._tensors[number]
            self._free[placed.size_bytes].append(placed.offset)

    def _copy(
        self,
        copy: Callable[[int, int, int], None],
        address: int,
        size_bytes: int,
        offset: int,
    ) -> None:
        """Copy between memory and the file. Raises `RematError` with a remedy if that fails."""
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


def _rounded_file_bytes(size_bytes: int) -> int:
    """Return the bytes of the file for a tensor: rounded up to one of eight sizes for each power of
    two, so that they can be reused for tensors of similar sizes, and to whole blocks."""
    unit = max(BLOCK_BYTES, 1 << max(0, size_bytes.bit_length() - 4))
    return -(-size_bytes // unit) * unit


def offload_directory() -> str:
    """Return the directory of the file: `REMAT_OFFLOAD_DIR`, or the one for temporary files."""
    return os.path.expanduser(os.environ.get(DIRECTORY_VARIABLE) or tempfile.gettempdir())


def is_io_direct() -> bool:
    """Return True if `REMAT_OFFLOAD_DIRECT` is 1: copies bypass the page cache. Raises `RematError`
    for a value that is neither 1, 0 nor empty."""
    value = os.environ.get(DIRECT_VARIABLE, "0")
    if value not in ("", "0", "1"):
        raise RematError(f"{DIRECT_VARIABLE} is {value!r}: set it to 1 or 0")
    return value == "1"


def new_host_file() -> HostFile:
    """Return a new file for offloaded tensors, as the environment variables say. Raises
    `RematError` if it cannot be created."""
    return HostFile(offload_directory(), is_direct=is_io_direct())


def host_file() -> HostFile:
    """Return this process's file for offloaded tensors, created at the first call. A forked process
    has its own."""
    return _host_file(os.getpid())


@cache
def _host_file(process: int) -> HostFile:
    """Return the file of a process, by its id."""
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


class CachedFileIo:
    """Copies through the page cache. The system writes to the disk when it needs the memory."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def write(self, address: int, size_bytes: int, offset: int) -> None:
        """Write from memory to the file."""
        _transfer_all_bytes(os.pwrite, self._descriptor, _memory_at(address, size_bytes), offset)

    def read(self, address: int, size_bytes: int, offset: int) -> None:
        """Read from the file into memory."""
        _transfer_all_bytes(
            _read_file_into, self._descriptor, _memory_at(address, size_bytes), offset
        )


class DirectFileIo:
    """Copies between memory and the disk without the page cache (O_DIRECT).

    The disk reads and writes whole blocks at aligned addresses, so the data goes through an aligned
    buffer, one for each direction. One thread may write while another one reads.
    """

    def __init__(self, descriptor: int) -> None:
        """Switch the file to direct I/O. Raises `OSError`, `ImportError` or `AttributeError` if
        the system has none."""
        import fcntl  # Windows has no such module

        flags = fcntl.fcntl(descriptor, fcntl.F_GETFL)
        fcntl.fcntl(descriptor, fcntl.F_SETFL, flags | os.O_DIRECT)
        self._descriptor = descriptor
        self._write_buffer, self._read_buffer = (mmap.mmap(-1, _BUFFER_BYTES) for _ in range(2))

    def write(self, address: int, size_bytes: int, offset: int) -> None:
        """Write from memory to the file, rounded up to whole blocks."""
        buffer = memoryview(self._write_buffer)
        buffer_address = _buffer_address(self._write_buffer)
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            ctypes.memmove(buffer_address, address + start, count)
            blocks = buffer[: rounded_to_blocks(count)]
            _transfer_all_bytes(os.pwrite, self._descriptor, blocks, offset + start)

    def read(self, address: int, size_bytes: int, offset: int) -> None:
        """Read from the file into memory."""
        buffer = memoryview(self._read_buffer)
        buffer_address = _buffer_address(self._read_buffer)
        for start in range(0, size_bytes, _BUFFER_BYTES):
            count = min(_BUFFER_BYTES, size_bytes - start)
            blocks = buffer[: rounded_to_blocks(count)]
            _transfer_all_bytes(_read_file_into, self._descriptor, blocks, offset + start)
            ctypes.memmove(address + start, buffer_address, count)


def rounded_to_blocks(size_bytes: int) -> int:
    """Return the bytes of the blocks that have room for `size_bytes`."""
    return -(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES


def _transfer_all_bytes(
    call: Callable[[int, memoryview, int], int], descriptor: int, data: memoryview, offset: int
) -> None:
    """Repeat the system call `call` until all bytes of `data` are copied. Raises `EOFError` where
    the file ends before."""
    copied = 0
    while copied < len(data):
        count = call(descriptor, data[copied:], offset + copied)
        if not count:
            raise EOFError
        copied += count


def _read_file_into(descriptor: int, data: memoryview, offset: int) -> int:
    """Read from the file into `data`, and return the number of bytes that were read."""
    return os.preadv(descriptor, [data], offset)


def _memory_at(address: int, size_bytes: int) -> memoryview:
    """Return the memory at an address, as bytes that can be written."""
    array = (ctypes.c_char * size_bytes).from_address(address)
    return memoryview(array).cast("B")


def _buffer_address(buffer: mmap.mmap) -> int:
    """Return the address of a buffer's memory."""
    return ctypes.addressof(ctypes.c_char.from_buffer(buffer))


def open_file_io(descriptor: int, *, is_direct: bool) -> FileIo:
    """Return the object that copies between memory and an open file: direct, or through the page
    cache. Raises `RematError` if direct I/O is not available."""
    if not is_direct:
        return CachedFileIo(descriptor)
    try:
        return DirectFileIo(descriptor)
    except (AttributeError, ImportError, OSError) as error:
        raise RematError(f"there is no direct I/O here ({error})") from None
