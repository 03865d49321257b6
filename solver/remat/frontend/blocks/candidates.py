"""Candidates of a block call: the options that it may run in, and the inputs that each saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.block_step import BlockOption
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

    `option_names` has the name of each option, and `saved_inputs` the indices of the input tensors
    that it saves; without `saved_inputs`, each option saves all of them. `unplanned_reason` says
    why the block could not be planned, if that was tried.
    """

    call: DryRunCall
    options: tuple[BlockOption, ...]
    option_names: tuple[str, ...]
    saved_inputs: tuple[frozenset[int], ...] = ()
    unplanned_reason: str = ""


def with_saved_inputs(
    candidates: Sequence[CallCandidates], dry_run: DryRun
) -> list[CallCandidates]:
    """Add the bytes of the inputs that each option saves to its saved and backward bytes.

    Not counted are inputs that code outside of blocks holds anyway, and those that an earlier call
    saves in each of its options.
    """
    counted: set[StorageWeakRef] = set(dry_run.externally_held_storages)
    results: list[CallCandidates] = []
    for candidate in candidates:
        storages = candidate.call.input_storages
        sizes = dict(zip(storages, candidate.call.input_sizes_bytes, strict=True))
        saved_by_all_options = set(storages)
        options: list[BlockOption] = []
        for index, option in enumerate(candidate.options):
            saved = set(storages)
            if candidate.saved_inputs:
                saved = {storages[i] for i in candidate.saved_inputs[index]}
            saved_by_all_options &= saved
            input_bytes = sum(sizes[ref] for ref in saved - counted)
            options.append(
                replace(
                    option,
                    saved_bytes=option.saved_bytes + input_bytes,
                    backward_bytes=option.backward_bytes + input_bytes,
                )
            )
        counted |= saved_by_all_options
        results.append(replace(candidate, options=tuple(options)))
    return results


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
