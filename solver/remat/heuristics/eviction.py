"""Schedules for a budget by eviction: run on, throw out what can best be spared, make it again.

The operations run in the graph's order. Where the next one does not fit, values that it does not
need are thrown out until it does; where an input is gone, the operations that make it run again,
in order, under the same rule. The future is known, so what to throw out is a choice between three
quantities: the bytes won, how long the value lies idle, and the cost of making it again from what
is there then. Equivalent to Dynamic Tensor Rematerialization (Kirisame et al., ICLR 2021, h_DTR)
with two differences: the idle time is the time to the next use instead of the last, as in Belady's
rule, and a group of operations that runs again does so in the graph's order.

Deterministic: every limit is a number of runs.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from remat.graph import Graph
from remat.schedule import Schedule

MAX_RUNS = 8
LARGE, MAX_RUNS_LARGE = 2_000, 3
"""An attempt is given up when it has run this many times the graph's operations, or this many on
graphs of more than `LARGE` operations, where it takes seconds."""

_INFINITE = float("inf")

Advice = Sequence[tuple[int, Mapping[int, float]]]
"""Up to which operation, and by what the scores of some values are multiplied until then."""


@dataclass(frozen=True, slots=True)
class Rule:
    """What to throw out first: the largest size^a * idle^b / cost^c; what the backward pass makes
    never, unless `backward`: it is made again from far more than what the forward makes."""

    size: float = 1.0
    idle: float = 1.0
    cost: float = 1.0
    backward: bool = True


RULES = (
    Rule(),
    Rule(idle=0.3),
    Rule(cost=0.5),
    Rule(cost=2.0),
    Rule(idle=0.6),
    Rule(idle=0.3, cost=2.0),
    Rule(idle=0.0),
    Rule(idle=0.3, cost=0.5),
    Rule(size=0.5),
    Rule(cost=0.0),
    Rule(size=0.5, idle=0.3),
    Rule(size=0.0, cost=0.0),
    Rule(backward=False),
    Rule(idle=0.3, backward=False),
    Rule(cost=0.0, backward=False),
)
"""Tried in this order; none is best on every graph."""


def evict(
    graph: Graph,
    budget_bytes: int,
    rule: Rule = RULES[0],
    weights: Sequence[float] | None = None,
    advice: Advice = (),
    most_s: float = _INFINITE,
    stop: Callable[[], bool] = lambda: False,
) -> Schedule | None:
    """A schedule with a peak of at most `budget_bytes`, constant memory included, or None.

    `weights` multiply the scores of the values: a large one is thrown out sooner. The attempt is
    given up when it takes more than `most_s`, or when `stop` says so: on a large graph the bad ones
    take the longest, and even a good one seconds.
    """
    attempt = _Attempt(graph, budget_bytes - graph.constant_bytes, rule, weights, advice)
    return Schedule.of(attempt.runs) if attempt.succeeds(most_s, stop) else None


class _Attempt:
    """One walk over the graph; the state is what is in memory now."""

    def __init__(
        self,
        graph: Graph,
        room_bytes: int,
        rule: Rule,
        weights: Sequence[float] | None,
        advice: Advice,
    ) -> None:
        self.graph = graph
        self.rule = rule
        self.room = room_bytes
        self.size = [value.size_bytes for value in graph.values]
        self.worth = [size**rule.size for size in self.size]
        self.is_backward = [graph.operations[op].backward for op in graph.producer]
        if not rule.backward:
            pairs = zip(self.worth, self.is_backward, strict=True)
            self.worth = [0.0 if late else worth for worth, late in pairs]
        if weights is not None:
            self.worth = [x * w for x, w in zip(self.worth, weights, strict=True)]
        self.unadvised = self.worth
        self.advice = sorted(advice, key=lambda piece: -piece[0])
        self.until = -1
        """The stage up to which the present advice holds."""
        self.is_result = [False] * len(self.size)
        for v in graph.results:
            self.is_result[v] = True
        self.need = graph.made_bytes
        self.floor = graph.total_cost_s / max(1, len(graph)) * 1e-2 or 1e-12
        self.live = 0
        self.resident = [False] * len(self.size)
        self.loose: set[int] = set()
        """Values in memory that are no results and have a size."""
        self.locks = [0] * len(self.size)
        self.waiting: list[float] = [_INFINITE] * len(self.size)
        """When a value is next wanted to make again another that was thrown out."""
        self.price: dict[int, float] = {}
        self.watchers: dict[int, list[int]] = {}
        self.runs: list[int] = []

    def succeeds(self, most_s: float, stop: Callable[[], bool]) -> bool:
        """Whether the walk came to its end; `runs` then holds the sequence."""
        count = len(self.graph)
        left_s = most_s - self.graph.total_cost_s
        limit = (MAX_RUNS if count <= LARGE else MAX_RUNS_LARGE) * count + 100
        for stage in range(count):
            if stage > self.until:
                self._take_advice()
            is_done = is_anew = False
            while not is_done:
                plan = self._plan(stage)
                if stop() or plan is None or len(self.runs) + len(plan) > limit:
                    return False
                begun = len(self.runs)
                is_done = self._run_all(plan, stage)
                again = self.runs[begun:-1] if is_done else self.runs[begun:]
                left_s -= sum(self.graph.operations[op].cost_s for op in again)
                if left_s < 0 or (not is_done and (is_anew or self.rule.backward)):
                    return False
                if not is_done:
                    self._throw_all_out(stage)
                    is_anew = True
        return True

    def _run_all(self, plan: Sequence[int], stage: int) -> bool:
        """Run these operations in order, as far as there is room for them."""
        for op in plan:
            for v in self.graph.operations[op].inputs:
                self.locks[v] += 1
        is_done = all(self._run(op, stage) for op in plan)
        if not is_done:
            self.locks = [0] * len(self.locks)
        return is_done

    def _throw_all_out(self, stage: int) -> None:
        """Where a group of operations does not fit beside what it shall read in the end, it begins
        anew with nothing: no plan of this kind needs more room than recomputing everything."""
        for v in sorted(self.loose):
            if not self.is_backward[v] and self._price(v) < _INFINITE:
                self._throw_out(v, stage)

    def _take_advice(self) -> None:
        """The next piece of advice, or none after the last."""
        self.worth = self.unadvised
        self.until = len(self.graph)
        if self.advice:
            self.until, factors = self.advice.pop()
            self.worth = list(self.worth)
            for value, factor in factors.items():
                self.worth[value] *= factor

    def _plan(self, stage: int) -> list[int] | None:
        """The operations to run, in order, so that `stage` can: itself last."""
        operations, producer = self.graph.operations, self.graph.producer
        found = {stage}
        stack = [stage]
        while stack:
            for v in operations[stack.pop()].inputs:
                maker = producer[v]
                if not self.resident[v] and maker not in found:
                    if not operations[maker].recomputable:
                        return None
                    found.add(maker)
                    stack.append(maker)
        return sorted(found)

    def _run(self, op: int, stage: int) -> bool:
        operation = self.graph.operations[op]
        for v in operation.outputs:
            # A copy made before is replaced by the new one.
            if self.resident[v] and not self.is_result[v]:
                self._drop(v)
        over = [v for v in operation.overwrites if self._may_go(v, stage)]
        excess = self.live + self.need[op] - sum(self.size[v] for v in over) - self.room
        if excess > 0 and not self._make_room(excess, stage):
            return False
        self.runs.append(op)
        for v in operation.inputs:
            self.locks[v] -= 1
        for v in operation.outputs:
            if not self.resident[v]:
                self._add(v)
        for v in over:
            self._throw_out(v, stage)
        return True

    def _may_go(self, v: int, stage: int) -> bool:
        """Whether `stage` may write over `v`: nobody reads it later, but to make something again,
        and then it can be made again itself."""
        if self._direct(v, stage) < _INFINITE:
            return False
        maker = self.graph.operations[self.graph.producer[v]]
        return maker.recomputable or self._wanted(v, stage) == _INFINITE

    def _add(self, v: int) -> None:
        self.resident[v] = True
        self.live += self.size[v]
        self.waiting[v] = _INFINITE
        if self.size[v] and not self.is_result[v]:
            self.loose.add(v)
        self._forget(v)

    def _drop(self, v: int) -> None:
        self.resident[v] = False
        self.live -= self.size[v]
        self.loose.discard(v)
        self._forget(v)

    def _forget(self, v: int) -> None:
        for watcher in self.watchers.pop(v, ()):
            self.price.pop(watcher, None)

    def _make_room(self, excess: int, stage: int) -> bool:
        dead: list[int] = []
        ranked: list[tuple[float, int]] = []
        rule = self.rule
        for v in self.loose:
            if self.locks[v]:
                continue
            wanted = self._wanted(v, stage)
            if wanted == _INFINITE:
                dead.append(v)
                continue
            price = self._price(v)
            if price == _INFINITE or not self.worth[v]:
                continue
            score = (wanted - stage + 1) ** rule.idle * self.worth[v]
            ranked.append((-score / (price + self.floor) ** rule.cost, v))
        for v in sorted(dead):
            self._drop(v)
            excess -= self.size[v]
        ranked.sort()
        victims: list[int] = []
        for _, v in ranked:
            if excess <= 0:
                break
            # An earlier victim may have been what this one would be made from.
            if self._price(v) == _INFINITE:
                continue
            victims.append(v)
            excess -= self.size[v]
            self._throw_out(v, stage)
        if excess > 0:
            return False
        # The last victim may have been so large that some before it can stay.
        for v in reversed(victims):
            if excess + self.size[v] <= 0:
                excess += self.size[v]
                waiting = self.waiting[v]
                self._add(v)
                self.waiting[v] = waiting
        return True

    def _throw_out(self, v: int, stage: int) -> None:
        wanted = self._wanted(v, stage)
        self._drop(v)
        stack = [v]
        while stack:
            for u in self.graph.operations[self.graph.producer[stack.pop()]].inputs:
                if wanted < self.waiting[u]:
                    self.waiting[u] = wanted
                    if not self.resident[u]:
                        stack.append(u)

    def _wanted(self, v: int, stage: int) -> float:
        """The stage at which `v` is next read, itself or to make another again."""
        if self.waiting[v] < stage:
            self.waiting[v] = min(self._indirect(v, stage), default=_INFINITE)
        return min(self._direct(v, stage), self.waiting[v])

    def _direct(self, v: int, stage: int) -> float:
        users = self.graph.consumers[v]
        position = bisect_right(users, stage)
        return users[position] if position < len(users) else _INFINITE

    def _indirect(self, v: int, stage: int) -> Iterator[float]:
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
                        yield self._direct(w, stage)

    def _price(self, v: int) -> float:
        """The cost of making `v` again from what is in memory."""
        known = self.price.get(v)
        if known is not None:
            return known
        operations, producer = self.graph.operations, self.graph.producer
        price = 0.0
        seen = {producer[v]}
        stack = [producer[v]]
        while stack:
            maker = stack.pop()
            operation = operations[maker]
            price += operation.cost_s if operation.recomputable else _INFINITE
            for u in operation.inputs:
                self.watchers.setdefault(u, []).append(v)
                if not self.resident[u] and producer[u] not in seen:
                    seen.add(producer[u])
                    stack.append(producer[u])
        self.price[v] = price
        return price
