"""The candidates for a compiled step: plans of its variants, and Inductor's own kernels.

Plans are made with a model of Inductor's kernels, which may need more memory than Inductor does. So
what plain torch.compile would run is a candidate, too: a budget at or above its peak is never
refused, and "min" is never more than it. With the option `offload`, so are plans with tensors on
the host, where the others recompute or do not fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import NamedTuple

from remat.choice.offloaded_forms import OffloadLimits
from remat.errors import InfeasibleBudget, SolverTimeout
from remat.frontend.compile.infeasible import no_plan_fits
from remat.frontend.compile.kernels.in_place import with_separate_buffers
from remat.frontend.compile.kernels.to_solver import CompileProblem, limit_saved_bytes
from remat.frontend.compile.kernels.variants import least_demanding_error, objective
from remat.frontend.compile.offload_choice import PlannedProblem, choose_offloaded
from remat.frontend.compile.registry import NO_FEEDBACK, ReplanFeedback
from remat.frontend.compile.solving import GraphSolver
from remat.graph import Graph
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.plan import Plan
from remat.schedule import Schedule
from remat.simulate import simulate


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
