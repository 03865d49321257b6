"""The default: a list of steps, over complete slots where they are few, near slots elsewhere."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, Literal

from remat.graph import Graph
from remat.milp import slots
from remat.milp.slots import Slots
from remat.milp.solvers.pulp_solvers import require_solver
from remat.schedule import Schedule
from remat.solution import Solution
from remat.strategies.base import Task
from remat.strategies.options import MilpOptions, Seconds, Share, between
from remat.strategies.search import pipeline
from remat.strategies.search.pipeline import Pipeline
from remat.strategies.search.search import search
from remat.strategies.search.state import SearchState
from remat.strategies.search.steps import order_search

_REGION = 100
"""Slots of an operation further apart than this many operations are no group. One group for all
allows one recomputation, and its cuts ask for inputs that were held since its first slot."""

_BACK = 14
_RESERVE = 0.1
"""Of the room, times the gap: what values may take together that no program decides on."""

_EVERY = (1, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True)
class Auto(MilpOptions):
    """Near-optimal plans for graphs of any size, step by step until the gap or the time is reached.

    1. `relaxation`: of the problem to the worst moments, a bound for all schedules of the order.
    2. `blocks`, in networks of many identical blocks: a program in which they decide together.
    3. `eviction`: what to drop when memory is full, by the advice of the moments; `baselines`; and
       `annealing` in graphs that are no training step.
    4. `feasibility`, where nothing fits by then: the smallest peak, by eviction and then by a program.
    5. `sifting`: a program over the slots that its relaxation uses; `following`: eviction by what
       that holds; `program`: one over all slots offered, for a proof; `windows`: what that leaves
       open, part by part. Beside these, `moments`: programs over more and more moments, for a
       higher bound and better advice.

    `steps` says which of these a graph has, `plan.stats` what each came to. Where other orders of
    the operations are searched, annealing over whole sequences goes before all of that.

    `gap` is on total time: 0.005 ends the solve once the plan is proved to be within 0.5% of the
    best, of every schedule of the order or of those over the slots offered. At `time_limit` seconds
    the best plan so far is returned with the gap that is proved by then. A solver run ends sooner
    once its best plan and its bound have barely moved for `stall` seconds (or for as long as its
    first bound took); `math.inf` turns that off. For budget="min", a peak within `peak_gap` of a
    proved bound is small enough, and so is one within `peak_gap` of the smallest found.
    `complete_slots` is up to how many optional slots every schedule of the order is considered,
    `near_slots` how many are offered at most otherwise. `order` says whether other orders of the
    operations are searched too; "auto" does so for graphs that are no training step.
    """

    gap: Share = 0.005
    time_limit: Seconds = 60.0
    stall: Seconds = 10.0
    peak_gap: Share = 0.01
    complete_slots: Annotated[int, between(0, 1_000_000)] = 4_000
    near_slots: Annotated[int, between(0, 1_000_000)] = 2_000
    order: Literal["auto", "on", "off"] = "auto"

    name = "auto"

    def run(self, task: Task) -> Solution:
        """The cheapest schedule within the budget, or the one with the smallest peak. Raises
        `SolverError` if the solver is missing and no schedule is known to begin from."""
        if task.start is None:
            require_solver(self.solver)

        def solve(task: Task, time_limit: float) -> Solution:
            timed = replace(self, time_limit=time_limit)
            reserve = 0.0 if self._is_complete(task.graph) else _RESERVE * self.gap
            return search(SearchState(task, timed, self._build_slots, small_values_share=reserve), self.steps(task.graph))

        is_needed = self.order == "on" or (self.order == "auto" and order_search.may_reorder(task.graph))
        if not is_needed:
            return solve(task, self.time_limit)
        in_any_order = order_search.minimize_peak_in_any_order if task.budget_bytes is None else order_search.minimize_cost_in_any_order
        return in_any_order(task, solve, time_limit=self.time_limit, seed=self.seed)

    def steps(self, graph: Graph) -> Pipeline:
        """The steps that this graph is solved by."""
        return pipeline.auto_pipeline(graph)

    def _is_complete(self, graph: Graph) -> bool:
        return slots.complete_slot_count(graph) <= self.complete_slots

    def _build_slots(
        self, graph: Graph, state: Sequence[Schedule], affordable_s: float, coarseness: int
    ) -> Slots:
        if self._is_complete(graph):
            return slots.build_complete_slots(graph, affordable_s)
        idle = max(8, len(graph) // 40)
        near = partial(
            slots.build_idle_read_slots,
            graph,
            max_distance=_BACK,
            min_idle=idle,
            group_span=_REGION,
            schedules=state,
            affordable_s=affordable_s,
        )
        for every in _EVERY[:-1]:
            offered = near(stride=coarseness * every)
            if offered.optional_count <= self.near_slots:
                return offered
        return near(stride=coarseness * _EVERY[-1])
