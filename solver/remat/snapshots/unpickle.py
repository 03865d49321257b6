"""Plain data from a pickle: dicts, lists, text and numbers only, within limits.

A pickle is a program. This module first scans its opcodes and accepts only those that create plain
data, in the forms that torch's two writers use (Python's `pickle` and `torch::jit::Pickler`); no
opcode that imports a name, calls an object or sets its state passes the scan. The accepted bytes
are then read by an `Unpickler` that refuses names and persistent objects once more.

Limits are on the number of objects per byte, the length of texts, the size of the memo, and the
nesting of what can be hashed: a tuple has two integers and nothing else. So memory and time are
proportional to the size of the file.
"""

from __future__ import annotations

import io
import pickle
import re
from typing import NoReturn

from remat.errors import DocumentError
from remat.limits.units import format_bytes

PICKLE_START = b"\x80"
"""The first byte of a pickle of protocol 2 or later."""
MAX_SNAPSHOT_BYTES = 2 << 30
_MAX_TEXT_BYTES = 1 << 20
_MIN_OBJECTS, _BYTES_PER_OBJECT = 4096, 8
"""A file may have this many containers and texts, plus one for so many bytes. Snapshots have one
for 15 bytes or more."""
_BYTES_PER_MEMO_ENTRY = 6
"""An opcode that creates an object, and one that stores it under a four-byte number."""

_LONG = b"|".join(rb"\x%02x.{%d}" % (length, length) for length in range(10))
_INTEGER = rb"(?:K.|M..|J.{4}|\x8a(?:" + _LONG + rb"))"
_FRAME = rb"(?:\x95.{8})?"
_OPCODES = re.compile(
    # The tuple of two integers; integers, floats, constants; reads and writes of the memo; marks,
    # items, frames. Opcodes of one byte that reserve memory may not repeat.
    rb"(?:" + (_INTEGER + _FRAME) * 2 + rb"\x86|" + _INTEGER + rb"|G.{8}"
    rb"|[N\x88\x89](?![N\x88\x89])|h.|j.{4}|q.|\x94(?!\x94)|\((?!\()|[suae]|\x95.{8})++",
    re.DOTALL,
)  # fmt: skip
_TEXT_LENGTH_BYTES = {0x8C: 1, 0x58: 4, 0x8D: 8}
_EMPTY_LIST, _EMPTY_DICT, _LONG_BINPUT, _STOP = b"]}r."

_ERRORS = (
    pickle.UnpicklingError, TypeError, AttributeError, ValueError, LookupError, EOFError,
    OverflowError, MemoryError, RecursionError,
)  # fmt: skip


def load_plain_data(data: bytes) -> object:
    """Return the plain data of a pickle. Raises `DocumentError` if it is not a pickle, is cut off,
    exceeds a limit, or contains anything but dicts, lists, texts, numbers and pairs of integers."""
    if len(data) > MAX_SNAPSHOT_BYTES:
        raise DocumentError(
            f"the snapshot has {format_bytes(len(data))}; up to {format_bytes(MAX_SNAPSHOT_BYTES)} "
            "are read. Record fewer events: _record_memory_history(max_entries=100_000)"
        )
    check_opcodes(data)
    try:
        return _PlainUnpickler(io.BytesIO(data)).load()
    except _ERRORS as error:
        raise DocumentError(f"the snapshot is not a valid pickle: {error}") from None


class _PlainUnpickler(pickle.Unpickler):
    """An unpickler that refuses every name and every persistent object."""

    def find_class(self, module_name: str, global_name: str, /) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module_name[:80]}.{global_name[:80]}")

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it has a persistent object")


def check_opcodes(data: bytes) -> None:
    """Raise `DocumentError` unless all opcodes create plain data within the limits."""
    if len(data) < 3 or data[0] != 0x80 or not 2 <= data[1] <= 5:
        raise DocumentError(
            "the file is not a memory snapshot: it does not start as a pickle of protocol 2 to 5. "
            "Pass what torch.cuda.memory._dump_snapshot(FILE) wrote"
        )
    position, end = 2, len(data)
    free_objects = _MIN_OBJECTS + end // _BYTES_PER_OBJECT
    match_run = _OPCODES.match
    while position < end:
        if run := match_run(data, position):
            position = run.end()
            if position == end:
                break
        opcode = data[position]
        if opcode in (_EMPTY_LIST, _EMPTY_DICT):
            position += 1
            free_objects -= 1
        elif opcode in _TEXT_LENGTH_BYTES:
            start = position + 1 + _TEXT_LENGTH_BYTES[opcode]
            length = int.from_bytes(data[position + 1 : start], "little")
            if length > _MAX_TEXT_BYTES:
                raise DocumentError(
                    f"the snapshot has a text of {length:,} bytes at byte {position:,}; the limit "
                    f"is {_MAX_TEXT_BYTES:,}"
                )
            position = start + length
            free_objects -= 1
        elif opcode == _LONG_BINPUT:
            index = int.from_bytes(data[position + 1 : position + 5], "little")
            if index > 256 + position // _BYTES_PER_MEMO_ENTRY:
                raise DocumentError(f"the snapshot stores object {index:,} at byte {position:,}")
            position += 5
        elif opcode == _STOP and position == end - 1:
            return
        else:
            raise DocumentError(_refusal(data, position))
        if free_objects < 0:
            raise DocumentError(
                "the snapshot has more objects than its size allows (one for "
                f"{_BYTES_PER_OBJECT} bytes)"
            )
    raise DocumentError("the snapshot is cut off: its pickle has no end. Copy the whole file")


def _refusal(data: bytes, position: int) -> str:
    """Return the error for an opcode that is not accepted."""
    if data[position] == _STOP:
        return f"the snapshot's pickle ends at byte {position:,}, and more data follow"
    return (
        f"the snapshot has the opcode {data[position : position + 1]!r} at byte {position:,}, "
        "which no snapshot of torch has. Only dicts, lists, texts and numbers are read, because "
        "other pickles can run code"
    )
