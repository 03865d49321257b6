"""The candidates for a compiled step: plans of its variants, and Inductor's own kernels.

Plans are made with a model of Inductor's kernels, which may need more memory than Inductor does. So
what plain torch.compile would run is a candidate, too: a budget at or above its peak is never
refused, and "min" is never more than it. With the option `offload`, so are plans with tensors on
the host, where the others recompute or do not fit. If no candidate fits, the error names one
figure, the smallest feasible budget, and what to do about it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple, cast

import torch
from torch._inductor import config

from remat.choice.candidate_log import CandidateLog
from remat.choice.offload import choose_offloading
from remat.choice.offloadable_step import StepPlan
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import CHOICE_LIMIT_S
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.frontend.common.planning_line import planning_line
from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.problem import (
    CompileProblem,
    OffloadableProblem,
    limit_saved_bytes,
    with_separate_buffers,
)
from remat.frontend.compile.registry import NO_FEEDBACK, ReplanFeedback, UnsplitStep
from remat.frontend.planning.host_limits import offload_limits_here, reserve_host_memory
from remat.graph import Graph
from remat.limits.budget import missing_percent_sign_hint
from remat.limits.limits import Limits
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_options import OffloadOptions
from remat.progress import Clock, ProgressCallback
from remat.report.plan_report import describe_peak
from remat.simulate import baseline_of
from remat.solve import solve
from remat.strategies import Auto, Strategy

MIN_SOLVE_S = 2.0
"""Time for a solve, however long the capture of the kernels took."""

_SMALLEST_PEAK_TIME_S = 2.0
"""Time for finding a small schedule whose peak an error describes."""


class VariantPlan(NamedTuple):
    """A plan of one variant. Where `is_plain`, the graph keeps Inductor's own kernels, which the
    plan describes."""

    problem: CompileProblem
    plan: Plan
    is_plain: bool = False


@dataclass(frozen=True)
class GraphSolver:
    """The solver of one compiled graph's variants.

    `clock` is the time limit of planning, which began with the capture of the kernels; None if the
    strategy has a time limit of its own. `cost_source` describes the costs in the plan.
    """

    strategy: Strategy
    clock: Clock | None
    progress: ProgressCallback | bool | None
    cost_source: str

    def solve(self, graph: Graph, budget: int | str, *, num_remaining: int = 1) -> Plan:
        """Solve a graph for a budget in bytes or "min".

        `num_remaining` variants, this one included, share the remaining time. If it is too short
        for any schedule, as the capture of a large graph took most of it, the solver gets the whole
        time limit once more.
        """
        if self.clock is None:
            return self.plan_within(graph, budget, None)
        limit_s = max(MIN_SOLVE_S, self.clock.remaining_s / num_remaining)
        try:
            return self.plan_within(graph, budget, limit_s)
        except SolverTimeout:
            if limit_s >= self.clock.limit_s:
                raise
            return self.plan_within(graph, budget, self.clock.limit_s)

    def plan_within(self, graph: Graph, budget: int | str, limit_s: float | None) -> Plan:
        """Solve a graph within `limit_s` seconds, or the strategy's own limit if that is None."""
        settings = _SettingsOutsideCacheKey(self.progress, limit_s)
        return cached_plan(graph, budget, self.strategy, settings, self.cost_source)


class _FormSolver:
    """Solves the forms of a step with offloaded tensors. The choice of the tensors may take the
    whole time limit, however long the solves before it took."""

    def __init__(self, solver: GraphSolver, log: CandidateLog) -> None:
        self._solver = solver
        self.log = log
        self.clock = Clock.of(math.inf)
        self.choice_limit_s = CHOICE_LIMIT_S if solver.clock is None else solver.clock.limit_s

    def solve(self, step: OffloadableProblem, budget_bytes: int | None) -> Plan:
        """Solve a form within a budget, None for "min", and add the result to the log."""
        try:
            plan = self._solver.solve(step.graph(), "min" if budget_bytes is None else budget_bytes)
        except (InfeasibleBudget, SolverTimeout) as error:
            self.log.add(str(step), error)
            raise
        self.log.add(str(step), plan)
        return plan


@dataclass(frozen=True)
class _SettingsOutsideCacheKey:
    """The time limit of a solve and who receives its progress. All instances are equal, so that the
    cache of plans ignores them."""

    progress: ProgressCallback | bool | None = field(default=None, compare=False)
    limit_s: float | None = field(default=None, compare=False)


@lru_cache(maxsize=32)
def cached_plan(
    graph: Graph,
    budget: int | str,
    strategy: Strategy,
    settings: _SettingsOutsideCacheKey,
    cost_source: str,
) -> Plan:
    """Solve a graph, or return the cached plan of an equal one: identical blocks that torch
    compiles separately are solved once. `settings` have the time limit and receive the progress."""
    if settings.limit_s is not None:
        strategy = replace(cast(Auto, strategy), time_limit=settings.limit_s)
    with planning_line(settings.progress) as callback:
        plan = solve(graph, budget, strategy, progress=callback)
    return replace(plan, terms=replace(plan.terms, cost_source=cost_source))


def graph_offload_limits(
    options: OffloadOptions | None, joint: CompiledJointGraph, other_host_bytes: int
) -> OffloadLimits | None:
    """Return the limits of offloading for a graph; None if nothing may be offloaded: without the
    option, with CUDA graphs, on other devices, or without a byte of host memory left.

    The step's other graphs have `other_host_bytes` on the host. Raises `BudgetError` for a host
    budget above what is free.
    """
    is_supported = joint.device.type in ("cpu", "cuda") and not config.triton.cudagraphs
    if options is None or options.host_bytes == 0 or not is_supported:
        return None
    with isolated_modes(joint.device):
        limits = offload_limits_here(options.host_bytes, options.link, joint.device)
    if limits.host_bytes is None:
        return limits
    host_bytes = max(0, limits.host_bytes - other_host_bytes)
    return OffloadLimits(limits.link, host_bytes) if host_bytes else None


def prepare_host_for_plan(plan: Plan, device: torch.device) -> None:
    """Pin memory for the offloaded tensors of a plan, if it has any, before its first step. For
    final plans only: other plans of a graph do not run."""
    sizes_bytes = [plan.graph.values[value].size_bytes for value in plan.graph.renewal]
    if sizes_bytes:
        with isolated_modes(device):
            reserve_host_memory(device, sizes_bytes, plan.host_bytes)


@dataclass(frozen=True)
class CandidateSelection:
    """The selection among the candidates of one graph.

    The first of the `problems` is the step that plain torch.compile runs; `plain_bytes` is its
    peak, None where it is no candidate. `baseline` is the step that percentages are relative to,
    with what the step's other graphs save. `offload` are the limits of tensors on the host, None if
    there are to be none. `log` has the result of each candidate.
    """

    problems: Sequence[CompileProblem]
    solver: GraphSolver
    limits: Limits
    baseline: UnsplitStep
    feedback: ReplanFeedback
    plain_bytes: int | None
    offload: OffloadLimits | None = None
    log: CandidateLog = field(default_factory=CandidateLog)

    @cached_property
    def available_bytes(self) -> int | None:
        """The largest peak that a plan may have; None for "min"."""
        return self.limits.available_bytes(self.baseline.peak_bytes)

    def select(self) -> VariantPlan:
        """Return the best candidate. Raises `InfeasibleBudget` if there is none, and
        `SolverTimeout` if there was no time to find one.

        Tensors are offloaded where that is faster than the plan without, or there is none without.
        """
        selected = self._select_candidate()
        plan = selected.plan
        candidates = self.log.results(plan, is_min=self.limits.budget.is_min)
        return (
            selected._replace(plan=replace(plan, candidates=candidates)) if candidates else selected
        )

    def _select_candidate(self) -> VariantPlan:
        """Return the best candidate, as `select`, without the log of candidates in its plan."""
        try:
            without = self._select_without_offload()
        except (InfeasibleBudget, SolverTimeout):
            offloaded = self._select_with_offload(None)
            if offloaded is None:
                raise
            return offloaded
        return self._select_with_offload(without) or without

    def explained(self, error: InfeasibleBudget, title: str, hint: str) -> InfeasibleBudget:
        """Return an error of `select` with a message for the user: the graph's title, the smallest
        budget of the step, the values that need the memory then, and `hint`, unless it is "".

        Plain torch.compile's kernels may need less than any plan. With kernels, a proof is about
        those that remat plans with; without, operations run as planned.
        """
        text, is_proved = str(error), error.is_proved
        min_feasible_bytes, limits = error.min_feasible_bytes, self.limits
        if min_feasible_bytes is not None and not limits.budget.is_min:
            if self.plain_bytes is not None:
                plain_bytes = self.plain_bytes + limits.external_bytes + limits.reserve_bytes
                is_proved = is_proved and plain_bytes >= min_feasible_bytes
                min_feasible_bytes = min(min_feasible_bytes, plain_bytes)
            has_kernels = self.problems[0].joint.kernels is not None
            text = self._infeasible_text(min_feasible_bytes)
            if is_proved:
                subject = "the kernels that remat plans with" if has_kernels else "the operations"
                text += f" This is proved of {subject}, in their order."
            is_proved = is_proved and not has_kernels
        graph = self.problems[0].graph
        with suppress(RematError):
            schedule = solve(graph, "min", Auto(time_limit=_SMALLEST_PEAK_TIME_S)).schedule
            text += f" At the smallest, {describe_peak(graph, schedule)}."
        explained = InfeasibleBudget(
            f"{title}: {text}", min_feasible_bytes=min_feasible_bytes, is_proved=is_proved
        )
        return explained.with_hint(hint) if hint else explained

    def _infeasible_text(self, min_feasible_bytes: int) -> str:
        """Return the text of an error that names the smallest budget, also as a percentage if the
        requested budget is one."""
        limits, baseline_bytes = self.limits, self.baseline.peak_bytes
        budget = limits.budget
        smallest = f"{min_feasible_bytes:,} bytes"
        if budget.share is not None:
            percent = math.ceil(100 * min_feasible_bytes / max(1, baseline_bytes))
            smallest += f' ("{percent}%")'
        external_bytes = limits.external_bytes + limits.reserve_bytes
        if external_bytes and budget.size_bytes is not None:
            smallest += f", of which {format_bytes(external_bytes)} are used outside this graph"
        hint = missing_percent_sign_hint(budget.size_bytes or 101, baseline_bytes)
        return (
            f"no plan fits the budget {budget.requested!r}. Pass a budget of at least {smallest}, "
            f'or "min", or make the batch smaller{hint}.'
        )

    # -- with and without tensors on the host -----------------------------------------------------

    def _select_with_offload(self, without: VariantPlan | None) -> VariantPlan | None:
        """Return the best candidate with offloaded tensors; None if nothing may be offloaded, no
        such plan fits, or `without` recomputes nothing. `without` is the best candidate without
        offloading, None if none fits. The result may be `without` with another plan, if that is
        better."""
        is_min = self.limits.budget.is_min
        may_pay = not is_min if without is None else is_min or _has_recomputations(without.plan)
        if self.offload is None or self.feedback.without_offload or not may_pay:
            return None

        def plan_without() -> StepPlan[OffloadableProblem]:
            if without is None:
                raise InfeasibleBudget("no plan without offloading fits")
            problem = replace(without.problem, graph=without.plan.graph)
            return StepPlan(self._offloadable_problem(problem), without.plan)

        forms = [self._graph_forms(problem) for problem in self.problems]
        for index in range(max(map(len, forms))):
            steps = [
                self._offloadable_problem(
                    replace(problem, graph=graphs[min(index, len(graphs) - 1)])
                )
                for problem, graphs in zip(self.problems, forms, strict=True)
            ]
            if is_min:  # only one of the variants is solved
                steps = [plan_without().step]
            with suppress(InfeasibleBudget, SolverTimeout):
                step, plan = choose_offloading(
                    steps,
                    self.available_bytes,
                    self.offload,
                    _FormSolver(self.solver, self.log),
                    plan_without,
                )
                if without is not None and not plan.graph.renewal:
                    return without._replace(plan=plan)
                if is_min and self.plain_bytes is not None and plan.peak_bytes > self.plain_bytes:
                    return None
                return VariantPlan(step.problem, plan)
        return None

    def _offloadable_problem(self, problem: CompileProblem) -> OffloadableProblem:
        """Return the problem, with the name of its variant, as the planner of offloading takes
        it."""
        return OffloadableProblem(problem, self._variant_name(problem))

    def _variant_name(self, problem: CompileProblem) -> str:
        """Return the name of a problem's variant in the log of candidates, with its pieces."""
        is_first = problem.groups is self.problems[0].groups
        name = "Inductor's fusion" if is_first else "changed fusion"
        pieces = max((split.pieces for split in problem.graph.splits), default=1)
        return name if pieces == 1 else f"in {pieces} pieces, {name}"

    def _select_without_offload(self) -> VariantPlan:
        """Return the best candidate without offloading: a plan; or Inductor's own kernels where
        these fit the budget, and either no plan does, or nothing needs to be recomputed and the
        kernels of an earlier plan exceeded the budget."""
        if self.available_bytes is None:
            return self._select_smallest()
        if not self._plain_kernels_fit(self.available_bytes):
            return self._solve_variants(self.problems)
        problems = self.problems
        share_bytes = self._saved_share_bytes()
        if share_bytes is None or self.baseline.saved_bytes <= share_bytes:
            # Inductor's own kernels fit, so that nothing needs to be recomputed.
            problems = [
                p for p in problems if baseline_of(p.graph).peak_bytes <= self.available_bytes
            ]
            if self.feedback._replace(without_offload=False) != NO_FEEDBACK:
                problems = []  # what Inductor made of the plan did not fit
        with suppress(InfeasibleBudget, SolverTimeout):
            if problems:
                return self._solve_variants(problems)
        return self._plain_candidate()

    def _select_smallest(self) -> VariantPlan:
        """Return the candidate with the smallest peak."""
        if self.plain_bytes is None:
            return self._solve_variants(self.problems)
        if self.feedback.excess_bytes > 0:  # Inductor's kernels for the smallest plan need more
            return self._plain_candidate()
        best = self._solve_variants(self.problems)
        return self._plain_candidate() if best.plan.peak_bytes > self.plain_bytes else best

    # -- single candidates ------------------------------------------------------------------------

    def _plain_kernels_fit(self, available_bytes: int) -> bool:
        """True if the kernels of plain torch.compile are a candidate that fits the budget, without
        the reduction for the excess of other kernels."""
        if self.plain_bytes is None or self.feedback.plain_exceeds:
            return False
        return self.plain_bytes <= available_bytes + self.limits.excess_bytes

    def _plain_candidate(self) -> VariantPlan:
        """Return Inductor's own kernels as a candidate: the step without recomputation."""
        problem = self.problems[0]
        plan = self.solver.solve(problem.graph, baseline_of(problem.graph).peak_bytes)
        self.log.add("the kernels of plain torch.compile", plan)
        return VariantPlan(problem, plan, is_plain=True)

    def _solve_variants(self, problems: Sequence[CompileProblem]) -> VariantPlan:
        """Return the best plan among the variants, without offloading: for "min" the one with the
        smallest peak, else preferably one without recomputation; then the fastest. Raises the error
        with the smallest feasible budget if no variant has a plan."""
        is_min = self.limits.budget.is_min

        def objective(candidate: VariantPlan) -> tuple[float, float]:
            plan = candidate.plan
            return (plan.peak_bytes if is_min else _has_recomputations(plan), plan.time_s)

        candidates: list[VariantPlan] = []
        errors: list[InfeasibleBudget | SolverTimeout] = []
        try:
            for index, problem in enumerate(problems):
                try:
                    plan = self._solve_variant(problem, num_remaining=len(problems) - index)
                    self.log.add(self._variant_name(problem), plan)
                    candidates.append(VariantPlan(problem, plan))
                except (InfeasibleBudget, SolverTimeout) as error:
                    self.log.add(self._variant_name(problem), error)
                    errors.append(error)
            if not candidates:
                raise least_demanding_error(errors)
            return min(candidates, key=objective)
        finally:
            errors.clear()  # their tracebacks have this frame: a reference cycle

    def _solve_variant(self, problem: CompileProblem, num_remaining: int) -> Plan:
        """Return the plan of one variant, for the first form of its graph that has one.
        `num_remaining` variants share the remaining time."""
        *limited_graphs, graph = self._graph_forms(problem)
        budget = "min" if self.available_bytes is None else self.available_bytes
        for limited_graph in limited_graphs:
            with suppress(InfeasibleBudget, SolverTimeout):
                return self.solver.solve(limited_graph, budget, num_remaining=num_remaining)
        with self.limits.infeasible_with_reserve():
            return self.solver.solve(graph, budget, num_remaining=num_remaining)

    def _graph_forms(self, problem: CompileProblem) -> tuple[Graph, ...]:
        """Return the one or two forms of a variant's graph, in the order in which they are solved.

        For a percentage, what the graph saves for its backward is first limited to that percentage,
        too, as other graphs of the step may run before its backward. If that is infeasible, only
        the peak is limited.
        """
        graph = with_separate_buffers(problem.graph, self.feedback.separate_buffers)
        share_bytes = self._saved_share_bytes()
        if self.available_bytes is None or share_bytes is None:
            return (graph,)
        budget_bytes = self.available_bytes + self.limits.excess_bytes
        limited = limit_saved_bytes(replace(problem, graph=graph), budget_bytes, share_bytes)
        return (graph,) if limited is graph else (limited, graph)

    def _saved_share_bytes(self) -> int | None:
        """Return the bytes that the step may save for its backward, by a budget in percent; None
        for other budgets."""
        return self.limits.share_bytes(self.baseline.saved_bytes, self.baseline.peak_bytes)


def least_demanding_error(errors: Sequence[RematError]) -> RematError:
    """Return the error with the smallest minimum feasible budget."""

    def min_budget(error: RematError) -> float:
        min_bytes = error.min_feasible_bytes if isinstance(error, InfeasibleBudget) else None
        return float("inf") if min_bytes is None else min_bytes

    return min(errors, key=min_budget)


def _has_recomputations(plan: Plan) -> bool:
    """True if a plan runs an operation more than once."""
    return len(plan.schedule) > len(plan.graph)
