"""Reads memory snapshots: the pickles of torch's Python and C++ writers, of all versions since 2.0.

Newer fields are optional (`is_expandable`, `segment_pool_id`, `pool_id`, `user_metadata`,
`frames`).
Versions before 2.1 have a `history` of blocks instead of `frames` and `requested_size`. Each event
of `device_traces` is one action of the allocator; the two events of a free, requested and
completed, differ where another stream still uses the block.
"""

from __future__ import annotations

import gc
import os
from array import array
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from remat.errors import DocumentError
from remat.snapshots.model import (
    DEFAULT_POOL,
    NEVER,
    Allocations,
    DeviceMemory,
    DeviceSegment,
    FailedRequest,
    Frame,
    Integers,
    Pool,
    SegmentBlock,
    Snapshot,
    Stack,
)
from remat.snapshots.unpickle import MAX_SNAPSHOT_BYTES, load_plain_data
from remat.view.text import plain_text

MODULE_METADATA = "remat.module:"
"""Prefix of the metadata with which `remat.watch` records the module of an allocation."""

NAMES_KEY = "remat_names"
"""Key of the names of parameters and gradients by address, which `remat.watch` adds."""

DEVICE_TYPE_KEY = "remat_device"
"""Key of the type of the device, if that is no GPU."""

_MAX_RECORDS, _MIN_BYTES_PER_RECORD = 20_000_000, 16
"""The largest number of events and blocks, and the fewest bytes that one takes in a file. A file
may refer to one list many times."""
_MAX_FRAMES = 512
_MAX_SIZE = 1 << 56
_ADDED = ("segment_alloc", "segment_map")
_REMOVED = ("segment_free", "segment_unmap")


def read_snapshot(source: bytes | str | os.PathLike[str] | Mapping[str, object]) -> Snapshot:
    """Return the snapshot of a file, of its bytes, or of what `torch.cuda.memory._snapshot()`
    returned. Raises `DocumentError` for anything else."""
    if isinstance(source, Mapping):
        data = dict(source)
        traces = data.get("device_traces")
        if isinstance(traces, list):  # reading clears them
            data["device_traces"] = [list(t) if isinstance(t, list) else t for t in traces]
        return _SnapshotReader().snapshot(data)
    if not isinstance(source, bytes):
        path = Path(source)
        if path.stat().st_size > MAX_SNAPSHOT_BYTES:
            raise DocumentError(f"{path.name} is larger than a snapshot may be (2 GiB)")
        source = path.read_bytes()
    was_collecting = gc.isenabled()
    gc.disable()  # millions of new objects without cycles
    try:
        data = load_plain_data(source)
        limit = 4096 + len(source) // _MIN_BYTES_PER_RECORD
        del source
        return _SnapshotReader(min(limit, _MAX_RECORDS)).snapshot(data)
    finally:
        if was_collecting:
            gc.enable()


class _SnapshotReader:
    """Builds a snapshot. Lists that occur several times are read once, by their identity."""

    def __init__(self, max_records: int = _MAX_RECORDS) -> None:
        self._frames: dict[int, Frame] = {}
        self._stack_of_list: dict[tuple[int, str], int] = {}
        self._stack_of_frames: dict[tuple[tuple[int, ...], str], int] = {}
        self._stacks = [Stack()]
        self._free_records = max_records

    def snapshot(self, data: object) -> Snapshot:
        """Return the snapshot of plain data. Raises `DocumentError`."""
        if isinstance(data, list):  # torch 1.x, and `torch.cuda.memory_snapshot()`
            data = {"segments": data}
        if not isinstance(data, dict) or "segments" not in data:
            raise DocumentError(
                "the file has no segments, so it is no memory snapshot of torch; pass what "
                "torch.cuda.memory._dump_snapshot(FILE) wrote"
            )
        segments = [_fields(s, "segment") for s in self._list(data["segments"], "segments")]
        traces = self._list(data.get("device_traces", []), "device_traces")
        if len(traces) > 1024:
            raise DocumentError(f"the snapshot has traces of {len(traces):,} devices")
        numbers = {_integer(s, "device", 0) for s in segments}
        numbers |= {number for number, trace in enumerate(traces) if trace}
        devices: list[DeviceMemory] = []
        for number in sorted(numbers):
            trace = traces[number] if number < len(traces) else []
            mine = [s for s in segments if _integer(s, "device", 0) == number]
            devices.append(self._device(number, mine, self._list(trace, "device_traces")))
        is_cpu = data.get(DEVICE_TYPE_KEY) == "cpu"
        names = self._names(data.get(NAMES_KEY))
        return Snapshot(tuple(devices), tuple(self._stacks), names, is_cpu)

    def _names(self, data: object) -> dict[int, str]:
        """Return the names of tensors by address."""
        if not isinstance(data, dict):
            return {}
        self._take_records(len(data))
        return {
            int(address): plain_text(name[:500])
            for address, name in data.items()
            if isinstance(address, str) and address.isdecimal() and len(address) < 20
            and isinstance(name, str)
        }  # fmt: skip

    def _device(
        self, number: int, segments: list[dict[object, object]], trace: list[object]
    ) -> DeviceMemory:
        """Return a device's memory. Clears `trace` as it is read, to save memory."""
        count = len(trace)
        columns = [array("q") for _ in range(6)]
        addresses, ends = columns[0], columns[3]
        live: dict[int, int] = {}  # row of the allocation at an address
        reserved: dict[int, DeviceSegment] = {}
        returned: list[DeviceSegment] = []
        failed: list[FailedRequest] = []
        is_cut = False

        def add(address: int, size: int, start: int, end: int, stack: int, stream: int) -> None:
            for column, value in zip(
                columns, (address, size, start, end, stack, stream), strict=True
            ):
                column.append(value)

        for event in range(count):
            entry = _fields(trace[event], "event")
            trace[event] = None
            action = entry.get("action")
            if action == "alloc":
                address = _integer(entry, "addr")
                if address in live:  # its free is missing
                    ends[live[address]] = event
                live[address] = len(addresses)
                stack = self._stack(entry)
                add(address, _size(entry, "size"), event, NEVER, stack, _stream(entry))
            elif action == "free_completed":
                address = _integer(entry, "addr")
                row = live.pop(address, None)
                if row is None:
                    is_cut = True
                    add(address, _size(entry, "size"), -1, event, 0, _stream(entry))
                else:
                    ends[row] = event
            elif action in _ADDED:
                address = _integer(entry, "addr")
                reserved[address] = DeviceSegment(
                    address, _size(entry, "size"), _stream(entry), _pool(entry), start=event
                )
            elif action in _REMOVED:
                address, size = _integer(entry, "addr"), _size(entry, "size")
                segment = reserved.pop(address, None)
                start = -1 if segment is None or segment.size_bytes != size else segment.start
                returned.append(
                    DeviceSegment(
                        address, size, _stream(entry), _pool(entry), start=start, end=event
                    )
                )
            elif action == "oom":
                failed.append(
                    FailedRequest(
                        event,
                        _size(entry, "size"),
                        _size(entry, "device_free", 0),
                        self._stack(entry),
                        _stream(entry),
                    )
                )
        final: list[DeviceSegment] = []
        for segment in segments:
            blocks, stacks_of_blocks, requested = self._blocks(segment)
            stream, address = _stream(segment), blocks[0].address if blocks else 0
            is_expandable = segment.get("is_expandable") is True
            earlier = reserved.get(address)
            start = -1 if earlier is None or is_expandable else earlier.start
            size_bytes = _size(segment, "total_size", sum(b.size_bytes for b in blocks))
            final.append(
                DeviceSegment(
                    address, size_bytes, stream, _pool(segment), is_expandable, blocks, start
                )
            )
            for block, stack, size in zip(blocks, stacks_of_blocks, requested, strict=True):
                if block.state == "inactive":
                    continue
                row = live.pop(block.address, None)
                if row is None:
                    is_cut = is_cut or count > 0
                    add(block.address, size, -1, NEVER, stack, stream)
        if segments:
            for row in live.values():  # neither freed nor in a segment
                ends[row] = count
        allocations = Allocations(*(_column(column) for column in columns))
        return DeviceMemory(number, count, allocations, (*final, *returned), tuple(failed), is_cut)

    def _blocks(
        self, segment: dict[object, object]
    ) -> tuple[tuple[SegmentBlock, ...], list[int], list[int]]:
        """Return the blocks of a segment, their stacks, and the bytes that were requested."""
        blocks: list[SegmentBlock] = []
        stacks: list[int] = []
        requested: list[int] = []
        address = _integer(segment, "address", 0)
        for item in self._list(segment.get("blocks", []), "blocks"):
            block = _fields(item, "block")
            size = _size(block, "size")
            address = _integer(block, "address", address)
            history = block.get("history")
            source, real_size = block, size
            if isinstance(history, list) and history:
                source = _fields(history[0], "history")
                real_size = _size(source, "real_size", size)
            state = block.get("state")
            blocks.append(
                SegmentBlock(address, size, state if isinstance(state, str) else "inactive")
            )
            stacks.append(self._stack(source) if state != "inactive" else 0)
            requested.append(_size(block, "requested_size", real_size))
            address += size
        return tuple(blocks), stacks, requested

    def _stack(self, entry: dict[object, object]) -> int:
        """Return the index of an entry's stack."""
        frames = entry.get("frames")
        metadata = entry.get("user_metadata")
        module = ""
        if isinstance(metadata, str) and metadata.startswith(MODULE_METADATA):
            module = plain_text(metadata.removeprefix(MODULE_METADATA)[:500])
        if not isinstance(frames, list):
            frames = []
        if not frames and not module:
            return 0
        identity = (id(frames), module) if frames else (0, module)
        if identity in self._stack_of_list and len(frames) > 0:
            return self._stack_of_list[identity]
        frames = frames[:_MAX_FRAMES]
        key = (tuple(map(id, frames)), module)
        index = self._stack_of_frames.get(key)
        if index is None:
            index = len(self._stacks)
            self._stacks.append(Stack(tuple(map(self._frame, frames)), module))
            self._stack_of_frames[key] = index
        return index

    def _frame(self, item: object) -> Frame:
        frame = self._frames.get(id(item))
        if frame is None:
            fields = _fields(item, "frame")
            name, file = fields.get("name"), fields.get("filename")
            frame = Frame(
                plain_text(str(file)[:1000]) if isinstance(file, str) else "",
                _integer(fields, "line", 0),
                plain_text(str(name)[:500]) if isinstance(name, str) else "",
            )
            self._frames[id(item)] = frame
        return frame

    def _list(self, value: object, name: str) -> list[object]:
        if not isinstance(value, list):
            raise DocumentError(f"the snapshot's {name} are no list")
        self._take_records(len(value))
        return value

    def _take_records(self, count: int) -> None:
        self._free_records -= count
        if self._free_records < 0:
            raise DocumentError(
                f"the snapshot has over {_MAX_RECORDS:,} events and blocks, or more than its size "
                "allows; record fewer: _record_memory_history(max_entries=100_000)"
            )


def _fields(value: object, name: str) -> dict[object, object]:
    if not isinstance(value, dict):
        raise DocumentError(f"a {name} of the snapshot is no dict")
    return value


def _integer(fields: dict[object, object], name: str, default: int | None = None) -> int:
    """Return a field that is an integer. Raises `DocumentError` if it is none of 64 bits."""
    value = fields.get(name, default)
    if isinstance(value, bool) or not isinstance(value, int) or not -(1 << 63) <= value < 1 << 63:
        raise DocumentError(f"{name} is {str(value)[:40]!r} in the snapshot; it must be an integer")
    return value


def _size(fields: dict[object, object], name: str, default: int | None = None) -> int:
    value = _integer(fields, name, default)
    if not 0 <= value <= _MAX_SIZE:
        raise DocumentError(f"{name} is {value} in the snapshot; it must be a number of bytes")
    return value


def _stream(fields: dict[object, object]) -> int:
    return _integer(fields, "stream", 0)


def _pool(fields: dict[object, object]) -> Pool:
    pool = fields.get("segment_pool_id", fields.get("pool_id", DEFAULT_POOL))
    match pool:
        case (int(first), int(second)):
            return first, second
        case _:
            return DEFAULT_POOL


def _column(values: array[int]) -> Integers:
    return np.frombuffer(values, dtype=np.int64) if len(values) else np.zeros(0, dtype=np.int64)
