"""`Planner`: plans a model's step for the inputs that arrive, and keeps the plans.

A second call with the same signature costs a comparison. One that differs in sizes only costs some
hundreds of milliseconds: its trace is read off a capture that was made for all sizes (`captures`),
and where a schedule that was solved for others is good enough (`known`), it is used again.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Self

from torch import nn

from remat.allocator.fitting import solve_within
from remat.costs.pricing import Priced, with_costs
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import GuardError, InfeasibleBudget, SolverTimeout
from remat.frontend.common.operators import check_allowed
from remat.frontend.costs.measure import measure
from remat.frontend.memory.auto_budget import available
from remat.frontend.memory.reserve import reserved
from remat.frontend.planning.options import ELSEWHERE, OptimizeOptions
from remat.frontend.planning.plan_cache import Entry, Kept
from remat.frontend.planning.schedule_reuse import Known, outgrown
from remat.frontend.planning.trace_cache import Captures
from remat.frontend.runtime.guards import Call, Signature, Watch, signature
from remat.frontend.runtime.lower import compile_program
from remat.frontend.runtime.module import Ready, Runnable, Source
from remat.limits.budget import Budget
from remat.limits.reserve import less_reserve, telling
from remat.passes.accumulation import with_accumulation
from remat.passes.draws import drawn_once
from remat.plan import Plan
from remat.planned import with_reserve
from remat.rewrite import rewrite
from remat.schedule import Schedule
from remat.solve import solve

logger = logging.getLogger("remat")

_MOST_SIZES = 64
"""Programs that are kept: those of sizes that nothing was solved for are made again in no time."""


class _Planned(NamedTuple):
    """A trace with costs, its plan, the program if it was made elsewhere, and whether nothing was
    solved for it."""

    trace: Trace
    plan: Plan
    program: Program | None = None
    reused: bool = False


@dataclass
class Planner:
    """The source of a module's programs. `timings_s` tells where the last planning's time went."""

    options: OptimizeOptions
    timings_s: dict[str, float] = field(default_factory=dict)
    _entries: OrderedDict[Signature, Entry] = field(default_factory=OrderedDict)
    _last: Runnable | None = None
    _last_key: Signature | None = None

    def __post_init__(self) -> None:
        self.captures = Captures(self.options)

    def current(self) -> Runnable | None:
        """The program that ran last, or was planned last."""
        return self._last

    @property
    def entries(self) -> list[Entry]:
        """What was planned, the one that ran last at the end."""
        return list(self._entries.values())

    def kept(self) -> Kept:
        """All of it but the model: copies and pickles have this."""
        entries = [(key, entry.kept()) for key, entry in self._entries.items()]
        return Kept(self.options, dict(self.timings_s), tuple(entries), self._last is not None)

    @classmethod
    def of(cls, kept: Kept, model: nn.Module) -> Self:
        """The same plans for a copy of the model."""
        found = cls(kept.options, dict(kept.timings_s))
        for key, entry in kept.entries:
            found._entries[key] = entry.bound(model)
        if kept.has_run:
            found._last = found.entries[-1].ready
        return found

    def rebind(self, model: nn.Module) -> Source:
        """As `of`."""
        return type(self).of(self.kept(), model)

    def follow(self, model: nn.Module) -> None:
        """The model is made of other modules now: plans that fit run with those."""
        for key, entry in list(self._entries.items()):
            try:
                self._entries[key] = entry.kept().bound(model)
            except (GuardError, AttributeError):  # of a module that is gone
                del self._entries[key]
                self.captures = Captures(self.options)
        self._last_key = None

    def ready(self, watch: Watch, call: Call) -> Runnable:
        """The program for a call; planned now where the call is of a new kind."""
        key = signature(watch, call.structure, call.leaves)
        if key == self._last_key and self._last is not None:
            return self._last
        entry = self._entries.get(key)
        if entry is None:
            entry = self._plan(watch.model, call, key)
            self._keep(key, entry)
        self._entries.move_to_end(key)
        self._last, self._last_key = entry.ready, key
        return entry.ready

    # -- planning ---------------------------------------------------------------------------

    def _plan(self, model: nn.Module, call: Call, key: Signature) -> Entry:
        self.timings_s = {}
        accumulating = key.accumulating
        with self._timed("trace"):
            traced = self.captures.trace(model, call, key)
            check_allowed((n.target for n in traced.nodes), self.options.namespaces)
            if accumulating:
                traced = with_accumulation(traced)
            if self.options.cuda_graphs:
                traced = drawn_once(traced)
        nominal_bytes = traced.storages
        traced, plan, program, reused = self._planned(traced, accumulating)
        plan = self._noted(plan)
        if program is None:
            with self._timed("rewrite"):
                program = rewrite(traced, plan.schedule)
        with self._timed("lower"):
            compiled = compile_program(program, self.options.namespaces)
            ready = Ready(compiled, model, plan)
        self._tell(traced, plan, reused=reused, accumulating=accumulating)
        return Entry(ready, traced, plan, nominal_bytes, reused)

    def _planned(self, traced: Trace, accumulating: bool) -> _Planned:
        """Measured and solved for, unless what is known is good enough."""
        budget, segments_bytes = self._limits(traced)
        known = None if segments_bytes else Known.of(traced, self._entries.values())
        if known is None:
            measured = self._measured(traced)
            return _Planned(*self._solve(measured, budget, segments_bytes, accumulating))
        budget = known.budget(budget)
        best = known.plan(budget)
        if best is not None:
            is_last = len(known.solved) >= self.options.max_plans
            if is_last or known.is_enough(best):
                return _Planned(known.trace, best, reused=True)
        priced = known.trace if known.is_smaller else self._measured(traced)
        try:
            solved = self._solve(priced, budget, None, accumulating)
        except SolverTimeout:
            if best is None:
                raise
            return _Planned(known.trace, best, reused=True)
        if best is not None and best.overhead < solved[1].overhead:
            return _Planned(known.trace, best, reused=True)
        return _Planned(*solved)

    def _measured(self, traced: Trace) -> Trace:
        if self.options.costs == ELSEWHERE:
            return traced
        with self._timed("measure"):
            costs = self.options.costs or traced.device.split(":")[0]
            return measure(traced, device=costs, cache=self.options.cache)

    def _limits(self, traced: Trace) -> tuple[Budget, int | None]:
        """The budget without what is reserved of it, and what segments may take where it is what
        the device has free."""
        budget, left = self.options.budget, reserved(self.options.reserve)
        if budget is None:
            found = available(traced, missing_bytes=left.missing_bytes)
            return Budget.parse(found.budget_bytes), found.reserved_bytes
        if left.total_bytes:
            budget = Budget.parse(less_reserve(budget, left.total_bytes))
        return budget, None

    def _solve(
        self, traced: Trace, budget: Budget, segments_bytes: int | None, accumulating: bool
    ) -> tuple[Trace, Plan, Program | None]:
        """The trace with costs, the plan, and its program if it was made elsewhere."""
        options = self.options
        programs: dict[Schedule, Program] = {}

        def once(budget: Budget) -> Plan:
            if options.service is None:
                return solve(traced, budget, options.strategy, progress=options.progress)
            assert not isinstance(budget.given, float)
            plan, programs[plan.schedule] = options.service(traced, budget.given)
            return plan

        try:
            with self._timed("solve"):
                with telling(reserved(options.reserve).total_bytes):
                    first = once(budget)
                if not traced.measured:
                    traced = _with_costs_of_plan(traced, first)
                plan = solve_within(
                    traced,
                    budget,
                    lambda asked: first if asked == budget else once(asked),
                    reserved_bytes=segments_bytes,
                )
            return traced, plan, programs.get(plan.schedule)
        except InfeasibleBudget as error:
            if not accumulating:
                raise
            raise InfeasibleBudget(
                f"{error} This call accumulates into gradients that are already there, which takes "
                "their memory for the whole step; call zero_grad(set_to_none=True) before the "
                "forward if accumulation is not meant.",
                min_feasible_bytes=error.min_feasible_bytes,
            ) from None

    def _noted(self, plan: Plan) -> Plan:
        """With what was asked for beside the budget."""
        plan = with_reserve(plan, reserved(self.options.reserve).total_bytes)
        if self.options.cuda_graphs:
            plan = replace(plan, stats={**plan.stats, "cuda_graphs": True})
        return plan

    @contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.timings_s[phase] = time.perf_counter() - start

    def _keep(self, key: Signature, entry: Entry) -> None:
        budget = self.options.budget
        if budget is not None and budget.size_bytes is None:  # else all sizes had the same
            for old in outgrown(entry, self._entries):
                del self._entries[old]
        self._entries[key] = entry
        solved = [key for key, entry in self._entries.items() if not entry.reused]
        if len(solved) > self.options.max_plans:
            del self._entries[solved[0]]
            logger.warning(
                "more than %d kinds of inputs were planned; the least recently used plan is "
                "forgotten. Pad inputs to fewer shapes, or pass max_plans=...",
                self.options.max_plans,
            )
        reused = [key for key, entry in self._entries.items() if entry.reused]
        if len(reused) > _MOST_SIZES:
            del self._entries[reused[0]]

    def _tell(self, traced: Trace, plan: Plan, *, reused: bool, accumulating: bool) -> None:
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.timings_s.items())
        why = " for gradient accumulation" if accumulating else ""
        if not self._entries:
            logger.info("planned%s: %r (%s)", why, plan, spent)
        elif reused:
            what = plan.stats["strategy"]
            logger.info("inputs changed%s: %r by %s (%s)", why, plan, what, spent)
        else:
            logger.warning("inputs changed: planned anew%s: %r (%s)", why, plan, spent)


def _with_costs_of_plan(traced: Trace, plan: Plan) -> Trace:
    """Costs as they were measured where the plan was made."""
    source = str(plan.stats.get("cost_source", "as given"))
    return with_costs(
        traced,
        {o.name: Priced(o.cost_s, o.workspace_bytes, source) for o in plan.graph.operations},
    )
