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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from remat.graph import Graph
from remat.heuristics.recompute_costs import RecomputeCosts
from remat.schedule import Schedule

MAX_RUN_FACTOR = 8
LARGE_GRAPH, MAX_RUN_FACTOR_LARGE = 2_000, 3
"""An attempt is given up when it has run this many times the graph's operations; the second factor
is for graphs of more than `LARGE_GRAPH` operations, where it takes seconds."""

_INFINITE = float("inf")

EvictionAdvice = Sequence[tuple[int, Mapping[int, float]]]
"""Pairs of an operation and factors by value: up to that operation, the values' eviction scores are
multiplied by them."""


def advice_to_retain(
    shares_before: Iterable[tuple[int, Mapping[int, float]]], factor: float
) -> EvictionAdvice:
    """Return advice to retain values: `shares_before` has pairs of an operation and the share (0 to
    1) of each value to retain until then. `factor` multiplies the eviction score of a value that is
    retained fully."""
    return [(op, {v: factor**share for v, share in shares.items()}) for op, shares in shares_before]


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
    attempt is given up when the schedule takes more than `max_time_s`, or when `stop` returns True:
    on a large graph the bad attempts take the longest, and even a good one takes seconds.
    """
    attempt = _EvictionAttempt(graph, budget_bytes - graph.constant_bytes, rule, weights, advice)
    return Schedule.of(attempt.runs) if attempt.run_to_end(max_time_s, stop) else None


_EvictionRank = tuple[float, int, float, float, bool]
"""The rank of a value for eviction (the smallest is evicted first), the value, the benefit of
evicting it, its next use, and True if the rank is by its cost, and not by a lower bound of that."""


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
        self.min_cost_s = graph.total_cost_s / max(1, len(graph)) * 1e-2 or 1e-12
        self.live_bytes = 0
        self.resident = [False] * len(self.size)
        self.evictable: set[int] = set()
        """Values in memory that are no results and have a size."""
        self.pending_reads = [0] * len(self.size)
        self.next_uses = NextUses(graph, self.resident)
        self.costs = RecomputeCosts(graph, self.resident, self.min_cost_s, rule.cost_exponent)
        self.idle_benefit = [idle**rule.idle_exponent for idle in range(1, len(graph) + 2)]
        self.runs: list[int] = []

    def run_to_end(self, max_time_s: float, stop: Callable[[], bool]) -> bool:
        """Walk over all stages; True if that succeeds: `runs` then has the sequence. False if it
        does not fit, has too many runs, takes more than `max_time_s`, or `stop` returns True."""
        count = len(self.graph)
        remaining_s = max_time_s - self.graph.total_cost_s
        limit = (MAX_RUN_FACTOR if count <= LARGE_GRAPH else MAX_RUN_FACTOR_LARGE) * count + 100
        for stage in range(count):
            self.next_uses.start_stage(stage)
            if stage > self.advice_end:
                self._apply_next_advice()
            has_run = has_restarted = False
            while not has_run:
                operations = self._operations_to_run(stage)
                if stop() or operations is None or len(self.runs) + len(operations) > limit:
                    return False
                first_run = len(self.runs)
                has_run = self._run_operations(operations, stage)
                recomputations = self.runs[first_run:-1] if has_run else self.runs[first_run:]
                remaining_s -= sum(self.graph.operations[op].cost_s for op in recomputations)
                if remaining_s < 0 or (
                    not has_run and (has_restarted or self.rule.evicts_backward)
                ):
                    return False
                if not has_run:
                    self._evict_recomputable(stage)
                    has_restarted = True
        return True

    def _run_operations(self, operations: Sequence[int], stage: int) -> bool:
        """Run these operations in order, as long as they fit; True if all do."""
        for op in operations:
            for v in self.graph.operations[op].inputs:
                self.pending_reads[v] += 1
        has_run = all(self._run_operation(op, stage) for op in operations)
        if not has_run:
            self.pending_reads = [0] * len(self.pending_reads)
        return has_run

    def _evict_recomputable(self, stage: int) -> None:
        """Evict every value of the forward that can be recomputed, because a group of operations
        does not fit next to what the last of them reads. The group then restarts from nothing, so
        this needs no more memory than recomputing everything."""
        for v in sorted(self.evictable):
            next_use = self.next_uses.of(v, stage)
            if not self.is_backward[v] and self.costs.cost_s(v, stage, next_use) < _INFINITE:
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

    def _run_operation(self, op: int, stage: int) -> bool:
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
            self.next_uses.find_indirect(v, stage)
        for v in overwritten:
            self._evict(v, stage)
        return True

    def _may_overwrite(self, v: int, stage: int) -> bool:
        """True if `stage` may overwrite `v`: later runs read it only to recompute another value,
        and then it can be recomputed, too."""
        if self.next_uses.direct(v, stage) < _INFINITE:
            return False
        producer = self.graph.operations[self.graph.producer[v]]
        return producer.recomputable or self.next_uses.of(v, stage) == _INFINITE

    def _allocate(self, v: int) -> None:
        self.resident[v] = True
        self.live_bytes += self.size[v]
        self.next_uses.indirect[v] = _INFINITE
        if self.size[v] and not self.is_result[v]:
            self.evictable.add(v)
        self.costs.note_allocation(v)

    def _free(self, v: int) -> None:
        self.resident[v] = False
        self.live_bytes -= self.size[v]
        self.evictable.discard(v)
        self.costs.note_release(v)

    def _make_room(self, excess: int, stage: int) -> bool:
        """Free or evict values of at least `excess` bytes; False if that is impossible."""
        unused, ranked = self._rank_evictable(stage)
        excess -= sum(self.size[v] for v in unused)
        heapify(ranked)
        best = self._take_best(ranked, excess, stage)  # by costs before anything is freed
        for v in sorted(unused):
            self._free(v)
        victims: list[int] = []
        while best:
            for v in best:
                # An earlier victim may have been needed to recompute this one.
                if self.costs.cost_s(v, stage, self.next_uses.of(v, stage)) < _INFINITE:
                    victims.append(v)
                    excess -= self.size[v]
                    self._evict(v, stage)
            best = self._take_best(ranked, excess, stage)
        if excess > 0:
            return False
        # The last victim may have been so large that some before it can be retained.
        for v in reversed(victims):
            if excess + self.size[v] <= 0:
                excess += self.size[v]
                indirect_use = self.next_uses.indirect[v]
                self._allocate(v)
                self.next_uses.indirect[v] = indirect_use
        return True

    def _rank_evictable(self, stage: int) -> tuple[list[int], list[_EvictionRank]]:
        """Return the values in memory that nothing uses any more, and the ranks of the others that
        may be evicted."""
        if not self.costs.holds_for_all_uses:
            return self._rank_by_next_uses(stage)
        # Much of the time of a plan is spent in this loop, so it calls little.
        unused: list[int] = []
        ranked: list[_EvictionRank] = []
        pending_reads, score_factor, idle_benefit = (
            self.pending_reads, self.score_factor, self.idle_benefit,
        )  # fmt: skip
        read_at, indirect = self.next_uses.read_at, self.next_uses.indirect
        divisors = self.costs.divisors
        for v in self.evictable:
            if pending_reads[v]:
                continue
            next_use = indirect[v]
            if next_use < stage:
                self.next_uses.find_indirect(v, stage)
                next_use = indirect[v]
            if read_at[v] < next_use:
                next_use = read_at[v]
            if next_use == _INFINITE:
                unused.append(v)
            elif divisors[v] != _INFINITE and score_factor[v]:
                benefit = idle_benefit[int(next_use) - stage] * score_factor[v]
                ranked.append((-benefit / divisors[v], v, benefit, next_use, False))
        return unused, ranked

    def _rank_by_next_uses(self, stage: int) -> tuple[list[int], list[_EvictionRank]]:
        """Return the same as `_rank_evictable`, for a graph in which the cost of recomputing a
        value depends on its next use."""
        unused: list[int] = []
        ranked: list[_EvictionRank] = []
        for v in self.evictable:
            if self.pending_reads[v]:
                continue
            next_use = self.next_uses.of(v, stage)
            if next_use == _INFINITE:
                unused.append(v)
                continue
            divisor = self.costs.divisor(self.costs.bound_s(v, stage, next_use))
            if divisor != _INFINITE and self.score_factor[v]:
                benefit = self.idle_benefit[int(next_use) - stage] * self.score_factor[v]
                ranked.append((-benefit / divisor, v, benefit, next_use, False))
        return unused, ranked

    def _take_best(self, ranked: list[_EvictionRank], excess: int, stage: int) -> list[int]:
        """Remove the best values of at least `excess` bytes from the heap `ranked`, or all, and
        return them. Only the first values need their exact costs: a bound ranks the others
        behind."""
        best: list[int] = []
        while excess > 0 and ranked:
            _, v, benefit, next_use, is_exact = heappop(ranked)
            if is_exact:
                best.append(v)
                excess -= self.size[v]
                continue
            cost_s = self.costs.cost_s(v, stage, next_use)
            if cost_s < _INFINITE:
                rank = -benefit / self.costs.divisor(cost_s)
                heappush(ranked, (rank, v, benefit, next_use, True))
        return best

    def _evict(self, v: int, stage: int) -> None:
        """Free `v`, and note when the values that it is recomputed from are needed for that."""
        next_use = self.next_uses.of(v, stage)
        self._free(v)
        self.next_uses.note_eviction(v, stage, next_use)


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
        """Return the stage at which `v` is next read, directly or to recompute another value;
        infinity if never."""
        if self.indirect[v] < stage:
            self.find_indirect(v, stage)
        return min(self.direct(v, stage), self.indirect[v])

    def direct(self, v: int, stage: int) -> float:
        """Return the next operation that reads this copy of `v` at its first run; infinity if there
        is none, or `v` is renewed before."""
        next_use = self.read_at[v]
        return _INFINITE if self._is_renewed(v, stage, next_use) else next_use

    def find_indirect(self, v: int, stage: int) -> None:
        """Set `indirect[v]` to the next stage that recomputes an evicted value from `v`."""
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
