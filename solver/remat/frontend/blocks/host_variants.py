"""Variants of the options of block calls that offload saved tensors to the host."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence

from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.block_step import BlockStep, CallVariant, host_stays, useful_variants
from remat.choice.offloaded_forms import MIN_BYTES
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.blocks.block_options import PlannedOption, SavedTensor
from remat.frontend.blocks.candidates import CallCandidates
from remat.frontend.blocks.dry_run import DryRun

_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the bytes that an option can offload, of which each is a variant, about."""


def host_variants(
    candidates: Sequence[CallCandidates],
    planned_options: Sequence[Sequence[PlannedOption]],
    dry_run: DryRun,
    step: BlockStep,
) -> tuple[tuple[CallVariant, ...], ...]:
    """Return the variants of each call that offload tensors; none for calls that cannot, such as
    those of blocks in eager mode."""
    stays = host_stays(step)
    call_counts = Counter(ref for c in candidates for ref in set(c.call.input_storages))
    variants: list[tuple[CallVariant, ...]] = []
    for number, (candidate, options) in enumerate(zip(candidates, planned_options, strict=True)):
        if number not in stays:
            variants.append(())
            continue
        of_call = [
            CallVariant(
                index, tuple(t.position for t in tensors), sum(t.size_bytes for t in tensors)
            )
            for index, option in enumerate(options)
            for tensors in _selections(
                [
                    tensor
                    for tensor in option.saved_tensors
                    if tensor.size_bytes >= MIN_BYTES
                    and _may_leave(tensor, candidate, call_counts, dry_run)
                ]
            )
        ]
        plain = [CallVariant(index) for index in range(len(options))]
        useful = useful_variants(candidate.options, [*plain, *of_call])
        variants.append(tuple(variant for variant in useful if variant.tensors))
    return tuple(variants)


def _may_leave(
    tensor: SavedTensor,
    candidate: CallCandidates,
    call_counts: Counter[StorageWeakRef],
    dry_run: DryRun,
) -> bool:
    """True unless the tensor is an input that others hold, or a part of a larger storage."""
    if tensor.input_index < 0:
        return True
    call = candidate.call
    storage = call.input_storages[tensor.input_index]
    storage_bytes = call.input_sizes_bytes[tensor.input_index]
    return (
        storage not in dry_run.externally_held_storages
        and call_counts[storage] == call.input_storages.count(storage) == 1
        and storage_bytes < tensor.size_bytes + CUDA_ALIGNMENT_BYTES
    )


def _selections(tensors: Sequence[SavedTensor]) -> Iterator[tuple[SavedTensor, ...]]:
    """Yield selections of tensors of about each share of their bytes, the largest tensors first."""
    total_bytes = sum(t.size_bytes for t in tensors)
    seen: set[frozenset[int]] = {frozenset()}
    for share in _SHARES:
        room_bytes = share * total_bytes
        selected: list[SavedTensor] = []
        for tensor in sorted(tensors, key=lambda t: -t.size_bytes):
            if tensor.size_bytes <= room_bytes:
                room_bytes -= tensor.size_bytes
                selected.append(tensor)
        key = frozenset(t.position for t in selected)
        if key not in seen:
            seen.add(key)
            yield tuple(sorted(selected, key=lambda t: t.position))
