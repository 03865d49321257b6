"""When values are next read, during a walk over the operations of a graph."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence

from remat.graph import Graph

_INFINITE = float("inf")


class NextUses:
    """The next uses of values, directly or to recompute values that were evicted. `resident` says
    which values are in memory; its owner changes it, and calls `start_stage` for each operation in
    order."""

    def __init__(self, graph: Graph, resident: Sequence[bool]) -> None:
        self.graph = graph
        self.resident = resident
        self.indirect: list[float] = [_INFINITE] * len(graph.values)
        """The stage at which a value is next needed to recompute one that was evicted."""
        self.read_at: list[float] = [users[0] if users else _INFINITE for users in graph.consumers]
        """The next operation that reads a value at its first run, if it is not renewed before."""
        self._renewal = graph.renewal

    def start_stage(self, stage: int) -> None:
        """Go on to the next operation: it no longer counts as a use of its inputs."""
        for v in self.graph.operations[stage].inputs:
            users = self.graph.consumers[v]
            position = bisect_right(users, stage)
            self.read_at[v] = users[position] if position < len(users) else _INFINITE

    def of(self, v: int, stage: int) -> float:
        """Return the stage at which `v` is next read, directly or to recompute another value."""
        if self.indirect[v] < stage:
            self.find_indirect(v, stage)
        return min(self.direct(v, stage), self.indirect[v])

    def direct(self, v: int, stage: int) -> float:
        """Return the next operation that reads this copy of `v` at its first run; infinity if there
        is none, or `v` is renewed before."""
        next_use = self.read_at[v]
        return _INFINITE if self._is_renewed(v, stage, next_use) else next_use

    def find_indirect(self, v: int, stage: int) -> None:
        """Find the next use of `v` for another value, if any is recomputed from it."""
        self.indirect[v] = min(self._indirect_uses(v, stage), default=_INFINITE)

    def note_eviction(self, v: int, stage: int, next_use: float) -> None:
        """Note that `next_use` recomputes `v`, which was freed, from other values."""
        stack = [v]
        while stack:
            for u in self.graph.operations[self.graph.producer[stack.pop()]].inputs:
                if self._is_renewed(u, stage, next_use):
                    continue
                if next_use < self.indirect[u]:
                    self.indirect[u] = next_use
                    if not self.resident[u]:
                        stack.append(u)

    def _is_renewed(self, v: int, stage: int, next_use: float) -> bool:
        """True if `v` is renewed after `stage`, and not later than `next_use`."""
        return bool(self._renewal) and stage < self._renewal.get(v, -1) <= next_use

    def _indirect_uses(self, v: int, stage: int) -> Iterator[float]:
        """Yield the stages that read evicted values which are recomputed from `v`."""
        seen = {v}
        stack = [v]
        while stack:
            for op in self.graph.consumers[stack.pop()]:
                if op > stage:
                    break
                for w in self.graph.operations[op].outputs:
                    if not self.resident[w] and w not in seen:
                        seen.add(w)
                        stack.append(w)
                        next_use = self.direct(w, stage)
                        if not self._is_renewed(v, stage, next_use):
                            yield next_use
