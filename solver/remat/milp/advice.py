"""What to keep, as the relaxations at single moments see it, and the bound that comes with it.

See `remat.milp.moment`. A heuristic that keeps what the best moment holds is often optimal at
once. Where it is not, the recomputations after the moment lack room: advice for a somewhat smaller
budget leaves them some.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from remat.graph import Graph
from remat.milp import moment
from remat.milp.moment import Moment
from remat.schedule import Schedule
from remat.simulate import simulate

_PIECES = 12
_SLACKS = (0.02, 0.06, 0.12, 0.18, 0.04, 0.01, 0.09)
"""Shares of the memory above the constant that the advice leaves free, in the order given."""

_HOLD = 1e-3
"""How much less a value that should be held is worth throwing out."""

_INTEGRAL_SHARE = 0.15
_INTEGRAL_S = 15.0


class Advisor:
    """Bound and advice for one budget, computed as they are asked for.

    `bound_s` holds for every schedule of the order and grows as `advice` is drawn; `gap` is to what
    relative gap the integer program is solved, `deadline` (of `time.monotonic`) when to stop.
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
        self._moments: list[Moment] = []
        for operation in moment.candidates(during_bytes, budget_bytes, _PIECES):
            if self._moments and stop():
                break
            found = moment.at(graph, budget_bytes, operation)
            if found is not None:
                self._moments.append(found)
        self._moments.sort(key=lambda found: -found.bound_s)
        self.bound_s = max((m.bound_s for m in self._moments), default=graph.total_cost_s)

    def advice(self) -> Iterator[list[float]]:
        """Weights for `evict`, the most promising first."""
        best = self._moments[:2]
        for found in best[:1]:
            yield self._weights(found)
            exact = self._integral(found)
            if exact is not None:
                self.bound_s = max(self.bound_s, exact.bound_s)
                yield self._weights(exact)
        for slack in _SLACKS:
            for found in best:
                if self._stop():
                    return
                smaller = self._budget_bytes - int(slack * self._range_bytes)
                tighter = moment.at(self._graph, smaller, found.operation)
                if tighter is not None:
                    yield self._weights(tighter)

    def _integral(self, found: Moment) -> Moment | None:
        left = self._deadline - time.monotonic()
        limit = min(_INTEGRAL_S, _INTEGRAL_SHARE * left)
        if limit <= 0 or self._stop():
            return None
        return moment.integral(
            self._graph,
            self._budget_bytes,
            found.operation,
            gap=self._gap / 5,
            time_limit=limit,
            cancelled=self._stop,
        )

    def _weights(self, found: Moment) -> list[float]:
        weights = [1.0] * len(self._graph.values)
        for value, share in found.held.items():
            weights[value] = _HOLD**share
        return weights
