"""Search for forms of a step with offloaded tensors, each with a guess of its plan's time.

The relaxation (`remat.milp.checkpoint_cuts`) is solved at the checkpoint cuts that need the most
memory. Its linear program is solved for the whole budget and bandwidth, which gives a bound; the
integer programs, for tensors of the forward, have a budget that is lower by 3%, 8% and 15% of the
memory that is not constant (not lower where that has no solution), and 95% of the bandwidth. Each
of their solutions is judged by a bound and the waiting of its copies, on the graph with those
copies. Only the forms that are solved are rewritten into steps. Where nothing else fits, everything
is offloaded, tensors of the backward too.

The search ends early: with a step that is nearly as fast as the bound, and after a cut whose best
step does not wait for copies. Without that, ResNet-152 took 6 s instead of 0.3.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import NamedTuple

from remat.choice.offloadable_step import S, stays_of_cut
from remat.choice.offloaded_forms import (
    INTEGER_GAP,
    LEAST_GAIN,
    OffloadedForm,
    OffloadLimits,
    OffloadPrograms,
    least_time_from_live_bytes_s,
    smallest_need_bytes,
)
from remat.milp.checkpoint_cuts import OffloadCut
from remat.passes.offload.copies import copy_times
from remat.progress import Clock
from remat.schedule import Schedule
from remat.simulate import simulate

_CUTS = 3
"""Checkpoint cuts at which the relaxation is solved."""

_REFINED_GAP = 0.002
"""Relative gap of the final solve, at the best cut and slack."""

CLOSE_SHARE = 0.005
"""The search ends with a step whose score is above the bound by at most this share, by default.
With 0.1%, plans were faster by up to 0.2 percentage points, for up to twice the time."""

_RETAINING_GAP = 0.003
"""The same without recomputation, which has fewer variables."""

_PRUNING_MARGIN = 0.05
"""Solutions of the relaxation that take longer than the best step by more than this share are not
rewritten. A step's score is a guess: with 2%, plans within 20% of the memory of a Llama took 2.6
points more time."""

_USED_BANDWIDTH = 0.95
"""The share of the bandwidth that the relaxation chooses tensors for: copies start and are awaited
between operations, so that their engines idle at times."""

_SLACK_SHARES = (0.03, 0.08, 0.15, 0.0)
"""Shares of the memory above the constant that the relaxation leaves free, for copies on their way
and for recomputation. The last is for budgets that are too tight for the others."""


def offloaded_forms(
    steps: Sequence[S],
    budget_bytes: int,
    limits: OffloadLimits,
    clock: Clock,
    close_share: float = CLOSE_SHARE,
) -> list[OffloadedForm[S]]:
    """Return forms of a step with offloaded tensors, the most promising first. Empty if the step
    fits without recomputation, or one operation does not fit. The search ends with `clock`, or with
    a form whose score is above the bound by at most `close_share`."""
    results = [
        result
        for step in steps
        if smallest_need_bytes(step.graph()) <= budget_bytes
        for result in _OffloadSearch(
            step, budget_bytes, limits, clock.is_set, close_share
        ).results()
        if result.score_s < math.inf
    ]
    return sorted(results, key=lambda result: result.score_s)


class _CutAndSlack(NamedTuple):
    """An integer program: its checkpoint cut, an operation, and the share of the memory that it
    leaves free."""

    cut: int
    slack: float


class _OffloadSearch(OffloadPrograms[S]):
    """The search for the offloaded tensors of one form of a step."""

    def __init__(
        self,
        step: S,
        budget_bytes: int,
        limits: OffloadLimits,
        has_ended: Callable[[], bool],
        close_share: float,
    ) -> None:
        super().__init__(step, budget_bytes, limits, has_ended)
        self.close_share = close_share
        cuts = self.cuts[:_CUTS]
        self.host_limits = {op: self.limits_at(op, self.values) for op in cuts}
        """The limits that the bound is proved for."""
        used = replace(limits, link=limits.link.scaled(_USED_BANDWIDTH))
        self.used_limits = {op: self.limits_at(op, self.forward, used) for op in cuts}
        self._bounds_s: dict[tuple[int, bool], float] = {}
        """The bounds of the linear programs that are solved, by cut and with recomputation or
        not."""
        total_s = self.graph.total_cost_s
        until_s = total_s * (1 + LEAST_GAIN)
        is_free = self._bound_s(recomputes=False, until_s=until_s) <= until_s
        self.bound_s = total_s if is_free else self._bound_s(recomputes=True)
        self.best_s = math.inf
        self._best: _CutAndSlack | None = None
        self._seen: set[frozenset[int]] = {frozenset()}

    def results(self) -> Iterator[OffloadedForm[S]]:
        """Yield forms with recomputation; then, if the bound without recomputation is lower than
        the best of them, forms without. One without comes first if it may be as fast as any."""
        as_fast_s = self.bound_s * (1 + LEAST_GAIN)
        if self._bound_s(recomputes=False, until_s=as_fast_s) <= as_fast_s:
            yield from islice(self._results_of_cuts(recomputes=False), 1)
            if self.best_s <= as_fast_s:
                return
        yield from self._results_of_cuts(recomputes=True)
        yield from self._refined_results()
        if self._bound_s(recomputes=False, until_s=self.best_s) < self.best_s:
            yield from self._results_of_cuts(recomputes=False)

    def _refined_results(self) -> Iterator[OffloadedForm[S]]:
        """Yield the form of the best cut and slack, solved to a smaller gap. Nothing if the best
        form is nearly as fast as the bound, or if the same values are offloaded."""
        if self._best is None or self.best_s <= self.bound_s * (1 + self.close_share):
            return
        cut = self._program_solution(self._best, recomputes=True, gap=_REFINED_GAP)
        if cut is not None and self._is_new(cut):
            result = self._judged_form(cut, self._best.slack)
            self.best_s = min(self.best_s, result.score_s)
            yield result

    def _results_of_cuts(self, *, recomputes: bool) -> Iterator[OffloadedForm[S]]:
        """Yield forms for each cut, with more and more memory left free as long as that helps.
        Solutions that are slower than the best form by `_PRUNING_MARGIN` are not judged.
        `recomputes` is False for forms without recomputation.

        Ends with a form that is nearly as fast as the bound, and with a cut whose best form does
        not wait for copies: then only recomputation costs time, and other cuts rarely avoid it.
        """
        best_s = best_waiting_s = math.inf
        for cut_operation in self.host_limits:
            last_s, is_solved = math.inf, False
            for slack in _SLACK_SHARES:
                if self.has_ended():
                    return
                if slack == 0.0 and is_solved:
                    break
                program = _CutAndSlack(cut_operation, slack)
                cut = self._program_solution(program, recomputes=recomputes)
                is_solved |= cut is not None
                if cut is None or not self._is_new(cut):
                    continue
                if recomputes and cut.bound_s > (1 + _PRUNING_MARGIN) * best_s:
                    break
                result = self._judged_form(cut, slack)
                expected_s = result.score_s if recomputes else result.without_recompute_s
                if expected_s < best_s:
                    best_s, best_waiting_s = expected_s, result.waiting_s
                if expected_s < self.best_s:
                    self.best_s, self._best = expected_s, program if recomputes else None
                yield result
                if expected_s <= self.bound_s * (1 + self.close_share):
                    return
                if last_s * (1 - LEAST_GAIN) < expected_s < math.inf:
                    break
                last_s = expected_s
            if best_waiting_s <= LEAST_GAIN * self.graph.total_cost_s:
                return

    def _is_new(self, cut: OffloadCut) -> bool:
        """True the first time that these values are offloaded; False if there are none."""
        is_new = cut.offloaded not in self._seen
        self._seen.add(cut.offloaded)
        return is_new

    def _bound_s(self, *, recomputes: bool, until_s: float = math.inf) -> float:
        """Return the time that every plan takes, whatever it offloads, or a bound above `until_s`;
        infinity if none fits. `recomputes` is False for plans without recomputation."""
        bound_s = self.graph.total_cost_s
        for operation in self.host_limits:
            if bound_s > until_s:
                break
            bound_s = max(bound_s, self._bound_at(operation, recomputes=recomputes))
        return bound_s

    def _bound_at(self, operation: int, *, recomputes: bool) -> float:
        """Return the bound of the linear program at one cut. If it has no solution, infinity
        without recomputation, as no such plan fits; else 0, as that proves nothing."""
        key = operation, recomputes
        if key not in self._bounds_s:
            host = self.host_limits[operation]
            cut = self.relaxed_cut(operation, host, recomputes=recomputes)
            nothing_s = 0.0 if recomputes else math.inf
            self._bounds_s[key] = nothing_s if cut is None else cut.bound_s
        return self._bounds_s[key]

    def _program_solution(
        self, program: _CutAndSlack, *, recomputes: bool, gap: float | None = None
    ) -> OffloadCut | None:
        """Return the solution of an integer program; None if there is none, or none in time."""
        return self.integral_cut(
            program.cut,
            self.used_limits[program.cut],
            int(program.slack * self.range_bytes),
            gap=gap or (INTEGER_GAP if recomputes else _RETAINING_GAP),
            recomputes=recomputes,
        )

    def _judged_form(self, cut: OffloadCut, slack: float) -> OffloadedForm[S]:
        """Return the form that offloads what a solution does, with its expected time. `slack` is
        the share of the memory that the solution leaves free."""
        link = self.limits.link
        planned = stays_of_cut(self.graph, cut, self.budget_bytes)
        graph = self.step.graph_with_stays(planned, link)
        runs = range(len(graph))
        timeline = simulate(graph, Schedule.keep_all(graph))
        fits = timeline.peak_bytes <= self.budget_bytes
        expected = copy_times(graph, runs, link, planned.recomputed_s)
        least_s = least_time_from_live_bytes_s(
            graph, self.budget_bytes, timeline.during_bytes, math.inf
        )
        return OffloadedForm(
            self.step,
            planned,
            link,
            score_s=least_s + expected.waiting_s,
            waiting_s=expected.waiting_s,
            bound_s=self.bound_s,
            without_recompute_s=copy_times(graph, runs, link).step_s if fits else math.inf,
            free_share=slack,
        )
