"""`RetentionAdvisor`: which values to retain according to the relaxations at checkpoint cuts, and
the lower bound that they prove.

See `remat.milp.checkpoint_cuts`. A heuristic that retains what the best single cut retains is often
optimal at once. Where it is not, there is too little memory for the recomputations after the cut.
There are two remedies: advice for a somewhat smaller budget, which leaves them some
(`RetentionAdvisor.advice`), and more cuts, added one by one where the schedule that the relaxation
implies does not fit (`RetentionAdvisor.advice_from_more_cuts`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from remat.errors import GraphError
from remat.graph import Graph
from remat.heuristics.eviction import EvictionAdvice, advice_to_retain
from remat.milp.checkpoint_cuts import CheckpointCuts, candidate_cuts, relax_cuts
from remat.progress import Clock
from remat.schedule import Schedule, missing_operations
from remat.simulate import simulate

_CANDIDATE_CUTS = 12
_BEST_CUTS = 3
_SLACK_SHARES = (0.02, 0.12, 0.06, 0.18, 0.04, 0.01, 0.09)
"""Shares of the memory above the constant that advice leaves free, in the order of the advice."""

_RETENTION_FACTOR = 1e-3
"""Factor on the eviction score of a value that the relaxation retains fully."""

_INTEGER_TIME_SHARE = 0.15
_INTEGER_TIME_LIMIT_S = 15.0
_MAX_CUTS = 8


class RetentionAdvisor:
    """Advice for eviction, and a lower bound for one budget, computed on demand.

    `bound_s` holds for every schedule of the order and rises as advice is computed. `gap` is the
    relative gap of the integer programs. Everything ends with `clock`.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        *,
        gap: float,
        clock: Clock,
        stop: Callable[[], bool],
    ) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._gap = gap
        self._clock = clock
        self._stop = stop
        during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
        self._range_bytes = max(during_bytes, default=0) - graph.constant_bytes
        self._single_cuts: list[CheckpointCuts] = []
        for operation in candidate_cuts(during_bytes, budget_bytes, _CANDIDATE_CUTS):
            if self._single_cuts and stop():
                break
            cut = relax_cuts(graph, budget_bytes, [operation])
            if cut is not None:
                self._single_cuts.append(cut)
        self._single_cuts.sort(key=lambda cut: -cut.bound_s)
        self.bound_s = max((cut.bound_s for cut in self._single_cuts), default=graph.total_cost_s)
        self.implied_schedules: list[Schedule] = []
        """The schedules that integer solutions imply, the latest one last. Few of them fit."""

    def advice(self) -> Iterator[EvictionAdvice]:
        """Yield advice for `evict` from single cuts, the most promising first."""
        best = self._single_cuts[:_BEST_CUTS]
        for cut in best[:1]:
            yield _advice_of_cuts(cut)
            remaining_s = self._clock.remaining_s
            limit_s = min(_INTEGER_TIME_LIMIT_S, _INTEGER_TIME_SHARE * remaining_s)
            integral = self._relax_to_integers(cut.operations, limit_s, None, self._stop)
            if integral is not None:
                yield _advice_of_cuts(integral)
        for slack in _SLACK_SHARES:
            for cut in best:
                if self._stop():
                    return
                smaller_bytes = self._budget_bytes - int(slack * self._range_bytes)
                tighter = relax_cuts(self._graph, smaller_bytes, cut.operations)
                if tighter is not None:
                    yield _advice_of_cuts(tighter)

    def advice_from_more_cuts(
        self, best_schedule: Callable[[], Schedule], time_limit: float, stop: Callable[[], bool]
    ) -> Iterator[EvictionAdvice]:
        """Yield advice from more and more cuts, each at the operation where the schedule that the
        last advice implies is furthest over the budget.

        `best_schedule` returns the best schedule so far; one program takes at most `time_limit`
        seconds. Ends when the implied schedule fits.
        """
        operations = list(self._single_cuts[0].operations) if self._single_cuts else []
        while 0 < len(operations) < _MAX_CUTS and not stop():
            cuts = self._relax_to_integers(operations, time_limit, best_schedule(), stop)
            if cuts is None:
                return
            yield _advice_of_cuts(cuts)
            worst = self._worst_operation(self.implied_schedules[-1])
            if worst is None or worst in operations:
                return
            operations.append(worst)

    def _relax_to_integers(
        self,
        operations: Sequence[int],
        time_limit: float,
        incumbent: Schedule | None,
        stop: Callable[[], bool],
    ) -> CheckpointCuts | None:
        """Solve the integer program at these cuts, record its bound and its implied schedule, and
        return the solution. None if the time is up, `stop` returns True, or nothing fits."""
        limit_s = min(time_limit, self._clock.remaining_s)
        if limit_s <= 0 or stop():
            return None
        cuts = relax_cuts(
            self._graph,
            self._budget_bytes,
            operations,
            gap=self._gap / 5,
            time_limit=limit_s,
            incumbent=incumbent,
            is_cancelled=stop,
        )
        if cuts is not None:
            self.bound_s = max(self.bound_s, cuts.bound_s)
            self.implied_schedules.append(implied_schedule(self._graph, cuts))
        return cuts

    def _worst_operation(self, schedule: Schedule) -> int | None:
        """Return the operation whose first run is furthest over the budget. None if all fit, or if
        the schedule is invalid because it recomputes a value that is on the host."""
        try:
            during_bytes = simulate(self._graph, schedule).during_bytes
        except GraphError:  # it recomputes a value that is being offloaded
            return None
        seen: set[int] = set()
        worst, worst_bytes = None, self._budget_bytes
        for run, op in enumerate(schedule.runs):
            if op not in seen and during_bytes[run] > worst_bytes:
                worst, worst_bytes = op, during_bytes[run]
            seen.add(op)
        return worst


def implied_schedule(graph: Graph, cuts: CheckpointCuts) -> Schedule:
    """Return the schedule that retains across each cut what the solution retains, and recomputes
    everything else when it is read.

    A retained value that is not live by then is recomputed right before the cut, not when it is
    next read: its inputs may be retained no longer than that.
    """
    always_retained = {
        v
        for v, value in enumerate(graph.values)
        if v in graph.results
        or not value.size_bytes
        or not graph.operations[graph.producer[v]].recomputable
    }
    retained_at = {
        op: {v for v, share in shares.items() if share > 0.5}
        for op, shares in zip(cuts.operations, cuts.retained, strict=True)
    }
    live: set[int] = set()
    runs: list[int] = []
    for stage, operation in enumerate(graph.operations):
        retained = {v for v in retained_at.get(stage, ()) if graph.producer[v] < stage}
        for op in (*missing_operations(graph, {*operation.inputs, *retained}, live), stage):
            runs.append(op)
            live.update(graph.operations[op].outputs)
        if stage in retained_at:
            live &= retained | always_retained | set(operation.outputs)
    return Schedule.of(runs)


def _advice_of_cuts(cuts: CheckpointCuts) -> EvictionAdvice:
    """Return the advice to retain across each cut what the solution retains."""
    return advice_to_retain(zip(cuts.operations, cuts.retained, strict=True), _RETENTION_FACTOR)
