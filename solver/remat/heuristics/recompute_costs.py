"""Costs of recomputing values from what is in memory, cached while that stays the same.

A value that is freed only raises the costs of others: what was cached remains a lower bound. Most
values can be ranked by bounds, which take no time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from remat.graph import Graph

_INFINITE = float("inf")

_ROUNDED_DOWN = 1 - 1e-9
"""A sum of more costs, in another order, may be smaller by a rounding error."""


class _CachedCost(NamedTuple):
    """The cost of recomputing a value. It holds for one next use (None: for all) until the stage
    `end`, exclusive."""

    cost_s: float
    next_use: float | None
    end: float


class RecomputeCosts:
    """The costs of recomputing values. `resident` says which values are in memory; its owner
    changes it, and calls `note_allocation` and `note_release`.

    `divisors` are what the scores of values are divided by, from their costs or lower bounds on
    them: (cost + `min_cost_s`) ** `exponent`, infinity for values that cannot be recomputed. They
    hold for every next use and stage, so they are valid only if `holds_for_all_uses`.
    """

    def __init__(
        self, graph: Graph, resident: Sequence[bool], min_cost_s: float, exponent: float
    ) -> None:
        self.graph = graph
        self.resident = resident
        self._renewal = graph.renewal
        self._no_recompute_spans = graph.no_recompute_spans
        self._cached: dict[int, _CachedCost] = {}
        self._dependents: list[set[int]] = [set() for _ in graph.values]
        """The values whose cached costs or bounds depend on whether a value is in memory."""
        self._least_s = [_least_recompute_cost_s(graph, v) for v in range(len(graph.values))]
        self._bounds_s = list(self._least_s)
        self._min_cost_s, self._exponent = min_cost_s, exponent
        self._least_divisors = [self.divisor(cost_s) for cost_s in self._least_s]
        self.divisors = list(self._least_divisors)
        self.holds_for_all_uses = not self._renewal and not self._no_recompute_spans

    def divisor(self, cost_s: float) -> float:
        """Return the divisor of the eviction score of a value with this cost of recomputation."""
        if cost_s == _INFINITE:
            return _INFINITE
        return (cost_s + self._min_cost_s) ** self._exponent

    def note_allocation(self, v: int) -> None:
        """Note that `v` is in memory now: forget the costs and bounds of values that are recomputed
        from it."""
        for dependent in self._dependents[v]:
            self._cached.pop(dependent, None)
            self._bounds_s[dependent] = self._least_s[dependent]
            self.divisors[dependent] = self._least_divisors[dependent]
        self._dependents[v].clear()

    def note_release(self, v: int) -> None:
        """Note that `v` was freed: costs of values that are recomputed from it are lower bounds
        now."""
        for dependent in self._dependents[v]:
            if self._cached.pop(dependent, None) is not None:
                self.divisors[dependent] = self.divisor(self._bounds_s[dependent])

    def bound_s(self, v: int, stage: int, next_use: float) -> float:
        """Return the cost of recomputing `v` for `next_use`, or a lower bound if it is not
        cached."""
        cached = self._cached.get(v)
        if cached is not None and stage < cached.end and cached.next_use in (None, next_use):
            return cached.cost_s
        return self._bounds_s[v]

    def cost_s(self, v: int, stage: int, next_use: float) -> float:
        """Return the cost of recomputing `v` for `next_use` from what is in memory, or is renewed
        before; infinity if that is impossible."""
        cached = self._cached.get(v)
        if cached is not None and stage < cached.end and cached.next_use in (None, next_use):
            return cached.cost_s
        operations, producer = self.graph.operations, self.graph.producer
        cost_s = 0.0
        depends_on_use = False
        end = _INFINITE
        seen = {producer[v]}
        stack = [producer[v]]
        while stack:
            producer_op = stack.pop()
            operation = operations[producer_op]
            cost_s += operation.cost_s if operation.recomputable else _INFINITE
            if spans := self._no_recompute_spans.get(producer_op, ()):
                depends_on_use = True
                end = min(end, min((e for _, e in spans if e > stage), default=_INFINITE))
                if any(start < next_use and stage < e for start, e in spans):
                    cost_s = _INFINITE
            for u in operation.inputs:
                self._dependents[u].add(v)
                if not self.resident[u] and producer[u] not in seen:
                    renewed_at = self._renewal.get(u, -1)
                    if stage < renewed_at:
                        depends_on_use = True
                        end = min(end, renewed_at)
                        if renewed_at <= next_use:
                            continue
                    seen.add(producer[u])
                    stack.append(producer[u])
        self._cached[v] = _CachedCost(cost_s, next_use if depends_on_use else None, end)
        if not depends_on_use:
            self._bounds_s[v] = cost_s * _ROUNDED_DOWN
            self.divisors[v] = self.divisor(cost_s)
        return cost_s


def _least_recompute_cost_s(graph: Graph, v: int) -> float:
    """Return a lower bound on the cost of recomputing a value: all inputs are in memory. Infinity
    if it cannot be recomputed."""
    operation = graph.operations[graph.producer[v]]
    return operation.cost_s * _ROUNDED_DOWN if operation.recomputable else _INFINITE
