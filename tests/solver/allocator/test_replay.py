"""The replay of torch's caching allocator equals torch's own recordings, block by block, and
keeps its invariants for any sequence."""

from __future__ import annotations

import gzip
import json
from typing import Any

import hypothesis
import pytest
from hypothesis import strategies as st
from tests.helpers.paths import DATA

from remat.allocator.prediction import predict_allocator_peaks, step_allocation_events
from remat.allocator.replay import AllocationEvent, Allocator, AllocatorPeaks, replay_events
from remat.documents.trace import Trace
from remat.schedule import Schedule
from remat.simulate import simulate

FILES = sorted((DATA / "allocator").glob("torch-*.json.gz"))
RECORDINGS: list[dict[str, Any]] = [
    {"file": path.name.split(".json")[0], **recording}
    for path in FILES
    for recording in json.loads(gzip.decompress(path.read_bytes()))
]
PLANS = [recording for recording in RECORDINGS if recording["name"].startswith("plan")]


def name_of(recording: dict[str, Any]) -> str:
    kind = "expandable" if recording["is_expandable"] else "segments"
    return f"{recording['file']}-{recording['name']}-{kind}"


def replayed(recording: dict[str, Any]) -> Allocator:
    """Replay every allocation and free of the recording; each must get the block that torch gave
    it."""
    allocator = Allocator(is_expandable=recording["is_expandable"])
    reserved, bases = 0, []
    for action, address, size in recording["actions"]:
        if action == "alloc":
            allocator.apply(AllocationEvent(address, size))
            assert allocator.reserved_bytes == reserved
        elif action == "free_completed":
            allocator.apply(AllocationEvent(address, None))
        else:
            assert action == ("segment_map" if recording["is_expandable"] else "segment_alloc")
            reserved += size
            bases.append(address)
    return allocator


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_replayed_blocks_are_those_that_torch_recorded(recording: dict[str, Any]):
    allocator = replayed(recording)
    expected = sorted(recording["segments"], key=lambda s: s["address"])
    actual = sorted(
        allocator.segments(),
        # Expandable segments have no order between the pools.
        key=lambda s: (
            [t["is_small"] for t in expected].index(s.is_small) * recording["is_expandable"]
        ),
    )
    assert len(actual) == len(expected)
    for segment, other in zip(actual, expected, strict=True):
        assert segment.is_small == other["is_small"]
        assert [
            (b.address - segment.address, b.size_bytes, b.requested_bytes) for b in segment.blocks
        ] == [
            (address - other["address"], size, requested if state != "inactive" else None)
            for address, size, requested, state in other["blocks"]
        ]


@pytest.mark.parametrize("recording", RECORDINGS, ids=name_of)
def test_replayed_peaks_are_those_that_torch_recorded(recording: dict[str, Any]):
    assert replayed(recording).peaks == AllocatorPeaks(
        *(recording["peaks"][kind] for kind in ("requested", "allocated", "reserved"))
    )


def test_recordings_cover_both_segment_kinds_and_two_versions_of_torch():
    kinds = {(r["name"].split()[0], r["is_expandable"], r["file"]) for r in RECORDINGS}
    assert len(kinds) == 2 * 2 * len(FILES) >= 8


@pytest.mark.parametrize(
    ("sizes", "allocated", "reserved"),
    [
        ((1,), 512, 2 << 20),
        ((0,), 0, 0),
        ((1 << 20,), 1 << 20, 2 << 20),
        ((1 << 20, 1 << 20, 512), (2 << 20) + 512, 4 << 20),
        (((1 << 20) + 1,), (1 << 20) + 512, 20 << 20),
        (((10 << 20) - 512,), (10 << 20) - 512, 20 << 20),
        # The last mebibyte of a segment is not split off.
        ((11 << 20,), 12 << 20, 12 << 20),
        ((21 << 20,), 22 << 20, 22 << 20),
        (((21 << 20) - 512,), (21 << 20) - 512, 22 << 20),
    ],
)
def test_requests_are_rounded_at_the_allocators_thresholds(
    sizes: tuple[int, ...], allocated: int, reserved: int
):
    peaks = replay_events(AllocationEvent(key, size) for key, size in enumerate(sizes))
    assert peaks == AllocatorPeaks(sum(sizes), allocated, reserved)


EVENTS = st.lists(
    st.tuples(
        st.booleans(),
        st.integers(0, 60),
        st.one_of(st.integers(1, 3 << 20), st.integers(1, 60 << 20)),
    ),
    max_size=80,
)


@hypothesis.given(EVENTS, st.booleans())
def test_allocated_and_reserved_bytes_add_up_for_any_sequence(
    requests: list[tuple[bool, int, int]], is_expandable: bool
):
    allocator, live = Allocator(is_expandable=is_expandable), dict[int, int]()
    for is_free, pick, size in requests:
        if is_free and live:
            key = sorted(live)[pick % len(live)]
            allocator.apply(AllocationEvent(key, None))
            del live[key]
        else:
            key = max(live, default=0) + 1
            live[key] = size
            allocator.apply(AllocationEvent(key, size))
        segments = allocator.segments()
        blocks = [block for segment in segments for block in segment.blocks]
        assert sum(s.size_bytes for s in segments) == allocator.reserved_bytes
        used = [b for b in blocks if b.requested_bytes is not None]
        assert sum(b.size_bytes for b in used) == allocator.allocated_bytes
        assert sorted(b.requested_bytes or 0 for b in used) == sorted(live.values())
        assert sum(live.values()) == allocator.requested_bytes <= allocator.allocated_bytes
        for segment in segments:
            for one, other in zip(segment.blocks, segment.blocks[1:], strict=False):
                assert one.address + one.size_bytes == other.address
                assert one.requested_bytes is not None or other.requested_bytes is not None
        if is_expandable:  # only the rounding to 512 bytes is lost
            assert allocator.allocated_bytes == sum(-(-s // 512) * 512 for s in live.values())


def test_freeing_an_unknown_block_or_allocating_it_twice_is_an_error():
    with pytest.raises(KeyError):
        replay_events([AllocationEvent("a", None)])
    with pytest.raises(KeyError, match="allocated already"):
        replay_events([AllocationEvent("a", 1), AllocationEvent("a", 1)])


@pytest.mark.parametrize("recording", PLANS, ids=name_of)
def test_a_step_allocates_the_predicted_bytes(recording: dict[str, Any]):
    """Three steps of remat's runtime on torch's CUDA allocator, recorded in a new process."""
    trace = Trace.from_json(json.dumps(recording["trace"]))
    schedule = Schedule(tuple(recording["runs"]))
    predicted, seen = predict_allocator_peaks(trace, schedule), recording["peaks"]
    is_expandable = recording["is_expandable"]
    predicted_bytes = simulate(trace.graph(), schedule).peak_bytes
    assert seen["requested"] <= predicted_bytes
    assert (
        predicted.requested_peak_bytes - (1 << 20) - 2048
        <= seen["requested"]
        <= predicted.requested_peak_bytes
    )
    allocated_bytes = predicted.allocated(is_expandable=is_expandable)
    # A measured workspace counts with its blocks, which may be a mebibyte more than was requested.
    assert allocated_bytes - (1 << 20) <= seen["allocated"] <= allocated_bytes + (1 << 18)
    assert seen["reserved"] == pytest.approx(
        predicted.reserved(is_expandable=is_expandable), rel=0.05
    )
    if is_expandable:
        assert seen["allocated"] <= predicted_bytes == allocated_bytes


@pytest.mark.parametrize("recording", PLANS, ids=name_of)
def test_allocations_happen_in_the_order_of_the_runtime(recording: dict[str, Any]):
    """Check every value of three steps in turn; between them are only a kernel's temporary
    allocations."""
    trace = Trace.from_json(json.dumps(recording["trace"]))
    events = step_allocation_events(trace, Schedule(tuple(recording["runs"])), steps=3)
    # A kernel allocates its results in its own order; only one of them is large.
    least_bytes = 1 << 20 if "resnet" in recording["name"] else 1
    values = [
        event.size_bytes
        for event in events
        if isinstance(event.key, tuple) and isinstance(event.key[0], int)
    ]
    before = len({p.storage for p in trace.placeholders if p.kind != "tangent"})
    seen = [size for action, _, size in recording["actions"] if action == "alloc"][before:]
    assert len(values) > 2 * len(trace.graph().values)
    waiting = iter(seen)
    late = [size for size in values if (size or 0) >= least_bytes and size not in waiting]
    assert late == []
