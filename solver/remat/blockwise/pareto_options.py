"""Options of one block: schedules solved for a range of memory limits, without dominated ones.

A block's schedule affects the other blocks by what it saves and by how much memory it needs when it
runs. A budget for the block limits only the second. So a workspace is added at the boundary, where
the forward ends: with a workspace of `w` there, a schedule within a budget `b` saves at most
`b - w`.

The graph of a block counts its inputs as constant memory, because other code produced them. In the
step, an input to which nothing but this block refers is freed after the backward's last read of it:
`SavedInputs` are the inputs that a block's plan saves, with these reads.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, is_dataclass, replace

from remat.blockwise.block_step import BlockOption
from remat.documents.program import Program
from remat.documents.trace import Trace
from remat.errors import SolverTimeout
from remat.graph import Graph
from remat.plan import Plan
from remat.progress import ProgressCallback
from remat.rewrite import tensor_of_variable
from remat.schedule import Schedule
from remat.simulate import simulate
from remat.solution import Solution
from remat.solve import sweep
from remat.strategies import Auto, Strategy

_WORKSPACE_FRACTIONS = (1.0, 0.6, 0.35, 0.15)
"""Workspaces added at the boundary, as fractions of the block's own peak: how much more than it
saved the block may need in its backward."""

_SAVED_FRACTIONS = (0.0, 0.05, 0.1, 0.2, 0.35, 0.5, 0.7)
"""Limits of the saved bytes, as fractions of those that the block saves without recomputation."""

_MINIMUM_SOLVE_S = 0.1
_MAXIMUM_SOLVE_S = 1.0


def pareto_options(
    graph: Graph,
    time_limit_s: float,
    strategy: Strategy | None = None,
    progress: ProgressCallback | None = None,
) -> list[tuple[BlockOption, Plan]]:
    """Return the options of a block that no other option dominates, the fastest first.

    The first option runs without recomputation. The solves take about `time_limit_s` together if
    the strategy has a time limit.
    """
    keep_all = Schedule.keep_all(graph)
    baseline = option_of_schedule(graph, keep_all)
    peak_bytes = simulate(graph, keep_all).peak_bytes
    baseline_plan = Plan.of(graph, peak_bytes, Solution(keep_all), {"strategy": "no recomputation"})
    options = [(baseline, baseline_plan)]
    solve_s = time_limit_s / len(_WORKSPACE_FRACTIONS) / len(_SAVED_FRACTIONS)
    solve_s = min(_MAXIMUM_SOLVE_S, max(_MINIMUM_SOLVE_S, solve_s))
    strategy = _strategy_with_time_limit(strategy or Auto(gap=0.01), solve_s)
    block_bytes = max(baseline.forward_bytes, baseline.backward_bytes)
    for workspace_fraction in _WORKSPACE_FRACTIONS:
        workspace_bytes = int(workspace_fraction * block_bytes)
        nothing_saved_bytes = graph.constant_bytes + tangent_bytes(graph) + workspace_bytes
        budgets = [nothing_saved_bytes + int(f * baseline.saved_bytes) for f in _SAVED_FRACTIONS]
        padded = with_boundary_workspace(graph, workspace_bytes)
        for plan in _feasible_block_plans(padded, budgets, strategy, progress):
            peak_bytes = simulate(graph, plan.schedule).peak_bytes
            unpadded = Plan.of(graph, peak_bytes, Solution(plan.schedule), plan.solve, plan.terms)
            options.append((option_of_schedule(graph, plan.schedule), unpadded))
    return pareto_optimal(options)


def _feasible_block_plans(
    graph: Graph,
    budgets: Sequence[int],
    strategy: Strategy,
    progress: ProgressCallback | None,
) -> list[Plan]:
    """Return the plans of a block for the budgets, smallest first, without infeasible ones. The
    smallest budgets are left out for as long as the solver times out."""
    for first in range(len(budgets)):
        with suppress(SolverTimeout):
            return sweep(graph, budgets[first:], strategy, progress=progress)
    return []


def option_of_schedule(graph: Graph, schedule: Schedule) -> BlockOption:
    """Return the option of a block that runs by a schedule: its time and memory, without the
    block's constant memory (its parameters and inputs)."""
    timeline = simulate(graph, schedule)
    boundary_run = schedule.runs.index(boundary_of(graph))
    constant_bytes = graph.constant_bytes
    # Up to the boundary the graph holds the block's outputs; from there on the caller holds them.
    backward = timeline.during_bytes[boundary_run + 1 :]
    boundary_bytes = timeline.after_bytes[boundary_run] - constant_bytes
    forward_peak_bytes = max(timeline.during_bytes[:boundary_run], default=constant_bytes)
    return BlockOption(
        time_s=timeline.time_s,
        saved_bytes=boundary_bytes - tangent_bytes(graph),
        forward_bytes=forward_peak_bytes - constant_bytes,
        backward_bytes=max(backward, default=constant_bytes) - constant_bytes,
        forward_s=math.fsum(graph.operations[op].cost_s for op in schedule.runs[:boundary_run]),
    )


def with_boundary_workspace(graph: Graph, size_bytes: int) -> Graph:
    """Return the graph with `size_bytes` of additional workspace at the end of the forward."""
    operations, index = list(graph.operations), boundary_of(graph)
    workspace_bytes = operations[index].workspace_bytes + size_bytes
    operations[index] = replace(operations[index], workspace_bytes=workspace_bytes)
    return replace(graph, operations=tuple(operations))


def boundary_of(graph: Graph) -> int:
    """Return the boundary of a block's graph, which has one."""
    assert graph.boundary is not None
    return graph.boundary


def live_tangents(graph: Graph) -> list[int]:
    """Return the gradients of the block's outputs that an operation reads, or that are results."""
    tangents = graph.operations[boundary_of(graph)].outputs
    return [v for v in tangents if graph.consumers[v] or v in graph.results]


def tangent_bytes(graph: Graph) -> int:
    """Return the bytes of `live_tangents`."""
    return sum(graph.values[v].size_bytes for v in live_tangents(graph))


def pareto_optimal(
    options: Iterable[tuple[BlockOption, Plan]],
) -> list[tuple[BlockOption, Plan]]:
    """Return the options that no other option matches or beats in time and all sizes, the fastest
    first."""
    optimal: list[tuple[BlockOption, Plan]] = []
    for option, plan in sorted(options, key=lambda pair: _option_objectives(pair[0])):
        if not any(_is_option_dominated(option, better) for better, _ in optimal):
            optimal.append((option, plan))
    return optimal


def _strategy_with_time_limit(strategy: Strategy, limit_s: float) -> Strategy:
    """Return the strategy with its time limit lowered to `limit_s`; unchanged if it has none."""
    current_s = getattr(strategy, "time_limit", None)
    if not is_dataclass(strategy) or not isinstance(current_s, int | float):
        return strategy
    return replace(strategy, time_limit=min(current_s, limit_s))


def _option_objectives(option: BlockOption) -> tuple[float, int, int, int]:
    """Return the time and sizes of an option, which are to be small."""
    return option.time_s, option.saved_bytes, option.backward_bytes, option.forward_bytes


def _is_option_dominated(option: BlockOption, better: BlockOption) -> bool:
    """True if `better` matches or beats an option in time and all sizes."""
    return all(
        b <= o for b, o in zip(_option_objectives(better), _option_objectives(option), strict=True)
    )


NEVER_FREED = sys.maxsize
"""The last read of an input that the backward holds to its end."""


@dataclass(frozen=True, slots=True)
class HeldInput:
    """An input that the block holds until run `last_read` of its backward. `index` is its position
    among the block's input tensors."""

    size_bytes: int
    last_read: int
    index: int = 0


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """A saved tensor that may be offloaded: it fills its storage, and is no parameter or output.

    `position` is its index among the tensors that the forward saves, inputs first, as at run time.
    `input_index` is its index among the block's input tensors, -1 for a result; `value` is a
    result's index among the values of the block's graph.
    """

    position: int
    size_bytes: int
    input_index: int = -1
    value: int = -1


@dataclass(frozen=True, slots=True)
class SavedInputs:
    """The inputs that a block saves from its forward for its backward, and the backward's memory.

    `last_reads` maps the index of each saved input, its position among the block's input tensors,
    to the last run of the backward that reads it; runs count from the start of the backward.
    `during_bytes[r]` are live during run `r`, without the block's parameters and inputs.
    """

    last_reads: Mapping[int, int]
    during_bytes: tuple[int, ...]

    @classmethod
    def of(cls, trace: Trace, schedule: Schedule, program: Program) -> SavedInputs:
        """Return the saved inputs of `program`, which is `trace` rewritten by `schedule`."""
        graph = trace.graph()
        timeline = simulate(graph, schedule)
        first_run = schedule.runs.index(boundary_of(graph)) + 1
        last_read_of_storage: dict[int, int] = {}
        for run, index in enumerate(schedule.runs[first_run:]):
            node = trace.operations[index]
            assert node is not None  # the boundary runs once
            for name in node.operand_names:
                last_read_of_storage[trace.storage_of[name]] = run
        tensors = (tensor_of_variable(name, trace.storage_of) for name in program.saved)
        saved_storages = {trace.storage_of[name] for name in tensors}
        return cls(
            last_reads={
                int(p.target): last_read_of_storage.get(p.storage, NEVER_FREED)
                for p in trace.placeholders
                if p.kind == "input" and p.storage in saved_storages
            },
            during_bytes=tuple(
                size - graph.constant_bytes for size in timeline.during_bytes[first_run:]
            ),
        )

    def backward_bytes(self, inputs: Sequence[HeldInput]) -> int:
        """Return the peak of the backward in which each of these inputs is live until its last
        read."""
        return max(
            (
                size_bytes + sum(i.size_bytes for i in inputs if i.last_read >= run)
                for run, size_bytes in enumerate(self.during_bytes)
            ),
            default=0,
        )
