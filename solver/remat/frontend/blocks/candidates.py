"""What each call of a block may run as, with what of its inputs it then saves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.step import Way
from remat.frontend.blocks.dry_run import Observation, SeenCall
from remat.frontend.blocks.fsdp2 import here
from remat.frontend.memory.auto_budget import left_on
from remat.frontend.memory.meter import unique_bytes
from remat.frontend.memory.reserve import reserved
from remat.frontend.planning.options import OptimizeOptions
from remat.limits.budget import Budget
from remat.limits.reserve import less_reserve


@dataclass(frozen=True)
class Offer:
    """The ways of one call, what each of them is called, and the numbers of the inputs that each
    saves: of all of them where nobody says."""

    call: SeenCall
    ways: tuple[Way, ...]
    how: tuple[str, ...]
    inputs: tuple[frozenset[int], ...] = ()
    why: str = ""


def with_inputs(offers: Sequence[Offer], observation: Observation) -> list[Offer]:
    """With the inputs that each way saves: those that nobody outside holds, and no earlier call,
    whichever way that runs."""
    taken: set[StorageWeakRef] = set(observation.held)
    done: list[Offer] = []
    for offer in offers:
        storages = offer.call.storages
        sizes = dict(zip(storages, offer.call.sizes_bytes, strict=True))
        everywhere = set(storages)
        ways: list[Way] = []
        for number, way in enumerate(offer.ways):
            saved = {storages[i] for i in offer.inputs[number]} if offer.inputs else set(storages)
            everywhere &= saved
            more_bytes = sum(sizes[ref] for ref in saved - taken)
            ways.append(
                replace(
                    way,
                    saved_bytes=way.saved_bytes + more_bytes,
                    backward_bytes=way.backward_bytes + more_bytes,
                )
            )
        taken |= everywhere
        done.append(replace(offer, ways=tuple(ways)))
    return done


def budget_of(options: OptimizeOptions, baseline_bytes: int, model: nn.Module) -> int | None:
    """The budget in bytes; None is for the smallest that there is."""
    left = reserved(options.reserve)
    if options.budget is None:
        device = next(p.device for p in model.parameters())
        own = [*model.parameters(), *model.buffers()]
        own += [p.grad for p in model.parameters() if p.grad is not None]
        own_bytes = unique_bytes(map(here, own))
        return left_on(device, own_bytes, missing_bytes=left.missing_bytes).budget_bytes
    budget = options.budget
    if left.total_bytes:
        budget = Budget.parse(less_reserve(budget, left.total_bytes))
    return budget.in_bytes(baseline_bytes)
