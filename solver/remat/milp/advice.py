"""What to keep, as the relaxations at moments see it, and the bound that comes with it.

See `remat.milp.moment`. A heuristic that keeps what the best single moment holds is often optimal
at once. Where it is not, the recomputations after the moment lack room. There are two remedies:
advice for a somewhat smaller budget, which leaves them some (`Advisor.advice`), and more moments,
added one by one where the schedule that the relaxation implies does not fit (`Advisor.pursue`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from remat.graph import Graph
from remat.heuristics.eviction import Advice
from remat.milp import moment
from remat.milp.moment import Moments
from remat.schedule import Schedule, missing
from remat.simulate import simulate

_PIECES = 12
_FOLLOWED = 3
_SLACKS = (0.02, 0.12, 0.06, 0.18, 0.04, 0.01, 0.09)
"""Shares of the memory above the constant that the advice leaves free, in the order given."""

_HOLD = 1e-3
"""How much less a value that should be held is worth throwing out."""

_INTEGRAL_SHARE = 0.15
_INTEGRAL_S = 15.0
_MOST_MOMENTS = 8


class Advisor:
    """Bound and advice for one budget, computed as they are asked for.

    `bound_s` holds for every schedule of the order and grows as advice is drawn; `gap` is to what
    relative gap the integer programs are solved, `deadline` (of `time.monotonic`) when to stop.
    """

    def __init__(
        self,
        graph: Graph,
        budget_bytes: int,
        *,
        gap: float,
        deadline: float,
        stop: Callable[[], bool],
    ) -> None:
        self._graph = graph
        self._budget_bytes = budget_bytes
        self._gap = gap
        self._deadline = deadline
        self._stop = stop
        during_bytes = simulate(graph, Schedule.keep_all(graph)).during_bytes
        self._range_bytes = max(during_bytes, default=0) - graph.constant_bytes
        self._singles: list[Moments] = []
        for operation in moment.candidates(during_bytes, budget_bytes, _PIECES):
            if self._singles and stop():
                break
            found = moment.linear(graph, budget_bytes, [operation])
            if found is not None:
                self._singles.append(found)
        self._singles.sort(key=lambda found: -found.bound_s)
        self.bound_s = max((m.bound_s for m in self._singles), default=graph.total_cost_s)
        self.implied: list[Schedule] = []
        """The schedules that integral advice implies, the last one last. Few of them fit."""

    def advice(self) -> Iterator[Advice]:
        """Advice for `evict` from single moments, the most promising first."""
        best = self._singles[:_FOLLOWED]
        for found in best[:1]:
            yield _advice(found)
            limit = min(_INTEGRAL_S, _INTEGRAL_SHARE * (self._deadline - time.monotonic()))
            exact = self._integral(found.operations, limit, None, self._stop)
            if exact is not None:
                yield _advice(exact)
        for slack in _SLACKS:
            for found in best:
                if self._stop():
                    return
                smaller = self._budget_bytes - int(slack * self._range_bytes)
                tighter = moment.linear(self._graph, smaller, found.operations)
                if tighter is not None:
                    yield _advice(tighter)

    def pursue(
        self, known: Callable[[], Schedule], time_limit: float, stop: Callable[[], bool]
    ) -> Iterator[Advice]:
        """Advice from more and more moments, each where the last advice would not fit.

        `known` is asked for the best schedule so far; one program takes `time_limit` seconds at
        most. Ends when the advice fits at every moment.
        """
        operations = list(self._singles[0].operations) if self._singles else []
        while 0 < len(operations) < _MOST_MOMENTS and not stop():
            found = self._integral(operations, time_limit, known(), stop)
            if found is None:
                return
            yield _advice(found)
            worst = self._worst(self.implied[-1])
            if worst is None or worst in operations:
                return
            operations.append(worst)

    def _integral(
        self,
        operations: Sequence[int],
        time_limit: float,
        known: Schedule | None,
        stop: Callable[[], bool],
    ) -> Moments | None:
        limit = min(time_limit, self._deadline - time.monotonic())
        if limit <= 0 or stop():
            return None
        found = moment.integral(
            self._graph,
            self._budget_bytes,
            operations,
            gap=self._gap / 5,
            time_limit=limit,
            known=known,
            cancelled=stop,
        )
        if found is not None:
            self.bound_s = max(self.bound_s, found.bound_s)
            self.implied.append(implied_schedule(self._graph, found))
        return found

    def _worst(self, schedule: Schedule) -> int | None:
        """The first run at which memory is most over the budget."""
        during_bytes = simulate(self._graph, schedule).during_bytes
        seen: set[int] = set()
        worst, most_bytes = None, self._budget_bytes
        for run, op in enumerate(schedule.runs):
            if op not in seen and during_bytes[run] > most_bytes:
                worst, most_bytes = op, during_bytes[run]
            seen.add(op)
        return worst


def implied_schedule(graph: Graph, found: Moments) -> Schedule:
    """The schedule that has in memory at each moment what is held there, and makes the rest again
    when it is read.

    What is held is made right before the moment where it is not there by then, not when it is next
    read: what it is made from may be held no longer.
    """
    stays = {
        v
        for v, value in enumerate(graph.values)
        if v in graph.results
        or not value.size_bytes
        or not graph.operations[graph.producer[v]].recomputable
    }
    held = {
        op: {v for v, share in shares.items() if share > 0.5}
        for op, shares in zip(found.operations, found.held, strict=True)
    }
    there: set[int] = set()
    runs: list[int] = []
    for stage, operation in enumerate(graph.operations):
        kept = {v for v in held.get(stage, ()) if graph.producer[v] < stage}
        for op in (*missing(graph, {*operation.inputs, *kept}, there), stage):
            runs.append(op)
            there.update(graph.operations[op].outputs)
        if stage in held:
            there &= kept | stays | set(operation.outputs)
    return Schedule.of(runs)


def _advice(found: Moments) -> Advice:
    return [
        (op, {value: _HOLD**share for value, share in held.items()})
        for op, held in zip(found.operations, found.held, strict=True)
    ]
