"""Reads the text of `torch.OutOfMemoryError`, in the forms of torch 1.13 to 2.15."""

from __future__ import annotations

import re
from dataclasses import dataclass

from remat.errors import DocumentError

_UNITS = {"bytes": 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}
_SIZE = r"([\d.]{1,20}) (bytes|KiB|MiB|GiB)"
_MAX_TEXT = 1 << 20


@dataclass(frozen=True, slots=True)
class ErrorText:
    """The bytes that an error names; None where it names none. `processes` are the bytes of other
    processes by their number, `allowed_bytes` the limit of this process."""

    requested_bytes: int
    device: int = 0
    total_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    unallocated_bytes: int | None = None
    private_pool_bytes: int | None = None
    process_bytes: int | None = None
    allowed_bytes: int | None = None
    processes: tuple[tuple[int, int], ...] = ()

    @property
    def other_bytes(self) -> int:
        """The bytes of all other processes."""
        return sum(size_bytes for _, size_bytes in self.processes)


def parse_error_text(text: str) -> ErrorText:
    """Return the bytes that the text of an error names; of several errors, those of the last one.
    Raises `DocumentError` if there is no such error in the text."""
    start = text[-_MAX_TEXT:].rfind("out of memory")
    text = " ".join(text[-_MAX_TEXT:][max(0, start) :].split())

    def size(pattern: str) -> int | None:
        match = re.search(pattern.replace("SIZE", _SIZE), text)
        return None if match is None else int(float(match[1]) * _UNITS[match[2]])

    requested = size("Tried to allocate SIZE") if start >= 0 else None
    if requested is None:
        raise DocumentError(
            'the text has no out-of-memory error of torch: it starts "CUDA out of memory. Tried to '
            'allocate"; pass the whole message'
        )
    allocated = size("SIZE is allocated by PyTorch") or size("SIZE already allocated")
    unallocated = size("SIZE is reserved by PyTorch but unallocated")
    reserved = size("SIZE reserved in total by PyTorch")
    if unallocated is None and reserved is not None and allocated is not None:
        unallocated = max(0, reserved - allocated)
    device = re.search(r"GPU (\d{1,4})", text)
    processes = re.findall(rf"Process (\d{{1,10}}) has {_SIZE} memory in use", text)
    return ErrorText(
        requested,
        int(device[1]) if device else 0,
        size("total capaci?ty of SIZE") or size("SIZE total capacity"),
        size("of which SIZE is free") if "of which" in text else size("SIZE free"),
        allocated,
        unallocated,
        size("with SIZE allocated in private pools"),
        size("this process has SIZE memory in use"),
        size("SIZE allowed"),
        tuple((int(pid), int(float(n) * _UNITS[unit])) for pid, n, unit in processes),
    )
