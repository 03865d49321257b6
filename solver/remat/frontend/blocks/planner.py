"""`ScopedPlanner`: plans a model's step block by block, or as a whole if that can be."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from remat.blockwise.choose import choose
from remat.blockwise.plan import AS_IT_IS, CHECKPOINTED, PLANNED, BlockCall, BlocksPlan
from remat.blockwise.step import BlockStep, Way
from remat.budget import Budget
from remat.errors import DocumentError, TraceError
from remat.frontend.blocks.observe import Observation, SeenCall
from remat.frontend.blocks.running import PlannedCall, ReadyBlocks
from remat.frontend.blocks.settled import settled
from remat.frontend.blocks.sharded import check_whole, here, is_sharded
from remat.frontend.blocks.swapped import checkpointing_off
from remat.frontend.blocks.ways import PlannedWay, Ways, reason
from remat.frontend.device_memory import left_on
from remat.frontend.entries import Entry
from remat.frontend.meter import unique_bytes
from remat.frontend.options import OptimizeOptions
from remat.frontend.planner import Planner
from remat.frontend.reserve import reserved
from remat.frontend.runtime.guards import Call, Signature
from remat.reserve import less_reserve

logger = logging.getLogger("remat")

MODEL, BLOCKS, AUTO = SCOPES = ("model", "blocks", "auto")
"""What is planned: the whole model, its repeated blocks, or what can be of these."""


@dataclass(frozen=True)
class _Offer:
    """What one call may run as. `ways` and `how` go together; `planned` where it is captured."""

    call: SeenCall
    ways: tuple[Way, ...]
    how: tuple[str, ...]
    planned: tuple[PlannedWay, ...] = ()
    why: str = ""


def block_plan(
    model: nn.Module, call: Call, options: OptimizeOptions, why: str = ""
) -> tuple[BlocksPlan, list[PlannedCall]]:
    """The plan of a step, block by block, and what runs.

    Raises `TraceError` where the model has no blocks, `InfeasibleBudget`.
    """
    ways = Ways(options, lambda text: logger.info("planning by blocks: %s", text))
    observation, whys = settled(model, call, options, ways)
    offers = [_offer(seen, ways, whys) for seen in observation.calls]
    offers = _with_inputs(offers, observation)
    step = BlockStep(tuple(o.ways for o in offers), observation.events)
    baseline_bytes = step.peak_bytes([0] * len(offers))
    budget_bytes = _budget_bytes(options, baseline_bytes, model)
    choice = choose(step, budget_bytes)
    peak_bytes = step.peak_bytes(choice.ways)
    calls: list[BlockCall] = []
    parts: list[PlannedCall] = []
    for offer, number in zip(offers, choice.ways, strict=True):
        site, how = offer.call.site, offer.how[number]
        chosen = offer.planned[number] if offer.planned else None
        plan = None if chosen is None else chosen.plan
        way, kept = offer.ways[number], offer.ways[0]
        calls.append(BlockCall(site.path, site.kind, how, way, kept, plan, offer.why))
        compiled = None if chosen is None else chosen.compiled
        parts.append(PlannedCall(site.path, how, offer.call.key, compiled, plan))
    plan = BlocksPlan(
        budget_bytes=peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=peak_bytes,
        baseline_bytes=baseline_bytes,
        bound_s=choice.bound_s,
        calls=tuple(calls),
        cost_source=ways.cost_source,
        why=why,
    )
    return plan, parts


def _offer(seen: SeenCall, ways: Ways, whys: dict[int, str]) -> _Offer:
    if seen.measured:
        why = whys.get(id(seen.site.module)) or ways.why(seen)
        return _Offer(seen, seen.measured, (AS_IT_IS, CHECKPOINTED), (), why)
    found = tuple(ways.of(seen))
    return _Offer(seen, tuple(w.way for w in found), (PLANNED,) * len(found), found)


def _with_inputs(offers: Sequence[_Offer], observation: Observation) -> list[_Offer]:
    """With the inputs that each way saves: those that nobody outside holds, and no earlier call,
    whichever way that runs."""
    taken: set[StorageWeakRef] = set(observation.held)
    done: list[_Offer] = []
    for offer in offers:
        storages = offer.call.storages
        sizes = dict(zip(storages, offer.call.sizes_bytes, strict=True))
        everywhere = set(storages)
        ways: list[Way] = []
        for number, way in enumerate(offer.ways):
            saved = set(storages)
            if offer.planned:
                saved = {storages[i] for i in offer.planned[number].inputs}
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


def _budget_bytes(options: OptimizeOptions, baseline_bytes: int, model: nn.Module) -> int | None:
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


@dataclass
class BlocksEntry(Entry):
    """A step planned block by block."""

    calls: tuple[PlannedCall, ...] = ()

    def kept(self) -> KeptBlocks:
        """Without the model."""
        assert isinstance(self.plan, BlocksPlan)
        return KeptBlocks(self.plan, self.calls, self.ready.training)


@dataclass(frozen=True)
class KeptBlocks:
    """A step planned block by block, without its model."""

    plan: BlocksPlan
    calls: tuple[PlannedCall, ...]
    training: bool

    def bound(self, model: nn.Module) -> BlocksEntry:
        """For this model."""
        ready = ReadyBlocks(model, self.calls, self.training)
        return BlocksEntry(ready, None, self.plan, calls=self.calls)


class ScopedPlanner(Planner):
    """Plans a step as `options.scope` says."""

    def _plan(self, model: nn.Module, call: Call, key: Signature) -> Entry:
        why = ""
        if self.options.scope == AUTO and is_sharded(model):
            why = "its parameters are sharded"
        elif self.options.scope != BLOCKS:
            check_whole(model)
            try:
                return super()._plan(model, call, key)
            except (TraceError, DocumentError) as error:
                if self.options.scope != AUTO:
                    raise
                why = reason(error)
        self.timings_s = {}
        with self._timed("blocks"), checkpointing_off(model):
            plan, calls = block_plan(model, call, self.options, why)
        if plan.unplanned or why:
            logger.warning("planned block by block:\n%s", plan)
        else:
            logger.info("planned block by block:\n%s", plan)
        return KeptBlocks(plan, tuple(calls), model.training).bound(model)
