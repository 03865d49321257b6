"""`ScopedPlanner`: plans a model's step block by block, or as a whole if that can be."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import nn

from remat.blockwise.choose import NEAR_MIN, Choice, choose, least_peak_bytes
from remat.blockwise.plan import AS_IT_IS, CHECKPOINTED, PLANNED, BlockCall, BlocksPlan
from remat.blockwise.step import BlockStep
from remat.errors import DocumentError, InfeasibleBudget, TraceError
from remat.frontend.blocks.block_options import PlannedWay, Ways, reason
from remat.frontend.blocks.candidates import Offer, budget_of, with_inputs
from remat.frontend.blocks.dry_run import SeenCall
from remat.frontend.blocks.fsdp2 import check_whole, is_sharded
from remat.frontend.blocks.menus import Menus
from remat.frontend.blocks.module_state import python_restored
from remat.frontend.blocks.patching import checkpointing_off
from remat.frontend.blocks.runtime import PlannedCall, ReadyBlocks
from remat.frontend.blocks.selection import settled
from remat.frontend.capture.model.checkpoints import checkpointing_disabled
from remat.frontend.planning.options import OptimizeOptions
from remat.frontend.planning.plan_cache import Entry
from remat.frontend.planning.planner import Planner
from remat.frontend.runtime.guards import Call, Signature, Watch
from remat.frontend.runtime.module import Runnable

logger = logging.getLogger("remat")

MODEL, BLOCKS, AUTO = SCOPES = ("model", "blocks", "auto")
"""What is planned: the whole model, its repeated blocks, or what can be of these."""

_CLEARLY = 0.8
"""Times of what is planned and of what is run once are not measured alike: only a smaller share of
the extra time counts as less."""


@dataclass(frozen=True)
class BlockPlanned:
    """The plan of a step, what runs, and whether everything in it was solved before, at other
    sizes."""

    plan: BlocksPlan
    calls: tuple[PlannedCall, ...]
    reused: bool


def block_plan(
    model: nn.Module,
    call: Call,
    options: OptimizeOptions,
    why: str = "",
    menus: Menus | None = None,
    allowed_bytes: int = 0,
) -> BlockPlanned:
    """A step planned block by block. What was solved for blocks goes to `menus`, and is used again.
    It may take `allowed_bytes` in any case. Where blocks cannot be captured, planning their parts
    is one way, and running them again as a whole another: the better one is taken.

    Raises `TraceError` where the model has no blocks, `InfeasibleBudget`.
    """
    menus = menus or Menus()
    ways = Ways(options, lambda text: logger.info("planning by blocks: %s", text), menus)
    sides: list[_Side] = []
    with python_restored(model), checkpointing_disabled():
        with suppress(TraceError):  # of blocks that call none of their parts
            sides.append(_side(model, call, options, ways, whole=False))
        if not sides or any(PLANNED not in offer.how for offer in sides[0].offers):
            sides.append(_side(model, call, options, ways, whole=True))
    # What parts save together is never less than what their block saves: it may be more.
    baseline_bytes = min(side.step.peak_bytes([0] * len(side.offers)) for side in sides)
    budget_bytes = budget_of(options, baseline_bytes, model)
    least_bytes = min(least_peak_bytes(side.step) for side in sides) if allowed_bytes else 0
    if allowed_bytes and (budget_bytes is not None or least_bytes <= allowed_bytes):
        budget_bytes = max(budget_bytes or 0, allowed_bytes)
    plans: list[BlockPlanned] = []
    refused: list[InfeasibleBudget] = []
    for side in sides:
        try:
            found = choose(side.step, budget_bytes)
        except InfeasibleBudget as error:
            refused.append(error)
        else:
            plans.append(_planned(side, found, budget_bytes, baseline_bytes, ways, why))
    if not plans:
        raise _infeasible(refused, () if why else sides[0].whys)
    if budget_bytes is None:
        smallest_bytes = min(each.plan.peak_bytes for each in plans)
        plans = [p for p in plans if p.plan.peak_bytes <= NEAR_MIN * smallest_bytes]
    extra_s = [each.plan.time_s - each.plan.baseline_time_s for each in plans]
    return plans[-1 if extra_s[-1] < _CLEARLY * extra_s[0] else 0]


@dataclass(frozen=True)
class _Side:
    """A step as it can be chosen for: what each call may run as."""

    step: BlockStep
    offers: list[Offer]
    planned: list[tuple[PlannedWay, ...]]
    whys: tuple[str, ...]
    """Why blocks could not be captured, and parts of these: a line for each."""


def _side(
    model: nn.Module, call: Call, options: OptimizeOptions, ways: Ways, *, whole: bool
) -> _Side:
    seen, whys = settled(model, call, options, ways, whole=whole)
    planned = [() if each.measured else tuple(ways.of(each)) for each in seen.calls]
    calls = Counter(id(each.site.module) for each in seen.calls)
    offers: list[Offer] = []
    for each, own in zip(seen.calls, planned, strict=True):
        runs = calls[id(each.site.module)] * options.in_flight
        offers.append(_offer(each, own, ways, whys, runs))
    offers = with_inputs(offers, seen)
    found = tuple(offer.ways for offer in offers)
    step = BlockStep(found, seen.events, options.in_flight, seen.outside_bytes)
    return _Side(step, offers, planned, tuple(whys.values()))


def _infeasible(refused: Sequence[InfeasibleBudget], whys: Sequence[str]) -> InfeasibleBudget:
    """The error with the smallest peak, and what stands in the way of a smaller one."""
    least = min(refused, key=lambda error: error.min_feasible_bytes or 0)
    if not whys:
        return least
    return InfeasibleBudget(
        f"{least}. Modules in it that could not be captured: {len(whys)}, the first because "
        f"{whys[0]}",
        min_feasible_bytes=least.min_feasible_bytes,
    )


def _planned(
    side: _Side,
    choice: Choice,
    budget_bytes: int | None,
    baseline_bytes: int,
    ways: Ways,
    why: str,
) -> BlockPlanned:
    peak_bytes = side.step.peak_bytes(choice.ways)
    calls: list[BlockCall] = []
    parts: list[PlannedCall] = []
    for offer, own, number in zip(side.offers, side.planned, choice.ways, strict=True):
        site, how = offer.call.site, offer.how[number]
        chosen = own[number] if own else None
        plan = None if chosen is None else chosen.plan
        way, kept = offer.ways[number], offer.ways[0]
        calls.append(BlockCall(site.path, site.kind, how, way, kept, plan, offer.why))
        compiled = None if chosen is None else chosen.compiled
        again = bool(own) or CHECKPOINTED in offer.how
        parts.append(PlannedCall(site.path, how, offer.call.key, compiled, plan, again))
    plan = BlocksPlan(
        budget_bytes=peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=peak_bytes,
        baseline_bytes=baseline_bytes,
        bound_s=choice.bound_s,
        calls=tuple(calls),
        cost_source=ways.cost_source,
        why=why,
    )
    return BlockPlanned(plan, tuple(parts), ways.reused)


def _offer(
    seen: SeenCall, planned: tuple[PlannedWay, ...], ways: Ways, whys: dict[int, str], runs: int
) -> Offer:
    """Of a call of what `runs` so often before it could be run again: other runs change buffers."""
    if not planned:
        module = seen.site.module
        has_buffers = any(True for _ in module.buffers())
        found = seen.measured[:1] if runs > 1 and has_buffers else seen.measured
        why = whys.get(id(module)) or ways.why(seen)
        return Offer(seen, found, (AS_IT_IS, CHECKPOINTED)[: len(found)], why=why)
    own = tuple(w.way for w in planned)
    return Offer(seen, own, (PLANNED,) * len(own), tuple(w.inputs for w in planned))


@dataclass
class BlocksEntry(Entry):
    """A step planned block by block."""

    calls: tuple[PlannedCall, ...] = ()

    def kept(self) -> KeptBlocks:
        """Without the model."""
        assert isinstance(self.plan, BlocksPlan)
        return KeptBlocks(self.plan, self.calls, self.ready.training, self.reused)


@contextmanager
def _telling(why: str, remedy: str) -> Iterator[None]:
    """Within it, errors tell `why` the model is planned by blocks, if nobody asked for that, and
    how it could be planned as a whole."""
    try:
        yield
    except (TraceError, InfeasibleBudget) as error:
        if not why:
            raise
        text = f"{error}. It is planned by blocks, as it cannot be as a whole: {why}{remedy}"
        if isinstance(error, TraceError):
            raise TraceError(text) from error
        raise InfeasibleBudget(text, min_feasible_bytes=error.min_feasible_bytes) from error


@dataclass(frozen=True)
class KeptBlocks:
    """A step planned block by block, without its model."""

    plan: BlocksPlan
    calls: tuple[PlannedCall, ...]
    training: bool
    reused: bool = False

    def bound(self, model: nn.Module) -> BlocksEntry:
        """For this model."""
        ready = ReadyBlocks(model, self.calls, self.training)
        return BlocksEntry(ready, None, self.plan, reused=self.reused, calls=self.calls)


class ScopedPlanner(Planner):
    """Plans a step as `options.scope` says."""

    def ready(self, watch: Watch, call: Call) -> Runnable:
        """As it is; of batches in flight the first has gradients to add to as well, so that there
        is one plan for all of them."""
        if self.options.in_flight > 1:
            for parameter in watch.model.parameters():
                if parameter.requires_grad and parameter.grad is None:
                    parameter.grad = torch.zeros_like(parameter)
        return super().ready(watch, call)

    @cached_property
    def _menus(self) -> Menus:
        return Menus()

    def _plan(self, model: nn.Module, call: Call, key: Signature) -> Entry:
        why = remedy = ""
        if self.options.scope == AUTO and is_sharded(model):
            why = "its parameters are sharded"
        elif self.options.scope != BLOCKS:
            check_whole(model)
            try:
                return super()._plan(model, call, key)
            except (TraceError, DocumentError) as error:
                if self.options.scope != AUTO:
                    raise
                why, remedy = reason(error), "".join(str(error).partition(" Remedy:")[1:])
        self.timings_s = {}
        with self._timed("blocks"), checkpointing_off(model), _telling(why, remedy):
            found = self._block_plan(model, call, why)
        is_news = not found.reused and (found.plan.unplanned or why)
        level = logging.WARNING if is_news else logging.INFO
        logger.log(level, "planned block by block:\n%s", found.plan)
        return KeptBlocks(found.plan, found.calls, model.training, found.reused).bound(model)

    def _block_plan(self, model: nn.Module, call: Call, why: str) -> BlockPlanned:
        """With what is known of other sizes; without it where nothing of that fits."""
        most_bytes = self._most_bytes()
        if self._menus.is_empty:
            return block_plan(model, call, self.options, why, self._menus, most_bytes)
        try:
            return block_plan(model, call, self.options, why, self._menus, most_bytes)
        except InfeasibleBudget:
            return block_plan(model, call, self.options, why, None, most_bytes)

    def _most_bytes(self) -> int:
        """A share is of the largest step that there was, and "min" is what that one needs: smaller
        ones may take it, too."""
        asked = self.options.budget
        if asked is None or asked.size_bytes is not None:
            return 0
        plans = [entry.plan for entry in self.entries]
        return max((p.budget_bytes for p in plans if isinstance(p, BlocksPlan)), default=0)
