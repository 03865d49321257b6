"""Regions of pinned memory: disjoint, reused by each step, pinned before they are needed."""

from __future__ import annotations

import itertools

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

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
