"""Planning one step block by block: candidates of each block call, and the choice among them."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import torch
from torch import nn

from remat.blockwise.block_step import (
    AS_IT_IS,
    CHECKPOINTED,
    PLANNED,
    BlockStep,
    CallVariant,
    HostCopies,
    StepOutcome,
    host_stays,
)
from remat.blockwise.blocks_plan import BlocksPlan
from remat.blockwise.choose import (
    NEAR_MINIMUM_FACTOR,
    OptionChoice,
    choose_options,
    minimum_peak_bytes,
)
from remat.blockwise.pareto_options import SavedTensor
from remat.blockwise.step_graph import BlockCall, schedule_of_step
from remat.choice.candidate_log import SLOWER, TAKEN
from remat.choice.offloaded_forms import MIN_BYTES, OffloadLimits
from remat.errors import InfeasibleBudget, TraceError
from remat.frontend.blocks.block_options import BlockSolver, PlannedOption
from remat.frontend.blocks.candidates import (
    CallCandidates,
    host_variants,
    step_limits,
    with_saved_inputs,
)
from remat.frontend.blocks.dry_run import head_growth_bytes
from remat.frontend.blocks.fsdp2 import is_sharded
from remat.frontend.blocks.runtime import PlannedCall, PlannedHostCopies
from remat.frontend.blocks.selection import Selection, select_blocks
from remat.frontend.blocks.step_recorder import DryRunCall, DryRunTooLarge
from remat.frontend.capture.model.attribute_guards import AttributeGuards
from remat.frontend.capture.model.wrapped_code import checkpointing_disabled
from remat.frontend.planning.host_limits import host_limits, reserve_host_memory
from remat.frontend.planning.schedule_reuse import BlockScheduleCache
from remat.frontend.runtime.guards import ModelCall
from remat.graph import Baseline
from remat.limits.budget import Budget
from remat.limits.limits import plan_or_smallest
from remat.passes.offload.copies_in_graph import HANDLE_BYTES
from remat.plan_data import CandidateResult, OffloadFigures, PlanTerms, Status
from remat.plan_options import CheckedOptions
from remat.simulate import simulate

logger = logging.getLogger("remat")

_SIGNIFICANT_RATIO = 0.8
"""Planned operations and blocks in eager mode are timed differently: one alternative counts as
faster only if its extra time is below this fraction of the other's."""


@dataclass(frozen=True)
class PlannedBlocks:
    """The plan of a step whose blocks are planned separately, and the calls to run. `is_all_reused`
    is True if all schedules came from other sizes and none had to be solved.
    `offloaded_sizes_bytes` are those of the tensors that are on the host, of all batches in
    flight."""

    plan: BlocksPlan
    calls: tuple[PlannedCall, ...]
    is_all_reused: bool
    offloaded_sizes_bytes: tuple[int, ...] = ()


def plan_blocks(
    model: nn.Module,
    call: ModelCall,
    options: CheckedOptions,
    not_whole_reason: str = "",
    schedule_cache: BlockScheduleCache | None = None,
    budget_floor_bytes: int = 0,
) -> PlannedBlocks:
    """Plan a step block by block, within one budget for the step.

    Schedules are reused from `schedule_cache`, and new ones added to it. A budget below
    `budget_floor_bytes` is raised to it; so is "min", if a plan fits. If blocks cannot be captured,
    there are two alternatives: to plan their child modules, or to checkpoint them as a whole. The
    better one is returned. `not_whole_reason` says why the model is not planned as a whole, for the
    plan's report.

    Raises `TraceError` if the model has no blocks, and `InfeasibleBudget`.
    """
    schedule_cache = schedule_cache or BlockScheduleCache()
    solver = BlockSolver(
        options, lambda text: logger.info("planning by blocks: %s", text), schedule_cache
    )
    with checkpointing_disabled():
        whole = _block_alternative(model, call, options, solver, keep_uncapturable=True)
        # The child modules of a block together save at least as much as the block.
        baseline_bytes = whole.step.peak_bytes([0] * len(whole.candidates))
        limits = step_limits(options, model)
        budget_bytes = limits.available_bytes(baseline_bytes, whole.selection.dry_run.library_bytes)
        alternatives = [whole]
        if whole.has_uncapturable:
            # A dry run with child modules retains what the code between them saves. If that exceeds
            # the limit, no plan of the child modules fits.
            limit_bytes = max(budget_bytes or 0, whole.checkpointed_bytes)
            # A block may call none of its child modules.
            with suppress(TraceError, DryRunTooLarge):
                parts = _block_alternative(
                    model,
                    call,
                    options,
                    solver,
                    keep_uncapturable=False,
                    limit_bytes=None if is_sharded(model) else limit_bytes,
                    growth_bytes=head_growth_bytes(whole.step.events),
                )
                alternatives.insert(0, parts)
    minimum_bytes = 0
    if budget_floor_bytes:
        minimum_bytes = min(minimum_peak_bytes(a.step) for a in alternatives)
    if budget_floor_bytes and (budget_bytes is not None or minimum_bytes <= budget_floor_bytes):
        budget_bytes = max(budget_bytes or 0, budget_floor_bytes)

    def plan_within(budget: Budget) -> PlannedBlocks:
        return _fastest_blocks_plan(
            alternatives, budget.size_bytes, baseline_bytes, solver, not_whole_reason
        )

    planned = plan_or_smallest(
        plan_within,
        Budget.parse("min" if budget_bytes is None else budget_bytes),
        options.infeasible,
        peak_bytes=lambda planned: planned.plan.peak_bytes + limits.reserve_bytes,
        requested=limits.budget,
    )
    traces = (o.trace for a in alternatives for c in a.candidates for o in c.planned)
    if planned.offloaded_sizes_bytes:
        device = torch.device(next(traces).device)
        host_bytes = sum(planned.offloaded_sizes_bytes)
        reserve_host_memory(device, planned.offloaded_sizes_bytes, host_bytes)
    return planned


def _fastest_blocks_plan(
    alternatives: Sequence[_BlockAlternative],
    budget_bytes: int | None,
    baseline_bytes: int,
    solver: BlockSolver,
    not_whole_reason: str,
) -> PlannedBlocks:
    """Return the plan of the first alternative that fits the budget, or of the last one if its
    extra time is clearly smaller. If `budget_bytes` is None, alternatives fit whose peaks are
    nearly the smallest. `not_whole_reason` is for the plan's report. Raises `InfeasibleBudget`."""
    choices: list[tuple[_BlockAlternative, OptionChoice]] = []
    errors: list[InfeasibleBudget] = []
    try:
        for alternative in alternatives:
            try:
                choices.append((alternative, choose_options(alternative.step, budget_bytes)))
            except InfeasibleBudget as error:
                errors.append(error)
        if not choices:
            failures = {} if not_whole_reason else alternatives[0].selection.failures
            raise _smallest_infeasible_error(errors, list(failures.values()))
    finally:
        errors.clear()  # their tracebacks have this frame: a reference cycle
    if budget_bytes is None:
        limit_bytes = NEAR_MINIMUM_FACTOR * min(c.outcome.peak_bytes for _, c in choices)
        choices = [(a, c) for a, c in choices if c.outcome.peak_bytes <= limit_bytes]
    extra_s = [c.outcome.time_s - a.baseline_time_s for a, c in choices]
    selected = choices[-1 if extra_s[-1] < _SIGNIFICANT_RATIO * extra_s[0] else 0]
    planned = _planned_blocks(*selected, budget_bytes, baseline_bytes, solver, not_whole_reason)
    if len(choices) == 1:
        return planned
    results = tuple(
        CandidateResult(
            a.name,
            TAKEN if a is selected[0] else SLOWER,
            c.outcome.peak_bytes,
            c.outcome.time_s / a.baseline_time_s - 1 if a.baseline_time_s else 0.0,
        )
        for a, c in choices
    )
    return replace(planned, plan=replace(planned.plan, candidates=results))


@dataclass(frozen=True)
class _BlockAlternative:
    """One of the alternatives of `plan_blocks`: a selection of blocks for the step, with the
    candidates of each block call."""

    name: str
    selection: Selection
    candidates: list[CallCandidates]
    step: BlockStep

    @property
    def has_uncapturable(self) -> bool:
        """True if a block call has no planned option."""
        return any(PLANNED not in candidate.option_names for candidate in self.candidates)

    @property
    def baseline_time_s(self) -> float:
        """The time of all blocks without recomputation."""
        return math.fsum(options[0].time_s for options in self.step.options_per_call)

    @property
    def checkpointed_bytes(self) -> int:
        """The peak if every call uses its option with the fewest saved bytes."""
        return self.step.peak_bytes(
            [
                min(range(len(options)), key=lambda n: options[n].saved_bytes)
                for options in self.step.options_per_call
            ]
        )


def _block_alternative(
    model: nn.Module,
    call: ModelCall,
    options: CheckedOptions,
    solver: BlockSolver,
    *,
    keep_uncapturable: bool,
    limit_bytes: int | None = None,
    growth_bytes: int = 0,
) -> _BlockAlternative:
    """Select the blocks of a step, capture and solve them, and return this as an alternative. The
    keywords are for `select_blocks`."""
    selection = select_blocks(
        model,
        call,
        options,
        solver,
        keep_uncapturable=keep_uncapturable,
        limit_bytes=limit_bytes,
        growth_bytes=growth_bytes,
    )
    dry_run, failures = selection.dry_run, selection.failures
    budget = None if options.budget is None else step_limits(options, model).budget_after_reserve
    budget_bytes = 0 if budget is None else budget.size_bytes or 0
    step_bytes = max([budget_bytes, *(event.non_block_bytes for event in dry_run.events)])
    solver.measuring_limit_bytes = max(0, step_bytes - dry_run.constant_bytes)
    call_counts = Counter(id(c.submodule.module) for c in dry_run.calls)
    planned = [() if c.measured_options else tuple(solver.options_of(c)) for c in dry_run.calls]
    candidates: list[CallCandidates] = []
    for block_call, planned_options in zip(dry_run.calls, planned, strict=True):
        forward_count = call_counts[id(block_call.submodule.module)] * options.in_flight
        candidates.append(
            _call_candidates(block_call, planned_options, solver, failures, forward_count)
        )
    candidates = with_saved_inputs(candidates, dry_run)
    step = BlockStep(
        tuple(candidate.options for candidate in candidates),
        dry_run.events,
        options.in_flight,
        dry_run.non_block_bytes,
    )
    limits = _block_host_limits(options, candidates)
    if limits is not None:
        variants = host_variants(candidates, dry_run, step)
        is_on_cpu = all(p.device.type == "cpu" for p in model.parameters())
        handle_bytes = HANDLE_BYTES if is_on_cpu else 0
        if any(variants):
            host = HostCopies(variants, limits.link, limits.host_bytes, handle_bytes)
            step = replace(step, host=host)
    name = "blocks" if keep_uncapturable else "child modules of blocks that cannot be captured"
    return _BlockAlternative(name, selection, candidates, step)


def _block_host_limits(
    options: CheckedOptions, candidates: Sequence[CallCandidates]
) -> OffloadLimits | None:
    """Return the limits of offloading from blocks; None if no block is planned, or the options do
    not allow it."""
    trace = next((c.planned[0].trace for c in candidates if c.planned), None)
    if trace is None:
        return None
    limits = host_limits(options.offload, trace, options.costs, options.cache)
    has_room = limits is not None and (limits.host_bytes is None or limits.host_bytes >= MIN_BYTES)
    return limits if has_room else None


def _smallest_infeasible_error(
    errors: Sequence[InfeasibleBudget], capture_failures: Sequence[str]
) -> InfeasibleBudget:
    """Return the error with the smallest feasible budget, extended by the number of modules that
    could not be captured and the first one's reason."""
    unknown = 2**63  # larger than any minimum
    smallest = min(errors, key=lambda error: error.min_feasible_bytes or unknown)
    if not capture_failures:
        return smallest
    return InfeasibleBudget(
        f"{smallest}. Modules in it that could not be captured: {len(capture_failures)}, the first "
        f"because {capture_failures[0]}",
        min_feasible_bytes=smallest.min_feasible_bytes,
    )


def _planned_blocks(
    alternative: _BlockAlternative,
    choice: OptionChoice,
    budget_bytes: int | None,
    baseline_bytes: int,
    solver: BlockSolver,
    not_whole_reason: str,
) -> PlannedBlocks:
    """Return the plan and the calls to run for the options chosen in an alternative."""
    copies = _copies_by_call(alternative.step, choice.variants)
    sizes_bytes: list[int] = []
    block_calls: list[BlockCall] = []
    planned_calls: list[PlannedCall] = []
    for number, (candidate, variant) in enumerate(
        zip(alternative.candidates, choice.variants, strict=True)
    ):
        index = variant.option
        block, how = candidate.call.submodule, candidate.option_names[index]
        planned = candidate.planned[index] if candidate.planned else None
        plan = None if planned is None else planned.plan
        offloaded: tuple[SavedTensor, ...] = ()
        if planned is not None:
            positions = set(variant.tensors)
            offloaded = tuple(t for t in planned.saved_tensors if t.position in positions)
        sizes_bytes += [t.size_bytes for t in offloaded]
        block_calls.append(
            BlockCall(
                path=block.path,
                class_name=block.class_name,
                how=how,
                option=candidate.options[index],
                baseline_option=candidate.options[0],
                plan=plan,
                unplanned_reason=candidate.unplanned_reason,
                inputs=candidate.held_inputs[index],
                offloaded=offloaded,
            )
        )
        planned_calls.append(
            PlannedCall(
                path=block.path,
                how=how,
                signature=candidate.call.signature,
                lowered=None if planned is None else planned.lowered,
                plan=plan,
                may_recompute=bool(candidate.planned) or CHECKPOINTED in candidate.option_names,
                copies=copies.get(number),
                changes_values=candidate.call.changes_values,
                guards=AttributeGuards() if planned is None else solver.guards_of(candidate.call),
            )
        )
    selection, dry_run = alternative.selection, alternative.selection.dry_run
    baseline_s = alternative.baseline_time_s
    graph, schedule = schedule_of_step(
        alternative.step,
        block_calls,
        choice.outcome,
        Baseline(baseline_bytes, baseline_s),
        dry_run.constant_bytes,
        dry_run.library_bytes,
    )
    timeline = simulate(graph, schedule)
    lowest_s = min(choice.bound_s, timeline.time_s)
    blocks_plan = BlocksPlan(
        status=Status.FEASIBLE,
        budget_bytes=timeline.peak_bytes if budget_bytes is None else budget_bytes,
        peak_bytes=timeline.peak_bytes,
        baseline_peak_bytes=baseline_bytes,
        time_s=timeline.time_s,
        baseline_time_s=baseline_s,
        lower_bound=lowest_s / baseline_s - 1 if baseline_s > 0 else 0.0,
        bound_scope="slots",
        schedule=schedule,
        graph=graph,
        solve={"strategy": "one option for each block"},
        terms=PlanTerms(cost_source=solver.cost_source),
        offload=_block_offload_figures(alternative.step, choice.outcome),
        calls=tuple(block_calls),
        not_whole_reason=not_whole_reason,
        replaced=selection.replaced,
    )
    return PlannedBlocks(
        blocks_plan,
        tuple(planned_calls),
        solver.is_all_reused,
        tuple(sizes_bytes) * alternative.step.in_flight,
    )


def _block_offload_figures(step: BlockStep, outcome: StepOutcome) -> OffloadFigures | None:
    if step.host is None or not outcome.host_bytes:
        return None
    link = step.host.link
    return OffloadFigures(
        outcome.host_bytes,
        outcome.copies_s,
        outcome.waiting_s,
        link.to_host_bytes_per_s,
        link.to_device_bytes_per_s,
    )


def _copies_by_call(
    step: BlockStep, variants: Sequence[CallVariant]
) -> dict[int, PlannedHostCopies]:
    """Return the host copies of the calls that offload, or whose backward starts a reload, by the
    number of the call."""
    stays = host_stays(step)
    offloading = [call for call, variant in enumerate(variants) if variant.tensors]
    reloads = {stays[call].reloaded_before: call for call in offloading}
    return {
        call: PlannedHostCopies(variants[call].tensors, reloads.get(call))
        for call in {*offloading, *reloads}
    }


def _call_candidates(
    call: DryRunCall,
    planned: tuple[PlannedOption, ...],
    solver: BlockSolver,
    failures: Mapping[int, str],
    forward_count: int,
) -> CallCandidates:
    """Return the candidates of a call: its `planned` options, or else its measured ones.

    `forward_count` is how often its block runs before its backward, and `failures` says why modules
    cannot be captured, by the `id` of the module. A block with buffers that runs more than once is
    not checkpointed: the other runs change the buffers before its recomputation.
    """
    if planned:
        options = tuple(planned_option.option for planned_option in planned)
        return CallCandidates(call, options, (PLANNED,) * len(planned), planned)
    module = call.submodule.module
    has_buffers = any(True for _ in module.buffers())
    options = call.measured_options
    if forward_count > 1 and has_buffers:
        options = options[:1]
    names = (AS_IT_IS, CHECKPOINTED)[: len(options)]
    unplanned_reason = failures.get(id(module)) or solver.capture_failure(call)
    return CallCandidates(call, options, names, unplanned_reason=unplanned_reason)
