"""`Auto`, the default strategy, and `Exact`, for small graphs: lists of steps over slots."""

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
from remat.strategies.option_types import MilpOptions, Seconds, Share, between
from remat.strategies.search import pipeline
from remat.strategies.search.pipeline import Pipeline, search
from remat.strategies.search.state import SearchState

_GROUP_SPAN = 100
"""Slots of one operation that are further apart than this many operations form no group. One group
for all would allow one recomputation, and its cuts would require inputs to be retained since its
first slot."""

_MAX_DISTANCE = 14
_SMALL_VALUES_SHARE = 0.1
"""Share of the memory for activations, times the gap, that is reserved for small values: they are
always retained, and no program decides on them."""

_STRIDES = (1, 2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True)
class Auto(MilpOptions):
    """Near-optimal plans for graphs of any size, step by step until the gap or the time limit is
    reached.

    1. `relaxation`: the relaxation at the worst checkpoint cuts, a bound for every schedule of the
       order.
    2. In networks of many identical blocks, `advised_eviction` and, if that leaves the gap open,
       `identical_blocks`: schedules that follow the advice of the relaxation, and a program in
       which blocks share decisions.
    3. `eviction`, `baselines` and, in graphs that are no training step, `annealing`: schedules
       without a solver. Eviction follows the advice of the relaxation.
    4. `feasibility`, if nothing fits by then: the smallest peak, by eviction and then by a program.
    5. `relaxation_support`: a program over the slots that its relaxation uses; `guided_eviction`:
       eviction by what the relaxation retains; `milp`: a program over all slots, for a proof;
       `windows`: large-neighbourhood search for what that leaves open. Concurrently, if there are
       two `threads`, `checkpoint_cuts`: programs over more and more cuts, for a higher bound and
       more advice.

    `gap` is on total time: 0.005 ends the solve once the plan is proved to be within 0.5% of the
    best, of every schedule of the order or of those over the slots. At `time_limit` seconds the
    best plan so far is returned with the gap that is proved by then. A solver run ends earlier once
    its best plan and its bound have barely improved for `stall` seconds (or for as long as its
    first bound took); `math.inf` turns that off. For budget="min", a peak within `peak_gap` of a
    proved bound is small enough, and so is one within `peak_gap` of the smallest found. `order`
    says whether other orders of the operations are searched too; "auto" does so for graphs that are
    no training step.

    The programs select recomputations from optional slots: places in the sequence where an
    operation may be recomputed. If there are at most `complete_slots` in all, all are offered, and
    every schedule of the order is considered. Otherwise only slots near the reads of idle values
    are offered (just before an operation that reads a value after a long time), thinned out to at
    most `near_slots` if possible.
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
        """Return the cheapest schedule within the budget, or the one with the smallest peak. Raises
        `SolverError` if the solver is missing and there is no schedule to start from."""
        if task.start is None:
            require_solver(self.solver)

        def search_in_order(task: Task, time_limit: float) -> Solution:
            timed = replace(self, time_limit=time_limit)
            small_values_share = (
                0.0 if self._is_complete(task.graph) else _SMALL_VALUES_SHARE * self.gap
            )
            return search(
                SearchState(task, timed, self._build_slots, small_values_share=small_values_share),
                self.steps(task.graph),
            )

        if self.order == "off" or (self.order == "auto" and not may_reorder(task.graph)):
            return search_in_order(task, self.time_limit)
        from remat.strategies import orders  # at the rim: no training step needs it

        in_any_order = (
            orders.minimize_peak_in_any_order
            if task.budget_bytes is None
            else orders.minimize_cost_in_any_order
        )
        return in_any_order(task, search_in_order, time_limit=self.time_limit, seed=self.seed)

    def steps(self, graph: Graph) -> Pipeline:
        """Return the steps that solve this graph."""
        annealing = None
        if may_reorder(graph):
            from remat.strategies.orders import ANNEALING as annealing
        return pipeline.auto_pipeline(graph, annealing, has_complete_slots=self._is_complete(graph))

    def _is_complete(self, graph: Graph) -> bool:
        return slots.complete_slot_count(graph) <= self.complete_slots

    def _build_slots(
        self, graph: Graph, schedules: Sequence[Schedule], affordable_s: float, coarseness: int
    ) -> Slots:
        if self._is_complete(graph):
            return slots.build_complete_slots(graph, affordable_s)
        min_idle = max(8, len(graph) // 40)
        build = partial(
            slots.build_idle_read_slots,
            graph,
            max_distance=_MAX_DISTANCE,
            min_idle=min_idle,
            group_span=_GROUP_SPAN,
            schedules=schedules,
            affordable_s=affordable_s,
        )
        for stride in _STRIDES[:-1]:
            slot_set = build(stride=coarseness * stride)
            if slot_set.optional_count <= self.near_slots:
                return slot_set
        return build(stride=coarseness * _STRIDES[-1])


def may_reorder(graph: Graph) -> bool:
    """True if the order is likely to matter. In a training step it is nearly forced, and where
    values are renewed it is fixed."""
    is_training_step = graph.boundary is not None or any(o.backward for o in graph.operations)
    return not is_training_step and not graph.renewal


@dataclass(frozen=True)
class Exact(MilpOptions):
    """Solves Checkmate's space: any earlier operation may be recomputed before any later one.

    Its bound holds for every schedule of the order (`bound_scope` is "order"). The number of
    binaries grows with the square of the number of operations: beyond 150 or so, use `Auto`.
    """

    name = "exact"

    def run(self, task: Task) -> Solution:
        """Return the cheapest schedule within the budget, or the one with the smallest peak. Raises
        `SolverError` if the solver is missing and there is no schedule to start from."""
        if task.start is None:
            require_solver(self.solver)
        state = SearchState(
            task,
            self,
            lambda graph, _, affordable_s, __: slots.build_complete_slots(graph, affordable_s),
        )
        return search(state, pipeline.exact_pipeline())
