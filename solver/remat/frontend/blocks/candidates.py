"""Candidates of a block call: its options, the inputs that each saves, and variants with copies."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.block_step import (
    BlockOption,
    BlockStep,
    CallVariant,
    host_stays,
    useful_variants,
)
from remat.blockwise.pareto_options import NEVER_FREED, HeldInput, SavedTensor
from remat.choice.offloaded_forms import MIN_BYTES
from remat.documents.trace import CUDA_ALIGNMENT_BYTES
from remat.frontend.blocks.block_options import PlannedOption
from remat.frontend.blocks.dry_run import DryRun
from remat.frontend.blocks.fsdp2 import local_tensor
from remat.frontend.blocks.step_recorder import DryRunCall
from remat.frontend.memory.device_memory import auto_limits_of_device, reserve_size
from remat.frontend.memory.meter import unique_bytes
from remat.limits.limits import Limits
from remat.plan_options import CheckedOptions


@dataclass(frozen=True)
class CallCandidates:
    """The options among which one is chosen for a block call.

    `option_names` has the name of each option, and `planned` its plan; if that is empty (the block
    runs in eager mode), each option holds all inputs until its backward ends. `held_inputs` are the
    inputs that count as an option's memory. `unplanned_reason` says why the block could not be
    planned, if that was tried.
    """

    call: DryRunCall
    options: tuple[BlockOption, ...]
    option_names: tuple[str, ...]
    planned: tuple[PlannedOption, ...] = ()
    held_inputs: tuple[tuple[HeldInput, ...], ...] = ()
    unplanned_reason: str = ""


def with_saved_inputs(
    candidates: Sequence[CallCandidates], dry_run: DryRun
) -> list[CallCandidates]:
    """Return the candidates with the bytes of the inputs that each option saves added to its saved
    and backward bytes, and with `held_inputs`.

    Not counted are inputs that code outside of blocks holds when the backward starts: the dry run
    counts them. An input of several calls, such as an attention mask, counts once if any option
    saves it: in every option of the first call that gets it, whose forward runs first and whose
    backward runs last.
    """
    last_reads = [
        [_last_input_reads(candidate, index) for index in range(len(candidate.options))]
        for candidate in candidates
    ]
    saved = {ref for reads_by_option in last_reads for reads in reads_by_option for ref in reads}
    call_counts = Counter(ref for c in candidates for ref in set(c.call.input_storages))
    saved_and_shared = {ref for ref in saved if call_counts[ref] > 1}
    counted: set[StorageWeakRef] = set(dry_run.externally_held_storages)
    results: list[CallCandidates] = []
    for candidate, reads_by_option in zip(candidates, last_reads, strict=True):
        call = candidate.call
        sizes = dict(zip(call.input_storages, call.input_sizes_bytes, strict=True))
        shared = saved_and_shared & sizes.keys() - counted
        options: list[BlockOption] = []
        held_inputs: list[tuple[HeldInput, ...]] = []
        for index, (option, reads) in enumerate(
            zip(candidate.options, reads_by_option, strict=True)
        ):
            inputs = [
                HeldInput(sizes[ref], reads.get(ref, NEVER_FREED), call.input_storages.index(ref))
                for ref in sorted((reads.keys() | shared) - counted, key=call.input_storages.index)
            ]
            input_bytes = sum(i.size_bytes for i in inputs)
            if candidate.planned:
                backward_bytes = candidate.planned[index].saved_inputs.backward_bytes(inputs)
            else:
                backward_bytes = option.backward_bytes + input_bytes
            saved_bytes = option.saved_bytes + input_bytes
            options.append(replace(option, saved_bytes=saved_bytes, backward_bytes=backward_bytes))
            held_inputs.append(tuple(inputs))
        counted |= shared
        results.append(replace(candidate, options=tuple(options), held_inputs=tuple(held_inputs)))
    return results


def _last_input_reads(candidate: CallCandidates, index: int) -> dict[StorageWeakRef, int]:
    """Return the storages of the inputs that option `index` saves, with the last run of the
    backward that reads each; `NEVER_FREED` for all inputs of a call in eager mode."""
    storages = candidate.call.input_storages
    if not candidate.planned:
        return dict.fromkeys(storages, NEVER_FREED)
    last_reads: dict[StorageWeakRef, int] = {}
    for number, run in candidate.planned[index].saved_inputs.last_reads.items():
        last_reads[storages[number]] = max(run, last_reads.get(storages[number], 0))
    return last_reads


def step_limits(options: CheckedOptions, model: nn.Module) -> Limits:
    """Return the limits that budget and reserve set for a step of the model; without a budget, the
    limits of its device's memory."""
    reserve = reserve_size(options.reserve)
    if options.budget is None:
        device = next(p.device for p in model.parameters())
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        allocated_bytes = unique_bytes(map(local_tensor, tensors))
        return auto_limits_of_device(device, allocated_bytes, reserve)
    return Limits(options.budget, reserve.total_bytes)


_SHARES = (0.25, 0.5, 0.75, 1.0)
"""Shares of the bytes that an option can offload, of which each is a variant, about."""


def host_variants(
    candidates: Sequence[CallCandidates], dry_run: DryRun, step: BlockStep
) -> tuple[tuple[CallVariant, ...], ...]:
    """Return for each call its variants that offload tensors; none if it cannot, such as in eager
    mode."""
    stays = host_stays(step)
    call_counts = Counter(ref for c in candidates for ref in set(c.call.input_storages))
    variants: list[tuple[CallVariant, ...]] = []
    for number, candidate in enumerate(candidates):
        if number not in stays:
            variants.append(())
            continue
        of_call = [
            CallVariant(
                index, tuple(t.position for t in tensors), sum(t.size_bytes for t in tensors)
            )
            for index, option in enumerate(candidate.planned)
            for tensors in _offload_selections(
                [
                    tensor
                    for tensor in option.saved_tensors
                    if tensor.size_bytes >= MIN_BYTES
                    and _may_be_offloaded(tensor, candidate, call_counts, dry_run)
                ]
            )
        ]
        plain = [CallVariant(index) for index in range(len(candidate.planned))]
        useful = useful_variants(candidate.options, [*plain, *of_call])
        variants.append(tuple(variant for variant in useful if variant.tensors))
    return tuple(variants)


def _may_be_offloaded(
    tensor: SavedTensor,
    candidate: CallCandidates,
    call_counts: Counter[StorageWeakRef],
    dry_run: DryRun,
) -> bool:
    """True unless the tensor is an input that other code or another call holds, or is a part of a
    larger storage. `call_counts` has the number of calls that get each input."""
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


def _offload_selections(tensors: Sequence[SavedTensor]) -> Iterator[tuple[SavedTensor, ...]]:
    """Yield a selection of the tensors for each of `_SHARES`, with about that share of their bytes:
    the largest tensors that fit. Empty and equal ones are left out."""
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
