"""Schedules for a budget by eviction: run the operations, evict values to make room, and recompute
them when they are read.

The operations run in the graph's order. Where the next one does not fit, values that it does not
read are evicted until it does; where an input was evicted, the operations that produce it are
recomputed, in order, under the same rule. The future is known, so what to evict is a choice between
three quantities: the bytes won, how long the value is idle, and the cost of recomputing it from
what is live then. Equivalent to Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021,
h_DTR) with two differences: the idle time is the time to the next use instead of the last, as in
Belady's rule, and a group of operations is recomputed in the graph's order.

Deterministic: every limit is a number of runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from remat.graph import Graph
from remat.schedule import Schedule

MAX_RUN_FACTOR = 8
LARGE_GRAPH, MAX_RUN_FACTOR_LARGE = 2_000, 3
"""An attempt is given up when it has run this many times the graph's operations; the second factor
is for graphs of more than `LARGE_GRAPH` operations, where it takes seconds."""

_INFINITE = float("inf")

EvictionAdvice = Sequence[tuple[int, Mapping[int, float]]]
"""Pairs of an operation and factors by value: up to that operation, the values' eviction scores are
multiplied by them."""


@dataclass(frozen=True, slots=True)
class EvictionRule:
    """Which value to evict first: the one with the largest size^a * idle^b / cost^c.

    Values of the backward pass are evicted only with `evicts_backward`: recomputing them takes far
    more than recomputing the forward's.
    """

    size_exponent: float = 1.0
    idle_exponent: float = 1.0
    cost_exponent: float = 1.0
    evicts_backward: bool = True


EVICTION_RULES = (
    EvictionRule(),
    EvictionRule(idle_exponent=0.3),
    EvictionRule(cost_exponent=0.5),
    EvictionRule(cost_exponent=2.0),
    EvictionRule(idle_exponent=0.6),
    EvictionRule(idle_exponent=0.3, cost_exponent=2.0),
    EvictionRule(idle_exponent=0.0),
    EvictionRule(idle_exponent=0.3, cost_exponent=0.5),
    EvictionRule(size_exponent=0.5),
    EvictionRule(cost_exponent=0.0),
    EvictionRule(size_exponent=0.5, idle_exponent=0.3),
    EvictionRule(size_exponent=0.0, cost_exponent=0.0),
    EvictionRule(evicts_backward=False),
    EvictionRule(idle_exponent=0.3, evicts_backward=False),
    EvictionRule(cost_exponent=0.0, evicts_backward=False),
)
"""Rules in the order in which they are tried; none is best on every graph."""


def evict(
    graph: Graph,
    budget_bytes: int,
    rule: EvictionRule = EVICTION_RULES[0],
    weights: Sequence[float] | None = None,
    advice: EvictionAdvice = (),
    max_time_s: float = _INFINITE,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule | None:
    """Return a schedule with a peak of at most `budget_bytes`, constant memory included, or None.

    `weights` multiply the scores of the values: one with a large weight is evicted sooner. The
    attempt is given up when it takes more than `max_time_s`, or when `stop` returns True: on a
    large graph the bad attempts take the longest, and even a good one takes seconds.
    """
    attempt = _EvictionAttempt(graph, budget_bytes - graph.constant_bytes, rule, weights, advice)
    return Schedule.of(attempt.runs) if attempt.run_to_end(max_time_s, stop) else None


class _RecomputeCost(NamedTuple):
    """A cached cost of recomputing a value. It holds for one next use (None: for all) until the
    stage `end`, exclusive."""

    cost_s: float
    next_use: float | None
    end: float


class _EvictionAttempt:
    """One walk over the graph; its state is what is in memory at the current stage.

    A *stage* is an operation's first run, with the recomputations before it.
    """

    def __init__(
        self,
        graph: Graph,
        capacity_bytes: int,
        rule: EvictionRule,
        weights: Sequence[float] | None,
        advice: EvictionAdvice,
    ) -> None:
        self.graph = graph
        self.rule = rule
        self.capacity_bytes = capacity_bytes
        self.size = [value.size_bytes for value in graph.values]
        self.score_factor = [size**rule.size_exponent for size in self.size]
        self.is_backward = [graph.operations[op].backward for op in graph.producer]
        if not rule.evicts_backward:
            pairs = zip(self.score_factor, self.is_backward, strict=True)
            self.score_factor = [0.0 if is_late else factor for factor, is_late in pairs]
        if weights is not None:
            self.score_factor = [x * w for x, w in zip(self.score_factor, weights, strict=True)]
        self.unadvised_factor = self.score_factor
        self.advice = sorted(advice, key=lambda advice_item: -advice_item[0])
        self.advice_end = -1
        """The stage up to which the current advice holds."""
        self.is_result = [False] * len(self.size)
        for v in graph.results:
            self.is_result[v] = True
        self.required_bytes = graph.produced_bytes
        self.renewal = graph.renewal
        self.no_recompute_spans = graph.no_recompute_spans
        self.min_cost_s = graph.total_cost_s / max(1, len(graph)) * 1e-2 or 1e-12
        self.live_bytes = 0
        self.resident = [False] * len(self.size)
        self.evictable: set[int] = set()
        """Values in memory that are no results and have a size."""
        self.pending_reads = [0] * len(self.size)
        self.next_indirect_use: list[float] = [_INFINITE] * len(self.size)
        """The stage at which a value is next needed to recompute one that was evicted."""
        self.cached_costs: dict[int, _RecomputeCost] = {}
        self.cost_dependents: dict[int, list[int]] = {}
        self.runs: list[int] = []

    def run_to_end(self, max_time_s: float, stop: Callable[[], bool]) -> bool:
        """Walk over all stages; True if that succeeds. `runs` then holds the sequence."""
        count = len(self.graph)
        remaining_s = max_time_s - self.graph.total_cost_s
        limit = (MAX_RUN_FACTOR if count <= LARGE_GRAPH else MAX_RUN_FACTOR_LARGE) * count + 100
        for stage in range(count):
            if stage > self.advice_end:
                self._apply_next_advice()
            has_run = has_restarted = False
            while not has_run:
                operations = self._operations_to_run(stage)
                if stop() or operations is None or len(self.runs) + len(operations) > limit:
                    return False
                first_run = len(self.runs)
                has_run = self._run_all(operations, stage)
                recomputations = self.runs[first_run:-1] if has_run else self.runs[first_run:]
                remaining_s -= sum(self.graph.operations[op].cost_s for op in recomputations)
                if remaining_s < 0 or (
                    not has_run and (has_restarted or self.rule.evicts_backward)
                ):
                    return False
                if not has_run:
                    self._evict_all(stage)
                    has_restarted = True
        return True

    def _run_all(self, operations: Sequence[int], stage: int) -> bool:
        """Run these operations in order, as long as they fit; True if all do."""
        for op in operations:
            for v in self.graph.operations[op].inputs:
                self.pending_reads[v] += 1
        has_run = all(self._run(op, stage) for op in operations)
        if not has_run:
            self.pending_reads = [0] * len(self.pending_reads)
        return has_run

    def _evict_all(self, stage: int) -> None:
        """Evict everything that can be recomputed, because a group of operations does not fit next
        to what the last of them reads. The group then restarts from nothing, so this needs no more
        memory than recomputing everything."""
        for v in sorted(self.evictable):
            next_use = self._next_use(v, stage)
            if not self.is_backward[v] and self._recompute_cost_s(v, stage, next_use) < _INFINITE:
                self._evict(v, stage)

    def _apply_next_advice(self) -> None:
        """Apply the next piece of advice, or none after the last."""
        self.score_factor = self.unadvised_factor
        self.advice_end = len(self.graph)
        if self.advice:
            self.advice_end, factors = self.advice.pop()
            self.score_factor = list(self.score_factor)
            for value, factor in factors.items():
                self.score_factor[value] *= factor

    def _operations_to_run(self, stage: int) -> list[int] | None:
        """Return the operations to run, in order, for `stage`, which is the last of them; None if
        one that may run only once would have to be repeated."""
        operations, producer = self.graph.operations, self.graph.producer
        required = {stage}
        stack = [stage]
        while stack:
            for v in operations[stack.pop()].inputs:
                producer_op = producer[v]
                if not self.resident[v] and producer_op not in required:
                    if not self.graph.may_recompute(producer_op, stage):
                        return None
                    required.add(producer_op)
                    stack.append(producer_op)
        return sorted(required)

    def _run(self, op: int, stage: int) -> bool:
        """Run an operation and update the memory; False if it does not fit."""
        operation = self.graph.operations[op]
        for v in operation.outputs:
            # An earlier copy is replaced by the new one.
            if self.resident[v] and not self.is_result[v]:
                self._free(v)
        overwritten: list[int] = []
        if op == stage:  # a recomputation overwrites nothing
            overwritten = [v for v in operation.overwrites if self._may_overwrite(v, stage)]
        excess = (
            self.live_bytes
            + self.required_bytes[op]
            - sum(self.size[v] for v in overwritten)
            - self.capacity_bytes
        )
        if excess > 0 and not self._make_room(excess, stage):
            return False
        self.runs.append(op)
        for v in operation.inputs:
            self.pending_reads[v] -= 1
        for v in operation.outputs:
            if not self.resident[v]:
                self._allocate(v)
        for v in operation.renews:
            self.next_indirect_use[v] = min(self._indirect_uses(v, stage), default=_INFINITE)
        for v in overwritten:
            self._evict(v, stage)
        return True

    def _may_overwrite(self, v: int, stage: int) -> bool:
        """True if `stage` may overwrite `v`: later runs read it only to recompute another value,
        and then it can be recomputed, too."""
        if self._next_direct_use(v, stage) < _INFINITE:
            return False
        producer = self.graph.operations[self.graph.producer[v]]
        return producer.recomputable or self._next_use(v, stage) == _INFINITE

    def _allocate(self, v: int) -> None:
        self.resident[v] = True
        self.live_bytes += self.size[v]
        self.next_indirect_use[v] = _INFINITE
        if self.size[v] and not self.is_result[v]:
            self.evictable.add(v)
        self._invalidate_costs(v)

    def _free(self, v: int) -> None:
        self.resident[v] = False
        self.live_bytes -= self.size[v]
        self.evictable.discard(v)
        self._invalidate_costs(v)

    def _invalidate_costs(self, v: int) -> None:
        for dependent in self.cost_dependents.pop(v, ()):
            self.cached_costs.pop(dependent, None)

    def _make_room(self, excess: int, stage: int) -> bool:
        """Free or evict values of at least `excess` bytes; False if that is impossible."""
        unused: list[int] = []
        ranked: list[tuple[float, int]] = []
        rule = self.rule
        for v in self.evictable:
            if self.pending_reads[v]:
                continue
            next_use = self._next_use(v, stage)
            if next_use == _INFINITE:
                unused.append(v)
                continue
            cost_s = self._recompute_cost_s(v, stage, next_use)
            if cost_s == _INFINITE or not self.score_factor[v]:
                continue
            score = (next_use - stage + 1) ** rule.idle_exponent * self.score_factor[v]
            ranked.append((-score / (cost_s + self.min_cost_s) ** rule.cost_exponent, v))
        for v in sorted(unused):
            self._free(v)
            excess -= self.size[v]
        ranked.sort()
        victims: list[int] = []
        for _, v in ranked:
            if excess <= 0:
                break
            # An earlier victim may have been needed to recompute this one.
            if self._recompute_cost_s(v, stage, self._next_use(v, stage)) == _INFINITE:
                continue
            victims.append(v)
            excess -= self.size[v]
            self._evict(v, stage)
        if excess > 0:
            return False
        # The last victim may have been so large that some before it can be retained.
        for v in reversed(victims):
            if excess + self.size[v] <= 0:
                excess += self.size[v]
                indirect_use = self.next_indirect_use[v]
                self._allocate(v)
                self.next_indirect_use[v] = indirect_use
        return True

    def _evict(self, v: int, stage: int) -> None:
        """Free `v`, and note when the values that it is recomputed from are needed for that."""
        next_use = self._next_use(v, stage)
        self._free(v)
        stack = [v]
        while stack:
            for u in self.graph.operations[self.graph.producer[stack.pop()]].inputs:
                if self._is_renewed(u, stage, next_use):
                    continue
                if next_use < self.next_indirect_use[u]:
                    self.next_indirect_use[u] = next_use
                    if not self.resident[u]:
                        stack.append(u)

    def _next_use(self, v: int, stage: int) -> float:
        """Return the stage at which `v` is next read, directly or to recompute another value."""
        if self.next_indirect_use[v] < stage:
            self.next_indirect_use[v] = min(self._indirect_uses(v, stage), default=_INFINITE)
        return min(self._next_direct_use(v, stage), self.next_indirect_use[v])

    def _next_direct_use(self, v: int, stage: int) -> float:
        """Return the next operation that reads this copy of `v` at its first run; infinity if there
        is none, or `v` is renewed before."""
        users = self.graph.consumers[v]
        position = bisect_right(users, stage)
        if position == len(users) or self._is_renewed(v, stage, users[position]):
            return _INFINITE
        return users[position]

    def _may_recompute_later(self, op: int, stage: int, next_use: float) -> bool:
        """True if no span in which `op` is not recomputed includes `next_use`, or `stage` with a
        read of its outputs at the end of the span."""
        return all(next_use <= start or stage >= end for start, end in self.no_recompute_spans[op])

    def _is_renewed(self, v: int, stage: int, next_use: float) -> bool:
        """True if `v` is renewed after `stage`, and not later than `next_use`."""
        return bool(self.renewal) and stage < self.renewal.get(v, -1) <= next_use

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
                        next_use = self._next_direct_use(w, stage)
                        if not self._is_renewed(v, stage, next_use):
                            yield next_use

    def _recompute_cost_s(self, v: int, stage: int, next_use: float) -> float:
        """Return the cost of recomputing `v` for `next_use` from what is in memory, or is renewed
        before; infinity if that is impossible."""
        cached = self.cached_costs.get(v)
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
            if producer_op in self.no_recompute_spans:
                depends_on_use = True
                ends = (e for _, e in self.no_recompute_spans[producer_op] if e > stage)
                end = min(end, min(ends, default=_INFINITE))
                if not self._may_recompute_later(producer_op, stage, next_use):
                    cost_s = _INFINITE
            for u in operation.inputs:
                self.cost_dependents.setdefault(u, []).append(v)
                if not self.resident[u] and producer[u] not in seen:
                    if stage < self.renewal.get(u, -1):
                        depends_on_use = True
                        end = min(end, self.renewal[u])
                    if self._is_renewed(u, stage, next_use):
                        continue
                    seen.add(producer[u])
                    stack.append(producer[u])
        self.cached_costs[v] = _RecomputeCost(cost_s, next_use if depends_on_use else None, end)
        return cost_s
