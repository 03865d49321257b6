"""`Planner`: plans a model's step for the inputs that arrive, and keeps the plans.

A second call with the same signature costs a comparison. Other shapes are traced anew; where the
graph is the same and the schedule fits the budget with the new sizes (the simulator proves it),
the schedule is used again, else it is solved for.
"""

from __future__ import annotations

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Protocol, Self

from torch import nn

from remat.allocator.fitting import has_expandable_segments, solve_within
from remat.allocator.prediction import is_on_cuda, predict, with_prediction
from remat.blockwise.plan import BlocksPlan
from remat.budget import Budget
from remat.costs.pricing import Priced, with_costs
from remat.costs.roofline import Roofline
from remat.documents.arguments import refs
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import InfeasibleBudget
from remat.frontend.capture.trace import trace as capture
from remat.frontend.costs.cache import CostCache
from remat.frontend.costs.measure import measure
from remat.frontend.device_memory import available
from remat.frontend.operators import NAMESPACES, check_allowed
from remat.frontend.reserve import Reserve, reserved
from remat.frontend.runtime.guards import Call, Signature, Watch, signature
from remat.frontend.runtime.lower import Compiled, compile_program
from remat.frontend.runtime.module import Ready, Runnable, Source
from remat.outputs import HELD
from remat.passes.accumulation import with_accumulation
from remat.passes.draws import drawn_once
from remat.plan import Plan
from remat.progress import Progress
from remat.reserve import less_reserve, telling, with_reserve
from remat.rewrite import rewrite
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Stats
from remat.solve import solve
from remat.strategies import Solution, Strategy

logger = logging.getLogger("remat")

ELSEWHERE = "elsewhere"
"""In `OptimizeOptions.costs`: who solves also measures."""


Service = Callable[[Trace, int | str], tuple[Plan, Program]]
"""What solves in place of this process."""


@dataclass(frozen=True)
class OptimizeOptions:
    """What `remat.optimize` was asked for. Without a `budget`, it is what the device has free."""

    budget: Budget | None
    strategy: Strategy | None = None
    costs: str | Roofline | None = None
    cache: str | CostCache | None = None
    differentiate: str | tuple[str, ...] = "auto"
    max_plans: int = 8
    progress: Callable[[Progress], None] | None = None
    namespaces: frozenset[str] = NAMESPACES
    service: Service | None = None
    reserve: Reserve | None = None
    cuda_graphs: bool = False
    outputs: str = HELD
    scope: str = "model"


@dataclass
class Entry:
    """One planned signature. Without a `trace` if it was not planned as a whole."""

    ready: Runnable
    trace: Trace | None
    plan: Plan | BlocksPlan

    def kept(self) -> KeptEntry:
        """Without the model."""
        assert isinstance(self.ready, Ready)
        assert isinstance(self.plan, Plan)
        assert self.trace is not None
        return KeptWhole(self.ready.compiled, self.trace, self.plan)


class KeptEntry(Protocol):
    """An entry without the model that it is for."""

    def bound(self, model: nn.Module) -> Entry:
        """The entry for a model."""
        ...


@dataclass(frozen=True)
class KeptWhole:
    """A program for the whole model."""

    compiled: Compiled
    trace: Trace
    plan: Plan

    def bound(self, model: nn.Module) -> Entry:
        """The entry for a model."""
        return Entry(Ready(self.compiled, model, self.plan), self.trace, self.plan)


@dataclass(frozen=True)
class Kept:
    """What a planner has found out, without the model that it is for."""

    options: OptimizeOptions
    timings_s: dict[str, float]
    entries: tuple[tuple[Signature, KeptEntry], ...]
    has_run: bool


@dataclass
class Planner:
    """The source of a module's programs. `timings_s` tells where the last planning's time went."""

    options: OptimizeOptions
    timings_s: dict[str, float] = field(default_factory=dict)
    _entries: OrderedDict[Signature, Entry] = field(default_factory=OrderedDict)
    _last: Runnable | None = None
    _last_key: Signature | None = None

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

    def ready(self, watch: Watch, call: Call) -> Runnable:
        """The program for a call; planned now where the call is of a new kind."""
        key = signature(watch, call.structure, call.leaves)
        if key == self._last_key and self._last is not None:
            return self._last
        entry = self._entries.get(key)
        if entry is None:
            entry = self._plan(watch.model, call, accumulating=key.accumulating)
            self._keep(key, entry)
        self._entries.move_to_end(key)
        self._last, self._last_key = entry.ready, key
        return entry.ready

    # -- planning ---------------------------------------------------------------------------

    def _plan(self, model: nn.Module, call: Call, *, accumulating: bool) -> Entry:
        self.timings_s = {}
        with self._timed("trace"):
            traced = capture(
                model,
                call.args,
                call.kwargs,
                differentiate=self.options.differentiate,
                outputs=self.options.outputs,
            )
            check_allowed((n.target for n in traced.nodes), self.options.namespaces)
            if accumulating:
                traced = with_accumulation(traced)
            if self.options.cuda_graphs:
                traced = drawn_once(traced)
        found = self._reuse(traced)
        if found is None:
            if self.options.costs != ELSEWHERE:
                with self._timed("measure"):
                    costs = self.options.costs or traced.device.split(":")[0]
                    traced = measure(traced, device=costs, cache=self.options.cache)
            with self._timed("solve"):
                traced, plan, program = self._solve(traced, accumulating)
                plan = self._noted(plan)
        else:
            (traced, plan), program = found, None
        if program is None:
            with self._timed("rewrite"):
                program = rewrite(traced, plan.schedule)
        with self._timed("lower"):
            compiled = compile_program(program, self.options.namespaces)
            ready = Ready(compiled, model, plan)
        self._tell(traced, plan, reused=found is not None, accumulating=accumulating)
        return Entry(ready, traced, plan)

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

    def _solve(self, traced: Trace, accumulating: bool) -> tuple[Trace, Plan, Program | None]:
        """The trace with costs, the plan, and its program if it was made elsewhere."""
        options = self.options
        budget, segments_bytes = self._limits(traced)
        programs: dict[Schedule, Program] = {}

        def once(budget: Budget) -> Plan:
            if options.service is None:
                return solve(traced, budget, options.strategy, progress=options.progress)
            assert not isinstance(budget.given, float)
            plan, programs[plan.schedule] = options.service(traced, budget.given)
            return plan

        try:
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

    def _reuse(self, traced: Trace) -> tuple[Trace, Plan] | None:
        asked = self.options.budget
        if asked is None or asked.size_bytes is None:
            return None  # these mean another number of bytes for other shapes
        budget_bytes = less_reserve(asked, reserved(self.options.reserve).total_bytes)
        for entry in reversed(self._entries.values()):
            if entry.trace is None or not isinstance(entry.plan, Plan):
                continue
            if _outline(entry.trace) != _outline(traced):
                continue
            priced = _with_costs_of(traced, entry.trace)
            graph, schedule = priced.graph(), entry.plan.schedule
            if _peak_bytes(priced, schedule) <= budget_bytes:
                solution = Solution(schedule)
                reused: Stats = {"strategy": "the schedule solved for other shapes"}
                plan = Plan.of(graph, budget_bytes, solution, reused)
                return priced, self._noted(with_prediction(plan, priced))
        return None

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
        self._entries[key] = entry
        if len(self._entries) > self.options.max_plans:
            self._entries.popitem(last=False)
            logger.warning(
                "more than %d kinds of inputs were planned; the least recently used plan is "
                "forgotten. Pad inputs to fewer shapes, or pass max_plans=...",
                self.options.max_plans,
            )

    def _tell(self, traced: Trace, plan: Plan, *, reused: bool, accumulating: bool) -> None:
        spent = ", ".join(f"{name} {seconds:.2f} s" for name, seconds in self.timings_s.items())
        why = " for gradient accumulation" if accumulating else ""
        if not self._entries:
            logger.info("planned%s: %r (%s)", why, plan, spent)
        elif reused:
            logger.warning("inputs changed: the same schedule fits, used again%s (%s)", why, spent)
        else:
            logger.warning("inputs changed: planned anew%s: %r (%s)", why, plan, spent)


def _peak_bytes(traced: Trace, schedule: Schedule) -> int:
    """The peak as it will be allocated."""
    if not is_on_cuda(traced):
        return simulate(traced.graph(), schedule).peak_bytes
    return predict(traced, schedule).allocated(is_expandable=has_expandable_segments())


def _outline(traced: Trace) -> tuple[object, ...]:
    """Equal for traces of the same operations on the same values, whatever their sizes."""
    nodes = tuple(
        (n.name, n.target, n.view, n.backward, tuple(refs((n.args, *n.kwargs.values()))))
        for n in traced.nodes
    )
    return nodes, traced.accumulating, tuple(o.tangent for o in traced.outputs)


def _with_costs_of_plan(traced: Trace, plan: Plan) -> Trace:
    """Costs as they were measured where the plan was made."""
    source = str(plan.stats.get("cost_source", "as given"))
    return with_costs(
        traced,
        {o.name: Priced(o.cost_s, o.workspace_bytes, source) for o in plan.graph.operations},
    )


def _with_costs_of(traced: Trace, other: Trace) -> Trace:
    """Costs of the same operations at other sizes: good enough to describe a plan that is not
    solved for again."""
    nodes = tuple(
        n.model_copy(
            update={
                "cost_s": o.cost_s,
                "launch_s": o.launch_s,
                "workspace_bytes": o.workspace_bytes,
                "cost_source": "estimated: measured at other sizes",
            }
        )
        for n, o in zip(traced.nodes, other.nodes, strict=True)
    )
    return traced.replace(nodes=nodes)
