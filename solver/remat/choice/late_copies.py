"""Plans with late copies, for budgets that no others fit: tensors come back right before use.

The relaxation covers one moment. Where a budget is a small part of the peak, its cheapest solution
offloads so much that what comes back does not fit the moments after it. With fewer bytes on the
host, more is recomputed and less comes back at once. After that solution, the search takes a
quarter of its bytes, then halves them if the step waits for copies, or doubles them if it
recomputes, as long as plans get faster. Copies of a solved schedule start earlier afterwards, where
memory has room (`remat.passes.offload.shorter_waits`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from remat.choice.offload_search import offloaded_forms
from remat.choice.offloadable_step import FormSolver, PlannedStays, S, StepPlan, stays_of_cut
from remat.choice.offloaded_forms import (
    INSTANT_COPIES_FACTOR,
    OffloadedForm,
    OffloadLimits,
    OffloadPrograms,
    form_with_everything_offloaded,
    least_time_from_live_bytes_s,
    smallest_need_bytes,
    stays_from_last_use,
)
from remat.choice.offloaded_plans import best_offloaded_plan
from remat.milp.checkpoint_cuts import OffloadCut
from remat.passes.offload.copies_in_graph import HostStay
from remat.plan import Plan
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import simulate

_FREE_SHARES = (0.75, 0.5, 0.25, 0.0)
"""Shares of the budget above the constant memory that the relaxation leaves free: the first that
has a solution."""

_FIRST_HALVINGS, _MAX_HALVINGS = 2, 7
"""How often the bytes on the host are halved after the first solution, and at most."""

_LEAST_SEARCH_S = 1.0
"""The minimum time limit of the last search for forms, also after the end of the clock."""

_FASTER_LINK = 1000.0
"""For a link that is faster by this factor, the relaxation offloads as few bytes as the memory
needs: the step waits less where waiting costs more than recomputation."""


def plan_with_late_copies(
    steps: Sequence[S],
    budget_bytes: int,
    limits: OffloadLimits,
    solver: FormSolver[S],
    clock: Clock,
) -> StepPlan[S] | None:
    """Return the fastest plan that is found; None if there is none, or if the step fits without
    recomputation. Of several forms of the step, the first that fits is solved. Once a plan fits, no
    solve starts after the end of `clock`; until then, all forms are tried, since no other plan may
    fit. No solve starts after the end of the solver's clock."""

    def search_host_bytes(forms: _LateCopyForms[S]) -> StepPlan[S] | None:
        """Return the fastest plan that is found, with more or fewer bytes on the host."""
        best = faster_plan(forms.with_host_share(1.0), None)
        halvings, direction = _FIRST_HALVINGS, 1
        while 0 < halvings <= _MAX_HALVINGS and not solver.clock.is_set():
            if best is not None and clock.is_set():
                break
            candidates = forms.with_host_share(0.5**halvings)
            plan = faster_plan(candidates, best)
            if plan is not None:
                if halvings == _FIRST_HALVINGS and not _waits_more_than_recomputes(plan.plan):
                    direction = -1
                best = plan
            elif best is not None and candidates:
                break
            elif not candidates:
                # fewer bytes on the host are too few, too: the halvings before were tried
                direction, halvings = -1, min(halvings, _FIRST_HALVINGS)
            halvings += direction
        if solver.clock.is_set():
            return best
        if best is None or (_waits_more_than_recomputes(best.plan) and not clock.is_set()):
            late = replace(limits, link=limits.link.scaled(_FASTER_LINK))
            search_clock = solver.clock.limited_to(max(clock.remaining_s, _LEAST_SEARCH_S))
            few = offloaded_forms([forms.step], budget_bytes, late, search_clock)
            last = [*few[:1], *forms.with_everything()]
            last = [replace(form, bound_s=max(form.bound_s, forms.bound_s)) for form in last]
            best = faster_plan(last, best) or best
        return best

    def faster_plan(
        forms: Sequence[OffloadedForm[S]], best: StepPlan[S] | None
    ) -> StepPlan[S] | None:
        """Return the plan of the first of these forms that fits, if it is faster than `best`."""
        best_s = math.inf if best is None else best.plan.time_s
        for form in forms:
            if form.score_s < best_s and not solver.clock.is_set():
                plan = best_offloaded_plan([form], budget_bytes, limits.link, solver, clock)
                if plan is not None:
                    return plan if plan.plan.time_s < best_s else None
        return None

    for step in steps:
        if smallest_need_bytes(step.graph()) <= budget_bytes:
            forms = _LateCopyForms(step, budget_bytes, limits, solver.clock.is_set)
            if forms.cuts and (plan := search_host_bytes(forms)) is not None:
                return plan
    return None


def _waits_more_than_recomputes(plan: Plan) -> bool:
    """True if a plan waits for copies for longer than it recomputes."""
    assert plan.offload is not None
    return 2 * plan.offload.waiting_s > plan.time_s - plan.baseline_time_s


class _LateCopyForms(OffloadPrograms[S]):
    """Forms of a step with more or fewer bytes on the host."""

    def with_host_share(self, share: float) -> tuple[OffloadedForm[S], ...]:
        """Return forms with at most this share of the bytes on the host that the relaxation
        offloads without a limit: one, and one in which tensors of the backward are offloaded, too.
        Empty if nothing is offloaded, or if the search has ended."""
        if self.has_ended():
            return ()
        cut = self._offload_cut(int(share * self._largest_bytes))
        if cut is None or not cut.offloaded:
            return ()
        planned = stays_of_cut(self.graph, cut, self.budget_bytes)
        backward = self._backward_stays(self._offloaded_bytes(cut))
        stays = [planned.stays, planned.stays + backward] if backward else [planned.stays]
        return tuple(self._late_copy_form(planned._replace(stays=s)) for s in stays)

    def with_everything(self) -> tuple[OffloadedForm[S], ...]:
        """Return the forms with everything offloaded: they take the least memory."""
        return tuple(
            form_with_everything_offloaded(self.step, self.limits, overlaps=overlaps)
            for overlaps in (True, False)
        )

    @cached_property
    def _largest_bytes(self) -> int:
        cut = self._offload_cut(self.limits.host_bytes)
        return 0 if cut is None else self._offloaded_bytes(cut)

    def _offloaded_bytes(self, cut: OffloadCut) -> int:
        return sum(self.graph.values[v].size_bytes for v in cut.offloaded)

    def _backward_stays(self, used_bytes: int) -> tuple[HostStay, ...]:
        """Return stays on the host of tensors of the backward, where `used_bytes` of the host are
        taken."""
        host_bytes = self.limits.host_bytes
        left_bytes = None if host_bytes is None else host_bytes - used_bytes
        backward = [v for v in self.values if v not in self.forward]
        return stays_from_last_use(self.graph, backward, left_bytes)

    @cached_property
    def bound_s(self) -> float:
        """The time that every plan takes, whatever it offloads."""
        cut = self.relaxed_cut(self.cuts[0], self.limits_at(self.cuts[0], self.values))
        return self.graph.total_cost_s if cut is None else cut.bound_s

    def _offload_cut(self, host_bytes: int | None) -> OffloadCut | None:
        """Return a solution with at most `host_bytes` on the host (None: any) that leaves memory
        free, the most for which there is one; None without a solution."""
        limits = replace(self.limits, host_bytes=host_bytes)
        host = self.limits_at(self.cuts[0], self.forward, limits)
        room_bytes = self.budget_bytes - self.graph.constant_bytes
        solutions = (
            self.integral_cut(self.cuts[0], host, int(free_share * room_bytes))
            for free_share in _FREE_SHARES
        )
        return next((cut for cut in solutions if cut is not None), None)

    def _late_copy_form(self, planned: PlannedStays) -> OffloadedForm[S]:
        """Return the form with these stays. Its score is a bound on its time without waiting."""
        instant = self.limits.link.scaled(INSTANT_COPIES_FACTOR)
        graph = self.step.graph_with_stays(planned, instant)
        during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
        return OffloadedForm(
            self.step,
            planned,
            instant,
            score_s=least_time_from_live_bytes_s(graph, self.budget_bytes, during_bytes, math.inf),
            waiting_s=0.0,
            bound_s=self.bound_s,
            without_recompute_s=math.inf,
            free_share=0.0,
        )
