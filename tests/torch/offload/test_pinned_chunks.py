"""Regions of pinned memory: disjoint, reused by each step, pinned before they are needed."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

import remat
from remat.frontend.planning.host_limits import sizes_to_pin
from remat.frontend.runtime.pinned_memory import PinnedChunks

MIB = 1 << 20


def unpinned_chunks() -> PinnedChunks:
    """Chunks on the meta device, without memory: only their regions are tested."""
    return PinnedChunks(lambda size: torch.empty(size, dtype=torch.uint8, device="meta"))


def test_regions_are_never_shared() -> None:
    chunks = unpinned_chunks()
    regions = [chunks.take(size) for size in (1000, 512, 3000, 1, 300 * MIB)]
    for one, other in itertools.pairwise(sorted(regions)):
        assert one.chunk != other.chunk or one.end <= other.start
    pinned_bytes = chunks.pinned_bytes
    for region in regions:
        chunks.give(region)
    assert [chunks.take(512 * MIB).start, chunks.take(256 * MIB).start] == [0, 0]
    assert chunks.pinned_bytes == pinned_bytes == (256 + 512) * MIB


@hypothesis.given(
    st.lists(st.integers(1, 2048), min_size=1, max_size=30),
    st.booleans(),
)
def test_all_steps_but_the_first_pin_nothing(mebibytes: list[int], is_reversed: bool) -> None:
    """Otherwise small regions would be taken from where a large one was, in every step."""
    chunks = unpinned_chunks()
    pinned_bytes = 0
    for step in range(5):
        regions = [chunks.take(size * MIB) for size in mebibytes]
        for region in reversed(regions) if is_reversed else regions:
            chunks.give(region)
        pinned_bytes = pinned_bytes or chunks.pinned_bytes
        assert chunks.pinned_bytes == pinned_bytes, step


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 5)), min_size=1, max_size=20)
)
def test_reserved_memory_suffices_where_tensors_come_back_early(
    tensors: list[tuple[int, int]],
) -> None:
    """Regions are given back while others are still taken."""
    chunks = unpinned_chunks()
    chunks.reserve(mebibytes * MIB for mebibytes, _ in tensors)
    pinned_bytes = chunks.pinned_bytes
    for _ in range(3):
        taken = []
        for mebibytes, delay in tensors:
            taken.append(chunks.take(mebibytes * MIB))
            if len(taken) > delay:
                chunks.give(taken.pop(0))
        for region in taken:
            chunks.give(region)
        assert chunks.pinned_bytes == pinned_bytes


@hypothesis.given(st.lists(st.lists(st.integers(1, 2048), max_size=12), min_size=2, max_size=4))
def test_programs_in_turns_pin_a_limited_size(sizes_of_programs: list[list[int]]) -> None:
    """Programs of other sizes, of batches of other shapes say, share the memory."""
    chunks = unpinned_chunks()
    largest = max(sum(sizes) for sizes in sizes_of_programs) * MIB
    for _ in range(6):
        for sizes in sizes_of_programs:
            for region in [chunks.take(size * MIB) for size in sizes]:
                chunks.give(region)
    assert chunks.pinned_bytes <= 4 * largest + 512 * MIB


@pytest.mark.parametrize("mebibytes", [100, 272, 896])
def test_memory_is_pinned_before_it_is_needed(mebibytes: int) -> None:
    sizes = [mebibytes * MIB] * 6
    chunks = unpinned_chunks()
    chunks.reserve(sizes)
    pinned_bytes = chunks.pinned_bytes
    assert sum(sizes) <= pinned_bytes < 1.6 * sum(sizes)
    for size in sizes:
        chunks.take(size)
    assert chunks.pinned_bytes == pinned_bytes


@hypothesis.given(
    st.lists(st.tuples(st.integers(1, 2048), st.integers(0, 5)), min_size=1, max_size=20)
)
def test_what_is_pinned_before_is_what_is_on_the_host_at_once(
    tensors: list[tuple[int, int]],
) -> None:
    sizes = [mebibytes * MIB for mebibytes, _ in tensors]
    on_host: list[int] = []
    most_bytes = 0
    for size, (_, delay) in zip(sizes, tensors, strict=True):
        on_host.append(size)
        most_bytes = max(most_bytes, sum(on_host))
        if len(on_host) > delay:
            on_host.pop(0)
    pinned = sizes_to_pin(sizes, most_bytes)
    assert sum(pinned) == most_bytes
    assert max(pinned) == max(sizes)


def test_a_failed_reserve_leaves_all_pinned_memory_free() -> None:
    pinned_bytes = 0

    def pin(size: int) -> torch.Tensor:
        nonlocal pinned_bytes
        pinned_bytes += size
        if pinned_bytes > 8 << 30:
            raise RuntimeError("no memory")
        return torch.empty(size, dtype=torch.uint8, device="meta")

    chunks = PinnedChunks(pin)
    with pytest.raises(remat.RematError, match="cannot pin"):
        chunks.reserve([3 << 30] * 4)
    pinned_bytes = chunks.pinned_bytes
    for _ in range(2):
        chunks.take(3 << 30)
    assert chunks.pinned_bytes == pinned_bytes
