"""Candidates of a block call: the options that it may run in, and the inputs that each saves."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.block_step import BlockOption
from remat.blockwise.saved_inputs import SavedInputs
from remat.frontend.blocks.dry_run import DryRun, DryRunCall
from remat.frontend.blocks.fsdp2 import local_tensor
from remat.frontend.memory.auto_budget import auto_limits_of_device
from remat.frontend.memory.meter import unique_bytes
from remat.frontend.memory.reserve import reserve_size
from remat.frontend.planning.optimize_options import OptimizeOptions
from remat.limits.limits import Limits


@dataclass(frozen=True)
class CallCandidates:
    """The options among which one is chosen for a block call.

    `option_names` has the name of each option, and `saved_inputs` the input tensors that it saves;
    if it is empty (the block is not planned), each option holds all inputs until its backward ends.
    `unplanned_reason` says why the block could not be planned, if that was tried.
    """

    call: DryRunCall
    options: tuple[BlockOption, ...]
    option_names: tuple[str, ...]
    saved_inputs: tuple[SavedInputs, ...] = ()
    unplanned_reason: str = ""


def with_saved_inputs(
    candidates: Sequence[CallCandidates], dry_run: DryRun
) -> list[CallCandidates]:
    """Add the bytes of the inputs that each option saves to its saved and backward bytes.

    Not counted are inputs that code outside of blocks holds when the backward starts: the dry run
    counts them. An input of several calls, such as an attention mask, counts once if any option
    saves it: in every option of the first call that gets it, whose forward runs first and whose
    backward runs last.
    """
    saved_and_shared = _saved_by_some_option(candidates) & _inputs_of_several_calls(candidates)
    counted: set[StorageWeakRef] = set(dry_run.externally_held_storages)
    results: list[CallCandidates] = []
    for candidate in candidates:
        storages = candidate.call.input_storages
        sizes = dict(zip(storages, candidate.call.input_sizes_bytes, strict=True))
        shared = saved_and_shared.intersection(storages) - counted
        options = tuple(
            _with_inputs(
                option,
                {ref: sizes[ref] for ref in (_saved_storages(candidate, index) | shared) - counted},
                storages,
                candidate.saved_inputs[index] if candidate.saved_inputs else None,
            )
            for index, option in enumerate(candidate.options)
        )
        counted |= shared
        results.append(replace(candidate, options=options))
    return results


def _with_inputs(
    option: BlockOption,
    sizes_bytes: Mapping[StorageWeakRef, int],
    storages: Sequence[StorageWeakRef],
    inputs: SavedInputs | None,
) -> BlockOption:
    """Return the option with inputs of these sizes in its saved and backward bytes. `storages` are
    those of all inputs. If `inputs` is None, all are held until the backward ends."""
    saved_bytes = sum(sizes_bytes.values())
    if inputs is None:
        backward_bytes = option.backward_bytes + saved_bytes
    else:
        # Later entries win: for each storage, the input that is read last.
        by_last_read = sorted(inputs.last_reads.items(), key=lambda item: item[1])
        index_of = {storages[index]: index for index, _ in by_last_read}
        freed = {index_of[ref]: size for ref, size in sizes_bytes.items() if ref in index_of}
        held_bytes = saved_bytes - sum(freed.values())
        backward_bytes = inputs.backward_bytes(freed) + held_bytes
    return replace(
        option, saved_bytes=option.saved_bytes + saved_bytes, backward_bytes=backward_bytes
    )


def _saved_storages(candidate: CallCandidates, index: int) -> set[StorageWeakRef]:
    """Return the storages of the inputs that option `index` saves."""
    storages = candidate.call.input_storages
    if not candidate.saved_inputs:
        return set(storages)
    return {storages[i] for i in candidate.saved_inputs[index].last_reads}


def _saved_by_some_option(candidates: Sequence[CallCandidates]) -> set[StorageWeakRef]:
    return {
        ref
        for c in candidates
        for index in range(len(c.options))
        for ref in _saved_storages(c, index)
    }


def _inputs_of_several_calls(candidates: Sequence[CallCandidates]) -> set[StorageWeakRef]:
    counts = Counter(ref for c in candidates for ref in set(c.call.input_storages))
    return {ref for ref, count in counts.items() if count > 1}


def available_bytes(
    options: OptimizeOptions, baseline_bytes: int, library_bytes: int, model: nn.Module
) -> int | None:
    """Return the largest peak in bytes that a plan of the model's step may have; None for the
    budget "min". `baseline_bytes` is the step's peak without recomputation, of which libraries use
    `library_bytes`."""
    reserve = reserve_size(options.reserve)
    if options.budget is None:
        device = next(p.device for p in model.parameters())
        tensors = [*model.parameters(), *model.buffers()]
        tensors += [p.grad for p in model.parameters() if p.grad is not None]
        allocated_bytes = unique_bytes(map(local_tensor, tensors))
        limits = auto_limits_of_device(device, allocated_bytes, reserve).limits
    else:
        limits = Limits(options.budget, reserve.total_bytes)
    return limits.available_bytes(baseline_bytes, library_bytes)
