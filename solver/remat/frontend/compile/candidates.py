"""The candidates for a compiled step: plans of its variants, and Inductor's own kernels.

Plans are made with a model of Inductor's kernels, which may need more memory than Inductor does. So
what plain torch.compile would run is a candidate, too: a budget at or above its peak is never
refused, and "min" is never more than it. With the option `offload`, so are plans with tensors on
the host, where the others recompute or do not fit. If no candidate fits, the error names one
figure, the smallest feasible budget, and what to do about it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from typing import NamedTuple, cast

import torch
from torch._inductor import config

from remat.choice.offload import choose_offloading
from remat.choice.offloadable_step import StepPlan
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.split import CHOICE_LIMIT_S
from remat.errors import InfeasibleBudget, RematError, SolverTimeout
from remat.frontend.common.aliases import storage_base
from remat.frontend.common.planning_line import planning_line
from remat.frontend.common.torch_modes import isolated_modes
from remat.frontend.compile.compat import cause_of_type, without_frames
from remat.frontend.compile.compile_options import OffloadOptions
from remat.frontend.compile.fx_utils import node_bytes, output_tensors
from remat.frontend.compile.joint_graph import CompiledJointGraph
from remat.frontend.compile.kernels.problem import (
    CompileProblem,
    OffloadableProblem,
    inductor_baseline_peak_bytes,
    limit_saved_bytes,
    with_separate_buffers,
)
from remat.frontend.compile.kernels.variants import least_demanding_error, objective
from remat.frontend.compile.registry import NO_FEEDBACK, ReplanFeedback, UnsplitStep
from remat.frontend.planning.host_limits import limits_here, reserve_host
from remat.graph import Baseline, Graph, Split
from remat.limits.budget import Budget, missing_percent_sign_hint
from remat.limits.limits import Limits
from remat.limits.units import format_bytes
from remat.plan import Plan
from remat.plan_data import HOST_BYTES_STAT
from remat.progress import ProgressCallback
from remat.report.describe import describe_peak
from remat.schedule import Schedule
from remat.simulate import baseline_of, simulate
from remat.solve import solve
from remat.strategies import Auto, Strategy
from remat.strategies.base import with_limits

_SMALLEST_PEAK_TIME_S = 2.0
"""Time for finding a small schedule whose peak the error describes."""


def no_plan_fits(
    limits: Limits,
    baseline_bytes: int,
    min_feasible_bytes: int,
    *,
    is_proved: bool,
    has_kernels: bool,
) -> InfeasibleBudget:
    """Return the error that names `min_feasible_bytes` as the smallest budget. For a percentage,
    `baseline_bytes` is the peak that it is relative to.

    With kernels, a proof is about those that remat plans with: Inductor may make others, which need
    less. Without, operations run as planned.
    """
    budget = limits.budget
    smallest = f"{min_feasible_bytes:,} bytes"
    if budget.share is not None:
        percent = math.ceil(100 * min_feasible_bytes / max(1, baseline_bytes))
        smallest += f' ("{percent}%")'
    external_bytes = limits.external_bytes + limits.reserve_bytes
    if external_bytes and budget.size_bytes is not None:
        smallest += f", of which {format_bytes(external_bytes)} are used outside this graph"
    hint = missing_percent_sign_hint(budget.size_bytes or 101, baseline_bytes)
    subject = "the kernels that remat plans with" if has_kernels else "the operations"
    proof = f" This is proved of {subject}, in their order." if is_proved else ""
    return InfeasibleBudget(
        f"no plan fits the budget {budget.requested!r}. Pass a budget of at least {smallest}, or "
        f'"min", or make the batch smaller{hint}.{proof}',
        min_feasible_bytes=min_feasible_bytes,
        is_proved=is_proved and not has_kernels,
    )


@contextmanager
def explain_infeasible(graph: Graph, title: str, hint: str = "") -> Iterator[None]:
    """Add the graph's title, the peak of a small schedule in words, and a hint, if there is one, to
    an `InfeasibleBudget` that is raised inside of this context."""
    try:
        yield
    except InfeasibleBudget as error:
        explanation = ""
        with suppress(RematError):
            schedule = solve(graph, "min", Auto(time_limit=_SMALLEST_PEAK_TIME_S)).schedule
            explanation = f" At the smallest, {describe_peak(graph, schedule)}."
        explained = InfeasibleBudget(
            f"{title}: {error}{explanation}",
            min_feasible_bytes=error.min_feasible_bytes,
            is_proved=error.is_proved,
        )
        raise (explained.with_hint(hint) if hint else explained) from error


@contextmanager
def add_hints(*hints: str) -> Iterator[None]:
    """Raise an `InfeasibleBudget` of this context in place of torch's exception that wraps it. The
    non-empty hints are sentences at its end."""
    try:
        yield
    except Exception as error:
        infeasible = cause_of_type(error, InfeasibleBudget)
        if infeasible is None:
            raise
        for hint in filter(None, hints):
            infeasible = infeasible.with_hint(hint)
        raise without_frames(infeasible) from None


_MIN_SOLVE_S = 2.0
"""Time for a solve, however long the capture of the kernels took."""

_CAPTURES_PER_COMPILATION = 4
"""A lower bound of the time of torch.compile for a graph, in times of the capture of its kernels.
torch.compile also generates and compiles their code."""


@dataclass(frozen=True)
class GraphSolver:
    """The solver of one compiled graph's variants.

    `planning_s` is the time for planning, counted from `started_s` (`time.perf_counter()`); None if
    the strategy has a time limit of its own. `cost_source` describes the costs in the plan.
    """

    strategy: Strategy
    planning_s: float | None
    started_s: float
    progress: ProgressCallback | bool | None
    cost_source: str

    def solve(self, graph: Graph, budget: int | str, *, num_remaining: int = 1) -> Plan:
        """Solve a graph for a budget in bytes or "min".

        `num_remaining` variants, this one included, share the time that is left. If it is too short
        for any schedule, as the capture of a large graph took most of it, the solver gets
        `planning_s` once more.
        """
        if self.planning_s is None:
            return self.solve_within(graph, budget, None)
        remaining_s = self.planning_s - (time.perf_counter() - self.started_s)
        limit_s = max(_MIN_SOLVE_S, remaining_s / num_remaining)
        try:
            return self.solve_within(graph, budget, limit_s)
        except SolverTimeout:
            if limit_s >= self.planning_s:
                raise
            return self.solve_within(graph, budget, self.planning_s)

    def solve_within(self, graph: Graph, budget: int | str, limit_s: float | None) -> Plan:
        """Solve a graph within `limit_s` seconds, or the strategy's own limit if that is None."""
        settings = _SettingsOutsideCacheKey(self.progress, limit_s)
        return solve_cached(graph, budget, self.strategy, settings, self.cost_source)


@dataclass(frozen=True)
class PiecesTime:
    """The time limit for plans of a graph in pieces, after the plan of the whole graph.

    The capture of the whole graph took `capture_s`, and it has `num_operations`. The captures in
    pieces begin at `started_s`. Together they may take the time limit of the strategy plus the
    expected time of compiling the whole graph. Each solve may take half of the time limit.
    """

    strategy: Strategy
    started_s: float
    capture_s: float
    num_operations: int

    def is_enough(self, num_operations: int, solves_s: float) -> bool:
        """True if the remaining time is enough to capture a graph with this many operations.
        `solves_s` is the time of earlier solves, which does not count."""
        capture_s = self.capture_s * num_operations / max(1, self.num_operations)
        elapsed_s = time.perf_counter() - self.started_s - solves_s
        limit_s = self._limit_s() + _CAPTURES_PER_COMPILATION * self.capture_s
        return elapsed_s + capture_s <= limit_s

    def limited_strategy(self) -> Strategy:
        """Return the strategy with the time limit of one solve."""
        return with_limits(self.strategy, time_limit=max(_MIN_SOLVE_S, self._limit_s() / 2))

    def _limit_s(self) -> float:
        return getattr(self.strategy, "time_limit", 0.0)


@dataclass(frozen=True)
class _SettingsOutsideCacheKey:
    """The time limit of a solve and who receives its progress. All instances are equal, so that the
    cache of plans ignores them."""

    progress: ProgressCallback | bool | None = field(default=None, compare=False)
    limit_s: float | None = field(default=None, compare=False)

    @contextmanager
    def progress_callback(self) -> Iterator[ProgressCallback | None]:
        """Yield the progress callback of `remat.solve`."""
        with planning_line(self.progress) as callback:
            yield callback


@lru_cache(maxsize=32)
def solve_cached(
    graph: Graph,
    budget: int | str,
    strategy: Strategy,
    settings: _SettingsOutsideCacheKey,
    cost_source: str,
) -> Plan:
    """Solve a graph. Identical blocks that torch compiles separately are solved once."""
    if settings.limit_s is not None:
        strategy = replace(cast(Auto, strategy), time_limit=settings.limit_s)
    with settings.progress_callback() as callback:
        plan = solve(graph, budget, strategy, progress=callback)
    return replace(plan, stats={**plan.stats, "cost_source": cost_source})


class PlannedProblem(NamedTuple):
    """A plan and the problem that it is for, in which tensors may be offloaded."""

    problem: CompileProblem
    plan: Plan


def offload_limits(
    options: OffloadOptions, joint: CompiledJointGraph, other_host_bytes: int
) -> OffloadLimits | None:
    """Return the limits of offloading for a graph; None if nothing may be offloaded.

    The step's other graphs have `other_host_bytes` on the host. Raises `BudgetError` for a host
    budget above what is free.
    """
    if not options.is_allowed or options.host_bytes == 0 or config.triton.cudagraphs:
        return None
    device = step_device(joint)
    if device.type not in ("cpu", "cuda"):
        return None
    with isolated_modes(device):
        limits = limits_here(options.host_bytes, options.link, device)
    if limits.host_bytes is None:
        return limits
    host_bytes = max(0, limits.host_bytes - other_host_bytes)
    return OffloadLimits(limits.link, host_bytes) if host_bytes else None


def choose_offloaded(
    problems: Sequence[CompileProblem],
    budget: Budget,
    limits: OffloadLimits,
    solver: GraphSolver,
    solve_without: Callable[[], PlannedProblem],
) -> PlannedProblem:
    """Return the fastest plan of these variants of a step, with offloaded tensors or that of
    `solve_without`. Raises the errors of `solve_without` if there is none."""

    def solve_in_full(step: OffloadableProblem, budget: Budget) -> Plan:
        size_bytes = budget.size_bytes
        return solver.solve(step.graph(), "min" if size_bytes is None else size_bytes)

    def solve_step_without() -> StepPlan[OffloadableProblem]:
        problem, plan = solve_without()
        return StepPlan(OffloadableProblem(problem), plan)

    steps = [OffloadableProblem(problem) for problem in problems]
    if budget.is_min:  # only one of the variants is solved
        steps = [solve_step_without().step]
    chosen = choose_offloading(
        steps,
        budget,
        limits,
        solve_in_full=solve_in_full,
        solve_without=solve_step_without,
        limit_s=solver.planning_s or CHOICE_LIMIT_S,
    )
    return PlannedProblem(chosen.step.problem, chosen.plan)


def prepare_host(plan: Plan, device: torch.device) -> None:
    """Pin memory for the offloaded tensors of a final plan before its first step: plans of earlier
    rounds do not run."""
    sizes_bytes = [plan.graph.values[value].size_bytes for value in plan.graph.renewal]
    if sizes_bytes:
        with isolated_modes(device):
            reserve_host(device, sizes_bytes, int(plan.stats.get(HOST_BYTES_STAT, 0)))


def step_device(joint: CompiledJointGraph) -> torch.device:
    """Return the device of a step: a GPU, if one of its tensors is there."""
    nodes = (*joint.placeholders, *joint.operations)
    return device_of(tensor for node in nodes for tensor in output_tensors(node))


def device_of(items: Iterable[object]) -> torch.device:
    """Return the GPU of the first tensor that is on one; else the CPU."""
    devices = (item.device for item in items if isinstance(item, torch.Tensor))
    return next((d for d in devices if d.type != "cpu"), torch.device("cpu"))


class StepBaseline(NamedTuple):
    """A step without recomputation: the peak of this graph with what the step's other graphs save,
    and the bytes that this graph saves for its backward."""

    peak_bytes: int
    saved_bytes: int


class Candidate(NamedTuple):
    """A plan of one variant. Where `is_plain`, the graph keeps Inductor's own kernels, which the
    plan describes."""

    problem: CompileProblem
    plan: Plan
    is_plain: bool = False


@dataclass(frozen=True)
class CandidateSelection:
    """The selection among the candidates of one graph.

    The first of the `problems` is the step that plain torch.compile runs; `plain_bytes` is its
    peak, None where it is no candidate. `offload` are the limits of tensors on the host, None if
    there are to be none.
    """

    problems: Sequence[CompileProblem]
    solver: GraphSolver
    limits: Limits
    baseline: StepBaseline
    feedback: ReplanFeedback
    plain_bytes: int | None
    offload: OffloadLimits | None = None

    def select(self) -> Candidate:
        """Return the best candidate. Raises `InfeasibleBudget` if there is none, and
        `SolverTimeout` if there was no time to find one.

        Tensors are offloaded where that is faster than the plan without, or there is none without.
        """
        try:
            without = self._select_without_offload()
        except (InfeasibleBudget, SolverTimeout):
            offloaded = self._select_with_offload(None)
            if offloaded is None:
                raise
            return offloaded
        return self._select_with_offload(without) or without

    def _select_with_offload(self, without: Candidate | None) -> Candidate | None:
        """Return the best candidate with offloaded tensors; None where there is none, or `without`
        is as fast."""
        is_min = self.limits.budget.is_min
        if self.offload is None or self.feedback.without_offload:
            return None
        if without is not None and not is_min and not _recomputes(without.plan):
            return None
        if without is None and is_min:
            return None
        available_bytes = self.limits.available_bytes(self.baseline.peak_bytes)
        budget = Budget.parse("min" if available_bytes is None else available_bytes)

        def solve_without() -> PlannedProblem:
            if without is None:
                raise InfeasibleBudget("no plan without offloading fits")
            problem = replace(without.problem, graph=without.plan.graph)
            return PlannedProblem(problem, without.plan)

        graphs = [self._graphs(problem) for problem in self.problems]
        for index in range(max(map(len, graphs))):
            problems = [
                replace(problem, graph=forms[min(index, len(forms) - 1)])
                for problem, forms in zip(self.problems, graphs, strict=True)
            ]
            with suppress(InfeasibleBudget, SolverTimeout):
                problem, plan = choose_offloaded(
                    problems, budget, self.offload, self.solver, solve_without
                )
                if without is not None and not plan.graph.renewal:
                    return without._replace(plan=plan)
                if is_min and self.plain_bytes is not None and plan.peak_bytes > self.plain_bytes:
                    return None
                return Candidate(problem, plan)
        return None

    def _select_without_offload(self) -> Candidate:
        available_bytes = self.limits.available_bytes(self.baseline.peak_bytes)
        if available_bytes is None:
            return self._select_smallest()
        if not self._plain_fits(available_bytes):
            with self._naming_the_smallest_budget():
                return self._best(self._solve(self.problems))
        problems = self.problems
        if self._saves_within_share():
            # Inductor's own kernels fit, so that nothing needs to be recomputed.
            problems = [p for p in problems if keep_all_bytes(p.graph) <= available_bytes]
            if self.feedback._replace(without_offload=False) != NO_FEEDBACK:
                problems = []  # what Inductor made of the plan did not fit
        with suppress(InfeasibleBudget, SolverTimeout):
            if problems:
                return self._best(self._solve(problems))
        return self._plain()

    @contextmanager
    def _naming_the_smallest_budget(self) -> Iterator[None]:
        """Make an `InfeasibleBudget` that is raised inside of this context name one figure: the
        smallest budget of the step, which plain torch.compile's kernels may need, too."""
        try:
            yield
        except InfeasibleBudget as error:
            min_feasible_bytes = error.min_feasible_bytes
            if min_feasible_bytes is None:
                raise
            limits = self.limits
            is_proved = error.is_proved
            if self.plain_bytes is not None:
                plain_bytes = self.plain_bytes + limits.external_bytes + limits.reserve_bytes
                is_proved = is_proved and plain_bytes >= min_feasible_bytes
                min_feasible_bytes = min(min_feasible_bytes, plain_bytes)
            raise no_plan_fits(
                limits,
                self.baseline.peak_bytes,
                min_feasible_bytes,
                is_proved=is_proved,
                has_kernels=self.problems[0].joint.kernels is not None,
            ) from error

    def _select_smallest(self) -> Candidate:
        """Return the candidate with the smallest peak."""
        is_plain_best = self.plain_bytes is not None and self.feedback.excess_bytes > 0
        if is_plain_best:  # Inductor's kernels for the smallest plan need more
            return self._plain()
        best = self._best(self._solve(self.problems))
        if self.plain_bytes is not None and best.plan.peak_bytes > self.plain_bytes:
            return self._plain()
        return best

    def _plain_fits(self, available_bytes: int) -> bool:
        """True if plain torch.compile's step fits the budget. The feedback's excess was that of
        other kernels."""
        if self.plain_bytes is None or self.feedback.plain_exceeds:
            return False
        return self.plain_bytes <= available_bytes + self.limits.excess_bytes

    def _saves_within_share(self) -> bool:
        """True if the step without recomputation saves no more than its share of a percentage."""
        share_bytes = self._share_bytes()
        return share_bytes is None or self.baseline.saved_bytes <= share_bytes

    def _share_bytes(self) -> int | None:
        return self.limits.share_bytes(self.baseline.saved_bytes, self.baseline.peak_bytes)

    def _plain(self) -> Candidate:
        """Return Inductor's own kernels as a candidate: the step without recomputation."""
        problem = self.problems[0]
        plan = self.solver.solve(problem.graph, keep_all_bytes(problem.graph))
        return Candidate(problem, plan, is_plain=True)

    def _best(self, candidates: Sequence[Candidate]) -> Candidate:
        is_min = self.limits.budget.is_min
        return min(candidates, key=lambda c: objective(c.plan, minimize_peak=is_min))

    def _solve(self, problems: Sequence[CompileProblem]) -> list[Candidate]:
        """Return the plans of those variants that have one. Raises the least demanding error if
        none has."""
        candidates: list[Candidate] = []
        errors: list[InfeasibleBudget | SolverTimeout] = []
        try:
            for index, problem in enumerate(problems):
                solve = partial(self.solver.solve, num_remaining=len(problems) - index)
                try:
                    candidates.append(Candidate(problem, self._solve_variant(problem, solve)))
                except (InfeasibleBudget, SolverTimeout) as error:
                    errors.append(error)
            if not candidates:
                raise least_demanding_error(errors)
            return candidates
        finally:
            errors.clear()  # their tracebacks have this frame: a reference cycle

    def _solve_variant(
        self, problem: CompileProblem, solve: Callable[[Graph, int | str], Plan]
    ) -> Plan:
        """Solve one variant of a graph, in the first of its forms that has a plan."""
        *limited_graphs, graph = self._graphs(problem)
        available_bytes = self.limits.available_bytes(self.baseline.peak_bytes)
        if available_bytes is None:
            return solve(graph, "min")
        for limited_graph in limited_graphs:
            with suppress(InfeasibleBudget, SolverTimeout):
                return solve(limited_graph, available_bytes)
        with self.limits.infeasible_with_reserve():
            return solve(graph, available_bytes)

    def _graphs(self, problem: CompileProblem) -> tuple[Graph, ...]:
        """Return the forms of a variant's graph, in the order in which they are solved.

        For a percentage, what the graph saves for its backward is first limited to that percentage,
        too, as other graphs of the step may run before its backward. If that is infeasible, only
        the peak is limited.
        """
        graph = with_separate_buffers(problem.graph, self.feedback.separate_buffers)
        available_bytes = self.limits.available_bytes(self.baseline.peak_bytes)
        saved_limit_bytes = self._share_bytes()
        if available_bytes is None or saved_limit_bytes is None:
            return (graph,)
        budget_bytes = available_bytes + self.limits.excess_bytes
        limited_graph = limit_saved_bytes(
            replace(problem, graph=graph), budget_bytes, saved_limit_bytes
        )
        return (graph,) if limited_graph is graph else (limited_graph, graph)


def _recomputes(plan: Plan) -> bool:
    return len(plan.schedule) > len(plan.graph)


def keep_all_bytes(graph: Graph) -> int:
    """Return the peak of a graph without recomputation."""
    return simulate(graph, Schedule.keep_all(graph)).peak_bytes


def unsplit_step(problem: CompileProblem) -> UnsplitStep:
    """Return the step that plain torch.compile would run: the baseline of budgets and times."""
    joint = problem.joint
    peak_bytes = inductor_baseline_peak_bytes(problem) or 0
    if joint.plain_halves is None:
        peak_bytes = max(peak_bytes, keep_all_bytes(problem.graph))
    saved = problem.retained_outputs.union(map(storage_base, joint.saved_tensors))
    return UnsplitStep(peak_bytes, sum(map(node_bytes, saved)), baseline_of(problem.graph).time_s)


def with_unsplit_step(
    problem: CompileProblem, unsplit: UnsplitStep | None, splits: Sequence[Split]
) -> CompileProblem:
    """Return the problem of a split graph, with the step that its plans are compared to."""
    assert unsplit is not None
    baseline = Baseline(unsplit.peak_bytes, unsplit.time_s)
    graph = replace(problem.graph, unsplit=baseline, splits=tuple(splits))
    return replace(problem, graph=graph)
