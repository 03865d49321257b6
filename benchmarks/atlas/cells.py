"""The cells of the atlas: each method at one budget, for one model and GPU.

Policies run on the published graph, and so does recomputation; splitting and offloading need the
trace that it was made from. The seconds of a cell are those of its own method only: what "split"
adds to "recompute", and "offload" to both.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import lru_cache

import remat
from benchmarks.atlas.graph_file import AtlasGraph, path_of
from benchmarks.atlas.results import (
    AT_BLOCKS,
    METHODS,
    OFFLOAD,
    POLICIES,
    RECOMPUTE,
    SPLIT,
    Row,
)
from benchmarks.atlas.tracing import measured, trace_of
from remat.choice.offloaded_forms import OffloadLimits
from remat.choice.plan_request import PlanRequest, TracePlan
from remat.choice.step import plan_step
from remat.costs.roofline import Roofline
from remat.limits.budget import Budget
from remat.limits.limits import Limits
from remat.limits.options import PIECES
from remat.plan import Plan
from remat.progress import Clock
from remat.strategies.base import Strategy
from remat.strategies.baselines.chen import ChenSqrt
from remat.strategies.baselines.saved_values import Knapsack, Selective
from remat.strategies.baselines.uniform import EveryK, PerBlock

STRATEGIES: dict[str, Strategy] = dict(
    zip(
        POLICIES,
        (
            PerBlock(),
            EveryK(),
            ChenSqrt(),
            Knapsack(),
            Selective(choices=6, time_limit=4.0, threads=1),
        ),
        strict=True,
    )
)
"""The policies by the names of their rows."""

GAP = 0.005
"""Plans are solved until they are proved to be within this share of the optimum. Where one takes
less extra time than that, nothing is split or offloaded instead."""

TIME_LIMIT_S = 10.0
STRATEGY = remat.Auto(gap=GAP, time_limit=TIME_LIMIT_S, threads=1)
CHOICE_LIMIT_S = 15.0


def solve_cells(model: str, gpu: str, budget: str) -> list[Row]:
    """Return the rows of all methods at one budget, a percentage, "min", or "per block" for the
    peak that per-block checkpointing reaches."""
    if budget == AT_BLOCKS:
        return _cells_at_blocks(model, gpu)
    cells = _Cells(model, gpu, budget, budget)
    rows = [cells.row(name, cells.policy(strategy)) for name, strategy in STRATEGIES.items()]
    recompute = cells.row(RECOMPUTE, cells.recompute)
    if recompute.overhead is not None and recompute.overhead <= GAP and budget != "min":
        note = f"not tried: recomputation takes at most {GAP:.1%}"
        same = {"wall_s": 0.0, "processor_s": 0.0, "note": note}
        others = [recompute.model_copy(update={"method": m, **same}) for m in (SPLIT, OFFLOAD)]
        return [*rows, recompute, *others]
    return [
        *rows,
        recompute,
        cells.row(SPLIT, cells.split),
        cells.row(OFFLOAD, cells.offload),
    ]


def _cells_at_blocks(model: str, gpu: str) -> list[Row]:
    """Return the rows at the peak of per-block checkpointing: of that, and of the optima."""
    blocks = _Cells(model, gpu, AT_BLOCKS, "min").row(AT_BLOCKS, _blocks_plan(model, gpu))
    if blocks.peak_bytes is None:
        note = "the model has no repeated blocks"
        empty = blocks.model_copy(update={"note": note, "wall_s": 0.0, "processor_s": 0.0})
        return [empty.model_copy(update={"method": m}) for m in METHODS]
    cells = _Cells(model, gpu, AT_BLOCKS, blocks.peak_bytes)
    note = "a policy has its own peaks"
    others = [
        Row(gpu=gpu, budget=AT_BLOCKS, method=name, note=note)
        for name in POLICIES
        if name != AT_BLOCKS
    ]
    return [
        blocks,
        *others,
        cells.row(RECOMPUTE, cells.recompute),
        cells.row(SPLIT, cells.split),
        cells.row(OFFLOAD, cells.offload),
    ]


def _blocks_plan(model: str, gpu: str) -> Callable[[], Plan]:
    graph = _loaded(model)[0].on(gpu)
    return lambda: remat.solve(graph, "min", STRATEGIES[AT_BLOCKS])


@lru_cache(maxsize=1)
def _loaded(model: str) -> tuple[AtlasGraph, remat.Trace]:
    """Return a model's published graph and its trace. Raises RuntimeError if they differ."""
    graph, trace = AtlasGraph.load(path_of(model)), trace_of(model)
    if measured(trace, next(iter(graph.costs_s))).graph() != graph.graph.to_graph():
        raise RuntimeError(
            f"the published graph of {model} is not the one of this code: write it with "
            f"`python -m benchmarks.atlas graphs --models {model}`"
        )
    return graph, trace


class _Cells:
    """The methods at one budget, of which later ones start from the plans of earlier ones."""

    def __init__(self, model: str, gpu: str, name: str, budget: str | int) -> None:
        published, trace = _loaded(model)
        self._gpu, self._name, self._budget = gpu, name, budget
        self._graph = published.on(gpu)
        self._trace = measured(trace, gpu)
        self._link = Roofline(gpu).link
        self._whole: Plan | remat.RematError | None = None
        self._split: TracePlan | remat.RematError | None = None

    def row(self, method: str, solve: Callable[[], Plan]) -> Row:
        """Return the row of a method, with its seconds."""
        wall_s, processor_s = time.perf_counter(), time.process_time()
        plan: Plan | None = None
        note = ""
        try:
            plan = solve()
        except remat.RematError as error:
            note = f"{type(error).__name__}: {error}"[:300]
        row = Row(
            gpu=self._gpu,
            budget=self._name,
            method=method,
            wall_s=round(time.perf_counter() - wall_s, 2),
            processor_s=round(time.process_time() - processor_s, 2),
            note=note,
        )
        return row if plan is None else row.model_copy(update=_figures(plan))

    def policy(self, strategy: Strategy) -> Callable[[], Plan]:
        """Return what solves with a policy."""
        return lambda: remat.solve(self._graph, self._budget, strategy)

    def recompute(self) -> Plan:
        """Return the plan of recomputation only."""
        try:
            self._whole = remat.solve(self._graph, self._budget, STRATEGY)
        except remat.RematError as error:
            self._whole = error
            raise
        return self._whole

    def split(self) -> Plan:
        """Return the plan with operations in pieces."""
        try:
            self._split = self._solve_step(None)
        except remat.RematError as error:
            self._split = error
            raise
        return self._split.plan

    def offload(self) -> Plan:
        """Return the plan with operations in pieces and tensors on the host."""
        return self._solve_step(OffloadLimits(self._link)).plan

    def _solve_step(self, offload: OffloadLimits | None) -> TracePlan:
        limits = Limits(Budget.parse(self._budget))
        request = PlanRequest(limits, STRATEGY, pieces=PIECES, offload=offload)
        return plan_step(
            self._trace,
            request,
            measure=lambda trace: measured(trace, self._gpu),
            plan_form=self._solve_trace,
            plan_without=None if offload is None else self._solved_split,
            clock=Clock.of(2 * CHOICE_LIMIT_S * request.choices),
        )

    def _solved_split(self) -> TracePlan:
        if isinstance(self._split, TracePlan):
            return self._split
        assert self._split is not None
        raise self._split

    def _solve_trace(
        self, trace: remat.Trace, budget: Budget, strategy: Strategy, start: remat.Schedule | None
    ) -> Plan:
        """Return the plan of a trace: for the one that is neither split nor offloaded, the plan of
        recomputation."""
        is_whole = trace is self._trace and budget == Budget.parse(self._budget)
        if not is_whole or self._whole is None:
            return remat.solve(trace, budget, strategy, start=start)
        if isinstance(self._whole, remat.RematError):
            raise self._whole
        return self._whole


def _figures(plan: Plan) -> dict[str, object]:
    """Return the fields of a row that come from a plan."""
    return {
        "peak_bytes": plan.peak_bytes,
        "overhead": round(plan.overhead, 5),
        "bound": None if plan.lower_bound is None else round(plan.lower_bound, 5),
        "host_bytes": plan.host_bytes,
        "pieces": max((split.pieces for split in plan.graph.splits), default=0),
    }
