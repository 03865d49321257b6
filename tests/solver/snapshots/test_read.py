"""Snapshots of torch's two writers, of older versions, and recordings that were cut."""

from __future__ import annotations

import copy
import gzip
import pickle
from typing import Any

import numpy as np
import pytest
from tests.helpers.paths import DATA

from remat.snapshots.explain import explain_snapshot
from remat.snapshots.findings import Kind
from remat.snapshots.model import NEVER
from remat.snapshots.read import read_snapshot

FOLDER = DATA / "snapshots"


def content(name: str) -> bytes:
    return gzip.decompress((FOLDER / f"{name}.pickle.gz").read_bytes())


def plain(name: str = "python-writer") -> dict[str, Any]:
    """Return the committed snapshot as plain data. It is ours: pickle may read it."""
    return pickle.loads(content(name))


def test_both_writers_of_torch_give_the_same_snapshot() -> None:
    python, cpp = (read_snapshot(content(name)) for name in ("python-writer", "cpp-writer"))
    assert python.stacks == cpp.stacks
    (a,), (b,) = python.devices, cpp.devices
    count = b.event_count  # the C++ writer was called first
    for column in ("addresses", "sizes", "starts", "stacks", "streams"):
        np.testing.assert_array_equal(
            getattr(a.allocations, column), getattr(b.allocations, column), column
        )
    ends = np.where(a.allocations.ends >= count, NEVER, a.allocations.ends)
    np.testing.assert_array_equal(ends, b.allocations.ends)
    assert [s.size_bytes for s in a.segments] == [s.size_bytes for s in b.segments]
    assert explain_snapshot(python).findings == explain_snapshot(cpp).findings


def test_live_bytes_are_those_of_the_segments() -> None:
    data = plain()
    memory = read_snapshot(content("python-writer")).devices[0]
    live = memory.allocations.live_at(memory.event_count)
    active = sum(s["requested_size"] for s in data["segments"])
    assert int(memory.allocations.sizes[live].sum()) == active


def test_plain_data_is_read_and_left_as_it_is() -> None:
    data = plain()
    before = copy.deepcopy(data)
    assert explain_snapshot(read_snapshot(data)).cause is not None
    assert data == before


def test_a_snapshot_of_torch_2_0_has_a_history_instead_of_frames() -> None:
    data = plain()
    for segment in data["segments"]:
        for key in ("segment_pool_id", "is_expandable", "frames", "requested_size"):
            segment.pop(key, None)
        for block in segment["blocks"]:
            frames, size = block.pop("frames", []), block.pop("requested_size")
            block.pop("address")
            if block["state"] != "inactive":
                block["history"] = [{"addr": 0, "real_size": size, "frames": frames}]
    for event in data["device_traces"][0]:
        for key in ("time_us", "pool_id", "user_metadata", "compile_context"):
            event.pop(key, None)
    old = explain_snapshot(read_snapshot(pickle.dumps(data, protocol=2)))
    new = explain_snapshot(read_snapshot(content("python-writer")))
    assert old.findings == new.findings
    assert old.lines == new.lines


@pytest.mark.parametrize("count", [400, 200, 60, 1])
def test_a_cut_recording_has_the_blocks_from_before(count: int) -> None:
    """A ring buffer has lost its oldest events: blocks are live that nothing allocated, and frees
    have no allocation."""
    data, whole = plain(), read_snapshot(content("python-writer")).devices[0]
    data["device_traces"][0] = data["device_traces"][0][-count:]
    memory = read_snapshot(data).devices[0]
    assert memory.is_cut
    first = whole.event_count - count
    for event in range(0, count + 1, 7):
        live = memory.allocations.live_at(event)
        expected = whole.allocations.live_at(first + event)
        assert memory.allocations.sizes[live].sum() == whole.allocations.sizes[expected].sum()
    notes = explain_snapshot(read_snapshot(data)).notes
    assert any("cut" in note for note in notes)


def test_a_recording_that_began_late_has_no_leak_of_its_start() -> None:
    data = plain()
    data["device_traces"][0] = data["device_traces"][0][-60:]
    assert not any(f.kind.is_leak for f in explain_snapshot(read_snapshot(data)).findings)


def test_without_events_the_blocks_are_explained() -> None:
    data = plain()
    explanation = explain_snapshot(read_snapshot({"segments": data["segments"]}))
    assert explanation.live_bytes == sum(s["requested_size"] for s in data["segments"])
    assert explanation.timeline is None
    assert "no events" in explanation.notes[0]
    assert explanation.lines[0].size_bytes > 0


def test_without_frames_the_leak_is_seen_and_its_line_is_not() -> None:
    data = plain()
    for event in data["device_traces"][0]:
        event.pop("frames", None)
    for segment in data["segments"]:
        for block in segment["blocks"]:
            block["frames"] = []
    explanation = explain_snapshot(read_snapshot(data))
    assert "no stacks" in " ".join(explanation.notes)
    assert explanation.cause is not None
    assert explanation.cause.place.frame is None


def test_the_device_that_ran_out_is_explained() -> None:
    data, other = plain(), plain()
    for segment in other["segments"]:
        segment["device"] = 1
    trace = other["device_traces"][0]
    trace.append({"action": "oom", "size": 1 << 30, "device_free": 5, "stream": 0, "frames": []})
    both = {
        "segments": [*data["segments"], *other["segments"]],
        "device_traces": [data["device_traces"][0], trace],
    }
    explanation = explain_snapshot(read_snapshot(both))
    assert (explanation.device, explanation.requested_bytes) == (1, 1 << 30)
    assert explain_snapshot(read_snapshot(both), device=0).requested_bytes == 0


def test_the_retained_outputs_are_named() -> None:
    cause = explain_snapshot(read_snapshot(content("python-writer"))).cause
    assert cause is not None
    assert cause.kind == Kind.KEPT_TENSORS
    assert cause.bytes_per_step == 2 << 20
