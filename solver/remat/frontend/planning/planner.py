"""`Planner`: plans a model's step for each new kind of call, and caches the plans.

A repeated call signature costs a comparison. A call that differs only in sizes costs a few 100 ms:
its trace comes from one symbolic capture for all sizes (`trace_cache`), and a schedule that was
solved for other sizes is reused where it is good enough (`schedule_reuse`).
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Self

from torch import nn

from remat.documents.trace import Trace
from remat.errors import GuardError, InfeasibleBudget, SolverTimeout
from remat.frontend.common.garbage_collection import (
    cycles_not_collected,
    older_objects_not_collected,
)
from remat.frontend.common.operators import check_namespaces_allowed
from remat.frontend.common.planning_line import planning_line
from remat.frontend.common.quantized import quantized_operators
from remat.frontend.common.torch_modes import checkpoints_suspended
from remat.frontend.memory.device_memory import auto_limits, reserve_size
from remat.frontend.memory.meter import unique_bytes
from remat.frontend.planning.host_limits import prepare_host_for_trace
from remat.frontend.planning.plan_cache import (
    EntryKey,
    ModelRecord,
    PlanEntry,
    PlannerState,
    ReplanReport,
)
from remat.frontend.planning.schedule_reuse import (
    ScheduleReuse,
    largest_budget,
    superseded_entry_keys,
)
from remat.frontend.planning.solving import PlanningResult, plan_trace, with_measured_costs
from remat.frontend.planning.trace_cache import TraceCache
from remat.frontend.runtime.dispatch import CallsInFlight, PlannedStep, StepProvider
from remat.frontend.runtime.guards import (
    CallSignature,
    ModelCall,
    ModelTracker,
    call_signature,
)
from remat.frontend.runtime.lower import lower_program
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.passes.gradient_accumulation import with_gradient_accumulation
from remat.passes.split.splits import with_recorded_splits
from remat.plan import Plan
from remat.plan_data import with_reserve
from remat.plan_options import MEASURED_BY_SERVICE, CheckedOptions
from remat.rewrite import rewrite

logger = logging.getLogger("remat")

_MAX_REUSED_PLANS = 64
"""Number of cached plans that reuse a schedule; to make such a plan once more takes little time."""

_COLLECTION = {
    "trace": cycles_not_collected,
    "rewrite": cycles_not_collected,
    "lower": cycles_not_collected,
    "solve": older_objects_not_collected,
}
"""How the garbage collector is restricted in a phase: not at all in those that run models."""


def _derived_parameter_bytes(model: nn.Module) -> int:
    """Return the bytes of parameters that are computed from other tensors, as in `functional_call`.
    These other tensors are in memory, too, and are assumed to have the same size."""
    return unique_bytes(p for p in model.parameters() if p.grad_fn is not None)


@contextmanager
def accumulation_explained(accumulates_gradients: bool) -> Iterator[None]:
    """If `accumulates_gradients`, add to an `InfeasibleBudget` that is raised inside of this
    context that gradients to accumulate into are in memory."""
    try:
        yield
    except InfeasibleBudget as error:
        if not accumulates_gradients:
            raise
        raise error.with_hint(
            "This call accumulates into gradients that are already there, which use memory during "
            "the whole step; if accumulation is not intended, call zero_grad(set_to_none=True) "
            "before the forward"
        ) from None


@dataclass
class Planner:
    """Provides the planned steps of a model, one for each kind of call. `timings_s` has the seconds
    of each phase of the latest planning."""

    options: CheckedOptions
    timings_s: dict[str, float] = field(default_factory=dict)
    _entries: OrderedDict[EntryKey, PlanEntry] = field(default_factory=OrderedDict)
    _current: PlanEntry | None = None
    _current_signature: CallSignature | None = None

    def __post_init__(self) -> None:
        self.trace_cache = TraceCache(self.options)
        self._entry_count = 0
        self._calls = CallsInFlight()
        self._in_flight = self.options.in_flight
        self._report = ReplanReport()
        self._has_warned = False

    def current_step(self) -> PlannedStep | None:
        """Return the step that ran or was planned last, None before the first."""
        return None if self._current is None else self._current.step

    @property
    def entries(self) -> list[PlanEntry]:
        """The entries of the plan cache; the one that ran last is at the end."""
        return list(self._entries.values())

    def state(self) -> PlannerState:
        """Return the options and plans without the model, for copies and pickles."""
        entries = tuple((key, entry.record) for key, entry in self._entries.items())
        has_run = self._current is not None
        return PlannerState(self.options, dict(self.timings_s), entries, has_run)

    @classmethod
    def from_state(cls, state: PlannerState, model: nn.Module) -> Self:
        """Create a planner for a model, with the plans of another planner's state."""
        planner = cls(state.options, dict(state.timings_s))
        for key, record in state.entries:
            planner._entries[key] = record.bind(model)
            planner._entry_count = max(planner._entry_count, key.number)
        if state.has_run:
            planner._current = planner.entries[-1]
        return planner

    def copy_for(self, model: nn.Module) -> StepProvider:
        """Return a planner with the same plans for a copy of the model."""
        return type(self).from_state(self.state(), model)

    def rebind(self, model: nn.Module) -> None:
        """Bind the plans to the model's current submodules, after some were replaced; drop the
        plans that do not fit them, and all traces: their guards compare values of the old ones."""
        for key, entry in list(self._entries.items()):
            try:
                self._entries[key] = entry.record.bind(model)
            except (GuardError, AttributeError):  # a submodule of the plan does not exist any more
                del self._entries[key]
        self.trace_cache = TraceCache(self.options)
        self._current_signature = None

    def step_for(self, tracker: ModelTracker, call: ModelCall) -> PlannedStep:
        """Return the planned step for a call. Plan it if no planned step has the call's signature
        and guards that hold."""
        self._count_calls(tracker.model)
        signature = call_signature(tracker, call.structure, call.leaves)
        if self._adds_to_gradients(tracker):
            signature = signature._replace(accumulates_gradients=True)
        current = self._current
        if current is None or signature != self._current_signature or not current.guards.hold():
            current = self._entry_for(signature)
            if current is None:
                with checkpoints_suspended(), self._progress_shown():
                    current = self._plan(tracker.model, call, signature)
                self._add_entry(signature, current)
            self._current, self._current_signature = current, signature
        return current.step

    def _adds_to_gradients(self, tracker: ModelTracker) -> bool:
        """True if the plan must accumulate although no parameter has a `.grad` yet: with several
        calls in flight, each backward adds to the gradients of the others."""
        return self._in_flight > 1

    def note_call(self, outputs: Any) -> None:
        """Count a call of the model with these outputs as in flight."""
        self._calls.add(outputs)

    def _count_calls(self, model: nn.Module) -> None:
        """Set the number of calls in flight to plan for to the number that an earlier step had.
        Warn once if a step has more calls in flight than its plan."""
        calls, name = self._calls, type(model).__name__
        may_replan = self.options.costs != MEASURED_BY_SERVICE
        if may_replan and calls.ended_in_a_row and calls.most > self._in_flight:
            self._in_flight, self._current = calls.most, None
            logger.info("%s is planned for %d calls before a backward", name, calls.most)
        elif calls.pending >= self._in_flight and not self._has_warned:
            self._has_warned = True
            logger.warning(
                "%s is called again before the backward of its last call. The saved tensors of all "
                "calls are in memory, so this step may exceed its budget. A later step is planned "
                "for the number of calls that each step has; pass in_flight= to plan the first "
                "step for it. Run calls without a backward under torch.no_grad(), or release "
                "their outputs before the next call, which frees their saved tensors",
                name,
            )

    @contextmanager
    def _progress_shown(self) -> Iterator[None]:
        """Show the progress of planning inside of this context on a terminal, unless the user's
        callback receives it."""
        options = self.options
        with planning_line(options.progress) as callback:
            self.options = replace(options, progress=callback)
            try:
                yield
            finally:
                self.options = options

    def _entry_for(self, signature: CallSignature) -> PlanEntry | None:
        """Return the entry with this signature whose guards hold, and move it to the end; None
        without such an entry."""
        for key in reversed(self._entries):
            is_for_call = (key.signature, key.in_flight) == (signature, self._in_flight)
            if is_for_call and self._entries[key].guards.hold():
                self._entries.move_to_end(key)
                return self._entries[key]
        return None

    # -- planning ---------------------------------------------------------------------------

    def _plan(self, model: nn.Module, call: ModelCall, key: CallSignature) -> PlanEntry:
        """Return a new entry with the plan of a call's step, for calls with the signature `key`.
        Subclasses override this to plan a model block by block."""
        self.timings_s = {}
        accumulates_gradients = key.accumulates_gradients
        with self._timed("trace"):
            traced, guards = self.trace_cache.step(model, call, key)
            namespaces = self.options.namespaces | quantized_operators(model)
            check_namespaces_allowed((n.target for n in traced.nodes), namespaces)
            if accumulates_gradients:
                traced = with_gradient_accumulation(traced)
            if self.options.cuda_graphs:
                traced = _without_random_recomputation(traced)
            if derived_bytes := _derived_parameter_bytes(model):
                traced = traced.replace(external_bytes=derived_bytes)
        captured = traced
        traced, plan, program, is_reused = self._plan_trace(traced, accumulates_gradients)
        plan = self._with_option_terms(plan)
        prepare_host_for_trace(traced)
        if program is None:
            with self._timed("rewrite"):
                program = rewrite(traced, plan.schedule)
        with self._timed("lower"):
            lowered = lower_program(program, namespaces)
        self._report.log(plan, key, self._entries, self.timings_s, is_reused=is_reused)
        captured = with_recorded_splits(captured, traced.splits)
        return ModelRecord(
            plan,
            is_reused,
            traced,
            captured.storage_bytes,
            lowered=lowered,
            guards=guards,
        ).bind(model)

    def _plan_trace(self, traced: Trace, accumulates_gradients: bool) -> PlanningResult:
        """Return the plan of a trace: with a schedule that was solved for other sizes if one is
        good enough, or the solver has no time; else measure the trace and solve it."""
        limits = self._limits(traced)
        budget = limits.budget_after_reserve
        reuse = None
        if not limits.segments_bytes and self._in_flight == 1:
            reuse = ScheduleReuse.from_entries(traced, self._entries.values())
        if reuse is None:
            measured = self._measure(traced, budget)
            if self._in_flight == 1 and self.options.costs != MEASURED_BY_SERVICE:
                budget = largest_budget(budget, measured, self._largest_budget_bytes())
            return self._plan_measured(measured, budget, limits, accumulates_gradients)
        budget = reuse.budget_at_largest_size(budget)
        reused_plan = reuse.fastest_plan(budget)
        reused = None
        if reused_plan is not None:
            reused = PlanningResult(reuse.trace, reused_plan, is_reused=True)
            is_cache_full = len(reuse.plans) >= self.options.max_plans
            if is_cache_full or reuse.is_near_optimal(reused_plan):
                return reused
        measured = reuse.trace if reuse.has_larger_plan else self._measure(traced, budget)
        try:
            solved = self._plan_measured(measured, budget, limits, accumulates_gradients)
        except SolverTimeout:
            if reused is None:
                raise
            return reused
        if reused is not None and reused.plan.overhead < solved.plan.overhead:
            return reused
        return solved

    def _largest_budget_bytes(self) -> int:
        """Return the largest budget of the earlier plans of the whole model; 0 without one."""
        plans = [entry.plan for entry in self.entries if entry.record.trace is not None]
        return max((plan.requested_budget_bytes for plan in plans), default=0)

    def _measure(self, traced: Trace, budget: Budget) -> Trace:
        """Return the trace with measured costs; unchanged if the service measures them."""
        if self.options.costs == MEASURED_BY_SERVICE:
            return traced
        with self._timed("measure"):
            return with_measured_costs(self.options, traced, budget)

    def _limits(self, traced: Trace) -> Limits:
        """Return the limits that budget and reserve set for a step; without a budget, the free
        memory of the device."""
        reserve = reserve_size(self.options.reserve)
        if self.options.budget is None:
            return auto_limits(traced, reserve)
        return Limits(self.options.budget, reserve.total_bytes)

    def _plan_measured(
        self, traced: Trace, budget: Budget, limits: Limits, accumulates_gradients: bool
    ) -> PlanningResult:
        """Return the plan of a trace with costs within `budget`, solved in this process or by the
        service."""
        if limits.budget_after_reserve != budget:  # earlier steps had a larger one
            limits = limits.with_budget(budget)
        options = replace(self.options, in_flight=self._in_flight)
        with (
            accumulation_explained(accumulates_gradients and self._in_flight == 1),
            self._timed("solve"),
        ):
            return plan_trace(options, traced, limits)

    def _with_option_terms(self, plan: Plan) -> Plan:
        """Return the plan with the options that its terms record: reserve and CUDA graphs."""
        plan = with_reserve(plan, reserve_size(self.options.reserve).total_bytes)
        if self.options.cuda_graphs:
            plan = replace(plan, terms=replace(plan.terms, cuda_graphs=True))
        return plan

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        """Record the seconds of a phase, spent inside of this context, in `timings_s`. The cyclic
        garbage collector, which would search the captured graph several times, is off in phases
        that run no model, and leaves out older objects while solving."""
        start = time.perf_counter()
        with _COLLECTION.get(phase, nullcontext)():
            yield
        self.timings_s[phase] = time.perf_counter() - start

    def _add_entry(self, signature: CallSignature, entry: PlanEntry) -> None:
        """Add an entry to the plan cache; remove entries that it replaces, or that are too many."""
        budget = self.options.budget
        if budget is not None and budget.size_bytes is None:  # a budget in bytes suits all sizes
            for superseded_key in superseded_entry_keys(entry, self._entries):
                del self._entries[superseded_key]
        self._entry_count += 1
        self._entries[EntryKey(signature, self._in_flight, self._entry_count)] = entry
        solved = [key for key, entry in self._entries.items() if not entry.record.is_reused]
        if len(solved) > self.options.max_plans:
            del self._entries[solved[0]]
            logger.warning(
                "more than %d kinds of inputs were planned; dropping the least recently used plan. "
                "Pad inputs to fewer shapes, or pass max_plans=...",
                self.options.max_plans,
            )
        reused = [key for key, entry in self._entries.items() if entry.record.is_reused]
        if len(reused) > _MAX_REUSED_PLANS:
            del self._entries[reused[0]]


def _without_random_recomputation(trace: Trace) -> Trace:
    """Return the trace whose random operations must not be recomputed: a CUDA graph capture cannot
    read the RNG state of their first run."""
    nodes = (
        n.model_copy(update={"recomputable": n.recomputable and not n.random}) for n in trace.nodes
    )
    return trace.replace(nodes=tuple(nodes))
