"""`ScopedPlanner`: plans a model's step as a whole if that is possible, else block by block."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import nn

from remat.blockwise.blocks_plan import BlocksPlan
from remat.errors import DocumentError, InfeasibleBudget, TraceError
from remat.frontend.blocks.block_options import short_failure_reason
from remat.frontend.blocks.block_planning import PlannedBlocks, plan_blocks
from remat.frontend.blocks.dry_run import NoBackwardOfBlocks
from remat.frontend.blocks.fsdp2 import (
    check_unsharded,
    is_dtensor,
    is_sharded,
    unreduced_gradients,
)
from remat.frontend.blocks.module_state import layer_checkpointing_disabled
from remat.frontend.blocks.runtime import BoundBlocks, PlannedCall, StepWithoutBlocks
from remat.frontend.capture.model.attribute_guards import AttributeGuards
from remat.frontend.planning.plan_cache import PlanEntry, PlanRecord
from remat.frontend.planning.planner import Planner, accumulation_explained
from remat.frontend.planning.schedule_reuse import BlockScheduleCache
from remat.frontend.runtime.dispatch import PlannedStep
from remat.frontend.runtime.guards import (
    CallSignature,
    ModelCall,
    ModelTracker,
    call_signature,
)
from remat.limits.limits import INFEASIBLE_ERROR
from remat.limits.options import OUTPUTS_LOSS, differentiated_with
from remat.plan_options import AUTO, BLOCKS

logger = logging.getLogger("remat")


@contextmanager
def _block_errors_explained(not_whole_reason: str, remedy: str) -> Iterator[None]:
    """Add to errors of this context why the model is planned by blocks, and how it could be planned
    as a whole; nothing if `not_whole_reason` is "" because the user requested blocks."""
    try:
        yield
    except NoBackwardOfBlocks:
        raise
    except (TraceError, InfeasibleBudget) as error:
        if not not_whole_reason:
            raise
        hint = (
            "The model is planned by blocks because it cannot be planned as a whole: "
            f"{not_whole_reason}{remedy}"
        )
        if isinstance(error, TraceError):
            raise TraceError(f"{error}. {hint}") from error
        raise error.with_hint(hint) from error


@contextmanager
def _gradients_allocated(model: nn.Module) -> Iterator[None]:
    """Within the context, give parameters without a gradient one of zeros."""
    without = [p for p in model.parameters() if p.requires_grad and p.grad is None]
    try:
        for parameter in without:
            parameter.grad = torch.zeros_like(parameter)
        yield
    finally:
        for parameter in without:
            parameter.grad = None


@dataclass(frozen=True, kw_only=True)
class BlocksRecord(PlanRecord):
    """A plan of a model block by block. `returned` is for `BoundBlocks`."""

    calls: tuple[PlannedCall, ...]
    training: bool
    returned: str | Sequence[str] | None = None

    def bind(self, model: nn.Module) -> PlanEntry:
        """Return a new entry with this plan, whose step runs on `model`."""
        step = BoundBlocks(model, self.calls, self.training, self.returned)
        guards = AttributeGuards.of_submodules((call.path, call.guards) for call in self.calls)
        return PlanEntry(self, step, guards.bind(model))


class ScopedPlanner(Planner):
    """Plans the model as a whole or its blocks separately, as `options.scope` says."""

    @cached_property
    def _schedule_cache(self) -> BlockScheduleCache:
        return BlockScheduleCache()

    def __post_init__(self) -> None:
        super().__post_init__()
        self._steps_without_blocks: dict[CallSignature, StepWithoutBlocks] = {}

    def step_for(self, tracker: ModelTracker, call: ModelCall) -> PlannedStep:
        """Return the planned step for a call; a step without a plan if no block has a backward in
        it."""
        if self._steps_without_blocks:  # most models have none
            signature = call_signature(tracker, call.structure, call.leaves)
            step = self._steps_without_blocks.get(signature)
            if step is not None and not step.is_outdated:
                return step
        try:
            return super().step_for(tracker, call)
        except NoBackwardOfBlocks as error:
            logger.info("%s: %s, so it runs without a plan", type(tracker.model).__name__, error)
            signature = call_signature(tracker, call.structure, call.leaves)
            step = StepWithoutBlocks(error.modules, tracker.model.training)
            self._steps_without_blocks[signature] = step
            return step

    def rebind(self, model: nn.Module) -> None:
        """Bind the plans to the model's current submodules, after some were replaced."""
        self._steps_without_blocks.clear()
        super().rebind(model)

    def _adds_to_gradients(self, tracker: ModelTracker) -> bool:
        """True also with unreduced gradients of FSDP2: the sharded parameters then have no
        `.grad`."""
        if super()._adds_to_gradients(tracker):
            return True
        is_any_sharded = any(map(is_dtensor, tracker.parameters))
        return is_any_sharded and bool(unreduced_gradients(tracker.model))

    def _plan(self, model: nn.Module, call: ModelCall, key: CallSignature) -> PlanEntry:
        not_whole_reason = remedy = ""
        if self.options.scope == AUTO and is_sharded(model):
            not_whole_reason = "its parameters are sharded"
        elif self.options.scope != BLOCKS:
            check_unsharded(model)
            try:
                return super()._plan(model, call, key)
            except (TraceError, DocumentError) as error:
                if self.options.scope != AUTO:
                    raise
                not_whole_reason = short_failure_reason(error)
                remedy = "".join(str(error).partition(" Remedy:")[1:])
        self.timings_s = {}
        with (
            self._timed("blocks"),
            layer_checkpointing_disabled(model),
            _block_errors_explained(not_whole_reason, remedy),
            accumulation_explained(key.accumulates_gradients and self._in_flight == 1),
        ):
            planned = self._plan_blocks(model, call, not_whole_reason)
        needs_warning = not planned.is_all_reused and (planned.plan.unplanned or not_whole_reason)
        level = logging.WARNING if needs_warning else logging.INFO
        logger.log(level, "planned block by block:\n%s", planned.plan)
        if self._entries:
            self._report.count_value(key, self._entries, self.timings_s)
        options = self.options
        returned = differentiated_with(options.outputs, options.differentiate)
        if options.outputs != OUTPUTS_LOSS:
            returned = None
        record = BlocksRecord(
            planned.plan,
            planned.is_all_reused,
            calls=planned.calls,
            training=model.training,
            returned=returned,
        )
        return record.bind(model)

    def _plan_blocks(
        self, model: nn.Module, call: ModelCall, not_whole_reason: str
    ) -> PlannedBlocks:
        """Plan with the schedules of other sizes; without them if none of these fits."""
        floor_bytes = self._budget_floor_bytes()
        cache = self._schedule_cache
        options = replace(self.options, in_flight=self._in_flight)
        # With several calls in flight, all of them accumulate, and share one plan.
        with _gradients_allocated(model) if self._in_flight > 1 else nullcontext():
            if cache.is_empty:
                return plan_blocks(model, call, options, not_whole_reason, cache, floor_bytes)
            reusing = replace(options, infeasible=INFEASIBLE_ERROR)
            try:
                return plan_blocks(model, call, reusing, not_whole_reason, cache, floor_bytes)
            except InfeasibleBudget:
                return plan_blocks(model, call, options, not_whole_reason, None, floor_bytes)

    def _budget_floor_bytes(self) -> int:
        """Return the bytes that any step may use: for a percentage or "min", the largest budget of
        a step so far, which other steps may use as well; else 0."""
        budget = self.options.budget
        if budget is None or budget.size_bytes is not None:
            return 0
        plans = [entry.plan for entry in self.entries]
        return max((p.budget_bytes for p in plans if isinstance(p, BlocksPlan)), default=0)
