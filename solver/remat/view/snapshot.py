"""`memory_snapshot`: a plan in the form of `torch.cuda.memory._snapshot()`.

What torch offers for real snapshots then works for planned ones: the viewer at
pytorch.org/memory_viz and the functions of `torch.cuda._memory_viz`. Allocations and frees are
those of the simulator, in run order. Addresses come from a first fit into one segment; CUDA's
allocator places blocks in its own way.
"""

from __future__ import annotations

import os
import pickle
from collections import defaultdict
from pathlib import Path
from typing import Any

from remat.documents.base import write_atomically
from remat.plan_data import PlanData
from remat.view.drawing.occupancy import LAYERS, copy_kinds, is_overwritten, starts_s
from remat.view.drawing.text import plain

_BASE = 0x7F0000000000
"""A plausible address of device memory, below 2**53: the viewer has JavaScript's numbers."""

Frames = list[dict[str, Any]]


def memory_snapshot(plan: PlanData) -> dict[str, Any]:
    """The snapshot as plain data: one device, one segment, one stream.

    Allocations carry frames: the operation (its module as the file, its run as the line), then the
    module and those around it, and a category. Live bytes after the events of a run are the
    simulator's; so is the largest sum on the way. Values without bytes are left out.
    """
    graph, runs = plan.graph, plan.schedule.runs
    timeline = plan.timeline()
    kinds = copy_kinds(plan, timeline)
    starts = starts_s(plan)
    made: dict[int, list[int]] = defaultdict(list)
    dying: dict[int, list[int]] = defaultdict(list)
    for index, copy in enumerate(timeline.copies):
        if graph.values[copy.value].size_bytes:
            made[copy.start].append(index)
            dying[copy.end].append(index)
    writer = _Writer()
    constant: Frames = [{"name": "constant memory", "filename": "remat", "line": 0}]
    writer.allocate("constant", graph.constant_bytes, constant, LAYERS["constant"], 0)
    modules: dict[str, Frames] = {}
    for run, op in enumerate(runs):
        operation = graph.operations[op]
        now = int(starts[run] * 1e6)
        around = modules.setdefault(operation.module, _around(operation.module))
        place = plain(operation.module) or "remat"
        own = {"name": plain(operation.name), "filename": place, "line": run}
        frames = [own, *around]
        for index in dying[run]:
            if is_overwritten(plan, timeline.copies[index]):
                writer.free(index, now)
        for index in made[run]:
            size = graph.values[timeline.copies[index].value].size_bytes
            writer.allocate(index, size, frames, LAYERS[kinds[index]], now)
        workspace = operation.workspace_bytes
        writer.allocate("workspace", workspace, frames, LAYERS["workspace"], now)
        now = int(starts[run + 1] * 1e6)
        for index in ("workspace", *dying[run]):
            writer.free(index, now)
    return {
        "segments": writer.segments(),
        "device_traces": [writer.events],
        "allocator_settings": {},
    }


def save_snapshot(plan: PlanData, path: str | os.PathLike[str]) -> None:
    """Write the snapshot as torch does, pickled: text and numbers only. All or nothing."""
    # The viewer reads pickles of protocol 4 at most.
    write_atomically(Path(path), pickle.dumps(memory_snapshot(plan), protocol=4))


def _around(module: str) -> Frames:
    """A frame for the module and for each that it is part of, innermost first."""
    frames: Frames = []
    while module:
        frames.append({"name": plain(module), "filename": "module", "line": 0})
        module = module.rpartition(".")[0]
    return frames


class _Writer:
    """Events, and the blocks that they leave; memory is given out by first fit."""

    def __init__(self) -> None:
        self.events: list[dict[str, Any]] = []
        self._held: dict[int | str, tuple[int, int, Frames]] = {}
        self._free: list[tuple[int, int]] = []
        """Holes (offset, size), by offset, with room on both sides of each."""
        self._end = 0
        self._high = 0

    def allocate(
        self, key: int | str, size: int, frames: Frames, category: str, now_us: int
    ) -> None:
        if not size:
            return
        offset = self._place(size)
        self._held[key] = (offset, size, frames)
        self.events.append(_event("alloc", offset, size, frames, now_us) | {"category": category})

    def free(self, key: int | str, now_us: int) -> None:
        if key not in self._held:
            return
        offset, size, frames = self._held.pop(key)
        self._release(offset, size)
        for action in ("free_requested", "free_completed"):
            self.events.append(_event(action, offset, size, frames, now_us))

    def segments(self) -> list[dict[str, Any]]:
        """The one segment, with its blocks and holes in order."""
        if not self._high:
            return []
        blocks: list[dict[str, Any]] = []
        at = 0
        for offset, size, frames in sorted(self._held.values(), key=lambda block: block[0]):
            if offset > at:
                blocks.append(_block(at, offset - at, "inactive", 0, []))
            blocks.append(_block(offset, size, "active_allocated", size, frames))
            at = offset + size
        if at < self._high:
            blocks.append(_block(at, self._high - at, "inactive", 0, []))
        live = sum(size for _, size, _ in self._held.values())
        return [
            {
                "device": 0,
                "address": _BASE,
                "total_size": self._high,
                "allocated_size": live,
                "active_size": live,
                "requested_size": live,
                "stream": 0,
                "segment_type": "large",
                "segment_pool_id": [0, 0],
                "is_expandable": False,
                "frames": [],
                "blocks": blocks,
            }
        ]

    def _place(self, size: int) -> int:
        for index, (offset, room) in enumerate(self._free):
            if room >= size:
                rest = [(offset + size, room - size)] if room > size else []
                self._free[index : index + 1] = rest
                return offset
        offset = self._end
        self._end += size
        self._high = max(self._high, self._end)
        return offset

    def _release(self, offset: int, size: int) -> None:
        holes = sorted([*self._free, (offset, size)])
        merged: list[tuple[int, int]] = []
        for start, room in holes:
            if merged and sum(merged[-1]) == start:
                merged[-1] = (merged[-1][0], merged[-1][1] + room)
            else:
                merged.append((start, room))
        if merged and sum(merged[-1]) == self._end:
            self._end = merged.pop()[0]
        self._free = merged


def _event(action: str, offset: int, size: int, frames: Frames, now_us: int) -> dict[str, Any]:
    return {
        "action": action,
        "addr": _BASE + offset,
        "size": size,
        "stream": 0,
        "time_us": now_us,
        "frames": frames,
    }


def _block(offset: int, size: int, state: str, requested: int, frames: Frames) -> dict[str, Any]:
    return {
        "address": _BASE + offset,
        "size": size,
        "requested_size": requested,
        "state": state,
        "frames": frames,
    }
