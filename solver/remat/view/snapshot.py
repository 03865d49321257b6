"""`memory_snapshot`: a plan in the format of `torch.cuda.memory._snapshot()`.

torch's tools for real snapshots can display it: the viewer at pytorch.org/memory_viz and the
functions of `torch.cuda._memory_viz`. Allocations and frees are those of the simulator, in run
order. Addresses are assigned by first fit in one segment; CUDA's allocator would place blocks
differently.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

from remat.documents.base import write_atomically
from remat.plan_data import PlanData
from remat.report.operation_lines import operation_labels
from remat.simulate import overwritten_copies
from remat.view.memory import LAYERS, run_start_times_s, value_copy_layers
from remat.view.text import plain_text

_BASE_ADDRESS = 0x7F0000000000
"""A plausible address of device memory, below 2**53 because the viewer uses JavaScript numbers."""

Frames = list[dict[str, Any]]


def memory_snapshot(plan: PlanData) -> dict[str, Any]:
    """Return the snapshot as plain data: one device, one segment, one stream.

    Each allocation has a category, and as its stack the operation (with its module as the file and
    its run as the line; all pieces of an operation are "mm x 8"), its module, and the enclosing
    modules. Live bytes after the events of a run, and their maximum, are those of the simulator.
    Values without bytes are left out.
    """
    graph, runs = plan.graph, plan.schedule.runs
    timeline = plan.timeline()
    layer_names = value_copy_layers(plan, timeline)
    overwritten = overwritten_copies(graph, plan.schedule, timeline.copies)
    starts_s = run_start_times_s(plan)
    copies_by_start: dict[int, list[int]] = defaultdict(list)
    copies_by_end: dict[int, list[int]] = defaultdict(list)
    for index, copy in enumerate(timeline.copies):
        if graph.values[copy.value].size_bytes:
            copies_by_start[copy.start].append(index)
            copies_by_end[copy.end].append(index)
    writer = _SnapshotWriter()
    constant: Frames = [{"name": "constant memory", "filename": "remat", "line": 0}]
    writer.allocate("constant", graph.constant_bytes, constant, LAYERS["constant"], 0)
    labels = operation_labels(graph)
    frames_of_module: dict[str, Frames] = {}
    for run, op in enumerate(runs):
        operation = graph.operations[op]
        start_us, end_us = int(starts_s[run] * 1e6), int(starts_s[run + 1] * 1e6)
        enclosing = frames_of_module.setdefault(operation.module, _module_frames(operation.module))
        filename = plain_text(operation.module) or "remat"
        frames = [{"name": plain_text(labels[op]), "filename": filename, "line": run}, *enclosing]
        for index in copies_by_end[run]:
            if index in overwritten:
                writer.free(index, start_us)
        for index in copies_by_start[run]:
            size = graph.values[timeline.copies[index].value].size_bytes
            writer.allocate(index, size, frames, LAYERS[layer_names[index]], start_us)
        workspace = operation.workspace_bytes
        writer.allocate("workspace", workspace, frames, LAYERS["workspace"], start_us)
        for index in ("workspace", *copies_by_end[run]):
            writer.free(index, end_us)
    return {
        "segments": writer.segments(),
        "device_traces": [writer.events],
        "allocator_settings": {},
    }


def save_snapshot(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Write the snapshot to a file as torch does: a pickle, of text and numbers only. The file is
    written atomically."""
    # The viewer reads pickles up to protocol 4.
    write_atomically(Path(path), pickle.dumps(memory_snapshot(plan), protocol=4))


def _module_frames(module: str) -> Frames:
    """Return a stack frame for the module path and for each enclosing module, innermost first; none
    for ""."""
    frames: Frames = []
    while module:
        frames.append({"name": plain_text(module), "filename": "module", "line": 0})
        module = module.rpartition(".")[0]
    return frames


class _SnapshotWriter:
    """Records allocations and frees as events, and places the blocks by first fit."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._allocated: dict[int | str, tuple[int, int, Frames]] = {}
        """(offset, size, frames) of each live block, by its key."""
        self._holes: list[tuple[int, int]] = []
        """(offset, size) of each hole between blocks, in order of the offset."""
        self._end = 0
        """The end of the last block."""
        self._max_end = 0
        """The largest `_end` so far: the size of the segment."""

    def allocate(
        self, key: int | str, size: int, frames: Frames, category: str, now_us: int
    ) -> None:
        """Allocate a block of `size` bytes under a key; nothing if `size` is 0."""
        if not size:
            return
        offset = self._take_first_fit(size)
        self._allocated[key] = (offset, size, frames)
        self.events.append(
            _snapshot_event("alloc", offset, size, frames, now_us) | {"category": category}
        )

    def free(self, key: int | str, now_us: int) -> None:
        """Free the block with this key, if it is allocated."""
        if key not in self._allocated:
            return
        offset, size, frames = self._allocated.pop(key)
        self._add_hole(offset, size)
        for action in ("free_requested", "free_completed"):
            self.events.append(_snapshot_event(action, offset, size, frames, now_us))

    def segments(self) -> list[dict[str, Any]]:
        """Return the segment with its blocks and holes in order; nothing if it is empty."""
        if not self._max_end:
            return []
        blocks: list[dict[str, Any]] = []
        position = 0
        for offset, size, frames in sorted(self._allocated.values(), key=lambda block: block[0]):
            if offset > position:
                blocks.append(_snapshot_block(position, offset - position, "inactive", 0, []))
            blocks.append(_snapshot_block(offset, size, "active_allocated", size, frames))
            position = offset + size
        if position < self._max_end:
            blocks.append(_snapshot_block(position, self._max_end - position, "inactive", 0, []))
        live_bytes = sum(size for _, size, _ in self._allocated.values())
        return [
            {
                "device": 0,
                "address": _BASE_ADDRESS,
                "total_size": self._max_end,
                "allocated_size": live_bytes,
                "active_size": live_bytes,
                "requested_size": live_bytes,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": [0, 0],
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
        ]

    def _take_first_fit(self, size: int) -> int:
        """Take `size` bytes from the first hole that is large enough, or after the last block, and
        return their offset."""
        for index, (offset, hole_size) in enumerate(self._holes):
            if hole_size >= size:
                rest = [(offset + size, hole_size - size)] if hole_size > size else []
                self._holes[index : index + 1] = rest
                return offset
        offset = self._end
        self._end += size
        self._max_end = max(self._max_end, self._end)
        return offset

    def _add_hole(self, offset: int, size: int) -> None:
        """Make a hole of the freed bytes at an offset, and merge it with neighbouring holes."""
        merged: list[tuple[int, int]] = []
        for start, hole_size in sorted([*self._holes, (offset, size)]):
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + hole_size)
            else:
                merged.append((start, hole_size))
        if merged and sum(merged[-1]) == self._end:
            self._end = merged.pop()[0]
        self._holes = merged


def _snapshot_event(
    action: str, offset: int, size: int, frames: Frames, now_us: int
) -> dict[str, Any]:
    """Return an allocation or a free in torch's format."""
    return {
        "action": action,
        "addr": _BASE_ADDRESS + offset,
        "size": size,
        "stream": 0,
        "time_us": now_us,
        "frames": frames,
    }


def _snapshot_block(
    offset: int, size: int, state: str, requested: int, frames: Frames
) -> dict[str, Any]:
    """Return a block of a segment in torch's format: allocated, or a hole."""
    return {
        "address": _BASE_ADDRESS + offset,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }
