"""Who holds the memory at each run, and which runs are of the backward pass."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from remat.plan_data import PlanData
from remat.schedule import Schedule
from remat.simulate import Copy, Timeline

LAYERS = {
    "constant": "constant (parameters, buffers, batch)",
    "results": "results (gradients, outputs)",
    "kept": "kept activations",
    "passing": "gradients passing through",
    "again": "recomputed",
    "workspace": "workspace",
}
"""What memory is held for, bottom first, in words.

A plan knows its constant memory as one number. *Results* are held to the end. *Kept activations*
are first copies that forward operations made, *gradients passing through* those that backward
operations made, *recomputed* every later copy, and *workspace* is held while its operation runs.
"""


@dataclass(frozen=True, slots=True)
class Occupancy:
    """`layers[name][run]` is bytes while a run runs; over all layers they add up to the simulator's
    `during_bytes[run]`."""

    layers: dict[str, list[int]]
    timeline: Timeline

    @property
    def used(self) -> list[str]:
        """The layers that ever hold a byte, bottom first."""
        return [name for name, held in self.layers.items() if any(held)]


def occupancy(plan: PlanData) -> Occupancy:
    """What holds the memory while each run of the plan runs."""
    graph, runs = plan.graph, plan.schedule.runs
    timeline = plan.timeline()
    count = len(runs)
    change = {name: [0] * (count + 2) for name in ("results", "kept", "passing", "again")}
    kind = copy_kinds(plan, timeline)
    for copy, name in zip(timeline.copies, kind, strict=True):
        size = graph.values[copy.value].size_bytes
        change[name][copy.start] += size
        change[name][copy.end + 1] -= size
    layers = {"constant": [graph.constant_bytes] * count}
    layers |= {name: list(accumulate(delta[:count])) for name, delta in change.items()}
    layers["workspace"] = [graph.operations[op].workspace_bytes for op in runs]
    for copy, name in zip(timeline.copies, kind, strict=True):
        if is_overwritten(plan, copy):  # one with what is written over it
            layers[name][copy.end] -= graph.values[copy.value].size_bytes
    return Occupancy(layers, timeline)


def is_overwritten(plan: PlanData, copy: Copy) -> bool:
    """Whether the last run that reads a copy writes over it."""
    runs = plan.schedule.runs
    if not copy.start < copy.end < len(runs):
        return False
    return copy.value in plan.graph.operations[runs[copy.end]].overwrites


def copy_kinds(plan: PlanData, timeline: Timeline) -> list[str]:
    """The layer of each copy of the timeline."""
    graph, count = plan.graph, len(plan.schedule)
    seen: set[int] = set()
    kinds: list[str] = []
    for copy in timeline.copies:
        if copy.value in seen:
            kinds.append("again")
            continue
        seen.add(copy.value)
        if copy.end >= count:
            kinds.append("results")
        else:
            backward = graph.operations[graph.producer[copy.value]].backward
            kinds.append("passing" if backward else "kept")
    return kinds


def backward_run(plan: PlanData) -> int | None:
    """The run that starts the backward pass: that of the boundary operation or, where the graph
    has none, the first of a backward operation; None where there is none either."""
    graph = plan.graph
    for run, op in enumerate(plan.schedule.runs):
        if op == graph.boundary if graph.boundary is not None else graph.operations[op].backward:
            return run
    return None


def reruns(schedule: Schedule) -> list[int]:
    """For each run, how often its operation ran before."""
    times: dict[int, int] = {}
    before: list[int] = []
    for op in schedule.runs:
        before.append(times.get(op, 0))
        times[op] = before[-1] + 1
    return before


def starts_s(plan: PlanData) -> list[float]:
    """When each run starts, and when the last one ends, in seconds."""
    costs = (plan.graph.operations[op].cost_s for op in plan.schedule.runs)
    return list(accumulate(costs, initial=0.0))
